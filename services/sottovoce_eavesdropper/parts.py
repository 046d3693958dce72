"""Parts of a capture: their columns, names and limits, written and read as Parquet files.

Columns: those of a `CaptureRow`, and `run, world, replica`, which are equal in all rows of a capture.

What is read may be untrusted or truncated: memory and time are bounded. The footer is checked against the limits before anything
else is read. It may be forged, so texts and payloads stay dictionaries until their true lengths are added up: a file of a few
bytes can repeat one long value a million times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sottovoce_core.errors import CaptureError
from sottovoce_core.runs.transcript import import_parquet
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.storage import Folder

if TYPE_CHECKING:
    import pyarrow as pa

MIB = 1024 * 1024
MAX_PART_ROWS, MAX_PART_BYTES = 8_192, 64 * MIB
"""Limits of a part that is written: rows, and bytes of their payloads not counting the last row."""
MAX_FILE_BYTES = 256 * MIB
"""Maximum bytes of a part on disk."""
MAX_UNPACKED_BYTES = 256 * MIB
"""Maximum bytes of a part, unpacked. Parts written by this project have a quarter of that, or one message."""
MAX_ROWS, _MAX_ROW_GROUPS = 65_536, 1_024
_MAX_TEXT_BYTES = 4_096
"""Maximum bytes of a text such as a method's name."""
BATCH_ROWS = 1_024
"""Number of rows unpacked at a time."""

_FOOTER = {"thrift_string_size_limit": 16 * MIB, "thrift_container_size_limit": 65_536}


def build_schema() -> pa.Schema:
    """Return the columns of a part."""
    import pyarrow as pa

    return pa.schema(
        [
            ("caller", pa.int32()),
            ("callee", pa.int32()),
            ("sender", pa.int32()),
            ("direction", pa.dictionary(pa.int8(), pa.string())),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("stream", pa.int32()),
            ("connection", pa.int32()),
            ("method", pa.dictionary(pa.int16(), pa.string())),
            ("wall_ns", pa.int64()),
            ("mono_ns", pa.int64()),
            ("size", pa.int64()),
            ("payload", pa.binary()),
            ("is_repeat", pa.bool_()),
            ("run", pa.dictionary(pa.int8(), pa.string())),
            ("world", pa.int8()),
            ("replica", pa.int32()),
        ]
    )


def format_part_name(number: int) -> str:
    """Return the file name of a part; parts count from 1."""
    return f"part-{number:06d}.parquet"


def parse_part_number(name: str) -> int:
    """Return the number of a part by its file name; 0 if it is not one."""
    found = re.fullmatch(r"part-(\d{6,})\.parquet", name)
    return 0 if found is None else int(found[1])


def split_into_parts(rows: Sequence[CaptureRow]) -> Iterator[Sequence[CaptureRow]]:
    """Split rows into parts of at most `MAX_PART_ROWS` rows, and `MAX_PART_BYTES` not counting the last row."""
    begin, held = 0, 0
    for end, row in enumerate(rows, 1):
        held += len(row.payload)
        if end - begin == MAX_PART_ROWS or held >= MAX_PART_BYTES or end == len(rows):
            yield rows[begin:end]
            begin, held = end, 0


