"""Files of records as they come: whatever reads them refuses the same ones, says what they are, and quotes nothing of them."""

from __future__ import annotations

import datetime
import gzip
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sottovoce_client.data.catalogue import describe
from sottovoce_client.data.schemas import check, infer
from sottovoce_client.feeding.formats import Csv, JsonLines
from sottovoce_client.init_wizard import InitOptions, draft_spec
from sottovoce_client.terminal import ignore_progress
from sottovoce_core.data.dataset import encode_file, load_dataset, read_source
from sottovoce_core.data.encoding import Encoder
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.data.spec import DataSpec, Schema
from sottovoce_core.errors import DataError, SottovoceError, SpecError
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run_warnings import find_data_warnings
from sottovoce_core.spec import load_schema, parse_spec

pytestmark = pytest.mark.each

CANARY, NUMBER = "Kanarek", "77177177"
"""What stands in records, a text and a number: no error may have it."""
MANY = 40
UTF_8 = "must be UTF-8"
SILENT = Console(file=io.StringIO())


def rows(header: str, line: Callable[[int], str], many: int = MANY) -> str:
    """A file of such lines."""
    return header + "\n" + "".join(f"{line(k)}\n" for k in range(many))


def of_bits(feature: str) -> str:
    """A file whose first feature is this, for a good one and a label."""
    return rows("odd,good,label", lambda k: f"{feature.replace('#', str(k))},{k % 5},{'yn'[k % 2]}")


def of_labels(*labels: str) -> str:
    return rows("good,label", lambda k: f"{k % 5}.5,{labels[k % len(labels)]}")


def zipped(name: str) -> bytes:
    with zipfile.ZipFile(found := io.BytesIO(), "w") as archive:
        archive.writestr(name, CANARY * 50)
    return found.getvalue()


RECORD = f"{CANARY},{NUMBER},y\n"
FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "no record"),
    "blank": ("\n\n", "no record"),
    "header alone": ("a,b,label\n", "at least one record|there must be one"),
    "no commas": ("".join(f"{CANARY}{k} {NUMBER} 3\n" for k in range(9)), "commas must separate|a field to learn from"),
    "one column": (rows("x", lambda k: f"{CANARY}{k}"), "commas must separate|a field to learn from"),
    "libsvm": (f"1 1:{NUMBER} 5:0.5\n0 1:2\n" * 9, "LIBSVM"),
    "libsvm with signs": (f"-1 3:1 11:{NUMBER} # x\n+1 3:2\n" * 9, "LIBSVM"),
    "gzip": (gzip.compress(RECORD.encode()), "gzip data: unpack"),
    "zip": (zipped("a.csv"), "zip archive: unpack"),
    "excel": (zipped("xl/sheet1.xml"), "Excel workbook: save the sheet as CSV UTF-8"),
    "old excel": (b"\xd0\xcf\x11\xe0\xa1\xb1" + bytes(600), "old Excel workbook"),
    "parquet": (b"PAR1" + bytes(100), r"Parquet file: its name must end in \.parquet"),
    "json": (f'[{{"a": 1, "label": "{CANARY}"}}]', "JSON"),
    "json lines": (f'{{"a": {NUMBER}, "label": "{CANARY}"}}\n' * 9, "JSON"),
    "web page": (f"<!DOCTYPE html><p>{CANARY}", "web page"),
    "arff": (f"% x\n@relation x\n@data\n1,{CANARY}\n", "ARFF"),
    "git lfs": ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "utf-16": (f"a,b,label\n{RECORD}".encode("utf-16"), f"UTF-16.*{UTF_8}"),
    "utf-16 without a mark": (f"a,b,label\n{RECORD}".encode("utf-16-le"), f"UTF-16.*{UTF_8}"),
    "latin-1 header": (f"größe,b,label\n{RECORD}".encode("latin-1"), f"{UTF_8}.*Latin-1"),
    "latin-1 body": (f"a,b,label\n1,2,{CANARY}ü\n".encode("latin-1"), f"{UTF_8}.*Latin-1"),
    "nul bytes": (bytes(200), "NUL bytes"),
    "semicolons": (f"a;b;label\n{RECORD.replace(',', ';')}", "semicolons"),
    "tabs": (f"a\tb\tlabel\n{RECORD.replace(',', chr(9))}", "tabs"),
    "bars": (f"a|b|label\n{RECORD.replace(',', '|')}", "bars"),
    "sep=": (f"sep=,\na,b,label\n{RECORD}", "sep="),
    "comment": (f"# {CANARY}\na,b,label\n{RECORD}", "comment"),
    "ragged": (f"a,b,label\n1,2,x\n{NUMBER},{CANARY}\n", "3 columns, as the first one has, got 2 in row 1"),
    "open quote": (f'a,b,label\n1,"{CANARY},x\n2,3,y\n', "3 columns"),
    "two of a name": (f"a,a,label\n1,2,x\n{RECORD}", "columns 0 and 1 .* have the same"),
    "two of a name but for blanks": (f"a,a ,label\n1,2,x\n{NUMBER},2,y\n", "columns 0 and 1 .* have the same"),
    "no header": (RECORD * 9, "must begin with a line of column names"),
    "no header, all differ": (
        "".join(f"{CANARY}{k},{CANARY}-{k},{NUMBER}{k}\n" for k in range(MANY)),
        r"column 0 \(counted from 0\)(: nearly all| must be numeric)",
    ),
    "no name": (rows(",age,label", lambda k: f"{k},{k % 5},{'yn'[k % 2]}"), "without a name|has none: name it or drop it"),
    "? is no class": (of_labels("yes", "no", "?"), "must have a value in every record, got one missing in 13 of 40"),
    "NA is no class": (of_labels("yes", "no", "NA"), "must have a value in every record, got one missing in 13 of 40"),
    "nothing is no class": (of_labels("yes", "no", ""), "must have a value in every record, got one missing in 13 of 40"),
    "a record's name is no class": (rows("a,b,name", lambda k: f"{k},1,{CANARY}{k}"), "names records, or is free text"),
}  # fmt: skip
"""Files `.csv`, and what everything that reads them says."""

