"""Audits on real services: labelled captures, nothing left for the next run, an audit that can be repeated, and early ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

from sottovoce_client.auditing import network as audit_network
from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.auditing.audit_files import RunLedgerWriter
from sottovoce_client.auditing.captures import audit_captures, list_captures, load_captured_runs
from sottovoce_client.auditing.network import RunFailed, audit_on_network, draw_seeded_coins
from sottovoce_client.runs.run_client import STOPPED_BY_OPERATOR, Outcome, RunInterrupted
from sottovoce_client.terminal import ignore_progress
from sottovoce_coordinator import service as coordinator_service
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_learner import coordinator_client
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import LearnerStatus
from tests.client.progress import Reported
from tests.examples import made_up, small_spec
from tests.services.network import network

RUNS = 5
ASKED = AuditRequest(runs=RUNS, seed=3)


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedRun:
    features = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    document = {
        "name": "small",
        "rounds": 6,
        "learners": ["a", "b"],
        "algorithm": {"name": "ldp-dol", "sigma": 5.0},
        "data": {"source": str(tmp_path / "records.npz")},
        "durability": "process",
        "privacy": {"budget": 1e-6},
        "telemetry": {"accuracy": True, "predict": True},
    }
    return prepare(parse_spec(document, allow_imports=True))


@pytest.mark.slow
def test_runs_on_real_services_are_labelled_and_can_be_audited_again(prepared: PreparedRun, tmp_path: Path) -> None:
    folder, said = tmp_path / "out", Reported()
    audited = ASKED.plan(prepared)
    done = audit_on_network(audited, report_progress=said.say, folder=folder, seeded_coins=True)
    captures = list_captures(open_folder(folder / "captures"))
    assert [capture.metadata["replica"] for capture in captures] == list(range(2 * RUNS))
    assert [capture.metadata["world"] for capture in captures] == draw_seeded_coins(audited).tolist()
    spec = captures[0].metadata["spec"]
    assert (spec["capture"], spec["privacy"]["budget"]) == ("relay", None)
    assert not spec["telemetry"]["accuracy"] and not spec["telemetry"]["predict"]
    left = {path.suffix for path in (folder / "learner-state").iterdir()}
    assert left == {".lock", ".high_water_mark", ".runs", ".identity"}  # what runs have cost, and nothing of a run
    assert any(f"running: {2 * RUNS} of {2 * RUNS} runs, " in text for text in said)
    assert len(done.run_worlds) == 2 * RUNS and "10 runs of real services" in done.source
    assert done.run_losses is not None and done.largest_loss <= done.findings.claim

    again = audit_captures(*load_captured_runs(str(folder), ASKED, prepare, said.say), said.say)
    np.testing.assert_array_equal(again.run_worlds, done.run_worlds)
    np.testing.assert_array_equal(again.noise, done.noise)
    assert again.largest_loss == done.largest_loss and again.findings.bounds == done.findings.bounds


def test_coins_are_fair_and_follow_the_seed(prepared: PreparedRun) -> None:
    """A fair coin is outside 4.9 standard deviations with probability 1e-6."""
    audited = AuditRequest(runs=5000, seed=1).plan(prepared)
    tossed = draw_seeded_coins(audited)
    assert abs(tossed.mean() - 0.5) < 4.9 * 0.5 / np.sqrt(len(tossed))
    np.testing.assert_array_equal(tossed, draw_seeded_coins(audited))
    assert (tossed != draw_seeded_coins(AuditRequest(runs=5000, seed=2).plan(prepared))).any()


class Services:
    """Nothing is started, and nothing dies."""

    coordinator, credentials = "", Credentials()

    def __init__(self, spec: RunSpec, folder: Path, *, tls: bool) -> None:
        self.spec = spec

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def wait_for_exit(self) -> str:
        await asyncio.Event().wait()
        return ""


def ending(monkeypatch: pytest.MonkeyPatch, state: str, detail: str, whole: int = 2) -> None:
    """After so many runs one ends like this."""
    made: list[int] = []

    async def run_on(*args: Any, replica: int, **more: Any) -> Outcome:
        made.append(replica)
        end = ("finished", "") if len(made) <= whole else (state, detail)
        return Outcome(f"run-{replica}", *end, 1.0, (), (), None, ())

    monkeypatch.setattr(audit_network, "LocalServices", Services)
    monkeypatch.setattr(audit_network, "run_on_services", run_on)


@pytest.mark.parametrize(
    ("state", "detail", "error", "why"),
    [
        ("stopped", STOPPED_BY_OPERATOR, RunInterrupted, "the operator stopped the run"),
        ("failed", "a failed: why", RunFailed, "a failed: why"),
    ],
)
def test_an_early_end_says_what_is_kept_and_how_to_go_on(
    prepared: PreparedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    detail: str,
    error: Any,
    why: str,
) -> None:
    ending(monkeypatch, state, detail)
    audited = ASKED.plan(prepared)
    kept = rf"2 of 10 runs were made: {why}; to audit them: sottovoce audit --captures {tmp_path}/out/captures"
    with pytest.raises(error, match=kept):
        audit_on_network(audited, report_progress=ignore_progress, folder=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "captures" / "worlds.json").read_text())["learner"] in ("a", "b")
    ending(monkeypatch, state, detail, whole=0)
    with pytest.raises(error, match=rf"^0 of 10 runs were made: {why}$"):
        audit_on_network(audited, report_progress=ignore_progress, folder=tmp_path / "other")


def test_a_service_that_dies_is_named_and_nobody_was_told_to_stop(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(Services):
        async def wait_for_exit(self) -> str:
            return "a (process 7) died"

    async def run_on(*args: Any, replica: int, **more: Any) -> Outcome:
        await args[4].wait()  # its end is asked for when somebody has died
        return Outcome(f"run-{replica}", "failed", "why", 1.0, (), (), None, ())

    monkeypatch.setattr(audit_network, "LocalServices", Dying)
    monkeypatch.setattr(audit_network, "run_on_services", run_on)
    with pytest.raises(RunFailed, match=r"^0 of 10 runs were made: a \(process 7\) died$"):
        audit_on_network(ASKED.plan(prepared), report_progress=ignore_progress, folder=tmp_path)


def test_a_full_disk_says_what_is_kept(prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending(monkeypatch, "finished", "")
    write = RunLedgerWriter.record_end

    def ended(ledger: RunLedgerWriter, replica: int, *more: str, **also: Any) -> None:
        if replica == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(ledger, replica, *more, **also)

    monkeypatch.setattr(RunLedgerWriter, "record_end", ended)
    with pytest.raises(
        RunFailed,
        match=r"^2 of 10 runs were made: .*No space left on device; to audit them: sottovoce audit --captures ",
    ):
        audit_on_network(ASKED.plan(prepared), report_progress=ignore_progress, folder=tmp_path)


def revealed(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "captures" / "runs.jsonl").read_text().splitlines()]
    return [line["world"] for line in lines if "nonce" in line]


def test_coins_come_from_entropy_unless_a_test_gives_a_seed(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows the seed does not know them: 80 coins are equal to the seed's with probability below 1e-24."""
    audited = AuditRequest(runs=40, seed=3).plan(prepared)
    runs = 2 * audited.runs
    for name, more in (("drawn", {}), ("seeded", {"seeded_coins": True})):
        ending(monkeypatch, "finished", "", whole=runs)
        with pytest.raises(CaptureError, match="needs a capture, and there is none"):
            audit_on_network(audited, report_progress=ignore_progress, folder=tmp_path / name, **more)
    assert revealed(tmp_path / "seeded") == draw_seeded_coins(audited).tolist()
    drawn = revealed(tmp_path / "drawn")
    assert len(drawn) == runs >= 80 and drawn != draw_seeded_coins(audited).tolist() and {*drawn} == {0, 1}


