"""Records in a stretch of bytes, lines of JSON or CSV.

A form has two methods. `header` returns how many bytes stand before the first record and are taken in, or None where they are
not all there yet; a `DataError` says why there is no header, and goes on behind the name of what has it. `cut` returns records,
and how many bytes of a stretch were used up; a stretch begins with a record, or with an empty line. `whole` says that nothing
will follow the stretch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sottovoce_client.feeding.records import NOT_UTF8, ColumnCheck, accept_any_columns
from sottovoce_core.data.cells import normalise_text
from sottovoce_core.data.columns import WRONG_VALUE_COUNT_REASON
from sottovoce_core.errors import DataError
from sottovoce_core.yaml_files import detect_format

MAX_RECORD_BYTES = 1024 * 1024
"""Bytes of a record at most."""
UNCLOSED_QUOTE, INVALID_QUOTES = "a quote that is never closed", "quotes that are not CSV"
_DELIMITERS = {",": "','", ";": "';'", "\t": "$'\\t'", "|": "'|'"}
"""Those that are usual, as a shell takes them."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some programs write before UTF-8."""


@dataclass(frozen=True, slots=True)
class ParsedRecord:
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

    def read_header(self, stretch: bytes, misfit: ColumnCheck = accept_any_columns, *, is_complete: bool) -> int | None:
        if not (stretch or is_complete):
            return None
        if (found := detect_format(stretch)) and "JSON" not in found:
            raise DataError(f"must have a JSON object on each line, and looks like {found}")
        return 0

    def split_records(self, stretch: bytes, *, is_complete: bool) -> tuple[Sequence[ParsedRecord], int]:
        found, at = list[ParsedRecord](), 0
        while (line := _line(stretch, at, whole=is_complete)) is not None:
            end, after = line
            if stretch[at:end].strip():
                found.append(ParsedRecord(at, end, stretch[at:end].removeprefix(_BYTE_ORDER_MARK)))
            at = after
        return found, at


@dataclass(slots=True)
class Csv:
    """Values with a delimiter between them, under a header.

    Attributes:
        delimiter: one character.
        names: of the columns; empty until the header was read.
    """

    delimiter: str = ","
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise DataError(
                f"--delimiter must be one character that is neither a quote nor a line's end, got {self.delimiter!r}"
            )

    def read_header(self, stretch: bytes, misfit: ColumnCheck = accept_any_columns, *, is_complete: bool) -> int | None:
        at = 0
        if other := detect_format(stretch):
            raise DataError(f"must begin with a line of column names, and looks like {other}")
        while (line := _line(stretch, at, whole=is_complete)) is not None and not stretch[at : line[0]].removeprefix(
            _BYTE_ORDER_MARK
        ).strip():
            at = line[1]
        found = self._record(stretch, at, whole=is_complete)
        if found is None:
            if is_complete or len(stretch) - at > MAX_RECORD_BYTES:
                raise DataError("must begin with a line of column names, and has none")
            return None
        values, end, after = found
        names = [normalise_text(each) for each in values] if isinstance(values, list) else []
        if names and (why := misfit(names)):
            raise DataError(f"{why}{self._other_delimiter(stretch[at:end], misfit)}")
        if not names or len(set(names)) < len(names) or not all(names):
            raise DataError(
                f"must begin with a line of column names that differ: these do not, or are no CSV in UTF-8"
                f"{self._other_delimiter(stretch[at:end], misfit)}"
            )
        self.names = names
        return after

    def _other_delimiter(self, header: bytes, misfit: ColumnCheck) -> str:
        """What to do about a header that has something else between its names; empty: nothing else is there."""
        for sign, called in _DELIMITERS.items():
            other = Csv(sign)._values(header.removeprefix(_BYTE_ORDER_MARK))
            if sign != self.delimiter and isinstance(other, list) and len(other) > 1:
                if not misfit([normalise_text(each) for each in other]):
                    return f". With --delimiter {called} they fit"
                if self.delimiter.encode() not in header:
                    return f". They seem to have another delimiter: --delimiter {called}"
        return ""

    def split_records(self, stretch: bytes, *, is_complete: bool) -> tuple[Sequence[ParsedRecord], int]:
        found, at = list[ParsedRecord](), 0
        while (record := self._record(stretch, at, whole=is_complete)) is not None:
            values, end, after = record
            if isinstance(values, str):
                found.append(ParsedRecord(at, end, stretch[at:end], values))
            elif values and len(values) != len(self.names):
                found.append(ParsedRecord(at, end, stretch[at:end], WRONG_VALUE_COUNT_REASON))
            elif values:
                found.append(ParsedRecord(at, end, dict(zip(self.names, values, strict=True))))
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
                values = self._values(stretch[at:end].removeprefix(_BYTE_ORDER_MARK))
                if values is not None:
                    return values, end, after
            if after - at > MAX_RECORD_BYTES:
                break
            begin, line = after, _line(stretch, after, whole=whole)
        if first is None or (not whole and len(stretch) - at <= MAX_RECORD_BYTES):
            return None
        return UNCLOSED_QUOTE, *first

    def _values(self, record: bytes) -> list[str] | str | None:
        """Values, or why there are none; None: it goes on with the next line."""
        try:
            rows = list(
                csv.reader(io.StringIO(record.decode("utf-8"), newline=""), delimiter=self.delimiter, strict=True)
            )
        except UnicodeDecodeError:
            return NOT_UTF8
        except csv.Error:
            return None if record.count(b'"') % 2 else INVALID_QUOTES
        return rows[0] if rows else []


RecordFormat = JsonLines | Csv
