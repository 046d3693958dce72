"""Verdict of an audit, no stronger than the runs allow, and the minimum detectable effects.

A minimum detectable effect is found with probability 0.9 by the given number of runs: formulas, at the levels in use; all are
approximate, and none is a test. An audit that could not even have detected a learner without noise is no evidence in its
favour.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
from scipy import special

from sottovoce_core.arrays import FloatArray, summarize_fields
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
from sottovoce_core.auditing.likelihood import Excess, LossBound, RoundBounds
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.optional import import_optional
from sottovoce_core.privacy.guarantee import WEAK_EPSILON
from sottovoce_core.table import Table

# ---- verdict ---------------------------------------------------------------------------------------------------------

VerdictKind = Literal["consistent", "refuted", "inconclusive", "no-claim"]

_ORDER: Mapping[BudgetPart | None, int] = {"freshness": 0, "lattice": 1, "marginal": 2, "dependence": 3}
"""Order of the classes of tests in the evidence: the cause first. Repeated noise also has another distribution."""

_MIN_COMPARED_P_VALUE = 1e-30
"""P-value below which two tests count as equally significant."""

_FINDINGS: Mapping[str, str] = {
    "scale": "noise is {:.3g} of the claimed size",
    "ties": "the same noise was repeated {:,.0f} times",
    "pair ties": "the same two neighbouring noise numbers were repeated {:,.0f} times",
    "permuted messages": "the largest noise of a message was repeated in another {:,.0f} times",
    "repeated messages": "the same message was repeated {:,.0f} times",
    "zeros": "{:,.0f} numbers were sent without noise",
    "lattice": "{:,.0f} numbers of noise are not on their lattice",
    "signs": "{:.3g} of all noise is positive",
    "epsilon of the noise": "the claimed noise has an epsilon of {:.3g}",
}
"""Descriptions of a failed test by its name, formatted with its statistic."""

_COIN_FAMILIES: frozenset[Family] = frozenset({"likelihood", "black box"})
"""Families whose tests and bounds assume that a fair coin chose the world of every run. Exact losses do not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Conclusion of an audit.

    Attributes:
        kind: `consistent`: no violation was found. `refuted`: the claim does not hold. `inconclusive`: weak evidence that more
            runs would settle. `no-claim`: there is no finite claim that could fail.
        text: conclusion in a sentence.
        evidence: reasons for the verdict, a sentence each; empty if nothing was found.
        is_weak: whether a claim that was not refuted is above `WEAK_EPSILON`, so that keeping it protects little.
    """

    kind: VerdictKind
    text: str
    evidence: tuple[str, ...] = ()
    is_weak: bool = False

    def __repr__(self) -> str:
        return f"Verdict {self.kind}: {self.text}"

    def _repr_html_(self) -> str:
        """Render the verdict as a table, for notebooks."""
        evidence = {f"evidence {k}": each for k, each in enumerate(self.evidence, 1)}
        return Table.from_facts({"verdict": self.kind, "conclusion": self.text, **evidence})._repr_html_()


@dataclass(frozen=True, slots=True)
class DetectableEffect:
    """Minimum detectable effect of one kind of violation.

    Attributes:
        part: part of the audit that detects it.
        min_effect: size of the effect.
        text: effect in words.
    """

    part: BudgetPart
    min_effect: float
    text: str

    @classmethod
    def from_scale_error(cls, error: float) -> DetectableEffect:
        """Describe the minimum detectable relative error of the noise's scale."""
        return cls("marginal", error, f"noise whose size is wrong by {float(f'{100 * error:.2g}'):g} %")


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of all families.

    Attributes:
        runs: number of runs of each world, on average, of all pairs of worlds.
        alpha_allocation: probability of a false alarm, divided among all tests and bounds.
        claim: claimed epsilon of the whole run; infinite: no claim.
        tests: every test, with its level.
        bounds: bounds from guesses of whole runs, each with its claim and its level.
        excess: first transcript above the claim.
        round_bounds: bounds on single rounds; None: rounds cannot be redrawn, or their loss is not known.
        loss_bound: bound at a delta by the losses of whole runs; None: no delta, or the losses are not known.
        anomalies: observations that no correct mechanism produces, though they bound no epsilon, a sentence each.
        has_both_worlds: True if there are runs of both worlds.
        needed_runs: minimum number of runs of each world that could refute the claim.
        assumption: assumption of the verdict, printed after the number of runs.
        void_reason: reason why the coins that chose the worlds are not valid; empty: they may be fair. Findings that depend on
            them are then no evidence.
        max_provable_epsilon: largest lower bound on epsilon that this number of runs could give; 0 if nothing is guessed.
        detectable_effects: minimum detectable effects.
        undetectable_violation: most obvious violation that would not have been detected; empty: the audit could have detected
            all of these.
        delta: delta at which epsilon is claimed and bounded.
    """

    runs: int
    alpha_allocation: AlphaAllocation
    claim: float
    tests: tuple[Test, ...] = ()
    bounds: tuple[Bound, ...] = ()
    excess: Excess | None = None
    round_bounds: RoundBounds | None = None
    loss_bound: LossBound | None = None
    anomalies: tuple[str, ...] = ()
    has_both_worlds: bool = True
    needed_runs: float = 0
    assumption: str = ""
    void_reason: str = ""
    max_provable_epsilon: float = 0.0
    detectable_effects: tuple[DetectableEffect, ...] = ()
    undetectable_violation: str = ""
    delta: float = 0.0

    __repr__ = summarize_fields

    def select_family(self, family: Family) -> Findings:
        """Select the findings of one family."""
        tests = tuple(test for test in self.tests if test.family == family)
        bounds = tuple(bound for bound in self.bounds if bound.family == family)
        is_likelihood = family == "likelihood"
        return replace(
            self,
            tests=tests,
            bounds=bounds,
            excess=self.excess if is_likelihood else None,
            round_bounds=self.round_bounds if is_likelihood else None,
            loss_bound=self.loss_bound if is_likelihood else None,
            anomalies=(),
            void_reason=self.void_reason if family in _COIN_FAMILIES else "",
        )

    @property
    def coin_free_findings(self) -> Findings:
        """Findings that need no coin: noise that differs from the claim, and losses above the claim."""
        tests = tuple(test for test in self.tests if test.family not in _COIN_FAMILIES)
        return replace(self, tests=tests, bounds=(), round_bounds=None)

    @property
    def stated_epsilon(self) -> float:
        """Claimed epsilon: at the delta at which it was tested, too, or else the pure one."""
        return self.claim if self.loss_bound is None else self.loss_bound.claim

    @property
    def whole_run_bound(self) -> Bound | None:
        """Bound of the likelihood ratio from guesses of whole runs; None: the adversary's view is too small for guesses."""
        return next((bound for bound in self.bounds if bound.family == "likelihood"), None)

    @property
    def best_bound(self) -> tuple[str, float]:
        """Guesser with the largest lower bound on epsilon of the whole run, and the bound: by guesses of whole runs only.

        A bound on one round is none on the run: given the earlier messages, a message may reveal up to twice the run's
        epsilon, where these concealed as much.
        """
        known = [(bound.name, bound.value) for bound in self.bounds]
        return max(known, key=lambda each: each[1], default=("", 0.0))

    @property
    def epsilon_lower_bound(self) -> float:
        """Largest lower bound on epsilon of the whole run."""
        return self.best_bound[1]


