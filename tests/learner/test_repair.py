"""Repair of a ledger: the most is charged where something is lost, no figure is lowered, and the run is over."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from sottovoce_client.privacy.ledger import adopt_ledger, repair_ledger, show_ledger, verify_ledger
from sottovoce_core.errors import CorruptStateError, FailedPrecondition, SpecError
from sottovoce_learner.storage import wal
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerLock, LearnerPaths
from sottovoce_learner.storage.store import Ledger
from tests.learner.test_damage import NAME, PRICE, lived, open_run, say
from tests.learner.test_recovery import ROUNDS, Crew, spec_of

RESERVED = 4 * PRICE
"""Of the open run: three rounds said, four reserved."""
LOG = Path("run-b@ann", "00000000.log")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wal, "PREALLOCATED_BYTES", 512)
    lived(tmp_path)
    return tmp_path


def cut(path: Path) -> None:
    raw = path.read_bytes().rstrip(b"\0")
    path.write_bytes(raw[:-30])


HARMS: list[tuple[str, Callable[[Path], object], float]] = [
    ("log cut", lambda folder: cut(folder / LOG), 2 * PRICE + RESERVED),
    ("log lost", lambda folder: shutil.rmtree(folder / "run-b@ann"), 2 * PRICE + RESERVED),
    ("log zeroed", lambda folder: (folder / LOG).write_bytes(bytes(9000)), 2 * PRICE + RESERVED),
    ("mark lost", lambda folder: (folder / "ann.mark").unlink(), 2 * PRICE + RESERVED),
    ("mark zeroed", lambda folder: (folder / "ann.mark").write_bytes(bytes(1024)), 2 * PRICE + RESERVED),
    ("ledger cut", lambda folder: cut(folder / "ann.runs"), 2 * PRICE + RESERVED),
    ("ledger lost", lambda folder: (folder / "ann.runs").unlink(), 2 * PRICE + RESERVED),
]


@pytest.mark.parametrize(("harm", "most"), [harm[1:] for harm in HARMS], ids=[harm[0] for harm in HARMS])
def test_what_may_have_been_spent_is_charged_for_ever(
    folder: Path, harm: Callable[[Path], object], most: float
) -> None:
    harm(folder)
    with pytest.raises(CorruptStateError, match=f"at most {most:.6g} in all"):
        open_run(folder, "run-b")
    done = Ledger(folder).repair(NAME)
    assert (done.total_epsilon_spent, Ledger(folder).sum_epsilon(NAME)) == (most, most)
    assert done.backup_folder is not None and any(done.backup_folder.iterdir())
    assert Ledger(folder).repair(NAME).backup_folder is None and Ledger(folder).sum_epsilon(NAME) == most
    say(open_run(folder, "run-c"), range(1))
    assert Ledger(folder).sum_epsilon(NAME) == most + PRICE


def test_the_run_is_over_where_it_is_still_known(folder: Path) -> None:
    cut(folder / LOG)
    Ledger(folder).repair(NAME)
    with pytest.raises(FailedPrecondition, match="which is closed for it"):
        open_run(folder, "run-b")


def test_every_byte_of_the_log_cut_is_charged_enough(folder: Path) -> None:
    """Whatever is left of it, and with the mark or without."""
    raw = (folder / LOG).read_bytes()
    files = {path: path.read_bytes() for path in (folder / "ann.runs", folder / "ann.mark")}
    for k in range(wal.PAGE_BYTES, len(raw.rstrip(b"\0")), 16):
        (folder / LOG).write_bytes(raw[:k])
        assert Ledger(folder).repair(NAME).total_epsilon_spent == 2 * PRICE + RESERVED
        for path, content in files.items():
            path.write_bytes(content)
        (folder / "run-b@ann").mkdir(exist_ok=True)
        (folder / LOG).write_bytes(raw)
        Ledger(folder).accept_moved_folder(NAME)
    shutil.rmtree(folder / "damaged")


def test_what_cannot_be_known_must_be_given(folder: Path) -> None:
    for path in (folder / "ann.runs", folder / "ann.mark"):
        path.unlink()
    with pytest.raises(CorruptStateError, match=r"cannot be known .* say what it was at most with --charge EPSILON"):
        Ledger(folder).repair(NAME)
    assert Ledger(folder).repair(NAME, 7.0).total_epsilon_spent == 7.0 == Ledger(folder).sum_epsilon(NAME)


def test_a_folder_that_is_lost_is_charged_what_is_given(tmp_path: Path) -> None:
    """Of a learner of whom nothing is left."""
    assert Ledger(tmp_path).repair(NAME, 7.0).total_epsilon_spent == 7.0 == Ledger(tmp_path).sum_epsilon(NAME)
    say(open_run(tmp_path, "run-c"), range(1))
    assert Ledger(tmp_path).sum_epsilon(NAME) == 7.0 + PRICE


COMMANDS: dict[str, Callable[[Path, str], None]] = {
    "show": show_ledger,
    "verify": verify_ledger,
    "repair": lambda folder, learner: repair_ledger(folder, learner, None),
    "moved": adopt_ledger,
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_folder_that_is_not_there_is_said_with_what_to_do(folder: Path, what: str) -> None:
    (folder / "a-file").touch()
    for wrong in (folder / "nowhere", folder / "a-file"):
        wanted = f"must contain a learner.s ledger, got {wrong}, which is not a folder: .* --state"
        with pytest.raises(SpecError, match=wanted):
            COMMANDS[what](wrong, NAME)


@pytest.mark.parametrize("what", COMMANDS)
def test_a_learner_of_whom_nothing_is_there_is_not_said_to_have_lost_nothing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, what: str
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    for there, names in ((folder, NAME), (empty, "none")):
        with pytest.raises(SpecError, match=rf"no (ledger|runs) of 'bo' in the state folder .* of: {names}$"):
            COMMANDS[what](there, "bo")
    assert not list(empty.iterdir())


@pytest.mark.parametrize(("charge", "in_all"), [(0.0, 2 * PRICE + RESERVED), (9.0, 5 * PRICE + 9.0)])
def test_a_backup_is_charged_what_was_spent_since_beside_what_it_knows(
    folder: Path, charge: float, in_all: float
) -> None:
    """The run that was open in it is charged as it stands there, or all that was reserved, if that is more."""
    assert Ledger(folder).repair(NAME, charge).total_epsilon_spent == Ledger(folder).sum_epsilon(NAME) == in_all


def test_nothing_is_repaired_while_the_learner_runs(folder: Path) -> None:
    with LearnerLock(folder, NAME), pytest.raises(FailedPrecondition, match="another process is learner 'ann'"):
        Ledger(folder).repair(NAME)


def test_a_copy_that_is_the_only_one_is_taken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("other") / "state"
    shutil.copytree(folder, copy)
    out = io.StringIO()
    adopt_ledger(copy, NAME, Console(file=out))
    assert f"ann continues from {copy}: 2 runs, ε {2 * PRICE + 3 * PRICE:g} in total\n" in out.getvalue()
    assert (
        f"charge them before the learner starts: sottovoce ledger --repair --state {copy} --learner ann --charge"
        in out.getvalue()
    )
    assert open_run(copy, "run-b").epsilon_spent == 3 * PRICE
    cut(copy / LOG)
    with pytest.raises(CorruptStateError, match="ledger --repair"):
        Ledger(copy).accept_moved_folder(NAME)
    with pytest.raises(CorruptStateError, match="there is no ledger of 'bo'"):
        Ledger(copy).accept_moved_folder("bo")


async def test_every_charge_is_computed_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec_of(), keyed=False)
    await crew.live(range(ROUNDS))
    out, folder = io.StringIO(), tmp_path / "0"
    verify_ledger(folder, None, Console(file=out, width=160))
    assert "learner-0: 1 run," in out.getvalue() and "the ledger is complete" in out.getvalue()
    (line,) = Ledger(folder).verify("learner-0", imports=False)
    assert line.epsilon_spent == crew.learners[0].status.epsilon_spent


async def test_a_charge_that_the_spec_does_not_ask_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sottovoce_learner.state_machine.Books.price", lambda books, t: 0.001 * (t + 1))
    crew = Crew(tmp_path, spec_of(), keyed=False)
    await crew.live(range(3))
    with pytest.raises(CorruptStateError, match=r"charges 0\.\d+ by round \d, and its spec asks for"):
        Ledger(tmp_path / "0").verify("learner-0", imports=False)


def test_repair_says_what_it_did(folder: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=300)
    repair_ledger(folder, NAME, None, console)
    cut(folder / LOG)
    repair_ledger(folder, NAME, None, console)
    first, second = out.getvalue().splitlines()
    assert first == "the ledger is complete: ε 1.25 in total, as before"
    assert second.startswith("charged ε 1; the total is 1.5; a backup of the former state is in ")
    assert "is cut or damaged at entry" in StoredState.read(LearnerPaths(folder, NAME)).lines[-1].facts["why"]
