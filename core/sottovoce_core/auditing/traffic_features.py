"""What passed on the wire in one run, and what classifiers may look at in it.

What classifiers may look at in conversations: decoded numbers, sizes, counts, order, metadata, status, bytes; and times.

Nothing here depends on the time of day or on the place of a run among the others: worlds may be recorded one after the other.
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
from sottovoce_core.auditing.blackbox import build_number_views

# ---- conversations ---------------------------------------------------------------------------------------------------

MAX_HEAD_BYTES, MAX_FIELD_NUMBERS = 64, 128
"""Of a message: the first bytes, and of each of its fields the first numbers, that are looked at."""


@dataclass(frozen=True, slots=True)
class DecodedMessage:
    """What a decoder read from a message.

    Attributes:
        fields: name to numbers, of any shape.
        round, sender: whose word it is, and in which round: one sender must not say two things in a round. None: no rounds;
            the side of the connection that it came from.
    """

    fields: Mapping[str, Any]
    round: int | None = None
    sender: str | int | None = None


@dataclass(frozen=True, slots=True)
class CapturedFrame:
    """One thing that passed.

    Attributes:
        kind: `message`, `metadata` or `trailers`; between learners also `hello`, with which a stream begins, and `signature`, of
            what was said. Of a wiretap `ciphertext`, or `opened` and `closed`: a connection, and either side of it.
        method: the gRPC method; between learners with the edge, and of a wiretap the edge alone.
        direction: `out`, to the service, or `back`.
        stream: counts the streams of the run from 0; of a wiretap, the connections.
        seconds: since the run began.
        size: in bytes, all of it.
        head: the first `HEAD` bytes of a message.
        digest: of all its bytes.
        entries: of metadata, hellos and trailers, key and value.
        status: code and text of trailers.
        decoded: what the decoder read, each field flat and at most `WIDTH` long; None: nothing.
        whose: `said` by the one who is audited, `told` to it, or `others`'. Of a foreign service everything counts as said.
    """

    kind: Literal["message", "hello", "signature", "metadata", "trailers", "ciphertext", "opened", "closed"]
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
    role: Literal["said", "told", "others"] = "said"

    @property
    def place(self) -> str:
        """Method and direction, for people."""
        return f"{self.method} {'request' if self.direction == 'out' else 'response'}"


@dataclass(frozen=True, slots=True)
class RunTraffic:
    """One run.

    Attributes:
        world: 0 or 1.
        name: where it is in the captures.
        began: orders the runs.
        heard: all that passed, in order of time.
    """

    world: int
    name: str
    start_time: float
    frames: tuple[CapturedFrame, ...]

    @property
    def messages(self) -> tuple[CapturedFrame, ...]:
        """Only the messages of the one who is audited."""
        return tuple(each for each in self.frames if each.kind == "message" and each.role == "said")

    @property
    def audited_frames(self) -> tuple[CapturedFrame, ...]:
        """What the one who is audited said and was told."""
        return tuple(each for each in self.frames if each.role != "others")


def digest(payload: bytes) -> bytes:
    """Equal for equal bytes, and, for all that matters, only for them."""
    return blake2b(payload, digest_size=16).digest()


def flatten_numbers(values: Any) -> FloatArray:
    """A decoded field as it is looked at: flat, float64, at most `WIDTH` long, without infinities.

    Raises:
        TypeError, ValueError: these are not numbers.
    """
    flat = np.asarray(values)
    if flat.dtype.kind not in "biuf":
        raise TypeError(f"a field must hold numbers, got {flat.dtype}")
    return np.clip(np.nan_to_num(flat.reshape(-1)[:MAX_FIELD_NUMBERS].astype(np.float64)), -1e100, 1e100)


# ---- features --------------------------------------------------------------------------------------------------------

MAX_ITEMS_PER_KIND, MAX_COLUMNS = 16, 1024
"""Of one kind of thing, the first so many in a run are looked at; of a view, at most so many columns."""

_Item = tuple[Hashable, Sequence[float]]
"""What kind of thing, and its numbers: always as many for one kind."""

FeatureLayout = tuple[tuple[Hashable, int], ...]
"""What the numbers of a run are: the kind of thing, counted within the run, and how many numbers it has."""

_View = Callable[[RunTraffic], Iterable[_Item]]


@dataclass(frozen=True, slots=True)
class RunFeatures:
    """A run as one view shows it: all that is kept of it.

    Attributes:
        layout: what the numbers are.
        numbers: side by side.
    """

    layout: FeatureLayout
    numbers: FloatArray


def build_features_by_view(run: RunTraffic, kinds: Mapping[str, _View]) -> dict[str, RunFeatures]:
    """A run in several views."""
    return {name: build_features(items(run)) for name, items in kinds.items()}


def build_features(items: Iterable[_Item]) -> RunFeatures:
    """The first `MAX_ITEMS_PER_KIND` things of every kind."""
    seen: Counter[Hashable] = Counter()
    layout: list[tuple[Hashable, int]] = []
    numbers: list[float] = []
    for kind, values in items:
        if seen[kind] < MAX_ITEMS_PER_KIND:
            layout.append(((kind, seen[kind]), len(values)))
            numbers.extend(values)
        seen[kind] += 1
    return RunFeatures(tuple(layout), np.array(numbers, dtype=np.float64))


def _table(runs: Sequence[RunFeatures]) -> FloatArray:
    """`(runs, features)`: things of the same kind below each other; -1 where a run had fewer.

    Kinds that most runs have come first; what does not fit into `COLUMNS` is left out.
    """
    columns = _columns(runs)
    found = np.full((len(runs), sum(width for _, width in columns.values())), -1.0)
    for k, run in enumerate(runs):
        start = 0
        for key, width in run.layout:
            if key in columns:
                first, _ = columns[key]
                found[k, first : first + width] = run.numbers[start : start + width]
            start += width
    return found


def _columns(runs: Sequence[RunFeatures]) -> dict[Hashable, tuple[int, int]]:
    """Of every kind of thing that fits, the first column of a table, and how many it has."""
    common = Counter(key for run in runs for key, _ in run.layout)
    widths = {key: width for run in runs for key, width in run.layout}
    found: dict[Hashable, tuple[int, int]] = {}
    total = 0
    for key, _ in common.most_common():
        if total + widths[key] <= MAX_COLUMNS:
            found[key] = total, widths[key]
            total += widths[key]
    return found


def locate_column(runs: Sequence[RunTraffic], view: str, column: int) -> tuple[Hashable, int, int]:
    """What a column of a view of `CHANNEL_VIEWS` is of: the kind of thing, its count within a run, and which of its numbers."""
    for key, (first, width) in _columns([build_features(CHANNEL_VIEWS[view](run)) for run in runs]).items():
        if first <= column < first + width and isinstance(key, tuple):
            kind, k = key
            return kind, k, column - first
    raise IndexError(column)


def build_tables(runs: Sequence[Mapping[str, RunFeatures]]) -> dict[str, FloatArray]:
    """Every view of all runs."""
    return {name: _table([run[name] for run in runs]) for name in runs[0]}


def build_views(runs: Sequence[RunTraffic]) -> dict[str, FloatArray]:
    """All views but timing, by name: finite numbers `(runs, features)`. Those that people understand best come first."""
    found: dict[str, FloatArray] = {}
    said = collect_decoded_fields(runs)
    for field, values in said.items():
        with np.errstate(over="ignore"):  # where most numbers are zero, others are huge in units of their spread
            found |= {f"{name} of {field}": view for name, view in build_number_views(values).items()}
    if len(said) > 1:
        every = np.concatenate([values.reshape(len(runs), -1) for values in said.values()], axis=1)
        found["values of all fields"] = every[:, :MAX_COLUMNS]
    return found | build_tables([build_features_by_view(run, {**CHANNEL_VIEWS, **CIPHERTEXT_VIEWS}) for run in runs])


def build_timing_views(runs: Sequence[RunTraffic]) -> dict[str, FloatArray]:
    """The view `gaps`: the times between whatever passed; and `paces`, of ciphertext."""
    return build_tables([build_features_by_view(run, {"gaps": _gaps, "paces": _tapped_paces}) for run in runs])


# ---- decoded numbers -------------------------------------------------------------------------------------------------


def collect_decoded_fields(runs: Sequence[RunTraffic]) -> dict[str, FloatArray]:
    """Decoded fields as `(runs, messages, numbers)`, in the order in which a run said them; zero where it did not.

    A field that stands in several kinds of messages is several fields.
    """
    found = {}
    for field, messages in _decoded_fields(runs).items():
        widest = max(len(values) for them in messages for _, values, _ in them)
        width = min(widest, max(1, MAX_FIELD_NUMBERS * MAX_ITEMS_PER_KIND // len(messages)))
        found[field] = dense = np.zeros((len(runs), len(messages), width))
        for t, them in enumerate(messages):
            for k, values, _ in them:
                dense[k, t, : len(values)] = values[:width]
    return found


def find_field_sources(runs: Sequence[RunTraffic]) -> dict[str, list[list[tuple[int, DecodedMessage]]]]:
    """Of every field of `decoded`, message by message, the runs that have it, and what was decoded there."""
    fields = _decoded_fields(runs).items()
    return {field: [[(k, each) for k, _, each in them] for them in messages] for field, messages in fields}


def _decoded_fields(runs: Sequence[RunTraffic]) -> dict[str, list[list[tuple[int, FloatArray, DecodedMessage]]]]:
    """Of every field, message by message, the runs that have it, its numbers, and what was decoded there."""
    found: dict[str, list[list[tuple[int, FloatArray, DecodedMessage]]]] = {}
    for k, run in enumerate(runs):
        count = Counter[str]()
        for message in run.messages:
            if (said := message.decoded_message) is None:
                continue
            for name, values in said.fields.items():
                field = f"{name} in {message.place}"
                messages = found.setdefault(field, [])
                if count[field] < MAX_ITEMS_PER_KIND:
                    if count[field] == len(messages):
                        messages.append([])
                    messages[count[field]].append((k, values, said))
                count[field] += 1
    names = _shortened(found)
    return {names[field]: messages for field, messages in found.items()}


def _shortened(found: Iterable[str]) -> dict[str, str]:
    """Names without the place where that leaves them different."""
    short = {name: name.split(" in ", 1)[0] for name in found}
    counts = Counter(short.values())
    return {name: alias if counts[alias] == 1 else name for name, alias in short.items()}


# ---- the channel -----------------------------------------------------------------------------------------------------


def _bits(text: str) -> list[float]:
    """A text as eight numbers that tell it from most others."""
    bucket = blake2b(text.encode(errors="replace"), digest_size=1).digest()[0]
    return [float(bucket >> k & 1) for k in range(8)]


def _parsed(text: str) -> float:
    """The number that a text is; 0 if it is none, or none that a classifier could use."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, -1e100), 1e100) if math.isfinite(value) else 0.0


