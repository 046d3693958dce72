"""The numbers that give a world away, by name: field, index, message, round and sender, as far as they are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.bounds import Bound
from sottovoce.auditing.views import CHANNEL, Conversation, decoded, sources, thing_at
from sottovoce.optional import import_extra

_CLEAR = 4.0
"""Standard errors by which an AUC must differ from 1/2 where a classifier has told the worlds apart."""

_NAMED = 5
"""Leaks that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class Leak:
    """A number that differs between the worlds.

    Attributes:
        view: where it was seen.
        place: its name: field, index, message, round and sender, as far as known.
        auc: share of pairs of runs, one of each world, in which world 1 has the larger number; ties count half.
        values: `(runs,)` the number in every run.
        worlds: `(runs,)` 0 or 1.
    """

    view: str
    place: str
    auc: float
    values: FloatArray
    worlds: IntArray

    def __str__(self) -> str:
        return f"{self.place} (AUC {self.auc:.2g})"


def leaks(
    runs: Sequence[Conversation],
    seen: Mapping[str, FloatArray],
    worlds: IntArray,
    bounds: Sequence[Bound],
    answers: Mapping[str, Sequence[str]],
) -> tuple[Leak, ...]:
    """Find the numbers that tell the worlds apart most, in the views by which classifiers did.

    Args:
        runs: all of them.
        seen: every view, `(runs, columns)`.
        worlds: `(runs,)` 0 or 1.
        bounds: of the classifiers; those that show nothing are left out.
        answers: names of the columns of views of answers.
    """
    naming = _Naming(runs, answers)
    found: dict[str, Leak] = {}
    for bound in sorted(bounds, key=lambda each: -each.value):
        if bound.value > 0.0 and bound.view:
            for column, auc in _telling(seen[bound.view], worlds):
                place = naming.name(bound.view, column)
                found.setdefault(place, Leak(bound.view, place, auc, seen[bound.view][:, column], worlds))
    return tuple(found.values())[:_NAMED]


def _telling(view: FloatArray, worlds: IntArray) -> list[tuple[int, float]]:
    """Columns that clearly differ, the clearest first, and their AUC."""
    ones = int(worlds.sum())
    zeros = len(worlds) - ones
    rankdata = import_extra("scipy.stats", "scipy", "an audit").rankdata
    ranks = rankdata(view, axis=0)
    aucs = (ranks[worlds == 1].sum(axis=0) - ones * (ones + 1) / 2.0) / (ones * zeros)
    # Of the ranks as they are: where most are equal, an AUC near 1/2 says as much as another one far from it.
    error = ranks.std(axis=0) * math.sqrt((zeros + ones) / (ones * zeros)) / (zeros + ones)
    scores = np.divide(np.abs(aucs - 0.5), error, out=np.zeros_like(aucs), where=error > 0.0)
    best = np.argsort(-scores, kind="stable")[: 4 * _NAMED]
    return [(int(k), float(aucs[k])) for k in best.tolist() if scores[k] >= _CLEAR]


class _Naming:
    """Names of the columns of all views."""

    def __init__(self, runs: Sequence[Conversation], answers: Mapping[str, Sequence[str]]) -> None:
        self._runs, self._answers = runs, answers
        self._shapes = {field: values.shape[1:] for field, values in decoded(runs).items()}
        self._messages = message_names(runs)

    def name(self, view: str, column: int) -> str:
        """What a column is, in words."""
        if view in CHANNEL:
            return _thing(view, *thing_at(self._runs, view, column))
        if view in self._answers:
            return self._answers[view][column]
        if view == "values of all fields":
            return self._of_all(column)
        for kind, name in _OF_FIELDS.items():
            field = view.removeprefix(f"{kind} of ")
            if field != view and field in self._shapes:
                messages, numbers = self._shapes[field]
                return name(_Place(field, messages, numbers, self._messages[field]), column)
        return view

    def _of_all(self, column: int) -> str:
        for field, (messages, numbers) in self._shapes.items():
            if column < messages * numbers:
                return _Place(field, messages, numbers, self._messages[field]).number(column)
            column -= messages * numbers
        raise IndexError(column)


def message_names(runs: Sequence[Conversation]) -> dict[str, tuple[str, ...]]:
    """Of every decoded field, `message 3 (round 3, from clinic)`: round and sender where all runs have the same ones."""
    found = {}
    for field, messages in sources(runs).items():
        names = []
        for t, them in enumerate(messages):
            rounds, senders = ({getattr(each, part) for _, each in them} for part in ("round", "sender"))
            facts = [f"round {each}" for each in rounds if len(rounds) == 1 and each is not None]
            facts += [f"from {each}" for each in senders if len(senders) == 1 and each is not None]
            names.append(f"message {t} ({', '.join(facts)})" if facts else f"message {t}")
        found[field] = tuple(names)
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """A field: its name, and how many messages have how many numbers of it."""

    field: str
    messages: int
    numbers: int
    names: Sequence[str]

    def number(self, k: int) -> str:
        """One number of one message, counted through all messages."""
        t, number = divmod(k, self.numbers)
        return f"number {number} of {self.field}, {self.names[t]}"

    def doubled(self, column: int, second: str = "") -> str:
        """Of two kinds of columns for every number, side by side in each message."""
        t, k = divmod(column, 2 * self.numbers)
        place = self.number(t * self.numbers + k % self.numbers)
        return f"{second}{place}" if k >= self.numbers else place

    def repeated(self, column: int) -> str:
        """Zeros of all messages, then what the next message repeats."""
        if column < self.messages * self.numbers:
            return f"whether it is zero: {self.number(column)}"
        return f"whether it is repeated in the next message: {self.number(column - self.messages * self.numbers)}"

    def means(self, column: int) -> str:
        """As `audit.spread_views` has them."""
        if column < self.numbers:
            return f"size of number {column} of {self.field}, in all messages together"
        t = (column - self.numbers) // 3
        return (
            f"sizes of all numbers of {self.field}, {self.names[t] if t < self.messages else 'all messages together'}"
        )


_OF_FIELDS: Mapping[str, Callable[[_Place, int], str]] = {
    "values": _Place.doubled,
    "low bits": lambda place, column: f"low bits of {place.doubled(column)}",
    "repeats": _Place.repeated,
    "lengths": lambda place, column: f"how many numbers are not zero: {place.field}, {place.names[column]}",
    "mean spread": _Place.means,
    "spread": lambda place, column: f"size of {place.number(column)}",
}
"""Views of a field, and the names of their columns."""


def _thing(view: str, kind: Hashable, k: int, number: int) -> str:
    """A column of what passes beside numbers."""
    parts = kind if isinstance(kind, tuple) else (kind,)
    where = " of ".join(str(part) for part in (*parts[:1], *parts[1:2]))
    match view:
        case "sizes":
            return f"bytes of {where}, number {k}"
        case "counts" if kind == "streams":
            return "how many streams"
        case "counts":
            return f"{('how many there are', 'bytes of all', 'how many entries')[number]}: {where}"
        case "metadata":
            return f"{'length' if number == 0 else 'value'} of {parts[2]!r} in {where}, number {k}"
        case "bytes":
            return f"byte {number} of message {k}, {kind}"
        case "status":
            return f"{'length of the text' if number == 0 else 'code or text'} of the status of {kind}, number {k}"
        case "messages said again":
            return f"whether it was sent before: message {k}, {kind}"
        case _:
            return f"{view}, {where}, number {k}"
