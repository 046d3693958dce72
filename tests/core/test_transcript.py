"""Transcripts and recorded noise on disk: what was written comes back, and nothing else passes for it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import CaptureError
from sottovoce_core.runs import transcript as module
from sottovoce_core.runs.transcript import COLUMNS, Transcript, TranscriptWriter, read_noise

pytestmark = pytest.mark.each

ROUNDS, LEARNERS, REPLICAS, DIM = 7, 3, 2, 4


@pytest.fixture
def values() -> FloatArray:
    return np.random.default_rng(0).normal(size=(ROUNDS, LEARNERS, REPLICAS, DIM))


def write(path: Path, values: FloatArray, run: str = "r", field: str = "y") -> None:
    with TranscriptWriter(path, run) as writer:
        for t, said in enumerate(values):
            writer.write(t, field, said)


def changed(path: Path, change: Any) -> Path:
    """The same file with its rows, a list of dictionaries, changed."""
    table = pq.read_table(path)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), path)
    return path


# ---- transcripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 10, 20_000])
def test_what_was_written_comes_back(
    tmp_path: Path, values: FloatArray, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS_PER_GROUP", group)
    write(tmp_path / "t.parquet", values)
    back = Transcript(read_noise(tmp_path / "t.parquet"))

    assert np.array_equal(back.fields["y"], values)
    assert (back.rounds, back.replicas) == (ROUNDS, REPLICAS)
    assert np.array_equal(back.message(4, 1)["y"], values[4, 1:2])


def test_the_file_has_the_promised_columns(tmp_path: Path, values: FloatArray) -> None:
    write(tmp_path / "t.parquet", values, run="name")
    table = pq.read_table(tmp_path / "t.parquet")
    row = table.to_pylist()[-1]

    assert tuple(table.column_names) == COLUMNS
    assert table.num_rows == ROUNDS * LEARNERS * REPLICAS
    assert row == {
        "run": "name",
        "world": 0,
        "replica": REPLICAS - 1,
        "round": ROUNDS - 1,
        "sender": LEARNERS - 1,
        "field": "y",
        "value": values[-1, -1, -1].tolist(),
    }


def test_row_order_does_not_matter(tmp_path: Path, values: FloatArray) -> None:
    write(tmp_path / "t.parquet", values)
    path = changed(tmp_path / "t.parquet", lambda rows: rows[::-1])
    assert np.array_equal(read_noise(path)["y"], values)


def test_fields_and_worlds_are_kept_apart(tmp_path: Path, values: FloatArray) -> None:
    path = tmp_path / "t.parquet"
    tables = []
    for world, field, sign in [(0, "y", 1), (0, "w", 2), (1, "y", 3)]:
        write(path, sign * values, "a", field)
        table = pq.read_table(path)
        worlds = pa.array([world] * table.num_rows, pa.int8())
        tables.append(table.set_column(COLUMNS.index("world"), "world", worlds))
    pq.write_table(pa.concat_tables(tables), path)

    found = read_noise(path)
    assert found.keys() == {"y", "w"}
    assert np.array_equal(found["y"], values) and np.array_equal(found["w"], 2 * values)


def test_after_an_error_the_file_is_called_partial_and_can_be_read(tmp_path: Path, values: FloatArray) -> None:
    def fail_after_a_round() -> None:
        with TranscriptWriter(tmp_path / "t.parquet", "r") as writer:
            writer.write(0, "y", values[0])
            raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        fail_after_a_round()
    assert [each.name for each in tmp_path.iterdir()] == ["t.parquet.partial"]
    (tmp_path / "t.parquet.partial").rename(tmp_path / "part.parquet")
    assert np.array_equal(read_noise(tmp_path / "part.parquet")["y"], values[:1])


def drop(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows[:5], *rows[6:]]


def double(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row twice in the place of another: the count is right."""
    return [*rows[:5], rows[4], *rows[6:]]