def _sizes(run: RunTraffic) -> Iterator[_Item]:
    return (((each.kind, each.place), (each.size,)) for each in run.frames)


def _counts(run: RunTraffic) -> Iterator[_Item]:
    """Streams; things and bytes of every kind; entries of metadata."""
    yield "streams", (len({each.stream for each in run.frames}),)
    things = Counter((each.kind, each.place) for each in run.frames)
    volume = Counter[Hashable]()
    entries = Counter[Hashable]()
    for each in run.frames:
        volume[each.kind, each.place] += each.size
        entries[each.kind, each.place] += len(each.entries)
    for kind, count in things.items():
        yield kind, (count, volume[kind], entries[kind])


def _order(run: RunTraffic) -> Iterator[_Item]:
    """Of either direction by itself: which of two directions is first is a matter of time."""
    return (
        ((each.role, each.direction), _bits(f"{each.stream} {each.kind} {each.method}")) for each in run.audited_frames
    )


def _metadata(run: RunTraffic) -> Iterator[_Item]:
    for each in run.audited_frames:
        for key, value in each.entries:
            yield (each.kind, each.place, key), (len(value), _parsed(value), *_bits(value))


def _status(run: RunTraffic) -> Iterator[_Item]:
    for each in run.audited_frames:
        if each.kind == "trailers":
            code, text = each.status
            yield each.method, (len(text), *_bits(code), *_bits(text))


