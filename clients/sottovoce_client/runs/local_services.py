"""Local services of a run, each in its own process, which all end with the command that started them.

A process stops when its standard input ends, so that a killed parent leaves none behind. Its log goes to a file; its first
line on standard output announces its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from sottovoce_client.formatting import pluralize
from sottovoce_client.pki import Authority
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import RunSpec, find_first_import
from sottovoce_eavesdropper.service import DRAIN_TIMEOUT_S
from sottovoce_rpc.certificates import AUTHORITIES_FILE
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.tasks import Tasks

_START_TIMEOUT_S = 300.0
"""Time limit for a service that hangs, generous for slow machines: one that dies is detected at once."""
_OPERATOR = "operator-local"
LEARNER_STATE_FOLDER = "learner-state"
"""Name of the folder that holds the state of the learners."""
_STOP_TIMEOUT_S = 3.5
"""Maximum seconds for a service to end; an eavesdropper also writes its buffer."""


@dataclass(slots=True)
class _Process:
    """Running service process."""

    name: str
    child: asyncio.subprocess.Process
    log: Path
    stop_s: float = _STOP_TIMEOUT_S
    addresses: dict[str, str] = field(default_factory=dict)
    """Addresses of what it serves, by the names that it announced."""

    async def end(self) -> None:
        """Stop the process, and kill it after `stop_s` seconds."""
        if self.child.returncode is None:
            self.child.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.stop_s):
                await self.child.wait()
        self.kill()
        await self.child.wait()

    def kill(self) -> None:
        """Kill the process if it is running."""
        if self.child.returncode is None:
            self.child.kill()

    def read_last_log_line(self) -> str:
        """Return the last line of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


