"""Residuals: the noise of messages, which is the message minus its value without noise.

A learner's state is replayed from the recorded messages, so the noise of every message is known: the message minus the centre.
Divided by its scale it must be independent standard Laplace numbers, on the lattice. A guarantee depends on nothing else, and
faults that are detected here (half the scale, reused or omitted noise, Gaussian tails) need thousands of runs, or are
undetectable, where two worlds are compared.

Objective perturbation is not covered: its noise is in the problem that a learner solves, not on its message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce_core.algorithms.interface import LatticeAlgorithm, Message
from sottovoce_core.arrays import Batch, BoolArray, FloatArray, IntArray, Scalars, as_floats
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.losses import mean_gradient
from sottovoce_core.noise import LATTICE_BITS, Distribution, NoiseRequest, lattice_spacing, no_noise
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript

ByteArray = npt.NDArray[np.int8]

ALL_BITS = 64
"""Count of lost bits if no bit is resolved."""

_MAX_EXACT_INTEGER = 2.0**53
"""Limit below which integers are exact in float64."""
_EXACT_SUM_BITS = 51
"""Count of correct bits of a sum of rounded terms in float64: all but two."""

_TIE = 1e-9
"""Relative distance from a power of two within which a scale may have either spacing: platforms round powers differently."""
_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Noise that a replay finds in one field of one learner's messages.

    Attributes:
        learner: index of the learner.
        field: field of the message.
        values: `(rounds, replicas, dim)`; independent standard Laplace numbers if the learner is honest. NaN where there
            should be no noise, and after the first round in which a message of the learner or of one of its in-neighbours is
            missing. Laplace noise is divided by its scale; other noise is mapped to Laplace numbers of the same probability
            (`convert_to_laplace`).
        steps: `(rounds, replicas, dim)` noise in lattice spacings, K'. A replay rounds elsewhere than the learner did, so it
            may be off by one; the direction depends on the past alone, so low bits remain uniform. 0 where `lost_bits` is
            `ALL_BITS`.
        message_steps: `(rounds, replicas, dim)` message in lattice spacings, which needs no replay.
        lost_bits: `(rounds, replicas, dim)` count of low bits of either that float64 does not resolve; `ALL_BITS` where
            nothing is known, or off any lattice.
        is_off_lattice: `(rounds, replicas, dim)` whether the message is off its lattice.
        scale: `(rounds,)` noise scale, or one for each of `dim`; NaN where there is no noise.
        grid: lattice spacing, shaped as `scale`; NaN where there is none.
        past: by name, `(rounds, replicas, dim)` each, or `(rounds, 1, dim)` for values equal in all replicas: the learner's
            state before it drew the noise, which must be independent of it. Empty unless requested.
    """

    learner: int
    field: str
    values: FloatArray
    steps: IntArray
    message_steps: IntArray
    lost_bits: ByteArray
    is_off_lattice: BoolArray
    scale: FloatArray
    grid: FloatArray
    past: dict[str, FloatArray] = dataclass_field(default_factory=dict)

    def get_round(self, t: int) -> Residuals:
        """Return a single round as views."""
        rows = {name: getattr(self, name)[t : t + 1] for name in UNKNOWN_VALUES}
        return Residuals(self.learner, self.field, **rows)

    def forget(self, rounds: IntArray) -> None:
        """Set these rounds to unknown."""
        for name, nothing in UNKNOWN_VALUES.items():
            getattr(self, name)[rounds] = nothing


UNKNOWN_VALUES: Mapping[str, np.generic] = {
    "values": np.float64(np.nan),
    "steps": np.int64(0),
    "message_steps": np.int64(0),
    "lost_bits": np.int8(ALL_BITS),
    "is_off_lattice": np.bool_(False),
    "scale": np.float64(np.nan),
    "grid": np.float64(np.nan),
}
"""Arrays of `Residuals`, and their values where nothing is known."""

RUN_INDEPENDENT_NAMES = ("scale", "grid")
"""Names of the arrays that are equal in all runs."""


