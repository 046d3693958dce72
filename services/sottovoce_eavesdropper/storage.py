"""Where captures lie: folders of this machine, or any place that fsspec has a name for (`s3://bucket/captures`).

A file is there whole or not at all. On a file system it is written under another name and renamed; an object store shows an
object only when all of it has arrived. A plain path needs no fsspec.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sottovoce_core.errors import CaptureError, SottovoceError
from sottovoce_core.optional import import_optional

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"})
"""Protocols of fsspec that put an object in one piece. All others are taken for file systems."""
_S3 = frozenset({"s3", "s3a"})
_S3_TIMEOUTS_S = {"connect_timeout": 5, "read_timeout": 20}
"""Of calls to S3, each tried a few times: whoever writes a capture tries again by itself, and a start is to fail soon."""
_PROBE = ".sottovoce-may-write"


class Folder:
    """A folder of this machine: files side by side, and folders below."""

    is_remote = False
    """Whether what cannot be written now may be written a moment later: a store that is away comes back, a full disk hardly."""

    def __init__(self, path: Path) -> None:
        self._local = path

    @property
    def name(self) -> str:
        """Path or URL."""
        return str(self._local)

    def get_subfolder(self, name: str) -> Folder:
        """A folder in this one; it need not exist."""
        return Folder(self._local / name)

    def make(self) -> None:
        """Make the folder, where places need making.

        Raises:
            OSError: it cannot be made.
        """
        self._local.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, name: str, content: bytes) -> None:
        """Write, or replace, a file: whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        partial = self._local / f"{name}.partial"
        partial.write_bytes(content)
        os.replace(partial, self._local / name)

    def require_writable(self) -> None:
        """Make the folder, and see that files can be written to it.

        Raises:
            CaptureError: they cannot.
        """
        try:
            self.make()
            self.write(_PROBE, b"")
        except OSError as error:
            raise CaptureError(f"cannot keep captures at {self.name}: {error.strerror or error}") from None
        with suppress(OSError):  # may be written and not be deleted, where the store says so
            self.remove(_PROBE)

    def remove(self, name: str) -> None:
        """Delete a file.

        Raises:
            OSError: it cannot be deleted.
        """
        (self._local / name).unlink()

    def get_write_time(self, name: str) -> float:
        """When a file was written, in seconds of Unix time; 0 where there is none, or nobody knows."""
        try:
            return (self._local / name).stat().st_mtime
        except OSError:
            return 0.0

    def list_names(self) -> list[str]:
        """Files and folders in here, sorted; empty where there is no such folder."""
        return sorted(path.name for path in self._local.iterdir()) if self._local.is_dir() else []

    def get_size(self, name: str) -> int:
        """Bytes in a file.

        Raises:
            OSError: there is none.
        """
        return (self._local / name).stat().st_size

    def open(self, name: str) -> Any:
        """A context with the file, open for reading, seekable.

        Raises:
            OSError: it cannot be read, or is no regular file: a named pipe would be waited on for ever.
        """
        descriptor = os.open(self._local / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self._local / name))
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise


class RemoteFolder(Folder):
    """A folder of any file system that fsspec knows.

    Args:
        files: the file system.
        path: within it.
        scheme: its protocol, as in the URL.
    """

    is_remote = True

    def __init__(self, files: Any, path: str, scheme: str) -> None:
        self._files, self._path, self._scheme = files, path.rstrip("/"), scheme

    @property
    def name(self) -> str:
        return f"{self._scheme}://{self._path.lstrip('/')}"

    def get_subfolder(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._files, f"{self._path}/{name}", self._scheme)

    def make(self) -> None:
        if self._scheme in _OBJECT_STORES:  # they have no folders, and a bucket is its owner's to make
            return
        with _as_os_error():
            self._files.makedirs(self._path, exist_ok=True)

    def remove(self, name: str) -> None:
        with _as_os_error():
            self._files.rm_file(f"{self._path}/{name}")

    def get_write_time(self, name: str) -> float:
        try:
            with _as_os_error():
                return float(self._files.modified(f"{self._path}/{name}").timestamp())
        except OSError:
            return 0.0

    def write(self, name: str, content: bytes) -> None:
        final = f"{self._path}/{name}"
        with _as_os_error():
            if self._scheme in _OBJECT_STORES:
                self._files.pipe_file(final, content)
                return
            self._files.pipe_file(f"{final}.partial", content)
            self._files.mv(f"{final}.partial", final)

    def list_names(self) -> list[str]:
        with _as_os_error():
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def get_size(self, name: str) -> int:
        with _as_os_error():
            return int(self._files.size(f"{self._path}/{name}"))

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        with _as_os_error(), self._files.open(f"{self._path}/{name}", "rb") as file:
            yield file


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What a store's own library raises (no credentials, no bucket), also while a file is read, is an `OSError` to us."""
    try:
        yield
    except (OSError, ValueError, ImportError, SottovoceError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def require_folder(place: str | Path) -> None:
    """Refuse to keep captures where a file is.

    Raises:
        CaptureError: one is.
    """
    if "://" not in str(place) and Path(place).exists() and not Path(place).is_dir():
        raise CaptureError(f"captures must be kept in a folder, and {place} is a file: give another --folder")


def open_folder(place: str | Path) -> Folder:
    """A folder by its path or URL.

    Raises:
        SpecError: a URL needs fsspec, which is not installed.
        CaptureError: fsspec knows no such place.
    """
    text = str(place)
    if "://" not in text:
        return Folder(Path(text).absolute())
    fsspec = import_optional("fsspec", "fsspec", f"keeping captures at {text}")
    scheme = text.split("://", 1)[0]
    if scheme in _S3:
        import_optional("s3fs", "s3fs", f"keeping captures at {text}", "s3")
    # Captures grow while they are read: what was listed a moment ago says nothing.
    options: dict[str, Any] = {"use_listings_cache": False} if scheme in _OBJECT_STORES else {}
    options |= {"config_kwargs": _S3_TIMEOUTS_S} if scheme in _S3 else {}
    try:
        with _as_os_error():
            files, path = fsspec.url_to_fs(text, **options)
    except (ValueError, ImportError, OSError) as error:
        raise CaptureError(f"cannot keep captures at {text}: {error}") from None
    return RemoteFolder(files, path, scheme)
