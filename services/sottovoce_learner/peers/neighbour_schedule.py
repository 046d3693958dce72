"""The plan: whom a learner hears and tells, round by round. No network, no clock.

The learner computes it from the run spec, since its guarantee rests on it. What the coordinator says, an epoch wherever
something changes, must agree: else the two work on different networks, and the run must not go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.network.network import Network, NetworkDigests
from sottovoce_core.text import format_learner_name

_WEIGHT_TOLERANCE = 1e-9
"""How far an announced weight may be from ours."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A learner's part in a round.

    Attributes:
        heard: weight of everybody whose message it waits for.
        told: who gets its message.
        own: weight of its own value.
    """

    in_neighbours: Mapping[int, float]
    out_neighbours: tuple[int, ...]
    own_weight: float


class NeighbourSchedule:
    """The parts of one learner.

    Args:
        network: of the run.
        index: the learner.
        digests: of the network.
        names: of the learners, by index, for errors.
    """

    def __init__(self, network: Network, index: int, digests: NetworkDigests, names: Sequence[str] = ()) -> None:
        self._network, self.index, self._digests, self._names = network, index, digests, names
        self.neighbours = network.neighbours(index)
        """Everybody whom the learner hears or tells in some round."""
        self.announced_rounds = 0
        """Rounds below this one are as the coordinator says."""
        self._over = 0
        self._parts: dict[int, _Part] = {}
        self._last = self._part(0)
        self._always = self._last if network.horizon == 1 else None
        fixed = self._always
        self.is_lockstep = (
            fixed is not None and bool(fixed.out_neighbours) and fixed.out_neighbours == tuple(fixed.in_neighbours)
        )
        """Everybody who is told is heard in every round: no neighbour can be more than one round ahead or behind."""

    def get_round_part(self, t: int) -> _Part:
        """The part in round t."""
        if self._always is not None:
            return self._always
        if t not in self._parts:
            self._parts[t] = self._part(t)
        return self._parts[t]

    def get_in_neighbours(self, t: int) -> Mapping[int, float]:
        """Whose messages round t needs."""
        return self.get_round_part(t).in_neighbours

    def compute_buffer_rounds(self, window: int, *, allows_late: bool) -> tuple[int, int]:
        """How many rounds' messages of a neighbour may come, the current one's included, and how many of ours it may lack.

        In lockstep nobody is more than a round apart. Elsewhere a neighbour goes as far as the clock lets it: a window beyond the
        slowest learner, which may die, and stand a round before what it has reported. Where nobody waits for late ones, it may be
        as far behind in what it has heard of us.

        Args:
            window: rounds that are granted beyond the slowest learner.
            late: whether a round may go on without who is late.
        """
        ahead = 2 if self.is_lockstep and not allows_late else window + 1
        return ahead, 2 * ahead + 1 if allows_late else ahead

    def accept_epoch(self, first_round: int, weights: Mapping[int, float], out_neighbours: Collection[int]) -> None:
        """An epoch of the coordinator's; one that is known already is passed over.

        Args:
            first_round: that it is for.
            weights: of everybody that it names; 0 for those who are not heard.
            told: those of them who are told.

        Raises:
            RemoteProtocolError: it is not what the run spec says.
        """
        if first_round < self.announced_rounds:
            return
        self.require_epochs(first_round)
        part, heard = self.get_round_part(first_round), {j: weight for j, weight in weights.items() if weight != 0}
        same = heard.keys() == part.in_neighbours.keys() and all(
            abs(heard[j] - part.in_neighbours[j]) <= _WEIGHT_TOLERANCE for j in heard
        )
        if not same or set(out_neighbours) != set(part.out_neighbours):  # not-a-number is refused, too
            raise RemoteProtocolError(
                f"in round {first_round} neighbours and their weights must be {self._weighed(part.in_neighbours)}, and those who are "
                f"told {self._called(part.out_neighbours)}, got {self._weighed(heard)} and {self._called(out_neighbours)}"
            )
        if first_round == 0 and weights.keys() != self.neighbours:
            raise RemoteProtocolError(
                f"the first epoch must name the neighbours of all rounds, {self._called(self.neighbours)}, got "
                f"{self._called(weights)}"
            )
        # What a learner did before it died was announced then, and needs no epochs again, but for the first, with the addresses.
        self.announced_rounds = max(first_round + 1, self._over)
        self._last = self.get_round_part(self.announced_rounds - 1)

    def accept_digest(self, since: int, until: int, network_hash: bytes) -> None:
        """A digest of the coordinator's, in place of epochs for rounds `since` to `until - 1`; empty: epochs say it.

        Raises:
            RemoteProtocolError: it is not of what the run spec says, or rounds before them are missing.
        """
        if not network_hash or until <= self.announced_rounds:  # known already
            return
        self.require_epochs(max(since, 1))
        if self._digests.combined_digest(since, until) != network_hash:
            raise RemoteProtocolError(
                f"in rounds {since} to {until - 1} everybody must hear whom the run spec says, with its weights, and the "
                "coordinator's digest of them is another one: do both run the same version, with the same code of your own?"
            )
        self.announced_rounds = until
        self._last = self.get_round_part(until - 1)

    def require_epochs(self, until: int) -> None:
        """Rounds below `until` need no further epoch.

        Raises:
            RemoteProtocolError: something changes in one of them.
        """
        if self._always is not None and self.announced_rounds:
            self.announced_rounds = max(self.announced_rounds, until)
        looked_at = min(until, self.announced_rounds + self._network.horizon)  # later rounds repeat these
        while self.announced_rounds < looked_at:
            if self.announced_rounds == 0 or self.get_round_part(self.announced_rounds) != self._last:
                raise RemoteProtocolError(f"an epoch for round {self.announced_rounds} must come first, and it did not")
            self.announced_rounds += 1
        self.announced_rounds = max(self.announced_rounds, until)

    def forget(self, t: int) -> None:
        """Round t is over."""
        self._parts.pop(t, None)
        self._over = t + 1

    def _called(self, learners: Iterable[int]) -> str:
        return ", ".join(format_learner_name(self._names, j) for j in sorted(learners)) or "nobody"

    def _weighed(self, heard: Mapping[int, float]) -> str:
        return ", ".join(f"{format_learner_name(self._names, j)} {heard[j]:.6g}" for j in sorted(heard)) or "nobody"

    def _part(self, t: int) -> _Part:
        mixing, i = self._network.mixing(t), self.index
        return _Part(mixing.in_neighbour_weights(i), mixing.out_neighbours(i), float(mixing.own_weights[i]))
