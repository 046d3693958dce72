"""PD-FTGL, PD-OCG and D-FTGL: the facts of their theory that a run must show, what they cost, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sottovoce_core.algorithms.follow_the_leader.accounting import (
    BlockSchedule,
    LeafSensitivity,
    OpenNodes,
    TreeAccountant,
    levels,
    lowbit,
)
from sottovoce_core.algorithms.follow_the_leader.algorithm import PdFtgl
from sottovoce_core.algorithms.follow_the_leader.d_ftgl import DFtgl
from sottovoce_core.algorithms.follow_the_leader.gossip import Gossip
from sottovoce_core.algorithms.follow_the_leader.parameters import PdFtglSpec, RegretParameters
from sottovoce_core.algorithms.interface import LocalMessages, Message, StackedMessages, StateAxes
from sottovoce_core.algorithms.run_context import RunContext
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.losses import mean_gradient
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.network.topology import FixedNetwork
from sottovoce_core.noise import NoiseRequest, NoiseSource, Recorder, SeededNoise, no_noise
from sottovoce_core.privacy.accountant import compute_guarantee
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import SimulatedRound, simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from tests.examples import made_up

PRIVATE = ["pd-ftgl", "pd-ocg"]
PLACEMENTS = ["before_gossip", "after_gossip"]
BALL = {"kind": "l2_ball", "radius": 2.0}
LOSS = {"kind": "logistic", "ridge": 0.1, "feature_bound": 2.0}


def ran(name: str, rounds: int = 83, learners: int = 5, *, n_features: int = 3, **more: Any) -> Run:
    """A run of blocks of 10 rounds; `algorithm` changes single parameters, the rest whole sections."""
    private = {"epsilon": 2.0, "block_length": 10, "gossip_steps": 7, "multiplier": 0.1} if name in PRIVATE else {}
    given = {**private, **more.pop("algorithm", {})}
    chosen = {key: value for key, value in given.items() if value is not None}
    sections = {"loss": LOSS, "decision_set": BALL, **more}
    document = {"rounds": rounds, "learners": learners, "durability": "process", **sections}
    return build_run(parse_spec({**document, "algorithm": {"name": name, **chosen}}, allow_imports=True), n_features)


def letter(name: str, graph: str = "complete", **algorithm: Any) -> Run:
    """The experiment of the paper: 26 classes, 16 features, trace norm 10, nine learners, 150000 rounds."""
    return ran(
        name,
        150_000,
        9,
        n_features=16,
        algorithm={"block_length": None, "gossip_steps": None, "multiplier": None, "epsilon": 10.0, **algorithm},
        loss={"kind": "softmax", "classes": 26, "ridge": 0.0, "clip_norm": 1.0, "feature_bound": 4.0},
        decision_set={"kind": "trace_norm", "rows": 26, "columns": 16, "radius": 10.0},
        topology={"graph": graph},
    )


@dataclass
class Again:
    """What was recorded, for one learner or one replica."""

    recorder: Recorder
    part: Any

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        drawn: FloatArray = self.recorder.noise_by_round[draw.field][draw.round][self.part]
        return drawn


def ftgl(run: Run) -> PdFtgl:
    """The algorithm of a private run."""
    assert isinstance(run.algorithm, PdFtgl)
    return run.algorithm


def simulated(run: Run, data: PlacedData, noise: NoiseSource, replicas: int = 1) -> list[SimulatedRound]:
    return list(simulate_rounds(run, data, noise, replicas))


def transcript_of(steps: list[SimulatedRound]) -> Transcript:
    return Transcript.from_rounds(step.message for step in steps)


# ---- the algorithm as the paper writes it ----------------------------------------------------------------------------


def prefix_nodes(leaf: int) -> list[int]:
    """Nodes `t, t - lowbit(t), ... > 0`."""
    nodes = []
    while leaf > 0:
        nodes.append(leaf)
        leaf -= lowbit(leaf)
    return nodes


def block_gradient(run: Run, data: PlacedData, learner: int, rounds: range, x: FloatArray) -> FloatArray:
    total = np.zeros(3)
    for t in rounds:
        batch = data.learners[learner].batch(t)
        features, labels = run.loss.enforce_bounds(batch.features, batch.labels)
        total = total + mean_gradient(run.loss, x, replace(batch, features=features, labels=labels))
    return total


def conditional_gradient(run: Run, linear: FloatArray, curvature: float, x: FloatArray, steps: int) -> FloatArray:
    for _ in range(steps):
        slope = linear + curvature * x
        v = ftgl(run).decision_set.minimise(slope)
        if slope @ (v - x) < 0:
            x = x + min(1.0, float(-slope @ (v - x) / (curvature * (v - x) @ (v - x)))) * (v - x)
    return x


def by_the_book(run: Run, data: PlacedData, noise: dict[int, FloatArray]) -> dict[int, FloatArray]:
    """Decisions x(z) of all learners, z = 1 .. Z, from `Q_K`, whole sums and whole nodes. `noise`: by leaf, `(n, d)`."""
    a, T, n = ftgl(run), run.spec.rounds, run.spec.n_learners
    L, alpha, h = a.blocks.length, run.loss.ridge, a.regularization
    Z, Q = math.ceil(T / L), a.gossip.polynomial(a.blocks.steps, a.momentum)
    x = dict.fromkeys((1, 2, 3), np.zeros((n, 3)))
    d: dict[int, FloatArray] = {}
    zhat: dict[int, FloatArray] = {1: np.zeros((n, 3))}
    for z in range(1, Z):
        rounds = range((z - 1) * L, z * L)
        d[z] = np.stack([block_gradient(run, data, i, rounds, x[z][i]) for i in range(n)])
        if z >= 2:
            clear = sum((d[tau] for tau in range(1, z)), np.zeros((n, 3)))
            noisy = sum((noise[r] for r in prefix_nodes(z - 1) if r in noise), np.zeros((n, 3)))
            zhat[z] = Q @ (clear + noisy) if a.has_noise_before_gossip else Q @ clear + noisy
            if a.name == "pd-ftgl":
                x[z + 1] = a.decision_set.project(-zhat[z] / (alpha * (z - 1) * L + 2 * h))
            elif z >= 3:
                c = alpha * (z - 2) * L + 2 * h
                x[z + 1] = np.stack([conditional_gradient(run, zhat[z - 1][i], c, x[z][i], L) for i in range(n)])
    return x


@pytest.mark.parametrize("rounds", [80, 83])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", PRIVATE)
def test_decisions_are_those_of_the_paper(name: str, placement: str, rounds: int) -> None:
    """Corrected Algorithms 1 and 3, whether or not T is a multiple of L; the graph is a ring, so P is the lazy one."""
    run = ran(name, rounds, algorithm={"noise_placement": placement})
    data, noise = made_up(run.spec, batch=2), Recorder(SeededNoise(1))
    steps = simulated(run, data, noise)
    expected = by_the_book(run, data, {t // 10: drawn[:, 0] for t, drawn in noise.noise_by_round["y"].items()})

    assert ftgl(run).gossip.mixing_share == 0.5
    for step in steps:
        np.testing.assert_allclose(step.decisions_before[:, 0], expected[step.t // 10 + 1], rtol=1e-8, atol=1e-9)
    assert max(float(np.abs(step.decisions_before).max()) for step in steps) > 0.01
    np.testing.assert_array_equal(steps[-1].decisions_after, steps[-1].decisions_before)  # x(Z+1) would never be played


@pytest.mark.parametrize("name", PRIVATE)
def test_a_decision_rests_on_what_is_two_or_three_blocks_older(name: str) -> None:
    run = ran(name)
    data = made_up(run.spec)
    first = [step.decisions_before for step in simulated(run, data, SeededNoise(2))]
    delay = 2 if name == "pd-ftgl" else 3
    assert all(not first[t].any() for t in range(10 * delay))

    for block in range(8):
        t = 10 * block + 4
        changed = data.with_learner(1, data.learners[1].with_use(t, np.array([2.0, -1.0, 3.0]), 1.0))
        second = [step.decisions_before for step in simulated(run, changed, SeededNoise(2))]
        apart = [t for t in range(83) if (first[t] != second[t]).any()]
        # The last two (three) block sums are never said, so they move nothing.
        assert apart[:1] == ([] if block + delay > 8 else [10 * (block + delay)])


def test_the_message_is_gossip_and_elsewhere_a_blank() -> None:
    """First the noisy block sum, then `Q_k` of it; 43 of 83 rounds have nothing to say and say zeros."""
    run = ran("pd-ftgl", algorithm={"gossip_steps": 6})
    data, noise = made_up(run.spec), Recorder(SeededNoise(3))
    steps = simulated(run, data, noise)
    assert sorted(noise.noise_by_round["y"]) == [10 * leaf for leaf in range(1, 8)]

    for step in steps:
        block, k = divmod(step.t, 10)
        said = step.message["y"]
        assert said.shape == (5, 1, 3)
        if not 1 <= block <= 7 or k >= 6:
            assert not said.any()
            continue
        first = steps[10 * block].message["y"][:, 0]
        mixed = ftgl(run).gossip.polynomial(k, ftgl(run).momentum) @ first
        np.testing.assert_allclose(said[:, 0], mixed, rtol=1e-10, atol=1e-10)
    own = np.stack([block_gradient(run, data, i, range(10), np.zeros(3)) for i in range(5)])
    np.testing.assert_allclose(
        steps[10].message["y"][:, 0] - noise.noise_by_round["y"][10][:, 0], own, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize(
    "decision_set", [{"kind": "box", "low": -0.1, "high": 0.3}, {"kind": "l1_ball", "radius": 0.2}]
)
def test_decisions_stay_in_the_decision_set(name: str, decision_set: dict[str, Any]) -> None:
    run = ran(name, decision_set=decision_set, algorithm={"multiplier": 0.01, "epsilon": 0.1})
    last = simulated(run, made_up(run.spec), SeededNoise(4), 4)[-1].decisions_after
    np.testing.assert_allclose(ftgl(run).decision_set.project(last), last, atol=1e-12)
    assert np.abs(last).max() > 0.09


@pytest.mark.parametrize("name", PRIVATE)
def test_matrices_stay_in_the_trace_norm_ball(name: str) -> None:
    run = ran(
        name,
        loss={"kind": "softmax", "classes": 2, "ridge": 0.0, "clip_norm": 1.0},
        decision_set={"kind": "trace_norm", "rows": 2, "columns": 3, "radius": 0.5},
        algorithm={"multiplier": 0.01},
    )
    last = simulated(run, made_up(run.spec), SeededNoise(4), 4)[-1].decisions_after
    trace_norms = np.linalg.norm(last.reshape(5, 4, 2, 3), ord="nuc", axis=(2, 3))
    assert trace_norms.max() == pytest.approx(0.5, rel=0.1)
    assert trace_norms.max() <= 0.5 + 1e-12


def test_conditional_gradient_comes_as_near_as_its_bound() -> None:
    """After L steps within `4 R / sqrt(L + 2)` of the minimiser of (9), with a gap of at most `8 c R^2 / (L + 2)`."""
    run = ran("pd-ocg", 200, algorithm={"block_length": 40, "multiplier": 0.02, "epsilon": 1.0})
    algorithm, generator = ftgl(run), np.random.default_rng(5)
    state = algorithm.init(StateAxes((0,), 50))
    x = algorithm.decision_set.project(generator.normal(size=(1, 50, 3)))
    state = replace(state, next_decision=x, prefix=30 * generator.normal(size=(1, 50, 3)))
    curvature = algorithm.loss.ridge * 40 + 2 * algorithm.regularization
    best = algorithm.decision_set.project(-state.prefix / curvature)
    for t in range(80, 120):
        state = replace(state, t=t, next_decision=algorithm._step_conditional_gradient(state))

    def value(x: FloatArray) -> FloatArray:
        return np.asarray(np.vecdot(state.prefix, x) + curvature / 2 * np.vecdot(x, x))

    assert (np.linalg.norm(state.next_decision - best, axis=-1) <= 4 * 2.0 / math.sqrt(42)).all()
    assert (value(state.next_decision) - value(best) <= 8 * curvature * 4.0 / 42).all()
    assert (value(state.next_decision) - value(best) < 0.1 * (value(x) - value(best)) + 1e-9).all()


@pytest.mark.parametrize(("name", "parameters"), [("pd-ftgl", {"block_length": 20}), ("pd-ocg", {"block_length": 20})])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_without_noise_the_network_comes_near_the_central_optimum(
    name: str, parameters: dict[str, Any], placement: str
) -> None:
    chosen = {"epsilon": None, "noise_scale": 0, "gossip_steps": None, "multiplier": 1e-3, **parameters}
    chosen |= {"noise_placement": placement}
    near_the_optimum(ran(name, 4000, 4, loss={**LOSS, "ridge": 0.3}, algorithm=chosen))


def test_the_baseline_without_noise_comes_near_the_central_optimum() -> None:
    near_the_optimum(ran("d-ftgl", 4000, 4, loss={**LOSS, "ridge": 0.3}, algorithm={"multiplier": 1e-3}))


def near_the_optimum(run: Run) -> None:
    data = made_up(run.spec, records=20)
    *_, last = simulate_rounds(run, data, no_noise)
    features = np.concatenate([run.loss.enforce_bounds(each.features, each.labels)[0] for each in data.learners])
    labels = np.concatenate([each.labels for each in data.learners])

    def objective(x: FloatArray) -> float:
        scores = features @ x
        return float(np.mean(np.logaddexp(0, scores) - labels * scores) + 0.15 * x @ x)

    optimum = minimize(objective, np.zeros(3), tol=1e-12).x
    assert np.linalg.norm(optimum) > 0.1
    assert np.abs(last.decisions_after[:, 0] - optimum).max() < 0.05 * np.linalg.norm(optimum)


def test_learning_starts_where_the_loss_says() -> None:
    """A network of neurons has its own starting point: regularisation pulls towards it, not towards zero."""

    class Elsewhere(LogisticLoss):
        def initial_parameters(self, dim: int) -> FloatArray:
            return np.full(dim, 0.25)

    for name in ("pd-ftgl", "pd-ocg", "d-ftgl"):
        run = ran(name, loss={**LOSS, "ridge": 0.0}, algorithm={"multiplier": 1e6})
        assert isinstance(run.algorithm, PdFtgl | DFtgl)
        elsewhere = replace(run.algorithm, loss=Elsewhere(feature_bound=2.0, ridge=0.0))
        last = simulated(replace(run, algorithm=elsewhere), made_up(run.spec), no_noise)[-1].decisions_after
        np.testing.assert_allclose(last, 0.25, atol=1e-3)


# ---- D-FTGL ----------------------------------------------------------------------------------------------------------


def test_a_round_of_the_baseline_is_the_papers_update() -> None:
    """(3) and (4), rounds counted from 0."""
    run = ran("d-ftgl", 30, 4, topology={"graph": "path"})
    data, P, algorithm = made_up(run.spec, batch=2), run.network.mixing(0).matrix, run.algorithm
    assert isinstance(algorithm, DFtgl)
    total = np.zeros((4, 3))
    for step in simulated(run, data, no_noise):
        np.testing.assert_allclose(step.message["y"][:, 0], total, atol=1e-12)
        seen = [block_gradient(run, data, i, range(step.t, step.t + 1), step.decisions_before[i, 0]) for i in range(4)]
        total = P @ total + np.stack(seen)
        x = -total / (0.1 * (step.t + 1) + 2 * algorithm.regularization)
        np.testing.assert_allclose(step.decisions_after[:, 0], algorithm.decision_set.project(x), rtol=1e-11)


def test_the_baseline_promises_nothing() -> None:
    run = ran("d-ftgl", 30)
    meter, guarantee = run.algorithm.accountant(0), run.guarantee(0)
    assert [finding.code for finding in run.warnings] == ["WIRE_EXPOSED"]
    assert guarantee.round_losses[0] == 0.0
    assert (guarantee.round_losses[1:] == math.inf).all()
    assert run.algorithm.noise_scale(0, 3) == 0.0
    for loss in guarantee.round_losses:
        assert meter.next_loss() == loss
        meter.advance(1)
    data = made_up(run.spec)
    own = data.learners[0]
    worlds = [own, own.with_use(3, np.array([2.0, -1.0, 3.0]), 1.0)]
    realised = replay(run, transcript_of(simulated(run, data, no_noise)), 0, worlds).realised_losses[:, 0, 0]
    assert np.flatnonzero(realised == math.inf).tolist() == [4]  # then the forced message is every world's own
    assert not realised[np.isfinite(realised)].any()


# ---- gossip and tree -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "gap", "theta", "length", "count", "sharp"),
    [("complete", 1.0, 0.5, 67, 2239, 43), ("ring", 0.07799, 0.72090, 237, 633, 91)],
)
def test_values_of_the_letter_experiment(
    graph: str, gap: float, theta: float, length: int, count: int, sharp: int
) -> None:
    algorithm = ftgl(letter("pd-ftgl", graph))
    assert algorithm.gossip.spectral_gap == pytest.approx(gap, abs=5e-6)
    assert algorithm.momentum == pytest.approx(theta, abs=5e-6)
    assert algorithm.blocks == BlockSchedule(150_000, length, length, count - 2)
    assert algorithm.gossip.sharp_steps(150_000) == sharp
    assert ftgl(letter("pd-ocg", graph)).blocks == BlockSchedule(150_000, 387, sharp, math.ceil(150_000 / 387) - 3)


@pytest.mark.parametrize(("rule", "scale"), [("tight", 48.95), ("paper", 234.90)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_scales_of_the_letter_experiment(placement: str, rule: str, scale: float) -> None:
    run = letter("pd-ftgl", scale_rule=rule, noise_placement=placement)
    guarantee = run.guarantee(0)
    claim = guarantee.cumulative_epsilon[-1] if guarantee.output_epsilon is None else guarantee.output_epsilon[-1]
    assert ftgl(run).scales == pytest.approx((scale,) * 9, abs=5e-3)
    assert claim <= 10.0
    assert claim == pytest.approx(10.0 if rule == "tight" else 10.0 * 48.95 / 234.90, rel=1e-4)
    assert guarantee.paper_epsilon[-1] == pytest.approx(10.0 * 234.90 / scale, rel=1e-3)
    assert levels(ftgl(run).blocks.leaves) == 12


@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_gossip_agrees_as_fast_as_promised(n: int, steps: int, seed: int) -> None:
    """`||Q_K m - mean|| <= sqrt(2) (1+s)^(-K/2) ||m - mean||`, mean kept; entries may be negative, rows sum to one."""
    weights = np.random.default_rng(seed).random((n, n))
    weights = (weights + weights.T) / (4 * n)
    np.fill_diagonal(weights, 0.0)
    gossip = Gossip.from_network(FixedNetwork.from_weights(weights - np.diag(weights.sum(axis=1))), "auto")
    Q, J = gossip.polynomial(steps, gossip.momentum), np.full((n, n), 1 / n)
    s = math.sqrt(1 - gossip.sigma_2**2)
    np.testing.assert_allclose(Q.sum(axis=0), 1.0)
    assert np.linalg.norm(Q - J, 2) <= math.sqrt(2) * (1 + s) ** (-steps / 2) + 1e-12


def test_lazy_gossip_is_half_the_step() -> None:
    complete = {"graph": "complete"}
    run, lazy_run = (ran("pd-ftgl", topology=complete, algorithm={"lazy": lazy}) for lazy in ("auto", True))
    plain, lazy = ftgl(run).gossip, ftgl(lazy_run).gossip
    np.testing.assert_allclose(lazy.matrix, (np.eye(5) + run.network.mixing(0).matrix) / 2)
    assert plain.mixing_share == 1.0
    own, others = np.array([1.0, -2.0]), np.array([3.0, 5.0])
    np.testing.assert_allclose(plain.mix(own, 0.8 * others, 0.2), 0.2 * own + 0.8 * others)
    np.testing.assert_allclose(lazy.mix(own, 0.8 * others, 0.2), 0.6 * own + 0.4 * others)


@given(st.integers(1, 300))
def test_a_prefix_carries_the_noise_of_its_nodes_and_little_is_kept(leaves: int) -> None:
    nodes, prefix = OpenNodes(), 0.0
    noise = np.random.default_rng(leaves).integers(-(2**20), 2**20, leaves + 1).astype(float)
    for leaf in range(1, leaves + 1):
        prefix += noise[leaf] - float(nodes.merged_noise(leaf))
        nodes = nodes.add_leaf(leaf, np.array(noise[leaf]))
        assert prefix == sum(noise[r] for r in prefix_nodes(leaf))
        assert len(nodes.noise) == leaf.bit_count() <= levels(leaf)


def test_leaf_one_lies_in_the_most_nodes() -> None:
    for leaves in (0, 1, 2, 3, 4, 7, 8, 2237):
        above = [sum(r - lowbit(r) < leaf <= r for r in range(1, leaves + 1)) for leaf in range(1, min(leaves, 40) + 1)]
        assert max(above, default=0) == levels(leaves) == (above[0] if above else 0)
    assert levels(2237) == 12


# ---- one machine, driven three ways ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", [*PRIVATE, "d-ftgl"])
def test_single_learners_equal_all_learners_at_once(name: str, placement: str) -> None:
    run = ran(name, algorithm={"noise_placement": placement} if name in PRIVATE else {})
    data, noise = made_up(run.spec, batch=3), Recorder(SeededNoise(6))
    together = simulated(run, data, noise)
    states = [run.algorithm.init(StateAxes(i)) for i in range(5)]
    for step in together:
        messages: dict[int, Message] = {}
        mixing = run.network.mixing(step.t)
        for i in range(5):
            states[i], messages[i] = run.algorithm.emit(states[i], Again(noise, (i, 0)))
        for i in range(5):
            assert messages[i]["y"].shape == (3,)
            heard = LocalMessages(mixing.in_neighbour_weights(i), messages, float(mixing.own_weights[i]))
            states[i] = run.algorithm.update(states[i], heard, data.learners[i].batch(step.t))
            np.testing.assert_allclose(messages[i]["y"], step.message["y"][i, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(
                run.algorithm.decision(states[i]), step.decisions_after[i, 0], rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("name", PRIVATE)
def test_every_replica_is_a_run_of_its_own(name: str) -> None:
    run = ran(name)
    data, noise = made_up(run.spec), Recorder(SeededNoise(7))
    together = simulated(run, data, noise, replicas=3)
    for k in range(3):
        alone = simulated(run, data, Again(noise, (slice(None), slice(k, k + 1))))
        for many, one in zip(together, alone, strict=True):
            np.testing.assert_allclose(many.message["y"][:, k], one.message["y"][:, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(many.decisions_after[:, k], one.decisions_after[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*PRIVATE, "d-ftgl"])
def test_a_state_is_a_value(name: str) -> None:
    run = ran(name)
    data, state = made_up(run.spec), run.algorithm.init(StateAxes((0, 1, 2, 3, 4), 1))
    mixing = run.network.mixing(0)
    for t in range(45):
        spoken, message = run.algorithm.emit(state, SeededNoise(t))
        assert (run.algorithm.emit(state, SeededNoise(t))[1]["y"] == message["y"]).all()
        heard = StackedMessages(mixing, message)
        before = run.algorithm.decision(spoken).copy()
        one, two = (run.algorithm.update(spoken, heard, data.stack_round(t)) for _ in range(2))
        assert (run.algorithm.decision(spoken) == before).all()
        assert (run.algorithm.decision(one) == run.algorithm.decision(two)).all()
        state = one


def test_a_learner_alone_learns() -> None:
    run = ran("pd-ftgl", learners=1)
    data, noise = made_up(run.spec), Recorder(SeededNoise(8))
    steps = simulated(run, data, noise)
    expected = by_the_book(run, data, {t // 10: drawn[:, 0] for t, drawn in noise.noise_by_round["y"].items()})
    np.testing.assert_allclose(steps[-1].decisions_before[:, 0], expected[9], rtol=1e-8, atol=1e-9)


def test_memory_does_not_grow_with_blocks() -> None:
    run = ran("pd-ftgl", 400, algorithm={"block_length": 1, "gossip_steps": 1})
    data, algorithm = made_up(run.spec), run.algorithm
    state, mixing = algorithm.init(StateAxes((0, 1, 2, 3, 4), 1)), run.network.mixing(0)
    for t in range(399):
        state, message = algorithm.emit(state, SeededNoise(t))
        state = algorithm.update(state, StackedMessages(mixing, message), data.stack_round(t))
        assert len(state.nodes.noise) <= levels(398)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def within(run: Run, data: PlacedData, worlds: list[LearnerData], transcript: Transcript, claim: FloatArray) -> float:
    """Round by round at most the claim. Returns the largest loss of all."""
    losses = replay(run, transcript, 0, worlds)
    shown, worst = np.cumsum(losses.realised_losses, axis=0), np.cumsum(losses.max_losses, axis=0)
    assert (np.abs(shown) <= claim[:, None, None] * (1 + 1e-9) + 1e-9).all()
    assert (worst <= claim[:, None, None] * (1 + 1e-9) + 1e-9).all()
    return float(losses.supremum.max())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PRIVATE)
def test_one_record_costs_at_most_the_claim(name: str, seed: int) -> None:
    run = ran(name, loss={**LOSS, "clip_norm": 0.8}, algorithm={"epsilon": [2.0, 1.0, 1.0, 3.0, 1.0]})
    data = made_up(run.spec, batch=2, seed=seed)
    transcript = transcript_of(simulated(run, data, SeededNoise(seed), 4))
    own, generator = data.learners[0], np.random.default_rng(seed)
    positions = [0, *generator.integers(0, len(own.order), 12).tolist()]
    worlds = [own, *(own.with_use(p, 3 * generator.normal(size=3), float(p % 2)) for p in positions)]
    claim = run.guarantee(0, np.diff(own.offsets)).cumulative_epsilon

    assert within(run, data, worlds, transcript, claim) > 0.1
    assert claim[-1] == pytest.approx(1.0, rel=1e-6)  # two records a round: each weighs a half of the target 2


@pytest.mark.parametrize("name", PRIVATE)
def test_several_records_cost_at_most_the_sum_over_their_nodes(name: str) -> None:
    run = ran(name, loss={**LOSS, "clip_norm": 0.8})
    data = made_up(run.spec, records=12)
    transcript, own = transcript_of(simulated(run, data, SeededNoise(9), 4)), data.learners[0]
    worlds = [own, *(own.with_record(row, np.array([2.0, -3.0, 1.0]), 1.0) for row in range(6))]
    for row in range(6):
        replaced = np.bincount(own.find_rounds(row), minlength=83)
        claim = run.guarantee(0, None, replaced).cumulative_epsilon
        assert within(run, data, [own, worlds[row + 1]], transcript, claim) > 0.1
        assert claim[-1] > run.guarantee(0).epsilon()


def test_the_claim_is_attained() -> None:
    """Leaf 1, a gradient along (1, 1, 1) that turns round, and noise that says nothing against it."""
    run = ran("pd-ftgl", loss={**LOSS, "feature_bound": 1.0, "clip_norm": 0.5})
    data = made_up(run.spec)
    aligned = np.full(3, 1 / math.sqrt(3))
    own = data.learners[0].with_use(0, aligned, 0.0)
    data = data.with_learner(0, own)
    transcript = transcript_of(simulated(run, data, SeededNoise(10)))
    losses = replay(run, transcript, 0, [own, own.with_use(0, aligned, 1.0)])

    assert losses.supremum[0, 0] == pytest.approx(2.0, rel=1e-6)
    assert np.flatnonzero(losses.max_losses[:, 0, 0] > 1e-9).tolist() == [10, 20, 40]
    assert run.guarantee(0).epsilon() == pytest.approx(2.0, rel=1e-6)
    assert run.guarantee(0).epsilon() <= 2.0


def test_a_likelihood_ratio_has_mean_one() -> None:
    """`E exp(-loss) = 1` over 20000 transcripts; beyond five standard errors with probability below 1e-6."""
    run = ran("pd-ftgl", 35, 2, algorithm={"epsilon": 1.5, "block_length": 5, "gossip_steps": 2})
    data = made_up(run.spec)
    own = data.learners[0]
    transcript = transcript_of(simulated(run, data, SeededNoise(11), 20_000))
    worlds = [own, own.with_use(2, np.array([2.0, 1.0, -1.0]), 1.0 - own.labels[2])]
    ratio = np.exp(-replay(run, transcript, 0, worlds).total[0])
    assert ratio.std() > 0.1
    assert abs(ratio.mean() - 1.0) < 5 * ratio.std() / math.sqrt(len(ratio))


@pytest.mark.parametrize("name", PRIVATE)
def test_as_published_the_wire_tells_everything(name: str) -> None:
    run = ran(name, loss={**LOSS, "clip_norm": 0.8}, algorithm={"noise_placement": "after_gossip", "epsilon": 0.01})
    data = made_up(run.spec)
    own, guarantee = data.learners[0], run.guarantee(0)
    transcript = transcript_of(simulated(run, data, SeededNoise(12), 2))
    losses = replay(run, transcript, 0, [own, own, own.with_use(3, np.array([2.0, 1.0, -1.0]), 1.0)])

    assert (losses.total[0] == 0.0).all()
    assert (losses.realised_losses[10, 1] == math.inf).all()
    assert np.isinf(guarantee.round_losses).nonzero()[0].tolist() == [
        10 * leaf for leaf in range(1, 8 - (name == "pd-ocg"))
    ]
    assert run.algorithm.noise_scale(0, 10) == 0.0
    assert "WIRE_EXPOSED" in {finding.code for finding in run.warnings}
    assert guarantee.output_epsilon is not None and guarantee.output_epsilon[-1] == pytest.approx(0.01, rel=1e-5)
    assert guarantee.output_epsilon[-1] <= 0.01


def test_too_few_steps_cost_more_in_decisions_but_not_on_the_wire() -> None:
    """Nine learners, P = J, theta = 1/2, one step: the columns of |Q| sum to 1.667; with many steps to 1."""
    for steps, reach in ((1, 5 / 3), (7, None), (60, 1.0)):
        shared = {"block_length": 60, "gossip_steps": steps}
        before, after = (
            ftgl(ran("pd-ftgl", 600, 9, topology={"graph": "complete"}, algorithm={**shared, "noise_placement": place}))
            for place in PLACEMENTS
        )
        ratio = after.scales[0] / before.scales[0]
        assert ratio == pytest.approx(after.prefix_weights.sum(axis=0).max(), rel=1e-6)
        assert reach is None or ratio == pytest.approx(reach, rel=1e-3)


@given(st.integers(4, 90), st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_the_meter_charges_what_the_guarantee_says(rounds: int, length: int, seed: int, several: bool) -> None:
    """And no record costs more than the dearest one."""
    generator = np.random.default_rng(seed)
    blocks = BlockSchedule(rounds, length, length, max(math.ceil(rounds / length) - 2, 0))
    sensitivity = LeafSensitivity(4, 1.5)
    counts = generator.integers(0, 4, rounds) if several else np.ones(rounds, np.int64)

    def cost(share: float) -> float:
        return sensitivity.node_privacy_loss(share, 3.0)

    meter, charged = TreeAccountant(blocks, cost), []
    for count in counts.tolist():
        charged.append(meter.next_loss())
        meter.advance(count)
    losses = TreeAccountant(blocks, cost).losses(counts)
    np.testing.assert_allclose(charged, losses, rtol=1e-12, atol=0)
    singles = TreeAccountant(blocks, cost).losses_by_change(counts, np.eye(rounds, dtype=np.int64)[counts > 0])
    worst = np.cumsum(singles, axis=1).max(axis=0, initial=0.0)
    np.testing.assert_allclose(np.cumsum(losses), worst, rtol=1e-9)


def test_what_is_planned_must_fit() -> None:
    blocks, cost, one = BlockSchedule(30, 5, 5, 4), LeafSensitivity(2, 1.0).node_privacy_loss, np.ones(30, np.int64)
    for counts, replaced in ((one[1:], None), (-one, None), (one, 2 * one)):
        with pytest.raises(SpecError, match=r"counts|replaced"):
            compute_guarantee(TreeAccountant(blocks, lambda share: cost(share, 1.0)), 30, counts, replaced)


def test_before_gossip_leaves_a_square_root_of_n_less_noise() -> None:
    """At one epsilon, the decisions' variance is a ninth: 9 learners' noise is averaged. 4000 replicas, so 15 % is 5 sigma."""
    variances = []
    for place in PLACEMENTS:
        exact = {"block_length": 2, "gossip_steps": 1, "momentum": 0.0}
        more = {**exact, "noise_placement": place, "regularization": 1e4}
        run = ran("pd-ftgl", 16, 9, topology={"graph": "complete"}, algorithm=more)
        last = simulated(run, made_up(run.spec), SeededNoise(14), 4000)[-1].decisions_after
        variances.append(float(last.var(axis=1).mean()))
    assert variances[1] / variances[0] == pytest.approx(9.0, rel=0.15)


def test_no_noise_no_promise() -> None:
    for parameters in ({"epsilon": None, "noise_scale": 0}, {"epsilon": math.inf}):
        run = ran("pd-ftgl", algorithm=parameters)
        assert ftgl(run).scales == (0.0,) * 5
        assert run.guarantee(0).cumulative_epsilon[[9, 10]].tolist() == [0.0, math.inf]
        assert run.algorithm.accountant(0).next_loss() == 0.0


def test_a_replay_refuses_what_could_not_be_said() -> None:
    run = ran("pd-ftgl")
    data, state = made_up(run.spec), run.algorithm.init(StateAxes((0, 1, 2, 3, 4), 1))
    mixing, wrong = run.network.mixing(0), Message({"y": np.full((5, 1, 3), 0.5)})
    for t in range(12):
        said, message = run.algorithm.emit(state, SeededNoise(t))
        _, density = run.algorithm.replay(state, message)
        assert np.isfinite(density).all()
        assert np.isfinite(run.algorithm.replay(state, wrong)[1]).all() == (t == 10)
        state = run.algorithm.update(said, StackedMessages(mixing, message), data.stack_round(t))


# ---- parameters and checks -------------------------------------------------------------------------------------------


def test_default_regularization_minimises_the_regret_bound() -> None:
    """Without noise `(G/R) sqrt(6 L T)`, and `sqrt(15 L T) G/R` for PD-OCG; with noise never above the paper's worst case."""
    G, R, T, d = 1.0, 10.0, 150_000, 416
    silent: dict[str, Any] = {"epsilon": None, "noise_scale": 0}
    assert ftgl(letter("pd-ftgl", **silent)).regularization == pytest.approx(G / R * math.sqrt(6 * 67 * T))
    assert ftgl(letter("pd-ocg", **silent)).regularization == pytest.approx(G / R * math.sqrt(15 * 387 * T))
    published = ftgl(letter("pd-ftgl", noise_placement="after_gossip", scale_rule="paper")).regularization
    worst = G / R * math.sqrt(T * (6 * 67 + 13.5 * d * (2 + math.log2(T)) ** 2 / 10))
    noise = 234.90 * math.sqrt(2 * d * 12)
    assert published == pytest.approx(G / R * math.sqrt(T * (6 * 67 + 1.5 * noise)), rel=1e-4)
    assert published < worst
    assert ftgl(letter("pd-ftgl")).regularization < 0.5 * published
    assert ftgl(letter("pd-ftgl", multiplier=0.5, **silent)).regularization == pytest.approx(
        0.5 * G / R * math.sqrt(6 * 67 * T)
    )
    assert ftgl(letter("pd-ftgl", multiplier=0.5, regularization=8.0)).regularization == 4.0


