"""Runs that failed, taken up again: they end as if nothing had happened, and what is not captured is said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from sottovoce_client.runs.run_client import run_on_services
from sottovoce_coordinator.service import Coordinator
from sottovoce_core.errors import SpecError
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.service import Eavesdropper
from sottovoce_learner.storage.run_log import RunLog
from sottovoce_learner.storage.wal import RoundPayload
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.services.network import PATIENCE_S, Network, missed_soon, refused
from tests.services.test_run import SHAPES
from tests.services.test_several_runs import Work, begun, ends_as_simulated, fed_to_their_ends, serving, work

NAMES = ["ann", "ben", "cleo"]  # ann opens all her streams: she is found again wherever she is started
FAILS_IN = 10
"""The round in which a disk breaks."""


class Disk:
    """Of all learners: once broken, no message is written any more."""

    broken = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        say = RunLog.write_ahead

        def written(own: RunLog, t: int, spent: float, said: RoundPayload) -> None:
            if self.broken and t >= FAILS_IN:
                raise OSError(5, "Input/output error")
            say(own, t, spent, said)

        monkeypatch.setattr(RunLog, "write_ahead", written)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def resume(up: Network, run_id: str) -> coordinator_pb2.Run:
    async with open_channel(up.coordinator) as to:
        request = coordinator_pb2.ResumeRunRequest(run_id=run_id)
        call = coordinator_pb2_grpc.CoordinatorStub(to).ResumeRun
        return await call(request, timeout=PATIENCE_S, wait_for_ready=True)


async def not_resumed(up: Network, run_id: str) -> str:
    """Why a run is not taken up again."""
    failure = await refused(resume(up, run_id))
    assert failure.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
    return failure.details() or ""


async def failed(up: Network, each: Work) -> coordinator_pb2.Run:
    """Start a run, and feed it until its learners' disk breaks."""
    (run_id,) = await begun(up, each)
    (end,) = await fed_to_their_ends(up, [run_id], each)
    assert end.state == coordinator_pb2.RUN_STATE_FAILED
    assert "the log cannot be written: Input/output error" in end.detail
    return end


async def test_a_run_whose_learners_disk_was_broken_goes_on_from_their_logs(tmp_path: Path, disk: Disk) -> None:
    """As often as it takes; the learners are the same processes all the time."""
    first = work(tmp_path, NAMES, 1)
    async with serving(tmp_path, first) as up:
        run_id = (await failed(up, first)).run_id
        again = await resume(up, run_id)
        assert (again.run_id, again.attempt, again.HasField("ended_at")) == (run_id, 1, False)
        second = await up.end(run_id)
        assert (second.state, second.attempt) == (coordinator_pb2.RUN_STATE_FAILED, 1)
        disk.broken = False
        await resume(up, run_id)
        end = await up.end(run_id)
        ends_as_simulated(up, first, end)
    assert (end.attempt, end.capture_error) == (2, "")
    assert [each.status.rounds_committed for each in end.learners] == [40] * 3


@pytest.mark.parametrize("name", NAMES)
async def test_a_run_goes_on_after_its_coordinator_and_a_learner_were_started_again(
    tmp_path: Path, disk: Disk, name: str
) -> None:
    """The learner at another address."""
    first = work(tmp_path, NAMES, 1)
    async with serving(tmp_path, first, durable=True) as up:
        run_id = (await failed(up, first)).run_id
        disk.broken = False
        await up.restart_coordinator()
        await up.leave(name)
        await up.join(name, first.noise)
        await resume(up, run_id)
        await up.until("cleo", LearnerState.RUNNING, 3)
        await up.restart_coordinator()
        end = await up.end(run_id)
        ends_as_simulated(up, first, end)
    assert end.attempt == 1


