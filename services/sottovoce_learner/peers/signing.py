"""Signatures in a run: what this learner signs, and what its neighbours have said and not signed yet. No network, no clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

from sottovoce_core.errors import EquivocationError, RemoteProtocolError, Rule
from sottovoce_core.text import called
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.signatures import BLOCK, DIGEST, UNSAID, Statement


@dataclass(frozen=True, slots=True)
class Vouched:
    """What `Own` remembers, in a snapshot.

    Attributes:
        blocks: digests of what was said, by block.
        told: of each neighbour the last blocks in which it was told anything.
    """

    blocks: tuple[tuple[int, bytes], ...] = ()
    told: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Own:
    """What this learner said last, as its signatures say it.

    Of each neighbour it remembers the blocks whose signature may not have come, however long ago it was told anything.

    Args:
        keep: rounds whose messages a neighbour may lack.
    """

    def __init__(self, keep: int) -> None:
        self._most = signatures_kept(keep)
        self._blocks: dict[int, bytes] = {}
        self._told: dict[int, deque[int]] = {}

    def said(self, t: int, digest: bytes, told: Iterable[int]) -> None:
        """A round was said, to some neighbours."""
        block, k = divmod(t, BLOCK)
        for j in told:
            own = self._told.get(j)
            if own is None:
                own = self._told[j] = deque(maxlen=self._most)
            if block not in own:
                own.append(block)
        if block not in self._blocks:
            needed = set(chain.from_iterable(self._told.values()))
            self._blocks = {each: known for each, known in self._blocks.items() if each in needed}
        known = self._blocks.get(block, UNSAID)
        self._blocks[block] = known[: DIGEST * k] + digest + known[DIGEST * (k + 1) :]

    def statement(self, run_id: str, sender: int, block: int) -> Statement:
        """What is signed of a block."""
        return Statement(run_id, sender, block, self._blocks[block])

    def told(self, block: int) -> list[int]:
        """Neighbours that were told anything of a block."""
        return [j for j, own in self._told.items() if block in own]

    @property
    def blocks(self) -> list[int]:
        """Those that are remembered, the oldest first."""
        return sorted(self._blocks)

    @property
    def vouched(self) -> Vouched:
        """All that is remembered."""
        return Vouched(tuple(self._blocks.items()), tuple((j, tuple(own)) for j, own in self._told.items()))

    def restore(self, vouched: Vouched) -> None:
        """`vouched` backwards."""
        self._blocks = dict(vouched.blocks)
        self._told = {j: deque(own, self._most) for j, own in vouched.told}


def signatures_kept(keep: int) -> int:
    """Signatures that a neighbour may lack which may lack so many rounds."""
    return keep // BLOCK + 2


class Unsigned:
    """What neighbours said and have not signed yet, as far as this process has heard it.

    A neighbour signs a block before it says anything of another one, so of each no more than a block is remembered.

    Args:
        names: of the learners, by index, for errors.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._heard: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def require_signed(self, neighbour: int, t: int) -> None:
        """Before a message of round t is taken in.

        Raises:
            RemoteProtocolError: the neighbour has not signed what it said in the blocks before.
        """
        waiting = self._heard[neighbour]
        if waiting and (first := next(iter(waiting))) // BLOCK < t // BLOCK:
            raise RemoteProtocolError(
                f"{called(self._names, neighbour)} must sign what it said from round {first} on before it says round {t}: is it "
                "older than this learner?",
                Rule.SIGNATURE,
            )

    def heard(self, neighbour: int, t: int, digest: bytes) -> None:
        """A message was taken in."""
        self._heard[neighbour][t] = digest

    def waits(self, neighbour: int, block: int) -> bool:
        """Was anything of a block heard that is not signed yet? Else its signature says nothing new, and need not be checked."""
        return any(t // BLOCK == block for t in self._heard[neighbour])

    @property
    def owing(self) -> set[int]:
        """Neighbours that have not signed all that was heard of them."""
        return {neighbour for neighbour, waiting in self._heard.items() if waiting}

    def signed(self, neighbour: int, statement: Statement) -> None:
        """A neighbour has signed; its signature is right.

        Raises:
            RemoteProtocolError: it signs in another one's name, or not all that it said.
            EquivocationError: it has said one thing here, and signed another one.
        """
        name = called(self._names, neighbour)
        if statement.sender != neighbour:
            text = f"{name} signed in the name of {called(self._names, statement.sender)}"
            raise RemoteProtocolError(text, Rule.NAME)
        waiting = self._heard[neighbour]
        of_block = {t: own for t, own in waiting.items() if t // BLOCK == statement.block}
        for t, own in of_block.items():
            if (said := statement[t]) is None:
                text = f"{name} did not sign what it said in round {t}"
                raise RemoteProtocolError(text, Rule.SIGNATURE)
            if said != own:
                raise EquivocationError(
                    f"{name} signed another message of round {t} than came here in its name: it, or whoever is in "
                    "between, says two things"
                )
        for t in of_block:
            del waiting[t]


def signature_of(statement: Statement, credentials: Credentials) -> Callable[[], bytes]:
    """Makes a signature, once for all neighbours, and anew where the identity was renewed since."""
    made = dict[datetime | None, bytes]()

    def make() -> bytes:
        if (until := credentials.expires) not in made:
            made[until] = credentials.signed(statement).encode()
        return made[until]

    return make
