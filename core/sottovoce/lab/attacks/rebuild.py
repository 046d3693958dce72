"""A transcript's records rebuilt, beside the true ones: what a picture of the attack shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import Batch, FloatArray
from sottovoce.data import LearnerData, PlacedData
from sottovoce.errors import SpecError
from sottovoce.lab.attacks.closed_form import read_stream
from sottovoce.lab.attacks.gradients import Added, added, fits_better
from sottovoce.lab.attacks.likeness import as_pictures, recognised, similarity
from sottovoce.losses import Loss
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Rebuilt records, and how like the true ones they are; the first of every learner come first.

    Attributes:
        originals, pictures: `(n, features)`, scaled as by `likeness.as_pictures`, without the intercept.
        error: mean squared error, mean of all.
        alike: structural similarity, mean of all.
        found: share whose original is the nearest of all records in the run.
        told: share in which the true record fits the overheard gradient better than one other record does; not-a-number
            where messages do not tell at which parameters the gradient was taken.
        pool: how many records there are to confuse one with.
    """

    originals: FloatArray
    pictures: FloatArray
    error: float
    alike: float
    found: float
    told: float
    pool: int


def rebuild(run: Run, data: PlacedData, transcript: Transcript, *, rounds: int = 8, seed: int = 0) -> Rebuilt:
    """Attack every learner's first records: in closed form, or by a search where the loss is a network.

    Args:
        run: the run that was overheard.
        data: what was learned; the attack itself looks at held-out records alone, to see whether features may be negative.
        transcript: what all learners said (one replica).
        rounds: records of each learner to rebuild, at most.
        seed: of the search, and of the records that true ones are told from.

    Raises:
        SpecError: no attack fits the algorithm, its first messages are of several records, or some learners are away.
    """
    if run.spec.absences:
        raise SpecError("rebuilding records needs all learners in all rounds, got absences: take a run without them")
    nonnegative = bool((data.test_features >= 0).all())
    generator = np.random.default_rng(seed)
    rows, truth, told = [], [], []
    for i, own in enumerate(data.learners):
        seen = _single(added(run, transcript, i), own, run.loss, rounds)
        rows.append(_rows(run, seen, i, nonnegative, seed + i))
        batches = [own.batch(int(t)) for t in seen.rounds]
        truth.append(np.concatenate([batch.features for batch in batches]))
        told += list(_told(run.loss, seen, batches, data, generator))
    width = data.n_features - int(run.spec.data.intercept)
    pool, originals, pictures = (
        as_pictures(each[:, :width], nonnegative=nonnegative)
        for each in (np.concatenate([own.features for own in data.learners]), _firsts_first(truth), _firsts_first(rows))
    )
    return Rebuilt(
        originals,
        pictures,
        error=float(((pictures - originals) ** 2).mean()),
        alike=float(similarity(pictures, originals).mean()),
        found=float(recognised(pictures, originals, pool).mean()),
        told=float(np.mean(told)) if told else np.nan,
        pool=len(np.unique(pool, axis=0)),
    )


def _single(found: Added, own: LearnerData, loss: Loss, most: int) -> Added:
    """What a learner added in its first rounds, as long as each is of one record.

    Of a network, as long as it is known where gradients were taken. Its history is not taken out of a mean over all
    records: there, the first round alone is of one.
    """
    if found.length > 1:
        raise SpecError(f"a message must be of one record to be read, got a sum over {found.length} rounds")
    most = 1 if found.so_far and loss.heavy else most
    sizes = np.diff(own.offsets)[found.rounds[:most]]
    fit = (sizes == 1) & (~np.bool_(loss.heavy) | np.isfinite(found.at[: len(sizes), 0]).all(axis=-1))
    count = len(fit) if fit.all() else int(fit.argmin())
    if count == 0:
        raise SpecError(f"a message must be of one record to be read, got {sizes[0]} in the first round")
    return Added(found.rounds[:count], found.at[:count], found.gradients[:count], so_far=found.so_far)


def _rows(run: Run, seen: Added, learner: int, nonnegative: bool, seed: int) -> FloatArray:
    """The records, `(k, features)`."""
    if not run.loss.heavy:
        rows, _ = read_stream(seen, run.loss, intercept=run.spec.data.intercept, nonnegative=nonnegative)
        return rows[:, 0]
    from sottovoce.lab.attacks.inversion import invert  # PyTorch takes seconds to import
    from sottovoce.losses.torch import TorchLoss

    if not isinstance(run.loss, TorchLoss):
        raise SpecError(f"a search needs a PyTorch module as the loss, got {type(run.loss).__name__}")
    # Nothing fits exactly where there is noise: to search for longer finds nothing better.
    starts, iterations = (1, 50) if run.algorithm.noise_scale(learner, int(seen.rounds[0]) + 1) else (2, 100)
    pairs = zip(seen.at[:, 0], seen.gradients[:, 0], strict=True)
    found = [invert(run.loss, at, gradient, seed, starts=starts, iterations=iterations) for at, gradient in pairs]
    return np.stack([each.record for each in found])


def _told(
    loss: Loss, seen: Added, batches: list[Batch], data: PlacedData, generator: np.random.Generator
) -> Iterator[bool]:
    """Is each true record told from another one, drawn from all? Of means over all records, the first round alone counts."""
    everybody = [(own, row) for own in data.learners for row in own.order[own.offsets[0] : own.offsets[-1]].tolist()]
    for k, batch in enumerate(batches[: 1 if seen.so_far else None]):
        own, row = everybody[int(generator.integers(len(everybody)))]
        other = Batch(own.features[row : row + 1], own.labels[row : row + 1])
        if np.isfinite(seen.at[k]).all() and (other.features != batch.features).any():
            yield fits_better(loss, seen.at[k, 0], seen.gradients[k, 0], batch, other)


def _firsts_first(parts: list[FloatArray]) -> FloatArray:
    """Every learner's first record, then every learner's second one, and so on."""
    longest = max(len(part) for part in parts)
    return np.concatenate([part[k : k + 1] for k in range(longest) for part in parts])
