"""What must hold after every trial."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.signatures import ROUNDS_PER_BLOCK
from tests.faults.simulated import anybody_late, decoded, unlike
from tests.faults.stage import NAMES
from tests.faults.trial import FEATURES, Said, Trial

_ROUNDING = 1e-9


def promises(trial: Trial) -> list[str]:
    """What was broken, a sentence each; none: all held."""
    checks = [_was_struck, _ended, _one_content, _charged, _same_trajectory, _silent, _nothing_left, _one_signed]
    if trial.state == "finished":
        checks += [_all_heard, _transcribed, _who_is_away, _all_agree, _as_simulated, _proved]
    return [broken for check in checks for broken in check(trial)]


def last_round(spec: RunSpec, index: int) -> int:
    """The round after the last one in which a learner takes part."""
    return spec.participation.learner_participation(index, spec.rounds).end


def price(spec: RunSpec, index: int, rounds: int) -> float:
    """Epsilon of so many rounds of one record each, by the spec."""
    return float(build_run(spec, FEATURES).guarantee(index).cumulative_epsilon[rounds - 1]) if rounds else 0.0


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
    network = build_run(trial.spec, FEATURES).network
    due = {(sender, t) for sender in range(len(NAMES)) for t in _due(trial.spec, sender)}
    heard = {(sender, t) for sender, t in due if network.sender_mask(t)[sender]}
    for where, said, wanted in (("capture", trial.overheard, heard), ("logs", trial.logged, due)):
        missing = wanted - _rounds(said)
        if missing and not (where == "capture" and trial.fault.blind):
            yield f"{len(missing)} rounds are missing in the {where}, the first of them {min(missing)}"
    if unwritten := _rounds(trial.overheard) - _rounds(trial.logged) - due:
        yield f"{len(unwritten)} rounds were said that are in no log, the first of them {min(unwritten)}"


def _charged(trial: Trial) -> Iterator[str]:
    """No ledger is below what was said; where all went well, none is above it either."""
    for index, name in enumerate(NAMES):
        said = max((t + 1 for sender, t, _ in trial.overheard if sender == index), default=0)
        due, spent = price(trial.spec, index, said), trial.spent[index]
        if spent < due * (1 - _ROUNDING):
            yield f"the ledger of {name} says {spent:.6g}, and {said} rounds that it said cost {due:.6g}"
        all_rounds = price(trial.spec, index, last_round(trial.spec, index))
        if trial.state == "finished" and index not in trial.repaired and spent > all_rounds * (1 + _ROUNDING):
            yield f"the ledger of {name} says {spent:.6g}, and all rounds cost {all_rounds:.6g}"


def _same_trajectory(trial: Trial) -> Iterator[str]:
    if trial.calm is None:
        return
    for sender, t, payload in (*trial.overheard, *trial.logged):
        if trial.calm.get((sender, t)) != payload:
            yield f"{NAMES[sender]} said something else in round {t} than in an undisturbed run"
            return


def _one_signed(trial: Trial) -> Iterator[str]:
    """What passed in somebody's name is what it signed, once."""
    for name, words in trial.signed.items():
        if wrong := words.equivocated_rounds or words.mismatched_rounds:
            yield f"{name} has signed something else of round {wrong[0]} than it said"
        yield from (f"a signature of {name} is refused: {why}" for why in words.refusals)


def _proved(trial: Trial) -> Iterator[str]:
    """All that was overheard is signed, but for the last block, which may be cut off, and where nobody was left to hear it."""
    network = build_run(trial.spec, FEATURES).network
    for name, words in trial.signed.items():
        index = _index(name)
        whole = last_round(trial.spec, index) // ROUNDS_PER_BLOCK * ROUNDS_PER_BLOCK
        ends = {
            t: t // ROUNDS_PER_BLOCK * ROUNDS_PER_BLOCK + ROUNDS_PER_BLOCK - 1
            for t in words.unsigned_rounds
            if t < whole
        }
        missing = [t for t, end in ends.items() if network.sender_mask(end)[index]]
        if missing and not trial.fault.blind and index not in _lost(trial.spec):
            yield f"{len(missing)} rounds of {name} are not signed, the first of them {min(missing)}"


def _silent(trial: Trial) -> Iterator[str]:
    """Who was lost says no more once it knows."""
    for name, rounds in trial.silent.items():
        if more := [t for sender, t, _ in (*trial.overheard, *trial.logged) if sender == _index(name) and t >= rounds]:
            yield f"{name} was silent after {rounds} rounds, and has said round {min(more)}"


def _transcribed(trial: Trial) -> Iterator[str]:
    if trial.unread:
        yield f"the capture must be a transcript of the whole run: {trial.unread}"


def _who_is_away(trial: Trial) -> Iterator[str]:
    spec = trial.spec
    away = {name for i, name in enumerate(NAMES) if last_round(spec, i) < spec.rounds} | {NAMES[i] for i in _lost(spec)}
    if away != trial.away:
        yield f"away in the end must be {sorted(trial.away)}, and are {sorted(away)}"


def _all_agree(trial: Trial) -> Iterator[str]:
    """Coordinator and learners say the same, but for who was lost; who has ended says nothing."""
    those = [i for i in range(len(NAMES)) if i not in _lost(trial.spec)]
    due = [last_round(trial.spec, i) for i in those]
    told, own = [trial.told[i] for i in those], [trial.own[i] for i in those]
    if told != due or any(said not in (-1, wanted) for said, wanted in zip(own, due, strict=True)):
        yield f"learners {those} must have done {due} rounds: the coordinator says {told}, they say {own}"


def _as_simulated(trial: Trial) -> Iterator[str]:
    """Where the run changes on its way: by its spec as it is in the end, and the messages that updates used."""
    if not trial.fault.changing:
        return
    said = decoded(trial.spec, (*trial.overheard, *trial.logged))
    if trial.fault.late in ("reuse", "async") and not anybody_late(said):
        yield "nobody was late: this trial shows nothing"
    if trial.keyed and (wrong := unlike(trial.spec, said)) is not None:
        yield f"{NAMES[wrong[0]]} said something else in round {wrong[1]} than the simulator does"


def _nothing_left(trial: Trial) -> Iterator[str]:
    yield from (f"{name} did not end when it was told to" for name in trial.left)
    yield from (f"unexpected: {words}" for words in trial.crashed)


def _due(spec: RunSpec, index: int) -> set[int]:
    """Rounds that a learner must have said: of one that was lost, those that others have learned."""
    there = spec.participation.learner_participation(index, spec.rounds)
    return {t for t in range(there.end) if t in there and not spec.participation.unreceived_sender_mask(t)[index]}


def _lost(spec: RunSpec) -> set[int]:
    return {_index(each.learner) for each in spec.offline_intervals or () if each.missed_from_rounds}


def _index(name: str) -> int:
    return NAMES.index(name)


def _rounds(said: tuple[Said, ...]) -> set[tuple[int, int]]:
    return {(sender, t) for sender, t, _ in said}
