"""Two adjacent worlds, simulated runs of both, and the effect of a record replacement without noise.

The worlds hold the same records except one, which another record replaces in world 1. A fair coin chooses the world of every
run. Runs are simulated in chunks; each chunk has independent noise.

Runs that differ only in the replaced record and share their noise are an illustration and no evidence: an adversary does not
know the noise. They show the size of the effect that the noise must hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, IntArray, summarize_fields
from sottovoce_core.auditing.traffic_features import RunFeatures
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.data.dataset import check_batch
from sottovoce_core.errors import DataError
from sottovoce_core.losses import Loss, mean_gradient
from sottovoce_core.noise import NoiseSource, SeededNoise, no_noise
from sottovoce_core.privacy.guarantee import Guarantee, compose_guarantees
from sottovoce_core.runs.replay import PrivacyLosses, Replay, replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript

# ---- worlds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worlds:
    """Two adjacent data sets.

    Attributes:
        learner: learner whose record differs.
        records_0, records_1: its records in worlds 0 and 1.
        description: replacement in words.
        is_shared: True if all learners hold these very records, so that one replacement affects all of them.

    Raises:
        DataError: the two data sets are not adjacent.
    """

    learner: int
    records_0: LearnerData
    records_1: LearnerData
    description: str
    is_shared: bool = False

    __repr__ = summarize_fields

    def __post_init__(self) -> None:
        if not np.array_equal(self.records_0.offsets, self.records_1.offsets):
            raise DataError("adjacent worlds must have equally many records in every round")
        differing = np.flatnonzero(self.find_differing_uses())
        rows = {(int(self.records_0.order[k]), int(self.records_1.order[k])) for k in differing.tolist()}
        if len(rows) != 1:
            raise DataError(f"adjacent worlds must differ in exactly one record, got {len(rows)}")

    def find_differing_uses(self) -> FloatArray:
        """Return `(uses,)` whether each use of a record differs between the worlds."""
        first, second = self.records_0, self.records_1
        features = (first.features[first.order] != second.features[second.order]).any(axis=1)
        differs: FloatArray = features | (first.labels[first.order] != second.labels[second.order])
        return differs

    @property
    def replacements_per_round(self) -> IntArray:
        """`(rounds,)` number of differing records in each round."""
        rounds = np.searchsorted(self.records_0.offsets, np.flatnonzero(self.find_differing_uses()), side="right") - 1
        return np.bincount(rounds, minlength=self.records_0.rounds).astype(np.int64)

    def get_records(self, world: int) -> LearnerData:
        """Return the learner's records in world 0 or 1."""
        return self.records_1 if world else self.records_0

    def build_data(self, data: PlacedData, world: int) -> PlacedData:
        """Build all learners' records in world 0 or 1."""
        if self.is_shared:
            return replace(data, learners=(self.get_records(world),) * len(data.learners))
        return data.with_learner(self.learner, self.get_records(world))

    def list_holders(self, run: Run) -> tuple[int, ...]:
        """List the learners whose messages depend on the differing record."""
        return tuple(range(run.spec.n_learners)) if self.is_shared else (self.learner,)

    def require_learnable(self, loss: Loss) -> None:
        """Reject records for which the loss is not defined: the privacy claim does not cover them.

        Raises:
            DataError: a label outside the loss's domain, or numbers that are not finite.
        """
        use = int(np.flatnonzero(self.find_differing_uses())[0])
        for data in (self.records_0, self.records_1):
            row = data.order[use : use + 1]
            try:
                check_batch(data.features[row], data.labels[row], data.features.shape[1], loss)
            except DataError as error:
                raise DataError(f"a record of the two worlds ({self.description}) does not fit: {error}") from None

    def compute_guarantee(self, run: Run) -> Guarantee:
        """Compute the guarantee for this replacement against an adversary that sees every holder: the sum of their losses."""
        counts = np.diff(self.records_0.offsets)
        return compose_guarantees(
            [run.guarantee(i, counts, self.replacements_per_round) for i in self.list_holders(run)]
        )

    def compute_losses(self, run: Run, transcript: Transcript) -> FloatArray:
        """Compute `(rounds, replicas)` the exact privacy loss of every round, `log p(y|world 0) - log p(y|world 1)`.

        The loss is infinite where one world could not have produced the message, and not-a-number where neither could.

        Raises:
            CaptureError: the messages of a holder are missing in the first round.
        """
        return replay_losses(run, transcript, self.list_holders(run), [self.records_0, self.records_1]).realised_losses[
            :, 0
        ]


