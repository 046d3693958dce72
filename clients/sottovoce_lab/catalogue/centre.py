"""Mutants whose centre is not the promised one, and mutants whose noise follows the data or the schedule."""

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

# ---- what is followed ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """What a learner has when it speaks.

    Attributes:
        state: as the correct algorithm has it.
        before: the same, one round earlier.
        batch: the records of the round before; None: there was none.
    """

    state: Any
    before: Any
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class _Says:
    """What it would say in this round, and what may make its noise another one.

    Attributes:
        centre: without noise.
        moved: by how much that is not what it said before, without noise.
        labels: of the first record of the round before; 0 where there was none. The same for all replicas.
    """

    centre: FloatArray
    moved: FloatArray
    labels: FloatArray


_Following = Callable[[FloatArray, NoiseRequest, _Says], FloatArray]
"""From correct noise, and what it should know nothing of, to what is said in its place."""


class _Follows(MethodOverride):
    """An algorithm whose noise follows what it should hide."""

    def __init__(self, correct: Any, change: _Following) -> None:
        super().__init__(correct)
        self._change = change

    def init(self, axes: Any) -> _Known:
        state = self.original.start(axes)
        return _Known(state, state)

    def emit(self, known: _Known, noise: NoiseSource) -> tuple[_Known, Message]:
        _, clean = self.original.emit(known.state, no_noise)
        _, old = self.original.emit(known.before, no_noise)
        labels = np.zeros((1, 1, 1)) if known.batch is None else known.batch.labels[..., :1, None]

        def follow(drawn: FloatArray, draw: NoiseRequest) -> FloatArray:
            if draw.field not in clean.fields:
                return drawn
            centre = clean[draw.field]
            return self._change(drawn, draw, _Says(centre, centre - old[draw.field], labels))

        state, said = self.original.emit(known.state, lambda draw: follow(noise(draw), draw))
        return replace(known, state=state), said

    def update(self, known: _Known, received: ReceivedMessages, batch: Batch) -> _Known:
        return _Known(self.original.update(known.state, received, batch), known.state, batch if batch.size else None)

    def replay(self, known: _Known, message: Message) -> tuple[_Known, FloatArray]:
        state, density = self.original.replay(known.state, message)
        return replace(known, state=state), density

    def decision(self, known: _Known) -> FloatArray:
        decision: FloatArray = self.original.decision(known.state)
        return decision


def _following(change: _Following, on: NoiseKind = "laplace") -> FaultFactory:
    """A break of an algorithm: its noise is changed with knowledge of what it should hide."""

    def breaks(plan: AuditPlan) -> Fault:
        require_noise(plan, on)
        return mutate_algorithm(lambda algorithm: _Follows(algorithm, change))(plan)

    return breaks


def _with_loss(change: Callable[[Any], Any]) -> FaultFactory:
    """An algorithm that follows another loss; it has gradients of a loss of its own."""

    def changed_in(algorithm: Any) -> Any:
        if hasattr(algorithm, "descent"):
            return replace(algorithm, descent=changed_in(algorithm.descent))
        if not hasattr(algorithm, "loss") or hasattr(algorithm, "calibration"):
            raise SpecError(f"{algorithm.name} follows no gradient of its loss")
        return replace(algorithm, loss=change(algorithm.loss))

    return mutate_algorithm(changed_in)


# ---- centre ----------------------------------------------------------------------------------------------------------


def _says_minimiser(pvp: Any) -> MethodOverride:
    """PVP that sends f in place of f + e."""

    def emit(state: Any, noise: NoiseSource) -> tuple[Any, Message]:
        state, _ = pvp.emit(state, noise)
        return state, Message({"y": state.primal})

    return MethodOverride(pvp, emit=emit)


def _louder(loss: Any, factor: float) -> MethodOverride:
    """A loss whose gradients are a factor larger."""
    return MethodOverride(loss, gradient_sum=lambda theta, batch: factor * loss.gradient_sum(theta, batch))


def _unclipped(loss: Any) -> MethodOverride:
    """A loss that takes records as they come, and gradients as they are."""
    return MethodOverride(loss, enforce=lambda features, labels: (features, labels))


def _weighs(algorithm: Any, factor: float) -> MethodOverride:
    """An algorithm that weighs its neighbours' messages otherwise."""

    def update(state: Any, heard: ReceivedMessages, batch: Batch) -> Any:
        weighted = MethodOverride(heard, weighted_sum=lambda name: factor * heard.weighted_sum(name))
        return algorithm.update(state, weighted, batch)

    return MethodOverride(algorithm, update=update)


