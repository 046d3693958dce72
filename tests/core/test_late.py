"""Runs whose rounds may go on without late neighbours: what is refused, and that replay stays exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online.canaries import draw_canaries
from sottovoce_core.auditing.online.watch import Watch
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce_core.runs.participation import (
    NO_ROUND,
    USED_ROUNDS_FIELD,
    StalenessStatistics,
    encode_punctual_rounds,
    measure_staleness,
)
from sottovoce_core.runs.replay import Replay, replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import ClockSpec
from sottovoce_lab.mutants import ALGORITHM_RUNS
from tests.examples import made_up, small_run, small_spec

HOLD = {"staleness": "reuse"}
STRICT = {"pd-ftgl", "pd-ocg", "d-ftgl"}
"""Algorithms whose guarantee rests on what is heard."""
FIXED = {"dpsda-ps": "in a fixed graph", "dpps": "in a fixed graph"}
CYCLE = {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0], [0, 2]], "directed": True}


def built(name: str, clock: dict[str, Any]) -> tuple[Run, PlacedData]:
    """The algorithm's small run with this clock, in one graph for all rounds."""
    run, data = ALGORITHM_RUNS[name].build()
    document = run.spec.model_dump(mode="json", exclude_none=True) | {"clock": clock, "rounds": 12}
    if name in FIXED:
        document["topology"] = {"graph": CYCLE, "weights": "out_degree"}
    spec = type(run.spec).model_validate(document, context={"imports": True})
    return build_run(spec, data.n_features), made_up(spec, data.n_features)


def lags(run: Run, seed: int) -> FloatArray:
    """`(rounds, learners, width)`: messages of up to five rounds before, never of earlier ones than those used before."""
    generator = np.random.default_rng(seed)
    own = np.stack([encode_punctual_rounds(run.network, t + 1) for t in range(run.spec.rounds)])
    late = np.where(own == NO_ROUND, NO_ROUND, np.maximum(own - generator.integers(0, 6, own.shape), 0.0))
    return np.asarray(np.maximum.accumulate(late, axis=0), dtype=np.float64)


@pytest.mark.parametrize("name", sorted(set(ALGORITHM_RUNS) - STRICT))
def test_a_replay_knows_the_state_of_a_learner_that_used_older_messages(name: str) -> None:
    """Every algorithm: the state that speaks next is the one that was, in each of two replicas with lags of its own."""
    run, data = built(name, HOLD)
    used = [lags(run, seed) for seed in (1, 2)]
    assert run.spec.n_learners == 1 or not np.array_equal(used[0], used[1])
    steps = [list(simulate_rounds(run, data, SeededNoise(k), used_rounds=used[k])) for k in (0, 1)]
    said = Transcript.concatenate([Transcript.from_rounds(step.message for step in each) for each in steps])
    for learner in range(run.spec.n_learners):
        machine = Replay(run, learner, replicas=2)
        for t in range(run.spec.rounds):
            density = machine.step(said.messages(t, learner, machine.required_senders), data.learners[learner].batch(t))
            assert density is not None and np.isfinite(density).all()
            decided = np.concatenate([each[t].decisions_before[learner] for each in steps])
            np.testing.assert_allclose(machine.decision[0], decided, rtol=1e-7, atol=1e-7)
        assert machine.t >= run.spec.rounds - 1


def test_a_replay_of_the_wrong_rounds_is_noticed() -> None:
    """A message names another round than was used: noise is no longer what is left, and where there is none, it shows."""
    run, data = built("dsgd", HOLD)
    used = lags(run, 1)
    said = Transcript.from_rounds(step.message for step in simulate_rounds(run, data, SeededNoise(1), used_rounds=used))
    fields = dict(said.fields)
    field = fields[USED_ROUNDS_FIELD].copy()
    field[5, 0, :, 0] = np.where(field[5, 0, :, 0] == 0, 1, 0)
    machines = Replay(run, 0), Replay(run, 0)
    told = said, Transcript({**fields, USED_ROUNDS_FIELD: field})
    found = [
        [machine.step(each.messages(t, 0, machine.required_senders), data.learners[0].batch(t)) for t in range(7)]
        for machine, each in zip(machines, told, strict=True)
    ]
    assert [np.array_equal(a, b) for a, b in zip(*found, strict=True)] == [True] * 5 + [False, False]


@pytest.mark.parametrize("wrong", [0.5, -1.0, -7.0, 12.0, 1e99, np.nan])
def test_a_round_that_there_is_not_ends_what_is_known(wrong: float) -> None:
    run, data = built("dsgd", HOLD)
    said = Transcript.from_rounds(
        step.message for step in simulate_rounds(run, data, SeededNoise(1), used_rounds=lags(run, 1))
    )
    said.fields[USED_ROUNDS_FIELD][5, 0, :, 0] = wrong
    losses = replay(run, said, 0, [data.learners[0], data.learners[0].with_use(0, np.ones(data.n_features), 1.0)])
    assert len(losses.realised_losses) == 5


