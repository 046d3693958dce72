"""Watching by the logs of learners: runs of live records, whose records nobody else has."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.watching.watch import WatchRequest, open_source, watch
from sottovoce_core.arrays import Batch
from sottovoce_core.errors import CaptureError, CorruptStateError, SottovoceError, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import RunSpec
from sottovoce_learner.storage import run_log, wal
from sottovoce_learner.storage.logged_records import LoggedRecords, find_learners
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.brokers import until
from tests.client.test_watch import started
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, Network, network

NAMES = ["ann", "ben", "cleo"]
CLOCK = {"mode": "paced", "period_s": 0.005, "deadline_s": 100.0}
AFTER = pytest.mark.parametrize("after", [run_log.SNAPSHOT_AFTER_BYTES, 0], ids=["one segment", "many"])
ROWS = np.random.default_rng(7).uniform(-1.0, 1.0, (90, 2))
LABELS = np.arange(90.0) % 2


def live_spec(rounds: int | None = None) -> RunSpec:
    data = {"source": "live", "features": 2, "batch_size": 4}
    return small_spec(rounds, NAMES, data=data, clock=CLOCK, capture="relay")


@asynccontextmanager
async def keeping(folder: Path) -> AsyncIterator[Network]:
    """Learners that keep their logs."""
    async with network(folder, []) as up:
        up.keep_log = True
        for name in NAMES:
            await up.join(name)
        yield up


async def stopped(up: Network, run_id: str) -> None:
    """End a run that would go on, and wait until its capture is whole."""
    async with up._to_coordinator() as to:
        asked = coordinator_pb2.StopRunRequest(run_id=run_id)
        await coordinator_pb2_grpc.CoordinatorStub(to).StopRun(asked, timeout=PATIENCE_S)
    await up.end(run_id)


async def lived(folder: Path) -> tuple[str, dict[str, list[int]]]:
    """A run of live records at ann and ben, of which ann is started again on the way.

    Returns:
        Its number, and how many records each learner counted in which round.
    """
    async with keeping(folder) as up:
        run_id = (await up.start(live_spec(), 3)).run_id
        for name, first in (("ann", 0), ("ben", 30), ("ann", 60)):
            async with connect_learner(up.addresses[name], source=f"of {first}") as learner:
                for k in range(first, first + 30, 6):
                    await learner.feed(ROWS[k : k + 6], LABELS[k : k + 6])
                async for status in learner.watch(0.01):
                    if status.records_waiting == 0:
                        break
            if name == "ben":
                await up.leave("ann")
                await up.join("ann")
        await up.until("cleo", LearnerState.RUNNING, up.learners["cleo"].status.rounds_done + 20)
        await until(lambda: len([*(folder / "journals").glob("kept/*@ann/*.log")]) > 1)  # the end adds another one
        await stopped(up, run_id)
        sessions = {name: learner._session for name, learner in up.learners.items()}
        return run_id, {
            name: list(own.state_machine.privacy_filter.record_counts)
            for name, own in sessions.items()
            if own is not None
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("lived")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "SNAPSHOT_AFTER_BYTES", 4_096)
        return folder, *asyncio.run(lived(folder))


def followed(folder: Path, **question: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    code = watch(open_source(str(folder), None, None), WatchRequest(**question), prepare, console=console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def batches(known: LoggedRecords, rounds: int) -> list[Batch]:
    known.refresh()
    assert known.known_rounds >= rounds
    return [known.batch(t) for t in range(rounds)]


@AFTER
async def test_a_log_says_what_was_learned_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(run_log, "SNAPSHOT_AFTER_BYTES", after)
    spec = small_spec(
        40,
        NAMES,
        topology={"graph": "complete"},
        offline_intervals=[{"learner": "ben", "first_round": 9, "until_round": 21}],
    )
    data = made_up(spec)
    async with keeping(tmp_path) as up:
        outcome = await up.run(spec, data)
    assert outcome.state == "finished"
    state = tmp_path / "journals"
    assert find_learners(state, outcome.run_id) == NAMES
    for i, name in enumerate(NAMES):
        known = LoggedRecords(state, name, outcome.run_id, spec, data.n_features)
        for t, found in enumerate(batches(known, 40)):
            there = t in spec.participation.learner_participation(i, 40)
            assert found.size == (data.learners[i].batch(t).size if there else 0)
            if there:
                np.testing.assert_array_equal(found.features, data.learners[i].batch(t).features)
                np.testing.assert_array_equal(found.labels, data.learners[i].batch(t).labels)


def test_of_live_records_each_stands_in_one_round(run: tuple[Path, str, dict[str, list[int]]]) -> None:
    folder, run_id, counts = run
    segments = list((folder / "journals").glob("kept/*@ann/*.log"))
    assert len(segments) > 2
    for name, rows in (("ann", [*range(30), *range(60, 90)]), ("ben", range(30, 60)), ("cleo", [])):
        known = LoggedRecords(folder / "journals", name, run_id, live_spec(), 3)
        known.refresh()
        found = [known.batch(t) for t in range(known.known_rounds)]
        assert [each.size for each in found] == counts[name][: len(found)] and len(found) >= len(counts[name]) - 1
        np.testing.assert_array_equal(np.concatenate([each.labels for each in found]), LABELS[list(rows)])
        assert len(np.concatenate([each.features for each in found])) == len(rows)


def test_a_run_of_live_records_is_watched(run: tuple[Path, str, dict[str, list[int]]]) -> None:
    """A false alarm has a chance of 0.001."""
    folder, *_ = run
    code, said = followed(folder, state_folders=(folder / "journals",))
    assert code == 0 and "No alarm in" in said and "18,014" not in said
    assert all(name in said for name in NAMES)


def test_a_look_at_a_live_run_that_was_stopped_before_its_end_is_no_look_at_a_damaged_one(
    run: tuple[Path, str, dict[str, list[int]]], tmp_path: Path
) -> None:
    folder, *_ = run
    (capture,) = (folder / "captures").iterdir()
    shutil.copytree(capture, tmp_path / "heard")
    facts = json.loads((capture / "capture.json").read_text(encoding="utf-8"))
    facts["spec"]["rounds"] = 5000
    (tmp_path / "heard" / "capture.json").write_text(json.dumps(facts), encoding="utf-8")
    code, said = followed(tmp_path / "heard", state_folders=(folder / "journals",), once=True)
    assert code == 0 and "no alarm" in said and "of 5000: " in said
    facts["messages"] += 1
    (tmp_path / "heard" / "capture.json").write_text(json.dumps(facts), encoding="utf-8")
    code, said = followed(tmp_path / "heard", state_folders=(folder / "journals",), once=True)
    assert code == 2 and "incomplete" in said and "parts are missing" in said


@pytest.mark.slow
async def test_a_watch_waits_for_logs_that_are_behind(tmp_path: Path) -> None:
    """While the run goes on, by logs that are being written."""
    async with keeping(tmp_path) as up:
        run_id = (await up.start(live_spec(), 3)).run_id
        process = started("watch", str(tmp_path), "--state", str(tmp_path / "journals"))
        following = asyncio.ensure_future(asyncio.to_thread(process.communicate, timeout=PATIENCE_S))
        async with connect_learner(up.addresses["ann"]) as learner:
            for k in range(0, 90, 6):
                await learner.feed(ROWS[k : k + 6], LABELS[k : k + 6])
                await asyncio.sleep(0.02)
        await up.until("cleo", LearnerState.RUNNING, 100)
        await stopped(up, run_id)
        said, wrong = await following
    assert process.returncode == 0 and "No alarm in" in said, wrong


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "records of a live run are only in the write-ahead logs of its learners"),
    ({"state_folders": (Path("nowhere"),)}, "--state must name state folders with the log of one of its learners"),
    ({"canary_file": Path("c.json")}, "canaries are in the records of the spec's data source"),
    ({"learners": ("ann", "zoe")}, "--state must name state folders with the log of ann and of zoe"),
]


@pytest.mark.parametrize(("question", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_cannot_be_watched_is_said(
    run: tuple[Path, str, dict[str, list[int]]], question: dict[str, Any], text: str
) -> None:
    folder, *_ = run
    if question and "state_folders" not in question:
        question = {**question, "state_folders": (folder / "journals",)}
    with pytest.raises(SottovoceError, match=text):
        followed(folder, **question)


def test_a_run_that_nobody_records_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: wards\nrounds: null\n")
    with pytest.raises(CaptureError, match=r"must be captured, and is not: its spec needs `capture: relay`"):
        followed(tmp_path, state_folders=(tmp_path,))
    for text in ("capture: relay", "capture: mirror", "[", "7"):
        (tmp_path / "spec.yaml").write_text(text)
        with pytest.raises(CaptureError, match="--once needs a capture, and there is none"):
            followed(tmp_path, once=True)


def test_who_is_not_watched_is_said(run: tuple[Path, str, dict[str, list[int]]]) -> None:
    folder, *_ = run
    code, said = followed(folder, state_folders=(folder / "journals",), learners=("ben",))
    assert code == 0 and "Not watched: ann, cleo." in said


def test_a_log_that_was_not_kept_from_the_beginning_is_refused(
    run: tuple[Path, str, dict[str, list[int]]], tmp_path: Path
) -> None:
    folder, run_id, _ = run
    shutil.copytree(folder / "journals", tmp_path / "state")
    with pytest.raises(CorruptStateError, match="has no log of run run-0 by learner 'ann'"):
        LoggedRecords(tmp_path / "state", "ann", "run-0", live_spec(), 3)
    (tmp_path / "state" / "kept" / f"{run_id}@ann" / "00000000.log").unlink()
    with pytest.raises(CorruptStateError, match=r"has lost its beginning: start the learner with\n?.*--keep-log"):
        LoggedRecords(tmp_path / "state", "ann", run_id, live_spec(), 3)


def test_a_log_that_was_changed_ends_there(run: tuple[Path, str, dict[str, list[int]]], tmp_path: Path) -> None:
    folder, run_id, _ = run
    whole = LoggedRecords(folder / "journals", "ann", run_id, live_spec(), 3)
    whole.refresh()
    shutil.copytree(folder / "journals" / "kept" / f"{run_id}@ann", tmp_path / f"{run_id}@ann")
    path = tmp_path / f"{run_id}@ann" / "00000001.log"
    raw = bytearray(path.read_bytes())
    raw[wal.PAGE_BYTES + 60] ^= 1
    path.write_bytes(raw)
    cut = LoggedRecords(tmp_path, "ann", run_id, live_spec(), 3)
    cut.refresh()
    assert 0 < cut.known_rounds < whole.known_rounds
    code, said = followed(folder, learners=("ann",), state_folders=(tmp_path,))
    assert code == 0 and f"The logs end before the records of round {cut.known_rounds}" in said
    with pytest.raises(KeyError):
        cut.batch(cut.known_rounds)


def test_without_being_asked_for_nothing_is_kept(tmp_path: Path) -> None:
    async def forgetful() -> None:
        spec = small_spec(20, NAMES)
        async with network(tmp_path, NAMES) as up:
            assert (await up.run(spec, made_up(spec))).state == "finished"

    asyncio.run(forgetful())
    assert not (tmp_path / "journals" / "kept").exists()


def test_of_a_planned_run_the_data_source_is_not_needed(tmp_path: Path) -> None:
    async def planned() -> None:
        spec = small_spec(30, NAMES, capture="relay")
        async with keeping(tmp_path) as up:
            assert (await up.run(spec, made_up(spec))).state == "finished"

    asyncio.run(planned())

    def never(spec: RunSpec, **more: Any) -> Any:
        raise SpecError("nobody has the data source")

    console = Console(file=io.StringIO(), width=100)
    question = WatchRequest(state_folders=(tmp_path / "journals",))
    assert watch(open_source(str(tmp_path), None, None), question, never, console=console) == 0
    assert isinstance(console.file, io.StringIO) and "No alarm in 30 rounds" in console.file.getvalue()
