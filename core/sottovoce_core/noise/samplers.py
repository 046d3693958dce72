"""Noise samplers of deployed learners: discrete Laplace numbers from random bytes, and OpenDP's samplers on the same lattice."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import SpecError
from sottovoce_core.noise.request import MAX_PREFETCH_ROWS, NoiseRequest, PrefetchCache, PrefetchKey
from sottovoce_core.optional import format_install_hint

# ---- bitwise ---------------------------------------------------------------------------------------------------------

_MAX_BLOCK_NUMBERS = 2**14
"""Maximum numbers whose random bits and digits are in memory at once: about 3 MB."""
_LEVELS = 18
_POWERS = np.exp2(np.arange(_LEVELS))
_SURE_ACCEPT_THRESHOLD = 2**16 - 2**5
"""16-bit coin value below which any low bits are accepted, because they are rejected with probability below 2^-11."""


class SystemNoise:
    """Noise of a deployed learner: discrete Laplace from cryptographic random bytes, without a seed; no number is used twice.

    The bytes come from OpenSSL's generator, which the operating system seeds repeatedly and after every fork; its past output
    cannot be computed from its state. They cost a tenth of the operating system's own.

    The magnitude of a discrete Laplace number is geometric with ratio `q = exp(-spacing/scale)`, and the binary digits of a
    geometric number are independent. The low bits, whose value times `spacing/scale` stays below 2^-11, are drawn together:
    uniform, accepted with probability `q^low`. Each of the 18 bits above (value v) is set with probability
    `1 / (1 + q^-v)`; the next one would be set with probability below e^-64, and is not drawn. Rejected numbers are drawn
    again, and so is minus zero, or zero would count twice. Every comparison of a random number with a probability uses 16
    bits, and 48 more if those tie.

    If later scales are known (`NoiseRequest.future_scale`), short Laplace vectors of several rounds are drawn together.
    """

    def __init__(self, entropy: Callable[[int], bytes] = ssl.RAND_bytes) -> None:
        self._entropy, self._cache = entropy, PrefetchCache()

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        match draw.distribution:
            case "laplace":
                return self._take_laplace(draw)
            case "gaussian":
                return self._gaussian(math.prod(draw.shape), *draw.require_single_scale()).reshape(draw.shape)
            case "spherical":
                return self._spherical(draw)
            case _:  # an unknown distribution must fail, not be replaced by another one
                assert_never(draw.distribution)

    def _take_laplace(self, draw: NoiseRequest) -> FloatArray:
        """Return prefetched Laplace numbers, or sample new ones together with those of as many later rounds as one pass takes."""
        row, count = PrefetchKey(draw.round, *draw.require_single_scale(), draw.shape), math.prod(draw.shape)
        if draw.future_scale is None or 2 * count > _MAX_BLOCK_NUMBERS:
            return self._laplace(count, row.scale, row.spacing).reshape(draw.shape)
        prefetched = self._cache.take(draw.field, row)
        if prefetched is not None:
            return prefetched
        rows = row.list_following(draw.future_scale, min(MAX_PREFETCH_ROWS, _MAX_BLOCK_NUMBERS // max(count, 1)))
        return self._cache.draw(draw.field, rows, self._sample_rows)

    def _sample_rows(self, rows: list[PrefetchKey]) -> Iterator[FloatArray]:
        """Sample the numbers of each row, each in its own array, so that none keeps the others in memory."""
        rates = np.array([row.rate for row in rows])
        integers = self._integers(rates, math.prod(rows[0].shape)).reshape(len(rows), *rows[0].shape)
        return (numbers * row.spacing for row, numbers in zip(rows, integers, strict=True))

    def _laplace(self, count: int, scale: float, spacing: float) -> FloatArray:
        drawn, rate = np.empty(count), np.array([spacing / scale])
        for start in range(0, count, _MAX_BLOCK_NUMBERS):
            part = drawn[start : start + _MAX_BLOCK_NUMBERS]
            part[:] = self._integers(rate, part.size)
        drawn *= spacing
        return drawn

    def _gaussian(self, count: int, scale: float, spacing: float) -> FloatArray:
        """Sample discrete Laplace x, accepted with probability `exp(-(|x|/scale - 1)^2 / 2)` (Canonne, Kamath, Steinke 2020)."""
        drawn = np.empty(count)
        pending = np.arange(count)
        while pending.size:
            proposed = self._laplace(pending.size, scale, spacing)
            coin = np.frombuffer(self._entropy(2 * pending.size), np.uint16)
            accepted = self._is_below(coin, np.exp(-0.5 * (np.abs(proposed) / scale - 1.0) ** 2))
            drawn[pending[accepted]] = proposed[accepted]
            pending = pending[~accepted]
        return drawn

    def _spherical(self, draw: NoiseRequest) -> FloatArray:
        """Sample a sum of exponentials, in the direction of a normal vector, in float64 without a lattice.

        It protects against an adversary that looks at values, not at their last bits: the possible floats depend on the
        state that they are added to (Mironov 2012). No bound on that leak is known.
        """
        rate, count, pairs = draw.require_single_rate(), math.prod(draw.shape), -(-math.prod(draw.shape) // 2)
        bits = np.frombuffer(self._entropy(8 * (count + 2 * pairs)), np.uint64) >> np.uint64(11)
        uniform = np.ldexp(bits + 0.5, -53)
        radius = -np.log(uniform[:count]).reshape(draw.shape).sum(axis=-1, keepdims=True) / rate
        length, angle = np.sqrt(-2.0 * np.log(uniform[count : count + pairs])), 2.0 * np.pi * uniform[count + pairs :]
        normal = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count].reshape(draw.shape)
        normal *= radius / np.linalg.norm(normal, axis=-1, keepdims=True)
        return normal

    def _integers(self, rates: FloatArray, count: int) -> FloatArray:
        """Sample integers `(rates * count,)`, `count` of each rate: the noise in units of the lattice spacing."""
        drawn, rejected = self._attempt(rates, count)
        while rejected.size:
            drawn[rejected], still = self._attempt(rates[rejected // count], 1)
            rejected = rejected[still]
        return drawn

    def _attempt(self, rates: FloatArray, count: int) -> tuple[FloatArray, IntArray]:
        """Sample signed integers; return them and the indices of rejected ones. All rates have the same exponent."""
        low_bits, total = max(0, -11 - math.frexp(rates[0])[1]), rates.size * count
        if not rates[0] > 0.0 or low_bits > 32:  # a rate of 0 has no low bits and gives almost no noise
            raise SpecError(f"scale must be at most 2^43 times the spacing, got spacing/scale of {rates[0]:g}")
        words = np.frombuffer(self._entropy((8 + 2 * _LEVELS) * total), np.uint16)
        coin, sign = words[:total], words[total : 2 * total].view(np.int16)
        low = words[2 * total : 4 * total].view(np.uint32) >> np.uint32(32 - low_bits) if low_bits else np.zeros(total)
        unit = math.ldexp(1.0, low_bits)
        bits = self._high_bits(words[4 * total :].reshape(_LEVELS, rates.size, count), unit * rates)
        magnitude = (unit * _POWERS) @ bits.reshape(_LEVELS, total)
        magnitude += low
        rejected = np.flatnonzero(coin >= _SURE_ACCEPT_THRESHOLD)
        if rejected.size:  # candidates: decided with all bits
            rejected = rejected[~self._is_below(coin[rejected], np.exp(-rates[rejected // count] * low[rejected]))]
        if np.count_nonzero(magnitude) < total:
            rejected = np.union1d(rejected, np.flatnonzero((magnitude == 0) & (sign < 0)))
        return np.copysign(magnitude, sign), rejected

    def _high_bits(self, coarse: npt.NDArray[np.uint16], rates: FloatArray) -> FloatArray:
        """Return independent bits `(levels, rates, count)`; `rates` is the lowest level's value times `spacing/scale`."""
        chance = 1.0 / (1.0 + np.exp(np.minimum(rates * _POWERS[:, None], 700.0)))
        leading = (chance * 2.0**16).astype(np.uint16)[..., None]
        bits = coarse < leading
        tied = (coarse == leading).reshape(-1).nonzero()[0]
        if tied.size:
            bits.reshape(-1)[tied] = self._is_below(
                coarse.reshape(-1)[tied], chance.reshape(-1)[tied // coarse.shape[-1]]
            )
        return bits.astype(np.float64)

    def _is_below(self, leading: npt.NDArray[np.uint16], chance: FloatArray) -> npt.NDArray[np.bool_]:
        """Return whether 64 random bits, the leading 16 already drawn, are below a probability as a 64-bit fraction."""
        fine = np.frombuffer(self._entropy(8 * leading.size), np.uint64) >> np.uint64(16)
        threshold = np.minimum(np.ldexp(chance, 64), np.nextafter(2.0**64, 0)).astype(np.uint64)
        return (leading.astype(np.uint64) << np.uint64(48) | fine) < threshold


@dataclass(frozen=True, slots=True)
class KeyedNoise:
    """Noise of `SystemNoise` from a secret instead of random bytes, for tests and demos: a round's noise is always the same.

    The bytes are SHAKE-256 of secret, run, learner, field, round and a counter, so no request depends on an earlier one. It
    protects no learner: with the secret the noise can be removed, and two runs with the same noise and other records reveal
    the difference of their states. One request a field and round.

    Attributes:
        secret: any text.
        run: name of the run.
        learner: its index.
    """

    secret: str
    run: str
    learner: int

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        calls = itertools.count()

        def stream(count: int) -> bytes:
            # repr separates the entries of a tuple, so no two keys have the same text
            key = (self.secret, self.run, self.learner, draw.field, draw.round, next(calls))
            return hashlib.shake_256(repr(key).encode()).digest(count)

        return SystemNoise(stream)(replace(draw, future_scale=None))


# ---- opendp ----------------------------------------------------------------------------------------------------------


class OpenDpNoise(SystemNoise):
    """Discrete Laplace and Gaussian noise from OpenDP 0.14.2 or later (extra `opendp`), in exact arithmetic.

    OpenDP adds noise to a vector of floats on `Z * 2^k`. For zeros it returns the noise, so distribution, lattice and
    accounting are those of `SystemNoise`. About 10 us a number. Spherical noise is that of `SystemNoise`.

    Raises:
        SpecError: OpenDP is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            self._opendp: Any = importlib.import_module("opendp.prelude")
        except ImportError:
            raise SpecError(f"noise from OpenDP needs its package: {format_install_hint('opendp')}") from None
        self._opendp.enable_features("contrib")  # proved, but not yet audited; for the whole process

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        opendp = self._opendp
        match draw.distribution:
            case "laplace":
                make, metric = opendp.m.make_laplace, opendp.l1_distance(T=float)
            case "gaussian":
                make, metric = opendp.m.make_gaussian, opendp.l2_distance(T=float)
            case _:
                return super().__call__(draw)
        (scale, spacing), count = draw.require_single_scale(), math.prod(draw.shape)
        domain = opendp.vector_domain(opendp.atom_domain(T=float, nan=False), size=count)
        add_noise = make(domain, metric, scale=scale, k=math.frexp(spacing)[1] - 1)
        return np.array(add_noise([0.0] * count)).reshape(draw.shape)
