"""What must hold after every trial."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from sottovoce.running.run import build_run
from sottovoce.spec import RunSpec
from tests.faults.trial import NAMES, Said, Trial

FEATURES = 3
_ROUNDING = 1e-9


def promises(trial: Trial) -> list[str]:
    """What was broken, a sentence each; none: all held."""
    checks = (_was_struck, _ended, _one_content, _all_heard, _charged, _same_trajectory, _all_agree, _nothing_left)
    return [broken for check in checks for broken in check(trial)]


def price(spec: RunSpec, index: int, rounds: int) -> float:
    """Epsilon of so many rounds of one record each, by the spec."""
    accountant = build_run(spec, FEATURES).algorithm.accountant(index)
    losses = []
    for t in range(rounds):
        if t > 0:
            accountant.advance(1)
        losses.append(accountant.next_loss())
    return math.fsum(losses)


def _was_struck(trial: Trial) -> Iterator[str]:
    if not trial.struck:
        yield "the fault was not done to its end: this trial shows nothing"


def _ended(trial: Trial) -> Iterator[str]:
    """Finished, or for a reason that this fault may end a run for."""
    finished, allowed = trial.state == "finished", trial.fault.ends
    if finished and trial.fault.must_end:
        yield "the run finished, and must not have"
    if not finished and (trial.state == "hung" or not allowed or not re.search(allowed, trial.reason)):
        wanted = f"end with {allowed!r}" if allowed else "finish"
        yield f"the run must {wanted}, and {trial.state}: {trial.reason!r}"


def _one_content(trial: Trial) -> Iterator[str]:
    known: dict[tuple[int, int], bytes] = {}
    for sender, t, payload in (*trial.overheard, *trial.logged):
        if known.setdefault((sender, t), payload) != payload:
            yield f"{NAMES[sender]} has two contents of round {t}"


def _all_heard(trial: Trial) -> Iterator[str]:
    """Everything that was said is in the capture, and everything in the capture was written down by who said it."""
    if trial.state != "finished":
        return
    due = {(sender, t) for sender in range(len(NAMES)) for t in range(trial.spec.rounds)}
    for where, said in (("capture", trial.overheard), ("logs", trial.logged)):
        missing = due - _rounds(said)
        if missing and not (where == "capture" and trial.fault.blind):
            yield f"{len(missing)} rounds are missing in the {where}, the first of them {min(missing)}"


def _charged(trial: Trial) -> Iterator[str]:
    """No ledger is below what was said; where all went well, none is above it either."""
    for index, name in enumerate(NAMES):
        said = max((t + 1 for sender, t, _ in trial.overheard if sender == index), default=0)
        due, spent = price(trial.spec, index, said), trial.spent[index]
        if spent < due * (1 - _ROUNDING):
            yield f"the ledger of {name} says {spent:.6g}, and {said} rounds that it said cost {due:.6g}"
        all_rounds = price(trial.spec, index, trial.spec.rounds)
        if trial.state == "finished" and index not in trial.repaired and spent > all_rounds * (1 + _ROUNDING):
            yield f"the ledger of {name} says {spent:.6g}, and all rounds cost {all_rounds:.6g}"


def _same_trajectory(trial: Trial) -> Iterator[str]:
    if trial.calm is None:
        return
    for sender, t, payload in (*trial.overheard, *trial.logged):
        if trial.calm.get((sender, t)) != payload:
            yield f"{NAMES[sender]} said something else in round {t} than in an undisturbed run"
            return


def _all_agree(trial: Trial) -> Iterator[str]:
    """Once a run has finished, coordinator and learners say the same."""
    due = (trial.spec.rounds,) * len(NAMES)
    if trial.state == "finished" and (trial.told, trial.own) != (due, due):
        yield f"all must have done {trial.spec.rounds} rounds: the coordinator says {trial.told}, they say {trial.own}"


def _nothing_left(trial: Trial) -> Iterator[str]:
    yield from (f"{name} did not end when it was told to" for name in trial.left)
    yield from (f"unexpected: {words}" for words in trial.crashed)


def _rounds(said: tuple[Said, ...]) -> set[tuple[int, int]]:
    return {(sender, t) for sender, t, _ in said}