def decide(findings: Findings) -> Verdict:
    """Decide the verdict on the findings."""
    if findings.void_reason:
        return _decide_without_coins(findings)
    evidence = tuple(_list_evidence(findings))
    if evidence:
        return Verdict(
            "refuted", f"The claim does not hold: {evidence[0]}{findings.assumption}.", evidence + findings.anomalies
        )
    runs = _format_runs(findings)
    if math.isinf(findings.claim):
        return Verdict("no-claim", _describe_no_claim(findings, runs), findings.anomalies)
    lower_bound = (
        f" (lower bound on epsilon: {findings.epsilon_lower_bound:.3g})" if findings.epsilon_lower_bound > 0.0 else ""
    )
    weak_evidence = tuple(_list_weak_evidence(findings))
    if weak_evidence:
        return Verdict(
            "inconclusive", f"No violation found with {runs}{lower_bound}, but {weak_evidence[0]}.", weak_evidence
        )
    at = f" at delta {findings.delta:.3g}" if findings.delta else ""
    text = f"No violation found with {runs}{lower_bound}; epsilon {findings.claim:.4g}{at} is claimed."
    if (loss_bound := findings.loss_bound) is not None:
        text = (
            f"{text[:-1]}, and {loss_bound.claim:.4g} at delta {loss_bound.delta:.3g}, of which the losses show at least "
            f"{loss_bound.value:.3g}."
        )
    if not findings.has_both_worlds:
        text += " No world was guessed, so there is no lower bound on epsilon: run both worlds to get one."
    elif not lower_bound:
        text += " No guess was significantly better than chance, so the lower bound on epsilon is 0."
    is_weak = findings.stated_epsilon > WEAK_EPSILON
    if is_weak:
        text += f" That claim is weak: an epsilon above {WEAK_EPSILON:g} rules out almost nothing about a record."
    return Verdict("consistent", text, is_weak=is_weak)


