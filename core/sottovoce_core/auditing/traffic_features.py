"""Traffic of one run on the wire, and the features of it that classifiers use.

Features are decoded numbers, sizes, counts, order, metadata, status, bytes, and times.

No feature depends on the time of day or on the position of a run among the others: worlds may be recorded one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing import http2_frames as http2
from sottovoce_core.auditing.blackbox import build_number_views
from sottovoce_core.auditing.http2_frames import Http2Frame

# ---- traffic ---------------------------------------------------------------------------------------------------------

MAX_HEAD_BYTES, MAX_FIELD_NUMBERS = 64, 128
"""Maximum number of first bytes of a message, and of first numbers of each of its fields, that features use."""


@dataclass(frozen=True, slots=True)
class DecodedMessage:
    """Content of a message as read by a decoder.

    Attributes:
        fields: field name to numbers, of any shape.
        round, sender: round and sender of the message: one sender must not send two contents in a round. Without rounds, round
            is None and the sender is the side of the connection.
    """

    fields: Mapping[str, Any]
    round: int | None = None
    sender: str | int | None = None


@dataclass(frozen=True, slots=True)
class CapturedFrame:
    """Captured item of traffic.

    Attributes:
        kind: `message`, `metadata`, `trailers` or `unfinished`, a message that has no end; between learners also `hello`, with
            which a stream begins, and `signature`, of the sent messages. In a wiretap `ciphertext`, or `opened` and `closed`: a
            connection, and either side of it.
        method: gRPC method; between learners with the edge, and in a wiretap the edge alone.
        direction: `out`, to the service, or `back`.
        stream: number of the stream in the run, from 0; in a wiretap, of the connection.
        seconds: time since the run began.
        size: total size in bytes.
        head: first `MAX_HEAD_BYTES` bytes of a message.
        digest: digest of all its bytes.
        entries: key and value of metadata, hellos and trailers; of an unfinished message its bytes.
        status: code and text of trailers.
        decoded_message: content read by the decoder, each field flat and at most `MAX_FIELD_NUMBERS` long; None: nothing.
        role: `sent` by the audited party, `received` by it, or `others`'. All traffic of a foreign service counts as sent.
    """

    kind: Literal[
        "message", "hello", "signature", "metadata", "trailers", "unfinished", "ciphertext", "opened", "closed"
    ]
    method: str
    direction: Literal["out", "back"]
    stream: int
    seconds: float
    size: int
    head: bytes = b""
    digest: bytes = b""
    entries: tuple[tuple[str, str], ...] = ()
    status: tuple[str, str] = ("", "")
    decoded_message: DecodedMessage | None = None
    role: Literal["sent", "received", "others"] = "sent"

    @property
    def place(self) -> str:
        """Method and direction as readable text."""
        return f"{self.method} {'request' if self.direction == 'out' else 'response'}"


@dataclass(frozen=True, slots=True)
class RunTraffic:
    """Captured traffic of one run.

    Attributes:
        world: 0 or 1.
        name: location of the run in the captures.
        start_time: time that orders the runs.
        frames: all captured frames, in order of time.
        http2_frames: place and frame of HTTP/2 of what the audited party sent or received, without messages.
    """

    world: int
    name: str
    start_time: float
    frames: tuple[CapturedFrame, ...]
    http2_frames: tuple[tuple[str, Http2Frame], ...] = ()

    @property
    def messages(self) -> tuple[CapturedFrame, ...]:
        """Messages of the audited party only."""
        return tuple(each for each in self.frames if each.kind == "message" and each.role == "sent")

    @property
    def audited_frames(self) -> tuple[CapturedFrame, ...]:
        """Frames that the audited party sent or received."""
        return tuple(each for each in self.frames if each.role != "others")


DIGEST_BYTES = 16


def digest(payload: bytes) -> bytes:
    """Compute a digest that is equal for equal bytes, and in practice only for them."""
    return blake2b(payload, digest_size=DIGEST_BYTES).digest()


def flatten_numbers(values: Any) -> FloatArray:
    """Flatten a decoded field for the features: float64, at most `MAX_FIELD_NUMBERS` long, without infinities.

    Raises:
        TypeError, ValueError: the values are not numbers.
    """
    flat = np.asarray(values)
    if flat.dtype.kind not in "biuf":
        raise TypeError(f"a field must hold numbers, got {flat.dtype}")
    return np.clip(np.nan_to_num(flat.reshape(-1)[:MAX_FIELD_NUMBERS].astype(np.float64)), -1e100, 1e100)


# ---- features --------------------------------------------------------------------------------------------------------

MAX_ITEMS_PER_KIND, MAX_COLUMNS = 16, 1024
"""Maximum number of first items of one kind in a run that features use, and maximum number of columns of a view."""

_Item = tuple[Hashable, Sequence[float]]
"""Kind of an item, and its numbers: their count is fixed for each kind."""

FeatureLayout = tuple[tuple[Hashable, int], ...]
"""Positions of the numbers of a run: the kind of the item with its count within the run, and the number of its numbers."""

_View = Callable[[RunTraffic], Iterable[_Item]]


@dataclass(frozen=True, slots=True)
class RunFeatures:
    """Features of one run in one view; nothing else of the run is kept.

    Attributes:
        layout: positions of the numbers.
        numbers: all numbers, concatenated.
    """

    layout: FeatureLayout
    numbers: FloatArray


def build_features_by_view(run: RunTraffic, kinds: Mapping[str, _View]) -> dict[str, RunFeatures]:
    """Build the features of a run in several views."""
    return {name: build_features(items(run)) for name, items in kinds.items()}


def build_features(items: Iterable[_Item]) -> RunFeatures:
    """Build features from the first `MAX_ITEMS_PER_KIND` items of every kind."""
    counts: Counter[Hashable] = Counter()
    layout: list[tuple[Hashable, int]] = []
    numbers: list[float] = []
    for kind, values in items:
        if counts[kind] < MAX_ITEMS_PER_KIND:
            layout.append(((kind, counts[kind]), len(values)))
            numbers.extend(values)
        counts[kind] += 1
    return RunFeatures(tuple(layout), np.array(numbers, dtype=np.float64))


def _build_table(runs: Sequence[RunFeatures]) -> FloatArray:
    """Build `(runs, features)`: items of the same kind share columns; -1 where a run has fewer.

    Kinds that most runs have come first; columns beyond `MAX_COLUMNS` are omitted.
    """
    columns = _assign_columns(runs)
    table = np.full((len(runs), sum(width for _, width in columns.values())), -1.0)
    for k, run in enumerate(runs):
        start = 0
        for key, width in run.layout:
            if key in columns:
                first, _ = columns[key]
                table[k, first : first + width] = run.numbers[start : start + width]
            start += width
    return table


def _assign_columns(runs: Sequence[RunFeatures]) -> dict[Hashable, tuple[int, int]]:
    """Assign columns of a table to the kinds of items that fit: first column and number of columns."""
    common = Counter(key for run in runs for key, _ in run.layout)
    widths = {key: width for run in runs for key, width in run.layout}
    columns: dict[Hashable, tuple[int, int]] = {}
    total = 0
    for key, _ in common.most_common():
        if total + widths[key] <= MAX_COLUMNS:
            columns[key] = total, widths[key]
            total += widths[key]
    return columns


def locate_column(runs: Sequence[RunTraffic], view: str, column: int) -> tuple[Hashable, int, int]:
    """Locate a column of a view of `CHANNEL_VIEWS`: kind of the item, its count within a run, index of its number."""
    for key, (first, width) in _assign_columns([build_features(CHANNEL_VIEWS[view](run)) for run in runs]).items():
        if first <= column < first + width and isinstance(key, tuple):
            kind, k = key
            return kind, k, column - first
    raise IndexError(column)


def build_tables(runs: Sequence[Mapping[str, RunFeatures]]) -> dict[str, FloatArray]:
    """Build the table of every view over all runs."""
    return {name: _build_table([run[name] for run in runs]) for name in runs[0]}


def build_views(runs: Sequence[RunTraffic]) -> dict[str, FloatArray]:
    """Build all views except timing, by name: finite numbers `(runs, features)`.

    The views that are easiest to understand come first.
    """
    found: dict[str, FloatArray] = {}
    fields = collect_decoded_fields(runs)
    for field, values in fields.items():
        with np.errstate(over="ignore"):  # where most numbers are zero, others are huge in units of their spread
            found |= {f"{name} of {field}": view for name, view in build_number_views(values).items()}
    if len(fields) > 1:
        all_values = np.concatenate([values.reshape(len(runs), -1) for values in fields.values()], axis=1)
        found["values of all fields"] = all_values[:, :MAX_COLUMNS]
    return found | build_tables([build_features_by_view(run, {**CHANNEL_VIEWS, **CIPHERTEXT_VIEWS}) for run in runs])


def build_timing_views(runs: Sequence[RunTraffic]) -> dict[str, FloatArray]:
    """Build the views `gaps`, the times between consecutive frames, `flow control`, and `paces`, of ciphertext."""
    views = {"gaps": _extract_gaps, "flow control": _extract_flow_control, "paces": _extract_ciphertext_paces}
    return build_tables([build_features_by_view(run, views) for run in runs])


# ---- decoded numbers -------------------------------------------------------------------------------------------------


def collect_decoded_fields(runs: Sequence[RunTraffic]) -> dict[str, FloatArray]:
    """Collect decoded fields as `(runs, messages, numbers)`, in the order of sending; zero where a run has no such message.

    A field that occurs in several kinds of messages counts as several fields.
    """
    fields = {}
    for field, messages in _find_decoded_fields(runs).items():
        widest = max(len(values) for occurrences in messages for _, values, _ in occurrences)
        width = min(widest, max(1, MAX_FIELD_NUMBERS * MAX_ITEMS_PER_KIND // len(messages)))
        fields[field] = dense = np.zeros((len(runs), len(messages), width))
        for t, occurrences in enumerate(messages):
            for k, values, _ in occurrences:
                dense[k, t, : len(values)] = values[:width]
    return fields


def find_field_sources(runs: Sequence[RunTraffic]) -> dict[str, list[list[tuple[int, DecodedMessage]]]]:
    """Return, for every field of `collect_decoded_fields` and message, the runs that have it and the decoded messages."""
    fields = _find_decoded_fields(runs).items()
    return {
        field: [[(k, each) for k, _, each in occurrences] for occurrences in messages] for field, messages in fields
    }


def _find_decoded_fields(runs: Sequence[RunTraffic]) -> dict[str, list[list[tuple[int, FloatArray, DecodedMessage]]]]:
    """Return, for every field and every message, the runs that have it, its numbers, and the decoded messages."""
    found: dict[str, list[list[tuple[int, FloatArray, DecodedMessage]]]] = {}
    for k, run in enumerate(runs):
        count = Counter[str]()
        for message in run.messages:
            if (decoded := message.decoded_message) is None:
                continue
            for name, values in decoded.fields.items():
                field = f"{name} in {message.place}"
                messages = found.setdefault(field, [])
                if count[field] < MAX_ITEMS_PER_KIND:
                    if count[field] == len(messages):
                        messages.append([])
                    messages[count[field]].append((k, values, decoded))
                count[field] += 1
    names = _shorten_names(found)
    return {names[field]: messages for field, messages in found.items()}


def _shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Shorten names by omitting the place where they remain distinct."""
    short = {name: name.split(" in ", 1)[0] for name in names}
    counts = Counter(short.values())
    return {name: alias if counts[alias] == 1 else name for name, alias in short.items()}


