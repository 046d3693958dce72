"""Dual averaging over a network: the facts of its theory, its privacy accounting, and that all ways of driving it agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from sottovoce_core.algorithms.dual_averaging.accounting import DualAveragingAccountant
from sottovoce_core.algorithms.dual_averaging.algorithm import DualAveraging, _State
from sottovoce_core.algorithms.dual_averaging.parameters import _blocks
from sottovoce_core.algorithms.interface import LocalMessages, Message, StackedMessages, StateAxes
from sottovoce_core.algorithms.run_context import RunContext
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.network.network import Network, PeriodicNetwork
from sottovoce_core.network.weights import Mixing
from sottovoce_core.noise import NoiseSource, RecordedNoise, Recorder, SeededNoise, no_noise
from sottovoce_core.privacy.guarantee import compose_guarantees
from sottovoce_core.runs.replay import PrivacyLosses, Replay, replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec

BOX = {"kind": "box", "low": -1.0, "high": 1.0}
BALL = {"kind": "l2_ball", "radius": 1.0}
LOGISTIC = {"kind": "logistic", "ridge": 0.05, "feature_bound": 1.5}


def cycle(*mixings: Mixing) -> PeriodicNetwork:
    return PeriodicNetwork(mixings)


def mixing(matrix: Any) -> Mixing:
    whole = np.array(matrix, dtype=float)
    return Mixing(whole - np.diag(np.diag(whole)), np.diag(whole).copy())


def digraphs(n: int, period: int = 3, seed: int = 0) -> PeriodicNetwork:
    """`1/outdegree` of the sender: a directed ring, and random further edges that change from round to round."""
    generator, made = np.random.default_rng(seed), []
    for _ in range(period):
        told = (generator.random((n, n)) < 0.3) | np.eye(n, dtype=bool)
        told[(np.arange(n) + 1) % n, np.arange(n)] = True
        made.append(mixing(told / told.sum(axis=0)))
    return cycle(*made)


def metropolis(n: int, graph: str = "path") -> Network:
    spec = parse_spec({"rounds": 1, "algorithm": {"name": "ldp-dol"}, "topology": {"graph": graph}}, allow_imports=True)
    return spec.topology.build_network(n, rounds=1)


class Gradient(LogisticLoss):
    """Not logistic: a record's gradient is its row (label 0), or `||row|| theta/||theta||` (label 1)."""

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        row, label = batch.features[..., 0, :], batch.labels[..., 0]
        if theta.ndim == 3:
            row, label = row[:, None, :], label[:, None]
        length = np.linalg.norm(theta, axis=-1, keepdims=True)
        radial = np.linalg.norm(row, axis=-1, keepdims=True) * theta / np.where(length > 0, length, 1.0)
        return np.where(label[..., None] == 1.0, radial, row)


class Bent(Gradient):
    """A loss that does not say that it is convex."""

    is_convex: ClassVar[bool] = False


def assemble(
    name: str = "dpsda-c",
    network: Network | None = None,
    rounds: int = 20,
    dim: int = 7,
    *,
    loss: Any = LOGISTIC,
    decision_set: Any = BOX,
    **parameters: Any,
) -> Run:
    """A run on any network; `loss` may be an object."""
    network = network or (digraphs(3) if name in ("dpsda-ps", "dpps") else metropolis(3))
    document = {"rounds": rounds, "learners": network.n_learners, "algorithm": {"name": name, **parameters}}
    sections = {"loss": loss if isinstance(loss, dict) else {}, "decision_set": decision_set}
    spec = parse_spec({**document, **sections}, allow_imports=True)
    made: Loss = spec.loss if isinstance(loss, dict) else loss
    setting = RunContext(rounds, dim, made, spec.decision_set, network)
    algorithm, findings = spec.algorithm.build(setting)
    return Run(spec.model_copy(update={"loss": made}), network, algorithm, findings)


def joint_epsilon(run: Run) -> float:
    """What the messages of all learners together tell about a loss that all of them hold."""
    return compose_guarantees([run.guarantee(i) for i in range(run.spec.n_learners)]).epsilon()


def method(run: Run) -> DualAveraging:
    assert isinstance(run.algorithm, DualAveraging)
    return run.algorithm


def shared(run: Run, batch: int = 1, seed: int = 0, features: FloatArray | None = None) -> PlacedData:
    """The same records for every learner, labels 0 and 1; or given rows `(rounds, dim)`, labels 0."""
    generator, uses = np.random.default_rng(seed), run.spec.rounds * batch
    rows = generator.normal(size=(uses, run.algorithm.dim)) if features is None else features
    labels = (generator.random(uses) < 0.5).astype(float) if features is None else np.zeros(uses)
    own = LearnerData(rows, labels, np.arange(uses), np.arange(run.spec.rounds + 1) * batch)
    return PlacedData((own,) * run.spec.n_learners, rows[:2], labels[:2])


class Step(NamedTuple):
    """One round: the states before, after speaking and after listening, `(learners, replicas, dim)` inside."""

    t: int
    before: _State
    spoken: _State
    message: Message
    after: _State


