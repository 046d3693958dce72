"""A capture, fetched from the eavesdropper while a run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from sottovoce.algorithms.interface import Message
from sottovoce.lab.watch.watch import Watch
from sottovoce.running.assembly import KEPT, Assembly
from sottovoce.running.run import build_run
from sottovoce_client.lab.watching.following import InFolder, Source, at_eavesdropper
from sottovoce_eavesdropper.reading import Capture
from sottovoce_rpc.codec import RoundCodec
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, network

NAMES = ["ann", "bob", "eve"]


async def complete(source: Source) -> Capture:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            capture = await source.latest()
            if capture is not None and capture.complete:
                return capture
            await asyncio.sleep(0.02)


async def test_a_capture_is_fetched_while_it_is_written(tmp_path: Path) -> None:
    """The run has begun before anybody asks; what comes is what lies in the eavesdropper's folder, each part once."""
    spec = small_spec(12, NAMES, capture="relay")
    data, run = made_up(spec), build_run(spec, 3)
    async with network(tmp_path, NAMES) as up:
        started = await up.start(spec, 3)
        async with at_eavesdropper(up.eavesdropper, started.run_id) as source:
            fetching = asyncio.ensure_future(complete(source))
            await up.feed(started.run_id, spec, data)
            await up.end(started.run_id)
            capture, parts = await fetching, set()
            codec, rounds = RoundCodec(capture.shapes), Assembly[Message](3, 12, run.network, KEPT)
            watch = Watch(run, data.learners, 1e-3, (0, 1, 2))
            for part, batch in capture.parts_since(0):
                parts.add(part)
                capture.assemble(batch, codec, rounds)
                for t, messages in rounds.ready():
                    assert watch.take(t, messages) == []  # a false alarm has probability 0.001
            assert list(capture.parts_since(max(parts))) == []
        there = await InFolder(str(tmp_path / "captures")).latest()
    assert there is not None
    assert there.facts == capture.facts
    assert (watch.round, rounds.equivocations) == (12, [])
    assert all(np.isfinite(each.e) and each.heard for each in watch.learners)
