"""Labels that come later: what is joined, what is given up, and that all of it is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.data.label_join import LabelJoin
from sottovoce_core.errors import SpecError

WINDOW_S, MOST = 10.0, 3

steps = st.lists(st.tuples(st.sampled_from(["expect", "label"]), st.integers(0, 5), st.floats(-2.0, 8.0)), max_size=60)
"""What is told, of which key, and by how much later: clocks go back a little, too."""


@dataclass
class Plainly:
    """The same rules without any cleverness: all events that ever were, looked through each time."""

    now: float = float("-inf")
    events: list[dict[str, object]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    def _of(self, state: str) -> list[dict[str, object]]:
        return [each for each in self.events if each["state"] == state]

    def tell(self, what: str, key: int, now: float, record: object) -> object:
        self.now = max(self.now, now)
        for each in self._of("waiting") + self._of("labelled"):
            if each["since"] < self.now - WINDOW_S:  # type: ignore[operator]
                self.found += ["expired_events"] * (each["state"] == "waiting")
                each["state"] = "gone"
        held = {state: [e for e in self._of(state) if e["key"] == key] for state in ("waiting", "labelled")}
        if what == "expect":
            if held["waiting"] or held["labelled"]:
                self.found.append("duplicate_events")
            else:
                if len(waiting := self._of("waiting")) == MOST:
                    waiting[0]["state"] = "gone"
                    self.found.append("evicted_events")
                self.events.append({"key": key, "since": self.now, "record": record, "state": "waiting"})
            return None
        if not held["waiting"]:
            self.found.append("duplicate_labels" if held["labelled"] else "unmatched_labels")
            return None
        (event,) = held["waiting"]
        if len(labelled := sorted(self._of("labelled"), key=lambda each: each["labelled"])) == MOST:  # type: ignore[arg-type,return-value]
            labelled[0]["state"] = "gone"
        self.found.append("joined_events")
        event.update(state="labelled", since=self.now, labelled=len(self.found))
        return event["record"]


@given(steps)
def test_what_is_joined_and_what_is_counted_is_what_the_rules_say(told: list[tuple[str, int, float]]) -> None:
    join, plainly, now = LabelJoin[int](WINDOW_S, MOST), Plainly(), 0.0
    expected = labelled = 0
    for record, (what, key, later) in enumerate(told):
        now += later
        if what == "expect":
            expected += 1
            join.add_event(key, record, now)
            plainly.tell(what, key, now, record)
        else:
            labelled += 1
            assert join.label(key, now) == plainly.tell(what, key, now, record)
    counts = join.counts
    for name in (
        "joined_events",
        "expired_events",
        "evicted_events",
        "duplicate_events",
        "unmatched_labels",
        "duplicate_labels",
    ):
        assert getattr(counts, name) == plainly.found.count(name), name
    assert join.waiting_events <= MOST
    # nothing is lost without a count
    assert expected == counts.joined_events + counts.unlabelled_events + counts.duplicate_events + join.waiting_events
    assert labelled == counts.joined_events + counts.unmatched_labels + counts.duplicate_labels


events = st.lists(st.tuples(st.floats(0.0, 5.0), st.lists(st.floats(0.0, 14.0), max_size=2)), min_size=1, max_size=12)
"""Events: how long after the one before, and how long after it its labels come: in time, twice, late, or never."""


def streams(made: list[tuple[float, list[float]]]) -> list[tuple[float, str, int, int]]:
    """Both streams in the order of their times: when, which, the key, and the place among the labels."""
    told, now = list[tuple[float, str, int]](), 0.0
    for key, (later, labels) in enumerate(made):
        now += later
        told += [(now, "expect", key), *((now + after, "label", key) for after in labels)]
    told.sort(key=lambda each: (each[0], each[1]))
    position = iter(range(len(told)))
    return [(at, what, key, next(position) if what == "label" else -1) for at, what, key in told]


def learned(told: list[tuple[float, str, int, int]], upto: int, kept: int = -1) -> list[tuple[int, int]]:
    """Records that are new to a learner which has them up to a position: their position, and the event's key."""
    join, found = LabelJoin[int](WINDOW_S, 1_000), list[tuple[int, int]]()
    for at, what, key, position in told[:upto]:
        if what == "expect":
            join.add_event(key, key, at)
        elif join.label(key, at) is not None and position > kept:
            found.append((position, key))
    return found


@given(events, st.data())
def test_who_begins_a_window_earlier_learns_each_record_once(
    made: list[tuple[float, list[float]]], data: st.DataObject
) -> None:
    """A feeder dies anywhere, and another one reads both streams again from a window before the last label that was kept."""
    told = streams(made)
    died = data.draw(st.integers(0, len(told)))
    before = learned(told, died)
    before = before[: data.draw(st.integers(0, len(before)))]  # receipts had come for no more
    kept, since = max((position for position, _ in before), default=-1), float("-inf")
    if kept >= 0:
        since = next(at for at, _, _, position in told if position == kept) - WINDOW_S
    again = learned([each for each in told if each[0] >= since], len(told), kept)
    assert before + again == learned(told, len(told))


def test_time_alone_gives_up_what_waits() -> None:
    join = LabelJoin[str](WINDOW_S, MOST)
    join.add_event("a", "record", 0.0)
    join.advance_time(WINDOW_S)
    assert join.waiting_events == 1
    join.advance_time(WINDOW_S + 0.1)
    assert (join.waiting_events, join.counts.expired_events, join.counts.unlabelled_events) == (0, 1, 1)


@pytest.mark.parametrize(
    ("window_s", "most", "name"), [(0.0, 1, "window_s"), (float("nan"), 1, "window_s"), (1.0, 0, "max_waiting")]
)
def test_bounds_are_positive(window_s: float, most: int, name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} must be positive"):
        LabelJoin[str](window_s, most)
