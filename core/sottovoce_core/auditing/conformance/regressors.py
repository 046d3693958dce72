"""Dependence on the past: linear relations, and every available function of the past."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.p_values import LOG_2, compute_log_sign_p_values
from sottovoce_core.auditing.conformance.residuals import ALL_BITS

# ---- linear relations ------------------------------------------------------------------------------------------------

_CLOSE = 2.0**-30
"""Distance from zero, in scales, within which a sum of independent noise lies with at most this probability.

The density of a Laplace number is at most 1/2, and so is that of its sum with anything independent. The distance is 2^10
spacings: the rounding of a replay hides no relation.
"""

_Relation = tuple[tuple[int, int], ...]
"""Rounds, counted back from the latest, and the signs with which their noise is added."""

_RELATIONS: tuple[_Relation, ...] = tuple(
    ((0, 1), *zip(back, signs, strict=True))
    for back in ((1,), (2,), (1, 2))
    for signs in itertools.product((1, -1), repeat=len(back))
)


class Relations(ConformanceTest):
    """Test by the number of sums that are almost zero, among all sums."""

    part: ClassVar[BudgetPart] = "dependence"
    additive_names: ClassVar[tuple[str, ...]] = ("_learners", "_rounds", "_sum_count")

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._learners = np.zeros(2, np.int64)
        self._rounds = np.zeros(len(_RELATIONS), np.int64)
        self._sum_count = 0

    def add(self, block: Block) -> None:
        units = [np.ones_like(block.scale)]
        if np.nanmax(block.scale, initial=0.0) > np.nanmin(block.scale, initial=np.inf):
            units.append(np.nan_to_num(block.scale))
        for _, part in block.iterate_run_pieces():
            for scale in units:  # in scales, and unscaled
                noise = part.values * scale[:, :, None]
                if not part.is_resolved.all():
                    noise[~part.is_resolved] = np.nan
                if len(noise) > 1:
                    self._learners += _count_near_zero(noise.sum(axis=0), scale.max(axis=0))
                self._add_rounds(noise, scale)

    def _add_rounds(self, noise: FloatArray, scale: FloatArray) -> None:
        for k, relation in enumerate(_RELATIONS):
            longest = relation[-1][0]
            if longest < noise.shape[1]:
                parts = [slice(longest - back, noise.shape[1] - back) for back, _ in relation]
                total = noise[:, parts[0]].copy()
                for part, (_, sign) in zip(parts[1:], relation[1:], strict=True):
                    (np.add if sign > 0 else np.subtract)(total, noise[:, part], out=total)
                zeros, known = _count_near_zero(total, np.maximum.reduce([scale[:, part] for part in parts]))
                self._rounds[k] += int(zeros)
                self._sum_count += int(known)

    def _iterate_tests(self) -> Iterator[Test]:
        """Test sums over all learners; sums and differences of rounds."""
        zeros, total_known = (int(each) for each in self._learners)
        if total_known:
            description = "noise does not add to zero over learners"
            yield Test(
                "sums of learners",
                description,
                zeros,
                _compute_upper_tail(zeros, total_known),
                "all learners",
                is_primary=False,
            )
        if self._sum_count:
            relation, total = _RELATIONS[int(self._rounds.argmax())], int(self._rounds.sum())
            description = "no noise is a sum or a difference of noise drawn before"
            where = " ".join(f"{'+-'[sign < 0]} round t-{back}" if back else "round t" for back, sign in relation)
            yield Test(
                "sums of rounds",
                description,
                total,
                _compute_upper_tail(total, self._sum_count),
                where,
                is_primary=False,
            )


def _count_near_zero(total: FloatArray, scale: FloatArray) -> IntArray:
    """Count sums `(..., runs, numbers)` close to zero, and known sums."""
    np.abs(total, out=total)
    near = total < _CLOSE * scale[..., None, :]  # False where unknown
    return np.array([np.count_nonzero(near), total.size - np.count_nonzero(np.isnan(total))])


def _compute_upper_tail(zeros: int, sum_count: int) -> float:
    """Compute the probability of at least this many zeros (Poisson)."""
    return float(special.pdtrc(zeros - 1, sum_count * _CLOSE)) if zeros else 1.0


# ---- functions of the past -------------------------------------------------------------------------------------------

MAX_RELATIVE_SIZE = 5.0
"""Limit at which regressors are clipped, in units of their past size: otherwise one large number dominates the p-value."""

_MAX_CROSS_LEARNERS = 8
"""Maximum number of learners for pairwise regressors (last noise and message); with more, only their mean is used."""

_OWN = -1
"""Index that stands for the learner's own past, not that of another learner."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of one regressor X: X sign(r) and X^2 by learner and coordinate, and over all X (|r| - 1), and the largest |X|.

    For another learner's X, sums are by learner only, `(learners, 1)`, and without sizes.
    """

    signed: FloatArray
    square: FloatArray
    sized: float = 0.0
    largest: float = 0.0

    def __add__(self, other: _Sums) -> _Sums:
        """Add the sums of other runs."""
        largest = max(self.largest, other.largest)
        return _Sums(self.signed + other.signed, self.square + other.square, self.sized + other.sized, largest)


class Regressors(ConformanceTest):
    """Tests of sums of known X times signs, or times sizes minus one: the sums are close to zero under the claim.

    Given the past, sign(noise) and |noise|/scale - 1 have mean zero.
    """

    part: ClassVar[BudgetPart] = "dependence"

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._sums: dict[tuple[str, int], _Sums] = {}

    def add(self, block: Block) -> None:
        noisy = np.asarray(block.is_known.any(axis=(0, 2, 3)))
        learners = len(self._layout.learners)
        for runs, part in block.iterate_run_pieces():
            noise = _BlockNoise(part)
            last_values = _select_last(part, block.normal_scores[:, :, runs], noisy)
            for name, values in {**_build_own_regressors(part, last_values), **part.past}.items():
                self._add_sums((name, _OWN), noise.sum_against(values))
            for name, values in last_values.items() if 1 < learners <= _MAX_CROSS_LEARNERS else ():
                for j, sums in enumerate(noise.sum_against_others(values)):
                    self._add_sums((name, j), sums)

    def merge(self, other: Self) -> None:
        for key, sums in other._sums.items():
            self._add_sums(key, sums)

    def _add_sums(self, key: tuple[str, int], sums: _Sums) -> None:
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums

    def _iterate_tests(self) -> Iterator[Test]:
        """Test signs against every regressor; the worst learner or coordinate; the worst of sizes."""
        own = {name: sums for (name, j), sums in self._sums.items() if j == _OWN and sums.square.any()}
        for name, sums in own.items():
            yield _test_signs(name, sums)
        for name in dict.fromkeys(name for name, j in self._sums if j != _OWN):
            each = {j: sums for (kind, j), sums in self._sums.items() if kind == name and j != _OWN}
            yield from _test_others(name, each, self._layout)
        if own:
            yield _test_by_place(own, self._layout)
            yield _test_sizes(own)


# ---- tests -----------------------------------------------------------------------------------------------------------


def _test_signs(name: str, sums: _Sums) -> Test:
    total, square = float(sums.signed.sum()), float(sums.square.sum())
    description = f"signs of the noise do not depend on the past: {name}"
    return Test(
        f"signs on {name}",
        description,
        total / square**0.5,
        float(np.exp(compute_log_sign_p_values(total, square))),
        name,
    )


def _test_others(name: str, each: Mapping[int, _Sums], layout: Layout) -> Iterator[Test]:
    """Test the worst pair of one learner's signs and another one's past, times their number."""
    signed = np.array([sums.signed.sum(axis=1) for sums in each.values()])
    square = np.array([sums.square.sum(axis=1) for sums in each.values()])
    for kind in (signed, square):
        kind[np.arange(len(each)), list(each)] = 0.0  # the learner's own past is tested separately
    if square.any():
        logs = np.where(square > 0.0, compute_log_sign_p_values(signed, square), np.inf)
        j, i = (int(at) for at in np.unravel_index(int(logs.argmin()), logs.shape))
        p_value = min(1.0, float(np.exp(logs[j, i])) * int(np.count_nonzero(square)))
        location = f"signs of {layout.learners[i]} on {name} of {layout.learners[list(each)[j]]}"
        description = f"signs of the noise do not depend on another learner's past: {name}"
        yield Test(
            f"signs on another's {name}", description, float(signed[j, i] / square[j, i] ** 0.5), p_value, location
        )


def _test_by_place(own: Mapping[str, _Sums], layout: Layout) -> Test:
    """Test the worst learner or coordinate, over every regressor."""
    candidates, count = [], 0
    for name, sums in own.items():
        for axis, place in ((1, layout.learners.__getitem__), (0, layout.name_coordinate)):
            signed, square = sums.signed.sum(axis=axis), sums.square.sum(axis=axis)
            logs = np.where(square > 0.0, compute_log_sign_p_values(signed, square), 0.0)
            index = int(logs.argmin())
            count += int(np.count_nonzero(square))
            candidates.append(
                (
                    float(logs[index]),
                    float(signed[index] / max(square[index], 1e-300) ** 0.5),
                    f"{name}, {place(index)}",
                )
            )
    least, deviations, location = min(candidates)
    description = "signs of the noise depend on no past value, in any learner or coordinate"
    return Test(
        "signs by place", description, deviations, min(1.0, float(np.exp(least)) * count), location, is_primary=False
    )


def _compute_size_log_p(total: float, square: float, largest: float) -> float:
    """Compute the log p-value of a sum of known numbers times `e - 1`, e exponential.

    It is a sub-gamma sum (Boucheron, Lugosi, Massart 2013, section 2.4).

    Args:
        total: the sum.
        square: sum of the known numbers' squares.
        largest: maximum of their sizes.
    """
    if square <= 0.0:
        return 0.0
    u = abs(total) * largest / square
    return min(0.0, LOG_2 - square / largest**2 * (1.0 + u - math.sqrt(1.0 + 2.0 * u)))


def _test_sizes(own: Mapping[str, _Sums]) -> Test:
    candidates = []
    for name, sums in own.items():
        square = float(sums.square.sum())
        candidates.append((_compute_size_log_p(sums.sized, square, sums.largest), sums.sized / square**0.5, name))
    least, deviations, location = min(candidates)
    description = "sizes of the noise depend on no past value"
    return Test(
        "sizes", description, deviations, min(1.0, float(np.exp(least)) * len(candidates)), location, is_primary=False
    )


# ---- sums ------------------------------------------------------------------------------------------------------------


class _BlockNoise:
    """Signs and sizes minus one of a block's noise, 0 where it is unknown."""

    def __init__(self, block: Block) -> None:
        self.signs = block.signs.astype(np.float64)
        self.excess = np.where(block.is_known, block.sizes - 1.0, 0.0)
        self.known: BoolArray | None = None if block.is_known.all() else block.is_known

    def sum_against(self, values: FloatArray) -> _Sums:
        """Compute the sums of a regressor that broadcasts to the block's values."""
        x, shape = _clip(_zero_nonfinite(values)), self.signs.shape
        if x.shape[2] < shape[2]:  # equal in all runs, which are therefore added first
            x = np.broadcast_to(x, (*shape[:2], 1, shape[3]))
            counts = np.array(shape[2]) if self.known is None else self.known.sum(axis=2, keepdims=True)
            x = x * (counts > 0)
            signs, excess, weighted = *self._over_runs, x * counts
        else:
            x = np.broadcast_to(x, shape)
            if self.known is not None:
                x = x * self.known
            signs, excess, weighted = self.signs, self.excess, x
        return _Sums(
            signed=np.einsum("itrk,itrk->ik", x, signs),
            square=np.einsum("itrk,itrk->ik", x, weighted),
            sized=float(np.vdot(x, excess)),
            largest=max(float(x.max()), -float(x.min())),
        )

    def sum_against_others(self, values: FloatArray) -> Iterator[_Sums]:
        """Compute the sums of all learners against each one's X, `(learners, rounds, runs, numbers)`."""
        signs = self.signs.reshape(len(values), -1)
        for own in values:
            x = _clip(_zero_nonfinite(own[None])).reshape(-1)
            known = np.ones((len(values), 1)) if self.known is None else self.known.reshape(len(values), -1)
            square = known * np.vdot(x, x) if self.known is None else known @ (x * x)[:, None]
            yield _Sums(signed=(signs @ x)[:, None], square=square)

    @cached_property
    def _over_runs(self) -> tuple[FloatArray, FloatArray]:
        """Signs, and sizes minus one, summed over all runs."""
        return self.signs.sum(axis=2, keepdims=True), self.excess.sum(axis=2, keepdims=True)


