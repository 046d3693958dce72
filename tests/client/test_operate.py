"""What whoever runs a spec sees of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from sottovoce_client.runs.run_client import _RunMonitor
from sottovoce_client.runs.summary import RunProgress
from sottovoce_rpc.credentials import NO_IDENTITY
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_wire.v1 import coordinator_pb2
from tests.examples import made_up, small_spec


def run(*rounds: int, said: int = 1) -> coordinator_pb2.Run:
    """As a coordinator tells it, of learners that have said one round more than they have done."""
    statuses = [
        LearnerStatus(
            rounds_done=done, rounds_committed=done + said, messages_sent=2 * (done + said), epsilon_charged=0.1 * done
        )
        for done in rounds
    ]
    learners = [coordinator_pb2.Participant(status=status.to_wire()) for status in statuses]
    return coordinator_pb2.Run(run_id="small-1", state=coordinator_pb2.RUN_STATE_RUNNING, learners=learners)


def test_what_is_seen_does_not_go_back_with_its_coordinator() -> None:
    """It comes back with what it had kept; each learner is shown as it was seen until it has told more."""
    spec, seen = small_spec(1_000, ["ann", "ben"]), list[RunProgress]()
    data, nobody = made_up(spec), cast("Any", None)
    running = _RunMonitor(
        nobody, run(0, 0), spec, data, lambda look, _: seen.append(look), asyncio.Event(), lambda _: data, NO_IDENTITY
    )
    for view in (run(167, 166), run(162, 166), run(162, 168), run(170, 168)):
        running._record_view(view)

    assert [look.rounds for look in seen] == [(167, 166), (167, 166), (167, 168), (170, 168)]
    assert [look.messages for look in seen] == [(336, 334), (336, 334), (336, 338), (342, 338)]
    assert seen[1].epsilon == seen[0].epsilon