async def test_who_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """A learner that was gone for longer than its deadline; and again, until it comes back."""
    first = work(tmp_path, NAMES, 1, 200, clock={"mode": "paced", "period_s": 0.005, "deadline_s": PATIENCE_S})
    async with serving(tmp_path, first) as up:
        (run_id,) = await begun(up, first)
        await up.feed(run_id, first.spec, first.data)
        await up.until("ann", LearnerState.RUNNING, 3)
        with pytest.MonkeyPatch.context() as patch:
            missed_soon(patch)
            await up.leave("ann")
            for back in (False, True):
                end = await up.end(run_id)
                if back:
                    patch.undo()
                assert end.state == coordinator_pb2.RUN_STATE_FAILED
                assert end.detail.startswith("ann is gone since round ")
                again = await resume(up, run_id)
                assert [each.HasField("disconnected_at") for each in again.learners] == [True, False, False]
        await up.join("ann", first.noise)
        ends_as_simulated(up, first, await up.end(run_id))


async def test_what_is_said_after_a_capture_was_closed_is_not_captured_and_that_is_said(
    tmp_path: Path, disk: Disk
) -> None:
    """The relays are gone with it: learners reach each other without them. Also when the coordinator is started again."""
    first = work(tmp_path, NAMES, 1, capture="relay", clock={"mode": "paced", "period_s": 0.02})
    async with serving(tmp_path, first, durable=True) as up:
        end = await failed(up, first)
        disk.broken = False
        again = await resume(up, end.run_id)
        await up.until("cleo", LearnerState.RUNNING, 15)
        await up.restart_coordinator()
        last = await up.end(end.run_id)
    assert (last.state, last.detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert end.capture_error == ""
    assert again.capture_error == last.capture_error
    closed = f"the capture of run {last.run_id!r} is closed: {last.capture_id}"
    assert again.capture_error == f"nothing is captured since the run was resumed: {closed}"
    capture = open_capture(last.capture_location)
    assert (last.capture_location, capture.is_complete) == (end.capture_location, True)
    assert capture.read_transcript(SHAPES, 3).rounds == FAILS_IN


async def test_who_takes_a_run_up_may_bring_the_records_that_its_learners_lack(tmp_path: Path, disk: Disk) -> None:
    """And no others: a run goes on with what it was started with."""
    first = work(tmp_path, NAMES, 1, 150)
    first_batch = [replace(own, order=own.order[:64], offsets=own.offsets[:65]) for own in first.data.learners]
    async with serving(tmp_path, first) as up:
        begun_with = replace(first, data=replace(first.data, learners=tuple(first_batch)))
        run_id = (await failed(up, begun_with)).run_id
        disk.broken = False
        other = work(tmp_path, NAMES, 1, 149)
        with pytest.raises(
            SpecError,
            match=f"run {run_id} must be resumed with the spec and the records that it was started with, and these are others",
        ):
            await run_on_services(up.coordinator, other.spec, other.data, lambda *seen: None, resume=run_id)
        going = run_on_services(up.coordinator, first.spec, first.data, lambda *seen: None, resume=run_id)
        outcome = await asyncio.wait_for(going, PATIENCE_S)
        ends_as_simulated(up, first, await up.end(run_id))
    assert (outcome.run_id, outcome.state) == (run_id, "finished")


async def test_a_feeder_that_waits_at_a_learner_goes_on_with_it(tmp_path: Path, disk: Disk) -> None:
    """It was not told that the run failed: its records come as soon as they are taken again."""
    first = work(tmp_path, NAMES, 1, 150)
    first_batch = [replace(own, order=own.order[:64], offsets=own.offsets[:65]) for own in first.data.learners]
    async with serving(tmp_path, first) as up:
        begun_with = replace(first, data=replace(first.data, learners=tuple(first_batch)))
        run_id = (await failed(up, begun_with)).run_id
        feeding = asyncio.ensure_future(up.feed(run_id, first.spec, first.data))
        await asyncio.sleep(0.2)
        disk.broken = False
        await resume(up, run_id)
        ends_as_simulated(up, first, await up.end(run_id))
        await asyncio.wait_for(feeding, PATIENCE_S)


async def test_a_capture_that_was_left_open_goes_on(tmp_path: Path, disk: Disk) -> None:
    """The eavesdropper died before the run failed, so nobody closed it; it has been started again by now."""
    first = work(tmp_path, NAMES, 1, capture="mirror")
    async with serving(tmp_path, first) as up:
        (run_id,) = await begun(up, first)
        old = up.eavesdropping
        assert old is not None and old.server is not None
        (recording,) = old._captures.sessions.values()
        await recording.writer_tasks.end()
        await old.server.server.stop(None)
        (end,) = await fed_to_their_ends(up, [run_id], first)
        assert "cannot reach the eavesdropper" in end.capture_error
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        await up.eavesdropping.start()
        disk.broken = False
        again = await resume(up, run_id)
        last = await up.end(run_id)
    assert (again.capture_error, last.capture_error) == ("", "")
    assert last.state == coordinator_pb2.RUN_STATE_FINISHED
    payloads = open_capture(last.capture_location).read_messages()["payload"].to_pylist()
    assert {RoundCodec(SHAPES).decode(payload)[0] for payload in payloads} >= set(range(FAILS_IN, 40))


async def test_a_report_from_before_ends_a_run_no_second_time(tmp_path: Path, disk: Disk) -> None:
    """It may have been on its way for long, or come from a learner that has not heard yet."""
    first = work(tmp_path, NAMES, 1)
    async with serving(tmp_path, first) as up:
        run_id = (await failed(up, first)).run_id
        disk.broken = False
        await resume(up, run_id)
        status = LearnerStatus("ann", run_id, LearnerState.FAILED, "late")
        event = coordinator_pb2.LearnerMessage(report=coordinator_pb2.Report(status=status.to_wire()))
        assert isinstance(up.coordinating, Coordinator)
        up.coordinating._handle_message(up.coordinating._learners._connected["ann"], event)
        ends_as_simulated(up, first, await up.end(run_id))


async def test_what_did_not_fail_or_whose_logs_are_gone_is_not_taken_up(tmp_path: Path, disk: Disk) -> None:
    first, short = work(tmp_path, NAMES, 1), work(tmp_path, ["ann"], 2, 5)
    async with serving(tmp_path, first) as up:
        unknown = await not_resumed(up, "other")
        run_id = (await failed(up, first)).run_id
        done = await up.run(short.spec, short.data)
        since = await not_resumed(up, run_id)
        finished = await not_resumed(up, done.run_id)
        (under_way,) = await begun(up, short)
        running = await not_resumed(up, under_way)
        held = await not_resumed(up, run_id)
    only = "only a run that failed can be resumed, and run"
    assert unknown == "no run 'other': there are no runs"
    assert since == f"ann took part in run {done.run_id} since, and logs of one run are kept: start a new run"
    assert finished == f"{only} {done.run_id} is finished"
    assert running.startswith(f"{only} {under_way} is ")
    assert held.startswith(f"ann is in run {under_way}, which is under way")


async def test_two_operators_take_a_run_up_once(tmp_path: Path, disk: Disk) -> None:
    first = work(tmp_path, NAMES, 1)
    async with serving(tmp_path, first) as up:
        run_id = (await failed(up, first)).run_id
        disk.broken = False
        answers: tuple[Any, ...] = await asyncio.gather(resume(up, run_id), resume(up, run_id), return_exceptions=True)
        (error,) = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        # The second is refused while the first is being looked at, or once the run goes on: as it comes.
        refusals = f"in run {run_id}, which is under way", f"resumed, and run {run_id} is running"
        assert any(each in (error.details() or "") for each in refusals), error.details()
        end = await up.end(run_id)
        ends_as_simulated(up, first, end)
    assert end.attempt == 1
