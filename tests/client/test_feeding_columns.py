"""The columns of a file are held against the run's schema before any of its rows."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.feeding.feeder import FeedOptions, FeedTarget, _open_dead_letters, feed
from sottovoce_client.feeding.files import _StandardInput, build_file_partitions
from sottovoce_client.feeding.formats import Csv
from sottovoce_client.feeding.progress import FeedCounters
from sottovoce_client.feeding.records import FieldMap, TabularPartition
from sottovoce_core.errors import DataError, FailedPrecondition
from tests.client.test_feeding import SECRET, ann
from tests.client.test_live_learner import SCHEMA, learned, spec_of

FIELDS = ["age", "ward", "outcome"]
OTHER = "every column must be in the schema, and 'years' is not: --map FIELD=COLUMN"
LACKING = "must have a column for every field of the schema, and has none for 'age'"


def fields(*maps: str, **more: Any) -> FieldMap:
    return FieldMap(spec_of({"schema": SCHEMA}).data.schema, maps, **more)


@pytest.mark.parametrize(
    ("columns", "maps", "more", "words"),
    [
        (FIELDS, (), {}, []),
        ([*FIELDS, "id"], (), {}, []),  # ignored by the schema
        (["years", "ward", "outcome"], ("age=years",), {}, []),
        (["patient", "ward", "outcome"], ("age=patient.age",), {}, []),
        (["patient.age", "ward", "outcome"], ("age=patient.age",), {}, []),
        ([*FIELDS, "years"], (), {"ignore_unknown": True}, []),
        ([*FIELDS, "years"], (), {"position": "years"}, []),
        (["years", "ward", "outcome"], (), {}, [LACKING, OTHER]),
        ([*FIELDS, "years"], (), {}, [OTHER]),
        (FIELDS, ("age=years",), {}, ["has none for 'age=years'", "'age' is not"]),
        (["ward", "outcome"], (), {"ignore_unknown": True}, [LACKING]),
        ([*FIELDS, "years"], ("age=years",), {}, ["'age' is not"]),  # in its place stands another
        ([str(SECRET), "icu", "home"], (), {}, ["none of its 3 is a field", "'age', 'ward', 'outcome'"]),
    ],
)
def test_columns_are_those_of_the_schema(
    columns: list[str], maps: tuple[str, ...], more: dict[str, Any], words: list[str]
) -> None:
    why = fields(*maps, **more).find_column_misfit(columns)
    assert bool(why) == bool(words) and all(word in why for word in words), why
    assert str(SECRET) not in why  # a first line that is no header may be a record


def test_without_a_schema_a_table_has_two_columns() -> None:
    own = FieldMap(None)
    assert not own.find_column_misfit(["features", "label"]) and "this run has no schema" in own.find_column_misfit(
        FIELDS
    )


@pytest.mark.parametrize(
    ("delimiter", "header", "advice"),
    [
        (",", b"age;ward;outcome", "With --delimiter ';' they fit"),
        (",", b"age\tward\toutcome", r"With --delimiter \$'\\t' they fit"),
        (";", b"age,ward,outcome", "With --delimiter ',' they fit"),
        (",", b"years|ward|outcome", r"They seem to have another delimiter: --delimiter '\|'"),
        (",", b"years,ward,outcome", "others out$"),
        (",", b'\xef\xbb\xbf"age";"ward";"outcome"', "With --delimiter ';' they fit"),
    ],
)
def test_a_delimiter_that_fits_is_named(delimiter: str, header: bytes, advice: str) -> None:
    with pytest.raises(DataError, match=advice):
        Csv(delimiter).read_header(header + b"\n", fields().find_column_misfit, is_complete=False)


def parts_of(kind: str, folder: Path, header: str, row: str, open_files: ExitStack) -> Any:
    text = f"{header}\n{row}\n".encode()
    if kind == "stdin":
        (folder / "in").write_bytes(text)
        return [_StandardInput("stdin", Csv(), file=open_files.enter_context((folder / "in").open("rb")))]
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        csv = pytest.importorskip("pyarrow.csv")
        parquet.write_table(csv.read_csv(io.BytesIO(text)), folder / "a.parquet")
        return build_file_partitions([folder / "a.parquet"])
    (folder / "a.csv").write_bytes(text)
    return build_file_partitions([folder / "a.csv"], follow=kind == "followed")


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("kind", ["csv", "followed", "stdin", "parquet"])
async def test_a_wrong_header_ends_a_feeder_before_anything_is_dropped(
    kind: str, tmp_path: Path, files: ExitStack
) -> None:
    account, dead = FeedCounters(), tmp_path / "dead.jsonl"
    async with ann(tmp_path) as (up, learner):
        (part,) = parts_of(kind, tmp_path, "years,ward,outcome", f"{SECRET},icu,home", files)
        work = feed([part], FeedTarget(up.addresses["ann"]), FeedOptions(dead_letters=dead), account, asyncio.Event())
        with pytest.raises(DataError, match=re.escape(LACKING)) as refused:
            await work
        assert str(SECRET) not in str(refused.value) and OTHER in str(refused.value)
        assert not account.refusals and not dead.read_text(encoding="utf-8")
        (part,) = parts_of("csv" if kind == "followed" else kind, tmp_path, "years,ward,outcome", "61,icu,home", files)
        again = feed([part], FeedTarget(up.addresses["ann"]), FeedOptions(["age=years"]), account, asyncio.Event())
        await again
        await learned(learner, 1)


@pytest.mark.parametrize("read", ["csv", "jsonl", "parquet"])
def test_what_is_no_file_is_called_what_it_is(read: str, tmp_path: Path) -> None:
    wrong = {tmp_path / "none.csv": "there is no file .*none.csv", tmp_path: "is a folder: name the files in it"}
    for path, words in wrong.items():
        with pytest.raises(DataError, match=words):
            build_file_partitions([path], read)


async def test_a_file_without_a_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (part,) = build_file_partitions([tmp_path / "a.csv"])
    with pytest.raises(DataError, match=r"a\.csv must begin with a line of column names, got none"):
        async for _ in part.read(-1):
            pass


@pytest.mark.parametrize("place", ["nowhere/dead.jsonl", "."])
async def test_dead_letters_that_cannot_be_written_are_refused_in_words(place: str, tmp_path: Path) -> None:
    words = r"dead letters cannot be written to .*: (there is no folder .*nowhere|Is a directory)$"
    with pytest.raises(FailedPrecondition, match=words), _open_dead_letters(tmp_path / place):
        pass


def test_lines_of_json_have_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"years": 1}\n', encoding="utf-8")
    (part,) = build_file_partitions([path])
    assert isinstance(part, TabularPartition)

    part.column_check = fields().find_column_misfit

    async def first() -> Any:
        async for messages in part.read(-1):
            return messages

    assert asyncio.run(first())[0].body == b'{"years": 1}'
