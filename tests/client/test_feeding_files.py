"""Files as a feeder reads them: on from any record, as they grow, and never another file in place of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_client.feeding.files import _decode_offset, _StandardInput, build_file_partitions
from sottovoce_client.feeding.formats import JsonLines
from sottovoce_client.feeding.records import SourceMessage, SourcePartition
from sottovoce_core.data.columns import WRONG_VALUE_COUNT_REASON
from sottovoce_core.errors import DataError, SpecError

CSV = b'a,b\n1,x\n2,"y\nz"\n3\n\n4,w'


async def read(part: SourcePartition, after: int = -1) -> list[SourceMessage]:
    return [message async for messages in part.read(after) for message in messages]


def wrote(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


async def test_reading_goes_on_behind_any_record(tmp_path: Path) -> None:
    (part,) = build_file_partitions([wrote(tmp_path / "a.csv", CSV)])
    found = await read(part)
    assert part.name == "a.csv"
    assert [each.body for each in found] == [{"a": "1", "b": "x"}, {"a": "2", "b": "y\nz"}, b"3", {"a": "4", "b": "w"}]
    assert [_decode_offset(each.position) for each in found] == [4, 8, 16, 19]
    assert found[2].reason == WRONG_VALUE_COUNT_REASON
    for number, each in enumerate(found):
        if not each.reason:
            assert await read(part, each.position) == found[number + 1 :]
    wrote(tmp_path / "a.csv", CSV + b"\n5,v\n")  # what was taken without its line's end has one now
    assert [each.body for each in await read(part, found[-1].position)] == [{"a": "5", "b": "v"}]


@given(lines=st.lists(st.integers(0, 999), min_size=1, max_size=300), data=st.data())
def test_positions_rise_and_lead_back_to_their_records(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    (part,) = build_file_partitions([wrote(path, b"".join(b'{"a": %d}\n' % line for line in lines))])

    async def check() -> None:
        found = await read(part)
        assert [each.body for each in found] == [b'{"a": %d}' % line for line in lines]
        positions = [each.position for each in found]
        assert positions == sorted(set(positions)) and positions[-1] < 2**63
        at = data.draw(st.integers(0, len(found) - 1))
        assert await read(part, positions[at]) == found[at + 1 :]

    asyncio.run(check())


OTHER: list[Callable[[bytes], bytes]] = [
    lambda text: text[:20],
    lambda text: text.replace(b"4,w", b"5,w"),
    lambda text: text.replace(b"1,x", b"7,x"),
    lambda text: text.replace(b"a,b", b"a,c"),
    lambda text: text.replace(b"a,b", b"a,bb"),
    lambda text: text[:4] + b"0,q\n" + text[4:],
    lambda text: text + b"4",
]


@pytest.mark.parametrize("change", OTHER)
async def test_another_file_of_that_name_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    (part,) = build_file_partitions([wrote(tmp_path / "a.csv", CSV)])
    last = (await read(part))[-1].position
    wrote(tmp_path / "a.csv", change(CSV))
    with pytest.raises(
        DataError, match=r"is not the file whose records were fed up to byte 19.* under another --source"
    ) as error:
        await read(part, last)
    assert "4,w" not in str(error.value)


async def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in {
        "pipe": "is not a file: feed a pipe",
        "nowhere": "there is no file",
        ".": "is a folder",
    }.items():
        with pytest.raises(DataError, match=words):
            build_file_partitions([tmp_path / name], "jsonl")
    endless = wrote(tmp_path / "endless", b"x" * (3 * 1024 * 1024))
    with pytest.raises(DataError, match=r"line at byte 0 has no end within 2,097,152 bytes"):
        await read(build_file_partitions([endless], "jsonl")[0])


# ---- files that grow -------------------------------------------------------------------------------------------------


class Following:
    """A file that is followed, and what came of it so far."""

    def __init__(self, part: SourcePartition) -> None:
        self.found: list[Any] = []
        self._batches: AsyncIterator[Sequence[SourceMessage]] = part.read(-1)

    async def until(self, records: int) -> list[Any]:
        while len(self.found) < records:
            self.found += [each.body for each in await anext(self._batches)]
        return self.found

    async def ended(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                self.found += [each.body for each in await anext(self._batches)]


async def test_a_file_is_followed_and_half_a_line_waited_for(tmp_path: Path) -> None:
    path = wrote(tmp_path / "a.csv", b"a")
    following = Following(build_file_partitions([path], follow=True)[0])
    waiting = asyncio.ensure_future(following.until(1))
    with path.open("ab", buffering=0) as file:
        for piece in (b",b", b"\n1", b",x\n2,"):
            file.write(piece)
        assert await waiting == [{"a": "1", "b": "x"}]
        waiting = asyncio.ensure_future(following.until(3))
        for piece in (b'"y\n', b'z"\n3,', b"v\n4"):
            file.write(piece)
        assert (await waiting)[1:] == [{"a": "2", "b": "y\nz"}, {"a": "3", "b": "v"}]


async def test_a_file_that_is_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    path = wrote(tmp_path / "a.jsonl", b"1\n")
    following = Following(build_file_partitions([path], follow=True)[0])
    assert await following.until(1) == [b"1"]
    path.rename(tmp_path / "a.jsonl.1")
    with (tmp_path / "a.jsonl.1").open("ab") as file:
        file.write(b"2\n3")
    assert await following.until(2) == [b"1", b"2"]
    wrote(path, b"4\n")
    with pytest.raises(DataError, match=r"was replaced by another file: the old one was read to its end"):
        await following.ended()
    assert following.found == [b"1", b"2", b"3"]


@pytest.mark.parametrize("text", [b"", b"7\n", b"7\n8\n9\n10\n"])
async def test_a_file_that_is_cut_or_written_anew_is_noticed(tmp_path: Path, text: bytes) -> None:
    path = wrote(tmp_path / "a.jsonl", b"1\n22\n")
    following = Following(build_file_partitions([path], follow=True)[0])
    await following.until(2)
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(text)
    with pytest.raises(DataError, match="was cut or rewritten after byte 5 was read"):
        await following.ended()


# ---- Parquet and standard input --------------------------------------------------------------------------------------


async def test_parquet_goes_on_behind_any_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(2_500), "in": [{"a": n} for n in range(2_500)]}), path, row_group_size=1_000)
    (part,) = build_file_partitions([path])
    found = await read(part)
    assert [each.body for each in found] == [{"n": n, "in": {"a": n}} for n in range(2_500)]
    assert [_decode_offset(each.position) for each in found] == list(range(2_500))
    for row in (0, 999, 1_000, 1_700, 2_498, 2_499):
        assert await read(part, found[row].position) == found[row + 1 :]
    pq.write_table(pa.table({"n": range(1, 2_501)}), path)
    with pytest.raises(DataError, match="is not the file whose records were fed up to row 1700"):
        await read(part, found[1_700].position)
    with pytest.raises(DataError, match=r"must be a Parquet file, and cannot be read as one"):
        await read(build_file_partitions([wrote(path, b"\0" * 100 + b"PAR1")], "parquet")[0])


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"\0" * 100, b"age,label\n71,1\n64,0\n"])
async def test_what_is_no_parquet_is_said_with_what_takes_it(tmp_path: Path, content: bytes) -> None:
    path = wrote(tmp_path / "a.parquet", content)
    with pytest.raises(DataError, match="must be a Parquet file, and cannot be read as one") as said:
        await read(build_file_partitions([path])[0])
    assert str(path) in str(said.value) and "use --format csv or jsonl for other files" in str(said.value)
    assert "71" not in str(said.value).replace(str(path), "")


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(SpecError, match=r"feeding Parquet needs pyarrow: .*, pip install '\.\[audit\]'"):
        build_file_partitions([wrote(tmp_path / "a.parquet", b"")])


async def test_standard_input_is_a_pipe_or_a_file(tmp_path: Path) -> None:
    lines = b'{"seq": 5}\n{"seq": 7}\n{"seq": 7}\n{"seq": 8}'
    outlet, inlet = os.pipe()
    with os.fdopen(outlet, "rb") as pipe:
        part = _StandardInput("s", JsonLines(), "seq", pipe)
        reading = asyncio.ensure_future(read(part, 5))
        os.write(inlet, lines)
        os.close(inlet)
        found = await reading
    assert [(each.position, bool(each.reason)) for each in found] == [
        (5, False),
        (7, False),
        (7, True),
        (8, False),
    ]
    with wrote(tmp_path / "lines", lines).open("rb") as file:
        assert await read(_StandardInput("s", JsonLines(), "seq", file), 5) == found
        file.seek(0)
        counted = await read(_StandardInput("s", JsonLines(), "", file), 40)
    assert [each.position for each in counted] == [41, 42, 43, 44]
