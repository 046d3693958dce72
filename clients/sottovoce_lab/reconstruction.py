"""Attacks that rebuild records from captured messages, and the similarity of the results to the true records.

The messages of a learner determine the gradients that it added in between. The eavesdropper knows the run, so it undoes the
mixing and the step. Noise, clipping and projection remain in the result.

    gossip descent    g_t = (b_t - y_{t+1}) / alpha_t - r p,   b_t = sum_j a_ij y_t^j,   p = b_t or y_t
    ldp-dol           d_t = (y_t + gamma_t sum_j w_ij (y_t^j - y_t) - y_{t+1}) / lambda_t - r y_t
    pd-ftgl, pd-ocg   m^0 of a block: the sum of the block before

Records of linear losses follow from their gradients without a search. The gradient of a margin loss is `phi'(z) a`, that of the
softmax the outer product of `p - e_b` and a: the record up to a factor. The appended intercept is 1 before rows are scaled, which
gives the factor.

Records are compared up to a positive factor, as pictures.
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
class _AddedGradients:
    """Data gradients that one learner added, computed by an eavesdropper.

    Attributes:
        rounds: `(k,)` rounds of the records; the first round, for a block of rounds.
        parameters: `(k, dim)` at which gradients were taken; not-a-number if the messages do not show it.
        gradients: `(k, dim)`.
        length: number of rounds whose gradients are added up.
        is_mean_of_past: whether gradients are means over all records so far, not over those of the round.
    """

    rounds: IntArray
    parameters: FloatArray
    gradients: FloatArray
    length: int = 1
    is_mean_of_past: bool = False


def _compute_added_gradients(run: Run, transcript: Transcript, learner: int) -> _AddedGradients:
    """Compute the gradients that one learner added.

    Args:
        run: the captured run.
        transcript: messages of all learners.
        learner: the learner.

    Raises:
        SpecError: The algorithm's messages are neither models nor sums of gradients, or the transcript is too short.
    """
    algorithm, rounds = run.algorithm, transcript.count_complete_rounds(learner)
    if rounds < 2:
        raise SpecError(f"the transcript must have two consecutive messages of a learner, got {rounds}")
    transcript = transcript.truncate(rounds)
    match algorithm:
        case GossipDescent():
            return _invert_gossip_descent(run, algorithm, transcript, learner)
        case LdpDol():
            return _invert_ldp_dol(run, algorithm, transcript, learner)
        case PdFtgl():
            return _read_block_sums(algorithm, _get_messages(transcript, learner))
        case _:
            text = (
                "the algorithm must be gossip descent, ldp-dol, pd-ftgl or pd-ocg, whose messages determine gradients"
            )
            raise SpecError(f"{text}, got {algorithm.name}")


def _get_messages(transcript: Transcript, learner: int) -> FloatArray:
    """Return a learner's messages in the first run of a transcript, `(rounds, dim)`."""
    messages: FloatArray = transcript.fields["y"][:, learner, 0]
    return messages


def _invert_gossip_descent(run: Run, algorithm: GossipDescent, transcript: Transcript, learner: int) -> _AddedGradients:
    messages = _get_messages(transcript, learner)
    ts, own = range(len(messages) - 1), messages[:-1]
    mixed = np.stack(
        [
            _sum_neighbours(run, transcript, learner, t) + run.network.mixing(t).own_weights[learner] * messages[t]
            for t in ts
        ]
    )
    parameters = mixed if algorithm.gradient_at == "mixed" else own
    steps = np.array([algorithm.step[learner](t) for t in ts])
    gradients = (mixed - messages[1:]) / steps[:, None] - run.loss.ridge * parameters
    return _AddedGradients(np.arange(len(parameters)), parameters, gradients)


