"""Gossip gradient descent: the published updates, convergence, and what its messages cost against what they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from sottovoce_core.algorithms.gradient_descent import accounting as privacy
from sottovoce_core.algorithms.gradient_descent.accounting import DescentAccountant, LearnerUpdate
from sottovoce_core.algorithms.gradient_descent.algorithm import GossipDescent
from sottovoce_core.algorithms.interface import LocalMessages, Message, StackedMessages, StateAxes
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.losses import mean_gradient
from sottovoce_core.noise import NoiseSource, RecordedNoise, Recorder, SeededNoise, no_noise
from sottovoce_core.privacy.guarantee import Regularity
from sottovoce_core.runs.replay import PrivacyLosses, replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import SimulatedRound, simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import build_spec_json_schema, dump_spec, parse_spec
from tests.examples import made_up

LOGISTIC = {"kind": "logistic", "ridge": 0.05, "feature_bound": 1.5}
CLIPPED = {"kind": "ridge", "ridge": 0.0, "feature_bound": 2.0, "label_bound": 3.0, "clip_norm": 0.7}
CONSTANT = {"kind": "power", "sigma": 0.8, "varsigma": 0.0}
SILENT = {"kind": "none"}

FORMS: list[dict[str, Any]] = [
    {"name": "dsgd"},
    {"name": "dsgd", "form": "combine_then_adapt"},
    {"name": "dsgd", "form": "consensus"},
    {"name": "dola", "noise": CONSTANT},
    {"name": "dpdola", "gradient_at": "own"},
    {"name": "pdop", "step": {"kind": "geometric", "ratio": 0.8}},
    {"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": [0.5, 1.0, 2.0, 1.0]}},
    {"name": "dpsr", "noise": CONSTANT},
]
IDS = ["atc", "cta", "consensus", "dola", "dpdola-own", "pdop", "pd-ogd", "dpsr"]
every_form = pytest.mark.parametrize("form", FORMS, ids=IDS)

WIDE = {"kind": "l2_ball", "radius": 1e3}
"""No cap by its diameter."""
STAR = {"graph": "star", "weights": "in_degree"}


def run_of(form: dict[str, Any], rounds: int = 20, learners: int = 4, n_features: int = 3, **sections: Any) -> Run:
    base = {"decision_set": {"kind": "l2_ball", "radius": 2.0}, "loss": LOGISTIC, "durability": "process"}
    return build_run(
        parse_spec({"rounds": rounds, "learners": learners, "algorithm": form, **base, **sections}, allow_imports=True),
        n_features,
    )


def descent(run: Run) -> GossipDescent:
    algorithm: Any = run.algorithm
    found: GossipDescent = algorithm if isinstance(algorithm, GossipDescent) else algorithm.descent
    return found


def simulated(run: Run, data: PlacedData, noise: NoiseSource, replicas: int = 1) -> list[SimulatedRound]:
    return list(simulate_rounds(run, data, noise, replicas))


def transcript_of(steps: Sequence[SimulatedRound]) -> Transcript:
    return Transcript.from_rounds(step.message for step in steps)


def gradient(run: Run, batch: Batch, at: FloatArray) -> FloatArray:
    """The mean gradient of a round's records, ridge included."""
    records = Batch(*run.loss.enforce_bounds(batch.features, batch.labels))
    return mean_gradient(run.loss, at, records) + run.loss.ridge * at


def constants(**changes: Any) -> Regularity:
    chosen = {"gradient_change": 2.0, "smoothness": 0.25, "clip_norm": 1.0, "ridge": 0.1, "diameter": 50.0}
    return Regularity(**{**chosen, "is_convex": True, "is_convex_when_clipped": True, **changes})


