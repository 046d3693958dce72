"""A data set that is made here, for a first run: long enough that no record is used twice, and nobody's."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import as_floats
from sottovoce.data.files import RawTable

_RECORDS, _HELD_OUT = 75_000, 25_000
_NAMES = ("heart_rate", "breaths", "temperature", "oxygen", "pressure", "age")


def vital_signs() -> RawTable:
    """What is measured at made-up bedsides, and whether a patient was worse a day later (1) or not (0).

    Severity is drawn, rises with age, and drifts with the season; measurements and outcome follow from it, each with noise of its
    own. One year, in the order of time; every fourth record is held out. The same numbers at every call.
    """
    random, count = np.random.default_rng(20260101), _RECORDS + _HELD_OUT
    noise = random.normal(size=(count, 6))
    age = np.clip(62 + 16 * random.normal(size=count), 18, 98)
    season = 0.5 * np.sin(2 * np.pi * np.arange(count) / count)
    severity = random.normal(size=count) + (age - 62) / 40 + season
    usual = np.array([82, 17, 37.1, 95.5, 124])
    rising = np.array([11, 3.2, 0.45, -1.7, -9])
    spread = np.array([9, 2.2, 0.5, 1.2, 11])
    measured = usual + severity[:, None] * rising + noise[:, :5] * spread
    measured[:, 3] = np.clip(measured[:, 3], 60, 100)
    measured[:, 4] += 0.25 * (age - 62)
    features = np.round(np.column_stack([measured, age]), 1)
    worse = as_floats(severity + 0.3 * noise[:, 5] > 0.3)
    held_out = np.arange(count) % 4 == 3
    return RawTable(
        features[~held_out],
        worse[~held_out],
        columns=_NAMES,
        test=(features[held_out], worse[held_out]),
        label="worse",
    )
