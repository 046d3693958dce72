"""How soon a watch sees what is broken: medians of several seeds, and whom it blames."""

from __future__ import annotations

import numpy as np
import pytest

from tests.watched import (
    BREAKS,
    Break,
    Changed,
    alarms,
    correlated,
    rounds_to_alarm,
    shifted_copy,
    sum_of_others,
    summed,
    times,
)

SEEDS = 5


@pytest.mark.statistics
@pytest.mark.parametrize(
    "broken",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.most > 100 else []) for each in BREAKS],
)
def test_median_rounds_to_an_alarm(broken: Break) -> None:
    """At alpha 0.001, five learners, 17 numbers. `most` is twice what single streams need at most.

    One run of 0.9 of the scale needs more than that with probability below 0.05, of the others with less: the median of five
    does with probability below 0.002.
    """
    found = [rounds_to_alarm(broken.change, broken.most, seed)[0] for seed in range(SEEDS)]
    assert np.median(found) <= broken.most


def test_only_the_broken_learner_is_blamed() -> None:
    """A correct one of five is named with probability below 0.001."""
    for change, guilty in ((times(0.5, slice(2, 3)), 2), (correlated(0.8), 3)):
        found = list(alarms(60, Changed(0, change)))
        assert {alarm.learner for alarm in found} == {guilty}


def test_of_a_sum_of_earlier_noise_the_learner_is_blamed() -> None:
    """A correct one of five is named with probability below 0.001."""
    first, *_ = alarms(5, Changed(0, summed(1, 2)))
    assert (first.learner, first.round, first.test) == (1, 3, "repeats")


def test_of_a_sum_in_the_same_round_nobody_knows_who_followed() -> None:
    """Learner 1 says what learners 3 and 4 say together; 4 might as well say the difference of 1 and 3."""
    first, *_ = alarms(5, Changed(0, sum_of_others))
    assert (first.learner, first.round, first.test) == (None, 0, "copies")


def test_of_a_copy_in_the_same_round_nobody_knows_who_copied() -> None:
    """Learner 3 copies learner 1; without a third one to compare with, it might as well be the other way round."""
    first, *_ = alarms(5, Changed(0, shifted_copy))
    assert (first.learner, first.test) == (None, "copies")
