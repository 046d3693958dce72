"""Accuracy where no learner was asked: by records and capture, the same that learners would have answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce.data import PlacedData
from sottovoce.running.run import build_run
from sottovoce.spec import parse_spec
from sottovoce_client.running.evaluate import summarise
from sottovoce_client.running.measuring import CURVE
from tests.examples import made_up, small_spec
from tests.services.network import network

NAMES = ["ann", "ben", "eve"]
CLEAN = {"name": "ldp-dol", "sigma": 1.0}
COVERED = {"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 2.0}, "play": "mixed"}


@pytest.mark.parametrize(
    ("algorithm", "sections", "told"),
    [
        (COVERED, {"capture": "relay"}, "it costs nothing more"),
        (CLEAN, {"capture": "mirror", "topology": {"graph": "path"}}, "no epsilon covers it"),
        (
            CLEAN,
            {"capture": "relay", "absences": [{"learner": "eve", "first_round": 3, "until_round": 7}]},
            "no epsilon covers it",
        ),
    ],
    ids=["covered", "clean", "away"],
)
async def test_what_is_measured_here_is_what_learners_would_answer(
    tmp_path: Path, algorithm: dict[str, Any], sections: dict[str, Any], told: str
) -> None:
    """The run opted in, so that they can be asked, too; where they were, nothing is measured."""
    common = {"rounds": 12, "learners": NAMES, "durability": "process", "telemetry": {"predict": True}}
    spec = parse_spec({**common, "algorithm": algorithm, **sections}, imports=True)
    made = made_up(spec)
    test = np.random.default_rng(5).normal(size=(200, 3))
    data = PlacedData(made.learners, test, (test[:, 0] > 0).astype(np.float64))
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, data)
    run = build_run(spec, 3)
    asked = summarise(run, data, outcome)
    measured = summarise(run, data, replace(outcome, predictions=(None,) * 3))
    assert None not in [each.test_accuracy for each in asked.learners]
    assert [each.test_accuracy for each in measured.learners] == [each.test_accuracy for each in asked.learners]
    assert measured.disagreement == asked.disagreement
    assert (asked.measured, [each.test_curve for each in asked.learners]) == ("", [()] * 3)
    assert told in measured.measured
    for each in measured.learners:
        assert [at for at, _ in each.test_curve] == list(range(1, 13)) and each.test_curve[-1][1] == each.test_accuracy


async def test_a_long_run_is_looked_at_in_some_rounds_and_one_without_a_capture_in_none(tmp_path: Path) -> None:
    spec = small_spec(3 * CURVE, NAMES, capture="mirror")
    data, run = made_up(spec), build_run(spec, 3)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, data)
    measured, blind = summarise(run, data, outcome), summarise(run, data, replace(outcome, capture=None))
    for each in measured.learners:
        rounds = [at for at, _ in each.test_curve]
        assert CURVE <= len(rounds) <= CURVE + 1 and (rounds[0], rounds[-1]) == (1, spec.rounds)
    assert [each.test_accuracy for each in blind.learners] == [None] * 3 and blind.measured == ""
