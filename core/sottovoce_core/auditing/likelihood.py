"""Likelihood-ratio attack: the information in runs for an adversary that knows the algorithm and all message densities.

If the learner does what is claimed, no adversary guesses the world better. The attack sees nothing that the claimed densities
rule out, such as repeated noise: conformance tests do.

Single rounds: whether one message distinguishes the worlds, given all earlier messages.

A loss that is spread evenly over many rounds cannot be shown end to end by any feasible number of runs. So every round of
every run has a coin of its own: its message is drawn in the world of that coin, from a state that follows one and the same
past, and guessed. The bounds of all rounds hold together, each for its message. Their sum bounds nothing: two messages may
both be informative, and never in one run. It estimates the epsilon of a run in which every round is informative given any
earlier messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import BoolArray, FloatArray, IntArray, summarize_fields
from sottovoce_core.auditing.bounds import AlphaAllocation, Bound, choose_threshold
from sottovoce_core.auditing.worlds import RecordedRuns, Worlds
from sottovoce_core.noise import NoiseSource
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript

# ---- whole runs ------------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9
"""Relative and absolute tolerance above the claim within which a loss does not exceed it."""

_MAX_SEGMENTS = 64
"""Maximum number of equal segments of a run whose losses are kept for every run; with fewer rounds, single rounds."""


@dataclass(frozen=True, slots=True)
class Excess:
    """First transcript whose loss exceeds a claim.

    Attributes:
        run: index of the run among the audited ones.
        round: round after whose message the loss exceeds the claim.
        loss: loss at that round; infinite: one of the worlds, or both, could not have produced the message.
        claim: claim at that round.
        transcript_count: number of transcripts that exceed the claim.
    """

    run: int
    round: int
    loss: float
    claim: float
    transcript_count: int


@dataclass(frozen=True, slots=True)
class RunLosses:
    """Privacy losses of audited runs, `log p(y|D) - log p(y|D')`, an array `(runs,)` each.

    Attributes:
        worlds: world of the run, 0 or 1.
        total: loss of the whole transcript; infinite if only one world could have produced it, 0, no information, if neither
            could.
        largest_losses: largest absolute loss after any round; infinite if a message was impossible.
        first_excess_round: first round after which the loss exceeds the claim; -1: never.
        excess_losses: absolute loss at that round.
        peak_by_round, mean_by_round: `(rounds,)` largest and mean absolute loss over the runs at that round.
        segment_losses: `(runs, at most _MAX_SEGMENTS)` losses of consecutive segments of the run; zero where they are not
            finite.
    """

    worlds: IntArray
    total: FloatArray
    largest_losses: FloatArray
    first_excess_round: IntArray
    excess_losses: FloatArray
    peak_by_round: FloatArray
    mean_by_round: FloatArray
    segment_losses: FloatArray

    __repr__ = summarize_fields

    @classmethod
    def concatenate(cls, parts: Sequence[RunLosses]) -> RunLosses:
        """Concatenate the runs of the parts, in order."""
        by_run = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("worlds", "total", "largest_losses", "first_excess_round", "excess_losses", "segment_losses")
        }
        weights = [len(part.total) for part in parts]
        return cls(
            **by_run,
            peak_by_round=np.max([part.peak_by_round for part in parts], axis=0),
            mean_by_round=np.average([part.mean_by_round for part in parts], axis=0, weights=weights),
        )

    @classmethod
    def create_empty(cls, worlds: IntArray, rounds: int) -> RunLosses:
        """Create the losses of runs without any recorded message."""
        nothing, blank = np.zeros(len(worlds)), np.zeros(rounds)
        parts = _sum_segments(np.zeros((rounds, len(worlds))))
        return cls(worlds, nothing, nothing, np.full(len(worlds), -1), nothing, blank, blank, parts)

    @property
    def is_correct(self) -> BoolArray:
        """`(runs,)` whether the sign of the loss matches the world."""
        correct: BoolArray = (self.total < 0) == (self.worlds == 1)
        return correct

    def find_excess(self, claim: FloatArray) -> Excess | None:
        """Find the first transcript that exceeds the claim with which the losses were compared."""
        exceeding = np.flatnonzero(self.first_excess_round >= 0)
        if not len(exceeding):
            return None
        run, t = int(exceeding[0]), int(self.first_excess_round[exceeding[0]])
        return Excess(run, t, float(self.excess_losses[run]), float(claim[t]), len(exceeding))


def compute_run_losses(run: Run, worlds: Worlds, part: RecordedRuns, claim: FloatArray) -> RunLosses:
    """Replay runs of one world, and compare them with `claim (rounds,)`, the cumulative epsilon after every round."""
    with np.errstate(
        invalid="ignore"
    ):  # not-a-number where neither world could have produced the message; reported as such
        recorded = worlds.compute_losses(run, part.transcript)
        missing = np.zeros(
            (run.spec.rounds - len(recorded), recorded.shape[1])
        )  # rounds without messages carry no information
        single = np.concatenate([recorded, missing])
        losses = np.cumsum(single, axis=0)
    sizes = np.nan_to_num(np.abs(losses), nan=np.inf, posinf=np.inf)
    limit = (claim * (1.0 + _ROUNDING) + _ROUNDING)[: len(sizes), None]
    exceeds = sizes > limit
    first_excess = np.where(exceeds.any(axis=0), exceeds.argmax(axis=0), -1)
    return RunLosses(
        worlds=np.full(losses.shape[1], part.world),
        total=np.nan_to_num(losses[-1], nan=0.0, posinf=np.inf, neginf=-np.inf),
        largest_losses=sizes.max(axis=0),
        first_excess_round=first_excess,
        excess_losses=sizes[first_excess, np.arange(len(first_excess))],
        peak_by_round=sizes.max(axis=1),
        mean_by_round=sizes.mean(axis=1),
        segment_losses=_sum_segments(single),
    )


def _sum_segments(losses: FloatArray) -> FloatArray:
    """Sum losses `(rounds, runs)` of single rounds over the segments of the run, `(runs, segments)`."""
    finite = np.nan_to_num(losses, nan=0.0, posinf=0.0, neginf=0.0)
    starts = np.unique(np.linspace(0, len(losses), _MAX_SEGMENTS, endpoint=False).astype(int))
    parts: FloatArray = np.add.reduceat(finite, starts, axis=0).T
    return parts


def guess(audited: RunLosses, rehearsed: RunLosses, claim: float, level: float) -> Bound:
    """Guess the world of every run by the sign of its loss.

    Args:
        audited: runs to judge.
        rehearsed: runs of the claimed mechanism with other noise, for the threshold.
        claim: claimed epsilon for a run.
        level: significance level of the bound.
    """
    strengths = np.abs(audited.total)
    threshold = choose_threshold(np.abs(rehearsed.total), len(strengths), level)
    is_guess = (strengths > 0) & (strengths >= threshold)
    guesses, correct = int(is_guess.sum()), int(audited.is_correct[is_guess].sum())
    return Bound("likelihood", "the likelihood ratio", "", correct, guesses, claim, level, threshold)


# ---- at a delta ------------------------------------------------------------------------------------------------------

_MIN_EXCESS_SHARE = 0.2
"""Minimum of `1 - e^(epsilon - loss)` for a loss that counts as above epsilon. With a smaller one, more losses do."""


@dataclass(frozen=True, slots=True)
class LossBound:
    """Lower bound on epsilon at a delta from the exact losses of whole runs, and the claim that it is compared with.

    If messages are (epsilon, delta)-private, `E max(0, 1 - e^(epsilon - loss)) <= delta` for the loss in the world of the run,
    so each run has a loss above `epsilon - log(1 - s)` with probability at most `delta / s`. The number of such runs is at most
    a binomial: the loss of the smallest rank that a binomial reaches with probability at most the level gives the bound, for
    s = 0.2. No coin is needed.

    Attributes:
        delta: the delta.
        claim: claimed epsilon at this delta.
        level: maximum probability that the bound is above the true epsilon.
        runs: number of runs.
        rank: rank of the loss among the largest ones.
        loss: that loss; not-a-number with fewer runs.
    """

    delta: float
    claim: float
    level: float
    runs: int
    rank: int
    loss: float

    @property
    def value(self) -> float:
        """The bound."""
        bound = self.loss + math.log1p(-_MIN_EXCESS_SHARE)
        return bound if bound > 0.0 else 0.0

    @property
    def is_above_claim(self) -> bool:
        """True if the bound refutes the claim."""
        return self.value > self.claim


def bound_at_delta(audited: RunLosses, claim: float, delta: float, level: float) -> LossBound:
    """Bound epsilon at a delta by the losses of whole runs.

    Args:
        audited: runs to judge.
        claim: claimed epsilon of a run at this delta.
        delta: above 0 and below 1.
        level: significance level of the bound.
    """
    binomial = import_optional("scipy.stats", "scipy", "an audit").binom
    losses = np.sort(np.where(audited.worlds == 0, audited.total, -audited.total))[::-1]
    rank = 1 + int(binomial.isf(level, len(losses), min(1.0, delta / _MIN_EXCESS_SHARE)))
    loss = float(losses[rank - 1]) if rank <= len(losses) else math.nan
    return LossBound(delta, claim, level, len(losses), rank, loss)


# ---- round by round --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundLosses:
    """Guesses of every round's coin, an array `(rounds, runs)` each.

    Attributes:
        coins: worlds, 0 or 1.
        losses: exact loss of the message; 0 where neither world could have produced it.
    """

    coins: IntArray
    losses: FloatArray

    __repr__ = summarize_fields

    @classmethod
    def concatenate(cls, parts: Sequence[RoundLosses]) -> RoundLosses:
        """Concatenate the runs of the parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("coins", "losses")))

    @property
    def strengths(self) -> FloatArray:
        """Absolute losses."""
        strengths: FloatArray = np.abs(self.losses)
        return strengths

    @property
    def is_correct(self) -> BoolArray:
        """True where the sign of the loss matches the coin."""
        correct: BoolArray = (self.losses < 0) == (self.coins == 1)
        return correct