def _invert_ldp_dol(run: Run, algorithm: LdpDol, transcript: Transcript, learner: int) -> _AddedGradients:
    messages = _get_messages(transcript, learner)
    ts, own, schedules = range(len(messages) - 1), messages[:-1], algorithm.schedules
    drift = [
        _sum_neighbours(run, transcript, learner, t) - run.network.mixing(t).neighbour_weights[learner].sum() * own[t]
        for t in ts
    ]
    coupling, steps = (
        np.array([schedule(t) for t in ts])[:, None] for schedule in (schedules.coupling, schedules.step_size)
    )
    gradients = (own + coupling * np.stack(drift) - messages[1:]) / steps - run.loss.ridge * own
    return _AddedGradients(np.arange(len(own)), own, gradients, is_mean_of_past=True)


def _read_block_sums(algorithm: PdFtgl, messages: FloatArray) -> _AddedGradients:
    """Read the sums of blocks; decisions are public in the blocks before the first sum arrives."""
    blocks = algorithm.blocks
    openings = [t for t in range(len(messages)) if blocks.leaf(t) and blocks.is_block_start(t)]
    if not openings:
        raise SpecError(
            "the transcript must reach the second block of rounds, in which the first sum of gradients is sent"
        )
    sums = messages[openings]
    parameters = np.full_like(sums, np.nan)
    initial = algorithm.loss.initial_parameters(algorithm.dim)
    parameters[: algorithm.delay] = algorithm.decision_set.project(initial)
    return _AddedGradients(np.array(openings) - blocks.length, parameters, sums, length=blocks.length)


def _sum_neighbours(run: Run, transcript: Transcript, learner: int, t: int) -> FloatArray:
    """Compute `sum_j w_ij y_t^j` over the neighbours, `(dim,)`; only their messages are sure to be in the transcript."""
    weights = run.network.mixing(t).in_neighbour_weights(learner)
    messages = transcript.messages(t, learner, {learner, *weights})
    zero = np.zeros_like(messages[learner]["y"][0, 0])
    total: FloatArray = sum((weight * messages[j]["y"][0, 0] for j, weight in weights.items()), zero)
    return total


def _fits_better(loss: Loss, parameters: FloatArray, gradient: FloatArray, record: Batch, other: Batch) -> bool:
    """Return whether `record` has a gradient nearer to the captured one than `other`: it is likelier under Laplace noise.

    Args:
        loss: loss of the run.
        parameters: `(dim,)` at which the gradient was taken.
        gradient: `(dim,)` captured gradient.
        record, other: one record each.
    """
    first, second = (
        np.abs(gradient - loss.gradient_sum(parameters, Batch(*loss.enforce_bounds(each.features, each.labels)))).sum()
        for each in (record, other)
    )
    return bool(first < second)


# ---- closed form -----------------------------------------------------------------------------------------------------

_TINY = 1e-300


