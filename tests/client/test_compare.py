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
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.page import PageTable
from sottovoce_client.running.compare import (
    HEADS,
    compare_page,
    compare_to,
    from_files,
    result_of,
    the_field,
    write_comparison,
)
from sottovoce_client.running.plot import figures, not_shown, read_results
from sottovoce_client.running.simulation import print_metrics
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.noise import SeededNoise
from sottovoce_core.running.metrics import Metrics
from sottovoce_core.running.simulator import simulate
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
    return compare_to(from_files(specs), prepare, folder, replicas=replicas, seed=1, console=console), out.getvalue()


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_the_table_says_what_the_runs_came_to(records: Path, tmp_path: Path) -> None:
    loud, silent = written(records, "loud"), written(records, "quiet", algorithm={"name": "ldp-dol", "sigma": 0.5})
    code, text = compared(tmp_path, loud, silent)
    rows = {row[0]: row for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n"))}

    assert code == 0
    assert rows["spec"] == list(HEADS)
    document = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert [Path(each["spec"]).stem for each in document["results"]] == ["loud", "quiet"]
    assert document["failures"] == []
    for path, found in zip((loud, silent), document["results"], strict=True):
        prepared = prepare(load_spec(path))
        counts = np.diff(prepared.data.learners[0].offsets)
        promise = prepared.run.guarantee(0, counts)
        assert found["epsilon_event"] == pytest.approx(promise.epsilon())
        assert found["epsilon_paper"] == pytest.approx(promise.paper[-1])
        meter = Metrics(prepared.run, prepared.data)
        for step in simulate(prepared.run, prepared.data, SeededNoise(1), 3):
            meter.take(step)
        for name, curve in meter.curves.curves.items():
            np.testing.assert_allclose(found["metrics"][name]["mean"], curve.mean, err_msg=name)
            np.testing.assert_allclose(found["metrics"][name]["standard_error"], curve.error, err_msg=name)
        row = rows[path.stem]
        assert row[1:3] == ["ldp-dol", "wire"]
        assert row[4] == f"{promise.epsilon():.4g}"
        assert row[10] == "4"
        assert " ± " in row[6]
    assert (tmp_path / "compare.md").read_text(encoding="utf-8").strip() in text


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_number_is_torn_on_a_narrow_terminal(width: int) -> None:
    heads = ["spec", "algorithm", "ε per event", "accuracy", "consensus error", "floats sent"]
    rows = [[f"a-long-name-{k}", "pd-ogd", "3.911", "0.6268 ± 0.15", "0.2603 ± 0.015", "31"] for k in range(3)]
    spare = ["floats sent", "consensus error", "algorithm"]
    table, left_out = terminal.fitted(width, heads, rows, right=heads[2:], spare=spare)
    out = io.StringIO()
    terminal.console(file=out, width=width).print(table)
    lines = out.getvalue().splitlines()

    assert left_out == spare[: {60: 2}.get(width, 0)]
    assert max(map(len, lines)) <= width
    for row in rows:
        kept = [cell for head, cell in zip(heads, row, strict=True) if head not in left_out]
        assert [line.split() for line in lines if row[0] in line] == [" ".join(kept).split()]
    assert "…" not in out.getvalue()


def test_specs_of_one_name_are_told_apart(records: Path, tmp_path: Path) -> None:
    result = result_of("a/one.yaml", prepare(load_spec(written(records, "one"))), replicas=1, seed=0)
    page = compare_page([result, replace(result, source="b/one.yaml"), replace(result, source="c/two.yaml")])
    table, figure = page.exhibits[:2]

    assert isinstance(table, PageTable)
    assert isinstance(figure, Figure)
    assert [row[0] for row in table.rows] == ["a/one", "b/one", "two"]
    assert [mark.name for mark in figure.marks if mark.kind == "line"] == ["a/one", "b/one", "two"]


def test_an_epsilon_that_nothing_bounds_is_shown_as_infinite(records: Path, tmp_path: Path) -> None:
    result = result_of("open.yaml", prepare(load_spec(written(records, "open"))), replicas=1, seed=0)
    write_comparison(tmp_path, [replace(result, paper=math.inf, event=math.inf)], [], replicas=1, seed=0)
    found = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["results"]
    assert "| wire | ∞ | ∞ |" in (tmp_path / "compare.md").read_text(encoding="utf-8")
    assert found[0]["epsilon_event"] is None
    assert found[0]["metrics"]["accuracy"]["standard_error"][-1] is None


def test_the_field_can_be_compared(tmp_path: Path) -> None:
    """All specs of the field load, and hold the same records out: two of them run."""
    field = the_field()
    chosen = [(name, load) for name, load in field if name in ("dpcda", "dvp")]
    for _, load in field:
        assert load().data.source == "breast_cancer"
    assert compare_to(chosen, prepare, tmp_path, replicas=1, seed=0, console=Console(file=io.StringIO())) == 0
    results = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["results"]
    assert [each["spec"] for each in results] == ["dpcda", "dvp"]
    assert results[1]["epsilon_record"] == pytest.approx(5.0, rel=0.01)  # used in every round, charged once a round
    assert results[0]["epsilon_record"] > results[0]["epsilon_event"]


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
    document = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert [Path(each["spec"]).stem for each in document["results"]] == ["fine"]
    assert {each["spec"] for each in document["failures"]} == set(map(str, others.values()))


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


def test_many_bands_are_left_out(records: Path) -> None:
    result = result_of("one.yaml", prepare(load_spec(written(records, "one"))), replicas=3, seed=0)
    for results, marks in (8, 16), (9, 9):
        made = compare_page([result] * results)
        figures = [each for each in made.exhibits if isinstance(each, Figure)]
        assert [len(each.marks) for each in figures if each.name == "accuracy"] == [marks]
        assert ("bands are two of these" in made.html()) == (results == 8)


def test_the_command_exits_with_what_the_comparison_says(records: Path, tmp_path: Path) -> None:
    fine, out = str(written(records, "fine")), ["--out", str(tmp_path / "out"), "--replicas", "2"]
    assert CliRunner().invoke(app, ["compare", fine, *out]).exit_code == 0
    assert json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))["replicas"] == 2
    assert CliRunner().invoke(app, ["compare", fine, str(tmp_path / "none.yaml"), *out]).exit_code == 1


