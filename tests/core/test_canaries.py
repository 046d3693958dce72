"""Canaries: a correct run's bound stays below the claim, less noise raises it, and a guess uses no later coin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online.canaries import Canaries, CanaryPosition, CanaryTest, _Scorer, draw_canaries
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import NoiseRequest, SeededNoise
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from tests.examples import made_up

DIM, LEARNERS = 2, 5
ONE_MESSAGE: dict[str, Any] = {"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 1.0}}
"""Every record is seen in one message, which costs epsilon 1."""
MANY_MESSAGES: dict[str, Any] = {"name": "dsgd", "noise": {"kind": "power", "sigma": 0.5}, "step": {"kind": "power"}}


class Shrunk(SeededNoise):
    """Less noise than is claimed."""

    def __init__(self, seed: int, factor: float) -> None:
        super().__init__(seed)
        self._factor = factor

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        return draw.round_to_lattice(self._factor * super().__call__(draw))


def a_run(algorithm: dict[str, Any], rounds: int, batch: int = 2, **more: Any) -> tuple[Run, PlacedData]:
    document = {
        "rounds": rounds,
        "learners": LEARNERS,
        "algorithm": algorithm,
        "decision_set": {"kind": "l2_ball", "radius": 1.0},
        "topology": {"graph": "ring", "weights": "metropolis"},
        "durability": "process",
    }
    run = build_run(parse_spec(document, allow_imports=True), DIM)
    return run, made_up(run.spec, DIM, batch=batch, **more)


@cache
def with_coins() -> tuple[Run, PlacedData, Canaries]:
    """200 coins of one record in its round."""
    run, data = a_run(ONE_MESSAGE, 81, batch=1)
    canaries = draw_canaries(run, data, 200, np.random.default_rng(0))
    return run, canaries.insert_into(data), canaries


def overheard(run: Run, data: PlacedData, noise: SeededNoise) -> Iterator[dict[int, Message]]:
    for step in simulate_rounds(run, data, noise):
        yield step.split_by_sender()


RUNS = 20


def guessed_in(noise: SeededNoise, alpha: float) -> CanaryTest:
    """The coins of that many runs, guessed and bet on in turns."""
    run, data, canaries = with_coins()
    test, scorer = CanaryTest(run, data, canaries, alpha), _Scorer(run, data, canaries, RUNS)
    for step in simulate_rounds(run, data, noise, RUNS):
        for k, losses in scorer.take(step.t, step.split_by_sender()):
            for loss in losses:
                test._guess(k, float(loss))
    return test


# ---- places ----------------------------------------------------------------------------------------------------------


def test_coins_have_places_of_their_own() -> None:
    run, data = a_run(MANY_MESSAGES, 60)
    canaries = draw_canaries(run, data, 12, np.random.default_rng(1))
    known = canaries.insert_into(data)

    assert list(canaries.positions) == sorted(set(canaries.positions))
    assert canaries.window > 1 and set(canaries.coins) == {0, 1}
    assert canaries.tau > 0.0 and canaries.claim < np.inf
    for i in range(LEARNERS):
        rounds = [place.round for place in canaries.positions if place.learner == i]
        assert all(after - before >= canaries.window for before, after in pairwise(rounds))
        assert all(t + canaries.window < 60 for t in rounds)
        changed = np.flatnonzero((known.learners[i].features != data.learners[i].features).any(axis=1))
        np.testing.assert_array_equal(changed, [data.learners[i].rows(t)[0] for t in rounds])
    for k, place in enumerate(canaries.positions):
        record = known.learners[place.learner].batch(place.round).features[0]
        expected = canaries.build_record(k, canaries.coins[k], DIM)
        np.testing.assert_array_equal(record, expected)
        np.testing.assert_array_equal(expected, -canaries.build_record(k, 1 - canaries.coins[k], DIM))


def test_the_claim_is_the_promise_for_the_swap() -> None:
    """`pd-ogd` shows a record in one message, for epsilon 1, whatever the window; `dsgd` in all that follow it."""
    assert with_coins()[2].claim == pytest.approx(1.0)
    run, data = a_run(MANY_MESSAGES, 60)
    canaries = draw_canaries(run, data, 12, np.random.default_rng(1))
    claims = []
    for place in canaries.positions:
        replaced = np.bincount([place.round], minlength=60)
        promised = run.guarantee(place.learner, np.full(60, 2), replaced).round_losses
        claims.append(promised[: place.round + canaries.window + 1].sum())
    assert canaries.claim == pytest.approx(max(claims))


def test_what_is_not_one_event_is_refused() -> None:
    run, data = a_run(MANY_MESSAGES, 40, records=20)
    with pytest.raises(SpecError, match="used once"):
        draw_canaries(run, data, 4, np.random.default_rng(0))
    run, data = a_run(MANY_MESSAGES, 40)
    with pytest.raises(SpecError, match="must be 1 to 195"):
        draw_canaries(run, data, 196, np.random.default_rng(0))
    silent, data = a_run({"name": "d-ogd"}, 40)
    with pytest.raises(SpecError, match="finite epsilon"):
        draw_canaries(silent, data, 4, np.random.default_rng(0))


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_a_score_is_the_exact_loss_of_the_window() -> None:
    """Against a replay of the learner in both worlds, all other coins as they fell."""
    run, data = a_run(MANY_MESSAGES, 50)
    canaries = draw_canaries(run, data, 10, np.random.default_rng(3))
    known = canaries.insert_into(data)
    said = list(overheard(run, known, SeededNoise(5)))
    scorer = _Scorer(run, known, canaries)
    scores = dict(pair for t, messages in enumerate(said) for pair in scorer.take(t, messages))
    transcript = Transcript({"y": np.stack([np.concatenate([m[i]["y"] for i in range(LEARNERS)]) for m in said])})

    assert sorted(scores) == list(range(10))
    for k, place in enumerate(canaries.positions):
        worlds = [replace(canaries, coins=_flipped(canaries.coins, k, coin)).insert_into(data) for coin in (0, 1)]
        losses = replay(run, transcript, place.learner, [world.learners[place.learner] for world in worlds])
        window = slice(place.round + 1, place.round + canaries.window + 1)
        np.testing.assert_allclose(scores[k], losses.realised_losses[window, 0].sum(axis=0), rtol=1e-9, atol=1e-12)


def _flipped(coins: tuple[int, ...], k: int, coin: int) -> tuple[int, ...]:
    return (*coins[:k], coin, *coins[k + 1 :])


def test_a_score_uses_neither_its_own_coin_nor_a_later_one() -> None:
    """Else earlier guesses, told right or wrong, would say something of it: the same messages, all later coins turned."""
    run, data = a_run(MANY_MESSAGES, 50)
    canaries = draw_canaries(run, data, 10, np.random.default_rng(3))
    said = list(overheard(run, canaries.insert_into(data), SeededNoise(5)))
    first = 4
    turned = replace(canaries, coins=canaries.coins[:first] + tuple(1 - c for c in canaries.coins[first:]))
    scores = []
    for each in (canaries, turned):
        scorer = _Scorer(run, each.insert_into(data), each)
        found = [pair for t, messages in enumerate(said) for pair in scorer.take(t, messages)]
        scores.append([loss[0] for k, loss in found if k <= first])
    assert scores[0] == scores[1] and len(scores[0]) == first + 1


def test_who_was_not_overheard_is_not_guessed() -> None:
    run, data = a_run(MANY_MESSAGES, 50)
    canaries = replace(
        draw_canaries(run, data, 3, np.random.default_rng(3)),
        window=5,
        positions=(CanaryPosition(0, 0), CanaryPosition(20, 0), CanaryPosition(20, 2)),
        tau=0.0,
    )
    known = canaries.insert_into(data)
    test = CanaryTest(run, known, canaries, 0.05)
    for t, messages in enumerate(overheard(run, known, SeededNoise(5))):
        test.take(t, {i: message for i, message in messages.items() if (t, i) != (22, 0)})
    assert (test.scored_count, test.guessed_count) == (3, 2)


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.statistics
def test_less_noise_raises_the_bound_and_much_less_is_refuted() -> None:
    """Of 3,000 guesses and more, 58 % are right, and 66 % with half the noise: six standard errors apart, and the claim is 73 %.

    Fails by chance with probability below 1e-8.
    """
    correct, half, tenth = (guessed_in(noise, 0.05) for noise in (SeededNoise(1), Shrunk(1, 0.5), Shrunk(1, 0.05)))

    assert correct.scored_count == half.scored_count == 200 * RUNS
    assert correct.bound < half.bound < tenth.bound
    assert correct.bound < correct.canaries.claim < tenth.bound
    assert correct.correct_count / correct.guessed_count < half.correct_count / half.guessed_count


def test_the_alarm_comes_once() -> None:
    run, data, canaries = with_coins()
    test, alarms = CanaryTest(run, data, canaries, 0.05), []
    for t, messages in enumerate(overheard(run, data, Shrunk(1, 0.05))):
        alarms += test.take(t, messages)
    (alarm,) = alarms
    assert (alarm.learner, alarm.test) == (None, "canaries")
    assert alarm.log_e_value >= alarm.log_threshold == pytest.approx(np.log(20.0))
