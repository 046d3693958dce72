"""Total breaks that an audit must not call consistent, each by a whole audit with few runs, in a default setting.

Seeds are fixed; what is found has p-values far below its level, so that another seed finds it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.audit import Audit, ChunkStatistics, ChunkTask, audit_simulated
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.traffic_features import build_features
from sottovoce_core.auditing.worlds import RunChunk
from sottovoce_core.noise import NoiseRequest, NoiseSource, SeededNoise, no_noise
from sottovoce_core.privacy.guarantee import ThreatModel
from tests.claims import SETUPS
from tests.examples import made_up, small_run

Change = Callable[[NoiseRequest, FloatArray, list[FloatArray]], FloatArray]


def broken(change: Change) -> Callable[[np.random.SeedSequence], NoiseSource]:
    """A source whose noise is changed, knowing all that it said before."""

    def source(seed: np.random.SeedSequence) -> NoiseSource:
        correct, said = SeededNoise(seed), list[FloatArray]()

        def drawn(draw: NoiseRequest) -> FloatArray:
            said.append(change(draw, correct(draw), said))
            return said[-1]

        return drawn

    return source


def in_float32(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    return draw.round_to_lattice(noise.astype(np.float32).astype(np.float64))


def on_a_coarse_lattice(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    assert draw.spacing is not None
    spacing = draw.spacing * 2.0**16
    rounded: FloatArray = np.rint(noise / spacing) * spacing
    return rounded


def taken_back(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    """What was added is subtracted two rounds later."""
    return -said[-2] if draw.round % 4 >= 2 else noise


def shifted_copy(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    """The second learner says the first one's noise, moved by one coordinate."""
    noise = noise.copy()
    noise[1] = np.roll(noise[0], 1, axis=-1)
    return noise


def a_round_late(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    """One learner says what another one said the round before."""
    noise = noise.copy()
    if said and len(noise) > 2:  # of all learners, not of one in two worlds
        noise[2] = said[-1][0]
    return noise


def of_few_streams(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    """A message is one of 2^12 that there are."""
    learners, runs, dim = noise.shape
    table = SeededNoise(99)(replace(draw, shape=(2**12, dim), scale=1.0, spacing=2.0**-40))
    picked = table[np.random.default_rng(int(1e6 * abs(noise).sum()) % 2**32).integers(0, 2**12, (learners, runs))]
    return draw.round_to_lattice(picked * draw.scale)


def a_little_small(draw: NoiseRequest, noise: FloatArray, said: list[FloatArray]) -> FloatArray:
    return draw.round_to_lattice(0.97 * noise)


BREAKS: dict[str, tuple[Change, int]] = {
    "float32": (in_float32, 10),
    "coarse lattice": (on_a_coarse_lattice, 10),
    "taken back": (taken_back, 10),
    "shifted copy": (shifted_copy, 10),
    "a round late": (a_round_late, 10),
    "few streams": (of_few_streams, 20),
    "scale x0.97": (a_little_small, 60),
}


def planned(**more: Any) -> AuditPlan:
    run = small_run(rounds=24, learners=5, n_features=10, algorithm={"sigma": 20.0})
    return plan_audit(run, made_up(run.spec, 10), 0, **{"runs": 20, "seed": 3, **more})


@pytest.mark.statistics
@pytest.mark.parametrize("name", BREAKS)
def test_a_total_break_is_refuted(name: str) -> None:
    change, runs = BREAKS[name]
    done = audit_simulated(planned(runs=runs), noise=broken(change))
    assert done.verdict.kind == "refuted", done.verdict.text
    assert min(test.p_value / test.level for test in done.findings.tests) < 1e-2


@pytest.mark.statistics
def test_the_same_runs_without_a_break_are_consistent() -> None:
    assert audit_simulated(planned(runs=60)).verdict.kind == "consistent"


def beside(plan: AuditPlan, tell: Callable[[AuditPlan, RunChunk, np.random.Generator], FloatArray]) -> Audit:
    """An audit of a correct learner that gives something away beside its numbers, `(runs, features)`."""

    def over(work: ChunkTask, shares: Sequence[RunChunk]) -> Iterator[ChunkStatistics]:
        for share in shares:
            part, generator = work(share), np.random.default_rng(share.seed)
            told = tell(plan.pairs[share.pair_index], share, generator)
            yield replace(part, channel_features=tuple({"gaps": build_features([("gap", row)])} for row in told))

    return audit_simulated(plan, mapper=over)


def slow_by_norm(plan: AuditPlan, share: RunChunk, generator: np.random.Generator) -> FloatArray:
    """Milliseconds of the first round: 20 for every unit of the record's norm, and jitter of 5."""
    norm = float(np.linalg.norm(plan.worlds.get_records(share.world).batch(0).features))
    return 20.0 * norm + generator.exponential(5.0, (share.runs, 1))


def jitter(plan: AuditPlan, share: RunChunk, generator: np.random.Generator) -> FloatArray:
    return generator.exponential(5.0, (share.runs, 1))


@pytest.mark.statistics
def test_a_delay_by_the_norm_hides_from_a_mirror_pair_and_not_from_a_loud_and_a_silent_record() -> None:
    plan = planned(runs=60)
    norms = [[float(np.linalg.norm(p.worlds.get_records(w).batch(0).features)) for w in (0, 1)] for p in plan.pairs]
    assert any(first > second + 0.5 for first, second in norms)
    done = beside(plan, slow_by_norm)
    assert done.verdict.kind == "refuted" and "gaps" in done.verdict.text
    assert beside(plan, jitter).verdict.kind == "consistent"


def test_who_sees_decisions_only_and_few_runs_cannot_call_a_learner_without_noise_consistent() -> None:
    setup = SETUPS["pd-ftgl"]
    run = setup.build()
    plan = plan_audit(run, made_up(run.spec, setup.n_features), 0, runs=40, seed=3, threat=ThreatModel.OUTPUT)
    done = audit_simulated(plan, noise=lambda seed: no_noise)
    assert done.verdict.kind in ("refuted", "inconclusive")
