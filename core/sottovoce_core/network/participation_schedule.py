"""Participation of learners by round. An offline learner sends nothing, receives nothing and learns nothing.

Its state advances like that of a learner without neighbours, records and noise: it depends on nothing that happens meanwhile.
So a learner that joins late starts from a known state, and one that returns continues from where it was.
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
from sottovoce_core.text import abbreviate_names, suggest_name

Mask = npt.NDArray[np.bool_]


class OfflineInterval(Section):
    """Interval in which a learner is offline: from `first_round` until before `until_round` (default: it does not return)."""

    learner: str
    """Name of the learner."""
    first_round: NonNegativeInt = 0
    """First round without the learner."""
    until_round: Count | None = None
    """Round in which it takes part again; None: it does not."""
    missed_from_rounds: Mapping[str, NonNegativeInt] = {}
    """For each learner that received its last messages: the first round before `first_round` whose message it missed."""

    @model_validator(mode="after")
    def _require_rounds(self) -> OfflineInterval:
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
    """Rounds in which one learner participates.

    Attributes:
        intervals: intervals of rounds, ascending; the learner pauses between them.
        rounds: number of planned rounds.
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
        """Round after its last one: from there on it sends nothing more."""
        return self.intervals[-1].stop if self.intervals else 0

    def next_round(self, t: int) -> int:
        """Return the first round from `t` on in which it participates; `rounds` if there is none."""
        return next((max(t, stretch.start) for stretch in self.intervals if t < stretch.stop), self.rounds)

    def mask(self, rounds: int | None = None) -> Mask:
        """Return in which of the first rounds it participates, `(rounds,)` (default: of all planned ones)."""
        mask = np.zeros(self.rounds if rounds is None else rounds, dtype=bool)
        for stretch in self.intervals:
            mask[stretch.start : stretch.stop] = True
        return mask


