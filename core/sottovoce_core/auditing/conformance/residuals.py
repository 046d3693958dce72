"""Noise taken off messages: what a learner said beside what it would have said without noise.

A learner's state is replayed from what was overheard, so the noise of every message is known: what was said minus the centre.
Divided by its scale it must be independent standard Laplace numbers, on the lattice. A guarantee rests on nothing else, and
what breaks it here (half the scale, reused or omitted noise, Gaussian tails) needs thousands of runs, or cannot be seen at
all, where two worlds are told apart.

Objective perturbation is not seen: its noise is in the problem that a learner solves, not on its message.
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
"""Low bits lost: all of them."""

_MAX_EXACT_INTEGER = 2.0**53
"""Whole numbers below this are exact in float64."""
_SURE = 51
"""Bits of a sum in float64 that are right, whatever was rounded on the way to it: all but two."""

_TIE = 1e-9
"""A scale so close to a power of two, relatively, may have either spacing: platforms round the schedule's powers differently."""
_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True)
class Residuals:
    """The noise that a replay finds in one field of one learner's messages.

    Attributes:
        learner: its index.
        field: of the message.
        values: `(rounds, replicas, dim)`; independent standard Laplace numbers if the learner does what it says. NaN
            where there should be no noise, and after the first round in which nobody heard the learner, or somebody
            whom it heard. Laplace noise is divided by its scale; other noise is mapped to Laplace numbers of the same
            probability (`convert_to_laplace`).
        steps: `(rounds, replicas, dim)` the noise in lattice spacings, K'. A replay rounds elsewhere than the learner did,
            so it may be one off; to which side follows from the past alone, so low bits stay as evenly spread as they
            were. 0 where `lost` is `ALL`.
        said: the same of the message, which needs no replay.
        lost: the same: how many low bits of either are unresolved by float64; `ALL` where nothing is known, or on no lattice.
        off: the same: whether the message is off its lattice.
        scale: `(rounds,)` of the noise, or the same for each of `dim`; NaN where there is none.
        grid: the same of the spacing of the lattice; NaN where there is none.
        past: by name, `(rounds, replicas, dim)` each, or `(rounds, 1, dim)` of what is the same in all of them: what the learner
            had before it drew the noise, and must not let it depend on. Empty unless it was asked for.
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
        """A single round of it, as views."""
        rows = {name: getattr(self, name)[t : t + 1] for name in UNKNOWN_VALUES}
        return Residuals(self.learner, self.field, **rows)

    def forget(self, rounds: IntArray) -> None:
        """Nothing is known of these rounds."""
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
"""The arrays of `Residuals`, and what stands in them where nothing is known."""

RUN_INDEPENDENT_NAMES = ("scale", "grid")
"""Those that are the same in all runs."""


def create_unknown_arrays(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> dict[str, Any]:
    """These arrays, nothing of them known: of the shape of `values`, and, `scale` and `grid`, of that of `scale`."""
    return {
        name: np.full(of_scales if name in RUN_INDEPENDENT_NAMES else shape, nothing)
        for name, nothing in UNKNOWN_VALUES.items()
    }


def _blank(learner: int, field: str, shape: tuple[int, ...]) -> Residuals:
    return Residuals(learner, field, **create_unknown_arrays(shape, shape[:1]))


# ---- from messages to noise ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Noisy:
    """What the schedule says of the noise in a field of one round's message.

    Attributes:
        law: of the noise.
        scale: of the noise.
        where: `(1, 1, dim)` which numbers carry it.
        lattice: whether the message itself is on the lattice, and not the noise alone.
    """

    law: Distribution
    scale: float
    where: BoolArray
    lattice: bool


Schedule = dict[tuple[int, int], Mapping[str, _Noisy]]
"""By learner and round, the fields that carry noise: the same in all runs, so found out once."""


def extract_round_noise(
    replay: Replay,
    said: Message,
    room: Mapping[str, Residuals] | None = None,
    schedule: Schedule | None = None,
) -> dict[str, Residuals]:
    """The noise of this round's message, by field that carries any.

    The claimed scale is `Algorithm.noise_scale`; that of spherical noise depends on the number of records, and is the one that
    the algorithm asks its source for. In a replay of two worlds the learner lived in the first.

    Args:
        replay: of the learner, before the round.
        said: its message, fields `(1, replicas, dim)`.
        room: residuals of one round, by field, to be filled, whatever is in them (default: new ones).
        schedule: what other replays of the same run have found; is kept up.
    """
    centre = replay.emit(no_noise)
    schedule = {} if schedule is None else schedule
    at = replay.learner, replay.t
    if at not in schedule:
        schedule[at] = _noisy(replay, centre)
    found = {}
    for name, noisy in schedule[at].items():
        filled = found[name] = _blank(replay.learner, name, said[name].shape) if room is None else room[name]
        own = centre[name][:1]
        _take_off(filled, noisy, said[name], own, 0.0 if noisy.lattice else _beside(replay, name))
        filled.past["centre"] = own
        if len(centre[name]) > 1:
            filled.past["swap"] = (own - centre[name][1:2]) / noisy.scale
    return found


def _noisy(replay: Replay, centre: Message) -> dict[str, _Noisy]:
    """The fields of this round's message that carry noise.

    The learner, who says `centre` without noise, speaks once with the same number in place of every noise: where a message moves
    by as much, it carries noise.
    """
    steps: dict[str, tuple[Distribution, Scalars]] = {}

    def probe(draw: NoiseRequest) -> FloatArray:
        # On the lattice, so that no sum is rounded; about one scale.
        step = 1.0 / draw.scale if draw.spacing is None else draw.spacing * 2.0**LATTICE_BITS
        steps[draw.field] = draw.distribution, step
        return np.zeros(draw.shape) + step

    moved, algorithm = replay.emit(probe), replay.run.algorithm
    on_lattice = algorithm.lattice_spacings(replay.learner, replay.t) if isinstance(algorithm, LatticeAlgorithm) else ()
    found = {}
    for name in sorted(steps.keys() & centre.fields.keys()):
        law, step = steps[name]
        scale = algorithm.noise_scale(replay.learner, replay.t)
        if law == "spherical":
            scale = float(np.asarray(step).flat[0])
        # By schedule alone, so that one replica says it for all.
        where = np.abs(moved[name][:1, :1] - centre[name][:1, :1] - step) <= 1e-6 * np.abs(step)
        if 0.0 < scale < math.inf and where.any():
            found[name] = _Noisy(law, scale, where, name in on_lattice)
    return found


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
    """Replay one learner, and take its noise off its messages.

    Args:
        run: the run that was overheard.
        transcript: what all learners said.
        data: what they learned.
        learner: whose noise.
        close: keep what the learner had before every draw, too.
        other: its records in the other world: how far they move the centre is part of what it had (`swap`, in scales), and
            the most telling part if it handles a record otherwise than it promised.
        room: for every field residuals to be filled, whatever is in them (default: new ones).
        schedule: what other replays of the same run have found; is kept up.

    Returns:
        One entry for each field that carries noise in some round.
    """
    own = data.learners[learner]
    sides = (own,) if other_records is None else (own, other_records)
    replay = Replay(run, learner, transcript.replicas, len(sides))
    every = buffers or {
        name: _blank(learner, name, (len(values), *values.shape[2:])) for name, values in transcript.fields.items()
    }
    noisy: dict[str, list[int]] = {}
    before: Mapping[str, FloatArray] = {}
    for t in range(transcript.rounds):
        messages = transcript.messages(t, learner, replay.required_senders)
        round_of = {name: each.get_round(t) for name, each in every.items()}
        for name, noise in (
            {} if replay.is_offline else extract_round_noise(replay, messages[learner], round_of, schedule)
        ).items():
            noisy.setdefault(name, []).append(t)
            for what, values in {**noise.past, **before}.items() if keep_past else ():
                if values.shape[-1] == noise.values.shape[-1]:
                    _keep(every[name], what, t, values[0])
        replay.step(messages, *(side.batch(t) for side in sides))
        if not replay.is_known:
            break
        if keep_past:
            before = collect_past(replay, own.batch(t))
    for name, each in every.items():
        each.forget(np.setdiff1d(np.arange(transcript.rounds), noisy.get(name, ())))
    return tuple(every[name] for name in sorted(noisy) if np.isfinite(every[name].values).any())


def _keep(noise: Residuals, what: str, t: int, values: FloatArray) -> None:
    """Something of the past of round t, `(replicas, dim)` or `(1, dim)`."""
    rounds, _, dim = noise.values.shape
    kept = noise.past.get(what)
    if kept is None:
        kept = noise.past[what] = np.zeros((rounds, len(values), dim))
    elif kept.shape[1] < len(values):
        kept = noise.past[what] = np.repeat(kept, len(values), axis=1)
    kept[t] = values


def collect_past(replay: Replay, batch: Batch) -> dict[str, FloatArray]:
    """What the learner took from the round that is over, `(1, replicas, dim)` or `(1, 1, dim)` each, by name."""
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


def _beside(replay: Replay, name: str) -> FloatArray | float:
    """`(1, replicas, 1)`: at most so large is what stands beside the noise in a message, a mix of what was said before."""
    sizes = [
        np.abs(each[name]).max(axis=-1, keepdims=True)
        for each in replay.received_messages.values()
        if name in each.fields
    ]
    return as_floats(np.sum(sizes, axis=0)) if sizes else 0.0


def _take_off(into: Residuals, noisy: _Noisy, said: FloatArray, centre: FloatArray, beside: FloatArray | float) -> None:
    """Fill the residuals of a round: what was said without its centre, where there is noise."""
    into.scale[:] = noisy.scale
    if noisy.law == "spherical":
        into.steps[:], into.message_steps[:], into.lost_bits[:], into.is_off_lattice[:], into.grid[:] = (
            0,
            0,
            ALL_BITS,
            False,
            np.nan,
        )
        into.values[:] = np.where(noisy.where, convert_to_laplace(noisy.law, (said - centre) / noisy.scale), np.nan)
        return
    spacing = float(lattice_spacing(noisy.scale * (1.0 - _TIE)))  # the finer one where it may be either
    into.grid[:] = spacing
    message, whole = said * (1.0 / spacing), centre * (1.0 / spacing)  # exact, for spacings are powers of two
    # The learner rounds its centre, too, and never the sum: each is a whole number of its own.
    np.rint(whole, out=whole)
    steps = message - whole
    unresolved: IntArray | int = 0
    if not noisy.lattice:
        # What was public before stands beside the noise, on no lattice (dual averaging): the noise alone is on it.
        noise = (said - centre) / spacing
        # It may be much larger than the sum, and then the noise lost its low bits where it was added.
        size = np.abs(message) + beside / spacing
        rounding = 64 * np.finfo(float).eps * np.maximum(size, np.abs(whole))
        unresolved = np.clip(np.frexp(np.where(np.isfinite(size), size, 0.0))[1] - _SURE, 0, ALL_BITS)
        steps = np.where(np.abs(noise - np.rint(noise)) <= 0.125 + rounding, np.rint(noise), noise)
        message = steps + whole
    np.multiply(steps, spacing / noisy.scale, out=into.values)
    if noisy.law != "laplace":
        into.values[:] = convert_to_laplace(noisy.law, into.values)
    if not noisy.where.all():
        into.values[:] = np.where(noisy.where, into.values, np.nan)
    # Not-a-number where nobody heard the message: then no comparison holds.
    exact = bool(max(message.max(), -message.min(), whole.max(), -whole.min()) < _MAX_EXACT_INTEGER)
    judged = (
        noisy.where
        if exact
        else noisy.where & (np.abs(message) < _MAX_EXACT_INTEGER) & (np.abs(whole) < _MAX_EXACT_INTEGER)
    )
    on = np.rint(message) == message
    either = int(float(lattice_spacing(noisy.scale * (1.0 + _TIE))) != spacing)
    if judged.all() and on.all():
        into.steps[:], into.message_steps[:], into.lost_bits[:], into.is_off_lattice[:] = (
            steps,
            message,
            np.maximum(unresolved, either),
            False,
        )
        return
    into.is_off_lattice[:] = noisy.where & ~on & ~np.isnan(message)
    judged = judged & on
    into.steps[:], into.message_steps[:] = np.where(judged, steps, 0.0), np.where(judged, message, 0.0)
    into.lost_bits[:] = np.where(judged, np.maximum(unresolved, either), ALL_BITS)


def convert_to_laplace(law: Distribution, noise: FloatArray) -> FloatArray:
    """Noise `(..., dim)` of scale 1 as independent standard Laplace numbers, with the signs of the noise.

    Gaussian noise coordinate by coordinate. A spherical vector e is taken apart into what is independent (Rosenblatt
    1952): the norm, of law Gamma(dim), becomes the last number; the k-th one before is the share of `e_k^2` in
    `e_k^2 + ... + e_dim^2`, of law Beta(1/2, (dim - k)/2).
    """
    if law == "laplace":
        return noise
    if law == "gaussian":
        return np.copysign(-special.log_ndtr(-np.abs(noise)) - math.log(2.0), noise)
    dim, squares = noise.shape[-1], noise**2
    rest = np.cumsum(squares[..., ::-1], axis=-1)[..., ::-1]
    share = squares[..., :-1] / np.maximum(rest[..., :-1], _TINY)
    larger = np.empty_like(noise)
    larger[..., :-1] = special.betaincc(0.5, np.arange(dim - 1, 0, -1) / 2.0, share)
    larger[..., -1] = special.gammaincc(dim, np.sqrt(rest[..., 0]))
    return np.copysign(-np.log(np.maximum(larger, _TINY)), noise)
