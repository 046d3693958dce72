"""Runs of live records, from the command line and from Python: what runs them, and what cannot."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import sottovoce as sv
from sottovoce_client import terminal
from sottovoce_client.cli import app
from sottovoce_client.live.connect import connect_learner
from sottovoce_client.runs.evaluate import summarise
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_client.runs.run_command import run_and_report, run_with_local_services
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import prepare
from tests.examples import small_spec
from tests.services.network import PATIENCE_S, network

LIVE = {"source": "live", "features": 2, "batch_size": 5}
CLOCK = {"mode": "paced", "period_s": 0.01}


def document(**data: Any) -> dict[str, Any]:
    return {"rounds": 5, "learners": 3, "algorithm": "ldp-dol", "data": {**LIVE, **data}}


WRONG = [
    ({"features": None}, "source: live needs a schema, or features"),
    ({"features": 0}, "features"),
    ({"batch_size": "all"}, "batch_size must be a number for live records"),
    ({"scale": "standard"}, "scale must be left out with source: live"),
    ({"reuse": True}, "reuse must be left out with source: live"),
    ({"partition": "by_label"}, "partition must be left out with source: live"),
    ({"test_fraction": 0.5}, "test_fraction must be left out with source: live"),
    ({"positive": [1]}, "positive must be left out without a schema"),
    ({"source": "breast_cancer"}, "features must be left out but with source: live"),
]


@pytest.mark.parametrize(("data", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_spec_says_nothing_of_records_that_are_nowhere_yet(data: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        sv.Experiment(**document(**data))


def test_what_needs_records_beforehand_says_so() -> None:
    experiment = sv.Experiment(**document())
    for work in (lambda: experiment.records, lambda: sv.simulate(experiment), lambda: sv.audit(experiment)):
        with pytest.raises(SpecError, match="live has no records before services run it"):
            work()
    shared = sv.Experiment(**{**document(), "algorithm": {"name": "dpsda-c", "sigma": 1.0}})
    with pytest.raises(SpecError, match="live ones are each learner's own"):
        prepare(shared, live=True)


@pytest.mark.parametrize(
    ("clock", "warned"),
    [({}, True), ({"mode": "async"}, True), ({"mode": "data"}, False), ({"mode": "paced", "period_s": 1.0}, False)],
)
def test_who_does_not_outlast_a_pause_is_told_before(
    clock: dict[str, Any], warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `spec check`, and by whatever starts the run, before it starts; nobody is hindered."""
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**document(), "clock": {"deadline_s": 7.0, **clock}}))
    monkeypatch.setattr("sottovoce_client.runs.run_command.run_and_report", lambda *_, **__: 0)
    checked, begun = (
        CliRunner().invoke(app, [*command, str(tmp_path / "spec.yaml"), *more])
        for command, more in ((["spec", "check"], []), (["up"], ["--out", str(tmp_path / "out")]))
    )
    assert (checked.exit_code, begun.exit_code) == (0, 0)
    words = "where none comes for 7 s (clock.deadline_s): take paced where streams pause [PAUSES]"
    assert [words in each for each in (checked.stdout, begun.stderr)] == [warned, warned]


def test_a_spec_with_all_its_defaults_is_the_same_spec() -> None:
    experiment = sv.Experiment(**document())
    assert sv.Experiment(**yaml.safe_load(experiment.to_yaml())) == experiment


