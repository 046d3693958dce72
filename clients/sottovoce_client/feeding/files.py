"""Files that are fed: CSV and JSON lines, which may grow meanwhile, and Parquet."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sottovoce_client.feeding.forms import LONGEST, Csv, Cut, Form, JsonLines, StandardInput, anything
from sottovoce_client.feeding.records import Message, Misfit, Part, Unreadable
from sottovoce_core.data.cells import normal
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.optional import import_extra

T = TypeVar("T")

FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Formats of files by their endings."""
_AT_ONCE, _MESSAGES = 256 * 1024, 1_024
"""Bytes that are read, and messages that are handed on, at once."""
_LOOK_S = 0.25
_CONTEXT = 1_024
"""Bytes before a record that tell its file from others."""
_CHECK_BITS = 16
_ROWS = 1_024
_ENDS = (b"PAR1", b"PARE")
"""Of a file, and of one whose footer is encrypted."""


def _position_of(place: int, check: int) -> int:
    """A position that rises with a place in a file, and says by what stands there which file it is.

    Args:
        place: bytes or rows before it; below 2**47.
        check: a checksum, of which the lowest 16 bits are taken: another file has the same by chance once in 65,536 times.
    """
    return place << _CHECK_BITS | (check & (1 << _CHECK_BITS) - 1)


def place_of(position: int) -> int:
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


@dataclass(frozen=True, slots=True)
class _LinesOfFile:
    """A file of lines. A position is where a record begins, and a checksum of it, of what is before it and the header.

    Attributes:
        path: of the file.
        form: how its records are written.
        follow: wait for more at its end.
        misfit: why columns are not those of records.
    """

    path: Path
    form: Form
    follow: bool
    misfit: Misfit = anything

    def held(self, misfit: Misfit) -> _LinesOfFile:
        return replace(self, misfit=misfit)

    @property
    def name(self) -> str:
        return self.path.name

    async def keep(self, position: int) -> None:
        """The file stays as it is."""

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        try:
            _require_file(self.path)
            file = self.path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        with file:
            reading = _Reading(self, file, self.form.anew(self.misfit))
            await reading.begin(after)
            async for messages in reading.messages():
                yield messages


class _Reading:
    """A file from some place on, to its end or for ever."""

    def __init__(self, of: _LinesOfFile, file: BinaryIO, form: Form) -> None:
        self._of, self._file, self._form = of, file, form
        self._at, self._rest, self._before = (
            0,
            b"",
            b"",
        )  # what was read and not used, where that begins, what is before it
        self._header, self._ended, self._gone = 0, False, ""

    async def begin(self, after: int) -> None:
        """Go to the record behind one.

        Raises:
            DataError: that one is not there any more: this is another file.
        """
        while (used := self._headed()) is None:
            await self._more()
        self._header = zlib.crc32(self._rest[:used])
        self._use(used)
        self._before = b""
        if after < 0:
            return
        place, size = place_of(after), os.fstat(self._file.fileno()).st_size
        if used <= place < size:
            begin = max(used, place - _CONTEXT)
            self._file.seek(begin)
            stretch = self._file.read(place - begin + 2 * LONGEST)
            self._before, self._rest, self._at = stretch[: place - begin], stretch[place - begin :], place
            self._ended = False
            found, _ = self._form.cut(self._rest, whole=True)
            if found and found[0].begin == 0 and self._position(found[0], self._before + self._rest) == after:
                self._use(found[0].end)
                self._trim_line_end()
                return
        raise DataError(
            f"{self._of.path} is not the file whose records were fed up to byte {place}: what stands there differs. Put the old "
            "one back, or feed this one under another --source, and all of it is learned"
        )

    def _headed(self) -> int | None:
        try:
            return self._form.header(self._rest, whole=self._ended)
        except DataError as error:
            raise DataError(f"{self._of.path} {error}") from None

    async def messages(self) -> AsyncIterator[Sequence[Message]]:
        """What follows, a few at a time."""
        while True:
            for messages in self._cut():
                yield messages
            if self._gone:
                raise DataError(self._gone)
            if self._ended:
                return
            await self._more()

    def _cut(self) -> Iterator[Sequence[Message]]:
        """What has been read, as messages."""
        found, used = self._form.cut(self._rest, whole=self._ended)
        stretch = self._before + self._rest
        made = [self._message(each, stretch) for each in found]
        self._use(used)
        for first in range(0, len(made), _MESSAGES):
            yield made[first : first + _MESSAGES]

    def _message(self, cut: Cut, stretch: bytes) -> Message:
        position = self._position(cut, stretch)
        return Unreadable(cut.body, position, cut.reason) if cut.reason else Message(cut.body, position)

    def _position(self, cut: Cut, stretch: bytes) -> int:
        """Of a record; a stretch begins with what stands before the rest."""
        begin, end = len(self._before) + cut.begin, len(self._before) + cut.end
        check = zlib.crc32(memoryview(stretch)[max(0, begin - _CONTEXT) : end], self._header)
        return _position_of(self._at + cut.begin, check)

    def _use(self, used: int) -> None:
        """So many bytes of the rest are done with."""
        if used:
            self._before = (self._before + self._rest[:used])[-_CONTEXT:]
            self._rest, self._at = self._rest[used:], self._at + used

    def _trim_line_end(self) -> None:
        """What ends the record that was fed last."""
        for each in (b"\r", b"\n"):
            if self._rest.startswith(each):
                self._use(1)

    async def _more(self) -> None:
        """Read on; at the end of a file that is followed, wait until there is more.

        Raises:
            DataError: it was cut or replaced, or what it holds is not what it should be.
        """
        if len(self._rest) > 2 * LONGEST:
            raise DataError(
                f"{self._of.path}: the line at byte {self._at} has no end within {2 * LONGEST:,} bytes: these are no lines"
            )
        if self._of.follow:
            self._require_same()
        stretch = await _in_thread(self._file.read, _AT_ONCE)
        if stretch:
            self._rest += stretch
        elif not self._of.follow:
            self._ended = True
        else:
            await self._wait()

    async def _wait(self) -> None:
        """Until a file is longer or shorter; or it is known that it never will be."""
        own, path = self._file.fileno(), self._of.path
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
            await asyncio.sleep(_LOOK_S)

    def _require_same(self) -> None:
        """What was read stands where it did.

        Raises:
            DataError: it does not.
        """
        own, known, read = self._file.fileno(), self._before + self._rest, self._at + len(self._rest)
        if os.fstat(own).st_size < read or os.pread(own, len(known), read - len(known)) != known:
            raise DataError(
                f"{self._of.path} was cut or written anew after byte {self._at} was read: feed what it holds now under "
                "another --source, and all of it is learned"
            )


