"""What comes on standard input: JSON lines, or CSV."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from sottovoce.data.cells import normal
from sottovoce.errors import DataError
from sottovoce_client.feeding.fields import Unfit, object_of
from sottovoce_client.feeding.forms import LONGEST, Cut, Form
from sottovoce_client.feeding.source import Message, Misfit, Unreadable

_AT_ONCE = 64 * 1024
NO_POSITION = "its position: not a whole number above the one before it"


@dataclass(slots=True)
class StandardInput:
    """Lines that come once, and cannot be read again.

    Attributes:
        name: under which the learner counts them.
        form: how records are written.
        position: field that says where a record stands; empty: they are counted on from where the learner stands.
        file: where they come from.
        once: what was read and is not fed is lost.
    """

    name: str
    form: Form
    position: str = ""
    file: BinaryIO = field(default_factory=lambda: sys.stdin.buffer)
    once: bool = field(default=True, init=False)

    def held(self, misfit: Misfit) -> StandardInput:
        return replace(self, form=self.form.anew(misfit))

    async def keep(self, position: int) -> None:
        """What was read is gone."""

    def _headed(self, rest: bytes, *, ended: bool) -> int | None:
        try:
            return self.form.header(rest, whole=ended)
        except DataError as error:
            raise DataError(f"standard input {error}") from None

    async def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        numbered = Numbered(self.position, after)
        more = _reader(self.file)
        rest, headed, ended = b"", False, False
        while not ended:
            stretch = await more()
            rest, ended = rest + stretch, not stretch
            if not headed:
                used = self._headed(rest, ended=ended) if rest else None
                if used is None:
                    continue
                rest, headed = rest[used:], True
            found, used = self.form.cut(rest, whole=ended)
            if found:
                yield [numbered.message(each) for each in found]
            rest = rest[used:]
            if len(rest) > 2 * LONGEST:
                raise DataError(f"a line of standard input has no end within {2 * LONGEST:,} bytes: these are no lines")


@dataclass(slots=True)
class Numbered:
    """Positions of messages that come in a stream.

    Attributes:
        position: field that says it; empty: they are counted on.
        last: the highest so far; where they are counted on, it begins with what the learner has.
    """

    position: str
    last: int

    def __post_init__(self) -> None:
        self.position = normal(self.position)
        self.last = -1 if self.position else self.last

    def message(self, cut: Cut) -> Message:
        """What was cut, with its position. One whose field says none is no record, and stands where the one before it does."""
        if not self.position:
            self.last += 1
            return Unreadable(cut.body, self.last, cut.reason) if cut.reason else Message(cut.body, self.last)
        if cut.reason:
            return Unreadable(cut.body, self.last, cut.reason)
        try:
            body = object_of(cut.body) if isinstance(cut.body, bytes) else cut.body
        except Unfit as why:
            return Unreadable(cut.body, self.last, str(why))
        said = whole_number(body, self.position)
        if said is None or said <= self.last:
            return Unreadable(cut.body, self.last, NO_POSITION)
        self.last = said
        return Message(body, said)


def whole_number(record: Mapping[str, Any], name: str) -> int | None:
    """What a field says, as a number or its digits; None: it says no position."""
    value = next((value for given, value in record.items() if normal(given) == name), None)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if fits else None


def _reader(file: BinaryIO) -> Callable[[], Awaitable[bytes]]:
    """What reads on, and can be given up while nothing comes; nothing: it has ended."""
    number, loop = file.fileno(), asyncio.get_running_loop()
    kind = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(number)):  # a file, which never lets anybody wait
        return lambda: asyncio.to_thread(os.read, number, _AT_ONCE)

    async def more() -> bytes:
        ready = asyncio.Event()
        loop.add_reader(number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(number)
        return os.read(number, _AT_ONCE)

    return more
