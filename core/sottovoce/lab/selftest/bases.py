"""Small runs with made-up records, which the auditor is tested on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sottovoce.data import LearnerData, PlacedData
from sottovoce.running.run import Run, build_run
from sottovoce.spec import parse_spec


@dataclass(frozen=True, slots=True)
class Base:
    """A small run with made-up records.

    Attributes:
        algorithm: that section of its spec.
        sections: other sections, over those of `_COMMON`.
        n_features: of a record.
        batch: records of a round.
        epsilon: about what the first learner's claim is to be, by noise of another size; None: what comes of the spec.
    """

    algorithm: Mapping[str, Any]
    sections: Mapping[str, Any] = field(default_factory=dict)
    n_features: int = 3
    batch: int = 1
    epsilon: float | None = None

    def lasting(self, rounds: int) -> Base:
        """The same for more rounds, or for fewer."""
        return replace(self, sections={**self.sections, "rounds": rounds})

    def build(self) -> tuple[Run, PlacedData]:
        """The run and its data."""
        spec = parse_spec({**_COMMON, "algorithm": dict(self.algorithm), **self.sections}, imports=True)
        run = build_run(spec, self.n_features)
        if self.epsilon is not None:
            factor = run.guarantee(0).epsilon() / self.epsilon
            louder = spec.algorithm.noisier((factor,) * spec.n_learners)
            run = build_run(spec.model_copy(update={"algorithm": louder}), self.n_features)
        return run, _made_up(run, self.n_features, self.batch)


_COMMON: dict[str, Any] = {
    "rounds": 8,
    "learners": 3,
    "loss": {"kind": "logistic", "ridge": 0.05},
    "decision_set": {"kind": "l2_ball", "radius": 2.0},
    "topology": {"graph": "ring", "weights": "metropolis"},
    "durability": "process",
}
_PUSHED = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": True}, "weights": "out_degree"}
_CYCLE = {"graph": {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0]], "directed": True}, "weights": "in_degree"}
_HINGE = {"loss": {"kind": "hinge", "ridge": 0.02}}


def _private(name: str, sections: Mapping[str, Any] = {}, **parameters: Any) -> Base:
    """At so small an epsilon that few runs would be enough for a false alarm."""
    return Base({"name": name, **parameters}, sections, epsilon=0.3)


ALGORITHMS: dict[str, Base] = {
    "ldp-dol": _private("ldp-dol"),
    "dsgd": _private("dsgd"),
    "dola": _private("dola"),
    "pdop": _private("pdop", _HINGE),
    "dpdola": _private("dpdola", _HINGE),
    "pd-ogd": _private("pd-ogd", _HINGE),
    "dpsr": _private("dpsr", {"topology": _CYCLE}),
    "dpsda-c": _private("dpsda-c"),
    "dpsda-ps": _private("dpsda-ps", {"topology": _PUSHED}),
    "dpps": _private("dpps", {"topology": _PUSHED}),
    "dpcda": _private("dpcda", {**_HINGE, "learners": 1}),
    "pd-ftgl": _private("pd-ftgl", _HINGE, epsilon=3.0, block_length=1),
    "pd-ocg": _private("pd-ocg", _HINGE, epsilon=3.0, block_length=1),
    "dvp": _private("dvp", {"rounds": 5}),
    "pvp": _private("pvp", {"rounds": 5}),
    "admm": Base({"name": "admm"}, {"rounds": 5}),
    "d-ogd": Base({"name": "d-ogd"}),
    "d-ftgl": Base({"name": "d-ftgl"}),
}
"""A run of every algorithm, for false alarms. The last three promise nothing, so nothing can be refuted."""

_LONG = {"rounds": 16}
BASES: dict[str, Base] = {
    "ldp-dol": Base({"name": "ldp-dol"}, _LONG, n_features=16, epsilon=10.0),
    "ldp-dol, 60,000 numbers": Base({"name": "ldp-dol"}, {"rounds": 50}, n_features=60, epsilon=10.0),
    "ldp-dol, epsilon 1": Base({"name": "ldp-dol"}, epsilon=1.0),
    "ldp-dol, budget": Base({"name": "ldp-dol"}, {**_LONG, "privacy": {"budget": 4.0}}, epsilon=10.0),
    "dola": Base({"name": "dola"}),
    "dola, batches of 4": Base({"name": "dola"}, batch=4),
    "dola, 9 features": Base({"name": "dola"}, n_features=9),
    "dola, 1 feature": Base({"name": "dola"}, _HINGE, n_features=1, epsilon=3.0),
    "dvp": Base({"name": "dvp", "alpha": 1.0}, {"rounds": 3}),
    "pvp": Base({"name": "pvp", "alpha": 1.0}),
}
"""The runs that mutants are tried on."""


def _made_up(run: Run, n_features: int, batch: int) -> PlacedData:
    """Normal features, fair labels; shared where the algorithm asks for it."""
    generator, rounds, n = np.random.default_rng(0), run.spec.rounds, run.spec.n_learners
    offsets = (np.arange(rounds + 1) * batch).astype(np.int64)
    features = generator.normal(size=(n, rounds * batch, n_features))
    labels = (generator.random((n, rounds * batch)) < 0.5).astype(np.float64)
    order = np.arange(rounds * batch)
    learners = [LearnerData(features[i], labels[i], order, offsets) for i in range(n)]
    if run.algorithm.accountant(0).shared:
        learners = learners[:1] * n
    return PlacedData(tuple(learners), features[0], labels[0])
