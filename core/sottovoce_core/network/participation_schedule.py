"""Who is there in which round. A learner that is away says nothing, hears nobody and learns nothing.

Its state goes on as that of a learner alone that gets no records and draws no noise: it depends on nothing that happens
meanwhile. So one that joins late begins where everybody can tell, and one that comes back goes on from where it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt, model_validator

from sottovoce_core.network.weights import Mixing
from sottovoce_core.registry import Count, Section

Mask = npt.NDArray[np.bool_]


class OfflineInterval(Section):
    """A learner is away from `first_round` on, and there again from `until_round` on (default: it does not come back)."""

    learner: str
    first_round: NonNegativeInt = 0
    until_round: Count | None = None
    missed_from_rounds: Mapping[str, NonNegativeInt] = {}
    """Of those who heard it for the last time before that: the first round in which each of them did not."""

    @model_validator(mode="after")
    def _some_rounds(self) -> OfflineInterval:
        if self.until_round is not None and self.until_round <= self.first_round:
            raise ValueError(
                f"until_round must be above first_round, got {self.until_round} and {self.first_round} for {self.learner}"
            )
        if late := [name for name, t in self.missed_from_rounds.items() if t > self.first_round]:
            raise ValueError(
                f"missed_from_rounds must name rounds up to first_round ({self.first_round}), got {late[0]}"
            )
        return self


@dataclass(frozen=True, slots=True)
class Participation:
    """The rounds in which one learner takes part.

    Attributes:
        stretches: of rounds, ascending; between each and the next it pauses.
        rounds: planned.
    """

    intervals: tuple[range, ...]
    rounds: int

    def __contains__(self, t: int) -> bool:
        for stretch in self.intervals:  # noqa: SIM110 - asked several times a round, and any() takes three times as long
            if t in stretch:
                return True
        return False

    @property
    def end(self) -> int:
        """The round after its last one: from there on it says nothing more."""
        return self.intervals[-1].stop if self.intervals else 0

    def next_round(self, t: int) -> int:
        """The first round from `t` on in which it takes part; `rounds`: there is none."""
        return next((max(t, stretch.start) for stretch in self.intervals if t < stretch.stop), self.rounds)

    def mask(self, rounds: int | None = None) -> Mask:
        """`(rounds,)`: whether it takes part in the first so many rounds (default: in all that are planned)."""
        mask = np.zeros(self.rounds if rounds is None else rounds, dtype=bool)
        for stretch in self.intervals:
            mask[stretch.start : stretch.stop] = True
        return mask


@dataclass(frozen=True, eq=False)
class ParticipationSchedule:
    """Who is there in which round.

    Attributes:
        names: of all learners, by index.
        offline_intervals: of some of them.
    """

    names: Sequence[str]
    offline_intervals: Sequence[OfflineInterval] = ()
    _index: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {name: i for i, name in enumerate(self.names)})

    @classmethod
    def from_spec(cls, document: Mapping[str, Any]) -> ParticipationSchedule:
        """Of a run spec as a document; it was checked before.

        Raises:
            ValueError, TypeError, KeyError: it was not.
        """
        return cls(
            resolve_learner_names(document["learners"]),
            [OfflineInterval(**each) for each in document.get("offline_intervals", ())],
        )

    def is_participating(self, learner: int, t: int) -> bool:
        """Does it take part in the round?"""
        return bool(self.participant_mask(t)[learner])

    def participant_mask(self, t: int) -> Mask:
        """`(learners,)`: who takes part in the round."""
        return self._stretches[bisect_right(self.changes, t)]

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Rounds, ascending, before which somebody leaves, joins or is not heard any more; round 0 is none of them."""
        ends = {
            t
            for each in self.offline_intervals
            for t in (each.first_round, each.until_round, *each.missed_from_rounds.values())
            if t
        }
        return tuple(sorted(ends))

    def last_change(self, t: int) -> int:
        """The round from which on all is as in round t."""
        stretch = bisect_right(self.changes, t)
        return self.changes[stretch - 1] if stretch else 0

    @cached_property
    def _stretches(self) -> tuple[Mask, ...]:
        """Who is there from round 0 and from every change on."""
        return tuple(self._there(t) for t in (0, *self.changes))

    def unreceived_sender_mask(self, t: int) -> Mask:
        """`(learners,)`: those who were lost, and of whom nobody who was there has learned what they said in the round."""
        return self._doubts[bisect_right(self.changes, t)]

    @cached_property
    def _doubts(self) -> tuple[Mask, ...]:
        """As `_stretches`."""
        return tuple(self._doubtful(t) for t in (0, *self.changes))

    def _doubtful(self, t: int) -> Mask:
        lost = {each.learner: each.first_round for each in self.offline_intervals if each.missed_from_rounds}

        def learned(by: str, since: int, end: int) -> bool:
            # Of one that was lost together with another one, nobody knows what it has learned.
            return t < since and self.is_participating(self._index[by], t) and not since == end == lost.get(by)

        doubtful = np.zeros(len(self.names), dtype=bool)
        for each in self.offline_intervals:
            if each.missed_from_rounds and t < each.first_round:
                heard = any(learned(by, since, each.first_round) for by, since in each.missed_from_rounds.items())
                doubtful[self._index[each.learner]] = not heard
        doubtful.setflags(write=False)
        return doubtful

    def _there(self, t: int) -> Mask:
        there = np.ones(len(self.names), dtype=bool)
        for each in self.offline_intervals:
            if each.first_round <= t and (each.until_round is None or t < each.until_round):
                there[self._index[each.learner]] = False
        there.setflags(write=False)
        return there

    def learner_participation(self, learner: int, rounds: int) -> Participation:
        """In which of the planned rounds a learner takes part."""
        starts = [t for t in (0, *self.changes) if t < rounds]
        stretches: list[range] = []
        for first, until in zip(starts, [*starts[1:], rounds], strict=True):
            if self.is_participating(learner, first):
                # Where others alone leave or join, its own stretch goes on.
                goes_on = bool(stretches) and stretches[-1].stop == first
                stretches.append(range(stretches.pop().start if goes_on else first, until))
        return Participation(tuple(stretches), rounds)

    def check(self, rounds: int) -> None:
        """Refuse offline_intervals of nobody, outside the run, twice at a time, or of everybody.

        Raises:
            ValueError: so it is.
        """
        until: dict[str, int | None] = {}
        for each in sorted(self.offline_intervals, key=lambda each: (each.learner, each.first_round)):
            if unknown := {each.learner, *each.missed_from_rounds} - set(self.names):
                raise ValueError(f"only learners of the run can be away, got {sorted(unknown)[0]!r}")
            last = rounds if each.missed_from_rounds else rounds - 1  # one that is lost in the end is not heard before
            if each.first_round > last or (each.until_round or 1) > rounds:
                raise ValueError(
                    f"an absence must lie within the {rounds} rounds of the run, got {each.model_dump(mode='json')}"
                )
            if each.learner in until and ((end := until[each.learner]) is None or each.first_round <= end):
                raise ValueError(
                    f"a learner's offline_intervals must not meet, got two of {each.learner}: make one of them"
                )
            until[each.learner] = each.until_round
        for t in (0, *self.changes):
            if not self.participant_mask(t).any():
                raise ValueError(f"somebody must be there in every round, got nobody in round {t}")

    def lost_senders(self, learner: int, t: int) -> frozenset[int]:
        """Those who were lost, and whom the learner does not hear any more in the round."""
        name = self.names[learner]
        return frozenset(
            self._index[each.learner]
            for each in self.offline_intervals
            if each.missed_from_rounds.get(name, t + 1) <= t
        )

    def redistribute_lost_weights(self, mixing: Mixing, t: int) -> Mixing:
        """The weights of a round without messages that did not arrive any more: each goes to the hearer's own value."""
        lost = [
            (self._index[hearer], self._index[each.learner])
            for each in self.offline_intervals
            for hearer, since in each.missed_from_rounds.items()
            if since <= t < each.first_round
        ]
        if not lost:
            return mixing
        neighbours, own = mixing.neighbour_weights.copy(), mixing.own_weights.copy()
        for hearer, silent in lost:
            own[hearer] += neighbours[hearer, silent]
            neighbours[hearer, silent] = 0.0
        return Mixing(neighbours, own)


def resolve_learner_names(learners: int | Sequence[str]) -> tuple[str, ...]:
    """Names of so many learners, or of these."""
    return tuple(f"learner-{i}" for i in range(learners)) if isinstance(learners, int) else tuple(learners)