@dataclass(frozen=True, slots=True)
class _RowsOfFile:
    """A Parquet file. A position is the number of a row, and a checksum of the file's footer.

    Attributes:
        path: of the file.
        parquet: `pyarrow.parquet`.
        misfit: why columns are not those of records.
    """

    path: Path
    parquet: Any
    misfit: Misfit = anything

    def held(self, misfit: Misfit) -> _RowsOfFile:
        return replace(self, misfit=misfit)

    @property
    def name(self) -> str:
        return self.path.name

    async def keep(self, position: int) -> None:
        """The file stays as it is."""

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        _require_file(self.path)
        try:
            if (check := await _in_thread(self._check)) is None:
                raise DataError(
                    f"{self.path} must be a Parquet file, which ends in PAR1, got one that does not: "
                    "--format csv or jsonl takes the others"
                )
            file = await _in_thread(self.parquet.ParquetFile, self.path)
        except (OSError, ValueError) as error:  # its own errors are ValueErrors, and quote no values
            raise DataError(f"cannot read {self.path} as Parquet: {type(error).__name__}") from None
        with file:
            if why := self.misfit([normal(name) for name in file.schema_arrow.names]):
                raise DataError(f"{self.path} {why}")
            row = -1 if after < 0 else place_of(after)
            if after >= 0 and (_position_of(row, check) != after or row >= file.metadata.num_rows):
                raise DataError(
                    f"{self.path} is not the file whose records were fed up to row {row}. Put the old one back, or feed this "
                    "one under another --source, and all of it is learned"
                )
            first, groups = _groups_from(file.metadata, row + 1)
            batches = file.iter_batches(batch_size=_ROWS, row_groups=groups, use_threads=False) if groups else iter(())
            try:
                while (batch := await _in_thread(next, batches, None)) is not None:
                    records = await _in_thread(batch.to_pylist)
                    numbered = enumerate(records, first)
                    first += len(records)
                    found = [Message(record, _position_of(at, check)) for at, record in numbered if at > row]
                    if found:
                        yield found
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {self.path} from row {first} on: {type(error).__name__}") from None

    def _check(self) -> int | None:
        """A checksum of the footer, which says where everything is and how much; None: there is none."""
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 12:
                return None
            file.seek(size - 8)
            length = int.from_bytes(file.read(4), "little")
            if file.read(4) not in _ENDS:
                return None
            file.seek(max(0, size - 8 - length))
            return zlib.crc32(file.read())


def _groups_from(metadata: Any, row: int) -> tuple[int, list[int]]:
    """Row groups with a row and those after it, and the number of their first row."""
    begin = 0
    for group in range(metadata.num_row_groups):
        end = begin + metadata.row_group(group).num_rows
        if row < end:
            return begin, list(range(group, metadata.num_row_groups))
        begin = end
    return begin, []


def format_of(paths: Sequence[str], given: str | None = None) -> str:
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


def file_parts(
    paths: Sequence[Path], kind: str = "", *, delimiter: str = ",", follow: bool = False, apart: Path | None = None
) -> list[Part]:
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
    if apart is not None and apart.exists() and any(map(apart.samefile, paths)):
        raise SpecError(f"--dead-letters must be another file than those that are fed, got {apart}")
    if (kind := kind or format_of([str(path) for path in paths])) == "parquet":
        parquet = import_extra("pyarrow.parquet", "pyarrow", "feeding Parquet")
        return [_RowsOfFile(path, parquet) for path in paths]
    form = Csv(delimiter) if kind == "csv" else JsonLines()
    return [_LinesOfFile(path, form, follow) for path in paths]


def standard_input(name: str, kind: str, delimiter: str = ",", position: str = "") -> StandardInput:
    """Standard input, as CSV or JSON lines.

    Raises:
        SpecError: it has another format.
    """
    if kind not in ("csv", "jsonl"):
        raise SpecError(f"--format of standard input must be csv or jsonl, got {kind}: write it to a file first")
    return StandardInput(name, Csv(delimiter) if kind == "csv" else JsonLines(), position)
