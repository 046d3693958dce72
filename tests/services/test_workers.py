"""An eavesdropper of several processes: the capture is that of one process, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.service import Eavesdropper
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.learner_status import LearnerState
from tests.examples import made_up, small_spec
from tests.services.capturing import said_again
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, Network, network
from tests.services.test_gaps import heard
from tests.services.test_run import SHAPES, by_round, recorded

NAMES, ROUNDS = ["ann", "ben", "cleo"], 200
CODEC = RoundCodec(SHAPES)
TRIANGLE = {"graph": {"kind": "complete"}}


def spec_of(capture: str = "relay", rounds: int = ROUNDS) -> RunSpec:
    clock = {"mode": "paced", "period_s": 0.005, "window": 20, "deadline_s": PATIENCE_S}
    return small_spec(rounds, NAMES, capture=capture, clock=clock, topology=TRIANGLE)


def kinds(capture: Capture) -> Counter[Any]:
    """How many rows of each kind are of each sender on each edge."""
    columns = ("caller", "callee", "sender", "kind")
    return Counter(tuple(row.values()) for batch in capture.read_batches(columns) for row in batch.to_pylist())


def processes(up: Network) -> list[int]:
    """The process ids of the workers."""
    assert up.eavesdropping is not None
    pool = up.eavesdropping._captures.pool
    return [each.pid for each in pool._processes.values() if each is not None and each.returncode is None]


@pytest.mark.parametrize("secured", [False, True])
async def test_a_capture_of_several_workers_is_that_of_one_process(tmp_path: Path, secured: bool) -> None:
    """The same rows of every edge, the same transcript, the same counts; equal to the simulation."""
    spec = spec_of(rounds=50)
    data = made_up(spec)
    noise, sent, _ = recorded(spec, data, tmp_path / "noise.npz")
    found = list[tuple[Any, ...]]()
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        ids = Identities(folder / "ids") if secured else None
        async with network(folder, NAMES, noise=noise, identities=ids, workers=workers) as up:
            outcome = await up.run(spec, data)
            assert len(processes(up)) == workers
        assert outcome.state == "finished"
        capture = open_capture(outcome.capture_location or "")
        assert capture.is_complete and capture.metadata["detections"] == []
        assert capture.metadata["unchecked_reason"] is None
        transcript = capture.read_transcript(SHAPES, 3)
        np.testing.assert_array_equal(by_round(transcript), sent[:, :, 0])
        facts = capture.metadata
        found.append((kinds(capture), facts["messages"], facts["bytes"], [each["caller"] for each in facts["routes"]]))
    assert found[0] == found[1]


async def test_a_wiretap_of_several_workers_counts_all_records(tmp_path: Path) -> None:
    spec = spec_of("wiretap", rounds=20)
    async with network(tmp_path, NAMES, workers=2) as up:
        outcome = await up.run(spec, made_up(spec))
        assert up.eavesdropping is not None
        (session,) = up.eavesdropping._captures.sessions.values()
        traffic = session.writer.channel_traffic
    capture = open_capture(outcome.capture_location or "")
    counts = capture.ciphertext
    assert outcome.state == "finished" and capture.is_complete and counts is not None
    rows = kinds(capture)
    assert counts.connections == sum(count for key, count in rows.items() if key[3] == "opened") >= 3
    assert counts.records == sum(count for key, count in rows.items() if key[3] == "ciphertext")
    assert sum(messages for messages, _ in traffic.values()) == counts.records and len(traffic) == 6


@pytest.mark.parametrize("deaths", [1, 3])
async def test_a_worker_that_is_killed_is_started_again_and_what_it_lost_is_named(tmp_path: Path, deaths: int) -> None:
    """Its relays come back on their ports, the run goes on, and rounds that are missing are in gaps of their channel."""
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, workers=2) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        for death in range(deaths):
            await up.until("ann", LearnerState.RUNNING, 30 + 80 * death)
            alive = processes(up)
            os.kill(alive[death % len(alive)], signal.SIGKILL)
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    capture = open_capture(outcome.capture_location or "")
    said_again(capture)
    assert capture.metadata["detection_count"] == 0
    lost = Counter[tuple[int, int, int]]()
    for gap in capture.metadata["gaps"]:
        lost.update((gap["sender"], gap["receiver"], t) for t in range(gap["from"], gap["to"]))
    captured = set[tuple[int, int, int]]()
    for batch in capture.read_batches(("caller", "callee", "sender", "kind", "payload")):
        for caller, callee, sender, kind, payload in (row.values() for row in batch.to_pylist()):
            if kind == "message":
                captured.add((sender, caller + callee - sender, CODEC.decode(payload)[0]))
    every = {(i, j, t) for i in range(3) for j in range(3) if i != j for t in range(400)}
    assert every - captured <= set(lost)
    assert capture.is_complete == (not lost)
    assert capture.count_messages()[0] == capture.metadata["messages"]


async def test_an_eavesdropper_with_workers_is_resumed(tmp_path: Path) -> None:
    """It ends with its workers; the next one serves the same ports, by workers of its own."""
    spec = spec_of(rounds=400)
    async with network(tmp_path, NAMES, workers=2) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 30)
        old = up.eavesdropping
        assert old is not None and old.server is not None
        for pid in processes(up):
            os.kill(pid, signal.SIGKILL)
        old._captures.pool._is_stopping = True
        for session in old._captures.sessions.values():
            session.writer.is_open, session.is_closed = False, True
            await session.writer_tasks.end()
        await old.server.server.stop(None)
        up.eavesdropping = Eavesdropper(replace(old.config, listen=up.eavesdropper))
        assert await up.eavesdropping.start() == up.eavesdropper
        outcome = await running
        assert len(processes(up)) == 2
        await old.stop()
    capture = open_capture(outcome.capture_location or "")
    assert outcome.state == "finished", outcome.detail
    assert capture.metadata["detection_count"] == 0
    assert capture.count_messages()[0] == capture.metadata["messages"]
    assert all(len(rounds) > 200 for rounds in heard(capture))
