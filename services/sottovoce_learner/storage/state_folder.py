"""State folder of a learner: its files, their exclusive use, and durable writes.

NAME.lock             held for the life of the process
NAME.identity         id of the folder, and the learner's incarnation
NAME.runs             privacy ledger: chained lines, each run opened, closed, or repaired (`ledger.py`)
NAME.high_water_mark  how far visible effects depend on the others (`run_log.py`)
RUN@NAME/K.log        write-ahead log of the open run, and of the last one until another is opened (`wal.py`)
RUN@NAME/K.snapshot   replaces the beginning of the log (`snapshot.py`)
kept/RUN@NAME/K.log   retired segments of logs, where they are kept (`store.py`)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sottovoce_core.errors import CorruptStateError, FailedPrecondition

FORMAT = 1
"""Format version of all files of a state folder."""
KEPT_LOGS_FOLDER = "kept"
_STORE_BYTES = 16
_MAX_WRITE_BYTES = 64 * 1024 * 1024
"""Maximum number of bytes of one write."""


@dataclass(frozen=True, slots=True)
class LearnerPaths:
    """Paths of a learner's files.

    Attributes:
        folder: state folder.
        learner: learner name.
        keep_log: whether logs of runs are kept after the run.
    """

    folder: Path
    learner: str
    keep_log: bool = False

    @property
    def ledger(self) -> Path:
        """Path of the ledger."""
        return self.folder / f"{self.learner}.runs"

    @property
    def high_water_mark(self) -> Path:
        """Path of the high-water mark."""
        return self.folder / f"{self.learner}.high_water_mark"

    def get_log_folder(self, run_id: str) -> Path:
        """Return the folder of a run's log. A run id has no @, so folders are distinct."""
        return self.folder / f"{run_id}@{self.learner}"

    def retire_segment(self, segment: Path) -> None:
        """Delete a segment that is no longer needed, or keep it in a folder on the same disk."""
        if not self.keep_log:
            segment.unlink()
            return
        kept = self.folder / KEPT_LOGS_FOLDER / segment.parent.name
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        segment.replace(kept / segment.name)

    def list_log_folders(self) -> list[Path]:
        """List the folders of all existing logs."""
        paths = (
            each
            for each in list_with_suffix(self.folder, f"@{self.learner}")
            if each.name.partition("@")[2] == self.learner
        )
        return [each for each in paths if each.is_dir()]


# ---- files -----------------------------------------------------------------------------------------------------------


class DiskFull(OSError):
    """Write that found no disk space, and does not count; existing content is intact, and the write may be retried."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FileGuard:
    """File that this process relies on, and that must stay in place.

    Args:
        path: its path.
        descriptor: descriptor of the open file; None: the file that is there now.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        status = path.stat() if descriptor is None else os.fstat(descriptor)
        self._path, self._file, self._size = os.fspath(path), (status.st_dev, status.st_ino), status.st_size

    def require_in_place(self, size: int | None = None) -> None:
        """Raise an error unless the same file is still there, with its content; takes one or two microseconds.

        Args:
            size: minimum size in bytes; None: the size at the beginning.

        Raises:
            CorruptStateError: it was deleted, moved, replaced or cut.
        """
        try:
            status = os.stat(self._path)
        except OSError:
            status = None
        if (
            status is None
            or (status.st_dev, status.st_ino) != self._file
            or status.st_size < (self._size if size is None else size)
        ):
            raise CorruptStateError(
                f"the state folder must stay where it is while its learner runs, and {self._path} was deleted, moved, replaced "
                "or cut: nothing more is sent. Stop the learner, and start it again when the folder is restored; where it "
                "is lost, charge what `sottovoce runs show` reports to a new one (docs/operate/backup.md)"
            )


def list_with_suffix(folder: Path, suffix: str) -> list[Path]:
    """List the files of a folder whose names have a suffix, sorted; called often on folders of many learners."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix)]


def read_if_exists(path: Path, offset: int = 0, size: int = -1) -> bytes:
    """Read a file from a byte on; empty if it does not exist, or was just deleted."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def require_format(subject: object, format_version: int) -> None:
    """Raise `CorruptStateError` unless this version reads a file's format."""
    if format_version > FORMAT:
        raise CorruptStateError(
            f"{subject} has format {format_version}, and this version reads up to {FORMAT}: take a newer Sottovoce"
        )


