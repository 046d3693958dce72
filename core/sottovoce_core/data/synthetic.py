"""Sources whose records this package generates: made-up patients, and streams with stated properties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, SerializeAsAny, model_validator

from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, as_floats
from sottovoce_core.data.files import RawTable
from sottovoce_core.registry import Count, NonNegative, Registry, Section


class SyntheticSource(Section, ABC):
    """Source of generated records, whose properties the spec states; the same fields give the same records."""

    kind: str

    @abstractmethod
    def generate(self) -> RawTable:
        """Generate the records, in the order in which a stream brings them."""

    def __str__(self) -> str:
        return self.kind


SYNTHETIC_SOURCES: Registry[SyntheticSource] = Registry(
    SyntheticSource,  # type: ignore[type-abstract]  # of its subclasses
    {"linear_regression": "LinearRegressionSource"},
    "sources",
)

AnySyntheticSource = Annotated[SerializeAsAny[SyntheticSource], SYNTHETIC_SOURCES]
"""Field of a spec: the synthetic source of the named kind."""


def describe_synthetic_source(kind: str) -> str:
    """Describe how a spec states the fields of a synthetic source."""
    fields = SYNTHETIC_SOURCES.find(kind).model_fields
    needed = "".join(f", {name}: {field.examples[0]}" for name, field in fields.items() if field.examples)
    others = ", ".join(name for name, field in fields.items() if name != "kind" and not field.examples)
    return f"source: {{kind: {kind}{needed}}}, and optionally {others}"


class LinearRegressionSource(SyntheticSource):
    """Independent records with a label that is linear in the features, up to noise.

    A label is `a . w + e`: features a and coefficients w are uniform on the unit sphere, and e is normal with mean 0. So the
    default bounds on rows and labels of a loss change nothing but large noise.
    """

    kind: Literal["linear_regression"] = "linear_regression"
    features: Annotated[Count, Field(examples=[10])]
    """Number of features of a record."""
    records: Count = 10_000
    """Number of records, held-out ones included."""
    noise: NonNegative = 0.1
    """Standard deviation of the noise of a label."""
    seed: NonNegativeInt = 0
    """Seed of the coefficients and the records."""

    @model_validator(mode="after")
    def _require_size(self) -> LinearRegressionSource:
        if (numbers := self.features * self.records) > MAX_ARRAY_ELEMENTS:
            raise ValueError(f"features times records must be at most {MAX_ARRAY_ELEMENTS}, got {numbers}")
        return self

    def generate(self) -> RawTable:
        coefficients_rng, features_rng, noise_rng = np.random.default_rng(self.seed).spawn(3)
        coefficients = coefficients_rng.normal(size=self.features)
        features = features_rng.normal(size=(self.records, self.features))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        labels = features @ (coefficients / np.linalg.norm(coefficients))
        labels += self.noise * noise_rng.normal(size=self.records)
        return RawTable(features, labels, columns=tuple(f"x{k}" for k in range(self.features)), label="y")


_TRAINING_RECORDS, _TEST_RECORDS = 75_000, 25_000
_NAMES = ("heart_rate", "breaths", "temperature", "oxygen", "pressure", "age")


def generate_vital_signs() -> RawTable:
    """Generate synthetic vital signs with a label: the patient is worse a day later (1) or not (0).

    Severity is random, rises with age, and drifts with the season; measurements and outcome follow from it, each with its own
    noise. One year, in the order of time; every fourth record is held out. Every call returns the same numbers.
    """
    random, count = np.random.default_rng(20260101), _TRAINING_RECORDS + _TEST_RECORDS
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
