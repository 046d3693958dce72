"""Sweeps, and what becomes of their tables: Parquet, figures, files for papers."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.cli.app import parse_field_values
from sottovoce_client.reports.figure import Figure, export, parse_formats
from sottovoce_client.reports.plot_elements import BLUE, Axis, PlotView, choose_style, make_line
from sottovoce_client.runs.plot import HorizontalAxis, make_figures
from sottovoce_client.runs.sweep import sweep
from sottovoce_core.api import simulate
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.results import Facts, Result, Results, compute_bootstrap_intervals, read_results
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.table import Table
from tests.core.test_experiment import small

SIGMAS: dict[str, list[float]] = {"algorithm.sigma": [1, 4], "algorithm.lam0": [0.5, 1.0]}


# ---- the table -------------------------------------------------------------------------------------------------------


def test_a_row_is_what_its_combination_comes_to(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    results = sweep(experiment, SIGMAS, replicas=5, seed=7, metrics=["average_loss", "accuracy"], jobs=1)
    table, lossy = results.summary(), results.metrics.where(metric="average_loss")
    settings = [(row[1], row[2]) for row in table.where(metric="accuracy").rows()]

    measured = ["metric", "mean", "standard_error", "low", "high", "epsilon", "seeds"]
    assert list(table.columns) == ["spec", *SIGMAS, "round", *measured]
    assert settings == [(1, 0.5), (1, 1.0), (4, 0.5), (4, 1.0)]
    for sigma, lam0 in settings:
        alone = experiment.replace(**{"algorithm.sigma": sigma, "algorithm.lam0": lam0})
        curves = simulate(alone, 5, seed=7).curves
        (row,) = table.where(**{"algorithm.sigma": sigma, "algorithm.lam0": lam0, "metric": "average_loss"}).rows()
        assert curves is not None
        assert row[5] == pytest.approx(curves["average_loss"].final_mean)
        assert row[7] <= row[5] <= row[8]
        assert row[9:] == (alone.epsilon(), 5)
        own = lossy.where(setting=f"algorithm.sigma={sigma}, algorithm.lam0={lam0}", learner=None)
        assert own["seed"].tolist() == [0, 1, 2, 3, 4]
        assert own["value"] == pytest.approx(curves["average_loss"].replicas[-1])


def test_jobs_do_not_change_a_table(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    one, two = (
        sweep(experiment, {"algorithm.sigma": [1, 2]}, replicas=3, vary_data=True, jobs=jobs).metrics.to_dict()
        for jobs in (1, 2)
    )

    np.testing.assert_equal(one, two)


def test_a_sweep_measures_at_chosen_checkpoints(tmp_path: Path) -> None:
    small(tmp_path).to_yaml(tmp_path / "spec.yaml")
    words = ["--set", "algorithm.sigma=1,4", "--metrics", "error,static_regret", "--checkpoints", "2,5", "--jobs", "1"]
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "spec.yaml"), *words, "--out", str(tmp_path / "o")])

    assert done.exit_code == 0, done.output
    results = read_results(tmp_path / "o")
    assert [run.curves.rounds.tolist() for run in results.runs] == [[2, 5]] * 2
    assert sorted(set(results.metrics["metric"])) == ["error", "static_regret"]
    counts = results.count_rounds_until("error", 1.0)
    assert list(counts.columns) == ["spec", "algorithm.sigma", "seed", "rounds"]
    assert set(counts["rounds"]) == {2.0}
    experiment = small(tmp_path)
    with pytest.raises(SpecError, match=r"rounds=3: checkpoints must be numbers of rounds from 1 to 3, got 2, 5"):
        sweep(experiment, {"rounds": [5, 3]}, checkpoints=(2, 5))


def test_records_are_dealt_anew_where_asked(tmp_path: Path) -> None:
    experiment = small(tmp_path).replace(**{"data.seed": 4})
    varied = sweep(experiment, {}, replicas=2, metrics=["accuracy"], vary_data=True, jobs=1).summary()
    finals = []
    for k, seed in enumerate(np.random.SeedSequence(0).spawn(2)):
        curves = simulate(experiment.replace(**{"data.seed": 4 + k}), seed=seed).curves
        assert curves is not None
        finals.append(curves["accuracy"].final_mean)

    assert varied["mean"].tolist() == [pytest.approx(np.mean(finals))]
    with pytest.raises(SpecError, match=r"data\.seed must not be among the changes with vary_data"):
        sweep(experiment, {"data.seed": [1, 2]}, vary_data=True)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    sweep(small(tmp_path), {"rounds": [3, 4]}, replicas=1, jobs=1, progress=lambda done, of: told.append((done, of)))

    assert told == [(1, 2), (2, 2)]


def test_what_is_not_allowed_is_refused(tmp_path: Path) -> None:
    experiment = small(tmp_path)

    with pytest.raises(SpecError, match=r"unknown field algorithm\.sigmal"):
        sweep(experiment, {"algorithm.sigmal": [1]})
    with pytest.raises(SpecError, match=r"metrics must be of average_loss, .*, got acuracy"):
        sweep(experiment, {}, replicas=1, metrics=["acuracy"], jobs=1)
    with pytest.raises(SpecError, match=r"a sweep needs values for algorithm\.sigma"):
        sweep(experiment, {"algorithm.sigma": []})
    with pytest.raises(SpecError, match="seeds must be at least 1, got 0"):
        sweep(experiment, {}, replicas=0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_combination_that_cannot_be_run_is_named_before_any_is_simulated(tmp_path: Path, jobs: int) -> None:
    told: list[int] = []
    experiment = small(tmp_path).replace(algorithm={"name": "pd-ftgl", "epsilon": 1.0})

    with pytest.raises(SpecError, match=r"^algorithm\.sigma=1, rounds=0: rounds: must be greater than 0"):
        sweep(small(tmp_path), {"algorithm.sigma": [1, 2], "rounds": [4, 0]}, replicas=1, jobs=jobs)
    changes = {"algorithm.block_length": [2, 20]}
    with pytest.raises(SpecError, match=r"^algorithm\.block_length=20: .* \[BLOCK_LENGTH\]$"):
        sweep(experiment, changes, replicas=1, jobs=jobs, progress=lambda done, _: told.append(done))
    assert told == []


@pytest.mark.statistics
def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Of 400 intervals of 50 normal numbers a percentile bootstrap covers about 94 %; fewer than 88 %: p < 1e-5."""
    generator = np.random.default_rng(1)
    low, high = compute_bootstrap_intervals(generator.normal(size=(400, 50)))
    covered = np.mean((low <= 0.0) & (high >= 0.0))

    assert 0.88 <= covered <= 0.985


