"""Sources of a capture that is still written (a folder, or an eavesdropper), and the file of noise keys of earlier runs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np
from ruamel.yaml.error import YAMLError

from sottovoce_client.atomic_files import create_scratch_folder, open_private
from sottovoce_core.auditing.online.noise_history import MAX_TABLE_KEYS, KeyTable
from sottovoce_core.errors import CaptureError
from sottovoce_core.yaml_files import parse_yaml
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_writer import parse_part_number
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc

# ---- keys ------------------------------------------------------------------------------------------------------------


def load_keys(path: Path | None, run_id: str) -> KeyTable:
    """What was heard before this run: nothing, if there is no file yet.

    Raises:
        CaptureError: unreadable, or this run is in it: it would be said to repeat itself.
    """
    if path is None or not path.exists():
        return KeyTable()
    runs, table = _read_keys(path)
    if run_id in runs:
        raise CaptureError(f"--keys must be of the runs before this one, and {path} has those of run {run_id} already")
    return KeyTable.from_table(table)


def save_keys(path: Path, keys: KeyTable, run_id: str) -> None:
    """Write what was heard, this run's noise too: for the owner's eyes, for it gives the noise away."""
    runs = [*(_read_keys(path)[0] if path.exists() else ()), run_id]
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb", opener=open_private) as file:
        np.savez(file, runs=np.array(runs, dtype=str), table=keys.table)
    beside.replace(path)


def _read_keys(path: Path) -> tuple[tuple[str, ...], np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            runs, table = stored["runs"], stored["table"]
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(f"cannot read the keys {path}: {error}") from None
    if runs.dtype.kind != "U" or table.dtype != np.int64 or table.ndim != 2 or table.shape[0] != 2:
        raise CaptureError(f"{path} has no keys")
    if table.shape[1] > MAX_TABLE_KEYS or (table[0] < 0).any():
        raise CaptureError(f"{path} has no keys")
    return tuple(map(str, runs.ravel())), table


# ---- following -------------------------------------------------------------------------------------------------------

_CALL_TIMEOUT_S = 20.0
_FOLDER_TIMEOUT_S = 60.0
"""So long a folder is waited for that is not there: what makes it may have been started in the same moment."""


class CaptureSource(Protocol):
    """A capture that may grow, and that may not have begun."""

    @property
    def wait_description(self) -> str:
        """What is waited for where it has not, in words."""
        ...

    async def fetch_latest(self) -> Capture | None:
        """As it stands; None: it has not begun.

        Raises:
            SottovoceError: it cannot be read.
        """
        ...


class FolderSource:
    """A capture in a folder, or the newest one in a run's or an eavesdropper's folder.

    Args:
        place: a path, or a URL for fsspec.
        patience_s: how long the folder may be missing.
    """

    def __init__(self, place: str, folder_timeout_s: float = _FOLDER_TIMEOUT_S) -> None:
        self._name, self._place = place, open_folder(place)
        self._local = None if "://" in place else Path(place)
        self._found: Folder | None = None
        self._until = time.monotonic() + folder_timeout_s

    @property
    def wait_description(self) -> str:
        return self._name if self._missing else f"a capture in {self._name}"

    async def fetch_latest(self) -> Capture | None:
        if self._found is None and self._missing:
            if self._until <= time.monotonic() or (self._local is not None and self._local.exists()):
                raise CaptureError(f"{self._name} must be a capture's folder, or a run's, and there is none")
            return None
        if self._found is None and self._local is not None and _unrecorded(self._local / "spec.yaml"):
            raise CaptureError(
                f"{self._name} is of a run that nobody records: its spec must have `capture: relay`, or mirror"
            )
        self._found = self._found or self._search()
        return None if self._found is None else open_capture(self._found)

    @property
    def _missing(self) -> bool:
        return self._local is not None and not self._local.is_dir()

    def _search(self) -> Folder | None:
        inside = self._place.get_subfolder("captures")
        below = [folder.get_subfolder(name) for folder in (inside, self._place) for name in folder.list_names()]
        for folder in (self._place, *sorted(below, key=lambda each: each.get_write_time("capture.json"), reverse=True)):
            if "capture.json" in folder.list_names():
                return folder
        return None


def _unrecorded(spec: Path) -> bool:
    """Whether a run that is written down here has no capture; what cannot be read says nothing."""
    try:
        found = parse_yaml(spec.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError):
        return False
    return isinstance(found, dict) and found.get("capture", "none") == "none"


@asynccontextmanager
async def open_eavesdropper_source(
    address: str, run_id: str, credentials: Credentials = NO_IDENTITY
) -> AsyncIterator[CaptureSource]:
    """The capture of a run at an eavesdropper, fetched into a folder that is removed in the end.

    Args:
        address: of the eavesdropper.
        run_id: of the run.
        credentials: of an operator.
    """
    with create_scratch_folder("sottovoce-watch-") as folder:
        async with open_channel(address, Role.EAVESDROPPER, credentials=credentials) as to:
            yield _Fetched(eavesdropper_pb2_grpc.EavesdropperStub(to), address, run_id, folder)


class _Fetched:
    """A copy of an eavesdropper's capture, as far as it has been fetched."""

    def __init__(
        self, stub: eavesdropper_pb2_grpc.EavesdropperAsyncStub, address: str, run_id: str, folder: Path
    ) -> None:
        self._stub, self._address, self._run_id, self._folder = stub, address, run_id, folder
        self._seen: tuple[str, int, bool] | None = None
        self.wait_description = f"a capture of {run_id}"

    async def fetch_latest(self) -> Capture | None:
        try:
            return await self._latest()
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, f"the eavesdropper at {self._address}") from None

    async def _latest(self) -> Capture | None:
        request = eavesdropper_pb2.ListCapturesRequest(run_id=self._run_id, page_size=1)
        known = (await self._stub.ListCaptures(request, timeout=_CALL_TIMEOUT_S)).captures  # the newest
        if not known:
            return None
        now = (known[0].capture_id, known[0].messages, known[0].open)
        if now != self._seen:  # else nothing was overheard since
            await self._fetch(known[0].capture_id)
            self._seen = now
        return open_capture(self._folder)

    async def _fetch(self, capture_id: str) -> None:
        """Write what is not there yet; a part never changes."""
        here = max((parse_part_number(path.name) for path in self._folder.iterdir()), default=0)
        files: dict[str, bytearray] = {}
        request = eavesdropper_pb2.StreamCaptureRequest(capture_id=capture_id, first_part=here + 1)
        async for piece in self._stub.StreamCapture(request, timeout=_CALL_TIMEOUT_S):
            if parse_part_number(piece.file) > here or piece.file == "capture.json":
                files.setdefault(piece.file, bytearray()).extend(piece.data)
        for name, content in files.items():
            (self._folder / name).write_bytes(content)
