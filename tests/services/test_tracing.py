"""Traces of rounds, as a collector gets them: one for all learners, with times alone."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from sottovoce_core.errors import SpecError
from sottovoce_learner.tracing import STEPS, Tracing
from tests.examples import made_up, small_spec
from tests.services.network import Network, network

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
collector_grpc = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

NAMES = ["ann", "ben", "cleo"]
ROUNDS = 6


@dataclass
class Collector:
    """Keeps what it is sent."""

    spans: list[Any] = field(default_factory=list)
    resources: list[Any] = field(default_factory=list)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the .proto names it
        for each in request.resource_spans:
            self.resources.append(each.resource)
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return collector.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A collector that exporters of this process find."""
    server, found = grpc.aio.server(), Collector()
    collector_grpc.add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    await server.start()
    try:
        yield found
    finally:
        await server.stop(None)


async def traced(up: Network, monkeypatch: pytest.MonkeyPatch, every: int) -> tuple[str, Collector]:
    """A run of traced learners: its id, and what a collector got."""
    spec = small_spec(ROUNDS, NAMES)
    async with collecting(monkeypatch) as found:
        up.tracing = Tracing(every)
        for name in NAMES:
            await up.join(name)
        outcome = await up.run(spec, made_up(spec))
        await up.tracing.end()
    assert outcome.state == "finished"
    return outcome.run_id, found


def facts(span: Any) -> dict[str, str | int]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def rounds(found: Collector) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every round's span, and its steps by name."""
    within = defaultdict[bytes, dict[str, Any]](dict)
    for span in found.spans:
        within[span.parent_span_id].setdefault(
            span.name, span
        )  # of the last round what was learned is written down, too
    for span in found.spans:
        if span.name == "round":
            yield span, within[span.span_id]


async def test_a_round_is_one_trace_with_spans_of_all_learners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(tmp_path, []) as up:
        run_id, found = await traced(up, monkeypatch, every=1)
    seen = defaultdict[bytes, set[tuple[Any, Any, Any]]](set)
    for span, steps in rounds(found):
        own = facts(span)
        seen[span.trace_id].add((own["sottovoce.learner"], own["sottovoce.run"], own["sottovoce.round"]))
        assert set(own) == {"sottovoce.learner", "sottovoce.run", "sottovoce.round"} and not span.parent_span_id
        assert set(steps) == {*STEPS, "write_log"}
        assert {each.trace_id for each in steps.values()} == {span.trace_id}
        assert not any(each.events or each.links or each.status.message for each in (span, *steps.values()))
        assert not any(each.attributes for each in steps.values())
        times = [steps[name].start_time_unix_nano for name in STEPS] + [steps[STEPS[-1]].end_time_unix_nano]
        assert times == sorted(times)
        assert all(steps[a].end_time_unix_nano == steps[b].start_time_unix_nano for a, b in pairwise(STEPS))
        assert span.start_time_unix_nano == times[0] and times[-1] <= span.end_time_unix_nano
        said, written = steps["emit"], steps["write_log"]
        assert said.start_time_unix_nano <= written.start_time_unix_nano
        assert written.end_time_unix_nano <= said.end_time_unix_nano
    assert seen == {
        Tracing.compute_trace_id(run_id, t).to_bytes(16, "big"): {(name, run_id, t) for name in NAMES}
        for t in range(ROUNDS)
    }
    names = {
        each.value.string_value
        for resource in found.resources
        for each in resource.attributes
        if each.key == "service.name"
    }
    assert names == {"sottovoce-learner"}


async def test_of_so_many_rounds_one_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(tmp_path, []) as up:
        _, found = await traced(up, monkeypatch, every=4)
    assert sorted(facts(span)["sottovoce.round"] for span, _ in rounds(found)) == [0, 0, 0, 4, 4, 4]
    assert len(found.spans) == 6 * 7


async def test_a_collector_that_is_away_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    spec = small_spec(ROUNDS, NAMES)
    async with network(tmp_path, []) as up:
        up.tracing = Tracing()
        for name in NAMES:
            await up.join(name)
        assert (await up.run(spec, made_up(spec))).state == "finished"
        await up.tracing.end()


def test_runs_and_rounds_have_traces_of_their_own() -> None:
    assert len({Tracing.compute_trace_id(run, t) for run in ("a", "b", "a1") for t in range(100)}) == 300
    assert Tracing.compute_trace_id("a", 11) != Tracing.compute_trace_id("a1", 1)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(SpecError, match="must be grpc, got http/protobuf"):
        Tracing()


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SpecError, match=r"--trace needs opentelemetry-sdk .*: .*, pip install '\.\[trace\]'"):
        Tracing()