def test_an_interval_of_one_number_is_unknown_and_of_equal_ones_is_that_number() -> None:
    assert np.isnan(compute_bootstrap_intervals(np.ones((2, 1)))).all()
    assert [each.tolist() for each in compute_bootstrap_intervals(np.ones((2, 5)))] == [[1.0, 1.0], [1.0, 1.0]]


# ---- figures and files -----------------------------------------------------------------------------------------------


def one_run(changes: Mapping[str, Any], values: list[float], epsilon: float, spec: str = "run") -> Result:
    """A run of which nothing but the last accuracies of some seeds is known."""
    facts = Facts(spec, changes, "ldp-dol", "wire", epsilon, epsilon, epsilon, 4, 6, ("ada",), "")
    curves = {"accuracy": Curve(np.array([values]), None)}
    return Result(facts, Curves(np.array([6]), curves, np.array([6.0])))


def swept(*fields: str) -> Results:
    runs = []
    for u, sigma in itertools.product(("a", "b"), (4, 1, 2)):
        changes = {name: {"u": u, "sigma": sigma}[name] for name in fields or ("sigma", "u")}
        runs.append(one_run(changes, [sigma / 11, sigma / 9], 3.0))
    return Results(tuple(runs))


def drawn(results: Results, x: str = "", log: set[str] | None = None) -> list[Figure]:
    return make_figures(HorizontalAxis.choose({"x": results}, x), log)


def test_a_figure_has_a_line_and_a_band_for_every_combination() -> None:
    (drawing,) = drawn(swept())
    lines = [mark for mark in drawing.marks if mark.kind == "line"]

    assert [mark.name for mark in lines] == ["u a", "u b"]
    assert [mark.x.tolist() for mark in lines] == [[1, 2, 4]] * 2
    assert len([mark for mark in drawing.marks if mark.kind == "area"]) == 2


def of_epsilon(*settings: tuple[object, float]) -> Results:
    """A sweep of one field, with an epsilon for each value."""
    return Results(
        tuple(one_run({"field": value}, [0.4 + k, 0.6 + k], epsilon) for k, (value, epsilon) in enumerate(settings))
    )


