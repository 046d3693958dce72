"""`sottovoce status`: one look at a coordinator's runs, at learners and at an eavesdropper."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json
from rich.console import Console

from sottovoce_client import doctor, terminal
from sottovoce_client.cli import app
from sottovoce_client.live.sender import LearnerEndpoint
from sottovoce_client.models.predicting import connect_as_owner
from sottovoce_client.runs import coordinator_commands, status
from sottovoce_client.runs.monitoring import (
    RunHistory,
    RunListItem,
    RunObservation,
    RunView,
    ServiceAddresses,
    make_run_view,
)
from sottovoce_client.runs.status import DeploymentStatus, _progress_line, collect_status, make_document, show
from sottovoce_core.errors import Unavailable
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_rpc import tasks
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.principals import Role
from tests.client import consoles
from tests.examples import made_up, small_spec
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, network

NAMES = ["ann", "ben"]
NOBODY = "127.0.0.1:1"
PACED = {"mode": "paced", "period_s": 0.05, "deadline_s": 100.0}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SAMPLE_INTERVAL_S", 0.0)


def printed(seen: DeploymentStatus, width: int = 160) -> str:
    shown = io.StringIO()
    show(seen, Console(file=shown, width=width))
    return shown.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the lines of tables, by their first."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def view(
    *looks: RunObservation, rounds: int | None = 1000, state: str = "running", ended: float | None = None
) -> RunView:
    """Of a run that was started at noon."""
    history = RunHistory()
    for each in looks:
        history.add(each)
    course = RunListItem("run-1", state, "", consoles.NOON, ended)
    return make_run_view(course, replace(consoles.plan(len(looks[0].statuses)), rounds=rounds), history)


@pytest.mark.parametrize("tls", [False, True])
async def test_what_goes_on_is_seen_by_whom_it_concerns(tmp_path: Path, tls: bool) -> None:
    """The operator asks coordinator and eavesdropper, the owner of learners these; then one of them is gone."""
    identities = Identities(tmp_path / "ids") if tls else None
    spec = small_spec(1000, NAMES, clock=PACED, capture="relay", name="wards", privacy={"budget": 1e6})
    async with network(tmp_path, NAMES, identities=identities) as up:
        await up.until_here("ann")
        idle = await collect_status(learners=(up.addresses["ann"],), credentials=up.operator)
        empty = await collect_status(ServiceAddresses(up.coordinator, up.eavesdropper), credentials=up.operator)
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 3)
        asked = partial(collect_status, ServiceAddresses(up.coordinator, up.eavesdropper), (up.addresses["ann"],))
        seen = await asked(credentials=up.operator)
        stranger = None if identities is None else identities.of("operator/mallory")
        other = None if stranger is None else await asked(credentials=stranger)
        await up.leave("ben")
        await up.until_gone("ben")
        alone = await asked(credentials=up.operator)
        assert seen.run is not None
        await coordinator_commands.stop_run(up.coordinator, seen.run.run_id, Console(quiet=True), up.operator)
        await running
        places, begins = ServiceAddresses(up.coordinator, up.eavesdropper), seen.run.run_id[:-1]
        over = await collect_status(places, run=begins, credentials=up.operator)
        assert over.run is not None and [each.run_id for each in over.captures] == [over.run.run_id]

    (ann,) = idle.learners
    assert rows(printed(idle))["ann"][:3] == ["in", "no", "run"] and not idle.faults and ann[1].run_id == ""
    assert printed(empty).startswith("no run: start one") and not empty.faults

    text = printed(seen)
    assert not seen.faults and text.rstrip().endswith("nothing is wrong")
    assert f"wards {seen.run.run_id}" in text and "of 1,000 rounds" in text
    assert {rows(text)[name][0] for name in NAMES} == {"running"}
    assert seen.captures[0].run_id == seen.run.run_id and seen.captures[0].messages > 0
    told = json.loads(to_json(make_document(seen)))
    (own,) = told["learners"]
    assert (own["run_id"], own["rounds"], own["state"]) == (seen.run.run_id, 1000, "running")
    assert own["learners"][0]["epsilon"] > 0 and own["learners"][0]["epsilon_limit"] == 1e6
    assert [each["name"] for each in told["run"]["learners"]] == NAMES
    assert all(each["accuracy"] is None for each in told["run"]["learners"])  # the run did not opt in

    if other is not None:  # any operator may know how far a learner is, and its owner alone what it is in
        assert other.run is not None and other.captures and not other.faults
        assert [(each.rounds, each.rounds_done > 0) for _, each in other.learners] == [(None, True)]
    assert alone.run is not None and rows(printed(alone))["ben"][0] == "disconnected"
    assert any(line.startswith("ben is disconnected since") for line in alone.faults)
    assert over.run.state == "stopped" and not over.faults


async def test_who_does_not_answer_hides_nobody_else(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        spec = small_spec(5, NAMES)
        await up.run(spec, made_up(spec))
        seen = await collect_status(ServiceAddresses(up.coordinator, NOBODY), (NOBODY, up.addresses["ann"]))
        wrong = await collect_status(ServiceAddresses(up.coordinator), run="no-such-run")
        elsewhere = await collect_status(ServiceAddresses(up.eavesdropper))
    assert seen.run is not None and (seen.run.state, seen.run.rounds_done) == ("finished", 5)
    assert [at for at, _ in seen.learners] == [up.addresses["ann"]]
    assert sorted(line.partition(" at ")[0] for line in seen.faults) == [
        "cannot reach the eavesdropper",
        "cannot reach the learner",
    ]
    assert "no run 'no-such-run'" in wrong.faults[0]
    assert "does not know this call" in elsewhere.faults[0]


async def test_a_learner_says_that_it_does_not_hear_its_coordinator(tmp_path: Path) -> None:
    spec = small_spec(1000, NAMES, clock={"mode": "paced", "period_s": 0.01, "deadline_s": 100.0})
    async with network(tmp_path, NAMES, durable=True) as up:
        own = (up.addresses["ann"],)
        run_id = (await up.start(spec, 3)).run_id
        feeding = asyncio.ensure_future(up.feed(run_id, spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 2)
        assert "coordinator" not in " ".join((await collect_status(learners=own)).faults)
        old = await up.cut_coordinator()
        async with asyncio.timeout(PATIENCE_S):
            while not (faults := (await collect_status(learners=own)).faults) or "it waits for" not in faults[0]:
                pass
        up.coordinating = old
        await up.restart_coordinator()
        await up.until_here("ann")
        async with asyncio.timeout(PATIENCE_S):
            while (await collect_status(learners=own)).faults:
                pass
        feeding.cancel()
    at = rf"[^;]*{re.escape(up.coordinator)}[^;]*"
    waits = r"it waits for a (lease of the coordinator|neighbour \(\w+\)) in round \d+"
    assert re.fullmatch(rf"ann: it has had no command from its coordinator since round \d+: {at}; {waits}", faults[0])


async def test_a_learner_in_no_run_says_that_no_coordinator_has_let_it_in(tmp_path: Path) -> None:
    learner = Learner(LearnerConfig("ann", "127.0.0.1:1", state_folder=tmp_path))
    address = await learner.start()
    try:
        seen = await collect_status(learners=(address,))
    finally:
        await learner.stop()
    assert seen.faults == ("ann: no coordinator has let it in yet: that at 127.0.0.1:1 has not answered yet",)


def test_the_command_exits_with_1_where_anything_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--coordinator", NOBODY], ["--learner-address", NOBODY, "--json"]):
        with pytest.raises(SystemExit) as left:
            app(["status", *arguments])
        assert left.value.code == 1
    text, _, told = capsys.readouterr().out.partition("{")
    assert "fault" in text and "no service listens there" in " ".join(text.split())
    found = json.loads("{" + told)
    assert found["run"] is None and "cannot reach the learner at 127.0.0.1:1" in found["faults"][0]


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """Somebody who accepts a connection and never says a word."""
    heard = asyncio.Event()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard.wait()
        writer.close()

    async with await asyncio.start_server(nothing, "127.0.0.1", 0) as server:
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            heard.set()


async def enter_owner(at: str) -> None:
    async with connect_as_owner(LearnerEndpoint(at, "", Credentials())):
        pass


ASKING: dict[str, Callable[[str], Awaitable[Any]]] = {
    "predict": enter_owner,
    "doctor": lambda at: doctor.run_checks(doctor.CheckTargets(Credentials(), [(Role.LEARNER, at)])),
    "status": lambda at: collect_status(learners=(at,)),
}


@pytest.mark.parametrize("command", ASKING)
async def test_who_waits_for_a_learner_is_told(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is given up."""
    monkeypatch.setattr(tasks, "WAIT_NOTICE_DELAY_S", 0.05)
    told, said = asyncio.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(terminal, "print_notice", say)
    async with silent() as at:
        asking = asyncio.ensure_future(ASKING[command](at))
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        assert not asking.done()
        asking.cancel()
        await asyncio.wait([asking])
    assert said == [f"waiting for the learner at {at}: not reached yet; is it running, and is the address right?"]