def unequal(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One vector longer, another one shorter: the sum is right."""
    first, second, *rest = rows
    return [first | {"value": first["value"] + [0.0]}, second | {"value": second["value"][:-1]}, *rest]


def negative(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"sender": row["sender"] - 1} for row in rows]


@pytest.mark.parametrize("change", [drop, double, unequal, negative], ids=lambda change: change.__name__)
def test_a_transcript_with_rows_missing_is_refused(tmp_path: Path, values: FloatArray, change: Any) -> None:
    write(tmp_path / "t.parquet", values)
    path = changed(tmp_path / "t.parquet", change)
    with pytest.raises(CaptureError, match="field 'y' must have one row of equal length for each of"):
        read_noise(path)


def test_other_files_are_not_transcripts(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CaptureError, match="cannot read the transcript"):
        read_noise(path)
    pq.write_table(pa.table({"run": ["a"], "round": [1]}), path)
    with pytest.raises(CaptureError, match=r"is not a transcript: it must have columns .*, and lacks .*'sender'"):
        read_noise(path)


@pytest.mark.parametrize(("name", "wrong"), [("value", 1.0), ("round", "one"), ("sender", None)])
def test_columns_of_another_type_are_refused(tmp_path: Path, values: FloatArray, name: str, wrong: Any) -> None:
    path = tmp_path / "t.parquet"
    write(path, values)
    rows = pq.read_table(path).to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {name: wrong} for row in rows]), path)
    with pytest.raises(CaptureError, match=r"is not a transcript: column '.*' must be .*"):
        read_noise(path)


@pytest.mark.parametrize("text", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_columns_as_pandas_and_polars_write_them_are_the_same(tmp_path: Path, values: FloatArray, text: Any) -> None:
    write(tmp_path / "t.parquet", values)
    table = pq.read_table(tmp_path / "t.parquet")
    kinds = {
        "run": text,
        "field": text,
        "round": pa.int64(),
        "world": pa.uint32(),
        "value": pa.large_list(pa.float64()),
    }
    for name, kind in kinds.items():
        try:
            column = table[name].dictionary_encode() if pa.types.is_dictionary(kind) else table[name].cast(kind)
        except pa.ArrowNotImplementedError:
            pytest.skip(f"this pyarrow cannot make a column of {kind}")
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, tmp_path / "others.parquet")
    np.testing.assert_array_equal(read_noise(tmp_path / "others.parquet")["y"], values)


# ---- recorded noise --------------------------------------------------------------------------------------------------


def test_noise_may_be_a_transcript(tmp_path: Path, values: FloatArray) -> None:
    write(tmp_path / "n.parquet", values)
    assert np.array_equal(read_noise(tmp_path / "n.parquet")["y"], values)


def test_noise_may_be_an_archive_with_or_without_replicas(tmp_path: Path, values: FloatArray) -> None:
    np.savez(tmp_path / "n.npz", y=values, w=values[:, :, 0], z=np.zeros((2, 3, 1), int))
    fields = read_noise(tmp_path / "n.npz")

    assert np.array_equal(fields["y"], values)
    assert np.array_equal(fields["w"], values[:, :, :1])
    assert fields["z"].shape == (2, 3, 1, 1)
    assert fields["z"].dtype == np.dtype("f8")


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 3)), np.zeros((1,) * 5), np.full((1, 1, 1), np.nan)])
def test_noise_of_another_shape_or_not_finite_is_refused(tmp_path: Path, array: FloatArray) -> None:
    np.savez(tmp_path / "n.npz", y=array)
    with pytest.raises(CaptureError, match=r"'y' must be finite and shaped \(rounds, learners, dim\)"):
        read_noise(tmp_path / "n.npz")


def test_noise_of_a_transcript_must_be_finite_as_well(tmp_path: Path, values: FloatArray) -> None:
    values[3, 1, 0, 2] = np.inf
    write(tmp_path / "n.parquet", values)
    with pytest.raises(CaptureError, match="'y' must be finite"):
        read_noise(tmp_path / "n.parquet")


def archive(**arrays: Any) -> bytes:
    held = io.BytesIO()
    np.savez(held, **arrays)
    return held.getvalue()


def single_array() -> bytes:
    held = io.BytesIO()
    np.save(held, np.zeros((2, 3, 1)))
    return held.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"text", archive(y=np.zeros((9, 9, 9)))[:-40], archive(y=np.array(["a"])), single_array()],
    ids=["empty", "text", "cut off", "words", "a single array"],
)
def test_an_unreadable_noise_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n.npz").write_bytes(content)
    with pytest.raises(CaptureError, match=r"cannot read the noise file .*n\.npz"):
        read_noise(tmp_path / "n.npz")


def test_a_missing_noise_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"cannot read the noise file .*n\.npz"):
        read_noise(tmp_path / "n.npz")


def test_a_transcript_is_as_long_as_its_fields() -> None:
    transcript = Transcript({"y": np.zeros((5, 2, 3, 1))})
    assert (transcript.rounds, transcript.replicas) == (5, 3)
