"""Dependence at a distance: what was drawn so many rounds later, or so many coordinates on, by the same or another learner.

All distances at once, by Fourier transforms over (round, coordinate), padded with zeros so that nothing wraps around.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import fft

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import Test
from sottovoce_core.auditing.conformance.block import Block, Layout
from sottovoce_core.auditing.conformance.p_values import log_normal, log_products, log_signs

KEPT = 2**22
"""Sums that are kept, at most, 8 bytes each: where there are more, the largest distances are left out."""

AT_ONCE = 2**23
"""Complex numbers of spectra, and of their products, that are held at once, about."""

_KINDS = ((0, 0), (1, 1), (2, 2), (2, 1), (1, 2))
"""Which scores of the first and of the second place are multiplied: of values, sizes, signs (0, 1, 2)."""
_VALUES, _SIZES, _SIGNS, _SIGN_SIZE, _SIZE_SIGN = range(5)

_Log = Callable[[FloatArray, FloatArray, bool], FloatArray]


class Lags:
    """Sums of products of scores over all pairs of places that are equally far apart.

    The sums are `(kinds, pairs of voices, lags in rounds, lags in coordinates)`; a pair `i <= j` at lag `(tau, kappa)` is
    `sum x_i(t, k) x_j(t + tau, k + kappa)` over rounds, coordinates and runs. Rounds are those that have noise.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._sums: FloatArray = np.zeros(0)
        self._counts: FloatArray = np.zeros(0)

    def add(self, block: Block) -> None:
        """Look at some more runs."""
        layout = self._layout or Layout.of(block)
        # Rounds without noise, as between trees' leaves, do not part the others.
        noisy = block.known.any(axis=(0, 2, 3))
        if not noisy.any():
            return
        scores = np.stack(
            [
                layout.by_voice(each[:, noisy]).astype(np.float32)
                for each in (block.normal, block.normal_sizes, block.signs)
            ]
        )
        known = layout.by_voice(block.known[:, noisy])
        alike = bool((known == known[:, :, :1]).all())
        counts = _correlated(known[None, :, :, :1] if alike else known[None], ((0, 0),), self._reach(layout))
        counts *= block.runs if alike else 1
        # Values meet values alone, so no product of theirs with others is made.
        values, others = ((0, 0),), tuple((a - 1, b - 1) for a, b in _KINDS[1:])
        sums = [
            _correlated(scores[:1], values, self._reach(layout)),
            _correlated(scores[1:], others, self._reach(layout)),
        ]
        self._gather(layout, np.concatenate(sums), np.rint(counts[0]))

    def merge(self, other: Self) -> None:
        """Take in what another one keeps."""
        if other._layout is not None:
            self._gather(other._layout, other._sums, other._counts)

    def _gather(self, layout: Layout, sums: FloatArray, counts: FloatArray) -> None:
        if self._layout is None:
            self._layout, self._sums, self._counts = layout, sums.copy(), counts.copy()
        else:
            self._sums += sums
            self._counts += counts

    @staticmethod
    def _reach(layout: Layout) -> tuple[int, int]:
        """Lags in rounds and in coordinates stay below these."""
        rounds, numbers = layout.rounds, layout.widest
        pairs = layout.voices * (layout.voices + 1) // 2
        while (len(_KINDS) + 1) * pairs * (2 * rounds - 1) * (2 * numbers - 1) > KEPT and (rounds > 3 or numbers > 2):
            if rounds > 3 and (rounds >= numbers or numbers <= 2):
                rounds = max(3, rounds // 2)
            else:
                numbers = max(2, numbers // 2)
        return rounds, numbers

    # ---- tests -------------------------------------------------------------------------------------------------------

    def tests(self) -> Iterator[Test]:
        """Near and far lags of values, sizes and signs; of signs beside sizes together."""
        if self._layout is None:
            return
        own, near = self._own(), self._near()
        apart = self._counted()
        for kind, what, log_p in (
            (_VALUES, "values", _products),
            (_SIZES, "sizes", _products),
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
        rounds, numbers = (n // 2 for n in self._counts.shape[1:])
        return np.arange(-rounds, rounds + 1)[:, None], np.arange(-numbers, numbers + 1)

    def _near(self) -> BoolArray:
        tau, kappa = self._lags()
        near: BoolArray = (np.abs(tau) + np.abs(kappa) <= 1) | ((np.abs(tau) <= 2) & (kappa == 0))
        return near

    def _own(self) -> BoolArray:
        """Which pairs are of one voice."""
        voices = 0 if self._layout is None else self._layout.voices
        first, second = np.triu_indices(voices)
        own: BoolArray = first == second
        return own

    def _counted(self) -> BoolArray:
        """Lags that are there; of one voice half of them, for the other half says the same."""
        tau, kappa = self._lags()
        ahead = (tau > 0) | ((tau == 0) & (kappa > 0))
        counted: BoolArray = (self._counts > 0) & (~self._own()[:, None, None] | ahead)
        return counted

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
        if self._layout is None:
            return ""
        first, second = (int(each[pair]) for each in np.triu_indices(self._layout.voices))
        tau, kappa = (each.ravel() for each in self._lags())
        lag = f"{tau[tau_at]} noisy rounds and {kappa[kappa_at]} coordinates on"
        return f"{self._layout.voice(first)}, and {self._layout.voice(second)} {lag}"


_DISTANCES = {"near": "next to each other", "far": "at every distance"}


def _products(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    return log_products(total, count, shared=shared)


def _fair(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    """Products of fair signs are fair signs, and independent of each other, one sequence or two."""
    return log_signs(total, count)


def _exact(total: FloatArray, count: FloatArray, shared: bool) -> FloatArray:
    """A normal size times a sign that is independent of it is normal, and each is in one product."""
    return log_normal(total, count)


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
    together = max(1, int((AT_ONCE / frequencies) ** 0.5) // each)
    groups = [slice(v, v + together) for v in range(0, voices, together)]
    step = max(1, AT_ONCE // (frequencies * voices * each))
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