async def test_a_learner_that_is_not_there_is_not_waited_for() -> None:
    with pytest.raises(Unavailable, match=f"cannot reach the learner at {NOBODY}: no service listens there"):
        await enter_owner(NOBODY)


# ---- how it is said --------------------------------------------------------------------------------------------------


def test_pace_and_time_left_are_of_now_or_else_of_all_so_far() -> None:
    now = consoles.NOON + 10.0
    at = [RunObservation(t, (consoles.status(0, rounds),)) for t, rounds in ((0.0, 20), (1.0, 40))]
    assert _progress_line(view(*at), now) == "40 of 1,000 rounds, 20 rounds/s (4 so far), about 48 s left"
    stuck = view(at[1], replace(at[1], observed_at_s=2.0))
    assert _progress_line(stuck, now) == "40 of 1,000 rounds, 0 rounds/s (4 so far), about 4 min 00 s left"
    paced = replace(view(*at), period_s=0.2)  # it catches up after a pause, and not for ever
    assert _progress_line(paced, now) == "40 of 1,000 rounds, 20 rounds/s (4 so far), about 3 min 10 s left"
    assert _progress_line(view(*at, rounds=None), now) == "40 rounds, 20 rounds/s (4 so far)"
    assert _progress_line(view(at[1], state="finished", ended=now), now) == "40 of 1,000 rounds"