def _solve_records(
    gradients: FloatArray, loss: Loss, *, intercept: bool, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Compute the records with these data gradients in closed form.

    Noise is removed by the best fit of rank one. The sign: the true class has the largest residual, and it is negative. A margin
    loss leaves the sign open; the intercept determines it, or features that cannot be negative. A gradient of zero, of a record
    that is fitted exactly, has no information.

    Args:
        gradients: `(..., dim)`, each of one record.
        loss: linear in the record: softmax, or a margin loss of two classes.
        intercept: the last feature is a constant 1; otherwise rows have the norm of the loss's feature bound.
        nonnegative: the features, such as pixels, are known to be nonnegative.

    Returns:
        Records `(..., features)`, the intercept included, and labels `(...)`, which are meaningless for squared error.
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


def _solve_stream(
    added: _AddedGradients, loss: Loss, *, intercept: bool, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Compute, round by round, the records `(rounds, features)` of a learner with one record a round, and labels `(rounds,)`.

    Where gradients are means over all records so far, those of earlier records are subtracted, so errors add up. Arguments as for
    `_solve_records`.
    """
    if not added.is_mean_of_past:
        return _solve_records(added.gradients, loss, intercept=intercept, nonnegative=nonnegative)
    count, dim = added.parameters.shape
    rows, labels = np.empty((count, dim // getattr(loss, "classes", 1))), np.empty(count)
    for t in range(count):
        gradient = (t + 1) * added.gradients[t]
        if t:
            past = Batch(*loss.enforce_bounds(rows[:t], labels[:t]))
            gradient = gradient - loss.gradient_sum(added.parameters[t], past)
        rows[t], labels[t] = _solve_records(gradient, loss, intercept=intercept, nonnegative=nonnegative)
    return rows, labels


# ---- similarity ------------------------------------------------------------------------------------------------------

_BRIGHTNESS, _CONTRAST = 0.01**2, 0.03**2
"""Constants c1 and c2 of structural similarity, for values up to 1 (Wang, Bovik, Sheikh, Simoncelli 2004)."""


def _scale_pictures(rows: FloatArray, *, nonnegative: bool = True) -> FloatArray:
    """Scale rows `(..., features)` to a largest value of 1; clip nonnegative features at 0."""
    clipped = np.maximum(rows, 0.0) if nonnegative else rows
    scaled: FloatArray = clipped / np.maximum(np.abs(clipped).max(axis=-1, keepdims=True), _TINY)
    return scaled


def _compute_similarity(pictures: FloatArray, originals: FloatArray) -> FloatArray:
    """Compute the structural similarity of pairs, `(...)`, with one window over all: 1 if equal, about 0 if unrelated."""
    means = pictures.mean(axis=-1), originals.mean(axis=-1)
    spreads = pictures.var(axis=-1), originals.var(axis=-1)
    common = ((pictures - means[0][..., None]) * (originals - means[1][..., None])).mean(axis=-1)
    bright = (2 * means[0] * means[1] + _BRIGHTNESS) / (means[0] ** 2 + means[1] ** 2 + _BRIGHTNESS)
    similarity: FloatArray = bright * (2 * common + _CONTRAST) / (spreads[0] + spreads[1] + _CONTRAST)
    return similarity


def _is_recognised(pictures: FloatArray, originals: FloatArray, pool: FloatArray) -> AnyArray:
    """Return whether each picture correlates most with its own original among the records of a pool, `(n,)`.

    Args:
        pictures: `(n, features)` rebuilt pictures.
        originals: `(n, features)`, records of the pool.
        pool: `(records, features)` that the eavesdropper knows, without their learners.
    """
    nearest = pool[(_normalise(pictures) @ _normalise(pool).T).argmax(axis=-1)]
    same: AnyArray = np.isclose(nearest, originals).all(axis=-1)
    return same


def _normalise(rows: FloatArray) -> FloatArray:
    centred = rows - rows.mean(axis=-1, keepdims=True)
    scaled: FloatArray = centred / np.maximum(np.linalg.norm(centred, axis=-1, keepdims=True), _TINY)
    return scaled


# ---- rebuild ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Rebuilt records and their similarity to the true ones, ordered by round, then by learner.

    Attributes:
        originals, pictures: `(n, features)`, scaled as by `_scale_pictures`, without the intercept.
        mean_squared_error: mean over all pictures.
        similarity: structural similarity, mean over all pictures.
        recognised_share: share of pictures that are nearest to their original among all records of the run.
        identified_share: share in which the true record fits the captured gradient better than one other record; not-a-number if
            messages do not show at which parameters the gradient was taken.
        pool_size: number of records of the run.
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
    """Attack every learner's first records: in closed form, or by a search if the loss is a network.

    Args:
        run: the captured run.
        data: the true records; the attack itself uses held-out records only, to see whether features may be negative.
        transcript: messages of all learners (one replica).
        max_rounds: maximum records of each learner to rebuild.
        seed: seed of the search, and of the records that true ones are compared with.

    Raises:
        SpecError: No attack fits the algorithm, its first messages are of several records, or some learners are offline.
    """
    if run.spec.offline_intervals:
        raise SpecError(
            "rebuilding records needs all learners in all rounds, got offline_intervals: take a run without them"
        )
    nonnegative = bool((data.test_features >= 0).all())
    generator = np.random.default_rng(seed)
    rows, truth, identified = [], [], []
    for i, own in enumerate(data.learners):
        added = _select_single_records(_compute_added_gradients(run, transcript, i), own, run.loss, max_rounds)
        rows.append(_rebuild_records(run, added, i, nonnegative, seed + i))
        batches = [own.batch(int(t)) for t in added.rounds]
        truth.append(np.concatenate([batch.features for batch in batches]))
        identified += list(_identify_records(run.loss, added, batches, data, generator))
    width = data.n_features - int(run.spec.data.intercept)
    pool, originals, pictures = (
        _scale_pictures(each[:, :width], nonnegative=nonnegative)
        for each in (
            np.concatenate([own.features for own in data.learners]),
            _interleave(truth),
            _interleave(rows),
        )
    )
    return Reconstruction(
        originals,
        pictures,
        mean_squared_error=float(((pictures - originals) ** 2).mean()),
        similarity=float(_compute_similarity(pictures, originals).mean()),
        recognised_share=float(_is_recognised(pictures, originals, pool).mean()),
        identified_share=float(np.mean(identified)) if identified else np.nan,
        pool_size=len(np.unique(pool, axis=0)),
    )


def _select_single_records(added: _AddedGradients, own: LearnerData, loss: Loss, max_rounds: int) -> _AddedGradients:
    """Select a learner's first gradients, as long as each is of one record.

    For a network, also as long as the parameters are known. Its past is not subtracted from a mean over all records, so only the
    first round is of one record then.
    """
    if added.length > 1:
        raise SpecError(f"a message must be of one record, got a sum over {added.length} rounds")
    max_rounds = 1 if added.is_mean_of_past and loss.has_slow_gradient else max_rounds
    sizes = np.diff(own.offsets)[added.rounds[:max_rounds]]
    known = np.isfinite(added.parameters[: len(sizes)]).all(axis=-1)
    fit = (sizes == 1) & (~np.bool_(loss.has_slow_gradient) | known)
    count = len(fit) if fit.all() else int(fit.argmin())
    if count == 0:
        raise SpecError(f"a message must be of one record, got {sizes[0]} in the first round")
    return replace(
        added,
        rounds=added.rounds[:count],
        parameters=added.parameters[:count],
        gradients=added.gradients[:count],
    )


def _rebuild_records(run: Run, added: _AddedGradients, learner: int, nonnegative: bool, seed: int) -> FloatArray:
    """Rebuild the records, `(k, features)`."""
    if not run.loss.has_slow_gradient:
        return _solve_stream(added, run.loss, intercept=run.spec.data.intercept, nonnegative=nonnegative)[0]
    from sottovoce_core.losses.torch import TorchLoss
    from sottovoce_lab.inversion import invert  # PyTorch takes seconds to import

    if not isinstance(run.loss, TorchLoss):
        raise SpecError(f"the loss must be a PyTorch module to be searched, got {type(run.loss).__name__}")
    # With noise no record fits exactly: a longer search finds nothing better.
    searches, iterations = (1, 50) if run.algorithm.noise_scale(learner, int(added.rounds[0]) + 1) else (2, 100)
    pairs = zip(added.parameters, added.gradients, strict=True)
    found = [
        invert(run.loss, parameters, gradient, seed, max_searches=searches, max_iterations=iterations)
        for parameters, gradient in pairs
    ]
    return np.stack([each.record for each in found])


def _identify_records(
    loss: Loss, added: _AddedGradients, batches: list[Batch], data: PlacedData, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether each true record fits better than another random one; only the first round, for means over all records."""
    pool = [(own, row) for own in data.learners for row in own.order[own.offsets[0] : own.offsets[-1]].tolist()]
    for k, batch in enumerate(batches[: 1 if added.is_mean_of_past else None]):
        own, row = pool[int(generator.integers(len(pool)))]
        other = Batch(own.features[row : row + 1], own.labels[row : row + 1])
        if np.isfinite(added.parameters[k]).all() and (other.features != batch.features).any():
            yield _fits_better(loss, added.parameters[k], added.gradients[k], batch, other)


def _interleave(parts: list[FloatArray]) -> FloatArray:
    """Order every learner's first record before every learner's second one, and so on."""
    longest = max(len(part) for part in parts)
    return np.concatenate([part[k : k + 1] for k in range(longest) for part in parts])
