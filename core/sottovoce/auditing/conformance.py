"""Conformance: is the noise of a transcript what the algorithm says it is? One world and one transcript are enough.

A learner's state is replayed from what was overheard, so the noise of every message is known: what was said minus the centre.
Divided by its scale it must be independent standard Laplace numbers, on the lattice. A guarantee rests on nothing else, and
what breaks it here (half the scale, reused or omitted noise, Gaussian tails) needs thousands of runs, or cannot be seen at
all, where two worlds are told apart.

Objective perturbation is not seen: its noise is in the problem that a learner solves, not on its message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import FloatArray, Scalars
from sottovoce.auditing.levels import Test
from sottovoce.data import PlacedData
from sottovoce.noise import GRID_BITS, Draw, Law, grid, no_noise
from sottovoce.running.replay import Replay
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

NEAR = 2.0**-34
"""Numbers closer than this, in scales, count as equal: 64 lattice points, beyond what a replay rounds off.

Standard Laplace numbers are so close to any given number with a probability below this.
"""

RESOLVED = 0.125
"""Numbers further than this off the lattice, in spacings, are off it; rounding must stay below."""
_ROUNDING = 64 * np.finfo(float).eps
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
            probability (`as_laplace`).
        scale: `(rounds,)` of the noise.
        off_lattice: `(rounds, replicas, dim)` distance of the noise to its lattice, in spacings. NaN where there is
            none, or where float64 does not resolve it.
    """

    learner: int
    field: str
    values: FloatArray
    scale: FloatArray
    off_lattice: FloatArray

    @property
    def place(self) -> str:
        """Learner and field, in words."""
        return f"learner {self.learner}, field {self.field!r}"


# ---- from messages to noise ------------------------------------------------------------------------------------------


def noise_of(replay: Replay, said: Message) -> dict[str, Residuals]:
    """The noise of this round's message `said`, fields `(1, replicas, dim)`: residuals of one round, by field that carries any.

    The learner speaks once without noise, and once with the same number in place of every noise: where a message moves by
    as much, it carries noise. The claimed scale is `Algorithm.noise_scale`; that of spherical noise depends on the number
    of records, and is the one that the algorithm asks its source for.
    """
    steps: dict[str, tuple[Law, Scalars]] = {}

    def probe(draw: Draw) -> FloatArray:
        # On the lattice, so that no sum is rounded; about one scale.
        step = 1.0 / draw.scale if draw.grid is None else draw.grid * 2.0**GRID_BITS
        steps[draw.field] = draw.law, step
        return np.zeros(draw.shape) + step

    centre, moved = replay.says(no_noise), replay.says(probe)
    found = {}
    for name in sorted(steps.keys() & centre.fields.keys()):
        law, step = steps[name]
        scale = replay.run.algorithm.noise_scale(replay.learner, replay.t)
        if law == "spherical":
            scale = float(np.asarray(step).flat[0])
        noisy = np.abs(moved[name] - centre[name] - step) <= 1e-6 * np.abs(step)
        if 0.0 < scale < math.inf and noisy.any():
            values, off_lattice = _taken_off(law, scale, noisy, said[name], centre[name])
            found[name] = Residuals(replay.learner, name, values, np.array([scale]), off_lattice)
    return found


def residuals(run: Run, transcript: Transcript, data: PlacedData, learner: int) -> tuple[Residuals, ...]:
    """Replay one learner, and take its noise off its messages.

    Args:
        run: the run that was overheard.
        transcript: what all learners said.
        data: what they learned.
        learner: whose noise.

    Returns:
        One entry for each field that carries noise in some round.
    """
    replay, own = Replay(run, learner, transcript.replicas), data.learners[learner]
    found: dict[str, Residuals] = {}
    for t in range(transcript.rounds):
        messages = transcript.messages(t, replay.concerned)
        for name, noise in noise_of(replay, messages[learner]).items():
            kept = found.setdefault(name, _blank(learner, name, transcript))
            kept.values[t], kept.scale[t], kept.off_lattice[t] = noise.values[0], noise.scale[0], noise.off_lattice[0]
        replay.step(messages, own.batch(t))
        if not replay.known:
            break
    return tuple(each for each in found.values() if np.isfinite(each.values).any())


