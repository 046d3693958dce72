"""`sottovoce simulate`: what it writes and leaves out, and noise that is written as it was drawn, read back, and said again."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tracemalloc
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from sottovoce_client.atomic_files import create_file
from sottovoce_client.cli import app
from sottovoce_client.cli.completion import complete_metrics
from sottovoce_client.formatting import format_number
from sottovoce_client.runs import simulation
from sottovoce_client.runs.simulation import describe_epsilon, estimate_sizes, simulate_to_folder
from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.experiment import Experiment, load
from sottovoce_core.results import read_results
from sottovoce_core.runs.transcript import TranscriptWriter, read_noise
from sottovoce_core.spec import dump_spec
from tests.gossip import Gossip, gossip_spec

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
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
    simulate_to_folder(folder, Experiment(**spec), replicas=2, seed=3, **{"recorded_noise": None, **more})
    return folder


@pytest.mark.parametrize("changes", RUNS, ids=lambda run: str(run["name"]))
def test_recorded_noise_is_read_back_and_said_again(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields beside those of the message (`dvp`), rounds without a draw (`pd-ftgl`), no noise at all (`admm`)."""
    first = simulated(tmp_path / "first", changes, outputs=("transcript", "noise"))
    again = simulated(
        tmp_path / "again", changes, recorded_noise=first / "noise.parquet", outputs=("transcript", "noise")
    )

    said, repeated = (read_noise(folder / "transcript.parquet") for folder in (first, again))
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
    fields = read_noise(simulated(tmp_path / "first", changes, outputs=("noise",)) / "noise.parquet")
    np.savez(tmp_path / "noise.npz", **fields, z=np.zeros((36, 5, 3)))  # type: ignore[arg-type]
    simulated(tmp_path / "again", changes, recorded_noise=tmp_path / "noise.npz", outputs=("metrics",))
    assert f"noise.npz: z was not used: this run draws {draws}\n" in capsys.readouterr().err


def test_recorded_noise_has_no_guarantee(tmp_path: Path) -> None:
    changes = next(run for run in FIELD["runs"] if run["algorithm"]["name"] == "ldp-dol")
    first = simulated(tmp_path / "first", changes, outputs=("noise", "metrics"), metrics=["privacy_loss", "error"])
    again = tmp_path / "again"
    noise = first / "noise.parquet"
    simulated(again, changes, outputs=("metrics",), recorded_noise=noise, metrics=["privacy_loss", "error"])

    seeded, recorded = (read_results(folder).runs[0] for folder in (first, again))
    assert seeded.curves["privacy_loss"].final_mean == pytest.approx(seeded.facts.epsilon_record_use)
    for values in (recorded.curves["privacy_loss"].replicas, recorded.curves["privacy_loss"].learners):
        assert values is not None and np.isinf(values).all()
    np.testing.assert_array_equal(recorded.curves["error"].replicas, seeded.curves["error"].replicas)


def test_rounds_without_a_draw_have_zeros(tmp_path: Path) -> None:
    """PD-FTGL draws in the first round of a block, for the leaf of the block before: once in two blocks and a bit."""
    changes = next(run for run in FIELD["runs"] if run["name"] == "pd-ftgl")
    noise = read_noise(simulated(tmp_path / "run", changes, outputs=("transcript", "noise")) / "noise.parquet")["y"]

    assert len(noise) == 36
    assert [t for t in range(36) if noise[t].any()] == [16]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["noise"]])
def test_memory_does_not_grow_with_the_rounds(tmp_path: Path, more: list[str]) -> None:
    """A round's noise is 12 kB here: 400 rounds would hold five megabytes of it, more than the writer's rows."""

    def peak(rounds: int) -> int:
        folder = tmp_path / str(rounds)
        folder.mkdir()
        experiment = Experiment(rounds=rounds, learners=5, algorithm="ldp-dol", data={"source": "breast_cancer"})
        _ = experiment.prepared_run
        tracemalloc.start()
        try:
            simulate_to_folder(
                folder, experiment, replicas=10, seed=0, recorded_noise=None, outputs=["transcript", "decisions", *more]
            )
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(20)
    assert peak(800) - peak(400) < 2.5e6


