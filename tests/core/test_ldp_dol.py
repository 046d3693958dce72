"""LDP-DOL as a machine: the facts of its theory that a run must show, and that all ways of driving it agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from sottovoce_core.algorithms.interface import LocalMessages, Message, StackedMessages, StateAxes
from sottovoce_core.algorithms.ldp_dol.accounting import SharedSchedules
from sottovoce_core.algorithms.ldp_dol.algorithm import LdpDol
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.losses.history import start_history
from sottovoce_core.noise import NoiseRequest, NoiseSource, RecordedNoise, Recorder, SeededNoise, no_noise
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound, simulate_rounds
from tests.examples import made_up, small_run

LOSSES = [{"kind": "logistic", "ridge": 0.1, "feature_bound": 2.0}, {"kind": "ridge", "ridge": 0.0, "clip_norm": 0.5}]


def simulated(run: Run, data: PlacedData, noise: NoiseSource, replicas: int = 1) -> list[SimulatedRound]:
    return list(simulate_rounds(run, data, noise, replicas))


def schedules_of(run: Run) -> SharedSchedules:
    assert isinstance(run.algorithm, LdpDol)
    return run.algorithm.schedules


def coupling_matrix(run: Run) -> FloatArray:
    """W, with `w_ii = -sum_j w_ij`."""
    mixing = run.network.mixing(0)
    return mixing.neighbour_weights - np.diag(mixing.neighbour_weights.sum(axis=1))


def mean_gradient(run: Run, data: PlacedData, learner: int, t: int, theta: FloatArray) -> FloatArray:
    """d_t of one learner with the ridge, from its records of rounds 0..t."""
    history = start_history(run.loss)
    for k in range(t + 1):
        batch = data.learners[learner].batch(k)
        features, labels = run.loss.enforce_bounds(batch.features, batch.labels)
        history = history.observe(replace(batch, features=features, labels=labels))
    return history.gradient(theta) + run.loss.ridge * theta


# ---- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_round_is_the_papers_update(loss: dict[str, object]) -> None:
    """`theta + gamma sum_j w_ij (y_j - theta) - lambda d(theta)`, term by term, for every learner."""
    run = small_run(rounds=12, learners=4, loss=loss, topology={"graph": "path"})
    data = made_up(run.spec, batch=2)
    schedules, weights = schedules_of(run), run.network.mixing(0).neighbour_weights
    for step in simulated(run, data, SeededNoise(1)):
        said = step.message["y"][:, 0]
        for i in range(4):
            theta = step.decisions_before[i, 0]
            pull = sum((weights[i, j] * (said[j] - theta) for j in range(4)), np.zeros(3))
            expected = (
                theta
                + schedules.coupling(step.t) * pull
                - schedules.step_size(step.t) * mean_gradient(run, data, i, step.t, theta)
            )
            np.testing.assert_allclose(step.decisions_after[i, 0], expected, rtol=1e-11, atol=1e-12)


def test_without_projection_the_mean_follows_gradients_and_noise() -> None:
    """Spec, section 6: `mean(theta) - lambda mean(d) + gamma mean_i sum_j w_ij noise_j`."""
    run = small_run(rounds=15, learners=5, decision_set={"kind": "l2_ball", "radius": 1e9})
    data, recorder = made_up(run.spec), Recorder(SeededNoise(2))
    weights, schedules = run.network.mixing(0).neighbour_weights, schedules_of(run)
    for step in simulated(run, data, recorder):
        noise = recorder.noise_by_field["y"][step.t][:, 0]
        gradients = [mean_gradient(run, data, i, step.t, step.decisions_before[i, 0]) for i in range(5)]
        expected = (
            step.decisions_before[:, 0].mean(axis=0)
            - schedules.step_size(step.t) * np.mean(gradients, axis=0)
            + schedules.coupling(step.t) * (weights @ noise).mean(axis=0)
        )
        # The message is the state rounded to the lattice plus noise: 2^-40 scales away from the formula.
        np.testing.assert_allclose(step.decisions_after[:, 0].mean(axis=0), expected, rtol=0, atol=1e-11)


def test_decisions_stay_in_the_decision_set() -> None:
    run = small_run(rounds=30, algorithm={"sigma": 50.0}, decision_set={"kind": "box", "low": -0.5, "high": 0.25})
    after = np.stack([step.decisions_after for step in simulated(run, made_up(run.spec), SeededNoise(3), 4)])

    assert after.min() == -0.5 and after.max() == 0.25


def test_the_start_is_in_the_decision_set_and_knows_no_data() -> None:
    run = small_run(decision_set={"kind": "box", "low": 1.0, "high": 2.0})
    assert run.algorithm.decision(run.algorithm.init(StateAxes(0))).tolist() == [1.0, 1.0, 1.0]

    first, second = (simulated(run, made_up(run.spec, seed=seed), SeededNoise(4))[0].message["y"] for seed in (0, 1))
    assert (first == second).all()


def test_without_noise_the_network_comes_near_the_central_optimum() -> None:
    """Spec, section 6: with `v - u` about 0.3 the distance is about `lambda/gamma ||W^+ grad f||`, and falls like `t^-(v-u)`."""
    run = small_run(
        rounds=3000,
        learners=4,
        algorithm={"u": 0.55, "v": 0.85, "lam0": 4.0, "gam0": 0.8},
        loss={"kind": "logistic", "ridge": 0.3, "feature_bound": 3.0},
    )
    data = made_up(run.spec, records=12)
    steps = simulated(run, data, no_noise)
    features = np.concatenate([run.loss.enforce_bounds(each.features, each.labels)[0] for each in data.learners])
    labels = np.concatenate([each.labels for each in data.learners])
    model = LogisticRegression(C=1 / (0.3 * len(labels)), fit_intercept=False, tol=1e-10, max_iter=10_000)
    optimum = model.fit(features, labels).coef_[0]
    distances = [float(np.linalg.norm(steps[t].decisions_after[:, 0] - optimum, axis=1).max()) for t in (29, 299, 2999)]

    gradients = np.stack([mean_gradient(run, data, i, 2999, optimum) for i in range(4)])
    ratio = schedules_of(run).step_size(2999) / schedules_of(run).coupling(2999)
    apart = ratio * np.linalg.norm(np.linalg.pinv(coupling_matrix(run)) @ gradients, axis=1).max()

    assert distances[2] == pytest.approx(apart, rel=0.2)
    assert distances[2] / distances[1] == pytest.approx(10**-0.3, rel=0.25)
    mean = steps[-1].decisions_after[:, 0].mean(axis=0)
    assert np.linalg.norm(mean - optimum) < 0.05 * np.linalg.norm(optimum)


def test_without_noise_the_network_is_nearly_stationary() -> None:
    """Spec, section 6: `gamma_t W theta = lambda_t grad f_i(theta_i)` up to a term of lower order."""
    run = small_run(
        rounds=2000,
        learners=4,
        algorithm={"u": 0.55, "v": 0.85, "lam0": 2.0, "gam0": 0.8},
        loss={"kind": "logistic", "ridge": 0.3, "feature_bound": 3.0},
    )
    data = made_up(run.spec, records=10)
    last = simulated(run, data, no_noise)[-1]
    theta = last.decisions_before[:, 0]
    pull = schedules_of(run).coupling(last.t) * (coupling_matrix(run) @ theta)
    slope = schedules_of(run).step_size(last.t) * np.stack(
        [mean_gradient(run, data, i, last.t, theta[i]) for i in range(4)]
    )

    assert np.linalg.norm(pull - slope) < 0.02 * np.linalg.norm(pull)


# ---- one machine, driven three ways ----------------------------------------------------------------------------------


def driven_singly(run: Run, data: PlacedData, noise: Sequence[NoiseSource]) -> list[tuple[FloatArray, FloatArray]]:
    """Learners as the service drives them, arrays `(dim,)`: messages and decisions `(learners, dim)` of every round."""
    n = run.spec.n_learners
    states = [run.algorithm.init(StateAxes(i)) for i in range(n)]
    rounds, mixing = [], run.network.mixing(0)
    for t in range(run.spec.rounds):
        messages: dict[int, Message] = {}
        for i in range(n):
            states[i], messages[i] = run.algorithm.emit(states[i], noise[i])
        for i in range(n):
            heard = LocalMessages(mixing.in_neighbour_weights(i), messages, float(mixing.own_weights[i]))
            states[i] = run.algorithm.update(states[i], heard, data.learners[i].batch(t))
        decisions = np.stack([run.algorithm.decision(state) for state in states])
        rounds.append((np.stack([messages[i]["y"] for i in range(n)]), decisions))
    return rounds


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_single_learners_equal_all_learners_at_once(loss: dict[str, object], batch: int) -> None:
    """The service's way and the simulator's give the same trajectory to 1e-12 under equal noise."""
    run = small_run(rounds=40, learners=5, loss=loss, algorithm={"sigma": [0.5, 1.0, 2.0, 1.0, 0.1]})
    data, recorder = made_up(run.spec, batch=batch), Recorder(SeededNoise(5))
    together = simulated(run, data, recorder)
    drawn = np.stack(recorder.noise_by_field["y"])
    singly = driven_singly(run, data, [RecordedNoise({"y": drawn[:, i, 0]}) for i in range(5)])

    for step, (said, decided) in zip(together, singly, strict=True):
        np.testing.assert_allclose(step.message["y"][:, 0], said, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(step.decisions_after[:, 0], decided, rtol=1e-12, atol=1e-12)


def test_a_learner_alone_takes_steps_by_itself() -> None:
    run = small_run(rounds=5, learners=1)
    data, recorder = made_up(run.spec), Recorder(SeededNoise(6))
    together = simulated(run, data, recorder)
    singly = driven_singly(run, data, [RecordedNoise({"y": np.stack(recorder.noise_by_field["y"])[:, 0, 0]})])

    np.testing.assert_allclose(together[-1].decisions_after[:, 0], singly[-1][1], rtol=1e-12, atol=1e-12)


def test_every_replica_is_a_run_of_its_own() -> None:
    run = small_run(rounds=25, learners=4)
    data, recorder = made_up(run.spec), Recorder(SeededNoise(7))
    together = simulated(run, data, recorder, replicas=3)
    drawn = np.stack(recorder.noise_by_field["y"])
    assert not (drawn[:, :, 0] == drawn[:, :, 1]).any()

    for k in range(3):
        alone = simulated(run, data, RecordedNoise({"y": drawn[:, :, k : k + 1]}))
        for many, one in zip(together, alone, strict=True):
            np.testing.assert_allclose(many.message["y"][:, k], one.message["y"][:, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(many.decisions_after[:, k], one.decisions_after[:, 0], rtol=1e-12, atol=1e-12)


def test_replicas_of_one_learner_have_one_axis() -> None:
    run = small_run(rounds=4)
    state = run.algorithm.init(StateAxes(1, 5))
    state, message = run.algorithm.emit(state, SeededNoise(8))
    assert message["y"].shape == (5, 3)

    heard = LocalMessages({0: 0.3, 2: 0.3}, {0: message, 2: message}, 0.4)
    state = run.algorithm.update(state, heard, made_up(run.spec).learners[1].batch(0))
    assert run.algorithm.decision(state).shape == (5, 3)


def test_a_state_is_a_value() -> None:
    """Going on from one state twice gives the same next state, and leaves it as it was."""
    run = small_run(rounds=6, loss=LOSSES[1])
    data, mixing = made_up(run.spec), run.network.mixing(0)
    state = run.algorithm.init(StateAxes((0, 1, 2), 1))
    for t in range(6):
        _, message = run.algorithm.emit(state, SeededNoise(t))
        before = run.algorithm.decision(state).copy()
        one = run.algorithm.update(state, StackedMessages(mixing, message), data.stack_round(t))
        two = run.algorithm.update(state, StackedMessages(mixing, message), data.stack_round(t))

        assert (run.algorithm.decision(state) == before).all()
        assert (run.algorithm.decision(one) == run.algorithm.decision(two)).all()
        state = one


# ---- what goes on the wire -------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0.01, 100.0), st.integers(0, 10))
def test_overheard_densities_differ_as_the_laplace_law_says(seed: int, sigma: float, t: int) -> None:
    """`log p(y) - log p(y')` is `(|y' - centre| - |y - centre|) / rho`, whatever the state; and density is normalised."""
    run = small_run(rounds=12, algorithm={"sigma": sigma, "varsigma": 0.2})
    generator = np.random.default_rng(seed)
    state = replace(run.algorithm.init(StateAxes(0)), t=t, theta=generator.normal(size=3))
    scale = run.algorithm.noise_scale(0, t)
    _, centre = run.algorithm.emit(state, no_noise)
    one, two = (Message({"y": centre["y"] + scale * generator.laplace(size=3)}) for _ in range(2))
    (_, first), (_, second) = run.algorithm.replay(state, one), run.algorithm.replay(state, two)
    _, top = run.algorithm.replay(state, centre)
    expected = (np.abs(two["y"] - centre["y"]).sum() - np.abs(one["y"] - centre["y"]).sum()) / scale

    assert first - second == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert top == pytest.approx(-3 * np.log(2 * scale))


def test_a_message_is_the_state_plus_noise_on_one_lattice() -> None:
    run = small_run(rounds=10, algorithm={"sigma": [0.3, 1.0, 7.0]})
    recorder = Recorder(SeededNoise(9))
    for step in simulated(run, made_up(run.spec), recorder):
        for i in range(3):
            scale = run.algorithm.noise_scale(i, step.t)
            spacing = 2.0 ** (np.floor(np.log2(scale)) - 40)
            said, noise = step.message["y"][i, 0], recorder.noise_by_field["y"][step.t][i, 0]
            assert (said / spacing == np.rint(said / spacing)).all()
            assert np.abs(said - noise - step.decisions_before[i, 0]).max() <= 0.5 * spacing


def test_the_noise_scale_grows_as_the_spec_says() -> None:
    run = small_run(algorithm={"sigma": [1.0, 2.0, 3.0], "varsigma": [0.0, 0.1, 0.2]})
    asked: list[NoiseRequest] = []

    def listener(draw: NoiseRequest) -> FloatArray:
        asked.append(draw)
        return no_noise(draw)

    simulated(run, made_up(run.spec), listener)
    assert [(draw.field, draw.round) for draw in asked] == [("y", t) for t in range(20)]
    scales = np.asarray(asked[8].scale).ravel()
    np.testing.assert_allclose(scales, np.array([1.0, 2.0, 3.0]) / np.sqrt(2) * 9.0 ** np.array([0.0, 0.1, 0.2]))


def test_step_sizes_and_couplings_fall_as_the_spec_says() -> None:
    schedules = SharedSchedules(2.0, 0.8, 3.0, 0.6)
    assert schedules.step_size(0) == 2.0 and schedules.coupling(0) == 3.0
    assert schedules.step_size(9) == pytest.approx(2.0 * 10**-0.8)
    assert schedules.coupling(9) == pytest.approx(3.0 * 10**-0.6)
