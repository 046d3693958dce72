"""One run of one learner, without a network."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sottovoce.errors import NotReady, SpecError
from sottovoce.noise import SystemNoise
from sottovoce.spec import parse_spec
from sottovoce_learner.journal import Entry
from sottovoce_learner.session import Role, Session
from sottovoce_rpc.learner_status import LearnerState


def session(folder: Path, run_id: str = "run-1") -> Session:
    spec = parse_spec({"rounds": 5, "learners": 2, "algorithm": {"name": "ldp-dol"}, "durability": "process"})
    return Session(Role(run_id, spec, 3, 0), SystemNoise(), folder)


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


def test_a_message_that_no_channel_carries_is_refused_before_it_is_made(tmp_path: Path) -> None:
    spec = parse_spec({"rounds": 5, "learners": 2, "algorithm": {"name": "ldp-dol"}})
    with pytest.raises(SpecError, match="n_features is too large"):
        Session(Role("run-1", spec, 2**40, 0), SystemNoise(), tmp_path)


async def test_the_status_counts_what_was_said_and_what_was_done(tmp_path: Path) -> None:
    one = session(tmp_path)
    one.announce(0, {1: 0.5}, [1])
    before = one.status
    await one._speak(0, 1)
    assert (before.rounds_said, before.rounds_done, before.state) == (0, 0, LearnerState.CONNECTING)
    assert (one.status.rounds_said, one.status.rounds_done, one.status.messages_sent) == (1, 0, 1)


async def test_what_takes_long_is_computed_beside_the_loop(tmp_path: Path) -> None:
    one: Any = session(tmp_path)
    assert await one._computed(threading.get_ident) == threading.get_ident()
    one.loss = SimpleNamespace(heavy=True)
    assert await one._computed(threading.get_ident) != threading.get_ident()
