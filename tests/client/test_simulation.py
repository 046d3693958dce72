"""`sottovoce simulate`: noise is written as it was drawn, read back, and said again."""

from __future__ import annotations

import tracemalloc
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sottovoce.experiment import Experiment
from sottovoce.running.transcript import read_noise, read_transcript
from sottovoce_client.running.simulation import simulate_to

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.running").joinpath("field.yaml").read_text("utf-8")
)
PVP_THEN_DVP = {
    "name": "pvp-then-dvp",
    "rounds": 6,
    "algorithm": {"name": "pvp", "alpha": 0.25, "final": "dvp"},
    "data": {"source": "breast_cancer", "batch_size": "all"},
}
RUNS = [*FIELD["runs"], PVP_THEN_DVP]


def simulated(folder: Path, changes: dict[str, Any], **more: Any) -> Path:
    """The folder of a short simulation of one algorithm of the field."""
    rounds = 6 if changes["algorithm"]["name"] in ("dvp", "pvp", "admm") else 36
    folder.mkdir()
    spec = {**FIELD["common"], **changes, "rounds": rounds}
    simulate_to(folder, Experiment(**spec), replicas=2, seed=3, **{"noise": None, "record_noise": False, **more})
    return folder


@pytest.mark.parametrize("changes", RUNS, ids=lambda run: str(run["name"]))
def test_recorded_noise_is_read_back_and_said_again(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields beside those of the message (`dvp`), rounds without a draw (`pd-ftgl`), no noise at all (`admm`)."""
    first = simulated(tmp_path / "first", changes, record_noise=True)
    again = simulated(tmp_path / "again", changes, noise=first / "noise.parquet", record_noise=True)

    said, repeated = (read_transcript(folder / "transcript.parquet").fields for folder in (first, again))
    assert said.keys() == repeated.keys()
    assert all(np.array_equal(said[name], repeated[name]) for name in said)
    drawn, redrawn = (read_noise(folder / "noise.parquet") for folder in (first, again))
    assert drawn.keys() == redrawn.keys()
    assert all(np.array_equal(drawn[name], redrawn[name]) for name in drawn)
    assert "was not used" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "draws"), [("dvp", "output, y"), ("ldp-dol", "y"), ("admm", "nothing")])
def test_noise_that_a_run_does_not_draw_is_told(
    tmp_path: Path, name: str, draws: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = next(run for run in FIELD["runs"] if run["algorithm"]["name"] == name)
    fields = read_noise(simulated(tmp_path / "first", changes, record_noise=True) / "noise.parquet")
    np.savez(tmp_path / "noise.npz", **fields, z=np.zeros((36, 5, 3)))  # type: ignore[arg-type]
    simulated(tmp_path / "again", changes, noise=tmp_path / "noise.npz")
    assert f"noise.npz: z was not used: this run draws {draws}\n" in capsys.readouterr().err


def test_rounds_without_a_draw_have_zeros(tmp_path: Path) -> None:
    """PD-FTGL draws in the first round of a block, for the leaf of the block before: once in two blocks and a bit."""
    changes = next(run for run in FIELD["runs"] if run["name"] == "pd-ftgl")
    noise = read_noise(simulated(tmp_path / "run", changes, record_noise=True) / "noise.parquet")["y"]

    assert len(noise) == 36
    assert [t for t in range(36) if noise[t].any()] == [16]


@pytest.mark.parametrize("record_noise", [False, True])
def test_memory_does_not_grow_with_the_rounds(tmp_path: Path, record_noise: bool) -> None:
    """A round's noise is 12 kB here: 400 rounds would hold five megabytes of it, more than the writer's rows."""

    def peak(rounds: int) -> int:
        folder = tmp_path / str(rounds)
        folder.mkdir()
        experiment = Experiment(rounds=rounds, learners=5, algorithm="ldp-dol", data={"source": "breast_cancer"})
        _ = experiment.prepared
        tracemalloc.start()
        try:
            simulate_to(folder, experiment, replicas=10, seed=0, noise=None, record_noise=record_noise)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(20)
    assert peak(800) - peak(400) < 2.5e6