def _bytes(run: RunTraffic) -> Iterator[_Item]:
    """Of what was looked into."""
    said = (each for each in run.messages if each.head or not each.size)
    return ((each.place, list(each.head.ljust(MAX_HEAD_BYTES, b"\0"))) for each in said)


def _said_again(run: RunTraffic) -> Iterator[_Item]:
    """Whether a message has been said before in this run."""
    known: set[bytes] = set()
    for each in run.messages:
        yield each.place, (float(each.digest in known),)
        known.add(each.digest)


CHANNEL_VIEWS: Mapping[str, _View] = {
    "sizes": _sizes,
    "counts": _counts,
    "order": _order,
    "metadata": _metadata,
    "status": _status,
    "bytes": _bytes,
    "messages said again": _said_again,
}
"""What passes beside numbers."""


# ---- ciphertext ------------------------------------------------------------------------------------------------------


def _tapped(run: RunTraffic) -> Iterator[CapturedFrame]:
    return (each for each in run.frames if each.kind == "ciphertext")


def _in_order(run: RunTraffic) -> Iterator[_Item]:
    """Sizes of the first records of every direction of an edge, one after the other, whatever connection they are on."""
    sizes: dict[str, list[float]] = {}
    for each in _tapped(run):
        sizes.setdefault(each.place, []).append(float(each.size))
    for place, own in sizes.items():
        yield place, [*own[:MAX_FIELD_NUMBERS], *[-1.0] * (MAX_FIELD_NUMBERS - len(own))]


