"""What a learner keeps to itself, replayed in both worlds: a side channel may tell it, and the world through it."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.auditing.worlds import Worlds
from sottovoce.losses import Loss, mean_gradient
from sottovoce.running.replay import Replay
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

QUANTITIES = ("norm of the gradient", "loss", "norm of the decision")
"""Summed over rounds. Numbers of records are the same in both worlds."""


def differences(run: Run, worlds: Worlds, transcript: Transcript) -> FloatArray:
    """`(runs, len(QUANTITIES))`: every quantity in the first world, without what it is in the second.

    A function of what was heard: it knows nothing of the world that the run lived in. Rounds that were not heard count for
    nothing, and so does what is not finite.
    """
    sides = worlds.first, worlds.second
    replay = Replay(run, worlds.learner, transcript.replicas, len(sides))
    total = np.zeros((transcript.replicas, len(QUANTITIES)))
    for t in range(transcript.rounds):
        batches = [side.batch(t) for side in sides]
        replay.step(transcript.messages(t, worlds.learner, replay.concerned), *batches)
        if not replay.known:
            break
        decisions = replay.decision
        one, other = (_kept(run.loss, decisions[w], batch) for w, batch in enumerate(batches))
        total += np.nan_to_num(one - other, nan=0.0, posinf=0.0, neginf=0.0)
    return total


def _kept(loss: Loss, decision: FloatArray, batch: Batch) -> FloatArray:
    """`(runs, len(QUANTITIES))` of a round's records, learned at `decision (runs, dim)`."""
    norms = np.linalg.norm(decision, axis=-1)
    if not batch.size:
        return np.stack([np.zeros_like(norms), np.zeros_like(norms), norms], axis=-1)
    enforced = Batch(*loss.enforce(batch.features, batch.labels))
    gradient = np.linalg.norm(mean_gradient(loss, decision, enforced), axis=-1)
    return np.stack([gradient, loss.values(decision, enforced).mean(axis=-1), norms], axis=-1)
