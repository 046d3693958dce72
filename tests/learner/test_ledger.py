"""The ledger: nothing that was spent is forgotten, whatever dies, and an owner's budget spans all runs."""

from __future__ import annotations

import io
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sottovoce.errors import BudgetExhausted, DataError, NotReady, SpecError
from sottovoce.noise import SystemNoise
from sottovoce.privacy.accountant import ListedLosses
from sottovoce.spec import parse_spec
from sottovoce_client.privacy.ledger import show_ledger
from sottovoce_learner.books import Books
from sottovoce_learner.ledger import Ledger, claim
from sottovoce_learner.session import Role, Session


def session(folder: Path, run_id: str, *, own_budget: float | None = None) -> Session:
    spec = parse_spec({"rounds": 9, "learners": 2, "algorithm": {"name": "ldp-dol"}, "durability": "process"})
    made = Session(Role(run_id, spec, 3, 0), SystemNoise(), folder, own_budget=own_budget)
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
        assert line.guarantee().epsilon(line.said) == pytest.approx(line.spent)
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


def test_a_line_is_there_whole_or_not_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners of one folder start at the same moment: nobody reads half a line of another."""
    seen: list[int] = []

    def look(descriptor: int) -> None:
        seen.append(len(Ledger(tmp_path).lines()))

    monkeypatch.setattr("sottovoce_learner.ledger.os.fsync", look)
    session(tmp_path, "run-a")
    session(tmp_path, "run-b")

    assert seen == [0, 1, 1, 1, 2, 2]  # each line is synced before it is there, then the journal and its folder
    assert len(Ledger(tmp_path).lines()) == 2


async def test_it_is_shown_with_sums(tmp_path: Path) -> None:
    spent = await spend(session(tmp_path, "run-a"), 3) + await spend(session(tmp_path, "run-b"), 4)
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=160))
    total = next(line for line in out.getvalue().splitlines() if "all runs" in line)
    assert total.split()[-2:] == ["7", f"{spent:.4g}"]
    with pytest.raises(SpecError, match=r"no runs of 'bo' .* runs of: learner-0"):
        show_ledger(tmp_path, "bo", Console(file=out))


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
