"""Runs without a planned end: which there are, and that what is said in them is what is said in any run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.registry import UNBOUNDED_ROUNDS
from sottovoce_core.runs.policy import Policy
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec, dump_spec, parse_spec
from tests.claims import BALL, EXPOSED, LOGISTIC, RING, SETUPS, Setup
from tests.examples import small_spec

LIVE = {"source": "live", "features": 2}
ALL = {**SETUPS, **EXPOSED}


def endless(**sections: Any) -> RunSpec:
    document = {"rounds": None, "learners": 3, "algorithm": "ldp-dol", "data": LIVE, **sections}
    return parse_spec(document, allow_imports=False)


def without_an_end(setup: Setup) -> Run | SpecError:
    """The run; or why there is none."""
    document = {
        "rounds": None,
        "learners": 3,
        "loss": LOGISTIC,
        "decision_set": BALL,
        "topology": RING,
        **setup.sections,
    }
    try:
        spec = parse_spec({**document, "algorithm": setup.algorithm, "data": LIVE}, allow_imports=True)
        return build_run(spec, setup.n_features)
    except SpecError as refused:
        return refused


@pytest.mark.parametrize("name", ALL)
def test_who_needs_no_end_promises_the_same_without_one(name: str) -> None:
    setup, planned, run = ALL[name], ALL[name].build(), without_an_end(ALL[name])
    if isinstance(run, SpecError):
        fades = ("noise must not fade", "noise scale is positive in every round", "noise scale must stay within")
        assert any(text in str(run) for text in ("needs a number of rounds, got rounds: null", *fades))
        return
    assert run.spec.is_unbounded
    first, counts = range(setup.rounds - 1), np.ones(setup.rounds - 1, np.int64)  # the last one of some is another
    for i in range(run.spec.n_learners):
        assert [run.algorithm.noise_scale(i, t) for t in first] == [planned.algorithm.noise_scale(i, t) for t in first]
        losses = [each.algorithm.accountant(i).losses(counts).tolist() for each in (run, planned)]
        assert losses[0] == losses[1]


def test_the_docs_name_who_needs_no_end() -> None:
    able = {each.algorithm["name"] for each in ALL.values() if not isinstance(without_an_end(each), SpecError)}
    page = (Path(__file__).parents[2] / "docs/guides/live.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"It is possible with (.*?);", page)
    assert able - {"dpsda-c", "dpcda"} == set(re.findall(r"`(.*?)`", said))  # those two share their records


def test_null_is_read_and_written() -> None:
    spec = endless()
    assert (spec.rounds, spec.is_unbounded) == (UNBOUNDED_ROUNDS, True)
    assert yaml.safe_load(dump_spec(spec))["rounds"] is None
    assert parse_spec(yaml.safe_load(dump_spec(spec)), allow_imports=False) == spec
    assert not small_spec().is_unbounded


def test_a_schema_of_specs_has_both() -> None:
    kinds = RunSpec.model_json_schema()["properties"]["rounds"]["anyOf"]
    assert [each["type"] for each in kinds] == ["integer", "null"]


def test_records_must_go_on() -> None:
    with pytest.raises(
        SpecError, match=r"rounds: null needs records that go on, data\.source: live, got breast_cancer"
    ):
        endless(data={"source": "breast_cancer"})


@pytest.mark.parametrize("learners", [3, 50])
def test_it_is_checked_without_going_through_its_rounds(learners: int) -> None:
    run = prepare(endless(learners=learners), live=True).run
    assert run.spec.is_unbounded
    with pytest.raises(SpecError, match="the cost of all rounds needs a number of rounds, got rounds: null: give one"):
        run.guarantee(0)


def test_an_owner_who_limits_rounds_allows_none_without_an_end() -> None:
    spec = endless(privacy={"budget": 4.0})
    with pytest.raises(
        SpecError, match=r"allows max_rounds 10000000, the spec asks for rounds without an end; `max_rounds: null` in"
    ):
        Policy().admit(spec, 2, 0)
    assert Policy(max_rounds=None).admit(spec, 2, 0).spec == spec
    assert Policy.from_spec(spec).max_rounds is None