# ---- the update ------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("topology", [{"graph": "path"}, STAR], ids=["path", "star"])
def test_a_round_is_the_published_update(form: dict[str, Any], topology: dict[str, Any]) -> None:
    """Term by term, for every learner, from the messages and the noise; the lattice moves a state by 2^-40 scales."""
    run = run_of(form, rounds=8, topology=topology)
    data, recorder = made_up(run.spec, batch=2), Recorder(SeededNoise(1))
    weights, algorithm = run.network.mixing(0).matrix, descent(run)
    project = algorithm.decision_set.project
    dsgd, consensus = form["name"] == "dsgd", form.get("form") == "consensus"
    x, e = np.zeros((4, 3)), np.eye(4)
    for t, step in enumerate(simulated(run, data, recorder)):
        noise = recorder.noise_by_field["y"][t][:, 0]
        said = x + noise
        np.testing.assert_allclose(step.message["y"][:, 0], said, rtol=0, atol=1e-11)
        nxt = np.empty_like(x)
        for i in range(4):
            alpha = algorithm.step[i](t)
            if form["name"] == "dpsr":
                np.testing.assert_allclose(step.message["e"][i, 0], e[i], rtol=0, atol=1e-14)
                alpha = (t + 1) ** -0.5 / e[i, i]
            b = weights[i] @ said - (weights[i, i] * noise[i] if dsgd else 0.0)
            own = consensus or form["name"] == "dpsr" or form.get("gradient_at") == "own"
            nxt[i] = project(b - alpha * gradient(run, data.learners[i].batch(t), x[i] if own else b))
            plays_b = (dsgd and "form" not in form) or form["name"] == "pd-ogd"
            np.testing.assert_allclose(
                step.decisions_after[i, 0], project(b) if plays_b else nxt[i], rtol=0, atol=1e-11
            )
        x, e = nxt, weights @ e


def test_adapt_then_combine_and_combine_then_adapt_say_the_same() -> None:
    runs = [run_of({"name": "dsgd", "form": form}) for form in ("adapt_then_combine", "combine_then_adapt")]
    data = made_up(runs[0].spec)
    first, second = (simulated(run, data, SeededNoise(2)) for run in runs)
    for one, two in zip(first, second, strict=True):
        assert (one.message["y"] == two.message["y"]).all()
    assert not np.allclose(first[-1].decisions_after, second[-1].decisions_after)


def test_d_ogd_is_its_update_and_says_its_clean_state() -> None:
    run = run_of({"name": "d-ogd"}, rounds=6)
    data, weights = made_up(run.spec), run.network.mixing(0).matrix
    scale = 2.0 / (1.5 + 0.05 * 2.0)
    for step in simulated(run, data, SeededNoise(3)):
        x = step.decisions_before[:, 0]
        assert (step.message["y"][:, 0] == x).all()
        for i in range(4):
            moved = weights[i] @ x - scale / math.sqrt(step.t + 1) * gradient(run, data.learners[i].batch(step.t), x[i])
            expected = moved * min(1.0, 2.0 / np.linalg.norm(moved))
            np.testing.assert_allclose(step.decisions_after[i, 0], expected, rtol=1e-12, atol=1e-13)


def test_the_first_message_knows_no_data_and_a_record_shows_in_the_next_one() -> None:
    run = run_of({"name": "dola"})
    data = made_up(run.spec)
    other = data.with_learner(0, data.learners[0].with_use(3, np.ones(3), 1.0))
    one, two = (simulated(run, records, SeededNoise(4)) for records in (data, other))
    differ = [bool((a.message["y"][0] != b.message["y"][0]).any()) for a, b in zip(one, two, strict=True)]
    assert differ == [False] * 4 + [True] * 16


# ---- convergence without noise ---------------------------------------------------------------------------------------


def optimum(run: Run, data: PlacedData, shares: Sequence[float]) -> FloatArray:
    """Minimiser of the mean loss over learners, each weighed by its share."""
    features = np.concatenate([run.loss.enforce_bounds(each.features, each.labels)[0] for each in data.learners])
    labels = np.concatenate([each.labels for each in data.learners])
    weights = np.repeat(shares, len(data.learners[0].labels))
    total = weights.sum() * run.loss.ridge
    model = LogisticRegression(C=1 / total, fit_intercept=False, tol=1e-12, max_iter=10_000)
    found: FloatArray = model.fit(features, labels, sample_weight=weights).coef_[0]
    return found


def skewed(run: Run) -> PlacedData:
    """Six records a learner, all of them in every round, with labels that lean another way at every learner."""
    data = made_up(run.spec, batch=6, records=6)
    for i, each in enumerate(data.learners):
        labels = (each.features[:, i % 3] > 0).astype(np.float64)
        data = data.with_learner(i, replace(each, labels=labels))
    return data


HARMONIC = {"kind": "harmonic", "shift": 10.0}
STRONG = {"kind": "logistic", "ridge": 0.3, "feature_bound": 3.0}


@pytest.mark.parametrize("form", ["adapt_then_combine", "combine_then_adapt", "consensus"])
def test_all_learners_come_to_the_common_optimum_without_noise(form: str) -> None:
    run = run_of({"name": "dsgd", "form": form, "step": HARMONIC, "noise": SILENT}, rounds=1500, loss=STRONG)
    data = skewed(run)
    steps, best = simulated(run, data, no_noise), optimum(run, data, [1.0] * 4)
    early, late = (float(np.abs(steps[t].decisions_after[:, 0] - best).max()) for t in (149, 1499))
    assert late < 0.015 * np.linalg.norm(best)
    assert late < 0.15 * early  # of the order of the step size


