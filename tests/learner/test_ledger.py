"""The ledger: nothing that was spent is forgotten, whatever dies, and an owner's budget spans all runs."""

from __future__ import annotations

import hashlib
import io
import json
import math
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sottovoce.errors import BudgetExhausted, DataError, NotReady, SpecError
from sottovoce.noise import SystemNoise
from sottovoce.privacy.accountant import ListedLosses
from sottovoce.spec import parse_spec
from sottovoce_client.privacy.ledger import show_ledger
from sottovoce_learner.books import Allowance, Books
from sottovoce_learner.ledger import Ledger
from sottovoce_learner.ledger_line import LedgerLine
from sottovoce_learner.role import Role
from sottovoce_learner.session import Session
from sottovoce_learner.store import Store, Terms, claim
from tests.examples import ALLOWING


def session(folder: Path, run_id: str, *, own_budget: float | None = None, name: str = "learner-0") -> Session:
    fixed = {"rounds": 9, "algorithm": {"name": "ldp-dol"}, "durability": "process"}
    spec = parse_spec({**fixed, "learners": [name, "another"]}, imports=True)
    made = Session(Role(run_id, spec, 3, 0, name), SystemNoise(), folder, policy=ALLOWING, own_budget=own_budget)
    made.plan.announce(0, {1: 0.5}, [1])
    return made


async def spend(made: Session, rounds: int) -> float:
    """Say so many rounds; what they cost."""
    for t in range(rounds):
        await made._speak(t)
        made.memory.books.round_over(1)
    return made.memory.books.spent


async def test_runs_add_up(tmp_path: Path) -> None:
    first = await spend(session(tmp_path, "run-a"), 3)
    second = await spend(session(tmp_path, "run-b"), 5)
    session(tmp_path, "run-c")
    ledger = Ledger(tmp_path)

    assert 0 < first < second
    assert [(line.run_id, line.said, line.spent) for line in ledger.lines()] == [
        ("run-a", 3, first),
        ("run-b", 5, second),
        ("run-c", 0, 0.0),
    ]
    for line in ledger.lines():
        assert line.algorithm == "ldp-dol"
        assert line.guarantee(imports=False).epsilon(line.said) == pytest.approx(line.spent)
    assert ledger.spent("learner-0") == pytest.approx(first + second)
    assert ledger.spent("learner-0", but="run-a") == second
    assert ledger.lines("somebody") == [] and ledger.spent("somebody") == 0.0


async def test_an_owners_budget_spans_all_runs(tmp_path: Path) -> None:
    first = await spend(session(tmp_path, "run-a"), 4)
    allowed = 1.5 * first
    again = session(tmp_path, "run-b", own_budget=allowed)
    assert again.status.epsilon_elsewhere == first
    assert again.status.epsilon_own_budget == allowed

    with pytest.raises(BudgetExhausted, match=r"in all runs from .* above what this learner's owner allows"):
        await spend(again, 9)
    assert 0 < again.memory.books.spent <= allowed - first
    assert Ledger(tmp_path).spent("learner-0") <= allowed


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from sottovoce_learner.books import Books, Allowance
from tests.learner.test_ledger import session, spend

