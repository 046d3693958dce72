"""From overheard messages to the gradients that a learner added in between.

The eavesdropper knows the run, so it undoes the mixing and the step. Noise, clipping and projection stay in what it finds.

    gossip descent    g_t = (b_t - y_{t+1}) / alpha_t - r p,   b_t = sum_j a_ij y_t^j,   p = b_t or y_t
    ldp-dol           d_t = (y_t + gamma_t sum_j w_ij (y_t^j - y_t) - y_{t+1}) / lambda_t - r y_t
    pd-ftgl, pd-ocg   m^0 of a block: the sum of the block before
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.follow_the_leader.algorithm import PdFtgl
from sottovoce.algorithms.gradient_descent.algorithm import GossipDescent
from sottovoce.algorithms.ldp_dol.algorithm import LdpDol
from sottovoce.arrays import Batch, FloatArray, IntArray
from sottovoce.errors import SpecError
from sottovoce.losses import Loss
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Added:
    """Data gradients that one learner added, as an eavesdropper computes them.

    Attributes:
        rounds: `(k,)` rounds whose records they are of; of a block of rounds, the first.
        at: `(k, replicas, dim)` where they were taken; not-a-number where messages do not tell.
        gradients: `(k, replicas, dim)`.
        length: rounds whose gradients are added up.
        so_far: means over all records up to the round, not over those of the round.
    """

    rounds: IntArray
    at: FloatArray
    gradients: FloatArray
    length: int = 1
    so_far: bool = False


def added(run: Run, transcript: Transcript, learner: int) -> Added:
    """The gradients that one learner added.

    Args:
        run: the run that was overheard.
        transcript: what all learners said.
        learner: whose gradients.

    Raises:
        SpecError: the algorithm's messages are neither models nor sums of gradients, or too few were heard.
    """
    algorithm, rounds = run.algorithm, transcript.unbroken(learner)
    if rounds < 2:
        raise SpecError(f"what a learner added shows in two of its messages, heard one after the other, got {rounds}")
    said = transcript.fields.get("y")
    match algorithm:
        case GossipDescent() if said is not None:
            return _descended(run, algorithm, transcript.until(rounds), learner)
        case LdpDol() if said is not None:
            return _pulled(run, algorithm, transcript.until(rounds), learner)
        case PdFtgl() if said is not None:
            return _block_sums(algorithm, said[:rounds], learner)
        case _:
            text = "gradients can be computed from the messages of gossip descent, ldp-dol, pd-ftgl and pd-ocg"
            raise SpecError(f"{text}, got {algorithm.name}")


def _descended(run: Run, algorithm: GossipDescent, heard: Transcript, learner: int) -> Added:
    said = heard.fields["y"]
    ts, own = range(len(said) - 1), said[:-1, learner]
    mixed = np.stack([_heard(run, heard, learner, t) + run.network.at(t).own[learner] * said[t, learner] for t in ts])
    at = mixed if algorithm.gradient_at == "mixed" else own
    steps = np.array([algorithm.step[learner](t) for t in ts])
    gradients = (mixed - said[1:, learner]) / steps[:, None, None] - run.loss.ridge * at
    return Added(np.arange(len(at)), at, gradients)


def _pulled(run: Run, algorithm: LdpDol, heard: Transcript, learner: int) -> Added:
    said = heard.fields["y"]
    ts, own, plan = range(len(said) - 1), said[:-1, learner], algorithm.schedules
    drift = [_heard(run, heard, learner, t) - run.network.at(t).neighbours[learner].sum() * own[t] for t in ts]
    coupling, steps = (np.array([one(t) for t in ts])[:, None, None] for one in (plan.coupling, plan.step_size))
    gradients = (own + coupling * np.stack(drift) - said[1:, learner]) / steps - run.loss.ridge * own
    return Added(np.arange(len(own)), own, gradients, so_far=True)


def _block_sums(algorithm: PdFtgl, said: FloatArray, learner: int) -> Added:
    """Decisions are public in the blocks before any sum has reached them."""
    blocks = algorithm.blocks
    openings = [t for t in range(len(said)) if blocks.leaf(t) and blocks.opens(t)]
    if not openings:
        raise SpecError("no sum of gradients was overheard: the first is said in the second block of rounds")
    sums = said[openings, learner]
    at = np.full_like(sums, np.nan)
    at[: algorithm.delay] = algorithm.decision_set.project(algorithm.loss.initial(algorithm.dim))
    return Added(np.array(openings) - blocks.length, at, sums, length=blocks.length)


def _heard(run: Run, heard: Transcript, learner: int, t: int) -> FloatArray:
    """`(replicas, dim)`: `sum_j w_ij y_t^j` over the neighbours, who alone are sure to have been heard."""
    weights = run.network.at(t).heard_by(learner)
    said = heard.messages(t, learner, {learner, *weights})
    total: FloatArray = sum(
        (weight * said[j]["y"][0] for j, weight in weights.items()), np.zeros_like(said[learner]["y"][0])
    )
    return total


def fits_better(loss: Loss, at: FloatArray, gradient: FloatArray, record: Batch, other: Batch) -> bool:
    """Does one record's gradient lie nearer to the overheard one than another's? Of two, the likelier, under Laplace noise.

    Args:
        loss: of the run.
        at: `(dim,)`, where the gradient was taken.
        gradient: `(dim,)`, overheard.
        record, other: one record each.
    """
    first, second = (
        np.abs(gradient - loss.gradient_sum(at, Batch(*loss.enforce(each.features, each.labels)))).sum()
        for each in (record, other)
    )
    return bool(first < second)
