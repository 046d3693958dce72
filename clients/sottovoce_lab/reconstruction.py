"""Attacks that rebuild records from overheard gradients, and how like the true records the results are.

From the messages of a learner follow the gradients that it added in between. The eavesdropper knows the run, so it undoes the
mixing and the step. Noise, clipping and projection stay in what it finds.

    gossip descent    g_t = (b_t - y_{t+1}) / alpha_t - r p,   b_t = sum_j a_ij y_t^j,   p = b_t or y_t
    ldp-dol           d_t = (y_t + gamma_t sum_j w_ij (y_t^j - y_t) - y_{t+1}) / lambda_t - r y_t
    pd-ftgl, pd-ocg   m^0 of a block: the sum of the block before

Records of linear losses are read off their gradients without a search. A margin loss has the gradient `phi'(z) a`, the softmax
the outer product of `p - e_b` and a: the record up to a factor. The appended intercept is 1 before rows are scaled, which gives
the factor.

A record counts up to a positive factor, as a picture does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.algorithms.follow_the_leader.algorithm import PdFtgl
from sottovoce_core.algorithms.gradient_descent.algorithm import GossipDescent
from sottovoce_core.algorithms.ldp_dol.algorithm import LdpDol
from sottovoce_core.arrays import AnyArray, Batch, FloatArray, IntArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import SoftmaxLoss
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript

# ---- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Added:
    """Data gradients that one learner added, as an eavesdropper computes them.

    Attributes:
        rounds: `(k,)` rounds whose records they are of; of a block of rounds, the first.
        at: `(k, dim)` where they were taken; not-a-number where messages do not tell.
        gradients: `(k, dim)`.
        length: rounds whose gradients are added up.
        so_far: means over all records up to the round, not over those of the round.
    """

    rounds: IntArray
    at: FloatArray
    gradients: FloatArray
    length: int = 1
    so_far: bool = False


def _added(run: Run, transcript: Transcript, learner: int) -> _Added:
    """The gradients that one learner added.

    Args:
        run: the run that was overheard.
        transcript: what all learners said.
        learner: whose gradients.

    Raises:
        SpecError: the algorithm's messages are neither models nor sums of gradients, or too few were heard.
    """
    algorithm, rounds = run.algorithm, transcript.count_complete_rounds(learner)
    if rounds < 2:
        raise SpecError(f"what a learner added shows in two of its messages, heard one after the other, got {rounds}")
    heard = transcript.truncate(rounds)
    match algorithm:
        case GossipDescent():
            return _descended(run, algorithm, heard, learner)
        case LdpDol():
            return _pulled(run, algorithm, heard, learner)
        case PdFtgl():
            return _block_sums(algorithm, _said(heard, learner))
        case _:
            text = "gradients can be computed from the messages of gossip descent, ldp-dol, pd-ftgl and pd-ocg"
            raise SpecError(f"{text}, got {algorithm.name}")


def _said(heard: Transcript, learner: int) -> FloatArray:
    """`(rounds, dim)`: what a learner said in the first of the runs that were overheard."""
    said: FloatArray = heard.fields["y"][:, learner, 0]
    return said


def _descended(run: Run, algorithm: GossipDescent, heard: Transcript, learner: int) -> _Added:
    said = _said(heard, learner)
    ts, own = range(len(said) - 1), said[:-1]
    mixed = np.stack(
        [_heard(run, heard, learner, t) + run.network.mixing(t).own_weights[learner] * said[t] for t in ts]
    )
    at = mixed if algorithm.gradient_at == "mixed" else own
    steps = np.array([algorithm.step[learner](t) for t in ts])
    gradients = (mixed - said[1:]) / steps[:, None] - run.loss.ridge * at
    return _Added(np.arange(len(at)), at, gradients)


def _pulled(run: Run, algorithm: LdpDol, heard: Transcript, learner: int) -> _Added:
    said = _said(heard, learner)
    ts, own, plan = range(len(said) - 1), said[:-1], algorithm.schedules
    drift = [
        _heard(run, heard, learner, t) - run.network.mixing(t).neighbour_weights[learner].sum() * own[t] for t in ts
    ]
    coupling, steps = (np.array([one(t) for t in ts])[:, None] for one in (plan.coupling, plan.step_size))
    gradients = (own + coupling * np.stack(drift) - said[1:]) / steps - run.loss.ridge * own
    return _Added(np.arange(len(own)), own, gradients, so_far=True)


def _block_sums(algorithm: PdFtgl, said: FloatArray) -> _Added:
    """Decisions are public in the blocks before any sum has reached them."""
    blocks = algorithm.blocks
    openings = [t for t in range(len(said)) if blocks.leaf(t) and blocks.is_block_start(t)]
    if not openings:
        raise SpecError("no sum of gradients was overheard: the first is said in the second block of rounds")
    sums = said[openings]
    at = np.full_like(sums, np.nan)
    at[: algorithm.delay] = algorithm.decision_set.project(algorithm.loss.initial_parameters(algorithm.dim))
    return _Added(np.array(openings) - blocks.length, at, sums, length=blocks.length)


def _heard(run: Run, heard: Transcript, learner: int, t: int) -> FloatArray:
    """`(dim,)`: `sum_j w_ij y_t^j` over the neighbours, who alone are sure to have been heard."""
    weights = run.network.mixing(t).in_neighbour_weights(learner)
    said = heard.messages(t, learner, {learner, *weights})
    own = np.zeros_like(said[learner]["y"][0, 0])
    total: FloatArray = sum((weight * said[j]["y"][0, 0] for j, weight in weights.items()), own)
    return total


def _fits_better(loss: Loss, at: FloatArray, gradient: FloatArray, record: Batch, other: Batch) -> bool:
    """Does one record's gradient lie nearer to the overheard one than another's? Of two, the likelier, under Laplace noise.

    Args:
        loss: of the run.
        at: `(dim,)`, where the gradient was taken.
        gradient: `(dim,)`, overheard.
        record, other: one record each.
    """
    first, second = (
        np.abs(gradient - loss.gradient_sum(at, Batch(*loss.enforce_bounds(each.features, each.labels)))).sum()
        for each in (record, other)
    )
    return bool(first < second)


# ---- closed form -----------------------------------------------------------------------------------------------------

_TINY = 1e-300


def _read(
    gradients: FloatArray, loss: Loss, *, intercept: bool, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """The records whose data gradients these are.

    Noise is met by the best fit of rank one. The sign: the true class has the largest residual, and it is negative. A margin
    loss leaves the sign open; the intercept tells it, or features that cannot be negative do. A gradient of zero, of a record
    that is fitted exactly, tells nothing.

    Args:
        gradients: `(..., dim)`, each of one record.
        loss: linear in the record: softmax, or a margin loss of two classes.
        intercept: the last feature is a constant 1; else rows come at the loss's feature bound.
        nonnegative: the features are known not to be negative, such as pixels.

    Returns:
        Records `(..., features)`, the intercept included, and labels `(...)`, which mean nothing for squared error.
    """
    if isinstance(loss, SoftmaxLoss):
        matrices = gradients.reshape(*gradients.shape[:-1], loss.classes, -1)
        left, _, right = np.linalg.svd(matrices, full_matrices=False)
        residuals, rows = left[..., 0], right[..., 0, :]
        largest = np.abs(residuals).argmax(axis=-1)
        rows = rows * -np.sign(np.take_along_axis(residuals, largest[..., None], axis=-1))
        labels = np.asarray(largest, dtype=np.float64)
    else:
        known = gradients[..., -1] if intercept and not nonnegative else gradients.sum(axis=-1)
        labels = np.asarray(known < 0, dtype=np.float64)
        rows = gradients * np.where(known < 0, -1.0, 1.0)[..., None]
    if intercept:
        return rows / np.maximum(np.abs(rows[..., -1:]), _TINY), labels
    return rows * (loss.feature_bound / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), _TINY)), labels


def _read_stream(
    found: _Added, loss: Loss, *, intercept: bool, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Round by round, the records `(rounds, features)` of a learner that gets one a round, and their labels `(rounds,)`.

    Where gradients are means over all records so far, those read before are taken out, so that errors add up. Arguments as
    for `_read`.
    """
    if not found.so_far:
        return _read(found.gradients, loss, intercept=intercept, nonnegative=nonnegative)
    count, dim = found.at.shape
    rows, labels = np.empty((count, dim // getattr(loss, "classes", 1))), np.empty(count)
    for t in range(count):
        gradient = (t + 1) * found.gradients[t]
        if t:
            gradient = gradient - loss.gradient_sum(found.at[t], Batch(*loss.enforce_bounds(rows[:t], labels[:t])))
        rows[t], labels[t] = _read(gradient, loss, intercept=intercept, nonnegative=nonnegative)
    return rows, labels


# ---- likeness --------------------------------------------------------------------------------------------------------

_BRIGHTNESS, _CONTRAST = 0.01**2, 0.03**2
"""Constants c1 and c2 of structural similarity, for values up to 1 (Wang, Bovik, Sheikh, Simoncelli 2004)."""


def _as_pictures(rows: FloatArray, *, nonnegative: bool = True) -> FloatArray:
    """Rows `(..., features)` scaled so that their largest value is 1; what cannot be negative is cut off at 0."""
    kept = np.maximum(rows, 0.0) if nonnegative else rows
    scaled: FloatArray = kept / np.maximum(np.abs(kept).max(axis=-1, keepdims=True), _TINY)
    return scaled


def _similarity(pictures: FloatArray, originals: FloatArray) -> FloatArray:
    """Structural similarity of each with one window over all of it, `(...)`: 1 for equal ones, about 0 for unrelated ones."""
    means = pictures.mean(axis=-1), originals.mean(axis=-1)
    spreads = pictures.var(axis=-1), originals.var(axis=-1)
    common = ((pictures - means[0][..., None]) * (originals - means[1][..., None])).mean(axis=-1)
    bright = (2 * means[0] * means[1] + _BRIGHTNESS) / (means[0] ** 2 + means[1] ** 2 + _BRIGHTNESS)
    alike: FloatArray = bright * (2 * common + _CONTRAST) / (spreads[0] + spreads[1] + _CONTRAST)
    return alike


def _recognised(pictures: FloatArray, originals: FloatArray, pool: FloatArray) -> AnyArray:
    """Is each one's original the record of a pool that it correlates with most? `(n,)` of truth values.

    Args:
        pictures: `(n, features)` rebuilt.
        originals: `(n, features)`, records of the pool.
        pool: `(records, features)` that the eavesdropper knows, but not whose they are.
    """
    found = pool[(_centred(pictures) @ _centred(pool).T).argmax(axis=-1)]
    same: AnyArray = np.isclose(found, originals).all(axis=-1)
    return same


def _centred(rows: FloatArray) -> FloatArray:
    moved = rows - rows.mean(axis=-1, keepdims=True)
    scaled: FloatArray = moved / np.maximum(np.linalg.norm(moved, axis=-1, keepdims=True), _TINY)
    return scaled


# ---- rebuild ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Rebuilt records, and how like the true ones they are; the first of every learner come first.

    Attributes:
        originals, pictures: `(n, features)`, scaled as by `_as_pictures`, without the intercept.
        error: mean squared error, mean of all.
        alike: structural similarity, mean of all.
        found: share whose original is the nearest of all records in the run.
        told: share in which the true record fits the overheard gradient better than one other record does; not-a-number
            where messages do not tell at which parameters the gradient was taken.
        pool: how many records there are to confuse one with.
    """

    originals: FloatArray
    pictures: FloatArray
    mean_squared_error: float
    similarity: float
    recognised_share: float
    identified_share: float
    pool_size: int


def reconstruct_records(
    run: Run, data: PlacedData, transcript: Transcript, *, max_rounds: int = 8, seed: int = 0
) -> Reconstruction:
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
    if run.spec.offline_intervals:
        raise SpecError(
            "rebuilding records needs all learners in all rounds, got offline_intervals: take a run without them"
        )
    nonnegative = bool((data.test_features >= 0).all())
    generator = np.random.default_rng(seed)
    rows, truth, told = [], [], []
    for i, own in enumerate(data.learners):
        seen = _single(_added(run, transcript, i), own, run.loss, max_rounds)
        rows.append(_rows(run, seen, i, nonnegative, seed + i))
        batches = [own.batch(int(t)) for t in seen.rounds]
        truth.append(np.concatenate([batch.features for batch in batches]))
        told += list(_told(run.loss, seen, batches, data, generator))
    width = data.n_features - int(run.spec.data.intercept)
    pool, originals, pictures = (
        _as_pictures(each[:, :width], nonnegative=nonnegative)
        for each in (np.concatenate([own.features for own in data.learners]), _firsts_first(truth), _firsts_first(rows))
    )
    return Reconstruction(
        originals,
        pictures,
        mean_squared_error=float(((pictures - originals) ** 2).mean()),
        similarity=float(_similarity(pictures, originals).mean()),
        recognised_share=float(_recognised(pictures, originals, pool).mean()),
        identified_share=float(np.mean(told)) if told else np.nan,
        pool_size=len(np.unique(pool, axis=0)),
    )


def _single(found: _Added, own: LearnerData, loss: Loss, most: int) -> _Added:
    """What a learner added in its first rounds, as long as each is of one record.

    Of a network, as long as it is known where gradients were taken. Its history is not taken out of a mean over all
    records: there, the first round alone is of one.
    """
    if found.length > 1:
        raise SpecError(f"a message must be of one record to be read, got a sum over {found.length} rounds")
    most = 1 if found.so_far and loss.has_slow_gradient else most
    sizes = np.diff(own.offsets)[found.rounds[:most]]
    fit = (sizes == 1) & (~np.bool_(loss.has_slow_gradient) | np.isfinite(found.at[: len(sizes)]).all(axis=-1))
    count = len(fit) if fit.all() else int(fit.argmin())
    if count == 0:
        raise SpecError(f"a message must be of one record to be read, got {sizes[0]} in the first round")
    return replace(found, rounds=found.rounds[:count], at=found.at[:count], gradients=found.gradients[:count])


def _rows(run: Run, seen: _Added, learner: int, nonnegative: bool, seed: int) -> FloatArray:
    """The records, `(k, features)`."""
    if not run.loss.has_slow_gradient:
        return _read_stream(seen, run.loss, intercept=run.spec.data.intercept, nonnegative=nonnegative)[0]
    from sottovoce_core.losses.torch import TorchLoss
    from sottovoce_lab.inversion import invert  # PyTorch takes seconds to import

    if not isinstance(run.loss, TorchLoss):
        raise SpecError(f"a search needs a PyTorch module as the loss, got {type(run.loss).__name__}")
    # Nothing fits exactly where there is noise: to search for longer finds nothing better.
    starts, iterations = (1, 50) if run.algorithm.noise_scale(learner, int(seen.rounds[0]) + 1) else (2, 100)
    pairs = zip(seen.at, seen.gradients, strict=True)
    found = [
        invert(run.loss, at, gradient, seed, max_searches=starts, max_iterations=iterations) for at, gradient in pairs
    ]
    return np.stack([each.record for each in found])


def _told(
    loss: Loss, seen: _Added, batches: list[Batch], data: PlacedData, generator: np.random.Generator
) -> Iterator[bool]:
    """Is each true record told from another one, drawn from all? Of means over all records, the first round alone counts."""
    everybody = [(own, row) for own in data.learners for row in own.order[own.offsets[0] : own.offsets[-1]].tolist()]
    for k, batch in enumerate(batches[: 1 if seen.so_far else None]):
        own, row = everybody[int(generator.integers(len(everybody)))]
        other = Batch(own.features[row : row + 1], own.labels[row : row + 1])
        if np.isfinite(seen.at[k]).all() and (other.features != batch.features).any():
            yield _fits_better(loss, seen.at[k], seen.gradients[k], batch, other)


def _firsts_first(parts: list[FloatArray]) -> FloatArray:
    """Every learner's first record, then every learner's second one, and so on."""
    longest = max(len(part) for part in parts)
    return np.concatenate([part[k : k + 1] for k in range(longest) for part in parts])