# ---- what is written -------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"name": "small", "rounds": 6, "learners": 3, "algorithm": {"name": "ldp-dol", "sigma": 2.0}}
FILES = {
    "metrics": {"results.parquet", "results.json"},
    "models": {"models.parquet"},
    "decisions": {"decisions.parquet"},
    "transcript": {"transcript.parquet"},
    "noise": {"noise.parquet"},
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL, "data": {"source": "breast_cancer"}}), "utf-8")
    return tmp_path / "small.yaml"


def ran(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], ["metrics", "models"]),
        (["--write", "transcript"], ["transcript"]),
        (["--write", "noise, decisions"], ["decisions", "noise"]),
        (["--write", "all"], list(FILES)),
        (["--write", "models", "--export", "csv"], ["metrics", "models"]),
    ],
)
def test_what_is_asked_for_is_written_and_what_is_left_out_is_said(
    words: list[str], kept: list[str], spec: Path, tmp_path: Path
) -> None:
    done = ran(spec, "--out", tmp_path / "o", *words)
    assert (done.exit_code, done.stderr) == (0, "")
    exported = {"results.csv"} if "--export" in words else set()
    assert {each.name for each in (tmp_path / "o").iterdir()} == {
        "spec.yaml",
        *exported,
        *(file for name in kept for file in FILES[name]),
    }
    left = ", ".join(name for name in FILES if name not in kept)
    assert (f"not written: {left} (see --write)" in done.stdout) == bool(left)
    assert ("average_loss: " in done.stdout) == ("metrics" in kept)


def test_chosen_metrics_are_measured_at_chosen_checkpoints(spec: Path, tmp_path: Path) -> None:
    words = ["--write", "models", "--metrics", "error, prequential_loss", "--checkpoints", "2,4"]
    done = ran(spec, "--out", tmp_path / "o", "--replicas", 2, *words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()[2:4]] == ["error", "prequential_loss"]
    results = read_results(tmp_path / "o")
    assert sorted(set(results.metrics["metric"])) == ["error", "prequential_loss"]
    assert results.runs[0].curves.rounds.tolist() == [2, 4]
    counts = results.count_rounds_until("prequential_loss", math.inf)
    assert counts.to_dict() == {"spec": ["small"] * 2, "seed": [0, 1], "rounds": [2.0, 2.0]}
    with pytest.raises(
        SpecError, match="the metric must be one of those measured, error, prequential_loss, got accuracy"
    ):
        results.count_rounds_until("accuracy", 0.5)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--metrics", "luck"], "metrics must be of average_loss, .*, got luck"),
        (["--checkpoints", "7,"], "checkpoints must be numbers of rounds from 1 to 6, got 7"),
        (["--checkpoints", "0"], "the number of checkpoints must be at least 1, got 0"),
        (
            ["--checkpoints", "all"],
            "--checkpoints must be a number, or numbers of rounds with commas between, got 'all'",
        ),
    ],
)
def test_metrics_and_checkpoints_are_refused_before_there_is_a_folder(
    words: list[str], text: str, spec: Path, tmp_path: Path
) -> None:
    done = ran(spec, "--out", tmp_path / "o", *words)
    assert isinstance(done.exception, SpecError)
    assert re.search(text, str(done.exception))
    assert not (tmp_path / "o").exists()


def test_metrics_are_completed() -> None:
    assert complete_metrics("average_loss,err") == ["average_loss,error"]


