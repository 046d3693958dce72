"""Parquet files, a row group at a time."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sottovoce.data.cells import normal
from sottovoce.errors import DataError
from sottovoce.optional import import_extra
from sottovoce_client.feeding.files import in_thread, place_of, position_of, require_file
from sottovoce_client.feeding.forms import anything
from sottovoce_client.feeding.source import Message, Misfit, Part

_ROWS = 1_024
_ENDS = (b"PAR1", b"PARE")
"""Of a file, and of one whose footer is encrypted."""


@dataclass(frozen=True, slots=True)
class RowsOfFile:
    """A Parquet file. A position is the number of a row, and a checksum of the file's footer.

    Attributes:
        path: of the file.
        parquet: `pyarrow.parquet`.
        misfit: why columns are not those of records.
    """

    path: Path
    parquet: Any
    misfit: Misfit = anything

    def held(self, misfit: Misfit) -> RowsOfFile:
        return replace(self, misfit=misfit)

    @property
    def name(self) -> str:
        return self.path.name

    async def keep(self, position: int) -> None:
        """The file stays as it is."""

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        require_file(self.path)
        try:
            if (check := await in_thread(self._check)) is None:
                raise DataError(
                    f"{self.path} must be a Parquet file, which ends in PAR1, got one that does not. `sottovoce feed csv` takes "
                    "CSV, `sottovoce feed jsonl` a JSON object a line"
                )
            file = await in_thread(self.parquet.ParquetFile, self.path)
        except (OSError, ValueError) as error:  # its own errors are ValueErrors, and quote no values
            raise DataError(f"cannot read {self.path} as Parquet: {type(error).__name__}") from None
        with file:
            if why := self.misfit([normal(name) for name in file.schema_arrow.names]):
                raise DataError(f"{self.path} {why}")
            row = -1 if after < 0 else place_of(after)
            if after >= 0 and (position_of(row, check) != after or row >= file.metadata.num_rows):
                raise DataError(
                    f"{self.path} is not the file whose records were fed up to row {row}. Put the old one back, or feed this "
                    "one under another --source, and all of it is learned"
                )
            first, groups = _groups_from(file.metadata, row + 1)
            batches = file.iter_batches(batch_size=_ROWS, row_groups=groups, use_threads=False) if groups else iter(())
            try:
                while (batch := await in_thread(next, batches, None)) is not None:
                    records = await in_thread(batch.to_pylist)
                    numbered = enumerate(records, first)
                    first += len(records)
                    found = [Message(record, position_of(at, check)) for at, record in numbered if at > row]
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


def parquet_files(paths: Sequence[Path]) -> list[Part]:
    """Parquet files; memory holds a row group's page at a time.

    Args:
        paths: each with a name of its own, for that is its source's.

    Raises:
        SpecError: pyarrow is not installed.
    """
    parquet = import_extra("pyarrow.parquet", "pyarrow", "feeding Parquet")
    return [RowsOfFile(path, parquet) for path in paths]