def replay_losses(
    run: Run, transcript: Transcript, holders: Sequence[int], worlds: Sequence[LearnerData]
) -> PrivacyLosses:
    """Compute the privacy losses of all holders' messages, between world 0 and each other world, summed over the holders.

    Raises:
        CaptureError: the messages of a holder are missing in the first round.
    """
    with np.errstate(invalid="ignore"):  # not-a-number where no world could have produced the message
        each = [replay(run, transcript, i, worlds) for i in holders]
        rounds = min(len(losses.realised_losses) for losses in each)
        realised: FloatArray = np.sum([losses.realised_losses[:rounds] for losses in each], axis=0)
        largest: FloatArray = np.sum([losses.max_losses[:rounds] for losses in each], axis=0)
    return PrivacyLosses(realised, largest)


def build_worlds(
    data: PlacedData,
    learner: int,
    row: int,
    features: FloatArray,
    label: float,
    *,
    replacement_name: str = "another one",
    is_shared: bool = False,
) -> Worlds:
    """Build the worlds in which another record replaces one record of a learner in all of its uses.

    Args:
        data: all records.
        learner: index of the learner that holds the record.
        row: index of the record.
        features: features of the replacement as placed: scaled, with the intercept.
        label: label of the replacement, in the domain of the loss.
        replacement_name: replacement in words.
        is_shared: True if all learners hold the same records.

    Raises:
        DataError: there is no such record, or the replacement does not fit or is equal to it.
    """
    own = data.learners[learner]
    if 0 <= row < len(own.labels) and row not in own.order:
        raise DataError(
            f"the replaced record must be learned in some round, got record {row}, which is never learned; "
            f"choose another one, such as record {own.order[0]}"
        )
    description = f"record {row}, in all of its uses, against {replacement_name}"
    return Worlds(learner, own, own.with_record(row, features, label), description, is_shared)


# ---- runs on the simulator -------------------------------------------------------------------------------------------

NoiseFactory = Callable[[np.random.SeedSequence], NoiseSource]
"""Constructor of an audited learner's noise source from a seed."""

ProgressCallback = Callable[[float], None]
"""Callback that receives the completed fraction of the work."""

MAX_TRANSCRIPT_BYTES = 2**27
"""Maximum number of message bytes kept in memory at once."""


@dataclass(frozen=True, slots=True)
class RecordedRuns:
    """Recorded runs of one world.

    Attributes:
        world: 0 or 1.
        transcript: messages of the runs.
        decisions: `(rounds, learners, replicas, dim)` decisions in use when the records of a round arrived; None: not
            published.
        channel_features: everything else on the wire of every run, by view: sizes, times, metadata. Empty for simulated runs.
    """

    world: int
    transcript: Transcript
    decisions: FloatArray | None = None
    channel_features: tuple[Mapping[str, RunFeatures], ...] = ()

    __repr__ = summarize_fields


def discard_progress(fraction: float) -> None:
    """Ignore the progress report."""