@pytest.mark.slow
def test_up_says_where_records_go_and_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what takes long: services that start, and the summary."""
    said, making = "", "making the summary and the report ...\n"

    def slowly(*words: Any) -> Any:
        nonlocal said
        until = time.monotonic() + PATIENCE_S
        while making not in said and time.monotonic() < until:
            said += capsys.readouterr().out
        return summarise(*words)

    monkeypatch.setattr(terminal, "WAIT_NOTICE_DELAY_S", 0.0)
    monkeypatch.setattr("sottovoce_client.runs.run_command.summarise", slowly)
    spec = small_spec(60, ["north", "south"], data=LIVE, clock=CLOCK)

    async def start(prepared: Any, watch: Any, stop: asyncio.Event) -> Any:
        async def feed() -> None:
            place = tmp_path / "learners.json"
            while not place.exists():  # noqa: ASYNC110 - a file is no event
                await asyncio.sleep(0.01)
            async with connect_learner(json.loads(place.read_text())["north"]) as learner:
                await learner.feed(np.ones((7, 2)), np.ones(7))

        feeding = asyncio.ensure_future(feed())
        outcome = await run_with_local_services(prepared.run.spec, prepared.data, tmp_path, watch, stop)
        await feeding
        return outcome

    assert run_and_report(prepare(spec, live=True), tmp_path, start) == 0
    assert "north accepts records at 127.0.0.1:" in said
    assert "starting a coordinator and 2 learners ...\n" in said and said.endswith(making)
    summary = json.loads((tmp_path / "summary.json").read_text())
    north, south = summary["learners"]
    assert (north["records"], south["records"], north["max_uses"], south["max_uses"]) == (7, 0, 1, 0)
    assert north["epsilon_record_use"] == north["epsilon_record"] == pytest.approx(north["epsilon_spent"])
    assert (north["epsilon_record_use"] > 0.0, south["epsilon_record_use"]) == (True, 0.0)
    assert len(north["epsilon_record_use_curve"]) == 60


def test_what_up_starts_is_said_in_words(tmp_path: Path) -> None:
    spec = small_spec(3, 6, capture="relay")
    planned = [LocalServices(spec, tmp_path, learners_per_process=each).description for each in (1, 4, 6)]
    assert planned == [
        f"a coordinator, an eavesdropper and 6 learners{of}" for of in ("", " in 2 processes", " in 1 process")
    ]


def test_what_does_not_take_long_is_not_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "WAIT_NOTICE_DELAY_S", 1_000.0)
    with terminal.print_if_slow("something"):
        (timer,) = (each for each in threading.enumerate() if isinstance(each, threading.Timer))
    timer.join(PATIENCE_S)
    assert not timer.is_alive() and not capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["told", "spent", "kept"])
def test_a_run_without_an_end_ends_well(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more: dict[str, Any] = {"privacy": {"budget": 3.0}} if ending == "spent" else {"capture": "relay"}
    if ending == "kept":
        more["algorithm"] = {"sigma": 1e4}  # a promise that is not weak, however many rounds there are
    spec = small_spec(None, ["north", "south"], data=LIVE, clock=CLOCK, **more)

    async def start(prepared: Any, watch: Any, stop: asyncio.Event) -> Any:
        async def feed() -> None:
            place = tmp_path / "learners.json"
            while not place.exists():  # noqa: ASYNC110 - a file is no event
                await asyncio.sleep(0.01)
            async with connect_learner(json.loads(place.read_text())["north"]) as learner:
                await learner.feed(np.ones((7, 2)), np.ones(7))
                async for status in learner.watch(0.01):
                    if status.rounds_done >= 20 and status.records_waiting == 0 and ending != "spent":
                        return stop.set()

        feeding = asyncio.ensure_future(feed())
        outcome = await run_with_local_services(
            prepared.run.spec, prepared.data, tmp_path, watch, stop, keep_log=ending == "kept"
        )
        await asyncio.gather(feeding, return_exceptions=True)
        return outcome

    assert run_and_report(prepare(spec, live=True), tmp_path, start) == 0
    said = capsys.readouterr().out
    assert "run: 2 learners, rounds until it is stopped" in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    north = summary["learners"][0]
    assert (summary["state"], summary["rounds"], north["records"] + north["records_waiting"]) == ("stopped", None, 7)
    assert north["records"] > 0 and (north["records_waiting"] == 0 or ending == "spent")
    assert ("waited when the run ended" in said) == (north["records_waiting"] > 0)
    assert north["rounds_done"] > 0
    assert (summary["capture"] is not None) == (ending != "spent")
    assert (north["record_use_loss"] is not None) == (ending == "kept") == ("loss found" in said)
    for swap in filter(None, (north["record_use_loss"], north["record_loss"])):
        assert abs(swap["loss"]) <= swap["supremum"] * (1 + 1e-9) <= swap["claimed_epsilon"] * (1 + 1e-9)
        assert 0.0 < swap["claimed_epsilon"] <= north["epsilon_spent"] * (1 + 1e-9)
    verdict = {
        "told": "Recorded, but not tested",
        "spent": "Not recorded",
        "kept": "Consistent with the promise",
    }
    assert verdict[ending] in (tmp_path / "report.html").read_text()
    assert len(north["epsilon_record_use_curve"]) == len(north["epsilon_paper_curve"]) >= north["rounds_done"]
    assert 0.0 < north["epsilon_record_use"] <= 3.0 or ending != "spent"
    assert yaml.safe_load((tmp_path / "spec.yaml").read_text())["rounds"] is None
    assert "until it is stopped" not in (tmp_path / "report.html").read_text()


async def test_a_deployment_runs_it_and_others_feed_it(tmp_path: Path) -> None:
    async with network(tmp_path, ["a", "b", "c"]) as up:
        experiment = sv.Experiment(**{**document(), "learners": ["a", "b", "c"], "clock": {"deadline_s": 100.0}})
        async with sv.connect(up.coordinator) as deployment:
            started = await deployment.start(experiment)
            for name in ("a", "b", "c"):
                async with sv.connect_learner(up.addresses[name]) as learner:
                    await learner.feed(np.ones((25, 2)), np.ones(25))
            outcome = await started.wait_for_outcome()
    assert (outcome.state, [each.records_waiting for each in outcome.statuses]) == ("finished", [0, 0, 0])
