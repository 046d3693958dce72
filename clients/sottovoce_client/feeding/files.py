"""Files to feed: CSV and JSON lines, which may grow meanwhile, Parquet, and standard input."""

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
"""Formats of files by suffix."""
_MAX_READ_BYTES, _MAX_BATCH_MESSAGES = 256 * 1024, 1_024
"""Maximum number of bytes read, and of messages passed on, at once."""
_CHECK_INTERVAL_S = 0.25
_CONTEXT_BYTES = 1_024
"""Bytes before a record that identify its file."""
_CHECK_BITS = 16
_MAX_BATCH_ROWS = 1_024
_FOOTER_END_BYTES = 8
"""Bytes after a Parquet file's metadata: their length, and the magic number."""


def _encode_position(offset: int, check: int) -> int:
    """Return a position that increases with the offset in a file, and identifies the file by the content there.

    Args:
        offset: bytes or rows before it; below 2**47.
        check: checksum; its lowest 16 bits are used: another file has the same by chance once in 65,536 times.
    """
    return offset << _CHECK_BITS | (check & (1 << _CHECK_BITS) - 1)


def _decode_offset(position: int) -> int:
    """Return the offset of a position."""
    return position >> _CHECK_BITS


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Work on a file in a thread, which has always ended when this returns: only then may the file be closed."""
    future = asyncio.get_running_loop().run_in_executor(None, partial(work, *arguments))
    try:
        return await asyncio.shield(future)
    finally:
        await asyncio.wait([future])


def _require_file(path: Path) -> None:
    """Reject a path that is not a file: opening a pipe would wait forever.

    Raises:
        DataError: there is none, or it is something else.
    """
    if not path.exists():
        raise DataError(f"there is no file {path} (searched at {path.absolute()})")
    if path.is_dir():
        raise DataError(f"{path} is a folder: name the files in it")
    if not path.is_file():
        raise DataError(f"{path} is not a file: feed a pipe by `sottovoce feed -`")


class _Lines(ABC):
    """Lines from an offset on.

    Args:
        display_name: their name in messages.
        record_format: format of the records.
    """

    def __init__(self, display_name: object, record_format: RecordFormat) -> None:
        self._display_name, self._record_format = display_name, record_format
        self._rest, self._offset, self._context = b"", 0, b""
        """Unused bytes that were read, their offset, and the bytes before them."""
        self._has_ended, self._replacement_error = False, ""

    @abstractmethod
    async def _read_more(self) -> None:
        """Read on; raise `DataError` where the content has changed."""

    @abstractmethod
    def _build_message(self, record: ParsedRecord, stretch: bytes) -> SourceMessage:
        """Build the message of a record; `stretch` begins with the bytes before the unused ones."""

    async def begin(self, column_check: ColumnCheck) -> int:
        """Skip the header; return a checksum of it.

        Raises:
            DataError: it is not valid, or its columns are not those of records.
        """
        try:
            while (
                used_bytes := self._record_format.read_header(self._rest, column_check, is_complete=self._has_ended)
            ) is None:
                await self._read_more()
        except DataError as error:
            raise DataError(f"{self._display_name} {error}") from None
        check = zlib.crc32(self._rest[:used_bytes])
        self._consume(used_bytes)
        self._context = b""
        return check

    async def messages(self) -> AsyncIterator[Sequence[SourceMessage]]:
        """Yield the following messages, a few at a time."""
        while True:
            for messages in self._split_messages():
                yield messages
            if self._replacement_error:
                raise DataError(self._replacement_error)
            if self._has_ended:
                return
            if len(self._rest) > 2 * MAX_RECORD_BYTES:
                raise DataError(
                    f"{self._display_name}: the line at byte {self._offset} has no end within {2 * MAX_RECORD_BYTES:,} bytes"
                )
            await self._read_more()

    def _split_messages(self) -> Iterator[Sequence[SourceMessage]]:
        """Yield the messages in the bytes read so far."""
        found, used_bytes = self._record_format.split_records(self._rest, is_complete=self._has_ended)
        stretch = self._context + self._rest
        messages = [self._build_message(each, stretch) for each in found]
        self._consume(used_bytes)
        for first in range(0, len(messages), _MAX_BATCH_MESSAGES):
            yield messages[first : first + _MAX_BATCH_MESSAGES]

    def _consume(self, used_bytes: int) -> None:
        """Mark bytes as used."""
        if used_bytes:
            self._context = (self._context + self._rest[:used_bytes])[-_CONTEXT_BYTES:]
            self._rest, self._offset = self._rest[used_bytes:], self._offset + used_bytes


class _FileLines(_Lines):
    """Lines of a file, to its end or forever.

    A position is the offset of a record, with a checksum of it, of the bytes before it and the header.
    """

    def __init__(self, path: Path, file: BinaryIO, record_format: RecordFormat, *, follow: bool) -> None:
        super().__init__(path, record_format)
        self._path, self._file, self._follow, self._header = path, file, follow, 0

    async def seek_after(self, after: int, column_check: ColumnCheck) -> None:
        """Go to the record after a position; -1: to the first.

        Raises:
            DataError: its record is not there any more: this is another file.
        """
        self._header = await self.begin(column_check)
        if after < 0:
            return
        offset, used_bytes = _decode_offset(after), self._offset
        if used_bytes <= offset < os.fstat(self._file.fileno()).st_size:
            begin = max(used_bytes, offset - _CONTEXT_BYTES)
            self._file.seek(begin)
            stretch = self._file.read(offset - begin + 2 * MAX_RECORD_BYTES)
            self._context, self._rest, self._offset = stretch[: offset - begin], stretch[offset - begin :], offset
            self._has_ended = False
            found, _ = self._record_format.split_records(self._rest, is_complete=True)
            if found and found[0].begin == 0 and self._position(found[0], self._context + self._rest) == after:
                self._consume(found[0].end)
                for each in (b"\r", b"\n"):  # line end of the last fed record
                    if self._rest.startswith(each):
                        self._consume(1)
                return
        raise DataError(
            f"{self._path} is not the file whose records were fed up to byte {offset}: its content differs. Restore the "
            "old one, or feed this one under another --source, and all of it is learned"
        )

    def _build_message(self, record: ParsedRecord, stretch: bytes) -> SourceMessage:
        return SourceMessage(record.body, self._position(record, stretch), record.reason)

    def _position(self, record: ParsedRecord, stretch: bytes) -> int:
        begin, end = len(self._context) + record.begin, len(self._context) + record.end
        check = zlib.crc32(memoryview(stretch)[max(0, begin - _CONTEXT_BYTES) : end], self._header)
        return _encode_position(self._offset + record.begin, check)

    async def _read_more(self) -> None:
        """Read on; at the end of a followed file, wait until it grows.

        Raises:
            DataError: it was cut or replaced.
        """
        if self._follow:
            self._require_unchanged()
        stretch = await _run_in_thread(self._file.read, _MAX_READ_BYTES)
        if stretch:
            self._rest += stretch
        elif not self._follow:
            self._has_ended = True
        else:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait until a file is longer or shorter, or was replaced."""
        own, path = self._file.fileno(), self._path
        read = self._offset + len(self._rest)
        while os.fstat(own).st_size == read:
            try:
                current = path.stat()
            except FileNotFoundError:  # moved, and the next one does not exist yet
                current = os.fstat(own)
            if not os.path.samestat(current, os.fstat(own)) and os.fstat(own).st_size == read:
                self._has_ended = True
                self._replacement_error = (
                    f"{path} was replaced by another file: the old one was read to its end. Feed the new one under another "
                    "--source, or give every file its own name"
                )
                return
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def _require_unchanged(self) -> None:
        """Check that the bytes already read are unchanged.

        Raises:
            DataError: they have changed.
        """
        own, known, read = self._file.fileno(), self._context + self._rest, self._offset + len(self._rest)
        if os.fstat(own).st_size < read or os.pread(own, len(known), read - len(known)) != known:
            raise DataError(
                f"{self._path} was cut or rewritten after byte {self._offset} was read: feed its current content under "
                "another --source, and all of it is learned"
            )


