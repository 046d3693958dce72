"""The audit without an algorithm: captured runs of two worlds, of a service that is not ours, or by a wiretap.

The coin of every run is the user's. Bounds are those of the black box, at the whole of alpha. What is said twice is no bound on
epsilon: it never refutes a claim, but keeps it from being called consistent. Timing is shown and not judged, where each world has
processes of its own: two differ in it whatever they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce.arrays import IntArray
from sottovoce.auditing.blackbox import TESTED, attack, level, split, tested
from sottovoce.auditing.bounds import Bound, epsilon_lower_bound, runs_to_show
from sottovoce.auditing.conversation import Conversation
from sottovoce.auditing.levels import BLIND, Levels
from sottovoce.auditing.verdict import Findings, Verdict, decide
from sottovoce.auditing.views import timing, views
from sottovoce.data.files import import_extra
from sottovoce.errors import CaptureError
from sottovoce.lab.foreign.answers import answer_views
from sottovoce.lab.foreign.repeats import Sign, signs

_UNFAIR = 1e-3
"""Coins that a fair one gives less often than this are doubted."""


@dataclass(frozen=True, slots=True)
class ForeignAudit:
    """What was found, and what may be said.

    Attributes:
        runs: of each world, after runs were left out to make both as frequent.
        left_out: how many were.
        in_turns: the worlds follow each other as coins do. If not, what drifts with time tells them apart, too.
        timed: guesses by timing; none where times are judged with the rest.
        signs: what was said twice.
        found: guesses by all that is judged.
        verdict: on the claim.
    """

    runs: tuple[int, int]
    left_out: int
    in_turns: bool
    timed: tuple[Bound, ...]
    signs: tuple[Sign, ...]
    found: Findings
    verdict: Verdict

    @property
    def most(self) -> float:
        """The bound if every guess were right."""
        guesses = tested(sum(self.runs))
        return epsilon_lower_bound(guesses, guesses, level(self.found.levels))


def audit_conversations(
    runs: Sequence[Conversation],
    *,
    claim: float = math.inf,
    confidence: float = 0.95,
    seed: int = 0,
    one_machine: bool = False,
    void: str = "",
    say: Callable[[str], None] = lambda what: None,
) -> ForeignAudit:
    """Audit captured runs.

    Args:
        runs: of both worlds, each in a world that a fair coin chose.
        claim: epsilon that is claimed for a run; infinite: nothing is.
        confidence: with which a claim that holds is not refuted.
        seed: of the split and the classifiers.
        one_machine: the same processes lived in both worlds, in turns: times are judged, too, and what tells the worlds apart
            at all is a sign, for numbers alone need do so, and nobody sees them.
        void: why the coins are none; empty: they may be fair.
        say: told what is being done.

    Raises:
        CaptureError: a world has no run.
        SpecError: scipy or scikit-learn are not installed.
    """
    for extra, package in (("scipy.stats", "scipy"), ("sklearn", "scikit-learn")):
        import_extra(extra, package, "an audit")
    levels = Levels(1.0 - confidence, BLIND)
    dropped, boxed, clocked = np.random.SeedSequence(seed).spawn(3)
    kept = _balanced(sorted(runs, key=lambda run: run.began), np.random.default_rng(dropped))
    worlds = np.array([run.world for run in kept], dtype=np.int64)
    in_turns = _in_turns(worlds)
    say("looking for what is said twice")
    seen = signs(kept)
    say("black box")
    learnt, _ = split(len(kept), boxed)
    clocks = timing(kept)
    seen_in = views(kept) | answer_views(kept, learnt) | (clocks if one_machine else {})
    attacks = attack(seen_in, worlds, levels, claim, boxed)
    found = Findings(
        runs=len(kept) // 2,
        levels=levels,
        claim=claim,
        bounds=tuple(each.bound for each in attacks),
        signs=tuple(map(str, seen)),
        needed=runs_to_show(claim, level(levels), TESTED) if math.isfinite(claim) else 0,
        proviso="" if in_turns else ", if nothing but the world changed between them",
        void=void,
    )
    if one_machine:
        found = replace(found, signs=(*found.signs, *_apart(found)))
    timed = () if one_machine else tuple(each.bound for each in attack(clocks, worlds, levels, math.inf, clocked))
    counts = (int((worlds == 0).sum()), int((worlds == 1).sum()))
    return ForeignAudit(counts, len(runs) - len(kept), in_turns, timed, seen, found, decide(found))


def _apart(found: Findings) -> tuple[str, ...]:
    """That the worlds differ, where a claim of more allows that; said of worlds that do not with probability alpha at most."""
    who, bound = found.best
    if bound == 0.0 or bound > found.claim:  # more than that is no sign, but evidence
        return ()
    return (
        f"{who} tells the worlds apart (epsilon is above {bound:.3g}), and nothing that passes need do so but numbers",
    )


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
    if 2.0 * float(binomial.cdf(min(ones, total - ones), total, 0.5)) >= _UNFAIR:
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
    return spread == 0.0 or float(norm.sf(abs(changes - mean) / spread)) * 2.0 >= _UNFAIR
