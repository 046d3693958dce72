"""Replay: the exact privacy loss of transcripts never exceeds what the guarantee claims, and is a loss in law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sottovoce_core.algorithms.interface import HiddenNoiseAlgorithm, LocalMessages, Message, StateAxes
from sottovoce_core.arrays import Batch, FloatArray, IntArray
from sottovoce_core.auditing.conformance.residuals import collect_past
from sottovoce_core.auditing.worst_case_search import compute_worst_losses, list_replacements
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import AssumptionViolated, DataError
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise, no_noise
from sottovoce_core.runs.replay import PrivacyLosses, Replay, iterate_replay, replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_lab.mutants import ALGORITHM_RUNS
from tests.examples import made_up, small_run

LOGISTIC = {"kind": "logistic", "ridge": 0.05, "feature_bound": 1.5}
CLIPPED = {"kind": "ridge", "ridge": 0.0, "feature_bound": 2.0, "label_bound": 3.0, "clip_norm": 0.7}
SQUARED = {"kind": "ridge", "ridge": 0.1, "feature_bound": 1.0, "label_bound": 1.0}
LOSSES = [LOGISTIC, CLIPPED, SQUARED]


def overheard(run: Run, data: PlacedData, seed: int, replicas: int = 1) -> Transcript:
    return Transcript.from_rounds(step.message for step in simulate_rounds(run, data, SeededNoise(seed), replicas))


def stranger(generator: np.random.Generator) -> tuple[FloatArray, float]:
    """A record that no learner has: large, in any direction."""
    return 3.0 * generator.normal(size=3), float(generator.integers(0, 2))


def claimed(run: Run, own: LearnerData, replaced: IntArray | None = None) -> FloatArray:
    """`(rounds,)` cumulative epsilon that the guarantee claims."""
    return run.guarantee(0, np.diff(own.offsets), replaced).cumulative_epsilon


def within(losses: PrivacyLosses, claim: FloatArray) -> None:
    """Round by round: what was shown is at most what could have been shown, and that is at most the claim."""
    worst = np.cumsum(losses.max_losses, axis=0)
    assert (np.abs(losses.realised_losses) <= losses.max_losses * (1 + 1e-9) + 1e-9).all()
    assert (np.abs(np.cumsum(losses.realised_losses, axis=0)) <= claim[:, None, None] * (1 + 1e-9) + 1e-9).all()
    assert (worst <= claim[:, None, None] * (1 + 1e-9) + 1e-9).all()


# ---- the machine -----------------------------------------------------------------------------------------------------


def batches(worlds: Sequence[LearnerData], t: int) -> list[Batch]:
    return [world.batch(t) for world in worlds]


@pytest.mark.parametrize("name", ["ldp-dol", "dola", "dpsda-c", "pd-ftgl", "dvp", "pvp", "d-ogd"])
def test_a_replay_decides_and_says_what_the_learner_did(name: str) -> None:
    """In the world that was; what the noise was is read off a recording."""
    run, data = ALGORITHM_RUNS[name].build()
    recorder = Recorder(SeededNoise(3))
    steps = list(simulate_rounds(run, data, recorder, replicas=2))
    noise = RecordedNoise({field: np.stack(rounds)[:, 1:2] for field, rounds in recorder.noise_by_field.items()})
    machine = Replay(run, 1, replicas=2)
    for t, step in enumerate(steps):
        said = step.split_by_sender()
        for field, value in machine.emit(noise).fields.items():
            np.testing.assert_allclose(
                np.broadcast_to(value, said[1][field].shape), said[1][field], rtol=1e-7, atol=1e-7
            )
        density = machine.step(said, data.learners[1].batch(t))
        assert density is not None and np.isfinite(density).all()
        np.testing.assert_allclose(machine.decision, step.decisions_before[1:2], rtol=1e-7, atol=1e-7)
    assert machine.is_known and machine.t == run.spec.rounds


@pytest.mark.parametrize("name", ALGORITHM_RUNS)
def test_a_model_follows_from_records_and_what_was_overheard(name: str) -> None:
    """After every round, of every algorithm; but for noise that stays in a state."""
    run, data = ALGORITHM_RUNS[name].build()
    steps = list(simulate_rounds(run, data, SeededNoise(3), replicas=2))
    last = run.spec.n_learners - 1
    transcript = Transcript.from_rounds(step.message for step in steps)
    found = [machine.model[0] for machine in iterate_replay(run, transcript, last, data.learners[last])]
    if isinstance(run.algorithm, HiddenNoiseAlgorithm) and run.algorithm.has_hidden_noise:
        assert found == []
        return
    for model, step in zip(found, steps, strict=True):
        np.testing.assert_allclose(model, step.decisions_after[last], rtol=1e-7, atol=1e-7)


LOSS_KINDS: dict[str, dict[str, Any]] = {
    "logistic": {},
    "logistic clipped": {"clip_norm": 0.4},
    "logistic pass_glm": {"history": "pass_glm", "score_bound": 2.0},
    "hinge": {},
    "smoothed_hinge": {},
    "ridge": {"clip_norm": 0.5},
    "least_squares": {"clip_norm": 0.5, "ridge": 0.01},
    "softmax": {"classes": 3},
    "softmax clipped": {"classes": 3, "clip_norm": 0.5},
}
"""Every loss that needs no further package, by its kind and what is chosen: `test_torch_loss` has the other one."""

REFUSED = {
    **{name: {"logistic pass_glm"} for name in ("dsgd", "dola", "pdop", "dpdola", "pd-ogd")},
    "dvp": LOSS_KINDS.keys() - {"logistic", "smoothed_hinge"},
    "pvp": LOSS_KINDS.keys() - {"logistic", "smoothed_hinge"},
    "admm": LOSS_KINDS.keys() - {"logistic", "logistic pass_glm", "smoothed_hinge"},
}
"""Losses that an algorithm's conditions exclude."""


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("name", ALGORITHM_RUNS)
def test_every_driver_computes_the_same_with_every_loss(name: str, kind: str) -> None:
    """The simulator `(learners, replicas, dim)`, the service `(dim,)`, and replay, whose state may be one for all worlds."""
    base = ALGORITHM_RUNS[name]
    sections = {**base.sections, "rounds": 4, "loss": {"kind": kind.split()[0], **LOSS_KINDS[kind]}}
    if kind in REFUSED.get(name, ()):
        with pytest.raises(AssumptionViolated):
            replace(base, sections=sections).build()
        return
    for batch in (1, 3):
        run, data = replace(base, sections=sections, batch_size=batch, epsilon=None).build()
        recorder, last = Recorder(SeededNoise(3)), run.spec.n_learners - 1
        steps = list(simulate_rounds(run, data, recorder, replicas=2))
        noise = RecordedNoise(
            {field: np.stack(rounds)[:, last, 0] for field, rounds in recorder.noise_by_field.items()}
        )
        worlds = [
            data.learners[last],
            data.learners[last].with_use(0, -np.ones(3), 1.0 - data.learners[last].labels[0]),
        ]
        served = run.algorithm.init(StateAxes(last))
        alone, both, swapped = (Replay(run, last, 2, many) for many in (1, 2, 2))
        hidden = isinstance(run.algorithm, HiddenNoiseAlgorithm) and run.algorithm.has_hidden_noise
        differ = False
        for t, step in enumerate(steps):
            said, (first, second) = step.split_by_sender(), batches(worlds, t)
            served, message = run.algorithm.emit(served, noise)
            for field, value in message.fields.items():
                close(value, said[last][field][0, 0])
            close(run.algorithm.decision(served), step.decisions_before[last, 0])
            served = run.algorithm.update(served, heard_alone(run, t, last, said), first)

            alone.step(said, first)
            both.step(said, first, second)
            swapped.step(said, second, first)
            close(alone.decision[0], step.decisions_before[last])
            close(both.decision, swapped.decision[::-1])
            for what, values in collect_past(both, first).items():
                close(values, collect_past(alone, first)[what])
            if not hidden:
                close(run.algorithm.decision(served), step.decisions_after[last, 0])
                close(alone.model[0], step.decisions_after[last])
                close(both.model[0], step.decisions_after[last])
                close(both.model, swapped.model[::-1])
            differ |= any(
                len(centre) == 2 and (centre[0] != centre[1]).any() for centre in both.emit(no_noise).fields.values()
            )
        assert differ