@pytest.mark.parametrize("wrong", ["", "models,everything", ","])
def test_what_there_is_not_is_refused_before_there_is_a_folder(wrong: str, spec: Path, tmp_path: Path) -> None:
    done = ran(spec, "--out", tmp_path / "o", "--write", wrong)
    assert isinstance(done.exception, SpecError)
    assert "--write must be of metrics, models, decisions, transcript, noise or all, got" in str(done.exception)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "SPEC", "--recorded-noise", "nowhere.npz"],
        ["sweep", "SPEC", "--set", "rounds=-1"],
        ["compare", "nowhere.yaml"],
        ["simulate", "OWN"],
    ],
)
def test_a_refused_command_leaves_no_folder_that_it_made(
    words: list[str], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not those around it, nor where an algorithm of one's own is refused in its first round; a folder of the user stays."""
    own = gossip_spec({"graph": "complete"}, 2, 3, data={"source": "breast_cancer"})
    (tmp_path / "own.yaml").write_text(dump_spec(own), encoding="utf-8")
    monkeypatch.setattr(Gossip, "emit", lambda _, state, __: (state, None))
    words = [{"SPEC": str(spec), "OWN": str(tmp_path / "own.yaml")}.get(word, word) for word in words]
    (tmp_path / "mine").mkdir()
    for out in ("out/inner", "mine"):
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / out)])
        assert done.exit_code == 1
        assert isinstance(done.exception, SottovoceError | SystemExit)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_summary_says_what_the_run_costs(spec: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["simulate", str(spec), "--out", str(tmp_path / "a")]).output.splitlines()
    assert said[1] == f"epsilon per record use: {format_number(load(spec).epsilon())}, of the learner with the largest"
    told = CliRunner().invoke(
        app, ["simulate", str(spec), "--json", "--out", str(tmp_path / "b")], catch_exceptions=False
    )
    assert json.loads(told.stdout)["epsilon_record_use"] == load(spec).epsilon()
    alike = {"rounds": 6, "learners": 3, "data": {"source": "breast_cancer", "partition": "shared", "reuse": True}}
    together = Experiment(**alike, algorithm={"name": "dpsda-c"}, decision_set={"kind": "l2_ball", "radius": 1.0})
    assert describe_epsilon(together).endswith(", of all learners together")
    silent = Experiment(rounds=6, learners=3, algorithm={"name": "d-ogd"})
    assert describe_epsilon(silent) == "epsilon per record use: infinite, there is no guarantee"


def test_models_are_the_last_decisions(spec: Path, tmp_path: Path) -> None:
    assert ran(spec, "--out", tmp_path / "o", "--replicas", 2, "--write", "models,decisions").exit_code == 0
    models, decided = (pq.read_table(tmp_path / "o" / f"{name}.parquet") for name in ("models", "decisions"))
    assert models.schema == decided.schema
    assert models.to_pylist() == [row for row in decided.to_pylist() if row["round"] == SMALL["rounds"]]


