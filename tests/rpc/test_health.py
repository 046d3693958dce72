"""What an image's health check says of a service: by its own identity, in the clear, and where nobody serves."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from sottovoce_client.pki import Authority
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.server import RunningServer, start_server

SOON = "import sys; from sottovoce_rpc import health; health._CHECK_TIMEOUT_S = 0.5; sys.exit(health.main())"
"""Where nobody can answer: it asks for as long as a service may take to start."""


async def asked(service: RunningServer, identity: Path | None, *, vain: bool = False) -> tuple[int, str]:
    """The exit code, and what it said."""
    own = {"SOTTOVOCE_LISTEN": service.address, "SOTTOVOCE_IDENTITY": str(identity or "")}
    command = [sys.executable, *(("-c", SOON) if vain else ("-m", "sottovoce_rpc.health"))]
    asking = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **own}, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    _, said = await asking.communicate()
    assert asking.returncode is not None
    return asking.returncode, said.decode()


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    authority = Authority.init(tmp_path / "authority", "ward.example")
    for whom in ("learner/north", "learner/east"):
        authority.issue(whom, tmp_path / whom.replace("/", "-"))
    return tmp_path


async def test_a_service_answers_its_own_identity_and_another_is_not_well(identities: Path) -> None:
    own, other = identities / "learner-north", identities / "learner-east"
    service = await start_server("127.0.0.1:0", lambda server: None, ["a.Service"], Credentials(own))
    assert await asked(service, own) == (0, "")
    code, said = await asked(service, other, vain=True)
    assert code == 1 and said.startswith("port ")
    code, said = await asked(service, identities / "nobody")
    assert code == 1 and "nobody cannot be used: " in said and "ca.crt" in said
    await service.stop()
    code, said = await asked(service, own, vain=True)
    assert code == 1 and said.startswith("port ")


async def test_without_an_identity_it_asks_in_the_clear() -> None:
    service = await start_server("127.0.0.1:0", lambda server: None, ["a.Service"])
    assert await asked(service, None) == (0, "")
    await service.health.enter_graceful_shutdown()
    code, said = await asked(service, None)
    assert (code, said.strip().endswith("the service answers, but is not serving: 2")) == (1, True)
    await service.stop()
