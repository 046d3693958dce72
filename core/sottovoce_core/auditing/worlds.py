"""Two adjacent worlds, runs of both on the simulator, and what a swap does without noise.

The worlds hold the same records, but for one record that is another one in the second world. A fair coin chooses the world of
every run; runs are simulated some at a time, each share with noise of its own.

Runs that differ in the swapped record alone, not in noise, give a picture and no evidence: an adversary does not know the noise.
They show the size of what noise must hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, IntArray
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
        learner: whose record differs.
        first, second: its records in either world.
        what: the swap in words.
        shared: all learners hold these very records, so that one swap is everybody's.

    Raises:
        DataError: they are not adjacent.
    """

    learner: int
    records_0: LearnerData
    records_1: LearnerData
    description: str
    is_shared: bool = False

    def __post_init__(self) -> None:
        if not np.array_equal(self.records_0.offsets, self.records_1.offsets):
            raise DataError("adjacent worlds must have equally many records in every round")
        swapped = np.flatnonzero(self.find_differing_uses())
        rows = {(int(self.records_0.order[k]), int(self.records_1.order[k])) for k in swapped.tolist()}
        if len(rows) != 1:
            raise DataError(f"adjacent worlds must differ in exactly one record, got {len(rows)}")

    def find_differing_uses(self) -> FloatArray:
        """`(uses,)` which uses differ."""
        first, second = self.records_0, self.records_1
        features = (first.features[first.order] != second.features[second.order]).any(axis=1)
        differs: FloatArray = features | (first.labels[first.order] != second.labels[second.order])
        return differs

    @property
    def replacements_per_round(self) -> IntArray:
        """`(rounds,)` how many records of each round differ."""
        rounds = np.searchsorted(self.records_0.offsets, np.flatnonzero(self.find_differing_uses()), side="right") - 1
        return np.bincount(rounds, minlength=self.records_0.rounds).astype(np.int64)

    def get_records(self, world: int) -> LearnerData:
        """Records of the learner in world 0 or 1."""
        return self.records_1 if world else self.records_0

    def build_data(self, data: PlacedData, world: int) -> PlacedData:
        """All learners' records in world 0 or 1."""
        if self.is_shared:
            return replace(data, learners=(self.get_records(world),) * len(data.learners))
        return data.with_learner(self.learner, self.get_records(world))

    def list_holders(self, run: Run) -> tuple[int, ...]:
        """The learners whose messages depend on the record."""
        return tuple(range(run.spec.n_learners)) if self.is_shared else (self.learner,)

    def require_learnable(self, loss: Loss) -> None:
        """Refuse records that the loss is not defined for: what is promised is about others.

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
        """What is promised for this very swap to somebody who hears every holder: their losses added up."""
        counts = np.diff(self.records_0.offsets)
        return compose_guarantees(
            [run.guarantee(i, counts, self.replacements_per_round) for i in self.list_holders(run)]
        )

    def compute_losses(self, run: Run, transcript: Transcript) -> FloatArray:
        """`(rounds, replicas)` exact privacy loss of every round, `log p(y|first) - log p(y|second)`.

        Infinite where one world could not have said it, not-a-number where neither could.

        Raises:
            CaptureError: a holder was not heard in the first round.
        """
        return replay_losses(run, transcript, self.list_holders(run), [self.records_0, self.records_1]).realised_losses[
            :, 0
        ]


def replay_losses(
    run: Run, transcript: Transcript, holders: Sequence[int], worlds: Sequence[LearnerData]
) -> PrivacyLosses:
    """What the messages of all holders of a record tell, between the first world and each other one: their losses added up.

    Raises:
        CaptureError: a holder was not heard in the first round.
    """
    with np.errstate(invalid="ignore"):  # neither world could have said it
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
    """One record of a learner, in all of its uses, against another one.

    Args:
        data: all records.
        learner: whose.
        row: which.
        features: of the other one, as placed: scaled, with the intercept.
        label: of the other one, in the domain of the loss.
        other: the other one, in words.
        shared: all learners hold the same records.

    Raises:
        DataError: no such record, one that does not fit, or the same again.
    """
    own = data.learners[learner]
    if 0 <= row < len(own.labels) and row not in own.order:
        raise DataError(
            f"record {row} is learned in no round, so a swap shows nothing; record {own.order[0]} is learned"
        )
    what = f"record {row}, in all of its uses, against {replacement_name}"
    return Worlds(learner, own, own.with_record(row, features, label), what, is_shared)


# ---- runs on the simulator -------------------------------------------------------------------------------------------

NoiseFactory = Callable[[np.random.SeedSequence], NoiseSource]
"""How an audited learner draws its noise."""

ProgressCallback = Callable[[float], None]
"""Is told, while something is done, what share of it is done."""

MAX_TRANSCRIPT_BYTES = 2**27
"""Of the messages that are held at a time."""


@dataclass(frozen=True, slots=True)
class RecordedRuns:
    """Some runs of one world.

    Attributes:
        world: 0 or 1.
        transcript: what was said.
        decisions: `(rounds, learners, replicas, dim)` in use when a round's records arrived; None: not published.
        channel: what else crossed the wire, of every run, by view: sizes, times, metadata. Only real services have any.
    """

    world: int
    transcript: Transcript
    decisions: FloatArray | None = None
    channel_features: tuple[Mapping[str, RunFeatures], ...] = ()


def discard_progress(done: float) -> None:
    """Is told, and nothing comes of it."""


def scale_progress(tell: ProgressCallback, start: float, stop: float) -> ProgressCallback:
    """Is told how far a part of something is that reaches from one share of it to another."""
    return lambda done: tell(start + (stop - start) * done)


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Some of the runs to be made.

    Attributes:
        world: of all of them.
        runs: how many.
        seed: of their noise.
        pair: of worlds, by its place in `AuditPlan.pairs`.
        tell: is told how far they are, wherever they are made.
    """

    world: int
    runs: int
    seed: np.random.SeedSequence
    pair_index: int = 0
    on_progress: ProgressCallback = discard_progress


