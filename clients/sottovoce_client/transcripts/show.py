"""Summary of a capture: activity over time, traffic by channel, missing rounds, first messages, and detections."""

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
_TIME_SLICES = 40
"""Number of time slices in the activity table."""
MAX_EDGES, MAX_LEARNERS, _MAX_SHOWN_DETECTIONS = 30, 30, 20


@dataclass(slots=True)
class _ChannelSummary:
    """Traffic from one learner to another.

    Attributes:
        messages: number of messages; of a wiretap, of ciphertext records.
        sizes: distinct sizes of the messages.
        streams: streams, or connections, of the messages.
        rounds: rounds that decoded messages claim.
    """

    messages: int = 0
    bytes: int = 0
    sizes: set[int] = field(default_factory=set)
    streams: set[int] = field(default_factory=set)
    rounds: list[IntArray] = field(default_factory=list)

    def count_missing(self) -> int:
        """Count missing rounds between the first and the last one."""
        captured = np.unique(np.concatenate(self.rounds)) if self.rounds else np.empty(0, np.int64)
        return int(captured[-1] - captured[0]) + 1 - len(captured) if len(captured) else 0

    def format_span(self) -> str:
        """Format the first and the last round."""
        known = [each for each in self.rounds if len(each)]
        return f"{min(int(e.min()) for e in known)}–{max(int(e.max()) for e in known)}" if known else "–"


@dataclass(slots=True)
class _CaptureSummary:
    """Summary of a capture that was read once."""

    channels: dict[tuple[int, int], _ChannelSummary] = field(default_factory=dict)
    times: dict[int, list[IntArray]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    first_messages: list[tuple[int, str, FloatArray]] = field(default_factory=list)
    undecoded: int = 0
    repeats: int = 0


def _summarise(capture: Capture, sender: int, max_messages: int) -> _CaptureSummary:
    """Read a capture and summarise it.

    Args:
        capture: the capture.
        sender: learner whose first messages are kept.
        max_messages: maximum number of kept messages.

    Raises:
        CaptureError: It cannot be read.
    """
    summary, codec = _CaptureSummary(), RoundCodec(capture.shapes)
    for batch in capture.read_batches():
        _count_traffic(summary, batch, tapped=capture.ciphertext is not None)
        messages = filter_rounds(batch)
        ends = _read_ends(messages)
        rows, rounds, _, fields = decode_rounds(messages, codec)
        summary.undecoded += messages.num_rows - len(rows)
        for pair in np.unique(ends[rows], axis=0).tolist():
            is_of_pair = (ends[rows] == pair).all(axis=1)
            summary.channels[pair[0], pair[1]].rounds.append(rounds[is_of_pair])
        if len(summary.first_messages) < max_messages * max(len(fields), 1):
            _keep_first_messages(summary, fields, rounds, ends[rows, 0] == sender, max_messages)
    return summary


def _count_traffic(summary: _CaptureSummary, batch: pa.RecordBatch, *, tapped: bool) -> None:
    kinds = np.array(batch.column("kind").to_pylist(), dtype=object)
    for kind in set(kinds.tolist()):
        summary.kinds[kind] = summary.kinds.get(kind, 0) + int(np.count_nonzero(kinds == kind))
    is_traffic = kinds == ("ciphertext" if tapped else "message")
    summary.repeats += int(np.count_nonzero(_read_integers(batch, "is_repeat")))
    ends, sizes, streams, walls = (
        _read_ends(batch)[is_traffic],
        *(
            _read_integers(batch, name)[is_traffic]
            for name in ("size", "connection" if tapped else "stream", "wall_ns")
        ),
    )
    for sender, receiver in np.unique(ends, axis=0).tolist():
        is_of_channel = (ends == (sender, receiver)).all(axis=1)
        channel = summary.channels.setdefault((sender, receiver), _ChannelSummary())
        channel.messages += int(np.count_nonzero(is_of_channel))
        channel.bytes += int(sizes[is_of_channel].sum())
        channel.sizes.update(sizes[is_of_channel].tolist())
        channel.streams.update(streams[is_of_channel].tolist())
        summary.times.setdefault(sender, []).append(walls[is_of_channel])


def _read_ends(batch: pa.RecordBatch) -> IntArray:
    """Read sender and receiver of every row, `(rows, 2)`."""
    caller, callee, sender = (_read_integers(batch, name) for name in ("caller", "callee", "sender"))
    return np.stack([sender, np.where(sender == caller, callee, caller)], axis=1)


def _read_integers(batch: pa.RecordBatch, name: str) -> IntArray:
    found: IntArray = batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _keep_first_messages(summary: _CaptureSummary, fields: Any, rounds: IntArray, own: Any, max_messages: int) -> None:
    """Keep the first messages of one learner, each round once."""
    for row in np.flatnonzero(own).tolist():
        known = {t for t, _, _ in summary.first_messages}
        if int(rounds[row]) not in known and len(known) < max_messages:
            summary.first_messages += [(int(rounds[row]), name, values[row]) for name, values in fields.items()]


# ---- on the terminal -------------------------------------------------------------------------------------------------


def show(place: str, *, sender: int | str = 0, max_messages: int = 3, console: Console | None = None) -> None:
    """Show the captures and transcripts in a folder.

    Args:
        place: a capture, a folder with captures, or a simulated transcript.
        sender: learner whose first messages are shown: an index, or a name of the run's spec.
        max_messages: maximum number of shown messages.

    Raises:
        CaptureError: There are none, or they cannot be read.
        SpecError: The learner does not exist.
    """
    console = console or terminal.create_console(highlight=False)
    captures, simulated = find_transcripts(place)
    channels, rows = [], list[tuple[Any, ...]]()
    if len(captures) == 1:
        channels = _show_one(captures[0], sender, max_messages, console)
    elif captures:
        _show_list(captures, console)
    heads = ("run", "world", "field", "rounds", "learners", "replicas", "numbers")
    if simulated:
        with open_database(captures, simulated, "broadcasts") as connection:
            sql = "SELECT run, world, field, count(DISTINCT round), count(DISTINCT sender), count(DISTINCT replica), "
            sql += "any_value(len(value)) FROM broadcasts GROUP BY ALL ORDER BY ALL"
            rows = connection.execute(sql).fetchall()
        table = _create_table(*heads)
        for row in rows:
            table.add_row(*(Text(format_cell(cell)) for cell in row))
        console.print(table)
    terminal.print_json_if_requested(
        lambda: {
            "captures": [_build_document(each) for each in captures],
            "channels": channels,
            "simulated": [dict(zip(heads, row, strict=True)) for row in rows],
        }
    )


def _build_document(capture: Capture) -> dict[str, Any]:
    """Build the metadata of a capture as JSON."""
    facts = capture.metadata
    names = (
        "run_id",
        "world",
        "replica",
        "messages",
        "bytes",
        "detections",
        "detection_count",
        "gaps",
        "unchecked_reason",
    )
    return {"capture": capture.name, "complete": capture.is_complete, **{name: facts.get(name) for name in names}}


def _show_list(captures: Sequence[Capture], console: Console) -> None:
    names = [format_cell(each.name.rstrip("/").rsplit("/", 1)[-1]) for each in captures]
    runs = [format_cell(each.metadata["run_id"]) for each in captures]
    values_by_key = {key: [each.metadata.get(key) for each in captures] for key in ("world", "replica")}
    labels = [key for key, values in values_by_key.items() if any(value is not None for value in values)]
    has_run_column = not all(map(str.startswith, names, runs))  # otherwise names of captures begin with their run's id
    table = _create_table(
        "capture", *(["run"] if has_run_column else []), *labels, "messages", "bytes", "state", "detections"
    )
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
            *([Text(runs[k])] if has_run_column else []),
            *(MISSING_VALUE if values_by_key[key][k] is None else str(values_by_key[key][k]) for key in labels),
            format_count(facts["messages"]) if capture.ciphertext is None else MISSING_VALUE,
            format_bytes(facts["bytes"] if capture.ciphertext is None else capture.ciphertext.bytes),
            state,
            Text(format_count(found), style="bold red" if found else ""),
        )
    console.print(table)
    console.print(f"{pluralize(len(captures), 'capture')}. Name one to see its summary.", style="dim")


