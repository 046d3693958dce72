"""The likelihood ratio: what runs of two worlds give away to an adversary that knows the algorithm, and every message's density.

Of a learner that does what is claimed, no adversary guesses the world better. It sees nothing of what the claimed densities rule
out, such as noise said twice: conformance does.

Round by round: whether a single message tells the worlds apart, given all that was said before.

A loss that is spread evenly over many rounds cannot be shown end to end by any feasible number of runs. So every round of every
run has a coin of its own: its message is drawn in the world of that coin, from a state that follows one and the same past, and
guessed. The bounds of all rounds hold together, each for its message. Their sum bounds nothing: two messages may both tell, and
never in one run. It estimates the epsilon of a run where every round tells whatever was said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import AlphaAllocation, Bound, choose_threshold
from sottovoce_core.auditing.worlds import RecordedRuns, Worlds
from sottovoce_core.noise import NoiseSource
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript

# ---- whole runs ------------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9
"""Of the claim, and of one: a loss above it by less is not above it."""

_MAX_SEGMENTS = 64
"""Parts of a run, each of as many rounds, whose losses are kept of every run; where there are fewer rounds, single rounds."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The transcript that shows more than a claim, first.

    Attributes:
        run: its number among the audited ones.
        round: after whose message the loss is above the claim.
        loss: by then; infinite: the message could not have been said in one of the worlds, or in either.
        claim: by then.
        transcripts: how many show more than the claim.
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
        worlds: the world that the run lived in, 0 or 1.
        total: the loss of the whole transcript; infinite where only one world could have said it, 0, no hint at all, where
            neither could.
        largest: the largest absolute loss after any round; infinite where a message could not have been said.
        above: the round after which the loss is above the claim first; -1: never.
        shown: the absolute loss by that round.
        peak, typical: `(rounds,)` the largest absolute loss of any run by that round, and the mean of all.
        stretches: `(runs, at most _STRETCHES)` losses of parts of the run, one after the other; zero where they are not finite.
    """

    worlds: IntArray
    total: FloatArray
    largest_losses: FloatArray
    first_excess_round: IntArray
    excess_losses: FloatArray
    peak_by_round: FloatArray
    mean_by_round: FloatArray
    segment_losses: FloatArray

    @classmethod
    def concatenate(cls, parts: Sequence[RunLosses]) -> RunLosses:
        """All runs of the parts, in order."""
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
        """Of runs of which nothing was heard."""
        nothing, blank = np.zeros(len(worlds)), np.zeros(rounds)
        parts = _stretches(np.zeros((rounds, len(worlds))))
        return cls(worlds, nothing, nothing, np.full(len(worlds), -1), nothing, blank, blank, parts)

    @property
    def is_correct(self) -> BoolArray:
        """`(runs,)` whether the sign of the loss gives the world away."""
        right: BoolArray = (self.total < 0) == (self.worlds == 1)
        return right

    def find_excess(self, claim: FloatArray) -> Excess | None:
        """The first transcript that shows more than the claim that the losses were held against."""
        guilty = np.flatnonzero(self.first_excess_round >= 0)
        if not len(guilty):
            return None
        run, t = int(guilty[0]), int(self.first_excess_round[guilty[0]])
        return Excess(run, t, float(self.excess_losses[run]), float(claim[t]), len(guilty))


def compute_run_losses(run: Run, worlds: Worlds, part: RecordedRuns, claim: FloatArray) -> RunLosses:
    """Replay some runs of one world, and hold them against `claim (rounds,)`, the cumulative epsilon after every round."""
    with np.errstate(invalid="ignore"):  # neither world could have said it: not-a-number, and reported as such
        heard = worlds.compute_losses(run, part.transcript)
        unheard = np.zeros((run.spec.rounds - len(heard), heard.shape[1]))  # rounds that were not heard tell nothing
        single = np.concatenate([heard, unheard])
        losses = np.cumsum(single, axis=0)
    shown = np.nan_to_num(np.abs(losses), nan=np.inf, posinf=np.inf)
    most = (claim * (1.0 + _ROUNDING) + _ROUNDING)[: len(shown), None]
    exceeds = shown > most
    above = np.where(exceeds.any(axis=0), exceeds.argmax(axis=0), -1)
    return RunLosses(
        worlds=np.full(losses.shape[1], part.world),
        total=np.nan_to_num(losses[-1], nan=0.0, posinf=np.inf, neginf=-np.inf),
        largest_losses=shown.max(axis=0),
        first_excess_round=above,
        excess_losses=shown[above, np.arange(len(above))],
        peak_by_round=shown.max(axis=1),
        mean_by_round=shown.mean(axis=1),
        segment_losses=_stretches(single),
    )


def _stretches(losses: FloatArray) -> FloatArray:
    """Losses `(rounds, runs)` of single rounds, as those of parts of the run, `(runs, parts)`."""
    finite = np.nan_to_num(losses, nan=0.0, posinf=0.0, neginf=0.0)
    starts = np.unique(np.linspace(0, len(losses), _MAX_SEGMENTS, endpoint=False).astype(int))
    parts: FloatArray = np.add.reduceat(finite, starts, axis=0).T
    return parts


def guess(audited: RunLosses, rehearsed: RunLosses, claim: float, level: float) -> Bound:
    """Guess the world of every run by the sign of its loss.

    Args:
        audited: the runs in question.
        rehearsed: runs of the claimed mechanism with other noise, for the threshold.
        claim: epsilon that is promised for a run.
        level: of the bound.
    """
    strengths = np.abs(audited.total)
    least = choose_threshold(np.abs(rehearsed.total), len(strengths), level)
    made = (strengths > 0) & (strengths >= least)
    guesses, correct = int(made.sum()), int(audited.is_correct[made].sum())
    return Bound("likelihood", "the likelihood ratio", "", correct, guesses, claim, level, least)


# ---- round by round --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundLosses:
    """Guesses of every round's coin, an array `(rounds, runs)` each.

    Attributes:
        coins: the worlds, 0 or 1.
        losses: exact loss of the message; 0 where neither world could have said it.
    """

    coins: IntArray
    losses: FloatArray

    @classmethod
    def concatenate(cls, parts: Sequence[RoundLosses]) -> RoundLosses:
        """All runs of the parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("coins", "losses")))

    @property
    def strengths(self) -> FloatArray:
        """Absolute losses."""
        strengths: FloatArray = np.abs(self.losses)
        return strengths

    @property
    def is_correct(self) -> BoolArray:
        """Whether the sign of the loss gives the coin away."""
        right: BoolArray = (self.losses < 0) == (self.coins == 1)
        return right


