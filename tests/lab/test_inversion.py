"""A search for the record behind a network's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from sottovoce_core.arrays import Batch  # noqa: E402
from sottovoce_core.data import PlacedData  # noqa: E402
from sottovoce_core.losses.torch import TorchLoss  # noqa: E402
from sottovoce_core.noise import SeededNoise  # noqa: E402
from sottovoce_core.runs.run import build_run  # noqa: E402
from sottovoce_core.runs.simulator import simulate_rounds  # noqa: E402
from sottovoce_core.runs.transcript import Transcript  # noqa: E402
from sottovoce_core.spec import parse_spec  # noqa: E402
from sottovoce_lab.inversion import invert  # noqa: E402
from sottovoce_lab.reconstruction import Reconstruction, reconstruct_records  # noqa: E402
from tests.examples import made_up  # noqa: E402

LOSS = {
    "kind": "torch",
    "module": "sottovoce_lab.inversion:SmoothNet",
    "shape": [1, 8, 8],
    "feature_bound": 4.0,
    "clip_norm": 2.0,
    "ridge": 0.0,
}


def document(noise: dict[str, Any]) -> dict[str, Any]:
    algorithm = {"name": "pd-ogd", "step": {"kind": "power", "scale": 1.0}, "noise": noise}
    ball = {"kind": "l2_ball", "radius": 1000.0}
    common = {"rounds": 2, "learners": 2, "durability": "process", "data": {"intercept": False}}
    return {**common, "algorithm": algorithm, "loss": LOSS, "decision_set": ball}


def attacked(noise: dict[str, Any]) -> Reconstruction:
    spec = parse_spec(document(noise), allow_imports=True)
    drawn = made_up(spec, 64)
    learners = tuple(type(own)(np.abs(own.features), own.labels, own.order, own.offsets) for own in drawn.learners)
    data = PlacedData(learners, np.abs(drawn.test_features), drawn.test_labels)
    run = build_run(spec, 64)
    return reconstruct_records(
        run, data, Transcript.from_rounds(step.message for step in simulate_rounds(run, data, SeededNoise(0)))
    )


def test_the_record_and_its_label_are_found() -> None:
    loss = parse_spec(document({"kind": "none"}), allow_imports=True).loss
    assert isinstance(loss, TorchLoss)
    features, labels = loss.enforce_bounds(np.abs(np.random.default_rng(3).normal(size=(1, 64))), np.array([7.0]))
    theta = loss.initial_parameters(loss.dim(64))
    threads = torch.get_num_threads()
    found = invert(loss, theta, loss.gradient_sum(theta, Batch(features, labels)), 0)
    assert found.label == 7 and found.mismatch < 1e-6
    np.testing.assert_allclose(found.record, features[0], atol=0.02)
    assert torch.get_num_threads() == threads


def test_the_wire_without_noise_gives_pictures_away() -> None:
    made = attacked({"kind": "none"})
    assert made.similarity > 0.99 and made.recognised_share == 1.0 and made.identified_share == 1.0


def test_noise_hides_pictures() -> None:
    made = attacked({"kind": "calibrated", "epsilon": 10.0})
    assert abs(made.similarity) < 0.4 and made.mean_squared_error > 0.05
