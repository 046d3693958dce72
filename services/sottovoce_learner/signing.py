"""Signatures in a run: what this learner signs, and what its neighbours have said and not signed yet. No network, no clock."""

from __future__ import annotations

from collections import defaultdict

from sottovoce.errors import EquivocationError, RemoteProtocolError
from sottovoce.running.assembly import Recent
from sottovoce_rpc.signatures import BLOCK, DIGEST, UNSAID, Statement

Blocks = tuple[tuple[int, bytes], ...]
"""Digests of what was said, by block."""


class Own:
    """What this learner said last, as its signatures say it.

    Args:
        keep: rounds whose messages a neighbour may lack.
    """

    def __init__(self, keep: int) -> None:
        self._blocks: Recent[int, bytes] = Recent(keep // BLOCK + 2)

    def said(self, t: int, digest: bytes) -> None:
        """A round was said."""
        block, k = divmod(t, BLOCK)
        known = self._blocks.get(block, UNSAID)
        self._blocks[block] = known[: DIGEST * k] + digest + known[DIGEST * (k + 1) :]

    def statement(self, run_id: str, sender: int, t: int) -> Statement:
        """What is signed behind round t."""
        block = t // BLOCK
        return Statement(run_id, sender, block, self._blocks[block])

    @property
    def blocks(self) -> Blocks:
        """All that is remembered."""
        return tuple(self._blocks.items())

    def restore(self, blocks: Blocks) -> None:
        """`blocks` backwards."""
        self._blocks.update(blocks)


class Unsigned:
    """What neighbours said and have not signed yet, as far as this process has heard it.

    A neighbour signs a block before it says anything of another one, so of each no more than a block is remembered.
    """

    def __init__(self) -> None:
        self._heard: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def require_signed(self, neighbour: int, t: int) -> None:
        """Before a message of round t is taken in.

        Raises:
            RemoteProtocolError: the neighbour has not signed what it said in the blocks before.
        """
        waiting = self._heard[neighbour]
        if waiting and (first := next(iter(waiting))) // BLOCK < t // BLOCK:
            raise RemoteProtocolError(
                f"learner {neighbour} must sign what it said from round {first} on before it says round {t}: is it older than "
                "this learner?"
            )

    def heard(self, neighbour: int, t: int, digest: bytes) -> None:
        """A message was taken in."""
        self._heard[neighbour][t] = digest

    def waits(self, neighbour: int, block: int) -> bool:
        """Was anything of a block heard that is not signed yet? Else its signature says nothing new, and need not be checked."""
        return any(t // BLOCK == block for t in self._heard[neighbour])

    def signed(self, neighbour: int, statement: Statement) -> None:
        """A neighbour has signed; its signature is right.

        Raises:
            RemoteProtocolError: it signs in another one's name, or not all that it said.
            EquivocationError: it has said one thing here, and signed another one.
        """
        if statement.sender != neighbour:
            raise RemoteProtocolError(f"learner {neighbour} signed in the name of learner {statement.sender}")
        waiting = self._heard[neighbour]
        of_block = {t: own for t, own in waiting.items() if t // BLOCK == statement.block}
        for t, own in of_block.items():
            if (said := statement[t]) is None:
                raise RemoteProtocolError(f"learner {neighbour} did not sign what it said in round {t}")
            if said != own:
                raise EquivocationError(
                    f"learner {neighbour} signed another message of round {t} than came here in its name: it, or whoever is in "
                    "between, says two things"
                )
        for t in of_block:
            del waiting[t]
