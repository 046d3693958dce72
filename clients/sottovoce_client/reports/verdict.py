"""What may be concluded from one capture: it can refute a claim, or be consistent with it, never prove it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sottovoce_client.running.summary import LearnerSummary, RunSummary, Swap
from sottovoce_client.wording import number

_Case = tuple[LearnerSummary, str, Swap]
"""Whose record, at which level (`event` or `record`), and what its swap shows."""


@dataclass(frozen=True, slots=True)
class _Headline:
    """A headline, and the sentence that gives its reason."""

    kind: Literal["consistent", "refuted", "open"]
    headline: str
    text: str


def exceeds(loss: float, budget: float) -> bool:
    """Whether a loss is above the claim by more than rounding."""
    return loss > budget * (1 + 1e-9) + 1e-12


def _cases(summary: RunSummary) -> list[_Case]:
    """Every swap that was weighed."""
    return [
        (learner, level, swap)
        for learner in summary.learners
        for level in ("event", "record")
        if (swap := learner.swap(level)) is not None
    ]


def telling(summary: RunSummary) -> _Case | None:
    """The swap with the largest loss, of those above their claim if there are any; None without a capture.

    One that claims nothing finite comes last.
    """

    def rank(case: _Case) -> tuple[bool, bool, float]:
        swap = case[2]
        return exceeds(swap.loss, swap.budget), math.isfinite(swap.budget), swap.loss

    return max(_cases(summary), key=rank, default=None)


def verdict_of(summary: RunSummary) -> _Headline:
    """Hold the capture's exact losses against the claims."""
    worst = telling(summary)
    if worst is None and summary.tapped is not None:
        text = "A wiretap reads no messages, so the promise below was not put to the test. What sizes and times of ciphertext "
        text += "give away takes many runs to see: sottovoce audit --on wiretap."
        return _Headline("open", "Only ciphertext was recorded", text)
    if worst is None and summary.live and summary.capture is not None:
        text = (
            "The records are with their learners, and without them nobody can say what this capture tells of one. With "
        )
        text += "sottovoce up --keep-log they are weighed here, too; sottovoce watch --log looks at the noise."
        return _Headline("open", "Recorded, and not put to the test", text)
    if worst is None:
        text = "Without a capture the promise below was not put to the test."
        return _Headline("open", "Nobody listened", text)
    learner, level, swap = worst
    shown = f"{learner.name}, one record swapped, per {level}"
    if exceeds(swap.loss, swap.budget):
        text = f"The privacy loss of this capture is {number(swap.loss)}, above the claim of {number(swap.budget)} ({shown})."
        return _Headline("refuted", "Refuted: the capture gives away more than was promised", text)
    loose = [case for case in _cases(summary) if exceeds(case[2].supremum, case[2].budget)]
    if loose:
        learner, level, swap = loose[0]
        text = f"A capture could have shown {number(swap.supremum)}, above the claim of {number(swap.budget)} "
        return _Headline("refuted", "Refuted: the claim does not hold", f"{text}({learner.name}, per {level}).")
    if not summary.private_noise:
        text = "Its noise came from a recording or a seed, so that it can be repeated: whoever has them can take it away again. "
        text += (
            f"The largest privacy loss found in this capture is {number(swap.loss)}, as far as the noise is unknown."
        )
        return _Headline("open", "This run protected nobody", text)
    if math.isinf(swap.budget):
        text = f"Every claimed ε is infinite. The largest privacy loss found in this capture is {number(swap.loss)}."
        return _Headline("open", "Nothing finite was promised", text)
    # Who left said nothing in the rounds that follow, which is no lack of the capture.
    examined = min((len(s.by_round) for who, _, s in _cases(summary) if not who.left), default=summary.rounds_done)
    said = summary.rounds_done
    if 2 * examined < said:
        text = f"What learners said could be replayed for {examined} of {said} rounds at least, because in later ones nobody "
        text += f"heard them. The largest privacy loss found is {number(swap.loss)}, within the claim of {number(swap.budget)}."
        return _Headline("open", "Too little was overheard to tell", text)
    text = f"The most telling record swap found has a privacy loss of {number(swap.loss)} in this capture, "
    text += f"within the claim of {number(swap.budget)} ({shown}). One capture can refute a promise, not prove it."
    return _Headline("consistent", "Consistent with the promise", text)