def lines_of(results: Results, x: str = "") -> list[tuple[str, list[float], list[float]]]:
    (drawing,) = drawn(results, x)
    return [(mark.name, mark.x.tolist(), mark.y.tolist()) for mark in drawing.marks if mark.kind != "area"]


@pytest.mark.parametrize("field", ["algorithm.epsilon", "algorithm.noise.epsilon", "algorithm.alpha"])
def test_a_privacy_level_is_drawn_by_the_epsilon_that_comes_of_it(field: str) -> None:
    runs = [one_run({field: level}, [0.1 * level] * 3, level / 7) for level in (1.0, 4.0, 16.0)]
    (shown,) = drawn(Results(tuple(runs)))
    (view,), curve = shown.views, next(each for each in shown.marks if each.kind == "line")
    assert view.x.title == "ε per record use" and curve.x == pytest.approx([1 / 7, 4 / 7, 16 / 7])
    (asked,) = drawn(Results(tuple(runs)), field)
    assert asked.views[0].x.title == f"{field} (a parameter, not the ε per record use)"
    endless = Results(tuple(one_run(each.facts.changes, [0.1], math.inf) for each in runs))
    (unpromised,) = drawn(endless)
    assert unpromised.views[0].x.title.startswith(field)


def test_epsilon_may_be_across() -> None:
    """Points are joined along the field that was changed, in the order of epsilon; what promises nothing is not there."""
    table = of_epsilon((4, 1.0), (1, 16.0), (2, 4.0), (0, math.inf))
    (drawing,) = drawn(table, "epsilon")

    assert drawing.views[0].x.title == "ε per record use"
    name, x, y = lines_of(table, "epsilon")[0]
    assert (name, x[:3], y[:3]) == ("accuracy", [1.0, 4.0, 16.0], [0.5, 2.5, 1.5])
    assert not np.isfinite(x[3:]).any()
    assert HorizontalAxis.choose({"x": table}, "epsilon").omission_note.endswith(
        "epsilon is infinite (no guarantee): 1 setting"
    )
    assert HorizontalAxis.choose({"x": table}).omission_note == ""
    with pytest.raises(SpecError, match="--x must be one of rounds, epsilon, field, got mean"):
        drawn(table, "mean")
    with pytest.raises(SpecError, match="an axis of epsilon needs a finite epsilon, and all of these are infinite"):
        drawn(of_epsilon((1, math.inf)), "epsilon")


def test_budgets_of_several_specs_are_one_figure_that_names_their_epsilon() -> None:
    runs = []
    for name, losses in (("finite", [1.0, 3.0]), ("none", [math.inf, math.inf]), ("n" * 50, [0.0, 2.5])):
        run = one_run({}, [0.5, 0.7], losses[-1], spec=name)
        budget = Curve(np.repeat([[each] for each in losses], 2, axis=1), None)
        runs.append(replace(run, curves=replace(run.curves, rounds=np.array([1, 6]), curves={"privacy_loss": budget})))
    (figure,) = drawn(Results(tuple(runs)), "rounds")
    lines = [mark for mark in figure.marks if mark.kind == "line"]

    assert [mark.name for mark in lines] == ["finite, ε 3", "none, ε ∞, not drawn", f"{'n' * 39}…, ε 2.5"]
    assert [mark.y.tolist() for mark in lines[::2]] == [[1.0, 3.0], [0.0, 2.5]]
    assert figure.views[0].y.title == "privacy loss, pure ε per record use"
    assert not drawn(Results(tuple(runs)), "epsilon")  # its own axis
    assert not drawn(Results((runs[1],)), "rounds")  # nothing to draw


def test_words_are_points_of_their_own() -> None:
    """A field of words has no order: nothing joins its values, and where another one has numbers it is across."""
    table = of_epsilon(("ring", 1.0), ("star", 2.0), ("loud", math.inf))
    assert lines_of(table) == [("field ring", [1], [0.5]), ("field star", [2], [1.5]), ("field loud", [3], [2.5])]
    assert lines_of(table, "epsilon") == [("field ring", [1.0], [0.5]), ("field star", [2.0], [1.5])]
    assert [each[:2] for each in lines_of(swept("u", "sigma"))] == [("u a", [1, 2, 4]), ("u b", [1, 2, 4])]


