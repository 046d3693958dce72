"""`sottovoce runs` and `rebind`: what an operator sees of a coordinator."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import pytest
from pydantic_core import to_json
from rich.console import Console

from sottovoce_client.runs.coordinator_commands import (
    get_run_documents,
    list_runs,
    rebind,
    reconfigure_run,
    resume_run,
    show_run,
    stop_run,
)
from sottovoce_client.terminal import reserve_stdout_for_json
from sottovoce_core.errors import FailedPrecondition, NotFound, SpecError, Unavailable, ViolationKind
from sottovoce_rpc.learner_status import Attribution, LearnerState
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, missed_soon, network

NAMES = ["ann", "ben"]


def screen() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, width=160), shown


async def test_runs_are_listed_shown_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = small_spec(5, NAMES)
    paced = small_spec(1000, NAMES, clock={"mode": "paced", "period_s": 0.05, "deadline_s": 100.0})
    console, shown = screen()
    async with network(tmp_path, NAMES) as up:
        await list_runs(up.coordinator, console)
        done = await up.run(short, made_up(short))
        running = asyncio.ensure_future(up.run(paced, made_up(paced)))
        await up.until("ann", LearnerState.RUNNING, 2)
        async with asyncio.timeout(PATIENCE_S):
            while (await get_run_documents(up.coordinator))[0]["rounds_done"] < 2:
                pass  # the coordinator has yet to hear of them
        await up.leave("ben")
        assert up.coordinating is not None
        run_id = up.coordinating._runs.active_runs[0].machine.run_id
        await up.until_gone("ben")
        for asked in (done.run_id, run_id[:-1]):  # or as much of it as tells it from the others
            await show_run(up.coordinator, asked, console)
        with pytest.raises(SpecError, match=f"got 'run-', the prefix of several: {run_id}, {done.run_id}"):
            await show_run(up.coordinator, "run-", console)
        with reserve_stdout_for_json():
            await stop_run(up.coordinator, run_id[:-1], console)
        for over, how in ((done.run_id, "finished"), (run_id, "stopped: the operator stopped the run")):
            await stop_run(up.coordinator, over, console)
            assert f"run {over} is over ({how}): nothing is left to stop" in " ".join(shown.getvalue().split())
            with pytest.raises(FailedPrecondition, match=re.escape(f"run {over} is over ({how})")):
                await reconfigure_run(up.coordinator, over, "ann", console, joins=False)
        out = capsys.readouterr().out  # with what services of this process log
        stopped = json.JSONDecoder().raw_decode(out, out.index("{\n"))[0]
        assert (stopped["run_id"], stopped["state"]) == (run_id, "stopped") and stopped["rounds_done"] >= 2
        await list_runs(up.coordinator, console)
        with pytest.raises(NotFound, match="no run 'x': the last one is"):
            await show_run(up.coordinator, "x", console)
        told = json.loads(to_json(await get_run_documents(up.coordinator)))
        assert await get_run_documents(up.coordinator, done.run_id) == (await get_run_documents(up.coordinator))[1:]
        outcome = await running
    assert [each["run_id"] for each in told] == [run_id, done.run_id] and told[1]["rounds_done"] == 5
    assert [each["epsilon"] > 0 for each in told[1]["learners"]] == [True, True]
    text = shown.getvalue()
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert text.startswith("no runs\n")
    assert ["rounds", "5", "of", "5"] in lines
    assert any(line[0] == "ben" and line[2:4] == ["disconnected", "since"] for line in lines if len(line) > 4)
    assert f"{run_id} stopped: the operator stopped the run" in text
    assert [line[:2] for line in lines[-2:]] == [[run_id, "stopped"], [done.run_id, "finished"]]
    assert outcome.state == "stopped"


async def test_what_learners_noticed_of_each_other_is_shown(tmp_path: Path) -> None:
    spec = small_spec(1000, NAMES, clock={"mode": "paced", "period_s": 0.05, "deadline_s": 100.0})
    console, shown = screen()
    async with network(tmp_path, NAMES) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 2)
        session = up.learners["ann"].require_session()
        assert session.receiver.record_violation(1, ViolationKind.EQUIVOCATION, Attribution.CLAIM, has_ended=False)
        session.request_report()
        async for view in up.watch(session.assignment.run_id):
            if view.violations:
                break
        await show_run(up.coordinator, session.assignment.run_id, console)
        await stop_run(up.coordinator, session.assignment.run_id, console)
        outcome = await running
    (line,) = outcome.violations
    assert line.startswith(
        "an unauthenticated sender under the name of ben sent two different things in one round when round "
    )
    assert f"violations {line}" in " ".join(shown.getvalue().split())


async def test_a_run_that_failed_is_taken_up_again(tmp_path: Path) -> None:
    spec = small_spec(100_000, NAMES, capture="relay", clock={"deadline_s": 5.0})
    console, shown = screen()
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, 3)).run_id
        with pytest.MonkeyPatch.context() as patch:
            missed_soon(patch)
            await up.leave("ben")
            await up.end(run_id)
        await resume_run(up.coordinator, run_id[:-1], console)
        await stop_run(up.coordinator, run_id, console)
        with pytest.raises(
            FailedPrecondition, match=f"only a run that failed can be resumed, and run {run_id} is stopped"
        ):
            await resume_run(up.coordinator, run_id, console)
    lines = shown.getvalue().splitlines()
    assert lines[:2] == [f"{run_id} connecting from round 0 on", "waiting for ben"]
    closed = f"nothing is captured since the run was resumed: the capture of run {run_id!r} is closed"
    assert lines[2].startswith(closed)


async def test_a_learner_is_let_in_with_another_folder(tmp_path: Path) -> None:
    console, shown = screen()
    async with network(tmp_path, ["ann"]) as up:
        await up.run(spec := small_spec(3, ["ann"]), made_up(spec))
        with pytest.raises(
            FailedPrecondition, match="learner 'ann' is connected, with the state folder that it has: stop it first"
        ):
            await rebind(up.coordinator, "ann", console)
        with pytest.raises(NotFound, match="learner 'zoe' has never joined this coordinator; those that have are ann"):
            await rebind(up.coordinator, "zoe", console)
        await up.leave("ann")
        await up.until_gone("ann")
        await rebind(up.coordinator, "ann", console)
    assert shown.getvalue().startswith("ann may join with another state folder")


async def test_a_coordinator_that_is_not_there_is_said_in_a_line() -> None:
    with pytest.raises(Unavailable, match=r"cannot reach the coordinator at 127\.0\.0\.1:1"):
        await list_runs("127.0.0.1:1", screen()[0])