def _zero_nonfinite(values: FloatArray) -> FloatArray:
    return values if np.isfinite(values).all() else np.where(np.isfinite(values), values, 0.0)


def _clip(values: FloatArray) -> FloatArray:
    """Clip a regressor at `MAX_RELATIVE_SIZE` times its usual size, `(learners, rounds, runs, numbers)` or 1 along any axis.

    The usual size is the geometric mean, over the rounds so far, of `mean(|X|^(1/2))^2` over the non-zero values of a round:
    few large numbers change it little. It depends on the past only, and only on that of the same run.
    """
    sizes = np.abs(values)
    is_nonzero = bool(sizes.min() > 0.0)
    counts = sizes.shape[0] * sizes.shape[3] if is_nonzero else np.count_nonzero(sizes, axis=(0, 3))
    root_means = np.sqrt(sizes).sum(axis=(0, 3)) / np.maximum(counts, 1)
    logs = np.where(root_means > 0.0, 2.0 * np.log(np.maximum(root_means, 1e-150)), 0.0)
    rounds_so_far = np.maximum(np.cumsum(root_means > 0.0, axis=0), 1)
    limit = MAX_RELATIVE_SIZE * np.exp(np.cumsum(logs, axis=0) / rounds_so_far)[None, :, :, None]
    clipped: FloatArray = np.clip(values, -limit, limit)
    return clipped