def _blank(learner: int, name: str, transcript: Transcript) -> Residuals:
    rounds, _, *shape = transcript.fields[name].shape
    unknown = np.full((rounds, *shape), np.nan)
    return Residuals(learner, name, unknown, np.full(rounds, np.nan), unknown.copy())


def _taken_off(
    law: Law, scale: float, noisy: npt.NDArray[np.bool_], said: FloatArray, centre: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What was said without its centre, where there is noise, as `Residuals.values`; and how far off its lattice."""
    noise, everywhere = said - centre, np.broadcast_to(noisy, said.shape)
    values = np.where(everywhere, as_laplace(law, noise / scale), np.nan)
    if law == "spherical":
        return values, np.full_like(values, np.nan)
    spacing = float(grid(scale))
    steps = noise / spacing
    rounding = _ROUNDING * np.maximum(np.abs(said), np.abs(centre))
    judged = everywhere & (rounding < RESOLVED * spacing)
    return values, np.where(judged, np.abs(steps - np.rint(steps)), np.nan)


def as_laplace(law: Law, noise: FloatArray) -> FloatArray:
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


# ---- tests -----------------------------------------------------------------------------------------------------------


def examine(own: Iterable[Residuals], others: Sequence[Iterable[Residuals]]) -> tuple[Test, ...]:
    """All tests of one learner's noise, given that of the other learners."""
    tests: list[Test] = []
    for each in own:
        neighbours = [other for listed in others for other in listed if other.field == each.field]
        tests += [
            *_marginal(each),
            *_lattice(each),
            _worst(each, "round scale", "the noise of every round has its scale", (2,), "round"),
            _worst(each, "coordinate scale", "the noise of every coordinate has its scale", (0, 1), "coordinate"),
            *_independence(each),
            *_between(each, neighbours),
        ]
    return tuple(tests)


def _marginal(own: Residuals) -> list[Test]:
    """Single numbers: law, scale, signs."""
    values = own.values[np.isfinite(own.values)]
    sizes, positive = np.abs(values), int(np.count_nonzero(values > 0))
    tails, law = stats.kstest(sizes, "expon"), stats.kstest(values, "laplace")
    total, signed = float(sizes.sum()), int(np.count_nonzero(values))
    sign = stats.binomtest(positive, signed).pvalue if signed else 1.0
    return [
        Test("tails", "sizes of the noise are exponential", float(tails.statistic), float(tails.pvalue), own.place),
        Test("law", "the noise has its law", float(law.statistic), float(law.pvalue), own.place),
        Test("scale", "the mean size is the scale", total / len(sizes), float(_gamma(total, len(sizes))), own.place),
        Test("signs", "both signs are as likely", positive / max(signed, 1), float(sign), own.place),
    ]


def _gamma(total: FloatArray | float, count: FloatArray | int) -> FloatArray:
    """Two-sided p-value of a sum of `count` exponential numbers: exact."""
    below, above = special.gammainc(count, total), special.gammaincc(count, total)
    return np.asarray(np.minimum(1.0, 2.0 * np.minimum(below, above)))


def _lattice(own: Residuals) -> list[Test]:
    """Noise is on its lattice, and is never zero."""
    judged = own.off_lattice[np.isfinite(own.off_lattice)]
    values = own.values[np.isfinite(own.values)]
    zeros = int(np.count_nonzero(np.abs(values) < NEAR))
    tests = [Test("zeros", "no number is without noise", zeros, _chance(zeros, values.size), own.place)]
    if judged.size:
        off = float(np.mean(judged > RESOLVED))
        tests.append(Test("lattice", "all noise is on its lattice", off, float(off == 0.0), own.place))
    return tests


def _chance(count: int, pairs: int) -> float:
    """How likely at least `count` of `pairs` are closer than `NEAR`."""
    return float(stats.binom.sf(count - 1, pairs, NEAR))


def _worst(own: Residuals, name: str, what: str, axes: tuple[int, ...], unit: str) -> Test:
    """No round, or no coordinate, has another scale: the worst one, times their number."""
    known = np.isfinite(own.values)
    counts = known.sum(axis=axes)
    totals = np.abs(np.where(known, own.values, 0.0)).sum(axis=axes)
    p_values = np.where(counts > 0, _gamma(totals, np.maximum(counts, 1)), 1.0)
    worst = np.unravel_index(int(p_values.argmin()), p_values.shape)
    p_value = min(1.0, float(p_values[worst]) * int(np.count_nonzero(counts)))
    return Test(name, what, float(totals[worst] / counts[worst]), p_value, f"{own.place}, {unit} {worst[0]}")


def _independence(own: Residuals) -> list[Test]:
    """Over rounds and coordinates of one learner."""
    values, noisy = own.values, np.isfinite(own.scale)
    rounds, scale = values[noisy], own.scale[noisy]  # rounds without noise, as between trees' leaves, do not part them
    tests = []
    if len(rounds) > 1:
        tests.append(_correlation("rounds", "rounds are independent", rounds[1:], rounds[:-1], own.place))
        raw = _ties_in(rounds * (scale / scale.min())[:, None, None], 0)
        tests.append(_tied("round ties", "no noise is said again", _ties_in(rounds, 0), raw, own.place))
    if values.shape[1] > 1:
        tied = _ties_in(values, 1)
        tests.append(_tied("run ties", "no two runs have equal noise", tied, tied, own.place))
    if values.shape[2] > 1:
        tests.append(
            _correlation("coordinates", "coordinates are independent", values[..., 1:], values[..., :-1], own.place)
        )
        tied = _ties_in(values, 2)
        tests.append(_tied("coordinate ties", "no two coordinates have equal noise", tied, tied, own.place))
    return [test for test in tests if test is not None]


def _between(own: Residuals, others: Sequence[Residuals]) -> list[Test]:
    """Over learners, in the same round: the worst pair, times their number."""
    correlations, ties = [], []
    for other in others:
        place = f"{own.place}, with learner {other.learner}"
        length = np.fmax(own.scale, other.scale)[:, None, None]
        raw = own.values * own.scale[:, None, None] / length, other.values * other.scale[:, None, None] / length
        correlations.append(_correlation("learners", "learners are independent", own.values, other.values, place))
        ties.append(
            _tied(
                "learner ties", "no other learner has this noise", _ties(own.values, other.values), _ties(*raw), place
            )
        )
    worst = []
    for tests in (correlations, ties):
        known = [test for test in tests if test is not None]
        if known:
            least = min(known, key=lambda test: test.p_value)
            p_value = min(1.0, least.p_value * len(known))
            worst.append(Test(least.name, least.what, least.statistic, p_value, least.where))
    return worst


def _correlation(name: str, what: str, first: FloatArray, second: FloatArray, place: str) -> Test | None:
    """Correlation of the probabilities `F(r)`, and of `F(|r|)`, as of ranks; the larger of the two, times two.

    Of independent numbers it is normal with variance `1/pairs`, in whatever scale: the tests of scale are others.
    """
    both = np.isfinite(first) & np.isfinite(second)
    pairs = int(np.count_nonzero(both))
    if pairs < 2:
        return None
    values = np.stack([first[both], second[both]])
    larger = np.exp(-np.abs(values))
    found = [_pearson(larger), _pearson(np.copysign(1.0 - larger, values))]
    most = max(found, key=abs)
    return Test(name, what, most, min(1.0, 2.0 * float(special.erfc(abs(most) * math.sqrt(pairs / 2)))), place)


def _pearson(pair: FloatArray) -> float:
    """Of two rows; 0 where one is constant."""
    first, second = pair - pair.mean(axis=1, keepdims=True)
    length = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / length if length > 0 else 0.0


_Count = tuple[int, int]
"""How many pairs are tied, and how many there are."""


def _ties(first: FloatArray, second: FloatArray) -> _Count:
    distance = np.abs(first - second)
    return int(np.count_nonzero(distance < NEAR)), int(np.count_nonzero(np.isfinite(distance)))


def _ties_in(values: FloatArray, axis: int) -> _Count:
    """Among all numbers along an axis: neighbours in order, of all pairs."""
    counts = np.isfinite(values).sum(axis=axis)
    distance = np.diff(np.sort(values, axis=axis), axis=axis)
    return int(np.count_nonzero(distance < NEAR)), int((counts * (counts - 1) // 2).sum())


def _tied(name: str, what: str, standard: _Count, raw: _Count, place: str) -> Test | None:
    """Noise may be said again as it is (`raw`), or in other scales (`standard`): the likelier of two, times two."""
    if not standard[1]:
        return None
    p_value = 2.0 * min(_chance(*standard), _chance(*raw))
    return Test(name, what, max(standard[0], raw[0]), min(1.0, p_value), place)