# ---- channel ---------------------------------------------------------------------------------------------------------


def _hash_to_bits(text: str) -> list[float]:
    """Hash a text to eight numbers that distinguish it from most others."""
    bucket = blake2b(text.encode(errors="replace"), digest_size=1).digest()[0]
    return [float(bucket >> k & 1) for k in range(8)]


def _parse_number(text: str) -> float:
    """Parse a text as a number; return 0 if it is not one, or too extreme for a classifier."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, -1e100), 1e100) if math.isfinite(value) else 0.0


def _extract_sizes(run: RunTraffic) -> Iterator[_Item]:
    return (((each.kind, each.place), (each.size,)) for each in run.frames)


def _extract_counts(run: RunTraffic) -> Iterator[_Item]:
    """Count streams; items and bytes of every kind; entries of metadata."""
    yield "streams", (len({each.stream for each in run.frames}),)
    items = Counter((each.kind, each.place) for each in run.frames)
    volume = Counter[Hashable]()
    entries = Counter[Hashable]()
    for each in run.frames:
        volume[each.kind, each.place] += each.size
        entries[each.kind, each.place] += len(each.entries)
    for kind, count in items.items():
        yield kind, (count, volume[kind], entries[kind])


def _extract_order(run: RunTraffic) -> Iterator[_Item]:
    """Hash the frames of each direction separately: the order across the two directions is a matter of timing."""
    return (
        ((each.role, each.direction), _hash_to_bits(f"{each.stream} {each.kind} {each.method}"))
        for each in run.audited_frames
    )


def _extract_metadata(run: RunTraffic) -> Iterator[_Item]:
    for each in run.audited_frames:
        for key, value in each.entries:
            yield (each.kind, each.place, key), (len(value), _parse_number(value), *_hash_to_bits(value))


def _extract_status(run: RunTraffic) -> Iterator[_Item]:
    for each in run.audited_frames:
        if each.kind == "trailers":
            code, text = each.status
            yield each.method, (len(text), *_hash_to_bits(code), *_hash_to_bits(text))


def _extract_bytes(run: RunTraffic) -> Iterator[_Item]:
    """Return the first bytes of messages whose content was read."""
    messages = (each for each in run.messages if each.head or not each.size)
    return ((each.place, list(each.head.ljust(MAX_HEAD_BYTES, b"\0"))) for each in messages)


def _extract_repeats(run: RunTraffic) -> Iterator[_Item]:
    """Mark whether a message was sent before in this run."""
    digests: set[bytes] = set()
    for each in run.messages:
        yield each.place, (float(each.digest in digests),)
        digests.add(each.digest)


_FLOW_CONTROL = frozenset({http2.DATA, http2.RST_STREAM, http2.PING, http2.WINDOW_UPDATE})
_FLOW_CONTROL_SETTINGS = frozenset({4, 5})
"""Kinds of frames, and keys of settings (sizes of windows and frames), that gRPC's library chooses by how fast bytes come."""


