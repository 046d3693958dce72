"""A whole run from one command: services, data, watching, and a clean end whatever happens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sottovoce.data import PlacedData
from sottovoce.errors import SottovoceError, Unavailable
from sottovoce.spec import RunSpec
from sottovoce.text import plain
from sottovoce_client.documents import write_json
from sottovoce_client.running.local import LocalServices
from sottovoce_client.running.operate import BY_OPERATOR, BY_SIGTERM, Interrupted, Outcome, Stop, Watcher, run_on
from sottovoce_rpc.tasks import Tasks

_AFTER_DEATH_S = 1.0


class ServiceDied(SottovoceError):
    """A service ended by itself, and took the run with it."""


async def run_up(
    spec: RunSpec,
    data: PlacedData,
    folder: Path,
    watch: Watcher,
    stop: asyncio.Event,
    **services: Any,
) -> Outcome:
    """Start all services here, run the spec, stop them.

    Args:
        spec: what to run.
        data: streamed into the learners by this process.
        folder: for journals, captures and logs.
        watch: called a few times a second.
        stop: when set, the run is stopped.
        services: as `LocalServices` has them.

    Raises:
        SottovoceError: a service did not start, or the run was refused.
        ServiceDied: a service died, and the run's outcome with it.
        Interrupted: told to stop before the run had begun.
    """
    local = LocalServices(spec, folder, **services)
    print(f"starting {local.planned} ...", flush=True)
    async with local as up:
        if stop.is_set():
            raise Interrupted("stopped before the run had begun")
        if spec.data.live:
            _tell_feeders(up.learners, folder)
        with _told(up, folder / "services.json"):
            running = run_on(up.coordinator, spec, data, watch, stop, credentials=up.credentials)
            return await while_alive(up, running, stop)


@contextmanager
def _told(services: LocalServices, place: Path) -> Iterator[None]:
    """Where the services are, for `sottovoce console`, while they are there."""
    identity = services.credentials.folder
    at = {"coordinator": services.coordinator, "eavesdropper": services.eavesdropper}
    write_json(place, {**at, "identity": None if identity is None else str(identity.resolve())})
    try:
        yield
    finally:
        place.unlink(missing_ok=True)


def _tell_feeders(learners: Mapping[str, str], folder: Path) -> None:
    """Where records are to be brought, for people and, in `learners.json`, for programs."""
    write_json(folder / "learners.json", learners)
    for name, address in learners.items():
        print(plain(f"{name} takes records at {address}"))


async def while_alive(services: LocalServices, run: Coroutine[Any, Any, Outcome], stop: asyncio.Event) -> Outcome:
    """The outcome of a run, unless a service dies.

    Raises:
        SottovoceError: what the run failed with.
        ServiceDied: a service died, and the run's outcome with it.
    """
    async with Tasks() as tasks:
        running, death = tasks.start(run), tasks.start(services.death())
        await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
        if running.done() and isinstance(running.exception(), Unavailable):
            await asyncio.wait([death], timeout=_AFTER_DEATH_S)  # the reason, where a service has died
        if not death.done():
            return running.result()
        return await _after_death(death.result(), running, stop)


async def _after_death(what: str, running: asyncio.Task[Outcome], stop: asyncio.Event) -> Outcome:
    """A service has died: the run is over; take what the others still tell."""
    stop.set()
    await asyncio.wait([running], timeout=_AFTER_DEATH_S)
    if running.done() and not running.cancelled() and running.exception() is None:
        return replace(running.result(), state="failed", detail=what)
    raise ServiceDied(what)


def run_async(work: Callable[[asyncio.Event], Coroutine[Any, Any, Any]]) -> Any:
    """Run to the end. The first Ctrl-C or SIGTERM sets the event that `work` was given, the second one cancels it.

    Raises:
        Interrupted: cancelled; its cleanup has run.
    """

    async def main() -> Any:
        stop, task = Stop(), asyncio.current_task()

        def tell(reason: str) -> None:
            if stop.is_set() and task is not None:
                task.cancel()
            if not stop.is_set():
                stop.reason = reason
            stop.set()

        for number, reason in ((signal.SIGINT, BY_OPERATOR), (signal.SIGTERM, BY_SIGTERM)):
            asyncio.get_running_loop().add_signal_handler(number, tell, reason)
        try:
            return await work(stop)
        except asyncio.CancelledError:
            raise Interrupted("told to stop twice: ended at once") from None

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)  # a loop leaves that of the system