@dataclass(slots=True)
class _FilePartition:
    """File to feed, a partition named after it.

    Attributes:
        path: path of the file.
        column_check: returns why columns are not those of records.
    """

    path: Path
    column_check: ColumnCheck = field(default=accept_any_columns, init=False)

    @property
    def name(self) -> str:
        return self.path.name

    async def acknowledge(self, position: int) -> None:
        """Do nothing: the file stays as it is."""


@dataclass(slots=True)
class _LinesPartition(_FilePartition):
    """File of lines.

    Attributes:
        record_format: format of its records.
        follow: wait for more at its end.
    """

    record_format: RecordFormat
    follow: bool

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        with file:
            lines = _FileLines(self.path, file, self.record_format, follow=self.follow)
            await lines.seek_after(after, self.column_check)
            async for messages in lines.messages():
                yield messages


@dataclass(slots=True)
class _ParquetPartition(_FilePartition):
    """Parquet file. A position is the number of a row, with a checksum of the file's footer.

    Attributes:
        parquet: module `pyarrow.parquet`.
    """

    parquet: Any

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        try:
            file = await _run_in_thread(self.parquet.ParquetFile, self.path)
            check = await _run_in_thread(self._compute_checksum, file.metadata.serialized_size)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors, and quote no values
            raise DataError(
                f"{self.path} must be a Parquet file, and cannot be read as one ({type(error).__name__}): "
                "use --format csv or jsonl for other files"
            ) from None
        with file:
            if why := self.column_check([normalise_text(name) for name in file.schema_arrow.names]):
                raise DataError(f"{self.path} {why}")
            row = -1 if after < 0 else _decode_offset(after)
            if after >= 0 and (_encode_position(row, check) != after or row >= file.metadata.num_rows):
                raise DataError(
                    f"{self.path} is not the file whose records were fed up to row {row}. Restore the old one, or feed this "
                    "one under another --source, and all of it is learned"
                )
            first = 0
            try:
                for group in range(file.metadata.num_row_groups):
                    end = first + file.metadata.row_group(group).num_rows
                    if row + 1 < end:
                        batches = file.iter_batches(batch_size=_MAX_BATCH_ROWS, row_groups=[group], use_threads=False)
                        while (batch := await _run_in_thread(next, batches, None)) is not None:
                            records = enumerate(await _run_in_thread(batch.to_pylist), first)
                            first += batch.num_rows
                            if found := [
                                SourceMessage(each, _encode_position(at, check)) for at, each in records if at > row
                            ]:
                                yield found
                    first = end
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {self.path} from row {first} on: {type(error).__name__}") from None

    def _compute_checksum(self, size: int) -> int:
        """Return a checksum of the footer, which has the layout of the file."""
        with self.path.open("rb") as file:
            file.seek(-size - _FOOTER_END_BYTES, os.SEEK_END)
            return zlib.crc32(file.read())


