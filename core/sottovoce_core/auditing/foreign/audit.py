"""The audit without an algorithm: captured runs of two worlds, of a service that is not ours, or by a wiretap.

The coin of every run is the user's. Bounds are those of the black box, at the whole of alpha. What is said twice is no bound on
epsilon: it never refutes a claim, but keeps it from being called consistent. Timing is shown and not judged, where each world has
processes of its own: two differ in it whatever they hold.
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
        messages: of a run, among which epsilon may be divided.
        leaks: the numbers that tell the worlds apart most, where a classifier does.
        noise: what came of the claimed noise; None: none is claimed.
        found: guesses by all that is judged.
        verdict: on the claim.
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
        """The bound if every guess were right."""
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
    on_stage: Callable[[str], None] = lambda what: None,
) -> ForeignAudit:
    """Audit captured runs.

    Args:
        runs: of both worlds, each in a world that a fair coin chose.
        claim: epsilon that is claimed for a run; infinite: nothing is.
        delta: at which it is claimed, and bounded.
        noise: what is claimed of the noise in decoded fields, by name; empty: nothing is.
        confidence: with which a claim that holds is not refuted.
        seed: of the split and the classifiers.
        same_processes: the same processes lived in both worlds, in turns: times are judged, too, and what tells the worlds apart
            at all is a sign, for numbers alone need do so, and nobody sees them.
        void: why the coins are none; empty: they may be fair.
        say: told what is being done.

    Raises:
        CaptureError: a world has no run.
        SpecError: scipy or scikit-learn are not installed; or noise is claimed of a field that there is not.
    """
    for extra, package in (("scipy.stats", "scipy"), ("sklearn", "scikit-learn")):
        import_optional(extra, package, "an audit")
    from sottovoce_core.auditing.foreign.noise import check_noise
    from sottovoce_core.auditing.foreign.power import count_messages

    levels = AlphaAllocation(1.0 - confidence, NOISE_ALLOCATION if noise else BLACK_BOX_ALLOCATION)
    dropped, boxed, clocked, spread = np.random.SeedSequence(seed).spawn(4)
    kept = _balanced(sorted(runs, key=lambda run: run.start_time), np.random.default_rng(dropped))
    worlds = np.array([run.world for run in kept], dtype=np.int64)
    in_turns = _in_turns(worlds)
    on_stage("looking for what is said twice")
    seen = find_anomalies(kept)
    noised = None
    if noise:
        on_stage("testing the noise")
        noised = check_noise(kept, noise, levels, np.random.default_rng(spread), claim, delta)
    on_stage("black box")
    learnt, _ = split(len(kept), boxed)
    clocks, answers = build_timing_views(kept), build_answer_views(kept, learnt)
    seen_in = build_views(kept) | _spread_views(kept, learnt) | {name: view for name, (view, _) in answers.items()}
    seen_in |= clocks if same_processes else {}
    bounds = [each.bound for each in attack(seen_in, worlds, levels, claim, boxed, delta)]
    shown = find_leaks(kept, seen_in, worlds, bounds, {name: names for name, (_, names) in answers.items()})
    guesses = count_guessed_runs(len(kept))
    decided = noised is not None and noised.is_decisive
    found = Findings(
        runs=len(kept) // 2,
        alpha_allocation=levels,
        claim=claim,
        tests=() if noised is None else noised.tests,
        bounds=tuple(_named(bound, shown) for bound in bounds),
        anomalies=tuple(map(str, seen)),
        needed_runs=0
        if decided or math.isinf(claim)
        else compute_min_runs(claim, compute_classifier_level(levels), GUESSED_FRACTION, delta),
        assumption="" if in_turns else ", if nothing but the world changed between them",
        void_reason=void_reason,
        max_provable_epsilon=compute_epsilon_lower_bound(
            guesses, guesses, compute_classifier_level(levels), delta, guesses
        ),
        delta=delta,
    )
    messages = count_messages(kept)
    if same_processes:
        found = replace(found, anomalies=(*found.anomalies, *_apart(found)))
    elif 0.0 < claim < math.inf:
        found = _with_power(found, len(kept), messages, noised)
    timed = (
        () if same_processes else tuple(each.bound for each in attack(clocks, worlds, levels, math.inf, clocked, delta))
    )
    counts = (int((worlds == 0).sum()), int((worlds == 1).sum()))
    return ForeignAudit(
        counts, len(runs) - len(kept), in_turns, timed, seen, messages, shown, noised, found, decide(found)
    )


def _spread_views(runs: Sequence[RunTraffic], learnt: IntArray) -> dict[str, FloatArray]:
    """Views that see how far numbers lie from their middle: noise of another size tells a world, too.

    Args:
        runs: what passed.
        learnt: the runs that may be learnt from, whose medians are the middle.
    """
    found = {}
    for field, values in collect_decoded_fields(runs).items():
        if not values.size:
            continue
        far = np.abs(values - np.median(values[learnt], axis=0))
        usual = np.median(far[learnt], axis=0)
        size = np.clip(np.divide(far, usual, out=np.zeros_like(far), where=usual > 0.0), 0.0, 20.0)
        found[f"spread of {field}"] = size.reshape(len(runs), -1)
        parts = np.stack([size, np.log(size + 1e-3), size**2], axis=-1)
        each = parts.mean(axis=2).reshape(len(runs), -1)
        means = [size.mean(axis=1), each, parts.mean(axis=(1, 2))]
        found[f"mean spread of {field}"] = np.concatenate(means, axis=1)
    return found


def _named(bound: Bound, shown: Sequence[Leak]) -> Bound:
    """A bound with the number that shows most in its view."""
    where = next((str(leak) for leak in shown if leak.view == bound.view), "")
    return replace(bound, location=where) if where and bound.value > 0.0 else bound


def _with_power(found: Findings, runs: int, messages: int, noised: NoiseFindings | None) -> Findings:
    """With what would have been found, and the plainest violation that would not."""
    from sottovoce_core.auditing.foreign import power

    guesser = power.PowerAnalysis(found.claim, found.delta, messages, found.alpha_allocation)
    reaches = tuple(guesser.list_detectable_effects(runs))
    if noised is not None and noised.noise_count:
        reach, halved = power.compute_noise_effect(noised.noise_count, found.alpha_allocation)
        reaches = reach, *reaches
        if noised.is_decisive:
            return replace(
                found,
                detectable_effects=reaches,
                undetectable_violation="" if halved else "a service with half of its noise",
            )
    if found.needed_runs > found.runs or guesser.can_detect(2.0, runs):
        return replace(found, detectable_effects=reaches)
    blind, many = "a service with half of its noise", guesser.find_needed_runs(2.0)
    if noised is not None:
        moved = f"numbers of {', '.join(noised.undecided_fields)}" if noised.undecided_fields else "messages"
        blind = f"a record that moves {moved} twice as far"
    needed = "more runs than anybody makes" if math.isinf(many) else f"about {many:,} runs of each world"
    return replace(
        found, detectable_effects=reaches, undetectable_violation=f"{blind} (the best of guessers needs {needed})"
    )


def _apart(found: Findings) -> tuple[str, ...]:
    """That the worlds differ, where a claim of more allows that; said of worlds that do not with probability alpha at most."""
    who, bound = found.best_bound
    if bound == 0.0 or bound > found.claim:  # more than that is no sign, but evidence
        return ()
    return (
        f"{who} tells the worlds apart (epsilon is above {bound:.3g}), and nothing that passes need do so but numbers",
    )


def _balanced(runs: Sequence[RunTraffic], generator: np.random.Generator) -> list[RunTraffic]:
    """Runs as a fair coin would have them: of a world that is too frequent, a random part.

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
    norm = import_optional("scipy.stats", "scipy", "an audit").norm
    return spread == 0.0 or float(norm.sf(abs(changes - mean) / spread)) * 2.0 >= _MIN_COIN_P_VALUE
