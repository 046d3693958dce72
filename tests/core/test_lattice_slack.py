"""LATTICE_SLACK: a run hears of it when rounding takes more than a thousandth of its epsilon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sottovoce_core.budget.composition import MAX_LATTICE_SHARE, check_lattice
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import parse_spec
from tests.examples import small_run


def found(rounds: int, dim: int, **algorithm: Any) -> list[str]:
    run = small_run(rounds, 3, dim, algorithm=algorithm)
    return [finding.text for finding in check_lattice(run)]


def test_a_small_epsilon_over_many_numbers_is_told() -> None:
    """About epsilon 1 for a million numbers: fine for 100 rounds, and for 2,000 it is not."""
    assert found(100, 10**6, sigma=4e4) == []
    (text,) = found(2_000, 10**6, sigma=4e4, varsigma=0.0)
    assert "got up to 0.00182 of " in text and "for learner-0" in text


def test_the_learner_with_the_largest_share_is_named() -> None:
    (text,) = found(2_000, 10**6, sigma=[1e3, 1e6, 1e3], varsigma=0.0)
    assert "for learner-1" in text


@pytest.mark.parametrize("dim", [100, 10_000, 10**6])
def test_slack_is_what_the_loss_charges_at_most(dim: int) -> None:
    """Of LDP-DOL: what its meter charges for the lattice, by the epsilon of the same run without it."""
    run = small_run(50, 3, dim, algorithm={"sigma": 2.0, "varsigma": 0.0})
    guarantee = run.guarantee(0)
    accountant: Any = run.algorithm.accountant(0)
    without = []
    for _ in range(50):
        without.append(math.sqrt(dim) * accountant.sensitivity / run.algorithm.noise_scale(0, 0))
        accountant.advance(1)
    slack = guarantee.epsilon() - math.fsum(without)

    assert slack <= np.count_nonzero(guarantee.round_losses) * dim * 2.0**-40 + 1e-12 * guarantee.epsilon()
    assert slack <= MAX_LATTICE_SHARE * guarantee.epsilon()


def test_without_a_promise_there_is_nothing_to_tell() -> None:
    run = build_run(
        parse_spec({"rounds": 2_000, "learners": 3, "algorithm": {"name": "d-ogd"}}, allow_imports=True), 10**6
    )
    assert run.guarantee(0).epsilon() == math.inf
    assert check_lattice(run) == ()
