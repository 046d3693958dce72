"""Services that are up somewhere, from Python: start an experiment on them, follow it, stop it."""

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
"""How long runs that are told to stop may take to end, when the block that they were started in is left."""


class RunHandle:
    """An experiment under way on services, as `Deployment.start` gives it.

    Attributes:
        experiment: what runs.
        state: `connecting`, `running`, `finished`, `stopped` or `failed`, as of the last look.
    """

    def __init__(
        self, coordinator: str, experiment: Experiment, data: PlacedData, tasks: Tasks, credentials: Credentials
    ) -> None:
        self.experiment, self.state, self._data = experiment, "connecting", data
        # A few looks a second; the outcome holds all of them anyway. None: there will be no more.
        self._looks: asyncio.Queue[RunProgress | None] = asyncio.Queue()
        self._begun, self._stop = asyncio.Event(), asyncio.Event()
        self._task = tasks.start(self._run(coordinator, credentials))

    async def _run(self, coordinator: str, credentials: Credentials) -> Outcome:
        own = self.experiment
        try:
            outcome = await run_on_services(
                coordinator, own, self._data, self._look, self._stop, credentials=credentials
            )
            self.state = outcome.state
            return outcome
        finally:
            self._looks.put_nowait(None)
            self._begun.set()

    def _look(self, progress: RunProgress, state: str) -> None:
        self.state = state
        self._looks.put_nowait(progress)
        self._begun.set()

    async def wait_for_start(self) -> None:
        """Wait until the learners have the run.

        Raises:
            SottovoceError: it was refused.
        """
        await self._begun.wait()
        if self._task.done():
            self._task.result()

    async def watch(self) -> AsyncIterator[RunProgress]:
        """A few looks a second until the run is over: rounds done, epsilon spent and messages sent, by learner."""
        while (progress := await self._looks.get()) is not None:
            yield progress
        self._looks.put_nowait(None)  # for who watches after the end

    async def wait_for_outcome(self) -> Outcome:
        """How the run went, when it is over.

        Its state, final statuses, all looks, and predictions on the held-out records, `(test records,)` by learner, where the
        experiment's telemetry allows them.

        Raises:
            SottovoceError: the coordinator could not be reached any more.
        """
        return await asyncio.shield(self._task)  # who is cancelled while waiting does not end the run

    async def stop(self) -> Outcome:
        """End the run before its last round; what there is comes back, as `outcome`."""
        self._stop.set()
        return await self.wait_for_outcome()


def _records_of(experiment: Experiment) -> PlacedData:
    return prepare(experiment, live=True).data if experiment.data.is_live else experiment.records


class Deployment:
    """Services that are up, by their coordinator. `connect` makes it.

    Attributes:
        coordinator: its address, `host:port`.
    """

    def __init__(self, coordinator: str, credentials: Credentials = NO_IDENTITY) -> None:
        self.coordinator, self._credentials = coordinator, credentials
        self._started: list[RunHandle] = []
        self._tasks = Tasks()

    async def start(self, experiment: Experiment) -> RunHandle:
        """Start an experiment, and stream its records from this process into the learners, but for live ones.

        Args:
            experiment: what to run. Learners join by the names that it gives them, and wait for the coordinator to tell them.
                Several run at the same time where no learner is in two of them.

        Raises:
            SpecError: it cannot be run as it is.
            DataError: its data cannot be used.
            SottovoceError: the services refused it.
        """
        # Reading files would hold up whoever else uses the loop.
        data = await asyncio.to_thread(_records_of, experiment)
        started = RunHandle(self.coordinator, experiment, data, self._tasks, self._credentials)
        self._started.append(started)
        await started.wait_for_start()
        return started

    async def run(self, experiment: Experiment) -> Outcome:
        """Start an experiment and wait for its end; errors as `start` and `Started.outcome`."""
        return await (await self.start(experiment)).wait_for_outcome()

    async def close(self) -> None:
        """Stop what was started here and is not over: without this process nobody would bring its records."""
        for each in self._started:
            each._stop.set()
        if self._started:
            await asyncio.wait([each._task for each in self._started], timeout=_STOP_TIMEOUT_S)
        await self._tasks.end()


@asynccontextmanager
async def connect(
    address: str, *, identity: str | Path | None = None, insecure: bool = False
) -> AsyncIterator[Deployment]:
    """Services that are up, for an `async with` block. Runs that are started in it are stopped when it is left.

    Args:
        address: of the coordinator, `host:port`.
        identity: folder with the identity of an operator, `tls.crt`, `tls.key` and `ca.crt`; None: this machine only.
        insecure: without one, speak in the clear to other machines, too.

    Raises:
        SpecError: it is on another machine, and there is no identity.
        FailedPrecondition: the files of the identity cannot be used.
        Unavailable: nobody answers there within 10 s.

    >>> import asyncio
    >>> async def main() -> None:
    ...     async with connect("host:7400") as deployment:
    ...         started = await deployment.start(Experiment(rounds=500, algorithm="ldp-dol"))
    ...         async for progress in started.watch():
    ...             print(min(progress.rounds), max(progress.epsilon))
    ...         print((await started.outcome()).state)
    >>> asyncio.run(main())  # doctest: +SKIP
    500 45.3
    finished
    """
    credentials = Credentials(None if identity is None else Path(identity), insecure)
    async with open_channel(address, Role.COORDINATOR, credentials=credentials) as to:
        await wait_until_reachable(to, f"the coordinator at {address}", CONNECT_TIMEOUT_S)
    deployment = Deployment(address, credentials)
    try:
        yield deployment
    finally:
        await deployment.close()
