"""How like its original a rebuilt record is. A record counts up to a positive factor, as a picture does."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import AnyArray, FloatArray

_TINY = 1e-300
_BRIGHTNESS, _CONTRAST = 0.01**2, 0.03**2
"""Constants c1 and c2 of structural similarity, for values up to 1 (Wang, Bovik, Sheikh, Simoncelli 2004)."""


def as_pictures(rows: FloatArray, *, nonnegative: bool = True) -> FloatArray:
    """Rows `(..., features)` scaled so that their largest value is 1; what cannot be negative is cut off at 0."""
    kept = np.maximum(rows, 0.0) if nonnegative else rows
    scaled: FloatArray = kept / np.maximum(np.abs(kept).max(axis=-1, keepdims=True), _TINY)
    return scaled


def similarity(pictures: FloatArray, originals: FloatArray) -> FloatArray:
    """Structural similarity of each with one window over all of it, `(...)`: 1 for equal ones, about 0 for unrelated ones."""
    means = pictures.mean(axis=-1), originals.mean(axis=-1)
    spreads = pictures.var(axis=-1), originals.var(axis=-1)
    common = ((pictures - means[0][..., None]) * (originals - means[1][..., None])).mean(axis=-1)
    bright = (2 * means[0] * means[1] + _BRIGHTNESS) / (means[0] ** 2 + means[1] ** 2 + _BRIGHTNESS)
    alike: FloatArray = bright * (2 * common + _CONTRAST) / (spreads[0] + spreads[1] + _CONTRAST)
    return alike


def recognised(pictures: FloatArray, originals: FloatArray, pool: FloatArray) -> AnyArray:
    """Is each one's original the record of a pool that it correlates with most? `(n,)` of truth values.

    Args:
        pictures: `(n, features)` rebuilt.
        originals: `(n, features)`, records of the pool.
        pool: `(records, features)` that the eavesdropper knows, but not whose they are.
    """
    found = pool[(_centred(pictures) @ _centred(pool).T).argmax(axis=-1)]
    same: AnyArray = np.isclose(found, originals).all(axis=-1)
    return same


def _centred(rows: FloatArray) -> FloatArray:
    moved = rows - rows.mean(axis=-1, keepdims=True)
    scaled: FloatArray = moved / np.maximum(np.linalg.norm(moved, axis=-1, keepdims=True), _TINY)
    return scaled