def redraw_rounds(
    run: Run,
    worlds: Worlds,
    transcript: Transcript,
    noise: NoiseSource,
    generator: np.random.Generator,
    actual: Run | None = None,
) -> RoundLosses:
    """Toss a coin for every round, and redraw its message in that world, given the past of the transcript.

    Args:
        run: claimed run: it gives the densities.
        worlds: the two worlds.
        transcript: pasts, of runs in either world.
        noise: noise source of the redrawn messages.
        generator: generator of the coins.
        actual: run that produces the messages (default: the claimed one).
    """
    replicas, rounds = transcript.replicas, transcript.rounds
    coins = generator.integers(0, 2, (rounds, replicas))
    losses = np.zeros((rounds, replicas))
    for learner in worlds.list_holders(run):
        claimed = Replay(run, learner, replicas, 2)
        produced = claimed if actual is None or actual is run else Replay(actual, learner, replicas, 2)
        for t, coin in enumerate(coins):
            density = claimed.log_density(_select_by_coin(produced.emit(noise), coin))
            with np.errstate(invalid="ignore"):
                losses[t] += density[0] - density[1]
            messages = transcript.messages(t, learner, claimed.required_senders)
            for machine in {claimed, produced}:
                machine.step(messages, *(worlds.get_records(world).batch(t) for world in (0, 1)))
            if not claimed.is_known:
                break
    return RoundLosses(coins, np.nan_to_num(losses, nan=0.0, posinf=np.inf, neginf=-np.inf))


