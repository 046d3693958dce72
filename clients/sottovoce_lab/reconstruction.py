"""Attacks that rebuild records from captured messages, and the distance of the results from the true records.

The messages of a learner determine the gradients that it added in between. The eavesdropper knows the run, so it undoes the
mixing and the step. Noise, clipping and projection remain in the result. The clean x_t and theta_t are public in round 0; later
the noised y_t is taken for them.

    gossip descent    g_t = (b_t - y_{t+1}) / alpha_t - r p,   b_t = sum_j a_ij y_t^j,   p = b_t or x_t
    ldp-dol           d_t = (theta_t + gamma_t sum_j w_ij (y_t^j - theta_t) - y_{t+1}) / lambda_t - r theta_t
    pd-ftgl, pd-ocg   m^0 of a block: the sum of the block before
    d-ftgl            g_t = z_{t+1} - sum_j P_ij z_t^j
    dual averaging    u_0 = h_1 / k; of a shared loss, the own blocks of all learners
    admm, dvp, pvp    d_t = -((rho + Phi) y + 2 lambda_{t+1} + eta sum_i (2 y - y_t - y_t^i)) / C,   y = y_{t+1}

Records of linear losses follow from their gradients without a search. The gradient of a margin loss is `phi'(z) a`, that of the
softmax the outer product of `p - e_b` and a: the record up to a factor. The appended intercept is 1 before rows are scaled, which
gives the factor. A network's record is searched for (`inversion`).

From the gradients of several records, one record is rebuilt, and compared with the nearest of them.

A small error means little by itself: a mean squared error of 0.11 per pixel is that of a blank picture of MNIST. So each error
stands beside those of guesses that need no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from sottovoce_core.algorithms.admm.algorithm import Admm
from sottovoce_core.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce_core.algorithms.follow_the_leader.algorithm import PdFtgl
from sottovoce_core.algorithms.follow_the_leader.d_ftgl import DFtgl
from sottovoce_core.algorithms.gradient_descent.algorithm import Dpsr, GossipDescent
from sottovoce_core.algorithms.interface import Message, StateAxes
from sottovoce_core.algorithms.ldp_dol.algorithm import LdpDol
from sottovoce_core.arrays import AnyArray, Batch, FloatArray, IntArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import SoftmaxLoss
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript

_Item = TypeVar("_Item")

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


def _compute_added_gradients(run: Run, transcript: Transcript, learner: int, sizes: IntArray) -> _AddedGradients:
    """Compute the gradients that one learner added.

    Args:
        run: the captured run.
        transcript: messages of all learners.
        learner: the learner.
        sizes: `(rounds,)` numbers of its records, which are public.

    Raises:
        SpecError: The algorithm is none of the project's, or the transcript is too short.
    """
    algorithm, rounds = run.algorithm, transcript.count_complete_rounds(learner)
    if rounds < 2:
        raise SpecError(f"the transcript must have two consecutive messages of a learner, got {rounds}")
    transcript = transcript.truncate(rounds)
    match algorithm:
        case GossipDescent():
            return _invert_gossip_descent(run, algorithm, transcript, learner)
        case Dpsr():
            return _invert_gossip_descent(run, algorithm.descent, transcript, learner)
        case LdpDol():
            return _invert_ldp_dol(run, algorithm, transcript, learner)
        case PdFtgl():
            return _read_block_sums(algorithm, _get_messages(transcript, learner))
        case DFtgl():
            return _invert_running_sums(run, algorithm, transcript, learner)
        case DualAveraging():
            return _invert_dual_averaging(algorithm, transcript, learner)
        case Admm():
            return _invert_admm(run, algorithm, transcript, learner, sizes)
        case _:
            text = "the algorithm must be one of the project's, whose messages determine gradients in a known way"
            raise SpecError(f"{text}, got {algorithm.name}")


def _get_messages(transcript: Transcript, learner: int) -> FloatArray:
    """Return a learner's messages in the first run of a transcript, `(rounds, dim)`."""
    messages: FloatArray = transcript.fields["y"][:, learner, 0]
    return messages