def test_rescaling_leads_from_the_perron_weighted_optimum_to_the_true_one() -> None:
    """A star whose rows alone sum to one: the centre's share is 4/10, that of a leaf 2/10."""
    loss, rounds = STRONG, 1500
    plain = run_of({"name": "d-ogd", "step": HARMONIC}, rounds, topology=STAR, loss=loss)
    rescaled = run_of({"name": "dpsr", "step": HARMONIC, "noise": SILENT}, rounds, topology=STAR, loss=loss)
    data = skewed(plain)
    weighted, true = optimum(plain, data, [4.0, 2.0, 2.0, 2.0]), optimum(plain, data, [1.0] * 4)
    size, apart = np.linalg.norm(true), np.linalg.norm(weighted - true)
    without, with_it = (simulated(run, data, no_noise)[-1].decisions_after[:, 0] for run in (plain, rescaled))

    assert apart > 0.08 * size
    assert np.linalg.norm(without - weighted, axis=1).max() < 0.2 * apart
    assert np.linalg.norm(with_it - true, axis=1).max() < 0.2 * apart
    assert [finding.code for finding in plain.warnings] == ["NOT_DOUBLY_STOCHASTIC"] and not rescaled.warnings


def test_the_regret_of_d_ogd_grows_like_a_root() -> None:
    """Regret of the worst learner against the network's loss over the square root of T, for T = 250 and 4000."""
    run = run_of({"name": "d-ogd"}, rounds=4000, loss={**LOGISTIC, "ridge": 0.0})
    data = made_up(run.spec)
    played = np.stack([step.decisions_before[:, 0] for step in simulated(run, data, no_noise)])
    features = np.stack([run.loss.enforce_bounds(each.features, each.labels)[0] for each in data.learners])  # (4, T, 3)
    labels = np.stack([each.labels for each in data.learners])

    def loss(scores: FloatArray, of: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, scores) - of * scores

    regrets = []
    for rounds in (250, 4000):
        past, seen = features[:, :rounds], labels[:, :rounds]
        scores = np.einsum("tid,jtd->ijt", played[:rounds], past)
        model = LogisticRegression(C=1e6, fit_intercept=False).fit(past.reshape(-1, 3), seen.ravel())
        assert np.linalg.norm(model.coef_) < 2.0
        best = loss(past @ model.coef_[0], seen).sum()
        regrets.append(float(loss(scores, seen).sum(axis=(1, 2)).max() - best))
    assert 0 < regrets[1] / math.sqrt(4000) < 1.3 * regrets[0] / math.sqrt(250)
    assert regrets[1] / 4000 < 0.4 * regrets[0] / 250


# ---- one machine, driven three ways ----------------------------------------------------------------------------------


