"""OpenTelemetry traces of the steps of a round, sent to a collector where the learner's owner enables them.

All learners' spans of a round belong to one trace: its id is computed from the run and the round, so nothing is exchanged
for it. A span has times, the learner's name, the run and the round, and no other number or text. The times themselves may
depend on records. A session without tracing has no code for it.
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
STEPS = ("wait_for_lease", "emit", "wait_for_records", "receive", "update")
"""Steps of a round, in order; `write_log` is within `emit`, and within `update` before an offline interval."""


class Tracing:
    """Exporter of spans of a process's learners, configured by the environment (`OTEL_EXPORTER_OTLP_ENDPOINT` and others).

    Args:
        interval_rounds: trace one in this many rounds.

    Raises:
        SpecError: the extra is not installed, or the environment asks for another protocol than gRPC, or has an invalid
            address.
    """

    def __init__(self, interval_rounds: int = 1) -> None:
        if others := {found for each in _PROTOCOLS if (found := os.environ.get(each, "grpc")) != "grpc"}:
            raise SpecError(f"--trace uses OTLP over gRPC: {' and '.join(_PROTOCOLS)} must be grpc, got {others.pop()}")
        for variable in _ENDPOINTS:
            if url := os.environ.get(variable):
                parse_url(url, {"http": 4317, "https": 4317}, variable, allow_path=True)
        api, context, sdk, export, id_module, resources, otlp = map(_module, _MODULES)
        _forward_exporter_log()
        self.interval_rounds, self._id_generator = interval_rounds, _create_id_generator(id_module)
        self._set_span_in_context, self._empty_context = api.set_span_in_context, context.Context()
        resource = resources.Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "sottovoce-learner")})
        self._provider = sdk.TracerProvider(id_generator=self._id_generator, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("sottovoce")

    @staticmethod
    def compute_trace_id(run_id: str, t: int) -> int:
        """Return the trace id of a round: 128 bits that all its learners can compute."""
        return int.from_bytes(hashlib.blake2b(f"{run_id}\0{t}".encode(), digest_size=16).digest())

    def open_session(self, *args: Any, **options: Any) -> Session:
        """Open a session whose rounds are traced."""
        session = open_session(*args, session_class=_TracedSession, **options)
        assert isinstance(session, _TracedSession)  # noqa: S101 - the class that was passed
        session.tracing = self
        return session

    def begin(self, learner: str, run_id: str, t: int, start_ns: int) -> Any:
        """Begin the span of a round."""
        self._id_generator.trace = self.compute_trace_id(run_id, t)
        attributes = {"sottovoce.learner": learner, "sottovoce.run": run_id, "sottovoce.round": t}
        return self._tracer.start_span(ROUND, self._empty_context, attributes=attributes, start_time=start_ns)

    def record_step(self, name: str, parent: Any, start_ns: int, end_ns: int) -> None:
        """Record a completed step of a round."""
        self._tracer.start_span(name, self._set_span_in_context(parent, self._empty_context), start_time=start_ns).end(
            end_ns
        )

    async def end(self) -> None:
        """Send the remaining spans, with a time limit: for an unreachable collector the client would wait half a minute."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _SHUTDOWN_TIMEOUT_S)


class _TracedSession(Session):
    """Session that records when each step of its rounds was over."""

    tracing: Tracing
    _span: Any = None
    _step_start_ns = 0

    async def _run_round(self, t: int) -> None:
        if t % self.tracing.interval_rounds:
            await super()._run_round(t)
            return
        self._step_start_ns = time.time_ns()
        self._span = span = self.tracing.begin(self.assignment.name, self.assignment.run_id, t, self._step_start_ns)
        try:
            await super()._run_round(t)
        finally:
            self._span = None
            span.end(time.time_ns())

    async def _send(self, t: int) -> None:
        self._record_step_end("wait_for_lease")
        await super()._send(t)
        self._record_step_end("emit")

    async def _write_log(self, write: Callable[[], None]) -> None:
        start_ns = time.time_ns()
        await super()._write_log(write)
        if self._span is not None:
            self.tracing.record_step("write_log", self._span, start_ns, time.time_ns())

    async def _receive_round(self, t: int) -> None:
        self._record_step_end("wait_for_records")
        await super()._receive_round(t)
        self._record_step_end("receive")

    async def _update(self, t: int) -> None:
        await super()._update(t)
        self._record_step_end("update")

    def _record_step_end(self, step: str) -> None:
        """Record a completed step; the next one begins."""
        if self._span is not None:
            start_ns, self._step_start_ns = self._step_start_ns, time.time_ns()
            self.tracing.record_step(step, self._span, start_ns, self._step_start_ns)


def _module(name: str) -> Any:
    return import_optional(f"opentelemetry.{name}", _PACKAGES, "--trace", EXTRA)


def _create_id_generator(id_module: Any) -> Any:
    """Return an id generator: random span ids, and given trace ids."""

    class Ids(id_module.RandomIdGenerator):  # type: ignore[misc] # the extra may be missing
        trace = 0

        def generate_trace_id(self) -> int:
            return self.trace

    return Ids()


class _ExporterLogHandler(logging.Handler):
    """Log handler that passes the exporter's messages, such as an unreachable collector, to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        write = log.error if record.levelno >= logging.ERROR else log.warning
        write("tracing", reason=record.getMessage()[:_MAX_REASON_CHARS])


def _forward_exporter_log() -> None:
    exporter_log = logging.getLogger("opentelemetry")
    if not any(isinstance(each, _ExporterLogHandler) for each in exporter_log.handlers):
        exporter_log.addHandler(_ExporterLogHandler(logging.WARNING))
        exporter_log.propagate = False
