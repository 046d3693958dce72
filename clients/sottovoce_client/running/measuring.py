"""How right learners' models are, where no learner was asked: by their records and what was overheard of the run.

Whoever fed all learners has their records, and a capture has what each said and heard: with both, a learner's model is computed
here, by replay. Nothing leaves a learner for it, and no learner need allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.data import PlacedData
from sottovoce.running.replay import replayed
from sottovoce.running.run import Run, publication
from sottovoce.running.transcript import Transcript
from sottovoce_rpc.learner_status import LearnerStatus

CURVE = 64
"""Rounds after which a model is looked at, evenly over the run, or all of a shorter one."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a learner's model says of the held-out records.

    Attributes:
        labels: `(test records,)`, after the last round, or the one before.
        curve: rounds, and the accuracy after them.
    """

    labels: FloatArray
    curve: tuple[tuple[int, float], ...]


def measure(
    run: Run,
    data: PlacedData,
    statuses: Sequence[LearnerStatus],
    transcript: Transcript | None,
    wanted: Sequence[bool],
) -> dict[int, Measured]:
    """Of those learners whose models follow from what is here, by index.

    Args:
        run: that was overheard.
        data: what its learners learned, and held-out records. Live ones are with their learners alone.
        statuses: how far each learner is.
        transcript: what they said; None: nobody knows it here.
        wanted: for each learner, whether it is.
    """
    if transcript is None or run.spec.data.live or not len(data.test_labels):
        return {}
    indices = [i for i, each in enumerate(wanted) if each and statuses[i].rounds_done]
    found = {i: _of(run, data, transcript, i, statuses[i].rounds_done) for i in indices}
    return {i: each for i, each in found.items() if each is not None}


def _of(run: Run, data: PlacedData, transcript: Transcript, index: int, done: int) -> Measured | None:
    """None: what is known of its models ends before the last round but one."""
    looks = {int(k) for k in np.rint(np.linspace(0, done - 1, min(done, CURVE)))} | {done - 2}
    curve, labels, rounds = list[tuple[int, float]](), None, 0
    for k, machine in enumerate(replayed(run, transcript, index, data.learners[index])):
        rounds = k + 1
        if k in looks:
            labels = run.loss.classify(run.loss.predict(machine.model[0, 0], data.test_features))
            curve.append((rounds, float(np.mean(labels == data.test_labels))))
    return None if labels is None or rounds < done - 1 else Measured(labels, tuple(curve))


def cost(run: Run, statuses: Sequence[LearnerStatus], measured: Mapping[int, Measured]) -> str:
    """What publishing it costs: of the model that costs most, in words; empty where nothing was measured."""
    told = [
        publication(
            run,
            i,
            each.curve[-1][0],
            statuses[i].epsilon_spent,
            private=not statuses[i].noise_is_not_private,
        )
        for i, each in measured.items()
    ]
    return max(told, key=lambda each: (not each.protected, each.epsilon)).text if told else ""
