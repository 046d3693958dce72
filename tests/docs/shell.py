"""A terminal that a page's commands are typed into: with a folder, a home and a network of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 300.0
UP = "import fcntl, os, socket, struct, sys; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1)); "
"""Brings up the loopback of a network namespace (SIOCSIFFLAGS, IFF_UP)."""
BASH = ["bash", "--noprofile", "--norc"]
OVER = "=== over"
UPON = re.compile(r"\"address\"|http://")
"""What a service says when it listens."""
OURS = re.compile(r"SOTTOVOCE_|XDG_|PYTEST_|PYTHONPATH|COLUMNS|PYTHONDONTWRITEBYTECODE")


@dataclass
class Shell:
    """Bash, which keeps variables and jobs from one command to the next."""

    process: subprocess.Popen[str]
    folder: Path
    scratch: Path
    count: int = 0

    def type(self, command: str, *, serves: bool = False) -> tuple[int, str]:
        """Run a command; returns its exit code and all that it printed. What `serves` goes on, as in another terminal."""
        self.count += 1
        script, said = self.scratch / f"{self.count}.sh", self.scratch / f"{self.count}.txt"
        script.write_text(f"{command}\n", encoding="utf-8")
        told, heard = self.process.stdin, self.process.stdout
        assert told is not None and heard is not None
        told.write(f". '{script}' </dev/null >'{said}' 2>&1 {'&' if serves else ''}\necho '{OVER}' $?\n")
        told.flush()
        patient, _, _ = select.select([heard], [], [], PATIENCE_S)
        assert patient, f"this must end within {PATIENCE_S:.0f} s: {command}\n{said.read_text(encoding='utf-8')}"
        line = heard.readline()
        assert line.startswith(OVER), f"the shell ended at: {command}"
        if serves:
            _until(
                lambda: said.is_file() and UPON.search(said.read_text(encoding="utf-8")) is not None,
                f"it listens: {command}",
            )
        return int(line.split()[-1]), said.read_text(encoding="utf-8")


def _until(happened: Callable[[], bool], what: str) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < patience, f"this must happen within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.05)


def isolated() -> list[str]:
    """What to start Bash with, so that it has a network of its own; nothing where this machine allows none."""
    for options in (["-n"], ["-rn"]):
        with suppress(FileNotFoundError):
            tried = subprocess.run(["unshare", *options, "true"], capture_output=True, check=False)  # noqa: S607
            if tried.returncode == 0:
                return ["unshare", *options, sys.executable, "-c", f"{UP}os.execvp(sys.argv[1], sys.argv[1:])"]
    return []


@contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    """A shell in an empty folder; all that it started is over at the end."""
    work, home, scratch = folder / "work", folder / "home", folder / "scratch"
    for made in (work, home, scratch):
        made.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    own = {"PATH": path, "HOME": str(home), "TERM": "dumb", "NO_COLOR": "1", "MPLBACKEND": "agg"}
    process = subprocess.Popen(
        [*isolated(), *BASH],
        cwd=work,
        env={**kept, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Shell(process, work, scratch)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """What is left running is told to end, then made to."""
    for told in (signal.SIGTERM, signal.SIGKILL):
        if _group(process.pid, told):
            break
        process.communicate()
        patience = time.monotonic() + PATIENCE_S / 4
        while time.monotonic() < patience:
            if _group(process.pid, 0):
                return
            time.sleep(0.05)


def _group(leader: int, told: int) -> bool:
    """Whether nobody is left of a process group, which is told something else."""
    try:
        os.killpg(leader, told)
    except ProcessLookupError:
        return True
    return False