def die(self, after):
    if after > 0:
        print(repr(after), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

Books.charge = die
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
    (line,) = Ledger(tmp_path).lines("learner-0")
    assert (line.said, line.spent) == (2, float(done.stdout))


async def test_two_runs_never_share_a_journal(tmp_path: Path) -> None:
    """Run `v-w` of `north` and run `v` of `w-north` had one file: the second wiped what the first had spent."""
    first = await spend(session(tmp_path, "v-w", name="north"), 3)
    second = await spend(session(tmp_path, "v", name="w-north"), 5)
    ledger = Ledger(tmp_path)
    assert (ledger.spent("north"), ledger.spent("w-north")) == (first, second)


def old_journal(folder: Path, stem: str, learner: str, run_id: str, said: int, spent: float) -> None:
    """As earlier versions wrote it."""
    spec = parse_spec({"rounds": 9, "learners": [learner, "b"], "algorithm": {"name": "ldp-dol"}}, imports=True)
    facts = {"learner": learner, "run_id": run_id, "index": 0, "n_features": 3, "spec": spec.model_dump_json()}
    (folder / f"{stem}.ledger").write_text(json.dumps(facts), encoding="utf-8")
    raw = bytearray(8192)
    for t in range(max(said - 2, 0), said):
        whose = hashlib.sha256(run_id.encode()).digest()[:16]
        head = struct.pack("<8s16sQdI", b"sotto.j1", whose, t, spent * (t + 1) / said, 9)
        whole = head + struct.pack("<I", zlib.crc32(head + bytes(4) + bytes(9))) + bytes(9)
        raw[(t % 2) * 4096 : (t % 2) * 4096 + len(whole)] = whole
    (folder / f"{stem}.journal").write_bytes(raw)


async def test_journals_of_earlier_versions_count_and_are_not_gone_on_with(tmp_path: Path) -> None:
    old_journal(tmp_path, "v-w@north", "north", "v-w", 3, 1.5)
    old_journal(tmp_path, "v-x-north", "north", "v-x", 2, 0.25)  # a name of a still earlier version
    old_journal(tmp_path, "v-y@north", "north", "v-y", 0, 0.0)
    assert Ledger(tmp_path).spent("north") == 1.75
    with pytest.raises(NotReady, match="its journal counts, and cannot be gone on with"):
        session(tmp_path, "v-w", name="north")
    made = session(tmp_path, "v", name="north", own_budget=100.0)
    assert made.status.epsilon_elsewhere == 1.75
    spent = await spend(session(tmp_path, "v-y", name="north"), 1)
    assert Ledger(tmp_path).spent("north") == pytest.approx(1.75 + spent)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda stem: stem.with_suffix(".journal").unlink(), "cannot be read: No such file"),
        (lambda stem: stem.with_suffix(".ledger").unlink(), "has no line v@north.ledger beside it"),
        (lambda stem: stem.with_suffix(".journal").write_bytes(b""), "has 0 bytes, which are no two slots"),
        (lambda stem: stem.with_suffix(".ledger").write_text("{"), "cannot be read: "),
    ],
)
def test_a_lost_journal_of_an_earlier_version_is_never_nothing_spent(
    tmp_path: Path, harm: Callable[[Path], None], text: str
) -> None:
    old_journal(tmp_path, "v@north", "north", "v", 3, 1.5)
    harm(tmp_path / "v@north")
    for again in ("v", "w"):
        with pytest.raises(DataError, match=text):
            session(tmp_path, again, name="north")


async def test_a_spec_that_changed_is_refused(tmp_path: Path) -> None:
    made = session(tmp_path, "run-a")
    line = LedgerLine("learner-0", "run-a", 1, 3, made.role.spec.model_dump_json())
    with pytest.raises(DataError, match="has run 'run-a' with another spec, index or number of features"):
        Store(tmp_path, "learner-0").open_run(line, Terms("process", 9, 9, 9, None), 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": "{"},
        {"spec": "{}"},
        {"spec": None},
        {"spec": "[" * 100_000},
        {"spec": '{"learners": "many", "algorithm": {"name": "ldp-dol"}}'},
        {"learner": 5},
        {"run_id": None},
        {"index": 99},
        {"index": "0"},
        {"n_features": 0},
        {"spent": -5.0},
        {"said": 1},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_an_old_line_that_says_something_else_is_refused_in_words(tmp_path: Path, changes: dict[str, Any]) -> None:
    old_journal(tmp_path, "v@north", "north", "v", 3, 1.5)
    about = tmp_path / "v@north.ledger"
    about.write_text(json.dumps({**json.loads(about.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read: "):
        show_ledger(tmp_path, None, Console(file=io.StringIO()))


def test_a_run_of_more_rounds_than_a_guarantee_is_computed_for_is_listed(tmp_path: Path) -> None:
    old_journal(tmp_path, "v@north", "north", "v", 3, 1.5)
    about = tmp_path / "v@north.ledger"
    facts = json.loads(about.read_text(encoding="utf-8"))
    facts["spec"] = json.dumps({**json.loads(facts["spec"]), "rounds": 10**12})
    about.write_text(json.dumps(facts), encoding="utf-8")
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    assert "1.5" in out.getvalue()


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
    old_journal(tmp_path, "v@north", "north", "v", 3, 1.5)
    about = tmp_path / "v@north.ledger"
    named = about.read_text(encoding="utf-8").replace("ldp-dol", "named_by_a_run:Spec")
    about.write_text(named, encoding="utf-8")
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
        Books(ListedLosses(np.array([math.inf])), None, Allowance(in_all=1e300)).price(0)


HOLDING = """
import sys
from pathlib import Path
from sottovoce_learner.store import claim
held = claim(Path(sys.argv[1]), "ann")
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
        with pytest.raises(NotReady, match="another process is learner 'ann'"):
            claim(tmp_path, "ann")
        claim(tmp_path, "ben").close()
        other.kill()
        other.wait()
        claim(tmp_path, "ann").close()
