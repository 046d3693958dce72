"""`sottovoce init`: a spec for one's own records, which checks without a warning and keeps the wish."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import csv, parquet

from sottovoce_client.init_wizard import InitOptions, draft_spec
from sottovoce_core.budget.calibration import compute_epsilons
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import load_spec
from tests.client.test_cli import here as here

Here = Callable[..., tuple[int, str, str]]
N = 240


def _table(labels: Any, **more: Any) -> pa.Table:
    generator = np.random.default_rng(0)
    own = {
        "age": generator.normal(60, 10, N),
        "stay": generator.integers(0, 9, N),
        "weight": generator.normal(70, 9, N),
    }
    return pa.table({**own, "outcome": labels, **more})


def _written(folder: Path, kind: str) -> tuple[Path, list[str]]:
    """A file of records, and the options that it needs."""
    generator = np.random.default_rng(1)
    two = np.where(generator.random(N) < 0.4, "sick", "well")
    path = folder / f"{kind}.csv"
    if kind == "text":
        csv.write_csv(_table(two).select(["outcome", "age", "stay", "weight"]), path)
        return path, ["--positive", "sick"]
    if kind == "three":
        csv.write_csv(_table(np.array(["low", "mid", "high"])[np.arange(N) % 3]), path)
        return path, []
    if kind == "three as two":
        csv.write_csv(_table(np.array(["low", "mid", "high"])[np.arange(N) % 3]), path)
        return path, ["--positive", "mid", "--positive", "high"]
    if kind == "number":
        csv.write_csv(_table(generator.normal(size=N)), path)
        return path, ["--label-bound", "2"]
    if kind == "own learners":
        csv.write_csv(_table(two, learner=np.array(["north", "south", "south"])[np.arange(N) % 3]), path)
        return path, ["--label", "outcome"]
    if kind == "own rounds":
        csv.write_csv(_table(two, round=np.arange(N) % 7), path)
        return path, ["--label", "outcome"]
    if kind == "schema":
        ward = np.array(["icu", "general"])[np.arange(N) % 2]
        csv.write_csv(_table(two, ward=ward), path)
        schema = {
            "features": {
                "age": {"type": "number", "bounds": [0, 120]},
                "stay": {"type": "number", "bounds": [0, 100]},
                "weight": {"type": "number", "bounds": [0, 300]},
                "ward": {"type": "category", "categories": ["icu", "general"]},
            },
            "label": {"name": "outcome", "type": "category", "categories": ["well", "sick"]},
        }
        (folder / "fields.yaml").write_text(yaml.safe_dump(schema), encoding="utf-8")
        return path, ["--schema", str(folder / "fields.yaml")]
    if kind == "parquet":
        path = folder / "records.parquet"
        parquet.write_table(_table(np.arange(N) % 2), path)
        return path, []
    path, features = folder / f"{kind}.npz", generator.normal(size=(N, 5))
    labels = (features[:, 0] > 0).astype(int)
    if kind == "test part":
        np.savez(path, X=features[:200], y=labels[:200], X_test=features[200:], y_test=labels[200:])
    else:
        np.savez(path, X=features, y=labels)
    return path, []


PLACED = {"own learners", "own rounds"}
"""Records that the file places: none is held out to scale by."""
KINDS = [
    "text",
    "three",
    "three as two",
    "number",
    "own learners",
    "own rounds",
    "schema",
    "parquet",
    "npz",
    "test part",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("epsilon", "learners"), [("0.1", "3"), ("2", "1"), ("1e-3", "2"), ("20", "north,Krankenhaus Süd")]
)
def test_a_spec_checks_without_a_warning_and_costs_what_was_wished(
    tmp_path: Path, here: Here, kind: str, epsilon: str, learners: str
) -> None:
    path, options = _written(tmp_path, kind)
    spec = tmp_path / "specs" / "own.yaml"
    spec.parent.mkdir()
    given = [] if kind == "own learners" else ["--learners", learners]

    code, out, err = here("init", str(path), "--epsilon", epsilon, *given, *options, "--out", str(spec), "--json")

    assert (code, err) == (0, "")
    told = json.loads(out)
    code, out, err = here("spec", "check", str(spec))
    assert (code, err) == (0, "")
    assert out.endswith("valid, with 1 warning above\n" if kind in PLACED else "valid\n")
    prepared = prepare(load_spec(spec))
    spent = compute_epsilons(prepared.run, prepared.data, unit="record")
    wished = float(epsilon)
    assert max(spent) == pytest.approx(told["epsilon"], rel=1e-12) and told["delta"] == 0.0
    assert all(0.997 * wished <= each <= wished for each in spent)
    assert all(len(np.unique(own.order)) == len(own.order) for own in prepared.data.learners)  # each record once
    assert load_spec(spec).get_budget(0) == wished


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_where_nothing_scales_the_features(tmp_path: Path, here: Here, kind: str) -> None:
    path, options = _written(tmp_path, kind)
    spec = tmp_path / "own.yaml"
    code, out, _ = here("init", str(path), *options, "--out", str(spec))
    said = "no record is held out, so features are not scaled; rows are cut to norm 1: scale them, or declare a schema"
    text = spec.read_text(encoding="utf-8")
    assert code == 0
    assert (said in out) == (f"  # {said}" in text) == ("scale: none" in text) == (kind in PLACED)
    _, out, _ = here("spec", "check", str(spec), "--json")
    assert [each["code"] for each in json.loads(out)["warnings"]] == ["LONG_ROWS"] * (kind in PLACED)


@pytest.mark.parametrize("rounds", [2, 5, 40, 10_000])
def test_no_batch_that_is_said_is_small(tmp_path: Path, rounds: int) -> None:
    """Else its records would cost more, and the noise of all rounds would follow them."""
    path, _ = _written(tmp_path, "npz")
    begun = draft_spec(InitOptions(path, learners="3", rounds=rounds), tmp_path, None, print)
    data = prepare(begun.spec).data
    assert begun.spec.rounds <= rounds
    for own in data.learners:
        assert set(np.diff(own.offsets)[:-1]) == {begun.spec.data.batch_size}
    assert begun.unused_records < 60 // min(rounds - 1, 60) + rounds - 1


@pytest.mark.parametrize(("learners", "telemetry"), [("1", True), ("3", False)])
def test_what_is_overheard_needs_no_telemetry(tmp_path: Path, learners: str, telemetry: bool) -> None:
    """So a learner by the default policy takes part; a single one has no neighbour that could be overheard."""
    path, _ = _written(tmp_path, "npz")
    begun = draft_spec(InitOptions(path, learners=learners), tmp_path, None, print)
    document = yaml.safe_load(begun.text)
    assert begun.spec.telemetry.predict is ("telemetry" in document) is telemetry
    if not telemetry:
        Policy().admit(begun.spec, prepare(begun.spec).data.n_features, 0)


def test_its_comments_say_what_was_chosen_and_what_comes_next(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, options = _written(tmp_path, "text")
    monkeypatch.chdir(tmp_path)
    code, out, _ = here("init", "text.csv", *options)
    text = (tmp_path / "text.yaml").read_text(encoding="utf-8")
    assert code == 0
    for command in ("spec check", "budget", "simulate", "up"):
        assert f"sottovoce {command} text.yaml" in out and f"#   sottovoce {command} " in text
    for said in ("PD-OGD", "Nothing protects these", "of 2 that were wished", "at any other delta"):
        assert said in text
    (tmp_path / "specs").mkdir()
    here("init", "text.csv", *options, "--out", "specs/own.yaml")
    assert "source: ../text.csv" in (tmp_path / "specs" / "own.yaml").read_text(encoding="utf-8")


def test_no_file_is_replaced(tmp_path: Path, here: Here) -> None:
    path, options = _written(tmp_path, "npz")
    spec = tmp_path / "own.yaml"
    spec.write_text("mine", encoding="utf-8")
    code, out, err = here("init", str(path), *options, "--out", str(spec))
    assert (code, out) == (2, "") and f"there is a file {spec} already" in err
    assert spec.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("replace", "kept"), [("n", True), ("y", False)])
def test_on_a_terminal_it_asks_what_no_option_says(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch, replace: str, kept: bool
) -> None:
    path, _ = _written(tmp_path, "text")
    spec = tmp_path / "own.yaml"
    spec.write_text("mine", encoding="utf-8")
    answers = [replace, "nobody", "outcome", "", "ill", "sick", "2", "", "", "lots", "0.5", ""]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(answers) + "\n"))
    code, _, err = here("init", str(path), "--out", str(spec))
    if kept:
        assert code == 2 and spec.read_text(encoding="utf-8") == "mine"
        return
    assert code == 0, err
    assert "--label must be one of outcome, age, stay, weight, got 'nobody'" in err
    assert "--positive must name labels that occur, sick, well, got 'ill'" in err
    assert "--epsilon must be a finite number above 0, got 'lots'" in err
    chosen = load_spec(spec)
    assert (chosen.n_learners, chosen.data.positive, chosen.get_budget(0)) == (2, ("sick",), 0.5)


@pytest.mark.parametrize("schema", [False, True])
@pytest.mark.parametrize(
    ("labels", "told", "kept"),
    [
        ([False, True], "yes", 1),
        ([False, True], "TRUE", 1),
        ([False, True], "False", 0),
        (["no", "yes"], "Yes", "yes"),
        (["no", "yes"], "true", "yes"),
        (["no", "yes"], "0", "no"),
        (["Sick", "well"], "sick", "Sick"),
    ],
)
def test_a_class_may_be_named_in_another_spelling(
    tmp_path: Path, labels: list[bool | str], told: str, kept: int | str, schema: bool
) -> None:
    path, declared = tmp_path / "told.csv", None
    csv.write_csv(_table(np.array(labels)[np.arange(N) % 2]), path)
    if schema:
        label = {"type": "boolean"} if labels[0] is False else {"type": "category", "categories": labels}
        numbers = {name: {"type": "number", "bounds": [0, 200]} for name in ("age", "stay", "weight")}
        declared = tmp_path / "schema.yaml"
        fields = {"features": numbers, "label": {"name": "outcome", **label}}
        declared.write_text(yaml.safe_dump(fields), encoding="utf-8")
        kept = ("false", "true")[kept] if isinstance(kept, int) else kept
    chosen = draft_spec(InitOptions(path, positive=(told,), schema=declared), tmp_path, None, print).spec
    assert chosen.data.positive == (kept,)


def test_a_spelling_that_means_no_class_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "told.csv"
    csv.write_csv(_table(np.array(["maybe", "no", "yes"])[np.arange(N) % 3]), path)
    with pytest.raises(SpecError, match="must name labels that occur, maybe, no, yes, got 'true'"):
        draft_spec(InitOptions(path, positive=("true",)), tmp_path, None, print)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positive": ("ill",)}, "--positive must name labels that occur, sick, well, got 'ill'"),
        ({"positive": ("sick", "well")}, "not all"),
        ({"label": "zip"}, "--label must be one of the columns, got 'zip' \\('outcome', 'age', 'stay', 'weight'\\)"),
        ({"learners": "0"}, "--learners must be how many"),
        ({"learners": "1000"}, "at most one for each of 240 records"),
        ({"epsilon": float("nan")}, "--epsilon must be a finite number above 0"),
        ({"epsilon": 1e-15}, "noise.epsilon must be finite and above"),
        ({"label_bound": 2.0}, "--label-bound must be left out where labels are classes"),
        ({"scale": "log"}, "--scale must be one of standard, range, none, got 'log'"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path, _ = _written(tmp_path, "text")
    with pytest.raises(SpecError, match=said):
        draft_spec(InitOptions(path, **options), tmp_path, None, print)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("number", {}, "--label-bound must be a finite number above 0, got ''; add --label-bound NUMBER"),
        ("number", {"label_bound": 1.0, "positive": ("1",)}, "--positive must be left out where labels are numbers"),
        ("own learners", {"partition": "iid"}, "--partition must be left out: the column learner"),
        ("own learners", {"label": "outcome", "scale": "range"}, "no record of this file is held out"),
        ("schema", {"scale": "range"}, "a schema scales by its bounds"),
        ("schema", {"task": "regress"}, "--task must be classify"),
    ],
)
def test_so_is_what_the_file_or_schema_says_otherwise(
    tmp_path: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    path, given = _written(tmp_path, kind)
    if kind == "schema":
        options = {**options, "schema": Path(given[1])}
    with pytest.raises(SpecError, match=said):
        draft_spec(InitOptions(path, **options), tmp_path, None, print)


@pytest.mark.parametrize(("shares", "left"), [((3, 1), True), ((1, 1), False)])
def test_records_that_a_large_learner_never_says_are_told(
    here: Here, tmp_path: Path, shares: tuple[int, int], left: bool
) -> None:
    """The learner with the fewest records sets the batch of all."""
    rows = np.repeat(["north", "south"], [N * each // sum(shares) for each in shares])
    labels = np.where(np.arange(N) % 2, "sick", "well")
    csv.write_csv(_table(labels, learner=rows), tmp_path / "sites.csv")
    options = ["--label", "outcome", "--epsilon", "2", "--rounds", "4", "--out", str(tmp_path / "sites.yaml")]
    code, out, err = here("init", str(tmp_path / "sites.csv"), *options)
    assert code == 0, err
    assert ("are not learned" in out) is left
    assert ("are not learned" in (tmp_path / "sites.yaml").read_text(encoding="utf-8")) is left