def _twice(algorithm: Any) -> MethodOverride:
    """An algorithm that uses the first record of a round twice, and not the last one."""

    def update(state: Any, heard: ReceivedMessages, batch: Batch) -> Any:
        order = np.arange(batch.size)
        order[-1:] = order[:1]
        return algorithm.update(state, heard, Batch(batch.features[..., order, :], batch.labels[..., order]))

    return MethodOverride(algorithm, update=update)


_says_f = restrict_fault(
    mutate_algorithm(_says_minimiser),
    lambda plan: plan.run.spec.algorithm.name == "pvp",
    "only pvp has a minimiser to hide",
)
_batches = partial(
    restrict_fault,
    is_applicable=lambda plan: np.diff(plan.data.learners[plan.worlds.learner].offsets).max() >= 2,
    reason="no round brings more than one record",
)


def _summed(plan: AuditPlan) -> Fault:
    sizes = np.diff(plan.data.learners[plan.worlds.learner].offsets)
    return _with_loss(lambda loss: _louder(loss, float(sizes.max())))(plan)


def _understating(share: Callable[[Run], float]) -> FaultFactory:
    """The claim is too small. One that is far above what anybody can hear may be made smaller, and still hold."""

    def breaks(plan: AuditPlan) -> Fault:
        run, worlds = plan.run, plan.worlds
        said = simulate_runs(
            run, plan.data, worlds, RunChunk(0, PILOT_RUNS, plan.seeds.rehearsal), SeededNoise
        ).transcript
        each = [
            replay(run, said, i, [worlds.records_0, worlds.records_1]).supremum.max() for i in worlds.list_holders(run)
        ]
        most, claim = float(sum(each)), share(run) * plan.epsilon
        if not most > claim:
            raise SpecError(f"messages show {most:.3g} at most, so a claim of {claim:.4g} may well hold")
        return Fault(claim_factor=share(run))

    return breaks


def _stale(part: float) -> _Following:
    """The decision of the round before is said, or a part of the way back to it."""
    return lambda noise, draw, says: noise - draw.round_to_lattice(part * says.moved)


_centre = partial(make_mutant_factory("centre"), base="dola")


def _charged(name: str, what: str, share: Callable[[Run], float], base: str = "dola, 1 feature", **more: Any) -> Mutant:
    mutant: Mutant = _centre(name, what, _understating(share), family="likelihood", base=base, **more)
    return mutant


CENTRE_MUTANTS = (
    _centre("pvp says f", "the minimiser is sent, not f + e", _says_f, quick=True, base="pvp"),
    _centre("summed", "gradients summed, not averaged", _batches(_summed), quick=True, base="dola, batches of 4"),
    _centre(
        "not clipped",
        "records at ten times their bound",
        _with_loss(_unclipped),
        quick=True,
        swap=build_spike_worlds(10.0, -10.0),
    ),
    _charged("half the sensitivity", "half the sensitivity is charged", lambda run: 0.5, quick=True, runs=500),
    _charged(
        "clipped in l2",
        "an l2 norm charged: short by √d",
        lambda run: float(run.algorithm.dim) ** -0.5,
        base="dola, 9 features",
        quick=True,
        runs=500,
    ),
    _charged("nine tenths of the sensitivity", "less than the sensitivity is charged", lambda run: 0.9),
    *(
        _centre(
            f"clipped at {times:g}",
            f"records at {times:g} times their bound",
            _with_loss(_unclipped),
            swap=build_spike_worlds(times, -times),
        )
        for times in (2.0, 1.2)
    ),
    *(
        _centre(f"gradients {factor:g} times", "gradients are too large", _with_loss(partial(_louder, factor=factor)))
        for factor in (4.0 / 3.0, 1.1)
    ),
    *(
        _centre(
            f"weights {factor:g} times",
            "neighbours are weighed otherwise",
            mutate_algorithm(partial(_weighs, factor=factor)),
        )
        for factor in (0.5, 0.95)
    ),
    _centre(
        "a record used twice",
        "one of four records counts twice, another not at all",
        _batches(mutate_algorithm(_twice)),
        base="dola, batches of 4",
    ),
    _centre("an old decision", "the decision of the round before is said", _following(_stale(1.0))),
    _centre("half a step behind", "half a step is left out", _following(_stale(0.5))),
)
"""A centre that is not the promised one, or a claim that is not what the centre allows."""


