"""Learners of one process: one whose state folder cannot be used, or that ends later, takes no other one down."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence

import structlog

from sottovoce_core.errors import CorruptStateError, SottovoceError, Unavailable
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.metrics import CATALOGUE
from sottovoce_learner.peers.in_process import InProcessTransport
from sottovoce_learner.service import Learner
from sottovoce_learner.tracing import Tracing
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.logs import describe_failure, log_start
from sottovoce_rpc.metrics import MetricSample, MetricsEndpoint, collect_common_metrics, serve_metrics
from sottovoce_rpc.server import announce, serve_until_stopped
from sottovoce_rpc.tasks import Tasks, run_cleanup

log = structlog.get_logger()

_STOP_TIMEOUT_S = 3.0
_FILES_PER_LEARNER, _FILES_PER_PROCESS = 16, 256
"""Files and connections that a learner with a few neighbours has open, and the process beside them."""
_MAX_NAMED_LEARNERS = 10
"""Learners that an error names."""


class Host:
    """The learners of one process.

    Args:
        learners: that they are.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners, self._ended = learners, dict[str, BaseException]()

    async def start(self) -> dict[str, str]:
        """Let all of them listen, and say where, or none; but for those whose state folders cannot be used.

        Raises:
            SottovoceError: one of them cannot, or all state folders cannot be used; by its name, where there are several.
        """
        addresses = dict[str, str]()
        if (many := len(self._learners)) > 1:
            log.info("starting", learners=many)
        _make_room(many)
        try:
            for learner in self._learners:
                try:
                    addresses[learner.config.name] = await self._started(learner)
                except CorruptStateError as error:
                    await self._end(learner, error)
            if not addresses:
                raise next(reversed(self._ended.values()))
        except BaseException:
            await self.stop()
            raise
        for learner in self._listening(addresses):
            config, address = learner.config, addresses[learner.config.name]
            announce("learner", name=config.name, address=address)
            whose = {"learner": config.name, "coordinator": config.coordinator}
            log_start("learner", config.credentials.principal, address=address, state=config.state_folder, **whose)
        return addresses

    async def _started(self, learner: Learner) -> str:
        try:
            return await learner.start()
        except SottovoceError as error:
            if len(self._learners) == 1:
                raise
            raise type(error)(f"learner {learner.config.name}: {error}") from None

    async def follow(self, addresses: dict[str, str]) -> None:
        """Follow until all have ended: who does is told in a line, and lets its address and its state folder go.

        Raises:
            SottovoceError: what the last one failed with.
        """
        async with Tasks() as tasks:
            listening = self._listening(addresses)
            works = [tasks.start(self._followed(each, addresses[each.config.name])) for each in listening]
            await asyncio.wait(works)
        raise next(reversed(self._ended.values()))

    def _listening(self, addresses: dict[str, str]) -> list[Learner]:
        return [each for each in self._learners if each.config.name in addresses]

    async def _followed(self, learner: Learner, address: str) -> None:
        try:
            await learner.follow(address)
        except Exception as error:  # noqa: BLE001 - a bug in the run of one learner is none of the others'
            await self._end(learner, error)

    async def _end(self, learner: Learner, error: Exception) -> None:
        """Let its address and its state folder go, while others go on."""
        name = learner.config.name
        self._ended[name] = error
        if len(self._learners) > 1:
            why = {"reason": str(error)} if isinstance(error, SottovoceError) else describe_failure(error)
            log.error("learner ended", learner=name, others=len(self._learners) - len(self._ended), **why)
            await run_cleanup(learner.stop(), _STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """End all of them."""
        await asyncio.gather(*(learner.stop() for learner in self._learners))

    def require_no_early_end(self) -> None:
        """Whoever stopped the process learns whether all had gone on until then.

        Raises:
            Unavailable: some had not.
        """
        if self._ended:
            ended, names = len(self._ended), ", ".join([*self._ended][:_MAX_NAMED_LEARNERS])
            more = f" and {ended - _MAX_NAMED_LEARNERS} more" if ended > _MAX_NAMED_LEARNERS else ""
            raise Unavailable(
                f"{ended} of {len(self._learners)} learners had ended before, the log says why: {names}{more}"
            )


def collect_metrics(learners: Sequence[Learner], refused: Refusals) -> Iterator[MetricSample]:
    """What learners of one process tell Prometheus; refused: who asked for it, and may not."""
    services = (learner.service for learner in learners)
    refusals = [refused, *(service.refusals for service in services if service is not None)]
    yield from collect_common_metrics([learner.config.credentials for learner in learners], refusals)
    for learner in learners:
        yield from learner.collect_metrics()


async def serve(
    configs: Sequence[LearnerConfig],
    *,
    with_stdin: bool = False,
    metrics: MetricsEndpoint | None = None,
    trace_interval_rounds: int | None = None,
) -> None:
    """Run learners in this process until it is told to stop.

    Args:
        configs: of the learners.
        with_stdin: stop when standard input ends.
        metrics: where all of them tell Prometheus how they are; None: nowhere.
        trace_every: of so many rounds one is traced; None: none is.

    Raises:
        SottovoceError: one of them cannot start; or one has ended by itself, and the others were stopped later.
    """
    tracing = None if trace_interval_rounds is None else Tracing(trace_interval_rounds)
    nearby, refused = InProcessTransport(), Refusals()
    learners = [Learner(config, tracing, nearby) for config in configs]
    host = Host(learners)

    async def stop(_: str) -> None:
        await host.stop()
        if tracing is not None:
            await tracing.end()

    async with serve_metrics(metrics, CATALOGUE, lambda: collect_metrics(learners, refused), refused):
        addresses = await host.start()
        await serve_until_stopped(stop, [host.follow(addresses)], stop_with_stdin=with_stdin)
    host.require_no_early_end()


def _make_room(learners: int) -> None:
    """As many open files as the system lets this process have, and a warning where that is little for so many learners."""
    needed, (soft, hard) = (
        _FILES_PER_LEARNER * learners + _FILES_PER_PROCESS,
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    if needed > soft != resource.RLIM_INFINITY:
        most = needed if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if needed > most:
            log.warning(
                "few open files are allowed", learners=learners, allowed=most, advised=needed, raise_it="ulimit -Hn"
            )