def replace_file(path: Path, raw: bytes) -> None:
    """Write a file atomically and durably.

    Raises:
        OSError: it could not be written; the earlier file is intact.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        write_at(draft, raw, 0)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_at(path: Path, raw: bytes, offset: int) -> None:
    """Write bytes durably at an offset, as the new end of the file, which is created if missing.

    Raises:
        OSError: they could not be written in full, and the file ends before them.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, offset)
        for k in range(0, len(raw), _MAX_WRITE_BYTES):
            if os.pwrite(file, chunk := raw[k : k + _MAX_WRITE_BYTES], offset + k) != len(chunk):
                os.ftruncate(file, offset)
                raise DiskFull
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def extend_chain(chain: bytes, raw: bytes) -> bytes:
    """Return the chain after an entry, or a line of the ledger: `SHA-256(chain before it | its bytes)[:16]`."""
    return hashlib.sha256(chain + raw).digest()[:16]


def hash_text(text: str) -> bytes:
    """Return a 16-byte hash of a text."""
    return extend_chain(b"", text.encode())


def hash_boot_id() -> bytes:
    """Return a hash of the machine's boot id: unsynced writes survive as long as it is the same."""
    return hash_text(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))


# ---- exclusive use ---------------------------------------------------------------------------------------------------


class LearnerLock:
    """Exclusive use of a learner's files until it is closed, or this process ends in any way.

    Two processes of one learner on one folder would each spend the full budget.

    Args:
        folder: state folder.
        learner: learner name.

    Raises:
        FailedPrecondition: another process is this learner.
    """

    def __init__(self, folder: Path, learner: str) -> None:
        self._file, self._files = (
            (folder / f"{learner}.lock").open("w", encoding="utf-8"),
            LearnerPaths(folder, learner),
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise FailedPrecondition(
                f"another process is learner {learner!r} on the state folder {folder}: stop it, or take another name or folder"
            ) from None
        self._lock = FileGuard(Path(self._file.name), self._file.fileno())
        self._guards = [self._lock]

    def __enter__(self) -> LearnerLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refresh_guards(self) -> None:
        """Guard the files that exist now: from now on they must stay."""
        paths = [path for path in (self._files.ledger, self._files.high_water_mark) if path.exists()]
        self._guards = [self._lock, *map(FileGuard, paths)]

    def require_in_place(self) -> None:
        """Raise an error unless the files are still there: another folder in their place is another ledger.

        Raises:
            CorruptStateError: one was deleted, moved, replaced or cut.
        """
        for each in self._guards:
            each.require_in_place()

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


# ---- identity --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identity of one learner of a state folder.

    The folder's id is drawn at its first use: another folder is another store. The incarnation is issued by the
    coordinator at each start and written here before it is used, so that of two processes, one on a copy or an old state
    of this folder, only one can be the learner.

    Attributes:
        learner: learner name.
        store_id: id of the folder for this learner, 128 random bits.
        incarnation: highest issued incarnation; 0: none.
    """

    learner: str
    store_id: bytes
    incarnation: int = 0

    @classmethod
    def load_or_create(cls, folder: Path, learner: str) -> StoreIdentity:
        """Load the identity of a folder; draw and write it if there is none.

        Raises:
            CorruptStateError: the file is damaged, another learner's, or of a newer version.
        """
        path = folder / f"{learner}.identity"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            version, name, incarnation = facts["format"], facts["learner"], facts["incarnation"]
            store = bytes.fromhex(facts["store_id"])
            if len(store) != _STORE_BYTES or type(incarnation) is not int or incarnation < 0:
                raise ValueError("must have a store of 16 bytes and an incarnation from 0")
        except FileNotFoundError:
            return cls(learner, secrets.token_bytes(_STORE_BYTES)).write_incarnation(0, folder)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CorruptStateError(
                f"the identity {path} is damaged: {error}; restore an intact copy, or take another state folder and "
                "inform the coordinator (sottovoce rebind)"
            ) from None
        if version != FORMAT:
            raise CorruptStateError(
                f"the identity {path} must be of format {FORMAT}, got {version!r}: use the version that wrote it"
            )
        if name != learner:
            raise CorruptStateError(
                f"the identity {path} must be of learner {learner!r}, got {name!r}: take the learner's own folder"
            )
        return cls(learner, store, incarnation)

    def write_incarnation(self, incarnation: int, folder: Path) -> StoreIdentity:
        """Write a new incarnation; return the new identity.

        Raises:
            OSError: it could not be written; the earlier file is intact.
        """
        new = replace(self, incarnation=incarnation)
        facts = {"format": FORMAT, **asdict(new), "store_id": self.store_id.hex()}
        replace_file(folder / f"{self.learner}.identity", json.dumps(facts).encode())
        return new
