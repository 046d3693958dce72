"""What crosses the wire besides numbers: captures as conversations, whose views a black box looks at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from sottovoce.auditing.conversation import HEAD, Conversation, Overheard, digest
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.views import CHANNEL, PACE, Features, features_of
from sottovoce.errors import RemoteProtocolError
from sottovoce_rpc.codec import read_hello

if TYPE_CHECKING:
    import pyarrow as pa

_MOST = 64
"""Directions of edges that are looked at, the learner's own ones first."""

_Line = tuple[int, int, str]
"""A direction of an edge: caller, callee, `out` or `back`."""

_Whose = Literal["said", "told", "others"]


@dataclass(frozen=True, slots=True)
class Lines:
    """The directions of edges that a listener hears, and whose words pass on them.

    Attributes:
        whose: of each.
        opened: the one whose messages are looked into; None: the learner speaks on none. Its others carry the same bytes.
    """

    whose: Mapping[_Line, _Whose]
    opened: _Line | None


def lines_of(plan: AuditPlan) -> Lines:
    """What the plan's listener hears."""
    learner, neighbour = plan.worlds.learner, plan.listener.neighbour
    edges = [edge for edge in plan.run.network.edges if neighbour is None or neighbour in edge]
    edges.sort(key=lambda edge: learner not in edge)
    every = [(*edge, direction) for edge in edges for direction in ("out", "back")][:_MOST]
    whose = {line: _whose(line, learner) for line in every}
    return Lines(whose, next((line for line in every if whose[line] == "said"), None))


def _whose(line: _Line, learner: int) -> _Whose:
    caller, callee, direction = line
    if learner not in (caller, callee):
        return "others"
    return "said" if learner == (caller if direction == "out" else callee) else "told"


def channel(table: pa.Table, lines: Lines, run_id: str) -> dict[str, Features]:
    """All views of one run.

    Args:
        table: all columns of a capture.
        lines: who is heard.
        run_id: the run's random name, which says nothing.
    """
    return features_of(conversation(table, lines, run_id), {**CHANNEL, **PACE})


def conversation(table: pa.Table, lines: Lines, run_id: str, *, world: int = 0, number: int = 0) -> Conversation:
    """One run, as it was heard.

    Args:
        table, lines, run_id: as of `channel`.
        world: 0 or 1.
        number: of the run, in the order of all.
    """
    return Conversation(world, run_id, float(number), tuple(_heard(table, lines, run_id.encode())))


def _heard(table: pa.Table, lines: Lines, run_id: bytes) -> Iterator[Overheard]:
    """What passed on the lines; payloads of the others are not looked into."""
    names = ("caller", "callee", "direction", "kind", "method", "stream", "connection", "mono_ns", "size")
    payloads, streams, began = table.column("payload"), dict[object, int](), None
    for k, values in enumerate(zip(*(table.column(name).to_pylist() for name in names), strict=True)):
        caller, callee, direction, kind, method, stream, connection, at, size = values
        line = (caller, callee, direction)
        if (whose := lines.whose.get(line)) is None:
            continue
        began = at if began is None else began
        stream = streams.setdefault((caller, callee, stream, connection), len(streams))
        heard = Overheard(
            kind, f"{caller} to {callee} {method}".rstrip(), direction, stream, (at - began) / 1e9, size, whose=whose
        )
        if whose != "others" and kind == "hello":
            heard = replace(heard, entries=tuple(_greeting(payloads[k].as_py(), run_id)))
        elif whose != "others" and kind in ("metadata", "trailers"):
            heard = told(heard, payloads[k].as_py().replace(run_id, b""))
        elif whose == "said" and kind == "message":
            payload = payloads[k].as_py()
            heard = replace(heard, head=payload[:HEAD] if line == lines.opened else b"", digest=digest(payload))
        yield heard


def _greeting(payload: bytes, run_id: bytes) -> Iterator[tuple[str, str]]:
    """What a hello asks for, and all its bytes without the run's random name."""
    with suppress(RemoteProtocolError):
        yield "next_round", str(read_hello(payload).next_round)
    yield "bytes", payload.replace(run_id, b"").hex()


def told(heard: Overheard, payload: bytes) -> Overheard:
    """Metadata or trailers with what they say, recorded in JSON; of what is none, nothing."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        document = None
    document = document if isinstance(document, dict) else {}
    listed = document.get("metadata")
    pairs = [each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, list) and len(each) == 2]
    entries = tuple((str(key), str(value)) for key, value in pairs)
    status = (str(document.get("code", "")), str(document.get("details", "")))
    return replace(heard, entries=entries, status=status)
