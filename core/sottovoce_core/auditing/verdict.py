"""What an audit found, in no stronger words than the runs allow, and the smallest violations that it would have found.

The smallest violations are those that so many runs show nine times in ten: formulas, at the levels in use; all are approximate,
and none is a test. An audit that could not even have found a learner without noise says nothing for the learner.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
from scipy import special, stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.blackbox import compute_classifier_level, count_guessed_runs
from sottovoce_core.auditing.bounds import (
    AlphaAllocation,
    Bound,
    BudgetPart,
    Family,
    Test,
    compute_epsilon_lower_bound,
    compute_max_provable_epsilon,
)
from sottovoce_core.auditing.likelihood import Excess, RoundBounds
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.privacy.guarantee import WEAK_EPSILON

# ---- the verdict -----------------------------------------------------------------------------------------------------

VerdictKind = Literal["consistent", "refuted", "inconclusive", "unpromised"]

_ORDER: Mapping[BudgetPart | None, int] = {"freshness": 0, "lattice": 1, "marginal": 2, "dependence": 3}
"""Of classes of tests in the evidence: what names the cause comes first. Noise that is said again is not of its law either."""

_MIN_COMPARED_P_VALUE = 1e-30
"""Of two tests with less than this, neither says more than the other."""

_FINDINGS: Mapping[str, str] = {
    "scale": "noise is {:.3g} of the claimed size",
    "ties": "the same noise was said again, {:,.0f} times",
    "pair ties": "the same two neighbouring numbers of noise were said again, {:,.0f} times",
    "permuted messages": "the largest noise of a message was said again in another, {:,.0f} times",
    "repeated messages": "the same message was said again, {:,.0f} times",
    "zeros": "{:,.0f} numbers were said without noise",
    "lattice": "{:,.0f} numbers of noise are not on their lattice",
    "signs": "{:.3g} of all noise is positive",
    "epsilon of the noise": "noise as it is claimed has an epsilon of {:.3g}",
}
"""What a test has found, by its name, where its statistic says it."""

_COIN_FAMILIES: frozenset[Family] = frozenset({"likelihood", "black box"})
"""Families whose tests and bounds suppose that a fair coin chose the world of every run. Exact losses do not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be said.

    Attributes:
        kind: `consistent`: no violation was found. `refuted`: the claim does not hold. `inconclusive`: a hint that more runs
            would settle. `unpromised`: there is no finite claim that could fail.
        text: the same in a sentence.
        evidence: what the verdict rests on, a sentence each; empty where nothing was found.
        weak: whether a claim that was not refuted is above `WEAK_EPSILON`, so that keeping it protects little.
    """

    kind: VerdictKind
    text: str
    evidence: tuple[str, ...] = ()
    is_weak: bool = False


@dataclass(frozen=True, slots=True)
class DetectableEffect:
    """The smallest violation of one kind that would have been found.

    Attributes:
        part: of the audit that finds it.
        least: how large it is.
        text: the same in words.
    """

    part: BudgetPart
    size: float
    text: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What all families found.

    Attributes:
        runs: of each world, on average, of all pairs of worlds.
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
        void: why the coins that chose the worlds are none; empty: they may be fair. What rests on them is no evidence then.
        most: the largest lower bound on epsilon that so many runs could give; 0 where nothing is guessed.
        reaches: what would have been found, had it been there.
        blind: the plainest violation that would not have been found; empty: the audit could have found these.
        delta: at which epsilon is claimed and bounded.
    """

    runs: int
    alpha_allocation: AlphaAllocation
    claim: float
    tests: tuple[Test, ...] = ()
    bounds: tuple[Bound, ...] = ()
    excess: Excess | None = None
    round_bounds: RoundBounds | None = None
    anomalies: tuple[str, ...] = ()
    has_both_worlds: bool = True
    needed_runs: float = 0
    assumption: str = ""
    void_reason: str = ""
    max_provable_epsilon: float = 0.0
    detectable_effects: tuple[DetectableEffect, ...] = ()
    undetectable_violation: str = ""
    delta: float = 0.0

    def select_family(self, family: Family) -> Findings:
        """What one family found."""
        tests = tuple(test for test in self.tests if test.family == family)
        bounds = tuple(bound for bound in self.bounds if bound.family == family)
        likely = family == "likelihood"
        return replace(
            self,
            tests=tests,
            bounds=bounds,
            excess=self.excess if likely else None,
            round_bounds=self.round_bounds if likely else None,
            anomalies=(),
            void_reason=self.void_reason if family in _COIN_FAMILIES else "",
        )

    @property
    def coin_free_findings(self) -> Findings:
        """What no coin is needed for: noise that is not what is claimed, and losses above the claim."""
        tests = tuple(test for test in self.tests if test.family not in _COIN_FAMILIES)
        return replace(self, tests=tests, bounds=(), round_bounds=None)

    @property
    def whole_run_bound(self) -> Bound | None:
        """The likelihood ratio's guesses of whole runs; None: nobody heard enough to make any."""
        return next((bound for bound in self.bounds if bound.family == "likelihood"), None)

    @property
    def best_bound(self) -> tuple[str, float]:
        """The largest lower bound on epsilon of the whole run, and who gave it: by guesses of whole runs alone.

        A bound on one round is none on the run: given what was said before, a message may tell up to twice the run's epsilon,
        where that took as much back.
        """
        known = [(bound.name, bound.value) for bound in self.bounds]
        return max(known, key=lambda each: each[1], default=("", 0.0))

    @property
    def epsilon_lower_bound(self) -> float:
        """The largest lower bound on epsilon of the whole run."""
        return self.best_bound[1]


