"""Neighbours of a learner by round. No network or clock.

The learner computes the schedule from the run spec, since its guarantee rests on it. The coordinator's epochs, sent
wherever something changes, must agree: else the two work on different networks, and the run must not continue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.network.network import Network, NetworkDigests
from sottovoce_core.text import format_learner_name

_WEIGHT_TOLERANCE = 1e-9
"""Maximum difference between an announced weight and ours."""


@dataclass(frozen=True, slots=True)
class _RoundPart:
    """A learner's part in a round.

    Attributes:
        in_neighbours: weight of each sender.
        out_neighbours: recipients of its message.
        own_weight: weight of its own value.
    """

    in_neighbours: Mapping[int, float]
    out_neighbours: tuple[int, ...]
    own_weight: float


class NeighbourSchedule:
    """Parts of one learner in all rounds.

    Args:
        network: network of the run.
        index: index of the learner.
        digests: digests of the network.
        names: names of the learners, by index, for errors.
    """

    def __init__(self, network: Network, index: int, digests: NetworkDigests, names: Sequence[str] = ()) -> None:
        self._network, self.index, self._digests, self._names = network, index, digests, names
        self.neighbours = network.neighbours(index)
        """All in-neighbours and out-neighbours, over all rounds."""
        self.announced_rounds = 0
        """Rounds below this one are confirmed by the coordinator."""
        self._rounds_done = 0
        self._cached_parts: dict[int, _RoundPart] = {}
        self._last_part = self._compute_part(0)
        self._constant_part = self._last_part if network.horizon == 1 else None
        constant_part = self._constant_part
        self.is_lockstep = (
            constant_part is not None
            and bool(constant_part.out_neighbours)
            and constant_part.out_neighbours == tuple(constant_part.in_neighbours)
        )
        """True if in- and out-neighbours are equal in every round: no neighbour can be more than one round ahead or behind."""

    def get_round_part(self, t: int) -> _RoundPart:
        """Return the part in round t."""
        if self._constant_part is not None:
            return self._constant_part
        if t not in self._cached_parts:
            self._cached_parts[t] = self._compute_part(t)
        return self._cached_parts[t]

    def get_in_neighbours(self, t: int) -> Mapping[int, float]:
        """Return the senders, with weights, that round t needs."""
        return self.get_round_part(t).in_neighbours

    def compute_buffer_rounds(self, window: int, *, allows_late: bool) -> tuple[int, int]:
        """Return how many rounds of a neighbour are accepted, the current one included, and how many of ours it may lack.

        In lockstep two neighbours are at most a round apart. Else a neighbour runs as far as the clock leases: a window
        beyond the slowest learner, which may crash and resume a round before its last report. With bounded staleness, it
        may be as far behind in receiving our messages.

        Args:
            window: rounds leased beyond the slowest learner.
            allows_late: whether the run has bounded staleness.
        """
        ahead = 2 if self.is_lockstep and not allows_late else window + 1
        return ahead, 2 * ahead + 1 if allows_late else ahead

    def accept_epoch(self, first_round: int, weights: Mapping[int, float], out_neighbours: Collection[int]) -> None:
        """Check an epoch of the coordinator; a known one is skipped.

        Args:
            first_round: its first round.
            weights: weights of all learners that it names; 0: not an in-neighbour.
            out_neighbours: recipients among them.

        Raises:
            RemoteProtocolError: it contradicts the run spec.
        """
        if first_round < self.announced_rounds:
            return
        self.require_epochs(first_round)
        part, in_weights = self.get_round_part(first_round), {j: weight for j, weight in weights.items() if weight != 0}
        has_same_neighbours = in_weights.keys() == part.in_neighbours.keys() and all(
            abs(in_weights[j] - part.in_neighbours[j]) <= _WEIGHT_TOLERANCE for j in in_weights
        )
        if not has_same_neighbours or set(out_neighbours) != set(part.out_neighbours):  # NaN is rejected, too
            raise RemoteProtocolError(
                f"in round {first_round} in-neighbours and their weights must be {self._format_weights(part.in_neighbours)}, "
                "and the recipients "
                f"{self._format_names(part.out_neighbours)}, got {self._format_weights(in_weights)} and "
                f"{self._format_names(out_neighbours)}"
            )
        if first_round == 0 and weights.keys() != self.neighbours:
            raise RemoteProtocolError(
                f"the first epoch must name the neighbours of all rounds, {self._format_names(self.neighbours)}, got "
                f"{self._format_names(weights)}"
            )
        # Rounds before a crash were announced then; only the first epoch, with the addresses, is needed again.
        self.announced_rounds = max(first_round + 1, self._rounds_done)
        self._last_part = self.get_round_part(self.announced_rounds - 1)

    def accept_digest(self, since: int, until: int, network_hash: bytes) -> None:
        """Check a digest of the coordinator, sent instead of epochs for rounds `since` to `until - 1`; empty: epochs follow.

        Raises:
            RemoteProtocolError: it contradicts the run spec, or rounds before them are missing.
        """
        if not network_hash or until <= self.announced_rounds:  # confirmed before
            return
        self.require_epochs(max(since, 1))
        if self._digests.combined_digest(since, until) != network_hash:
            raise RemoteProtocolError(
                f"in rounds {since} to {until - 1} the senders and weights must be those of the run spec, and the "
                "coordinator's digest of them is another one: do both run the same version, with the same code of your own?"
            )
        self.announced_rounds = until
        self._last_part = self.get_round_part(until - 1)

    def require_epochs(self, until: int) -> None:
        """Check that rounds below `until` need no further epoch.

        Raises:
            RemoteProtocolError: something changes in one of them.
        """
        if self._constant_part is not None and self.announced_rounds:
            self.announced_rounds = max(self.announced_rounds, until)
        checked_until = min(until, self.announced_rounds + self._network.horizon)  # later rounds repeat these
        while self.announced_rounds < checked_until:
            if self.announced_rounds == 0 or self.get_round_part(self.announced_rounds) != self._last_part:
                raise RemoteProtocolError(f"an epoch for round {self.announced_rounds} must come first, got none")
            self.announced_rounds += 1
        self.announced_rounds = max(self.announced_rounds, until)

    def forget(self, t: int) -> None:
        """Forget round t, which is over."""
        self._cached_parts.pop(t, None)
        self._rounds_done = t + 1

    def _format_names(self, learners: Iterable[int]) -> str:
        return ", ".join(format_learner_name(self._names, j) for j in sorted(learners)) or "none"

    def _format_weights(self, in_weights: Mapping[int, float]) -> str:
        return (
            ", ".join(f"{format_learner_name(self._names, j)} {in_weights[j]:.6g}" for j in sorted(in_weights))
            or "none"
        )

    def _compute_part(self, t: int) -> _RoundPart:
        mixing, i = self._network.mixing(t), self.index
        return _RoundPart(mixing.in_neighbour_weights(i), mixing.out_neighbours(i), float(mixing.own_weights[i]))
