"""What LDP-DOL's messages cost (Chen & Wang 2025, section IV).

With the received messages fixed, a learner's clean state `theta_t` is a function of its records, and its messages are
independent Laplace vectors around it. So the loss of message t is at most `sqrt(n) Phi_t / rho_t`, where `Phi_t` bounds
the l2 change of `theta_t` when records are replaced. `Phi` obeys a recursion in scalars that depends on no data:

    s_t       = 1 - a gamma_t - lambda_t r
    loose     |s_t| Phi + lambda_t (L Phi + C)                                  (19), Theorem 5-(i)
    smooth    |s_t| Phi + lambda_t (L Phi + C m_t/n_t)                          (22)
    convex    max(|s_t|, |s_t - lambda_t L|) Phi + lambda_t C m_t/n_t
    clip      |s_t| Phi + lambda_t min(L Phi + C m_t/n_t, 2G)
    best      the least of those that apply, in every round anew

`n_t` records were seen up to round t, `m_t` of them replaced; with one record a round, the first one replaced,
`m_t/n_t = 1/(t+1)`. A history gradient is a mean of `n_t` record gradients. Replacing changes `m_t` of them, each by at
most C; moving theta by Phi changes it by at most L Phi, or 2G if each is clipped. `convex` holds because a gradient
step on a convex L-smooth f contracts. Projection does not expand, and no two states are further apart than the
diameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import CheckFailed, SpecError
from sottovoce.noise import grid
from sottovoce.privacy.constants import _NUMBERS, Constants
from sottovoce.privacy.guarantee import Constant, Guarantee, ThreatModel

Mode = Literal["loose", "smooth", "convex", "clip", "best"]
_SQRT2 = math.sqrt(2.0)

LONGEST_HEAD = 2**20
"""Rounds after which `infinite_horizon` gives up looking for the start of its tail."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """The numbers that all learners share."""

    lam0: float
    v: float
    gam0: float
    u: float

    def step_size(self, t: int) -> float:
        """`lambda_t = lambda_0 / (t+1)^v`."""
        return self.lam0 * math.pow(t + 1.0, -self.v)

    def coupling(self, t: int) -> float:
        """`gamma_t = gamma_0 / (t+1)^u`."""
        return self.gam0 * math.pow(t + 1.0, -self.u)


@dataclass(frozen=True, slots=True)
class LearnerScales:
    """The numbers of one learner: `a = |w_ii|`, dimension n, noise size sigma and growth varsigma."""

    own_weight: float
    dim: int
    sigma: float
    varsigma: float

    def laplace_scale(self, t: int) -> float:
        """`rho_t = sigma / sqrt(2) * (t+1)^varsigma`."""
        return self.sigma / _SQRT2 * math.pow(t + 1.0, self.varsigma)


Step = Callable[[float, float, float, float], float]
"""`Phi_t`, `s_t`, `lambda_t`, `m_t/n_t` to `Phi_{t+1}`, before the cap at the diameter."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The recursions of the module's head, one method each."""

    change: float
    smoothness: float
    swing: float

    def loose(self, phi: float, s: float, lam: float, share: float) -> float:
        return abs(s) * phi + lam * (self._moved(phi) + self.change)

    def smooth(self, phi: float, s: float, lam: float, share: float) -> float:
        return abs(s) * phi + lam * (self.smoothness * phi + share * self.change)

    def convex(self, phi: float, s: float, lam: float, share: float) -> float:
        return max(abs(s), abs(s - lam * self.smoothness)) * phi + lam * share * self.change

    def clip(self, phi: float, s: float, lam: float, share: float) -> float:
        return abs(s) * phi + lam * min(self._moved(phi) + share * self.change, self.swing)

    def best(self, phi: float, s: float, lam: float, share: float) -> float:  # `clip` is never above `smooth`
        return min(self.clip(phi, s, lam, share), self.convex(phi, s, lam, share))

    def _moved(self, phi: float) -> float:
        return self.smoothness * phi if phi > 0.0 else 0.0  # L may be infinite