@dataclass(frozen=True, eq=False)
class ParticipationSchedule:
    """Participation of all learners, by round.

    Attributes:
        names: names of all learners, by index.
        offline_intervals: offline intervals of some of them.
    """

    names: Sequence[str]
    offline_intervals: Sequence[OfflineInterval] = ()
    _index: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {name: i for i, name in enumerate(self.names)})

    @classmethod
    def from_spec(cls, document: Mapping[str, Any]) -> ParticipationSchedule:
        """Make the schedule of a run spec given as a document, already validated.

        Raises:
            ValueError, TypeError, KeyError: the document is not valid.
        """
        return cls(
            resolve_learner_names(document["learners"]),
            [OfflineInterval(**each) for each in document.get("offline_intervals", ())],
        )

    def is_participating(self, learner: int, t: int) -> bool:
        """Return whether the learner participates in the round."""
        return bool(self.participant_mask(t)[learner])

    def participant_mask(self, t: int) -> Mask:
        """Return the participants of the round, `(learners,)`."""
        return self._participant_masks[bisect_right(self.changes, t)]

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Rounds, ascending, before which a learner leaves, joins or is first missed; round 0 is not among them."""
        ends = {
            t
            for each in self.offline_intervals
            for t in (each.first_round, each.until_round, *each.missed_from_rounds.values())
            if t
        }
        return tuple(sorted(ends))

    def last_change(self, t: int) -> int:
        """Return the first round since which participation is as in round t."""
        stretch = bisect_right(self.changes, t)
        return self.changes[stretch - 1] if stretch else 0

    @cached_property
    def _participant_masks(self) -> tuple[Mask, ...]:
        """Participants from round 0 and from every change on."""
        return tuple(self._compute_participants(t) for t in (0, *self.changes))

    def unreceived_sender_mask(self, t: int) -> Mask:
        """Return the lost learners whose message of the round no other participant has learned, `(learners,)`."""
        return self._unreceived_masks[bisect_right(self.changes, t)]

    @cached_property
    def _unreceived_masks(self) -> tuple[Mask, ...]:
        """Lost learners without a recipient, for the same rounds as `_participant_masks`."""
        return tuple(self._compute_unreceived_mask(t) for t in (0, *self.changes))

    def _compute_unreceived_mask(self, t: int) -> Mask:
        lost = {each.learner: each.first_round for each in self.offline_intervals if each.missed_from_rounds}

        def has_learned(by: str, since: int, end: int) -> bool:
            # If two learners were lost together, it is unknown what one learned from the other.
            return t < since and self.is_participating(self._index[by], t) and not since == end == lost.get(by)

        unreceived = np.zeros(len(self.names), dtype=bool)
        for each in self.offline_intervals:
            if each.missed_from_rounds and t < each.first_round:
                was_received = any(
                    has_learned(by, since, each.first_round) for by, since in each.missed_from_rounds.items()
                )
                unreceived[self._index[each.learner]] = not was_received
        unreceived.setflags(write=False)
        return unreceived

    def _compute_participants(self, t: int) -> Mask:
        there = np.ones(len(self.names), dtype=bool)
        for each in self.offline_intervals:
            if each.first_round <= t and (each.until_round is None or t < each.until_round):
                there[self._index[each.learner]] = False
        there.setflags(write=False)
        return there

    def learner_participation(self, learner: int, rounds: int) -> Participation:
        """Return the participation of a learner in the planned rounds."""
        starts = [t for t in (0, *self.changes) if t < rounds]
        stretches: list[range] = []
        for first, until in zip(starts, [*starts[1:], rounds], strict=True):
            if self.is_participating(learner, first):
                # If only others leave or join, its own interval continues.
                goes_on = bool(stretches) and stretches[-1].stop == first
                stretches.append(range(stretches.pop().start if goes_on else first, until))
        return Participation(tuple(stretches), rounds)

    def check(self, rounds: int) -> None:
        """Refuse offline intervals of unknown learners, outside the run, overlapping, or of all learners at once.

        Raises:
            ValueError: there is such an interval.
        """
        until: dict[str, int | None] = {}
        for each in sorted(self.offline_intervals, key=lambda each: (each.learner, each.first_round)):
            if unknown := {each.learner, *each.missed_from_rounds} - set(self.names):
                name = min(unknown)
                raise ValueError(
                    f"only learners of the run, {abbreviate_names(self.names)}, can be offline, got {name!r}"
                    f"{suggest_name(name, self.names)}"
                )
            last = rounds if each.missed_from_rounds else rounds - 1  # a learner lost at the end was missed before it
            if each.first_round > last or (each.until_round or 1) > rounds:
                raise ValueError(
                    f"an offline interval must lie within the {rounds} rounds of the run, got {each.model_dump(mode='json')}"
                )
            if each.learner in until and ((end := until[each.learner]) is None or each.first_round <= end):
                raise ValueError(f"a learner's offline_intervals must not meet, got two of {each.learner}: merge them")
            until[each.learner] = each.until_round
        for t in (0, *self.changes):
            if not self.participant_mask(t).any():
                raise ValueError(f"a learner must participate in every round, got none in round {t}")

    def lost_senders(self, learner: int, t: int) -> frozenset[int]:
        """Return the lost learners from which the learner receives no more in the round."""
        name = self.names[learner]
        return frozenset(
            self._index[each.learner]
            for each in self.offline_intervals
            if each.missed_from_rounds.get(name, t + 1) <= t
        )

    def redistribute_lost_weights(self, mixing: Mixing, t: int) -> Mixing:
        """Return the weights of a round after losses: the weight of a missing message is added to the recipient's own value."""
        lost = [
            (self._index[recipient], self._index[each.learner])
            for each in self.offline_intervals
            for recipient, since in each.missed_from_rounds.items()
            if since <= t < each.first_round
        ]
        if not lost:
            return mixing
        neighbours, own = mixing.neighbour_weights.copy(), mixing.own_weights.copy()
        for recipient, silent in lost:
            own[recipient] += neighbours[recipient, silent]
            neighbours[recipient, silent] = 0.0
        return Mixing(neighbours, own)


def resolve_learner_names(learners: int | Sequence[str]) -> tuple[str, ...]:
    """Return the given names, or default names for a number of learners."""
    return tuple(f"learner-{i}" for i in range(learners)) if isinstance(learners, int) else tuple(learners)