def test_what_is_forced_on_the_simulator_is_what_it_does_by_itself() -> None:
    """Nobody late: the same numbers, whether told or not, and the same as in a run that waits."""
    run, data = built("ldp-dol", HOLD)
    recorder = Recorder(SeededNoise(3))
    plain = Transcript.from_rounds(step.message for step in simulate_rounds(run, data, recorder, replicas=2))
    noise = {name: np.stack(drawn) for name, drawn in recorder.noise_by_field.items()}
    own = np.stack([encode_punctual_rounds(run.network, t + 1) for t in range(run.spec.rounds)])
    waits = replace(run, spec=run.spec.model_copy(update={"clock": type(run.spec.clock)()}))
    for other, used in ((run, own), (waits, None)):
        again = Transcript.from_rounds(
            step.message for step in simulate_rounds(other, data, RecordedNoise(noise), 2, used)
        )
        np.testing.assert_allclose(again.fields["y"], plain.fields["y"], rtol=1e-13, atol=1e-13)
    assert plain.fields.keys() == {"y", USED_ROUNDS_FIELD} and run.field_shapes[USED_ROUNDS_FIELD] == (2,)
    assert waits.field_shapes == run.algorithm.field_shapes()


def test_how_late_messages_were() -> None:
    run, data = built("dpsr", HOLD)  # one learner hears two, the others one
    used = lags(run, 1)
    said = Transcript.from_rounds(
        step.message for step in simulate_rounds(run, data, SeededNoise(1), used_rounds=used)
    ).fields[USED_ROUNDS_FIELD]
    gone = [t - u for t, row in enumerate(used[:-1]) for u in row.ravel() if u != NO_ROUND]
    assert measure_staleness(said) == StalenessStatistics(np.mean([lag > 0 for lag in gone]), max(gone))
    assert (
        measure_staleness(said[:1])
        == measure_staleness(encode_punctual_rounds(run.network, 0)[None, :, None])
        == StalenessStatistics(0.0, 0)
    )


def test_late_messages_lead_to_other_messages() -> None:
    run, data = built("ldp-dol", HOLD)
    plain, late = (
        np.stack([step.message["y"] for step in simulate_rounds(run, data, SeededNoise(3), used_rounds=used)])
        for used in (None, lags(run, 1))
    )
    assert np.array_equal(plain[:2], late[:2])  # round 0's messages are all that round 0 can use
    assert not np.allclose(plain[3:], late[3:])


# ---- what is refused, and what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [HOLD, {"mode": "async"}], ids=["hold", "async"])
@pytest.mark.parametrize("name", sorted(STRICT))
def test_a_guarantee_that_rests_on_what_is_heard_needs_everybody(name: str, clock: dict[str, Any]) -> None:
    with pytest.raises(AssumptionViolated, match=f"{name}.* does not say so: set clock.staleness to wait") as refused:
        built(name, clock)
    assert refused.value.code == "LATE_GUARANTEE"


def test_a_network_that_changes_needs_everybody() -> None:
    run, data = ALGORITHM_RUNS["dpps"].build()
    spec = run.spec.model_copy(update={"clock": ClockSpec.model_validate(HOLD)})
    with pytest.raises(AssumptionViolated, match="one graph for all rounds") as refused:
        build_run(spec, data.n_features)
    assert refused.value.code == "LATE_NETWORK"


def test_a_watch_needs_everybody() -> None:
    run = small_run(clock=HOLD)
    data = made_up(run.spec)
    with pytest.raises(SpecError, match="a watch needs a run that waits for late neighbours"):
        Watch(run, data.learners, 0.05, [0])
    with pytest.raises(SpecError, match="guessing canaries needs a run that waits for late neighbours"):
        draw_canaries(run, data, 2, np.random.default_rng(1))


def test_what_it_costs_is_told() -> None:
    usual = small_run().warnings
    assert small_run(clock={"staleness": "wait"}).warnings == usual
    assert [each.code for each in small_run(clock=HOLD).warnings] == [*(each.code for each in usual), "LATE_REGRET"]


@pytest.mark.parametrize(
    ("clock", "seconds"),
    [
        ({}, None),
        ({"staleness": "wait"}, None),
        (HOLD, 1.0),
        ({**HOLD, "stale_after_s": 0.25}, 0.25),
        ({"mode": "async"}, 0.0),
    ],
)
def test_how_long_a_round_waits(clock: dict[str, Any], seconds: float | None) -> None:
    assert small_spec(clock=clock).clock.staleness_timeout_s == seconds


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        ({"stale_after_s": 1.0}, "stale_after_s must be given with staleness: reuse"),
        ({"staleness": "wait", "stale_after_s": 1.0}, "stale_after_s must be given with staleness: reuse"),
        ({"mode": "async", "staleness": "wait"}, "must be left out in async mode"),
        ({"mode": "async", "staleness": "reuse"}, "must be left out in async mode"),
        ({"staleness": "reuse", "stale_after_s": 60.0}, "stale_after_s must be below deadline_s, got 60 and 60"),
        ({"staleness": "reuse", "deadline_s": 0.5}, "stale_after_s must be below deadline_s, got 1 and 0.5"),
        ({"staleness": "lose"}, "clock.staleness"),
        ({"staleness": "reuse", "stale_after_s": 0.0}, "clock.stale_after_s"),
    ],
)
def test_a_clock_that_contradicts_itself_is_refused(clock: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        small_spec(clock=clock)