def redraw_rounds(
    run: Run,
    worlds: Worlds,
    transcript: Transcript,
    noise: NoiseSource,
    generator: np.random.Generator,
    actual: Run | None = None,
) -> RoundLosses:
    """Toss a coin for every round, and draw its message anew in that world, after the past of the transcript.

    Args:
        run: what is claimed to run: it gives the densities.
        worlds: the two worlds.
        transcript: the pasts, of runs in either world.
        noise: of the messages that are drawn.
        generator: of the coins.
        actual: what really runs (default: what is claimed).
    """
    replicas, rounds = transcript.replicas, transcript.rounds
    coins = generator.integers(0, 2, (rounds, replicas))
    losses = np.zeros((rounds, replicas))
    for learner in worlds.list_holders(run):
        claimed = Replay(run, learner, replicas, 2)
        really = claimed if actual is None or actual is run else Replay(actual, learner, replicas, 2)
        for t, coin in enumerate(coins):
            density = claimed.log_density(_picked(really.emit(noise), coin))
            with np.errstate(invalid="ignore"):
                losses[t] += density[0] - density[1]
            messages = transcript.messages(t, learner, claimed.required_senders)
            for machine in {claimed, really}:
                machine.step(messages, *(worlds.get_records(world).batch(t) for world in (0, 1)))
            if not claimed.is_known:
                break
    return RoundLosses(coins, np.nan_to_num(losses, nan=0.0, posinf=np.inf, neginf=-np.inf))


def _picked(message: Message, coin: IntArray) -> Message:
    """Of every run, the message of its coin's world."""
    runs = np.arange(len(coin))
    return Message(
        {name: value[np.minimum(coin, len(value) - 1), runs][None] for name, value in message.fields.items()}
    )


@dataclass(frozen=True, slots=True)
class RoundBounds:
    """What the guesses of single rounds came to.

    Attributes:
        bounds: of every round; all hold together at the level of the part.
        largest: `(rounds,)` the largest absolute loss of any message.
    """

    bounds: tuple[Bound, ...]
    largest_losses: FloatArray

    @property
    def estimate(self) -> float:
        """Single rounds, added up: an estimate of the epsilon of a whole run, and no bound on it."""
        return float(np.sum([bound.value for bound in self.bounds]))


def bound_rounds(
    audited: RoundLosses, rehearsed: RoundLosses, claim: FloatArray, levels: AlphaAllocation
) -> RoundBounds:
    """Bounds on every round's epsilon; thresholds are fixed on other runs, of the claimed mechanism.

    Args:
        audited: of the runs in question.
        rehearsed: of the claimed mechanism with other noise.
        claim: `(rounds,)` epsilon of every round.
        levels: of the audit.
    """
    rounds, runs = audited.losses.shape
    level = levels.compute_level("likelihood", "single rounds", rounds)
    least = [choose_threshold(strengths, runs, level) for strengths in rehearsed.strengths]
    made = (audited.strengths > 0) & (audited.strengths >= np.array(least)[:, None])
    guesses, correct = made.sum(axis=1).tolist(), (made & audited.is_correct).sum(axis=1).tolist()
    bounds = (
        Bound(
            "likelihood",
            f"the message of round {t} alone",
            "",
            correct[t],
            guesses[t],
            float(claim[t]),
            level,
            least[t],
        )
        for t in range(rounds)
    )
    return RoundBounds(tuple(bounds), audited.strengths.max(axis=1))
