"""What a learner says to its neighbours: handed to their links, copied where the run is mirrored, signed block by block.

What comes from them is in `hearing.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from sottovoce.network.roster import Attendance
from sottovoce_learner.links import Link
from sottovoce_learner.role import Role
from sottovoce_learner.signing import Own, signature_of
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.signatures import BLOCK


class Telling:
    """What is said in a run, and to whom.

    Args:
        role: of the learner.
        attendance: the rounds in which it takes part.
        own: what it said last, as its signatures say it.
        links: to all neighbours.
        credentials: of the learner: with an identity it signs what it says.
        mirror: is given every frame that was said and who was told it; None: the run is not mirrored.
    """

    def __init__(
        self,
        role: Role,
        attendance: Attendance,
        own: Own,
        links: Mapping[int, Link],
        credentials: Credentials,
        mirror: Callable[[bytes, list[int]], None] | None,
    ) -> None:
        self._role, self._attendance, self._own = role, attendance, own
        self._links, self._credentials, self._mirror = links, credentials, mirror

    def say(self, t: int, frame: bytes, told: Sequence[int]) -> None:
        """Hand a round's message to everybody who is told.

        Raises:
            NotReady: a signature is due, and the identity cannot sign.
        """
        for j in told:
            self._links[j].say(t, frame)
        if self._mirror is not None:
            self._mirror(frame, list(told))
        if self._ends_block(t):
            self._sign(t)

    def repeat(self, frames: Iterable[tuple[int, bytes]], told: Callable[[int], Sequence[int]], said: int) -> None:
        """After a death: what neighbours may lack, with its signatures.

        Args:
            frames: by round.
            told: round to those who are told.
            said: rounds that were said.

        Raises:
            NotReady: the identity cannot sign.
        """
        for t, frame in frames:
            for j in told(t):
                self._links[j].say(t, frame)
        for block in self._own.blocks:
            t = min(BLOCK * (block + 1), said) - 1
            if self._ends_block(t):
                self._sign(t)

    def end(self, said: int) -> None:
        """Sign what was said last: nothing more follows.

        Raises:
            NotReady: the identity cannot sign.
        """
        if said and not self._ends_block(said - 1):
            self._sign(said - 1)

    async def flush(self) -> None:
        """Wait until all that was said is written, or the channels are broken."""
        await asyncio.gather(*(link.flushed() for link in self._links.values()))

    async def close(self) -> None:
        """Say nothing more to anybody."""
        for link in self._links.values():
            await link.close()

    def _ends_block(self, t: int) -> bool:
        """Is a round followed by a signature, once it was said?"""
        return t % BLOCK == BLOCK - 1 or t + 1 not in self._attendance

    def _sign(self, t: int) -> None:
        """Tell whoever was told anything of the block of round t what was said in it, signed."""
        if self._credentials.principal is None:
            return
        block = t // BLOCK
        statement, told = self._own.statement(self._role.run_id, self._role.index, block), self._own.told(block)
        signature = signature_of(statement, self._credentials)
        for j in told:
            self._links[j].sign(t, signature)
        if self._mirror is not None and told:
            self._mirror(signature(), told)
