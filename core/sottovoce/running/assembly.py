"""Rounds put together from messages as they were overheard: in whatever order, and once for everybody who heard them.

A learner says one thing in a round, to all. Whoever says another one gives its noise away: two noisy copies of one state
average the noise out, and one noise on two states shows their difference. So the bytes that were heard first stand, and all
others are contradictions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from sottovoce.errors import CaptureError
from sottovoce.network.network import Network
from sottovoce.text import called

KEPT = 65_536
"""Messages that are remembered where memory must be bounded: of those said longest ago nothing is known any more, and
nothing that contradicts them is seen."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets what was set longest ago."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Versions(Generic[K]):
    """Which bytes were heard first, by key: whose message it is, and of which round.

    Args:
        kept: keys that are remembered; None: all.
    """

    def __init__(self, kept: int | None = None) -> None:
        self._first: dict[K, bytes] = {} if kept is None else Recent(kept)

    def first(self, key: K, digest: bytes) -> bytes:
        """The digest of the version that was heard first: of this one, where nothing was."""
        found = self._first.get(key)
        if found is None:
            found = self._first[key] = digest
        return found


class Assembly(Generic[V]):
    """Rounds of one run.

    Args:
        learners, rounds: of the run.
        network: who hears whom in which round; None: everybody is heard in every round.
        kept: messages that are remembered after their round, to notice whoever says something else later; None: all.
        names: of the learners, by index, for errors.

    Attributes:
        next: the first round that is not whole.
        equivocations: who said two different things in which round, `(round, learner)`.
    """

    def __init__(
        self,
        learners: int,
        rounds: int,
        network: Network | None = None,
        kept: int | None = None,
        *,
        names: Sequence[str] = (),
    ) -> None:
        self._names = names
        self.next, self.equivocations = 0, list[tuple[int, int]]()
        self._learners, self._rounds, self._network = learners, rounds, network
        self._versions: Versions[tuple[int, int]] = Versions(kept)
        self._pending: dict[int, dict[int, V]] = {}
        self._last = -1

    def take(self, sender: int, claimed: int, t: int, digest: bytes, content: V) -> None:
        """A message that was overheard.

        Args:
            sender: by the channel that it came on.
            claimed: who it says is speaking.
            t: the round that it says it is for.
            digest: of its bytes.
            content: what is wanted of it when its round is whole.

        Raises:
            CaptureError: it is no message of this run.
        """
        if claimed != sender or sender >= self._learners or t >= self._rounds:
            late = f"in one of {self._rounds} rounds" if t >= self._rounds else "and as nobody else"
            raise CaptureError(
                f"each of {self._learners} learners must speak as itself, {late}, "
                f"got {called(self._names, claimed)} in round {t} from {called(self._names, sender)}"
            )
        if self._versions.first((t, sender), digest) != digest:
            self.equivocations.append((t, sender))
        elif t >= self.next:
            self._pending.setdefault(t, {}).setdefault(sender, content)
            self._last = max(self._last, t)

    def ready(self) -> Iterator[tuple[int, Mapping[int, V]]]:
        """The rounds in which all were overheard by now whom anybody hears, in order, each once."""
        while self.next <= self._last and not self.missing:
            t = self.next
            self.next += 1
            yield t, self._pending.pop(t, {})

    @property
    def missing(self) -> list[int]:
        """Who has yet to be overheard in the next round."""
        here = self._pending.get(self.next, {})
        return [i for i in self._heard() if i not in here]

    def _heard(self) -> Iterable[int]:
        """Those whose message of the next round somebody hears."""
        if self._network is None:
            return range(self._learners)
        heard: list[int] = np.flatnonzero(self._network.heard(self.next)).tolist()
        return heard
