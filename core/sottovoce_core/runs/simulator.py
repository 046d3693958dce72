"""The simulator: all learners of a graph in one process, many replicas at once, no network.

It drives the same algorithm object as the learner service. Arrays are `(learners, replicas, dim)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from sottovoce_core.algorithms.interface import Message, StackedMessages, StateAxes
from sottovoce_core.algorithms.validation import require_decision, require_emitted_message
from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, Batch, FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.noise import NoiseSource
from sottovoce_core.runs.participation import (
    USED_ROUNDS_FIELD,
    StaleStackedMessages,
    encode_punctual_rounds,
    mask_offline_messages,
    mask_offline_noise,
    require_no_records,
)
from sottovoce_core.runs.run import Run


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """Messages and decisions of one round.

    Attributes:
        t: the round.
        message: message of every learner; not-a-number for offline ones.
        decisions_before: decisions in use when the round's records arrived, `(learners, replicas, dim)`.
        decisions_after: decisions after the round.
    """

    t: int
    message: Message
    decisions_before: FloatArray
    decisions_after: FloatArray

    def split_by_sender(self) -> dict[int, Message]:
        """Return the message of every learner, fields `(1, replicas, dim)`, as an eavesdropper receives it."""
        history, senders = self.message.fields.items(), range(len(self.decisions_before))
        return {i: Message({name: value[i : i + 1] for name, value in history}) for i in senders}


def simulate_rounds(
    run: Run, data: PlacedData, noise: NoiseSource, replicas: int = 1, used_rounds: FloatArray | None = None
) -> Iterator[SimulatedRound]:
    """Run all rounds of a spec, one yielded value per round.

    Args:
        run: run to simulate.
        data: placed records; the same for all replicas.
        noise: its draws are `(learners, replicas, dim)`.
        replicas: independent repetitions.
        used_rounds: with bounded staleness, `(rounds, learners, width)`: the rounds of the messages that the update of a round
            uses, as stated in the next message (`USED_ROUNDS_FIELD`). Default: no message is late.

    Raises:
        DataError: a learner has records in a round in which it is offline.
        SpecError: it would need too much memory; or the algorithm's first message is invalid.
    """
    require_size(run, replicas)
    _keep_freed_memory()
    roster, late, always = run.spec.participation, run.has_bounded_staleness, not run.spec.offline_intervals
    require_no_records(data, roster, run.spec.rounds)
    algorithm = run.algorithm
    who = StateAxes(tuple(range(run.spec.n_learners)), replicas)
    state, lead = algorithm.init(who), who.leading_shape
    earlier: dict[str, list[FloatArray]] = (
        {name: [] for name in algorithm.field_shapes()} if used_rounds is not None else {}
    )
    for t, batch in enumerate(_iterate_batches(data, run.spec.rounds, run.loss)):
        there = None if always else roster.participant_mask(t)
        if there is not None and there.all():
            there = None
        emitted = algorithm.emit(state, noise if there is None else mask_offline_noise(noise, there))
        if t == 0:
            require_emitted_message(algorithm, emitted, lead)
        state, message = emitted
        before = algorithm.decision(state)
        if t == 0:
            require_decision(algorithm, before, lead)
        mixing = run.network.mixing(t)
        received = StackedMessages(mixing, run.clipping.clip_all(t, message))
        if used_rounds is not None:
            for name, history in earlier.items():
                history.append(message[name])
            received = StaleStackedMessages(mixing, message, used_rounds[t], earlier)
        state = algorithm.update(state, received, batch)
        if late:
            last = encode_punctual_rounds(run.network, t) if used_rounds is None or t == 0 else used_rounds[t - 1]
            field = np.broadcast_to(last[:, None], (len(last), replicas, last.shape[1]))
            message = Message({**message.fields, USED_ROUNDS_FIELD: field})
        if there is not None:
            message = mask_offline_messages(message, there)
        yield SimulatedRound(t, message, before, algorithm.decision(state))


def require_size(run: Run, replicas: int) -> None:
    """Require that the replicas of a run fit into a simulation.

    Raises:
        SpecError: they do not.
    """
    if (numbers := run.spec.n_learners * replicas * run.algorithm.dim) > MAX_ARRAY_ELEMENTS:
        text = f"{run.spec.n_learners} learners in {replicas} replicas with {run.algorithm.dim} numbers each"
        raise SpecError(
            f"a simulation must hold at most {MAX_ARRAY_ELEMENTS} numbers, and {text} are {numbers}: take fewer replicas"
        )


def _keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next round: if returned to the system, every page costs a fault.

    malloc raises its threshold to twice the largest freed block with its own mapping, of up to 32 MiB; no page of this block is
    touched. Other allocators ignore this.
    """
    np.empty(2**25 - 2**14, np.uint8)


def limit_blas_threads() -> AbstractContextManager[object]:
    """Limit NumPy's and SciPy's BLAS to one thread in the block, unless the user has set a number of threads.

    Matrices are small: threads wait for each other longer than they compute, many times so on a busy machine. threadpoolctl
    comes with scikit-learn; without it there is no limit.
    """
    if any(variable in os.environ for variable in _BLAS_VARIABLES):
        return nullcontext()
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits


_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "OMP_NUM_THREADS")
"""Environment variables in which a user sets the number of threads of BLAS."""

MAX_GATHERED_ELEMENTS = 2**17
"""Maximum size of the records that are gathered at a time (1 MiB), but at least one round's."""


def _iterate_batches(data: PlacedData, rounds: int, loss: Loss) -> Iterator[Batch]:
    """Yield `data.stack_round(t)` of every round, many gathered at once if all learners have equally many records in each."""
    sizes = np.stack([np.diff(learner.offsets) for learner in data.learners])[:, :rounds]
    t = 0
    while t < rounds:
        size = int(sizes[0, t])
        rounds_at_once = max(MAX_GATHERED_ELEMENTS // max(len(sizes) * size * data.n_features, 1), 1)
        even = (sizes[:, t : t + rounds_at_once] == size).all(axis=0)
        many = len(even) if even.all() else int(even.argmin())
        if many < 2:
            yield data.stack_round(t)
            t += 1
            continue
        rows = [each.order[each.offsets[t] : each.offsets[t + many]].reshape(many, size) for each in data.learners]
        features = np.stack([each.features[mine] for each, mine in zip(data.learners, rows, strict=True)], axis=1)
        labels = np.stack([each.labels[mine] for each, mine in zip(data.learners, rows, strict=True)], axis=1)
        within = loss.enforce_bounds(features, labels)
        bounded = map(partial(Batch.from_bounded_records, loss), *within)
        obey = all(map(np.array_equal, (features, labels), within))
        yield from bounded if obey else map(Batch.with_bounded_batch, features, labels, bounded)
        t += many
