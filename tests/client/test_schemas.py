"""`sottovoce schema`, and runs whose records a schema reads, from a CSV file as people have them to their end."""

from __future__ import annotations

import csv
import datetime
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.cli import app
from sottovoce_client.watching import canary_files as kept
from sottovoce_core.auditing.online.canaries import draw_canaries
from sottovoce_core.errors import CaptureError, DataError, SottovoceError, SpecError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.spec import load_schema, load_spec
from tests.client.test_cli import ran as command

pytest.importorskip("pyarrow")

HEAD = ("patient_id", "age", "stay", "ward", "insured", "admitted", "note", "outcome")
RUN: dict[str, Any] = {
    "name": "wards",
    "rounds": 8,
    "learners": ["north", "east", "south"],
    "algorithm": {"name": "dsgd", "noise": {"kind": "power", "sigma": 2.0}, "step": {"kind": "power"}},
    "loss": {"kind": "logistic", "feature_bound": 2.5},
    "data": {"source": "wards.csv", "schema": "schema.yaml"},
}


def rows(n: int = 60) -> list[list[str]]:
    """Patients, with text, dates, gaps, commas and line breaks."""
    made = random.Random(0)  # noqa: S311 - nothing is to be guessed
    return [
        [
            f"P{k:05}",
            str(made.randint(17, 94)),
            made.choice(["", "n/a", f"{made.uniform(0, 30):.1f}"]),
            made.choice(["north", "Süd", "no", " "]),
            made.choice(["yes", "no"]),
            f"{datetime.date(2023, 1, 1) + datetime.timedelta(made.randint(0, 700))}{made.choice(['', 'T23:30:00-05:00'])}",
            f"fell, {k} times\nthen rose",
            ("died", "home")[k % 2],
        ]
        for k in range(n)
    ]


def write(path: Path, records: list[list[str]], head: tuple[str, ...] = HEAD, **how: Any) -> Path:
    with path.open("w", newline="", encoding=how.pop("encoding", "utf-8")) as file:
        csv.writer(file, **how).writerows([head, *records])
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with records, their schema, and a spec of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write(tmp_path / "wards.csv", rows())
    ran("init", "wards.csv", "--schema-only", "--out", "schema.yaml")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")
    return tmp_path


def ran(*arguments: str, group: str = "") -> Result:
    done = CliRunner().invoke(app, [*group.split(), *arguments])
    if isinstance(done.exception, SottovoceError):
        raise done.exception
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit), done.exception
    return done


def told(*arguments: str, group: str = "") -> str:
    """What is printed, in one line."""
    done = ran(*arguments, group=group)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


# ---- init --schema-only ----------------------------------------------------------------------------------------------


def test_a_draft_fits_the_file_that_it_was_made_from(folder: Path) -> None:
    schema = load_schema(folder / "schema.yaml")
    assert schema.names == (
        "admitted", "age", "insured", "stay", "stay missing", "ward=Süd", "ward=no", "ward=north", "ward missing",
    )  # fmt: skip
    assert schema.ignored == ("patient_id", "note") and "n/a" in schema.missing_values
    assert "60 of 60 records fit" in told("data", "describe", "wards.csv", "--schema", "schema.yaml")


def test_a_draft_says_that_its_sample_must_be_public(folder: Path) -> None:
    printed = ran("init", "wards.csv", "--schema-only")
    assert "must be public" in " ".join(printed.stderr.split())
    assert printed.stdout == (folder / "schema.yaml").read_text(encoding="utf-8")
    assert "must be public" in printed.stdout.partition("features:")[0]
    assert "must be public" in told("init", "wards.csv", "--schema-only", "--label", "insured", "--out", "other.yaml")
    assert load_schema(folder / "other.yaml").label.name == "insured"