@every_form
def test_a_learner_alone_equals_its_row_of_the_simulator(form: dict[str, Any]) -> None:
    run = run_of(form, rounds=25)
    data, recorder = made_up(run.spec, batch=2), Recorder(SeededNoise(5))
    together, drawn, mixing = (
        simulated(run, data, recorder),
        np.stack(recorder.noise_by_field["y"]),
        run.network.mixing(0),
    )
    states = [run.algorithm.init(StateAxes(i)) for i in range(4)]
    sources = [RecordedNoise({"y": drawn[:, i, 0]}) for i in range(4)]
    for step in together:
        messages: dict[int, Message] = {}
        for i in range(4):
            states[i], messages[i] = run.algorithm.emit(states[i], sources[i])
            assert {name: value.shape for name, value in messages[i].fields.items()} == run.algorithm.field_shapes()
        for i in range(4):
            heard = LocalMessages(mixing.in_neighbour_weights(i), messages, float(mixing.own_weights[i]))
            states[i] = run.algorithm.update(states[i], heard, data.learners[i].batch(step.t))
            decided = run.algorithm.decision(states[i])
            np.testing.assert_allclose(step.message["y"][i, 0], messages[i]["y"], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(step.decisions_after[i, 0], decided, rtol=1e-12, atol=1e-12)


@every_form
def test_every_replica_is_a_run_of_its_own(form: dict[str, Any]) -> None:
    run = run_of(form, rounds=12)
    data, recorder = made_up(run.spec), Recorder(SeededNoise(6))
    together, drawn = simulated(run, data, recorder, replicas=3), np.stack(recorder.noise_by_field["y"])
    for k in range(3):
        alone = simulated(run, data, RecordedNoise({"y": drawn[:, :, k : k + 1]}))
        for many, one in zip(together, alone, strict=True):
            np.testing.assert_allclose(many.message["y"][:, k], one.message["y"][:, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(many.decisions_after[:, k], one.decisions_after[:, 0], rtol=1e-12, atol=1e-12)


@every_form
def test_a_state_is_a_value(form: dict[str, Any]) -> None:
    run = run_of(form, rounds=4)
    data, mixing = made_up(run.spec), run.network.mixing(0)
    state = run.algorithm.init(StateAxes((0, 1, 2, 3), 1))
    for t in range(4):
        before = run.algorithm.decision(state).copy()
        spoken, message = run.algorithm.emit(state, SeededNoise(t))
        heard = StackedMessages(mixing, message)
        one, two = (run.algorithm.update(spoken, heard, data.stack_round(t)) for _ in range(2))
        assert (run.algorithm.decision(state) == before).all()
        assert (run.algorithm.decision(one) == run.algorithm.decision(two)).all()
        state = one


def test_a_lie_about_shares_cannot_make_a_step_larger_than_what_is_charged() -> None:
    run = run_of({"name": "dpsr", "noise": SILENT}, rounds=6, topology=STAR)
    own, mixing = made_up(run.spec).learners[1], run.network.mixing(0)

    def last(e: float) -> FloatArray:
        state = before = run.algorithm.init(StateAxes(1))
        for t in range(6):
            state, message = run.algorithm.emit(state, no_noise)
            lie = Message({"y": np.zeros(3), "e": message["e"] * e})
            heard = LocalMessages(mixing.in_neighbour_weights(1), {0: lie}, float(mixing.own_weights[1]))
            before, state = state, run.algorithm.update(state, heard, own.batch(t))
        pull = mixing.own_weights[1] * before.descent.x
        moved = np.linalg.norm(run.algorithm.decision(state) - pull)
        slope = np.linalg.norm(gradient(run, own.batch(5), before.descent.x))
        return np.array([moved / slope, descent(run).step[1](5)])

    taken, charged = last(-1.0)
    assert taken == pytest.approx(charged)
    assert last(100.0)[0] < 0.1 * charged


# ---- the published formulas ------------------------------------------------------------------------------------------


def test_dola_costs_one_record_its_worst_message() -> None:
    """`max_k sqrt(n) alpha_{k+1} C / rho_{k+1}`; the paper adds all of them up."""
    run = run_of(
        {"name": "dola", "step": {"kind": "power", "scale": 2.0, "exponent": 0.5}}, rounds=30, decision_set=WIDE
    )
    promise = run.guarantee(0)
    each = np.array([math.sqrt(3) * 2.0 / math.sqrt(k + 1) * 3.0 / (0.35 / (k + 2)) for k in range(29)])
    np.testing.assert_allclose(promise.cumulative_epsilon, np.append(0.0, np.maximum.accumulate(each)), rtol=1e-10)
    np.testing.assert_allclose(promise.paper_epsilon, np.append(0.0, np.cumsum(each)), rtol=1e-12)
    assert [finding.code for finding in run.warnings] == ["NOISE_FADES"]


def test_pdop_protects_a_whole_objective_by_its_closed_form() -> None:
    """`2 G sqrt(n) c / (d (p - q))` for c q^t and d p^t; one record of it costs its worst message only."""
    noise, step = {"kind": "geometric", "scale": 0.5, "ratio": 0.9}, {"kind": "geometric", "scale": 1.5, "ratio": 0.6}
    run = run_of({"name": "pdop", "noise": noise, "step": step}, rounds=150, decision_set=WIDE)
    promise = run.guarantee(0)
    limit = 2 * 1.5 * math.sqrt(3) * 1.5 / (0.5 * (0.9 - 0.6))
    assert promise.epsilon() == pytest.approx(limit, rel=1e-9)
    assert promise.paper_epsilon[-1] == pytest.approx(limit, rel=1e-12)
    by_record = run_of(
        {"name": "pdop", "noise": noise, "step": step, "adjacency": "record_use"}, rounds=150, decision_set=WIDE
    )
    assert by_record.guarantee(0).epsilon() == pytest.approx(limit * (1 - 0.6 / 0.9), rel=1e-9)


CONVERGENT = [
    {"name": "dola", "noise": {"kind": "power", "sigma": 0.4, "varsigma": 0.1}},
    {"name": "dola", "step": {"kind": "power", "scale": 2.0, "exponent": 1.0}},
    {"name": "dola", "step": {"kind": "power", "exponent": 0.6}, "noise": {"kind": "power", "varsigma": -0.5}},
    {"name": "dpdola", "step": {"kind": "harmonic", "mu": 0.5, "shift": 3.0}},
    {"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 2.0}},
    {"name": "pdop", "adjacency": "record_use"},
    {"name": "pdop"},
]
"""Forms in which a record moves one message, with steps that fall at least as fast as the noise."""


@pytest.mark.parametrize("form", CONVERGENT)
@pytest.mark.parametrize("batch", [1, 4])
def test_infinitely_many_rounds_cost_what_long_runs_come_near(form: dict[str, Any], batch: int) -> None:
    """The bound of a short run is above the cost of a long one, with the same or larger batches, and not far."""
    short, long = (run_of(form, rounds=rounds, decision_set=WIDE) for rounds in (5, 900))
    bound = short.guarantee(0, np.full(5, batch)).infinite_horizon_epsilon
    assert 0.0 < long.guarantee(0, np.full(900, batch)).epsilon() <= bound * (1 + 1e-9)
    assert long.guarantee(0, batch + np.arange(900)).epsilon() <= bound * (1 + 1e-9)
    assert bound == pytest.approx(long.guarantee(0, np.full(900, batch)).epsilon(), rel=1e-6)


def test_a_smaller_batch_of_the_plan_may_come_again() -> None:
    run = run_of({"name": "dpdola", "step": {"kind": "power", "exponent": 0.0}}, rounds=4, decision_set=WIDE)
    bound = run.guarantee(0, np.array([4, 4, 4, 2])).infinite_horizon_epsilon
    assert bound == pytest.approx(run.guarantee(0, np.array([2, 4, 4, 4])).epsilon())
    assert run.guarantee(0, np.zeros(4, np.int64)).infinite_horizon_epsilon == 0.0


def test_one_replaced_record_costs_its_message_also_after_the_plan() -> None:
    run, counts = run_of({"name": "dpdola"}, rounds=4, decision_set=WIDE), np.ones(4, np.int64)
    longer = run_of({"name": "dpdola"}, rounds=5, decision_set=WIDE).guarantee(
        0, np.ones(5, np.int64), np.array([0, 0, 0, 1, 0])
    )
    promise = run.guarantee(0, counts, np.array([0, 0, 0, 1]))
    assert promise.epsilon() == 0.0 < promise.infinite_horizon_epsilon == pytest.approx(longer.epsilon())
    assert run.guarantee(0, counts, np.array([0, 1, 0, 1])).infinite_horizon_epsilon == math.inf


@pytest.mark.parametrize(
    "form",
    [
        {"name": "dola"},
        {"name": "dpdola", "gradient_at": "own"},
        {"name": "dsgd"},
        {"name": "dpsr"},
        {"name": "d-ogd"},
        {"name": "dola", "step": {"kind": "harmonic", "mu": 0.5, "shift": 3.0}},
        {"name": "pdop", "step": {"kind": "geometric", "ratio": 0.99}},
        {"name": "pdop", "step": {"kind": "geometric", "ratio": 0.98}},
    ],
)
def test_infinitely_many_rounds_have_no_bound(form: dict[str, Any]) -> None:
    assert run_of(form, rounds=5, decision_set=WIDE).guarantee(0).infinite_horizon_epsilon == math.inf


def test_pd_ogd_costs_epsilon_in_all_and_the_t_fold_scale_a_t_th_of_it() -> None:
    once, fold = (
        run_of({"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 2.0, "charged": charged}}, rounds=50)
        for charged in ("once", "every_round")
    )
    promise, cautious = once.guarantee(1), fold.guarantee(1)
    assert promise.epsilon() == pytest.approx(2.0, rel=1e-9) and promise.epsilon() <= 2.0
    np.testing.assert_allclose(promise.paper_epsilon, 2.0 * np.arange(50), rtol=1e-9)
    assert cautious.epsilon() == pytest.approx(2.0 / 50, rel=1e-9)
    np.testing.assert_allclose(cautious.paper_epsilon, 2.0 / 50 * np.arange(50), rtol=1e-9)
    for t in range(50):
        assert fold.algorithm.noise_scale(1, t) == pytest.approx(50 * once.algorithm.noise_scale(1, t), rel=1e-9)
    eta, bound = 2.0 / (1.5 + 0.05 * 2.0), 1.5
    assert once.algorithm.noise_scale(1, 5) == pytest.approx(
        2 * eta / math.sqrt(5) * bound * math.sqrt(3) / 2.0, rel=1e-9
    )


def test_dsgd_follows_the_recursion_of_every_record() -> None:
    """`Z_{t+1} = q_t a Z_t` from `alpha_k C`, q = max(|1 - alpha r|, |1 - alpha (r + L)|) or 1 + alpha L, the worst k outside."""
    run = run_of({"name": "dsgd"}, rounds=40, loss={**LOGISTIC, "ridge": 0.0})
    alpha = [(t + 1.0) ** -0.77 for t in range(40)]
    rho = [(t + 1.0) ** 0.1 / math.sqrt(2) for t in range(40)]
    own = run.network.mixing(0).own_weights[0]
    totals, messages = np.zeros((39, 40)), np.zeros((39, 40))
    for k in range(39):
        z = alpha[k] * 3.0
        for t in range(k + 1, 40):
            messages[k, t] = math.sqrt(3) * min(z, 4.0) / rho[t]
            grown = own * min(z, 4.0)
            z = min(max(1.0, abs(1 - alpha[t] * 0.5625)) * grown, grown + alpha[t] * 3.0)
        totals[k] = np.cumsum(messages[k])
    promise = run.guarantee(0)
    np.testing.assert_allclose(
        promise.cumulative_epsilon, np.maximum.accumulate(totals.max(axis=0)), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(promise.paper_epsilon, np.cumsum(messages.max(axis=0)), rtol=1e-12)


def test_without_noise_nothing_is_promised() -> None:
    for form in ({"name": "d-ogd"}, {"name": "dola", "noise": {"kind": "power", "sigma": 0.0}}):
        promise = run_of(form).guarantee(0)
        assert (
            promise.round_losses[0] == 0.0
            and (promise.round_losses[1:] == np.inf).all()
            and promise.epsilon() == np.inf
        )


# ---- the running meter -----------------------------------------------------------------------------------------------


def brute(known: Regularity, update: LearnerUpdate, counts: Sequence[int]) -> FloatArray:
    """`(records, rounds)` cumulative loss of every round's record, each followed alone."""
    totals = np.zeros((len(counts), len(counts)))
    for k, present in enumerate(counts):
        meter = DescentAccountant(known, update)
        losses = []
        for t, count in enumerate(counts):
            losses.append(meter.next_loss())
            meter.advance(count, 1 if t == k and present else 0)
        totals[k] = np.cumsum(losses)
    return totals


@given(
    st.floats(0.05, 3.0), st.floats(0, 1.2), st.floats(-1, 0.5), st.floats(-0.3, 1.0), st.booleans(),
    st.sampled_from([0.25, 3.0, math.inf]), st.lists(st.integers(0, 3), min_size=2, max_size=25),
)  # fmt: skip
@settings(max_examples=60)
def test_the_meter_covers_every_record_and_no_more(
    step: float, fade: float, growth: float, own: float, at_mix: bool, smoothness: float, counts: list[int]
) -> None:
    known = constants(smoothness=smoothness)
    update = LearnerUpdate(
        3, lambda t: step * (t + 1) ** -fade, lambda t: 0.7 * (t + 1) ** growth, lambda t: own, at_mix
    )
    meter = DescentAccountant(known, update)
    charged = []
    for count in counts:
        charged.append(meter.next_loss())
        meter.advance(count)
    worst = np.maximum.accumulate(brute(known, update, counts).max(axis=0))
    np.testing.assert_allclose(np.cumsum(charged), worst, rtol=1e-9, atol=1e-12)
    assert min(charged) >= 0.0


def test_a_crowded_meter_charges_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    update = LearnerUpdate(3, lambda t: 0.5, lambda t: 1.0, lambda t: 0.5, is_gradient_at_mix=True)
    exact = brute(constants(), update, [1] * 60).max(axis=0)
    monkeypatch.setattr(privacy, "MAX_FOLLOWED_RECORDS", 12)
    losses = DescentAccountant(constants(), update).losses(np.ones(60, np.int64))
    assert (np.cumsum(losses) >= exact * (1 - 1e-12)).all()
    assert losses.sum() == pytest.approx(exact[-1], rel=0.01)


def test_replacing_several_records_never_costs_more_than_each_alone() -> None:
    update = LearnerUpdate(3, lambda t: 0.5 / math.sqrt(t + 1), lambda t: 1.0, lambda t: 0.4, is_gradient_at_mix=False)
    replaced = [2, 0, 1, 0, 3, 0, 0, 1, 0, 0]
    (together,) = DescentAccountant(constants(), update).losses_by_change(np.full(10, 3), np.array([replaced]))
    alone = brute(constants(), update, [3] * 10)
    assert alone.max() < together.sum() <= np.dot(replaced, alone[:, -1]) * (1 + 1e-9)


@every_form
def test_the_learners_meter_adds_up_to_the_guarantee(form: dict[str, Any]) -> None:
    run = run_of(form, rounds=15)
    for counts in (None, np.array([2, 0, 1] * 5)):
        meter, spent = run.algorithm.accountant(2), []
        for t in range(15):
            spent.append(meter.next_loss())
            meter.advance(1 if counts is None else int(counts[t]))
        assert spent == run.guarantee(2, counts).round_losses.tolist()
        assert sum(spent) > 0.0


def test_geometric_noise_gives_up_only_where_it_says_so() -> None:
    assert descent(run_of({"name": "pdop"}, rounds=4)).noise[0](3) == pytest.approx(0.5 * 0.98**3)
    with pytest.raises(AssumptionViolated) as caught:
        run_of({"name": "pdop"}, rounds=40_000)
    assert caught.value.code == "NOISE_SCALE"


# ---- replay ----------------------------------------------------------------------------------------------------------


def within(losses: PrivacyLosses, claim: FloatArray) -> None:
    worst = np.cumsum(losses.max_losses, axis=0)
    bound = claim[:, None, None] * (1 + 1e-9) + 1e-9
    assert (np.abs(losses.realised_losses) <= losses.max_losses * (1 + 1e-9) + 1e-9).all()
    assert (np.abs(np.cumsum(losses.realised_losses, axis=0)) <= bound).all()
    assert (worst <= bound).all()


@every_form
@pytest.mark.parametrize("loss", [LOGISTIC, CLIPPED], ids=["logistic", "clipped"])
@pytest.mark.parametrize("topology", [{"graph": "ring"}, STAR], ids=["ring", "star"])
def test_no_transcript_shows_more_of_a_record_than_is_claimed(
    form: dict[str, Any], loss: dict[str, Any], topology: dict[str, Any]
) -> None:
    run = run_of(
        {**form, **({"adjacency": "record_use"} if form["name"] == "pdop" else {})}, loss=loss, topology=topology
    )
    generator = np.random.default_rng(7)
    for batch, learner in product((1, 2), (0, 2)):
        data = made_up(run.spec, batch=batch, seed=batch)
        steps, own = simulated(run, data, SeededNoise(batch), 3), data.learners[learner]
        positions = generator.integers(0, len(own.order), 12)
        worlds = [own.with_use(int(k), 3 * generator.normal(size=3), float(generator.integers(2))) for k in positions]
        losses = replay(run, transcript_of(steps), learner, [own, *worlds])
        within(losses, run.guarantee(learner, np.diff(own.offsets)).cumulative_epsilon)
        assert losses.supremum.max() > 0.0


@every_form
def test_no_transcript_shows_more_of_a_reused_record_than_is_claimed(form: dict[str, Any]) -> None:
    run = run_of(form)
    data = made_up(run.spec, batch=2, records=10)
    own, generator = data.learners[0], np.random.default_rng(8)
    replaced = np.array([int((own.rows(t) == 3).sum()) for t in range(20)])
    worlds = [own, *(own.with_record(3, 3 * generator.normal(size=3), 1.0) for _ in range(6))]
    losses = replay(run, transcript_of(simulated(run, data, SeededNoise(9), 3)), 0, worlds)
    promise = run.guarantee(0, np.diff(own.offsets), replaced)

    assert replaced.sum() == 4 and promise.adjacency_description.startswith("one use of each of 4 records ")
    within(losses, promise.cumulative_epsilon)
    assert losses.supremum.max() > 0.0


def test_a_record_of_dola_shows_in_one_message_and_reaches_most_of_the_claim() -> None:
    """One feature, the two most different records: at b the slopes are s(b) and s(b) - 1, so C = 2 is half reached."""
    run = run_of({"name": "dola", "noise": CONSTANT}, rounds=6, n_features=1, loss={**LOGISTIC, "feature_bound": 1.0})
    data = made_up(run.spec, 1)
    own = LearnerData(np.ones((6, 1)), np.zeros(6), data.learners[0].order, data.learners[0].offsets)
    data = data.with_learner(0, own)
    said = transcript_of(simulated(run, data, SeededNoise(10)))
    losses = replay(run, said, 0, [own, own.with_use(0, np.ones(1), 1.0)])
    shown = losses.max_losses[:, 0, 0]
    assert (shown[[0, 2, 3, 4, 5]] == 0.0).all()
    assert shown[1] == pytest.approx(run.guarantee(0).epsilon() / 2, rel=1e-9)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[7]], ids=["atc", "dpdola-own", "dpsr"])
def test_the_realised_loss_is_a_log_likelihood_ratio(form: dict[str, Any]) -> None:
    """The mean of `exp(-loss)` over 80,000 transcripts is 1, six standard errors: failure probability below 1e-8.

    The mean of the loss, about half its variance, is thirteen of its own: below six of them as rarely.
    """
    quiet = {"kind": "power", "sigma": 8.0, "varsigma": 0.0}
    run = run_of({**form, "noise": quiet}, rounds=5)
    data = made_up(run.spec, seed=3)
    own = data.learners[0]
    other = own.with_record(0, own.features[0], 1.0 - own.labels[0])
    said = transcript_of(simulated(run, data, SeededNoise(11), 80_000))
    losses = replay(run, said, 0, [own, other]).total[0]
    ratios, error = np.exp(-losses), np.exp(-losses).std() / math.sqrt(80_000)
    assert 1e-4 < error < 0.05
    assert abs(ratios.mean() - 1.0) < 6 * error
    assert losses.mean() > 6 * losses.std() / math.sqrt(80_000)


# ---- checks ----------------------------------------------------------------------------------------------------------

SQUARED = {"kind": "ridge", "ridge": 0.0}


@pytest.mark.parametrize(
    ("form", "sections", "code"),
    [
        ({"name": "dola"}, {"loss": SQUARED}, "GRAD_CHANGE"),
        ({"name": "pd-ogd", "step": {"kind": "power", "scale": 1.0}}, {"loss": SQUARED}, "GRAD_CHANGE"),
        ({"name": "pd-ogd"}, {"loss": SQUARED}, "STEP_SCALE"),
        ({"name": "dsgd", "step": HARMONIC}, {"loss": {**LOGISTIC, "ridge": 0.0}}, "STEP_MU"),
        ({"name": "dsgd", "noise": {"kind": "power", "sigma": -1.0}}, {}, "SIGMA"),
        ({"name": "dsgd", "noise": {"kind": "power", "varsigma": 1.5}}, {}, "VARSIGMA_RANGE"),
        ({"name": "dsgd", "noise": {"kind": "power", "sigma": [1.0, 0.0, 1.0, 1.0]}}, {}, "NOISE_PARTIAL"),
        ({"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 1e-12}}, {}, "NOISE_EPSILON"),
        ({"name": "dola"}, {"topology": {"graph": "star", "weights": "out_degree"}}, "ROW_SUM"),
        ({"name": "dpsr"}, {"topology": {"graph": "complete", "weights": {"kind": "constant", "value": 1 / 3}}}, "SELF_WEIGHT"),
    ],
)  # fmt: skip
def test_what_has_no_guarantee_or_no_meaning_is_refused(
    form: dict[str, Any], sections: dict[str, Any], code: str
) -> None:
    with pytest.raises(AssumptionViolated) as caught:
        run_of(form, **sections)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("form", "sections", "codes"),
    [
        ({"name": "dsgd"}, {}, []),
        ({"name": "dola"}, {"topology": STAR}, ["NOT_DOUBLY_STOCHASTIC", "NOISE_FADES"]),
        ({"name": "dsgd"}, {"topology": {"weights": {"kind": "constant", "value": 0.6}}}, ["OWN_WEIGHT"]),
        ({"name": "pdop"}, {"rounds": 1200}, ["NOISE_RESOLUTION"]),
        ({"name": "dsgd", "form": "consensus"}, {"loss": {**SQUARED, "label_bound": 1.0}}, []),
    ],
)
def test_what_only_voids_a_theorem_is_reported(
    form: dict[str, Any], sections: dict[str, Any], codes: list[str]
) -> None:
    assert [finding.code for finding in run_of(form, **sections).warnings] == codes


def test_a_list_must_have_one_number_per_learner() -> None:
    with pytest.raises(SpecError, match=r"algorithm\.noise\.sigma"):
        run_of({"name": "dsgd", "noise": {"kind": "power", "sigma": [1.0, 2.0]}})


@pytest.mark.parametrize("name", ["dsgd", "dola", "pdop", "dpdola", "pd-ogd", "d-ogd", "dpsr"])
def test_a_method_needs_its_name_alone_and_survives_being_written(name: str) -> None:
    spec = run_of({"name": name}).spec
    assert parse_spec(yaml.safe_load(dump_spec(spec)), allow_imports=True) == spec
    assert f'"const": "{name}"' in build_spec_json_schema()