def create_unknown_arrays(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> dict[str, Any]:
    """Create the arrays with unknown values: `shape` for most, `scale_shape` for `scale` and `grid`."""
    return {
        name: np.full(scale_shape if name in RUN_INDEPENDENT_NAMES else shape, unknown)
        for name, unknown in UNKNOWN_VALUES.items()
    }


def _create_unknown_residuals(learner: int, field: str, shape: tuple[int, ...]) -> Residuals:
    return Residuals(learner, field, **create_unknown_arrays(shape, shape[:1]))


# ---- from messages to noise ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FieldNoise:
    """Scheduled noise in a field of one round's message.

    Attributes:
        distribution: noise distribution.
        scale: noise scale.
        where: `(1, 1, dim)` mask of the numbers with noise.
        lattice: whether the message itself is on the lattice, and not the noise alone.
    """

    distribution: Distribution
    scale: float
    where: BoolArray
    lattice: bool


Schedule = dict[tuple[int, int], Mapping[str, _FieldNoise]]
"""Fields with noise by learner and round: equal in all runs, so computed once."""


def extract_round_noise(
    replay: Replay,
    message: Message,
    buffers: Mapping[str, Residuals] | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Residuals]:
    """Extract the noise of this round's message, by field with noise.

    The claimed scale is `Algorithm.noise_scale`; that of spherical noise depends on the number of records, and is the one that
    the algorithm requests from its source. In a replay of two worlds the learner belongs to the first.

    Args:
        replay: replay of the learner, before the round.
        message: its message, fields `(1, replicas, dim)`.
        buffers: residuals of one round, by field, to be overwritten (default: new ones).
        schedule: fields found by other replays of the same run; updated in place.
    """
    centre = replay.emit(no_noise)
    schedule = {} if schedule is None else schedule
    key = replay.learner, replay.t
    if key not in schedule:
        schedule[key] = _find_field_noise(replay, centre)
    residuals = {}
    for name, field_noise in schedule[key].items():
        filled = residuals[name] = (
            _create_unknown_residuals(replay.learner, name, message[name].shape) if buffers is None else buffers[name]
        )
        own_centre = centre[name][:1]
        _fill_residuals(
            filled, field_noise, message[name], own_centre, 0.0 if field_noise.lattice else _bound_mix(replay, name)
        )
        filled.past["centre"] = own_centre
        if len(centre[name]) > 1:
            filled.past["swap"] = (own_centre - centre[name][1:2]) / field_noise.scale
    return residuals


def _find_field_noise(replay: Replay, centre: Message) -> dict[str, _FieldNoise]:
    """Find the fields of this round's message that carry noise.

    The message `centre` has no noise; the learner emits once more with the same number in place of every noise: where the
    message moves by this number, it carries noise.
    """
    steps: dict[str, tuple[Distribution, Scalars]] = {}

    def probe(draw: NoiseRequest) -> FloatArray:
        # A number on the lattice, so that no sum is rounded; about one scale.
        step = 1.0 / draw.scale if draw.spacing is None else draw.spacing * 2.0**LATTICE_BITS
        steps[draw.field] = draw.distribution, step
        return np.zeros(draw.shape) + step

    moved, algorithm = replay.emit(probe), replay.run.algorithm
    on_lattice = algorithm.lattice_spacings(replay.learner, replay.t) if isinstance(algorithm, LatticeAlgorithm) else ()
    fields = {}
    for name in sorted(steps.keys() & centre.fields.keys()):
        distribution, step = steps[name]
        scale = algorithm.noise_scale(replay.learner, replay.t)
        if distribution == "spherical":
            scale = float(np.asarray(step).flat[0])
        # The mask follows from the schedule alone, so one replica suffices.
        mask = np.abs(moved[name][:1, :1] - centre[name][:1, :1] - step) <= 1e-6 * np.abs(step)
        if 0.0 < scale < math.inf and mask.any():
            fields[name] = _FieldNoise(distribution, scale, mask, name in on_lattice)
    return fields


def compute_residuals(
    run: Run,
    transcript: Transcript,
    data: PlacedData,
    learner: int,
    *,
    keep_past: bool = False,
    other_records: LearnerData | None = None,
    buffers: Mapping[str, Residuals] | None = None,
    schedule: Schedule | None = None,
) -> tuple[Residuals, ...]:
    """Replay one learner, and extract the noise of its messages.

    Args:
        run: recorded run.
        transcript: messages of all learners.
        data: records of all learners.
        learner: index of the learner.
        keep_past: keep the learner's state before every draw, too.
        other_records: its records in the other world: the resulting shift of the centre is part of its past (`swap`, in
            scales), and the most revealing part if it mishandles a record.
        buffers: residuals to be overwritten, for every field (default: new ones).
        schedule: fields found by other replays of the same run; updated in place.

    Returns:
        One entry for each field that carries noise in some round.
    """
    own = data.learners[learner]
    sides = (own,) if other_records is None else (own, other_records)
    replay = Replay(run, learner, transcript.replicas, len(sides))
    residuals = buffers or {
        name: _create_unknown_residuals(learner, name, (len(values), *values.shape[2:]))
        for name, values in transcript.fields.items()
    }
    noisy_rounds: dict[str, list[int]] = {}
    past: Mapping[str, FloatArray] = {}
    for t in range(transcript.rounds):
        messages = transcript.messages(t, learner, replay.required_senders)
        round_buffers = {name: each.get_round(t) for name, each in residuals.items()}
        for name, noise in (
            {} if replay.is_offline else extract_round_noise(replay, messages[learner], round_buffers, schedule)
        ).items():
            noisy_rounds.setdefault(name, []).append(t)
            for name_of_past, values in {**noise.past, **past}.items() if keep_past else ():
                if values.shape[-1] == noise.values.shape[-1]:
                    _store_past(residuals[name], name_of_past, t, values[0])
        replay.step(messages, *(side.batch(t) for side in sides))
        if not replay.is_known:
            break
        if keep_past:
            past = collect_past(replay, own.batch(t))
    for name, each in residuals.items():
        each.forget(np.setdiff1d(np.arange(transcript.rounds), noisy_rounds.get(name, ())))
    return tuple(residuals[name] for name in sorted(noisy_rounds) if np.isfinite(residuals[name].values).any())


def _store_past(noise: Residuals, name: str, t: int, values: FloatArray) -> None:
    """Store one value of the past of round t, `(replicas, dim)` or `(1, dim)`."""
    rounds, _, dim = noise.values.shape
    stored = noise.past.get(name)
    if stored is None:
        stored = noise.past[name] = np.zeros((rounds, len(values), dim))
    elif stored.shape[1] < len(values):
        stored = noise.past[name] = np.repeat(stored, len(values), axis=1)
    stored[t] = values


def collect_past(replay: Replay, batch: Batch) -> dict[str, FloatArray]:
    """Collect the learner's state after the last round, `(1, replicas, dim)` or `(1, 1, dim)` each, by name."""
    decision = replay.decision[:1]
    if not batch.size:
        return {"decision": decision}
    loss = replay.run.loss
    features, labels = loss.enforce_bounds(batch.features, batch.labels)
    enforced = replace(batch, features=features, labels=labels)
    return {
        "decision": decision,
        "gradient": mean_gradient(loss, decision, enforced),
        "label": np.full((1, 1, decision.shape[-1]), labels.sum()),
        "record": features.sum(axis=0)[None, None],
        "record with its label": (features * labels[:, None]).sum(axis=0)[None, None],
    }


def _bound_mix(replay: Replay, name: str) -> FloatArray | float:
    """Bound the mix of earlier messages that is added to the noise in a message: `(1, replicas, 1)`."""
    sizes = [
        np.abs(each[name]).max(axis=-1, keepdims=True)
        for each in replay.received_messages.values()
        if name in each.fields
    ]
    return as_floats(np.sum(sizes, axis=0)) if sizes else 0.0


def _fill_residuals(
    residuals: Residuals,
    field_noise: _FieldNoise,
    values: FloatArray,
    centre: FloatArray,
    mix_bound: FloatArray | float,
) -> None:
    """Fill the residuals of a round: the message minus its centre, where there is noise."""
    residuals.scale[:] = field_noise.scale
    if field_noise.distribution == "spherical":
        residuals.steps[:] = 0
        residuals.message_steps[:] = 0
        residuals.lost_bits[:] = ALL_BITS
        residuals.is_off_lattice[:] = False
        residuals.grid[:] = np.nan
        residuals.values[:] = np.where(
            field_noise.where,
            convert_to_laplace(field_noise.distribution, (values - centre) / field_noise.scale),
            np.nan,
        )
        return
    spacing = float(lattice_spacing(field_noise.scale * (1.0 - _TIE)))  # the finer spacing where both are possible
    residuals.grid[:] = spacing
    # exact, for spacings are powers of two
    message_steps = values * (1.0 / spacing)
    centre_steps = centre * (1.0 / spacing)
    # The learner rounds its centre, too, and never the sum: both are integers.
    np.rint(centre_steps, out=centre_steps)
    steps = message_steps - centre_steps
    unresolved_bits: IntArray | int = 0
    if not field_noise.lattice:
        # A public mix is added to the noise, off the lattice (dual averaging): only the noise is on it.
        noise = (values - centre) / spacing
        # The mix may be much larger than the sum, and then the noise lost its low bits in the addition.
        size = np.abs(message_steps) + mix_bound / spacing
        rounding = 64 * np.finfo(float).eps * np.maximum(size, np.abs(centre_steps))
        unresolved_bits = np.clip(np.frexp(np.where(np.isfinite(size), size, 0.0))[1] - _EXACT_SUM_BITS, 0, ALL_BITS)
        steps = np.where(np.abs(noise - np.rint(noise)) <= 0.125 + rounding, np.rint(noise), noise)
        message_steps = steps + centre_steps
    np.multiply(steps, spacing / field_noise.scale, out=residuals.values)
    if field_noise.distribution != "laplace":
        residuals.values[:] = convert_to_laplace(field_noise.distribution, residuals.values)
    if not field_noise.where.all():
        residuals.values[:] = np.where(field_noise.where, residuals.values, np.nan)
    # Not-a-number where the message is missing: then no comparison holds.
    exact = bool(
        max(message_steps.max(), -message_steps.min(), centre_steps.max(), -centre_steps.min()) < _MAX_EXACT_INTEGER
    )
    is_tested = field_noise.where
    if not exact:
        is_tested = (
            is_tested & (np.abs(message_steps) < _MAX_EXACT_INTEGER) & (np.abs(centre_steps) < _MAX_EXACT_INTEGER)
        )
    is_on_lattice = np.rint(message_steps) == message_steps
    ambiguous_bits = int(float(lattice_spacing(field_noise.scale * (1.0 + _TIE))) != spacing)
    if is_tested.all() and is_on_lattice.all():
        residuals.steps[:] = steps
        residuals.message_steps[:] = message_steps
        residuals.lost_bits[:] = np.maximum(unresolved_bits, ambiguous_bits)
        residuals.is_off_lattice[:] = False
        return
    residuals.is_off_lattice[:] = field_noise.where & ~is_on_lattice & ~np.isnan(message_steps)
    is_tested = is_tested & is_on_lattice
    residuals.steps[:] = np.where(is_tested, steps, 0.0)
    residuals.message_steps[:] = np.where(is_tested, message_steps, 0.0)
    residuals.lost_bits[:] = np.where(is_tested, np.maximum(unresolved_bits, ambiguous_bits), ALL_BITS)


def convert_to_laplace(distribution: Distribution, noise: FloatArray) -> FloatArray:
    """Convert noise `(..., dim)` of scale 1 to independent standard Laplace numbers, with the signs of the noise.

    Gaussian noise is converted by coordinate. A spherical vector e is decomposed into independent parts (Rosenblatt 1952): the
    norm, distributed as Gamma(dim), becomes the last number; the k-th one before is the fraction of `e_k^2` in `e_k^2 + ... +
    e_dim^2`, distributed as Beta(1/2, (dim - k)/2).
    """
    if distribution == "laplace":
        return noise
    if distribution == "gaussian":
        return np.copysign(-special.log_ndtr(-np.abs(noise)) - math.log(2.0), noise)
    dim, squares = noise.shape[-1], noise**2
    tail_sums = np.cumsum(squares[..., ::-1], axis=-1)[..., ::-1]
    fraction = squares[..., :-1] / np.maximum(tail_sums[..., :-1], _TINY)
    upper_tail = np.empty_like(noise)
    upper_tail[..., :-1] = special.betaincc(0.5, np.arange(dim - 1, 0, -1) / 2.0, fraction)
    upper_tail[..., -1] = special.gammaincc(dim, np.sqrt(tail_sums[..., 0]))
    return np.copysign(-np.log(np.maximum(upper_tail, _TINY)), noise)
