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
from sottovoce_eavesdropper.parts import parse_part_number
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc

# ---- noise history ---------------------------------------------------------------------------------------------------


def load_noise_history(path: Path | None, run_id: str) -> KeyTable:
    """Load the noise keys of earlier runs; empty if there is no file yet.

    Raises:
        CaptureError: It cannot be read, or contains this run, which would then repeat itself.
    """
    if path is None or not path.exists():
        return KeyTable()
    runs, table = _read_noise_history(path)
    if run_id in runs:
        raise CaptureError(f"--noise-history must be of earlier runs, and {path} contains run {run_id}")
    return KeyTable.from_table(table)


def save_noise_history(path: Path, keys: KeyTable, run_id: str) -> None:
    """Write the noise keys of this run and of earlier ones, readable by the owner only: they disclose the noise."""
    runs = [*(_read_noise_history(path)[0] if path.exists() else ()), run_id]
    new_path = path.with_name(path.name + ".new")
    with open(new_path, "wb", opener=open_private) as file:
        np.savez(file, runs=np.array(runs, dtype=str), table=keys.table)
    new_path.replace(path)


def _read_noise_history(path: Path) -> tuple[tuple[str, ...], np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            runs, table = stored["runs"], stored["table"]
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(f"cannot read the noise history {path}: {error}") from None
    if runs.dtype.kind != "U" or table.dtype != np.int64 or table.ndim != 2 or table.shape[0] != 2:
        raise CaptureError(f"{path} must be a noise history, and has no keys")
    if table.shape[1] > MAX_TABLE_KEYS or (table[0] < 0).any():
        raise CaptureError(f"{path} must be a noise history, and has no keys")
    return tuple(map(str, runs.ravel())), table


# ---- sources ---------------------------------------------------------------------------------------------------------

_CALL_TIMEOUT_S = 20.0
_FOLDER_TIMEOUT_S = 60.0
"""Maximum wait for a missing folder: the run that makes it may have been started at the same moment."""


class CaptureSource(Protocol):
    """A capture that may grow, and that may not exist yet."""

    @property
    def wait_description(self) -> str:
        """Description of the awaited capture, if it does not exist yet."""
        ...

    async def fetch_latest(self) -> Capture | None:
        """Return the capture in its current state; None if it does not exist yet.

        Raises:
            SottovoceError: It cannot be read.
        """
        ...


class FolderSource:
    """A capture in a folder, or the newest one in a run's or an eavesdropper's folder.

    Args:
        place: a path, or a URL for fsspec.
        folder_timeout_s: maximum wait for a missing folder.
    """

    def __init__(self, place: str, folder_timeout_s: float = _FOLDER_TIMEOUT_S) -> None:
        self._name, self._place = place, open_folder(place)
        self._local = None if "://" in place else Path(place)
        self._found: Folder | None = None
        self._deadline = time.monotonic() + folder_timeout_s

    @property
    def wait_description(self) -> str:
        return self._name if self._is_missing else f"a capture in {self._name}"

    async def fetch_latest(self) -> Capture | None:
        if self._found is None and self._is_missing:
            if self._deadline <= time.monotonic() or (self._local is not None and self._local.exists()):
                raise CaptureError(f"{self._name} must be a folder of a capture or a run, and there is none")
            return None
        if self._found is None and self._local is not None and _has_no_capture(self._local / "spec.yaml"):
            raise CaptureError(
                f"the run in {self._name} must be captured, and is not: its spec needs `capture: relay`, or mirror"
            )
        self._found = self._found or self._find_newest()
        return None if self._found is None else open_capture(self._found)

    @property
    def _is_missing(self) -> bool:
        return self._local is not None and not self._local.is_dir()

    def _find_newest(self) -> Folder | None:
        inside = self._place.get_subfolder("captures")
        below = [folder.get_subfolder(name) for folder in (inside, self._place) for name in folder.list_names()]
        for folder in (self._place, *sorted(below, key=lambda each: each.get_write_time("capture.json"), reverse=True)):
            if "capture.json" in folder.list_names():
                return folder
        return None


def _has_no_capture(spec: Path) -> bool:
    """Return whether a spec file turns capture off; False if it cannot be read."""
    try:
        found = parse_yaml(spec.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError):
        return False
    return isinstance(found, dict) and found.get("capture", "none") == "none"


@asynccontextmanager
async def open_eavesdropper_source(
    address: str, run_id: str, credentials: Credentials = NO_IDENTITY
) -> AsyncIterator[CaptureSource]:
    """Fetch the capture of a run from an eavesdropper into a folder that is removed at the end.

    Args:
        address: address of the eavesdropper.
        run_id: id of the run.
        credentials: credentials of an operator.
    """
    with create_scratch_folder("sottovoce-watch-") as folder:
        async with open_channel(address, Role.EAVESDROPPER, credentials=credentials) as channel:
            yield _EavesdropperSource(eavesdropper_pb2_grpc.EavesdropperStub(channel), address, run_id, folder)


class _EavesdropperSource:
    """A local copy of an eavesdropper's capture, updated by parts."""

    def __init__(
        self, stub: eavesdropper_pb2_grpc.EavesdropperAsyncStub, address: str, run_id: str, folder: Path
    ) -> None:
        self._stub, self._address, self._run_id, self._folder = stub, address, run_id, folder
        self._seen: tuple[str, int, bool] | None = None
        self.wait_description = f"a capture of {run_id}"

    async def fetch_latest(self) -> Capture | None:
        try:
            return await self._update_copy()
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, f"the eavesdropper at {self._address}") from None

    async def _update_copy(self) -> Capture | None:
        request = eavesdropper_pb2.ListCapturesRequest(run_id=self._run_id, page_size=1)
        newest = (await self._stub.ListCaptures(request, timeout=_CALL_TIMEOUT_S)).captures
        if not newest:
            return None
        now = (newest[0].capture_id, newest[0].messages, newest[0].open)
        if now != self._seen:  # otherwise nothing was captured since
            await self._fetch_new_parts(newest[0].capture_id)
            self._seen = now
        return open_capture(self._folder)

    async def _fetch_new_parts(self, capture_id: str) -> None:
        """Fetch parts that are not here yet; a part never changes."""
        last = max((parse_part_number(path.name) for path in self._folder.iterdir()), default=0)
        files: dict[str, bytearray] = {}
        request = eavesdropper_pb2.StreamCaptureRequest(capture_id=capture_id, first_part=last + 1)
        async for piece in self._stub.StreamCapture(request, timeout=_CALL_TIMEOUT_S):
            if parse_part_number(piece.file) > last or piece.file == "capture.json":
                files.setdefault(piece.file, bytearray()).extend(piece.data)
        for name, content in files.items():
            (self._folder / name).write_bytes(content)
