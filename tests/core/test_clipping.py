"""Messages that are clipped before they are used, by the run's policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.algorithms.interface import Clippable, Message
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.replay import Replay, replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec
from tests.examples import made_up, small_spec
from tests.services.test_every_algorithm import FIELD

N_FEATURES = 6
CLIPPED = {"ldp-dol", "dsgd", "dola", "pdop", "dpdola", "pd-ogd", "d-ogd", "dpsr"}
ROUNDS = 30
SPECS = {run["name"]: run for run in FIELD["runs"]}
OF = {name: next(run for run in FIELD["runs"] if run["algorithm"]["name"] == name) for name in CLIPPED}


def run_of(name: str, policy: str, **more: Any) -> Run:
    document = {**FIELD["common"], **OF[name], "rounds": ROUNDS, "on_violation": policy, **more}
    return build_run(RunSpec.model_validate(document), N_FEATURES)


def said_by_all(run: Run, replicas: int = 1) -> Transcript:
    return Transcript.from_rounds(
        step.message for step in simulate_rounds(run, made_up(run.spec, N_FEATURES), SeededNoise(1), replicas)
    )


@pytest.mark.parametrize("name", sorted(CLIPPED))
def test_a_run_of_correct_learners_is_the_same_number_by_number(name: str) -> None:
    """With 50 replicas of 30 rounds, some honest number is clipped with a probability below e^-50."""
    as_said, clipped = (said_by_all(run_of(name, policy), 50) for policy in ("stop", "clip"))
    for field, values in as_said.fields.items():
        np.testing.assert_array_equal(clipped.fields[field], values)


@pytest.mark.parametrize("name", sorted(CLIPPED))
def test_what_is_used_is_within_reach_and_what_is_near_stays(name: str) -> None:
    run = run_of(name, "clip")
    assert isinstance(run.algorithm, Clippable)
    reach = run.algorithm.clip_bounds(1, 7)
    shapes = run.algorithm.field_shapes()
    far = {field: np.full((2, *shape), 1e99) for field, shape in shapes.items()}
    near = {field: np.full((2, *shape), -0.999 * reach[field]) for field, shape in shapes.items()}
    for field in shapes:
        np.testing.assert_array_equal(run.clipping.clip(1, 7, Message(far))[field], reach[field])
        np.testing.assert_array_equal(run.clipping.clip(1, 7, Message(near))[field], near[field])


def test_all_are_clipped_as_each_is() -> None:
    """Each by the noise of its sender and round."""
    run = run_of(
        "ldp-dol", "clip", learners=3, algorithm={"name": "ldp-dol", "sigma": [0.5, 1.0, 2.0], "varsigma": 0.1}
    )
    message = Message({"y": np.full((3, 4, run.algorithm.dim), 1e99)})
    together = run.clipping.clip_all(5, message)["y"]
    alone = [run.clipping.clip(i, 5, Message({"y": message["y"][i]}))["y"] for i in range(3)]
    np.testing.assert_array_equal(together, alone)
    assert together[0].max() < together[1].max() < together[2].max()


def test_losses_are_exact_whatever_a_neighbour_says() -> None:
    """In a transcript in which learner 1 says something huge: clipped, the same in both worlds, so within what was promised."""
    run = run_of("ldp-dol", "clip")
    data, said = made_up(run.spec, N_FEATURES), said_by_all(run)
    said.fields["y"][4:9, 1] = 1e99
    own = data.learners[0]
    other = own.with_use(0, -own.features[0], 1.0 - own.labels[0])
    losses = replay(run, said, 0, [own, other])
    assert np.abs(losses.supremum).max() <= run.guarantee(0).cumulative_epsilon[-1]
    assert len(losses.realised_losses) == ROUNDS


@pytest.mark.parametrize(("policy", "same"), [("clip", True), ("stop", False)])
def test_a_huge_number_does_what_the_largest_honest_one_would(policy: str, same: bool) -> None:
    """Little, where the noise is small: without the policy, the decision is wherever the neighbour wants it."""
    quiet = {"name": "ldp-dol", "sigma": 0.01, "gam0": 0.1}
    run = run_of("ldp-dol", policy, algorithm=quiet)
    reach = run_of("ldp-dol", "clip", algorithm=quiet).clipping.bounds
    assert reach is not None
    said, own = said_by_all(run).fields["y"], made_up(run.spec, N_FEATURES).learners[0]
    decisions = []
    for value in (1e99, reach(1, 2)["y"]):
        machine = Replay(run, 0)
        for t in range(5):
            heard = {i: Message({"y": said[t, i : i + 1].copy()}) for i in range(run.spec.n_learners)}
            if t == 2:
                heard[1]["y"][:] = value
            machine.step(heard, own.batch(t))
        decisions.append(machine.decision)
    huge, largest = decisions
    assert np.array_equal(huge, largest) == same


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS.built_in_classes) - CLIPPED))
def test_messages_that_are_no_decisions_are_not_clipped(name: str) -> None:
    spec = next(run for run in FIELD["runs"] if run["algorithm"]["name"] == name)
    document = {**FIELD["common"], **spec, "on_violation": "clip"}
    why = f"those of {name} are not: nothing bounds .* set on_violation to stop"
    with pytest.raises(AssumptionViolated, match=why) as refused:
        build_run(RunSpec.model_validate(document), N_FEATURES)
    assert refused.value.code == "VIOLATION_CLIP"


@pytest.mark.parametrize("clock", [{"staleness": "reuse"}, {"mode": "async"}], ids=["hold", "async"])
def test_nor_where_older_ones_may_be_used(clock: dict[str, Any]) -> None:
    with pytest.raises(AssumptionViolated, match=r"set clock\.staleness to wait, or another clock\.mode") as refused:
        build_run(small_spec(on_violation="clip", clock=clock), 3)
    assert refused.value.code == "VIOLATION_CLIP"


def test_nor_where_the_guarantee_rests_on_what_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_run(small_spec(), 3)
    monkeypatch.setattr(type(run.algorithm.accountant(0)), "is_valid_for_any_messages", False)
    with pytest.raises(
        AssumptionViolated, match="holds for any received messages, and that of ldp-dol does not say so"
    ) as refused:
        build_run(small_spec(on_violation="clip"), 3)
    assert refused.value.code == "VIOLATION_CLIP"


def test_a_run_that_clips_says_so_when_it_is_copied() -> None:
    """An algorithm in place of another, as the auditor's own test has it, is clipped as the run that it breaks."""
    run = run_of("ldp-dol", "clip")
    assert replace(run, algorithm=run_of("ldp-dol", "stop").algorithm).clipping == run.clipping
