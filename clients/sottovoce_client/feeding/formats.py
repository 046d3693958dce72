"""Formats of records in bytes: lines of JSON, and CSV.

A format has two methods. `read_header` returns the number of bytes before the first record, or None where they are
incomplete; a `DataError` says why there is no header, and its text follows the name of the source. `split_records`
returns records, and the number of used bytes; the bytes begin with a record, or with an empty line. `is_complete` means
that nothing follows the bytes.
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
"""Maximum size of a record."""
UNCLOSED_QUOTE, INVALID_QUOTES = "a quote that is never closed", "quotes that are not CSV"
_DELIMITERS = {",": "','", ";": "';'", "\t": "$'\\t'", "|": "'|'"}
"""Usual delimiters, as written in a shell."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Byte order mark that some programs write before UTF-8."""


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """Record in a stretch of bytes.

    Attributes:
        begin, end: bytes of the record, without its line end.
        body: fields and their values, or the bytes of an object; where it cannot be read, its bytes.
        reason: why it cannot be read; empty: it can.
    """

    begin: int
    end: int
    body: Mapping[str, Any] | bytes
    reason: str = ""


def _find_line_end(stretch: bytes, at: int, *, is_complete: bool) -> tuple[int, int] | None:
    """Return the end of a line, without and with its line feed; None: it is incomplete."""
    line_feed = stretch.find(b"\n", at)
    if line_feed < 0 and (not is_complete or at >= len(stretch)):
        return None
    end, after = (len(stretch), len(stretch)) if line_feed < 0 else (line_feed, line_feed + 1)
    return (end - 1 if end > at and stretch[end - 1] == 0x0D else end), after


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Format with a JSON object on each line."""

    def read_header(
        self, stretch: bytes, column_check: ColumnCheck = accept_any_columns, *, is_complete: bool
    ) -> int | None:
        if not (stretch or is_complete):
            return None
        if (found := detect_format(stretch)) and "JSON" not in found:
            raise DataError(f"must have a JSON object on each line, and looks like {found}")
        return 0

    def split_records(self, stretch: bytes, *, is_complete: bool) -> tuple[Sequence[ParsedRecord], int]:
        found, at = list[ParsedRecord](), 0
        while (line := _find_line_end(stretch, at, is_complete=is_complete)) is not None:
            end, after = line
            if stretch[at:end].strip():
                found.append(ParsedRecord(at, end, stretch[at:end].removeprefix(_BYTE_ORDER_MARK)))
            at = after
        return found, at


@dataclass(slots=True)
class Csv:
    """Values separated by a delimiter, after a header.

    Attributes:
        delimiter: one character.
        names: names of the columns; empty until the header was read.
    """

    delimiter: str = ","
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise DataError(
                f"--delimiter must be one character that is neither a quote nor a line end, got {self.delimiter!r}"
            )

    def read_header(
        self, stretch: bytes, column_check: ColumnCheck = accept_any_columns, *, is_complete: bool
    ) -> int | None:
        at = 0
        if other := detect_format(stretch):
            raise DataError(f"must begin with a line of column names, and looks like {other}")
        while (line := _find_line_end(stretch, at, is_complete=is_complete)) is not None and not stretch[
            at : line[0]
        ].removeprefix(_BYTE_ORDER_MARK).strip():
            at = line[1]
        found = self._parse_record(stretch, at, is_complete=is_complete)
        if found is None:
            if is_complete or len(stretch) - at > MAX_RECORD_BYTES:
                raise DataError("must begin with a line of column names, got none")
            return None
        values, end, after = found
        names = [normalise_text(each) for each in values] if isinstance(values, list) else []
        if names and (why := column_check(names)):
            raise DataError(f"{why}{self._suggest_delimiter(stretch[at:end], column_check)}")
        if not names or len(set(names)) < len(names) or not all(names):
            raise DataError(
                f"must begin with a line of column names that differ: these do not, or are not CSV in UTF-8"
                f"{self._suggest_delimiter(stretch[at:end], column_check)}"
            )
        self.names = names
        return after

    def _suggest_delimiter(self, header: bytes, column_check: ColumnCheck) -> str:
        """Return a hint for a header with another delimiter; empty: there is none."""
        for candidate, shell_text in _DELIMITERS.items():
            other = Csv(candidate)._parse_values(header.removeprefix(_BYTE_ORDER_MARK))
            if candidate != self.delimiter and isinstance(other, list) and len(other) > 1:
                if not column_check([normalise_text(each) for each in other]):
                    return f". With --delimiter {shell_text} they fit"
                if self.delimiter.encode() not in header:
                    return f". They seem to have another delimiter: --delimiter {shell_text}"
        return ""

    def split_records(self, stretch: bytes, *, is_complete: bool) -> tuple[Sequence[ParsedRecord], int]:
        found, at = list[ParsedRecord](), 0
        while (record := self._parse_record(stretch, at, is_complete=is_complete)) is not None:
            values, end, after = record
            if isinstance(values, str):
                found.append(ParsedRecord(at, end, stretch[at:end], values))
            elif values and len(values) != len(self.names):
                found.append(ParsedRecord(at, end, stretch[at:end], WRONG_VALUE_COUNT_REASON))
            elif values:
                found.append(ParsedRecord(at, end, dict(zip(self.names, values, strict=True))))
            at = after
        return found, at

    def _parse_record(self, stretch: bytes, at: int, *, is_complete: bool) -> tuple[list[str] | str, int, int] | None:
        """Return the values of a record, or why it has none, and its end, without and with its line feed. None: it is incomplete.

        A line end ends a record unless a quote is open: then the number of quotes is odd.
        """
        first = line = _find_line_end(stretch, at, is_complete=is_complete)
        begin, quotes = at, 0
        while line is not None:
            end, after = line
            quotes += stretch.count(b'"', begin, end)
            if begin == at or quotes % 2 == 0:
                values = self._parse_values(stretch[at:end].removeprefix(_BYTE_ORDER_MARK))
                if values is not None:
                    return values, end, after
            if after - at > MAX_RECORD_BYTES:
                break
            begin, line = after, _find_line_end(stretch, after, is_complete=is_complete)
        if first is None or (not is_complete and len(stretch) - at <= MAX_RECORD_BYTES):
            return None
        return UNCLOSED_QUOTE, *first

    def _parse_values(self, record: bytes) -> list[str] | str | None:
        """Return values, or why there are none; None: the record continues on the next line."""
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
