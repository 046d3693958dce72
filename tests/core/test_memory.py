"""Records in memory: the same numbers and errors as the same records in a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import sottovoce as sv
from sottovoce_core.data.memory import MemoryRecords
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.spec import build_spec_json_schema, find_imports, parse_spec

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(60, 3))
Y = (X @ [1.0, -2.0, 0.5] + 0.1 * RANDOM.normal(size=60) > 0).astype(np.float64)
FRAME = pd.DataFrame(X, columns=["age", "pulse", "stay"]).assign(outcome=Y)
SPEC: dict[str, Any] = {"rounds": 8, "learners": 3, "algorithm": "ldp-dol"}


def experiment(source: Any, **data: Any) -> sv.Experiment:
    return sv.Experiment(**SPEC, data={"source": source, "scale": "standard", **data})


def require_equal(one: sv.Experiment, other: sv.Experiment) -> None:
    for mine, own in zip(one.records.learners, other.records.learners, strict=True):
        for part in ("features", "labels", "order", "offsets"):
            np.testing.assert_array_equal(getattr(mine, part), getattr(own, part))
    np.testing.assert_array_equal(one.records.test_features, other.records.test_features)
    np.testing.assert_array_equal(one.records.test_labels, other.records.test_labels)
    np.testing.assert_array_equal(sv.simulate(one, seed=4).decisions, sv.simulate(other, seed=4).decisions)
    assert one.epsilon() == other.epsilon()


LABELS = {
    "0 and 1": Y,
    "-1 and 1": 2 * Y - 1,
    "words": np.where(Y > 0, "worse", "better"),
    "words in objects": np.where(Y > 0, "worse", "better").astype(object),
    "truth values": Y > 0,
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("as_frame", [False, True])
def test_pairs_are_learned_as_from_a_file(tmp_path: Path, labels: Any, as_frame: bool) -> None:
    file = tmp_path / "records.npz"
    np.savez(file, X=X, y=labels.astype(np.str_) if labels.dtype == object else labels)
    features = FRAME[["age", "pulse", "stay"]] if as_frame else X
    require_equal(experiment((features, labels)), experiment(str(file)))


FRAMES = {
    "pandas": lambda frame: frame,
    "pandas with an index": lambda frame: frame.set_index(np.arange(60)[::-1]),
    "polars": pl.from_pandas,
    "pyarrow": pa.Table.from_pandas,
}
COLUMNS = {
    "plain": {},
    "words": {"outcome": np.where(Y > 0, "worse", "better")},
    "categories": {"outcome": pd.Categorical(np.where(Y > 0, "worse", "better"))},
    "placed": {"learner": np.array(["north", "east", "south"])[np.arange(60) % 3], "round": np.arange(60) % 8},
}


@pytest.mark.parametrize("change", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("convert", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_frames_are_learned_as_from_a_file(tmp_path: Path, change: Any, convert: Any, suffix: str) -> None:
    frame, file = FRAME.assign(**change), tmp_path / f"records{suffix}"
    frame.to_csv(file, index=False) if suffix == ".csv" else frame.to_parquet(file)
    names = {"learners": ["north", "east", "south"], "data.scale": "none"} if "learner" in change else {}
    made = experiment(convert(frame), label="outcome").replace(**names)
    require_equal(made, experiment(str(file), label="outcome").replace(**names))


def test_multiclass_labels_and_partitions_are_those_of_a_file(tmp_path: Path) -> None:
    labels = np.arange(60) % 4 + 1
    np.savez(tmp_path / "records.npz", X=X, y=labels)
    more = {"loss": {"kind": "softmax", "classes": 4}, "data.partition": {"kind": "dirichlet", "concentration": 1.0}}
    made = [experiment(each).replace(**more) for each in ((X, labels), str(tmp_path / "records.npz"))]
    require_equal(*made)


def test_a_schema_reads_a_frame_as_a_file(tmp_path: Path) -> None:
    frame = FRAME.assign(ward=np.where(np.arange(60) % 2, "icu", "surgery"))
    frame.to_csv(file := tmp_path / "records.csv", index=False)
    number = {"type": "number", "bounds": [-5, 5]}
    schema = {
        "features": {
            "age": number,
            "pulse": number,
            "stay": number,
            "ward": {"type": "category", "categories": ["icu", "surgery"]},
        },
        "label": {"name": "outcome", "type": "category", "categories": ["0", "1"]},
    }
    frame["outcome"] = frame["outcome"].astype(int)
    frame.to_csv(file, index=False)
    made = [experiment(each, schema=schema, scale="none") for each in (frame, pl.from_pandas(frame), str(file))]
    require_equal(made[0], made[2])
    require_equal(made[1], made[2])
    with pytest.raises(SpecError, match="columns with names: give a data frame"):
        _ = experiment((X, Y), schema=schema, scale="none").records
    with pytest.raises(DataError, match=r"records in memory must have a column for every field.*'ward'"):
        _ = experiment(FRAME.assign(outcome=1), schema=schema, scale="none").records


def test_the_short_form_and_later_changes() -> None:
    features, frame = X.copy(), FRAME.copy()
    pair, of_frame = sv.Experiment(**SPEC, data=(features, Y)), sv.Experiment(**SPEC, data=frame)
    features[:], frame.loc[:] = 0.0, 0.0
    require_equal(pair, sv.Experiment(**SPEC, data={"source": (X, Y)}))
    require_equal(of_frame, pair)
    assert repr(pair) == "Experiment 'run': ldp-dol, 3 learners, 8 rounds of records in memory"
    assert repr(pair.data.source) == "<records in memory, 60 x 3>"


PAIR_ERRORS = {
    "not a number": (
        (np.where(np.eye(60, 3) > 0, np.nan, X), Y),
        "row 0 .*column 0 .*must be a finite number, got nan",
    ),
    "one axis": ((X[:, 0], Y), r"features must be numbers of the shape \(records, features\), got float64 \(60,\)"),
    "words": ((X.astype(str), Y), "features must be numbers of the shape"),
    "fewer labels": ((X, Y[:9]), r"labels must have the shape \(60,\), one for each record, got \(9,\)"),
    "a column of labels": ((X, Y[:, None]), r"labels must have the shape \(60,\), one for each record, got \(60, 1\)"),
    "no records": ((X[:0], Y[:0]), "at least one record"),
    "ragged": (([[1.0], [1.0, 2.0]], [0, 1]), "rows of several lengths"),
    "masked": ((np.ma.masked_greater(X, 0.0), Y), "must have a value in every cell, got masked cells"),
    "no array": ((object(), Y), "features must be numbers"),
    "an empty label": ((X, pd.Series([None, *Y[1:]], dtype="Int64")), "row 0 .*label column must be a finite number"),
}


@pytest.mark.parametrize(("source", "message"), PAIR_ERRORS.values(), ids=PAIR_ERRORS)
def test_pairs_that_cannot_be_learned(source: Any, message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        _ = sv.Experiment(**SPEC, data=source).records


@pytest.mark.parametrize(
    ("loss", "labels"), [({"kind": "softmax", "classes": 2}, np.arange(60) % 3), ("squared", np.full(60, "worse"))]
)
def test_labels_that_the_loss_cannot_take_are_refused_as_those_of_a_file(
    tmp_path: Path, loss: Any, labels: Any
) -> None:
    np.savez(file := tmp_path / "records.npz", X=X, y=labels)
    texts = []
    for source in ((X, labels), str(file)):
        with pytest.raises((DataError, SpecError)) as refused:
            _ = experiment(source).replace(loss=loss).records
        texts.append(str(refused.value).replace(str(file), "records in memory"))
    assert texts[0] == texts[1]


FRAME_ERRORS = {
    "an empty cell": (FRAME.assign(age=np.nan), {}, "row 0 .*column 'age' must hold a value, got an empty cell"),
    "words": (FRAME.assign(ward="icu"), {"label": "outcome"}, "column 'ward' must be numeric, got type"),
    "no label": (FRAME, {"label": "outcom"}, "of records in memory, got 'outcom' .'age', 'pulse', 'stay', 'outcome'."),
    "a name twice": (FRAME.rename(columns={"age": "pulse"}), {}, "columns .* with different names"),
    "no records": (FRAME[:0], {}, "at least one record"),
    "a label twice": ((FRAME.rename(columns={"age": "label"}), Y), {}, "column names must differ"),
    "fewer labels": ((FRAME, Y[:9]), {}, "labels with one entry a record"),
    "mixed objects": (FRAME.assign(age=[{}, *X[1:, 0]]), {}, "each of one type"),
    "a label beside y": ((X, Y), {"label": "outcome"}, r"label must be left out with \(X, y\)"),
    "a learner": (FRAME.assign(learner="west"), {"label": "outcome"}, "column 'learner' must be one of learner-0"),
}


@pytest.mark.parametrize(("source", "data", "message"), FRAME_ERRORS.values(), ids=FRAME_ERRORS)
def test_frames_that_cannot_be_learned(source: Any, data: Any, message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message) as refused:
        _ = sv.Experiment(**SPEC, data={"source": source, **data}).records
    assert all(f"{value:.6g}" not in str(refused.value) for value in X.flat)


def test_a_spec_of_records_in_memory_is_not_written_or_sent(tmp_path: Path) -> None:
    from sottovoce_rpc.specs import spec_to_wire

    made = experiment((X, Y))
    with pytest.raises(SpecError, match=r"must name its records.*write them to a \.csv or \.parquet file"):
        made.to_yaml(tmp_path / "spec.yaml")
    assert not (tmp_path / "spec.yaml").exists()
    for write in (spec_to_wire, lambda spec: spec.model_dump(mode="json"), lambda spec: spec.model_dump_json()):
        with pytest.raises(SpecError, match="write them to a"):
            write(made)
    results = sv.simulate(made, seed=1).results
    results.write(tmp_path)
    assert sv.read_results(tmp_path).runs[0].facts.spec_yaml == results.runs[0].facts.spec_yaml
    (tmp_path / "read.yaml").write_text(results.runs[0].facts.spec_yaml, encoding="utf-8")
    with pytest.raises(SpecError, match="were in the memory of a Python process: write"):
        _ = sv.load(tmp_path / "read.yaml").records


def test_every_operation_takes_them() -> None:
    made = experiment((X, Y))
    assert 1.99 < sv.calibrate(made, 2.0).epsilon() <= 2.0
    assert sv.audit(made.replace(rounds=3), runs=60).verdict.kind == "consistent"
    swept = sv.sweep(made, {"algorithm.sigma": [1.0, 2.0]}, replicas=2, jobs=2)
    assert {each.facts.changes["algorithm.sigma"] for each in swept.runs} == {1.0, 2.0}
    compared = sv.compare({"one": made, "other": experiment((X.copy(), Y)).replace(**{"algorithm.sigma": 4.0})})
    assert [each.facts.spec for each in compared.runs] == ["one", "other"]
    with pytest.raises(SpecError, match=r"data.source must be that of the first spec, <records in memory, 60 x 3>"):
        sv.compare({"one": made, "other": experiment((2 * X, Y))})


def test_equality_is_by_content() -> None:
    assert MemoryRecords((X, Y)) == MemoryRecords((X.copy(), Y.tolist())) != MemoryRecords((X, 1 - Y))
    assert MemoryRecords(FRAME) == copy.deepcopy(MemoryRecords(FRAME)) != MemoryRecords((X, Y))
    assert len({MemoryRecords((X, Y)), MemoryRecords((X, Y))}) == 1


@pytest.mark.parametrize("source", [[X.tolist(), Y.tolist()], {"X": [1.0], "y": [1.0]}, [[1.0, 2.0], [3.0, 4.0]]])
def test_documents_hold_no_records(source: Any) -> None:
    """Neither YAML nor a message of another party can bring records in memory."""
    for data in (source, {"source": source}):
        with pytest.raises(SpecError):
            parse_spec({**SPEC, "data": data}, allow_imports=False)
    assert "MemoryRecords" not in build_spec_json_schema()
    assert not [*find_imports(experiment((X, Y)).to_document())]