@pytest.mark.parametrize("alpha", [1e-8, 1e-4, 1e-2, 1.0])
def test_default_regularization_of_strongly_convex_losses(alpha: float) -> None:
    """The bound (8) itself, scanned; `alpha L` where that is larger."""
    run = ran("pd-ftgl", 1000, loss={**LOSS, "ridge": alpha}, algorithm={"multiplier": None})
    problem = RegretParameters.from_context(
        RunContext(run.spec.rounds, 3, run.loss, run.spec.decision_set, run.network)
    )
    G, R, L, E = problem.lipschitz, problem.radius, 10, 25.0
    z = np.arange(1, 101)

    def bound(h: float) -> float:
        lagging = 12 * G * L * (G + 2 * alpha * R) / (alpha * z * L + 2 * h)
        return h * R**2 + float(L * (lagging + 3 * G * E / (alpha * (z - 1) * L + 2 * h)).sum())

    h = problem.regularization(L, 12.0, E)
    scan = np.geomspace(alpha * L, 1e4, 4000)
    assert h >= alpha * L
    assert bound(h) <= min(map(bound, scan)) * (1 + (1e-3 if alpha < 1e-6 else 2e-2))


@pytest.mark.parametrize(
    ("code", "text", "changes"),
    [
        ("BLOCK_LENGTH", "block_length must be in 1..horizon=83", {"algorithm": {"block_length": 84}}),
        ("BLOCK_LENGTH", "below half the horizon", {"algorithm": {"block_length": 42}}),
        ("BLOCK_LENGTH", "block_length to", {"rounds": 120, "algorithm": {"block_length": None, "gossip_steps": None}}),
        ("GOSSIP_STEPS", "gossip_steps must not exceed block_length=10", {"algorithm": {"gossip_steps": 11}}),
        ("NOISE", "got neither", {"algorithm": {"epsilon": None}}),
        ("NOISE", "got both", {"algorithm": {"noise_scale": 1.0}}),
        ("NOISE_SCALE", "above 0 for all", {"algorithm": {"epsilon": None, "noise_scale": [0, 1, 1, 1, 1]}}),
        ("NOISE_SCALE", "finite", {"algorithm": {"epsilon": None, "noise_scale": -1.0}}),
        ("REGULARIZATION", "a longer block", {"rounds": 2**53}),
        (
            "GOSSIP_STEPS",
            "at most 1048576, got 4503599627370495",
            {"rounds": 2**53, "algorithm": {"block_length": 2**52 - 1, "gossip_steps": 2**52 - 1}},
        ),
        ("EPSILON", "above 0", {"algorithm": {"epsilon": 0.0}}),
        ("EPSILON_UNIFORM", "infinite for all", {"algorithm": {"epsilon": [math.inf, 1, 1, 1, 1]}}),
        (
            "EPSILON_UNIFORM",
            "one number for all",
            {"algorithm": {"epsilon": [2, 1, 1, 1, 1], "noise_placement": "after_gossip"}},
        ),
        ("ORIGIN", "contain the origin", {"decision_set": {"kind": "box", "low": 0.5, "high": 1.0}}),
        ("P_EIGENVALUE", "negative eigenvalue", {"algorithm": {"lazy": False}}),
        (
            "P_DISCONNECTED",
            "lazy to true",
            {"learners": 2, "algorithm": {"lazy": False}, "topology": {"weights": {"kind": "constant", "value": 1.0}}},
        ),
        ("P_NEGATIVE", "doubly stochastic", {"topology": {"weights": {"kind": "constant", "value": 3.0}}}),
    ],
)
def test_what_is_refused(code: str, text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(AssumptionViolated, match=text) as failed:
        ran("pd-ftgl", **changes)
    assert failed.value.code == code


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_a_default_regularization_beyond_float64_is_refused(alpha: float) -> None:
    """The bisection would never end."""
    with pytest.raises(AssumptionViolated, match="set regularization") as failed:
        RegretParameters(rounds=83, radius=2.0, lipschitz=1.0, alpha=alpha).regularization(10, 12.0, math.inf)
    assert failed.value.code == "REGULARIZATION"


@pytest.mark.parametrize("private", [{"epsilon": 1.0}, {"noise_scale": 1.0}, {"noise_scale": 0.0}], ids=str)
def test_gradients_without_bound_are_refused(private: dict[str, float]) -> None:
    class Unbounded(LogisticLoss):
        def gradient_bound(self, radius: float) -> float:
            return math.inf

        def gradient_change(self, radius: float) -> float:
            return math.inf

    run = ran("pd-ftgl")
    setting = RunContext(83, 3, Unbounded(feature_bound=2.0, ridge=0.1), ftgl(run).decision_set, run.network)
    with pytest.raises(AssumptionViolated, match=r"loss\.clip_norm") as failed:
        PdFtglSpec.model_validate({"name": "pd-ftgl", "block_length": 10, **private}).build(setting)
    assert failed.value.code == "GRADIENT_BOUND"
    silent = {"name": "pd-ftgl", "block_length": 10, "noise_scale": 0.0, "regularization": 1.0}
    assert PdFtglSpec.model_validate(silent).build(setting)[0].regularization == 1.0


@pytest.mark.parametrize(
    "parameter", [{"momentum": 1.0}, {"momentum": -0.1}, {"regularization": 0}, {"gossip_steps": 0}]
)
def test_what_no_run_may_have(parameter: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(parameter))):
        ran("pd-ftgl", algorithm=parameter)