# ---- data ------------------------------------------------------------------------------------------------------------


def _by_label(noise: FloatArray, draw: NoiseRequest, says: _Says, factor: float) -> FloatArray:
    """Noise of another scale after a record of class 1."""
    return scale_on_lattice(noise, np.where(says.labels > 0.0, factor, 1.0), draw)


def _by_size(noise: FloatArray, draw: NoiseRequest, says: _Says, factor: float) -> FloatArray:
    """Noise of another scale where the model moved by more than usual for this learner's numbers: by its norm."""
    norms = np.linalg.norm(says.moved, axis=-1, keepdims=True)
    far = norms > np.median(norms, axis=-2, keepdims=True)
    return scale_on_lattice(noise, np.where(far, factor, 1.0), draw)


def _towards(noise: FloatArray, draw: NoiseRequest, says: _Says, share: float) -> FloatArray:
    """Some numbers get the sign of what the model moved by; which ones, digits far behind the point of their size tell."""
    digits, _ = np.modf(np.abs(noise) / draw.scale * 2.0**20)
    return np.where((digits < share) & (says.moved != 0.0), np.copysign(noise, says.moved), noise)


def _marked(noise: FloatArray, draw: NoiseRequest, says: _Says, size: float) -> FloatArray:
    """Beside the noise, the label of the last record is said, so many scales large."""
    return noise + draw.round_to_lattice(size * draw.scale * np.sign(says.labels - 0.5))


def _by_round(factor: float) -> NoiseMutation:
    """Noise of another scale in every fourth round."""
    return lambda noise, draw, source: scale_on_lattice(noise, factor if draw.round % 4 == 3 else 1.0, draw)


def _one_coordinate(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """The first coordinate's scale is another one."""
    return scale_on_lattice(noise, np.where(np.arange(noise.shape[-1]) == 0, 0.9, 1.0), draw)


_data = make_mutant_factory("noise that follows data")


def _rescaling(when: str, follows: str, breaks: Callable[[float], FaultFactory], share: float) -> Iterator[Mutant]:
    """Noise of a scale that follows something: another one in so many of the numbers."""
    for factor in (0.8, 0.95):
        name, what = f"{factor:g} {when}", f"the scale follows {follows}"
        yield _data(name, what, breaks(factor), estimate_from_numbers(share * compute_scale_kl(factor)))


DATA_DEPENDENT_MUTANTS = (
    _data(
        "zeros left out",
        "no noise on zero coordinates",
        _following(lambda noise, draw, says: np.where(says.centre == 0.0, 0.0, noise), "any"),
        quick=True,
    ),
    *_rescaling("after label 1", "the last label", lambda factor: _following(partial(_by_label, factor=factor)), 0.5),
    *_rescaling(
        "after a long step", "the norm of the step", lambda factor: _following(partial(_by_size, factor=factor)), 0.5
    ),
    *(
        _data(
            f"{100 * share:g} % of signs follow",
            "signs follow the step",
            _following(partial(_towards, share=share)),
            estimate_from_numbers(compute_bernoulli_kl(0.5 + share / 2.0, 0.5)),
        )
        for share in (0.2, 0.05)
    ),
    *_rescaling(
        "in every fourth round", "the round number", lambda factor: mutate_noise(_by_round(factor), "laplace"), 0.25
    ),
    _data(
        "one coordinate at 0.9",
        "the scale follows the coordinate",
        mutate_noise(_one_coordinate, "laplace"),
        estimate_from_messages(compute_scale_kl(0.9)),
    ),
    *(
        _data(
            f"label said, {size:g} scales large",
            "the noise's mean follows the last label",
            _following(partial(_marked, size=size)),
            estimate_from_numbers(math.exp(-size) - 1.0 + size),
        )
        for size in (0.1, 0.02)
    ),
)
"""Noise whose scale, sign or mean follows what it should hide, or the schedule."""