@pytest.mark.parametrize(
    ("settings", "log", "expected"),
    [
        ([(1, 1.0), (100, 2.0)], None, (True, False)),
        ([(1, 1.0), (99, 2.0)], None, (False, False)),
        ([(0, 1.0), (100, 2.0)], None, (False, False)),
        ([(1, 1.0), (2, 2.0)], {"x", "y"}, (True, True)),
        ([(1, 1.0), (100, 2.0)], set(), (False, False)),
    ],
)
def test_an_axis_is_logarithmic_where_it_spans_decades_or_is_asked_for(
    settings: list[tuple[int, float]], log: set[str] | None, expected: tuple[bool, bool]
) -> None:
    (drawing,) = drawn(of_epsilon(*settings), log=log)
    assert (drawing.views[0].x.log, drawing.views[0].y.log) == expected


def test_curves_differ_in_dash_as_well_as_in_colour() -> None:
    looks = [choose_style(k) for k in range(32)]
    assert len(set(looks)) == 32
    assert all(one[0] != other[0] and one[1] != other[1] for one, other in pairwise(looks))
    (drawing,) = drawn(swept())
    assert [(mark.colour, mark.dash) for mark in drawing.marks if mark.kind == "line"] == looks[:2]


def test_the_legend_of_an_exported_figure_is_below_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    kept: list[Any] = []
    save = figure.savefig

    def saved(self: Any, *given: Any, **more: Any) -> None:
        save(self, *given, **more)
        kept.append(self)

    monkeypatch.setattr(figure, "savefig", saved)
    points = of_epsilon(*((f"a-name-of-some-length-{k}", 1.0 + k) for k in range(9)))
    for table in (swept(), points):
        export(tmp_path, ("png",), {}, drawn(table))
        (canvas,) = kept
        (legend,), (axes,) = canvas.legends, canvas.axes
        box = legend.get_window_extent()
        assert box.y1 <= axes.get_tightbbox().y0 + 1
        assert canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1
        assert axes.get_legend() is None
        kept.clear()


def test_results_are_read_back(tmp_path: Path) -> None:
    result = simulate(small(tmp_path), replicas=2)
    result.results.write(tmp_path)
    read, again = (read_results(path) for path in (tmp_path, tmp_path / "results.parquet"))
    for each in (read, again):
        np.testing.assert_equal(each.metrics.to_dict(), result.metrics.to_dict())
        np.testing.assert_equal(each.summary().to_dict(), result.results.summary().to_dict())
        assert each.runs[0].facts == result.results.runs[0].facts
    assert [each.name for each in drawn(read)] == list(dict.fromkeys(result.metrics["metric"]))
    assert [mark.x.tolist() for mark in drawn(read)[0].marks if mark.kind == "line"] == [[1, 2, 3, 4, 5, 6]]


def test_what_are_no_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("a,b", encoding="utf-8")
    with pytest.raises(SpecError, match=r"results must be read from results\.parquet or its folder"):
        read_results(tmp_path / "results.csv")
    pq.write_table(Table.from_rows(["a"], [(1,)]).to_arrow(), tmp_path / "results.parquet")
    with pytest.raises(CaptureError, match=r"its columns must be spec, setting, .*, got a"):
        read_results(tmp_path)
    (tmp_path / "results.parquet").write_bytes(b"none")
    with pytest.raises(CaptureError, match="cannot read the results"):
        read_results(tmp_path)
    swept().write(tmp_path)
    facts = (tmp_path / "results.json").read_text(encoding="utf-8")
    (tmp_path / "results.json").write_text(facts.replace('"sigma": 4', '"sigma": 5'), encoding="utf-8")
    with pytest.raises(CaptureError, match="cannot read the results"):
        read_results(tmp_path)
    (tmp_path / "results.json").unlink()
    with pytest.raises(CaptureError, match="cannot read the results"):
        read_results(tmp_path)


