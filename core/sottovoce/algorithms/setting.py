"""What a run gives to its algorithm: everything that is public and fixed before the first round."""

from __future__ import annotations

from dataclasses import dataclass

from sottovoce.algorithms.per_learner import PerLearner, spread
from sottovoce.decision_sets import DecisionSet
from sottovoce.errors import CheckFailed
from sottovoce.losses import Loss
from sottovoce.network.fixed import FixedNetwork
from sottovoce.network.network import Network, PartialNetwork
from sottovoce.registry import ENDLESS


@dataclass(frozen=True, slots=True)
class Caveat:
    """A condition that voids a theorem without making the run unsafe: the run goes on, and its user is told.

    Attributes:
        code: its name in the docs.
        text: the condition, the value found, and which theorem does not apply.
    """

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Setting:
    """The surroundings of an algorithm.

    Attributes:
        rounds: planned; `ENDLESS`: no end is.
        n_features: features of a record.
        loss: of one record.
        decision_set: where parameters may lie.
        network: who hears whom, with which weights.
        names: of the learners, by index, for what is told of one; empty: nobody has said.
    """

    rounds: int
    n_features: int
    loss: Loss
    decision_set: DecisionSet
    network: Network
    names: tuple[str, ...] = ()

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return self.network.n_learners

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.loss.dim(self.n_features)

    @property
    def fixed_network(self) -> FixedNetwork:
        """The network as one fixed undirected graph with symmetric weights.

        Raises:
            CheckFailed: TOPOLOGY_FIXED.
        """
        if isinstance(self.network, PartialNetwork):
            text = "this algorithm needs all learners in all rounds, got absences: leave them out"
            raise CheckFailed("TOPOLOGY_FIXED", text)
        return self.fixed_whole

    @property
    def fixed_whole(self) -> FixedNetwork:
        """The same where some learners may be away: the network of all of them.

        Raises:
            CheckFailed: TOPOLOGY_FIXED.
        """
        whole = self.network.whole if isinstance(self.network, PartialNetwork) else self.network
        if isinstance(whole, FixedNetwork):
            return whole
        raise CheckFailed(
            "TOPOLOGY_FIXED",
            "this algorithm needs one undirected graph with symmetric weights for all rounds, got a network that changes, is "
            "directed, or has in_degree or out_degree weights; give topology.graph, undirected, with other weights",
        )

    def require_end(self, what: str) -> None:
        """Refuse a run without a planned end.

        Args:
            what: needs one.

        Raises:
            CheckFailed: ENDLESS.
        """
        if self.rounds >= ENDLESS:
            raise CheckFailed(
                "ENDLESS", f"{what} needs a number of rounds, got rounds: null; give one, or another algorithm"
            )

    def per_learner(self, value: PerLearner, field: str) -> tuple[float, ...]:
        """`value` as one number per learner.

        Args:
            value: one number, or one per learner.
            field: as a spec names it, for the error.

        Raises:
            SpecError: a list of another length than the number of learners.
        """
        return spread(value, self.n_learners, field)
