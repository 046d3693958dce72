"""The ledger: nothing that was spent is forgotten, whatever dies, and an owner's budget spans all runs."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
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
from sottovoce_learner.books import Books
from sottovoce_learner.ledger import Ledger, LedgerLine, claim
from sottovoce_learner.session import Role, Session


def session(folder: Path, run_id: str, *, own_budget: float | None = None, name: str = "learner-0") -> Session:
    fixed = {"rounds": 9, "algorithm": {"name": "ldp-dol"}, "durability": "process"}
    spec = parse_spec({**fixed, "learners": [name, "another"]}, imports=True)
    made = Session(Role(run_id, spec, 3, 0, name), SystemNoise(), folder, own_budget=own_budget)
    made.announce(0, {1: 0.5}, [1])
    return made


async def spend(made: Session, rounds: int) -> float:
    """Say so many rounds; what they cost."""
    for t in range(rounds):
        await made._speak(t, 1)
        made._books.round_over(1)
    return made._books.spent


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
    assert 0 < again._books.spent <= allowed - first
    assert Ledger(tmp_path).spent("learner-0") <= allowed


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from sottovoce_learner.books import Books
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


def tear(folder: Path) -> None:
    """Spoil the slot of odd rounds."""
    path = next(folder.glob("*.journal"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 + 60] ^= 1
    path.write_bytes(bytes(raw))


def scribble(folder: Path) -> None:
    """Spoil a line."""
    next(folder.glob("*.ledger")).write_text("{", encoding="utf-8")


def alter(folder: Path, changes: dict[str, Any]) -> None:
    """Let a line say something else."""
    about = next(folder.glob("*.ledger"))
    about.write_text(json.dumps({**json.loads(about.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


async def test_a_torn_slot_forgets_nothing_but_the_torn_round(tmp_path: Path) -> None:
    made = session(tmp_path, "run-a")
    await spend(made, 4)
    price = [entry.spent for entry in made._journal.entries()]
    tear(tmp_path)
    assert Ledger(tmp_path).lines()[0].spent == price[0] < price[1]


async def test_a_ledger_that_cannot_be_read_allows_nothing(tmp_path: Path) -> None:
    session(tmp_path, "run-a")
    scribble(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        session(tmp_path, "run-b")


async def test_two_runs_never_share_a_journal(tmp_path: Path) -> None:
    """Run `v-w` of `north` and run `v` of `w-north` had one file: the second wiped what the first had spent."""
    first = await spend(session(tmp_path, "v-w", name="north"), 3)
    second = await spend(session(tmp_path, "v", name="w-north"), 5)
    ledger = Ledger(tmp_path)
    assert (ledger.spent("north"), ledger.spent("w-north")) == (first, second)


async def test_journals_under_their_former_names_count(tmp_path: Path) -> None:
    """And a run that has one goes on having it: nothing is said in it again."""
    made = session(tmp_path, "v-w", name="north")
    spent = await spend(made, 3)
    made._journal.close()
    for kind in ("journal", "ledger"):
        (tmp_path / f"v-w@north.{kind}").rename(tmp_path / f"v-w-north.{kind}")
    assert Ledger(tmp_path).spent("north") == spent
    with pytest.raises(NotReady, match="has said round 2 of this run"):
        session(tmp_path, "v-w", name="north")
    other = await spend(session(tmp_path, "v", name="w-north"), 4)
    assert (Ledger(tmp_path).spent("north"), Ledger(tmp_path).spent("w-north")) == (spent, other)


async def test_a_line_about_another_run_is_not_written_over(tmp_path: Path) -> None:
    await spend(session(tmp_path, "run-a"), 3)
    for kind in ("journal", "ledger"):
        (tmp_path / f"run-a@learner-0.{kind}").rename(tmp_path / f"run-b@learner-0.{kind}")
    with pytest.raises(DataError, match="is about run 'run-a' of 'learner-0', and must be about run 'run-b'"):
        Ledger(tmp_path).open_run(LedgerLine("learner-0", "run-b", 0, 3, "{}"), 100, "process")


def lose(folder: Path, kind: str) -> None:
    next(folder.glob(f"*@learner-0.{kind}")).unlink()


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda folder: lose(folder, "journal"), "cannot be read: No such file"),
        (lambda folder: lose(folder, "ledger"), "has no line run-a@learner-0.ledger beside it"),
        (lambda folder: (folder / "run-a@learner-0.journal").write_bytes(b""), "has 0 bytes, which are no two slots"),
    ],
)
async def test_a_loss_is_never_nothing_spent(tmp_path: Path, harm: Callable[[Path], None], text: str) -> None:
    await spend(session(tmp_path, "run-a"), 3)
    theirs = await spend(session(tmp_path, "run-a", name="ann"), 3)
    harm(tmp_path)
    for again in ("run-a", "run-b"):
        with pytest.raises(DataError, match=text):
            session(tmp_path, again)
    assert Ledger(tmp_path).spent("ann") == theirs > 0  # what another learner has spent is known


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
async def test_a_line_that_says_something_else_is_refused_in_words(tmp_path: Path, changes: dict[str, Any]) -> None:
    await spend(session(tmp_path, "run-a"), 3)
    alter(tmp_path, changes)
    with pytest.raises(DataError, match="cannot be read: "):
        show_ledger(tmp_path, None, Console(file=io.StringIO()))


async def test_a_run_of_more_rounds_than_a_guarantee_is_computed_for_is_listed(tmp_path: Path) -> None:
    spent = await spend(session(tmp_path, "run-a"), 3)
    spec = json.loads(Ledger(tmp_path).lines()[0].spec)
    alter(tmp_path, {"spec": json.dumps({**spec, "rounds": 10**12})})
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    assert f"{spent:.4g}" in out.getvalue()


def test_a_line_is_there_whole_or_not_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners of one folder start at the same moment: nobody reads half a line of another."""
    seen: list[int] = []

    def look(descriptor: int) -> None:
        seen.append(len(Ledger(tmp_path).lines()))

    monkeypatch.setattr(os, "fsync", look)
    session(tmp_path, "run-a")
    session(tmp_path, "run-b")

    # The journal and its folder, the line before it is there, and the folder again.
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2]
    assert len(Ledger(tmp_path).lines()) == 2


