"""Step sizes and noise scales that a spec may choose for gossip gradient descent; each builds its own schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from sottovoce_core.algorithms.gradient_descent.accounting import RoundSchedule
from sottovoce_core.algorithms.run_context import PerLearner, RunContext, divide_per_learner, multiply_per_learner
from sottovoce_core.errors import SpecError, require
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.privacy.guarantee import Regularity
from sottovoce_core.registry import Positive, Section

# ---- steps -----------------------------------------------------------------------------------------------------------


class PowerStep(Section):
    """`alpha_t = scale / (t+1)^exponent`."""

    kind: Literal["power"] = "power"
    scale: Positive | None = None
    """Scale of the step (None: R/G, radius of the decision set over bound on a record's gradient)."""
    exponent: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Exponent of the decay."""

    def build_schedule(self, context: RunContext, regularity: Regularity) -> RoundSchedule:
        radius = context.decision_set.largest_norm(context.dim)
        bound = regularity.clip_norm + regularity.ridge * radius
        text = "a step without a scale is R/G, which needs a finite bound G on gradients: set step.scale or clip_norm"
        require(self.scale is not None or 0 < bound < math.inf, "STEP_SCALE", f"{text}, got G={bound}")
        return partial(_power, self.scale or radius / bound, -self.exponent)


class GeometricStep(Section):
    """`alpha_t = scale ratio^t`."""

    kind: Literal["geometric"]
    scale: Positive = 1.0
    """First step."""
    ratio: Annotated[float, Field(gt=0, lt=1)]
    """Ratio of consecutive steps."""

    def build_schedule(self, context: RunContext, regularity: Regularity) -> RoundSchedule:
        return partial(_geometric, self.scale, self.ratio)


class HarmonicStep(Section):
    """`alpha_t = scale / (mu (t + shift))`, for strongly convex losses."""

    kind: Literal["harmonic"]
    scale: Positive = 1.0
    """Factor of the step."""
    mu: Positive | None = None
    """Strong convexity (None: the loss's ridge)."""
    shift: Positive = 1.0
    """Rounds added to t."""

    def build_schedule(self, context: RunContext, regularity: Regularity) -> RoundSchedule:
        mu = self.mu or regularity.ridge
        require(mu > 0, "STEP_MU", f"a harmonic step needs mu, or a loss with a positive ridge, got ridge={mu}")
        return partial(_harmonic, self.scale / mu, self.shift)


StepSize = Annotated[PowerStep | GeometricStep | HarmonicStep, Field(discriminator="kind")]
"""Step size of a spec. Each builds the schedule of alpha_t, with the condition STEP_SCALE or STEP_MU."""

# ---- noise -----------------------------------------------------------------------------------------------------------


class ZeroNoise(Section):
    """No noise, and no guarantee."""

    kind: Literal["none"] = "none"

    def build_schedules(
        self, context: RunContext, regularity: Regularity, steps: tuple[RoundSchedule, ...]
    ) -> tuple[RoundSchedule, ...]:
        return _build_each(_power, (0.0,) * context.n_learners, (0.0,) * context.n_learners)

    def scale_by(self, factors: tuple[float, ...]) -> ZeroNoise:
        raise SpecError("algorithm.noise.kind must be power, geometric, harmonic or calibrated to be scaled, got none")


class PowerNoise(Section):
    """`rho_t = sigma/sqrt(2) (t+1)^varsigma`, as in LDP-DOL; sigma 0: no noise."""

    kind: Literal["power"] = "power"
    sigma: PerLearner = 1.0
    """Size sigma of the noise; 0: no noise."""
    varsigma: PerLearner = 0.1
    """Growth of the noise, in [-1, 1]."""

    def build_schedules(
        self, context: RunContext, regularity: Regularity, steps: tuple[RoundSchedule, ...]
    ) -> tuple[RoundSchedule, ...]:
        growth = context.broadcast_to_learners(self.varsigma, "algorithm.noise.varsigma")
        for value in growth:
            require(-1 <= value <= 1, "VARSIGMA_RANGE", f"varsigma must lie in [-1, 1], got {value}")
        sizes = [size / math.sqrt(2.0) for size in _sizes(context, self.sigma, "sigma")]
        return _build_each(_power, sizes, growth)

    def scale_by(self, factors: tuple[float, ...]) -> PowerNoise:
        return self.model_copy(update={"sigma": multiply_per_learner(self.sigma, factors)})


class _ScaledNoise(Section):
    """Noise with a start scale."""

    scale: PerLearner
    """Scale in the first round."""

    def scale_by(self, factors: tuple[float, ...]) -> Self:
        return self.model_copy(update={"scale": multiply_per_learner(self.scale, factors)})


class GeometricNoise(_ScaledNoise):
    """`rho_t = scale ratio^t`."""

    kind: Literal["geometric"] = "geometric"
    ratio: Annotated[float, Field(gt=0, lt=1)]
    """Ratio of consecutive scales."""

    def build_schedules(
        self, context: RunContext, regularity: Regularity, steps: tuple[RoundSchedule, ...]
    ) -> tuple[RoundSchedule, ...]:
        return _build_each(_geometric, _sizes(context, self.scale, "scale"), (self.ratio,) * context.n_learners)


class HarmonicNoise(_ScaledNoise):
    """`rho_t = scale / (t+1)`."""

    kind: Literal["harmonic"] = "harmonic"

    def build_schedules(
        self, context: RunContext, regularity: Regularity, steps: tuple[RoundSchedule, ...]
    ) -> tuple[RoundSchedule, ...]:
        return _build_each(_harmonic, _sizes(context, self.scale, "scale"), (1.0,) * context.n_learners)


class CalibratedNoise(Section):
    """Scale at which a record costs `epsilon` in the first message that it influences: proportional to the step before it.

    `charged: every_round` is for a T-fold composition: T times the noise.
    """

    kind: Literal["calibrated"] = "calibrated"
    epsilon: PerLearner = 1.0
    """Privacy loss of a record in the first message that it influences."""
    charged: Literal["once", "every_round"] = "once"
    """once: a record costs epsilon where it influences one message. every_round: epsilon is shared by all rounds."""

    def build_schedules(
        self, context: RunContext, regularity: Regularity, steps: tuple[RoundSchedule, ...]
    ) -> tuple[RoundSchedule, ...]:
        require_gradient_change(regularity.clipped_gradient_change)
        targets = context.broadcast_to_learners(self.epsilon, "algorithm.noise.epsilon")
        factors = [self._factor(each, context, regularity.clipped_gradient_change) for each in targets]
        return _build_each(_follow_step, steps, factors)

    def _factor(self, epsilon: float, context: RunContext, change: float) -> float:
        """Compute `sqrt(n) C / epsilon`, with the cost of the lattice subtracted from epsilon."""
        if self.charged == "every_round":
            context.require_finite_rounds("noise that shares its epsilon among all rounds (charged: every_round)")
        messages, lattice = context.rounds if self.charged == "every_round" else 1, context.dim * 2.0**-LATTICE_BITS
        share = epsilon / messages - lattice
        text = f"noise.epsilon must be finite and above {messages * lattice:.3g}, the cost of rounding to the lattice"
        require(0 < share < math.inf, "NOISE_EPSILON", f"{text}, got {epsilon}")
        return math.sqrt(context.dim) * change / share

    def scale_by(self, factors: tuple[float, ...]) -> CalibratedNoise:
        return self.model_copy(update={"epsilon": divide_per_learner(self.epsilon, factors)})


NoiseScale = Annotated[
    ZeroNoise | PowerNoise | GeometricNoise | HarmonicNoise | CalibratedNoise, Field(discriminator="kind")
]
"""Noise scale of a spec. Each builds the schedules of rho_t, one for each learner, and scales them by a factor per learner, with
the condition SIGMA, VARSIGMA_RANGE, GRAD_CHANGE or NOISE_EPSILON."""


def require_gradient_change(change: float) -> None:
    """Raise GRAD_CHANGE unless the gradient change is finite and above 0."""
    text = "a privacy budget needs a finite bound on the per-record gradient change at every gradient's point (a mix of"
    text += " noisy messages may be any point): set clip_norm, or choose a loss whose gradients are bounded"
    require(0 < change < math.inf, "GRAD_CHANGE", f"{text}, got {change}")


def _sizes(context: RunContext, value: PerLearner, field: str) -> tuple[float, ...]:
    sizes = context.broadcast_to_learners(value, f"algorithm.noise.{field}")
    for size in sizes:
        require(0 <= size < math.inf, "SIGMA", f"noise.{field} must be finite and at least 0, got {size}")
    return sizes


def _build_each(schedule: Callable[..., float], *numbers: Sequence[Any]) -> tuple[RoundSchedule, ...]:
    """Build each learner's schedule from its own numbers; learners with equal numbers share one."""
    built: dict[tuple[Any, ...], RoundSchedule] = {}
    return tuple(built.setdefault(each, partial(schedule, *each)) for each in zip(*numbers, strict=True))


# ---- schedules: module functions, so that a run can be pickled -------------------------------------------------------


def _power(first: float, exponent: float, t: int) -> float:
    return first * math.pow(t + 1.0, exponent)


def _geometric(first: float, ratio: float, t: int) -> float:
    return first * math.pow(ratio, t)


def _harmonic(factor: float, shift: float, t: int) -> float:
    return factor / (t + shift)


def _follow_step(step: RoundSchedule, factor: float, t: int) -> float:
    """Scale in proportion to the step that produced the round's message; the first message, without a step, as the second."""
    return factor * step(max(t - 1, 0))


# ---- infinitely many rounds ------------------------------------------------------------------------------------------


def bound_later_costs(step: RoundSchedule, noise: RoundSchedule, t: int) -> tuple[float, float]:
    """Bound the largest `alpha_k / rho_{k+1}` of all k >= t, and their sum; infinite: no bound is known.

    With `alpha_k <= c q^k (k+1)^e` up to a factor that never grows, e at most 0, and `rho_k = d p^k (k+1)^v`, the quotient never
    grows if `q <= p` and `e <= min(v, 0)`: its logarithm has the derivative `log(q/p) + e/(k+1) - v/(k+2)`.
    """
    scale = noise(t + 1)
    if scale == 0.0:
        return math.inf, math.inf
    first = step(t) / scale
    if isinstance(noise, partial) and noise.func is _follow_step and noise.args[0] is step:
        return first, math.inf
    falling, growing = _form(step), _form(noise)
    if falling is None or growing is None or not (falling[0] <= growing[0] and falling[1] <= min(growing[1], 0.0)):
        return math.inf, math.inf
    ratio = falling[0] / growing[0]
    return first, first / (1.0 - ratio) if ratio < 1.0 else math.inf


def _form(schedule: RoundSchedule) -> tuple[float, float] | None:
    """Return q and e of a schedule `c q^t (t+1)^e`; None: it has another form."""
    if not isinstance(schedule, partial):
        return None
    if schedule.func is _geometric:
        return schedule.args[1], 0.0
    if schedule.func is _power:
        return 1.0, schedule.args[1]
    if schedule.func is _harmonic:  # steps with a larger shift fall more slowly, noise has the shift 1
        return 1.0, -1.0 if schedule.args[1] <= 1.0 else 0.0
    return None
