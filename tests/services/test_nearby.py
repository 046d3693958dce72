"""Learners of one process that meet without a channel: what is said, kept and overheard is as over one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from sottovoce_client.runs.run_client import Outcome
from sottovoce_core.errors import FailedPrecondition, Unavailable
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner.peers import connection
from sottovoce_learner.peers.in_process import InProcessStream, InProcessTransport, _WakeScheduler
from sottovoce_learner.service import Learner
from sottovoce_learner.state_machine import LearnerStateMachine
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2
from tests.examples import made_up, small_spec
from tests.services.identities import Identities, Issuing
from tests.services.network import Network, network

ROUNDS, NAMES = 40, ["ann", "ben", "cleo", "dan"]


def spec_of(**more: Any) -> RunSpec:
    return small_spec(ROUNDS, NAMES, clock={"deadline_s": 100.0}, **more)


@asynccontextmanager
async def together(
    folder: Path, nearby: InProcessTransport | None, identities: Issuing | None = None
) -> AsyncIterator[Network]:
    """Learners of one process, whose noise is the same in every run."""
    async with network(folder, [], identities=identities) as up:
        up.nearby, up.noise_seed = nearby, "the same"
        for name in NAMES:
            await up.join(name)
        yield up


class Opened:
    """Counts the channels that are opened to neighbours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def opening(*args: Any, **more: Any) -> Any:
            self.count += 1
            return open_channel(*args, **more)

        monkeypatch.setattr(connection, "open_channel", opening)


async def ran(up: Network, spec: RunSpec) -> Outcome:
    outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.detail) == ("finished", "")
    return outcome


async def test_what_is_said_is_as_over_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, said = Opened(monkeypatch), list[bytes]()
    say = LearnerStateMachine.commit_message

    def saying(memory: LearnerStateMachine, t: int, state: Any, frame: bytes, spent: float) -> None:
        say(memory, t, state, frame, spent)
        said.append(frame)

    monkeypatch.setattr(LearnerStateMachine, "commit_message", saying)
    found = list[list[bytes]]()
    for folder, nearby in ((tmp_path / "apart", None), (tmp_path / "together", InProcessTransport())):
        async with together(folder, nearby) as up:
            before = opened.count
            await ran(up, spec_of())
            assert (opened.count == before) == (nearby is not None)
        found.append(sorted(said))
        said.clear()
    assert found[0] == found[1]
    assert len(set(found[0])) == ROUNDS * len(NAMES)


@pytest.mark.parametrize("capture", ["mirror", "relay"])
async def test_what_is_overheard_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: str) -> None:
    """A relay stands on the edge: whoever is overheard by one opens a channel to it."""
    opened = Opened(monkeypatch)
    async with together(tmp_path, InProcessTransport()) as up:
        outcome = await ran(up, spec_of(capture=capture))
    assert outcome.capture_location is not None
    heard = open_capture(outcome.capture_location)
    assert heard.is_complete and heard.count_messages()[0] == 2 * len(NAMES) * ROUNDS
    assert (opened.count > 0) == (capture == "relay")


async def test_who_has_an_identity_shows_it_on_a_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    async with together(tmp_path, InProcessTransport(), Identities(tmp_path / "identities")) as up:
        await ran(up, spec_of())
    assert opened.count >= len(NAMES)


async def test_a_learner_that_leaves_and_comes_back_goes_on(tmp_path: Path) -> None:
    """To whoever met it its stream has ended; of what it says again nothing is new."""
    spec = spec_of()
    data = made_up(spec)
    async with together(tmp_path, InProcessTransport()) as up:
        run = await up.start(spec, 3)
        await up.feed(run.run_id, spec, data, but=["dan"])
        await up.until("ben", LearnerState.RUNNING)
        await up.leave("ben")
        await up.until_gone("ben")
        await up.join("ben")
        await up.feed(run.run_id, spec, data)
        last = await up.end(run.run_id)
        assert last.state == coordinator_pb2.RUN_STATE_FINISHED and not last.violations, last
        assert not any(learner.require_session().receiver.violation_count for learner in up.learners.values())


async def test_a_stream_is_read_to_its_end_and_written_no_further() -> None:
    ours, theirs = InProcessStream.create_pair(_WakeScheduler())
    await ours.write(b"one")
    await ours.write(b"two")
    theirs.end()
    assert [await theirs.read(), await theirs.read(), await theirs.read()] == [b"one", b"two", grpc.aio.EOF]
    assert await ours.read() is grpc.aio.EOF
    with pytest.raises(Exception, match="over"):
        await ours.write(b"three")


async def test_one_reader_a_turn_is_told_that_something_has_come() -> None:
    """Else whoever asks a learner of a large host waits until all others have taken their rounds."""
    turns, told = _WakeScheduler(), list[int]()
    pairs = [InProcessStream.create_pair(turns) for _ in range(20)]

    async def reading(k: int) -> None:
        await pairs[k][1].read()
        told.append(k)

    async with asyncio.TaskGroup() as group:
        for k in range(20):
            group.create_task(reading(k))
        await asyncio.sleep(0)  # all wait
        for ours, _ in pairs:
            await ours.write(b"x")
        before = 0
        while len(told) < 20:
            await asyncio.sleep(0)
            assert len(told) - before <= 1
            before = len(told)
    assert told == list(range(20))


async def test_an_error_of_the_other_side_is_told_and_a_bugs_text_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearby = InProcessTransport()
    async with together(tmp_path, nearby) as up:
        with pytest.raises(FailedPrecondition, match="not in a run"):
            async with nearby.open_stream(up.addresses["ann"]) as stream:
                await stream.read()

        def broken(_: Learner) -> None:
            raise ValueError("the record of Mrs Miller")

        monkeypatch.setattr(up.learners["ann"].servicer, "_get_session", broken.__get__(up.learners["ann"]))
        with pytest.raises(Unavailable, match="internal error") as told:
            async with nearby.open_stream(up.addresses["ann"]) as stream:
                await stream.read()
        assert "Miller" not in str(told.value)


async def test_a_learner_that_is_gone_is_not_met(tmp_path: Path) -> None:
    nearby = InProcessTransport()
    async with together(tmp_path, nearby) as up:
        address = up.addresses["ann"]
        assert nearby.has_learner(address)
        await up.leave("ann")
        assert not nearby.has_learner(address)