def decide(found: Findings) -> Verdict:
    """The verdict on what was found."""
    if found.void_reason:
        return _decide_without_coins(found)
    evidence = tuple(_evidence(found))
    if evidence:
        return Verdict(
            "refuted", f"The claim does not hold: {evidence[0]}{found.assumption}.", evidence + found.anomalies
        )
    runs = _runs(found)
    if math.isinf(found.claim):
        return Verdict("unpromised", _unpromised(found, runs), found.anomalies)
    above = f"above {found.epsilon_lower_bound:.3g} " if found.epsilon_lower_bound > 0.0 else ""
    hints = tuple(_hints(found))
    if hints:
        return Verdict("inconclusive", f"No violation {above}found with {runs}, but {hints[0]}.", hints)
    at = f" at delta {found.delta:.3g}" if found.delta else ""
    text = f"No violation {above}found with {runs}; epsilon {found.claim:.4g}{at} is claimed."
    if not found.has_both_worlds:
        text += " Nothing was guessed, so this bounds no epsilon from below: that takes runs of two worlds."
    elif not above:
        text += " No guess was surely better than chance, so the lower bound on epsilon is 0, as it is of anything."
    weak = found.claim > WEAK_EPSILON
    if weak:
        text += f" That claim is weak: an epsilon above {WEAK_EPSILON:g} rules out almost nothing about a record."
    return Verdict("consistent", text, is_weak=weak)


def find_blamed_learner(found: Findings, names: Sequence[str], audited: int) -> int | None:
    """The learner whom a verdict is about, by its index; None: several, or all together.

    It is the one whose record was swapped, but where nothing except the noise refutes the claim: that of another may do so.

    Args:
        found: by all families.
        names: of all learners.
        audited: whose record was swapped.
    """
    failed = [test for test in found.tests if test.is_significant]
    rounds = () if found.round_bounds is None else found.round_bounds.bounds
    of_swap = any(test.family != "conformance" for test in failed) or any(
        b.is_above_claim for b in (*found.bounds, *rounds)
    )
    above = found.excess is not None and math.isfinite(found.claim)
    if of_swap or above or not failed:
        return audited
    # What depends on what of another may lie at either of them.
    named = [(test.part, _named(test.location, names)) for test in failed]
    blame = {i for part, each in named if part != "dependence" or len(each) == 1 for i in each}
    return blame.pop() if len(blame) == 1 else 0 if len(names) == 1 else None


def _named(where: str, names: Sequence[str]) -> set[int]:
    """The learners that the place of a test's statistic names, as `east, field 'y'` or `east, and south 2 noisy rounds on`."""
    pieces = re.split("[;,] (?:and )?", where)
    return {i for i, name in enumerate(names) if any(re.fullmatch(rf"{re.escape(name)}( -?\d.*)?", p) for p in pieces)}


def _decide_without_coins(found: Findings) -> Verdict:
    """The audit refutes by what needs no coin, or is void."""
    kept = decide(replace(found.coin_free_findings, void_reason=""))
    if kept.kind == "refuted":
        return replace(kept, evidence=(*kept.evidence, found.void_reason))
    return Verdict("inconclusive", f"The audit is void with {_runs(found)}: {found.void_reason}.", (found.void_reason,))


def _unpromised(found: Findings, runs: str) -> str:
    said = ["Nothing is promised about what is heard, so nothing can fail."]
    if found.has_both_worlds:
        who, bound = found.best_bound
        at = f" at delta {found.delta:.3g}" if found.delta else ""
        said.append(f"It shows an epsilon of at least {bound:.3g}{at}{f', by {who}' if bound else ''} ({runs}).")
    if found.anomalies:
        said.append(f"Besides, {found.anomalies[0]}.")
    return " ".join(said)


def _runs(found: Findings, factor: int = 1) -> str:
    """So many times the runs, in words."""
    runs = factor * found.runs
    if not found.has_both_worlds:
        return f"{runs:,} run{'s' * (runs != 1)} of one world"
    return f"{runs:,} runs of each world{found.assumption}"