LEARNED: dict[str, tuple[str, str, str]] = {
    "index": (
        rows("Unnamed: 0,age,label", lambda k: f"{k},{k % 5},{'yn'[k % 2]}"),
        "'Unnamed: 0' .*index of a pandas",
        "Unnamed: 0",
    ),
    "identifier": (rows("patient_id,age,label", lambda k: f"{9 + k},{k % 5},{k % 2}"), "names records", "patient_id"),
    "postcode": (rows("plz,age,label", lambda k: f"0{k}417,{k % 5},{k % 2}"), "'plz' .*codes", "plz"),
    "card": (rows("card,age,label", lambda k: f"42424242424242{k:02},{k % 5},{k % 2}"), "'card' .*codes", "card"),
    "digits": (of_bits(f"-{2**53 + 1}"), "'odd' .*codes", ""),
    "1e308": (of_bits("#e307"), "'odd' must be between -1e.100 and 1e.100", "odd"),
    "inf": (of_bits("inf"), "'odd' must be a finite number, got inf", ""),
    "? in a feature": (
        rows("odd,good,label", lambda k: f"{'12?'[k % 3]},{k % 5},{k % 2}"),
        "'odd' must be numeric",
        "odd",
    ),
}
"""Files `.csv` of which a schema leaves a column out, or says more of it: what reads them without one says, and that column."""