def scale_progress(on_progress: ProgressCallback, start: float, stop: float) -> ProgressCallback:
    """Map the progress 0..1 of a subtask to [start, stop] of the whole."""
    return lambda fraction: on_progress(start + (stop - start) * fraction)


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Runs of one world that one task makes.

    Attributes:
        world: world of all of them.
        runs: number of runs.
        seed: seed of their noise.
        pair_index: index of the pair of worlds in `AuditPlan.pairs`.
        on_progress: receives the completed fraction of the chunk, also from another process.
    """

    world: int
    runs: int
    seed: np.random.SeedSequence
    pair_index: int = 0
    on_progress: ProgressCallback = discard_progress


def spawn_seeds(seed: np.random.SeedSequence, count: int) -> list[np.random.SeedSequence]:
    """Derive independent seeds from one; equal calls give equal seeds, unlike `SeedSequence.spawn`, which counts."""
    return np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key, pool_size=seed.pool_size).spawn(count)


def plan_chunks(runs: int, max_chunk_runs: int, seed: np.random.SeedSequence, pair_index: int = 0) -> list[RunChunk]:
    """Plan `2 runs` runs, each in a world chosen by a fair coin, in chunks of at most `max_chunk_runs`; worlds alternate."""
    coins, *sources = spawn_seeds(seed, 3)
    world_1_runs = int(np.random.default_rng(coins).binomial(2 * runs, 0.5))
    by_world = []
    for world, (count, source) in enumerate(zip((2 * runs - world_1_runs, world_1_runs), sources, strict=True)):
        sizes = [min(max_chunk_runs, count - done) for done in range(0, count, max_chunk_runs)]
        seeds = spawn_seeds(source, len(sizes))
        by_world.append([RunChunk(world, size, own, pair_index) for size, own in zip(sizes, seeds, strict=True)])
    longest = max(map(len, by_world))
    return [own[k] for k in range(longest) for own in by_world if k < len(own)]


def simulate_runs(
    run: Run,
    data: PlacedData,
    worlds: Worlds,
    chunk: RunChunk,
    noise: NoiseFactory,
    *,
    rounds: int | None = None,
    keep_all_learners: bool = False,
    keep_decisions: bool = False,
) -> RecordedRuns:
    """Simulate one chunk of the runs.

    Args:
        run: run to simulate.
        data: records of all learners; the holders' records are replaced by those of the world.
        worlds: the two worlds.
        chunk: chunk with the world and the number of runs.
        noise: constructor of the noise source.
        rounds: number of first rounds to simulate (default: all).
        keep_all_learners: keep the messages of all learners, not only those that a replay needs.
        keep_decisions: keep all decisions, too.
    """
    kept = slice(None) if keep_all_learners else find_needed_learners(run, worlds)
    rounds = run.spec.rounds if rounds is None else rounds
    leading_shape = (rounds, run.spec.n_learners, chunk.runs)
    # All other entries remain zero; their pages take no memory.
    fields = {name: np.zeros((*leading_shape, *shape)) for name, shape in run.field_shapes.items()}
    decisions = np.empty((*leading_shape, run.algorithm.dim)) if keep_decisions else None
    world_data = worlds.build_data(data, chunk.world)
    for step in islice(simulate_rounds(run, world_data, noise(chunk.seed), chunk.runs), rounds):
        for name, values in fields.items():
            values[step.t, kept] = step.message[name][kept]
        if decisions is not None:
            decisions[step.t] = step.decisions_before
        chunk.on_progress((step.t + 1) / rounds)
    return RecordedRuns(chunk.world, Transcript(fields), decisions)


def find_needed_learners(run: Run, worlds: Worlds) -> list[int]:
    """Return the learners whose messages a replay needs: the holders and all their in-neighbours."""
    holders = worlds.list_holders(run)
    mixings = [run.network.mixing(t) for t in range(run.spec.rounds)]
    senders = {j for mixing in mixings for i in holders for j in mixing.in_neighbour_weights(i)}
    return sorted(senders.union(holders))


def count_numbers(run: Run) -> int:
    """Count the numbers that all learners send in a run."""
    numbers_per_message = sum(math.prod(shape) for shape in run.field_shapes.values())
    return run.spec.rounds * run.spec.n_learners * numbers_per_message


def count_runs_in_memory(run: Run, *, keep_decisions: bool = False) -> int:
    """Count the runs whose messages fit into `MAX_TRANSCRIPT_BYTES` together."""
    decision_numbers = run.spec.rounds * run.spec.n_learners * run.algorithm.dim if keep_decisions else 0
    return max(1, MAX_TRANSCRIPT_BYTES // (8 * (count_numbers(run) + decision_numbers)))


# ---- runs that differ in one record alone ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoupledRuns:
    """Two runs with the same noise that differ in one record: one number of the learner's messages, `(rounds,)` each.

    Attributes:
        field, coordinate: position of the number: the one that the replacement moves most without noise.
        first_affected_round: first round that learns the record.
        message_0, message_1: number in worlds 0 and 1, with the same noise.
        noiseless_0, noiseless_1: number in worlds 0 and 1 without any noise.
        scale: noise scale.
    """

    field: str
    coordinate: int
    first_affected_round: int
    message_0: FloatArray
    message_1: FloatArray
    noiseless_0: FloatArray
    noiseless_1: FloatArray
    scale: FloatArray

    __repr__ = summarize_fields

    @property
    def largest_shift_round(self) -> int:
        """The round whose message the replacement moves most relative to the noise; without noise, in absolute terms."""
        moved = np.abs(self.noiseless_0 - self.noiseless_1)
        known = np.where(self.scale > 0, self.scale, np.inf)
        relative = moved / known if np.isfinite(known).any() else moved
        return int(relative.argmax())


def simulate_coupled_runs(run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence) -> CoupledRuns:
    """Simulate both worlds with the same noise, and without noise."""
    learner = worlds.learner
    transcripts = [
        simulate_runs(run, data, worlds, RunChunk(world, 1, seed), noise).transcript
        for noise in (SeededNoise, lambda _: no_noise)
        for world in (0, 1)
    ]
    moved = {
        name: np.abs(values[:, learner, 0] - transcripts[3].fields[name][:, learner, 0]).max(axis=0)
        for name, values in transcripts[2].fields.items()
    }
    field = max(moved, key=lambda name: float(moved[name].max()))
    coordinate = int(moved[field].argmax())
    first, second, *noiseless = (
        np.ascontiguousarray(each.fields[field][:, learner, 0, coordinate]) for each in transcripts
    )
    scale = np.array([run.algorithm.noise_scale(learner, t) for t in range(run.spec.rounds)])
    return CoupledRuns(
        field, coordinate, int(worlds.replacements_per_round.argmax()), first, second, noiseless[0], noiseless[1], scale
    )


# ---- private quantities of a learner ---------------------------------------------------------------------------------

PRIVATE_QUANTITIES = ("norm of the gradient", "loss", "norm of the decision")
"""Names of the private quantities, each summed over the rounds. The number of records is the same in both worlds."""


def compute_private_differences(run: Run, worlds: Worlds, transcript: Transcript) -> FloatArray:
    """Compute `(runs, len(PRIVATE_QUANTITIES))` each private quantity in world 0 minus its value in world 1.

    The result is a function of the messages alone; the world of the run is not used. Rounds without messages, and values that
    are not finite, count as zero.
    """
    sides = worlds.records_0, worlds.records_1
    replay = Replay(run, worlds.learner, transcript.replicas, len(sides))
    total = np.zeros((transcript.replicas, len(PRIVATE_QUANTITIES)))
    for t in range(transcript.rounds):
        batches = [side.batch(t) for side in sides]
        replay.step(transcript.messages(t, worlds.learner, replay.required_senders), *batches)
        if not replay.is_known:
            break
        decisions = replay.decision
        first, second = (_compute_private_quantities(run.loss, decisions[w], batch) for w, batch in enumerate(batches))
        total += np.nan_to_num(first - second, nan=0.0, posinf=0.0, neginf=0.0)
    return total


def _compute_private_quantities(loss: Loss, decision: FloatArray, batch: Batch) -> FloatArray:
    """Compute `(runs, len(PRIVATE_QUANTITIES))` of the records of a round, learned at `decision (runs, dim)`."""
    norms = np.linalg.norm(decision, axis=-1)
    if not batch.size:
        return np.stack([np.zeros_like(norms), np.zeros_like(norms), norms], axis=-1)
    enforced = Batch(*loss.enforce_bounds(batch.features, batch.labels))
    gradient = np.linalg.norm(mean_gradient(loss, decision, enforced), axis=-1)
    return np.stack([gradient, loss.values(decision, enforced).mean(axis=-1), norms], axis=-1)
