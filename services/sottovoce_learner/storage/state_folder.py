"""A learner's state folder: where its files stand, who may use them, and how a file is made to last.

NAME.lock            held for the life of the process
NAME.identity        number of the folder, and the learner's incarnation
NAME.runs            the privacy ledger: chained lines, each run opened, closed, or repaired (`ledger.py`)
NAME.mark            high-water mark: how far something visible rests on the others (`run_log.py`)
RUN@NAME/K.log       write-ahead log of the open run, and of the last one until another is opened (`wal.py`)
RUN@NAME/K.snapshot  what takes the place of the log's beginning (`snapshot.py`)
kept/RUN@NAME/K.log  what was put away of logs, where they are kept (`recovery.py`)
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
"""Format of all files of a state folder."""
KEPT_LOGS_FOLDER = "kept"
_STORE_BYTES = 16
_MAX_WRITE_BYTES = 64 * 1024 * 1024
"""Bytes of a file that are written at a time."""


@dataclass(frozen=True, slots=True)
class LearnerPaths:
    """Where a learner's files stand.

    Attributes:
        folder: the state folder.
        learner: its name.
        keep_log: logs of runs are kept when they are over.
    """

    folder: Path
    learner: str
    keep_log: bool = False

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.folder / f"{self.learner}.runs"

    @property
    def high_water_mark(self) -> Path:
        """The mark."""
        return self.folder / f"{self.learner}.mark"

    def get_log_folder(self, run_id: str) -> Path:
        """The folder of a run's log. A run's id has no @, so no two share one."""
        return self.folder / f"{run_id}@{self.learner}"

    def retire_segment(self, segment: Path) -> None:
        """Of a log delete what is no longer needed to go on, or keep it in a folder of the same disk."""
        if not self.keep_log:
            segment.unlink()
            return
        kept = self.folder / KEPT_LOGS_FOLDER / segment.parent.name
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        segment.replace(kept / segment.name)

    def list_log_folders(self) -> list[Path]:
        """Folders of all logs that are there."""
        own = (
            each
            for each in list_with_suffix(self.folder, f"@{self.learner}")
            if each.name.partition("@")[2] == self.learner
        )
        return [each for each in own if each.is_dir()]


# ---- files -----------------------------------------------------------------------------------------------------------


class DiskFull(OSError):
    """What was written found no room, and does not count; nothing of what stands there is in doubt, and it may be tried again."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FileGuard:
    """A file that this process relies on, and where it must stay.

    Args:
        path: its place.
        descriptor: of the open file; None: whatever stands there now.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        found = path.stat() if descriptor is None else os.fstat(descriptor)
        self._path, self._file, self._size = os.fspath(path), (found.st_dev, found.st_ino), found.st_size

    def require_in_place(self, size: int | None = None) -> None:
        """Raise an error unless the same file is still there, with its content: one or two microseconds.

        Args:
            size: least number of bytes that it must have; None: as many as it had.

        Raises:
            CorruptStateError: it was deleted, moved, replaced or cut.
        """
        try:
            found = os.stat(self._path)
        except OSError:
            found = None
        if (
            found is None
            or (found.st_dev, found.st_ino) != self._file
            or found.st_size < (self._size if size is None else size)
        ):
            raise CorruptStateError(
                f"the state folder must stay where it is while its learner runs, and {self._path} was deleted, moved, replaced "
                "or cut: nothing more is sent. Stop the learner, and start it again when the folder is back as it was; where "
                "it is lost, charge what `sottovoce runs show` says to a new one "
                "(docs/deploy.md#backup-restore-and-move-of-a-learner)"
            )


def list_with_suffix(folder: Path, suffix: str) -> list[Path]:
    """What stands in a folder under a name with this end, by name: a folder of many learners is looked through often."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix)]


