"""One run of one learner, without a network."""

import asyncio
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sottovoce_core.errors import (
    CorruptStateError,
    FailedPrecondition,
    LocalProtocolError,
    RemoteProtocolError,
    SpecError,
)
from sottovoce_core.noise import SystemNoise
from sottovoce_core.spec import parse_spec
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.ingest import group_commit
from sottovoce_learner.session import Session
from sottovoce_learner.session_factory import open_session
from sottovoce_rpc.codec import to_tensor
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import learner_pb2
from tests.examples import ALLOWING, small_spec
from tests.services.network import said_rounds


def session(folder: Path, run_id: str = "run-1") -> Session:
    spec = parse_spec(
        {"rounds": 5, "learners": 2, "algorithm": {"name": "ldp-dol"}, "durability": "process"}, allow_imports=True
    )
    return open_session(RunAssignment(run_id, spec, 3, 0, "learner-0"), SystemNoise(), folder, policy=ALLOWING)


async def test_a_restarted_learner_says_the_last_round_of_its_run_as_it_was(tmp_path: Path) -> None:
    before = session(tmp_path)
    before.plan.accept_epoch(0, {1: 0.5}, [1])
    frame = await before._form_and_log(0)
    again = session(tmp_path)
    assert (again.status.rounds_committed, again.status.rounds_done) == (1, 0)
    assert list(again.links[1]._frames) == [(0, frame)]
    assert again.status.epsilon_spent == before.status.epsilon_spent


def test_a_learner_that_was_assigned_but_never_spoke_may_be_assigned_again(tmp_path: Path) -> None:
    session(tmp_path)
    assert session(tmp_path).status.rounds_committed == 0


def test_who_is_away_has_heard_nothing_that_was_not_said(tmp_path: Path) -> None:
    """It has a place in the run, and asks for the first round that it may be told; who is there cannot have heard any."""
    place: dict[str, Any] = {"offline_intervals": [{"learner": "learner-2"}]}
    own = open_session(
        RunAssignment("run-1", small_spec(20, 3, **place), 3, 0, "learner-0"), SystemNoise(), tmp_path, policy=ALLOWING
    )
    away = open_session(
        RunAssignment("run-1", own.assignment.spec, 3, 2, "learner-2"), SystemNoise(), tmp_path, policy=ALLOWING
    )
    own.require_log_complete(2, away.inbox.get_due_round(0))
    with pytest.raises(
        CorruptStateError, match="learner-1 has received round 0 of this learner, whose log has 0 rounds"
    ):
        own.require_log_complete(1, 1)


def test_a_learner_is_assigned_under_its_own_name(tmp_path: Path) -> None:
    """Under another one it would find nothing spent: a coordinator must not choose what a budget is counted by."""
    spec = parse_spec({"rounds": 5, "learners": ["m0", "m1"], "algorithm": {"name": "ldp-dol"}}, allow_imports=True)
    assert RunAssignment("run-1", spec, 3, 1, "m1").name == "m1"
    with pytest.raises(RemoteProtocolError, match="learner 'north' must be assigned under its own name, got 'm0'"):
        RunAssignment("run-1", spec, 3, 0, "north")
    with pytest.raises(RemoteProtocolError, match="needs an index below 2, got 2"):
        RunAssignment("run-1", spec, 3, 2, "m0")


async def test_another_run_begins_afresh_and_closes_the_one_before(tmp_path: Path) -> None:
    before = session(tmp_path)
    before.plan.accept_epoch(0, {1: 0.5}, [1])
    await before._form_and_log(0)
    assert session(tmp_path, "run-2")._log.recovered_contents is None
    with pytest.raises(FailedPrecondition, match="has been in another run since run 'run-1', which is closed for it"):
        session(tmp_path)


def test_a_message_that_no_channel_carries_is_refused_before_it_is_made(tmp_path: Path) -> None:
    spec = parse_spec({"rounds": 5, "learners": 2, "algorithm": {"name": "ldp-dol"}}, allow_imports=True)
    with pytest.raises(SpecError, match="take fewer features or classes"):
        open_session(RunAssignment("run-1", spec, 2**40, 0, "learner-0"), SystemNoise(), tmp_path, policy=ALLOWING)


async def test_the_status_counts_what_was_said_and_what_was_done(tmp_path: Path) -> None:
    one = session(tmp_path)
    one.plan.accept_epoch(0, {1: 0.5}, [1])
    before = one.status
    await one._send(0)
    assert (before.rounds_committed, before.rounds_done, before.state) == (0, 0, LearnerState.CONNECTING)
    assert (one.status.rounds_committed, one.status.rounds_done, one.status.messages_sent) == (1, 0, 1)


@pytest.mark.parametrize("number", [math.nan, math.inf, -1e101])
async def test_what_no_neighbour_would_take_is_neither_said_nor_charged(tmp_path: Path, number: float) -> None:
    one: Any = session(tmp_path)
    one.plan.accept_epoch(0, {1: 0.5}, [1])
    one._noise = lambda draw: np.array([0.0, number, 0.0])
    with pytest.raises(LocalProtocolError, match="field 'y' of a message must be finite and within 1e\\+100"):
        await one._form_and_log(0)
    assert one._log.epsilon_spent == 0.0 and one.status.rounds_committed == 0
    assert said_rounds(tmp_path, "learner-0") == []


async def test_a_feeder_waits_while_more_bytes_wait_than_a_learner_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "MAX_QUEUED_BYTES", 100)
    one = session(tmp_path)

    def batch(sequence: int) -> learner_pb2.SampleBatch:
        rows, labels = to_tensor(np.ones((4, 3))), to_tensor(np.ones(4))
        return learner_pb2.SampleBatch(source="s", sequence=sequence, features=rows, labels=labels)

    await one.ingestor.feed(batch(0))
    waiting = asyncio.ensure_future(one.ingestor.feed(batch(1)))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done and one.record_queue.get_next_sequence("s") == 1
    one.record_queue.take(0)
    one.ingestor.begin_round(1)
    await asyncio.wait_for(waiting, 60.0)
    assert one.record_queue.get_next_sequence("s") == 2


async def test_what_takes_long_is_computed_beside_the_loop(tmp_path: Path) -> None:
    one: Any = session(tmp_path)
    assert await one._compute(threading.get_ident) == threading.get_ident()
    one.state_machine.loss = SimpleNamespace(has_slow_gradient=True)
    assert await one._compute(threading.get_ident) != threading.get_ident()