def test_noise_and_what_learners_keep_to_themselves_is_their_users_alone(spec: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        ran(spec, "--out", tmp_path / "o", "--write", "all")
    finally:
        os.umask(before)
    modes = {each.stem: each.stat().st_mode & 0o777 for each in (tmp_path / "o").glob("*.parquet")}
    assert modes.pop("results") == 0o644  # means over all learners
    assert len(modes) == 4 and set(modes.values()) == {0o600}


def test_sizes_are_those_of_the_files(spec: Path, tmp_path: Path) -> None:
    """Compressed noise is nearly as large as it is: within a fifth, for all three."""
    ran(spec, "--out", tmp_path / "o", "--replicas", 200, "--write", "all")
    expected = estimate_sizes(load(spec).run, 200, list(FILES))
    assert list(expected) == ["models", "decisions", "transcript", "noise"]
    for name in ("transcript", "noise"):
        written = (tmp_path / "o" / f"{name}.parquet").stat().st_size
        assert 0.8 < written / expected[name] < 1.2
    assert expected["decisions"] == 7 * expected["models"]


def test_what_is_large_is_said_and_what_has_no_room_refused(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "_LARGE_OUTPUT_BYTES", 1000)
    said = ran(spec, "--out", tmp_path / "o", "--write", "models,transcript")
    assert said.exit_code == 0
    assert said.stderr == "about 5.21 kB will be written: models 744 bytes, transcript 4.46 kB\n"

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    refused = ran(spec, "--out", tmp_path / "p" / "q", "--write", "models,transcript")
    assert isinstance(refused.exception, SpecError)
    assert "5 kB are free, about 5.21 kB are needed (models 744 bytes, transcript 4.46 kB)" in str(refused.exception)
    assert not (tmp_path / "p").exists()


def test_whoever_needs_what_was_left_out_says_how_to_get_it(spec: Path, tmp_path: Path) -> None:
    ran(spec, "--out", tmp_path / "o", "--write", "noise")
    for words, needed in (
        (["transcript", "show"], "simulate --write transcript"),
        (["transcript", "query", "SELECT * FROM broadcasts"], "simulate --write transcript"),
        (["models", "export", "--out", tmp_path / "m.npz"], "simulate --write models"),
        (["plot", "--out", tmp_path / "p"], "simulate --write metrics"),
        (["audit", "--captures"], f"sottovoce audit {tmp_path / 'o'}/spec.yaml"),
    ):
        at = 1 if words[0] == "plot" else 2
        done = CliRunner().invoke(app, [*map(str, words[:at]), str(tmp_path / "o"), *map(str, words[at:])])
        assert isinstance(done.exception, SottovoceError)
        assert needed in str(done.exception)


def test_more_replicas_than_a_simulation_takes_are_refused_before_anything_is_said_or_written(
    spec: Path, tmp_path: Path
) -> None:
    done = ran(spec, "--out", tmp_path / "o", "--replicas", 10**7)
    assert str(done.exception).startswith(
        "a simulation must hold at most 134217728 numbers, and 3 learners in 10000000"
    )
    assert done.output == "" and not (tmp_path / "o").exists()


@pytest.mark.parametrize("how", [KeyboardInterrupt, SpecError])
def test_where_a_simulation_ended_early_another_one_may_write(
    how: type[BaseException], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise how

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(TranscriptWriter, "write", cut)
    for folder in ("there", "made/here"):
        assert ran(spec, "--out", tmp_path / folder).exit_code != 0
    assert not list((tmp_path / "there").iterdir()) and not (tmp_path / "made").exists()
    monkeypatch.undo()
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**SMALL, "rounds": 5}), "utf-8")
    assert ran(tmp_path / "other.yaml", "--out", tmp_path / "there").exit_code == 0


# ---- what is not complete --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["simulate", "SPEC"], "results.json"),
        (["compare", "SPEC"], "compare.html"),
        (["sweep", "SPEC", "--set", "algorithm.sigma=1", "--replicas", "1", "--jobs", "1"], "results.parquet"),
        (
            ["sweep", "SPEC", "--set", "algorithm.sigma=1", "--replicas", "1", "--jobs", "1", "--export", "csv"],
            "results.csv",
        ),
        (["budget", "SPEC"], "budget.json"),
        (["budget", "SPEC", "--tradeoff", "5,10,20", "--replicas", "2"], "tradeoff.html"),
        (["audit", "SPEC", "--runs", "30", "--jobs", "1"], "audit.html"),
        (["audit", "SPEC", "--runs", "30", "--jobs", "1"], "audit.json"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else each,
)
def test_what_is_interrupted_is_called_partial(
    words: list[str],
    last: str,
    how: type[BaseException],
    spec: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Just before a file is complete: it has all that it will have, but nobody knows that yet."""
    replace = Path.replace

    def unless_last(self: Path, to: Path) -> Path:
        if to.name == last:
            raise how
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", unless_last)
    done = CliRunner().invoke(
        app, [*(str(spec) if word == "SPEC" else word for word in words), "--out", str(tmp_path / "o")]
    )
    assert done.exit_code != 0
    there = {each.name for each in (tmp_path / "o").iterdir()}
    assert f"{last}.partial" in there and last not in there


def test_a_new_file_is_there_when_it_is_complete_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "model.npz"
    with create_file(out) as file:
        file.write(b"half")
        assert [each.name for each in tmp_path.iterdir()] == ["model.npz.partial"]
        with (
            pytest.raises(SpecError, match=r"model\.npz\.partial already, written or left behind by another command"),
            create_file(out),
        ):
            pass
    assert [each.name for each in tmp_path.iterdir()] == ["model.npz"]
    with pytest.raises(SpecError, match=r"there is a file .*npz already"), create_file(out):
        pass
    with pytest.raises(KeyboardInterrupt), create_file(tmp_path / "other"):
        raise KeyboardInterrupt
    assert out.read_bytes() == b"half" and len(list(tmp_path.iterdir())) == 1
