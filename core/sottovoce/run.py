"""From a checked spec to the objects that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sottovoce.algorithms.ldp_dol import LdpDol, constants_of
from sottovoce.algorithms.ldp_dol_checks import Finding, check_ldp_dol
from sottovoce.decision_sets import build_decision_set
from sottovoce.losses import Loss, build_loss
from sottovoce.privacy.ldp_dol import Schedules
from sottovoce.spec import RunSpec
from sottovoce.topology import Topology, build_topology


@dataclass(frozen=True, slots=True)
class Run:
    """A run that may start: every check of its algorithm has passed.

    `warnings` are the conditions that void a theorem without making the run unsafe.
    """

    spec: RunSpec
    topology: Topology
    algorithm: LdpDol
    warnings: tuple[Finding, ...]

    @property
    def loss(self) -> Loss:
        """The loss that turns decisions into predictions."""
        return self.algorithm.loss


def build_algorithm(spec: RunSpec, n_features: int, own_weights: Sequence[float]) -> LdpDol:
    """The algorithm of a spec, for records of `n_features` features and learners of these own weights `|w_ii|`.

    Raises:
        SpecError: a per-learner list of the wrong length, or an empty decision set.
    """
    chosen = spec.algorithm
    return LdpDol(
        dim=n_features,
        rounds=spec.rounds,
        schedules=Schedules(chosen.lam0, chosen.v, chosen.gam0, chosen.u),
        sigma=spec.per_learner(chosen.sigma, "algorithm.sigma"),
        varsigma=spec.per_learner(chosen.varsigma, "algorithm.varsigma"),
        own_weights=tuple(own_weights),
        loss=build_loss(spec.loss),
        decision_set=build_decision_set(spec.decision_set),
        accounting=chosen.accounting,
    )


def build_run(spec: RunSpec, n_features: int) -> Run:
    """Everything that a run needs but its data.

    Raises:
        SpecError: the spec contradicts itself, or a condition of the algorithm does not hold (`CheckFailed`).
    """
    topology = build_topology(spec.topology, spec.n_learners)
    own_weights = [topology.own_weight(i) for i in range(spec.n_learners)]
    algorithm = build_algorithm(spec, n_features, own_weights)
    if spec.privacy.budget is not None:
        spec.per_learner(spec.privacy.budget, "privacy.budget")
    warnings = check_ldp_dol(
        spec.algorithm,
        algorithm.sigma,
        algorithm.varsigma,
        topology,
        constants_of(algorithm.loss, algorithm.decision_set, algorithm.dim),
        strong_convexity=algorithm.loss.ridge,
        budget_requested=True,
        infinite_horizon_requested=False,
    )
    return Run(spec, topology, algorithm, warnings)
