"""Receipts: none before the sync that it rests on, and one sync for all who wait together."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sottovoce_core.errors import FailedPrecondition
from sottovoce_core.noise import SystemNoise
from sottovoce_core.spec import parse_spec
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.ingest import group_commit
from sottovoce_learner.ingest.group_commit import _Receipts
from sottovoce_learner.servicer import LearnerServicer
from sottovoce_learner.session import Session
from sottovoce_learner.session_factory import open_session
from sottovoce_rpc.codec import to_tensor
from sottovoce_rpc.credentials import Credentials
from sottovoce_wire.v1 import learner_pb2
from tests.examples import ALLOWING
from tests.services.network import PATIENCE_S

FOR_EVER_S = 10 * PATIENCE_S


class Disk:
    """What happens in what order: syncs, and who goes on."""

    def __init__(self, streams: int, *, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self._error = error
        self.is_durable = False
        self.receipts = _Receipts(cast(Any, self))
        self.open = [ExitStack() for _ in range(streams)]
        for each in self.open:
            each.enter_context(self.receipts.register_stream())

    def make_durable(self) -> None:
        self.events.append("sync")
        if self._error is not None:
            raise self._error

    @property
    def after_sync(self) -> list[str]:
        """Who went on after the one sync that there was, before everybody."""
        first, *rest = self.events
        assert first == "sync" not in rest
        return sorted(rest)

    async def waits(self, name: str) -> None:
        await self.receipts.wait_durable()
        self.events.append(name)

    def begin(self, *names: str) -> list[asyncio.Task[None]]:
        return [asyncio.ensure_future(self.waits(name)) for name in names]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Company is waited for, however long it takes."""
    monkeypatch.setattr(group_commit, "GROUP_COMMIT_DELAY_S", FOR_EVER_S)


async def until_all_wait() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("patient")
async def test_streams_that_wait_together_share_a_sync() -> None:
    disk = Disk(3)
    for _ in range(2):
        waiting = disk.begin("a", "b")
        await until_all_wait()
        assert disk.events == []  # the third may need one, too
        await asyncio.gather(*waiting, *disk.begin("c"))
        assert disk.after_sync == ["a", "b", "c"]
        disk.events.clear()


@pytest.mark.usefixtures("patient")
async def test_who_is_alone_waits_for_nobody() -> None:
    disk = Disk(2)
    disk.open[1].close()
    await disk.waits("a")
    await disk.waits("a")
    assert disk.events == ["sync", "a", "sync", "a"]


async def test_company_that_does_not_come_is_not_waited_for_for_ever() -> None:
    disk = Disk(3)
    await asyncio.wait_for(asyncio.gather(*disk.begin("a", "b")), PATIENCE_S)
    assert disk.after_sync == ["a", "b"]


@pytest.mark.usefixtures("patient")
async def test_a_sync_for_another_reason_serves_those_who_wait() -> None:
    disk = Disk(3)
    waiting = disk.begin("a", "b")
    await until_all_wait()
    disk.receipts.commit_now()
    await asyncio.gather(*waiting)
    assert disk.after_sync == ["a", "b"]
    disk.receipts.commit_now()
    assert disk.after_sync == ["a", "b"]  # nobody waits


@pytest.mark.usefixtures("patient")
async def test_a_stream_that_breaks_while_it_waits_takes_no_other_along() -> None:
    disk = Disk(3)
    gone, stays = disk.begin("a", "b")
    await until_all_wait()
    gone.cancel()
    disk.open[0].close()
    await asyncio.gather(stays, *disk.begin("c"))
    assert gone.cancelled()
    assert disk.after_sync == ["b", "c"]


@pytest.mark.usefixtures("patient")
async def test_a_sync_that_fails_is_told_to_all_who_rest_on_it() -> None:
    disk = Disk(2, error=FailedPrecondition("records cannot be stored"))
    told = await asyncio.gather(*disk.begin("a", "b"), return_exceptions=True)
    assert [str(each) for each in told] == ["records cannot be stored"] * 2
    assert disk.events == ["sync"]


SOURCES = 4


def session(folder: Path) -> Session:
    """One that says nothing: no round is due."""
    document = {"rounds": 100, "learners": 2, "algorithm": {"name": "ldp-dol"}, "durability": "power"}
    role = RunAssignment("run-1", parse_spec(document, allow_imports=False), 3, 0, "learner-0")
    return open_session(role, SystemNoise(), folder, policy=ALLOWING)


class Feeders:
    """Feeders of one learner, each with one batch; none sends it before all are there."""

    def __init__(self, fed: Session) -> None:
        self._face, self._send = (
            LearnerServicer(
                LearnerConfig("ann", "127.0.0.1:1", credentials=Credentials(insecure=True)),
                lambda: fed,
                lambda: fed.status,
            ),
            asyncio.Event(),
        )
        self.events: list[str] = []

    async def _batches(self, source: str) -> AsyncIterator[learner_pb2.SampleBatch]:
        await self._send.wait()
        features, labels = to_tensor(np.zeros((1, 3))), to_tensor(np.zeros(1))
        yield learner_pb2.SampleBatch(source=source, sequence=0, features=features, labels=labels)

    async def _feeds(self, source: str) -> list[int]:
        found = []
        async for receipt in self._face.ingest(
            self._batches(source), cast(Any, SimpleNamespace(peer=lambda: "somewhere"))
        ):
            self.events.append("receipt")
            found.append(receipt.next_sequence)
        return found

    async def run(self) -> list[list[int]]:
        feeding = [asyncio.ensure_future(self._feeds(f"source {k}")) for k in range(SOURCES)]
        await until_all_wait()
        self._send.set()
        return await asyncio.wait_for(asyncio.gather(*feeding), PATIENCE_S)


@pytest.mark.usefixtures("patient")
async def test_feeders_get_their_receipts_after_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of every source are on the disk before any receipt."""
    fed = session(tmp_path)
    feeders, sync = Feeders(fed), os.fdatasync

    def noted(file: int) -> None:
        feeders.events.append("sync")
        sync(file)

    monkeypatch.setattr(os, "fdatasync", noted)
    receipts = await feeders.run()
    assert receipts == [[1, 1]] * SOURCES  # the first one at once, and the last word
    assert feeders.events == ["sync"] + ["receipt"] * 2 * SOURCES
    await fed.close()


async def test_no_receipt_for_what_a_closed_log_does_not_keep(tmp_path: Path) -> None:
    """The run ends between the entry and its sync."""
    fed = session(tmp_path)
    fed._log.append_records(0, b"records")
    await fed.close()
    with pytest.raises(FailedPrecondition, match="records cannot be stored: the log is closed"):
        await fed.ingestor.receipts.wait_durable()


async def test_a_disk_that_failed_at_one_receipt_gives_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not write may be gone, whatever the next sync says."""
    fed = session(tmp_path)
    fed._log.append_records(0, b"records")

    def fails(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", fails)
        with pytest.raises(FailedPrecondition, match="records cannot be stored: Input/output error"):
            await fed.ingestor.receipts.wait_durable()
    with pytest.raises(FailedPrecondition, match="records cannot be stored: an earlier sync failed"):
        await fed.ingestor.receipts.wait_durable()
    await fed.close()