def _show_one(capture: Capture, sender: int | str, max_messages: int, console: Console) -> list[dict[str, Any]]:
    """Show one capture, and return its channels as JSON."""
    names = capture.names
    index = _find_index(names, sender)
    summary = _summarise(capture, index, max_messages)
    facts = terminal.create_fact_grid()
    for name, value in _list_facts(capture, summary):
        facts.add_row(name, value)
    console.print(facts)
    console.print(_build_channels_table(summary, names, tapped=capture.ciphertext is not None))
    console.print(_build_activity_table(summary, names, "message" if capture.ciphertext is None else "record"))
    if summary.first_messages:
        console.print(_build_messages_table(summary, format_learner_name(names, index)))
    return [
        {
            "from": format_learner_name(names, ends[0]),
            "to": format_learner_name(names, ends[1]),
            "messages": each.messages,
            "bytes": each.bytes,
        }
        | {"sizes": sorted(each.sizes), "missing_rounds": each.count_missing()}
        for ends, each in sorted(summary.channels.items())
    ]


def _find_index(names: Sequence[str], sender: int | str) -> int:
    """Find a learner by its name, or by its index as text.

    Raises:
        SpecError: No learner has this name.
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


def _describe_incomplete(gaps: object) -> str:
    if isinstance(gaps, list) and gaps:
        return f"incomplete: {pluralize(len(gaps), 'gap')} in the recording"
    return "cut short: the eavesdropper did not close it, so the last messages may be missing"


def _list_facts(capture: Capture, summary: _CaptureSummary) -> Iterator[tuple[str, Text | str]]:
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
        yield "state", Text(_describe_incomplete(facts.get("gaps")), style="yellow")
    count = sum(channel.messages for channel in summary.channels.values())
    others = ", ".join(f"{format_count(n)} {kind}" for kind, n in sorted(summary.kinds.items()) if kind != "message")
    total = sum(channel.bytes for channel in summary.channels.values())
    if capture.ciphertext is not None:
        yield "captured", f"{describe_ciphertext(summary.kinds.get('opened', 0), count, total)}, by wiretap"
        yield from _list_detections(facts)
        return
    repeats = f" ({format_count(summary.repeats)} of them repeated)" if summary.repeats else ""
    yield (
        "captured",
        f"{pluralize(count, 'message')}{repeats}, {format_bytes(total)}" + (f"; {others}" if others else ""),
    )
    if summary.undecoded:
        yield "not decoded", f"{pluralize(summary.undecoded, 'message')} cannot be decoded"
    yield from _list_detections(facts)


def _list_detections(facts: Any) -> Iterator[tuple[str, Text | str]]:
    found = [each for each in facts.get("detections", ()) if isinstance(each, dict)]
    texts = ["".join(c for c in str(each.get("text")) if c.isprintable()) for each in found]
    if line := describe_detections(facts.get("detection_count", 0), texts):
        yield "detections", Text(line, style="bold red")
        for text in texts[1:_MAX_SHOWN_DETECTIONS]:
            yield "", Text(text, style="red")
    elif "detection_count" in facts and facts.get("ciphertext") is None:
        yield "detections", "none"
    if facts.get("unchecked_reason"):
        yield "not checked", Text(str(facts["unchecked_reason"])[:300])


def _build_channels_table(summary: _CaptureSummary, names: Sequence[str], *, tapped: bool) -> Table:
    """Build the table of bytes, sizes and missing rounds of every channel; ciphertext has no rounds."""
    heads = ("records", "bytes", "size", "connections") if tapped else ("messages", "bytes", "size", "streams")
    table = _create_table("from", "to", *heads, *(() if tapped else ("rounds", "missing")))
    for (sender, receiver), channel in sorted(summary.channels.items())[:MAX_EDGES]:
        sizes = (
            f"{format_count(min(channel.sizes))}–{format_count(max(channel.sizes))}"
            if len(channel.sizes) > 1
            else format_count(*channel.sizes)
        )
        missing = channel.count_missing()
        cells = (
            Text(format_learner_name(names, sender)),
            Text(format_learner_name(names, receiver)),
            format_count(channel.messages),
            format_bytes(channel.bytes),
            sizes,
            format_count(len(channel.streams)),
        )
        rounds = (
            () if tapped else (channel.format_span(), Text(format_count(missing), style="yellow" if missing else ""))
        )
        table.add_row(*cells, *rounds)
    if len(summary.channels) > MAX_EDGES:
        table.add_row(f"… {len(summary.channels) - MAX_EDGES} more", style="dim")
    return table


def _build_activity_table(summary: _CaptureSummary, names: Sequence[str], unit: str) -> Table:
    """Build the table of messages, or records, of each learner over time, and of its longest pause."""
    table = _create_table("learner", "activity", "longest pause")
    times = {i: np.sort(np.concatenate(own)) for i, own in sorted(summary.times.items())}
    known = [own for own in times.values() if len(own)]
    if not known:
        return table
    begin, end = min(int(own[0]) for own in known), max(int(own[-1]) for own in known)
    edges = np.linspace(begin, max(end, begin + 1), _TIME_SLICES + 1)
    counts = {i: np.histogram(own, edges)[0] for i, own in times.items()}
    highest = max(int(each.max()) for each in counts.values())
    for i, own in list(times.items())[:MAX_LEARNERS]:
        bars = "".join(_BARS[-(-int(n) * (len(_BARS) - 1) // highest)] for n in counts[i])
        pause = format_duration(float(np.diff(own).max(initial=0)) / 1e9)
        table.add_row(Text(format_learner_name(names, i)), Text(bars, style="cyan"), pause)
    span = format_duration((end - begin) / 1e9)
    table.caption = f"from {_format_time(begin)} over {span}; a full bar: {pluralize(highest, unit)}"
    return table


def _format_time(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"


def _build_messages_table(summary: _CaptureSummary, sender: str) -> Table:
    table = _create_table("round", "field", f"values of {sender}", "largest")
    for t, name, values in summary.first_messages:
        flat = values.reshape(-1)
        largest = format_number(float(np.abs(flat).max(initial=0.0)))
        table.add_row(format_count(t), format_cell(name), format_numbers([float(v) for v in flat], 5), largest)
    return table


def _create_table(*heads: str) -> Table:
    table = terminal.create_table(caption_justify="left")
    texts = {"field", "capture", "run", "activity", "state"}
    for head in heads:
        left = head in texts or head.startswith("values")
        no_wrap = not left or head in ("run", "capture")  # ids are copied, so they are not cut
        table.add_column(
            head, justify="left" if left else "right", overflow="fold" if left else "ellipsis", no_wrap=no_wrap
        )
    return table