def read_if_exists(path: Path, at: int = 0, size: int = -1) -> bytes:
    """Of a file, from a byte on, so many or all; nothing where it is not, or was deleted just now."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(size)
    except FileNotFoundError:
        return b""


def require_format(what: object, form: int) -> None:
    """Raise `CorruptStateError` unless a file's format is one that this version reads."""
    if form > FORMAT:
        raise CorruptStateError(
            f"{what} has format {form}, and this version reads up to {FORMAT}: take a newer Sottovoce"
        )


def replace_file(path: Path, raw: bytes) -> None:
    """Write a file, whole or not at all, and make it last.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        write_at(draft, raw, 0)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_at(path: Path, raw: bytes, at: int) -> None:
    """Write bytes at a place of a file, as its end, and sync them; the file is made where it is not there.

    Raises:
        OSError: they could not be written whole, and the file ends before them.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, at)
        for k in range(0, len(raw), _MAX_WRITE_BYTES):
            if os.pwrite(file, piece := raw[k : k + _MAX_WRITE_BYTES], at + k) != len(piece):
                os.ftruncate(file, at)
                raise DiskFull
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def extend_chain(chain: bytes, raw: bytes) -> bytes:
    """The chain behind an entry, or a line of the ledger: `SHA-256(chain before it | its bytes)[:16]`."""
    return hashlib.sha256(chain + raw).digest()[:16]


def hash_text(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return extend_chain(b"", text.encode())


def hash_boot_id() -> bytes:
    """The machine since its start: what was written without a sync is there as long as it is the same."""
    return hash_text(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))


# ---- who may use it --------------------------------------------------------------------------------------------------


class LearnerLock:
    """Exclusive use of a learner's files, until it is closed, or this process dies, however it does.

    Two processes that were this learner on one folder would each spend the whole budget.

    Args:
        folder: the state folder.
        learner: its name.

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
        self._held = [self._lock]

    def __enter__(self) -> LearnerLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refresh_guards(self) -> None:
        """Note which files stand there now: from now on they must stay."""
        there = [path for path in (self._files.ledger, self._files.high_water_mark) if path.exists()]
        self._held = [self._lock, *map(FileGuard, there)]

    def require_in_place(self) -> None:
        """Raise an error unless the files are still there: another folder in their place is another ledger.

        Raises:
            CorruptStateError: one was deleted, moved, replaced or cut.
        """
        for each in self._held:
            each.require_in_place()

    def close(self) -> None:
        """Let another process be this learner."""
        self._file.close()


# ---- who the learner is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """One learner of a state folder.

    The folder's number is drawn once, when it is first used: another folder is another store. The incarnation is issued by the
    coordinator at each start and written here before it is used, so that of two processes, one on a copy or an old state of
    this folder, only one can be the learner.

    Attributes:
        learner: its name.
        store: the folder's number for it, 128 random bits.
        incarnation: the highest that was issued to it; 0: none.
    """

    learner: str
    store_id: bytes
    incarnation: int = 0

    @classmethod
    def load_or_create(cls, folder: Path, learner: str) -> StoreIdentity:
        """As its file has it; drawn and written where there is none.

        Raises:
            CorruptStateError: the file is damaged, another learner's, or of a newer version.
        """
        path = folder / f"{learner}.identity"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            version, name, incarnation = facts["format"], facts["learner"], facts["incarnation"]
            store = bytes.fromhex(facts["store_id"])
            if len(store) != _STORE_BYTES or type(incarnation) is not int or incarnation < 0:
                raise ValueError("a store of 16 bytes and an incarnation from 0 are due")
        except FileNotFoundError:
            return cls(learner, secrets.token_bytes(_STORE_BYTES)).write_incarnation(0, folder)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CorruptStateError(
                f"the identity {path} is damaged: {error}; restore it from where it is whole, or take another state folder and "
                "let the coordinator know (sottovoce rebind)"
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
        """This learner with a new incarnation, written.

        Raises:
            OSError: it could not be written; what was there before is still there.
        """
        new = replace(self, incarnation=incarnation)
        facts = {"format": FORMAT, **asdict(new), "store_id": self.store_id.hex()}
        replace_file(folder / f"{self.learner}.identity", json.dumps(facts).encode())
        return new
