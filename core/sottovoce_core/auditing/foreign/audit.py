"""Audit without an algorithm: captured runs of two worlds, of a foreign service, or from a wiretap.

The user supplies the coin of every run. Bounds are those of the black box, with all of alpha. Repeats are no bound on epsilon:
they never refute a claim, but prevent the verdict "consistent". Timing is shown but not tested if each world has its own
processes: these differ in timing in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.blackbox import (
    GUESSED_FRACTION,
    attack,
    compute_classifier_level,
    count_guessed_runs,
    split,
)
from sottovoce_core.auditing.bounds import (
    BLACK_BOX_ALLOCATION,
    NOISE_ALLOCATION,
    AlphaAllocation,
    Bound,
    compute_epsilon_lower_bound,
    compute_min_runs,
)
from sottovoce_core.auditing.foreign.answer_features import Leak, build_answer_views, find_leaks
from sottovoce_core.auditing.foreign.repeats import Anomaly, find_anomalies
from sottovoce_core.auditing.traffic_features import RunTraffic, build_timing_views, build_views, collect_decoded_fields
from sottovoce_core.auditing.verdict import Findings, Verdict, decide
from sottovoce_core.errors import CaptureError
from sottovoce_core.optional import import_optional

if TYPE_CHECKING:
    from sottovoce_core.auditing.foreign.noise import NoiseClaim, NoiseFindings


_MIN_COIN_P_VALUE = 1e-3
"""Minimum p-value of coins that are accepted as fair."""


@dataclass(frozen=True, slots=True)
class ForeignAudit:
    """Results of a foreign audit.

    Attributes:
        runs: number of runs of each world, after some were excluded to balance them.
        excluded_runs: number of excluded runs.
        is_interleaved: True if the worlds alternate as coins do. If not, drift over time distinguishes them, too.
        timing_bounds: bounds from timing; empty if times are tested with the rest.
        anomalies: repeats.
        message_count: messages of a run, among which epsilon may be divided.
        leaks: numbers that differ most between the worlds, if a classifier distinguishes them.
        noise: results on the claimed noise; None: none is claimed.
        findings: guesses by everything that is tested.
        verdict: verdict on the claim.
    """

    runs: tuple[int, int]
    excluded_runs: int
    is_interleaved: bool
    timing_bounds: tuple[Bound, ...]
    anomalies: tuple[Anomaly, ...]
    message_count: int
    leaks: tuple[Leak, ...]
    noise: NoiseFindings | None
    findings: Findings
    verdict: Verdict

    @property
    def max_provable_epsilon(self) -> float:
        """Bound if every guess were correct."""
        return self.findings.max_provable_epsilon


def audit_traffic(
    runs: Sequence[RunTraffic],
    *,
    claim: float = math.inf,
    delta: float = 0.0,
    noise: Mapping[str, NoiseClaim] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    same_processes: bool = False,
    void_reason: str = "",
    on_stage: Callable[[str], None] = lambda stage: None,
) -> ForeignAudit:
    """Audit captured runs.

    Args:
        runs: runs of both worlds, each in a world that a fair coin chose.
        claim: claimed epsilon for a run; infinite: none.
        delta: delta at which it is claimed, and bounded.
        noise: claimed noise in decoded fields, by name; empty: none.
        confidence: probability that a true claim is not refuted.
        seed: seed of the split and the classifiers.
        same_processes: the same processes served both worlds, alternately: times are tested, too, and any difference between
            the worlds is an anomaly, because only the numbers may differ, and they are encrypted.
        void_reason: reason why the coins are not valid; empty: they may be fair.
        on_stage: receives the name of each stage.

    Raises:
        CaptureError: a world has no run.
        SpecError: scipy or scikit-learn are not installed; or noise is claimed of a field that does not exist.
    """
    for extra, package in (("scipy.stats", "scipy"), ("sklearn", "scikit-learn")):
        import_optional(extra, package, "an audit")
    from sottovoce_core.auditing.foreign.noise import check_noise
    from sottovoce_core.auditing.foreign.power import count_messages

    levels = AlphaAllocation(1.0 - confidence, NOISE_ALLOCATION if noise else BLACK_BOX_ALLOCATION)
    balance_seed, box_seed, timing_seed, rounding_seed = np.random.SeedSequence(seed).spawn(4)
    balanced = _balance(sorted(runs, key=lambda run: run.start_time), np.random.default_rng(balance_seed))
    worlds = np.array([run.world for run in balanced], dtype=np.int64)
    is_interleaved = _is_interleaved(worlds)
    on_stage("looking for repeats")
    anomalies = find_anomalies(balanced)
    noise_findings = None
    if noise:
        on_stage("testing the noise")
        noise_findings = check_noise(balanced, noise, levels, np.random.default_rng(rounding_seed), claim, delta)
    on_stage("black box")
    learned_runs, _ = split(len(balanced), box_seed)
    timing_views, answers = build_timing_views(balanced), build_answer_views(balanced, learned_runs)
    views = (
        build_views(balanced)
        | _build_spread_views(balanced, learned_runs)
        | {name: view for name, (view, _) in answers.items()}
    )
    views |= timing_views if same_processes else {}
    bounds = [each.bound for each in attack(views, worlds, levels, claim, box_seed, delta)]
    leaks = find_leaks(balanced, views, worlds, bounds, {name: names for name, (_, names) in answers.items()})
    guesses = count_guessed_runs(len(balanced))
    is_decided = noise_findings is not None and noise_findings.is_decisive
    findings = Findings(
        runs=len(balanced) // 2,
        alpha_allocation=levels,
        claim=claim,
        tests=() if noise_findings is None else noise_findings.tests,
        bounds=tuple(_add_location(bound, leaks) for bound in bounds),
        anomalies=tuple(map(str, anomalies)),
        needed_runs=0
        if is_decided or math.isinf(claim)
        else compute_min_runs(claim, compute_classifier_level(levels), GUESSED_FRACTION, delta),
        assumption="" if is_interleaved else ", if only the world changed between them",
        void_reason=void_reason,
        max_provable_epsilon=compute_epsilon_lower_bound(
            guesses, guesses, compute_classifier_level(levels), delta, guesses
        ),
        delta=delta,
    )
    messages = count_messages(balanced)
    if same_processes:
        findings = replace(findings, anomalies=(*findings.anomalies, *_describe_difference(findings)))
    elif 0.0 < claim < math.inf:
        findings = _add_detectable_effects(findings, len(balanced), messages, noise_findings)
    timing_bounds = (
        ()
        if same_processes
        else tuple(each.bound for each in attack(timing_views, worlds, levels, math.inf, timing_seed, delta))
    )
    counts = (int((worlds == 0).sum()), int((worlds == 1).sum()))
    return ForeignAudit(
        counts,
        len(runs) - len(balanced),
        is_interleaved,
        timing_bounds,
        anomalies,
        messages,
        leaks,
        noise_findings,
        findings,
        decide(findings),
    )


def _build_spread_views(runs: Sequence[RunTraffic], learned_runs: IntArray) -> dict[str, FloatArray]:
    """Build views of the distance of numbers from their median: noise of another size distinguishes worlds, too.

    Args:
        runs: captured runs.
        learned_runs: indices of the runs that may be used for learning, whose medians are used.
    """
    views = {}
    for field, values in collect_decoded_fields(runs).items():
        if not values.size:
            continue
        distances = np.abs(values - np.median(values[learned_runs], axis=0))
        median_distance = np.median(distances[learned_runs], axis=0)
        size = np.clip(
            np.divide(distances, median_distance, out=np.zeros_like(distances), where=median_distance > 0.0), 0.0, 20.0
        )
        views[f"spread of {field}"] = size.reshape(len(runs), -1)
        parts = np.stack([size, np.log(size + 1e-3), size**2], axis=-1)
        each = parts.mean(axis=2).reshape(len(runs), -1)
        means = [size.mean(axis=1), each, parts.mean(axis=(1, 2))]
        views[f"mean spread of {field}"] = np.concatenate(means, axis=1)
    return views


def _add_location(bound: Bound, leaks: Sequence[Leak]) -> Bound:
    """Add to a bound the number with the largest effect in its view."""
    location = next((str(leak) for leak in leaks if leak.view == bound.view), "")
    return replace(bound, location=location) if location and bound.value > 0.0 else bound


def _add_detectable_effects(
    findings: Findings, runs: int, messages: int, noise_findings: NoiseFindings | None
) -> Findings:
    """Add the minimum detectable effects, and the most obvious undetectable violation."""
    from sottovoce_core.auditing.foreign import power

    guesser = power.PowerAnalysis(findings.claim, findings.delta, messages, findings.alpha_allocation)
    effects = tuple(guesser.list_detectable_effects(runs))
    if noise_findings is not None and noise_findings.noise_count:
        effect, detects_half_noise = power.compute_noise_effect(noise_findings.noise_count, findings.alpha_allocation)
        effects = effect, *effects
        if noise_findings.is_decisive:
            return replace(
                findings,
                detectable_effects=effects,
                undetectable_violation="" if detects_half_noise else "a service with half of its noise",
            )
    if findings.needed_runs > findings.runs or guesser.can_detect(2.0, runs):
        return replace(findings, detectable_effects=effects)
    violation, needed_runs = "a service with half of its noise", guesser.find_needed_runs(2.0)
    if noise_findings is not None:
        subject = (
            f"numbers of {', '.join(noise_findings.undecided_fields)}"
            if noise_findings.undecided_fields
            else "messages"
        )
        violation = f"a record that moves {subject} twice as far"
    needed = "more than 1,048,576 runs" if math.isinf(needed_runs) else f"about {needed_runs:,} runs of each world"
    return replace(
        findings, detectable_effects=effects, undetectable_violation=f"{violation} (the optimal guesser needs {needed})"
    )


def _describe_difference(findings: Findings) -> tuple[str, ...]:
    """Describe a difference between the worlds that the claim allows; false with probability at most alpha."""
    guesser, bound = findings.best_bound
    if bound == 0.0 or bound > findings.claim:  # a larger bound is evidence, not an anomaly
        return ()
    return (
        f"{guesser} distinguishes the worlds (epsilon is above {bound:.3g}), but only numbers may differ between them",
    )


def _balance(runs: Sequence[RunTraffic], generator: np.random.Generator) -> list[RunTraffic]:
    """Select runs as a fair coin would give them: of a world that is too frequent, a random part.

    Raises:
        CaptureError: a world has no run.
    """
    worlds = np.array([run.world for run in runs], dtype=np.int64)
    ones, total = int(worlds.sum()), len(runs)
    if ones in (0, total):
        raise CaptureError(f"an audit needs runs of both worlds, got {total - ones} of world 0 and {ones} of world 1")
    stats = import_optional("scipy.stats", "scipy", "an audit")
    if 2.0 * float(stats.binom.cdf(min(ones, total - ones), total, 0.5)) >= _MIN_COIN_P_VALUE:
        return list(runs)
    common = int(2 * ones > total)
    kept_fraction = min(ones, total - ones) / max(ones, total - ones)
    keep = (worlds != common) | (generator.random(total) < kept_fraction)
    return [run for run, is_kept in zip(runs, keep.tolist(), strict=True) if is_kept]


def _is_interleaved(worlds: IntArray) -> bool:
    """Return whether the worlds change as often as coins would (Wald and Wolfowitz)."""
    ones, total = int(worlds.sum()), len(worlds)
    zeros = total - ones
    if total < 10 or not ones or not zeros:
        return True  # too few to decide
    mean = 1.0 + 2.0 * ones * zeros / total
    spread = math.sqrt((mean - 1.0) * (mean - 2.0) / (total - 1.0))
    changes = 1 + int((worlds[1:] != worlds[:-1]).sum())
    norm = import_optional("scipy.stats", "scipy", "an audit").norm
    return spread == 0.0 or float(norm.sf(abs(changes - mean) / spread)) * 2.0 >= _MIN_COIN_P_VALUE
