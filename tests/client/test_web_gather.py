"""Asking real services: what the console comes to know, and how it takes it that they are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.runs.monitoring import CaptureListItem, ServiceAddresses
from sottovoce_client.watching.display import Gauges
from sottovoce_client.web import poller
from sottovoce_client.web.poller import MAX_BROWSERS, Poller, _merge_captures
from sottovoce_client.web.service_clients import ConsoleOptions
from sottovoce_core.errors import NotFound
from sottovoce_core.spec import dump_spec
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.tasks import Tasks
from tests.client.summaries import summary
from tests.client.test_watch import a_sight
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, network

NAMES = ["ann", "ben", "eve"]
PACED = {"mode": "paced", "period_s": 0.05, "deadline_s": 100.0}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services, lists and files are looked at several times a second."""
    for name in ("POLL_PERIOD_S", "_LIST_PERIOD_S", "_FILE_SCAN_PERIOD_S"):
        monkeypatch.setattr(poller, name, 0.2)


@asynccontextmanager
async def looking(asked: ConsoleOptions, run_id: str = "") -> AsyncIterator[Callable[[Callable[[Any], bool]], Any]]:
    """A console that is looked at; gives what waits for a page of which something holds."""
    gathering = Poller(asked)
    async with Tasks() as tasks:
        tasks.start(gathering.run(), "the console")
        pages = gathering.stream_states(run_id)

        async def until(holds: Callable[[Any], bool]) -> Any:
            async with asyncio.timeout(PATIENCE_S):
                async for page in pages:
                    if holds(told := json.loads(page)):
                        return told
            raise AssertionError("the console ended")

        try:
            yield until
        finally:
            await pages.aclose()  # type: ignore[attr-defined]


def asked_of(up: Network, folder: Path | None = None, watch: str = "") -> ConsoleOptions:
    return ConsoleOptions(folder, ServiceAddresses(up.coordinator, up.eavesdropper, up.operator.folder), watch)


async def test_a_run_is_seen_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    spec = small_spec(1000, NAMES, clock=PACED, capture="relay", privacy={"budget": 1e6})
    with Gauges("127.0.0.1:0") as metrics:
        async with network(tmp_path, NAMES) as up, looking(asked_of(up, tmp_path, metrics.address)) as until:
            nothing = await until(lambda page: True)
            assert (nothing["run"], nothing["runs"], nothing["problems"]) == (None, [], [])
            stop = asyncio.Event()
            running = asyncio.ensure_future(up.run(spec, made_up(spec), stop))
            page = await until(lambda page: page["run"] and page["run"]["rounds_per_second"] and page["captures"])
            run, (capture, *_) = page["run"], page["captures"]
            assert (run["state"], run["rounds"], run["traffic_source"]) == ("running", 1000, "eavesdropper")
            assert [each["name"] for each in run["learners"]] == NAMES
            assert {each["epsilon_limit"] for each in run["learners"]} == {1e6}
            assert all(each["records"] > 0 and each["records_per_second"] is not None for each in run["learners"])
            assert all(each["messages"] > 0 for each in run["edges"]) and len(run["edges"]) == 3
            assert (capture["run_id"], capture["state"]) == (run["run_id"], "open")
            page = await until(lambda page: any(each["path"] for each in page["captures"]))
            metrics.update(a_sight())  # of another run
            await up.leave("ben")
            page = await until(lambda page: page["run"]["learners"][1]["state"] == "disconnected")
            assert page["run"]["learners"][1]["disconnected_since"] > page["run"]["started_at"]
            assert page["watch"] is None
            stop.set()
            outcome = await running
            page = await until(lambda page: page["run"]["state"] == outcome.state == "stopped")
            assert page["run"]["detail"] == "the operator stopped the run" and page["run"]["ended_at"]


async def test_a_run_that_nobody_knows_is_a_problem(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up, looking(asked_of(up), "nothing") as until:
        page = await until(lambda page: page["problems"])
        (problem,) = page["problems"]
        assert problem["text"].startswith("the coordinator at") or "no run 'nothing'" in problem["text"]
        assert page["run"] is None


async def test_services_that_go_are_told_and_what_was_known_stays(tmp_path: Path) -> None:
    spec = small_spec(1000, NAMES, clock=PACED)
    async with network(tmp_path, NAMES) as up, looking(asked_of(up)) as until:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 2)
        await until(lambda page: page["run"])
        assert up.coordinating is not None
        await up.coordinating.stop()
        page = await until(lambda page: page["problems"])
        assert up.coordinator in page["problems"][0]["text"]
        assert page["run"]["name"] == spec.name and page["is_stale"]
        later = await until(lambda page: page["problems"])
        assert later["problems"][0]["first_seen"] == page["problems"][0]["first_seen"]
        running.cancel()
        await asyncio.wait([running])


async def test_results_say_how_a_run_ended_whose_services_are_gone(tmp_path: Path) -> None:
    spec, results = small_spec(1000, NAMES, clock=PACED), tmp_path / "results"
    results.mkdir()
    async with network(tmp_path, NAMES) as up, looking(asked_of(up, results)) as until:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        page = await until(lambda page: page["run"] and page["runs"])
        run_id = page["run"]["run_id"]
        told = {"name": "run", "run_id": run_id, "state": "finished", "detail": ""}
        (results / "summary.json").write_text(json.dumps(told))
        assert up.coordinating is not None
        await up.coordinating.stop()
        page = await until(lambda page: page["problems"] and page["run"]["state"] == "finished")
        assert page["runs"][0]["state"] == "finished" and page["run"]["ended_at"] == page["runs"][0]["ended_at"]
        running.cancel()
        await asyncio.wait([running])


