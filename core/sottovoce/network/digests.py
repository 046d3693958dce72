"""The networks of a run's rounds in short: by that those who compute them compare, without saying all of it."""

from __future__ import annotations

from sottovoce.network.mixing import digest_of
from sottovoce.network.network import Network


class Digests:
    """By round, each computed once, and kept for a while.

    Args:
        network: of the run.
        keep: rounds of them; a network that never changes has one.
    """

    def __init__(self, network: Network, keep: int) -> None:
        self._network, self._keep = network, keep
        self._known: dict[int, bytes] = {}

    @property
    def needed(self) -> bool:
        """Does the network change? Else its first epoch says it all."""
        return self._network.horizon > 1

    def know(self, t: int) -> bytes:
        """That of a round."""
        known = self._known.get(t)
        if known is None:
            known = self._known[t] = self._network.at(t).digest
            if len(self._known) > self._keep:  # rounds before those that are kept are asked for seldom
                del self._known[min(self._known)]
        return known

    def of(self, first: int, until: int) -> bytes:
        """Of rounds `first` to `until - 1` together; empty where none is needed."""
        if not self.needed or first >= until:
            return b""
        return digest_of(map(self.know, range(first, until)))
