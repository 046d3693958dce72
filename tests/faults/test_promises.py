"""What is looked at after a trial sees what it must: every promise, broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sottovoce_client.transcripts.verify import LearnerSignatures
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray
from sottovoce_core.runs.participation import encode_punctual_rounds
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.signatures import DIGEST_BYTES, ROUNDS_PER_BLOCK, Statement, compute_frame_digest
from tests.examples import made_up
from tests.faults.catalogue import EVERY
from tests.faults.page import Row, page
from tests.faults.promises import price, promises
from tests.faults.simulated import keyed
from tests.faults.stage import NAMES, spec_of, tracebacks
from tests.faults.trial import FEATURES, UNDISTURBED, Said, Trial

SPEC = spec_of("paced", 0.1, 60.0)
ROUNDS = SPEC.rounds
SAID = tuple((i, t, bytes([i, t])) for t in range(ROUNDS) for i in range(len(NAMES)))
COST = {i: price(SPEC, i, ROUNDS) for i in range(len(NAMES))}
AT_END = (ROUNDS,) * len(NAMES)
GOOD = Trial(
    UNDISTURBED,
    0,
    SPEC,
    True,
    True,
    "finished",
    "",
    SAID + SAID[:3],  # heard by several, and said again
    SAID,
    COST,
    frozenset(),
    AT_END,
    AT_END,
    {(sender, t): payload for sender, t, payload in SAID},
)


def test_a_good_trial_breaks_nothing() -> None:
    assert ROUNDS == 5
    assert promises(GOOD) == []
    assert promises(replace(GOOD, calm=None)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"struck": False}, "was not done to its end"),
        ({"state": "failed", "reason": "ann failed"}, "must finish, and failed: 'ann failed'"),
        ({"state": "hung"}, "must finish, and hung"),
        ({"overheard": (*SAID, (1, 2, b"other")), "calm": None}, "ben has two contents of round 2"),
        ({"logged": (*SAID[:-1], (2, 4, b"other")), "calm": None}, "cleo has two contents of round 4"),
        ({"overheard": SAID[:-1]}, "1 rounds are missing in the capture, the first of them (2, 4)"),
        ({"logged": SAID[1:]}, "1 rounds are missing in the logs, the first of them (0, 0)"),
        ({"spent": {**COST, 1: COST[1] * 0.999}}, "the ledger of ben says"),
        ({"spent": {**COST, 1: COST[1] * 1.001}}, "and all rounds cost"),
        ({"calm": {**(GOOD.calm or {}), (0, 3): b"other"}}, "ann said something else in round 3"),
        ({"told": (ROUNDS, ROUNDS - 1, ROUNDS)}, "must have done [5, 5, 5] rounds: the coordinator says [5, 4, 5]"),
        ({"own": (ROUNDS, ROUNDS, 4)}, "they say [5, 5, 4]"),
        ({"silent": {"ben": 4}, "calm": None}, "ben was silent after 4 rounds, and has said round 4"),
        ({"unread": "it has 4 of 5 rounds"}, "a transcript of the whole run: it has 4 of 5 rounds"),
        ({"away": frozenset({"ben"})}, "away in the end must be ['ben'], and are []"),
        ({"left": ("ben",)}, "ben did not end when it was told to"),
        ({"crashed": ("ben: Traceback",)}, "unexpected: ben: Traceback"),
    ],
)
def test_whatever_breaks_is_noticed(change: dict[str, Any], words: str) -> None:
    (broken,) = promises(replace(GOOD, **change))
    assert words in broken


def words(said: int, signed: int, what: bytes = b"", refused: str = "") -> LearnerSignatures:
    """Of so many rounds, of which so many are signed."""
    found = LearnerSignatures()
    for t in range(said):
        found.record_message(t, compute_frame_digest(b"%d" % t))
    for block in range(-(-signed // ROUNDS_PER_BLOCK)):
        rounds = range(ROUNDS_PER_BLOCK * block, ROUNDS_PER_BLOCK * (block + 1))
        digests = [compute_frame_digest(b"%d" % t + what) if t < signed else bytes(DIGEST_BYTES) for t in rounds]
        found.record_statement(Statement("run", 1, block, b"".join(digests)))
    found.refusals.update([refused] if refused else [])
    return found


@pytest.mark.parametrize(
    ("told", "state", "broken"),
    [
        (words(80, 64), "finished", []),
        (words(80, 32), "stopped", []),
        (words(80, 40), "finished", ["24 rounds of ben are not signed, the first of them 40"]),
        (words(80, 64, b"x"), "stopped", ["ben has signed something else of round 0"]),
        (words(0, 0, refused="nobody"), "stopped", ["a signature of ben is refused: nobody"]),
    ],
)
def test_what_is_signed_is_what_was_said_but_for_the_end(
    told: LearnerSignatures, state: str, broken: list[str]
) -> None:
    may_end = replace(UNDISTURBED, ends="gone")
    spec = SPEC.model_copy(update={"rounds": 80})
    plain = replace(GOOD, fault=may_end, state=state, reason="gone", spec=spec)
    found = [each for each in promises(replace(plain, signed={"ben": told})) if each not in promises(plain)]
    assert len(found) == len(broken) and all(part in each for part, each in zip(broken, found, strict=True))


LOST = {"learner": "cleo", "first_round": 4, "missed_from_rounds": {"ann": 2, "ben": 2}}
CHANGING = replace(UNDISTURBED, changing=True)


def simulated(spec: RunSpec, used: FloatArray | None = None) -> tuple[Said, ...]:
    """What learners say in a run, but for those who are away."""
    run = build_run(spec, FEATURES)
    codec = RoundCodec(run.field_shapes)
    return tuple(
        (
            i,
            step.t,
            codec.encode(step.t, i, Message({name: value[i, 0] for name, value in step.message.fields.items()})),
        )
        for step in simulate_rounds(run, made_up(spec), keyed(spec), used_rounds=used)
        for i in range(len(NAMES))
        if spec.participation.is_participating(i, step.t)
    )


def lost() -> Trial:
    """A run that went on without its last learner, which said a round that nobody learned, and not all that it might have."""
    spec = SPEC.model_validate({**SPEC.model_dump(mode="json"), "offline_intervals": [LOST]})
    said = tuple(each for each in simulated(spec) if each[:2] != (2, 3))
    return replace(
        GOOD,
        fault=CHANGING,
        spec=spec,
        overheard=said,
        logged=said,
        spent={0: price(spec, 0, ROUNDS), 1: price(spec, 1, ROUNDS), 2: price(spec, 2, 3)},
        own=(5, 5, -1),
        calm=None,
        away=frozenset({"cleo"}),
        silent={"cleo": 3},
    )


def test_a_run_that_lost_a_learner_must_be_what_the_simulator_says() -> None:
    good = lost()
    assert promises(good) == []
    few = tuple(each for each in good.logged if each[:2] != (2, 1))
    assert promises(replace(good, logged=few, overheard=few)) == [
        f"1 rounds are missing in the {where}, the first of them (2, 1)" for where in ("capture", "logs")
    ]
    sender, t, raw = good.logged[7]
    other = (*good.logged[:7], (sender, t, raw[:-1] + bytes([raw[-1] ^ 1])), *good.logged[8:])
    (broken,) = promises(replace(good, logged=other, overheard=other))
    assert broken == f"{NAMES[sender]} said something else in round {t} than the simulator does"
    assert promises(replace(good, logged=other, overheard=other, keyed=False)) == []


def test_a_run_that_goes_on_without_late_messages_must_say_which_it_used() -> None:
    spec = spec_of("paced", 0.1, 60.0, "reuse")
    network = build_run(spec, FEATURES).network
    used = np.stack([encode_punctual_rounds(network, t + 1) for t in range(ROUNDS)])
    good = replace(GOOD, fault=replace(CHANGING, late="reuse"), spec=spec, calm=None)
    said = simulated(spec, used)
    assert promises(replace(good, overheard=said, logged=said)) == ["nobody was late: this trial shows nothing"]
    used[2, 0, 0] = 1
    said = simulated(spec, used)
    assert promises(replace(good, overheard=said, logged=said)) == []
    other = tuple(each for each in said if each[:2] != (0, 3)) + tuple(e for e in simulated(spec) if e[:2] == (0, 3))
    assert promises(replace(good, overheard=other, logged=other)) != []


def test_a_run_that_may_end_must_say_why() -> None:
    may_end = replace(UNDISTURBED, ends="No space left")
    ended = replace(GOOD, fault=may_end, state="failed", reason="ann failed: No space left on device")
    assert promises(ended) == []
    assert promises(replace(GOOD, fault=may_end)) == []
    assert "must end with 'No space left', and failed: 'gone'" in promises(replace(ended, reason="gone"))[0]
    assert promises(replace(ended, state="hung")) != []
    must_end = replace(may_end, must_end=True)
    assert promises(replace(GOOD, fault=must_end)) == ["the run finished, and must not have"]


def test_a_ledger_below_is_noticed_in_a_run_that_ended() -> None:
    may_end = replace(UNDISTURBED, ends="damaged")
    ended = replace(GOOD, fault=may_end, state="stopped", reason="damaged", repaired=frozenset({2}))
    assert promises(replace(ended, spent={**COST, 2: 2 * COST[2]})) == []
    (broken,) = promises(replace(ended, spent={**COST, 2: 0.5 * COST[2]}))
    assert "the ledger of cleo says" in broken


def test_an_eavesdropper_that_was_away_may_lack_rounds_but_has_no_others() -> None:
    blind = replace(GOOD, fault=replace(UNDISTURBED, blind=True), overheard=SAID[4:])
    assert promises(blind) == []
    assert promises(replace(blind, overheard=(*SAID[4:], (0, 0, b"other")))) != []


def test_the_page_says_what_broke() -> None:
    rows = [Row(fault, 8, 2 if k == 0 else 0) for k, fault in enumerate(EVERY)]
    text = page(rows, "python -m tests.faults --tries 8", 4.0)
    assert len({fault.name for fault in EVERY}) == len(EVERY)
    assert text.count("| 8 | broken in 2 |") == 1
    assert text.count("| 8 | held |") == len(EVERY) - 1
    assert "by `python -m tests.faults --tries 8`" in text


def test_a_traceback_is_noticed_unless_it_is_grpcs_own() -> None:
    head, own = "Traceback (most recent call last):\n", '  File "a.py", line 1, in f\n    f()\n'
    theirs = '  File "src/python/grpcio/grpc/_cython/server.pyx.pxi", line 812, in f\n'
    words = f"{{}}\n{head}{theirs}CancelledError\n{{}}\n{head}{theirs}{own}ValueError: x\n{head}{own}KeyError: y\n"
    assert tracebacks(words) == ["ValueError: x", "KeyError: y"]
