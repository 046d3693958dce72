"""Dependence at a distance: what was drawn so many rounds later, or so many coordinates on, by the same or another learner.

All distances at once, by Fourier transforms over (round, coordinate), padded with zeros so that nothing wraps around.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.p_values import LOG_2, compute_log_sign_p_values

MAX_SUMS = 2**22
"""Sums that are kept, at most, 8 bytes each: where there are more, the largest distances are left out."""

MAX_COMPLEX_NUMBERS = 2**23
"""Complex numbers of spectra, and of their products, that are held at once, about."""

_KINDS = ((0, 0), (1, 1), (2, 2), (2, 1), (1, 2))
"""Which scores of the first and of the second place are multiplied: of values, sizes, signs (0, 1, 2)."""
_VALUES, _SIZES, _SIGNS, _SIGN_SIZE, _SIZE_SIGN = range(5)

_Log = Callable[[FloatArray, FloatArray, bool], FloatArray]


class Lags(ConformanceTest):
    """Sums of products of scores over all pairs of places that are equally far apart.

    The sums are `(kinds, pairs of voices, lags in rounds, lags in coordinates)`; a pair `i <= j` at lag `(tau, kappa)` is
    `sum x_i(t, k) x_j(t + tau, k + kappa)` over rounds, coordinates and runs. Rounds are those that have noise.
    """

    part: ClassVar[BudgetPart] = "dependence"
    additive_names: ClassVar[tuple[str, ...]] = ("_sums", "_counts")

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._reach = _reach(layout)
        rounds, numbers = (2 * each - 1 for each in self._reach)
        self._voices = np.triu_indices(layout.sequence_count)  # of every pair
        self._counts: FloatArray = np.zeros((len(self._voices[0]), rounds, numbers))
        self._sums: FloatArray = np.zeros((len(_KINDS), *self._counts.shape))

    def add(self, block: Block) -> None:
        layout = self._layout
        # Rounds without noise, as between trees' leaves, do not part the others.
        noisy = block.is_known.any(axis=(0, 2, 3))
        if not noisy.any():
            return
        scores = np.stack(
            [
                layout.stack_sequences(each[:, noisy]).astype(np.float32)
                for each in (block.normal_scores, block.normal_size_scores, block.signs)
            ]
        )
        known = layout.stack_sequences(block.is_known[:, noisy])
        alike = bool((known == known[:, :, :1]).all())
        counts = _correlated(known[None, :, :, :1] if alike else known[None], ((0, 0),), self._reach)
        counts *= block.runs if alike else 1
        # Values meet values alone, so no product of theirs with others is made.
        values, others = ((0, 0),), tuple((a - 1, b - 1) for a, b in _KINDS[1:])
        self._sums += np.concatenate(
            [_correlated(scores[:1], values, self._reach), _correlated(scores[1:], others, self._reach)]
        )
        self._counts += np.rint(counts[0])

    # ---- tests -------------------------------------------------------------------------------------------------------

    def _every(self) -> Iterator[Test]:
        """Near and far lags of values, sizes and signs; of signs beside sizes together."""
        tau, kappa = self._lags()
        near = (np.abs(tau) + np.abs(kappa) <= 1) | ((np.abs(tau) <= 2) & (kappa == 0))
        own = self._voices[0] == self._voices[1]
        # Of one voice half of the lags count, for the other half says the same.
        ahead = (tau > 0) | ((tau == 0) & (kappa > 0))
        apart = (self._counts > 0) & (~own[:, None, None] | ahead)
        for kind, what, log_p in (
            (_VALUES, "values", _log_products),
            (_SIZES, "sizes", _log_products),
            (_SIGNS, "signs", _fair),
        ):
            for distance, here in (("near", near), ("far", ~near)):
                yield from self._worst(
                    f"{distance} {what}",
                    f"{what} of the noise are independent, {_DISTANCES[distance]}",
                    ((kind, log_p),),
                    apart & here,
                    own,
                    primary=distance == "near",
                )
        kinds = ((_SIGN_SIZE, _exact), (_SIZE_SIGN, _exact))
        what = "signs of the noise and sizes elsewhere are independent"
        yield from self._worst("signs and sizes", what, kinds, apart, own, primary=False)

    def _lags(self) -> tuple[IntArray, IntArray]:
        """Lags in rounds and in coordinates, to broadcast."""
        rounds, numbers = (np.arange(1 - most, most) for most in self._reach)
        return rounds[:, None], numbers

    def _worst(
        self,
        name: str,
        what: str,
        kinds: tuple[tuple[int, _Log], ...],
        here: BoolArray,
        own: BoolArray,
        *,
        primary: bool,
    ) -> Iterator[Test]:
        """The least likely sum, times their number."""
        if not here.any():
            return
        found = []
        for kind, log_p in kinds:
            logs = np.empty(self._counts.shape)
            for shared in (False, True):
                logs[own == shared] = log_p(self._sums[kind, own == shared], self._counts[own == shared], shared)
            logs[~here] = np.inf
            at = np.unravel_index(int(logs.argmin()), logs.shape)
            found.append((float(logs[at]), kind, at))
        least, kind, at = min(found)
        p_value = min(1.0, float(np.exp(least)) * int(np.count_nonzero(here)) * len(kinds))
        rho = float(self._sums[(kind, *at)] / self._counts[at])
        yield Test(name, what, rho, p_value, self._place(*(int(each) for each in at)), primary)

    def _place(self, pair: int, tau_at: int, kappa_at: int) -> str:
        first, second = (int(each[pair]) for each in self._voices)
        tau, kappa = (each.ravel() for each in self._lags())
        lag = f"{tau[tau_at]} noisy rounds and {kappa[kappa_at]} coordinates on"
        return f"{self._layout.name_sequence(first)}, and {self._layout.name_sequence(second)} {lag}"


_DISTANCES = {"near": "next to each other", "far": "at every distance"}


def _reach(layout: Layout) -> tuple[int, int]:
    """Lags in rounds and in coordinates stay below these."""
    rounds, numbers = layout.rounds, layout.max_width
    pairs = layout.sequence_count * (layout.sequence_count + 1) // 2
    while (len(_KINDS) + 1) * pairs * (2 * rounds - 1) * (2 * numbers - 1) > MAX_SUMS and (rounds > 3 or numbers > 2):
        if rounds > 3 and (rounds >= numbers or numbers <= 2):
            rounds = max(3, rounds // 2)
        else:
            numbers = max(2, numbers // 2)
    return rounds, numbers


def _log_products(total: FloatArray, count: FloatArray, shared: bool = False) -> FloatArray:
    """Of a sum of `count` products of independent normal numbers (Chernoff's bound).

    Args:
        total: the sum, of any shape.
        count: of products; 0: nothing is known.
        shared: each number may be in two of the products, as in sums along one sequence.
    """
    rho = np.abs(total) / np.maximum(count, 1.0)
    root = np.sqrt(1.0 + 4.0 * rho**2)
    if shared:
        theta = rho / root
        rate = theta * rho + np.log((1.0 + 1.0 / root) / 2.0) / 2.0
    else:
        theta = 2.0 * rho / (1.0 + root)
        rate = theta * rho + np.log1p(-(theta**2)) / 2.0
    found: FloatArray = np.minimum(0.0, LOG_2 - count * rate)
    return found


def _fair(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    """Products of fair signs are fair signs, and independent of each other, one sequence or two."""
    return compute_log_sign_p_values(total, count)


def _exact(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    """A normal size times a sign that is independent of it is normal, of variance one, and each is in one product; exact."""
    deviations = np.abs(total) / np.sqrt(np.maximum(count, 1e-300))
    found: FloatArray = np.minimum(0.0, LOG_2 + special.log_ndtr(-deviations))
    return found


# ---- transforms ------------------------------------------------------------------------------------------------------


def _correlated(scores: npt.NDArray[Any], kinds: tuple[tuple[int, int], ...], reach: tuple[int, int]) -> FloatArray:
    """Sums of products at all lags.

    Args:
        scores: `(scores, voices, rounds, runs, numbers)`.
        kinds: which score is multiplied with which.
        reach: lags stay below these.

    Returns:
        `(kinds, pairs of voices, 2 reach - 1, 2 reach - 1)`.
    """
    each, voices, rounds, runs, numbers = scores.shape
    size = fft.next_fast_len(rounds + reach[0] - 1), fft.next_fast_len(numbers + reach[1] - 1, real=True)
    frequencies = size[0] * (size[1] // 2 + 1)
    together = max(1, int((MAX_COMPLEX_NUMBERS / frequencies) ** 0.5) // each)
    groups = [slice(v, v + together) for v in range(0, voices, together)]
    step = max(1, MAX_COMPLEX_NUMBERS // (frequencies * voices * each))
    index = {pair: k for k, pair in enumerate(itertools.combinations_with_replacement(range(voices), 2))}
    found = np.zeros((len(kinds), len(index), 2 * reach[0] - 1, 2 * reach[1] - 1))
    for start in range(0, runs, step):
        spectra = _transformed(scores[:, :, :, start : start + step], size)
        for a, b in itertools.combinations_with_replacement(groups, 2):
            product = _products_of(spectra[:, :, :, a], spectra[:, :, :, b])
            for i, j in itertools.product(range(voices)[a], range(voices)[b]):
                if i <= j:
                    own = np.stack([product[:, :, p, i - a.start, q, j - b.start] for p, q in kinds])
                    found[:, index[i, j]] += _inverted(own, size, reach)
    return found


def _transformed(scores: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.complex64]:
    """`(frequencies, frequencies, scores, voices, runs)`, in single precision."""
    moved = np.ascontiguousarray(scores.transpose(2, 4, 0, 1, 3), dtype=np.float32)
    spectra: npt.NDArray[np.complex64] = fft.fft(fft.rfft(moved, size[1], axis=1), size[0], axis=0)
    return spectra


def _products_of(first: npt.NDArray[np.complex64], second: npt.NDArray[np.complex64]) -> npt.NDArray[np.complex64]:
    """Of all scores of all voices, summed over runs: `(frequencies, frequencies, scores, voices, scores, voices)`."""
    rows, columns = (each.reshape(*each.shape[:2], -1, each.shape[-1]) for each in (first, second))
    product: npt.NDArray[np.complex64] = rows.conj() @ columns.swapaxes(-1, -2)
    return product.reshape(*first.shape[:4], *second.shape[2:4])


def _inverted(product: npt.NDArray[np.complex64], size: tuple[int, int], reach: tuple[int, int]) -> FloatArray:
    """`(..., 2 reach - 1, 2 reach - 1)` sums, from the most negative lag on."""
    wrapped = fft.irfft(fft.ifft(product, axis=-2), size[1], axis=-1)
    tau, kappa = (np.arange(1 - most, most) for most in reach)
    sums: FloatArray = wrapped[..., tau[:, None], kappa].astype(np.float64)
    return sums
