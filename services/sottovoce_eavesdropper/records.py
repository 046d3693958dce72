"""Captures on disk: a folder with `capture.json` and numbered Parquet parts, each complete in itself.

A part is written under another name and renamed, so that whatever stands there can be read, however the process ended. At
most the last part is lost: at most `PART_ROWS` messages or `PART_S` seconds.

Columns: `caller, callee, sender, direction, kind, stream, wall_ns, mono_ns, size, payload`. `direction` is `out` (from
the caller of the stream to its callee) or `back`; `kind` is `message`, `metadata` or `trailers`; `payload` has the bytes of
the gRPC message as they crossed the channel (metadata as JSON).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from sottovoce.transcript import parquet

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()

PART_ROWS, PART_BYTES, PART_S = 8_192, 64 * 1024 * 1024, 1.0

Row = tuple[int, int, int, str, str, int, int, int, int, bytes]
"""caller, callee, sender, direction, kind, stream, wall_ns, mono_ns, size, payload"""


def schema() -> pa.Schema:
    """The columns of a part."""
    import pyarrow as pa

    return pa.schema(
        [
            ("caller", pa.int32()),
            ("callee", pa.int32()),
            ("sender", pa.int32()),
            ("direction", pa.dictionary(pa.int8(), pa.string())),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("stream", pa.int32()),
            ("wall_ns", pa.int64()),
            ("mono_ns", pa.int64()),
            ("size", pa.int64()),
            ("payload", pa.binary()),
        ]
    )


@dataclass(slots=True)
class CaptureFile:
    """One capture being written.

    Attributes:
        folder: where it stands.
        capture_id, run_id: whose it is.
        messages, bytes: counts of messages (metadata not counted).
    """

    folder: Path
    capture_id: str
    run_id: str
    spec: str
    messages: int = 0
    bytes: int = 0
    open: bool = True
    _rows: list[Row] = field(default_factory=list)
    _held: int = 0
    _parts: int = 0
    _full: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        parquet()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._describe()

    def add(self, row: Row) -> None:
        """Keep a record; cheap, called for every message that passes."""
        if not self.open:
            return
        self._rows.append(row)
        if row[4] == "message":
            self.messages += 1
            self.bytes += row[8]
        self._held += row[8]
        if len(self._rows) >= PART_ROWS or self._held >= PART_BYTES:
            self._full.set()

    async def write_parts(self) -> None:
        """Write parts as they fill up, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), PART_S)
            self._full.clear()
            try:
                await self.flush()
            except OSError as error:  # a full disk must not fill the memory as well
                log.error(
                    "capture cannot be written: nothing more is recorded", capture=self.capture_id, reason=str(error)
                )
                self.open = False
                return

    async def flush(self) -> None:
        """Write what is in memory."""
        async with self._writing:
            rows, self._rows, self._held = self._rows, [], 0
            if rows:
                self._parts += 1
                await asyncio.to_thread(_write_part, self.folder / f"part-{self._parts:06d}.parquet", rows)

    async def close(self) -> None:
        """Write the rest; the capture is complete."""
        self.open = False
        await self.flush()
        self._describe()

    def _describe(self) -> None:
        facts = {
            "format": "sottovoce-capture-1",
            "capture_id": self.capture_id,
            "run_id": self.run_id,
            "complete": not self.open,
            "messages": self.messages,
            "bytes": self.bytes,
            "spec": json.loads(self.spec),
        }
        _replace(self.folder / "capture.json", json.dumps(facts, indent=2).encode())


def _write_part(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa

    table = pa.Table.from_arrays(
        [pa.array(column, kind.type) for column, kind in zip(zip(*rows, strict=True), schema(), strict=True)],
        schema=schema(),
    )
    partial = path.with_suffix(".partial")
    parquet().write_table(table, partial, compression="zstd")
    os.replace(partial, path)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