def _estimate_states(algorithm: GossipDescent | LdpDol, messages: FloatArray) -> FloatArray:
    """Return the public state of round 0, and the messages of later rounds except the last, `(rounds - 1, dim)`."""
    states = messages[:-1].copy()
    states[0] = algorithm.decision_set.project(algorithm.loss.initial_parameters(algorithm.dim))
    return states


def _invert_gossip_descent(run: Run, algorithm: GossipDescent, transcript: Transcript, learner: int) -> _AddedGradients:
    messages = _get_messages(transcript, learner)
    states = _estimate_states(algorithm, messages)
    own = states if algorithm.own_value == "clean" else messages[:-1]
    mixed = np.stack([_mix(run, transcript, learner, t, own[t]) for t in range(len(own))])
    parameters = mixed if algorithm.gradient_at == "mixed" else states
    steps = np.array([algorithm.step[learner](t) for t in range(len(own))])
    gradients = (mixed - messages[1:]) / steps[:, None] - run.loss.ridge * parameters
    return _AddedGradients(np.arange(len(parameters)), parameters, gradients)


def _invert_ldp_dol(run: Run, algorithm: LdpDol, transcript: Transcript, learner: int) -> _AddedGradients:
    messages, schedules = _get_messages(transcript, learner), algorithm.schedules
    own = _estimate_states(algorithm, messages)
    ts = range(len(own))
    drift = [
        _sum_neighbours(run, transcript, learner, t) - run.network.mixing(t).neighbour_weights[learner].sum() * own[t]
        for t in ts
    ]
    coupling, steps = (
        np.array([schedule(t) for t in ts])[:, None] for schedule in (schedules.coupling, schedules.step_size)
    )
    gradients = (own + coupling * np.stack(drift) - messages[1:]) / steps - run.loss.ridge * own
    return _AddedGradients(np.arange(len(own)), own, gradients, is_mean_of_past=True)


def _invert_running_sums(run: Run, algorithm: DFtgl, transcript: Transcript, learner: int) -> _AddedGradients:
    sums, start = _get_messages(transcript, learner), algorithm.init(StateAxes(learner))
    parameters, gradients = np.empty_like(sums[1:]), np.empty_like(sums[1:])
    for t in range(len(gradients)):
        state, _ = algorithm.replay(replace(start, t=t), Message({"y": sums[t]}))
        own_weight = float(run.network.mixing(t).own_weights[learner])
        mixed = algorithm.gossip.mix(sums[t], _sum_neighbours(run, transcript, learner, t), own_weight)
        parameters[t], gradients[t] = algorithm.decision(state), sums[t + 1] - mixed
    return _AddedGradients(np.arange(len(gradients)), parameters, gradients)


def _invert_dual_averaging(algorithm: DualAveraging, transcript: Transcript, learner: int) -> _AddedGradients:
    """Invert the first gradient; later ones are taken at decisions that differ between the learners of a shared loss."""
    first = transcript.fields["h"][1, :, 0]
    total = np.where(algorithm.owned_mask, first, 0.0).sum(axis=0) if algorithm.has_shared_loss else first[learner]
    parameters = algorithm.decision_set.project(np.zeros(algorithm.dim))
    gradient = total / algorithm.gradient_factor - algorithm.loss.ridge * parameters
    return _AddedGradients(np.zeros(1, dtype=np.int64), parameters[None], gradient[None])


def _invert_admm(run: Run, algorithm: Admm, transcript: Transcript, learner: int, sizes: IntArray) -> _AddedGradients:
    messages, node, counts = _get_messages(transcript, learner), algorithm.nodes[learner], np.cumsum(sizes)
    before, after = messages[:-1], messages[1:]
    neighbours = np.stack([_sum_neighbours(run, transcript, learner, t, weighted=False) for t in range(len(before))])
    duals = node.penalty / 2.0 * np.cumsum(node.degree * before - neighbours, axis=0)
    ridges = [
        algorithm.calibration.calibrate_iteration(node, float(counts[t]), 0.0, t + 2 == algorithm.rounds).extra_ridge
        for t in range(len(before))
    ]
    stiffness = node.stiffness + np.array(ridges, dtype=np.float64)[:, None]
    slopes = stiffness * after + 2.0 * duals - node.penalty * (node.degree * before + neighbours)
    return _AddedGradients(np.arange(len(before)), after, slopes / -node.loss_weight, is_mean_of_past=True)


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