class LocalServices:
    """Coordinator, learners and (for captured runs) an eavesdropper as child processes. Use it in `async with`.

    Args:
        spec: Run spec.
        folder: Folder for learner state, captures and logs.
        learners_per_process: Learners in one process.
        recorded_noise: File of recorded noise, for tests.
        tls: Whether channels are encrypted, with an authority made for these services.
        keep_log: Whether learners keep their logs.

    Attributes:
        spec: Run spec.
        coordinator: Address of the coordinator.
        eavesdropper: Address of the eavesdropper; empty: none.
        credentials: Credentials of an operator, who may also feed the learners.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        *,
        learners_per_process: int = 1,
        recorded_noise: Path | None = None,
        tls: bool = False,
        keep_log: bool = False,
    ) -> None:
        self.spec, self._folder, self._per_process, self._noise = spec, folder, learners_per_process, recorded_noise
        self._keep_log = keep_log
        self._processes: list[_Process] = []
        self._identities = folder / "identities" if tls else None
        self.coordinator, self.eavesdropper, self.credentials = "", "", Credentials()

    async def __aenter__(self) -> Self:
        try:
            await self._start_all()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def wait_for_exit(self) -> str:
        """Wait until a service exits by itself; return a description of it."""
        async with Tasks() as tasks:
            waits = {tasks.start(process.child.wait()): process for process in self._processes}
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        process = waits[done.pop()]
        how = _describe_exit(process.child.returncode)
        return f"{process.name} (process {process.child.pid}) died, {how}; its log is {process.log}"

    async def stop(self) -> None:
        """Stop all services and kill those that do not end in time. The coordinator, which still sends to learners, is first."""
        first = [process for process in self._processes if process.name == "coordinator"]
        try:
            for group in (first, self._processes):
                await asyncio.gather(*(process.end() for process in group))
        finally:
            for process in self._processes:
                process.kill()
            self._processes.clear()
            if self._identities is not None:  # keys that are not used any more
                await asyncio.to_thread(shutil.rmtree, self._identities, ignore_errors=True)

    @property
    def description(self) -> str:
        """Description of the services, in words."""
        learners, processes = self.spec.n_learners, -(-self.spec.n_learners // self._per_process)
        hosts = f" in {processes} {'process' if processes == 1 else 'processes'}" if processes < learners else ""
        eavesdropper = "" if self.spec.capture == "none" else ", an eavesdropper"
        return f"a coordinator{eavesdropper} and {pluralize(learners, 'learner')}{hosts}"

    @property
    def learner_addresses(self) -> dict[str, str]:
        """Address of each learner, by name."""
        known = {name: address for process in self._processes for name, address in process.addresses.items()}
        return {name: known[name] for name in self.spec.names}

    # ---- starting -----------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        if self._identities is not None:
            await asyncio.to_thread(issue_local_identities, self._identities, self.spec.names)
            # Stays with the results, to verify signatures by.
            await asyncio.to_thread(
                shutil.copy, self._identities / _OPERATOR / AUTHORITIES_FILE, self._folder / AUTHORITIES_FILE
            )
            self.credentials = Credentials(self._identities / _OPERATOR)
        eavesdropper_options: list[str] = []
        if self.spec.capture != "none":
            captures = str(self._folder / "captures")
            eavesdropper = await self._start(
                "eavesdropper",
                [
                    "eavesdropper",
                    *self._imports,
                    *self._identity_options("eavesdropper-local"),
                    "--folder",
                    captures,
                ],
            )
            self.eavesdropper = await self._read_address(eavesdropper)
            eavesdropper_options = ["--eavesdropper", self.eavesdropper]
        coordinator = await self._start(
            "coordinator",
            ["coordinator", *self._imports, *self._identity_options("coordinator-local"), *eavesdropper_options],
        )
        self.coordinator = await self._read_address(coordinator)
        policy = Policy.from_spec(self.spec).dump()
        await asyncio.to_thread(self._policy.write_text, policy, encoding="utf-8")
        names = self.spec.names
        groups = [names[k : k + self._per_process] for k in range(0, len(names), self._per_process)]
        learners = [await self._start(group[0], self._learner_command(group)) for group in groups]
        for process, group in zip(learners, groups, strict=True):
            for _ in group:
                await self._read_address(process)

    def _identity_options(self, identity: str) -> list[str]:
        """Return the options that name a service's identity, or the folder of the identities of its learners."""
        return [] if self._identities is None else ["--identity", str(self._identities / identity)]

    @property
    def _policy(self) -> Path:
        """Policy file of the learners: it accepts this spec alone, because other users of this machine could start a run."""
        return self._folder / "logs" / "policy.yaml"

    @property
    def _imports(self) -> list[str]:
        """Option that permits imports, only if this spec needs them."""
        return ["--allow-imports"] if find_first_import(self.spec.model_dump(mode="json")) else []

    def _learner_command(self, names: Sequence[str]) -> list[str]:
        command = ["learner", "--coordinator", self.coordinator, "--state", str(self._folder / LEARNER_STATE_FOLDER)]
        command += ["--policy", str(self._policy), *self._imports]
        command += self._identity_options(f"learner-{names[0]}" if len(names) == 1 else "")
        if self._identities is not None:
            command += ["--owner", _OPERATOR.replace("-", "/")]
        for name in names:
            command += ["--name", name]
        command += ["--keep-log"] if self._keep_log else []
        return command + (["--recorded-noise", str(self._noise)] if self._noise else [])

    async def _start(self, name: str, command: Sequence[str]) -> _Process:
        logs = self._folder / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = logs / f"{name}.log"
        with path.open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "sottovoce_client",
                *command,
                "--listen",
                "127.0.0.1:0",
                "--stop-with-stdin",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={
                    name: value for name, value in os.environ.items() if name != "SOTTOVOCE_METRICS"
                },  # one port cannot serve several services
                start_new_session=True,  # Ctrl-C is for the parent, which stops its children in order
            )
        process = _Process(name, child, path, _STOP_TIMEOUT_S + (DRAIN_TIMEOUT_S if name == "eavesdropper" else 0.0))
        self._processes.append(process)
        return process

    async def _read_address(self, process: _Process) -> str:
        """Read the address that a process announces."""
        stdout = process.child.stdout
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await stdout.readline() if stdout else b""
        except TimeoutError:
            raise Unavailable(
                f"{process.name} did not start within {_START_TIMEOUT_S:g} s; see {process.log}"
            ) from None
        if not line:
            await process.child.wait()
            raise Unavailable(f"{process.name} did not start: {process.read_last_log_line()}")
        facts = json.loads(line)
        process.addresses[facts.get("name", process.name)] = facts["address"]
        return str(facts["address"])


def issue_local_identities(folder: Path, names: Sequence[str]) -> None:
    """Create an authority, and an identity for each service of a local run, in folders such as `learner-NAME`.

    Args:
        folder: Folder for them.
        names: Names of the learners.

    Raises:
        SpecError: The learners belong to other trust domains.
    """
    if foreign := [name for name in names if "@" in name]:
        raise SpecError(
            f"encrypted channels on this machine need learners of one trust domain, got {foreign[0]!r}: omit --tls, "
            "or remove the domains from the names of learners"
        )
    authority = Authority.init(folder / "authority", "local")
    learners = (f"learner/{name}" for name in names)
    for principal in ("coordinator/local", "eavesdropper/local", "operator/local", *learners):
        authority.issue(principal, folder / principal.replace("/", "-", 1))


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
