"""The ledger: nothing that was spent is forgotten, whatever dies, and an owner's budget spans all runs."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sottovoce_client.privacy.ledger import show_ledger
from sottovoce_core.errors import BudgetExhausted, CorruptStateError, FailedPrecondition, SpecError
from sottovoce_core.noise import SystemNoise
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.privacy.loss import EpsilonLimit
from sottovoce_core.spec import parse_spec
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.privacy_filter import Allowance, PrivacyFilter
from sottovoce_learner.session import Session
from sottovoce_learner.session_factory import open_session
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.run_log import LogOptions
from sottovoce_learner.storage.state_folder import LearnerLock
from sottovoce_learner.storage.store import LearnerStore, Ledger
from tests.examples import ALLOWING


def session(folder: Path, run_id: str, *, own_budget: float | None = None, name: str = "learner-0") -> Session:
    fixed = {"rounds": 9, "algorithm": {"name": "ldp-dol"}, "durability": "process"}
    spec = parse_spec({**fixed, "learners": [name, "another"]}, allow_imports=True)
    made = open_session(
        RunAssignment(run_id, spec, 3, 0, name), SystemNoise(), folder, policy=ALLOWING, own_budget=own_budget
    )
    made.plan.accept_epoch(0, {1: 0.5}, [1])
    return made


async def spend(made: Session, rounds: int) -> float:
    """Say so many rounds; what they cost."""
    for t in range(rounds):
        await made._form_and_log(t)
        made.state_machine.privacy_filter.advance(1)
    return made.state_machine.privacy_filter.epsilon_spent


async def test_runs_add_up(tmp_path: Path) -> None:
    first = await spend(session(tmp_path, "run-a"), 3)
    second = await spend(session(tmp_path, "run-b"), 5)
    session(tmp_path, "run-c")
    ledger = Ledger(tmp_path)

    assert 0 < first < second
    assert [(line.run_id, line.rounds_committed, line.epsilon_spent) for line in ledger.list_entries()] == [
        ("run-a", 3, first),
        ("run-b", 5, second),
        ("run-c", 0, 0.0),
    ]
    for line in ledger.list_entries():
        assert line.algorithm == "ldp-dol"
        assert line.build_guarantee(imports=False).epsilon(line.rounds_committed) == pytest.approx(line.epsilon_spent)
    assert ledger.sum_epsilon("learner-0") == pytest.approx(first + second)
    assert [line.epsilon_spent for line in ledger.list_entries("learner-0")] == [first, second, 0.0]
    assert ledger.list_entries("somebody") == [] and ledger.sum_epsilon("somebody") == 0.0


async def test_an_owners_budget_spans_all_runs(tmp_path: Path) -> None:
    first = await spend(session(tmp_path, "run-a"), 4)
    allowed = 1.5 * first
    again = session(tmp_path, "run-b", own_budget=allowed)
    assert again.status.epsilon_other_runs == first
    assert again.status.epsilon_owner_budget == allowed

    with pytest.raises(BudgetExhausted, match=r"in all runs from .* above what this learner's owner allows"):
        await spend(again, 9)
    assert 0 < again.state_machine.privacy_filter.epsilon_spent <= allowed - first
    assert Ledger(tmp_path).sum_epsilon("learner-0") <= allowed


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from sottovoce_learner.privacy_filter import Allowance, PrivacyFilter
from tests.learner.test_ledger import session, spend

def die(self, after):
    if after > 0:
        print(repr(after), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

PrivacyFilter.charge = die
asyncio.run(spend(session(Path(sys.argv[1]), "run-a"), 9))
"""