def _extract_http2(run: RunTraffic) -> Iterator[_Item]:
    """Return frames of HTTP/2: flags, padding, settings, and contents, which packed headers are not."""
    for place, frame in run.http2_frames:
        if frame.kind == http2.SETTINGS:
            for key, value in frame.settings:
                if key not in _FLOW_CONTROL_SETTINGS:
                    yield (f"setting {key}", place), (value, *_hash_to_bits(str(value)))
        elif frame.kind in (http2.HEADERS, http2.CONTINUATION) or frame.padding:
            yield (frame.name, place), (frame.flags, frame.padding)
        elif frame.kind not in _FLOW_CONTROL:
            content = (
                frame.content[4:] if frame.kind == http2.GOAWAY else frame.content
            )  # the last stream: who was first
            yield (frame.name, place), (frame.flags, len(content), *_hash_to_bits(content.hex()))


def _extract_flow_control(run: RunTraffic) -> Iterator[_Item]:
    """Return sizes of frames of data, changes of windows, and what pings and resets say."""
    for place, frame in run.http2_frames:
        if frame.kind == http2.SETTINGS:
            for key, value in frame.settings:
                if key in _FLOW_CONTROL_SETTINGS:
                    yield (f"setting {key}", place), (value,)
        elif frame.kind == http2.DATA:
            yield (frame.name, place), (frame.size,)
        elif frame.kind in (http2.WINDOW_UPDATE, http2.RST_STREAM):
            yield (frame.name, place), (int.from_bytes(frame.content[:4]),)
        elif frame.kind == http2.PING:
            yield (f"{frame.name} {frame.flags}", place), list(frame.content[:8].ljust(8, b"\0"))