def spawn_seeds(seed: np.random.SeedSequence, count: int) -> list[np.random.SeedSequence]:
    """Independent seeds from one, the same ones whenever asked (`SeedSequence.spawn` counts)."""
    return np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key, pool_size=seed.pool_size).spawn(count)


def plan_chunks(runs: int, most: int, seed: np.random.SeedSequence, pair: int = 0) -> list[RunChunk]:
    """`2 runs` runs, each in a world that a fair coin chose, at most so many in a share; worlds take turns."""
    coins, *sources = spawn_seeds(seed, 3)
    seconds = int(np.random.default_rng(coins).binomial(2 * runs, 0.5))
    by_world = []
    for world, (count, source) in enumerate(zip((2 * runs - seconds, seconds), sources, strict=True)):
        sizes = [min(most, count - done) for done in range(0, count, most)]
        seeds = spawn_seeds(source, len(sizes))
        by_world.append([RunChunk(world, size, own, pair) for size, own in zip(sizes, seeds, strict=True)])
    longest = max(map(len, by_world))
    return [own[k] for k in range(longest) for own in by_world if k < len(own)]


def simulate_runs(
    run: Run,
    data: PlacedData,
    worlds: Worlds,
    share: RunChunk,
    noise: NoiseFactory,
    *,
    rounds: int | None = None,
    keep_all_learners: bool = False,
    keep_decisions: bool = False,
) -> RecordedRuns:
    """Simulate a share of the runs.

    Args:
        run: what runs.
        data: of all learners; the holders' records are those of the world.
        worlds: the two worlds.
        share: of which world, and how many.
        noise: where the noise comes from.
        rounds: only the first ones (default: all).
        everybody: keep what all learners say, not only what a replay needs.
        decisions: keep all decisions, too.
    """
    kept = slice(None) if keep_all_learners else find_needed_learners(run, worlds)
    rounds = run.spec.rounds if rounds is None else rounds
    lead = (rounds, run.spec.n_learners, share.runs)
    # All else is left at zero, whose pages take no memory.
    said = {name: np.zeros((*lead, *shape)) for name, shape in run.field_shapes.items()}
    decided = np.empty((*lead, run.algorithm.dim)) if keep_decisions else None
    known = worlds.build_data(data, share.world)
    for step in islice(simulate_rounds(run, known, noise(share.seed), share.runs), rounds):
        for name, values in said.items():
            values[step.t, kept] = step.message[name][kept]
        if decided is not None:
            decided[step.t] = step.decisions_before
        share.on_progress((step.t + 1) / rounds)
    return RecordedRuns(share.world, Transcript(said), decided)


