"""Traces: when each step of a round was over, on its way to an OpenTelemetry collector, where a learner's owner wants that.

All learners' spans of a round are of one trace, for its number follows from the run and the round: nothing more is said to
anybody. A span has times, the learner's name, the run and the round, and never a number or a text of anything else. The times
themselves may depend on records. A session that is not traced knows nothing of this.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from sottovoce_core.errors import SpecError
from sottovoce_core.optional import import_optional
from sottovoce_learner.session import Session
from sottovoce_learner.session_factory import open_session
from sottovoce_rpc.addresses import parse_url

log = structlog.get_logger()

EXTRA, _PACKAGES = "trace", "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc"
_MODULES = (
    "trace",
    "context",
    "sdk.trace",
    "sdk.trace.export",
    "sdk.trace.id_generator",
    "sdk.resources",
    "exporter.otlp.proto.grpc.trace_exporter",
)
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MAX_REASON_CHARS, _SHUTDOWN_TIMEOUT_S = 300, 2.0
ROUND = "round"
STEPS = ("granted", "said", "records", "heard", "learned")
"""Of a round, one after the other; within `said`, and where an absence follows within `learned`: `written`."""


class Tracing:
    """Sends spans of the learners of a process, as the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT` and so on).

    Args:
        every: of so many rounds one is traced.

    Raises:
        SpecError: the extra is not installed, or the environment asks for another protocol than gRPC, or names no address.
    """

    def __init__(self, interval_rounds: int = 1) -> None:
        if others := {found for each in _PROTOCOLS if (found := os.environ.get(each, "grpc")) != "grpc"}:
            raise SpecError(
                f"--trace speaks OTLP over gRPC: {' and '.join(_PROTOCOLS)} must say grpc, got {others.pop()}"
            )
        for variable in _ENDPOINTS:
            if at := os.environ.get(variable):
                parse_url(at, {"http": 4317, "https": 4317}, variable, allow_path=True)
        api, context, sdk, export, numbers, resources, otlp = map(_module, _MODULES)
        _tell_in_our_log()
        self.interval_rounds, self._ids = interval_rounds, _ids(numbers)
        self._within, self._nowhere = api.set_span_in_context, context.Context()
        own = resources.Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "sottovoce-learner")})
        self._provider = sdk.TracerProvider(id_generator=self._ids, resource=own, shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("sottovoce")

    @staticmethod
    def compute_trace_id(run_id: str, t: int) -> int:
        """The trace of a round: 128 bits that all its learners know."""
        return int.from_bytes(hashlib.blake2b(f"{run_id}\0{t}".encode(), digest_size=16).digest())

    def open_session(self, *args: Any, **more: Any) -> Session:
        """A session whose rounds are traced."""
        made = open_session(*args, session_class=_TracedSession, **more)
        assert isinstance(made, _TracedSession)  # noqa: S101 - asked for
        made.tracing = self
        return made

    def begin(self, learner: str, run_id: str, t: int, since: int) -> Any:
        """A round's span."""
        self._ids.trace = self.compute_trace_id(run_id, t)
        facts = {"sottovoce.learner": learner, "sottovoce.run": run_id, "sottovoce.round": t}
        return self._tracer.start_span(ROUND, self._nowhere, attributes=facts, start_time=since)

    def record_step(self, name: str, within: Any, since: int, until: int) -> None:
        """A step of a round that is over."""
        self._tracer.start_span(name, self._within(within, self._nowhere), start_time=since).end(until)

    async def end(self) -> None:
        """Send what is left, but not for long: a collector that is away lets its client wait for half a minute."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _SHUTDOWN_TIMEOUT_S)


class _TracedSession(Session):
    """A session that tells when each step of its rounds was over."""

    tracing: Tracing
    _span: Any = None
    _since = 0

    async def _round(self, t: int) -> None:
        if t % self.tracing.interval_rounds:
            await super()._round(t)
            return
        self._since = time.time_ns()
        self._span = span = self.tracing.begin(self.assignment.name, self.assignment.run_id, t, self._since)
        try:
            await super()._round(t)
        finally:
            self._span = None
            span.end(time.time_ns())

    async def _send(self, t: int) -> None:
        self._passed("granted")
        await super()._send(t)
        self._passed("said")

    async def _written(self, write: Callable[[], None]) -> None:
        since = time.time_ns()
        await super()._written(write)
        if self._span is not None:
            self.tracing.record_step("written", self._span, since, time.time_ns())

    async def _hear(self, t: int) -> None:
        self._passed("records")
        await super()._hear(t)
        self._passed("heard")

    async def _learn(self, t: int) -> None:
        await super()._learn(t)
        self._passed("learned")

    def _passed(self, step: str) -> None:
        """A step is over, and the next one begins."""
        if self._span is not None:
            since, self._since = self._since, time.time_ns()
            self.tracing.record_step(step, self._span, since, self._since)


def _module(name: str) -> Any:
    return import_optional(f"opentelemetry.{name}", _PACKAGES, "--trace", EXTRA)


def _ids(numbers: Any) -> Any:
    """Numbers of spans by chance, and of traces as we say."""

    class Ids(numbers.RandomIdGenerator):  # type: ignore[misc] # the extra may be missing
        trace = 0

        def generate_trace_id(self) -> int:
            return self.trace

    return Ids()


class _Told(logging.Handler):
    """What the exporter has to say, such as that nobody listens, goes into our log."""

    def emit(self, record: logging.LogRecord) -> None:
        told = log.error if record.levelno >= logging.ERROR else log.warning
        told("tracing", reason=record.getMessage()[:_MAX_REASON_CHARS])


def _tell_in_our_log() -> None:
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(each, _Told) for each in theirs.handlers):
        theirs.addHandler(_Told(logging.WARNING))
        theirs.propagate = False
