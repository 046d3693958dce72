"""Whatever a coordinator says ends no learner: a directive that cannot be followed fails its run, and the next one goes well."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.runs.feeder import feed
from sottovoce_core.algorithms.run_context import RunContext, RunWarning
from sottovoce_core.runs.policy import Policy
from sottovoce_core.runs.run import build_run
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_rpc.commands import Command
from sottovoce_rpc.learner_status import MAX_DETAIL_CHARS
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import coordinator_pb2, learner_pb2
from sottovoce_wire.v1.coordinator_pb2 import (
    Assignment,
    IncarnationConfirmed,
    IncarnationIssued,
    Neighbour,
    RoundLease,
    Stop,
    TopologyEpoch,
)
from tests.examples import ALLOWING, ALLOWING_FILE, made_up, small_spec
from tests.gossip import Gossip, GossipSpec
from tests.services.dictating import Dictator, changed, dictating
from tests.services.network import PATIENCE_S
from tests.services.test_killed import service

ROUNDS = 5
SPEC = small_spec(ROUNDS, ["ann"])
PLAN = Assignment(spec=spec_to_wire(SPEC), n_features=3)
PAIR = small_spec(ROUNDS, ["ann", "ben"])
NOWHERE = Neighbour(index=1, name="ben", address="127.0.0.1:1", weight=0.5, is_recipient=True)
MOST_32, MOST_64 = 2**32 - 1, 2**64 - 1


class RaisingSpec(GossipSpec):
    """Gossip that cannot be built."""

    error: str

    def build(self, context: RunContext) -> tuple[Gossip, tuple[RunWarning, ...]]:
        match self.error:
            case "memory":
                raise MemoryError
            case "recursion":
                return self.build(context)
            case "exit":
                sys.exit(3)
        raise AssertionError(self.error)


def asked(**changes: Any) -> Assignment:
    """An assignment by another spec."""
    document = {**json.loads(PLAN.spec), **changes}
    return changed(PLAN, spec=json.dumps(document))


def own(error: str) -> Assignment:
    return asked(algorithm={"name": "tests.services.test_directives:RaisingSpec", "error": error})


def nested(depth: int) -> Any:
    """A decision set of sets of sets."""
    inner: dict[str, Any] = {"kind": "l2_ball", "radius": 1.0}
    for _ in range(depth):
        inner = {"kind": "product", "blocks": [{"size": 3, "set": inner}]}
    return inner


LIPSCHITZ = {"kind": "logistic", "feature_bound": 1.0}
REFUSED: dict[str, tuple[Command, ...]] = {
    "features without end": (changed(PLAN, n_features=MOST_32),),
    "rounds without end": (asked(rounds=2**53, algorithm="dpsr", loss=LIPSCHITZ),),
    "more rounds than any integer": (asked(rounds=10**400),),
    "classes without end": (asked(loss={"kind": "softmax", "classes": 2**53}),),
    "learners without end": (asked(learners=2**53),),
    "an index beyond all": (changed(PLAN, index=MOST_32),),
    "another learner": (changed(PLAN, spec=spec_to_wire(PAIR), index=1),),
    "no spec": (changed(PLAN, spec=""),),
    "no mapping": (changed(PLAN, spec="[1]"),),
    "brackets without end": (changed(PLAN, spec="[" * 10**6),),
    "sections without end": (changed(PLAN, spec='{"a":' * 900 + "1" + "}" * 900),),
    "sets of sets": (asked(decision_set=nested(40)),),
    "sets of sets without end": (asked(decision_set=nested(200)),),
    "digits without end": (changed(PLAN, spec='{"rounds": ' + "9" * 10**5 + "}"),),
    "half a character": (changed(PLAN, spec='{"\\ud800": "\\udfff"}'),),
    "a field without end": (asked(**{"x" * 2**20: 1}),),
    "fields without end": (asked(**{f"x{k}": k for k in range(10_000)}),),
    "nothing is a number": (asked(clock={"deadline_s": math.nan}),),
    "code": (asked(algorithm={"name": "nowhere.at.all:Spec"}),),
    "no memory": (own("memory"),),
    "no end": (own("recursion"),),
    "an exit": (own("exit"),),
    "an epoch of others": (changed(PLAN, spec=spec_to_wire(PAIR)), TopologyEpoch()),
    "an epoch without weights": (
        changed(PLAN, spec=spec_to_wire(PAIR)),
        TopologyEpoch(neighbours=[changed(NOWHERE, weight=math.nan)]),
    ),
    "an epoch of a round beyond all": (PLAN, TopologyEpoch(first_round=MOST_64)),
    "a grant before an epoch": (PLAN, RoundLease(until_round=MOST_64)),
}
"""By what is wrong, what is said about one run; the last of it is refused."""
ODD: dict[str, tuple[Command, ...]] = {
    "no features": (changed(PLAN, n_features=0), TopologyEpoch(), RoundLease(until_round=ROUNDS)),
    "a run that nobody began": (TopologyEpoch(neighbours=[NOWHERE]), RoundLease(until_round=MOST_64), Stop(final=True)),
    "an end before all": (Stop(final=False), Stop(final=True), Stop(final=True)),
    "an address that is none": (
        changed(PLAN, spec=spec_to_wire(PAIR)),
        TopologyEpoch(neighbours=[changed(NOWHERE, address="\x00://[::")]),
        RoundLease(until_round=MOST_64),
    ),
    "a mirror that is none": (changed(PLAN, mirror_address="\x00"), TopologyEpoch(), RoundLease(until_round=MOST_64)),
    "another handshake": (IncarnationIssued(incarnation=MOST_64), IncarnationConfirmed(incarnation=MOST_64)),
    "the same again": (
        PLAN,
        PLAN,
        TopologyEpoch(),
        TopologyEpoch(),
        RoundLease(until_round=1),
        RoundLease(until_round=MOST_64),
        RoundLease(until_round=0),
    ),
}
"""What is no use, and nothing that a run must fail for."""
RUN_IDS = ["", "..", "../ann", "a/b", "a@b", "a\nb", "\x00", "x" * 10**6]


@asynccontextmanager
async def learner(folder: Path, policy: Policy = ALLOWING) -> AsyncIterator[tuple[Dictator, str]]:
    """A learner that follows a dictator, and its address; it must follow to the end."""
    async with dictating() as coordinator, Tasks() as tasks:
        config = LearnerConfig("ann", coordinator.address, state_folder=folder, allow_imports=True, policy=policy)
        made = Learner(config)
        address = await made.start()
        following = tasks.start(made.follow(address))
        try:
            yield coordinator, address
            assert not following.done()
        finally:
            await made.stop()


async def goes_well(coordinator: Dictator, address: str, run_id: str) -> None:
    """A run of one learner, to its end."""
    for told in (PLAN, TopologyEpoch(), RoundLease(until_round=ROUNDS)):
        coordinator.say(run_id, told)
    await coordinator.until(lambda report: report.status.run_id == run_id)
    await feed(address, run_id, made_up(SPEC).learners[0])
    finished = learner_pb2.LEARNER_STATE_FINISHED
    await coordinator.until(lambda report: report.status.run_id == run_id and report.status.state == finished)
    coordinator.say(run_id, Stop(final=True))


def failed(run_id: str) -> Any:
    state = learner_pb2.LEARNER_STATE_FAILED
    return lambda report: (report.status.run_id, report.status.state) == (run_id, state)


@pytest.mark.parametrize("policy", [ALLOWING, Policy()], ids=["any", "default"])
@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_be_followed_fails_the_run_and_leaves_the_learner_alive(
    tmp_path: Path, what: str, policy: Policy
) -> None:
    async with learner(tmp_path, policy) as (coordinator, address):
        for told in REFUSED[what]:
            coordinator.say("run-1", told)
        report = await coordinator.until(failed("run-1"))
        assert 0 < len(report.status.detail) <= MAX_DETAIL_CHARS
        if policy is ALLOWING:
            await goes_well(coordinator, address, "run-2")
    assert coordinator.joined == 1


@pytest.mark.parametrize("what", ODD)
async def test_what_is_no_use_is_passed_over(tmp_path: Path, what: str) -> None:
    async with learner(tmp_path) as (coordinator, address):
        for told in ODD[what]:
            coordinator.say("run-1", told)
        coordinator.say_as_is(coordinator_pb2.Command(run_id="run-1"))  # of a newer coordinator
        await goes_well(coordinator, address, "run-2")
    assert coordinator.joined == 1


@pytest.mark.parametrize("run_id", RUN_IDS, ids=[f"{each[:8]!r}" for each in RUN_IDS])
async def test_a_run_id_that_is_none_is_refused(tmp_path: Path, run_id: str) -> None:
    async with learner(tmp_path / "state") as (coordinator, address):
        coordinator.say(run_id, Stop(final=True))
        coordinator.say(run_id, PLAN)
        report = await coordinator.until(failed(run_id[:128]))
        assert report.status.detail.startswith("a run id must be letters")
        await goes_well(coordinator, address, "run-2")
    assert os.listdir(tmp_path) == ["state"]


async def test_a_grant_of_rounds_without_end_is_no_work(tmp_path: Path) -> None:
    """In a network that changes once, all rounds behind were looked at, one after the other."""
    place: dict[str, Any] = {"absences": [{"learner": "ben", "first_round": 3}]}
    spec = small_spec(2**40, ["ann", "ben"], **place)
    weight = build_run(spec, 3).network.mixing(0).in_neighbour_weights(0)[1]
    there, away = changed(NOWHERE, weight=weight), changed(NOWHERE, weight=0.0, is_recipient=False)
    async with learner(tmp_path) as (coordinator, address):
        plan = changed(PLAN, spec=spec_to_wire(spec))
        for told in (
            plan,
            TopologyEpoch(neighbours=[there]),
            TopologyEpoch(first_round=3, neighbours=[away]),
            RoundLease(until_round=2**40),
        ):
            coordinator.say("run-1", told)
        await goes_well(coordinator, address, "run-2")


@pytest.mark.slow
async def test_a_process_outlives_all_of_it(tmp_path: Path) -> None:
    """One after the other, of one learner."""
    async with dictating() as coordinator:
        arguments = ["--name", "ann", "--coordinator", coordinator.address, "--state", str(tmp_path / "state")]
        with service("learner", *arguments, "--policy", str(ALLOWING_FILE), "--allow-imports") as (process, address):
            for k, (what, said) in enumerate({**REFUSED, **ODD}.items()):
                for told in said:
                    coordinator.say(f"run-{k}", told)
                if what in REFUSED:
                    await coordinator.until(failed(f"run-{k}"))
                await asyncio.wait_for(goes_well(coordinator, address, f"run-{k}-well"), PATIENCE_S)
                assert process.poll() is None, what
    assert coordinator.joined == 1
