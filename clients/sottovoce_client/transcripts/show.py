"""What a capture holds, for people: who spoke when, how much, what is missing, what it says, and what was noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import (
    MISSING_VALUE,
    describe_ciphertext,
    describe_detections,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    pluralize,
)
from sottovoce_client.transcripts.query import (
    decode_rounds,
    find_transcripts,
    format_cell,
    format_numbers,
    open_database,
)
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import SpecError
from sottovoce_core.text import format_learner_name
from sottovoce_eavesdropper.capture_reader import Capture, filter_rounds
from sottovoce_rpc.codec import RoundCodec

if TYPE_CHECKING:
    import pyarrow as pa

_BARS = " ▁▂▃▄▅▆▇█"
_WIDE = 40
"""Slices of time in the picture of who spoke when."""
MAX_EDGES, MAX_LEARNERS, _MAX_SHOWN_DETECTIONS = 30, 30, 20


@dataclass(slots=True)
class _Channel:
    """What one learner told another one.

    Attributes:
        messages: or, of a wiretap, records of ciphertext.
        sizes: of its messages, each different one.
        streams: that they came on, or connections.
        rounds: that they say they are for, as far as they can be decoded.
    """

    messages: int = 0
    bytes: int = 0
    sizes: set[int] = field(default_factory=set)
    streams: set[int] = field(default_factory=set)
    rounds: list[IntArray] = field(default_factory=list)

    def missing(self) -> int:
        """Rounds between the first and the last one that were not overheard."""
        heard = np.unique(np.concatenate(self.rounds)) if self.rounds else np.empty(0, np.int64)
        return int(heard[-1] - heard[0]) + 1 - len(heard) if len(heard) else 0

    def span(self) -> str:
        """The first and the last round."""
        known = [each for each in self.rounds if len(each)]
        return f"{min(int(e.min()) for e in known)}–{max(int(e.max()) for e in known)}" if known else "–"


@dataclass(slots=True)
class _Picture:
    """A capture, read once from end to end."""

    channels: dict[tuple[int, int], _Channel] = field(default_factory=dict)
    times: dict[int, list[IntArray]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    first: list[tuple[int, str, FloatArray]] = field(default_factory=list)
    failed: int = 0
    again: int = 0


def _look(capture: Capture, sender: int, first: int) -> _Picture:
    """Read a capture.

    Args:
        capture: which one.
        sender: whose first messages are kept.
        first: how many of them.

    Raises:
        CaptureError: it cannot be read.
    """
    picture, codec = _Picture(), RoundCodec(capture.shapes)
    for batch in capture.read_batches():
        _count(picture, batch, tapped=capture.ciphertext is not None)
        messages = filter_rounds(batch)
        ends = _ends(messages)
        rows, rounds, _, fields = decode_rounds(messages, codec)
        picture.failed += messages.num_rows - len(rows)
        for pair in np.unique(ends[rows], axis=0).tolist():
            of = (ends[rows] == pair).all(axis=1)
            picture.channels[pair[0], pair[1]].rounds.append(rounds[of])
        if len(picture.first) < first * max(len(fields), 1):
            _keep(picture, fields, rounds, ends[rows, 0] == sender, first)
    return picture


def _count(picture: _Picture, batch: pa.RecordBatch, *, tapped: bool) -> None:
    kinds = np.array(batch.column("kind").to_pylist(), dtype=object)
    for kind in set(kinds.tolist()):
        picture.kinds[kind] = picture.kinds.get(kind, 0) + int(np.count_nonzero(kinds == kind))
    said = kinds == ("ciphertext" if tapped else "message")
    picture.again += int(np.count_nonzero(_numbers(batch, "is_repeat")))
    ends, sizes, streams, walls = (
        _ends(batch)[said],
        *(_numbers(batch, name)[said] for name in ("size", "connection" if tapped else "stream", "wall_ns")),
    )
    for sender, receiver in np.unique(ends, axis=0).tolist():
        of = (ends == (sender, receiver)).all(axis=1)
        channel = picture.channels.setdefault((sender, receiver), _Channel())
        channel.messages += int(np.count_nonzero(of))
        channel.bytes += int(sizes[of].sum())
        channel.sizes.update(sizes[of].tolist())
        channel.streams.update(streams[of].tolist())
        picture.times.setdefault(sender, []).append(walls[of])


def _ends(batch: pa.RecordBatch) -> IntArray:
    """`(rows, 2)`: sender and receiver."""
    caller, callee, sender = (_numbers(batch, name) for name in ("caller", "callee", "sender"))
    return np.stack([sender, np.where(sender == caller, callee, caller)], axis=1)


def _numbers(batch: pa.RecordBatch, name: str) -> IntArray:
    found: IntArray = batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _keep(picture: _Picture, fields: Any, rounds: IntArray, own: Any, first: int) -> None:
    """The first messages of one learner, each round once."""
    for row in np.flatnonzero(own).tolist():
        known = {t for t, _, _ in picture.first}
        if int(rounds[row]) not in known and len(known) < first:
            picture.first += [(int(rounds[row]), name, values[row]) for name, values in fields.items()]


# ---- on the terminal -------------------------------------------------------------------------------------------------


def show(place: str, *, sender: int | str = 0, max_messages: int = 3, console: Console | None = None) -> None:
    """Show what lies in a folder.

    Args:
        place: a capture, a folder with captures, or a simulator's transcript.
        sender: whose first messages are shown: an index, or a name of the run's spec.
        first: how many.

    Raises:
        CaptureError: there is nothing, or it cannot be read.
        SpecError: there is no such learner.
    """
    console = console or terminal.create_console(highlight=False)
    captures, simulated = find_transcripts(place)
    channels, rows = [], list[tuple[Any, ...]]()
    if len(captures) == 1:
        channels = _one(captures[0], sender, max_messages, console)
    elif captures:
        _many(captures, console)
    heads = ("run", "world", "field", "rounds", "learners", "replicas", "numbers")
    if simulated:
        with open_database(captures, simulated, "said") as connection:
            asked = "SELECT run, world, field, count(DISTINCT round), count(DISTINCT sender), count(DISTINCT replica), "
            rows = connection.execute(asked + "any_value(len(value)) FROM said GROUP BY ALL ORDER BY ALL").fetchall()
        table = _plain(*heads)
        for row in rows:
            table.add_row(*(Text(format_cell(cell)) for cell in row))
        console.print(table)
    terminal.print_json_if_requested(
        lambda: {
            "captures": [_document(each) for each in captures],
            "channels": channels,
            "simulated": [dict(zip(heads, row, strict=True)) for row in rows],
        }
    )


def _document(capture: Capture) -> dict[str, Any]:
    """What a capture says of itself, for programs."""
    facts = capture.metadata
    names = ("run_id", "world", "replica", "messages", "bytes", "detections", "detection_count", "gaps", "unchecked_reason")
    return {"capture": capture.name, "complete": capture.is_complete, **{name: facts.get(name) for name in names}}


def _many(captures: Sequence[Capture], console: Console) -> None:
    names = [format_cell(each.name.rstrip("/").rsplit("/", 1)[-1]) for each in captures]
    runs = [format_cell(each.metadata["run_id"]) for each in captures]
    told = {key: [each.metadata.get(key) for each in captures] for key in ("world", "replica")}
    labels = [key for key, values in told.items() if any(value is not None for value in values)]
    apart = not all(map(str.startswith, names, runs))  # else a capture is called as its run, and a little more
    table = _plain("capture", *(["run"] if apart else []), *labels, "messages", "bytes", "state", "noticed")
    for k, capture in enumerate(captures):
        facts = capture.metadata
        state = (
            Text("closed")
            if capture.is_complete
            else Text("gaps" if facts.get("gaps") else "cut short", style="yellow")
        )
        found = facts.get("detection_count", 0)
        table.add_row(
            Text(names[k]),
            *([Text(runs[k])] if apart else []),
            *(MISSING_VALUE if told[key][k] is None else str(told[key][k]) for key in labels),
            format_count(facts["messages"]) if capture.ciphertext is None else MISSING_VALUE,
            format_bytes(facts["bytes"] if capture.ciphertext is None else capture.ciphertext.bytes),
            state,
            Text(format_count(found), style="bold red" if found else ""),
        )
    console.print(table)
    console.print(f"{pluralize(len(captures), 'capture')}. Name one to see what it holds.", style="dim")


def _one(capture: Capture, sender: int | str, first: int, console: Console) -> list[dict[str, Any]]:
    """Show one; returns its channels, for programs."""
    names = capture.names
    index = _index(names, sender)
    picture = _look(capture, index, first)
    facts = terminal.create_fact_grid()
    for name, value in _facts(capture, picture):
        facts.add_row(name, value)
    console.print(facts)
    console.print(_channels(picture, names, tapped=capture.ciphertext is not None))
    console.print(_who_when(picture, names, "message" if capture.ciphertext is None else "record"))
    if picture.first:
        console.print(_first(picture, format_learner_name(names, index)))
    return [
        {
            "from": format_learner_name(names, ends[0]),
            "to": format_learner_name(names, ends[1]),
            "messages": each.messages,
            "bytes": each.bytes,
        }
        | {"sizes": sorted(each.sizes), "missing_rounds": each.missing()}
        for ends, each in sorted(picture.channels.items())
    ]


def _index(names: Sequence[str], sender: int | str) -> int:
    """The index of a learner by its name, or by its index as text.

    Raises:
        SpecError: there is none of this name.
    """
    if str(sender) in names:
        return list(names).index(str(sender))
    if str(sender).isdecimal() and len(str(sender)) < 10:
        return int(sender)
    known = (
        f"one of {', '.join(names[:MAX_LEARNERS])}, or an index"
        if names
        else "an index: this capture names no learners"
    )
    raise SpecError(f"--sender must be {known}, got {sender!r}")


def _not_whole(gaps: object) -> str:
    if isinstance(gaps, list) and gaps:
        return f"not whole: {pluralize(len(gaps), 'gap')} where nobody listened"
    return "cut short: the eavesdropper did not close it, so what came last may be missing"


def _facts(capture: Capture, picture: _Picture) -> Iterator[tuple[str, Text | str]]:
    facts, spec = capture.metadata, capture.metadata["spec"]
    yield "capture", Text(capture.name)
    labels = [f"{key} {facts[key]}" for key in ("world", "replica") if facts.get(key) is not None]
    yield "run", Text(", ".join([format_cell(facts["run_id"]), *labels]))
    algorithm = spec.get("algorithm")
    if isinstance(algorithm, dict):
        rounds = spec.get("rounds", "?")
        planned = "no end" if rounds is None else f"{format_cell(rounds)} rounds"
        yield "spec", Text(f"{format_cell(algorithm.get('name'))}, {planned} planned")
    if not capture.is_complete:
        yield "state", Text(_not_whole(facts.get("gaps")), style="yellow")
    heard = sum(channel.messages for channel in picture.channels.values())
    others = ", ".join(f"{format_count(n)} {kind}" for kind, n in sorted(picture.kinds.items()) if kind != "message")
    total = sum(channel.bytes for channel in picture.channels.values())
    if capture.ciphertext is not None:
        yield "overheard", f"{describe_ciphertext(picture.kinds.get('opened', 0), heard, total)}, by wiretap"
        yield from _noticed(facts)
        return
    again = f" ({format_count(picture.again)} of them said again)" if picture.again else ""
    yield (
        "overheard",
        f"{pluralize(heard, 'message')}{again}, {format_bytes(total)}" + (f"; {others}" if others else ""),
    )
    if picture.failed:
        yield "not rounds", f"{pluralize(picture.failed, 'message')} cannot be decoded"
    yield from _noticed(facts)


def _noticed(facts: Any) -> Iterator[tuple[str, Text | str]]:
    found = [each for each in facts.get("detections", ()) if isinstance(each, dict)]
    texts = ["".join(c for c in str(each.get("text")) if c.isprintable()) for each in found]
    if line := describe_detections(facts.get("detection_count", 0), texts):
        yield "noticed", Text(line, style="bold red")
        for text in texts[1:_MAX_SHOWN_DETECTIONS]:
            yield "", Text(text, style="red")
    elif "detection_count" in facts and facts.get("ciphertext") is None:
        yield "noticed", "nothing that must never happen"
    if facts.get("unchecked_reason"):
        yield "not checked", Text(str(facts["unchecked_reason"])[:300])


def _channels(picture: _Picture, names: Sequence[str], *, tapped: bool) -> Table:
    """Bytes, sizes and gaps of every channel; of ciphertext no gap is known."""
    heads = ("records", "bytes", "size", "connections") if tapped else ("messages", "bytes", "size", "streams")
    table = _plain("from", "to", *heads, *(() if tapped else ("rounds", "missing")))
    for (sender, receiver), channel in sorted(picture.channels.items())[:MAX_EDGES]:
        sizes = (
            f"{format_count(min(channel.sizes))}–{format_count(max(channel.sizes))}"
            if len(channel.sizes) > 1
            else format_count(*channel.sizes)
        )
        gap = channel.missing()
        cells = (
            Text(format_learner_name(names, sender)),
            Text(format_learner_name(names, receiver)),
            format_count(channel.messages),
            format_bytes(channel.bytes),
            sizes,
            format_count(len(channel.streams)),
        )
        rounds = () if tapped else (channel.span(), Text(format_count(gap), style="yellow" if gap else ""))
        table.add_row(*cells, *rounds)
    if len(picture.channels) > MAX_EDGES:
        table.add_row(f"… {len(picture.channels) - MAX_EDGES} more", style="dim")
    return table


def _who_when(picture: _Picture, names: Sequence[str], what: str) -> Table:
    """Messages, or records, of each learner over time, a bar for each slice; the longest silence of each."""
    table = _plain("learner", "who spoke when", "longest silence")
    times = {i: np.sort(np.concatenate(own)) for i, own in sorted(picture.times.items())}
    known = [own for own in times.values() if len(own)]
    if not known:
        return table
    begin, end = min(int(own[0]) for own in known), max(int(own[-1]) for own in known)
    edges = np.linspace(begin, max(end, begin + 1), _WIDE + 1)
    counts = {i: np.histogram(own, edges)[0] for i, own in times.items()}
    highest = max(int(each.max()) for each in counts.values())
    for i, own in list(times.items())[:MAX_LEARNERS]:
        bars = "".join(_BARS[-(-int(n) * (len(_BARS) - 1) // highest)] for n in counts[i])
        silence = format_duration(float(np.diff(own).max(initial=0)) / 1e9)
        table.add_row(Text(format_learner_name(names, i)), Text(bars, style="cyan"), silence)
    table.caption = (
        f"from {_clock(begin)} over {format_duration((end - begin) / 1e9)}; a full bar: {pluralize(highest, what)}"
    )
    return table


def _clock(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"


def _first(picture: _Picture, sender: str) -> Table:
    table = _plain("round", "field", f"what {sender} said first", "largest")
    for t, name, values in picture.first:
        flat = values.reshape(-1)
        largest = format_number(float(np.abs(flat).max(initial=0.0)))
        table.add_row(format_count(t), format_cell(name), format_numbers([float(v) for v in flat], 5), largest)
    return table


def _plain(*heads: str) -> Table:
    table = terminal.create_table(caption_justify="left")
    texts = {"field", "capture", "run", "who spoke when", "state"}
    for head in heads:
        left = head in texts or head.startswith("what")
        whole = not left or head in ("run", "capture")  # what is copied, is whole
        table.add_column(
            head, justify="left" if left else "right", overflow="fold" if left else "ellipsis", no_wrap=whole
        )
    return table