def test_who_is_behind_has_stopped_or_is_missing_is_shown_first_among_many() -> None:
    statuses = [consoles.status(i, 20) for i in range(60)]
    statuses[50] = consoles.status(
        50, 12, state=LearnerState.BUDGET_EXHAUSTED, detail="the next message costs too much"
    )
    statuses[55] = replace(statuses[55], state=LearnerState.UNSPECIFIED, rounds_done=0)
    seen = DeploymentStatus(
        consoles.NOON + 10, view(RunObservation(0.0, tuple(statuses), ("127.0.0.1:1",) * 55 + ("",) * 5))
    )
    lines = [line.strip() for line in printed(seen).splitlines() if line.startswith(" learner-")]
    assert lines[0].split()[:5] == ["learner-55", "not", "joined", "0", "20"]
    assert lines[1].split()[:5] == ["learner-50", "budget", "exhausted", "12", "8"]
    assert len(lines) == status.MAX_ROWS and "… 20 more" in printed(seen)
    assert seen.faults == ("learner-50: budget exhausted", "learner-50: the next message costs too much")


def test_what_depends_on_records_is_shown_where_the_run_opted_in() -> None:
    one = consoles.status(0)
    for each, there in ((one, False), (replace(one, prequential_accuracy=0.875), True)):
        text = printed(DeploymentStatus(consoles.NOON + 10, view(RunObservation(0.0, (each,)))))
        assert ("accuracy" in text, "87.5 %" in text) == (there, there)


def test_a_run_that_failed_is_a_fault_and_one_that_was_stopped_is_none() -> None:
    gone = view(RunObservation(0.0, (consoles.status(0),)), state="failed", ended=consoles.NOON + 5)
    assert DeploymentStatus(consoles.NOON, gone).faults == ("the run failed: no reason is known",)
    assert not DeploymentStatus(consoles.NOON, replace(gone, state="stopped")).faults


def test_a_run_that_its_budget_stopped_is_a_fault() -> None:
    why = "learner-0 stopped sending: that would be above the budget of 4"
    spent = consoles.status(0, state=LearnerState.BUDGET_EXHAUSTED, detail="that would be above the budget of 4")
    other = consoles.status(1, state=LearnerState.STOPPED, detail=why)
    over = view(RunObservation(0.0, (spent, other)), state="stopped", ended=consoles.NOON + 5)
    assert DeploymentStatus(consoles.NOON, replace(over, detail=why)).faults == (f"the run stopped: {why}",)


async def test_a_run_whose_records_nobody_took_is_a_fault_that_says_what_to_do(tmp_path: Path) -> None:
    """The operator who runs it is not one whom the learners' owners have named."""
    identities = Identities(tmp_path / "ids")
    spec = small_spec(5, NAMES)
    async with network(tmp_path, NAMES, identities=identities) as up:
        stranger = identities.of("operator/mallory")
        outcome = await up.run(spec, made_up(spec), credentials=stranger)
        seen = await collect_status(ServiceAddresses(up.coordinator), credentials=up.operator)
    what = "--owner operator/mallory or --feeder operator/mallory"
    assert outcome.state == "failed" and outcome.detail.endswith(what)
    (fault,) = seen.faults
    # All feeders are refused at once, and the first answer stops the run.
    named = "|".join(NAMES)
    assert re.fullmatch(
        "the run stopped: a feeder could not deliver its records: "
        rf"operator/mallory must be authorised for this by the owner of '({named})': .*{re.escape(what)}",
        fault,
    )