def require_mode(mode: Mode, constants: Constants) -> None:
    """Refuse a mode whose proof does not cover these constants. `best` falls back to what applies, so it never fails.

    Raises:
        CheckFailed: SMOOTHNESS, NOT_CONVEX or CONVEX_CLIPPED.
    """
    if mode in ("smooth", "convex") and constants.smoothness == math.inf:
        text = 'this accounting mode needs a known smoothness constant; use mode "clip"'
        raise CheckFailed("SMOOTHNESS", f'{text}, got mode "{mode}" with smoothness inf')
    if mode == "convex" and not constants.convex:
        raise CheckFailed("NOT_CONVEX", 'this loss is not convex; mode "convex" does not apply')
    if mode == "convex" and not constants.convex_step:
        text = 'clipped gradients of this loss are not gradients of a convex function; mode "convex" does not apply'
        raise CheckFailed("CONVEX_CLIPPED", f"{text}, got clip_norm={constants.clip_norm}")


def _step(mode: Mode, constants: Constants) -> Step:
    require_mode(mode, constants)
    steps = _Steps(constants.change, constants.smoothness, 2 * constants.clip_norm)
    best = steps.best if constants.convex_step else steps.clip
    table: dict[str, Step] = {"loose": steps.loose, "smooth": steps.smooth, "convex": steps.convex, "clip": steps.clip}
    return table.get(mode, best)


class LdpDolAccountant:
    """Running meter of one learner: implements `Accountant`, O(1) a round.

    Raises:
        CheckFailed: the mode does not apply to the constants (`require_mode`).
    """

    def __init__(self, mode: Mode, constants: Constants, schedules: Schedules, learner: LearnerScales) -> None:
        self._step = _step(mode, constants)
        self._ridge, self._diameter = constants.ridge, constants.diameter
        self._schedules, self._learner, self._root = schedules, learner, math.sqrt(learner.dim)
        self._round = self._seen = self._replaced = 0
        self._phi = 0.0

    @property
    def sensitivity(self) -> float:
        """`Phi_t` of the current round: l2."""
        return self._phi

    def next_loss(self) -> float:
        """`(sqrt(n) Phi_t + n grid_t) / rho_t`, or 0 while nothing can differ.

        The release rounds the state to a lattice, which can part two states by one more spacing in every coordinate.
        """
        if self._phi == 0.0:
            return 0.0
        scale = self._learner.laplace_scale(self._round)
        return (self._root * self._phi + self._learner.dim * float(grid(scale))) / scale

    def advance(self, new_records: int, replaced: int | None = None) -> None:
        """The round is over and brought `new_records` records, `replaced` of which differ between the two worlds.

        By default one record of the first round that brings any: no later record costs more. A record that is used
        again is replaced again.

        Raises:
            SpecError: not `0 <= replaced <= new_records`.
        """
        if replaced is None:
            replaced = 1 if new_records and not self._seen else 0
        if not 0 <= replaced <= new_records:
            raise SpecError(f"replaced must lie in [0, new_records={new_records}], got {replaced}")
        self._seen += new_records
        self._replaced += replaced
        if self._replaced:
            self._phi = self._next_sensitivity()
        self._round += 1

    def _next_sensitivity(self) -> float:
        lam = self._schedules.step_size(self._round)
        s = 1.0 - self._learner.own_weight * self._schedules.coupling(self._round) - lam * self._ridge
        phi = self._step(self._phi, s, lam, self._replaced / self._seen)
        return phi if phi < self._diameter else self._diameter  # in this order, not-a-number (0 * inf) is the diameter


def _losses(accountant: LdpDolAccountant, learner: LearnerScales, rounds: int, batch_size: int = 1) -> Iterator[float]:
    """`sqrt(n) Phi_t / rho_t`, without lattice, of equal batches."""
    for t in range(rounds):
        yield math.sqrt(learner.dim) * accountant.sensitivity / learner.laplace_scale(t)
        accountant.advance(batch_size)