def find_blamed_learner(findings: Findings, names: Sequence[str], audited: int) -> int | None:
    """Find the learner that a verdict is about; return its index, or None for several learners, or all together.

    It is the one whose record was replaced, unless only noise refutes the claim: that may be another learner's.

    Args:
        findings: findings of all families.
        names: names of all learners.
        audited: index of the learner whose record was replaced.
    """
    failed = [test for test in findings.tests if test.is_significant]
    rounds = () if findings.round_bounds is None else findings.round_bounds.bounds
    is_about_record = any(test.family != "conformance" for test in failed) or any(
        bound.is_above_claim for bound in (*findings.bounds, *rounds)
    )
    is_above = findings.loss_bound is not None and findings.loss_bound.is_above_claim
    has_excess = (findings.excess is not None and math.isfinite(findings.claim)) or is_above
    if is_about_record or has_excess or not failed:
        return audited
    # Dependence between two learners may be caused by either of them.
    locations = [(test.part, _parse_learners(test.location, names)) for test in failed]
    blamed = {i for part, each in locations if part != "dependence" or len(each) == 1 for i in each}
    return blamed.pop() if len(blamed) == 1 else 0 if len(names) == 1 else None


def _parse_learners(location: str, names: Sequence[str]) -> set[int]:
    """Parse the learners in the location of a statistic, such as `east, field 'y'` or `east, and south 2 noisy rounds on`."""
    parts = re.split("[;,] (?:and )?", location)
    return {i for i, name in enumerate(names) if any(re.fullmatch(rf"{re.escape(name)}( -?\d.*)?", p) for p in parts)}


def _decide_without_coins(findings: Findings) -> Verdict:
    """Decide by findings that need no coin; otherwise the audit is void."""
    verdict = decide(replace(findings.coin_free_findings, void_reason=""))
    if verdict.kind == "refuted":
        return replace(verdict, evidence=(*verdict.evidence, findings.void_reason))
    return Verdict(
        "inconclusive",
        f"The audit is void with {_format_runs(findings)}: {findings.void_reason}.",
        (findings.void_reason,),
    )


def _describe_no_claim(findings: Findings, runs: str) -> str:
    sentences = ["There is no privacy claim for the visible messages, so no claim can fail."]
    if findings.has_both_worlds:
        guesser, bound = findings.best_bound
        at = f" at delta {findings.delta:.3g}" if findings.delta else ""
        sentences.append(f"The lower bound on epsilon is {bound:.3g}{at}{f', by {guesser}' if bound else ''} ({runs}).")
    if findings.anomalies:
        sentences.append(f"In addition, {findings.anomalies[0]}.")
    return " ".join(sentences)


def _format_runs(findings: Findings, factor: int = 1) -> str:
    """Format a multiple of the number of runs."""
    runs = factor * findings.runs
    if not findings.has_both_worlds:
        return f"{runs:,} run{'s' * (runs != 1)} of one world"
    return f"{runs:,} runs of each world{findings.assumption}"


def _list_evidence(findings: Findings) -> Iterator[str]:
    """List observations that are impossible if the claim holds; the most definite first."""
    if findings.excess is not None and math.isfinite(findings.claim):
        e = findings.excess
        observation = f"a loss of {e.loss:.4g}, above {e.claim:.4g}"
        if math.isinf(e.loss):
            observation = "a transcript that is impossible in one of the two worlds, or in both"
        yield f"run {e.run} shows, after the message of round {e.round}, {observation} ({e.transcript_count:,} runs do)"
    failed = sorted(
        (test for test in findings.tests if test.is_significant), key=lambda test: _ORDER.get(test.part, len(_ORDER))
    )
    for _, part_tests in groupby(failed, key=lambda test: test.part):
        yield _describe_failed_tests(list(part_tests))
    for bound in findings.bounds:
        if bound.is_above_claim:
            right = f"is correct in {bound.correct_guesses} of {bound.guesses} guesses"
            at = f" at delta {bound.delta:.3g}" if bound.delta else ""
            place = f"; the largest effect is in {bound.location}" if bound.location else ""
            yield f"{bound.name} {right}: epsilon is above {bound.value:.3g}{at}, not {bound.claim:.3g}{place}"
    if (at_delta := findings.loss_bound) is not None and at_delta.is_above_claim:
        largest = "largest loss" if at_delta.rank == 1 else f"loss of rank {at_delta.rank}"
        yield (
            f"the {largest} of {at_delta.runs:,} runs is {at_delta.loss:.4g}: epsilon at delta {at_delta.delta:.3g} is above "
            f"{at_delta.value:.4g}, not {at_delta.claim:.4g}"
        )
    for bound in () if findings.round_bounds is None else findings.round_bounds.bounds:
        if bound.is_above_claim:
            right = f"is guessed correctly in {bound.correct_guesses} of {bound.guesses} guesses"
            yield f"{bound.name} {right}: epsilon of that round is above {bound.value:.3g}, not {bound.claim:.3g}"


