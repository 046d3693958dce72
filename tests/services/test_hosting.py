"""Processes with several learners, each with a policy and an identity of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sottovoce_client.runs.run_client import Outcome, run_on_services
from sottovoce_client.runs.summary import RunProgress
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_rpc.credentials import Credentials
from tests.examples import ALLOWING_FILE, made_up, small_spec
from tests.services.identities import Identities
from tests.services.network import OPERATOR, PATIENCE_S

pytestmark = pytest.mark.slow

NAMES = ["ann", "ben", "cleo"]
PACED = {"mode": "paced", "period_s": 0.02, "window": 5, "deadline_s": 100.0}


@dataclass
class Hosting:
    """A process with learners, and what it says."""

    process: asyncio.subprocess.Process
    addresses: dict[str, str]

    async def line(self, event: str) -> dict[str, Any]:
        """The next line of its log about an event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            async for text in self.process.stderr:
                if (said := json.loads(text))["event"] == event:
                    return dict(said)
        raise AssertionError(f"the log ended without {event!r}")

    async def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; its exit code, and the last line that it said."""
        self.process.send_signal(number)
        _, err = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        lines = err.decode().strip().splitlines()
        assert self.process.returncode is not None
        return self.process.returncode, lines[-1] if lines else ""


@asynccontextmanager
async def hosting(file: Path, document: Mapping[str, Any]) -> AsyncIterator[Hosting]:
    """The learners of a file in a process; killed at the end, if it still lives."""
    await asyncio.to_thread(file.write_text, yaml.safe_dump(dict(document)), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sottovoce_client", "learner", "--host", str(file)),
        env={**os.environ, "SOTTOVOCE_POLICY": str(ALLOWING_FILE)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = [json.loads(await process.stdout.readline()) for _ in document["learners"]]
        assert [(each["service"], each["name"]) for each in said] == [
            ("learner", name) for name in document["learners"]
        ]
        yield Hosting(process, {each["name"]: each["address"] for each in said})
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def coordinating(credentials: Credentials | None = None) -> AsyncIterator[str]:
    """A coordinator's address."""
    coordinator = Coordinator(CoordinatorConfig(credentials=credentials or Credentials()))
    try:
        yield await coordinator.start()
    finally:
        await coordinator.stop()


async def ran(coordinator: str, rounds: int, names: list[str], **more: Any) -> Outcome:
    """A run, to its end."""
    spec = small_spec(rounds, names)
    return await asyncio.wait_for(
        run_on_services(coordinator, spec, made_up(spec), lambda *_: None, **more), PATIENCE_S
    )


async def test_each_learner_of_a_process_has_its_own_policy_and_identity(tmp_path: Path) -> None:
    """A run that one of them may not take part in fails because of it, and the others' runs go on."""
    identities = Identities(tmp_path / "identities")
    for name in NAMES:
        identities.at(f"learner/{name}")
    elsewhere, strict = tmp_path / "cleo", tmp_path / "strict.yaml"
    (tmp_path / "identities" / "learner-cleo").rename(elsewhere)
    strict.write_text("epsilon_per_run: null\nguarantees: {threat_model: output}\nmax_rounds: 3\n", encoding="utf-8")
    operator = identities.of(OPERATOR)
    async with coordinating(identities.of("coordinator/main")) as address:
        document = {
            "coordinator": address,
            "state": str(tmp_path / "states"),
            "identity": str(tmp_path / "identities"),
            "owner": [OPERATOR],
            "learners": {"ann": None, "ben": {"budget": 1e6}, "cleo": {"identity": str(elsewhere), "policy": str(strict)}},
        }  # fmt: skip
        async with hosting(tmp_path / "wards.yaml", document) as host:
            refused = await ran(address, 20, NAMES, credentials=operator)
            others = await ran(address, 20, ["ann", "ben"], credentials=operator)
            short = await ran(address, 3, NAMES, credentials=operator)
            assert (await host.stop())[0] == 0
    assert refused.state == "failed" and "max_rounds 3, the spec asks for 20" in refused.detail
    assert [(each.state, each.detail) for each in (others, short)] == [("finished", ""), ("finished", "")]


async def test_learners_of_a_process_that_is_killed_go_on_when_it_is_started_again(tmp_path: Path) -> None:
    halfway = asyncio.Event()

    def look(progress: RunProgress, state: str) -> None:
        if min(progress.rounds) >= 20:
            halfway.set()

    spec = small_spec(200, NAMES, clock=PACED)
    async with coordinating() as address:
        document = {"coordinator": address, "state": str(tmp_path / "states"), "learners": NAMES}
        async with hosting(tmp_path / "wards.yaml", document) as host:
            running = asyncio.ensure_future(run_on_services(address, spec, made_up(spec), look))
            await asyncio.wait_for(halfway.wait(), PATIENCE_S)
            await host.stop(signal.SIGKILL)
        async with hosting(tmp_path / "wards.yaml", document):
            outcome = await asyncio.wait_for(running, PATIENCE_S)
    assert (outcome.state, outcome.detail) == ("finished", "")
    assert {each.rounds_done for each in outcome.statuses} == {200}


async def test_a_learner_that_is_refused_is_told_of_and_leaves_the_others_in_peace(tmp_path: Path) -> None:
    """By the coordinator, which knows it with another state folder. Who stops the process learns of it, too."""
    async with coordinating() as address:
        learners: dict[str, Any] = {name: {} for name in NAMES}
        document = {"coordinator": address, "state": str(tmp_path / "states"), "learners": learners}
        async with hosting(tmp_path / "wards.yaml", document) as host:
            assert (await ran(address, 5, NAMES)).state == "finished"
            assert (await host.stop())[0] == 0
        learners["ben"] = {"state": str(tmp_path / "another")}
        async with hosting(tmp_path / "wards.yaml", document) as host:
            line = await host.line("learner ended")
            outcome = await ran(address, 5, ["ann", "cleo"])
            code, last = await host.stop()
    assert (line["learner"], line["others"]) == ("ben", 2)
    assert "'ben' has joined with another state folder than this one" in line["reason"]
    assert outcome.state == "finished"
    assert (code, last) == (2, "sottovoce: 1 of 3 learners had ended before, see the log for the reasons: ben")


async def test_all_start_or_none(tmp_path: Path) -> None:
    """Whoever cannot is named, and nothing is left that listens, or holds a state folder."""
    document = {"coordinator": "127.0.0.1:1", "state": str(tmp_path), "join_timeout": 0.2, "learners": NAMES}
    file = tmp_path / "wards.yaml"
    (tmp_path / "cleo.lock").mkdir()
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sottovoce_client", "learner", "--host", str(file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert (process.returncode, out) == (2, b"")
    told, *said = err.decode().splitlines()
    assert json.loads(told)["event"] == "starting"
    assert said == [f"sottovoce: learner cleo: the state folder {tmp_path} cannot be written: Is a directory"]
