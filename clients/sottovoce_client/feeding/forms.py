"""Records in a stream of bytes, lines of JSON or CSV, and standard input."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Protocol

from sottovoce_client.feeding.records import NOT_UTF8, Message, Misfit, Numbered
from sottovoce_core.data.cells import normal
from sottovoce_core.data.columns import OTHER_WIDTH
from sottovoce_core.errors import DataError
from sottovoce_core.yaml_files import format_of

LONGEST = 1024 * 1024
"""Bytes of a record at most."""
NO_END, ODD_QUOTES = "a quote that is never closed", "quotes that are not CSV"
_DELIMITERS = {",": "','", ";": "';'", "\t": "$'\\t'", "|": "'|'"}
"""Those that are usual, as a shell takes them."""
_MARK = b"\xef\xbb\xbf"
"""What some programs write before UTF-8."""
_AT_ONCE = 64 * 1024
"""Bytes of standard input that are read at once."""


def anything(names: Sequence[str]) -> str:
    """Columns may be any."""
    return ""


@dataclass(frozen=True, slots=True)
class Cut:
    """A record that was found.

    Attributes:
        begin, end: the bytes that it has, without the end of its line.
        body: fields and their values, or the bytes of an object; where it cannot be read, its bytes.
        reason: why it cannot be read; empty: it can.
    """

    begin: int
    end: int
    body: Mapping[str, Any] | bytes
    reason: str = ""


class Form(Protocol):
    """How records are written."""

    def anew(self, misfit: Misfit) -> Form:
        """For another reading.

        Args:
            misfit: why columns are not those of records.
        """
        ...

    def header(self, stretch: bytes, *, whole: bool) -> int | None:
        """Bytes of what stands before the first record, and is taken in; None: it is not all there yet.

        Raises:
            DataError: it is none; the text goes on behind the name of what has it.
        """
        ...

    def cut(self, stretch: bytes, *, whole: bool) -> tuple[Sequence[Cut], int]:
        """Records, and how many bytes were used up.

        Args:
            stretch: begins with a record, or with an empty line.
            whole: nothing will follow it.
        """
        ...


def _line(stretch: bytes, at: int, *, whole: bool) -> tuple[int, int] | None:
    """Where a line ends, without and with its line feed; None: that is not there yet."""
    feed = stretch.find(b"\n", at)
    if feed < 0 and (not whole or at >= len(stretch)):
        return None
    end, after = (len(stretch), len(stretch)) if feed < 0 else (feed, feed + 1)
    return (end - 1 if end > at and stretch[end - 1] == 0x0D else end), after


@dataclass(frozen=True, slots=True)
class JsonLines:
    """An object on each line."""

    def anew(self, misfit: Misfit) -> JsonLines:
        return self

    def header(self, stretch: bytes, *, whole: bool) -> int | None:
        if not (stretch or whole):
            return None
        if (found := format_of(stretch)) and "JSON" not in found:
            raise DataError(f"must have a JSON object on each line, and looks like {found}")
        return 0

    def cut(self, stretch: bytes, *, whole: bool) -> tuple[Sequence[Cut], int]:
        found, at = list[Cut](), 0
        while (line := _line(stretch, at, whole=whole)) is not None:
            end, after = line
            if stretch[at:end].strip():
                found.append(Cut(at, end, stretch[at:end].removeprefix(_MARK)))
            at = after
        return found, at


@dataclass(slots=True)
class Csv:
    """Values with a delimiter between them, under a header.

    Attributes:
        delimiter: one character.
        misfit: why columns are not those of records.
        names: of the columns; empty until the header was read.
    """

    delimiter: str = ","
    misfit: Misfit = anything
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise DataError(
                f"--delimiter must be one character that is neither a quote nor a line's end, got {self.delimiter!r}"
            )

    def anew(self, misfit: Misfit) -> Csv:
        return Csv(self.delimiter, misfit)

    def header(self, stretch: bytes, *, whole: bool) -> int | None:
        at = 0
        if other := format_of(stretch):
            raise DataError(f"must begin with a line of column names, and looks like {other}")
        while (line := _line(stretch, at, whole=whole)) is not None and not stretch[at : line[0]].removeprefix(
            _MARK
        ).strip():
            at = line[1]
        found = self._record(stretch, at, whole=whole)
        if found is None:
            if whole or len(stretch) - at > LONGEST:
                raise DataError("must begin with a line of column names, and has none")
            return None
        values, end, after = found
        names = [normal(each) for each in values] if isinstance(values, list) else []
        if names and (why := self.misfit(names)):
            raise DataError(f"{why}{self._other_delimiter(stretch[at:end])}")
        if not names or len(set(names)) < len(names) or not all(names):
            raise DataError(
                f"must begin with a line of column names that differ: these do not, or are no CSV in UTF-8"
                f"{self._other_delimiter(stretch[at:end])}"
            )
        self.names = names
        return after

    def _other_delimiter(self, header: bytes) -> str:
        """What to do about a header that has something else between its names; empty: nothing else is there."""
        for sign, called in _DELIMITERS.items():
            other = Csv(sign)._values(header.removeprefix(_MARK))
            if sign != self.delimiter and isinstance(other, list) and len(other) > 1:
                if not self.misfit([normal(each) for each in other]):
                    return f". With --delimiter {called} they fit"
                if self.delimiter.encode() not in header:
                    return f". They seem to have another delimiter: --delimiter {called}"
        return ""

    def cut(self, stretch: bytes, *, whole: bool) -> tuple[Sequence[Cut], int]:
        found, at = list[Cut](), 0
        while (record := self._record(stretch, at, whole=whole)) is not None:
            values, end, after = record
            if isinstance(values, str):
                found.append(Cut(at, end, stretch[at:end], values))
            elif values and len(values) != len(self.names):
                found.append(Cut(at, end, stretch[at:end], OTHER_WIDTH))
            elif values:
                found.append(Cut(at, end, dict(zip(self.names, values, strict=True))))
            at = after
        return found, at

    def _record(self, stretch: bytes, at: int, *, whole: bool) -> tuple[list[str] | str, int, int] | None:
        """Values of a record, or why it has none; and where it ends, without and with its line feed. None: it does not end yet.

        A line ends a record unless a quote is open, of which there is an odd number then.
        """
        first = line = _line(stretch, at, whole=whole)
        begin, quotes = at, 0
        while line is not None:
            end, after = line
            quotes += stretch.count(b'"', begin, end)
            if begin == at or quotes % 2 == 0:
                values = self._values(stretch[at:end].removeprefix(_MARK))
                if values is not None:
                    return values, end, after
            if after - at > LONGEST:
                break
            begin, line = after, _line(stretch, after, whole=whole)
        if first is None or (not whole and len(stretch) - at <= LONGEST):
            return None
        return NO_END, *first

    def _values(self, record: bytes) -> list[str] | str | None:
        """Values, or why there are none; None: it goes on with the next line."""
        try:
            rows = list(
                csv.reader(io.StringIO(record.decode("utf-8"), newline=""), delimiter=self.delimiter, strict=True)
            )
        except UnicodeDecodeError:
            return NOT_UTF8
        except csv.Error:
            return None if record.count(b'"') % 2 else ODD_QUOTES
        return rows[0] if rows else []


@dataclass(slots=True)
class StandardInput:
    """Lines that come once, and cannot be read again.

    Attributes:
        name: under which the learner counts them.
        form: how records are written.
        position: field that says where a record stands; empty: they are counted on from where the learner stands.
        file: where they come from.
        once: what was read and is not fed is lost.
    """

    name: str
    form: Form
    position: str = ""
    file: BinaryIO = field(default_factory=lambda: sys.stdin.buffer)
    once: bool = field(default=True, init=False)

    def held(self, misfit: Misfit) -> StandardInput:
        return replace(self, form=self.form.anew(misfit))

    async def keep(self, position: int) -> None:
        """What was read is gone."""

    def _headed(self, rest: bytes, *, ended: bool) -> int | None:
        try:
            return self.form.header(rest, whole=ended)
        except DataError as error:
            raise DataError(f"standard input {error}") from None

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        numbered = Numbered(self.position, after)
        more = _reader(self.file)
        rest, headed, ended = b"", False, False
        while not ended:
            stretch = await more()
            rest, ended = rest + stretch, not stretch
            if not headed:
                used = self._headed(rest, ended=ended) if rest else None
                if used is None:
                    continue
                rest, headed = rest[used:], True
            found, used = self.form.cut(rest, whole=ended)
            if found:
                yield [numbered.message(each.body, each.reason) for each in found]
            rest = rest[used:]
            if len(rest) > 2 * LONGEST:
                raise DataError(f"a line of standard input has no end within {2 * LONGEST:,} bytes: these are no lines")


def _reader(file: BinaryIO) -> Callable[[], Awaitable[bytes]]:
    """What reads on, and can be given up while nothing comes; nothing: it has ended."""
    number, loop = file.fileno(), asyncio.get_running_loop()
    kind = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(number)):  # a file, which never lets anybody wait
        return lambda: asyncio.to_thread(os.read, number, _AT_ONCE)

    async def more() -> bytes:
        ready = asyncio.Event()
        loop.add_reader(number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(number)
        return os.read(number, _AT_ONCE)

    return more