def paper_epsilon(
    constants: Constants, schedules: Schedules, learner: LearnerScales, rounds: int, smallest_own_weight: float
) -> FloatArray:
    """`(rounds,)`: the paper's own cumulative epsilon after messages 0..t, Theorem 5-(i), for comparison.

    Its double sum is recursion (19), with `w_bar = min_j |w_jj|` in place of the own weight and the ridge as part of L.
    It knows neither batches nor a diameter. T rounds send messages 0..T-1; the paper sums to T.
    """
    smoothness = constants.smoothness + constants.ridge
    theirs = replace(constants, smoothness=smoothness, ridge=0.0, diameter=math.inf)
    learner = replace(learner, own_weight=smallest_own_weight)
    accountant = LdpDolAccountant("loose", theirs, schedules, learner)
    return np.cumsum(np.fromiter(_losses(accountant, learner, rounds), np.float64, rounds))


def infinite_horizon(
    mode: Mode, constants: Constants, schedules: Schedules, learner: LearnerScales, batch_size: int = 1
) -> float:
    """Bound on epsilon over infinitely many rounds, each bringing at least `batch_size` records, one of all replaced.

    The recursion runs to a round T1; from there on `Phi_t <= K (t+1)^-p` with `p = 1 + v - u`, and the rest sums to
    `sqrt(2n)/sigma K zeta(p + varsigma, T1 + 1)` (Hurwitz). Infinite where there is no such bound or it is out of
    reach: `u >= v`, mode `loose`, an unknown L, or T1 above `LONGEST_HEAD`. It leaves out the lattice term of
    `next_loss`, about `n 2^-40` a round at most, whose sum diverges.

    Raises:
        CheckFailed: the mode does not apply to the constants.
        SpecError: SciPy is missing.
    """
    require_mode(mode, constants)
    if schedules.u >= schedules.v or mode == "loose" or constants.smoothness == math.inf:
        return math.inf
    tails = (True, False) if mode == "best" and constants.convex_step else (mode == "convex",)
    return min(_head_and_tail(mode, constants, schedules, learner, batch_size, tail) for tail in tails)


def _head_and_tail(
    mode: Mode, constants: Constants, schedules: Schedules, learner: LearnerScales, batch_size: int, convex: bool
) -> float:
    """The bound of `infinite_horizon` with the tail of mode `convex`, or of `smooth`."""
    try:
        from scipy.special import zeta
    except ImportError:
        raise SpecError("an infinite-horizon bound needs SciPy: pip install 'sottovoce[audit]'") from None
    start = _tail_start(constants, schedules, learner.own_weight, convex)
    if start is None:
        return math.inf
    t1, margin = start
    accountant = LdpDolAccountant(mode, constants, schedules, learner)
    head = math.fsum(_losses(accountant, learner, t1, batch_size))
    p = 1.0 + schedules.v - schedules.u
    k = max(schedules.lam0 * constants.change / batch_size / margin, accountant.sensitivity * math.pow(t1 + 1.0, p))
    return head + math.sqrt(2.0 * learner.dim) / learner.sigma * k * float(zeta(p + learner.varsigma, t1 + 1.0))


def _tail_start(constants: Constants, schedules: Schedules, a: float, convex: bool) -> tuple[int, float] | None:
    """First power of two T1 with `c' >= a gamma_0 / 2`, and `c'`; None if there is none up to `LONGEST_HEAD`.

    From T1 on, a step must shrink Phi by `1 - c (t+1)^-u`. That needs `|s_t| <= 1 - a gamma_t` (for `convex`, of
    `s_t - lambda_t L` too), so coupling and ridge must have become small enough not to overshoot.
    """
    growth = 0.0 if convex else constants.smoothness * schedules.lam0
    push = 2 * constants.ridge + constants.smoothness if convex else constants.ridge
    t1 = 1
    while t1 <= LONGEST_HEAD:
        c = a * schedules.gam0 - growth * (t1 + 1.0) ** (schedules.u - schedules.v)
        margin = c - (1.0 + schedules.v - schedules.u) * (t1 + 1.0) ** (schedules.u - 1.0)
        steady = schedules.step_size(t1) * push <= 2.0 * (1.0 - a * schedules.coupling(t1))
        if steady and 0.0 < a * schedules.gam0 / 2.0 <= margin:
            return t1, margin
        t1 *= 2
    return None