def heard_alone(run: Run, t: int, learner: int, said: Mapping[int, Message]) -> LocalMessages:
    """What a service hears in the first of the simulator's replicas."""
    mixing = run.network.mixing(t)
    weights = mixing.in_neighbour_weights(learner)
    messages = {j: Message({field: value[0, 0] for field, value in said[j].fields.items()}) for j in weights}
    return LocalMessages(weights, messages, float(mixing.own_weights[learner]))


def close(found: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(np.broadcast_to(found, expected.shape), expected, rtol=1e-7, atol=1e-7)


def test_a_model_is_not_known_any_more_once_something_was_not_overheard() -> None:
    run = small_run(rounds=6, learners=4, topology={"graph": "path"})
    data = made_up(run.spec)
    gaps = overheard(run, data, 2).fields["y"].copy()
    gaps[4, 2] = np.nan
    assert [len(list(iterate_replay(run, Transcript({"y": gaps}), i, data.learners[i]))) for i in range(4)] == [
        6,
        4,
        4,
        4,
    ]


def test_questions_change_nothing_and_copies_go_on_by_themselves() -> None:
    run = small_run(rounds=6)
    data = made_up(run.spec)
    transcript, own = overheard(run, data, 2, replicas=3), data.learners[0]
    worlds = [own, own.with_use(0, np.ones(3), 1.0 - own.labels[0])]
    asked, straight = Replay(run, 0, 3, 2), Replay(run, 0, 3, 2)
    for t in range(6):
        messages = transcript.messages(t, 0, asked.required_senders)
        assert asked.required_senders == set(messages) == {0, *run.network.mixing(t).in_neighbour_weights(0)}
        foreseen, centre = asked.log_density(messages[0]), asked.emit(no_noise)
        elsewhere = copy(asked)
        assert elsewhere.step(messages, *batches([worlds[1], worlds[0]], t)) is not None
        assert elsewhere.t == t + 1 == asked.t + 1
        assert np.array_equal(asked.emit(no_noise)["y"], centre["y"])
        for machine in (asked, straight):
            found = machine.step(messages, *batches(worlds, t))
            assert found is not None and found.shape == (2, 3)
            assert np.array_equal(found, foreseen)


def test_what_was_not_overheard_ends_what_is_known() -> None:
    """Of the learner: its density is not known. Of somebody that it hears: its density still is, but not its next state."""
    run = small_run(rounds=4, learners=4, topology={"graph": "path"})
    data = made_up(run.spec)
    transcript, own = overheard(run, data, 2), data.learners[1]
    lost = Message({"y": np.full((1, 1, 3), np.nan)})
    for missing, density_known in ((1, False), (0, True), (2, True), (3, True)):
        for unheard in ({}, {missing: lost}):
            machine = Replay(run, 1)
            machine.step(transcript.messages(0, 1, range(4)), own.batch(0))
            kept = transcript.messages(1, 1, set(range(4)) - {missing})
            density = machine.step({**kept, **unheard}, own.batch(1))
            assert (density is not None) == density_known
            assert machine.is_known == (missing == 3)
            assert machine.t == (2 if missing == 3 else 1)
            assert (machine.step(transcript.messages(2, 1, range(4)), own.batch(2)) is not None) == (missing == 3)


def test_losses_end_where_a_neighbour_was_not_overheard() -> None:
    """What the learner said in that very round is known, and nothing later: not-a-number would pass for a refutation."""
    run = small_run(rounds=8, learners=4, topology={"graph": "path"})
    data = made_up(run.spec)
    whole, own = overheard(run, data, 2), data.learners[1]
    worlds, gaps = [own, own.with_use(0, np.ones(3), 1.0 - own.labels[0])], whole.fields["y"].copy()
    gaps[5, 2] = np.nan
    found = replay(run, Transcript({"y": gaps}), 1, worlds)
    expected = replay(run, whole, 1, worlds)

    assert np.array_equal(found.realised_losses, expected.realised_losses[:6])
    assert np.array_equal(found.max_losses, expected.max_losses[:6])


# ---- never above the claim -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounting", ["best", "smooth", "clip"])
@pytest.mark.parametrize("loss", LOSSES, ids=["logistic", "clipped", "squared"])
@pytest.mark.parametrize("seed", range(3))
def test_one_use_of_a_record_costs_at_most_the_event_level_claim(
    loss: dict[str, object], accounting: str, seed: int
) -> None:
    run = small_run(
        rounds=25,
        loss=loss,
        algorithm={"sigma": 0.7, "accounting": accounting},
        decision_set={"kind": "l2_ball", "radius": 2.0},
    )
    data = made_up(run.spec, batch=2, seed=seed)
    transcript, own = overheard(run, data, seed, replicas=4), data.learners[0]
    generator = np.random.default_rng(seed)
    positions = [0, 1, *generator.integers(0, len(own.order), 10).tolist()]
    worlds = [own, *(own.with_use(position, *stranger(generator)) for position in positions)]
    losses = replay(run, transcript, 0, worlds)

    within(losses, claimed(run, own))
    assert losses.supremum.max() > 0.0


@pytest.mark.parametrize("loss", LOSSES, ids=["logistic", "clipped", "squared"])
@pytest.mark.parametrize("seed", range(3))
def test_all_uses_of_a_record_cost_at_most_the_record_level_claim(loss: dict[str, object], seed: int) -> None:
    """Records repeat every five rounds, so a swapped record is swapped five times."""
    run = small_run(rounds=25, loss=loss, algorithm={"sigma": 0.7}, decision_set={"kind": "l2_ball", "radius": 2.0})
    data = made_up(run.spec, batch=2, records=10, seed=seed)
    transcript, own = overheard(run, data, seed, replicas=4), data.learners[0]
    generator = np.random.default_rng(seed)
    for row in range(0, 10, 3):
        replaced = np.array([int((own.rows(t) == row).sum()) for t in range(25)])
        worlds = [own, *(own.with_record(row, *stranger(generator)) for _ in range(4))]
        losses = replay(run, transcript, 0, worlds)

        assert replaced.sum() == 5
        within(losses, claimed(run, own, replaced))


def test_the_claim_is_not_far_above_what_can_be_reached() -> None:
    """One feature, one record a round, the two most different records: most of the claim is reached."""
    run = small_run(rounds=6, n_features=1, loss={"kind": "logistic", "ridge": 0.0, "feature_bound": 1.0})
    data = made_up(run.spec, 1)
    ones, zeros = np.ones((6, 1)), np.zeros(6)
    own = LearnerData(ones, zeros, data.learners[0].order, data.learners[0].offsets)
    data = data.with_learner(0, own)
    losses = replay(run, overheard(run, data, 0), 0, [own, own.with_use(0, np.ones(1), 1.0)])
    claim = claimed(run, own)

    # At the origin both slopes are 1/2, so the first step parts the worlds by half of C.
    assert 0.4 * claim[1] < losses.max_losses[:2].sum() <= claim[1]


def test_nothing_shows_before_the_swapped_record_and_in_equal_worlds() -> None:
    run = small_run(rounds=10)
    data = made_up(run.spec)
    own, transcript = data.learners[0], overheard(run, data, 1, replicas=2)
    losses = replay(run, transcript, 0, [own, own, own.with_use(6, np.ones(3), 1.0)])

    assert losses.realised_losses.shape == losses.max_losses.shape == (10, 2, 2)
    assert (losses.realised_losses[:, 0] == 0.0).all()
    assert (losses.max_losses[:7, 1] == 0.0).all()
    assert (losses.max_losses[7:, 1] > 0.0).all()


# ---- in law ----------------------------------------------------------------------------------------------------------


def test_the_realised_loss_is_a_log_likelihood_ratio() -> None:
    """Under D the mean of `exp(-loss)` is 1 and the mean loss is positive; under D' the signs turn.

    Means of 20,000 transcripts, six standard errors each: failure probability below 1e-8, fixed seeds.
    """
    run = small_run(rounds=8, loss=LOGISTIC, algorithm={"sigma": 2.0})
    data = made_up(run.spec, seed=3)
    own = data.learners[0]
    other = own.with_record(0, own.features[0], 1.0 - own.labels[0])
    replicas = 20_000
    here = replay(run, overheard(run, data, 11, replicas), 0, [own, other]).total[0]
    there = replay(run, overheard(run, data.with_learner(0, other), 12, replicas), 0, [own, other]).total[0]

    for ratios in (np.exp(-here), np.exp(there)):
        error = ratios.std() / np.sqrt(replicas)
        assert error < 0.05
        assert abs(ratios.mean() - 1.0) < 6 * error
    assert here.mean() > 6 * here.std() / np.sqrt(replicas)
    assert there.mean() < -6 * there.std() / np.sqrt(replicas)


# ---- the worst swap --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_use", [False, True])
def test_the_worst_swap_is_the_worst_of_its_candidates_and_below_the_claim(every_use: bool) -> None:
    run = small_run(rounds=20, loss=LOGISTIC)
    data = made_up(run.spec, batch=2, records=8)
    own, transcript = data.learners[0], overheard(run, data, 4)
    replaced = np.array([int((own.rows(t) == own.order[0]).sum()) for t in range(20)])
    claim = claimed(run, own, replaced if every_use else None)
    worst = compute_worst_losses(run, transcript, data, 0, every_use=every_use)
    assert worst is not None
    swap = own.with_record if every_use else own.with_use
    flipped = swap(0, own.features[0], 1.0 - own.labels[0])

    assert abs(worst.total[0, 0]) <= worst.supremum[0, 0] <= claim[-1]
    assert worst.realised_losses.shape == (20, 1, 1)
    assert worst.supremum[0, 0] >= replay(run, transcript, 0, [own, flipped]).supremum[0, 0] * (1 - 1e-12)


def test_a_lone_learner_has_a_worst_swap_too() -> None:
    run = small_run(rounds=5, learners=1)
    data = made_up(run.spec)
    worst = compute_worst_losses(run, overheard(run, data, 5), data, 0)
    assert worst is not None and 0.0 < worst.supremum[0, 0] <= claimed(run, data.learners[0])[-1]


def test_a_learner_among_others_without_records_has_a_worst_swap_too() -> None:
    run = small_run(rounds=5, learners=2)
    data = made_up(run.spec)
    own = data.learners[0]
    nothing = LearnerData(own.features[:0], own.labels[:0], own.order[:0], np.zeros_like(own.offsets))
    worst = compute_worst_losses(
        run, overheard(run, data.with_learner(1, nothing), 5), data.with_learner(1, nothing), 0
    )
    assert worst is not None and 0.0 < worst.supremum[0, 0] <= claimed(run, own)[-1]


def test_a_record_without_another_one_has_no_swap() -> None:
    run = small_run(rounds=5, learners=1)
    data = made_up(run.spec)
    own = data.learners[0]
    alone = data.with_learner(0, replace(own, features=np.zeros_like(own.features), labels=np.ones_like(own.labels)))
    with pytest.raises(DataError, match="must have a record, but Krankenhaus Süd has none"):
        list_replacements(data.with_learner(0, replace(own, order=own.order[:0])), 0, names=["Krankenhaus Süd"])
    assert list_replacements(alone, 0) == [] and compute_worst_losses(run, overheard(run, alone, 5), alone, 0) is None
