"""A capture, fetched from the eavesdropper while a run goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sottovoce_client.watching.capture_sources import CaptureSource, FolderSource, open_eavesdropper_source
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.auditing.online.watch import Watch
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.transcript import MAX_REMEMBERED_MESSAGES, RoundReassembler
from sottovoce_eavesdropper import capture_writer
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.storage import Folder
from sottovoce_rpc.codec import RoundCodec
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S, network

NAMES = ["ann", "bob", "eve"]


async def complete(source: CaptureSource) -> Capture:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            capture = await source.fetch_latest()
            if capture is not None and capture.is_complete:
                return capture
            await asyncio.sleep(0.02)


async def test_a_capture_is_fetched_while_it_is_written(tmp_path: Path) -> None:
    """The run has begun before anybody asks; what comes is what lies in the eavesdropper's folder, each part once."""
    spec = small_spec(12, NAMES, capture="relay")
    data, run = made_up(spec), build_run(spec, 3)
    async with network(tmp_path, NAMES) as up:
        started = await up.start(spec, 3)
        async with open_eavesdropper_source(up.eavesdropper, started.run_id) as source:
            fetching = asyncio.ensure_future(complete(source))
            await up.feed(started.run_id, spec, data)
            await up.end(started.run_id)
            capture, parts = await fetching, set()
            codec, rounds = (
                RoundCodec(capture.shapes),
                RoundReassembler[Message](3, 12, run.network, MAX_REMEMBERED_MESSAGES),
            )
            watch = Watch(run, data.learners, 1e-3, (0, 1, 2))
            for part, batch in capture.read_parts(("sender", "kind", "method", "payload")):
                parts.add(part)
                capture.assemble_rounds(batch, codec, rounds)
                for t, messages in rounds.pop_complete_rounds():
                    assert watch.take(t, messages) == []  # a false alarm has probability 0.001
            assert list(capture.read_parts(("payload",), lambda part: part > max(parts))) == []
        there = await FolderSource(str(tmp_path / "captures")).fetch_latest()
    assert there is not None
    assert there.metadata == capture.metadata
    assert (watch.round, rounds.equivocations) == (12, [])
    assert all(np.isfinite(each.log_e_value) and each.is_replayable for each in watch.learners)


async def test_a_capture_that_is_being_closed_is_fetched_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last part is on its way to the disk, then its last words; who asks is told those: nothing changes after."""
    spec, closing, asked, may_end = small_spec(12, NAMES, capture="relay"), *(threading.Event() for _ in range(3))
    write, describe = CaptureWriter._write, CaptureWriter._write_metadata

    def write_slowly(self: CaptureWriter, rows: Sequence[CaptureRow]) -> None:
        if not self.is_open:
            closing.set()
            assert asked.wait(PATIENCE_S)
        write(self, rows)

    def describe_slowly(self: CaptureWriter) -> None:
        if not self.is_open:
            assert may_end.wait(PATIENCE_S)
        describe(self)

    monkeypatch.setattr(capture_writer, "_PART_INTERVAL_S", PATIENCE_S)  # all is written in the end
    monkeypatch.setattr(CaptureWriter, "_write", write_slowly)
    monkeypatch.setattr(CaptureWriter, "_write_metadata", describe_slowly)
    async with network(tmp_path, NAMES) as up:
        started = await up.start(spec, 3)
        async with open_eavesdropper_source(up.eavesdropper, started.run_id) as source:
            await up.feed(started.run_id, spec, made_up(spec))
            assert await asyncio.to_thread(closing.wait, PATIENCE_S)
            asking = asyncio.ensure_future(source.fetch_latest())
            await asyncio.sleep(0.2)  # it has asked
            asked.set()
            early, _ = await asyncio.wait([asking], timeout=0.2)
            may_end.set()
            capture = await asking
            assert not early
            assert capture is not None
            assert capture.is_complete
            await up.end(started.run_id)


async def test_a_capture_that_ends_while_it_is_fetched_has_all_that_it_tells_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are looked for, and are then written, and the capture is closed, before any file is sent."""
    spec, looking, may_send = small_spec(12, NAMES, capture="relay"), threading.Event(), threading.Event()
    names = Folder.list_names

    def slowly(self: Folder) -> list[str]:
        found = names(self)
        if Path(self.name).parent == tmp_path / "captures" and not looking.is_set():
            looking.set()
            assert may_send.wait(PATIENCE_S)
        return found

    async with network(tmp_path, NAMES) as up:
        started = await up.start(spec, 3)
        async with open_eavesdropper_source(up.eavesdropper, started.run_id) as source:
            monkeypatch.setattr(Folder, "list_names", slowly)
            asking = asyncio.ensure_future(source.fetch_latest())
            assert await asyncio.to_thread(looking.wait, PATIENCE_S)
            await up.feed(started.run_id, spec, made_up(spec))
            await up.end(started.run_id)
            may_send.set()
            early = await asking
            assert early is not None
            assert not early.is_complete
            capture = await complete(source)
            assert sum(batch.num_rows for batch in capture.read_batches()) >= 12 * 6  # and what learners say first
