"""The attacks of `tests/core/test_every_claim.py` with many more cases: minutes, not seconds. `pytest -m long tests/long`."""

from __future__ import annotations

import pytest

from tests.claims import Effort
from tests.core.test_every_claim import (  # noqa: F401
    test_losses_are_log_likelihood_ratios,
    test_no_attack_tells_more_than_the_claim,
    test_shared_records_cost_at_most_the_joint_claim,
    test_the_meter_charges_what_any_single_swap_costs,
)

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.fixture(params=range(1, 6), ids="seed{}".format)
def effort(request: pytest.FixtureRequest) -> Effort:
    """The thorough round, one seed after another."""
    return Effort(starts=150, steps=350, tries=20, replicas=40_000, seed=request.param)