def test_a_comparison_is_exported_for_papers(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    specs, out = [str(written(records, "one")), str(written(records, "two"))], tmp_path / "out"
    asked = ["--replicas", "2", "--export", "csv,latex,svg", "--out", str(out)]
    done = CliRunner().invoke(app, ["compare", *specs, *asked], catch_exceptions=False)
    found = json.loads((out / "compare.json").read_text(encoding="utf-8"))["results"]
    heads, *rows = csv.reader((out / "compare.csv").read_text(encoding="utf-8").splitlines())
    one = dict(zip(heads, rows[0], strict=True))
    tex = (out / "compare.tex").read_text(encoding="utf-8").splitlines()

    assert done.exit_code == 0
    assert (one["spec"], float(one["epsilon_event"])) == ("one", found[0]["epsilon_event"])
    assert float(one["accuracy"]) == found[0]["metrics"]["accuracy"]["mean"][-1]
    assert float(one["accuracy_standard_error"]) == found[0]["metrics"]["accuracy"]["standard_error"][-1]
    assert len(tex) == 8  # a row for a spec
    assert r"$\varepsilon$ per event" in tex[2] and r"$\pm$" in tex[4] and "rounds/s" not in tex[2]
    assert {path.name for path in out.glob("*.svg")} == {
        "accuracy.svg",
        "average-loss.svg",
        "consensus-error.svg",
        "tracking-error.svg",
    }
    with pytest.raises(SpecError, match="--export must be of"):
        CliRunner().invoke(app, ["compare", *specs, "--export", "eps"], catch_exceptions=False)


def test_a_comparison_is_drawn_over_epsilon(records: Path, tmp_path: Path) -> None:
    result = result_of("a/one.yaml", prepare(load_spec(written(records, "one"))), replicas=2, seed=0)
    others = [replace(result, source="b/one.yaml", event=2.0), replace(result, source="open.yaml", event=math.inf)]
    write_comparison(tmp_path, [result, *others], [], replicas=2, seed=0)
    read = read_results(tmp_path)
    drawn = {each.name: each for each in figures({"x": read})}["accuracy"]
    curve = result.curves["accuracy"]

    assert drawn.views[0].x.title == "ε per event"
    assert [(mark.kind, mark.name, mark.x.tolist()) for mark in drawn.marks] == [
        ("dots", "a/one", [result.event]),
        ("dots", "b/one", [2.0]),
    ]
    assert drawn.marks[0].y.tolist() == [curve.final]
    assert drawn.marks[0].low == pytest.approx([2 * curve.final_error])
    assert "1 setting" in not_shown({"x": read})
    (tmp_path / "compare.json").write_text('{"results": [1]}', encoding="utf-8")
    with pytest.raises(CaptureError, match="it is not what `sottovoce compare` wrote"):
        read_results(tmp_path)


# ---- simulate --------------------------------------------------------------------------------------------------------


def test_simulate_measures_when_asked(records: Path, tmp_path: Path) -> None:
    path, folder = written(records, "run"), tmp_path / "out"
    done = CliRunner().invoke(app, ["simulate", str(path), "--out", str(folder), "--replicas", "2"])
    table = pq.read_table(folder / "metrics.parquet").to_pylist()
    document = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))

    assert done.exit_code == 0, done.output
    assert document["rounds"][-1] == 15
    last = {row["metric"]: row for row in table if row["rounds"] == 15 and row["learner"] is None}
    for name, curve in document["metrics"].items():
        assert last[name]["mean"] == curve["mean"][-1]
        assert last[name]["standard_error"] == curve["standard_error"][-1]
        assert f"\n{name}: " in done.output
    regrets = {row["learner"]: row["mean"] for row in table if row["rounds"] == 15 and row["metric"] == "static_regret"}
    named = [regrets[f"learner-{i}"] for i in range(3)]
    assert np.mean(named) == pytest.approx(regrets[None])
    assert {each.name for each in folder.iterdir()} == {
        "spec.yaml",
        "metrics.parquet",
        "metrics.json",
        "models.parquet",
    }
    assert done.output.endswith("models.parquet; left out: decisions, transcript, noise (--write)\n")

    again = CliRunner().invoke(app, ["simulate", str(path), "--out", str(tmp_path / "plain"), "--write", "models"])
    assert again.exit_code == 0
    assert not (tmp_path / "plain" / "metrics.json").exists()


def test_on_a_terminal_the_final_values_are_a_table(records: Path) -> None:
    prepared = prepare(load_spec(written(records, "run")))
    meter = Metrics(prepared.run, prepared.data, at=[15])
    for step in simulate(prepared.run, prepared.data, SeededNoise(1)):
        meter.take(step)
    out = io.StringIO()
    print_metrics(meter.curves, Console(file=out, force_terminal=True, width=80))
    assert "after 15 rounds" in out.getvalue()
    assert "static regret" in out.getvalue()
    assert "±" not in out.getvalue()
