"""Learners of one process. A learner that fails or ends does not stop the others."""

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
"""Open files and connections of a learner with a few neighbours, and of the process itself."""
_MAX_NAMED_LEARNERS = 10
"""Maximum number of learners named in an error."""


class Host:
    """The learners of one process.

    Args:
        learners: learners to run.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners, self._ended = learners, dict[str, BaseException]()

    async def start(self) -> dict[str, str]:
        """Let all learners listen, except those with an unusable state folder; return and announce their addresses.

        Raises:
            SottovoceError: one of them cannot start, or no state folder can be used; with the learner's name, where there
                are several.
        """
        addresses = dict[str, str]()
        if (count := len(self._learners)) > 1:
            log.info("starting", learners=count)
        _raise_file_limit(count)
        try:
            for learner in self._learners:
                try:
                    addresses[learner.config.name] = await self._start_learner(learner)
                except CorruptStateError as error:
                    await self._end(learner, error)
            if not addresses:
                raise next(reversed(self._ended.values()))
        except BaseException:
            await self.stop()
            raise
        for learner in self._list_listening(addresses):
            config, address = learner.config, addresses[learner.config.name]
            announce("learner", name=config.name, address=address)
            names = {"learner": config.name, "coordinator": config.coordinator}
            log_start("learner", config.credentials.principal, address=address, state=config.state_folder, **names)
        return addresses

    async def _start_learner(self, learner: Learner) -> str:
        try:
            return await learner.start()
        except SottovoceError as error:
            if len(self._learners) == 1:
                raise
            raise type(error)(f"learner {learner.config.name}: {error}") from None

    async def follow(self, addresses: dict[str, str]) -> None:
        """Run until all have ended. A learner that ends is logged and releases its address and state folder.

        Raises:
            SottovoceError: the error of the last one.
        """
        async with Tasks() as tasks:
            listening = self._list_listening(addresses)
            followers = [tasks.start(self._follow_learner(each, addresses[each.config.name])) for each in listening]
            await asyncio.wait(followers)
        raise next(reversed(self._ended.values()))

    def _list_listening(self, addresses: dict[str, str]) -> list[Learner]:
        return [each for each in self._learners if each.config.name in addresses]

    async def _follow_learner(self, learner: Learner, address: str) -> None:
        try:
            await learner.follow(address)
        except Exception as error:  # noqa: BLE001 - a bug in one learner's run must not end the others
            await self._end(learner, error)

    async def _end(self, learner: Learner, error: Exception) -> None:
        """Release the learner's address and state folder, while others go on."""
        name = learner.config.name
        self._ended[name] = error
        if len(self._learners) > 1:
            why = {"reason": str(error)} if isinstance(error, SottovoceError) else describe_failure(error)
            log.error("learner ended", learner=name, others=len(self._learners) - len(self._ended), **why)
            await run_cleanup(learner.stop(), _STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """End all learners."""
        await asyncio.gather(*(learner.stop() for learner in self._learners))

    def require_no_early_end(self) -> None:
        """Check that all learners ran until the process was stopped.

        Raises:
            Unavailable: some had ended earlier.
        """
        if self._ended:
            ended, names = len(self._ended), ", ".join([*self._ended][:_MAX_NAMED_LEARNERS])
            more = f" and {ended - _MAX_NAMED_LEARNERS} more" if ended > _MAX_NAMED_LEARNERS else ""
            raise Unavailable(
                f"{ended} of {len(self._learners)} learners had ended before, see the log for the reasons: {names}{more}"
            )


def collect_metrics(learners: Sequence[Learner], refused: Refusals) -> Iterator[MetricSample]:
    """Yield the metrics of all learners; `refused` counts callers refused by the metrics endpoint."""
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
    """Run learners in this process until it is stopped.

    Args:
        configs: settings of the learners.
        with_stdin: stop when standard input ends.
        metrics: endpoint of their Prometheus metrics; None: none.
        trace_interval_rounds: trace one in this many rounds; None: no tracing.

    Raises:
        SottovoceError: one of them cannot start; or one has ended by itself, and the others were stopped later.
    """
    tracing = None if trace_interval_rounds is None else Tracing(trace_interval_rounds)
    transport, refused = InProcessTransport(), Refusals()
    learners = [Learner(config, tracing, transport) for config in configs]
    host = Host(learners)

    async def stop(_: str) -> None:
        await host.stop()
        if tracing is not None:
            await tracing.end()

    async with serve_metrics(metrics, CATALOGUE, lambda: collect_metrics(learners, refused), refused):
        addresses = await host.start()
        await serve_until_stopped(stop, [host.follow(addresses)], stop_with_stdin=with_stdin)
    host.require_no_early_end()


def _raise_file_limit(learners: int) -> None:
    """Raise the limit of open files to what these learners need; warn where the system allows less."""
    needed, (soft, hard) = (
        _FILES_PER_LEARNER * learners + _FILES_PER_PROCESS,
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    if needed > soft != resource.RLIM_INFINITY:
        allowed = needed if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if needed > allowed:
            log.warning(
                "few open files are allowed", learners=learners, allowed=allowed, advised=needed, hint="ulimit -Hn"
            )
