"""`simulate` and `compare`: what they print, write and exit with."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client import terminal
from sottovoce_client.cli import app
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import PageTable
from sottovoce_client.runs.compare import (
    HEADS,
    compare,
    compare_to_folder,
    format_markdown,
    list_builtin_sources,
    list_file_sources,
    make_compare_page,
    make_spec_names,
    simulate_and_measure,
)
from sottovoce_client.runs.plot import HorizontalAxis, make_figures
from sottovoce_client.runs.simulation import _print_metrics
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import load, prepare
from sottovoce_core.noise import SeededNoise
from sottovoce_core.results import Result, Results, compute_bootstrap_intervals, read_results
from sottovoce_core.runs.metrics import DEFAULT_METRICS, Metrics
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import load_spec

SMALL: dict[str, Any] = {"rounds": 15, "learners": 3, "algorithm": {"name": "ldp-dol", "sigma": 2.0}}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    features = np.random.default_rng(0).normal(size=(80, 3))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    return tmp_path / "records.npz"


def written(records: Path, name: str, **changes: Any) -> Path:
    data = {"source": str(records), "reuse": True, **changes.pop("data", {})}
    path = records.parent / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, **SMALL, "data": data, **changes}), encoding="utf-8")
    return path


def compared(folder: Path, *specs: Path, replicas: int = 3, terminal: bool = False) -> tuple[int, str]:
    """Exit code and what was printed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    return compare_to_folder(
        list_file_sources(specs), id, folder, replicas=replicas, seed=1, console=console
    ), out.getvalue()


def one_of(records: Path, name: str = "one", replicas: int = 1, **changes: Any) -> Result:
    """The result of a small spec, with other facts where they are given."""
    found = simulate_and_measure(name, load(written(records, name)), replicas, 0)
    return replace(found, facts=replace(found.facts, **changes))