def _mix(run: Run, transcript: Transcript, learner: int, t: int, own: FloatArray) -> FloatArray:
    """Compute `a_ii own + sum_j a_ij y_t^j`, `(dim,)`."""
    mixed: FloatArray = _sum_neighbours(run, transcript, learner, t) + run.network.mixing(t).own_weights[learner] * own
    return mixed


def _sum_neighbours(run: Run, transcript: Transcript, learner: int, t: int, *, weighted: bool = True) -> FloatArray:
    """Compute `sum_j w_ij y_t^j` over the neighbours, `(dim,)`; only their messages are sure to be in the transcript."""
    weights = run.network.mixing(t).in_neighbour_weights(learner)
    messages = transcript.messages(t, learner, {learner, *weights})
    zero = np.zeros_like(messages[learner]["y"][0, 0])
    terms = ((weight if weighted else 1.0) * messages[j]["y"][0, 0] for j, weight in weights.items())
    total: FloatArray = sum(terms, zero)
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
    gradients: FloatArray, loss: Loss, *, length: float | None, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Compute the records with these data gradients in closed form.

    Noise is removed by the best fit of rank one. The sign: the true class has the largest residual, and it is negative. A margin
    loss leaves the sign open; the intercept determines it, or features that cannot be negative. A gradient of zero, of a record
    that is fitted exactly, has no information.

    Args:
        gradients: `(..., dim)`, each of one record.
        loss: linear in the record: softmax, or a margin loss of two classes.
        length: norm of the rows; None: the last feature, an intercept of 1, determines it.
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
        known = gradients[..., -1] if length is None and not nonnegative else gradients.sum(axis=-1)
        labels = np.asarray(known < 0, dtype=np.float64)
        rows = gradients * np.where(known < 0, -1.0, 1.0)[..., None]
    if length is None:
        return rows / np.maximum(np.abs(rows[..., -1:]), _TINY), labels
    return rows * (length / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), _TINY)), labels


