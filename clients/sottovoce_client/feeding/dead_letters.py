"""Dead letters: messages that are no records of the run, kept for whoever mends them, in a file that is its user's alone."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sottovoce_client.feeding.records import Message
from sottovoce_core.errors import DataError, NotReady


class DeadLetters:
    """A file of JSON lines: `run`, `source`, `position`, `reason`, `message`. `dead_letters` opens one.

    Args:
        file: open for reading and appending.
        path: what errors call it.

    Raises:
        DataError: a line of it is none of ours.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._turn = file, asyncio.Lock()
        self._before = Counter[tuple[str, str, int, int]]()
        """What earlier feeders have written, as often as they have: a position alone does not tell a message from another."""
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                self._before[_known_by(**json.loads(line))] += 1
            except (ValueError, TypeError, RecursionError):
                raise DataError(f"{path} has a line {number} that no feeder wrote: take another file") from None

    async def write(self, run_id: str, source: str, refused: Sequence[tuple[Message, str]]) -> int:
        """Add messages, and come back when they are on the disk; OSError: they are not.

        Args:
            run_id: of the run.
            source: that they came from.
            refused: each with its reason.

        Returns:
            How many a feeder before this one had written; they are not written again.
        """
        lines = list[bytes]()
        for message, reason in refused:
            letter = {
                "run": run_id,
                "source": source,
                "position": message.position,
                "reason": reason,
                "message": _as_json(message.body),
            }
            if self._before[known := _known_by(**letter)] > 0:
                self._before[known] -= 1
            else:
                lines.append(f"{json.dumps(letter)}\n".encode())
        if lines:
            async with self._turn:
                await asyncio.to_thread(self._append, b"".join(lines))
        return len(refused) - len(lines)

    def _append(self, lines: bytes) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def dead_letters(path: Path) -> Iterator[DeadLetters]:
    """A file for dead letters, made where it is not there: nobody else may read it, and no other feeder writes to it meanwhile.

    Half a line at its end, of a feeder that died, is cut off: its message has not been passed.

    Raises:
        NotReady: another feeder writes to it, or it cannot be written to.
        DataError: it holds something else.
    """
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        where = f": there is no folder {path.parent.absolute()}" if not path.parent.exists() else f": {error.strerror}"
        raise NotReady(f"dead letters cannot be written to {path}{where}") from None
    with os.fdopen(number, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotReady(f"another feeder writes dead letters to {path}: stop it, or take another file") from None
        os.fchmod(number, 0o600)
        os.truncate(number, _whole(file))
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        yield DeadLetters(file, path)


def _whole(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 65_536)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def _known_by(run: str, source: str, position: int, message: Any, reason: str) -> tuple[str, str, int, int]:
    """What tells a letter from others in this process."""
    return run, source, position, hash(json.dumps(message))


def _as_json(value: Any) -> Any:
    """What came, as JSON has it: text of bytes that are text, text of what JSON has no word for."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(name): _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