def failures(folder: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["failures"]
    return found


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_the_table_says_what_the_runs_came_to(records: Path, tmp_path: Path) -> None:
    loud, silent = written(records, "loud"), written(records, "quiet", algorithm={"name": "ldp-dol", "sigma": 0.5})
    code, text = compared(tmp_path, loud, silent)
    rows = {row[0]: row for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n"))}

    assert code == 0
    assert rows["spec"] == list(HEADS)
    results = read_results(tmp_path)
    assert [each.facts.spec for each in results.runs] == ["loud", "quiet"]
    assert failures(tmp_path) == []
    for path, found in zip((loud, silent), results.runs, strict=True):
        prepared = prepare(load_spec(path))
        counts = np.diff(prepared.data.learners[0].offsets)
        promise = prepared.run.guarantee(0, counts)
        assert found.facts.epsilon_record_use == pytest.approx(promise.epsilon())
        assert found.facts.epsilon_paper == pytest.approx(promise.paper_epsilon[-1])
        meter = Metrics(prepared.run, prepared.data)
        for step in simulate_rounds(prepared.run, prepared.data, SeededNoise(1), 3):
            meter.add_round(step)
        for name, curve in meter.curves.curves.items():
            np.testing.assert_array_equal(found.curves[name].replicas, curve.replicas, err_msg=name)
            np.testing.assert_array_equal(found.curves[name].learners, curve.learners, err_msg=name)
        row = rows[path.stem]
        assert row[1:3] == ["ldp-dol", "wire"]
        assert row[4] == f"{promise.epsilon():.4g}"
        assert row[10] == "4"
        assert " ± " in row[6]
    assert (tmp_path / "compare.md").read_text(encoding="utf-8").strip() in text


def test_several_targets_give_a_line_for_every_spec(records: Path, tmp_path: Path) -> None:
    """Also for two specs with one algorithm; each run has its target, and the figure a line through all targets."""
    short, long = written(records, "short"), written(records, "long", rounds=30)
    out = tmp_path / "out"
    arguments = [
        "compare",
        str(short),
        str(long),
        "--target",
        "4,1",
        "--replicas",
        "2",
        "--export",
        "svg",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    results = read_results(out)
    facts = [each.facts for each in results.runs]
    assert [(each.spec, each.changes) for each in facts] == [
        (name, {"target": target}) for name in ("short", "long") for target in (1.0, 4.0)
    ]
    assert [each.epsilon_record_use for each in facts] == pytest.approx([1.0, 4.0] * 2, rel=1e-3)
    assert "over-epsilon.svg" in {path.name for path in out.iterdir()}
    lines = HorizontalAxis.choose({"out": results}, "epsilon").make_lines(results)["accuracy"]
    assert [(name, len(line.x), line.is_curve) for name, line in lines] == [("short", 2, True), ("long", 2, True)]
    again = compare([short, long], replicas=2, target=[1, 4])
    assert [each.facts.changes for each in again.runs] == [each.changes for each in facts]
    assert len(compare([short], replicas=2, target=4.0).runs) == 1
    for wrong in ("0", "-1", "1,x", "inf"):
        refused = CliRunner().invoke(app, ["compare", str(short), "--target", wrong])
        assert refused.exit_code != 0 and "--target must be" in str(refused.exception)


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_number_is_torn_on_a_narrow_terminal(width: int) -> None:
    heads = ["spec", "algorithm", "ε per record use", "accuracy", "consensus error", "floats sent"]
    rows = [[f"a-long-name-{k}", "pd-ogd", "3.911", "0.6268 ± 0.15", "0.2603 ± 0.015", "31"] for k in range(3)]
    spare = ["floats sent", "consensus error", "algorithm"]
    table, left_out = terminal.fit_table(width, heads, rows, right_aligned=heads[2:], optional_columns=spare)
    out = io.StringIO()
    terminal.create_console(file=out, width=width).print(table)
    lines = out.getvalue().splitlines()

    assert left_out == spare[: {60: 2}.get(width, 0)]
    assert max(map(len, lines)) <= width
    for row in rows:
        kept = [cell for head, cell in zip(heads, row, strict=True) if head not in left_out]
        assert [line.split() for line in lines if row[0] in line] == [" ".join(kept).split()]
    assert "…" not in out.getvalue()


def test_specs_of_one_name_are_told_apart(records: Path, tmp_path: Path) -> None:
    names = make_spec_names(["a/one.yaml", "b/one.yaml", "c/two.yaml"])
    assert names == ["a/one", "b/one", "two"]
    page = make_compare_page(Results(tuple(one_of(records, spec=name) for name in names)))
    table, _, figure = page.elements[:3]

    assert isinstance(table, PageTable)
    assert isinstance(figure, Figure)
    assert [row[0] for row in table.rows] == names
    assert [mark.name for mark in figure.marks if mark.kind == "line"] == names


def test_an_epsilon_that_nothing_bounds_is_shown_as_infinite(records: Path, tmp_path: Path) -> None:
    results = Results((one_of(records, epsilon_paper=math.inf, epsilon_record_use=math.inf),))
    results.write(tmp_path)
    (written,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    (read,) = read_results(tmp_path).runs
    assert "| wire | ∞ | ∞ |" in format_markdown(results)
    assert (written["epsilon_record_use"], read.facts.epsilon_record_use) == (None, math.inf)
    assert math.isnan(read.curves["accuracy"].final_error)


def test_the_field_can_be_compared(tmp_path: Path) -> None:
    """All specs of the field load, and hold the same records out: two of them run."""
    field = list_builtin_sources()
    chosen = [each for each in field if each[0] in ("dpcda", "dvp")]
    for _, load_one in field:
        assert load_one().data.source == "breast_cancer"
    assert compare_to_folder(chosen, id, tmp_path, replicas=1, seed=0, console=Console(file=io.StringIO())) == 0
    one, other = (each.facts for each in read_results(tmp_path).runs)
    assert (one.spec, other.spec) == ("dpcda", "dvp")
    assert other.epsilon_record == pytest.approx(5.0, rel=0.01)  # used in every round, charged once a round
    assert one.epsilon_record > one.epsilon_record_use


def test_what_cannot_be_run_is_said_and_the_others_are_run(records: Path, tmp_path: Path) -> None:
    fine = written(records, "fine")
    others = {
        "must be that of the first spec": written(records, "elsewhere", data={"seed": 7}),
        "sigma must be positive": written(records, "wrong", algorithm={"name": "ldp-dol", "sigma": -1}),
        "algorithm.name must be one of": written(records, "unknown", algorithm={"name": "nonesuch"}),
        "cannot read the run spec": tmp_path / "none.yaml",
    }
    code, text = compared(tmp_path, *others.values(), fine, terminal=True)
    # The first of them that can be read sets the data, so `elsewhere` runs and `fine` differs from it.
    assert code == 1
    code, text = compared(tmp_path, fine, *others.values())
    assert code == 1
    for words in others:
        assert words in text
    assert [each.facts.spec for each in read_results(tmp_path).runs] == ["fine"]
    assert {each["spec"] for each in failures(tmp_path)} == set(map(str, others.values()))


def test_the_page_is_whole_and_loads_nothing(records: Path, tmp_path: Path) -> None:
    compared(tmp_path, written(records, "one"), written(records, "two"))
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    loaded: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            loaded.extend(value or "" for name, value in attrs if name in ("src", "href"))

    Reader().feed(page)
    assert loaded == []
    assert 'id="plot-average-loss"' in page
    assert 'id="plot-accuracy"' in page


@pytest.mark.parametrize(("specs", "panels"), [(6, 0), (7, 7), (9, 9)])
def test_each_of_many_specs_has_a_panel_with_its_band(records: Path, specs: int, panels: int) -> None:
    results = Results(tuple(one_of(records, replicas=3, spec=f"spec-{k}") for k in range(specs)))
    made = make_compare_page(results)
    (figure,) = (each for each in made.elements if each.name == "accuracy")
    assert isinstance(figure, Figure)
    assert (len(figure.marks), len(figure.panels)) == (2 * specs, panels)
    assert "bands are ± two standard errors" in made.to_html()


def test_accuracy_over_epsilon_comes_first_with_a_line_for_each_algorithm(records: Path) -> None:
    runs = [one_of(records, replicas=3, spec=f"at-{e}", epsilon_record_use=e) for e in (4.0, 1.0)]
    runs += [one_of(records, replicas=3, spec="once", algorithm="other", epsilon_record_use=2.0)]
    runs += [one_of(records, replicas=3, spec="open", algorithm="plain", epsilon_record_use=math.inf)]
    page = make_compare_page(Results(tuple(runs)))
    (figure,) = (each for each in page.elements if each.name == "over-epsilon")
    assert isinstance(figure, Figure)
    drawn = [(mark.kind, mark.name, mark.x.tolist()) for mark in figure.marks]
    assert drawn == [
        ("area", "", [1.0, 4.0]),
        ("line", runs[0].facts.algorithm, [1.0, 4.0]),
        ("dots", "once", [2.0]),
        ("line", "open, no finite ε", [1.0, 4.0]),
    ]
    text = page.to_html()
    assert text.index('id="plot-over-epsilon"') < text.index('id="plot-average-loss"')
    assert "1 spec without a finite ε has no place on the axis: open." in " ".join(text.split())
    alone = make_compare_page(Results((runs[0], runs[3])))
    assert not any(each for each in alone.elements if each.name == "over-epsilon")


def test_specs_of_one_algorithm_calibrated_to_one_epsilon_are_points(records: Path) -> None:
    runs = [one_of(records, replicas=3, spec=f"at-{e}", epsilon_record_use=e) for e in (0.9991, 0.9995)]
    (figure,) = (each for each in make_compare_page(Results(tuple(runs))).elements if each.name == "over-epsilon")
    assert isinstance(figure, Figure)
    assert [(mark.kind, mark.name) for mark in figure.marks] == [("dots", "at-0.9991"), ("dots", "at-0.9995")]


def test_the_table_of_a_page_folds_to_what_is_asked_first(records: Path) -> None:
    short, full = make_compare_page(Results((one_of(records),))).elements[:2]
    assert isinstance(short, PageTable) and isinstance(full, PageTable)
    assert [each.head for each in short.columns] == [
        "spec",
        "algorithm",
        "threat model",
        "ε per record use",
        "accuracy",
        "average loss",
    ]
    assert [each.head for each in full.columns] == list(HEADS)


def test_the_command_exits_with_what_the_comparison_says(records: Path, tmp_path: Path) -> None:
    fine, out = str(written(records, "fine")), ["--out", str(tmp_path / "out"), "--replicas", "2"]
    assert CliRunner().invoke(app, ["compare", fine, *out]).exit_code == 0
    assert read_results(tmp_path / "out").runs[0].curves["accuracy"].replicas.shape[1] == 2
    assert CliRunner().invoke(app, ["compare", fine, str(tmp_path / "none.yaml"), *out]).exit_code == 1


def test_a_comparison_is_exported_for_papers(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    specs, out = [str(written(records, "one")), str(written(records, "two"))], tmp_path / "out"
    asked = ["--replicas", "2", "--export", "csv,latex,svg", "--out", str(out)]
    done = CliRunner().invoke(app, ["compare", *specs, *asked], catch_exceptions=False)
    found, _ = read_results(out).runs
    heads, *rows = csv.reader((out / "results.csv").read_text(encoding="utf-8").splitlines())
    named = [dict(zip(heads, row, strict=True)) for row in rows]
    one = next(row for row in named if (row["spec"], row["round"], row["metric"]) == ("one", "15", "accuracy"))
    tex = (out / "results.tex").read_text(encoding="utf-8").splitlines()

    assert done.exit_code == 0
    assert float(one["epsilon"]) == found.facts.epsilon_record_use
    assert float(one["mean"]) == found.curves["accuracy"].final_mean
    assert float(one["standard_error"]) == found.curves["accuracy"].final_error
    assert len(tex) == 8  # a row for a spec
    assert r"$\varepsilon$ per record use" in tex[2] and r"$\pm$" in tex[4] and "rounds/s" not in tex[2]
    assert {path.name for path in out.glob("*.svg")} == {
        "accuracy.svg",
        "average-loss.svg",
        "consensus-error.svg",
        "over-epsilon.svg",
        "tracking-error.svg",
    }
    with pytest.raises(SpecError, match="--export must be of"):
        CliRunner().invoke(app, ["compare", *specs, "--export", "eps"], catch_exceptions=False)


def test_a_comparison_is_drawn_over_epsilon(records: Path, tmp_path: Path) -> None:
    result = one_of(records, replicas=2, spec="a/one")
    others = [one_of(records, replicas=2, spec="b/one", epsilon_record_use=2.0)]
    others.append(one_of(records, replicas=2, spec="open", epsilon_record_use=math.inf))
    Results((result, *others)).write(tmp_path)
    across = HorizontalAxis.choose({"x": read_results(tmp_path)})
    drawn = {each.name: each for each in make_figures(across)}["accuracy"]
    curve = result.curves["accuracy"]
    (low,), (high,) = compute_bootstrap_intervals(curve.replicas[-1:])

    assert drawn.views[0].x.title == "ε per record use"
    assert [(mark.kind, mark.name, mark.x.tolist()) for mark in drawn.marks] == [
        ("dots", "a/one", [result.facts.epsilon_record_use]),
        ("dots", "b/one", [2.0]),
    ]
    assert drawn.marks[0].y.tolist() == [curve.final_mean]
    assert drawn.marks[0].low == pytest.approx([(high - low) / 2])
    assert "1 setting" in across.omission_note
    over = make_figures(HorizontalAxis.choose({"x": read_results(tmp_path)}, "rounds"))[0]
    assert [mark.name for mark in over.marks if mark.kind == "line"] == ["a/one", "b/one", "open"]
    for wrong in ('{"runs": [1]}', "{}", "none"):
        (tmp_path / "results.json").write_text(wrong, encoding="utf-8")
        with pytest.raises(CaptureError, match="cannot read the results"):
            read_results(tmp_path)


# ---- simulate --------------------------------------------------------------------------------------------------------


def test_a_comparison_shows_chosen_metrics(records: Path, tmp_path: Path) -> None:
    spec, folder = written(records, "one"), tmp_path / "o"
    words = ["--metrics", "error,tracking_error", "--checkpoints", "1", "--replicas", "2"]
    done = CliRunner().invoke(app, ["compare", str(spec), *words, "--export", "csv", "--out", str(folder)])

    assert done.exit_code == 0, done.output
    heads = (folder / "compare.md").read_text("utf-8").splitlines()[0]
    unmeasured = {"accuracy", "average loss", "regret per round", "consensus error"}
    shown = [head for head in HEADS if head not in unmeasured]
    assert heads == f"| {' | '.join([*shown[:-2], 'error', 'tracking error', *shown[-2:]])} |"
    assert "error" in (folder / "compare.html").read_text("utf-8")
    with pytest.raises(SpecError, match=r"metrics must be of .*, got luck"):
        compare([spec], metrics=["luck"])
    many = compare([spec], 1, metrics=[*DEFAULT_METRICS, "prequential_loss"], checkpoints=1)
    assert format_markdown(many).splitlines()[0] == f"| {' | '.join([*HEADS[:-2], 'prequential loss', *HEADS[-2:]])} |"


def test_simulate_measures_when_asked(records: Path, tmp_path: Path) -> None:
    path, folder = written(records, "run"), tmp_path / "out"
    done = CliRunner().invoke(app, ["simulate", str(path), "--out", str(folder), "--replicas", "2"])
    table = pq.read_table(folder / "results.parquet").to_pylist()
    (run,) = read_results(folder).runs

    assert done.exit_code == 0, done.output
    assert list(table[0]) == ["spec", "setting", "seed", "round", "learner", "metric", "value"]
    assert {(row["spec"], row["setting"]) for row in table} == {("run", "")}
    assert run.curves.rounds[-1] == 15
    last = [row for row in table if row["round"] == 15]
    for name, curve in run.curves.curves.items():
        seeds = {row["seed"]: row["value"] for row in last if row["metric"] == name and row["learner"] is None}
        assert seeds == dict(enumerate(curve.replicas[-1]))
        assert f"\n{name}: " in done.output
    regrets = {(row["learner"], row["seed"]): row["value"] for row in last if row["metric"] == "static_regret"}
    named = [regrets[f"learner-{i}", None] for i in range(3)]
    assert np.mean(named) == pytest.approx(np.mean([regrets[None, k] for k in range(2)]))
    assert {each.name for each in folder.iterdir()} == {
        "spec.yaml",
        "results.parquet",
        "results.json",
        "models.parquet",
    }
    assert done.output.endswith("models.parquet; not written: decisions, transcript, noise (see --write)\n")

    again = CliRunner().invoke(app, ["simulate", str(path), "--out", str(tmp_path / "plain"), "--write", "models"])
    assert again.exit_code == 0
    assert not (tmp_path / "plain" / "results.json").exists()


def test_on_a_terminal_the_final_values_are_a_table(records: Path) -> None:
    prepared = prepare(load_spec(written(records, "run")))
    meter = Metrics(prepared.run, prepared.data, checkpoints=[15])
    for step in simulate_rounds(prepared.run, prepared.data, SeededNoise(1)):
        meter.add_round(step)
    out = io.StringIO()
    _print_metrics(meter.curves, Console(file=out, force_terminal=True, width=80))
    assert "after 15 rounds" in out.getvalue()
    assert "static regret" in out.getvalue()
    assert "±" not in out.getvalue()
