"""Faults done to running containers, and starts that must be refused: what docs/operate/deploy.md says of each, looked at."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sottovoce_client.pki import AUTHORITY_KEY, Authority, read_certificate
from sottovoce_rpc.certificates import CERTIFICATE_FILE
from tests.deploy.engine import Engine
from tests.deploy.images import name_of
from tests.deploy.promises import USER
from tests.deploy.stack import LEARNERS, Stack, until

NETWORKS = ("control", "ring", "intake")
SMALL = "state-centre"
"""A volume of 16 MiB: its learner's can be filled."""
_FILL = """
import os
try:
    with open("/var/lib/sottovoce/ballast", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
except OSError as error:
    print(error.strerror)
"""
_EMPTY = "import os; os.remove('/var/lib/sottovoce/ballast')"


def small_volume(engine: Engine) -> None:
    """Before the demo comes up."""
    labels = ["--label", "com.docker.compose.project=sottovoce", "--label", f"com.docker.compose.volume={SMALL}"]
    size = ["--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", "o=size=16m,uid=65532,gid=65532,mode=0700"]
    engine("volume", "create", *labels, *size, f"sottovoce_{SMALL}")


# ---- what a run survives ---------------------------------------------------------------------------------------------


def killed(service: str) -> Callable[[Stack], None]:
    """A service dies by SIGKILL; the engine starts it again, and the run goes on."""

    def fault(stack: Stack) -> None:
        before = stack.container(service)["RestartCount"]
        os.kill(stack.container(service)["State"]["Pid"], signal.SIGKILL)
        until(lambda: stack.container(service)["RestartCount"] > before, f"{service} is started again")
        stack.wait_healthy(service)
        _goes_on(stack)

    fault.__name__ = f"{service} killed"
    return fault


def cut_off(stack: Stack) -> None:
    """A learner is in no network; the others wait for it, and when it is back all go on."""
    container = "sottovoce-north-1"
    for network in NETWORKS:
        stack.engine("network", "disconnect", f"sottovoce_{network}", container)
    others = [name for name in LEARNERS if name != "north"]
    before: list[dict[str, int]] = [stack.rounds(*others)]

    def rests() -> bool:
        now = stack.rounds(*others)
        before.append(now)
        return len(now) == len(others) and before[-2] == now

    until(rests, "the others wait", lambda: str(before[-2:]))
    for network in NETWORKS:
        stack.engine("network", "connect", "--alias", "north", f"sottovoce_{network}", container)
    _goes_on(stack)


def full(stack: Stack) -> None:
    """A learner's volume is full: it says so and says nothing else; with room it goes on."""
    assert stack.inside("centre", _FILL) == "No space left on device"
    until(
        lambda: "disk full" in stack.logs("centre"),
        "centre says so",
        lambda: stack.logs("centre"),
    )
    stack.inside("centre", _EMPTY)
    _goes_on(stack)


def _goes_on(stack: Stack) -> None:
    stack.wait_rounds(3)
    states = {name: each.get("state") for name, each in stack.statuses().items()}
    assert set(states.values()) == {"LEARNER_STATE_RUNNING"}, states


SURVIVED: tuple[Callable[[Stack], None], ...] = (killed("east"), killed("coordinator"), cut_off, full)


def eavesdropper_killed(stack: Stack) -> None:
    """In a run that it relays the eavesdropper dies, is started again, and the run finishes."""
    stack.up("record", profile="record")
    until(lambda: min(stack.rounds().values(), default=0) > 10, "rounds are relayed", lambda: str(stack.statuses()))
    before = stack.container("eavesdropper")["RestartCount"]
    os.kill(stack.container("eavesdropper")["State"]["Pid"], signal.SIGKILL)
    until(lambda: stack.container("eavesdropper")["RestartCount"] > before, "the eavesdropper is started again")
    stack.wait_ended("record")
    states = {name: each.get("state") for name, each in stack.statuses().items()}
    assert set(states.values()) == {"LEARNER_STATE_FINISHED"}, (states, stack.logs("record"))


