"""The compose file, brought up on an engine, and what can be asked of it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tests.deploy.engine import Engine, Failed, run
from tests.deploy.images import CHECKOUT

COMPOSE = CHECKOUT / "deploy" / "compose.yaml"
LEARNERS = ("north", "east", "south", "west", "centre")
RECORDS = 569
"""That are published, each for one learner."""
LATE_S = 600.0
"""Something that should happen does not: late, for a busy machine is no failure."""
_LOOK_S = 1.0
_EVERYTHING = ("--profile", "live", "--profile", "record", "--profile", "audit")
_STATUS = """
import asyncio, json, sys
from pathlib import Path
import grpc
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc
from google.protobuf.json_format import MessageToDict

async def main(names):
    own = Credentials(Path("/etc/sottovoce/identity"))
    found = {}
    for name in names:
        async with open_channel(f"{name}:7401", Role.LEARNER, name, credentials=own) as to:
            try:
                answer = await learner_pb2_grpc.LearnerStub(to).GetStatus(learner_pb2.GetStatusRequest(), timeout=20)
                found[name] = MessageToDict(answer.status, preserving_proto_field_name=True)
            except grpc.aio.AioRpcError as error:
                found[name] = {"error": f"{error.code().name}: {error.details()}"}
    print(json.dumps(found))

asyncio.run(main(sys.argv[1:]))
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """The demo on an engine.

    Attributes:
        engine: that runs it.
        leave_out: services that cannot be had here.
    """

    engine: Engine
    leave_out: Sequence[str] = ()

    def __call__(self, *words: str, profile: str = "", check: bool = True) -> str:
        """`docker compose WORDS`."""
        chosen = ["--profile", profile] if profile else []
        command = ["docker-compose", "--file", str(COMPOSE), "--ansi", "never", "--progress", "quiet", *chosen, *words]
        return run(command, self.engine.environment, check=check)

    def up(self, *services: str, profile: str = "") -> None:
        """Start services, and what they need; all of the profile where none is named."""
        scale = [option for name in self.leave_out for option in ("--scale", f"{name}=0")] if not services else []
        self("up", "--detach", "--no-build", "--pull", "never", *scale, *services, profile=profile)

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        found: dict[str, Any] = self.engine.inspect(f"sottovoce-{service}-1")
        return found

    def state(self, service: str) -> tuple[str, str, int]:
        """Its status, its health (empty: none is known) and its exit code."""
        try:
            state = self.container(service)["State"]
        except Failed:
            return "missing", "", 0
        return state["Status"], state.get("Health", {}).get("Status", ""), state["ExitCode"]

    def logs(self, service: str) -> str:
        """All that it said."""
        return self.engine("logs", f"sottovoce-{service}-1", check=False, errors=True)

    def inside(self, service: str, code: str) -> str:
        """What Python code prints in a service's container; it must catch what it expects."""
        return self.engine("exec", f"sottovoce-{service}-1", "python", "-c", code)

    def wait_healthy(self, *services: str) -> None:
        """Until all are.

        Raises:
            TimeoutError: one is not.
        """
        for service in services:
            until(partial(self._healthy, service), f"{service} is healthy", partial(self.logs, service))

    def _healthy(self, service: str) -> bool:
        return self.state(service)[1] == "healthy"

    def wait_ended(self, service: str) -> int:
        """Until a service that ends by itself has done so; returns its exit code."""
        until(lambda: self.state(service)[0] == "exited", f"{service} has ended", lambda: self.logs(service))
        return self.state(service)[2]

    def as_operator(self, *words: str, check: bool = True) -> str:
        """`sottovoce WORDS` with the operator's identity, in a container of its own."""
        return self("run", "--rm", "--no-deps", "--pull", "never", "-T", "run", *words, profile="live", check=check)

    def statuses(self, *names: str) -> dict[str, dict[str, Any]]:
        """What learners say of themselves; where one does not answer, its `error`."""
        words = ["run", "--rm", "--no-deps", "--pull", "never", "-T", "--entrypoint", "python", "run"]
        said = self(*words, "-c", _STATUS, *(names or LEARNERS), profile="live")
        found: dict[str, dict[str, Any]] = json.loads(said)
        return found

    def rounds(self, *names: str) -> dict[str, int]:
        """Rounds done, of learners that answer."""
        return {
            name: int(each.get("rounds_done", 0)) for name, each in self.statuses(*names).items() if "error" not in each
        }

    def wait_rounds(self, more: int, *names: str) -> dict[str, int]:
        """Until learners have done so many more rounds."""
        before = self.rounds(*LEARNERS)

        def enough() -> dict[str, int] | None:
            now = self.rounds(*(names or LEARNERS))
            done = len(now) == len(names or LEARNERS) and all(
                n >= before.get(name, 0) + more for name, n in now.items()
            )
            return now if done else None

        return until(enough, f"{more} more rounds than {before}", lambda: str(self.statuses()))

    def down(self) -> None:
        """Containers, networks and volumes."""
        with contextlib.suppress(Failed):
            self(*_EVERYTHING, "down", "--volumes", "--remove-orphans", "--timeout", "5")


def until(there: Callable[[], T | None], what: str, otherwise: Callable[[], str] = lambda: "") -> T:
    """Look until something is there.

    Raises:
        TimeoutError: it is not, and what is instead.
    """
    give_up = time.monotonic() + LATE_S
    while time.monotonic() < give_up:
        if found := there():
            return found
        time.sleep(_LOOK_S)
    raise TimeoutError(f"{what}: not within {LATE_S:g} s\n{otherwise()[-3_000:]}")


@contextlib.contextmanager
def brought_up(engine: Engine, profile: str = "live") -> Iterator[Stack]:
    """The demo while the block lasts."""
    stack = Stack(engine, ["grafana"])
    try:
        stack.up(profile=profile)
        yield stack
    finally:
        stack.down()