def ldp_dol_guarantee(
    mode: Mode,
    constants: Constants,
    schedules: Schedules,
    learner: LearnerScales,
    rounds: int,
    *,
    enforced_by: Mapping[str, str],
    smallest_own_weight: float | None = None,
    counts: IntArray | None = None,
    replaced: IntArray | None = None,
) -> Guarantee:
    """The meter run over the planned rounds.

    Args:
        enforced_by: what makes each finite field of `constants` true (`grad_change`, …), and `own_weight`.
        smallest_own_weight: `min_j |w_jj|` over all learners, for the paper's formula (default: the own weight).
        counts: `(rounds,)` new records of each round (default: one each).
        replaced: `(rounds,)` of them that differ (default: one record of the first round that brings any).

    Raises:
        CheckFailed: the mode does not apply to the constants.
        SpecError: wrong shapes or counts, or a constant that nothing enforces.
    """
    plan = _planned("counts", np.ones(rounds, np.int64) if counts is None else counts, rounds)
    changes = None if replaced is None else _planned("replaced", replaced, rounds)
    smallest = learner.own_weight if smallest_own_weight is None else smallest_own_weight
    # One replaced record among at least `batch` new ones a round; what is used again has no end to be planned for.
    batch, uses = min(plan, default=1), 1 if changes is None else sum(changes)
    endless = batch > 0 and uses <= 1
    return Guarantee(
        threat_model=ThreatModel.WIRE,
        adjacency=f"{uses} record{'s' * (uses != 1)} of one learner replaced (event level, numbers of records public)",
        mode=mode,
        per_round=_run(LdpDolAccountant(mode, constants, schedules, learner), plan, changes),
        paper=paper_epsilon(constants, schedules, learner, rounds, smallest),
        infinite_horizon=infinite_horizon(mode, constants, schedules, learner, batch) if endless else math.inf,
        proof="Chen & Wang 2025, Theorem 5 with (17)-(22) and the learner's own |w_ii|; sottovoce.algorithms.ldp_dol",
        constants=_grounds(constants, learner, enforced_by),
    )


def _planned(name: str, numbers: IntArray, rounds: int) -> list[int]:
    plan: list[int] = np.asarray(numbers).tolist()
    if np.shape(numbers) != (rounds,) or any(number < 0 or number != int(number) for number in plan):
        raise SpecError(f"{name} must be {rounds} whole numbers of at least 0, got {numbers}")
    return [int(number) for number in plan]


def _run(accountant: LdpDolAccountant, counts: list[int], replaced: list[int] | None) -> FloatArray:
    """`(rounds,)` losses."""
    losses = np.empty(len(counts))
    for t, new_records in enumerate(counts):
        losses[t] = accountant.next_loss()
        accountant.advance(new_records, None if replaced is None else replaced[t])
    return losses


def _grounds(constants: Constants, learner: LearnerScales, enforced_by: Mapping[str, str]) -> dict[str, Constant]:
    """Every finite constant with what enforces it."""
    values = {name: float(getattr(constants, name)) for name in _NUMBERS} | {"own_weight": learner.own_weight}
    finite = {name: value for name, value in values.items() if value < math.inf}
    missing = sorted(finite.keys() - enforced_by.keys())
    if missing:
        raise SpecError(f"enforced_by must name what makes each finite constant true, got none for {missing}")
    return {name: Constant(value, enforced_by[name]) for name, value in finite.items()}
