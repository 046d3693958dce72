"""What a stranger sends with nothing but the ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2
from tests.services.network import PATIENCE_S, Network, network, refused

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]  # gRPC's own
SERVICES: dict[str, Any] = {
    "coordinator": coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    "eavesdropper": eavesdropper_pb2.DESCRIPTOR.services_by_name["Eavesdropper"],
    "learner": learner_pb2.DESCRIPTOR.services_by_name["Learner"],
}
METHODS = {
    f"/{service.full_name}/{method.name}": (house, method.client_streaming)
    for house, service in (*SERVICES.items(), ("learner", HEALTH))
    for method in service.methods
}


def address(up: Network, house: str) -> str:
    assert up.eavesdropping is not None and up.eavesdropping.server is not None
    return {
        "coordinator": up.coordinator,
        "eavesdropper": up.eavesdropping.server.address,
        "learner": up.addresses["ann"],
    }[house]


async def answered(to: str, method: str, payload: bytes, **options: Any) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(to, **options) as channel:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        return await refused(call(iter([payload]), timeout=PATIENCE_S))


async def test_bytes_that_are_no_message_are_refused_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By every method of every service; some refuse before they read. No text of an exception, and nothing in the log."""
    generator = np.random.default_rng(0)
    async with network(tmp_path, ["ann"]) as up:
        for method, (house, streams) in METHODS.items():
            payload = b"\xff" + generator.bytes(200)
            failure = await answered(address(up, house), method, payload)
            early = {grpc.StatusCode.FAILED_PRECONDITION} if streams else set()
            assert failure.code() in {grpc.StatusCode.INVALID_ARGUMENT, *early}, method
            assert "DecodeError" not in (failure.details() or ""), method
    assert not caplog.records


async def test_a_small_message_does_not_become_a_large_one(tmp_path: Path) -> None:
    async with network(tmp_path, ["ann"]) as up:
        for method, (house, _) in METHODS.items():
            failure = await answered(address(up, house), method, bytes(2**20), compression=grpc.Compression.Gzip)
            assert failure.code() is grpc.StatusCode.UNIMPLEMENTED, method


async def test_who_watches_the_health_of_a_service_is_answered(tmp_path: Path) -> None:
    async with (
        network(tmp_path, ["ann"]) as up,
        grpc.aio.insecure_channel(up.addresses["ann"]) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
