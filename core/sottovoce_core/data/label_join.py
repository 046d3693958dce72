"""Labels that come later: what was known of an event waits for its label, by key, within a bounded window.

An event is expected, and labelled. Rules:

1. Time does not go back: an earlier one counts as the latest that was told.
2. What waited for more than `window_s`, or was there first when more than `most` wait, waits no longer: it is never labelled.
3. A key is one event. While it waits, and for `window_s` after its label came, what comes for it again is passed over.

The second half of 3 is why an event that is told twice is joined once; of such keys `most` are remembered, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sottovoce_core.errors import SpecError

Record = TypeVar("Record")


@dataclass(slots=True)
class JoinCounts:
    """What became of what was told. Figures of private records: they are for their owner.

    Attributes:
        joined: events whose label came in time.
        expired: that waited for longer than the window, without a label.
        evicted_events: that had to go before that, for too many waited.
        repeated: events told again, which were passed over.
        unmatched_labels: labels of events that do not wait: never told, or gone.
        duplicate_labels: second labels, which were passed over.
    """

    joined_events: int = 0
    expired_events: int = 0
    evicted_events: int = 0
    duplicate_events: int = 0
    unmatched_labels: int = 0
    duplicate_labels: int = 0

    @property
    def unlabelled_events(self) -> int:
        """Events that are given up."""
        return self.expired_events + self.evicted_events


@dataclass(slots=True)
class LabelJoin(Generic[Record]):
    """Joins events with labels that come later. It knows no clock: times are told to it, in seconds, of any one clock.

    Attributes:
        window_s: longest that an event waits for its label.
        most: events that wait at a time.
        counts: what became of them.

    Raises:
        SpecError: a bound is not positive.

    >>> join = LabelJoin(window_s=3600, most=1000)
    >>> join.expect("order 7", {"amount": 12}, now=0.0)
    >>> join.label("order 7", now=60.0)
    {'amount': 12}
    >>> join.label("order 8", now=61.0) is None, join.counts.joined, join.counts.unmatched_labels
    (True, 1, 1)
    """

    window_s: float
    max_waiting: int
    counts: JoinCounts = field(default_factory=JoinCounts, init=False)
    _now: float = field(default=float("-inf"), init=False)
    _waiting: dict[Hashable, tuple[float, Record]] = field(default_factory=dict, init=False)
    _labelled: dict[Hashable, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, bound in (("window_s", self.window_s), ("max_waiting", self.max_waiting)):
            if not bound > 0:
                raise SpecError(f"{name} must be positive, got {bound}")

    @property
    def waiting_events(self) -> int:
        """Events that wait for their label, as of the latest time that was told."""
        return len(self._waiting)

    def add_event(self, key: Hashable, record: Record, now: float) -> None:
        """An event, whose label is not known yet.

        Args:
            key: by which its label will name it.
            record: what is known of it; `label` gives it back as it is.
            now: when.
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
        """A label has come.

        Args:
            key: of its event.
            now: when.

        Returns:
            What is known of the event, which has its label now; None: it does not wait, and the label is passed over.
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
        """Give up what waits for too long, where nothing else is told.

        Args:
            now: the time.
        """
        self._now = max(self._now, now)
        gone = self._now - self.window_s
        while self._waiting and next(iter(self._waiting.values()))[0] < gone:
            del self._waiting[next(iter(self._waiting))]
            self.counts.expired_events += 1
        while self._labelled and next(iter(self._labelled.values())) < gone:
            del self._labelled[next(iter(self._labelled))]