def encode_part(rows: Sequence[CaptureRow], run_id: str, world: int | None, replica: int | None) -> bytes:
    """Encode rows of a run as a Parquet file, with the labels of the capture in an audit; None if there are none."""
    import pyarrow as pa

    labels = (run_id, *(-1 if each is None else each for each in (world, replica)))
    columns = [*zip(*rows, strict=True), *([label] * len(rows) for label in labels)]
    table = pa.Table.from_arrays(
        [pa.array(column, kind.type) for column, kind in zip(columns, build_schema(), strict=True)],
        schema=build_schema(),
    )
    sink = pa.BufferOutputStream()
    import_parquet().write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_part(folder: Folder, name: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part in batches: text and bytes decoded, no nulls, `size` equal to the payload's length.

    Args:
        folder: folder of the capture.
        name: file name of the part.
        columns: names of columns of `build_schema()`.

    Raises:
        CaptureError: the file cannot be read, is too large, or is not a part of a capture.
    """
    where = f"{folder.name}/{name}"
    with _convert_errors(where):
        if (size := folder.get_size(name)) > MAX_FILE_BYTES:
            raise CaptureError(f"{where} must have at most {MAX_FILE_BYTES} bytes, got {size}")
        with folder.open(name) as raw:
            footer = import_parquet().ParquetFile(raw, **_FOOTER)
            _require_limits(where, footer.metadata)
            _require_columns(where, footer.schema_arrow)
            texts = [kind.name for kind in build_schema() if not _is_primitive(kind.type)]
            file = import_parquet().ParquetFile(raw, metadata=footer.metadata, read_dictionary=texts, **_FOOTER)
            unpacked = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False):
                unpacked += _count_payload_bytes(where, batch)
                if unpacked > MAX_UNPACKED_BYTES:
                    raise CaptureError(f"{where} must unpack to at most {MAX_UNPACKED_BYTES} bytes")
                yield _decode_batch(where, batch)


@contextmanager
def _convert_errors(where: str) -> Iterator[None]:
    """Convert every error that Arrow raises for a broken file to one line with the file's name."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        raise CaptureError(f"cannot read {where}: {' '.join(str(error).split())[:300]}") from None


def _require_limits(where: str, footer: Any) -> None:
    groups = footer.num_row_groups
    if groups > _MAX_ROW_GROUPS or not 0 <= footer.num_rows <= MAX_ROWS:
        raise CaptureError(
            f"{where} must have at most {MAX_ROWS} rows in {_MAX_ROW_GROUPS} groups, got {footer.num_rows} in {groups}"
        )
    sizes = [footer.row_group(k).total_byte_size for k in range(groups)]
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_UNPACKED_BYTES:
        raise CaptureError(f"{where} must unpack to at most {MAX_UNPACKED_BYTES} bytes, its footer says {sum(sizes)}")


def _require_columns(where: str, found: Any) -> None:
    """Require the columns of a capture, each once, with their types; text may be a dictionary or not."""
    wanted = {kind.name: str(_value_type(kind.type)) for kind in build_schema()}
    got = [(kind.name, str(_value_type(kind.type))) for kind in found]
    if dict(got) != wanted or len(got) != len(wanted):
        wrong = sorted({name for name, _ in set(got) ^ set(wanted.items())})
        raise CaptureError(
            f"{where} is not a part of a capture: column(s) {', '.join(wrong)[:200]} missing or of another type"
        )


def _count_payload_bytes(where: str, batch: pa.RecordBatch) -> int:
    """Return the bytes of all payloads, unpacked; refuse nulls, and long text."""
    import pyarrow.compute as pc

    total = 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            raise CaptureError(f"{where}: column {name!r} must hold a value in every row")
        if _is_primitive(column.type):
            continue
        lengths = pc.binary_length(column.dictionary)
        if name == "payload":
            total = pc.sum(lengths.take(column.indices)).as_py() or 0
        elif (longest := pc.max(lengths).as_py() or 0) > _MAX_TEXT_BYTES:
            raise CaptureError(
                f"{where}: column {name!r} must hold text of at most {_MAX_TEXT_BYTES} bytes, got {longest}"
            )
    return total


def _decode_batch(where: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [each if _is_primitive(each.type) else each.dictionary_decode() for each in batch.columns]
    plain = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
    plain.validate(full=True)  # detects invalid UTF-8
    if {"kind", "size", "payload"} <= set(plain.schema.names):
        lengths = pc.binary_length(plain.column("payload"))
        unread = pc.and_(pc.equal(plain.column("kind"), "ciphertext"), pc.equal(lengths, 0))
        right = pc.or_(pc.equal(lengths, plain.column("size")), unread)
        if not pc.all(right).as_py() and plain.num_rows:
            raise CaptureError(f"{where}: column 'size' must hold the length of the payload")
    return plain


def _is_primitive(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_primitive(kind))


def _value_type(kind: Any) -> Any:
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind
