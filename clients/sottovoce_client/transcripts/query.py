"""SQL queries of messages: captures and simulated transcripts as two tables of a temporary database.

- `messages`: the records of captures, unchanged (`sottovoce_eavesdropper.capture_writer`).
- `broadcasts`: `run, world, replica, round, sender, field, value`, each message once for all its receivers: decoded ones of
  captures, and those of simulated transcripts. Messages that cannot be decoded are left out.

A query can read these tables only: it has no access to files or the network, and changes nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.atomic_files import create_file, create_scratch_folder, require_new
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.traffic_features import digest
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.transcript import COLUMNS, import_parquet
from sottovoce_core.text import escape_formula
from sottovoce_eavesdropper.capture_reader import Capture, filter_rounds, open_capture
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import RoundCodec

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_FOLDER_DEPTH = 4
"""Maximum depth of folders between the named one and a capture."""
_FILES = (".parquet", ".json", ".yaml", ".html", ".log", ".npz", ".partial", ".md", ".csv")
MAX_SHOWN_ROWS, _MAX_VERTICAL_ROWS, _MAX_CELL_CHARACTERS = 200, 20, 60
_MAX_MEMORY = "2GB"
_FETCH_ROWS = 10_000
_MAX_GATHERED_BATCHES, _MAX_GATHERED_BYTES = 32, 64 * 1024 * 1024
_MAX_ROUND = 2**62
"""Upper limit of plausible round numbers."""
_EMPTY_COLUMNS = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0))


SimulatedTranscript = tuple[Folder, str]
"""Folder and file name of a simulated transcript."""


def find_transcripts(place: str) -> tuple[list[Capture], list[SimulatedTranscript]]:
    """Find all captures and transcripts in a folder and below, or one `.parquet` file.

    Raises:
        CaptureError: There are none.
    """
    captures, simulated = list[Capture](), list[SimulatedTranscript]()
    if place.endswith(".parquet"):
        folder, _, name = place.rpartition("/")
        return captures, [(open_folder(folder or "."), name)]
    try:
        _gather(open_folder(place), _MAX_FOLDER_DEPTH, captures, simulated)
    except OSError as error:
        raise CaptureError(f"cannot read {place}: {error}") from None
    if not captures and not simulated:
        hint = "; give the folder, or the .parquet file itself" if Path(place).is_file() else ""
        raise CaptureError(
            f"{place} must have captures or a transcript.parquet, which `sottovoce simulate --write transcript` writes{hint}"
        )
    return captures, simulated


def _gather(folder: Folder, depth: int, captures: list[Capture], simulated: list[SimulatedTranscript]) -> None:
    names = folder.list_names()
    if "capture.json" in names:
        captures.append(open_capture(folder))
        return
    if "transcript.parquet" in names:
        simulated.append((folder, "transcript.parquet"))
    for name in names if depth else ():
        if not name.endswith(_FILES):
            _gather(folder.get_subfolder(name), depth - 1, captures, simulated)


# ---- tables ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_database(captures: Sequence[Capture], simulated: Sequence[SimulatedTranscript], wanted: str) -> Iterator[Any]:
    """Open a DuckDB connection with the tables named in the text `wanted`, without access to anything else.

    Raises:
        SpecError: duckdb is not installed, or a table does not exist.
        CaptureError: A file cannot be read.
    """
    duckdb = import_optional("duckdb", "duckdb", "querying transcripts", "query")
    named = set(re.findall(r"\w+", wanted.lower()))
    if "messages" in named and not captures:
        raise SpecError(
            "the table messages needs a capture, and there are only simulated transcripts: query broadcasts"
        )
    sources = {
        "messages": (batch for each in captures for batch in each.read_batches()),
        "broadcasts": chain(
            [_build_rows("", -1, -1, "", *_EMPTY_COLUMNS)],  # the right columns even without rows
            (batch for each in captures for batch in _read_broadcasts(each)),
            (batch for folder, name in simulated for batch in _read_simulated(folder, name)),
        ),
    }
    with (
        create_scratch_folder("sottovoce-query-") as folder,
        duckdb.connect(str(folder / "query.duckdb"), config={"memory_limit": _MAX_MEMORY}) as connection,
    ):
        for name in sources.keys() & named:
            _fill_table(connection, name, sources[name])
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection


def _fill_table(connection: Any, name: str, batches: Iterator[pa.RecordBatch]) -> None:
    """Fill a table in portions; it is on disk, not in memory."""
    created = False
    for portion in _merge_batches(batches):
        relation = connection.from_arrow(portion)
        if created:
            relation.insert_into(name)
        else:
            relation.create(name)
        created = True
    if not created:
        raise CaptureError(f"the table {name} needs records, and there are none")


def _merge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Merge batches into larger tables: each insertion has a fixed cost."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if len(held) == _MAX_GATHERED_BATCHES or sum(each.nbytes for each in held) > _MAX_GATHERED_BYTES:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _read_broadcasts(capture: Capture) -> Iterator[pa.RecordBatch]:
    """Yield each message of a capture once for all its receivers."""
    codec, seen, run = RoundCodec(capture.shapes), set[bytes](), capture.metadata["run_id"]
    world, replica = (-1 if number is None else number for number in (capture.world, capture.replica))
    for batch in capture.read_batches(("kind", "method", "sender", "payload")):
        messages = filter_rounds(batch)
        rows, rounds, senders, fields = decode_rounds(messages, codec)
        new = []
        for k, payload in enumerate(messages.column("payload").take(rows).to_pylist()):
            if (key := digest(payload)) not in seen:
                seen.add(key)
                new.append(k)
        for field, values in fields.items():
            flat = values[new].reshape(len(new), -1) if new else np.empty((0, 0))
            yield _build_rows(run, world, replica, field, rounds[new], senders[new], flat)


def decode_rounds(
    batch: pa.RecordBatch, codec: RoundCodec
) -> tuple[IntArray, IntArray, IntArray, dict[str, FloatArray]]:
    """Decode the messages of rounds in a batch with the column `payload`.

    Returns:
        The rows of these messages; the rounds and senders that they claim, and fields `(messages, *shape)`.
    """
    rows, rounds, senders, fields = codec.decode_many(batch.column("payload").to_pylist())
    kept = rounds < _MAX_ROUND
    fields = {name: values[kept] for name, values in fields.items()}
    return rows[kept], rounds[kept].astype(np.int64), senders[kept].astype(np.int64), fields


def _build_rows(
    run: str, world: int, replica: int, field: str, rounds: Any, senders: Any, values: Any
) -> pa.RecordBatch:
    """Build rows of `broadcasts`; values are `(rows, numbers)`."""
    import pyarrow as pa

    rows, dim = values.shape
    offsets = np.arange(rows + 1, dtype=np.int64) * dim
    columns = [
        pa.repeat(pa.scalar(run, pa.string()), rows),
        pa.repeat(pa.scalar(world, pa.int32()), rows),
        pa.repeat(pa.scalar(replica, pa.int32()), rows),
        pa.array(rounds, pa.int64()),
        pa.array(senders, pa.int64()),
        pa.repeat(pa.scalar(field, pa.string()), rows),
        pa.LargeListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1), pa.float64())),
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(COLUMNS))


def _read_simulated(folder: Folder, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a simulated transcript."""
    import pyarrow as pa

    where = f"{folder.name}/{name}"
    kinds = _build_rows("", 0, 0, "", *_EMPTY_COLUMNS).schema
    try:
        with folder.open(name) as raw:
            file = import_parquet().ParquetFile(raw)
            if missing := [column for column in COLUMNS if column not in file.schema_arrow.names]:
                raise CaptureError(f"{where} must be a transcript, and lacks the columns {missing}")
            for batch in file.iter_batches(_FETCH_ROWS, columns=list(COLUMNS)):
                yield pa.RecordBatch.from_arrays(
                    [batch.column(kind.name).cast(kind.type) for kind in kinds], schema=kinds
                )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CaptureError(f"cannot read {where}: {' '.join(str(error).split())[:300]}") from None


# ---- queries ---------------------------------------------------------------------------------------------------------


def query(place: str, sql: str, *, out: Path | None = None, csv_file: TextIO | None = None) -> None:
    """Run an SQL query, and show the result, or write it as CSV or as a Parquet file.

    Raises:
        SpecError: It is not one SELECT statement, or the file `out` exists.
        CaptureError: A file cannot be read.
    """
    require_new(out)
    duckdb = import_optional("duckdb", "duckdb", "querying transcripts", "query")
    with open_database(*find_transcripts(place), sql) as connection:
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise SpecError("a query must be one SELECT statement: tables cannot be changed")
            if out is not None:
                with create_file(out) as file:
                    _write_parquet(connection.sql(sql), file)
                terminal.print_json_if_requested(lambda: {"out": out})
            elif csv_file is not None:
                _write_csv(connection.execute(sql), csv_file)
            else:
                _print_result(connection.execute(sql))
        except duckdb.Error as error:
            raise SpecError(f"the query failed: {' '.join(str(error).split())[:600]}") from None


def _print_result(result: Any) -> None:
    """Print the first rows, or all of them as JSON."""
    if terminal.is_json_requested():
        names, rows = [column[0] for column in result.description], result.fetchall()
        printable = [[each.hex() if isinstance(each, bytes) else each for each in row] for row in rows]
        terminal.print_json([dict(zip(names, row, strict=True)) for row in printable])
    else:
        _show(result, terminal.create_console(highlight=False))


