"""Accuracy where no learner was asked: by records and capture, the same that learners would have answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.reports.run_report import build_run_page, determine_verdict
from sottovoce_client.runs.evaluate import MAX_CURVE_POINTS, summarise
from sottovoce_core.data import PlacedData
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import parse_spec
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
    spec = parse_spec({**common, "algorithm": algorithm, **sections}, allow_imports=True)
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
    assert (asked.publication_cost, [each.test_curve for each in asked.learners]) == ("", [()] * 3)
    assert told in measured.publication_cost
    for each in measured.learners:
        assert [at for at, _ in each.test_curve] == list(range(1, 13)) and each.test_curve[-1][1] == each.test_accuracy


async def test_a_long_run_is_looked_at_in_some_rounds_and_one_without_a_capture_in_none(tmp_path: Path) -> None:
    spec = small_spec(3 * MAX_CURVE_POINTS, NAMES, capture="mirror")
    data, run = made_up(spec), build_run(spec, 3)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, data)
    measured, blind = summarise(run, data, outcome), summarise(run, data, replace(outcome, capture_location=None))
    for each in measured.learners:
        rounds = [at for at, _ in each.test_curve]
        assert MAX_CURVE_POINTS <= len(rounds) <= MAX_CURVE_POINTS + 1 and (rounds[0], rounds[-1]) == (1, spec.rounds)
    assert [each.test_accuracy for each in blind.learners] == [None] * 3 and blind.publication_cost == ""


async def test_what_cannot_be_computed_costs_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest stands, what is missing is named without what an error says of records, and the verdict is open."""
    spec = small_spec(6, NAMES, capture="mirror")
    data, run = made_up(spec), build_run(spec, 3)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, data)

    def broken(*_: object, **__: object) -> None:
        raise ValueError("secret 3.25")

    whole = summarise(run, data, outcome)
    assert whole.failed_parts == () and determine_verdict(whole).kind == "consistent"
    monkeypatch.setattr("sottovoce_client.runs.evaluate.compute_worst_losses", broken)
    lost = summarise(run, data, outcome)
    assert [line.partition(" could")[0] for line in lost.failed_parts] == [
        f"the privacy loss of the messages of {name}" for name in NAMES
    ]
    assert all("ValueError at " in line and "secret" not in line for line in lost.failed_parts)
    assert [each.test_accuracy for each in lost.learners] == [each.test_accuracy for each in whole.learners]
    assert (lost.state, lost.epsilon_record_use, lost.capture is not None) == (
        whole.state,
        whole.epsilon_record_use,
        True,
    )
    assert determine_verdict(lost).tone == "open" and lost.failed_parts[1] in determine_verdict(lost).text
    page = build_run_page(lost).to_html()
    assert "It could not be computed" in page and "There is no capture" not in page

    monkeypatch.setattr("sottovoce_client.runs.evaluate.measure", broken)
    monkeypatch.setattr("sottovoce_client.runs.evaluate.compute_central_accuracy", broken)
    monkeypatch.setattr("sottovoce_client.runs.evaluate._read_capture", broken)
    least = summarise(run, data, outcome)
    assert len(least.failed_parts) == 3 and least.state == whole.state
    assert [each.epsilon_record_use for each in least.learners] == [each.epsilon_record_use for each in whole.learners]


async def test_a_loss_of_many_classes_is_summarised_where_learners_say_their_values(tmp_path: Path) -> None:
    loss = {"kind": "softmax", "classes": 3}
    for name in ("dola", "pd-ogd", "pdop", "dpdola"):
        document = {"rounds": 4, "learners": NAMES, "durability": "process", "capture": "mirror", "loss": loss}
        spec = parse_spec({**document, "algorithm": {"name": name}}, allow_imports=True)
        data, run = made_up(spec), build_run(spec, 3)
        async with network(tmp_path / name, NAMES) as up:
            outcome = await up.run(spec, data)
        assert summarise(run, data, outcome).failed_parts == ()
