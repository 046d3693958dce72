"""What an audit found, in no stronger words than the runs allow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sottovoce.audit.blackbox import Attempt
from sottovoce.audit.bounds import epsilon_lower_bound, runs_to_decide
from sottovoce.audit.likelihood import Excess, Guessed
from sottovoce.audit.result import Test
from sottovoce.audit.rounds import RoundBounds

Kind = Literal["consistent", "refuted", "inconclusive", "unpromised"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be said.

    Attributes:
        kind: `consistent`: no violation was found. `refuted`: the claim does not hold. `inconclusive`: a hint that more runs
            would settle. `unpromised`: there is no finite claim that could fail.
        text: the same in a sentence.
        evidence: what the verdict rests on, a sentence each; empty where nothing was found.
    """

    kind: Kind
    text: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Findings:
    """What the three families found.

    Attributes:
        runs: of each world.
        alpha: the chance of a false alarm in all families together; each family has a third.
        claim: epsilon that is promised over the whole run.
        claim_seen: epsilon that is promised over the rounds that the black box looked at.
        conformance: its tests.
        excess: the first transcript above the claim.
        guessed: the likelihood ratio's guesses; None: the listener does not hear enough to compute it.
        rounds: bounds on single rounds; None: rounds cannot be drawn anew, or their loss is not known.
        attempts: the black box's.
    """

    runs: int
    alpha: float
    claim: float
    claim_seen: float
    conformance: tuple[Test, ...]
    excess: Excess | None
    guessed: Guessed | None
    rounds: RoundBounds | None
    attempts: tuple[Attempt, ...]

    @property
    def paired(self) -> bool:
        """Whether there were two worlds to tell apart."""
        return self.guessed is not None or bool(self.attempts)

    @property
    def largest(self) -> float:
        """The largest lower bound on epsilon."""
        composed = [] if self.rounds is None else [self.rounds.composed]
        return max([bound for _, _, _, bound, _, _ in self.bounds] + composed, default=0.0)

    @property
    def tests(self) -> tuple[tuple[Test, float], ...]:
        """Every test, and the p-value at which it rejects."""
        each = self.alpha / 3 / max(len(self.conformance), 1)
        guessed = () if self.guessed is None else ((self.guessed.overconfident, self.alpha / 9),)
        return (*((test, each) for test in self.conformance), *guessed)

    @property
    def bounds(self) -> tuple[tuple[str, int, int, float, float, float], ...]:
        """By guesser: name, right guesses, guesses, bound, claim and alpha."""
        each = self.alpha / 3 / max(len(self.attempts), 1)
        black = (
            (f"{a.model} on {a.view}", a.correct, a.guesses, a.bound, self.claim_seen, each) for a in self.attempts
        )
        if self.guessed is None:
            return tuple(black)
        g = self.guessed
        return (("the likelihood ratio", g.correct, g.guesses, g.bound, self.claim, self.alpha / 9), *black)


def decide(found: Findings) -> Verdict:
    """The verdict on what was found."""
    evidence = tuple(_evidence(found))
    if evidence:
        return Verdict("refuted", f"The claim does not hold: {evidence[0]}.", evidence)
    above = f"above {found.largest:.3g} " if found.paired else ""
    runs = _runs(found, 1)
    if math.isinf(found.claim):
        text = "Nothing is promised about what is said, so nothing can fail."
        if found.paired:
            text += f" The wire shows an epsilon of at least {found.largest:.3g} ({runs})."
        return Verdict("unpromised", text)
    hints = tuple(_hints(found))
    if hints:
        return Verdict("inconclusive", f"No violation {above}found with {runs}, but {hints[0]}.", hints)
    text = f"No violation {above}found with {runs}; epsilon {found.claim:.4g} is claimed."
    if not found.paired:
        text += " Nothing was guessed, so this bounds no epsilon from below: that takes runs of two worlds."
    return Verdict("consistent", text)


def _runs(found: Findings, factor: int) -> str:
    """So many times the runs, in words."""
    runs = factor * found.runs
    return f"{runs:,} runs of each world" if found.paired else f"{runs:,} run{'s' * (runs != 1)} of one world"


def _evidence(found: Findings) -> list[str]:
    """What cannot be if the claim holds; the most definite first."""
    said = []
    if found.excess is not None and math.isfinite(found.claim):
        e = found.excess
        shown = f"a loss of {e.loss:.4g}, above {e.claim:.4g}"
        if math.isinf(e.loss):
            shown = "what one of the worlds, or either, could not have said"
        said.append(f"run {e.run} shows, after the message of round {e.round}, {shown} ({e.transcripts:,} runs do)")
    for test, level in found.tests:
        if test.p_value < level:
            place = f" at {test.where}" if test.where else ""
            said.append(f"{test.name}{place}: p = {test.p_value:.2g} ({test.what})")
    for name, correct, guesses, bound, claim, _ in found.bounds:
        if bound > claim:
            said.append(
                f"{name} is right in {correct} of {guesses} guesses: epsilon is above {bound:.3g}, not {claim:.3g}"
            )
    if found.rounds is not None:
        over = found.rounds.bound > found.rounds.claim
        for t in [int(k) for k in over.nonzero()[0]]:
            r = found.rounds
            said.append(
                f"the message of round {t} alone is guessed right in {r.correct[t]} of {r.guesses[t]} guesses: epsilon of that "
                f"round is above {r.bound[t]:.3g}, not {r.claim[t]:.3g}"
            )
    return said


def _hints(found: Findings) -> list[str]:
    """What would be evidence if it were all that was looked at, and how many runs would settle it."""
    said = []
    for test, level in found.tests:
        if test.p_value < min(3 * level, found.alpha):
            said.append(f"{test.name} has p = {test.p_value:.2g}; about {_runs(found, 2)} would decide")
    for name, correct, guesses, _, claim, level in found.bounds:
        if epsilon_lower_bound(correct, guesses, min(3 * level, found.alpha)) > claim:
            factor = runs_to_decide(correct, guesses, claim, level)
            more = "" if factor is None else f"; about {factor * found.runs:,} runs of each world would decide"
            said.append(f"{name} guesses better than {claim:.3g} allows, by little{more}")
    return said