def _evidence(found: Findings) -> Iterator[str]:
    """What cannot be if the claim holds; the most definite first."""
    if found.excess is not None and math.isfinite(found.claim):
        e = found.excess
        shown = f"a loss of {e.loss:.4g}, above {e.claim:.4g}"
        if math.isinf(e.loss):
            shown = "what is impossible in one of the two worlds, or in both"
        yield f"run {e.run} shows, after the message of round {e.round}, {shown} ({e.transcript_count:,} runs do)"
    failed = sorted(
        (test for test in found.tests if test.is_significant), key=lambda test: _ORDER.get(test.part, len(_ORDER))
    )
    for _, of_part in groupby(failed, key=lambda test: test.part):
        yield _found(list(of_part))
    for bound in found.bounds:
        if bound.is_above_claim:
            right = f"is right in {bound.correct_guesses} of {bound.guesses} guesses"
            at = f" at delta {bound.delta:.3g}" if bound.delta else ""
            most = f"; most shows in {bound.location}" if bound.location else ""
            yield f"{bound.name} {right}: epsilon is above {bound.value:.3g}{at}, not {bound.claim:.3g}{most}"
    for bound in () if found.round_bounds is None else found.round_bounds.bounds:
        if bound.is_above_claim:
            right = f"is guessed right in {bound.correct_guesses} of {bound.guesses} guesses"
            yield f"{bound.name} {right}: epsilon of that round is above {bound.value:.3g}, not {bound.claim:.3g}"


def _found(failed: Sequence[Test]) -> str:
    """What the tests of a class that fail have found: the one that says most, the plainest of several that are as sure."""
    worst = min(failed, key=lambda test: max(test.p_value, _MIN_COMPARED_P_VALUE) / test.level)
    kind = "scale" if worst.name.endswith(" scale") else worst.name
    says = (
        _FINDINGS[kind].format(worst.statistic) if kind in _FINDINGS else f"it does not hold that {worst.description}"
    )
    place = f" at {worst.location}" if worst.location else ""
    more = len(failed) - 1
    also = f"; {more:,} more test{'s' * (more > 1)} of {worst.part} fail{'s' * (more == 1)}" if more else ""
    return f"{says} ({worst.name}{place}: {worst.p_value_text}{also})"


def _hints(found: Findings) -> Iterator[str]:
    """What keeps a claim from being called consistent, and how many runs would settle it."""
    if found.runs < found.needed_runs:
        few = f"so few could not refute an epsilon of {found.claim:.4g}, whatever they show"
        many = "more than anybody makes" if math.isinf(found.needed_runs) else f"{found.needed_runs:,}"
        yield f"{few}: {many} of each world are needed"
    if found.undetectable_violation:
        yield f"this audit could not have found even {found.undetectable_violation}: it takes more runs, or somebody who hears more"
    yield from found.anomalies
    # What would be evidence if it were all that was looked at.
    for test in found.tests:
        if test.p_value < min(3 * test.level, found.alpha_allocation.alpha):
            yield f"{test.name} has {test.p_value_text}; about {_runs(found, 2)} would decide"
    for bound in found.bounds:
        alone = min(3 * bound.level, found.alpha_allocation.alpha)
        if bound.compute_bound(alone) > bound.claim:
            factor = bound.find_deciding_factor()
            more = "" if factor is None else f"; about {factor * found.runs:,} runs of each world would decide"
            yield f"{bound.name} guesses better than {bound.claim:.3g} allows, by little{more}"


# ---- the smallest violations that would have been found --------------------------------------------------------------

_POWER = 0.9
"""The probability with which what is named would have been found."""

_NEAR_LAGS = 9
"""Of two learners' noise, about: the same or the next round and coordinate, and rounds two apart."""


_SIGNED_BITS = 500
"""Comparisons of a number's sign with bits of its own uniform number, about."""

_RESOLVED = 1.6
"""Numbers for each bit of evidence: one in ten has the other sign, and there may be fewer than are expected."""


def add_detectable_effects(found: Findings, plan: AuditPlan, numbers: int, losses: FloatArray) -> Findings:
    """The findings, and what would have been found, had it been there.

    Args:
        found: by all families.
        plan: the audit.
        numbers: of noise that conformance looked at.
        losses: exact losses of all runs; none where they are not known.
    """
    on_lattice = any(test.part == "lattice" for test in found.tests)
    reaches = (*_of_noise(plan, numbers, on_lattice), *_of_worlds(plan))
    most = _most(plan)
    return replace(
        found,
        max_provable_epsilon=most,
        detectable_effects=reaches,
        undetectable_violation=_blind(plan, numbers, losses, most),
    )