class _InputLines(_Lines):
    """Lines of standard input; positions are numbered consecutively or read from a field."""

    def __init__(self, record_format: RecordFormat, counter: PositionCounter, file: BinaryIO) -> None:
        super().__init__("standard input", record_format)
        self._counter, self._descriptor = counter, file.fileno()
        kind = os.fstat(self._descriptor).st_mode
        self._waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(self._descriptor)

    def _build_message(self, record: ParsedRecord, stretch: bytes) -> SourceMessage:
        return self._counter.number_message(record.body, record.reason)

    async def _read_more(self) -> None:
        """Read on; cancellable while nothing arrives."""
        if self._waits:  # a regular file never blocks
            ready = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._descriptor, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self._descriptor)
            stretch = os.read(self._descriptor, _MAX_READ_BYTES)
        else:
            stretch = await asyncio.to_thread(os.read, self._descriptor, _MAX_READ_BYTES)
        self._rest, self._has_ended = self._rest + stretch, not stretch


@dataclass(slots=True)
class _StandardInput:
    """Lines that arrive once, and cannot be read again.

    Attributes:
        name: name under which the learner counts them.
        record_format: format of the records.
        position: field with a record's position; empty: numbered consecutively from the learner's position.
        file: file to read from.
        is_single_pass: unfed lines are lost.
        column_check: returns why columns are not those of records.
    """

    name: str
    record_format: RecordFormat
    position: str = ""
    file: BinaryIO = field(default_factory=lambda: sys.stdin.buffer)
    is_single_pass: bool = field(default=True, init=False)
    column_check: ColumnCheck = field(default=accept_any_columns, init=False)

    async def acknowledge(self, position: int) -> None:
        """Do nothing: standard input cannot be read again."""

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        lines = _InputLines(self.record_format, PositionCounter(self.position, after), self.file)
        await lines.begin(self.column_check)
        async for messages in lines.messages():
            yield messages


def infer_format(paths: Sequence[str], given: str | None = None) -> str:
    """Return the format of files, by their suffixes or as given.

    Raises:
        SpecError: a suffix is unknown, or they differ.
    """
    found = {each: given or FORMATS.get(Path(each).suffix.lower(), "") for each in paths}
    if unknown := [each for each, kind in found.items() if not kind]:
        raise SpecError(
            f"SOURCE must end in one of {', '.join(FORMATS)}, got {unknown[0]!r}: give its format by --format"
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
    """Build a partition for each file. Of Parquet, memory holds a row group's page at a time.

    Args:
        paths: paths with different names.
        kind: their format, `csv` (with a header, in UTF-8), `jsonl` or `parquet`; empty: by suffix.
        delimiter: delimiter of CSV values.
        follow: wait for more at the end of lines, and for the end of an incomplete line; else that is a line.
        excluded_path: file that must not be fed; None: none.

    Raises:
        DataError: some are not files; the error names each; or the delimiter is not valid.
        SpecError: one of them is `excluded_path`, or pyarrow is not installed.
    """
    errors = list[str]()
    for path in paths:
        try:
            _require_file(path)
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    if excluded_path is not None and excluded_path.exists() and any(map(excluded_path.samefile, paths)):
        raise SpecError(f"--dead-letters must be another file than those that are fed, got {excluded_path}")
    if (kind := kind or infer_format([str(path) for path in paths])) == "parquet":
        parquet = import_optional("pyarrow.parquet", "pyarrow", "feeding Parquet")
        return [_ParquetPartition(path, parquet) for path in paths]
    record_format = Csv(delimiter) if kind == "csv" else JsonLines()
    return [_LinesPartition(path, record_format, follow) for path in paths]


def build_standard_input(name: str, kind: str, delimiter: str = ",", position: str = "") -> _StandardInput:
    """Build the partition of standard input, as CSV or JSON lines.

    Raises:
        SpecError: it has another format.
    """
    if kind not in ("csv", "jsonl"):
        raise SpecError(f"--format of standard input must be csv or jsonl, got {kind}: write it to a file first")
    return _StandardInput(name, Csv(delimiter) if kind == "csv" else JsonLines(), position)
