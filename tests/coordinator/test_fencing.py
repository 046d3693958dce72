"""State folders and incarnations: who is let in, who is refused, and that no number is issued twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sottovoce_coordinator.store import MAX_INCARNATION, Claim, LearnerBinding
from sottovoce_core.errors import FailedPrecondition, PermissionDenied, RemoteProtocolError, SottovoceError, Unavailable

HERE, ELSEWHERE = bytes(16), bytes([1] * 16)


def joined(incarnation: int = 1) -> LearnerBinding:
    return LearnerBinding(HERE, incarnation, incarnation)


def claim(incarnation: int = 1, **more: Any) -> Claim:
    return Claim(**{"name": "ann", "store_id": HERE, "incarnation": incarnation, **more})


def test_the_first_learner_of_a_name_binds_it_when_it_confirms() -> None:
    issued = LearnerBinding().admit(claim(0), is_connected=False)
    assert issued == LearnerBinding(HERE, 1, 0)
    assert issued.confirm(claim(0), 1) == joined()
    assert issued.admit(claim(0, store_id=ELSEWHERE), is_connected=False) == LearnerBinding(ELSEWHERE, 2, 0)


@pytest.mark.parametrize("disk", [1, 2])
def test_a_death_between_issue_and_confirmation_is_harmless(disk: int) -> None:
    """The folder knows the new number or not; either way the next start is let in."""
    issued = joined().admit(claim(), is_connected=False)
    assert issued.issued_incarnation == 2
    assert issued.admit(claim(disk), is_connected=False).issued_incarnation == 3


@pytest.mark.parametrize(
    ("said", "live", "kind", "text"),
    [
        (claim(store_id=ELSEWHERE), False, PermissionDenied, "sottovoce rebind ann"),
        (claim(store_id=ELSEWHERE, is_rejoin=True), False, PermissionDenied, "another state folder"),
        (claim(3), True, Unavailable, "is connected already: stop the other process"),
        (claim(2), False, FailedPrecondition, "it has incarnation 2 and 0 rounds, and must have 3 and 9"),
        (
            claim(3),
            False,
            FailedPrecondition,
            "has no log of the run that this learner is in, and 9 rounds were sent in it",
        ),
        (
            claim(3, journaled=8),
            False,
            FailedPrecondition,
            "it has incarnation 3 and 8 rounds, and must have 3 and 9",
        ),
        (claim(2, is_rejoin=True), False, FailedPrecondition, "is an old one and ends"),
        (claim(2**32 + 1), False, RemoteProtocolError, "one more at each start of a learner, at most 4294967296"),
        (claim(2**63, is_rejoin=True), True, RemoteProtocolError, "got 9223372036854775808"),
    ],
)
def test_who_is_refused(said: Claim, live: bool, kind: type[SottovoceError], text: str) -> None:
    with pytest.raises(kind, match=text):
        joined(3).admit(said, is_connected=live, rounds_committed=9)


def test_whoever_tells_of_too_many_starts_locks_nobody_out() -> None:
    """A stranger joins with the highest number: the learner itself is let in all the same, once its name is free again."""
    strange = LearnerBinding().admit(claim(MAX_INCARNATION, store_id=ELSEWHERE), is_connected=False)
    known = strange.confirm(claim(MAX_INCARNATION, store_id=ELSEWHERE), strange.issued_incarnation).unbind()
    for _ in range(3):
        known = known.admit(claim(known.confirmed_incarnation), is_connected=False)
        known = known.confirm(claim(known.confirmed_incarnation), known.issued_incarnation)
        assert known.admit(claim(known.confirmed_incarnation, is_rejoin=True), is_connected=True) == known


def test_a_process_that_never_stopped_is_taken_back_also_by_a_coordinator_that_knows_nothing() -> None:
    for known in (joined(3), LearnerBinding()):
        for live in (False, True):  # the old stream may not have been noticed as broken
            assert known.admit(claim(3, is_rejoin=True), is_connected=live, rounds_committed=9) == joined(3)


def test_a_coordinator_that_knows_nothing_issues_no_number_again() -> None:
    assert LearnerBinding().admit(claim(5), is_connected=False).issued_incarnation == 6


def test_another_folder_may_take_a_name_that_was_unbound_and_numbers_go_on() -> None:
    issued = joined(3).unbind().admit(claim(0, store_id=ELSEWHERE), is_connected=False)
    assert issued == LearnerBinding(ELSEWHERE, 4, 0)


def test_a_folder_is_told_by_its_number() -> None:
    with pytest.raises(RemoteProtocolError, match="in 16 bytes, got 0: is it older than its coordinator"):
        Claim("ann", b"")


def test_what_was_not_issued_last_is_not_confirmed() -> None:
    with pytest.raises(FailedPrecondition, match="must confirm incarnation 2, got 1: it was started twice"):
        LearnerBinding(HERE, 2, 0).confirm(claim(0), 1)
    with pytest.raises(FailedPrecondition):
        LearnerBinding(HERE, 2, 0).confirm(claim(0, store_id=ELSEWHERE), 2)


class Fencing(RuleBasedStateMachine):
    """One state folder that is copied, and started at any time; answers and streams are lost at any step."""

    @initialize()
    def begin(self) -> None:
        self.known, self.disks = LearnerBinding(), [0]
        self.processes: list[int] = []  # incarnations of those that may speak
        self.handed: list[int] = []  # numbers that were confirmed, each to one process

    @rule(k=st.integers(0, 9))
    def copy_a_disk(self, k: int) -> None:
        if len(self.disks) < 4:
            self.disks.append(self.disks[k % len(self.disks)])

    @rule(k=st.integers(0, 9), dies=st.sampled_from(["after the issue", "after the write", "after confirmation", ""]))
    def start(self, k: int, dies: str) -> None:
        k %= len(self.disks)
        try:
            self.known = self.known.admit(claim(self.disks[k]), is_connected=False)
        except FailedPrecondition:
            return
        number = self.known.issued_incarnation
        if dies == "after the issue":
            return
        self.disks[k] = number
        if dies == "after the write":
            return
        self.known = self.known.confirm(claim(number), number)
        self.handed.append(number)
        if not dies:
            self.processes.append(number)

    @rule(k=st.integers(0, 9))
    def rejoin(self, k: int) -> None:
        if not self.processes:
            return
        number = self.processes[k % len(self.processes)]
        try:
            self.known = self.known.admit(claim(number, is_rejoin=True), is_connected=True)
        except FailedPrecondition:
            assert number < self.known.issued_incarnation
            self.processes.remove(number)
        else:
            assert number == max(self.handed)

    @invariant()
    def no_number_is_handed_out_twice(self) -> None:
        assert len(set(self.handed)) == len(self.handed) and self.handed == sorted(self.handed)

    @invariant()
    def some_disk_is_let_in(self) -> None:
        newest = claim(max(self.disks))
        assert (
            self.known.admit(newest, is_connected=False).issued_incarnation
            == max(self.known.issued_incarnation, max(self.disks)) + 1
        )


TestFencing = Fencing.TestCase


def test_the_checks_of_the_model_notice_one_step_instead_of_two() -> None:
    """Refused below the number issued, not the number confirmed: a lost answer would lock the learner out."""
    one_step = replace(joined(2), confirmed_incarnation=2)  # issued is taken as confirmed
    with pytest.raises(FailedPrecondition):
        one_step.admit(claim(1), is_connected=False)