def _most(plan: AuditPlan) -> float:
    """The largest lower bound that so many runs could give, if all guesses were right; 0 where nothing is guessed."""
    if not plan.has_both_worlds:
        return 0.0
    if plan.adversary.can_replay:
        return compute_max_provable_epsilon(plan.runs, plan.alpha_allocation.compute_level("likelihood", "whole runs"))
    guesses = count_guessed_runs(2 * plan.runs)
    return compute_epsilon_lower_bound(guesses, guesses, compute_classifier_level(plan.alpha_allocation))


def _of_noise(plan: AuditPlan, numbers: int, on_lattice: bool) -> Iterator[DetectableEffect]:
    if not numbers:
        return
    error: float = (
        stats.norm.isf(plan.alpha_allocation.compute_level("conformance", "marginal", 8) / 2)
        + stats.norm.isf(1 - _POWER)
    ) / math.sqrt(numbers)
    yield DetectableEffect("marginal", error, f"noise whose scale is wrong by {100 * error:.2g} %")
    learners = plan.run.spec.n_learners
    messages = 2 * plan.total_runs * plan.run.spec.rounds * learners
    if learners > 1:
        products = max(1.0, plan.dependence_fraction * numbers / learners)
        among = _NEAR_LAGS * learners * (learners - 1) / 2
        share = plan.alpha_allocation.compute_level("conformance", "dependence", 8) / among
        together = min(1.0, (stats.norm.isf(share / 2) + 1.6) / math.sqrt(products))
        yield DetectableEffect("dependence", together, f"noise of two learners that is correlated by {together:.2g}")
    enough = _RESOLVED * -math.log2(plan.alpha_allocation.compute_level("conformance", "dependence", 40) / _SIGNED_BITS)
    if on_lattice and plan.dependence_fraction * numbers >= enough:
        bits = LATTICE_BITS + math.floor(math.log2(plan.dependence_fraction * numbers / enough))
        yield DetectableEffect("dependence", bits, f"signs that are any of the first {bits} bits behind their sizes")
    centre = math.sqrt(35.0 / messages)
    yield DetectableEffect("dependence", centre, f"centres that are wrong by {centre:.2g} scales in every message")
    streams = messages * (messages - 1) / (2 * math.log(1 / (1 - _POWER)))
    if streams >= 1.0:
        yield DetectableEffect(
            "freshness", streams, f"noise from a generator of up to {streams:,.0f} different streams"
        )


def _of_worlds(plan: AuditPlan) -> Iterator[DetectableEffect]:
    if not plan.has_both_worlds:
        return
    if plan.adversary.can_replay:
        needed = _epsilon_found(plan)
        if math.isfinite(needed):
            yield DetectableEffect("whole runs", needed, f"guesses of whole runs that need an epsilon of {needed:.3g}")
    area = 0.5 + 5.6 / math.sqrt(6 * min(pair.runs for pair in plan.pairs))
    if area < 1.0:
        worlds = "the worlds of any pair" if plan.other_pairs else "the worlds"
        yield DetectableEffect(
            "worlds", area, f"a length, a time or a count that tells {worlds} apart with an AUC of {area:.2g}"
        )


def _epsilon_found(plan: AuditPlan) -> float:
    """The smallest epsilon, if all of it shows in every run, that guesses put above the claim; infinite: none."""
    guesses, share = 2 * plan.runs, plan.alpha_allocation.compute_level("likelihood", "whole runs")
    if compute_max_provable_epsilon(plan.runs, share) <= plan.epsilon:
        return math.inf
    for epsilon in np.geomspace(max(plan.epsilon, 1e-3), max(plan.epsilon, 1e-3) + 40.0, 200).tolist():
        usual = int(stats.binom.ppf(1 - _POWER, guesses, special.expit(epsilon)))
        if compute_epsilon_lower_bound(usual, guesses, share) > plan.epsilon:
            return float(epsilon)
    return math.inf


def _blind(plan: AuditPlan, numbers: int, losses: FloatArray, most: float) -> str:
    """The plainest violation that the audit could not have found, in words; empty: it could have found these."""
    exceeds = most > plan.epsilon
    share = plan.alpha_allocation.compute_level("likelihood", "calibration", 8)
    chances = special.expit(np.abs(losses[np.isfinite(losses)]))
    certain = bool(len(chances)) and float(np.log(chances).sum()) < math.log(share / 2)
    if not (numbers or exceeds or certain):
        return "a learner without noise"
    least = special.gammaincinv(max(numbers, 1), plan.alpha_allocation.compute_level("conformance", "marginal", 8) / 2)
    halved = numbers > 0 and float(special.gammainc(numbers, 2.0 * least)) >= _POWER
    slope = float(np.sum(losses[np.isfinite(losses)] ** 2 * chances * (1.0 - chances))) > 4.9**2
    if not (halved or exceeds or slope):
        return "a learner with half of its noise"
    return ""
