"""Sources of records that only a paper needs."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import NonNegativeInt

from sottovoce_core.data.files import RawTable
from sottovoce_core.data.synthetic import SyntheticSource
from sottovoce_core.registry import Count


class UniformRegressionSource(SyntheticSource):
    """Records of Cheng, Liao and Li: features uniform in [-0.5, 0.5], coefficients and noise normal with variances 1 and 0.2."""

    kind: Literal["experiments.sources:UniformRegressionSource"] = "experiments.sources:UniformRegressionSource"
    features: Count = 21
    records: Count = 1000
    seed: NonNegativeInt = 0

    def generate(self) -> RawTable:
        """Generate the records."""
        rng = np.random.default_rng(self.seed)
        features = rng.uniform(-0.5, 0.5, size=(self.records, self.features))
        labels = features @ rng.normal(size=self.features) + rng.normal(scale=np.sqrt(0.2), size=self.records)
        return RawTable(features, labels, columns=tuple(f"x{k}" for k in range(self.features)), label="y")