CHANNEL_VIEWS: Mapping[str, _View] = {
    "sizes": _extract_sizes,
    "counts": _extract_counts,
    "order": _extract_order,
    "metadata": _extract_metadata,
    "status": _extract_status,
    "bytes": _extract_bytes,
    "repeated messages": _extract_repeats,
    "http2": _extract_http2,
}
"""Views of the channel other than decoded numbers."""


# ---- ciphertext ------------------------------------------------------------------------------------------------------


def _iterate_ciphertext(run: RunTraffic) -> Iterator[CapturedFrame]:
    return (each for each in run.frames if each.kind == "ciphertext")


def _extract_sizes_in_order(run: RunTraffic) -> Iterator[_Item]:
    """Return sizes of the first records of every direction of an edge, in order, across all connections."""
    sizes: dict[str, list[float]] = {}
    for each in _iterate_ciphertext(run):
        sizes.setdefault(each.place, []).append(float(each.size))
    for place, own in sizes.items():
        yield place, [*own[:MAX_FIELD_NUMBERS], *[-1.0] * (MAX_FIELD_NUMBERS - len(own))]


def _extract_size_counts(run: RunTraffic) -> Iterator[_Item]:
    """Count the records of each size: one additional record is visible at any position."""
    for (place, size), count in Counter((each.place, each.size) for each in _iterate_ciphertext(run)).items():
        yield (place, size), (count,)