def test_what_was_journaled_but_never_sent_stays_spent(tmp_path: Path) -> None:
    """Killed between journal and send: the message may have been seen, so it counts."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (line,) = Ledger(tmp_path).list_entries("learner-0")
    assert (line.rounds_committed, line.epsilon_spent) == (2, float(done.stdout))


async def test_two_runs_never_share_a_journal(tmp_path: Path) -> None:
    """Run `v-w` of `north` and run `v` of `w-north` had one file: the second wiped what the first had spent."""
    first = await spend(session(tmp_path, "v-w", name="north"), 3)
    second = await spend(session(tmp_path, "v", name="w-north"), 5)
    ledger = Ledger(tmp_path)
    assert (ledger.sum_epsilon("north"), ledger.sum_epsilon("w-north")) == (first, second)


async def test_a_spec_that_changed_is_refused(tmp_path: Path) -> None:
    made = session(tmp_path, "run-a")
    line = LedgerEntry("learner-0", "run-a", 1, 3, made.assignment.spec.model_dump_json())
    with pytest.raises(CorruptStateError, match="has run 'run-a' with another spec, index or number of features"):
        LearnerStore(tmp_path, "learner-0").open_run(line, LogOptions("process", 9, 9, 9, None))


def charged_run(folder: Path, document: dict[str, Any]) -> None:
    """A ledger of `north` with one run, of this spec, and a charge of 1.5."""
    line = LedgerEntry("north", "run-a", 0, 3, json.dumps(document))
    LearnerStore(folder, "north").open_run(line, LogOptions("process", 9, 9, 9, None))
    Ledger(folder).repair("north", 1.5)


def test_a_run_of_more_rounds_than_a_guarantee_is_computed_for_is_listed(tmp_path: Path) -> None:
    charged_run(tmp_path, {"rounds": 10**12, "learners": ["north", "b"], "algorithm": {"name": "ldp-dol"}})
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    assert "ldp-dol" in out.getvalue() and "1.5" in out.getvalue()


async def test_it_is_shown_with_sums(tmp_path: Path) -> None:
    spent = await spend(session(tmp_path, "run-a"), 3) + await spend(session(tmp_path, "run-b"), 4)
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    total = next(line for line in out.getvalue().splitlines() if "all runs" in line)
    assert total.split()[-2:] == ["7", f"{spent:.4g}"]
    await spend(session(tmp_path, "breast-cancer-ward-0123456789ab"), 3)
    show_ledger(tmp_path, None, Console(file=(narrow := io.StringIO()), width=80))
    assert " breast-cancer-ward-0123456789ab " in narrow.getvalue()
    with pytest.raises(SpecError, match=r"no runs of 'bo' .* runs of: learner-0"):
        show_ledger(tmp_path, "bo", Console(file=out))


def test_showing_imports_no_code_that_a_run_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec came from a coordinator; whoever looks at what was spent runs none of it."""
    charged_run(tmp_path, {"rounds": 9, "learners": ["north", "b"], "algorithm": {"name": "named_by_a_run:Spec"}})
    (tmp_path / "named_by_a_run.py").write_text("Spec = None", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    assert "named_by_a_run" not in sys.modules
    assert "named_by_a_run:Spec" in out.getvalue() and "1.5" in out.getvalue()
    show_ledger(tmp_path, None, Console(file=out, width=160), allow_imports=True)
    assert sys.modules.pop("named_by_a_run").Spec is None


def test_an_infinite_price_is_above_every_owners_budget() -> None:
    with pytest.raises(BudgetExhausted):
        PrivacyFilter(
            PrecomputedAccountant(np.array([math.inf])), None, Allowance(in_all_runs=EpsilonLimit(1e300))
        ).admit_round(0)


HOLDING = """
import sys
from pathlib import Path
from sottovoce_learner.storage.state_folder import LearnerLock
held = LearnerLock(Path(sys.argv[1]), "ann")
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_are_never_one_learner(tmp_path: Path) -> None:
    """Each would spend the whole budget. A process that is killed gives the name back."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(FailedPrecondition, match="another process is learner 'ann'"):
            LearnerLock(tmp_path, "ann")
        LearnerLock(tmp_path, "ben").close()
        other.kill()
        other.wait()
        LearnerLock(tmp_path, "ann").close()