def _describe_failed_tests(failed: Sequence[Test]) -> str:
    """Describe the failed tests of a class by the most significant one, or the first of several equally significant ones."""
    worst = min(failed, key=lambda test: max(test.p_value, _MIN_COMPARED_P_VALUE) / test.level)
    kind = "scale" if worst.name.endswith(" scale") else worst.name
    description = (
        _FINDINGS[kind].format(worst.statistic) if kind in _FINDINGS else f"it does not hold that {worst.description}"
    )
    place = f" at {worst.location}" if worst.location else ""
    more = len(failed) - 1
    also = f"; {more:,} more test{'s' * (more > 1)} of {worst.part} fail{'s' * (more == 1)}" if more else ""
    return f"{description} ({worst.name}{place}: {worst.p_value_text}{also})"


def _list_weak_evidence(findings: Findings) -> Iterator[str]:
    """List reasons not to call a claim consistent, and the number of runs that would settle each."""
    if findings.runs < findings.needed_runs:
        limit = f"this number could not refute an epsilon of {findings.claim:.4g} with any result"
        needed = "more than 1,000,000,000 runs" if math.isinf(findings.needed_runs) else f"{findings.needed_runs:,}"
        yield f"{limit}: {needed} of each world are needed"
    if findings.undetectable_violation:
        yield (
            f"this audit could not have detected even {findings.undetectable_violation}: "
            "use more runs, or an adversary with a larger view"
        )
    yield from findings.anomalies
    # Results that would be evidence without the correction for other tests.
    for test in findings.tests:
        if test.p_value < min(3 * test.level, findings.alpha_allocation.alpha):
            yield f"{test.name} has {test.p_value_text}; about {_format_runs(findings, 2)} would decide"
    for bound in findings.bounds:
        level = min(3 * bound.level, findings.alpha_allocation.alpha)
        if bound.compute_bound(level) > bound.claim:
            factor = bound.find_deciding_factor()
            more = "" if factor is None else f"; about {factor * findings.runs:,} runs of each world would decide"
            yield f"{bound.name} guesses slightly better than {bound.claim:.3g} allows{more}"


# ---- minimum detectable effects --------------------------------------------------------------------------------------

_POWER = 0.9
"""Probability with which a minimum detectable effect is found."""

_NEAR_LAGS = 9
"""Approximate number of comparisons of two learners' noise: the same or the next round and coordinate, and rounds two apart."""


_SIGNED_BITS = 500
"""Approximate number of comparisons of a number's sign with bits of its own uniform number."""

_NUMBERS_PER_BIT = 1.6
"""Numbers needed for each bit of evidence: one in ten has the other sign, and there may be fewer than expected."""


def add_detectable_effects(findings: Findings, plan: AuditPlan, numbers: int, losses: FloatArray) -> Findings:
    """Add the minimum detectable effects to the findings.

    Args:
        findings: findings of all families.
        plan: plan of the audit.
        numbers: number of noise values that conformance examined.
        losses: exact losses of all runs; empty if they are not known.
    """
    on_lattice = any(test.part == "lattice" for test in findings.tests)
    effects = (*_list_noise_effects(plan, numbers, on_lattice), *_list_world_effects(plan))
    max_provable = _compute_max_provable(plan)
    return replace(
        findings,
        max_provable_epsilon=max_provable,
        detectable_effects=effects,
        undetectable_violation=_find_undetectable_violation(plan, numbers, losses, max_provable),
    )


def _compute_max_provable(plan: AuditPlan) -> float:
    """Compute the largest lower bound from these runs, if all guesses were correct; 0 if nothing is guessed."""
    if not plan.has_both_worlds:
        return 0.0
    if plan.adversary.can_replay:
        return compute_max_provable_epsilon(plan.runs, plan.alpha_allocation.compute_level("likelihood", "whole runs"))
    guesses = count_guessed_runs(2 * plan.runs)
    return compute_epsilon_lower_bound(guesses, guesses, compute_classifier_level(plan.alpha_allocation))