def _extract_connections(run: RunTraffic) -> Iterator[_Item]:
    """Return, for every connection of an edge, records and bytes of either direction, and the side that ends first."""
    connections: dict[tuple[str, int], list[float]] = {}
    for each in run.frames:
        if each.kind in ("opened", "ciphertext", "closed"):
            own, back = connections.setdefault((each.method, each.stream), [0.0] * 5), 2 * (each.direction == "back")
            if each.kind == "ciphertext":
                own[back] += 1.0
                own[back + 1] += each.size
            elif each.kind == "closed" and not own[4]:
                own[4] = 1.0 + back
    for (edge, _), own in connections.items():
        yield edge, own


def _extract_bursts(run: RunTraffic) -> Iterator[_Item]:
    """Count how often one side of a connection sends a given number of records before the other side sends."""
    open_bursts: dict[tuple[str, int], tuple[str, int]] = {}
    ended = Counter[tuple[str, int]]()
    for each in _iterate_ciphertext(run):
        key = each.method, each.stream
        place, records = open_bursts.get(key, (each.place, 0))
        if place != each.place:
            ended[place, records] += 1
            records = 0
        open_bursts[key] = each.place, records + 1
    ended.update(open_bursts.values())
    return ((burst, (count,)) for burst, count in ended.items())


CIPHERTEXT_VIEWS: Mapping[str, _View] = {
    "connections": _extract_connections,
    "records of each size": _extract_size_counts,
    "sizes in order": _extract_sizes_in_order,
    "bursts": _extract_bursts,
}
"""Views of ciphertext; empty if there is none."""


# ---- times -----------------------------------------------------------------------------------------------------------


def _extract_gaps(run: RunTraffic) -> Iterator[_Item]:
    """Return the logarithm of the time since the previous frame."""
    previous = run.frames[0].seconds if run.frames else 0.0
    for each in run.frames:
        yield (each.kind, each.place), (math.log(max(each.seconds - previous, 0.0) + 1e-6),)
        previous = each.seconds


def _extract_paces(run: RunTraffic) -> Iterator[_Item]:
    """Return times between the messages of one place: the first ones, and quantiles of all."""
    for place, sent in _group_times_by_place(run).items():
        yield place, _summarize_log_times(np.diff(sent))


def _extract_replies(run: RunTraffic) -> Iterator[_Item]:
    """Return times from the latest received message to the next sent one, in every place."""
    received = np.sort([each.seconds for each in run.frames if each.kind == "message" and each.role == "received"])
    for place, sent in _group_times_by_place(run).items():
        before = np.searchsorted(received, sent) - 1
        yield place, _summarize_log_times((sent - received[before])[before >= 0] if len(received) else np.empty(0))


def _extract_ciphertext_paces(run: RunTraffic) -> Iterator[_Item]:
    """Return times between records of a direction, and the duration of every connection."""
    seconds: dict[str, list[float]] = {}
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for each in run.frames:
        if each.kind in ("opened", "ciphertext", "closed"):
            first, _ = spans.get((each.method, each.stream), (each.seconds, 0.0))
            spans[each.method, each.stream] = first, each.seconds
        if each.kind == "ciphertext":
            seconds.setdefault(each.place, []).append(each.seconds)
    for place, own in seconds.items():
        yield place, _summarize_log_times(np.diff(np.array(own)))
    for (edge, _), (first, last) in spans.items():
        yield edge, (math.log(last - first + 1e-6),)


def _group_times_by_place(run: RunTraffic) -> dict[str, FloatArray]:
    places = dict.fromkeys(each.place for each in run.messages)
    return {place: np.array([each.seconds for each in run.messages if each.place == place]) for place in places}


def _summarize_log_times(spans: FloatArray) -> list[float]:
    """Summarise times in nanoseconds: logarithms of the first ones, -1 where there are fewer, then quantiles and mean."""
    logs = np.log(np.maximum(1e9 * spans, 1.0))
    first = np.full(MAX_ITEMS_PER_KIND, -1.0)
    first[: len(logs)] = logs[:MAX_ITEMS_PER_KIND]
    distribution = [*np.quantile(logs, (0.1, 0.5, 0.9, 1.0)), logs.mean()] if len(logs) else [-1.0] * 5
    return [*first.tolist(), *map(float, distribution)]


TIMING_VIEWS: Mapping[str, _View] = {
    "gaps": _extract_paces,
    "replies": _extract_replies,
    "flow control": _extract_flow_control,
}
"""Timing views of a sender whose clock, machine and neighbours are the same in both worlds."""
