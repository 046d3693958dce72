"""What docs/operate/deploy.md promises of images and of the compose file, looked at while it runs."""

from __future__ import annotations

from tests.deploy.images import STANDINS, TARGETS, build, contents, name_of
from tests.deploy.stack import LEARNERS, RECORDS, Stack, until

SERVICES = ("coordinator", *LEARNERS)
FEEDERS = tuple(f"feeder-{name}" for name in LEARNERS)
USER = 65532
_WRITE = """
import os
try:
    open("{}/x", "w")
    said = "written"
except OSError as error:
    said = error.strerror
print(os.getuid(), said)
"""
_REACH = """
import socket
try:
    socket.create_connection(("{}", {}), 5)
    print("reached")
except OSError:
    print("not reached")
"""
_TARGETS = """
import json, urllib.request
try:
    asked = urllib.request.urlopen("http://prometheus:9090/api/v1/targets", timeout=10)
    found = json.load(asked)["data"]["activeTargets"]
    print(*sorted(each["labels"]["job"] + " " + each["health"] for each in found), sep=", ")
except OSError as error:
    print(error)
"""
_PLAIN = """
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
try:
    health_pb2_grpc.HealthStub(grpc.insecure_channel("north:7401")).Check(health_pb2.HealthCheckRequest(), timeout=10)
    print("answered")
except grpc.RpcError as error:
    print(error.code().name)
"""


def confined(stack: Stack) -> None:
    """User, root file system, capabilities and memory are as promised, and there is no shell."""
    for service in (*SERVICES, *FEEDERS):
        about = stack.container(service)
        host = about["HostConfig"]
        assert about["Config"]["User"] == f"{USER}:{USER}", (service, about["Config"]["User"])
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"], (service, host)
        assert host["SecurityOpt"] == ["no-new-privileges:true"] and host["Memory"] and host["PidsLimit"], (
            service,
            host,
        )
        writable = {each["Destination"] for each in about["Mounts"] if each["RW"]}
        assert writable <= {"/var/lib/sottovoce"}, (service, writable)
    assert [each.removeprefix("CAP_") for each in stack.container("pki")["HostConfig"]["CapAdd"]] == ["CHOWN"]
    for folder in ("", "/opt/sottovoce", "/etc/sottovoce/identity", "/demo"):
        said = stack.inside("north", _WRITE.format(folder))
        assert said == f"{USER} Read-only file system", (folder, said)
    said = stack.engine("exec", "sottovoce-north-1", "sh", check=False, errors=True)
    assert "executable file not found" in said, said


def its_own_secrets(stack: Stack) -> None:
    """Each container has one identity, its own, and the authority's key is in none but the one that issues."""
    for service in (*SERVICES, *FEEDERS):
        mounts = {each.get("Name", "") for each in stack.container(service)["Mounts"]}
        identities = {name for name in mounts if "identity-" in name}
        assert identities == {f"sottovoce_identity-{service}"} and "sottovoce_authority" not in mounts, (
            service,
            mounts,
        )


def mutual_tls(stack: Stack) -> None:
    """Nobody is answered in the clear, and nobody is told what is another one's."""
    assert stack.inside("east", _PLAIN) == "UNAVAILABLE"
    for of, said in (("feeder-east", "PERMISSION_DENIED"), ("east", "PERMISSION_DENIED"), ("feeder-north", "answered")):
        assert stack.inside(of, _STATUS.format(whom="north")) == said, of


def apart(stack: Stack) -> None:
    """Networks: a learner cannot reach the broker, nor a feeder the coordinator, nor anybody the world."""
    for of, host, port in (("north", "nats", 4222), ("feeder-north", "coordinator", 7400), ("north", "1.1.1.1", 443)):
        assert stack.inside(of, _REACH.format(host, port)) == "not reached", (of, host)
    assert stack.inside("feeder-north", _REACH.format("nats", 4222)) == "reached"


def goes_on(stack: Stack) -> None:
    """Rounds follow each other, at all learners."""
    stack.wait_rounds(3)


def each_once(stack: Stack) -> None:
    """Every record that was published is learned, and none twice: they are counted."""

    def all_learned() -> bool:
        found = stack.statuses().values()
        return all("records" in each and not int(each.get("records_waiting", 0)) for each in found)

    until(all_learned, "no record waits", lambda: str(stack.statuses()))
    learned = {name: int(each["records"]) for name, each in stack.statuses().items()}
    assert sum(learned.values()) == RECORDS, learned
    assert max(learned.values()) - min(learned.values()) <= 1, learned


def seen(stack: Stack) -> None:
    """Prometheus, by an identity of its own, is told by all who are there how they are."""
    expected = ", ".join(["coordinator up", *["learner up"] * len(LEARNERS)])
    until(
        lambda: stack.inside("coordinator", _TARGETS) == expected,
        "Prometheus sees all",
        lambda: stack.inside("coordinator", _TARGETS) + stack.logs("prometheus"),
    )


def ends(stack: Stack) -> None:
    """SIGTERM ends each service within its grace, with 0."""
    running = [name for name in (*SERVICES, *FEEDERS, "eavesdropper") if stack.state(name)[0] == "running"]
    stack("stop", *running, profile="live")
    codes = {name: stack.state(name)[2] for name in running}
    assert not any(codes.values()), codes


def recorded(stack: Stack) -> None:
    """Another profile: the eavesdropper relays a run, which is audited."""
    stack.up("record", profile="record")
    assert stack.wait_ended("record") == 0, stack.logs("record")
    stack.up("audit", profile="audit")
    code = stack.wait_ended("audit")
    said = stack.logs("audit")
    assert code == 0 and "audit.html" in said, said
    target = stack.engine.folder / "results"
    stack.engine("cp", "sottovoce-audit-1:/var/lib/sottovoce/.", str(target))
    assert (target / "audit" / "audit.html").stat().st_size > 10_000
    assert "Not recorded" not in (target / "recorded" / "report.html").read_text(encoding="utf-8")


LIVE = (confined, its_own_secrets, mutual_tls, apart, goes_on, each_once, seen, ends)


def sizes(stack: Stack) -> list[str]:
    """Of the images, in MB."""
    there = [name for name in (*map(name_of, TARGETS), *STANDINS.values()) if stack.engine("images", "--quiet", name)]
    return [f"{name}: {stack.engine.inspect(name)['Size'] / 1e6:.0f} MB" for name in there]


_STATUS = """
import asyncio
from pathlib import Path
import grpc
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

async def main():
    own = Credentials(Path("/etc/sottovoce/identity"))
    async with open_channel("{whom}:7401", Role.LEARNER, "{whom}", credentials=own) as to:
        try:
            await learner_pb2_grpc.LearnerStub(to).GetStatus(learner_pb2.GetStatusRequest(), timeout=20)
            print("answered")
        except grpc.aio.AioRpcError as error:
            print(error.code().name)

asyncio.run(main())
"""


def reproducible(stack: Stack) -> list[str]:
    """A second build from nothing: which files differ."""
    build(stack.engine, ["learner"], tag="-again", anew=True)
    first, second = (contents(stack.engine, name_of("learner") + tag) for tag in ("", "-again"))
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
