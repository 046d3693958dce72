"""What classifiers may look at in conversations: decoded numbers, sizes, counts, order, metadata, status, bytes; and gaps.

Nothing here depends on the time of day or on the place of a run among the others: worlds may be recorded one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.audit.blackbox import number_views
from sottovoce.audit.conversation import HEAD, WIDTH, Conversation
from sottovoce.audit.features import bits, parsed

REPEATED, COLUMNS = 16, 1024
"""Of one kind of thing, the first so many in a run are looked at; of a view, at most so many columns."""

Item = tuple[Hashable, Sequence[float]]
"""What kind of thing, and its numbers: always as many for one kind."""


def views(runs: Sequence[Conversation]) -> dict[str, FloatArray]:
    """All views but timing, by name: finite numbers `(runs, features)`. Those that people understand best come first."""
    kinds: dict[str, Callable[[Conversation], Iterable[Item]]] = {
        "sizes": _sizes,
        "counts": _counts,
        "order": _order,
        "metadata": _metadata,
        "status": _status,
        "bytes": _bytes,
        "messages said again": _said_again,
    }
    found: dict[str, FloatArray] = {}
    said = decoded(runs)
    for field, values in said.items():
        with np.errstate(over="ignore"):  # where most numbers are zero, others are huge in units of their spread
            found |= {f"{name} of {field}": view for name, view in number_views(values).items()}
    if len(said) > 1:
        every = np.concatenate([values.reshape(len(runs), -1) for values in said.values()], axis=1)
        found["values of all fields"] = every[:, :COLUMNS]
    return found | {name: _table([list(items(run)) for run in runs]) for name, items in kinds.items()}


def timing(runs: Sequence[Conversation]) -> dict[str, FloatArray]:
    """The view `gaps`: the times between whatever passed."""
    return {"gaps": _table([list(_gaps(run)) for run in runs])}


def decoded(runs: Sequence[Conversation]) -> dict[str, FloatArray]:
    """Decoded fields as `(runs, messages, numbers)`, in the order in which a run said them; zero where it did not.

    A field that stands in several kinds of messages is several fields.
    """
    found: dict[str, list[list[FloatArray]]] = {}
    for k, run in enumerate(runs):
        for field, values in fields(run):
            mine = found.setdefault(field, [[] for _ in runs])[k]
            if len(mine) < REPEATED:
                mine.append(values)
    names = _shortened(found)
    return {names[field]: _dense(said) for field, said in found.items()}


def fields(run: Conversation) -> Iterator[tuple[str, FloatArray]]:
    """Everything that was decoded in a run: `FIELD in METHOD DIRECTION`, and the numbers."""
    for each in run.messages:
        if each.decoded is not None:
            for name, values in each.decoded.fields.items():
                yield f"{name} in {each.place}", values


def _shortened(found: Iterable[str]) -> dict[str, str]:
    """Names without the place where that leaves them different."""
    short = {name: name.split(" in ", 1)[0] for name in found}
    counts = Counter(short.values())
    return {name: alias if counts[alias] == 1 else name for name, alias in short.items()}


def _dense(said: Sequence[Sequence[FloatArray]]) -> FloatArray:
    rounds = max(len(mine) for mine in said)
    width = min(max((len(values) for mine in said for values in mine), default=0), max(1, WIDTH * REPEATED // rounds))
    dense = np.zeros((len(said), rounds, width))
    for k, mine in enumerate(said):
        for t, values in enumerate(mine):
            dense[k, t, : len(values)] = values[:width]
    return dense


def _table(runs: Sequence[Sequence[Item]]) -> FloatArray:
    """One row for every run: the numbers of the first `REPEATED` things of every kind, side by side; -1 where it had fewer.

    Kinds that most runs have come first; what does not fit into `COLUMNS` is left out.
    """
    numbered = [dict(_numbered(items)) for items in runs]
    common = Counter(key for row in numbered for key in row)
    widths = {key: len(values) for row in numbered for key, values in row.items()}
    offsets: dict[Hashable, int] = {}
    total = 0
    for key, _ in common.most_common():
        if total + widths[key] <= COLUMNS:
            offsets[key] = total
            total += widths[key]
    table = np.full((len(runs), total), -1.0)
    for k, row in enumerate(numbered):
        for key, values in row.items():
            if key in offsets:
                table[k, offsets[key] : offsets[key] + len(values)] = values
    return table


def _numbered(items: Sequence[Item]) -> Iterator[tuple[Hashable, Sequence[float]]]:
    seen: Counter[Hashable] = Counter()
    for kind, values in items:
        if seen[kind] < REPEATED:
            yield (kind, seen[kind]), values
        seen[kind] += 1


def _sizes(run: Conversation) -> Iterator[Item]:
    return (((each.kind, each.place), (each.size,)) for each in run.heard)


def _gaps(run: Conversation) -> Iterator[Item]:
    """Time since whatever passed before, by its logarithm."""
    before = run.heard[0].seconds if run.heard else 0.0
    for each in run.heard:
        yield (each.kind, each.place), (math.log(max(each.seconds - before, 0.0) + 1e-6),)
        before = each.seconds


def _counts(run: Conversation) -> Iterator[Item]:
    """Streams; things and bytes of every kind; entries of metadata."""
    yield "streams", (len({each.stream for each in run.heard}),)
    things = Counter((each.kind, each.place) for each in run.heard)
    volume = Counter[Hashable]()
    entries = Counter[Hashable]()
    for each in run.heard:
        volume[each.kind, each.place] += each.size
        entries[each.kind, each.place] += len(each.entries)
    for kind, count in things.items():
        yield kind, (count, volume[kind], entries[kind])


def _order(run: Conversation) -> Iterator[Item]:
    """Of either direction by itself: which of two directions is first is a matter of time."""
    return ((each.direction, bits(f"{each.stream} {each.kind} {each.method}")) for each in run.heard)


def _metadata(run: Conversation) -> Iterator[Item]:
    for each in run.heard:
        for key, value in each.entries:
            yield (each.kind, each.place, key), (len(value), parsed(value), *bits(value))


def _status(run: Conversation) -> Iterator[Item]:
    for each in run.heard:
        if each.kind == "trailers":
            code, text = each.status
            yield each.method, (len(text), *bits(code), *bits(text))


def _bytes(run: Conversation) -> Iterator[Item]:
    return ((each.place, list(each.head.ljust(HEAD, b"\0"))) for each in run.messages)


def _said_again(run: Conversation) -> Iterator[Item]:
    """Whether a message has been said before in this run."""
    known: set[bytes] = set()
    for each in run.messages:
        yield each.place, (float(each.digest in known),)
        known.add(each.digest)