def parquet(column: Any, label: Any = None) -> bytes:
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    labels = arrow.array([CANARY, "y"] * (MANY // 2)) if label is None else arrow.array(*label)
    table = arrow.table({"odd": arrow.array(*column), "good": np.arange(MANY) % 5.0, "label": labels})
    pq.write_table(table, found := io.BytesIO())
    return found.getvalue()


PARQUET: dict[str, tuple[Callable[[Any], tuple[Any, ...]], str]] = {
    "list": (lambda _: ([[1.0, float(NUMBER)]] * MANY,), "got type list.*; declare its fields in a schema, or ignore"),
    "struct": (lambda _: ([{"x": CANARY}] * MANY,), "got type struct.*; declare its fields in a schema, or ignore"),
    "bytes": (lambda _: ([CANARY.encode()] * MANY,), "got type binary; declare its fields in a schema, or ignore"),
    "time": (lambda _: ([datetime.time(1, 2)] * MANY,), "got type time64.*; declare its fields in a schema, or ignore"),
    "length of time": (
        lambda _: ([datetime.timedelta(1)] * MANY,),
        "got type duration.*; declare its fields in a schema, or ignore",
    ),
    "timestamp": (lambda _: ([datetime.datetime(2024, 1, 1)] * MANY,), "got type timestamp.*; declare"),
    "text": (lambda _: ([CANARY] * MANY,), "got type string; declare"),
    "gaps": (lambda _: ([None, 1.0] * (MANY // 2),), "must hold a value, got an empty cell.* declare"),
    "nothing": (lambda _: ([None] * MANY,), "must hold a value, got an empty cell"),
    "nan": (lambda _: ([float("nan")] * MANY,), "finite number, got nan"),
    "int64": (lambda _: ([2**53 + 1] * MANY,), r"beyond 2\*\*53"),
    "uint64": (lambda arrow: ([2**64 - 1] * MANY, arrow.uint64()), r"beyond 2\*\*53"),
    "decimal": (lambda arrow: ([Decimal(2**60 + 1)] * MANY, arrow.decimal128(38, 0)), r"beyond 2\*\*53"),
}


def readers(path: Path, *, drafted: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All that reads a file of records before a run, by name."""
    folder = path.parent
    if drafted:
        yield "init --schema-only", lambda: infer(path, None, folder / "schema.yaml", SILENT)
    yield "data describe", lambda: describe(str(path), (), SILENT)
    yield "init", lambda: draft_spec(InitOptions(path, label_bound=1.0), folder, None, ignore_progress)
    yield "spec check and a run", lambda: load_dataset(DataSpec(source=str(path)), LogisticLoss())


def refusals(path: Path, *, drafted: bool = True) -> Iterator[str]:
    for name, read in readers(path, drafted=drafted):
        with pytest.raises(SottovoceError) as refused:
            read()
        told = str(refused.value)
        assert CANARY not in told and NUMBER not in told, f"{name}: {told}"
        yield told


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def written(name: str, content: str | bytes) -> Path:
        (path := tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return written


Write = Callable[[str, str | bytes], Path]


def numbered(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases with their numbers for names: archives differ from process to process."""
    return [pytest.param(*case, id=str(k)) for k, case in enumerate(cases)]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_table_is_refused_by_all(file: Write, name: str) -> None:
    pytest.importorskip("pyarrow")
    content, message = FILES[name]
    for told in refusals(path := file("odd.csv", content)):
        assert str(path) in told and re.search(message, told), told


@pytest.mark.parametrize("name", LEARNED)
def test_what_a_schema_leaves_out_is_refused_without_one(file: Write, name: str) -> None:
    pytest.importorskip("pyarrow")
    content, message, ignored = LEARNED[name]
    path = file("odd.csv", content)
    for told in refusals(path, drafted=False):
        assert re.search(message, told), told
    infer(path, None, drafted := path.parent / "schema.yaml", SILENT)
    schema = load_schema(drafted)
    if name == "? in a feature":
        assert schema.features["odd"].missing == "flag"
    else:
        assert schema.ignored == (ignored or "odd",) or schema.features["odd"].type == "category"
    assert encode_file(path, Encoder.from_schema(schema, LogisticLoss()))[0].accepted_mask.all()


@pytest.mark.parametrize("name", PARQUET)
def test_a_column_of_no_numbers_is_refused_by_all(file: Write, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    column, message = PARQUET[name]
    for told in refusals(file("odd.parquet", parquet(column(arrow))), drafted=False):
        assert re.search(f"column 'odd' .*{message}", told.replace("must be numeric, ", "")), told


@pytest.mark.parametrize(
    ("content", "message"),
    numbered(
        (RECORD, r"text: its name must end in \.csv"),
        ("", "empty file"),
        (zipped("a.csv"), "zip archive"),
        (b"PAR1" + bytes(50), "broken: copy it anew"),
        (f"{CANARY}\xff".encode("latin-1"), "a broken one"),
    ),
)
def test_what_is_no_parquet_file_is_named(file: Write, content: str | bytes, message: str) -> None:
    pytest.importorskip("pyarrow")
    for told in refusals(file("odd.parquet", content)):
        assert re.search(message, told), told


def archive(**arrays: Any) -> bytes:
    np.savez(found := io.BytesIO(), **arrays)
    return found.getvalue()


LABELS = np.arange(MANY) % 2
ONES = np.ones((MANY, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    numbered(
        (RECORD, r"got text: its name must end in \.csv"),
        ("", "got an empty file"),
        (zipped("a.csv"), "must hold the arrays X and y"),
        (zipped("X"), "must hold the arrays X and y"),
        (b"\x80\x04\x95" + CANARY.encode(), "pickled"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '" + CANARY.encode(), "one NumPy array"),
        (archive(X=np.array([[CANARY, 1]] * MANY, dtype=object), y=LABELS), "Python objects"),
        (archive(X=ONES, y=LABELS)[:-40], "a broken one: copy it anew"),
        (archive(X=ONES.astype(np.int64) * (2**53 + 1), y=LABELS), r"beyond 2\*\*53"),
        (archive(X=ONES * 1e308, y=LABELS), r"column 0 .*between -1e\+100 and 1e\+100"),
        (archive(X=ONES, y=np.array(["a", "b", "?", CANARY] * (MANY // 4))), "missing in 10 of 40"),
        (archive(X=ONES, y=LABELS, columns=["a", "__index_level_0__"]), "'__index_level_0__' .*index"),
        (archive(X=ONES * np.arange(MANY)[:, None], y=LABELS, columns=["a", "id"]), "'id' .*names records"),
    ),
)
def test_archives(file: Write, content: str | bytes, message: str) -> None:
    for told in refusals(file("odd.npz", content), drafted=False):
        assert re.search(message, told), told


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").mkdir()
    for told in refusals(tmp_path / "odd.csv"):
        assert "must be in a file, got the folder" in told


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"a,b,label\r\n1,2,x\n3,4,y\r5,6,x\r\n7,8,y\n",
        b"a,b,label\r1,2,x\r3,4,y\r5,6,x\r7,8,y",
        b'\xef\xbb\xbfa,b,label\n"1",2,"x"\n3,"4",y\n5,6,x\n7,8,y\n',
    ],
)
def test_marks_ends_of_lines_and_quotes_change_nothing(file: Write, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    table = read_source(DataSpec(source=str(file("odd.csv", content))))
    assert table.features.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert table.labels.tolist() == ["x", "y", "x", "y"]


@pytest.mark.parametrize(
    "name", ["PAR1", "BZh", "ARROW1", "MATLAB score", "SQLite format", "version", "<id>", "[id]", "{id}"]
)
def test_a_column_may_be_called_as_another_format_begins(file: Write, name: str) -> None:
    pytest.importorskip("pyarrow")
    path = file("odd.csv", rows(f"{name},label", lambda k: f"{k % 5}.5,{'yn'[k % 2]}"))
    assert read_source(DataSpec(source=str(path))).columns == (name,)


def test_names_mean_the_same_with_blanks_around_them(file: Write) -> None:
    """Else the label of `age, label, dose` would be the dose."""
    pytest.importorskip("pyarrow")
    path = file("odd.csv", rows(" age, label, learner,dose ", lambda k: f"{k % 5}.5,{'yn'[k % 2]},{k % 3},{k % 7}"))
    table = read_source(DataSpec(source=str(path)))
    assert table.columns == ("age", "dose") and table.label == "label" and table.learner is not None
    assert read_source(DataSpec(source=str(path), label=" label")).label == "label"
    infer(path, None, drafted := path.parent / "schema.yaml", SILENT)
    assert load_schema(drafted).label.name == "label"


def test_learners_keep_their_zeros_with_a_schema_too(file: Write) -> None:
    pytest.importorskip("pyarrow")
    path = file("odd.csv", rows("learner,a,label", lambda k: f"0{k % 2},{k % 5}.5,{'yn'[k % 2]}"))
    infer(path, None, drafted := path.parent / "schema.yaml", SILENT)
    for schema in (None, load_schema(drafted)):
        assert load_dataset(DataSpec(source=str(path), schema=schema), LogisticLoss()).learner_names == ("00", "01")


def test_labels_that_are_codes_stay_text(file: Write) -> None:
    pytest.importorskip("pyarrow")
    table = read_source(DataSpec(source=str(file("odd.csv", of_labels("01", "1")))))
    assert set(table.labels.tolist()) == {"01", "1"}
    content = parquet(([1.0] * MANY,), ([2**53, 2**53 + 1] * (MANY // 2),))
    assert set(read_source(DataSpec(source=str(file("odd.parquet", content)))).labels.tolist()) == {
        "9007199254740992",
        "9007199254740993",
    }


def test_categories_and_decimals_are_read_as_what_they_hold(file: Write) -> None:
    arrow = pytest.importorskip("pyarrow")
    for column in (
        (arrow.array([1, 2] * (MANY // 2)).dictionary_encode(),),
        ([Decimal("1"), Decimal("2")] * (MANY // 2),),
    ):
        table = read_source(DataSpec(source=str(file("odd.parquet", parquet(column)))))
        assert table.features[:, 0].tolist() == [1.0, 2.0] * (MANY // 2)


@pytest.mark.parametrize(
    ("learners", "column"), [(("1", "2"), "12"), (("2", "1"), "12"), (("01", "02"), ("01", "02")), (2, "01")]
)
def test_a_learner_that_is_called_by_a_number_is_found_by_it(file: Write, learners: Any, column: Any) -> None:
    pytest.importorskip("pyarrow")
    path = file("odd.csv", rows("learner,a,label", lambda k: f"{column[k % 2]},{k % 2}.5,{k % 2}"))
    document = {"rounds": 3, "learners": learners, "algorithm": "ldp-dol", "data": {"source": str(path)}}
    spec = parse_spec(document, allow_imports=False)
    placed = place_data(spec, load_dataset(spec.data, spec.loss))
    own = {name: set(one.features[:, 0].tolist()) for name, one in zip(spec.names, placed.learners, strict=True)}
    first, second = spec.names if learners == 2 else sorted(spec.names)
    assert own == {first: {0.5}, second: {1.5}}


def test_scaling_that_overflows_is_refused(file: Write) -> None:
    content = archive(X=ONES * 1e99, y=LABELS, X_test=np.array([[0.0, 0.0], [1e-99, 1e-99]]), y_test=np.array([0, 1]))
    document = {
        "rounds": 3,
        "learners": 2,
        "algorithm": "ldp-dol",
        "data": {"source": str(file("odd.npz", content)), "scale": "standard"},
    }
    spec = parse_spec(document, allow_imports=False)
    with pytest.raises(DataError, match=r"scaled features must be between -1e\+100 and 1e\+100"):
        place_data(spec, load_dataset(spec.data, spec.loss))


# ---- labels that are nearly the same ---------------------------------------------------------------------------------

INCOMES = of_labels(">50K", "<=50K", ">50K.", "<=50K.")
ALIKE = "'<=50K' and '<=50K.'; '>50K' and '>50K.' differ only by case, blanks or a final dot"


def test_labels_that_are_nearly_the_same_are_told_by_all(file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    path = file("odd.csv", INCOMES)
    describe(str(path), (), Console(file=(shown := io.StringIO()), width=400))
    assert ALIKE in shown.getvalue()
    assert any(ALIKE in note for note in draft_spec(InitOptions(path), path.parent, None, ignore_progress).notes)
    infer(path, None, drafted := path.parent / "schema.yaml", SILENT)
    assert ALIKE in drafted.read_text(encoding="utf-8")
    document = {"rounds": 3, "learners": 2, "algorithm": "ldp-dol", "data": {"source": str(path)}}
    spec = parse_spec(document, allow_imports=False)
    dataset = load_dataset(spec.data, spec.loss)
    assert any(
        each.code == "LABELS_ALIKE" and ALIKE in each.text
        for each in find_data_warnings(spec, dataset, place_data(spec, dataset))
    )


def test_a_test_part_that_writes_labels_otherwise_is_told_which_are_near(file: Write) -> None:
    pytest.importorskip("pyarrow")
    infer(file("train.csv", of_labels(">50K", "<=50K")), None, path := file("s.yaml", "").with_name("t.yaml"), SILENT)
    schema, test = load_schema(path), file("test.csv", of_labels(">50K.", "<=50k"))
    with pytest.raises(
        DataError, match=r"label: some words differ from '<=50K', '>50K' only by case, blanks or a final dot"
    ):
        load_dataset(DataSpec(source=str(test), schema=schema), LogisticLoss())
    assert not check(schema, test, console=Console(file=(shown := io.StringIO()), width=400))
    assert "some words differ from '<=50K', '>50K'" in shown.getvalue()
    with pytest.raises(DataError) as refused:
        load_dataset(DataSpec(source=str(file("other.csv", of_labels(CANARY, "<=50K"))), schema=schema), LogisticLoss())
    assert "none of its categories" in str(refused.value) and CANARY not in str(refused.value)


def test_a_record_in_place_of_a_header_is_not_quoted_though_one_of_its_words_is_a_field(file: Write) -> None:
    pytest.importorskip("pyarrow")
    field = {"type": "number", "bounds": [0, 9]}
    label = {"name": "label", "type": "category", "categories": ["x", "y"]}
    schema = Schema.model_validate({"features": {"a": field, "b": field}, "label": label})
    path = file("odd.csv", "".join(f"{CANARY}{k},{NUMBER},{'ab'[k % 2]}\n" for k in range(MANY)))
    with pytest.raises(
        DataError, match="only one of its 3 is a field of the schema; the fields are 'a', 'b', 'label'"
    ) as refused:
        load_dataset(DataSpec(source=str(path), schema=schema), LogisticLoss())
    assert CANARY not in str(refused.value) and NUMBER not in str(refused.value)


# ---- what is fed, and predicted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [Csv(), JsonLines()])
@pytest.mark.parametrize(
    ("content", "message"),
    numbered(
        (gzip.compress(RECORD.encode()), "gzip"),
        (zipped("a.csv"), "zip"),
        (f"a,b\n{RECORD}".encode("utf-16"), "UTF-16"),
        (f"1 3:1 11:{NUMBER}\n".encode(), "LIBSVM"),
        (b"PAR1" + bytes(9), "Parquet"),
    ),
)
def test_what_is_fed_is_named_by_its_format(form: Any, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"looks like .*{message}") as refused:
        form.read_header(content, is_complete=True)
    assert CANARY not in str(refused.value) and NUMBER not in str(refused.value)


def test_whole_numbers_that_would_lose_digits_are_no_live_records() -> None:
    live = LiveRecordEncoder.from_spec(DataSpec(source="live", features=2), LogisticLoss())
    found = live.encode([[2**53 + 1, 0.5], [2.0**60, 1], [1e300, 1], [2**53 - 1, 1]], [0, 1, 0, 1])
    assert found.refusals == {
        0: "integers beyond 2**53, of which float64 loses digits",
        2: "a number beyond 1e+100",
    }
    assert found.features[:, 0].tolist() == [2.0**60, 2.0**53 - 1]


def test_numbers_that_would_lose_digits_are_no_categories() -> None:
    with pytest.raises(ValueError, match=r"below 2\*\*53.*quotes around codes"):
        Schema.model_validate(
            {
                "features": {"a": {"type": "category", "categories": [1, 2**53]}},
                "label": {"name": "y", "type": "boolean"},
            }
        )


def test_a_document_in_another_format_is_named(file: Write) -> None:
    with pytest.raises(SpecError, match="must be text in UTF-8, got gzip data"):
        load_schema(file("schema.yaml", gzip.compress(CANARY.encode() * 9)))
    with pytest.raises(SpecError, match="it is UTF-16: save it as UTF-8"):
        load_schema(file("schema.yaml", "features: {}".encode("utf-16")))
