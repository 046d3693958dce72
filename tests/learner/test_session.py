"""One run of one learner, without a network."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sottovoce.errors import NotReady
from sottovoce.noise import SystemNoise
from sottovoce.spec import parse_spec
from sottovoce_learner.journal import Entry
from sottovoce_learner.session import Assignment, Session


def session(folder: Path, run_id: str = "run-1") -> Session:
    spec = parse_spec({"rounds": 5, "learners": 2, "algorithm": {"name": "ldp-dol"}, "durability": "process"})
    return Session(Assignment(run_id, spec, 3, 0), SystemNoise(), folder)


async def test_a_restarted_learner_says_no_round_of_its_run_again(tmp_path: Path) -> None:
    before = session(tmp_path)
    before.announce(0, {1: 0.5}, [1])
    await before._speak(0, 1)
    with pytest.raises(NotReady, match="round 0 of this run"):
        session(tmp_path)


def test_a_learner_that_was_assigned_but_never_spoke_may_be_assigned_again(tmp_path: Path) -> None:
    session(tmp_path)
    assert session(tmp_path)._journal.entries() == []


def test_another_run_begins_afresh(tmp_path: Path) -> None:
    before = session(tmp_path)
    before._journal.write(Entry(3, 1.0, bytes(before._journal._message_size)))
    assert session(tmp_path, "run-2")._journal.entries() == []


async def test_what_takes_long_is_computed_beside_the_loop(tmp_path: Path) -> None:
    one: Any = session(tmp_path)
    assert await one._computed(threading.get_ident) == threading.get_ident()
    one.loss = SimpleNamespace(heavy=True)
    assert await one._computed(threading.get_ident) != threading.get_ident()
