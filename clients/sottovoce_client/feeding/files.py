"""Files that are fed, CSV and JSON lines, which may grow meanwhile, and Parquet; and standard input."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sottovoce_client.feeding.formats import MAX_RECORD_BYTES, Csv, JsonLines, ParsedRecord, RecordFormat
from sottovoce_client.feeding.records import (
    ColumnCheck,
    PositionCounter,
    SourceMessage,
    SourcePartition,
    accept_any_columns,
)
from sottovoce_core.data.cells import normalise_text
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.optional import import_optional

T = TypeVar("T")

FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Formats of files by their endings."""
_MAX_READ_BYTES, _MAX_BATCH_MESSAGES = 256 * 1024, 1_024
"""Bytes that are read, and messages that are handed on, at once."""
_CHECK_INTERVAL_S = 0.25
_CONTEXT_BYTES = 1_024
"""Bytes before a record that tell its file from others."""
_CHECK_BITS = 16
_MAX_BATCH_ROWS = 1_024
_FOOTER_END_BYTES = 8
"""Bytes behind a Parquet file's metadata: their length, and the mark of the format."""


def _position_of(place: int, check: int) -> int:
    """A position that rises with a place in a file, and says by what stands there which file it is.

    Args:
        place: bytes or rows before it; below 2**47.
        check: a checksum, of which the lowest 16 bits are taken: another file has the same by chance once in 65,536 times.
    """
    return place << _CHECK_BITS | (check & (1 << _CHECK_BITS) - 1)


