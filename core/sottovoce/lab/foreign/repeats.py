"""What is said twice, and what is said differently to different ears: both void noise, whatever a classifier makes of it.

A number counts as said again only where chance cannot explain it: from how densely the numbers of a field lie, and from the
resolution that they were rounded to, follows how many should coincide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.conversation import Conversation, Overheard
from sottovoce.auditing.views import decoded
from sottovoce.data.files import import_extra
from sottovoce.lab.foreign.resolution import resolution
from sottovoce.running.assembly import Versions

_CHANCE = 1e-6
"""Coincidences less likely than this are reported."""

_LEAST = 16
"""Of fewer numbers, or of messages with fewer bytes, nothing is concluded."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that no correct mechanism does.

    Attributes:
        test: `said again` or `equivocation`.
        text: what was found, in a sentence without a full stop.
        count: how often.
        where: the first place.
    """

    test: str
    text: str
    count: int
    where: str

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


def signs(runs: Sequence[Conversation]) -> tuple[Sign, ...]:
    """All of them."""
    return (*_numbers_again(runs), *_bytes_again(runs), *_equivocations(runs))


def _numbers_again(runs: Sequence[Conversation]) -> list[Sign]:
    poisson = import_extra("scipy.stats", "scipy", "an audit").poisson
    found = []
    for field, values in decoded(runs).items():
        varied = values * (values != values[:1]).any(axis=0)
        place = np.nonzero(varied)
        said = varied[place]
        ties = len(said) - len(np.unique(said))
        if len(said) < _LEAST or not ties or poisson.sf(ties - 1, _by_chance(said)) >= _CHANCE:
            continue
        first, again = (tuple(int(axis[k]) for axis in place) for k in _pair(said))
        where = f"{_position(runs, first)} and {_position(runs, again)}"
        found.append(Sign("said again", f"{ties:,} of {len(said):,} numbers of {field} are repeated", ties, where))
    return found


def _by_chance(said: FloatArray) -> float:
    """How many of these numbers should coincide with another one, were each drawn anew from the density they show."""
    ordered = np.sort(said)
    reach = max(2, int(np.sqrt(len(ordered))) // 2)
    above = np.minimum(np.arange(len(ordered)) + reach, len(ordered) - 1)
    below = np.maximum(np.arange(len(ordered)) - reach, 0)
    with np.errstate(divide="ignore"):  # many equal numbers: then coincidence is the rule
        density = (above - below) / (ordered[above] - ordered[below])
    return float(0.5 * np.sum(density * resolution(ordered)))


def _pair(said: FloatArray) -> tuple[int, int]:
    """Where the first repetition is, and what it repeats."""
    known: dict[float, int] = {}
    for k, value in enumerate(said.tolist()):
        if value in known:
            return known[value], k
        known[value] = k
    raise AssertionError("there is one")


def _position(runs: Sequence[Conversation], place: tuple[int, ...]) -> str:
    run, message, number = place
    return f"{runs[run].name}, message {message}, number {number}"


def _bytes_again(runs: Sequence[Conversation]) -> list[Sign]:
    """Whole messages, where nobody decoded them and most differ."""
    places: dict[str, list[tuple[Conversation, int, Overheard]]] = defaultdict(list)
    for run in runs:
        count = Counter[str]()
        for each in run.messages:
            places[each.place].append((run, count[each.place], each))
            count[each.place] += 1
    found = []
    for place, said in places.items():
        if any(each.decoded is not None for _, _, each in said):
            continue
        varied = _varied(said, len(runs))
        known: dict[bytes, str] = {}
        repeated = []
        for run, k, each in varied:
            where = f"{run.name}, message {k}"
            if each.digest in known:
                repeated.append(f"{known[each.digest]} and {where}")
            known.setdefault(each.digest, where)
        if repeated and 2 * len(known) > len(varied):
            text = f"{len(repeated):,} of {len(varied):,} messages of {place} are said again, byte for byte"
            found.append(Sign("said again", text, len(repeated), repeated[0]))
    return found


def _varied(
    said: Sequence[tuple[Conversation, int, Overheard]], runs: int
) -> list[tuple[Conversation, int, Overheard]]:
    """Messages long enough to be no coincidence, without those that are the same in all runs."""
    counts = Counter((k, each.digest) for _, k, each in said)
    return [(run, k, each) for run, k, each in said if each.size >= _LEAST and counts[k, each.digest] < runs]


def _equivocations(runs: Sequence[Conversation]) -> list[Sign]:
    found = []
    for run in runs:
        versions = Versions[tuple[object, ...]]()
        for each in run.messages:
            if each.decoded is None or each.decoded.round is None:
                continue
            key = (each.place, each.decoded.sender, each.decoded.round)
            if versions.first(key, each.digest) != each.digest:
                found.append((run, each))
    if not found:
        return []
    run, each = found[0]
    sender = "" if each.decoded is None or each.decoded.sender is None else f"{each.decoded.sender} says "
    t = None if each.decoded is None else each.decoded.round
    text = f"{sender or 'one sender says '}different things in one round, {len(found):,} times"
    return [Sign("equivocation", text, len(found), f"{run.name}, {each.place}, round {t}")]
