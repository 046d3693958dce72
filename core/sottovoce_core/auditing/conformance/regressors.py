"""Dependence on what was before: linear relations, and every function of the past that is at hand."""

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
"""In scales: a sum of independent noise is so close to zero with at most this probability, whatever else is in it.

The density of a Laplace number is at most 1/2, and so is that of its sum with anything independent. It is 2^10 spacings: a
replay that rounds elsewhere hides no relation.
"""

_Relation = tuple[tuple[int, int], ...]
"""Rounds, counted back from the latest, and the signs that their noise is added with."""

_RELATIONS: tuple[_Relation, ...] = tuple(
    ((0, 1), *zip(back, signs, strict=True))
    for back in ((1,), (2,), (1, 2))
    for signs in itertools.product((1, -1), repeat=len(back))
)


class Relations(ConformanceTest):
    """How many sums are almost zero, among how many."""

    part: ClassVar[BudgetPart] = "dependence"
    additive_names: ClassVar[tuple[str, ...]] = ("_learners", "_rounds", "_tried")

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._learners = np.zeros(2, np.int64)
        self._rounds = np.zeros(len(_RELATIONS), np.int64)
        self._tried = 0

    def add(self, block: Block) -> None:
        units = [np.ones_like(block.scale)]
        if np.nanmax(block.scale, initial=0.0) > np.nanmin(block.scale, initial=np.inf):
            units.append(np.nan_to_num(block.scale))
        for _, part in block.iterate_run_pieces():
            for scale in units:  # in scales, and as they are
                noise = part.values * scale[:, :, None]
                if not part.is_resolved.all():
                    noise[~part.is_resolved] = np.nan
                if len(noise) > 1:
                    self._learners += _near_zero(noise.sum(axis=0), scale.max(axis=0))
                self._add_rounds(noise, scale)

    def _add_rounds(self, noise: FloatArray, scale: FloatArray) -> None:
        for k, relation in enumerate(_RELATIONS):
            longest = relation[-1][0]
            if longest < noise.shape[1]:
                parts = [slice(longest - back, noise.shape[1] - back) for back, _ in relation]
                total = noise[:, parts[0]].copy()
                for part, (_, sign) in zip(parts[1:], relation[1:], strict=True):
                    (np.add if sign > 0 else np.subtract)(total, noise[:, part], out=total)
                zeros, tried = _near_zero(total, np.maximum.reduce([scale[:, part] for part in parts]))
                self._rounds[k] += int(zeros)
                self._tried += int(tried)

    def _every(self) -> Iterator[Test]:
        """Sums over all learners; sums and differences of rounds."""
        zeros, tried = (int(each) for each in self._learners)
        if tried:
            what = "noise does not add up to nothing over learners"
            yield Test("sums of learners", what, zeros, _chance(zeros, tried), "all learners", is_primary=False)
        if self._tried:
            most, total = _RELATIONS[int(self._rounds.argmax())], int(self._rounds.sum())
            what = "no noise is a sum or a difference of noise drawn before"
            where = " ".join(f"{'+-'[sign < 0]} round t-{back}" if back else "round t" for back, sign in most)
            yield Test("sums of rounds", what, total, _chance(total, self._tried), where, is_primary=False)


def _near_zero(total: FloatArray, scale: FloatArray) -> IntArray:
    """How many sums `(..., runs, numbers)` are close to zero, and how many are known."""
    np.abs(total, out=total)
    near = total < _CLOSE * scale[..., None, :]  # not where it is unknown
    return np.array([np.count_nonzero(near), total.size - np.count_nonzero(np.isnan(total))])


def _chance(zeros: int, tried: int) -> float:
    """Of so many or more (Poisson)."""
    return float(special.pdtrc(zeros - 1, tried * _CLOSE)) if zeros else 1.0


# ---- functions of the past -------------------------------------------------------------------------------------------

MAX_RELATIVE_SIZE = 5.0
"""Regressors are clipped at so many times their usual size until then: else their largest number rules the p-value."""

_MAX_CROSS_LEARNERS = 8
"""Learners, at most, where each one's last noise and message are regressors for all others; with more, only their mean is."""

