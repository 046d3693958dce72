"""Every algorithm runs over the network as it does in the simulator."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.noise import Recorder, SeededNoise
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec
from sottovoce_eavesdropper.capture_reader import open_capture
from tests.examples import made_up
from tests.services.network import network

pytestmark = pytest.mark.each

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)
ROUNDS = 36
"""More than two blocks of the longest block length."""


def test_the_field_has_every_algorithm() -> None:
    assert {run["algorithm"]["name"] for run in FIELD["runs"]} == set(ALGORITHMS.built_in_classes)


@pytest.mark.parametrize("changes", FIELD["runs"], ids=lambda run: str(run["name"]))
async def test_the_network_equals_the_simulator(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Equal noise, equal data: what crosses the wire, what is decided and what is charged, to 1e-9."""
    more = {"capture": "mirror", "clock": {"window": 7, "deadline_s": 100.0}}
    spec = parse_spec(
        {**FIELD["common"], **changes, **more, "rounds": min(ROUNDS, changes.get("rounds", ROUNDS))}, allow_imports=True
    )
    data = made_up(spec, 6, batch=2)
    run, recorder = build_run(spec, data.n_features), Recorder(SeededNoise(1))
    steps = list(simulate_rounds(run, data, recorder))
    drawn: dict[str, Any] = {name: np.stack(rounds) for name, rounds in recorder.noise_by_field.items()}
    np.savez(tmp_path / "noise.npz", **drawn)

    async with network(tmp_path, spec.names, noise=tmp_path / "noise.npz") as up:
        outcome = await up.run(spec, data)
        sessions = [up.learners[name].require_session() for name in spec.names]
        decisions = np.stack([session.algorithm.decision(session.state_machine.state) for session in sessions])

    assert (outcome.state, outcome.detail) == ("finished", "")
    np.testing.assert_allclose(decisions, steps[-1].decisions_after[:, 0], rtol=1e-9, atol=1e-9)
    promised = [run.guarantee(i, np.full(spec.rounds, 2)).epsilon() for i in range(spec.n_learners)]
    assert [status.epsilon_spent for status in outcome.statuses] == pytest.approx(promised, rel=1e-9)
    if spec.n_learners == 1 or outcome.capture_location is None:  # nobody to say anything to
        return
    capture = open_capture(outcome.capture_location)
    assert (capture.metadata["detections"], capture.metadata["unchecked_reason"]) == ([], None)
    overheard = capture.read_transcript(run.algorithm.field_shapes(), spec.n_learners)
    for name, heard in overheard.fields.items():
        said = np.stack([step.message[name] for step in steps])[: len(heard)]
        was_heard = ~np.isnan(heard).any(axis=-1)
        assert was_heard.mean() > 0.5
        np.testing.assert_allclose(heard[was_heard], said[was_heard], rtol=1e-9, atol=1e-9)