def _write_csv(result: Any, file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column[0] for column in result.description])
    while rows := result.fetchmany(_FETCH_ROWS):
        writer.writerows(
            [cell.hex() if isinstance(cell, bytes) else escape_formula(cell) for cell in row] for row in rows
        )


def _write_parquet(result: Any, file: BinaryIO) -> None:
    reader = result.to_arrow_reader(_FETCH_ROWS)
    with import_parquet().ParquetWriter(file, reader.schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_batch(batch)


def _show(result: Any, console: Console) -> None:
    rows = result.fetchmany(MAX_SHOWN_ROWS + 1)
    table = terminal.create_table()
    for k, column in enumerate(result.description):
        right = bool(rows) and isinstance(rows[0][k], int | float)
        table.add_column(column[0], justify="right" if right else "left", overflow="fold")
    for row in rows[:MAX_SHOWN_ROWS]:
        table.add_row(*(Text(format_cell(cell)) for cell in row))
    shown = MAX_SHOWN_ROWS
    if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
        console.print(table)
    else:
        shown = _MAX_VERTICAL_ROWS
        for row in rows[:shown]:  # a line for each column
            upright = terminal.create_fact_grid()
            for column, cell in zip(result.description, row, strict=True):
                upright.add_row(column[0], Text(format_cell(cell)))
            console.print(upright)
            console.print()
    if len(rows) > shown:
        console.print(f"The first {shown} rows; --csv or --out FILE.parquet gives all.", style="dim")


def format_cell(cell: object) -> str:
    """Format a cell of a table on a terminal; long ones are cut."""
    if isinstance(cell, bytes):
        text = cell[:_MAX_CELL_CHARACTERS].hex(" ", 4)
    elif isinstance(cell, float):
        text = f"{cell:.6g}"
    elif isinstance(cell, Sequence) and not isinstance(cell, str):
        return format_numbers(cell)
    else:
        text = str(cell)
    text = "".join(letter if letter.isprintable() else "�" for letter in text[: _MAX_CELL_CHARACTERS + 1])
    return text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[: _MAX_CELL_CHARACTERS - 1]}…"


def format_numbers(values: Sequence[Any], max_shown: int = 4) -> str:
    """Format the first values of a sequence, and its length."""
    first = ", ".join(f"{v:.4g}" if isinstance(v, float) else format_cell(v) for v in values[:max_shown])
    return f"[{first}]" if len(values) <= max_shown else f"[{first}, … {len(values)} in all]"
