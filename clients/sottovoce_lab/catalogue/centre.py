"""Mutants with a wrong centre, and mutants whose noise depends on the data or the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import Message, ReceivedMessages
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import RunChunk, simulate_runs
from sottovoce_core.auditing.worst_case_search import PILOT_RUNS
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import NoiseRequest, NoiseSource, SeededNoise, no_noise
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run
from sottovoce_lab.mutants import (
    Fault,
    FaultFactory,
    MethodOverride,
    Mutant,
    NoiseKind,
    NoiseMutation,
    NoiseMutationState,
    build_spike_worlds,
    compute_bernoulli_kl,
    compute_scale_kl,
    estimate_from_messages,
    estimate_from_numbers,
    make_mutant_factory,
    mutate_algorithm,
    mutate_noise,
    require_noise,
    restrict_fault,
    scale_on_lattice,
)

# ---- data-dependent algorithms ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ObservingState:
    """State of `_DataDependentAlgorithm`.

    Attributes:
        state: state of the correct algorithm.
        before: the same, one round earlier.
        batch: records of the previous round; None: there were none.
    """

    state: Any
    before: Any
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class _Secret:
    """Values of one round that correct noise does not depend on.

    Attributes:
        centre: the message without noise.
        change: difference of the centre from that of the previous round.
        labels: label of the first record of the previous round, 0 without one; the same for all replicas.
    """

    centre: FloatArray
    change: FloatArray
    labels: FloatArray


_DependentMutation = Callable[[FloatArray, NoiseRequest, _Secret], FloatArray]
"""Function from correct noise and the values that it must not depend on, to the noise that is used."""


class _DataDependentAlgorithm(MethodOverride):
    """An algorithm whose noise depends on the values that it must hide."""

    def __init__(self, original: Any, mutation: _DependentMutation) -> None:
        super().__init__(original)
        self._mutation = mutation

    def init(self, axes: Any) -> _ObservingState:
        state = self.original.init(axes)
        return _ObservingState(state, state)

    def emit(self, known: _ObservingState, noise: NoiseSource) -> tuple[_ObservingState, Message]:
        _, clean = self.original.emit(known.state, no_noise)
        _, old = self.original.emit(known.before, no_noise)
        labels = np.zeros((1, 1, 1)) if known.batch is None else known.batch.labels[..., :1, None]

        def mutate(correct: FloatArray, request: NoiseRequest) -> FloatArray:
            if request.field not in clean.fields:
                return correct
            centre = clean[request.field]
            return self._mutation(correct, request, _Secret(centre, centre - old[request.field], labels))

        state, message = self.original.emit(known.state, lambda request: mutate(noise(request), request))
        return replace(known, state=state), message

    def update(self, known: _ObservingState, received: ReceivedMessages, batch: Batch) -> _ObservingState:
        return _ObservingState(
            self.original.update(known.state, received, batch), known.state, batch if batch.size else None
        )

    def replay(self, known: _ObservingState, message: Message) -> tuple[_ObservingState, FloatArray]:
        state, density = self.original.replay(known.state, message)
        return replace(known, state=state), density

    def decision(self, known: _ObservingState) -> FloatArray:
        decision: FloatArray = self.original.decision(known.state)
        return decision


def _make_dependent(mutation: _DependentMutation, noise_kind: NoiseKind = "laplace") -> FaultFactory:
    """Build a fault whose noise depends on the values that it must hide."""

    def build_fault(plan: AuditPlan) -> Fault:
        require_noise(plan, noise_kind)
        return mutate_algorithm(lambda algorithm: _DataDependentAlgorithm(algorithm, mutation))(plan)

    return build_fault


def _mutate_loss(change: Callable[[Any], Any]) -> FaultFactory:
    """Build a fault whose algorithm uses the gradients of a changed loss."""

    def change_loss(algorithm: Any) -> Any:
        if hasattr(algorithm, "descent"):
            return replace(algorithm, descent=change_loss(algorithm.descent))
        if not hasattr(algorithm, "loss") or hasattr(algorithm, "calibration"):
            raise SpecError(f"the algorithm must use gradients of its loss, got {algorithm.name}")
        return replace(algorithm, loss=change(algorithm.loss))

    return mutate_algorithm(change_loss)


# ---- centre ----------------------------------------------------------------------------------------------------------


def _send_minimiser(pvp: Any) -> MethodOverride:
    """Make PVP send f in place of f + e."""

    def emit(state: Any, noise: NoiseSource) -> tuple[Any, Message]:
        state, _ = pvp.emit(state, noise)
        return state, Message({"y": state.primal})

    return MethodOverride(pvp, emit=emit)


def _scale_gradients(loss: Any, factor: float) -> MethodOverride:
    """Multiply the gradients of a loss by a factor."""
    return MethodOverride(loss, gradient_sum=lambda theta, batch: factor * loss.gradient_sum(theta, batch))


def _skip_clipping(loss: Any) -> MethodOverride:
    """Make a loss skip the bounds of records and gradients."""
    return MethodOverride(loss, enforce_bounds=lambda features, labels: (features, labels))


def _scale_weights(algorithm: Any, factor: float) -> MethodOverride:
    """Multiply the weights of the neighbours' messages by a factor."""

    def update(state: Any, received: ReceivedMessages, batch: Batch) -> Any:
        weighted = MethodOverride(received, weighted_sum=lambda name: factor * received.weighted_sum(name))
        return algorithm.update(state, weighted, batch)

    return MethodOverride(algorithm, update=update)