def test_an_epsilon_below_the_lattice_is_refused() -> None:
    with pytest.raises(SpecError, match="slack"):
        ran("pd-ftgl", algorithm={"epsilon": 1e-12})


def test_what_the_user_is_told() -> None:
    def codes(name: str, rounds: int = 83, **algorithm: Any) -> list[str]:
        return [finding.code for finding in ran(name, rounds, algorithm=algorithm).warnings]

    assert codes("pd-ftgl", 400, block_length=100, gossip_steps=60) == []
    assert codes("pd-ftgl") == ["GOSSIP_SHORT"]
    assert codes("pd-ftgl", 400, block_length=100, gossip_steps=60, scale_rule="paper") == ["PAPER_SCALE"]
    assert codes("pd-ftgl", noise_placement="after_gossip") == ["GOSSIP_SHORT", "WIRE_EXPOSED"]
    assert codes("pd-ocg", 25) == ["NO_MOVE", "GOSSIP_SHORT"]
    run = ran("pd-ocg", 25)
    assert not simulated(run, made_up(run.spec), SeededNoise(0))[-1].decisions_after.any()
    assert run.guarantee(0).epsilon() == 0.0


def test_plain_gossip_over_the_complete_graph_agrees_at_once() -> None:
    run = ran("pd-ftgl", topology={"graph": "complete"}, algorithm={"momentum": 0.0, "gossip_steps": 1})
    assert isinstance(run.algorithm, PdFtgl)
    after = simulated(run, made_up(run.spec), SeededNoise(13))[-1].decisions_after
    np.testing.assert_allclose(after - after.mean(axis=0), 0.0, atol=1e-12)
    assert np.abs(after).max() > 0.01


def test_the_first_rounds_alone_cost_what_they_cost_in_the_run() -> None:
    run = ran("pd-ftgl", 83)
    whole = run.algorithm.accountant(0).losses(np.ones(83, np.int64))
    assert np.count_nonzero(whole) == 3
    for rounds in (0, 1, 10, 11, 25, 80, 81, 82):
        part = run.algorithm.accountant(0).losses(np.ones(rounds, np.int64))
        assert part.tolist() == whole[:rounds].tolist()
