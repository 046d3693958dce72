"""An algorithm of somebody's own that is none is refused before it runs, in words that name its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec
from tests.examples import made_up
from tests.gossip import Gossip, GossipSpec, gossip_spec


@pytest.fixture
def spec() -> RunSpec:
    return gossip_spec({"graph": "complete"}, 2, 3)


@pytest.fixture
def said(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Simulate with another message of `emit`, or another decision."""

    def simulated(change: Callable[[Any], object], method: str = "emit") -> Any:
        own = getattr(Gossip, method)

        def changed(self: Gossip, *given: Any) -> object:
            return change(own(self, *given))

        changed.__wrapped__ = own  # type: ignore[attr-defined]
        monkeypatch.setattr(Gossip, method, changed)
        run = build_run(spec, 2)
        return list(simulate_rounds(run, made_up(run.spec, 2), SeededNoise(1), replicas=4))

    return simulated


@pytest.mark.parametrize("missing", ["replay", "accountant", "noise_scale"])
def test_a_method_that_is_missing_is_named_before_anything_runs(
    missing: str, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Gossip, missing)
    with pytest.raises(SpecError, match=rf"must have the methods .*, and tests\.gossip\.Gossip .* has no {missing};"):
        build_run(spec, 2)


def test_build_returns_a_pair(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    build = GossipSpec.build
    monkeypatch.setattr(GossipSpec, "build", lambda self, setting: build(self, setting)[0])
    with pytest.raises(SpecError, match=r"must return the algorithm and a tuple of warnings, .* got Gossip;"):
        build_run(spec, 2)


@pytest.mark.parametrize(
    "fields", [{}, None, ["y"], {"y": 3}, {"y": (3.0,)}, {"y": [3]}, {1: (3,)}, {"y": (0,)}, {"y": (-1,)}]
)
def test_fields_without_shapes_are_refused(fields: object, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gossip, "field_shapes", lambda _: fields)
    with pytest.raises(SpecError, match=r"Gossip\.field_shapes .*such as \{'y': \(2,\)\}, got"):
        build_run(spec, 2)


def test_the_number_of_parameters_is_that_of_the_loss(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    build = GossipSpec.build

    def smaller(self: GossipSpec, setting: Any) -> Any:
        algorithm, caveats = build(self, setting)
        return replace(algorithm, dim=3), caveats

    monkeypatch.setattr(GossipSpec, "build", smaller)
    with pytest.raises(SpecError, match=r"which is 2 here; .*Gossip .* and dim 3; see"):
        build_run(spec, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda spoken: spoken[0], "must return the state and a Message, got State"),
        (lambda spoken: (spoken[0], spoken[1]["y"]), r"must return the state and a Message, got \(State, ndarray\)"),
        (
            lambda spoken: (spoken[0], Message({"x": spoken[1]["y"]})),
            "must return a message with the fields of field_shapes, y, got x",
        ),
        (lambda spoken: (spoken[0], Message({})), "must return a message with the fields of field_shapes, y, got none"),
    ],
)
def test_what_is_said_first_is_a_message_of_the_fields(
    change: Callable[[Any], object], told: str, said: Callable[..., Any]
) -> None:
    with pytest.raises(SpecError, match=rf"Gossip\.emit \(gossip\.py:\d+\) {told}; see docs/guides/extending\.md"):
        said(change)


@pytest.mark.parametrize(
    ("change", "came"),
    [
        (lambda y: y[0], r"float64 of shape \(4, 2\)"),
        (lambda y: y[..., :1], r"float64 of shape \(3, 4, 1\)"),
        (lambda y: y.astype(np.float32), r"float32 of shape \(3, 4, 2\)"),
        (lambda y: y.tolist(), "list"),
        (lambda _: None, "None"),
    ],
)
def test_a_field_of_another_shape_or_type_is_refused(
    change: Callable[[Any], object], came: str, said: Callable[..., Any]
) -> None:
    wanted = (
        rf"the field y of the message of .*emit \(gossip\.py:\d+\) must be float64 of shape \(3, 4, 2\), .* got {came};"
    )
    with pytest.raises(SpecError, match=wanted):
        said(lambda spoken: (spoken[0], Message({"y": cast(Any, change(spoken[1]["y"]))})))


def test_a_decision_is_a_model_for_each_learner_and_replica(said: Callable[..., Any]) -> None:
    with pytest.raises(
        SpecError, match=r"the result of .*decision \(gossip\.py:\d+\) must be .* got float64 of shape \(4, 2\)"
    ):
        said(lambda decided: decided[0], "decision")
