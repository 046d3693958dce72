"""LDP-DOL: locally differentially private distributed online learning (Chen & Wang, IEEE TAC 2025).

Round t of learner i::

    say       y_t = theta_t + noise,  noise ~ Laplace(rho_t),  rho_t = sigma/sqrt(2) (t+1)^varsigma
    hear      y_t^j of every neighbour j
    update    theta_{t+1} = Pro( theta_t + gamma_t sum_j w_ij (y_t^j - theta_t) - lambda_t d_t(theta_t) )

with `lambda_t = lam0/(t+1)^v`, `gamma_t = gam0/(t+1)^u` and `d_t` the mean gradient over all records so far, those of round t
included. The learner uses its own clean theta; its noise never enters its own update. Where theta is said it is first
rounded to the noise's lattice, which changes it by less than 2^-40 scales and is charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce.algorithms.ldp_dol_checks import check_ldp_dol
from sottovoce.arrays import FloatArray, IntArray, Scalars
from sottovoce.decision_sets import DecisionSet
from sottovoce.history import History, start_history
from sottovoce.losses import Loss
from sottovoce.machine import Batch, Heard, Message, Noise, Who
from sottovoce.mechanisms import laplace_density, lattice_of, say_laplace
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.privacy.ldp_dol import (
    Constants,
    LdpDolAccountant,
    LearnerScales,
    Mode,
    Schedules,
    ldp_dol_guarantee,
)
from sottovoce.setting import Finding, Setting
from sottovoce.spec import AlgorithmSpec, PerLearner, times

ENFORCED_BY = {
    "grad_change": "the loss, on rows scaled to feature_bound (and labels clipped to label_bound), clipped to clip_norm",
    "smoothness": "the loss, on rows scaled to feature_bound",
    "clip_norm": "the loss, on rows scaled to feature_bound, and clipping where clip_norm is set",
    "ridge": "the loss, exactly",
    "diameter": "projection onto the decision set",
    "own_weight": "the learner, which refuses a topology whose weights add up to another value",
}


class LdpDolSpec(AlgorithmSpec):
    """LDP-DOL (Chen & Wang 2025). `ldp_dol_checks` has the conditions that the theory puts on these numbers."""

    name: Literal["ldp-dol"]
    lam0: float = 1.0
    v: float = 0.77
    gam0: float = 1.0
    u: float = 0.65
    sigma: PerLearner = 1.0
    varsigma: PerLearner = 0.1
    accounting: Mode = "best"

    def build(self, setting: Setting) -> tuple[LdpDol, tuple[Finding, ...]]:
        topology = setting.topology
        algorithm = LdpDol(
            dim=setting.dim,
            rounds=setting.rounds,
            schedules=Schedules(self.lam0, self.v, self.gam0, self.u),
            sigma=setting.per_learner(self.sigma, "algorithm.sigma"),
            varsigma=setting.per_learner(self.varsigma, "algorithm.varsigma"),
            own_weights=tuple(topology.own_weight(i) for i in range(topology.n_learners)),
            loss=setting.loss,
            decision_set=setting.decision_set,
            accounting=self.accounting,
        )
        findings = check_ldp_dol(
            self,
            algorithm.sigma,
            algorithm.varsigma,
            topology,
            constants_of(setting.loss, setting.decision_set, setting.dim),
            strong_convexity=setting.loss.ridge if setting.loss.convex else 0.0,
            budget_requested=True,
            infinite_horizon_requested=False,
        )
        return algorithm, findings

    def noisier(self, factors: tuple[float, ...]) -> LdpDolSpec:
        return self.model_copy(update={"sigma": times(self.sigma, factors)})


@dataclass(frozen=True, slots=True)
class State:
    """theta_t, the round t, and the records seen."""

    who: Who
    t: int
    theta: FloatArray
    history: History
    sigma: Scalars
    varsigma: Scalars


@dataclass(frozen=True, slots=True)
class LdpDol:
    """The algorithm for one run: all learners' parameters, by index."""

    dim: int
    rounds: int
    schedules: Schedules
    sigma: tuple[float, ...]
    varsigma: tuple[float, ...]
    own_weights: tuple[float, ...]
    """`|w_ii|` of every learner: what its guarantee rests on."""
    loss: Loss
    decision_set: DecisionSet
    accounting: Mode = "best"
    name: str = "ldp-dol"

    def field_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": (self.dim,)}

    def start(self, who: Who) -> State:
        initial = np.broadcast_to(self.loss.initial(self.dim), (*who.lead, self.dim))
        origin = self.decision_set.project(initial)
        return State(who, 0, origin, start_history(self.loss), who.pick(self.sigma), who.pick(self.varsigma))

    def speak(self, state: State, noise: Noise) -> tuple[State, Message]:
        return state, Message({"y": say_laplace(noise, "y", state.t, state.theta, laplace_scale(state))})

    def listen(self, state: State, heard: Heard, batch: Batch) -> State:
        t, theta, ridge = state.t, state.theta, self.loss.ridge
        coupling, step = self.schedules.coupling(t), self.schedules.step_size(t)
        features, labels = self.loss.enforce(batch.features, batch.labels)
        history = state.history.observe(Batch(features, labels, batch.present))
        pulled = heard.weighted_sum("y")
        keep = 1.0 - coupling * heard.total_weight - step * ridge
        moved = keep * theta
        moved += coupling * pulled
        moved -= step * history.gradient(theta)
        theta = self.decision_set.project(moved)
        return State(state.who, t + 1, theta, history, state.sigma, state.varsigma)

    def decision(self, state: State) -> FloatArray:
        return state.theta

    def overheard(self, state: State, message: Message) -> tuple[State, FloatArray]:
        return state, laplace_density(message["y"], state.theta, laplace_scale(state))

    def accountant(self, learner: int) -> LdpDolAccountant:
        return LdpDolAccountant(self.accounting, self._constants(), self.schedules, self._scales(learner))

    def guarantee(self, learner: int, counts: IntArray | None = None, replaced: IntArray | None = None) -> Guarantee:
        return ldp_dol_guarantee(
            self.accounting,
            self._constants(),
            self.schedules,
            self._scales(learner),
            self.rounds,
            enforced_by=ENFORCED_BY,
            smallest_own_weight=min(self.own_weights),
            counts=counts,
            replaced=replaced,
        )

    def lattice(self, learner: int, t: int) -> dict[str, float]:
        return lattice_of("y", self.noise_scale(learner, t))

    def noise_scale(self, learner: int, t: int) -> float:
        return self._scales(learner).laplace_scale(t)

    def _constants(self) -> Constants:
        return constants_of(self.loss, self.decision_set, self.dim)

    def _scales(self, learner: int) -> LearnerScales:
        return LearnerScales(self.own_weights[learner], self.dim, self.sigma[learner], self.varsigma[learner])


def laplace_scale(state: State) -> Scalars:
    """`rho_t = sigma/sqrt(2) (t+1)^varsigma`."""
    return state.sigma / math.sqrt(2.0) * (state.t + 1.0) ** state.varsigma


def constants_of(loss: Loss, decision_set: DecisionSet, dim: int) -> Constants:
    """What accounting needs to know of a loss on a decision set."""
    radius = decision_set.radius(dim)
    return Constants(
        grad_change=loss.gradient_change(radius),
        smoothness=loss.smoothness,
        clip_norm=loss.gradient_bound(radius),
        ridge=loss.ridge,
        diameter=decision_set.diameter(dim),
        convex=loss.convex,
        margin=loss.convex_clipped,
    )
