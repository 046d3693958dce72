"""What a broker sends again: packet identifiers of messages that it may not know to be kept, beyond a feeder's death.

A broker of MQTT sends what was not acknowledged again, under the same packet identifier, and marks it. Whether the learner has it
is known here: a message's identifier, a digest and its position are written down before it is fed, and the learner's own position
says, after a death, which of them it has. A digest tells a message from a later one under the same identifier.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO
from urllib.parse import quote

from sottovoce.errors import DataError, NotReady

_MOST_LINES = 4 * 65_536


def usual_place(client: str) -> Path:
    """File of a session, in this user's folder for what outlasts a process."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "sottovoce")
    return folder / f"{quote(client, safe='')}.mqtt"


class Unacknowledged:
    """Messages by their packet identifiers. `begin` comes first.

    Args:
        path: file in which they outlast the feeder; None: they do not.
        client: whose session they are of.
    """

    def __init__(self, path: Path | None, client: str) -> None:
        self._path, self._client = path, client
        self._key = secrets.token_hex(16)
        self._known = dict[int, tuple[str, int]]()
        self._file: IO[str] | None = None
        self._lock: IO[str] | None = None
        self._lines = 0

    def begin(self, after: int) -> None:
        """Go on behind a position: what is known of later ones is forgotten, for it will be fed under other positions.

        Raises:
            DataError: the file is none of ours.
            NotReady: it cannot be written, or another feeder has it.
        """
        kept = after
        try:
            self._locked()
            if self._path is not None and self._path.exists():
                kept = max(after, self._read(self._path.read_text(encoding="utf-8")))
            self._known = {mid: (digest, -1) for mid, (digest, at) in self._known.items() if at <= kept}
            self._write_anew()
        except OSError as error:
            raise NotReady(f"{self._path} cannot be written: {error.strerror}") from None

    def digest(self, topic: str, body: bytes) -> str:
        """Of a message, which tells nothing of it without the file."""
        made = hashlib.blake2b(body, digest_size=16, key=bytes.fromhex(self._key), person=b"mqtt")
        made.update(topic.encode())
        return made.hexdigest()

    @property
    def any(self) -> bool:
        """Whether messages are known at all."""
        return bool(self._known)

    def is_known(self, mid: int, digest: str) -> bool:
        """Whether a message was the last one under its identifier."""
        return self._known.get(mid, ("", 0))[0] == digest

    def note(self, mid: int, digest: str, position: int) -> None:
        """A message that will be fed; `flush` before that."""
        self._known[mid] = digest, position
        self._put([mid, digest, position])

    def keep(self, position: int) -> None:
        """Everything up to a position is kept."""
        self._put([position])

    def forget(self) -> None:
        """The broker has: identifiers begin anew."""
        self._known.clear()
        self._put([])

    async def flush(self) -> None:
        """What was noted outlasts a loss of power."""
        if self._file is not None:
            if self._lines > _MOST_LINES:
                self._write_anew()
            self._file.flush()
            await asyncio.to_thread(os.fsync, self._file.fileno())

    def close(self) -> None:
        """Nothing is noted any more."""
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None

    # ---- the file: a header, then a line for each note ---------------------------------------------------------------

    def _put(self, entry: list[int | str] | Mapping[str, str]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._lines += 1

    def _read(self, text: str) -> int:
        """What is known; returns the position up to which it was kept."""
        kept = -1
        try:
            header, *lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if header["client"] != self._client:
                raise DataError(f"{self._path} is of client {header['client']!r}, and this is {self._client!r}")
            self._key = str(header["key"])
            for line in lines:
                if not line:
                    self._known.clear()
                elif len(line) == 1:
                    kept = max(kept, int(line[0]))
                else:
                    self._known[int(line[0])] = str(line[1]), int(line[2])
        except (ValueError, KeyError, TypeError, IndexError):
            raise DataError(f"{self._path} is no file that a feeder has written") from None
        return kept

    def _locked(self) -> None:
        """Nobody else has the file, until this process ends."""
        if self._path is not None and self._lock is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_name(self._path.name + ".lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.close()
                if not isinstance(error, BlockingIOError):
                    raise
                raise NotReady(
                    f"another feeder has {self._path}: each needs a --client and a --state of its own"
                ) from None
            self._lock = lock

    def _write_anew(self) -> None:
        if self._path is None:
            return
        if self._file is not None:
            self._file.close()
        new = self._path.with_name(self._path.name + ".new")
        self._file = open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w", encoding="utf-8")  # noqa: SIM115
        self._put({"client": self._client, "key": self._key})
        for mid, (digest, position) in self._known.items():
            self._put([mid, digest, position])
        self._file.flush()
        os.fsync(self._file.fileno())
        new.replace(self._path)
        self._lines = 0
