"""Storage of captures: folders of this machine, or any location that fsspec supports (`s3://bucket/captures`).

A file is written whole or not at all. On a file system it is written under another name and renamed; an object store shows an
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
"""fsspec protocols that write an object in one piece; all others are treated as file systems."""
_S3 = frozenset({"s3", "s3a"})
_S3_TIMEOUTS_S = {"connect_timeout": 5, "read_timeout": 20}
"""Timeouts of S3 calls, each of which botocore retries: capture writers retry by themselves, and a start must fail soon."""
_PROBE = ".sottovoce-may-write"


class Folder:
    """A folder of this machine, with files and subfolders."""

    is_remote = False
    """True if a failed write may succeed a moment later: an unreachable store comes back, a full disk hardly."""

    def __init__(self, path: Path) -> None:
        self._local = path

    @property
    def name(self) -> str:
        """Path or URL."""
        return str(self._local)

    def get_subfolder(self, name: str) -> Folder:
        """Return a folder in this one; it need not exist."""
        return Folder(self._local / name)

    def make(self) -> None:
        """Create the folder, if the storage has folders.

        Raises:
            OSError: it cannot be created.
        """
        self._local.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        partial = self._local / f"{name}.partial"
        partial.write_bytes(content)
        os.replace(partial, self._local / name)

    def require_writable(self) -> None:
        """Create the folder, and check that files can be written to it.

        Raises:
            CaptureError: they cannot.
        """
        try:
            self.make()
            self.write(_PROBE, b"")
        except OSError as error:
            raise CaptureError(f"cannot write captures to {self.name}: {error.strerror or error}") from None
        with suppress(OSError):  # a store may permit writing and not deleting
            self.remove(_PROBE)

    def remove(self, name: str) -> None:
        """Delete a file.

        Raises:
            OSError: it cannot be deleted.
        """
        (self._local / name).unlink()

    def get_write_time(self, name: str) -> float:
        """Return when a file was written, in seconds of Unix time; 0 if there is no such file, or it is unknown."""
        try:
            return (self._local / name).stat().st_mtime
        except OSError:
            return 0.0

    def list_names(self) -> list[str]:
        """Return the names of files and subfolders, sorted; empty if the folder does not exist."""
        return sorted(path.name for path in self._local.iterdir()) if self._local.is_dir() else []

    def get_size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            OSError: there is no such file.
        """
        return (self._local / name).stat().st_size

    def open(self, name: str) -> Any:
        """Open a file for reading, seekable, as a context manager.

        Raises:
            OSError: it cannot be read, or is not a regular file: opening a named pipe would wait for ever.
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
    """A folder of a file system of fsspec.

    Args:
        files: the file system.
        path: path within it.
        scheme: protocol of the URL.
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
        if self._scheme in _OBJECT_STORES:  # they have no folders, and a bucket is created by its owner
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
    """Convert errors of a store's own library (no credentials, no bucket) to `OSError`, also while a file is read."""
    try:
        yield
    except (OSError, ValueError, ImportError, SottovoceError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def require_folder(location: str | Path) -> None:
    """Refuse a location of captures that is a file.

    Raises:
        CaptureError: it is a file.
    """
    if "://" not in str(location) and Path(location).exists() and not Path(location).is_dir():
        raise CaptureError(f"captures must be stored in a folder, and {location} is a file: give another --folder")


def open_folder(location: str | Path) -> Folder:
    """Return a folder by its path or URL.

    Raises:
        SpecError: a URL needs fsspec, which is not installed.
        CaptureError: fsspec cannot open the location.
    """
    text = str(location)
    if "://" not in text:
        return Folder(Path(text).absolute())
    fsspec = import_optional("fsspec", "fsspec", f"storing captures at {text}")
    scheme = text.split("://", 1)[0]
    if scheme in _S3:
        import_optional("s3fs", "s3fs", f"storing captures at {text}", "s3")
    # Captures grow while they are read, so listings must not be cached.
    options: dict[str, Any] = {"use_listings_cache": False} if scheme in _OBJECT_STORES else {}
    options |= {"config_kwargs": _S3_TIMEOUTS_S} if scheme in _S3 else {}
    try:
        with _as_os_error():
            files, path = fsspec.url_to_fs(text, **options)
    except (ValueError, ImportError, OSError) as error:
        raise CaptureError(f"cannot open the location of captures {text}: {error}") from None
    return RemoteFolder(files, path, scheme)