def rounds_of(run: Run, data: PlacedData, noise: NoiseSource, network: Network | None = None) -> Iterator[Step]:
    algorithm = method(run)
    state = algorithm.init(StateAxes(tuple(range(run.spec.n_learners)), 1))
    for t in range(run.spec.rounds):
        spoken, message = algorithm.emit(state, noise)
        mix = (network or run.network).mixing(t)
        after = algorithm.update(spoken, StackedMessages(mix, message), data.stack_round(t))
        yield Step(t, state, spoken, message, after)
        state = after


def stacked_gradient(run: Run, data: PlacedData, step: Step) -> FloatArray:
    """u(t): each owner's block of the gradient at its own decision, clipped, one coordinate after the other."""
    algorithm = method(run)
    stacked = np.zeros(algorithm.dim)
    for i, owned in enumerate(_blocks(algorithm.dim, run.spec.n_learners)):
        batch, y = data.learners[i].batch(step.t), step.spoken.decision[i, 0]
        features, labels = run.loss.enforce_bounds(batch.features, batch.labels)
        block = run.loss.gradient_sum(y, Batch(features, labels))[owned] / (
            len(labels) if algorithm.has_mean_loss else 1
        )
        block *= min(1.0, algorithm.clip_threshold / np.linalg.norm(block))
        stacked[owned] = block + run.loss.ridge * y[owned]
    return stacked


# ---- the update --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "longer", "shorter"), [(784, 112, 112), (3072, 439, 438)])
def test_blocks_are_contiguous_and_the_first_ones_are_longer(dim: int, longer: int, shorter: int) -> None:
    mask = _blocks(dim, 7)
    assert mask.sum(axis=1).tolist() == [longer] * 6 + [shorter]
    assert (mask.sum(axis=0) == 1).all()
    assert (np.diff(mask.argmax(axis=0)) >= 0).all()


@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps"])
@pytest.mark.parametrize("primal", ["noised", "clean"])
@pytest.mark.parametrize("noise_on", ["own_block", "all"])
def test_the_average_recursion_is_exact(name: str, primal: str, noise_on: str) -> None:
    """(16): `zbar(t+1) = zbar(t) + mean eta(t) + u(t)`, for push-sum, too, whose columns sum to one."""
    run = assemble(name, rounds=12, clip=0.1, batch="sum", primal=primal, noise_on=noise_on)
    data = shared(run, batch=3)
    for step in rounds_of(run, data, SeededNoise(1)):
        noise = step.message["h"] - step.before.dual
        expected = (step.before.dual + noise).mean(axis=(0, 1)) + stacked_gradient(run, data, step)
        np.testing.assert_allclose(step.after.dual.mean(axis=(0, 1)), expected, rtol=0, atol=1e-12)
        assert (noise != 0).sum() == (0 if step.t == 0 else 7 if noise_on == "own_block" else 21)


