"""Round by round: whether a single message tells the worlds apart, given all that was said before.

A loss that is spread evenly over many rounds cannot be shown end to end by any feasible number of runs. So every round of every
run has a coin of its own: its message is drawn in the world of that coin, from a state that follows one and the same past, and
guessed. The bounds of all rounds hold together, each for its message. Their sum bounds nothing: two messages may both tell, and
never in one run. It estimates the epsilon of a run where every round tells whatever was said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.auditing.bounds import Bound, threshold
from sottovoce.auditing.levels import Levels
from sottovoce.auditing.worlds import Worlds
from sottovoce.noise import Noise
from sottovoce.running.replay import Replay
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Apart:
    """Guesses of every round's coin, an array `(rounds, runs)` each.

    Attributes:
        coins: the worlds, 0 or 1.
        losses: exact loss of the message; 0 where neither world could have said it.
    """

    coins: IntArray
    losses: FloatArray

    @classmethod
    def joined(cls, parts: Sequence[Apart]) -> Apart:
        """All runs of the parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("coins", "losses")))

    @property
    def strengths(self) -> FloatArray:
        """Absolute losses."""
        strengths: FloatArray = np.abs(self.losses)
        return strengths

    @property
    def right(self) -> BoolArray:
        """Whether the sign of the loss gives the coin away."""
        right: BoolArray = (self.losses < 0) == (self.coins == 1)
        return right


def apart(
    run: Run,
    worlds: Worlds,
    transcript: Transcript,
    noise: Noise,
    generator: np.random.Generator,
    actual: Run | None = None,
) -> Apart:
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
    with np.errstate(invalid="ignore"):
        for learner in worlds.holders(run):
            losses += _of_learner(run, actual or run, worlds, transcript, noise, coins, learner)
    return Apart(coins, np.nan_to_num(losses, nan=0.0, posinf=np.inf, neginf=-np.inf))


def _of_learner(
    run: Run, actual: Run, worlds: Worlds, transcript: Transcript, noise: Noise, coins: IntArray, learner: int
) -> FloatArray:
    """`(rounds, replicas)` loss of the messages that one learner says."""
    claimed = Replay(run, learner, transcript.replicas, 2)
    really = claimed if actual is run else Replay(actual, learner, transcript.replicas, 2)
    losses = np.zeros(coins.shape)
    for t, coin in enumerate(coins):
        density = claimed.density(_picked(really.says(noise), coin))
        losses[t] = density[0] - density[1]
        messages = transcript.messages(t, learner, claimed.concerned)
        for machine in {claimed, really}:
            machine.step(messages, *(worlds.of(world).batch(t) for world in (0, 1)))
        if not claimed.known:
            break
    return losses


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
    largest: FloatArray

    @property
    def estimate(self) -> float:
        """Single rounds, added up: an estimate of the epsilon of a whole run, and no bound on it."""
        return float(np.sum([bound.value for bound in self.bounds]))


def bound_rounds(audited: Apart, rehearsed: Apart, claim: FloatArray, levels: Levels) -> RoundBounds:
    """Bounds on every round's epsilon; thresholds are fixed on other runs, of the claimed mechanism.

    Args:
        audited: of the runs in question.
        rehearsed: of the claimed mechanism with other noise.
        claim: `(rounds,)` epsilon of every round.
        levels: of the audit.
    """
    rounds, runs = audited.losses.shape
    level = levels.of("likelihood", "single rounds", rounds)
    least = [threshold(strengths, runs, level) for strengths in rehearsed.strengths]
    made = (audited.strengths > 0) & (audited.strengths >= np.array(least)[:, None])
    guesses, correct = made.sum(axis=1).tolist(), (made & audited.right).sum(axis=1).tolist()
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
