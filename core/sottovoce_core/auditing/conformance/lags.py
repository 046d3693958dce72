"""Dependence at a distance: noise at lags in rounds and coordinates, of the same or another learner.

All lags are computed at once by Fourier transforms over (round, coordinate), padded with zeros so that nothing wraps around.
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
"""Maximum number of sums kept, 8 bytes each: with more, the largest lags are omitted."""

MAX_COMPLEX_NUMBERS = 2**23
"""Approximate maximum of complex numbers of spectra and their products in memory at once."""

_KINDS = ((0, 0), (1, 1), (2, 2), (2, 1), (1, 2))
"""Pairs of scores of the first and the second place that are multiplied: of values, sizes, signs (0, 1, 2)."""
_VALUES, _SIZES, _SIGNS, _SIGN_SIZE, _SIZE_SIGN = range(5)

_Log = Callable[[FloatArray, FloatArray, bool], FloatArray]


class Lags(ConformanceTest):
    """Sums of products of scores over all pairs of places at the same lag.

    The sums are `(kinds, pairs of sequences, lags in rounds, lags in coordinates)`; a pair `i <= j` at lag `(tau, kappa)` is
    `sum x_i(t, k) x_j(t + tau, k + kappa)` over rounds, coordinates and runs. Only rounds with noise are counted.
    """

    part: ClassVar[BudgetPart] = "dependence"
    additive_names: ClassVar[tuple[str, ...]] = ("_sums", "_counts")

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._max_lags = _choose_max_lags(layout)
        rounds, numbers = (2 * each - 1 for each in self._max_lags)
        self._sequences = np.triu_indices(layout.sequence_count)  # indices of every pair
        self._counts: FloatArray = np.zeros((len(self._sequences[0]), rounds, numbers))
        self._sums: FloatArray = np.zeros((len(_KINDS), *self._counts.shape))

    def add(self, block: Block) -> None:
        layout = self._layout
        # Rounds without noise, as between the leaves of trees, are skipped.
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
        is_uniform = bool((known == known[:, :, :1]).all())
        counts = _correlate(known[None, :, :, :1] if is_uniform else known[None], ((0, 0),), self._max_lags)
        counts *= block.runs if is_uniform else 1
        # Values are multiplied with values only.
        values, other_kinds = ((0, 0),), tuple((a - 1, b - 1) for a, b in _KINDS[1:])
        self._sums += np.concatenate(
            [_correlate(scores[:1], values, self._max_lags), _correlate(scores[1:], other_kinds, self._max_lags)]
        )
        self._counts += np.rint(counts[0])

    # ---- tests -------------------------------------------------------------------------------------------------------

    def _iterate_tests(self) -> Iterator[Test]:
        """Test near and far lags of values, sizes and signs; of signs and sizes together."""
        tau, kappa = self._list_lags()
        is_near = (np.abs(tau) + np.abs(kappa) <= 1) | ((np.abs(tau) <= 2) & (kappa == 0))
        is_same_sequence = self._sequences[0] == self._sequences[1]
        # Within one sequence, half of the lags is redundant.
        is_ahead = (tau > 0) | ((tau == 0) & (kappa > 0))
        is_counted = (self._counts > 0) & (~is_same_sequence[:, None, None] | is_ahead)
        for kind, description, log_p in (
            (_VALUES, "values", _compute_product_log_p),
            (_SIZES, "sizes", _compute_product_log_p),
            (_SIGNS, "signs", _compute_sign_log_p),
        ):
            for distance, mask in (("near", is_near), ("far", ~is_near)):
                yield from self._test_worst_lag(
                    f"{distance} {description}",
                    f"{description} of the noise are independent, {_DISTANCES[distance]}",
                    ((kind, log_p),),
                    is_counted & mask,
                    is_same_sequence,
                    is_primary=distance == "near",
                )
        kinds = ((_SIGN_SIZE, _compute_sign_size_log_p), (_SIZE_SIGN, _compute_sign_size_log_p))
        description = "signs of the noise and sizes elsewhere are independent"
        yield from self._test_worst_lag(
            "signs and sizes", description, kinds, is_counted, is_same_sequence, is_primary=False
        )

    def _list_lags(self) -> tuple[IntArray, IntArray]:
        """Return lags in rounds and in coordinates, to broadcast."""
        rounds, numbers = (np.arange(1 - limit, limit) for limit in self._max_lags)
        return rounds[:, None], numbers

    def _test_worst_lag(
        self,
        name: str,
        description: str,
        kinds: tuple[tuple[int, _Log], ...],
        mask: BoolArray,
        is_same_sequence: BoolArray,
        *,
        is_primary: bool,
    ) -> Iterator[Test]:
        """Test the least likely sum, times their number."""
        if not mask.any():
            return
        candidates = []
        for kind, log_p in kinds:
            logs = np.empty(self._counts.shape)
            for shared in (False, True):
                logs[is_same_sequence == shared] = log_p(
                    self._sums[kind, is_same_sequence == shared], self._counts[is_same_sequence == shared], shared
                )
            logs[~mask] = np.inf
            index = np.unravel_index(int(logs.argmin()), logs.shape)
            candidates.append((float(logs[index]), kind, index))
        least, kind, index = min(candidates)
        p_value = min(1.0, float(np.exp(least)) * int(np.count_nonzero(mask)) * len(kinds))
        rho = float(self._sums[(kind, *index)] / self._counts[index])
        yield Test(name, description, rho, p_value, self._name_lag(*(int(each) for each in index)), is_primary)

    def _name_lag(self, pair: int, tau_at: int, kappa_at: int) -> str:
        first, second = (int(each[pair]) for each in self._sequences)
        tau, kappa = (each.ravel() for each in self._list_lags())
        lag = f"{tau[tau_at]} noisy rounds and {kappa[kappa_at]} coordinates on"
        return f"{self._layout.name_sequence(first)}, and {self._layout.name_sequence(second)} {lag}"


_DISTANCES = {"near": "next to each other", "far": "at every distance"}


def _choose_max_lags(layout: Layout) -> tuple[int, int]:
    """Choose the exclusive limits of lags in rounds and in coordinates."""
    rounds, numbers = layout.rounds, layout.max_width
    pairs = layout.sequence_count * (layout.sequence_count + 1) // 2
    while (len(_KINDS) + 1) * pairs * (2 * rounds - 1) * (2 * numbers - 1) > MAX_SUMS and (rounds > 3 or numbers > 2):
        if rounds > 3 and (rounds >= numbers or numbers <= 2):
            rounds = max(3, rounds // 2)
        else:
            numbers = max(2, numbers // 2)
    return rounds, numbers


def _compute_product_log_p(total: FloatArray, count: FloatArray, shared: bool = False) -> FloatArray:
    """Compute the log p-value of a sum of `count` products of independent normal numbers (Chernoff's bound).

    Args:
        total: the sum, of any shape.
        count: number of products; 0: nothing is known.
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
    logs: FloatArray = np.minimum(0.0, LOG_2 - count * rate)
    return logs


def _compute_sign_log_p(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    """Compute the log p-value of a sum of products of fair signs, which are independent fair signs, for one sequence or two."""
    return compute_log_sign_p_values(total, count)


def _compute_sign_size_log_p(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    """Compute the exact log p-value of sign times normal size: independent, so normal of variance one, each in one product."""
    deviations = np.abs(total) / np.sqrt(np.maximum(count, 1e-300))
    logs: FloatArray = np.minimum(0.0, LOG_2 + special.log_ndtr(-deviations))
    return logs


# ---- transforms ------------------------------------------------------------------------------------------------------


def _correlate(scores: npt.NDArray[Any], kinds: tuple[tuple[int, int], ...], reach: tuple[int, int]) -> FloatArray:
    """Compute sums of products at all lags.

    Args:
        scores: `(scores, sequences, rounds, runs, numbers)`.
        kinds: pairs of scores that are multiplied.
        reach: exclusive limits of the lags.

    Returns:
        `(kinds, pairs of sequences, 2 reach - 1, 2 reach - 1)`.
    """
    score_count, sequences, rounds, runs, numbers = scores.shape
    size = fft.next_fast_len(rounds + reach[0] - 1), fft.next_fast_len(numbers + reach[1] - 1, real=True)
    frequencies = size[0] * (size[1] // 2 + 1)
    group_size = max(1, int((MAX_COMPLEX_NUMBERS / frequencies) ** 0.5) // score_count)
    groups = [slice(v, v + group_size) for v in range(0, sequences, group_size)]
    step = max(1, MAX_COMPLEX_NUMBERS // (frequencies * sequences * score_count))
    index = {pair: k for k, pair in enumerate(itertools.combinations_with_replacement(range(sequences), 2))}
    sums = np.zeros((len(kinds), len(index), 2 * reach[0] - 1, 2 * reach[1] - 1))
    for start in range(0, runs, step):
        spectra = _compute_spectra(scores[:, :, :, start : start + step], size)
        for a, b in itertools.combinations_with_replacement(groups, 2):
            product = _multiply_spectra(spectra[:, :, :, a], spectra[:, :, :, b])
            for i, j in itertools.product(range(sequences)[a], range(sequences)[b]):
                if i <= j:
                    own = np.stack([product[:, :, p, i - a.start, q, j - b.start] for p, q in kinds])
                    sums[:, index[i, j]] += _invert_spectra(own, size, reach)
    return sums


def _compute_spectra(scores: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.complex64]:
    """Compute the spectra `(frequencies, frequencies, scores, sequences, runs)`, in single precision."""
    moved = np.ascontiguousarray(scores.transpose(2, 4, 0, 1, 3), dtype=np.float32)
    spectra: npt.NDArray[np.complex64] = fft.fft(fft.rfft(moved, size[1], axis=1), size[0], axis=0)
    return spectra


def _multiply_spectra(first: npt.NDArray[np.complex64], second: npt.NDArray[np.complex64]) -> npt.NDArray[np.complex64]:
    """Multiply all scores of all sequences, summed over runs: two axes of frequencies, then scores and sequences twice."""
    rows, columns = (each.reshape(*each.shape[:2], -1, each.shape[-1]) for each in (first, second))
    product: npt.NDArray[np.complex64] = rows.conj() @ columns.swapaxes(-1, -2)
    return product.reshape(*first.shape[:4], *second.shape[2:4])


def _invert_spectra(product: npt.NDArray[np.complex64], size: tuple[int, int], reach: tuple[int, int]) -> FloatArray:
    """Transform back to `(..., 2 reach - 1, 2 reach - 1)` sums, from the most negative lag on."""
    wrapped = fft.irfft(fft.ifft(product, axis=-2), size[1], axis=-1)
    tau, kappa = (np.arange(1 - limit, limit) for limit in reach)
    sums: FloatArray = wrapped[..., tau[:, None], kappa].astype(np.float64)
    return sums