def test_a_file_that_is_there_is_left_as_it_is(folder: Path) -> None:
    before = (folder / "schema.yaml").read_bytes()
    with pytest.raises(SpecError, match=r"there is a file schema\.yaml already: give another --out"):
        ran("init", "wards.csv", "--schema-only", "--out", "schema.yaml")
    assert (folder / "schema.yaml").read_bytes() == before
    with pytest.raises(SpecError, match="cannot write"):
        ran("init", "wards.csv", "--schema-only", "--out", "nowhere/schema.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no record"),
        (b"age,outcome\n", "drafted from records: there must be one"),
        (b"outcome\nhome\n", "with a field to learn from and a label"),
        (b"age;outcome\n1,5;home\n", "has semicolons: save it with commas, and numbers as 1234.5"),
        (b"age,outcome\n\xe9,home\n", "must be UTF-8"),
        (b"age,age,outcome\n1,2,home\n", "columns 0 and 1 .* have the same"),
        (b",age,outcome\n0,1,home\n1,2,died\n", "column 0 .* has none: name it or drop it"),
        (b"age,outcome\n1,home\n2,\n", "'outcome' must have a value in every record, got one missing in 1 of 2"),
        (b"age,outcome\n1,home\n2,home\n", "'outcome' must have two values"),
        (b"id,outcome\n1,home\n2,died\n", "'id': it names records"),
    ],
    ids=range(10),
)
def test_a_sample_that_gives_no_schema_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "odd.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        ran("init", "odd.csv", "--schema-only", "--out", "odd.yaml")
    assert not (folder / "odd.yaml").exists()


def test_a_sample_that_is_not_there_is_refused(folder: Path) -> None:
    for name, message in (
        ("none.csv", "a file that exists"),
        ("spec.yaml", r"a file for a schema must be \.csv or \.parquet"),
    ):
        with pytest.raises(SpecError, match=message):
            ran("init", name, "--schema-only")
    with pytest.raises(SpecError, match="one of the columns"):
        ran("init", "wards.csv", "--schema-only", "--label", "none")


# ---- files as people have them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"encoding": "utf-8-sig"}, {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL}], ids=repr
)
def test_files_of_spreadsheets_are_read(folder: Path, how: dict[str, Any]) -> None:
    """A byte order mark, either end of line, quotes everywhere."""
    write(folder / "other.csv", rows(), **how)
    ran("init", "other.csv", "--schema-only", "--out", "other.yaml")
    assert load_schema(folder / "other.yaml") == load_schema(folder / "schema.yaml")
    assert "60 of 60 records fit" in told("data", "describe", "other.csv", "--schema", "schema.yaml")


def test_words_that_yaml_reads_otherwise_stay_words(folder: Path) -> None:
    write(
        folder / "odd.csv",
        [["no", "1"], ["off", "0"], ["2020-01-01", "1"], ["~", "0"], ["1e3", "1"]] * 4,
        ("answer", "y"),
    )
    text = ran("init", "odd.csv", "--schema-only").stdout
    assert "categories: ['1e3', '2020-01-01', 'no', 'off', '~']" in text
    (folder / "odd.yaml").write_text(text, encoding="utf-8")
    assert "20 of 20 records fit" in told("data", "describe", "odd.csv", "--schema", "odd.yaml")
    (folder / "odd.yaml").write_text(text.replace("'2020-01-01'", "2020-01-01"), encoding="utf-8")
    with pytest.raises(SpecError, match="put quotes around text"):
        ran("data", "describe", "odd.yaml")


@pytest.mark.slow
def test_many_records(folder: Path) -> None:
    """What they take is in no test; that they are read, is."""
    write(folder / "many.csv", rows(100_000))
    ran("init", "many.csv", "--schema-only", "--out", "many.yaml")
    assert "100,000 of 100,000 records fit" in told("data", "describe", "many.csv", "--schema", "many.yaml")


# ---- check -----------------------------------------------------------------------------------------------------------


def test_a_schema_is_shown(folder: Path) -> None:
    (folder / "schema.yaml").write_text(
        """
        features:
          age: {type: number, bounds: [0, 1234567], out_of_bounds: clip}
          ward: {type: category, categories: [a, b, c], missing: flag}
          code: {type: category, categories: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]}
        label: {name: outcome, type: category, categories: [home, died, moved]}
        ignored: [note]
        """,
        encoding="utf-8",
    )
    text = told("data", "describe", "schema.yaml")
    for line in ("age number 0 to 1234567 refuse clip 1", "ward category a, b, c flag – 4", "10 and 4 more refuse – 14",
                 "label outcome: 0 is home; 1 is died; 2 is moved", "ignored note", "no value NA, ?, empty text",
                 "19 numbers of 3 fields", "at most 2, the intercept included"):  # fmt: skip
        assert line in text
    assert "spec" not in text


