"""Parameters of dual averaging and their conditions (Cheng, Liao & Li 2023, corrected).

A condition of the privacy guarantee, or of convergence to the minimiser, raises an error. A condition of a theorem only
gives a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from sottovoce_core.algorithms.dual_averaging.accounting import calibrate_sigma
from sottovoce_core.algorithms.dual_averaging.algorithm import CoordinateMask, DualAveraging
from sottovoce_core.algorithms.run_context import AlgorithmSpec, RunContext, RunWarning, require_scales
from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, FloatArray
from sottovoce_core.decision_sets import Box, DecisionSet
from sottovoce_core.errors import SpecError, require
from sottovoce_core.losses import Loss
from sottovoce_core.network.network import describe_disconnection
from sottovoce_core.network.weights import Mixing
from sottovoce_core.registry import MAX_MAGNITUDE, MIN_MAGNITUDE

# ---- conditions -------------------------------------------------------------------------------------------------------

StochasticAxes = Literal["doubly", "columns"]
"""Axes along which the weights of every round must sum to one: rows and columns, or columns only."""

_MAX_CHECKED_ROUNDS = 4096
"""Maximum number of rounds whose weights are checked: periods are shorter, and random graphs follow a rule."""

_ROUNDING = 1e-9
"""Tolerance of sums of weights around one."""


def _check_network(context: RunContext, kind: StochasticAxes, *, rows_suffice: bool) -> Iterator[RunWarning]:
    """Raise W_SHAPE, W_NEGATIVE, SELF_WEIGHT, DOUBLY_STOCHASTIC or COLUMN_STOCHASTIC; warn of ROW_STOCHASTIC, CONNECTIVITY.

    Args:
        context: run whose network's weights are checked, up to `_MAX_CHECKED_ROUNDS` of the planned rounds.
        kind: required kind of weights.
        rows_suffice: warn of weights whose rows alone sum to one, instead of raising an error.
    """
    network, rounds = context.network, context.rounds
    has_link, only_rows = np.zeros((network.n_learners, network.n_learners), dtype=bool), None
    for t in range(min(rounds, network.horizon, _MAX_CHECKED_ROUNDS)):
        mixing = network.planned_mixing(t)
        _check_entries(mixing, network.n_learners, t)
        if not _check_sums(mixing, t, kind, rows_suffice) and only_rows is None:
            only_rows = t
        has_link |= mixing.neighbour_weights > 0
    if only_rows is not None:
        text = "weights are row-stochastic only: every block gets a step size of its own, and no regret bound holds"
        yield RunWarning("ROW_STOCHASTIC", f"{text}, got columns that do not sum to one in round {only_rows}")
    if disconnection := describe_disconnection(has_link, context.names):
        text = "messages of some learners never reach others: the regret bounds do not apply"
        yield RunWarning("CONNECTIVITY", f"{text}, got {disconnection} in all rounds")


def _check_entries(mixing: Mixing, n: int, t: int) -> None:
    shapes = mixing.neighbour_weights.shape, mixing.own_weights.shape
    require(shapes == ((n, n), (n,)), "W_SHAPE", f"weights must be ({n}, {n}) and ({n},), got {shapes} in round {t}")
    matrix = mixing.matrix
    finite = int(np.isfinite(matrix).sum())
    require(finite == n * n, "W_SHAPE", f"all {n * n} weights must be finite, got {finite} in round {t}")
    require(bool((matrix >= 0).all()), "W_NEGATIVE", f"weights must be non-negative, got {matrix.min()} in round {t}")
    own = float(mixing.own_weights.min())
    require(own > 0, "SELF_WEIGHT", f"every learner needs a positive self weight, got {own:.6g} in round {t}")


def _check_sums(mixing: Mixing, t: int, kind: StochasticAxes, rows_suffice: bool) -> bool:
    """Return whether the weights are of the required kind; False if that gives only a warning."""
    rows, columns = (float(np.abs(mixing.matrix.sum(axis=axis) - 1.0).max()) for axis in (1, 0))
    got = f"got rows off one by {rows:.3g} and columns by {columns:.3g} in round {t}"
    if kind == "columns":
        text = "DPSDA-PS and DPPS need column-stochastic weights, 1/outdegree of the sender, itself included"
        require(columns <= _ROUNDING, "COLUMN_STOCHASTIC", f"{text} (out_degree weights), {got}")
        return True
    if rows <= _ROUNDING < columns and rows_suffice:
        return False
    text = "DPSDA-C needs doubly stochastic weights, for example Metropolis (dpsda-ps takes directed graphs)"
    require(max(rows, columns) <= _ROUNDING, "DOUBLY_STOCHASTIC", f"{text}, {got}")
    return True


def _method_findings(
    loss: Loss, decision_set: DecisionSet, *, split: bool, noised: bool, sigma: float
) -> Iterator[RunWarning]:
    """Yield the warnings NOT_CONVEX, PRODUCT_SET, CLEAN_PRIMAL and NO_NOISE.

    Args:
        loss, decision_set: those of the run.
        split: several learners own a block each.
        noised: decisions are computed from messages.
        sigma: noise scale.
    """
    if not loss.is_convex:
        yield RunWarning(
            "NOT_CONVEX", f"no regret bound holds for a loss that is not convex, got {type(loss).__name__}"
        )
    if split and not isinstance(decision_set, Box):
        text = "decision_set is no product of the learners' blocks (a box is): the decision combined from all blocks"
        yield RunWarning("PRODUCT_SET", f"{text} can be outside while learners disagree, got {decision_set}")
    if not noised and sigma > 0:
        text = "primal: clean guarantees nothing if decisions are observed: with the messages, a decision reveals its gradient"
        yield RunWarning("CLEAN_PRIMAL", f"{text} exactly; primal: noised covers both")
    if sigma == 0:
        yield RunWarning("NO_NOISE", "sigma is 0: messages are sent without noise and without a guarantee")


# ---- parameters -------------------------------------------------------------------------------------------------------


class _DualAveragingSpec(AlgorithmSpec):
    """Parameters that all four methods share."""

    step: float = 1.0
    """Step size factor: `alpha_t = step / sqrt(t)`."""
    sigma: float | None = None
    """Laplace scale (default: 1, unless epsilon is given). 0: no noise, no guarantee."""
    epsilon: float | None = None
    """Maximum cost of one replaced loss over the whole run (dpsda: all learners together), instead of sigma."""
    clip: float | None = None
    """Maximum l2 norm of the own block of a round's gradient, by clipping (None: the loss's own bound)."""
    batch: Literal["mean", "sum"] = "mean"
    """Loss of a round: mean or sum over its records (the paper's experiments: sum)."""
    primal: Literal["noised", "clean"] = "noised"
    """Source of decisions: the noised message, or the clean dual vector (the paper)."""

    has_shared_noise_scale: ClassVar[bool] = True

    def scale_noise(self, factors: tuple[float, ...]) -> _DualAveragingSpec:
        if self.sigma == 0 or len(set(factors)) > 1:
            raise SpecError("algorithm.sigma must be above 0, and one number for all learners, to be scaled")
        if self.epsilon is not None:
            return self.model_copy(update={"epsilon": self.epsilon / factors[0]})
        return self.model_copy(update={"sigma": (1.0 if self.sigma is None else self.sigma) * factors[0]})

    def _require_numbers(self) -> None:
        """Raise STEP, SIGMA, EPSILON or CLIP for numbers out of range."""
        step, sigma, epsilon, clip = self.step, self.sigma, self.epsilon, self.clip
        require(0 < step < math.inf, "STEP", f"step must be positive and finite, got {step}")
        one = sigma is None or epsilon is None
        require(one, "SIGMA", f"give sigma or epsilon, got sigma={sigma} and epsilon={epsilon}")
        finite = sigma is None or 0 <= sigma < math.inf
        require(finite, "SIGMA", f"sigma must be finite and positive, or 0 for no noise, got {sigma}")
        positive = epsilon is None or 0 < epsilon < math.inf
        require(positive, "EPSILON", f"epsilon must be positive and finite, got {epsilon}")
        text = f"clip must be positive, and within [{MIN_MAGNITUDE:g}, {MAX_MAGNITUDE:g}]"
        require(clip is None or MIN_MAGNITUDE <= clip <= MAX_MAGNITUDE, "CLIP", f"{text}, got {clip}")

    def _build(
        self,
        context: RunContext,
        owned: CoordinateMask,
        noisy: CoordinateMask,
        shared: bool,
        kind: StochasticAxes,
        allow_rows: bool,
    ) -> tuple[DualAveraging, tuple[RunWarning, ...]]:
        self._require_numbers()
        rounds, push = context.rounds, kind == "columns"
        findings = [*_check_network(context, kind, rows_suffice=allow_rows)]
        unscaled = DualAveraging(
            name=self.name,
            dim=context.dim,
            rounds=rounds,
            step=self.step,
            sigma=1.0 if self.sigma is None else self.sigma,
            clip_threshold=math.inf if self.clip is None else self.clip,
            has_mean_loss=self.batch == "mean",
            has_noised_primal=self.primal == "noised",
            has_push_sum=push,
            has_shared_loss=shared,
            owned_mask=owned,
            noise_mask=noisy,
            push_weights=_push_weights(context) if push else np.ones((1, context.n_learners)),
            loss=context.loss,
            decision_set=context.decision_set,
        )
        bound = unscaled.gradient_bound
        text = "noise needs a strict bound on the gradient of a round: set clip"
        got = f"got gradient_bound={bound}, a finite one with clip, or with batch: mean and a loss of bounded gradients"
        require(unscaled.sigma == 0 or bound < math.inf, "CLIP", f"{text}, {got}")
        algorithm = unscaled
        if self.epsilon is not None:
            context.require_finite_rounds("noise that follows from the epsilon of all rounds (give sigma instead)")
            # Losses of all learners add up if they hold the same loss; otherwise they differ only in w.
            parts = [unscaled.sensitivity(i) for i in range(context.n_learners)]
            groups = [parts] if shared else [[part] for part in parts]
            algorithm = replace(unscaled, sigma=max(calibrate_sigma(group, rounds, self.epsilon) for group in groups))
        require_scales([algorithm.sigma], "SIGMA")
        split = shared and context.n_learners > 1
        noised, sigma = algorithm.has_noised_primal, algorithm.sigma
        findings += _method_findings(context.loss, context.decision_set, split=split, noised=noised, sigma=sigma)
        return algorithm, tuple(findings)


class _BlocksSpec(_DualAveragingSpec):
    """Parameters of methods with one loss that all learners hold, and a block of coordinates for each."""

    noise_on: Literal["own_block", "all"] = "own_block"
    """Coordinates with noise. Other blocks are sums of earlier messages, where noise protects nothing (`all`: the paper)."""

    def _build_blocks(
        self, context: RunContext, kind: StochasticAxes, allow_rows: bool
    ) -> tuple[DualAveraging, tuple[RunWarning, ...]]:
        n, dim = context.n_learners, context.dim
        require(dim >= n, "BLOCKS", f"every learner needs a coordinate of its own, got {dim} for {n} learners")
        owned = _blocks(dim, n)
        noisy = owned if self.noise_on == "own_block" else np.ones_like(owned)
        return self._build(context, owned, noisy, True, kind, allow_rows)


class DpsdaCSpec(_BlocksSpec):
    """DPSDA-C (Cheng, Liao & Li 2023): doubly stochastic weights."""

    name: Literal["dpsda-c"]
    allow_row_stochastic: bool = False
    """Allow weights whose rows alone sum to one, with a warning. For boxes only: on other sets they lead to a wrong point."""

    def build(self, context: RunContext) -> tuple[DualAveraging, tuple[RunWarning, ...]]:
        allowed = self.allow_row_stochastic and isinstance(context.decision_set, Box)
        return self._build_blocks(context, "doubly", allowed)


class DpsdaPsSpec(_BlocksSpec):
    """DPSDA-PS (Cheng, Liao & Li 2023): push-sum over directed graphs."""

    name: Literal["dpsda-ps"]

    def build(self, context: RunContext) -> tuple[DualAveraging, tuple[RunWarning, ...]]:
        return self._build_blocks(context, "columns", False)


class DpcdaSpec(_DualAveragingSpec):
    """DPCDA, private centralised dual averaging: one learner."""

    name: Literal["dpcda"]

    def build(self, context: RunContext) -> tuple[DualAveraging, tuple[RunWarning, ...]]:
        n = context.n_learners
        require(n == 1, "ONE_LEARNER", f"dpcda is for one learner, got {n}; dpsda-c is the same for several")
        everything = np.ones((1, context.dim), dtype=bool)
        return self._build(context, everything, everything, True, "doubly", False)


class DppsSpec(_DualAveragingSpec):
    """DPPS (Han et al. 2022), reconstructed from its abstract: private push-sum dual averaging."""

    name: Literal["dpps"]
    primal: Literal["noised", "clean"] = "clean"

    def build(self, context: RunContext) -> tuple[DualAveraging, tuple[RunWarning, ...]]:
        everything = np.ones((context.n_learners, context.dim), dtype=bool)
        return self._build(context, everything, everything, False, "columns", False)


def _blocks(dim: int, n_learners: int) -> CoordinateMask:
    """Return the ownership mask `(learners, dim)`: contiguous blocks, the first `dim mod n` of them one longer."""
    lengths = dim // n_learners + (np.arange(n_learners) < dim % n_learners)
    owner = np.repeat(np.arange(n_learners), lengths)
    mask: CoordinateMask = owner == np.arange(n_learners)[:, None]
    return mask


def _push_weights(context: RunContext) -> FloatArray:
    """Compute `w_t` of push-sum, `(rounds, learners)`, which depends on the network alone."""
    context.require_finite_rounds("push-sum, which computes the weights of all rounds in advance,")
    network, rounds = context.network, context.rounds
    if rounds * network.n_learners > MAX_ARRAY_ELEMENTS:
        raise MemoryError  # build_run explains it
    weights = np.ones((rounds, network.n_learners))
    for t in range(rounds - 1):
        mixing = network.mixing(t)
        weights[t + 1] = mixing.neighbour_weights @ weights[t] + mixing.own_weights * weights[t]
    return weights
