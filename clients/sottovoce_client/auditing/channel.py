"""What crosses the wire besides numbers, for a black box: sizes, counts, metadata, status, times, order and bytes.

Every run gives equally many numbers, however much was heard of it: what is missing is -1, what is too much is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.audit.features import bits, bucket, parsed
from sottovoce.audit.plan import Plan
from sottovoce.errors import RemoteProtocolError
from sottovoce_rpc.codec import read_hello

if TYPE_CHECKING:
    import pyarrow as pa

FIRST, HEAD = 16, 64
"""Of a direction of an edge: the first messages that are looked at, and the first bytes of them."""
MOST, MOST_NEAR = 64, 16
"""Directions of edges that are looked at: of all edges, and of the learner's own ones."""
BUCKETS, WIDTH = 12, 11
"""Entries of metadata are told apart by a hash of their key; the numbers that are kept of each."""

Line = tuple[int, int, str]
"""A direction of an edge: caller, callee, `out` or `back`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The records of one capture, in the order in which they were overheard, an array `(rows,)` each.

    Attributes:
        line: where it passed, an index into `Lines.all`; -1: elsewhere.
        kind: `message`, `hello`, `metadata` or `trailers`.
        stream, connection: counted per edge.
        at: monotonic time in nanoseconds.
        size: in bytes.
        payloads: an Arrow array.
        run_id: a random name, which says nothing.
    """

    line: IntArray
    kind: Any
    stream: IntArray
    connection: IntArray
    at: IntArray
    size: IntArray
    payloads: Any
    run_id: bytes

    def of(self, line: int, kind: str) -> IntArray:
        """Numbers of the rows of that kind."""
        return np.flatnonzero((self.line == line) & (self.kind == kind))

    def payload(self, row: int) -> bytes:
        """As it crossed the channel."""
        payload: bytes = self.payloads[int(row)].as_py()
        return payload


@dataclass(frozen=True, slots=True)
class Lines:
    """The directions of edges that a listener hears.

    Attributes:
        all: the learner's own ones first.
        said, heard: numbers of those on which the audited learner speaks, and of those on which it is spoken to.
    """

    all: tuple[Line, ...]
    said: tuple[int, ...]
    heard: tuple[int, ...]


def lines_of(plan: Plan) -> Lines:
    """What the plan's listener hears."""
    learner, neighbour = plan.worlds.learner, plan.listener.neighbour
    edges = [edge for edge in plan.run.topology.edges if neighbour is None or neighbour in edge]
    edges.sort(key=lambda edge: learner not in edge)
    every = [(*edge, direction) for edge in edges for direction in ("out", "back")][:MOST]
    near = [k for k, (caller, callee, _) in enumerate(every) if learner in (caller, callee)][:MOST_NEAR]
    said = tuple(k for k in near if every[k][0 if every[k][2] == "out" else 1] == learner)
    return Lines(tuple(every), said, tuple(k for k in near if k not in said))


def channel(table: pa.Table, lines: Lines, run_id: str) -> dict[str, FloatArray]:
    """All views of one run: name to finite numbers `(features,)`.

    Args:
        table: all columns of a capture.
        lines: who is heard.
        run_id: the run's random name.
    """
    rows = _rows(table, lines, run_id)
    near = sorted((*lines.said, *lines.heard))
    views = {
        "sizes": [_first(rows.size[rows.of(k, "message")]) for k in range(len(lines.all))],
        "counts": [_counts(rows, k) for k in range(len(lines.all))],
        "metadata": [_metadata(rows, k) for k in near],
        "status": [_status(rows, k) for k in near],
        "gaps": [_paced(np.diff(rows.at[rows.of(k, "message")])) for k in lines.said],
        "replies": [_replies(rows, lines, k) for k in lines.said],
        "order": [_order(rows, k) for k in lines.said],
        "bytes": [_bytes(rows, k) for k in lines.said[:1]],
    }
    return {name: np.concatenate(parts) for name, parts in views.items() if parts}