def _use_record_twice(algorithm: Any) -> MethodOverride:
    """Make an algorithm use the first record of a round twice, and the last one not at all."""

    def update(state: Any, received: ReceivedMessages, batch: Batch) -> Any:
        order = np.arange(batch.size)
        order[-1:] = order[:1]
        return algorithm.update(state, received, Batch(batch.features[..., order, :], batch.labels[..., order]))

    return MethodOverride(algorithm, update=update)


_pvp_sends_f = restrict_fault(
    mutate_algorithm(_send_minimiser),
    lambda plan: plan.run.spec.algorithm.name == "pvp",
    "the algorithm must be pvp: only it has a minimiser to hide",
)
_require_batches = partial(
    restrict_fault,
    is_applicable=lambda plan: np.diff(plan.data.learners[plan.worlds.learner].offsets).max() >= 2,
    reason="a round must bring more than one record, and none does",
)


def _sum_gradients(plan: AuditPlan) -> Fault:
    sizes = np.diff(plan.data.learners[plan.worlds.learner].offsets)
    return _mutate_loss(lambda loss: _scale_gradients(loss, float(sizes.max())))(plan)


def _understate_claim(share: Callable[[Run], float]) -> FaultFactory:
    """Build a fault whose claim is too small; refuse it where the smaller claim may still hold."""

    def build_fault(plan: AuditPlan) -> Fault:
        run, worlds = plan.run, plan.worlds
        transcript = simulate_runs(
            run, plan.data, worlds, RunChunk(0, PILOT_RUNS, plan.seeds.rehearsal), SeededNoise
        ).transcript
        losses = [
            replay(run, transcript, i, [worlds.records_0, worlds.records_1]).supremum.max()
            for i in worlds.list_holders(run)
        ]
        largest, claim = float(sum(losses)), share(run) * plan.epsilon
        if not largest > claim:
            raise SpecError(
                f"messages must show more than the understated claim, got {largest:.3g} at most, {claim:.4g} claimed"
            )
        return Fault(claim_factor=share(run))

    return build_fault


def _delay_decision(part: float) -> _DependentMutation:
    """Send the decision of the previous round, or move a part of the way back to it."""
    return lambda noise, request, secret: noise - request.round_to_lattice(part * secret.change)


_centre_mutant = partial(make_mutant_factory("centre"), base="dola")


def _make_understated_mutant(
    name: str, description: str, share: Callable[[Run], float], base: str = "dola, 1 feature", **options: Any
) -> Mutant:
    mutant: Mutant = _centre_mutant(
        name, description, _understate_claim(share), family="likelihood", base=base, **options
    )
    return mutant


CENTRE_MUTANTS = (
    _centre_mutant("pvp sends f", "the minimiser is sent, not f + e", _pvp_sends_f, quick=True, base="pvp"),
    _centre_mutant(
        "summed",
        "gradients summed, not averaged",
        _require_batches(_sum_gradients),
        quick=True,
        base="dola, batches of 4",
    ),
    _centre_mutant(
        "not clipped",
        "records at ten times their bound",
        _mutate_loss(_skip_clipping),
        quick=True,
        build_worlds=build_spike_worlds(10.0, -10.0),
    ),
    _make_understated_mutant(
        "half the sensitivity", "half the sensitivity is charged", lambda run: 0.5, quick=True, max_runs=500
    ),
    _make_understated_mutant(
        "clipped in l2",
        "an l2 norm charged: short by √d",
        lambda run: float(run.algorithm.dim) ** -0.5,
        base="dola, 9 features",
        quick=True,
        max_runs=500,
    ),
    _make_understated_mutant("nine tenths of the sensitivity", "less than the sensitivity is charged", lambda run: 0.9),
    *(
        _centre_mutant(
            f"clipped at {times:g}",
            f"records at {times:g} times their bound",
            _mutate_loss(_skip_clipping),
            build_worlds=build_spike_worlds(times, -times),
        )
        for times in (2.0, 1.2)
    ),
    *(
        _centre_mutant(
            f"gradients {factor:g} times",
            "gradients are too large",
            _mutate_loss(partial(_scale_gradients, factor=factor)),
        )
        for factor in (4.0 / 3.0, 1.1)
    ),
    *(
        _centre_mutant(
            f"weights {factor:g} times",
            "wrong weights of the neighbours",
            mutate_algorithm(partial(_scale_weights, factor=factor)),
        )
        for factor in (0.5, 0.95)
    ),
    _centre_mutant(
        "a record used twice",
        "one of four records counts twice, another not at all",
        _require_batches(mutate_algorithm(_use_record_twice)),
        base="dola, batches of 4",
    ),
    _centre_mutant(
        "an old decision", "the decision of the previous round is sent", _make_dependent(_delay_decision(1.0))
    ),
    _centre_mutant("half a step behind", "half a step is left out", _make_dependent(_delay_decision(0.5))),
)
"""Mutants with a wrong centre, or with a claim that the centre does not allow."""