def _select_by_coin(message: Message, coin: IntArray) -> Message:
    """Select, for every run, the message of its coin's world."""
    runs = np.arange(len(coin))
    return Message(
        {name: value[np.minimum(coin, len(value) - 1), runs][None] for name, value in message.fields.items()}
    )


@dataclass(frozen=True, slots=True)
class RoundBounds:
    """Bounds from the guesses of single rounds.

    Attributes:
        bounds: bound of every round; all hold together at the level of the part.
        largest_losses: `(rounds,)` largest absolute loss of any message.
    """

    bounds: tuple[Bound, ...]
    largest_losses: FloatArray

    __repr__ = summarize_fields

    @property
    def estimate(self) -> float:
        """Sum over single rounds: an estimate of the epsilon of a whole run, and no bound on it."""
        return float(np.sum([bound.value for bound in self.bounds]))


def bound_rounds(
    audited: RoundLosses, rehearsed: RoundLosses, claim: FloatArray, levels: AlphaAllocation
) -> RoundBounds:
    """Bound every round's epsilon; thresholds are fixed on other runs, of the claimed mechanism.

    Args:
        audited: runs to judge.
        rehearsed: runs of the claimed mechanism with other noise.
        claim: `(rounds,)` epsilon of every round.
        levels: alpha allocation of the audit.
    """
    rounds, runs = audited.losses.shape
    level = levels.compute_level("likelihood", "single rounds", rounds)
    thresholds = [choose_threshold(strengths, runs, level) for strengths in rehearsed.strengths]
    is_guess = (audited.strengths > 0) & (audited.strengths >= np.array(thresholds)[:, None])
    guesses, correct = is_guess.sum(axis=1).tolist(), (is_guess & audited.is_correct).sum(axis=1).tolist()
    bounds = (
        Bound(
            "likelihood",
            f"the message of round {t} alone",
            "",
            correct[t],
            guesses[t],
            float(claim[t]),
            level,
            thresholds[t],
        )
        for t in range(rounds)
    )
    return RoundBounds(tuple(bounds), audited.strengths.max(axis=1))