_OWN = -1
"""Whose past a regressor is of: the learner's own, or that of the learner at this place."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of one regressor X: X sign(r) and X^2 by learner and coordinate, and in all X (|r| - 1), and the largest |X|.

    Of another learner's X by learner alone, `(learners, 1)`, and nothing of sizes.
    """

    signed: FloatArray
    square: FloatArray
    sized: float = 0.0
    largest: float = 0.0

    def __add__(self, other: _Sums) -> _Sums:
        """Those of both runs."""
        largest = max(self.largest, other.largest)
        return _Sums(self.signed + other.signed, self.square + other.square, self.sized + other.sized, largest)


class Regressors(ConformanceTest):
    """Signs are fair whatever was before, and sizes are one scale on average: so no sum of them times X is far from zero."""

    part: ClassVar[BudgetPart] = "dependence"

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._sums: dict[tuple[str, int], _Sums] = {}

    def add(self, block: Block) -> None:
        noisy = np.asarray(block.is_known.any(axis=(0, 2, 3)))
        learners = len(self._layout.learners)
        for runs, part in block.iterate_run_pieces():
            noise = _Noise(part)
            last = _last(part, block.normal_scores[:, :, runs], noisy)
            for name, values in {**_own(part, last), **part.past}.items():
                self._gather((name, _OWN), noise.against(values))
            for name, values in last.items() if 1 < learners <= _MAX_CROSS_LEARNERS else ():
                for j, sums in enumerate(noise.against_others(values)):
                    self._gather((name, j), sums)

    def merge(self, other: Self) -> None:
        for key, sums in other._sums.items():
            self._gather(key, sums)

    def _gather(self, key: tuple[str, int], sums: _Sums) -> None:
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums

    def _every(self) -> Iterator[Test]:
        """Signs against every regressor; the worst learner or coordinate; the worst of sizes."""
        own = {name: sums for (name, j), sums in self._sums.items() if j == _OWN and sums.square.any()}
        for name, sums in own.items():
            yield _signs(name, sums)
        for name in dict.fromkeys(name for name, j in self._sums if j != _OWN):
            each = {j: sums for (of, j), sums in self._sums.items() if of == name and j != _OWN}
            yield from _others(name, each, self._layout)
        if own:
            yield _by_place(own, self._layout)
            yield _sizes(own)


# ---- tests -----------------------------------------------------------------------------------------------------------


def _signs(name: str, sums: _Sums) -> Test:
    total, square = float(sums.signed.sum()), float(sums.square.sum())
    what = f"signs of the noise do not follow what was before: {name}"
    return Test(
        f"signs on {name}", what, total / square**0.5, float(np.exp(compute_log_sign_p_values(total, square))), name
    )


def _others(name: str, each: Mapping[int, _Sums], layout: Layout) -> Iterator[Test]:
    """The worst pair of one learner's signs and another one's past, times their number."""
    signed = np.array([sums.signed.sum(axis=1) for sums in each.values()])
    square = np.array([sums.square.sum(axis=1) for sums in each.values()])
    for kind in (signed, square):
        kind[np.arange(len(each)), list(each)] = 0.0  # its own is a regressor of its own
    if square.any():
        logs = np.where(square > 0.0, compute_log_sign_p_values(signed, square), np.inf)
        j, i = (int(at) for at in np.unravel_index(int(logs.argmin()), logs.shape))
        p_value = min(1.0, float(np.exp(logs[j, i])) * int(np.count_nonzero(square)))
        where = f"signs of {layout.learners[i]} on {name} of {layout.learners[list(each)[j]]}"
        what = f"signs of the noise do not follow what another learner had before: {name}"
        yield Test(f"signs on another's {name}", what, float(signed[j, i] / square[j, i] ** 0.5), p_value, where)


def _by_place(own: Mapping[str, _Sums], layout: Layout) -> Test:
    """The worst learner or coordinate, of every regressor."""
    found, count = [], 0
    for name, sums in own.items():
        for axis, place in ((1, layout.learners.__getitem__), (0, layout.name_coordinate)):
            signed, square = sums.signed.sum(axis=axis), sums.square.sum(axis=axis)
            logs = np.where(square > 0.0, compute_log_sign_p_values(signed, square), 0.0)
            at = int(logs.argmin())
            count += int(np.count_nonzero(square))
            found.append((float(logs[at]), float(signed[at] / max(square[at], 1e-300) ** 0.5), f"{name}, {place(at)}"))
    least, deviations, where = min(found)
    what = "signs of the noise follow nothing that was before, in no learner and no coordinate"
    return Test("signs by place", what, deviations, min(1.0, float(np.exp(least)) * count), where, is_primary=False)


