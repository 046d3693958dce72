"""Nothing that a learner says tells more of its records than its algorithm claims: attacks on every built-in algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.algorithms.interface import LocalMessages, Message, StateAxes
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.noise import NoiseRequest, NoiseSource, SeededNoise
from sottovoce_core.privacy.guarantee import compose_guarantees
from tests.claims import (
    EXPOSED,
    SETUPS,
    Attack,
    Effort,
    Setup,
    Times,
    counted,
    drawn,
    losses_of,
    mild,
    ratio,
    search,
    shared,
    told,
    undercharged,
)

ROUNDING = 1e-9
EVERY = pytest.mark.parametrize("name", SETUPS)


@pytest.fixture
def effort() -> Effort:
    """The quick round; `tests/long` has the thorough one."""
    return Effort(starts=8, steps=8, tries=2, replicas=2000, seed=0)


def seeded(name: str, offset: int = 0) -> np.random.Generator:
    """A generator of a setup's own."""
    return np.random.default_rng([offset, *name.encode()])


def test_every_algorithm_is_attacked() -> None:
    assert {setup.algorithm["name"] for setup in (*SETUPS.values(), *EXPOSED.values())} == set(
        ALGORITHMS.built_in_classes
    )


# ---- never above the claim -------------------------------------------------------------------------------------------


@EVERY
def test_no_attack_tells_more_than_the_claim(name: str, effort: Effort) -> None:
    """After no round, whatever others say, and however the noise falls."""
    found, attack = search(SETUPS[name], seeded(name, effort.seed), starts=effort.starts, steps=effort.steps)
    assert found <= 1.0 + ROUNDING, attack
    assert found > 0.0 and found >= SETUPS[name].attained * (1.0 - ROUNDING)


@EVERY
def test_the_meter_charges_what_any_single_swap_costs(name: str, effort: Effort) -> None:
    """By every round: a learner may stop at its budget in any."""
    setup, generator = SETUPS[name], seeded(name, 100 + effort.seed)
    run = setup.build()
    for attack in (drawn(setup, run, generator) for _ in range(effort.tries)):
        for single in singles(setup, attack):
            assert undercharged(setup, run, single) <= ROUNDING


def singles(setup: Setup, attack: Attack) -> list[Attack]:
    """The attack with the smallest swap that the claim is about, in every round with records."""
    if setup.swapped == "learner":
        return [attack]
    swaps = []
    for start, count in zip(attack.own.offsets[:-1].tolist(), attack.counts.tolist(), strict=True):
        most = count if setup.swapped == "round" else 1
        swaps += [replace(attack, swapped=np.arange(start, start + most))] if count else []
    return swaps


SHARED = [name for name, setup in SETUPS.items() if setup.algorithm["name"] in ("dpsda-c", "dpsda-ps")]


@pytest.mark.parametrize("name", SHARED)
def test_shared_records_cost_at_most_the_joint_claim(name: str, effort: Effort) -> None:
    """The messages of all learners tell about a record that all of them hold: their losses add up."""
    setup, generator = SETUPS[name], seeded(name, 200 + effort.seed)
    run = setup.build()
    assert shared(run)
    most = 0.0
    for _ in range(5 * effort.tries):
        attack, noise = drawn(setup, run, generator), Times(SeededNoise(3), float(generator.choice([0.0, 1.0, 64.0])))
        each = [run.guarantee(i, attack.counts, attack.replaced) for i in range(run.spec.n_learners)]
        claimed: FloatArray = np.sum([alone.cumulative_epsilon for alone in each], axis=0)
        for losses in losses_of(setup, run, [attack], noise, 2, generator):
            most = max(most, ratio(np.cumsum(losses[:, 0], axis=0), claimed))
        assert compose_guarantees(each).epsilon() == pytest.approx(claimed[-1])
    assert 0.1 < most <= 1.0 + ROUNDING


# ---- in law ----------------------------------------------------------------------------------------------------------


def deviation(name: str, noise: Callable[[NoiseSource], NoiseSource], replicas: int, seed: int) -> float:
    """Standard errors by which the mean of `exp(-loss)` differs from 1.

    Losses count up to 2: rare large ones would spoil the mean. So would rare small ones if there are no others, so the
    standard deviation is taken to be at least 0.3.
    """
    setup, generator = SETUPS[name], seeded(name, 300 + seed)
    run = setup.build()
    attack = mild(setup, run, generator, most=2.0)
    realised, largest = losses_of(setup, run, [attack], noise(SeededNoise(seed)), replicas, generator)
    ratios = np.exp(-counted(realised, largest, 2.0))
    assert ratios.std() > 0.0
    return float(abs(ratios.mean() - 1.0) / (max(ratios.std(), 0.3) / np.sqrt(replicas)))