def test_a_schema_is_held_against_the_loss_of_a_spec(folder: Path) -> None:
    text = told("data", "describe", "schema.yaml", "--spec", "spec.yaml")
    assert (
        "outcome: 0 is died; 1 is home" in text
        and "2.449, the intercept included: within loss.feature_bound, 2.5" in text
    )
    document = {**RUN, "loss": {"kind": "logistic"}, "data": {**RUN["data"], "positive": ["died"], "intercept": False}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    text = told("data", "describe", "schema.yaml", "--spec", "spec.yaml")
    assert "0 is home; 1 is died" in text and "at most 2.236; records above loss.feature_bound, 1, are scaled" in text
    (folder / "spec.yaml").write_text(yaml.safe_dump({**document, "loss": "ridge"}), encoding="utf-8")
    with pytest.raises(SpecError, match=r"label must be a number for the ridge loss"):
        ran("data", "describe", "schema.yaml", "--spec", "spec.yaml")


def test_a_label_that_is_a_number(folder: Path) -> None:
    write(folder / "cost.csv", [[str(k), f"{k}.5"] for k in range(30)], ("age", "cost"))
    ran("init", "cost.csv", "--schema-only", "--out", "cost.yaml")
    assert "cost: a number from 0 to 30, scaled onto [-1, 1]" in told(
        "data", "describe", "cost.csv", "--schema", "cost.yaml"
    )


def test_records_that_do_not_fit_are_counted_and_not_shown(folder: Path) -> None:
    spoilt = rows()
    for k, (column, value) in enumerate(
        [(1, "4711"), (1, "4712"), (3, "Geheim"), (5, "31.12.2023"), (1, "4,7"), (7, "")]
    ):
        spoilt[10 + k][column] = value
    write(folder / "wards.csv", spoilt)
    done = ran("data", "describe", "wards.csv", "--schema", "schema.yaml")
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    for line in ("54 of 60 records fit", "2 age: beyond its bounds 10", "1 ward: none of its categories 12",
                 "1 admitted: not a date, write 2020-01-31 13", "1 age: a number with a comma, write 1234.5 14",
                 "1 outcome: missing 15", "are not protected"):  # fmt: skip
        assert line in text
    assert not re.search("471|Geheim|31.12|4,7|P000", text)
    with pytest.raises(
        DataError, match=r"6 of 60 records do not fit the schema: age: beyond its bounds \(2\); "
    ) as refused:
        ran("spec.yaml", group="spec check")
    assert not re.search("471|Geheim|31.12|4,7|P000", str(refused.value))


def test_rows_of_another_width_are_counted_among_the_others(folder: Path) -> None:
    """As a feeder does it: they are no records, and those behind them are."""
    found = rows()
    odd = [*found[:2], found[2][:-1], [*found[3], "more"], found[4], ["Geheim"], *found[5:]]
    write(folder / "wards.csv", odd)
    done = ran("data", "describe", "wards.csv", "--schema", "schema.yaml")
    text = " ".join(done.output.split())
    assert done.exit_code == 1 and f"wards.csv: {len(found) - 2} of {len(odd)} records fit" in text
    assert "3 not as many values as the header 2" in text and "Geheim" not in text  # the first is row 2, counted from 0
    with pytest.raises(
        DataError, match=r"3 of 61 records .* not as many values as the header \(3\); the first is row 2"
    ):
        ran("spec.yaml", group="spec check")
    with pytest.raises(DataError, match="each row must have 8 columns"):  # nothing is drafted from what is odd
        ran("init", "wards.csv", "--schema-only")
    write(folder / "wards.csv", [found[0][:-1]])
    assert "0 of 1 record fit" in " ".join(
        ran("data", "describe", "wards.csv", "--schema", "schema.yaml").output.split()
    )


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (("patient_id", "alter", *HEAD[2:]), "has none for 'age'"),
        ((*HEAD[:6], "comment", "outcome"), "every column must be in the schema, and 'comment' is not"),
        (tuple(rows(1)[0]), "must begin with a line of column names"),
    ],
)
def test_columns_that_are_others_are_refused(folder: Path, head: tuple[str, ...], message: str) -> None:
    write(folder / "wards.csv", rows(), head)
    with pytest.raises(DataError, match=message):
        ran("data", "describe", "wards.csv", "--schema", "schema.yaml")


# ---- what else says or uses it ---------------------------------------------------------------------------------------


def test_a_spec_says_its_features_and_what_counts_as_1(folder: Path) -> None:
    text = told("spec.yaml", group="spec check")
    assert (
        "features: admitted, age, insured, stay, stay missing, ward=Süd, ward=no, ward=north, ward missing, intercept"
        in text
    )
    assert "label outcome: 0 is died; 1 is home" in text and "3 learners, 9 features and an intercept: valid" in text


def test_describe_leads_to_schemas(folder: Path) -> None:
    for record, problem in (
        (["a", "1", "x"], "must be numeric, got type string"),
        (["", "1", "x"], "must hold a value, got an empty cell"),
    ):
        write(folder / "text.csv", [record], ("ward", "age", "outcome"))
        with pytest.raises(DataError, match=rf"'ward' {problem}.*`sottovoce init --schema-only` drafts one"):
            ran("text.csv", group="data describe")


