"""Unknown names, of any kind: the error lists the names there are, and the nearest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import sottovoce as sv
from sottovoce_core.errors import SpecError

E = sv.Experiment(rounds=3, learners=["north", "east", "south"], algorithm="ldp-dol")
FRAME = pa.table({"age": [1.0, 2.0, 3.0, 4.0], "outcome": [0, 1, 0, 1]})


@pytest.fixture(scope="module")
def simulated() -> sv.Simulation:
    return sv.simulate(E)


FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a field": ({"rouns": 3}, "rounds", "clock"),
    "a field of a section": ({"algorithm.sgma": 1.0}, "sigma", "lam0"),
    "a section": ({"algoritm.sigma": 1.0}, "algorithm", ""),
    "an algorithm": ({"algorithm": "ldp-dl"}, "ldp-dol", "pd-ogd"),
    "a noise": ({"algorithm": {"name": "pd-ogd", "noise": {"kind": "geometrc"}}}, "geometric", "calibrated"),
    "a loss": ({"loss": "logstic"}, "logistic", "hinge"),
    "a set": ({"decision_set": "l2_bal"}, "l2_ball", "box"),
    "a graph": ({"topology": {"graph": "rng"}}, "ring", "complete"),
    "a rule of weights": ({"topology.weights": "metropols"}, "metropolis", ""),
    "a partition": ({"data.partition": "dirichle"}, "dirichlet", "iid"),
    "a scale": ({"data.scale": "standrd"}, "standard", "range"),
    "a data set": ({"data.source": "breast_cancr"}, "breast_cancer", "digits"),
    "a column": ({"data": {"source": FRAME, "label": "outcom"}}, "outcome", "age"),
    "a word": ({"clock.mode": "pacd"}, "paced", "async"),
    "an offline learner": ({"offline_intervals": [{"learner": "nort", "until_round": 1}]}, "north", "east"),
}


@pytest.mark.parametrize(("changes", "meant", "other"), FIELDS.values(), ids=FIELDS)
def test_of_a_spec(changes: dict[str, Any], meant: str, other: str) -> None:
    with pytest.raises(SpecError) as refused:
        _ = E.replace(**changes).records
    text = str(refused.value)
    assert other in text and f"did you mean {meant}" in text.replace("'", "")


CALLS: dict[str, tuple[Callable[[sv.Simulation], Any], str, str]] = {
    "a metric to measure": (lambda _: sv.simulate(E, metrics=["acuracy"]), "accuracy", "average_loss"),
    "a metric of a sweep": (lambda _: sv.sweep(E, {"rounds": [2]}, metrics=["acuracy"], jobs=1), "accuracy", "error"),
    "a swept field": (lambda _: sv.sweep(E, {"algorithm.sgma": [1.0]}, jobs=1), "sigma", "lam0"),
    "a metric of a comparison": (lambda _: sv.compare([E], metrics=["acuracy"]), "accuracy", "average_loss"),
    "a curve": (lambda done: done.results.runs[0].curves["acuracy"], "accuracy", "average_loss"),
    "a metric's threshold": (lambda done: done.results.count_rounds_until("acuracy", 1.0), "accuracy", "average_loss"),
    "a column of a table": (lambda done: done.metrics["vale"], "value", "learner"),
    "a column to select": (lambda done: done.metrics.where(metrc="accuracy"), "metric", "learner"),
    "a value to select": (lambda done: done.metrics.where(metric="acuracy"), "accuracy", "average_loss"),
    "a learner": (lambda _: E.guarantee("nort"), "north", "east"),
    "an audited learner": (lambda _: sv.audit(E, runs=60, learner="nort"), "north", "east"),
    "a threat": (lambda _: sv.audit(E, runs=60, threat="wir"), "wire", "output"),
    "a learner with a budget": (lambda _: sv.calibrate(E, {"nort": 1, "east": 1, "south": 1}), "north", "east"),
    "a privacy unit": (lambda _: sv.calibrate(E, 1.0, privacy_unit="recrd"), "record", "record_use"),  # type: ignore[arg-type]
    "a tracker": (lambda done: sv.track(done.results, "mlflw"), "mlflow", "wandb"),
}


@pytest.mark.parametrize(("call", "meant", "other"), CALLS.values(), ids=CALLS)
def test_of_a_call(simulated: sv.Simulation, call: Callable[[sv.Simulation], Any], meant: str, other: str) -> None:
    with pytest.raises(SpecError) as refused:
        call(simulated)
    text = str(refused.value)
    assert other in text and f"did you mean {meant}" in text.replace("'", "")


def test_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"it has .*simulate.*; did you mean 'Experiment'\?"):
        _ = getattr(sv, "Experimnt")  # noqa: B009 - type checkers know that it is wrong
    assert not hasattr(sv, "_repr_html_")