def _list_noise_effects(plan: AuditPlan, numbers: int, on_lattice: bool) -> Iterator[DetectableEffect]:
    if not numbers:
        return
    level = plan.alpha_allocation.compute_level("conformance", "marginal", 8)
    error = -float(special.ndtri(level / 2) + special.ndtri(1 - _POWER)) / math.sqrt(numbers)
    yield DetectableEffect.from_scale_error(error)
    learners = plan.run.spec.n_learners
    messages = 2 * plan.total_runs * plan.run.spec.rounds * learners
    if learners > 1:
        products = max(1.0, plan.dependence_fraction * numbers / learners)
        comparisons = _NEAR_LAGS * learners * (learners - 1) / 2
        level = plan.alpha_allocation.compute_level("conformance", "dependence", 8) / comparisons
        correlation = min(1.0, (1.6 - float(special.ndtri(level / 2))) / math.sqrt(products))
        yield DetectableEffect(
            "dependence", correlation, f"noise of two learners that is correlated by {correlation:.2g}"
        )
    needed = _NUMBERS_PER_BIT * -math.log2(
        plan.alpha_allocation.compute_level("conformance", "dependence", 40) / _SIGNED_BITS
    )
    if on_lattice and plan.dependence_fraction * numbers >= needed:
        bits = LATTICE_BITS + math.floor(math.log2(plan.dependence_fraction * numbers / needed))
        yield DetectableEffect("dependence", bits, f"signs that equal any of the first {bits} bits after their sizes")
    centre = math.sqrt(35.0 / messages)
    yield DetectableEffect("dependence", centre, f"centres that are wrong by {centre:.2g} scales in every message")
    streams = messages * (messages - 1) / (2 * math.log(1 / (1 - _POWER)))
    if streams >= 1.0:
        yield DetectableEffect(
            "freshness", streams, f"noise from a generator of up to {streams:,.0f} different streams"
        )


def _list_world_effects(plan: AuditPlan) -> Iterator[DetectableEffect]:
    if not plan.has_both_worlds:
        return
    if plan.adversary.can_replay:
        needed = _find_min_epsilon(plan)
        if math.isfinite(needed):
            yield DetectableEffect(
                "whole runs", needed, f"messages that reveal all that an epsilon of {needed:.3g} allows"
            )
    area = 0.5 + 5.6 / math.sqrt(6 * min(pair.runs for pair in plan.pairs))
    if area < 1.0:
        where = f"larger in one world than in the other in {100 * area:.0f} of 100 pairs"
        text = f"a property of the traffic, such as a length, that is {where}"
        yield DetectableEffect("worlds", area, text)


def _find_min_epsilon(plan: AuditPlan) -> float:
    """Find the smallest epsilon, fully realised in every run, that guesses put above the claim; infinite: none."""
    guesses, level = 2 * plan.runs, plan.alpha_allocation.compute_level("likelihood", "whole runs")
    if compute_max_provable_epsilon(plan.runs, level) <= plan.epsilon:
        return math.inf
    binomial = import_optional("scipy.stats", "scipy", "an audit").binom

    def exceeds_claim(epsilon: float) -> bool:
        correct = int(binomial.ppf(1 - _POWER, guesses, special.expit(epsilon)))
        return compute_epsilon_lower_bound(correct, guesses, level) > plan.epsilon

    epsilons = np.geomspace(max(plan.epsilon, 1e-3), max(plan.epsilon, 1e-3) + 40.0, 200).tolist()
    index = bisect_left(epsilons, True, key=exceeds_claim)
    return float(epsilons[index]) if index < len(epsilons) else math.inf


def _find_undetectable_violation(plan: AuditPlan, numbers: int, losses: FloatArray, max_provable: float) -> str:
    """Find the most obvious violation that the audit could not have detected; empty: it could have detected all of these."""
    exceeds = max_provable > plan.epsilon
    level = plan.alpha_allocation.compute_level("likelihood", "calibration", 8)
    probabilities = special.expit(np.abs(losses[np.isfinite(losses)]))
    detects_no_noise = bool(len(probabilities)) and float(np.log(probabilities).sum()) < math.log(level / 2)
    if not (numbers or exceeds or detects_no_noise):
        return "a learner without noise"
    quantile = special.gammaincinv(
        max(numbers, 1), plan.alpha_allocation.compute_level("conformance", "marginal", 8) / 2
    )
    detects_half_noise = numbers > 0 and float(special.gammainc(numbers, 2.0 * quantile)) >= _POWER
    detects_slope = float(np.sum(losses[np.isfinite(losses)] ** 2 * probabilities * (1.0 - probabilities))) > 4.9**2
    if not (detects_half_noise or exceeds or detects_slope):
        return "a learner with half of its noise"
    return ""
