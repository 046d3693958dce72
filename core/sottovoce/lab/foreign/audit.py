"""The audit of a service that is not ours: captured runs of two worlds, and nothing known of how it works.

The coin of every run is the user's. Bounds are those of the black box, at the whole of alpha. What is said twice is no bound on
epsilon: it never refutes a claim, but keeps it from being called consistent. Timing is shown and not judged: two processes
differ in it whatever they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import IntArray
from sottovoce.audit.blackbox import Attempt, attack
from sottovoce.audit.bounds import epsilon_lower_bound, runs_to_decide
from sottovoce.audit.verdict import Verdict
from sottovoce.data.files import import_extra
from sottovoce.errors import CaptureError
from sottovoce.lab.foreign.conversation import Conversation
from sottovoce.lab.foreign.repeats import Finding, findings
from sottovoce.lab.foreign.views import timing, views

TESTED = 0.4
"""The share of the runs that the black box guesses."""

UNFAIR = 1e-3
"""Coins that a fair one gives less often than this are doubted."""


@dataclass(frozen=True, slots=True)
class ForeignAudit:
    """What was found, and what may be said.

    Attributes:
        runs: of each world, after runs were left out to make both as frequent.
        left_out: how many were.
        in_turns: the worlds follow each other as coins do. If not, what drifts with time tells them apart, too.
        alpha: the chance of a false alarm.
        claim: epsilon that the owner claims for a run; None: nothing.
        attempts: the classifiers', on all but timing.
        timed: on timing.
        findings: what was said twice.
        verdict: on the claim.
    """

    runs: tuple[int, int]
    left_out: int
    in_turns: bool
    alpha: float
    claim: float | None
    attempts: tuple[Attempt, ...]
    timed: tuple[Attempt, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict

    @property
    def bound(self) -> float:
        """The largest lower bound on epsilon, timing left aside."""
        return max((attempt.bound for attempt in self.attempts), default=0.0)

    @property
    def most(self) -> float:
        """The bound if every guess were right."""
        tested = _tested(sum(self.runs))
        return epsilon_lower_bound(tested, tested, self.alpha / 2)


def audit_conversations(
    runs: Sequence[Conversation],
    *,
    claim: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    say: Callable[[str], None] = lambda what: None,
) -> ForeignAudit:
    """Audit captured runs.

    Args:
        runs: of both worlds, each in a world that a fair coin chose.
        claim: epsilon that is claimed for a run.
        confidence: with which a claim that holds is not refuted.
        seed: of the split and the classifiers.
        say: told what is being done.

    Raises:
        CaptureError: a world has no run.
        SpecError: scipy or scikit-learn are not installed.
    """
    for extra, package in (("scipy.stats", "scipy"), ("sklearn", "scikit-learn")):
        import_extra(extra, package, "an audit")
    alpha = 1.0 - confidence
    dropped, boxed, clocked = np.random.SeedSequence(seed).spawn(3)
    kept = _balanced(sorted(runs, key=lambda run: run.began), np.random.default_rng(dropped))
    worlds = np.array([run.world for run in kept], dtype=np.int64)
    say("looking for what is said twice")
    found = findings(kept)
    say("black box")
    attempts = attack(views(kept), worlds, alpha, boxed)
    timed = attack(timing(kept), worlds, alpha, clocked)
    counts = (int((worlds == 0).sum()), int((worlds == 1).sum()))
    in_turns = _in_turns(worlds)
    verdict = decide(counts, alpha, claim, attempts, found, in_turns=in_turns)
    return ForeignAudit(counts, len(runs) - len(kept), in_turns, alpha, claim, attempts, timed, found, verdict)


def runs_to_refute(claim: float, alpha: float) -> int:
    """Runs of each world with which a claim can be refuted at all, if every guess is right."""
    right = math.log(0.5 * alpha) / -math.log1p(math.exp(-claim))
    return math.ceil((math.floor(right) + 1) / TESTED / 2)


def decide(
    runs: tuple[int, int],
    alpha: float,
    claim: float | None,
    attempts: Sequence[Attempt],
    found: Sequence[Finding],
    *,
    in_turns: bool,
) -> Verdict:
    """The verdict; see `ForeignAudit` for the arguments."""
    many = f"{sum(runs):,} runs"
    if not in_turns:
        many += ", if nothing but the world changed between them"
    best = max(attempts, key=lambda attempt: attempt.bound, default=None)
    told = tuple(f"{each.text} ({each.where})" for each in found)
    leak = () if best is None or best.bound <= 0.0 else (_leak(best),)
    if claim is None:
        text = "No leak was found"
        if best is not None and leak:
            text = f"At least ε = {best.bound:.3g} is leaked, by {best.view}"
        return Verdict("unpromised", f"{text} ({many}). Nothing is claimed that could fail.", (*leak, *told))
    beyond = tuple(_leak(attempt) for attempt in attempts if attempt.bound > claim)
    if beyond:
        return Verdict("refuted", f"The claim does not hold: {beyond[0]} ({many}).", (*beyond, *told))
    needed = runs_to_refute(claim, alpha)
    hints = (*told, *_hints(attempts, claim, alpha, sum(runs)))
    largest = 0.0 if best is None else best.bound
    text = f"No violation above {largest:.3g} found with {many}"
    if sum(runs) < 2 * needed:
        few = f"so few could not refute an epsilon of {claim:.4g}, whatever they show: {needed:,} of each world are needed"
        return Verdict("inconclusive", f"{text}, but {few}.", (few, *hints))
    if hints:
        return Verdict("inconclusive", f"{text}, but {hints[0]}.", hints)
    return Verdict("consistent", f"{text}; epsilon {claim:.4g} is claimed.")


def _leak(attempt: Attempt) -> str:
    return (
        f"{attempt.model} on {attempt.view} is right in {attempt.correct:,} of {attempt.guesses:,} guesses: "
        f"epsilon is at least {attempt.bound:.3g}"
    )


def _hints(attempts: Sequence[Attempt], claim: float, alpha: float, runs: int) -> list[str]:
    """What would refute the claim if it were all that was looked at."""
    level, said = alpha / max(len(attempts), 1), []
    for a in attempts:
        if epsilon_lower_bound(a.correct, a.guesses, alpha) > claim:
            factor = runs_to_decide(a.correct, a.guesses, claim, level)
            more = "" if factor is None else f"; about {factor * runs:,} runs would decide"
            said.append(f"{a.model} on {a.view} guesses better than {claim:.3g} allows, by little{more}")
    return said


def _balanced(runs: Sequence[Conversation], generator: np.random.Generator) -> list[Conversation]:
    """Runs as a fair coin would have them: of a world that is too frequent, a random part.

    Raises:
        CaptureError: a world has no run.
    """
    worlds = np.array([run.world for run in runs], dtype=np.int64)
    ones, total = int(worlds.sum()), len(runs)
    if ones in (0, total):
        raise CaptureError(f"an audit needs runs of both worlds, got {total - ones} of world 0 and {ones} of world 1")
    binomial = import_extra("scipy.stats", "scipy", "an audit").binom
    if 2.0 * float(binomial.cdf(min(ones, total - ones), total, 0.5)) >= UNFAIR:
        return list(runs)
    common = int(2 * ones > total)
    share = min(ones, total - ones) / max(ones, total - ones)
    keep = (worlds != common) | (generator.random(total) < share)
    return [run for run, kept in zip(runs, keep.tolist(), strict=True) if kept]


def _in_turns(worlds: IntArray) -> bool:
    """Whether the worlds change as often as coins would (Wald and Wolfowitz)."""
    ones, total = int(worlds.sum()), len(worlds)
    zeros = total - ones
    if total < 10 or not ones or not zeros:
        return True  # too few to say
    mean = 1.0 + 2.0 * ones * zeros / total
    spread = math.sqrt((mean - 1.0) * (mean - 2.0) / (total - 1.0))
    changes = 1 + int((worlds[1:] != worlds[:-1]).sum())
    norm = import_extra("scipy.stats", "scipy", "an audit").norm
    return spread == 0.0 or float(norm.sf(abs(changes - mean) / spread)) * 2.0 >= UNFAIR


def _tested(runs: int) -> int:
    return runs - 3 * runs // 5
