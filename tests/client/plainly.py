"""Programs without `await`, against a learner that runs in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.sync_learner import SyncLearner
from sottovoce_core.spec import RunSpec
from tests.client.test_live_learner import NAMES
from tests.services.network import network

T = TypeVar("T")


async def plainly(folder: Path, spec: RunSpec, program: Callable[[SyncLearner], T]) -> T:
    """What a program makes of a learner in a run."""
    async with network(folder, NAMES) as up:
        await up.start(spec, spec.data.width or 0)

        def connected() -> T:
            with connect_learner(up.addresses["ann"], patience_s=5.0) as learner:
                return program(learner)

        return await asyncio.to_thread(connected)
