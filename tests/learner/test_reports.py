"""When a learner reports of its own accord: where the clock may wait for what it tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sottovoce_core.noise import SystemNoise
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.progress import LeaseTracker
from sottovoce_learner.session_factory import open_session
from sottovoce_rpc.codec import to_tensor
from sottovoce_wire.v1 import learner_pb2
from sottovoce_wire.v1.coordinator_pb2 import RoundLease
from tests.examples import ALLOWING, small_spec


class Fed:
    """A learner that is brought records of a round at a time."""

    def __init__(self, folder: Path, mode: str) -> None:
        spec = small_spec(20, 2, clock={"mode": mode, "window": 5})
        role = RunAssignment("run-1", spec, 3, 0, "learner-0")
        self.session = open_session(role, SystemNoise(), folder, policy=ALLOWING)
        self.session.plan.accept_epoch(
            0,
            dict(self.session.plan.get_round_part(0).in_neighbours),
            self.session.plan.get_round_part(0).out_neighbours,
        )
        self._due = 0

    async def feed(self) -> bool:
        """One round's; is that to be reported at once?"""
        batch = learner_pb2.SampleBatch(
            source="s",
            sequence=self._due,
            first_round=self._due,
            counts=[1],
            features=to_tensor(np.zeros((1, 3))),
            labels=to_tensor(np.zeros(1)),
        )
        self._due += 1
        await self.session.ingestor.feed(batch)
        return self.reported

    @property
    def reported(self) -> bool:
        """Was there anything to report since this was asked last?"""
        changed = self.session._report_event.is_set()
        self.session._report_event.clear()
        return changed


@pytest.mark.parametrize("mode", ["free", "async"])
async def test_records_are_no_news_to_a_clock_that_does_not_count_them(tmp_path: Path, mode: str) -> None:
    fed = Fed(tmp_path, mode)
    assert [await fed.feed() for _ in range(4)] == [False] * 4
    assert fed.session.status.rounds_with_data == 4


async def test_records_are_reported_where_the_clock_may_wait_for_them(tmp_path: Path) -> None:
    """As long as more is granted than it has told, others are waited for; of what came meanwhile it tells when it is its turn."""
    fed = Fed(tmp_path, "data")
    assert [await fed.feed() for _ in range(3)] == [True, False, False]
    fed.session.extend_lease(RoundLease(until_round=1))
    assert fed.reported
    assert [await fed.feed() for _ in range(2)] == [False, False]
    fed.session.extend_lease(RoundLease(until_round=2))
    assert not fed.reported
    fed.session.extend_lease(RoundLease(until_round=3))
    assert fed.reported
    fed.session.extend_lease(RoundLease(until_round=5))
    assert not fed.reported  # it has told of five
    assert await fed.feed()


@pytest.mark.parametrize(
    ("learners", "by"),
    [(1, [8, 18, 24, 46, 78]), (5, [8, 18, 24, 46, 78]), (64, [1, 3, 5, 26, 58]), (1000, [1, 1, 1, 4, 34])],
)
def test_rounds_are_reported_ever_more_seldom_however_many_learners_there_are(learners: int, by: list[int]) -> None:
    """Enough for curves of short runs; what a round costs all learners together is bounded, and vanishes in a long run."""
    told, done = list[int](), 0
    grants = LeaseTracker(
        small_spec(2, 2, clock={"mode": "paced", "period_s": 1}).clock, learners, lambda: told.append(done)
    )
    grants.extend(40_000, 0)
    for done in range(1, 20_001):
        grants.report_progress(done)
    assert [sum(each <= rounds for each in told) for rounds in (8, 20, 40, 500, 20_000)] == by
    assert told[0] == 1 and told == sorted(set(told))
    for first in range(0, 20_000 - 100, 100):
        assert learners * sum(first < each <= first + 100 for each in told) <= 10 * 100