def test_records_and_coins_are_their_users_alone(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending(monkeypatch, "finished", "", whole=2 * RUNS)
    before = os.umask(0o022)
    try:
        with pytest.raises(CaptureError, match="needs a capture, and there is none"):
            audit_on_network(ASKED.plan(prepared), report_progress=ignore_progress, folder=tmp_path)
    finally:
        os.umask(before)
    there = [tmp_path / "captures", *(tmp_path / "captures").iterdir()]
    assert {each.name: each.stat().st_mode & 0o777 for each in there} == {
        "captures": 0o700,
        "worlds.json": 0o600,
        "runs.jsonl": 0o600,
    }


def test_a_run_that_fails_is_an_outcome_and_the_others_follow(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_network, "LocalServices", Services)

    async def run_on(*args: Any, replica: int, **more: Any) -> Outcome:
        state = "failed" if replica % 4 == 1 else "finished"
        return Outcome(f"run-{replica}", state, "why", 1.0, (), (), None, ())

    monkeypatch.setattr(audit_network, "run_on_services", run_on)
    with pytest.raises(CaptureError, match="needs a capture, and there is none"):
        audit_on_network(ASKED.plan(prepared), report_progress=ignore_progress, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "captures" / "runs.jsonl").read_text().splitlines()]
    ends = [line["outcome"] for line in lines if "outcome" in line]
    assert ends == ["finished", "failed", "finished", "finished"] * 2 + ["finished", "failed"]


def test_noise_that_can_be_repeated_stands_in_the_ledger(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_network, "LocalServices", Services)

    async def run_on(*args: Any, replica: int, **more: Any) -> Outcome:
        statuses = tuple(LearnerStatus(name, noise_is_not_private=replica == 2) for name in ("a", "b"))
        return Outcome(f"run-{replica}", "finished", "", 1.0, statuses, (), None, ())

    monkeypatch.setattr(audit_network, "run_on_services", run_on)
    with pytest.raises(CaptureError, match="needs a capture, and there is none"):
        audit_on_network(ASKED.plan(prepared), report_progress=ignore_progress, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "captures" / "runs.jsonl").read_text().splitlines()]
    assert [line["replica"] for line in lines if line.get("seeded")] == [2]


def test_captures_of_other_runs_are_not_mixed_in(prepared: PreparedRun, tmp_path: Path) -> None:
    (tmp_path / "captures" / "old").mkdir(parents=True)
    with pytest.raises(SpecError, match="captures must be empty or missing"):
        audit_on_network(ASKED.plan(prepared), report_progress=ignore_progress, folder=tmp_path)


def test_decisions_cross_no_channel(prepared: PreparedRun, tmp_path: Path) -> None:
    audited: AuditPlan = AuditRequest(runs=RUNS, threat=ThreatModel.OUTPUT).plan(prepared)
    with pytest.raises(SpecError, match="--threat output"):
        audit_on_network(audited, report_progress=ignore_progress, folder=tmp_path)
    assert not (tmp_path / "captures").exists()


async def test_runs_follow_each_other_without_waiting_for_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks lie ten minutes here, and the network gives up after half a minute."""
    spec = small_spec(4, ["a", "b"], capture="relay")
    data = made_up(spec)
    async with network(tmp_path, spec.names) as up:
        assert (await up.run(spec, data)).state == "finished"
        monkeypatch.setattr(coordinator_service, "WATCH_INTERVAL_S", 600.0)
        monkeypatch.setattr(coordinator_client, "REPORT_INTERVAL_S", 600.0)
        await asyncio.sleep(0.4)  # until learners look at the old run for that long
        assert [(await up.run(spec, data)).state for _ in range(2)] == ["finished"] * 2
