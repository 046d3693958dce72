"""Code of a user's own that raises: the run ends, its learner lives on, and the log says what and where, never the text.

The text of an exception may quote the record that it stumbled over; logs, statuses and errors leave the learner.
"""

from __future__ import annotations

import linecache
import logging
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import structlog.testing

from sottovoce_core.algorithms.interface import Message, ReceivedMessages, StateAxes
from sottovoce_core.algorithms.run_context import RunContext, RunWarning
from sottovoce_core.arrays import Batch
from sottovoce_core.errors import BudgetExhausted, DataError
from sottovoce_core.noise import NoiseSource
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_rpc.learner_status import LearnerState
from tests.examples import made_up, small_spec
from tests.gossip import Gossip, GossipSpec, State
from tests.services.network import network

QUOTED = "diagnosis: positive"
NAMES = ["ann", "ben"]


class FailingSpec(GossipSpec):
    """Gossip that raises."""

    fails: str

    def build(self, context: RunContext) -> tuple[Failing, tuple[RunWarning, ...]]:
        return Failing(context.n_features, context.rounds, self.scale, self.step, fails=self.fails), ()


@dataclass(frozen=True)
class Failing(Gossip):
    """Raises at the start, or in round 3."""

    fails: str = ""

    def init(self, axes: StateAxes) -> State:
        if self.fails == "start":
            raise MemoryError(QUOTED)
        return Gossip.init(self, axes)

    def emit(self, state: State, noise: NoiseSource) -> tuple[State, Message]:
        if self.fails == "speak" and state.t == 3:
            raise KeyError(QUOTED)
        return Gossip.emit(self, state, noise)

    def update(self, state: State, received: ReceivedMessages, batch: Batch) -> State:
        if state.t == 3:
            match self.fails:
                case "listen":
                    raise ValueError(f"{QUOTED}, {batch.features}")
                case "ours":
                    raise DataError(QUOTED)
                case "budget":
                    raise BudgetExhausted(QUOTED)
                case "os":
                    raise OSError(5, QUOTED)
                case "exit":
                    raise SystemExit(QUOTED)
                case "memory":
                    raise MemoryError(QUOTED)
                case "library":
                    np.linalg.inv(np.zeros((2, 2)))
        return Gossip.update(self, state, received, batch)


def spec_of(fails: str) -> RunSpec:
    document = small_spec(10, NAMES, clock={"deadline_s": 100.0}).model_dump(mode="json")
    return parse_spec(
        {**document, "algorithm": {"name": "tests.services.test_failures:FailingSpec", "fails": fails}},
        allow_imports=True,
    )


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        ("listen", "ValueError"),
        ("speak", "KeyError"),
        ("ours", "DataError"),
        ("budget", "BudgetExhausted"),
        ("os", "OSError"),
        ("exit", "SystemExit"),
        ("memory", "MemoryError"),
        ("library", "LinAlgError"),
    ],
)
async def test_an_own_algorithm_that_raises_fails_the_run_and_the_log_says_where(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fails: str,
    kind: str,
) -> None:
    spec = spec_of(fails)
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as logs:
        async with network(tmp_path, NAMES) as up:
            outcome = await up.run(spec, made_up(spec))
            statuses = [await up.status(name) for name in NAMES]
            again = await up.run(well := small_spec(5, NAMES), made_up(well))
    failed = [event for event in logs if event["event"] == "failed"]

    assert outcome.state == "failed"
    told = (
        "too little memory (docs/operate/upgrade.md lists what a learner keeps)"
        if fails == "memory"
        else "an internal error"
    )
    assert outcome.detail.endswith(f" failed: {told}; the learner's log has it")
    assert LearnerState.FAILED in [status.state for status in statuses]
    assert failed and {(event["kind"], event["round"]) for event in failed} == {(kind, 3)}
    for event in failed:
        file, line = event["where"].rsplit(":", 1)
        assert Path(file) == Path(__file__)
        assert ("np.linalg.inv" if fails == "library" else kind) in linecache.getline(file, int(line))
    assert again.state == "finished"
    assert QUOTED not in f"{outcome} {statuses} {logs} {capfd.readouterr()} {caplog.text}"


async def test_a_directive_that_this_machine_cannot_follow_fails_the_run_and_leaves_the_learner_alive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of("start")
    with structlog.testing.capture_logs() as logs:
        async with network(tmp_path, NAMES) as up:
            outcome = await up.run(spec, made_up(spec))
            statuses = [await up.status(name) for name in NAMES]
            again = await up.run(well := small_spec(5, NAMES), made_up(well))
    refused = [event for event in logs if event["event"] == "command refused"]

    assert outcome.state == "failed"
    assert outcome.detail.endswith(" failed: an internal error, MemoryError; see the learner's log")
    assert [status.state for status in statuses] == [LearnerState.FAILED] * 2
    assert {event["kind"] for event in refused} == {"MemoryError"}
    assert all("test_failures.py" in event["where"] for event in refused)
    assert again.state == "finished"
    assert QUOTED not in f"{outcome} {statuses} {logs} {capfd.readouterr()}"


async def test_records_too_wide_for_a_message_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    spec = small_spec(5, NAMES)
    async with network(tmp_path, NAMES) as up:
        with pytest.raises(grpc.aio.AioRpcError, match="take fewer features or classes"):
            await up.start(spec, 2**32 - 1)
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished"
