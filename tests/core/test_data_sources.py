"""Sources: what is read, how labels are mapped, and what is refused in which words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_core.data import Dataset, dataset, load_dataset
from sottovoce_core.data.catalogue import CATALOGUE, get_data_folders
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses.linear import HingeLoss, LeastSquaresLoss, LogisticLoss, RidgeLoss, SoftmaxLoss
from sottovoce_core.losses.loss import Loss

pytestmark = pytest.mark.each

LOGISTIC, RIDGE = LogisticLoss(), RidgeLoss()
Save = Callable[..., Path]


def load(source: object, loss: Loss = LOGISTIC, folders: Sequence[Path] = (), **fields: Any) -> Dataset:
    return load_dataset(DataSpec(source=str(source), **fields), loss, folders=folders)


@pytest.fixture
def npz(tmp_path: Path) -> Save:
    def save(**arrays: Any) -> Path:
        path = tmp_path / "records.npz"
        np.savez(path, **arrays)
        return path

    return save


@pytest.fixture
def csv(tmp_path: Path) -> Callable[[str], Path]:
    def save(text: str) -> Path:
        path = tmp_path / "records.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return save


# ---- only some labels ------------------------------------------------------------------------------------------------


def test_only_records_with_the_wanted_labels_are_used(npz: Save) -> None:
    X, y = np.arange(12.0).reshape(6, 2), np.array([8, 1, 6, 8, 1, 6])
    path = npz(X=X, y=y, X_test=X[:3], y_test=y[:3], learner=np.arange(6), round=np.arange(6))
    kept = load(path, only_labels=[6, "8"])
    assert np.array_equal(kept.features, X[[0, 2, 3, 5]])
    assert kept.labels.tolist() == [1, 0, 1, 0]
    assert (kept.learner is not None and kept.learner.tolist()) == [0, 2, 3, 5]
    assert (kept.round is not None and kept.round.tolist()) == [0, 2, 3, 5]
    assert kept.test is not None
    assert np.array_equal(kept.test.features, X[[0, 2]])
    assert kept.class_names == ("6", "8")
    with pytest.raises(SpecError, match="only_labels must be labels that occur, got 7"):
        load(path, only_labels=[6, 7])


# ---- named sources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "shape", "classes"), [("breast_cancer", (569, 30), 2), ("digits", (1797, 64), 10)])
def test_scikit_learn_sources(source: str, shape: tuple[int, int], classes: int) -> None:
    pytest.importorskip("sklearn")
    dataset = load(source)
    assert dataset.features.shape == shape
    assert set(dataset.labels) == {0.0, 1.0}
    assert dataset.classes is not None
    assert np.unique(dataset.classes).size == classes
    assert dataset.learner is None
    assert dataset.round is None
    assert dataset.test is None


def test_the_made_source_is_what_is_said_of_it_and_the_same_at_every_call() -> None:
    known, made, again = CATALOGUE["vital_signs"], load("vital_signs"), load("vital_signs")

    assert made.features.shape == (known.records, known.features)
    assert made.test is not None and len(made.test.labels) == known.test_records
    assert set(made.labels) == {0.0, 1.0}
    assert np.array_equal(made.features, again.features) and np.array_equal(made.labels, again.labels)
    assert abs(made.labels.mean() - made.test.labels.mean()) < 0.02


@pytest.mark.parametrize("source", ["breast_cancer", "digits"])
def test_a_shipped_data_set_is_read_as_scikit_learn_reads_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn import datasets

    features, labels = getattr(datasets, f"load_{source}")(return_X_y=True)
    data = DataSpec(source=source)
    for files in (dataset._SHIPPED_FILES, {source: ("no such file", 0)}):  # a version may keep it elsewhere
        monkeypatch.setattr(dataset, "_SHIPPED_FILES", files)
        table = dataset.read_source(data)
        assert np.array_equal(table.features, features) and np.array_equal(table.labels, labels)


def test_a_shipped_data_set_needs_no_import_of_scikit_learn() -> None:
    code = "import sys; from sottovoce_core.data import dataset; dataset._read_shipped('digits'); print('sklearn' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_scikit_learn_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SpecError, match=r"needs scikit-learn: in a clone of the repository, pip install '\.\[audit\]'"):
        load("digits")


def test_pyarrow_missing_says_what_to_install(csv: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecError, match=r"needs pyarrow: in a clone of the repository, pip install '\.\[audit\]'"):
        load(csv("a,y\n1,0\n2,1\n"))


def test_public_data_set_without_folder_says_how_to_get_it() -> None:
    with pytest.raises(SpecError, match=r"run `sottovoce data fetch mushrooms`.*SOTTOVOCE_DATA is not set"):
        load("mushrooms")


def test_public_data_set_that_is_not_here_says_where_it_was_looked_for(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with pytest.raises(SpecError, match=f"fetch poker`.*searched {one}/poker.npz, {other}/poker.npz"):
        load("poker", folders=[one, other])


def test_the_first_folder_that_has_a_data_set_wins(tmp_path: Path) -> None:
    folders = [tmp_path / "missing", tmp_path / "first", tmp_path / "second"]
    for k, folder in enumerate(folders[1:], 1):
        folder.mkdir()
        np.savez(folder / "letter.npz", X=np.full((2, 1), k), y=[0, 1])
    assert load("letter", folders=folders).features.tolist() == [[1], [1]]
    assert load("letter", folders=folders[::-1]).features.tolist() == [[2], [2]]


def test_folders_are_the_variable_then_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    (cache,) = get_data_folders()
    assert cache == tmp_path / "cache" / "sottovoce" / "data"
    monkeypatch.setenv("SOTTOVOCE_DATA", "")
    assert get_data_folders() == (cache,)
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    assert get_data_folders() == (tmp_path, cache)


def test_without_what_knows_the_cache_the_variable_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    assert get_data_folders() == (tmp_path,)
    monkeypatch.delenv("SOTTOVOCE_DATA")
    assert get_data_folders() == ()


@pytest.mark.parametrize(
    ("source", "records", "features", "test_records", "positive"),
    [
        ("mushrooms", 8124, 112, None, 3916),
        ("adult", 32561, 6 + 99, 16281, 7841),
        ("a9a", 32561, 123, 16281, 7841),
        ("letter", 20000, 16, None, None),
        ("poker", 25010, 10, 18488, 54 + 36 + 6 + 5 + 5),
    ],
)
def test_public_data_sets(
    data_folder: Path, source: str, records: int, features: int, test_records: int | None, positive: int | None
) -> None:
    dataset = load(source, folders=[data_folder])
    assert dataset.features.shape == (records, features)
    assert (None if dataset.test is None else dataset.test.features.shape) == (
        None if test_records is None else (test_records, features)
    )
    if positive is not None:
        assert dataset.labels.sum() == positive


def test_mushrooms_are_one_hot_without_the_stalk_root(data_folder: Path) -> None:
    assert (load("mushrooms", folders=[data_folder]).features.sum(axis=1) == 21).all()


def test_letters_split_in_the_middle_of_the_alphabet(data_folder: Path) -> None:
    dataset = load("letter", folders=[data_folder])
    assert dataset.classes is not None
    assert np.array_equal(dataset.labels, (dataset.classes >= 13).astype(float))


def test_mnist_images_become_rows(data_folder: Path) -> None:
    dataset = load("mnist", folders=[data_folder], positive=(3, 7))
    assert dataset.features.shape == (60000, 784)
    assert dataset.test is not None
    assert dataset.test.features.shape == (10000, 784)
    assert dataset.labels.sum() == 6131 + 6265
    assert dataset.test.labels.sum() == 1010 + 1028


# ---- .npz ------------------------------------------------------------------------------------------------------------


def test_npz_with_everything(npz: Save) -> None:
    path = npz(
        X=np.arange(6.0).reshape(3, 2),
        y=[0, 1, 1],
        learner=[1, 0, 1],
        round=[5, 0, 2],
        X_test=np.ones((1, 2)),
        y_test=[1],
    )
    dataset = load(path)
    assert dataset.features.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert dataset.labels.tolist() == [0, 1, 1]
    assert dataset.learner is not None
    assert dataset.learner.tolist() == [1, 0, 1]
    assert dataset.learner_names is None
    assert dataset.round is not None
    assert dataset.round.tolist() == [5, 0, 2]
    assert dataset.test is not None
    assert (dataset.test.features.tolist(), dataset.test.labels.tolist()) == ([[1, 1]], [1])


def test_npz_categories_become_one_hot_and_missing_ones_zero(npz: Save) -> None:
    path = npz(
        num_train=[[10, 20], [30, 40]],
        cat_train=[[0, 1], [-1, 0]],
        num_columns=["age", "hours"],
        cat_columns=["sex", "race"],
        values_sex=["f", "m"],
        values_race=["x", "y", "z"],
        y_train=[0, 1],
    )
    assert load(path).features.tolist() == [[10, 20, 1, 0, 0, 1, 0], [30, 40, 0, 0, 1, 0, 0]]


def test_npz_test_labels_are_mapped_together_with_the_others(npz: Save) -> None:
    """A test part that lacks a class must not shift the mapping."""
    dataset = load(npz(X=np.ones((3, 1)), y=[0, 1, 2], X_test=np.ones((2, 1)), y_test=[1, 1]))
    assert dataset.test is not None
    assert dataset.test.labels.tolist() == [0, 0]


MIXED = {
    "num_train": np.ones((2, 1)),
    "num_columns": ["age"],
    "cat_train": [[0], [1]],
    "cat_columns": ["sex"],
    "values_sex": ["f", "m"],
    "y_train": [0, 1],
}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.ones((2, 1))}, r"must hold the arrays X and y .*got \['X'\]"),
        ({"X": np.ones(2), "y": [0, 1]}, r"shape \(records, features\), got float64 \(2,\)"),
        ({"X": [["a"], ["b"]], "y": [0, 1]}, "features must be numbers"),
        ({"X": np.ones((2, 1)), "y": [0, 1, 1]}, r"labels must have the shape \(2,\).*got \(3,\)"),
        ({"X": np.ones((0, 1)), "y": []}, "at least one record"),
        ({"X": np.ones((2, 1)), "y": [0, 1], "y_test": [0]}, "both of X_test and y_test"),
        ({"X": np.ones((2, 1)), "y": [0, 1], "X_test": np.ones((1, 3)), "y_test": [0]}, "must have 1 features .*got 3"),
        ({"X": np.ones((2, 1)), "y": [0, 1], "X_test": [[np.nan]], "y_test": [0]}, "test part: row 0"),
        ({"X": [[1.0, 2.0], [3.0, np.nan]], "y": [0, 1]}, r"row 1 \(counted from 0\), column 1 .*got nan"),
        ({"X": [[1.0], [np.inf]], "y": [0, 1], "columns": ["age"]}, r"row 1 .*column 'age' .*got inf"),
        ({"X": np.ones((2, 1)), "y": [0, np.nan]}, "row 1 .*label column must be a finite number"),
        ({"X": np.ones((2, 1)), "y": [0, 1], "round": [0, -1]}, "row 1 .*'round' must be an integer >= 0, got -1"),
        (
            {"X": np.ones((2, 1)), "y": [0, 1], "learner": [0.5, 1]},
            "row 0 .*'learner' must be an integer >= 0, got 0.5",
        ),
        ({"X": np.ones((2, 1)), "y": [0, 1], "round": ["a", "b"]}, "'round' must hold integers"),
        ({"num_train": np.ones((2, 1)), "y_train": [0, 1]}, "must hold the array cat_train too"),
        ({**MIXED, "num_train": np.ones(2)}, r"num_train must be numbers .* got float64 \(2,\) and \(2, 1\)"),
        ({**MIXED, "num_train": [["a"], ["b"]]}, r"num_train must be numbers .* got <U1 \(2, 1\)"),
        ({**MIXED, "cat_train": [0, 1]}, r"cat_train codes \(records, 1\), got float64 \(2, 1\) and \(2,\)"),
        ({**MIXED, "cat_train": [[0], [1], [0]]}, r"and \(3, 1\)"),
        ({**MIXED, "cat_columns": "sex"}, "cat_columns must be a list, got an array of 0 axes"),
        ({**MIXED, "values_sex": [["f", "m"]]}, "values_sex must be a list, got an array of 2 axes"),
        ({"X": np.ones((2, 1)), "y": np.array([0, None])}, "without pickled objects"),
    ],
)
def test_npz_refused(npz: Save, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(npz(**arrays))


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(DataError, match=r"must be a NumPy \.npz archive"):
        load(tmp_path / "no.npz")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.npz", "must be in a file that exists, got nowhere.npz"),
        ("mushroms", "must be one of breast_cancer, .*got mushroms; did you mean mushrooms"),
        ("nothing-like-it", "must be one of breast_cancer, .*got nothing-like-it$"),
    ],
)
def test_unknown_source_is_refused(source: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(source)


# ---- .csv and .parquet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "label", "expected"),
    [
        ("a,label,y", None, [0, 1]),
        ("a,y,b", None, [0, 1]),
        ("y,b,a", "b", [0, 1]),
        ("a,b,c", None, [1, 0]),
        ("y,a,round", None, [0, 1]),
    ],
)
def test_label_column(csv: Callable[[str], Path], header: str, label: str | None, expected: list[int]) -> None:
    pytest.importorskip("pyarrow")
    # First and second column ascend, the last one descends.
    assert load(csv(f"{header}\n1,3,9\n2,4,8\n"), label=label).labels.tolist() == expected


def test_csv_with_placement_by_name(csv: Callable[[str], Path]) -> None:
    pytest.importorskip("pyarrow")
    dataset = load(csv("age,learner,round,label\n1.5,rome,0,no\n2,bern,4,yes\n3,rome,2,no\n"))
    assert dataset.features.tolist() == [[1.5], [2.0], [3.0]]
    assert dataset.labels.tolist() == [0, 1, 0]
    assert dataset.learner is not None
    assert dataset.learner_names is not None
    assert [dataset.learner_names[i] for i in dataset.learner] == ["rome", "bern", "rome"]
    assert dataset.round is not None
    assert dataset.round.tolist() == [0, 4, 2]


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    # The folder looks like a partition of a data set: it must not turn into a column.
    folder = tmp_path / "site=7"
    folder.mkdir()
    columns = {"a": [1, 2], "flag": [True, False], "learner": [1, 0], "y": arrow.array(["u", "v"]).dictionary_encode()}
    parquet.write_table(arrow.table(columns), folder / "records.parquet")
    dataset = load(folder / "records.parquet")
    assert dataset.features.tolist() == [[1, 1], [2, 0]]
    assert dataset.labels.tolist() == [0, 1]
    assert dataset.learner is not None
    assert dataset.learner.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "a,city,y\n1,x,0\n2,z,1\n",
            DataError,
            "column 'city' must be numeric, got type string; declare its fields in a schema",
        ),
        ("a,b,y\n1,2,0\n3,,1\n", DataError, r"row 1 \(counted from 0\), column 'b' must hold a value"),
        ("a,b,y\n1,2,0\n3,nan,1\n", DataError, r"row 1 .*column 'b' must hold a value, .* or a word for one \(nan, NA"),
        ("a,b,y\n1,inf,0\n3,4,1\n", DataError, "row 0 .*column 'b' must be a finite number, got inf"),
        ("a,a,y\n1,2,0\n3,4,1\n", DataError, "names must differ"),
        ("y,round\n0,1\n1,0\n", DataError, "must have a feature column beside the label"),
        ("a,y\n1,0\n1,2,3\n", DataError, r"readable \.csv file: .*, got 3 in row 1 \(counted from 0\)$"),
        (
            "# taken in 2024, ward 7\na,b,y\n1,2,0\n",
            DataError,
            "got 3 in row 0 .*; its first line begins with #: remove it",
        ),
        ("a,b,y\n0x1f,2,0\n0x20,4,1\n", DataError, "column 'a' must be numeric, got digits that are codes"),
        ("a,b,y\n07:30,2,0\n08:15,4,1\n", DataError, "column 'a' must be numeric, .*; declare its fields in a schema"),
        (f"a,b,y\n1,{'x' * 2**21},0\n2,x,1\n", DataError, "a row is longer than 1 MiB"),
        ("", DataError, r"must be a readable \.csv file"),
        ("round,learner\n0,1\n", SpecError, "data.label must name a column"),
    ],
)
def test_csv_refused(csv: Callable[[str], Path], text: str, error: type[Exception], message: str) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(error, match=message):
        load(csv(text))


@pytest.mark.parametrize(
    "text", ["a,y\n1,0\n31337,1,5\n3,1\n", 'a,y\n1,0\n"31337\n', "a,y\n31337\n", "a,y\n1,0\n\x00,31337,\xff\n"]
)
def test_a_broken_csv_is_not_quoted(csv: Callable[[str], Path], text: str) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError) as refusal:
        load(csv(text))
    assert "31337" not in str(refusal.value)


@pytest.mark.parametrize("label", ["b", "round"])
def test_label_column_that_is_not_there_is_refused(csv: Callable[[str], Path], label: str) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(SpecError, match=rf"must name a column of .*, got '{label}' \('a', 'y'\)"):
        load(csv("a,y,round\n1,0,0\n2,1,0\n"), label=label)


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "positive", "expected"),
    [
        ([-1, 1, -1], None, [0, 1, 0]),
        ([2, 1, 2], None, [1, 0, 1]),
        (["m", "b", "m"], None, [1, 0, 1]),
        ([b"m", b"b", b"m"], None, [1, 0, 1]),
        ([True, False, True], None, [1, 0, 1]),
        ([0, 1, 2], None, [0, 0, 1]),
        ([3, 0, 1, 2], None, [1, 0, 0, 1]),
        ([10, 9, 2], None, [1, 0, 0]),
        ([0, 1, 2], (0, 2), [1, 0, 1]),
        ([0, 1, 2], ("1",), [0, 1, 0]),
        ([0.5, 1.0, 2.0], ("0.5",), [1, 0, 0]),
        (["a", "b", "c"], ("b",), [0, 1, 0]),
        ([0, 1, 0], (0,), [1, 0, 1]),
    ],
)
def test_logistic_labels(
    npz: Save, labels: list[Any], positive: tuple[int | str, ...] | None, expected: list[int]
) -> None:
    dataset = load(npz(X=np.ones((len(labels), 1)), y=labels), positive=positive)
    assert dataset.labels.tolist() == expected
    assert dataset.labels.dtype == np.float64


def test_classes_keep_what_a_binary_loss_forgets(npz: Save) -> None:
    dataset = load(npz(X=np.ones((4, 1)), y=[30, 10, 20, 40]))
    assert dataset.classes is not None
    assert dataset.classes.tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize(
    ("labels", "positive", "error", "message"),
    [
        ([4, 4], None, DataError, "needs two labels, got only 4: name in data.positive what counts as 1"),
        ([0, 1], (5,), SpecError, r"must name labels that occur \(0, 1\), got 5"),
        ([0, 1], (0, 1), SpecError, "some of the labels 0, 1, not all"),
        ([0, 1], (), SpecError, "some of the labels 0, 1, not all"),
    ],
)
def test_logistic_labels_refused(
    npz: Save, labels: list[int], positive: tuple[int, ...] | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(npz(X=np.ones((4, 1)), y=labels * 2), positive=positive)


def test_hinge_labels_are_those_of_the_logistic_loss(npz: Save) -> None:
    path = npz(X=np.ones((3, 1)), y=["m", "b", "m"])
    assert load(path, HingeLoss()).labels.tolist() == load(path).labels.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="the hinge loss needs two labels, got only 4"):
        load(npz(X=np.ones((2, 1)), y=[4, 4]), HingeLoss())


def test_softmax_labels_are_ranks(npz: Save) -> None:
    """Fewer labels than classes are fine: some may come later, from live records."""
    path = npz(X=np.ones((4, 1)), y=[30, 10, 20, 30], X_test=np.ones((1, 1)), y_test=[40])
    dataset = load(path, SoftmaxLoss(classes=5))
    assert dataset.labels.tolist() == [2, 0, 1, 2]
    assert dataset.labels.dtype == np.float64
    assert dataset.test is not None
    assert dataset.test.labels.tolist() == [3]
    assert load(npz(X=np.ones((3, 1)), y=["c", "a", "c"]), SoftmaxLoss(classes=2)).labels.tolist() == [1, 0, 1]


def test_more_labels_than_classes_are_refused(npz: Save) -> None:
    path = npz(X=np.ones((6, 1)), y=[30, 10, 20] * 2)
    with pytest.raises(SpecError, match=r"loss\.classes must be at least .*, got 2 for 3 labels: 10, 20, 30"):
        load(path, SoftmaxLoss(classes=2))


def test_ridge_labels_stay_as_they_are(npz: Save) -> None:
    assert load(npz(X=np.ones((3, 1)), y=[0.25, -7, 3]), RIDGE).labels.tolist() == [0.25, -7, 3]
    assert load(npz(X=np.ones((2, 1)), y=[1, 1]), RIDGE).labels.tolist() == [1, 1]


def test_ridge_refuses_text(npz: Save) -> None:
    with pytest.raises(DataError, match="ridge loss must be numbers, got text: high, low"):
        load(npz(X=np.ones((4, 1)), y=["low", "high"] * 2), RIDGE)
    with pytest.raises(DataError, match="least_squares loss must be numbers, got text"):
        load(npz(X=np.ones((2, 1)), y=["low", "high"]), LeastSquaresLoss())
