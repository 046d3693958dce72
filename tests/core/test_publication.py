"""Which models follow from messages, of every algorithm: tried in worlds that differ in all of a learner's records."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.algorithms.interface import PublicModelAlgorithm
from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import PublicationCoverage, Run, assess_publication
from tests.claims import EXPOSED, RING, SETUPS, Setup, _setup, learner_data, overhear, records
from tests.examples import small_run
from tests.gossip import GOSSIP

MORE = {
    "pd-ogd own": _setup("pd-ogd", parameters={"play": "own"}),
    "dola mixed": _setup("dola", parameters={"play": "mixed"}),
    "dola mixed own gradient": _setup("dola", parameters={"play": "mixed", "gradient_at": "own"}),
    "pd-ocg after gossip": _setup(
        "pd-ocg", parameters={"epsilon": 1.0, "block_length": 2, "noise_placement": "after_gossip"}, rounds=12
    ),
}
EVERY: dict[str, Setup] = {**SETUPS, **EXPOSED, **MORE}


def _decisions(setup: Setup, run: Run) -> list[FloatArray]:
    """After each round, `(2, replicas, dim)`: in two worlds in which everybody said the same."""
    generator = np.random.default_rng(5)
    counts = np.full(run.spec.rounds, 2)
    one, other = (learner_data(*records(run, setup.n_features, int(counts.sum()), generator), counts) for _ in range(2))
    heard = overhear(run, one, 0, SeededNoise(7), 3, generator, loudest=2.0)
    machine, found = Replay(run, 0, 3, 2), []
    for t in range(run.spec.rounds):
        machine.step(heard.messages(t, 0, machine.required_senders), one.batch(t), other.batch(t))
        assert machine.decision.shape == (2, 3, run.algorithm.dim)  # also where both worlds share it
        found.append(run.algorithm.decision(machine._state))
    return found


@pytest.mark.parametrize("name", EVERY)
def test_a_model_that_is_said_to_follow_from_messages_does_and_no_other(name: str) -> None:
    """Where it is claimed, no record moves it once all messages are fixed; else records do, or noise that is in none."""
    setup = EVERY[name]
    run = setup.build()
    apart = []
    for t, decision in enumerate(_decisions(setup, run)):
        differs = float(np.abs(decision[0] - decision[-1]).max()) > 1e-9  # equal worlds may share one row
        claimed = isinstance(run.algorithm, PublicModelAlgorithm) and run.algorithm.is_model_public(t + 1)
        assert not (claimed and differs), f"after round {t}"
        apart += [] if claimed else [differs]
    assert not apart or any(apart) or getattr(run.algorithm, "has_hidden_noise", False)


def test_every_algorithm_is_tried() -> None:
    assert {setup.algorithm["name"] for setup in EVERY.values()} == set(ALGORITHMS.built_in_classes)


PROTECTED = {
    "pd-ogd",
    "pd-ogd t-fold",
    "dola mixed",
    "dola mixed own gradient",
    "dpsda-c",
    "dpsda-c sums",
    "dpsda-ps",
    "dpps noised",
    "dpcda",
    "pd-ftgl",
    "pd-ftgl blocks",
    "pd-ftgl plain",
    "pd-ocg",
    "dvp",
    "dvp exact",
    "dvp printed",
    "pvp and dvp",
}
PUBLISHED = {"pd-ftgl after gossip", "pd-ocg after gossip"}


@pytest.mark.parametrize("name", EVERY)
def test_what_handing_out_the_model_costs(name: str) -> None:
    run = EVERY[name].build()
    told = assess_publication(run, 0, run.spec.rounds)
    cover = (
        PublicationCoverage.MESSAGES
        if name in PROTECTED
        else PublicationCoverage.DECISIONS
        if name in PUBLISHED
        else PublicationCoverage.UNCOVERED
    )
    assert told.coverage is cover and told.is_protected == (cover is not PublicationCoverage.UNCOVERED)
    promise = run.guarantee(0)
    if cover is PublicationCoverage.MESSAGES:
        assert told.epsilon == promise.epsilon() < math.inf
        assert assess_publication(run, 0, run.spec.rounds, 0.25).epsilon == 0.25
        assert (
            assess_publication(run, 0, run.spec.rounds, has_private_noise=False).coverage
            is PublicationCoverage.UNCOVERED
        )
    elif cover is PublicationCoverage.DECISIONS:
        assert promise.output_epsilon is not None and told.epsilon == promise.output_epsilon[-1]
    else:
        assert told.epsilon == math.inf and "no epsilon covers it" in told.text


def test_before_its_last_step_pvp_says_no_model() -> None:
    run = SETUPS["pvp and dvp"].build()
    assert [assess_publication(run, 0, t).coverage for t in (4, 5)] == [
        PublicationCoverage.UNCOVERED,
        PublicationCoverage.MESSAGES,
    ]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_who_heard_the_messages_of_noise_after_gossip_is_promised_nothing(name: str) -> None:
    setup = EVERY[name]
    run = Setup(setup.algorithm, {**setup.sections, "capture": "relay"}, setup.n_features, setup.rounds).build()
    told = assess_publication(run, 0, run.spec.rounds)
    assert told.coverage is PublicationCoverage.UNCOVERED and "this run was captured (capture: relay)" in told.text


def test_who_was_away_went_on_without_noise() -> None:
    """Its own value enters its next decision as it is. Who only joined late had learned nothing before."""
    setup = EVERY["dola mixed"]
    for absence, rounds, cover in (
        ({"first_round": 5}, 5, PublicationCoverage.MESSAGES),
        ({"first_round": 5}, 6, PublicationCoverage.UNCOVERED),
        ({"until_round": 3}, 6, PublicationCoverage.MESSAGES),
    ):
        away = {"offline_intervals": [{"learner": "learner-0", **absence}]}
        run = Setup(setup.algorithm, {**setup.sections, **away}, setup.n_features, setup.rounds).build()
        assert assess_publication(run, 0, rounds).coverage is cover


def test_before_any_record_was_learned_a_model_is_public() -> None:
    assert assess_publication(small_run(), 0, 0).epsilon == 0.0


def test_learners_that_share_their_records_are_told_of() -> None:
    assert "epsilons add up" in assess_publication(SETUPS["dpsda-c"].build(), 0, 5).text


def test_an_algorithm_of_ones_own_that_does_not_say_is_covered_by_nothing() -> None:
    run = Setup({"name": GOSSIP}, {"topology": RING}).build()
    assert run.guarantee(0).epsilon() > 0.0 and assess_publication(run, 0, 3).coverage is PublicationCoverage.UNCOVERED