def test_of_a_capture_whose_eavesdropper_is_gone_the_folder_says_how_it_ended() -> None:
    told = CaptureListItem("a", "run-1", "/far/a", "open", 5, 500)
    found = CaptureListItem("a", "run-1", "/far/a", "complete", 7, 700, "captures/a/capture.json", 1.0)
    older = CaptureListItem("b", "run-0", "/far/b", "complete", 7, 700, "captures/b/capture.json", 0.5)
    assert _merge_captures((told,), (found, older)) == (replace(told, path=found.path), older)
    assert _merge_captures((told,), (found, older), is_stale=True) == (found, older)
    assert _merge_captures((told,), ()) == (told,)


async def test_services_are_found_where_up_says_that_they_are(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    place = results / "services.json"
    async with network(tmp_path, NAMES) as up, looking(ConsoleOptions(results)) as until:
        page = await until(lambda page: page["problems"])
        assert "no run is up in" in page["problems"][0]["text"]
        place.write_text(json.dumps({"coordinator": up.coordinator, "eavesdropper": up.eavesdropper, "identity": None}))
        await until(lambda page: not page["problems"])
        place.write_text("nonsense")
        await until(lambda page: page["problems"])


async def test_nobody_is_asked_while_nobody_looks() -> None:
    gathering = Poller(ConsoleOptions(None, ServiceAddresses("127.0.0.1:9")))
    looks: list[int] = []

    async def look(_: object) -> None:
        looks.append(1)

    gathering._poll = look  # type: ignore[method-assign, assignment]
    async with Tasks() as tasks:
        tasks.start(gathering.run(), "the console")
        for _ in range(5):
            await asyncio.sleep(0)
        assert looks == []
        with gathering._register_browser(""):
            while not looks:  # noqa: ASYNC110 - it is another task's turn
                await asyncio.sleep(0)
        assert not gathering._has_browsers.is_set()


async def test_so_many_may_look_and_no_more() -> None:
    gathering = Poller(ConsoleOptions(None, ServiceAddresses("127.0.0.1:9")))
    with ExitStack() as stack:
        for _ in range(MAX_BROWSERS):
            assert not gathering.is_full
            stack.enter_context(gathering._register_browser(""))
        assert gathering.is_full
    assert not gathering.is_full


async def test_the_end_lets_everybody_go() -> None:
    gathering = Poller(ConsoleOptions(None, ServiceAddresses("127.0.0.1:9")))
    waiting = asyncio.ensure_future(anext(gathering.stream_states(""), None))
    await asyncio.sleep(0)
    await gathering.end()
    assert await waiting is None


def test_addresses_given_by_hand_win(tmp_path: Path) -> None:
    (tmp_path / "services.json").write_text(
        json.dumps({"coordinator": "a:1", "eavesdropper": "b:2", "identity": "/id"})
    )
    assert ConsoleOptions(tmp_path).resolve_addresses() == ServiceAddresses("a:1", "b:2", Path("/id"))
    assert ConsoleOptions(tmp_path, ServiceAddresses("c:3")).resolve_addresses() == ServiceAddresses(
        "c:3", "", Path("/id")
    )
    assert ConsoleOptions(
        tmp_path, ServiceAddresses("c:3", "d:4", Path("/own"))
    ).resolve_addresses() == ServiceAddresses("c:3", "d:4", Path("/own"))


@pytest.mark.parametrize("text", ["[]", "1", '{"coordinator": null}', ""])
def test_services_of_nowhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "services.json").write_text(text)
    with pytest.raises(NotFound, match="no run is up in"):
        ConsoleOptions(tmp_path).resolve_addresses()


async def test_a_run_that_is_over_is_shown_when_its_services_are_gone(tmp_path: Path) -> None:
    spec = small_spec(20, NAMES, name="demo", capture="relay")
    (tmp_path / "demo").mkdir()
    over = replace(summary(3, 20), name="demo", run_id="demo-1", spec_yaml=dump_spec(spec))
    over = replace(
        over, learners=tuple(replace(each, name=name) for each, name in zip(over.learners, NAMES, strict=True))
    )
    over.save(tmp_path / "demo" / "summary.json")
    older = replace(
        over, run_id="demo-0", started_at="2020-01-01T00:00:00+00:00", state="failed", detail="north is gone"
    )
    (tmp_path / "older").mkdir()
    older.save(tmp_path / "older" / "summary.json")
    (tmp_path / "broken").mkdir()
    replace(over, run_id="demo-2", spec_yaml="[").save(tmp_path / "broken" / "summary.json")

    asked = ConsoleOptions(tmp_path, ServiceAddresses("", "", None))
    async with looking(asked) as until:
        page = await until(lambda page: page["run"])
    run = page["run"]
    assert (run["run_id"], run["state"], run["rounds_done"], run["rounds"]) == (
        "demo-1",
        "finished",
        over.rounds_done,
        20,
    )
    assert [each["name"] for each in run["learners"]] == NAMES
    assert [each["epsilon"] for each in run["learners"]] == [each.epsilon_spent for each in over.learners]
    assert len(run["edges"]) == 3 and sum(each["messages"] for each in run["edges"]) > 0
    assert [(each["run_id"], each["state"]) for each in page["runs"]] == [("demo-1", "finished"), ("demo-0", "failed")]
    async with looking(asked, "demo-0") as until:
        page = await until(lambda page: page["run"])
    assert (page["run"]["state"], page["run"]["detail"]) == ("failed", "north is gone")