async def test_it_is_shown_with_sums(tmp_path: Path) -> None:
    spent = await spend(session(tmp_path, "run-a"), 3) + await spend(session(tmp_path, "run-b"), 4)
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    total = next(line for line in out.getvalue().splitlines() if "all runs" in line)
    assert total.split()[-2:] == ["7", f"{spent:.4g}"]
    with pytest.raises(SpecError, match=r"no runs of 'bo' .* runs of: learner-0"):
        show_ledger(tmp_path, "bo", Console(file=out))


async def test_showing_imports_no_code_that_a_run_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec came from a coordinator; whoever looks at what was spent runs none of it."""
    spent = await spend(session(tmp_path, "run-a"), 3)
    about = tmp_path / "run-a@learner-0.ledger"
    named = about.read_text(encoding="utf-8").replace("ldp-dol", "named_by_a_run:Spec")
    about.write_text(named, encoding="utf-8")
    (tmp_path / "named_by_a_run.py").write_text("Spec = None", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    assert "named_by_a_run" not in sys.modules
    assert "named_by_a_run:Spec" in out.getvalue() and f"{spent:.4g}" in out.getvalue()
    show_ledger(tmp_path, None, Console(file=out, width=160), allow_imports=True)
    assert sys.modules.pop("named_by_a_run").Spec is None


def test_an_infinite_price_is_above_every_owners_budget() -> None:
    with pytest.raises(BudgetExhausted):
        Books(ListedLosses(np.array([math.inf])), None, own_budget=1e300).price(0)


HOLDING = """
import sys
from pathlib import Path
from sottovoce_learner.ledger import claim
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
