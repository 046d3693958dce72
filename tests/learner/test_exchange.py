"""What two learners compare before they speak."""

from __future__ import annotations

from typing import Any

import pytest

from sottovoce_core.spec import RunSpec
from sottovoce_rpc.specs import compute_plan_hash
from tests.examples import small_spec


def spec_of(**more: Any) -> RunSpec:
    return small_spec(6, ["ann", "ben", "cleo"], **more)


@pytest.mark.parametrize(
    "change",
    [{"algorithm": {"sigma": 2.5}}, {"topology": {"graph": "path"}}, {"clock": {"window": 3}}, {"capture": "relay"}],
    ids=str,
)
def test_plans_differ_in_whatever_the_spec_says(change: dict[str, Any]) -> None:
    assert compute_plan_hash(spec_of(**change), 3) != compute_plan_hash(spec_of(), 3)


def test_plans_differ_in_the_features() -> None:
    assert compute_plan_hash(spec_of(), 4) != compute_plan_hash(spec_of(), 3)


def test_a_field_that_nobody_sets_changes_no_plan() -> None:
    """What a later version adds, and leaves at None, must not part it from this one."""

    class Later(RunSpec):
        added: int | None = None

    told = {name: getattr(spec_of(), name) for name in RunSpec.model_fields}
    assert compute_plan_hash(Later.model_construct(**told), 3) == compute_plan_hash(spec_of(), 3)
    assert compute_plan_hash(Later.model_construct(**told, added=1), 3) != compute_plan_hash(spec_of(), 3)
