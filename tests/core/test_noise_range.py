"""Extreme parameters: a run is refused, or its noise is drawn and charged as what it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.noise import MAX_NOISE_SCALE, MIN_NOISE_SCALE, NoiseRequest, SeededNoise
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec
from tests.examples import made_up

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)
RUNS = {str(each["name"]): each for each in FIELD["runs"]}
EXTREME = [0.0, 5e-324, 1e-308, 1e-200, 1e-100, 1e-60, 1e60, 1e100, 1e200, 1.7e308]
ROUNDS = 36


def document(name: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """A run of the field, with everything in it that a spec may say."""
    short = {**FIELD["common"], **RUNS[name], "rounds": rounds}
    return copy.deepcopy(parse_spec(short, allow_imports=True).model_dump(mode="json"))


def numbers(section: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a section has a number that is not a count, or none."""
    if isinstance(section, dict):
        for key, value in section.items():
            yield from numbers(value, (*path, key))
    elif section is None or isinstance(section, float):
        yield path


PLACES = {
    name: [(part, *path) for part in ("algorithm", "loss", "decision_set") for path in numbers(document(name)[part])]
    for name in RUNS
}


def changed(name: str, changes: dict[tuple[Any, ...], float]) -> dict[str, Any]:
    told = document(name)
    for path, value in changes.items():
        section = told
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = value
    return told


@st.composite
def extremes(draw: st.DrawFn) -> tuple[str, dict[tuple[Any, ...], float]]:
    """One to three numbers of a run's algorithm, loss and decision set, at the ends of float64."""
    name = draw(st.sampled_from(sorted(RUNS)))
    places = draw(st.lists(st.sampled_from(PLACES[name]), min_size=1, max_size=3, unique=True))
    return name, {place: draw(st.sampled_from(EXTREME)) for place in places}


class Looking(SeededNoise):
    """A source that sees whether a deployed learner's would serve what it is asked for."""

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        scale = np.asarray(draw.scale)
        if draw.distribution == "spherical" and draw.round == 0:
            assert np.isinf(scale).all()  # before the first record nothing is asked of a real source
        elif draw.spacing is None:
            assert ((scale > 0) & (1.0 / scale >= MIN_NOISE_SCALE) & (1.0 / scale <= MAX_NOISE_SCALE)).all(), draw
        else:
            assert ((scale >= MIN_NOISE_SCALE) & (scale <= MAX_NOISE_SCALE) & (draw.spacing > 0.0)).all(), draw
        return super().__call__(draw)


@settings(max_examples=400, deadline=None)
@given(extremes())
def test_extreme_parameters_are_refused_or_charged(of: tuple[str, dict[tuple[Any, ...], float]]) -> None:
    """No price is not a number, or below 0; and what has a finite one is said with noise of a scale in range."""
    try:
        with np.errstate(all="ignore"):
            run = build_run(parse_spec(changed(*of), allow_imports=True), 6)
    except SpecError:
        return
    with np.errstate(all="ignore"):
        prices(run)
        for _ in simulate_rounds(run, made_up(run.spec, 6), Looking(1)):
            pass


def prices(run: Run) -> None:
    for learner in range(run.spec.n_learners):
        meter = run.algorithm.accountant(learner)
        for t in range(run.spec.rounds):
            price = meter.next_loss()
            assert price >= 0.0, (learner, t, price)
            if 0.0 < price < math.inf:
                scale = run.algorithm.noise_scale(learner, t)
                assert MIN_NOISE_SCALE <= scale <= MAX_NOISE_SCALE, (learner, t, price, scale)
            meter.advance(1)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ldp-dol", {"sigma": 1.7e308, "varsigma": 0.4}),
        ("ldp-dol", {"sigma": 1e-308}),
        ("dsgd", {"noise": {"kind": "power", "sigma": 1.7e308, "varsigma": 0.4}}),
        ("dsgd", {"noise": {"kind": "power", "sigma": 1e90, "varsigma": 0.4}}),
        ("dpsr", {"noise": {"kind": "power", "sigma": 1.7e308, "varsigma": 0.4}}),
        ("dpsda-c", {"sigma": 1.7e308}),
        ("dpps", {"sigma": 1e-300}),
        ("pd-ftgl", {"noise_scale": 1.7e308, "block_length": 8}),
        ("pd-ocg", {"noise_scale": 1e-308}),
        ("dvp", {"alpha": 1e-308}),
        ("dvp", {"output_noise": 1e-308}),
        ("pvp", {"alpha": 1e-320}),
        ("pvp", {"alpha": 1e300}),
    ],
)
def test_noise_that_float64_or_the_wire_cannot_carry_is_refused(name: str, parameters: dict[str, Any]) -> None:
    """What overflows is charged as nothing, and would be drawn as next to nothing."""
    algorithm = {"name": name, **parameters}
    if "alpha" not in parameters and name in ("dvp", "pvp"):
        algorithm["alpha"] = 0.25
    short = {**FIELD["common"], **RUNS[name], "rounds": 60, "algorithm": algorithm}
    with pytest.raises(AssumptionViolated, match="the noise scale must stay within") as caught:
        build_run(parse_spec(short, allow_imports=True), 6)
    assert caught.value.code in ("NOISE_SCALE", "SIGMA", "SOLVER")