@EVERY
def test_losses_are_log_likelihood_ratios(name: str, effort: Effort) -> None:
    """The mean of `exp(-loss)` under D is 1. Five standard errors: failure probability below 1e-6 a setup."""
    assert deviation(name, lambda source: source, effort.replicas, effort.seed) < 5.0


def halved(source: NoiseSource) -> NoiseSource:
    """Broken noise: half as much."""
    return Times(source, 0.5)


@dataclass(slots=True)
class Again:
    """Broken noise: what was drawn in the first round is said in every round."""

    source: NoiseSource
    kept: dict[str, FloatArray] = field(default_factory=dict)

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        drawn = self.source(draw)
        return self.kept.setdefault(draw.field, drawn) if drawn.any() else drawn


ONE_EACH = {setup.algorithm["name"]: name for name, setup in reversed(SETUPS.items())}
"""The first setup of every algorithm."""


@pytest.mark.statistics
@pytest.mark.parametrize("broken", [halved, Again])
@pytest.mark.parametrize("name", ONE_EACH.values())
def test_broken_noise_is_seen(name: str, broken: Callable[[NoiseSource], NoiseSource]) -> None:
    """The mean is another: by five standard errors, of ever more runs."""
    assert any(deviation(name, broken, 2000 * 4**k, seed=k) > 5.0 for k in range(4))


# ---- nothing promised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPOSED)
def test_without_noise_on_the_wire_claim_and_loss_are_infinite(name: str) -> None:
    setup, generator = EXPOSED[name], seeded(name)
    run = setup.build()
    infinite = 0
    for _ in range(5):
        attack = drawn(setup, run, generator)
        attack = replace(attack, swapped=np.arange(len(attack.rows)), new_rows=-attack.rows, new_labels=attack.labels)
        realised, largest = losses_of(setup, run, [attack], SeededNoise(1), 2, generator)
        claim = run.guarantee(attack.learner, attack.counts, attack.replaced).cumulative_epsilon
        for losses in (realised, largest):
            first = int(
                np.isinf(losses).all(axis=(1, 2)).argmax()
            )  # later, worlds that parted have no density any more
            assert (losses[:first] == 0.0).all() and (claim[first:] == np.inf).all()
            infinite += int(np.isposinf(losses[first]).all())
    assert infinite > 5


# ---- what the attacks found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpps", "dpsda-ps clean"])
@pytest.mark.parametrize("lie", [1e-9, 0.0, -1.0])
def test_a_lie_about_push_weights_makes_no_decision_move_more(name: str, lie: float) -> None:
    """A clean decision moves by `alpha/w` times the dual vector: a small w would carry a record on more than is charged."""
    setup = SETUPS[name]
    run = setup.build()
    algorithm, dim = run.algorithm, run.algorithm.dim
    state = algorithm.init(StateAxes((0,), 1))
    for t in range(setup.rounds - 1):
        state, _ = algorithm.emit(state, SeededNoise(t))
        mixing = run.network.mixing(t)
        weights = mixing.in_neighbour_weights(0)
        heard = Message({"h": np.zeros((1, 1, dim)), "w": np.full((1, 1, 1), lie)})
        batch = Batch(np.zeros((1, 1, setup.n_features)), np.zeros((1, 1)))
        state = algorithm.update(
            state, LocalMessages(weights, dict.fromkeys(weights, heard), float(mixing.own_weights[0])), batch
        )
        assert state.push_weight.item() >= algorithm.push_weights[t + 1, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["dpsda-c clean", "dpsda-c sums", "pvp", "pvp own", "dvp exact"])
@pytest.mark.parametrize("size", [1e14, 1e16, 1e20])
def test_huge_messages_do_not_spoil_the_arithmetic(name: str, size: float) -> None:
    """What is said between two float64 far apart must not be rounded to them, nor a minimiser be found less exactly."""
    setup, generator = SETUPS[name], seeded(name, 400)
    run = setup.build()
    most = 0.0
    for _ in range(8):
        attack = drawn(setup, run, generator)
        most = max(most, told(run, attack, generator, loudest=size))
    assert 0.0 < most <= 1.0 + ROUNDING
