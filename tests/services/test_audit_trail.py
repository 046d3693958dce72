"""The audit trail of a coordinator's log: who asked for what, and what came of it; how runs ended; how services begin and end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from sottovoce_rpc.access import ACCESS_RULES, UNIDENTIFIED_CALLER
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, network, refused

READS = {"GetRun", "ListRuns", "WatchRun"}
CHANGES = {
    method.rsplit("/", 1)[1]
    for method, rule in ACCESS_RULES.items()
    if method.startswith("/sottovoce_wire.v1.Coordinator/") and Role.OPERATOR in rule.roles
} - READS


def calls(log: Sequence[Any]) -> list[dict[str, Any]]:
    return [each for each in log if each["event"] == "operator call"]


async def test_every_call_that_changes_something_is_logged_with_who_made_it(tmp_path: Path) -> None:
    """And with what came of it, as JSON would have it; nothing of the spec."""
    pb, identities = coordinator_pb2, Identities(tmp_path / "ids")
    spec = small_spec(5, ["ann"])
    async with network(tmp_path, ["ann"], durable=True, identities=identities) as up:
        alice = identities.of("operator/alice")
        await up.until_here("ann")
        async with open_channel(up.coordinator, Role.COORDINATOR, credentials=alice) as to:
            stub: Any = coordinator_pb2_grpc.CoordinatorStub(to)
            with structlog.testing.capture_logs() as log:
                asked: dict[str, Any] = {"spec": spec_to_wire(spec), "n_features": 3}
                run_id = (await stub.StartRun(pb.StartRunRequest(**asked), timeout=PATIENCE_S)).run_id
                for name, request in (
                    ("StopRun", pb.StopRunRequest(run_id="other", reason="enough")),
                    ("ResumeRun", pb.ResumeRunRequest(run_id=run_id)),
                    ("LeaveRun", pb.LeaveRunRequest(run_id="other", learner="ann")),
                    ("JoinRun", pb.JoinRunRequest(run_id="other", learner="ann")),
                    ("RecoverRun", pb.RecoverRunRequest(run_id=run_id, **asked)),
                    ("RebindLearner", pb.RebindLearnerRequest(learner="zoe")),
                ):
                    await refused(getattr(stub, name)(request, timeout=PATIENCE_S))
                await refused(stub.StopRun(pb.StopRunRequest(run_id="long" * 100_000), timeout=PATIENCE_S))
                stopping = pb.StopRunRequest(run_id=run_id[:-1], reason="enough")
                await stub.StopRun(stopping, timeout=PATIENCE_S)
                for name in READS - {"WatchRun"}:
                    given = pb.ListRunsRequest() if name == "ListRuns" else pb.GetRunRequest(run_id=run_id)
                    await getattr(stub, name)(given, timeout=PATIENCE_S)
    refused_first, *_ = [each for each in calls(log) if each["call"] == "StopRun"]
    assert (refused_first["outcome"], refused_first["reason"]) == ("refused", "enough")
    assert max(len(json.dumps(each)) for each in calls(log)) < 4_000
    told = {each["call"]: each for each in calls(log)}
    assert set(told) == CHANGES
    assert {each["caller"] for each in told.values()} == {alice.principal.uri if alice.principal else ""}
    assert {name for name, each in told.items() if each["outcome"] == "done"} == {"StartRun", "StopRun"}
    assert told["StopRun"]["run_id"] == told["StartRun"]["run_id"] == run_id
    assert told["LeaveRun"] | {"peer": "", "error": ""} == {
        "event": "operator call",
        "log_level": "warning",
        "call": "LeaveRun",
        "caller": alice.principal.uri if alice.principal else "",
        "peer": "",
        "run_id": "other",
        "learner": "ann",
        "outcome": "refused",
        "kind": "NotFound",
        "error": "",
    }
    assert "no run 'other'" in told["LeaveRun"]["error"]
    assert all("loss" not in json.dumps(each) for each in told.values())
    (end,) = [each for each in log if each["event"] == "run ended"]
    assert (end["run_id"], end["state"], end["reason"], end["rounds"]) == (run_id, "stopped", "enough", 0)


async def test_an_end_is_logged_with_its_rounds_and_its_reason(tmp_path: Path) -> None:
    async with network(tmp_path, ["ann", "ben"]) as up:
        spec = small_spec(5, ["ann", "ben"])
        with structlog.testing.capture_logs() as log:
            outcome = await up.run(spec, made_up(spec))
        (started,) = calls(log)
        assert (started["caller"], started["peer"].startswith("ipv4:127.0.0.1:")) == (UNIDENTIFIED_CALLER, True)
        (end,) = [each for each in log if each["event"] == "run ended"]
        assert (end["run_id"], end["state"], end["rounds"], end["log_level"]) == (outcome.run_id, "finished", 5, "info")
        with structlog.testing.capture_logs() as log:
            run = await up.start(spec, 3)
            assert up.coordinating is not None
            await up.coordinating.stop("SIGTERM")
            up.coordinating._store.close()
        (end,) = [each for each in log if each["event"] == "run ended"]
        assert (end["run_id"], end["reason"]) == (run.run_id, "the coordinator was asked to stop (SIGTERM)")


@pytest.mark.parametrize("kind", ["coordinator", "eavesdropper", "learner"])
async def test_a_service_logs_how_it_begins_and_why_it_ends(tmp_path: Path, kind: str) -> None:
    """A signal is no operator's stop."""
    state = {"coordinator": "--state", "eavesdropper": "--folder", "learner": "--state"}[kind]
    more = ["--name", "ann", "--coordinator", "127.0.0.1:9"] if kind == "learner" else []
    command = [sys.executable, "-m", "sottovoce_client", kind, "--listen", "127.0.0.1:0", state, str(tmp_path / "s")]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, *more, "--log-format", "json", stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        address = json.loads(await process.stdout.readline())["address"]
        process.send_signal(signal.SIGTERM)
        _, text = await process.communicate()
    log = [json.loads(line) for line in text.decode().splitlines()]
    assert process.returncode == 0
    (started,) = [each for each in log if each["event"] == "started"]
    facts = {"service": kind, "version": version("sottovoce"), "identity": "none", "address": address}
    assert facts.items() <= started.items()
    assert str(tmp_path / "s") in started.values()
    assert [(each["event"], each["reason"]) for each in log[-2:]] == [("stopping", "SIGTERM"), ("stopped", "SIGTERM")]
    assert not any("operator" in each.get("reason", "") for each in log)