def _select_last(block: Block, normal: FloatArray, noisy: BoolArray) -> dict[str, FloatArray]:
    """Select every learner's noise and message of the last round with noise, as known before every round; 0: none.

    Args:
        block: all learners in some runs.
        normal: its normal scores.
        noisy: rounds that have noise in any run.
    """
    rounds = np.arange(len(noisy))
    latest = np.maximum.accumulate(np.where(noisy, rounds, -1))
    before = np.concatenate([[-1], latest[:-1]])
    with_lattice = (block.grid / block.scale)[:, :, None]
    message = np.where(block.lost_bits < ALL_BITS, block.message_steps * with_lattice, 0.0)
    return {
        "last noise": np.where((before >= 0)[:, None, None], normal[:, before], 0.0),
        "last message": np.where((before >= 0)[:, None, None], message[:, before], 0.0),
    }


def _build_own_regressors(block: Block, last: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Build regressors that follow from the block."""
    learners, rounds = block.values.shape[:2]
    regressors = dict(last)
    if rounds > 1:
        regressors["round number"] = (np.arange(rounds) - (rounds - 1) / 2.0)[None, :, None, None]
    if learners > 1:
        message = last["last message"]
        regressors["others' last messages"] = (message.sum(axis=0) - message) / (learners - 1)
    return regressors