def _rows(table: pa.Table, lines: Lines, run_id: str) -> Rows:
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "payload"}
    where = np.full(table.num_rows, -1)
    for k, (caller, callee, direction) in enumerate(lines.all):
        here: BoolArray = (columns["caller"] == caller) & (columns["callee"] == callee)
        where[here & (columns["direction"] == direction)] = k
    return Rows(
        where,
        columns["kind"],
        columns["stream"],
        columns["connection"],
        columns["mono_ns"],
        columns["size"],
        table.column("payload"),
        run_id.encode(),
    )


def _first(values: IntArray | FloatArray, count: int = FIRST) -> FloatArray:
    """The first numbers, -1 where there are fewer."""
    padded = np.full(count, -1.0)
    padded[: len(values)] = values[:count]
    return padded


def _counts(rows: Rows, line: int) -> FloatArray:
    here = [rows.of(line, kind) for kind in ("message", "hello", "metadata", "trailers")]
    own = rows.line == line
    last = [float(column[own].max(initial=0)) for column in (rows.stream, rows.connection)]
    return np.array([*map(len, here), *(float(rows.size[own].sum()) for own in here), *last])


def _paced(spans: IntArray) -> FloatArray:
    """Logarithms of times in nanoseconds: the first ones, and how all of them are spread."""
    logs = np.log(np.maximum(spans, 1))
    spread = np.quantile(logs, (0.1, 0.5, 0.9, 1.0)) if len(logs) else np.full(4, -1.0)
    return np.concatenate([_first(logs), spread, [logs.mean() if len(logs) else -1.0]])


def _replies(rows: Rows, lines: Lines, line: int) -> FloatArray:
    """Times from whatever the learner heard last to what it says then."""
    said = rows.at[rows.of(line, "message")]
    heard = np.sort(rows.at[np.isin(rows.line, lines.heard) & (rows.kind == "message")])
    before = np.searchsorted(heard, said) - 1
    return _paced((said - heard[before])[before >= 0] if len(heard) else np.empty(0, np.int64))


def _order(rows: Rows, line: int) -> FloatArray:
    """Which messages of all the learner's are."""
    messages = np.flatnonzero((rows.line >= 0) & (rows.kind == "message"))
    return _first(np.searchsorted(messages, rows.of(line, "message")))


def _bytes(rows: Rows, line: int) -> FloatArray:
    heads = b"".join(rows.payload(k)[:HEAD].ljust(HEAD, b"\0") for k in rows.of(line, "message")[:FIRST])
    return _first(np.frombuffer(heads, np.uint8).astype(np.int64), FIRST * HEAD)


def _metadata(rows: Rows, line: int) -> FloatArray:
    """By hashed key: how many entries, how long, what number or text; a hello's bytes are an entry, too."""
    kept = np.zeros((BUCKETS, WIDTH))
    for kind in ("hello", "metadata", "trailers"):
        for key, value in _entries(rows, line, kind):
            place = bucket(f"{kind} {key}") % BUCKETS
            kept[place] += [1.0, len(value), parsed(value), *bits(value)]
    return kept.ravel()


def _entries(rows: Rows, line: int, kind: str) -> Iterator[tuple[str, str]]:
    """Key and value; of what is no metadata, none."""
    for row in rows.of(line, kind)[:FIRST]:
        if kind == "hello":
            yield from _greeting(rows.payload(row), rows.run_id)
            continue
        found = _told(rows, row).get("metadata")
        for entry in found if isinstance(found, list) else ():
            if isinstance(entry, list) and len(entry) == 2:
                yield str(entry[0]), str(entry[1])


def _greeting(payload: bytes, run_id: bytes) -> Iterator[tuple[str, str]]:
    """What a hello asks for, and all its bytes without the run's random name."""
    with suppress(RemoteProtocolError):
        yield "next_round", str(read_hello(payload).next_round)
    yield "bytes", payload.replace(run_id, b"").hex()


def _status(rows: Rows, line: int) -> FloatArray:
    """Code and text of the first trailers."""
    ends = rows.of(line, "trailers")
    told = _told(rows, ends[0]) if len(ends) else {}
    code, text = str(told.get("code", "")), str(told.get("details", ""))
    return np.array([len(ends), len(text), *bits(code), *bits(text)])


def _told(rows: Rows, row: int) -> dict[str, Any]:
    """Metadata or trailers, without the run's random name."""
    try:
        told = json.loads(rows.payload(row).replace(rows.run_id, b""))
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