def _solve_stream(
    added: _AddedGradients, loss: Loss, *, length: float | None, nonnegative: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Compute, round by round, the records `(rounds, features)` of a learner with one record a round, and labels `(rounds,)`.

    Where gradients are means over all records so far, those of earlier records are subtracted, so errors add up. Arguments as for
    `_solve_records`.
    """
    if not added.is_mean_of_past:
        return _solve_records(added.gradients, loss, length=length, nonnegative=nonnegative)
    count, dim = added.parameters.shape
    rows, labels = np.empty((count, dim // getattr(loss, "classes", 1))), np.empty(count)
    for t in range(count):
        gradient = (t + 1) * added.gradients[t]
        if t:
            past = Batch(*loss.enforce_bounds(rows[:t], labels[:t]))
            gradient = gradient - loss.gradient_sum(added.parameters[t], past)
        rows[t], labels[t] = _solve_records(gradient, loss, length=length, nonnegative=nonnegative)
    return rows, labels


# ---- similarity ------------------------------------------------------------------------------------------------------

_BRIGHTNESS, _CONTRAST = 0.01**2, 0.03**2
"""Constants c1 and c2 of structural similarity, for values up to 1 (Wang, Bovik, Sheikh, Simoncelli 2004)."""


def _scale_pictures(rows: FloatArray) -> FloatArray:
    """Cut rows `(..., features)` at 0 and scale them to a largest value of 1: likeness does not depend on brightness."""
    cut = np.maximum(rows, 0.0)
    scaled: FloatArray = cut / np.maximum(cut.max(axis=-1, keepdims=True), _TINY)
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

_MAX_LEARNERS, _MAX_ROUNDS = 8, 8
"""Maximum number of attacked learners, the first ones, and of gradients of each."""
_MAX_POOL_RECORDS = 2000
"""Maximum number of records, in addition to the originals, among which a picture is recognised."""


class ReferenceGuess(NamedTuple):
    """Pictures `(n, features)` guessed without any message, and their mean squared error."""

    pictures: FloatArray
    mean_squared_error: float


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Rebuilt records and their similarity to the true ones, ordered by round, then by learner.

    Pictures are scaled such that the feature range, the smallest to the largest feature of all held-out records, becomes [0, 1].
    For errors they are cut to it; for similarity and recognition each is scaled to a largest value of 1. Where no intercept
    shows a record's length, records are as the loss scales them to the feature bound.

    Attributes:
        originals: `(n, features)` true records, without the intercept, not cut.
        pictures: `(n, features)` rebuilt records, cut.
        mean_squared_error: mean over all features and pictures.
        similarity: structural similarity, mean over all pictures.
        recognised_share: share of pictures that are nearest to their original among many records of the run.
        identified_share: share in which the true record fits the captured gradient better than one other record; not-a-number if
            messages do not show at which parameters the gradient was taken, or gradients are of several records.
        label_share: share of records whose label was found; not-a-number if labels are numbers.
        pool_size: number of records among which pictures are recognised.
        references: guesses that need no message: a `blank` picture, all zeros; the `mean record` of the held-out ones; and a
            `random record`, uniform in the feature range.
    """

    originals: FloatArray
    pictures: FloatArray
    mean_squared_error: float
    similarity: float
    recognised_share: float
    identified_share: float
    label_share: float
    pool_size: int
    references: Mapping[str, ReferenceGuess]


def count_attacked_rounds(run: Run) -> int:
    """Return the number of rounds, from the first, whose messages an attack uses at most."""
    length = run.algorithm.blocks.length if isinstance(run.algorithm, PdFtgl) else 1
    return length * (_MAX_ROUNDS + 1) + 1


def reconstruct_records(
    run: Run,
    data: PlacedData,
    transcript: Transcript,
    *,
    seed: int = 0,
    has_noise: bool | None = None,
) -> Reconstruction:
    """Attack the learners' first records: in closed form, or by a search if the loss is a network.

    Args:
        run: the captured run.
        data: the true records; the attack itself uses held-out records only, for what features are like.
        transcript: messages of all learners (one replica).
        seed: seed of the search, of random guesses, and of the records that true ones are compared with.
        has_noise: whether messages carry noise, so that no record fits exactly (default: what the algorithm states).

    Raises:
        SpecError: No attack fits the algorithm, no learner has a record in its first round, or some learners are offline.
    """
    if run.spec.offline_intervals:
        raise SpecError(
            "rebuilding records needs all learners in all rounds, got offline_intervals: take a run without them"
        )
    view, transcript = _FeatureView.from_data(run, data), transcript.truncate(count_attacked_rounds(run))
    generator = np.random.default_rng(seed)
    rebuilt, truth, identified = list[list[_Record]](), list[list[Batch]](), list[bool]()
    for i, own in enumerate(data.learners[: 1 if run.algorithm.accountant(0).has_shared_records else _MAX_LEARNERS]):
        added = _compute_added_gradients(run, transcript, i, np.diff(own.offsets))
        added = _select_gradients(added, own, run.loss)
        if not len(added.rounds):
            continue
        batches = [_get_records(own, int(t), added.length) for t in added.rounds]
        rebuilt.append(list(_rebuild_records(run, added, i, view, seed + i, has_noise)))
        truth.append([view.normalise_batch(each) for each in batches])
        identified += list(_identify_records(run.loss, added, batches, data, generator))
    if not rebuilt:
        raise SpecError("a learner must have records in its first round to be attacked, got none at any learner")
    records, batches = _interleave(rebuilt), _interleave(truth)
    rows = view.normalise(np.stack([each.features for each in records]))
    pictures = np.clip(rows, 0.0, 1.0)
    nearest = [int(_compute_errors(picture, each).argmin()) for picture, each in zip(pictures, batches, strict=True)]
    originals = np.stack([each.features[k] for k, each in zip(nearest, batches, strict=True)])
    labels = np.array([each.labels[k] for k, each in zip(nearest, batches, strict=True)])
    found = np.array([each.label for each in records])
    scaled, scaled_originals = _scale_pictures(rows), _scale_pictures(originals)
    pool = _scale_pictures(np.concatenate([view.sample_records(data, seed), originals]))
    return Reconstruction(
        originals,
        pictures,
        mean_squared_error=_compute_mean_error(pictures, batches),
        similarity=float(_compute_similarity(scaled, scaled_originals).mean()),
        recognised_share=float(_is_recognised(scaled, scaled_originals, pool).mean()),
        identified_share=float(np.mean(identified)) if identified else np.nan,
        label_share=float((found == labels).mean()) if run.loss.n_classes else np.nan,
        pool_size=len(np.unique(pool, axis=0)),
        references={
            name: ReferenceGuess(each, _compute_mean_error(each, batches))
            for name, each in view.guess_records(len(pictures), seed).items()
        },
    )


def _compute_errors(picture: FloatArray, batch: Batch) -> FloatArray:
    """Compute the mean squared error of one picture `(features,)` as each record of a batch, which is cut alike, `(records,)`."""
    errors: FloatArray = ((np.clip(batch.features, 0.0, 1.0) - picture) ** 2).mean(axis=-1)
    return errors


def _compute_mean_error(pictures: FloatArray, batches: Sequence[Batch]) -> float:
    """Compute the mean error of pictures `(n, features)`, each as the nearest record of its batch."""
    return float(np.mean([_compute_errors(each, batch).min() for each, batch in zip(pictures, batches, strict=True)]))


@dataclass(frozen=True, slots=True)
class _FeatureView:
    """Features as an eavesdropper can know them, by held-out records; without those, by the records of all learners.

    Attributes:
        run: the run.
        held_out: `(records, features)`, as `bound` returns them.
        low, high: smallest and largest feature of the held-out records.
    """

    run: Run
    held_out: FloatArray
    low: float
    high: float

    @classmethod
    def from_data(cls, run: Run, data: PlacedData) -> _FeatureView:
        known = [data.test_features] if len(data.test_features) else [own.features for own in data.learners]
        held_out = _bound(run, np.concatenate(known))
        return cls(run, held_out, float(held_out.min()), float(held_out.max()))

    @property
    def is_nonnegative(self) -> bool:
        """True if features, such as pixels, are known to be nonnegative."""
        return self.low >= 0.0

    @property
    def length(self) -> float | None:
        """Mean norm of a row, which a gradient alone does not show; None: the intercept shows it."""
        return None if self.run.spec.data.intercept else float(_compute_norms(self.held_out).mean())

    def limit_lengths(self, rows: FloatArray) -> FloatArray:
        """Scale rows to norms between the smallest and the largest of held-out records: noise on the intercept changes norms."""
        norms, known = _compute_norms(rows), _compute_norms(self.held_out)
        limited: FloatArray = rows * np.clip(norms, known.min(), known.max()) / np.maximum(norms, _TINY)
        return limited

    def normalise(self, rows: FloatArray) -> FloatArray:
        """Scale rows such that the feature range becomes [0, 1]."""
        scaled: FloatArray = (rows - self.low) / max(self.high - self.low, _TINY)
        return scaled

    def normalise_batch(self, batch: Batch) -> Batch:
        """Return records as pictures, with labels of the loss's domain."""
        _, labels = self.run.loss.enforce_bounds(batch.features, batch.labels)
        return Batch(self.normalise(_bound(self.run, batch.features)), labels)

    def sample_records(self, data: PlacedData, seed: int) -> FloatArray:
        """Return pictures of the learners' records, at most `_MAX_POOL_RECORDS` at random."""
        generator, quota = np.random.default_rng((seed, 2)), max(1, _MAX_POOL_RECORDS // len(data.learners))
        parts = [
            own.features
            if len(own.features) <= quota
            else own.features[generator.choice(len(own.features), quota, replace=False)]
            for own in data.learners[:_MAX_POOL_RECORDS]
        ]
        return self.normalise(_bound(self.run, np.concatenate(parts)))

    def guess_records(self, count: int, seed: int) -> dict[str, FloatArray]:
        """Return `count` pictures by each rule that needs no message, `(count, features)`."""
        shape = (count, self.held_out.shape[1])
        blank = np.clip(self.normalise(np.zeros(shape)), 0.0, 1.0)
        mean = np.broadcast_to(self.normalise(self.held_out.mean(axis=0)), shape)
        return {"blank": blank, "mean record": mean, "random record": np.random.default_rng((seed, 1)).random(shape)}


def _compute_norms(rows: FloatArray) -> FloatArray:
    norms: FloatArray = np.linalg.norm(rows, axis=-1, keepdims=True)
    return norms


def _bound(run: Run, features: FloatArray) -> FloatArray:
    """Return rows without the intercept; or, without one, scaled to the feature bound: no message shows more."""
    if run.spec.data.intercept:
        return features[:, :-1]
    return run.loss.enforce_bounds(features, np.zeros(len(features)))[0]


def _get_records(own: LearnerData, t: int, length: int) -> Batch:
    """Return the records of `length` rounds from round t on."""
    rows = own.order[own.offsets[t] : own.offsets[min(t + length, own.rounds)]]
    return Batch(own.features[rows], own.labels[rows])


def _select_gradients(added: _AddedGradients, own: LearnerData, loss: Loss) -> _AddedGradients:
    """Select a learner's first gradients, as long as they have records; of a network the first one, at known parameters.

    Earlier records are subtracted from a mean over all records only where each was alone in its round, so that it was rebuilt.
    """
    first = added.rounds[: 1 if loss.has_slow_gradient else _MAX_ROUNDS]
    sizes = np.array([_get_records(own, int(t), added.length).size for t in first])
    fit = sizes > 0
    if loss.has_slow_gradient:
        fit &= np.isfinite(added.parameters[: len(sizes)]).all(axis=-1)
    if added.is_mean_of_past:
        fit[1:] &= sizes[:-1] == 1
    count = len(fit) if fit.all() else int(fit.argmin())
    return replace(
        added, rounds=added.rounds[:count], parameters=added.parameters[:count], gradients=added.gradients[:count]
    )


class _Record(NamedTuple):
    """A rebuilt record, without the intercept, and its label."""

    features: FloatArray
    label: float


def _rebuild_records(
    run: Run, added: _AddedGradients, learner: int, view: _FeatureView, seed: int, has_noise: bool | None
) -> Iterator[_Record]:
    """Yield the records of one learner."""
    noisy = (
        run.algorithm.noise_scale(learner, int(added.rounds[0]) + added.length) > 0 if has_noise is None else has_noise
    )
    if not run.loss.has_slow_gradient:
        rows, labels = _solve_stream(added, run.loss, length=view.length, nonnegative=view.is_nonnegative)
        rows = rows[:, :-1] if run.spec.data.intercept else rows
        for row, label in zip(view.limit_lengths(rows) if noisy else rows, labels, strict=True):
            yield _Record(row, float(label))
        return
    from sottovoce_core.losses.torch import TorchLoss
    from sottovoce_lab.inversion import invert  # PyTorch takes seconds to import

    if not isinstance(run.loss, TorchLoss):
        raise SpecError(f"the loss must be a PyTorch module to be searched, got {type(run.loss).__name__}")
    # With noise no record fits exactly: a longer search finds nothing better.
    searches, iterations = (1, 50) if noisy else (2, 100)
    for parameters, gradient in zip(added.parameters, added.gradients, strict=True):
        found = invert(run.loss, parameters, gradient, seed, max_searches=searches, max_iterations=iterations)
        yield _Record(found.record, float(found.label))


def _identify_records(
    loss: Loss, added: _AddedGradients, batches: list[Batch], data: PlacedData, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether each true record fits better than another random one; only the first round, for means over all records."""
    ends = np.cumsum([len(own.order) for own in data.learners])
    for k, batch in enumerate(batches[: 1 if added.is_mean_of_past else None]):
        use = int(generator.integers(ends[-1]))
        own = data.learners[int(np.searchsorted(ends, use, side="right"))]
        row = int(own.order[use - int(ends[ends <= use].max(initial=0))])
        other = Batch(own.features[row : row + 1], own.labels[row : row + 1])
        is_known = batch.size == 1 and np.isfinite(added.parameters[k]).all()
        if is_known and (other.features != batch.features).any():
            yield _fits_better(loss, added.parameters[k], added.gradients[k], batch, other)


def _interleave(parts: list[list[_Item]]) -> list[_Item]:
    """Order every learner's first item before every learner's second one, and so on."""
    longest = max(len(part) for part in parts)
    return [part[k] for k in range(longest) for part in parts if k < len(part)]