def test_a_budget_writes_the_schema_in_its_place(folder: Path) -> None:
    """Its path would lead elsewhere from another folder."""
    (folder / "deep").mkdir()
    told("spec.yaml", "--target", "9", "--out", "deep/spec.yaml", group="budget")
    assert load_spec(folder / "deep/spec.yaml").data == load_spec(folder / "spec.yaml").data


def test_a_simulation_from_a_file_to_its_end(folder: Path) -> None:
    told("spec.yaml", "--replicas", "2", "--out", "out", group="simulate")
    assert load_spec(folder / "out" / "spec.yaml") == load_spec(folder / "spec.yaml")
    assert (folder / "out" / "results.parquet").is_file()


@pytest.mark.slow
def test_services_from_a_file_to_their_end(folder: Path) -> None:
    code, out, err = command("up", "spec.yaml", "--out", "out", cwd=folder)
    assert (code, err) == (0, ""), out
    summary = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["state"], summary["rounds"]) == ("finished", RUN["rounds"])
    assert load_spec(folder / "out" / "spec.yaml") == load_spec(folder / "spec.yaml")


@pytest.mark.slow
def test_an_audit_from_a_file_to_its_end(folder: Path) -> None:
    """By construction a correct learner is refuted for one seed in 10,000 at most."""
    pytest.importorskip("sklearn")
    done = ran("spec.yaml", "--runs", "24", "--confidence", "0.9999", "--out", "out", group="audit")
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "out" / "audit.json").read_text(encoding="utf-8"))["verdict"]["kind"] == "consistent"


# ---- records that are made up ----------------------------------------------------------------------------------------

PATIENT = {"age": 30, "stay": None, "ward": "no", "insured": True, "admitted": "2024-01-01", "outcome": "home"}


@pytest.fixture
def prepared(folder: Path) -> PreparedRun:
    return prepare(load_spec(folder / "spec.yaml"))


def test_a_replacement_is_a_record_of_the_schema(prepared: PreparedRun, folder: Path) -> None:
    row = int(prepared.data.learners[0].order[0])
    asked = AuditRequest(learner="north", runs=20, record=row, replacement=str(path := folder / "other.json"))
    path.write_text(json.dumps(PATIENT), encoding="utf-8")
    second = asked.plan(prepared).worlds.records_1
    made = second.features[row]
    assert (
        made[1] == pytest.approx(-0.4) and made[2:].tolist() == [1, 0, 1, 0, 1, 0, 0, 1] and second.labels[row] == 1.0
    )
    for change, message in (
        ({"age": 4711}, "a record that the schema allows: age: beyond its bounds"),
        ({"ward": "4711"}, "ward: none of its categories"),
        ({"outcome": None}, "outcome: missing"),
        ({"features": [0.5] * 10}, "neither declared nor ignored"),
    ):
        path.write_text(json.dumps({**PATIENT, **change}), encoding="utf-8")
        with pytest.raises(DataError, match=message):
            asked.plan(prepared)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(SpecError, match="a JSON object with the fields of a record"):
        asked.plan(prepared)


def test_canaries_of_a_schema_are_kept_whole(prepared: PreparedRun, folder: Path) -> None:
    drawn = draw_canaries(prepared.run, prepared.data, 3, np.random.default_rng(0))
    kept._save(drawn, folder)
    found = kept.load_canaries(folder / "canaries.json")
    assert found == drawn and found.record_pair is not None
    assert (
        kept.insert_canaries(prepared, found).data.learners[0].features.shape
        == prepared.data.learners[0].features.shape
    )
    other = replace(found, record_pair=(found.record_pair[0][1:], found.record_pair[1][1:]))
    with pytest.raises(CaptureError, match="records here have 10 features"):
        kept.insert_canaries(prepared, other)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_is(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    files = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["patients.csv", "schema.yaml"]
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8")
    (shown,) = re.findall(r"```text\n( field .*?not protected\.)", page, re.DOTALL)
    assert told("data", "describe", "patients.csv", "--schema", "schema.yaml") == " ".join(shown.split())
    told("patients.csv", "--schema", "schema.yaml", "--learners", "north,east,south", group="init")
    assert "valid" in told("patients.yaml", group="spec check")
    told("patients.yaml", "--out", "out", group="simulate")
    assert (folder / "out" / "results.parquet").is_file()
