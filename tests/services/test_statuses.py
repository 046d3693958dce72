"""What each method of each service answers to what it refuses: one table.

A value that is wrong is INVALID_ARGUMENT; what is not known NOT_FOUND; what is there already ALREADY_EXISTS; FAILED_PRECONDITION
is of the state alone, which the same request may find changed later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from sottovoce_rpc.codec import to_tensor
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2
from tests.examples import small_spec
from tests.services.capturing import hello
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.test_exchange_errors import introducing, reason, start
from tests.services.test_hostile import METHODS, SERVICES

INVALID, NOT_FOUND, EXISTS, STATE, DENIED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
)
NO_MESSAGE = b"\xff"
Case = tuple[str, Message | bytes, grpc.StatusCode, str]


def of_coordinator(run_id: str, spec: str) -> list[Case]:
    """In a run that is under way, with learners ann and ben, while cleo is in none."""
    pb = coordinator_pb2
    no_run, no_id = "no run 'other': the last one is", "a run id is required, got none"
    no_learner, no_name = (
        f"run {run_id} has no learner 'zoe'; it has ann, ben",
        "a learner's name is required, got none",
    )
    asked: dict[str, Any] = {"spec": spec, "n_features": 3}
    a_token: dict[str, Any] = {"page_token": "x"}
    return [
        ("Join", introducing(""), INVALID, "a learner must introduce itself first, by its name"),
        ("Join", introducing("a/b"), INVALID, "a learner's name must be"),
        ("Join", introducing("ann"), DENIED, "has joined with another state folder"),
        ("StartRun", pb.StartRunRequest(spec="{"), INVALID, "the run spec must be JSON"),
        ("StartRun", pb.StartRunRequest(spec=spec), INVALID, "n_features must be at least 1, got 0"),
        ("StartRun", pb.StartRunRequest(**asked), STATE, f"ann, ben are in run {run_id}, which is under way"),
        ("StopRun", pb.StopRunRequest(run_id="other"), NOT_FOUND, no_run),
        ("StopRun", pb.StopRunRequest(), INVALID, no_id),
        ("ResumeRun", pb.ResumeRunRequest(run_id="other"), NOT_FOUND, no_run),
        ("ResumeRun", pb.ResumeRunRequest(), INVALID, no_id),
        ("ResumeRun", pb.ResumeRunRequest(run_id=run_id), STATE, "only a run that failed can be resumed"),
        ("LeaveRun", pb.LeaveRunRequest(run_id="other", learner="ann"), NOT_FOUND, no_run),
        ("LeaveRun", pb.LeaveRunRequest(run_id=run_id, learner="zoe"), NOT_FOUND, no_learner),
        ("LeaveRun", pb.LeaveRunRequest(run_id=run_id), INVALID, no_name),
        ("JoinRun", pb.JoinRunRequest(run_id="other", learner="ann"), NOT_FOUND, no_run),
        ("JoinRun", pb.JoinRunRequest(run_id=run_id, learner="zoe"), NOT_FOUND, no_learner),
        ("JoinRun", pb.JoinRunRequest(run_id=run_id), INVALID, no_name),
        ("JoinRun", pb.JoinRunRequest(run_id=run_id, learner="ann"), STATE, "only a learner with a place in the spec"),
        ("RecoverRun", pb.RecoverRunRequest(run_id=run_id, **asked), EXISTS, f"run {run_id} is known here"),
        ("RecoverRun", pb.RecoverRunRequest(**asked), INVALID, "a run id must be letters, digits"),
        ("GetRun", pb.GetRunRequest(run_id="other"), NOT_FOUND, no_run),
        ("GetRun", pb.GetRunRequest(), INVALID, no_id),
        ("ListRuns", pb.ListRunsRequest(**a_token), INVALID, "the page token must be one"),
        ("WatchRun", pb.WatchRunRequest(run_id="other"), NOT_FOUND, no_run),
        ("WatchRun", pb.WatchRunRequest(), INVALID, no_id),
        ("RebindLearner", pb.RebindLearnerRequest(learner="zoe"), NOT_FOUND, "those that have are ann, ben, cleo"),
        ("RebindLearner", pb.RebindLearnerRequest(), INVALID, no_name),
        ("RebindLearner", pb.RebindLearnerRequest(learner="ann"), STATE, "learner 'ann' is connected"),
    ]


def of_eavesdropper(run_id: str, capture_id: str, spec: str) -> list[Case]:
    """While that run is mirrored."""
    pb = eavesdropper_pb2
    no_capture, no_id = (
        f"no capture 'other' here: the last one is {capture_id!r}",
        "a capture's id is required, got none",
    )
    opening: dict[str, Any] = {"run_id": "other", "spec": spec}
    a_token: dict[str, Any] = {"page_token": "x"}
    return [
        ("OpenCapture", pb.OpenCaptureRequest(run_id=run_id, spec=spec), EXISTS, "is captured already"),
        (
            "OpenCapture",
            pb.OpenCaptureRequest(run_id="other", resume=True),
            NOT_FOUND,
            "no capture of run 'other' here",
        ),
        ("OpenCapture", pb.OpenCaptureRequest(spec=spec), INVALID, "a run id must be letters, digits"),
        ("OpenCapture", pb.OpenCaptureRequest(**opening, world=2**31), INVALID, "world must be at most"),
        ("CloseCapture", pb.CloseCaptureRequest(capture_id="other"), NOT_FOUND, no_capture),
        ("CloseCapture", pb.CloseCaptureRequest(), INVALID, no_id),
        ("ListSentRounds", pb.ListSentRoundsRequest(run_id="a/b"), INVALID, "a run id must be letters, digits"),
        ("StreamCapture", pb.StreamCaptureRequest(capture_id="other"), NOT_FOUND, no_capture),
        ("StreamCapture", pb.StreamCaptureRequest(), INVALID, no_id),
        ("ListCaptures", pb.ListCapturesRequest(**a_token), INVALID, "the page token must be one"),
        ("Mirror", pb.MirrorRequest(run_id="other"), NOT_FOUND, "no capture of run 'other' here"),
        ("Mirror", pb.MirrorRequest(run_id=run_id, sender=9), INVALID, "the capture is of 2 learners, got learner 9"),
        ("Work", pb.WorkRequest(), DENIED, "this eavesdropper has not started this worker"),
        ("Work", NO_MESSAGE, INVALID, "a message must be one of this method"),
    ]


def of_learner(run_id: str, *, in_run: bool) -> list[Case]:
    """Of ann, in the run, or of cleo, in none."""
    pb = learner_pb2
    if not in_run:
        idle = "this learner is not in a run yet"
        return [
            ("Exchange", hello(0, 0, run_id=run_id), STATE, idle),
            ("Ingest", pb.SampleBatch(source="x"), STATE, idle),
            ("GetIntake", pb.GetIntakeRequest(source="x"), STATE, idle),
            ("Predict", pb.PredictRequest(), STATE, idle),
        ]
    return [
        ("Exchange", NO_MESSAGE, INVALID, "expected a Hello first"),
        ("Exchange", hello(1, 0, run_id="other"), DENIED, "this learner is in another run than 'other'"),
        ("Ingest", NO_MESSAGE, INVALID, "a message must be one of this method"),
        ("Ingest", pb.SampleBatch(source="x", sequence=7, counts=[1]), STATE, "must send batch 0 next, got batch 7"),
        ("GetIntake", NO_MESSAGE, INVALID, "a message must be one of this method"),
        ("Predict", pb.PredictRequest(features=to_tensor(np.zeros((1, 7)))), INVALID, ""),
        ("GetStatus", NO_MESSAGE, INVALID, "a message must be one of this method"),  # its request is empty
        ("GetLedger", NO_MESSAGE, INVALID, "a message must be one of this method"),
    ]


async def answered(to: grpc.aio.Channel, path: str, request: Message | bytes) -> grpc.aio.AioRpcError:
    payload = request if isinstance(request, bytes) else request.SerializeToString()
    call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = to.stream_stream(path)
    return await refused(call(iter([payload]), timeout=PATIENCE_S))


async def seen(address: str, house: str, cases: list[Case]) -> set[str]:
    """The methods of a service, each of which has answered as it should."""
    service, paths = SERVICES[house].full_name, set[str]()
    async with open_channel(address) as to:
        for name, request, code, text in cases:
            paths.add(path := f"/{service}/{name}")
            failure = await answered(to, path, request)
            told = failure.details() or ""
            assert (failure.code(), text in told) == (code, True), (path, request, failure)
            assert told.strip() == told and not told.endswith(("are", ":", ",", ";")), (path, told)
            if code in (NOT_FOUND, EXISTS):
                assert reason(failure) == {NOT_FOUND: "NotFound", EXISTS: "AlreadyExists"}[code]
    return paths


async def test_every_method_says_what_is_wrong_by_its_status(tmp_path: Path) -> None:
    own: dict[str, Any] = {"capture": "mirror", "telemetry": {"predict": True}}
    spec = small_spec(5, ["ann", "ben"], **own)
    async with network(tmp_path, ["ann", "ben", "cleo"], durable=True) as up:
        for name in ("ann", "ben", "cleo"):
            await up.until_here(name)
        run = await up.start(spec, 3)
        await up.until("ann", LearnerState.RUNNING)
        met = await seen(up.coordinator, "coordinator", of_coordinator(run.run_id, spec_to_wire(spec)))
        cases = of_eavesdropper(run.run_id, run.capture_id, spec_to_wire(spec))
        met |= await seen(up.eavesdropper, "eavesdropper", cases)
        met |= await seen(up.addresses["ann"], "learner", of_learner(run.run_id, in_run=True))
        met |= await seen(up.addresses["cleo"], "learner", of_learner(run.run_id, in_run=False))
        assert {path for path in METHODS if "sottovoce" in path} == met
        await stopped_and_closed(up, run)


async def stopped_and_closed(up: Network, run: coordinator_pb2.Run) -> None:
    """Afterwards the run is over, and its capture closed: that is state, and nothing of it is unknown."""
    pb = coordinator_pb2
    asked: dict[str, Any] = {"run_id": run.run_id}
    async with open_channel(up.coordinator) as to:
        stop: Any = to.unary_unary(f"/{SERVICES['coordinator'].full_name}/StopRun", None, pb.Run.FromString)
        await stop(pb.StopRunRequest(**asked).SerializeToString(), timeout=PATIENCE_S)
    await up.end(run.run_id)
    over = f"run {run.run_id} is over (stopped"
    await seen(
        up.coordinator,
        "coordinator",
        [
            ("LeaveRun", pb.LeaveRunRequest(**asked, learner="ann"), STATE, over),
            ("ResumeRun", pb.ResumeRunRequest(**asked), STATE, "is stopped"),
        ],
    )
    closed = eavesdropper_pb2.OpenCaptureRequest(**asked, resume=True)
    await seen(up.eavesdropper, "eavesdropper", [("OpenCapture", closed, STATE, "is closed")])


async def test_where_nothing_is_known_texts_are_whole(tmp_path: Path) -> None:
    """Of runs, captures and learners there may be none: no sentence ends where their list would stand."""
    async with network(tmp_path, []) as up:
        for house, address, name, request, text in (
            (
                "coordinator",
                up.coordinator,
                "GetRun",
                coordinator_pb2.GetRunRequest(run_id="x"),
                "'x': there are no runs",
            ),
            (
                "coordinator",
                up.coordinator,
                "RebindLearner",
                coordinator_pb2.RebindLearnerRequest(learner="x"),
                "learner 'x' has never joined this coordinator; no learner has yet",
            ),
            (
                "eavesdropper",
                up.eavesdropper,
                "CloseCapture",
                eavesdropper_pb2.CloseCaptureRequest(capture_id="x"),
                "no capture 'x' here: there are no captures",
            ),
        ):
            await seen(address, house, [(name, request, NOT_FOUND, text)])
        failure = await start(up.coordinator, {"colour": 1})
        assert failure.code() is INVALID