def test_the_closed_form() -> None:
    """(17) with own-block noise and a fixed W: `z(t+1) = sum_s W^(t-s) (n u(s)) + W^(t+1-s) eta(s)`."""
    run = assemble(rounds=8, dim=6)
    data, steps = shared(run), []
    weights, mask = run.network.mixing(0).matrix, _blocks(6, 3)
    noise, pushed = [], []
    for step in rounds_of(run, data, SeededNoise(2)):
        steps.append(step)
        noise.append((step.message["h"] - step.before.dual)[:, 0])
        pushed.append(3 * mask * stacked_gradient(run, data, step))
        power = [np.linalg.matrix_power(weights, k) for k in range(step.t + 2)]
        closed = sum(power[step.t - s] @ pushed[s] + power[step.t + 1 - s] @ noise[s] for s in range(step.t + 1))
        np.testing.assert_allclose(step.after.dual[:, 0], closed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dpsda-ps", "dpps"])
def test_push_sum_keeps_the_sum_of_its_weights(name: str) -> None:
    run = assemble(name, digraphs(5, seed=3), rounds=40, dim=6)
    seen = []
    for step in rounds_of(run, shared(run), SeededNoise(3)):
        weight = step.before.push_weight[:, 0, 0]
        assert weight.sum() == pytest.approx(5.0, rel=1e-12) and weight.min() > 0.0
        assert (step.message["w"][:, 0, 0] == weight).all()
        np.testing.assert_allclose(method(run).push_weights[step.t], weight, rtol=1e-12)
        seen.append(weight)
    assert np.ptp(seen[-1]) > 0.1  # else this network would not need push-sum


@pytest.mark.parametrize("primal", ["noised", "clean"])
def test_decisions_are_projected_and_scaled_by_push_weights(primal: str) -> None:
    """(22), with alpha_t = step/sqrt(t): from the message where the primal is noised."""
    run = assemble("dpsda-ps", rounds=9, step=0.3, primal=primal, noise_on="all")
    for step in rounds_of(run, shared(run), SeededNoise(4)):
        basis = step.message["h"] if primal == "noised" else step.before.dual
        ratio = basis / step.before.push_weight
        expected = np.clip(-0.3 / math.sqrt(max(step.t, 1)) * ratio, -1.0, 1.0)
        np.testing.assert_allclose(run.algorithm.decision(step.spoken), expected, rtol=1e-14)
        assert (step.after.decision == step.spoken.decision).all()


@pytest.mark.parametrize("name", ["dpcda", "dpsda-c", "dpsda-ps", "dpps"])
def test_one_learner_is_centralised_dual_averaging(name: str) -> None:
    """`z(t+1) = z(t) + eta(t) + g(y(t))`, by hand."""
    run = assemble(name, metropolis(1), rounds=15, dim=4, sigma=0.2, primal="noised", step=0.5)
    data, dual = shared(run, batch=2), np.zeros(4)
    for step in rounds_of(run, data, SeededNoise(5)):
        said = step.message["h"][0, 0]
        y = np.clip(-0.5 / math.sqrt(max(step.t, 1)) * said, -1.0, 1.0)
        batch = data.learners[0].batch(step.t)
        rows, _ = run.loss.enforce_bounds(batch.features, batch.labels)
        dual = said + ((1 / (1 + np.exp(-rows @ y)) - batch.labels) @ rows) / 2 + 0.05 * y
        np.testing.assert_allclose(step.after.dual[0, 0], dual, rtol=1e-12, atol=1e-12)


def test_dpps_takes_the_whole_gradient_of_its_own_records() -> None:
    run = assemble("dpps", rounds=2, dim=4)
    data = shared(run)
    other = replace(data.learners[1], features=-2.0 * data.learners[1].features)
    data = PlacedData((data.learners[0], other, data.learners[2]), data.test_features, data.test_labels)
    first = next(rounds_of(run, data, SeededNoise(6)))
    for i in range(3):
        batch = data.learners[i].batch(0)
        rows, _ = run.loss.enforce_bounds(batch.features, batch.labels)
        np.testing.assert_allclose(first.after.dual[i, 0], (0.5 - batch.labels) @ rows, rtol=1e-12)


def test_message_0_is_zero_and_knows_no_data() -> None:
    run = assemble(decision_set={"kind": "box", "low": 0.5, "high": 2.0})
    first = next(rounds_of(run, shared(run), SeededNoise(7)))
    assert (first.message["h"] == 0.0).all()
    assert (first.spoken.decision == 0.5).all()
    assert run.algorithm.noise_scale(0, 0) == 0.0 and run.algorithm.noise_scale(0, 1) == 1.0


def test_noisy_blocks_lie_on_the_lattice() -> None:
    """Before the first mix, that is: what was heard is public, and added as it is."""
    run = assemble(sigma=0.3, rounds=2)
    spacing = 2.0 ** (math.floor(math.log2(0.3)) - 40)
    for step in rounds_of(run, shared(run), SeededNoise(8)):
        own = step.message["h"][:, 0][_blocks(7, 3)]
        assert (own / spacing == np.rint(own / spacing)).all()


# ---- learning ----------------------------------------------------------------------------------------------------


def regret(run: Run, network: Network, slopes: FloatArray) -> FloatArray:
    """`(rounds,)` regret per round so far of the decision put together of all blocks, for linear losses."""
    mask, total, rates = _blocks(run.algorithm.dim, run.spec.n_learners), 0.0, []
    radius = method(run).decision_set.largest_norm(run.algorithm.dim)
    ball = run.spec.decision_set.kind == "l2_ball"
    for step in rounds_of(run, shared(run, features=slopes), no_noise, network):
        total += float(slopes[step.t] @ (step.spoken.decision[:, 0] * mask).sum(axis=0))
        so_far = slopes[: step.t + 1].sum(axis=0)
        best = -radius * np.linalg.norm(so_far) if ball else -np.abs(so_far).sum()
        rates.append((total - best) / (step.t + 1))
    return np.array(rates)


@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps"])
def test_without_noise_regret_per_round_vanishes(name: str) -> None:
    """Linear losses that change with every round, on a box."""
    run = assemble(name, rounds=4000, dim=6, loss=Gradient(feature_bound=30.0, ridge=0.0))
    slopes = np.random.default_rng(9).normal(0.2, 1.0, size=(4000, 6)) / 2
    rates = regret(run, run.network, slopes)

    assert rates[99] > 0.2
    assert rates[3999] < 0.01


def test_row_stochastic_weights_lead_to_a_wrong_point_on_a_ball() -> None:
    """The star with 1/degree weights weighs blocks by the hub's 5/13 and the leaves' 2/13: regret per round stays 0.206."""
    slope = np.array([1.0, -1.0, 1.0, -1.0, 1.0]) * np.ones((3000, 1))
    run = assemble(
        network=metropolis(5, "star"),
        rounds=3000,
        dim=5,
        loss=Gradient(feature_bound=9.0, ridge=0.0),
        decision_set=BALL,
    )
    star = np.eye(5)
    star[0, :] = star[:, 0] = 1.0
    row_stochastic = cycle(mixing(star / star.sum(axis=1, keepdims=True)))
    weighed = slope[0] * [5, 2, 2, 2, 2]
    limit = math.sqrt(5) - slope[0] @ weighed / np.linalg.norm(weighed)
    for network, expected in ((row_stochastic, limit), (run.network, 0.0)):
        total = regret(run, network, slope) * np.arange(1, 3001)
        assert (total[2999] - total[1999]) / 1000 == pytest.approx(expected, abs=0.02)  # agreement comes like 1/t

    assert limit == pytest.approx(0.206, abs=1e-3)
    with pytest.raises(AssumptionViolated, match="DOUBLY_STOCHASTIC"):
        assemble(network=row_stochastic, decision_set=BALL, allow_row_stochastic=True)


# ---- one machine, driven three ways ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps", "dpps"])
@pytest.mark.parametrize("primal", ["noised", "clean"])
def test_single_learners_equal_all_learners_at_once(name: str, primal: str) -> None:
    run = assemble(name, rounds=25, primal=primal, clip=0.4, batch="sum")
    data, recorder = shared(run, batch=2), Recorder(SeededNoise(10))
    together = list(simulate_rounds(run, data, recorder))
    drawn = np.stack(recorder.noise_by_field["h"])
    states = [run.algorithm.init(StateAxes(i)) for i in range(3)]
    for step in together:
        messages = {}
        for i in range(3):
            states[i], messages[i] = run.algorithm.emit(states[i], RecordedNoise({"h": drawn[:, i, 0]}))
        for i in range(3):
            assert {k: v.shape for k, v in messages[i].fields.items()} == run.algorithm.field_shapes()
            np.testing.assert_allclose(step.message["h"][i, 0], messages[i]["h"], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(
                step.decisions_before[i, 0], run.algorithm.decision(states[i]), rtol=1e-12, atol=1e-12
            )
            mix = run.network.mixing(step.t)
            weights = mix.in_neighbour_weights(i)
            heard = LocalMessages(weights, {j: messages[j] for j in weights}, float(mix.own_weights[i]))
            states[i] = run.algorithm.update(states[i], heard, data.learners[i].batch(step.t))


@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps"])
def test_every_replica_is_a_run_of_its_own(name: str) -> None:
    run = assemble(name, rounds=10)
    data, recorder = shared(run), Recorder(SeededNoise(11))
    together = list(simulate_rounds(run, data, recorder, replicas=3))
    drawn = np.stack(recorder.noise_by_field["h"])
    for k in range(3):
        alone = simulate_rounds(run, data, RecordedNoise({"h": drawn[:, :, k : k + 1]}))
        for many, one in zip(together, alone, strict=True):
            np.testing.assert_allclose(many.message["h"][:, k], one.message["h"][:, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(many.decisions_before[:, k], one.decisions_before[:, 0], rtol=1e-12, atol=1e-12)


def test_a_round_without_records_moves_nothing_but_the_ridge() -> None:
    run = assemble(rounds=2)
    state = run.algorithm.init(StateAxes(0))
    state, message = run.algorithm.emit(state, no_noise)
    mix = run.network.mixing(0)
    heard = LocalMessages(mix.in_neighbour_weights(0), dict.fromkeys(range(3), message), float(mix.own_weights[0]))
    assert (run.algorithm.update(state, heard, Batch.empty(7)).dual == 0.0).all()


# ---- privacy -----------------------------------------------------------------------------------------------------


def overheard(run: Run, data: PlacedData, seed: int, replicas: int = 1) -> Transcript:
    return Transcript.from_rounds(step.message for step in simulate_rounds(run, data, SeededNoise(seed), replicas))


def swapped(data: PlacedData, t: int, generator: np.random.Generator) -> LearnerData:
    """The records with all those of round t replaced."""
    own = data.learners[0]
    for row in own.rows(t):
        features: FloatArray = 3.0 * generator.normal(size=(own.features.shape[1],))
        own = own.with_record(int(row), features, float(generator.random() < 0.5))
    return own


def within(losses: PrivacyLosses, claim: FloatArray) -> None:
    assert np.isfinite(losses.realised_losses).all()
    assert (np.abs(losses.realised_losses) <= losses.max_losses * (1 + 1e-9) + 1e-9).all()
    assert (losses.max_losses <= claim[:, None, None] * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps", "dpps", "dpcda"])
@pytest.mark.parametrize("primal", ["noised", "clean"])
@pytest.mark.parametrize("decision_set", [BOX, BALL], ids=["box", "ball"])
def test_replayed_losses_stay_within_the_claim(name: str, primal: str, decision_set: dict[str, Any]) -> None:
    """Every learner's, round by round, whichever round is replaced: with the loss's own bounds and with a clip."""
    generator = np.random.default_rng(12)
    network = metropolis(1) if name == "dpcda" else None
    for clip, batch, noise in ((None, "mean", "own_block"), (0.2, "sum", "all")):
        more: dict[str, Any] = {"noise_on": noise} if name.startswith("dpsda") else {}
        run = assemble(
            name,
            network,
            rounds=12,
            decision_set=decision_set,
            primal=primal,
            clip=clip,
            batch=batch,
            sigma=0.7,
            **more,
        )
        data = shared(run, batch=2)
        transcript = overheard(run, data, 12, replicas=3)
        for t in (0, 1, 5, 11):
            worlds = [data.learners[0], *(swapped(data, t, generator) for _ in range(5))]
            replaced = np.eye(12, dtype=np.int64)[t] * 2
            for i in range(run.spec.n_learners):
                losses = replay(run, transcript, i, worlds)
                within(losses, run.guarantee(i, np.full(12, 2), replaced).round_losses)
                assert (losses.max_losses[: t + 1] == 0.0).all()
                assert t == 11 or losses.max_losses[t + 1].max() > 0.0
                if primal == "noised":
                    assert (losses.max_losses[t + 2 :] == 0.0).all()


def test_the_realised_loss_is_a_log_likelihood_ratio() -> None:
    """Under D the mean of `exp(-loss)` over all learners is 1. Six standard errors: fails with probability 2e-9."""
    run = assemble("dpsda-ps", rounds=5, dim=4, sigma=8.0, primal="clean")
    data = shared(run)
    transcript = overheard(run, data, 13, replicas=20_000)
    worlds = [data.learners[0], swapped(data, 0, np.random.default_rng(13))]
    total = sum(replay(run, transcript, i, worlds).total[0] for i in range(3))
    ratio = np.exp(-total)

    assert total.std() > 0.1
    assert abs(ratio.mean() - 1.0) < 6 * ratio.std() / math.sqrt(20_000)


@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps"])
def test_the_joint_sensitivity_is_attained(name: str) -> None:
    """Equal features: every clipped block turns around when the label does, so all learners show their whole part."""
    run = assemble(name, rounds=2, dim=8, clip=0.01, sigma=0.5)
    data = shared(run, features=np.ones((2, 8)))
    own, transcript = data.learners[0], overheard(run, shared(run, features=np.ones((2, 8))), 14)
    shown = sum(replay(run, transcript, i, [own, own.with_use(0, np.ones(8), 1.0)]).supremum[0, 0] for i in range(3))

    by_hand = 3 * 2 * 0.01 * (2 * math.sqrt(3) + math.sqrt(2)) / 0.5  # n sum_i 2 sqrt(d_i) B / sigma
    assert shown == pytest.approx(by_hand, rel=1e-9)
    assert joint_epsilon(run) == pytest.approx(by_hand, rel=1e-9)


def test_one_round_can_cost_more_than_the_paper_says() -> None:
    """Before mixing `z_i = n u_i e_i`; a radial loss against a linear one then costs 6 times `2 n L / sigma` at n = 9."""
    run = assemble(
        network=metropolis(9, "complete"),
        rounds=3,
        dim=9,
        loss=Gradient(feature_bound=1.0, ridge=0.0),
        decision_set=BALL,
    )
    data = shared(run, features=np.full((3, 9), 1 / 3))
    transcript = Transcript.from_rounds(step.message for step in rounds_of(run, data, no_noise))
    own = data.learners[0]
    largest = [
        replay(run, transcript, i, [own, own.with_use(1, own.features[1], 1.0)]).supremum[0, 0] for i in range(9)
    ]
    guarantee = run.guarantee(0)

    assert guarantee.paper_epsilon[0] == pytest.approx(2 * 9 * 1.0)
    assert sum(largest) == pytest.approx(6.0 * guarantee.paper_epsilon[0], rel=1e-9)
    assert joint_epsilon(run) == pytest.approx(9.0 * guarantee.paper_epsilon[0], rel=1e-9)


def test_noised_decisions_are_functions_of_messages_and_clean_ones_are_not() -> None:
    for primal, equal in (("noised", True), ("clean", False)):
        run = assemble(primal=primal, rounds=2)
        state = run.algorithm.init(StateAxes((0, 0), 1))
        said = Message({"h": np.full((1, 1, 7), 0.3)})
        state = replace(state, t=1, private_part=np.array([[[0.3] * 7], [[0.1, *[0.3] * 6]]]))
        heard, density = run.algorithm.replay(state, said)
        decided = run.algorithm.decision(heard)
        assert (decided[0] == decided[1]).all() == equal
        assert density[0, 0] == pytest.approx(-3 * math.log(2.0))  # the own block of 3, scale 1
        assert density[1, 0] == pytest.approx(density[0, 0] - 0.2)


def test_what_a_learner_could_not_have_said_has_density_zero() -> None:
    run = assemble("dpsda-ps", rounds=4)
    steps = list(rounds_of(run, shared(run), SeededNoise(15)))
    state, message = steps[3].before, steps[3].message
    _, possible = run.algorithm.replay(state, message)
    forged = message["h"].copy()
    forged[0, 0, 6] += 1e-6  # a block of another learner
    _, foreign = run.algorithm.replay(state, Message({**message.fields, "h": forged}))
    _, weight = run.algorithm.replay(state, Message({**message.fields, "w": message["w"] * 1.001}))

    assert np.isfinite(possible).all()
    assert foreign[0, 0] == -np.inf and np.isfinite(foreign[1:]).all()
    assert (weight == -np.inf).all()


# ---- accounting --------------------------------------------------------------------------------------------------


def test_a_noised_primal_is_charged_once_and_a_clean_one_by_the_recursion() -> None:
    """By hand: n = 3, d_0 = 3, B = G = 1 (and r = 0), alpha = step/sqrt(t)."""
    loss = {"kind": "logistic", "ridge": 0.0, "feature_bound": 1.0}
    noised = assemble(loss=loss, rounds=5).guarantee(0)
    assert noised.round_losses[[0, 2, 3, 4]].tolist() == [0.0] * 4
    assert noised.epsilon() == pytest.approx(math.sqrt(3) * 3 * 2, rel=1e-9)
    assert noised.infinite_horizon_epsilon == noised.epsilon()

    clean = assemble(loss=loss, rounds=5, step=0.5, primal="clean").guarantee(0)
    difference, expected = 6.0, [0.0]
    for t in range(1, 5):
        expected.append(math.sqrt(3) * difference)
        difference = 3 * min(2.0, 0.25 * min(math.sqrt(3) * 2, 0.5 / math.sqrt(t) * difference))
    np.testing.assert_allclose(clean.round_losses, expected, rtol=1e-9)
    assert clean.epsilon() < clean.infinite_horizon_epsilon < 1.2 * clean.epsilon()


def test_the_first_round_is_the_worst_to_replace_and_the_horizon_does_not_matter() -> None:
    run = assemble(rounds=40, primal="clean")
    totals = single_totals(run, 1)
    assert max(totals) == totals[0] == run.guarantee(1).epsilon()
    assert totals[-1] == 0.0 and run.algorithm.accountant(1).has_dominating_losses
    # nG = 3 * 1.5^2/4: the spec's estimate of about ((nG)^2 + nG sqrt(pi) + 1) one-round losses, for any horizon.
    loss, n_g = {"kind": "logistic", "ridge": 0.0, "feature_bound": 1.5}, 3 * 1.5**2 / 4
    long = assemble(rounds=500, loss=loss, primal="clean", decision_set={"kind": "l2_ball", "radius": 1e6})
    guarantee = long.guarantee(0)
    assert guarantee.epsilon() / guarantee.round_losses[1] < n_g**2 + n_g * math.sqrt(math.pi) + 1.5
    assert guarantee.epsilon() == pytest.approx(guarantee.infinite_horizon_epsilon)


def single_totals(run: Run, learner: int) -> list[float]:
    """What every round costs, if its loss alone is replaced."""
    rounds = run.spec.rounds
    counts = np.ones(rounds, dtype=np.int64)
    change = np.eye(rounds, dtype=np.int64)
    return [math.fsum(each) for each in run.algorithm.accountant(learner).losses_by_change(counts, change)]


def sparse(n: int, rounds: int, seed: int) -> Network:
    """Digraphs drawn anew in every round, so thin that push weights rise and fall by much."""
    sequence = {"kind": "random", "probability": 0.3, "seed": seed, "directed": True}
    topology = {"sequence": sequence, "weights": "out_degree"}
    spec = parse_spec({"rounds": rounds, "algorithm": {"name": "dpps"}, "topology": topology}, allow_imports=True)
    return spec.topology.build_network(n, rounds=rounds)


GRAPHS: dict[str, Callable[[], Network]] = {
    "static": lambda: digraphs(3, period=1),
    "periodic": lambda: digraphs(3, period=3, seed=1),
    "random 0": lambda: sparse(3, 40, 0),
    "random 2": lambda: sparse(3, 40, 2),
    "random 5": lambda: sparse(3, 40, 5),
}
CLEAN: dict[str, Any] = {"primal": "clean", "clip": 0.5, "sigma": 2.0}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("name", "step"), [("dpps", 1.0), ("dpps", 0.2), ("dpsda-ps", 1.0), ("dpsda-ps", 0.1)])
def test_a_clean_primal_on_a_changing_graph_costs_what_its_worst_round_does(name: str, step: float, graph: str) -> None:
    """With records in every round, or in some: by every round at least as much as any one, in the end as much as the worst."""
    run = assemble(name, GRAPHS[graph](), rounds=40, dim=6, step=step, **CLEAN)
    counts = np.random.default_rng(3).integers(0, 3, 40)
    for plan in (np.ones(40, dtype=np.int64), counts):
        for i in range(3):
            singles = np.eye(40, dtype=np.int64)[plan > 0]
            each = np.cumsum(run.algorithm.accountant(i).losses_by_change(plan, singles), axis=1)
            charged = run.guarantee(i, plan).cumulative_epsilon
            np.testing.assert_allclose(charged, each.max(axis=0), rtol=1e-9)
            assert (np.diff(charged) >= 0.0).all()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("name", "step"), [("dpps", 1.0), ("dpps", 0.2), ("dpsda-ps", 1.0), ("dpsda-ps", 0.1)])
def test_the_claim_of_a_clean_primal_is_attained(name: str, step: float, graph: str) -> None:
    """By records chosen against it. The exact privacy loss is above the claim divided by 1.05, and never above the claim."""
    loss = {"kind": "ridge", "ridge": 0.1, "label_bound": 20.0}
    run = assemble(name, GRAPHS[graph](), rounds=24, dim=6, loss=loss, step=step, decision_set=WIDE, **CLEAN)
    for i in range(3):
        claim, totals = run.guarantee(i).epsilon(), single_totals(run, i)
        worst = int(np.argmax(totals))
        shown = attained(run, i, worst)
        assert shown <= claim * (1 + 1e-9) and claim <= 1.05 * shown
        for t in (0, 9):
            assert attained(run, i, t) <= totals[t] * (1 + 1e-9)


WIDE = {"kind": "box", "low": -10.0, "high": 10.0}


def attained(run: Run, learner: int, replaced: int) -> float:
    """The largest exact privacy loss of messages, where the round's loss is replaced by its opposite and everybody says zeros.

    In later rounds the label lies in the middle between both worlds' predictions: there the gradient moves most.
    """
    machine, algorithm, total = Replay(run, learner, worlds=2), method(run), 0.0
    own = algorithm.owned_mask[learner]
    row = (own / np.sqrt(own.sum()))[None]
    for t in range(run.spec.rounds):
        centre = Message({name: value[:1] for name, value in machine.emit(no_noise).fields.items()})
        density = machine.log_density(centre)
        total += float(density[0, 0] - density[1, 0])
        zeros, weights = np.zeros((1, 1, run.algorithm.dim)), algorithm.push_weights[t]
        messages = {j: Message({"h": zeros, "w": np.full((1, 1, 1), weights[j])}) for j in machine.required_senders}
        looked = copy(machine)
        looked.step(messages, *[Batch(row, np.zeros(1))] * 2)
        scores = looked.decision[:, 0] @ row[0]
        labels = (20.0, -20.0) if t == replaced else (scores.mean(),) * 2
        machine.step(messages, *(Batch(row, np.full(1, label)) for label in labels))
    return total


@pytest.mark.parametrize("primal", ["noised", "clean"])
@pytest.mark.parametrize("name", ["dpsda-c", "dpsda-ps", "dpps"])
def test_the_meter_adds_up_to_the_guarantee_and_to_the_epsilon_asked_for(name: str, primal: str) -> None:
    run = assemble(name, rounds=15, primal=primal, epsilon=0.5, clip=0.3)
    for i in range(3):
        meter, charged = run.algorithm.accountant(i), []
        for _ in range(15):
            charged.append(meter.next_loss())
            meter.advance(4)
        assert charged == run.guarantee(i).round_losses.tolist()
        assert charged[0] == 0.0
    parts = [run.guarantee(i).epsilon() for i in range(3)]
    assert 0.5 - 1e-9 < (max(parts) if name == "dpps" else joint_epsilon(run)) <= 0.5


def test_a_replaced_loss_costs_what_two_gradients_differ_by_at_one_decision() -> None:
    """For squared errors less than both bounds together: `c R^2 radius + 2 R P` in place of `2 R (c R radius + P)`."""
    loss = {"kind": "ridge", "feature_bound": 0.5, "label_bound": 3.0}
    radius = math.sqrt(7.0)  # of the box
    change, bound = 2 * 0.25 * radius + 2 * 0.5 * 6.0, 0.5 * (2 * 0.5 * radius + 6.0)
    for clip in (None, 3.0, 100.0):
        guarantee = assemble(loss=loss, sigma=2.0, clip=clip).guarantee(0)
        expected = 3 * math.sqrt(3) * min(change, 2 * (clip or bound)) / 2.0
        assert guarantee.epsilon() == pytest.approx(expected, rel=1e-9)
    named = {name: each.value for name, each in assemble(loss=loss).guarantee(0).basis.constants.items()}
    assert (named["gradient_bound"], named["gradient_change"]) == pytest.approx((bound, change))


def test_replaced_rounds_and_rounds_without_records() -> None:
    run = assemble(rounds=6)
    two = run.guarantee(0, np.full(6, 3), np.array([0, 1, 0, 3, 0, 1]))
    one = run.guarantee(0)
    assert np.flatnonzero(two.round_losses).tolist() == [2, 4]
    assert two.epsilon() == pytest.approx(2 * one.epsilon())
    late = run.guarantee(0, counts=np.array([0, 0, 2, 1, 1, 1]))
    assert np.flatnonzero(late.round_losses).tolist() == [3]
    assert one.paper_epsilon.tolist() == pytest.approx([2 * 3 * 1.5 * (t + 1) for t in range(6)])


def test_a_sum_over_records_has_no_known_smoothness() -> None:
    """Clean primal: every later round is charged in full; the number of records does not matter."""
    guarantee = assemble(rounds=6, batch="sum", clip=0.5, primal="clean", step=1e-3, loss={"ridge": 0.0}).guarantee(0)
    np.testing.assert_allclose(guarantee.round_losses[1:], guarantee.round_losses[1], rtol=1e-9)
    assert guarantee.infinite_horizon_epsilon == math.inf


def test_without_noise_nothing_is_promised() -> None:
    run = assemble(sigma=0.0, rounds=4, batch="sum")
    assert [finding.code for finding in run.warnings] == ["NO_NOISE"]
    assert run.guarantee(0).epsilon() == math.inf
    said = [step.message["h"] for step in simulate_rounds(run, shared(run), SeededNoise(16))]
    assert (said[0] == 0.0).all() and (said[1] != 0.0).sum() == 7
    assert isinstance(run.algorithm.accountant(0), DualAveragingAccountant)


# ---- conditions --------------------------------------------------------------------------------------------------

ROWS = mixing([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("code", "name", "changes"),
    [
        ("STEP", "dpsda-c", {"step": 0.0}),
        ("SIGMA", "dpsda-c", {"sigma": -1.0}),
        ("SIGMA", "dpps", {"sigma": 1.0, "epsilon": 1.0}),
        ("EPSILON", "dpcda", {"epsilon": 0.0, "network": metropolis(1)}),
        ("EPSILON", "dpsda-c", {"epsilon": 1e-12}),
        ("CLIP", "dpsda-c", {"clip": -1.0}),
        ("CLIP", "dpsda-ps", {"batch": "sum"}),
        ("CLIP", "dpsda-ps", {"batch": "sum", "epsilon": 1.0}),
        ("BLOCKS", "dpsda-c", {"dim": 2}),
        ("ONE_LEARNER", "dpcda", {}),
        ("DOUBLY_STOCHASTIC", "dpsda-c", {"network": cycle(ROWS)}),
        ("DOUBLY_STOCHASTIC", "dpsda-c", {"network": cycle(metropolis(3).mixing(0), ROWS)}),
        ("DOUBLY_STOCHASTIC", "dpsda-c", {"network": cycle(mixing(0.5 * np.eye(3)))}),
        ("COLUMN_STOCHASTIC", "dpsda-ps", {"network": cycle(ROWS)}),
        ("COLUMN_STOCHASTIC", "dpps", {"network": cycle(ROWS)}),
        ("SELF_WEIGHT", "dpsda-c", {"network": cycle(mixing(1 - np.eye(2)))}),
        ("W_NEGATIVE", "dpsda-ps", {"network": cycle(mixing([[1.5, -0.5], [-0.5, 1.5]]))}),
        ("W_SHAPE", "dpsda-ps", {"network": cycle(Mixing(np.zeros((2, 3)), np.ones(2)))}),
        ("W_SHAPE", "dpsda-ps", {"network": cycle(mixing([[1.0, np.nan], [0.0, 1.0]]))}),
    ],
)
def test_what_is_refused(code: str, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(AssumptionViolated) as failure:
        assemble(name, **changes)
    assert failure.value.code == code


@pytest.mark.parametrize(
    ("codes", "name", "changes"),
    [
        ([], "dpsda-c", {}),
        ([], "dpsda-ps", {}),
        ([], "dpps", {"primal": "noised", "decision_set": BALL}),
        (["CLEAN_PRIMAL"], "dpps", {}),
        (["NOT_CONVEX"], "dpsda-c", {"loss": Bent(feature_bound=1.0, ridge=0.0)}),
        (["PRODUCT_SET"], "dpsda-c", {"decision_set": BALL}),
        (["CLEAN_PRIMAL"], "dpsda-ps", {"primal": "clean"}),
        (["ROW_STOCHASTIC"], "dpsda-c", {"network": cycle(ROWS), "allow_row_stochastic": True}),
        (["CONNECTIVITY"], "dpsda-c", {"network": cycle(mixing(np.eye(3)))}),
        (["CONNECTIVITY"], "dpsda-ps", {"network": cycle(mixing([[1, 0.5, 0], [0, 0.5, 0], [0, 0, 1]]))}),
        ([], "dpsda-ps", {"network": cycle(mixing([[1, 0.5], [0, 0.5]]), mixing([[0.5, 0], [0.5, 1]]))}),
    ],
)
def test_what_is_reported(codes: list[str], name: str, changes: dict[str, Any]) -> None:
    assert [finding.code for finding in assemble(name, **changes).warnings] == codes


@pytest.mark.parametrize(
    ("name", "learners", "topology"),
    [
        ("dpsda-c", 3, {"graph": "star"}),
        ("dpsda-ps", 3, {"graph": "star", "weights": "out_degree"}),
        ("dpps", 3, {"graph": "ring", "weights": "out_degree"}),
        ("dpcda", 1, {}),
    ],
)
def test_a_spec_names_them(name: str, learners: int, topology: dict[str, Any]) -> None:
    document = {"rounds": 3, "learners": learners, "algorithm": {"name": name}, "topology": topology}
    run = build_run(parse_spec({**document, "decision_set": BOX}, allow_imports=True), 5)
    messages = [step.message for step in simulate_rounds(run, shared(run), SeededNoise(17))]
    assert run.algorithm.name == name and method(run).sigma == 1.0
    assert {field: values.shape[2:] for field, values in messages[2].fields.items()} == run.algorithm.field_shapes()
