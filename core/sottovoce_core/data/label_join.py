"""Join of events with late labels: an event waits for its label, by key, within a bounded window.

An event is added, and labelled. Rules:

1. Time does not go back: an earlier time counts as the latest one so far.
2. An event that has waited longer than `window_s`, or the oldest one when more than `max_waiting` wait, is dropped unlabelled.
3. A key identifies one event. While it waits, and for `window_s` after its label, duplicates are ignored.

The second half of rule 3 ensures that a duplicate event is joined once; up to `max_waiting` such keys are remembered, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sottovoce_core.arrays import summarize_fields
from sottovoce_core.errors import SpecError

Record = TypeVar("Record")


@dataclass(slots=True)
class JoinCounts:
    """Counts of joined and dropped events and labels. They concern private records, and are only for the owner.

    Attributes:
        joined_events: events whose label arrived in time.
        expired_events: events that waited longer than the window, without a label.
        evicted_events: events dropped earlier, because too many waited.
        duplicate_events: ignored duplicates of events.
        unmatched_labels: labels without a waiting event: never added, or dropped.
        duplicate_labels: ignored second labels.
    """

    joined_events: int = 0
    expired_events: int = 0
    evicted_events: int = 0
    duplicate_events: int = 0
    unmatched_labels: int = 0
    duplicate_labels: int = 0

    @property
    def unlabelled_events(self) -> int:
        """Number of events dropped without a label."""
        return self.expired_events + self.evicted_events


@dataclass(slots=True)
class LabelJoin(Generic[Record]):
    """Joins events with labels that come later. Independent of any clock: callers pass times, in seconds, of one clock.

    Attributes:
        window_s: maximum time that an event waits for its label.
        max_waiting: maximum number of waiting events.
        counts: counts of joined and dropped events.

    Raises:
        SpecError: a bound is not positive.

    >>> join = LabelJoin(window_s=3600, max_waiting=1000)
    >>> join.add_event("order 7", {"amount": 12}, now=0.0)
    >>> join.label("order 7", now=60.0)
    {'amount': 12}
    >>> join.label("order 8", now=61.0) is None, join.counts.joined_events, join.counts.unmatched_labels
    (True, 1, 1)
    """

    window_s: float
    max_waiting: int
    counts: JoinCounts = field(default_factory=JoinCounts, init=False)
    _now: float = field(default=float("-inf"), init=False)
    _waiting: dict[Hashable, tuple[float, Record]] = field(default_factory=dict, init=False)
    _labelled: dict[Hashable, float] = field(default_factory=dict, init=False)

    __repr__ = summarize_fields

    def __post_init__(self) -> None:
        for name, bound in (("window_s", self.window_s), ("max_waiting", self.max_waiting)):
            if not bound > 0:
                raise SpecError(f"{name} must be positive, got {bound}")

    @property
    def waiting_events(self) -> int:
        """Number of events that wait for their label, at the latest time so far."""
        return len(self._waiting)

    def add_event(self, key: Hashable, record: Record, now: float) -> None:
        """Add an event whose label is not known yet.

        Args:
            key: key that its label will carry.
            record: record of the event, returned unchanged by `label`.
            now: current time.
        """
        self.advance_time(now)
        if key in self._waiting or key in self._labelled:
            self.counts.duplicate_events += 1
            return
        if len(self._waiting) >= self.max_waiting:
            del self._waiting[next(iter(self._waiting))]
            self.counts.evicted_events += 1
        self._waiting[key] = (self._now, record)

    def label(self, key: Hashable, now: float) -> Record | None:
        """Add a label.

        Args:
            key: key of its event.
            now: current time.

        Returns:
            The record of the event, now labelled; None: no such event waits, and the label is ignored.
        """
        self.advance_time(now)
        found = self._waiting.pop(key, None)
        if found is None:
            if key in self._labelled:
                self.counts.duplicate_labels += 1
            else:
                self.counts.unmatched_labels += 1
            return None
        if len(self._labelled) >= self.max_waiting:
            del self._labelled[next(iter(self._labelled))]
        self._labelled[key] = self._now
        self.counts.joined_events += 1
        return found[1]

    def advance_time(self, now: float) -> None:
        """Drop events that have waited too long, if nothing else is added.

        Args:
            now: current time.
        """
        self._now = max(self._now, now)
        gone = self._now - self.window_s
        while self._waiting and next(iter(self._waiting.values()))[0] < gone:
            del self._waiting[next(iter(self._waiting))]
            self.counts.expired_events += 1
        while self._labelled and next(iter(self._labelled.values())) < gone:
            del self._labelled[next(iter(self._labelled))]
