"""Python client of running services: start an experiment, watch it, stop it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sottovoce_client.runs.run_client import Outcome, run_on_services
from sottovoce_client.runs.summary import RunProgress
from sottovoce_core.data import PlacedData
from sottovoce_core.experiment import Experiment, prepare
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel, wait_until_reachable
from sottovoce_rpc.tasks import Tasks

CONNECT_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 20.0
"""Seconds that runs may take to stop when the block in which they were started ends."""


class RunHandle:
    """A started experiment, created by `Deployment.start`.

    Attributes:
        experiment: The experiment.
        state: `connecting`, `running`, `finished`, `stopped` or `failed`, as of the last report.
    """

    def __init__(
        self, coordinator: str, experiment: Experiment, data: PlacedData, tasks: Tasks, credentials: Credentials
    ) -> None:
        self.experiment, self.state, self._data = experiment, "connecting", data
        # Unbounded: a few reports a second, which the outcome holds anyway. None marks the end.
        self._reports: asyncio.Queue[RunProgress | None] = asyncio.Queue()
        self._has_started, self._stop = asyncio.Event(), asyncio.Event()
        self._task = tasks.start(self._run(coordinator, credentials))

    def __repr__(self) -> str:
        return f"RunHandle of {self.experiment}: {self.state}"

    async def _run(self, coordinator: str, credentials: Credentials) -> Outcome:
        own = self.experiment
        try:
            outcome = await run_on_services(
                coordinator, own, self._data, self._add_report, self._stop, credentials=credentials
            )
            self.state = outcome.state
            return outcome
        finally:
            self._reports.put_nowait(None)
            self._has_started.set()

    def _add_report(self, progress: RunProgress, state: str) -> None:
        self.state = state
        self._reports.put_nowait(progress)
        self._has_started.set()

    async def wait_for_start(self) -> None:
        """Wait until the learners have the run.

        Raises:
            SottovoceError: The services refused the run.
        """
        await self._has_started.wait()
        if self._task.done():
            self._task.result()

    async def watch(self) -> AsyncIterator[RunProgress]:
        """Yield a few reports a second until the run has ended: rounds done, epsilon spent and messages sent, by learner."""
        while (progress := await self._reports.get()) is not None:
            yield progress
        self._reports.put_nowait(None)  # for a later call

    async def wait_for_outcome(self) -> Outcome:
        """Wait for the end of the run and return its outcome.

        The outcome holds the state, the final statuses, all reports, and predictions on the held-out records, `(test records,)`
        by learner, where the experiment's telemetry allows them.

        Raises:
            SottovoceError: The connection to the coordinator was lost.
        """
        return await asyncio.shield(self._task)  # cancelling this call does not end the run

    async def stop(self) -> Outcome:
        """Stop the run before its last round and return the outcome so far."""
        self._stop.set()
        return await self.wait_for_outcome()


def _load_records(experiment: Experiment) -> PlacedData:
    return prepare(experiment, live=True).data if experiment.data.is_live else experiment.records


class Deployment:
    """Running services, reached through their coordinator. Created by `connect`.

    Attributes:
        coordinator: Address of the coordinator, `host:port`.
    """

    def __init__(self, coordinator: str, credentials: Credentials = NO_IDENTITY) -> None:
        self.coordinator, self._credentials = coordinator, credentials
        self._started: list[RunHandle] = []
        self._tasks = Tasks()

    def __repr__(self) -> str:
        return f"Deployment at {self.coordinator}, {len(self._started)} started here"

    async def start(self, experiment: Experiment) -> RunHandle:
        """Start an experiment; unless its records are live, this process streams them to the learners.

        Args:
            experiment: The experiment. Its learners must have joined the coordinator under the names in its spec. Several
                experiments can run at the same time if no learner is in two of them.

        Raises:
            SpecError: The experiment is invalid.
            DataError: Its data cannot be used.
            SottovoceError: The services refused it.
        """
        data = await asyncio.to_thread(_load_records, experiment)  # reading files would block the event loop
        started = RunHandle(self.coordinator, experiment, data, self._tasks, self._credentials)
        self._started.append(started)
        await started.wait_for_start()
        return started

    async def run(self, experiment: Experiment) -> Outcome:
        """Start an experiment and wait for its end; errors as of `start` and `RunHandle.wait_for_outcome`."""
        return await (await self.start(experiment)).wait_for_outcome()

    async def close(self) -> None:
        """Stop the runs started here that have not ended: without this process they would get no more records."""
        for each in self._started:
            each._stop.set()
        if self._started:
            await asyncio.wait([each._task for each in self._started], timeout=_STOP_TIMEOUT_S)
        await self._tasks.end()


@asynccontextmanager
async def connect(
    address: str, *, identity: str | Path | None = None, insecure: bool = False
) -> AsyncIterator[Deployment]:
    """Connect to running services for an `async with` block. Runs started in the block are stopped when it ends.

    Args:
        address: Address of the coordinator, `host:port`.
        identity: Folder with the identity of an operator, `tls.crt`, `tls.key` and `ca.crt`; None: this machine only.
        insecure: Without an identity, allow unencrypted connections to other machines.

    Raises:
        SpecError: The coordinator is on another machine, and there is no identity.
        FailedPrecondition: The files of the identity cannot be used.
        Unavailable: The coordinator does not answer within 10 s.

    >>> import asyncio
    >>> async def main() -> None:
    ...     async with connect("host:7400") as deployment:
    ...         started = await deployment.start(Experiment(rounds=500, algorithm="ldp-dol"))
    ...         async for progress in started.watch():
    ...             print(min(progress.rounds), max(progress.epsilon))
    ...         print((await started.wait_for_outcome()).state)
    >>> asyncio.run(main())  # doctest: +SKIP
    500 45.3
    finished
    """
    credentials = Credentials(None if identity is None else Path(identity), insecure)
    async with open_channel(address, Role.COORDINATOR, credentials=credentials) as channel:
        await wait_until_reachable(channel, f"the coordinator at {address}", CONNECT_TIMEOUT_S)
    deployment = Deployment(address, credentials)
    try:
        yield deployment
    finally:
        await deployment.close()