def _place_of(position: int) -> int:
    """Where a position is."""
    return position >> _CHECK_BITS


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Work on a file in a thread, which has ended when this does, however it does: only then the file may be closed."""
    working = asyncio.get_running_loop().run_in_executor(None, partial(work, *arguments))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.wait([working])


def _require_file(path: Path) -> None:
    """Refuse what is no file: opening a pipe would wait for ever.

    Raises:
        DataError: there is none, or it is something else.
    """
    if not path.exists():
        raise DataError(f"there is no file {path} (looked for at {path.absolute()})")
    if path.is_dir():
        raise DataError(f"{path} is a folder: name the files in it")
    if not path.is_file():
        raise DataError(f"{path} is no file: what comes in a pipe is fed by `sottovoce feed -`")


class _Lines(ABC):
    """Lines that come, from some place on.

    Args:
        what: they are called in messages.
        form: how records are written.
    """

    def __init__(self, what: object, form: RecordFormat) -> None:
        self._what, self._form = what, form
        self._rest, self._at, self._before = b"", 0, b""
        """What was read and not used, where that begins, and what is before it."""
        self._ended, self._gone = False, ""

    @abstractmethod
    async def _more(self) -> None:
        """Read on; raises `DataError` where what is there is not what it should be."""

    @abstractmethod
    def _message(self, cut: ParsedRecord, stretch: bytes) -> SourceMessage:
        """Of a record; a stretch begins with what stands before the rest."""

    async def begin(self, misfit: ColumnCheck) -> int:
        """Go behind the header; returns a checksum of it.

        Raises:
            DataError: it is none, or its columns are not those of records.
        """
        try:
            while (used := self._form.read_header(self._rest, misfit, is_complete=self._ended)) is None:
                await self._more()
        except DataError as error:
            raise DataError(f"{self._what} {error}") from None
        check = zlib.crc32(self._rest[:used])
        self._use(used)
        self._before = b""
        return check

    async def messages(self) -> AsyncIterator[Sequence[SourceMessage]]:
        """What follows, a few at a time."""
        while True:
            for messages in self._cut():
                yield messages
            if self._gone:
                raise DataError(self._gone)
            if self._ended:
                return
            if len(self._rest) > 2 * MAX_RECORD_BYTES:
                raise DataError(
                    f"{self._what}: the line at byte {self._at} has no end within {2 * MAX_RECORD_BYTES:,} bytes: these are no lines"
                )
            await self._more()

    def _cut(self) -> Iterator[Sequence[SourceMessage]]:
        """What has been read, as messages."""
        found, used = self._form.split_records(self._rest, is_complete=self._ended)
        stretch = self._before + self._rest
        made = [self._message(each, stretch) for each in found]
        self._use(used)
        for first in range(0, len(made), _MAX_BATCH_MESSAGES):
            yield made[first : first + _MAX_BATCH_MESSAGES]

    def _use(self, used: int) -> None:
        """So many bytes of the rest are done with."""
        if used:
            self._before = (self._before + self._rest[:used])[-_CONTEXT_BYTES:]
            self._rest, self._at = self._rest[used:], self._at + used


class _FileLines(_Lines):
    """Lines of a file, to its end or for ever.

    A position is where a record begins, and a checksum of it, of what is before it and the header.
    """

    def __init__(self, path: Path, file: BinaryIO, form: RecordFormat, *, follow: bool) -> None:
        super().__init__(path, form)
        self._path, self._file, self._follow, self._header = path, file, follow, 0

    async def go_behind(self, after: int, misfit: ColumnCheck) -> None:
        """Go to the record behind a position; -1: to the first.

        Raises:
            DataError: that one is not there any more: this is another file.
        """
        self._header = await self.begin(misfit)
        if after < 0:
            return
        place, used = _place_of(after), self._at
        if used <= place < os.fstat(self._file.fileno()).st_size:
            begin = max(used, place - _CONTEXT_BYTES)
            self._file.seek(begin)
            stretch = self._file.read(place - begin + 2 * MAX_RECORD_BYTES)
            self._before, self._rest, self._at = stretch[: place - begin], stretch[place - begin :], place
            self._ended = False
            found, _ = self._form.split_records(self._rest, is_complete=True)
            if found and found[0].begin == 0 and self._position(found[0], self._before + self._rest) == after:
                self._use(found[0].end)
                for each in (b"\r", b"\n"):  # which end the record that was fed last
                    if self._rest.startswith(each):
                        self._use(1)
                return
        raise DataError(
            f"{self._path} is not the file whose records were fed up to byte {place}: what stands there differs. Put the old "
            "one back, or feed this one under another --source, and all of it is learned"
        )

    def _message(self, cut: ParsedRecord, stretch: bytes) -> SourceMessage:
        return SourceMessage(cut.body, self._position(cut, stretch), cut.reason)

    def _position(self, cut: ParsedRecord, stretch: bytes) -> int:
        begin, end = len(self._before) + cut.begin, len(self._before) + cut.end
        check = zlib.crc32(memoryview(stretch)[max(0, begin - _CONTEXT_BYTES) : end], self._header)
        return _position_of(self._at + cut.begin, check)

    async def _more(self) -> None:
        """Read on; at the end of a file that is followed, wait until there is more.

        Raises:
            DataError: it was cut or replaced.
        """
        if self._follow:
            self._require_same()
        stretch = await _in_thread(self._file.read, _MAX_READ_BYTES)
        if stretch:
            self._rest += stretch
        elif not self._follow:
            self._ended = True
        else:
            await self._wait()

    async def _wait(self) -> None:
        """Until a file is longer or shorter; or it is known that it never will be."""
        own, path = self._file.fileno(), self._path
        read = self._at + len(self._rest)
        while os.fstat(own).st_size == read:
            try:
                there = path.stat()
            except FileNotFoundError:  # moved away, and the next one is not there yet
                there = os.fstat(own)
            if not os.path.samestat(there, os.fstat(own)) and os.fstat(own).st_size == read:
                self._ended = True
                self._gone = (
                    f"{path} was replaced by another file: the old one was read to its end. Feed the new one under another "
                    "--source, or let every file have a name of its own"
                )
                return
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def _require_same(self) -> None:
        """What was read stands where it did.

        Raises:
            DataError: it does not.
        """
        own, known, read = self._file.fileno(), self._before + self._rest, self._at + len(self._rest)
        if os.fstat(own).st_size < read or os.pread(own, len(known), read - len(known)) != known:
            raise DataError(
                f"{self._path} was cut or written anew after byte {self._at} was read: feed what it holds now under "
                "another --source, and all of it is learned"
            )


@dataclass(slots=True)
class _File:
    """A file that is fed, a part by its name.

    Attributes:
        path: of the file.
        misfit: why columns are not those of records.
    """

    path: Path
    column_check: ColumnCheck = field(default=accept_any_columns, init=False)

    @property
    def name(self) -> str:
        return self.path.name

    async def acknowledge(self, position: int) -> None:
        """The file stays as it is."""


@dataclass(slots=True)
class _LinesOfFile(_File):
    """A file of lines.

    Attributes:
        form: how its records are written.
        follow: wait for more at its end.
    """

    form: RecordFormat
    follow: bool

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        with file:
            lines = _FileLines(self.path, file, self.form, follow=self.follow)
            await lines.go_behind(after, self.column_check)
            async for messages in lines.messages():
                yield messages


@dataclass(slots=True)
class _RowsOfFile(_File):
    """A Parquet file. A position is the number of a row, and a checksum of the file's footer.

    Attributes:
        parquet: `pyarrow.parquet`.
    """

    parquet: Any

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        try:
            file = await _in_thread(self.parquet.ParquetFile, self.path)
            check = await _in_thread(self._check, file.metadata.serialized_size)
        except (OSError, ValueError) as error:  # its own errors are ValueErrors, and quote no values
            raise DataError(
                f"{self.path} must be a Parquet file, and cannot be read as one ({type(error).__name__}): "
                "--format csv or jsonl takes the others"
            ) from None
        with file:
            if why := self.column_check([normalise_text(name) for name in file.schema_arrow.names]):
                raise DataError(f"{self.path} {why}")
            row = -1 if after < 0 else _place_of(after)
            if after >= 0 and (_position_of(row, check) != after or row >= file.metadata.num_rows):
                raise DataError(
                    f"{self.path} is not the file whose records were fed up to row {row}. Put the old one back, or feed this "
                    "one under another --source, and all of it is learned"
                )
            first = 0
            try:
                for group in range(file.metadata.num_row_groups):
                    end = first + file.metadata.row_group(group).num_rows
                    if row + 1 < end:
                        batches = file.iter_batches(batch_size=_MAX_BATCH_ROWS, row_groups=[group], use_threads=False)
                        while (batch := await _in_thread(next, batches, None)) is not None:
                            records = enumerate(await _in_thread(batch.to_pylist), first)
                            first += batch.num_rows
                            if found := [
                                SourceMessage(each, _position_of(at, check)) for at, each in records if at > row
                            ]:
                                yield found
                    first = end
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {self.path} from row {first} on: {type(error).__name__}") from None

    def _check(self, size: int) -> int:
        """A checksum of the footer, which says where everything is and how much."""
        with self.path.open("rb") as file:
            file.seek(-size - _FOOTER_END_BYTES, os.SEEK_END)
            return zlib.crc32(file.read())


class _InputLines(_Lines):
    """Lines of standard input; positions are of no bytes, but counted on or said by a field."""

    def __init__(self, form: RecordFormat, numbered: PositionCounter, file: BinaryIO) -> None:
        super().__init__("standard input", form)
        self._numbered, self._number = numbered, file.fileno()
        kind = os.fstat(self._number).st_mode
        self._waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(self._number)

    def _message(self, cut: ParsedRecord, stretch: bytes) -> SourceMessage:
        return self._numbered.number_message(cut.body, cut.reason)

    async def _more(self) -> None:
        """Read on; that can be given up while nothing comes."""
        if self._waits:  # of a file nobody ever has to
            ready = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._number, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self._number)
            stretch = os.read(self._number, _MAX_READ_BYTES)
        else:
            stretch = await asyncio.to_thread(os.read, self._number, _MAX_READ_BYTES)
        self._rest, self._ended = self._rest + stretch, not stretch


@dataclass(slots=True)
class _StandardInput:
    """Lines that come once, and cannot be read again.

    Attributes:
        name: under which the learner counts them.
        form: how records are written.
        position: field that says where a record stands; empty: they are counted on from where the learner stands.
        file: where they come from.
        once: what was read and is not fed is lost.
        misfit: why columns are not those of records.
    """

    name: str
    form: RecordFormat
    position: str = ""
    file: BinaryIO = field(default_factory=lambda: sys.stdin.buffer)
    is_single_pass: bool = field(default=True, init=False)
    column_check: ColumnCheck = field(default=accept_any_columns, init=False)

    async def acknowledge(self, position: int) -> None:
        """What was read is gone."""

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        lines = _InputLines(self.form, PositionCounter(self.position, after), self.file)
        await lines.begin(self.column_check)
        async for messages in lines.messages():
            yield messages


def infer_format(paths: Sequence[str], given: str | None = None) -> str:
    """The format of files, by their endings or as it was given.

    Raises:
        SpecError: an ending does not say it, or they differ.
    """
    found = {each: given or FORMATS.get(Path(each).suffix.lower(), "") for each in paths}
    if unknown := [each for each, kind in found.items() if not kind]:
        raise SpecError(
            f"SOURCE must end in one of {', '.join(FORMATS)}, got {unknown[0]!r}: say its format by --format"
        )
    if len(kinds := sorted(set(found.values()))) > 1:
        raise SpecError(f"SOURCE must be files of one format, got {' and '.join(kinds)}: start a feeder for each")
    return kinds[0]


def build_file_partitions(
    paths: Sequence[Path],
    kind: str = "",
    *,
    delimiter: str = ",",
    follow: bool = False,
    excluded_path: Path | None = None,
) -> list[SourcePartition]:
    """Files, each a part by its name. Of Parquet, memory holds a row group's page at a time.

    Args:
        paths: each with a name of its own.
        kind: their format, `csv` (with a header, in UTF-8), `jsonl` or `parquet`; empty: as they end.
        delimiter: between values of CSV.
        follow: wait for more at the end of lines, and for the end of half a line; else half a line is one.
        apart: file that must be none of them; None: there is none.

    Raises:
        DataError: some are no files, each of which is named; or there is no such delimiter.
        SpecError: one of them is `apart`, or pyarrow is not installed.
    """
    wrong = list[str]()
    for path in paths:
        try:
            _require_file(path)
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError("\n".join(wrong))
    if excluded_path is not None and excluded_path.exists() and any(map(excluded_path.samefile, paths)):
        raise SpecError(f"--dead-letters must be another file than those that are fed, got {excluded_path}")
    if (kind := kind or infer_format([str(path) for path in paths])) == "parquet":
        parquet = import_optional("pyarrow.parquet", "pyarrow", "feeding Parquet")
        return [_RowsOfFile(path, parquet) for path in paths]
    form = Csv(delimiter) if kind == "csv" else JsonLines()
    return [_LinesOfFile(path, form, follow) for path in paths]


def build_standard_input(name: str, kind: str, delimiter: str = ",", position: str = "") -> _StandardInput:
    """Standard input, as CSV or JSON lines.

    Raises:
        SpecError: it has another format.
    """
    if kind not in ("csv", "jsonl"):
        raise SpecError(f"--format of standard input must be csv or jsonl, got {kind}: write it to a file first")
    return _StandardInput(name, Csv(delimiter) if kind == "csv" else JsonLines(), position)