# ---- what is refused -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A learner that must not start.

    Attributes:
        what: is wrong.
        volumes: that it gets, by where they go.
        says: what its log must say, as a pattern.
        code: with which it ends.
        options: of `docker run`, besides.
    """

    what: str
    volumes: Sequence[str]
    says: str
    code: int = 2
    options: Sequence[str] = ()


_STATE = "/var/lib/sottovoce"
_NEW = ("--tmpfs", f"{_STATE}:size=16m,uid=65532,mode=0700")
_OWN, _KEPT = "identity-north:/etc/sottovoce/identity:ro", f"state-north:{_STATE}"
_OTHERS, _STRANGERS, _UNNAMED, _EARLY = (
    f"identity-{name}:/etc/sottovoce/identity:ro" for name in ("east", "other", "unnamed", "early")
)
REFUSED = (
    Refused("no secret", [_KEPT], r"identity in /etc/sottovoce/identity cannot be used: tls.key: No such file"),
    Refused("the identity of another", [_OTHERS, _KEPT], r"must be of learner/north, got learner/east"),
    Refused("an identity of another authority", [_STRANGERS], r"cannot reach the coordinator", options=_NEW),
    Refused("an identity that is not valid yet", [_EARLY], r"cannot reach the coordinator", options=_NEW),
    Refused("an identity without its hosts", [_UNNAMED, _KEPT], r"it lacks north.learner.demo.example"),
    Refused("the volume of another", [_OWN, f"state-east:{_STATE}"], r"another state folder"),
    Refused("two of one identity, on one volume", [_OWN, _KEPT], r"another process is learner 'north'"),
    Refused("two of one identity, on two volumes", [_OWN], r"another state folder", options=_NEW),
    Refused("no volume", [_OWN], r"cannot be written: Read-only file system"),
    Refused("a volume that is read-only", [_OWN, f"{_KEPT}:ro"], r"cannot be written: Read-only file system"),
    Refused("not enough memory", [_OWN], r"", 137, ("--memory=24m", "--memory-swap=24m")),
)


def refused(stack: Stack, each: Refused) -> None:
    """Start it beside the demo; it ends, and says why."""
    name = "sottovoce-refused"
    volumes = [word for volume in each.volumes for word in ("--volume", f"sottovoce_{volume}")]
    settings = {"NAME": "north", "COORDINATOR": "coordinator:7400", "ADVERTISE": "north:7401", "JOIN_TIMEOUT": "10"}
    given = [word for key, value in settings.items() for word in ("--env", f"SOTTOVOCE_{key}={value}")]
    confined = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "sottovoce_control"]  # noqa: S108
    command = ["run", "--name", name, *confined, *volumes, *given, *each.options, name_of("learner")]
    said = stack.engine(*command, check=False, errors=True, seconds=600.0)
    state = stack.engine.inspect(name)["State"]
    stack.engine("rm", "--force", name)
    assert state["ExitCode"] == each.code and re.search(each.says, said), (state, said[-1_000:])
    assert each.code != 137 or state["OOMKilled"], state


def wrong_identities(stack: Stack) -> None:
    """North's, each in a volume of its own: of another authority of the same domain, without its hosts, and not valid yet."""
    with tempfile.TemporaryDirectory() as folder:
        _issue(stack, Authority.init(Path(folder, "authority"), "demo.example"), "other")
    own = Authority(_place(stack, "authority"))
    _issue(stack, own, "unnamed", hosts=False)
    _issue(stack, own, "early", begins=timedelta(hours=1))


def _issue(
    stack: Stack, authority: Authority, name: str, *, hosts: bool = True, begins: timedelta = timedelta()
) -> None:
    """An identity of north, as `sottovoce pki` issues it, but for its hosts and its beginning."""
    folder = _place(stack, f"identity-{name}")
    authority.issue("learner/north", folder)
    was = read_certificate(folder)
    key = serialization.load_pem_private_key((authority.folder / AUTHORITY_KEY).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    made = x509.CertificateBuilder().subject_name(was.subject).issuer_name(was.issuer).public_key(was.public_key())
    made = made.serial_number(was.serial_number).not_valid_after(was.not_valid_after_utc)
    made = made.not_valid_before(was.not_valid_before_utc + begins)
    for each in was.extensions:
        value = each.value
        if isinstance(value, x509.SubjectAlternativeName) and not hosts:
            value = x509.SubjectAlternativeName([x for x in value if isinstance(x, x509.UniformResourceIdentifier)])
        made = made.add_extension(value, each.critical)
    certificate = made.sign(key, hashes.SHA256())
    (folder / CERTIFICATE_FILE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for path in (folder, *folder.iterdir()):
        os.chown(path, USER, USER)


def _place(stack: Stack, volume: str) -> Path:
    """Where the engine keeps a volume, which is made where there is none."""
    stack.engine("volume", "create", f"sottovoce_{volume}")
    return Path(stack.engine.inspect(f"sottovoce_{volume}")["Mountpoint"])
