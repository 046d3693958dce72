"""A run that is known to its learners alone, for the state of its coordinator is lost: what they tell of it, put together. Pure.

Each learner tells how far it was granted and what it has said, and says nothing again, whoever leads it: its log and its
neighbours know. So the most that any of them knows is enough to go on, as long as all of them have told it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sottovoce.errors import NotReady, SpecError
from sottovoce.network.roster import in_short
from sottovoce.running.run import Run
from sottovoce_coordinator.joining import Member
from sottovoce_coordinator.runs import RunBook, RunState
from sottovoce_rpc.directives import Sent
from sottovoce_rpc.learner_status import LearnerStatus


def require_in_run(run_id: str, told: Sequence[Member]) -> None:
    """Each of these learners has the log of a run: who has not would say its rounds again.

    Raises:
        NotReady: one has not.
    """
    if others := [each for each in told if each.run_id != run_id]:
        logs = [f"{f'that of run {each.run_id!r}' if each.run_id else 'none'} with {each.name}" for each in others]
        raise NotReady(
            f"each learner must have the log of run {run_id!r}, got {in_short(logs)}: is the run the right one, and the state "
            "folder the learner's own? Else it has been in another run since, or this one was over: start a new run"
        )


def require_plan(run_id: str, plan_hash: bytes, told: Sequence[Member]) -> None:
    """What the run is to go on with is what its learners were told, by their ledgers.

    Raises:
        SpecError: it is not.
    """
    if others := [each.name for each in told if each.plan_hash != plan_hash]:
        raise SpecError(
            f"run {run_id} is of another spec or other records, by the ledgers of {in_short(others)}: take it up with those "
            "that it was started with"
        )


def require_newest(run_id: str, run: Run, told: Sequence[Member], sent: Sequence[Sent]) -> None:
    """No learner has a log that lacks rounds which were captured: it would send them again with other noise.

    Args:
        run_id, run: what it is.
        told: what its learners know, by index.
        sent: what was captured of the run.

    Raises:
        NotReady: one has.
    """
    captured = {each.learner: each.rounds for each in sent if each.run_id == run_id}
    old = [i for i, each in enumerate(told) if captured.get(each.name, 0) > (each.claim.journaled or 0)]
    if old:
        found = [f"{told[i].name} ({told[i].claim.journaled or 0} of {captured[told[i].name]} rounds)" for i in old]
        most = max(run.guarantee(i).epsilon() for i in old)
        raise NotReady(
            f"each learner must have all rounds of run {run_id!r} in its log that were captured, got {in_short(found)}: state "
            "folders were set back, and rounds would be sent again with other noise. Put the newest folders back; where they are "
            "lost, charge what was spent since (`sottovoce ledger --repair --state FOLDER --learner NAME --charge EPSILON`; all "
            f"rounds of this run cost {most:.6g} at most), and start a new run"
        )


def recovered(run_id: str, run: Run, n_features: int, told: Sequence[Member], now: datetime) -> RunBook:
    """The book of the run; its learners, by index, are yet to be told.

    Args:
        run_id, run, n_features: what it is.
        told: what its learners know, by index.
        now: since when they are away.
    """
    addresses, attempt = tuple(each.address for each in told), max(each.attempt for each in told)
    book = RunBook(run_id, run, n_features, addresses, attempt=attempt)
    said = [each.claim.journaled or 0 for each in told]
    statuses = [
        LearnerStatus(each.name, run_id, rounds_done=max(rounds - 1, 0), rounds_said=rounds)
        for each, rounds in zip(told, said, strict=True)
    ]
    book.restore(RunState.RUNNING if any(said) else RunState.CONNECTING, statuses, now)
    book.clock.resume(max(each.granted for each in told))
    return book