def _log_sizes(total: float, square: float, largest: float) -> float:
    """Of a sum of known numbers times `e - 1`, e exponential (a sub-gamma sum; Boucheron, Lugosi, Massart 2013, section 2.4).

    Args:
        total: the sum.
        square: of the known numbers' squares, the sum.
        largest: of their sizes.
    """
    if square <= 0.0:
        return 0.0
    u = abs(total) * largest / square
    return min(0.0, LOG_2 - square / largest**2 * (1.0 + u - math.sqrt(1.0 + 2.0 * u)))


def _sizes(own: Mapping[str, _Sums]) -> Test:
    found = []
    for name, sums in own.items():
        square = float(sums.square.sum())
        found.append((_log_sizes(sums.sized, square, sums.largest), sums.sized / square**0.5, name))
    least, deviations, where = min(found)
    what = "sizes of the noise follow nothing that was before"
    return Test("sizes", what, deviations, min(1.0, float(np.exp(least)) * len(found)), where, is_primary=False)


# ---- sums ------------------------------------------------------------------------------------------------------------


class _Noise:
    """Signs and sizes minus one of a block's noise, 0 where it is unknown."""

    def __init__(self, block: Block) -> None:
        self.signs = block.signs.astype(np.float64)
        self.excess = np.where(block.is_known, block.sizes - 1.0, 0.0)
        self.known: BoolArray | None = None if block.is_known.all() else block.is_known

    def against(self, values: FloatArray) -> _Sums:
        """Sums of a regressor that broadcasts to the block's values."""
        x, shape = _clipped(_finite(values)), self.signs.shape
        if x.shape[2] < shape[2]:  # the same in all runs: these are added up first
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

    def against_others(self, values: FloatArray) -> Iterator[_Sums]:
        """The same of all learners and each one's X, `(learners, rounds, runs, numbers)`."""
        signs = self.signs.reshape(len(values), -1)
        for own in values:
            x = _clipped(_finite(own[None])).reshape(-1)
            known = np.ones((len(values), 1)) if self.known is None else self.known.reshape(len(values), -1)
            square = known * np.vdot(x, x) if self.known is None else known @ (x * x)[:, None]
            yield _Sums(signed=(signs @ x)[:, None], square=square)

    @cached_property
    def _over_runs(self) -> tuple[FloatArray, FloatArray]:
        """Signs, and sizes minus one, of all runs together."""
        return self.signs.sum(axis=2, keepdims=True), self.excess.sum(axis=2, keepdims=True)


def _finite(values: FloatArray) -> FloatArray:
    return values if np.isfinite(values).all() else np.where(np.isfinite(values), values, 0.0)


def _clipped(values: FloatArray) -> FloatArray:
    """A regressor clipped at `MAX_RELATIVE_SIZE` times its usual size, `(learners, rounds, runs, numbers)` or 1 along any axis.

    The usual size is the geometric mean, over the rounds so far, of `mean(|X|^(1/2))^2` over what is not zero in a round: few
    large numbers move it little. It follows from the past and from nothing else, and from a run's own alone.
    """
    sizes = np.abs(values)
    every = bool(sizes.min() > 0.0)
    some = sizes.shape[0] * sizes.shape[3] if every else np.count_nonzero(sizes, axis=(0, 3))
    usual = np.sqrt(sizes).sum(axis=(0, 3)) / np.maximum(some, 1)
    logs = np.where(usual > 0.0, 2.0 * np.log(np.maximum(usual, 1e-150)), 0.0)
    so_far = np.maximum(np.cumsum(usual > 0.0, axis=0), 1)
    limit = MAX_RELATIVE_SIZE * np.exp(np.cumsum(logs, axis=0) / so_far)[None, :, :, None]
    found: FloatArray = np.clip(values, -limit, limit)
    return found


def _last(block: Block, normal: FloatArray, noisy: BoolArray) -> dict[str, FloatArray]:
    """What every learner drew and said in the last round that had noise, as it was known before every round; 0: nothing.

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


def _own(block: Block, last: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Regressors that follow from the block."""
    learners, rounds = block.values.shape[:2]
    found = dict(last)
    if rounds > 1:
        found["round number"] = (np.arange(rounds) - (rounds - 1) / 2.0)[None, :, None, None]
    if learners > 1:
        message = last["last message"]
        found["others' last messages"] = (message.sum(axis=0) - message) / (learners - 1)
    return found