def test_figures_are_files_with_what_they_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = export(tmp_path, ("svg", "pdf", "png", "csv", "latex"), {"sweep": swept().summary()}, drawn(swept()))
    first = (tmp_path / "accuracy.svg").read_bytes()

    assert [path.name for path in files] == ["accuracy.svg", "accuracy.pdf", "accuracy.png", "sweep.csv", "sweep.tex"]
    assert first.startswith(b"<?xml")
    assert b"#0072b2" in first.lower()
    assert (tmp_path / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    export(tmp_path, ("svg",), {}, drawn(swept()))
    assert (tmp_path / "accuracy.svg").read_bytes() == first


def test_gaps_are_drawn_as_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gap = make_line([1, 2, 3], [1.0, math.nan, 3.0], "a", BLUE)
    export(tmp_path, ("svg",), {}, [Figure("gap", "gap", [gap], (PlotView("", Axis("x", log=True), Axis("y")),))])

    assert (tmp_path / "gap.svg").stat().st_size > 0


def test_formats_are_known() -> None:
    assert parse_formats("") == ()
    assert parse_formats("SVG, csv,latex") == ("svg", "csv", "latex")
    with pytest.raises(SpecError, match="--export must be of svg, pdf, png, csv, tex, latex, got eps"):
        parse_formats("svg,eps")


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_values_are_read_as_in_a_spec_file() -> None:
    texts = ["algorithm.sigma=1,2.5", "topology.graph=ring,complete", "x=[1, 2],[3, 4]"]
    assert parse_field_values(texts, "--set") == {
        "algorithm.sigma": [1, 2.5],
        "topology.graph": ["ring", "complete"],
        "x": [[1, 2], [3, 4]],
    }
    for wrong in ("algorithm.sigma", "=1", "a=", "a=[1"):
        with pytest.raises(SpecError, match="--set must be FIELD=V,V,"):
            parse_field_values([wrong], "--set")


def test_sweep_and_plot_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small(tmp_path).to_yaml(tmp_path / "spec.yaml")
    arguments = ["--set", "algorithm.sigma=1,2", "--replicas", "2", "--jobs", "1", "--export", "csv"]
    swept = CliRunner().invoke(
        app, ["sweep", str(tmp_path / "spec.yaml"), *arguments, "--out", str(tmp_path / "s")], catch_exceptions=False
    )
    plotted = CliRunner().invoke(
        app, ["plot", str(tmp_path / "s"), "--export", "pdf", "--out", str(tmp_path / "p")], catch_exceptions=False
    )
    over = ["plot", str(tmp_path / "s"), "--x", "epsilon", "--log", "x,y", "--out", str(tmp_path / "e")]
    assert CliRunner().invoke(app, over, catch_exceptions=False).exit_code == 0
    assert "ε per record use" in (tmp_path / "e" / "plot.html").read_text(encoding="utf-8")
    with pytest.raises(SpecError, match="--log must be x, y, x,y or none, got 'z'"):
        CliRunner().invoke(app, ["plot", str(tmp_path / "s"), "--log", "z"], catch_exceptions=False)

    assert (swept.exit_code, plotted.exit_code) == (0, 0)
    assert "algorithm.sigma" in swept.stdout
    assert (tmp_path / "s" / "results.csv").is_file()
    assert (tmp_path / "p" / "accuracy.pdf").is_file()
    assert 'id="plot-accuracy"' in (tmp_path / "p" / "plot.html").read_text(encoding="utf-8")


def test_what_figures_need_is_asked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    small(tmp_path).to_yaml(tmp_path / "spec.yaml")
    for command in (["sweep", "--set", "algorithm.sigma=1"], ["simulate"]):
        asked = [
            command[0],
            str(tmp_path / "spec.yaml"),
            *command[1:],
            "--export",
            "csv,svg",
            "--out",
            str(tmp_path / "o"),
        ]
        with pytest.raises(SpecError, match=r"in a clone of the repository, pip install '\.\[audit\]'"):
            CliRunner().invoke(app, asked, catch_exceptions=False)

    assert parse_formats("csv,latex") == ("csv", "latex")  # tables need nothing
    assert not (tmp_path / "o").exists()


def test_a_metric_that_is_not_is_said_by_the_first_job(tmp_path: Path) -> None:
    told: list[int] = []
    with pytest.raises(SpecError, match=r"metrics must be of average_loss, .*, got luck"):
        sweep(small(tmp_path), SIGMAS, 1, metrics=["luck"], jobs=1, progress=lambda done, _: told.append(done))

    assert told == []


def test_simulate_exports_what_it_measured(tmp_path: Path) -> None:
    small(tmp_path).to_yaml(tmp_path / "spec.yaml")
    done = CliRunner().invoke(
        app,
        ["simulate", str(tmp_path / "spec.yaml"), "--export", "tex", "--out", str(tmp_path / "o")],
        catch_exceptions=False,
    )

    assert done.exit_code == 0
    lines = (tmp_path / "o" / "results.tex").read_text(encoding="utf-8").splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrr}"
    assert lines[2] == r"metric & mean & standard error & low & high \\"
    assert lines[4].startswith("average loss & 0.")
    assert len(lines) == 8 + 6  # a line for a metric: what the network came to, not every round and learner
