"""What an audit found, in no stronger words than the runs allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sottovoce.auditing.bounds import Bound, ceiling, epsilon_lower_bound
from sottovoce.auditing.levels import Family, Levels, Test
from sottovoce.auditing.likelihood import Excess
from sottovoce.auditing.rounds import RoundBounds

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
    """What all families found.

    Attributes:
        runs: of each world, on average.
        levels: the chance of a false alarm, divided among all that was looked at.
        claim: epsilon that is promised over the whole run; infinite: nothing is.
        tests: every test, with its level.
        bounds: of guesses of whole runs, each with its claim and its level.
        excess: the first transcript above the claim.
        rounds: bounds on single rounds; None: rounds cannot be drawn anew, or their loss is not known.
        signs: what no correct mechanism does, though it bounds no epsilon, a sentence each.
        paired: there were two worlds to tell apart.
        needed: runs of each world with which the claim could be refuted at all.
        proviso: what the verdict supposes, to be read after the number of runs.
    """

    runs: int
    levels: Levels
    claim: float
    tests: tuple[Test, ...] = ()
    bounds: tuple[Bound, ...] = ()
    excess: Excess | None = None
    rounds: RoundBounds | None = None
    signs: tuple[str, ...] = ()
    paired: bool = True
    needed: int = 0
    proviso: str = ""

    def of(self, family: Family) -> Findings:
        """What one family found."""
        tests = tuple(test for test in self.tests if test.family == family)
        bounds = tuple(bound for bound in self.bounds if bound.family == family)
        likely = family == "likelihood"
        return replace(
            self,
            tests=tests,
            bounds=bounds,
            excess=self.excess if likely else None,
            rounds=self.rounds if likely else None,
            signs=(),
        )

    @property
    def guessed(self) -> Bound | None:
        """The likelihood ratio's guesses of whole runs; None: nobody heard enough to make any."""
        return next((bound for bound in self.bounds if bound.family == "likelihood"), None)

    @property
    def best(self) -> tuple[str, float]:
        """The largest lower bound on epsilon, and who gave it."""
        known = [(bound.name, bound.value) for bound in self.bounds]
        if self.rounds is not None:
            known.append(("single rounds, added up", self.rounds.composed))
        return max(known, key=lambda each: each[1], default=("", 0.0))

    @property
    def largest(self) -> float:
        """The largest lower bound on epsilon."""
        return self.best[1]

    @property
    def most(self) -> float:
        """The lower bound if every guess of a whole run were right; 0 where nothing is guessed."""
        return ceiling(self.runs, self.levels.of("likelihood", "whole runs")) if self.paired else 0.0


def decide(found: Findings) -> Verdict:
    """The verdict on what was found."""
    evidence = tuple(_evidence(found))
    if evidence:
        return Verdict("refuted", f"The claim does not hold: {evidence[0]}{found.proviso}.", evidence + found.signs)
    runs = _runs(found)
    if math.isinf(found.claim):
        return Verdict("unpromised", _unpromised(found, runs), found.signs)
    above = f"above {found.largest:.3g} " if found.paired else ""
    hints = tuple(_hints(found))
    if hints:
        return Verdict("inconclusive", f"No violation {above}found with {runs}, but {hints[0]}.", hints)
    text = f"No violation {above}found with {runs}; epsilon {found.claim:.4g} is claimed."
    if not found.paired:
        text += " Nothing was guessed, so this bounds no epsilon from below: that takes runs of two worlds."
    return Verdict("consistent", text)


def _unpromised(found: Findings, runs: str) -> str:
    said = ["Nothing is promised about what is said, so nothing can fail."]
    if found.paired:
        who, bound = found.best
        said.append(f"The wire shows an epsilon of at least {bound:.3g}{f', by {who}' if bound else ''} ({runs}).")
    if found.signs:
        said.append(f"Besides, {found.signs[0]}.")
    return " ".join(said)


def _runs(found: Findings, factor: int = 1) -> str:
    """So many times the runs, in words."""
    runs = factor * found.runs
    if not found.paired:
        return f"{runs:,} run{'s' * (runs != 1)} of one world"
    return f"{runs:,} runs of each world{found.proviso}"


def _evidence(found: Findings) -> Iterator[str]:
    """What cannot be if the claim holds; the most definite first."""
    if found.excess is not None and math.isfinite(found.claim):
        e = found.excess
        shown = f"a loss of {e.loss:.4g}, above {e.claim:.4g}"
        if math.isinf(e.loss):
            shown = "what one of the worlds, or either, could not have said"
        yield f"run {e.run} shows, after the message of round {e.round}, {shown} ({e.transcripts:,} runs do)"
    for test in found.tests:
        if test.rejects:
            place = f" at {test.where}" if test.where else ""
            yield f"{test.name}{place}: p = {test.p_value:.2g} ({test.what})"
    for bound in found.bounds:
        if bound.rejects:
            right = f"is right in {bound.correct} of {bound.guesses} guesses"
            yield f"{bound.name} {right}: epsilon is above {bound.value:.3g}, not {bound.claim:.3g}"
    for bound in () if found.rounds is None else found.rounds.bounds:
        if bound.rejects:
            right = f"is guessed right in {bound.correct} of {bound.guesses} guesses"
            yield f"{bound.name} {right}: epsilon of that round is above {bound.value:.3g}, not {bound.claim:.3g}"


def _hints(found: Findings) -> Iterator[str]:
    """What keeps a claim from being called consistent, and how many runs would settle it."""
    if found.runs < found.needed:
        few = f"so few could not refute an epsilon of {found.claim:.4g}, whatever they show"
        yield f"{few}: {found.needed:,} of each world are needed"
    yield from found.signs
    # What would be evidence if it were all that was looked at.
    for test in found.tests:
        if test.p_value < min(3 * test.level, found.levels.alpha):
            yield f"{test.name} has p = {test.p_value:.2g}; about {_runs(found, 2)} would decide"
    for bound in found.bounds:
        alone = min(3 * bound.level, found.levels.alpha)
        if epsilon_lower_bound(bound.correct, bound.guesses, alone) > bound.claim:
            factor = bound.runs_to_decide()
            more = "" if factor is None else f"; about {factor * found.runs:,} runs of each world would decide"
            yield f"{bound.name} guesses better than {bound.claim:.3g} allows, by little{more}"