def _of_each_size(run: RunTraffic) -> Iterator[_Item]:
    """How many records have this size: one more among many is seen wherever it stands."""
    for (place, size), count in Counter((each.place, each.size) for each in _tapped(run)).items():
        yield (place, size), (count,)


def _connections(run: RunTraffic) -> Iterator[_Item]:
    """Of every connection of an edge: records and bytes of either direction, and which side ends first."""
    found: dict[tuple[str, int], list[float]] = {}
    for each in run.frames:
        if each.kind in ("opened", "ciphertext", "closed"):
            own, back = found.setdefault((each.method, each.stream), [0.0] * 5), 2 * (each.direction == "back")
            if each.kind == "ciphertext":
                own[back] += 1.0
                own[back + 1] += each.size
            elif each.kind == "closed" and not own[4]:
                own[4] = 1.0 + back
    for (edge, _), own in found.items():
        yield edge, own


def _bursts(run: RunTraffic) -> Iterator[_Item]:
    """How often one side of a connection sends so many records before the other one does."""
    under_way: dict[tuple[str, int], tuple[str, int]] = {}
    ended = Counter[tuple[str, int]]()
    for each in _tapped(run):
        key = each.method, each.stream
        place, records = under_way.get(key, (each.place, 0))
        if place != each.place:
            ended[place, records] += 1
            records = 0
        under_way[key] = each.place, records + 1
    ended.update(under_way.values())
    return ((burst, (count,)) for burst, count in ended.items())


CIPHERTEXT_VIEWS: Mapping[str, _View] = {
    "connections": _connections,
    "records of each size": _of_each_size,
    "sizes in order": _in_order,
    "bursts": _bursts,
}
"""What ciphertext shows; empty where there is none."""


# ---- times -----------------------------------------------------------------------------------------------------------


def _gaps(run: RunTraffic) -> Iterator[_Item]:
    """Time since whatever passed before, by its logarithm."""
    before = run.frames[0].seconds if run.frames else 0.0
    for each in run.frames:
        yield (each.kind, each.place), (math.log(max(each.seconds - before, 0.0) + 1e-6),)
        before = each.seconds


def _paces(run: RunTraffic) -> Iterator[_Item]:
    """Times between the messages that are said in one place: the first ones, and how all of them lie."""
    for place, said in _by_place(run).items():
        yield place, _logs(np.diff(said))


def _replies(run: RunTraffic) -> Iterator[_Item]:
    """Times from whatever was told last to what is said then, in every place."""
    told = np.sort([each.seconds for each in run.frames if each.kind == "message" and each.role == "told"])
    for place, said in _by_place(run).items():
        before = np.searchsorted(told, said) - 1
        yield place, _logs((said - told[before])[before >= 0] if len(told) else np.empty(0))


def _tapped_paces(run: RunTraffic) -> Iterator[_Item]:
    """Times between records of a direction, and how long every connection is open."""
    seconds: dict[str, list[float]] = {}
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for each in run.frames:
        if each.kind in ("opened", "ciphertext", "closed"):
            first, _ = spans.get((each.method, each.stream), (each.seconds, 0.0))
            spans[each.method, each.stream] = first, each.seconds
        if each.kind == "ciphertext":
            seconds.setdefault(each.place, []).append(each.seconds)
    for place, own in seconds.items():
        yield place, _logs(np.diff(np.array(own)))
    for (edge, _), (first, last) in spans.items():
        yield edge, (math.log(last - first + 1e-6),)


def _by_place(run: RunTraffic) -> dict[str, FloatArray]:
    places = dict.fromkeys(each.place for each in run.messages)
    return {place: np.array([each.seconds for each in run.messages if each.place == place]) for place in places}


def _logs(spans: FloatArray) -> list[float]:
    """Logarithms of times in nanoseconds; -1 where there are fewer."""
    logs = np.log(np.maximum(1e9 * spans, 1.0))
    first = np.full(MAX_ITEMS_PER_KIND, -1.0)
    first[: len(logs)] = logs[:MAX_ITEMS_PER_KIND]
    lie = [*np.quantile(logs, (0.1, 0.5, 0.9, 1.0)), logs.mean()] if len(logs) else [-1.0] * 5
    return [*first.tolist(), *map(float, lie)]


TIMING_VIEWS: Mapping[str, _View] = {"gaps": _paces, "replies": _replies}
"""When somebody speaks whose clock, machine and neighbours are the same in both worlds."""