def find_needed_learners(run: Run, worlds: Worlds) -> list[int]:
    """The learners whose messages a replay needs: the holders, and those that they ever hear."""
    holders = worlds.list_holders(run)
    mixings = [run.network.mixing(t) for t in range(run.spec.rounds)]
    heard = {j for mixing in mixings for i in holders for j in mixing.in_neighbour_weights(i)}
    return sorted(heard.union(holders))


def count_numbers(run: Run) -> int:
    """Numbers that all learners say in a run."""
    said = sum(math.prod(shape) for shape in run.field_shapes.values())
    return run.spec.rounds * run.spec.n_learners * said


def count_runs_in_memory(run: Run, *, keep_decisions: bool = False) -> int:
    """Of how many runs the messages fit into `MAX_TRANSCRIPT_BYTES`."""
    decided = run.spec.rounds * run.spec.n_learners * run.algorithm.dim if keep_decisions else 0
    return max(1, MAX_TRANSCRIPT_BYTES // (8 * (count_numbers(run) + decided)))


# ---- runs that differ in one record alone ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoupledRuns:
    """One number of the learner's messages over all rounds, `(rounds,)` each.

    Attributes:
        field, coordinate: which number: the one that the swap moves most where there is no noise.
        swapped: the first round that learns the record.
        first, second: said in either world, with the same noise.
        noiseless_0, noiseless_1: without any noise.
        scale: of the noise.
    """

    field: str
    coordinate: int
    first_affected_round: int
    message_0: FloatArray
    message_1: FloatArray
    noiseless_0: FloatArray
    noiseless_1: FloatArray
    scale: FloatArray

    @property
    def largest_shift_round(self) -> int:
        """The round whose message the swap moves most, against the noise; without noise: most."""
        moved = np.abs(self.noiseless_0 - self.noiseless_1)
        known = np.where(self.scale > 0, self.scale, np.inf)
        relative = moved / known if np.isfinite(known).any() else moved
        return int(relative.argmax())


def simulate_coupled_runs(run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence) -> CoupledRuns:
    """Simulate both worlds with the same noise, and without any."""
    learner = worlds.learner
    heard = [
        simulate_runs(run, data, worlds, RunChunk(world, 1, seed), noise).transcript
        for noise in (SeededNoise, lambda _: no_noise)
        for world in (0, 1)
    ]
    moved = {
        name: np.abs(values[:, learner, 0] - heard[3].fields[name][:, learner, 0]).max(axis=0)
        for name, values in heard[2].fields.items()
    }
    field = max(moved, key=lambda name: float(moved[name].max()))
    coordinate = int(moved[field].argmax())
    first, second, *bare = (np.ascontiguousarray(each.fields[field][:, learner, 0, coordinate]) for each in heard)
    scale = np.array([run.algorithm.noise_scale(learner, t) for t in range(run.spec.rounds)])
    return CoupledRuns(
        field, coordinate, int(worlds.replacements_per_round.argmax()), first, second, bare[0], bare[1], scale
    )


# ---- what a learner keeps to itself ----------------------------------------------------------------------------------

PRIVATE_QUANTITIES = ("norm of the gradient", "loss", "norm of the decision")
"""Summed over rounds. Numbers of records are the same in both worlds."""


def compute_private_differences(run: Run, worlds: Worlds, transcript: Transcript) -> FloatArray:
    """`(runs, len(QUANTITIES))`: every quantity in the first world, without what it is in the second.

    A function of what was heard: it knows nothing of the world that the run lived in. Rounds that were not heard count for
    nothing, and so does what is not finite.
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
        one, other = (_kept(run.loss, decisions[w], batch) for w, batch in enumerate(batches))
        total += np.nan_to_num(one - other, nan=0.0, posinf=0.0, neginf=0.0)
    return total


def _kept(loss: Loss, decision: FloatArray, batch: Batch) -> FloatArray:
    """`(runs, len(QUANTITIES))` of a round's records, learned at `decision (runs, dim)`."""
    norms = np.linalg.norm(decision, axis=-1)
    if not batch.size:
        return np.stack([np.zeros_like(norms), np.zeros_like(norms), norms], axis=-1)
    enforced = Batch(*loss.enforce_bounds(batch.features, batch.labels))
    gradient = np.linalg.norm(mean_gradient(loss, decision, enforced), axis=-1)
    return np.stack([gradient, loss.values(decision, enforced).mean(axis=-1), norms], axis=-1)