# ---- data-dependent noise --------------------------------------------------------------------------------------------


def _scale_by_label(noise: FloatArray, request: NoiseRequest, secret: _Secret, factor: float) -> FloatArray:
    """Scale the noise after a record of class 1."""
    return scale_on_lattice(noise, np.where(secret.labels > 0.0, factor, 1.0), request)


def _scale_by_step(noise: FloatArray, request: NoiseRequest, secret: _Secret, factor: float) -> FloatArray:
    """Scale the noise where the norm of the step is above the median of this learner."""
    norms = np.linalg.norm(secret.change, axis=-1, keepdims=True)
    far = norms > np.median(norms, axis=-2, keepdims=True)
    return scale_on_lattice(noise, np.where(far, factor, 1.0), request)


def _copy_step_sign(noise: FloatArray, request: NoiseRequest, secret: _Secret, share: float) -> FloatArray:
    """Give a fraction of the values the sign of the step; low digits of their size choose which."""
    digits, _ = np.modf(np.abs(noise) / request.scale * 2.0**20)
    return np.where((digits < share) & (secret.change != 0.0), np.copysign(noise, secret.change), noise)


def _add_label(noise: FloatArray, request: NoiseRequest, secret: _Secret, size: float) -> FloatArray:
    """Add the label of the last record to the noise, `size` scales large."""
    return noise + request.round_to_lattice(size * request.scale * np.sign(secret.labels - 0.5))


def _scale_by_round(factor: float) -> NoiseMutation:
    """Scale the noise of every fourth round."""
    return lambda noise, request, state: scale_on_lattice(noise, factor if request.round % 4 == 3 else 1.0, request)


def _scale_first_coordinate(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Scale the noise of the first coordinate by 0.9."""
    return scale_on_lattice(noise, np.where(np.arange(noise.shape[-1]) == 0, 0.9, 1.0), request)


_data_mutant = make_mutant_factory("data-dependent noise")


def _make_rescaled_mutants(
    condition: str, cause: str, build_fault: Callable[[float], FaultFactory], share: float
) -> Iterator[Mutant]:
    """Yield mutants whose scale depends on `cause`: it is wrong in a fraction of the values."""
    for factor in (0.8, 0.95):
        name, description = f"{factor:g} {condition}", f"the scale depends on {cause}"
        yield _data_mutant(
            name, description, build_fault(factor), estimate_from_numbers(share * compute_scale_kl(factor))
        )


DATA_DEPENDENT_MUTANTS = (
    _data_mutant(
        "zeros left out",
        "no noise on zero coordinates",
        _make_dependent(lambda noise, request, secret: np.where(secret.centre == 0.0, 0.0, noise), "any"),
        quick=True,
    ),
    *_make_rescaled_mutants(
        "after label 1", "the last label", lambda factor: _make_dependent(partial(_scale_by_label, factor=factor)), 0.5
    ),
    *_make_rescaled_mutants(
        "after a long step",
        "the norm of the step",
        lambda factor: _make_dependent(partial(_scale_by_step, factor=factor)),
        0.5,
    ),
    *(
        _data_mutant(
            f"{100 * share:g} % of signs follow",
            "signs follow the step",
            _make_dependent(partial(_copy_step_sign, share=share)),
            estimate_from_numbers(compute_bernoulli_kl(0.5 + share / 2.0, 0.5)),
        )
        for share in (0.2, 0.05)
    ),
    *_make_rescaled_mutants(
        "in every fourth round",
        "the round number",
        lambda factor: mutate_noise(_scale_by_round(factor), "laplace"),
        0.25,
    ),
    _data_mutant(
        "one coordinate at 0.9",
        "the scale depends on the coordinate",
        mutate_noise(_scale_first_coordinate, "laplace"),
        estimate_from_messages(compute_scale_kl(0.9)),
    ),
    *(
        _data_mutant(
            f"label added, {size:g} scales large",
            "the noise's mean depends on the last label",
            _make_dependent(partial(_add_label, size=size)),
            estimate_from_numbers(math.exp(-size) - 1.0 + size),
        )
        for size in (0.1, 0.02)
    ),
)
"""Mutants whose noise depends, in scale, sign or mean, on what it must hide, or on the schedule."""
