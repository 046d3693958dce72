"""The parameters of LDP-DOL, and how a run is made of them."""

from __future__ import annotations

from typing import Literal

from sottovoce_core.algorithms.ldp_dol.algorithm import LdpDol
from sottovoce_core.algorithms.ldp_dol.conditions import check_ldp_dol, large_statistics
from sottovoce_core.algorithms.ldp_dol.sensitivity import Mode, Schedules
from sottovoce_core.algorithms.setting import AlgorithmSpec, Caveat, PerLearner, Setting, require_scales, times
from sottovoce_core.privacy.guarantee import regularity_of


class LdpDolSpec(AlgorithmSpec):
    """LDP-DOL (Chen & Wang 2025). `conditions` has what the theory asks of these numbers."""

    name: Literal["ldp-dol"]
    lam0: float = 1.0
    v: float = 0.77
    gam0: float = 1.0
    u: float = 0.65
    sigma: PerLearner = 1.0
    varsigma: PerLearner = 0.1
    accounting: Mode = "best"

    def build(self, setting: Setting) -> tuple[LdpDol, tuple[Caveat, ...]]:
        topology = setting.fixed_whole
        algorithm = LdpDol(
            dim=setting.dim,
            rounds=setting.rounds,
            schedules=Schedules(self.lam0, self.v, self.gam0, self.u),
            sigma=setting.per_learner(self.sigma, "algorithm.sigma"),
            varsigma=setting.per_learner(self.varsigma, "algorithm.varsigma"),
            network=setting.network,
            loss=setting.loss,
            decision_set=setting.decision_set,
            accounting=self.accounting,
        )
        findings = check_ldp_dol(
            algorithm.schedules,
            self.accounting,
            algorithm.sigma,
            algorithm.varsigma,
            topology,
            regularity_of(setting.loss, setting.decision_set, setting.dim),
            strong_convexity=setting.loss.ridge if setting.loss.convex else 0.0,
        )
        ends = (0, setting.rounds - 1)  # the noise grows with the rounds
        require_scales(algorithm.noise_scale(i, t) for i in range(setting.n_learners) for t in ends)
        return algorithm, (*findings, *large_statistics(setting.loss, setting.dim))

    def noisier(self, factors: tuple[float, ...]) -> LdpDolSpec:
        return self.model_copy(update={"sigma": times(self.sigma, factors)})
