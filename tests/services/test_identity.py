"""Certificates that are not what they should be, at every server; and what happens when they change."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from sottovoce_client import pki
from sottovoce_client.runs import coordinator_commands
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_core.errors import FailedPrecondition, SpecError, Unavailable
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_rpc import access, credentials
from sottovoce_rpc.addresses import is_same_user
from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, REVOCATION_FILE
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Principal
from sottovoce_rpc.server import open_channel
from tests.services.identities import Elsewhen, Identities, raw_channel
from tests.services.network import PATIENCE_S, network
from tests.services.test_access import address, host

pytestmark = pytest.mark.each

HEALTH = "/grpc.health.v1.Health/Check"
HOUSES = ("coordinator", "eavesdropper", "learner")


async def checked(to: grpc.aio.Channel) -> grpc.StatusCode:
    """With which a health check is answered."""
    async with to:
        try:
            call: Any = to.unary_unary(HEALTH)
            await call(b"", timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def elsewhen(monkeypatch: pytest.MonkeyPatch, ids: Identities, days: float) -> Path:
    """An identity that was issued so many days from now, for one day."""
    folder = ids.folder / "elsewhen"
    with monkeypatch.context() as patched:
        patched.setattr(Elsewhen, "off", datetime.timedelta(days=days))
        patched.setattr(pki, "datetime", Elsewhen)
        ids.authority.issue("operator/alice", folder, days=1)
    return folder


def of_others(ids: Identities) -> Path:
    """Of another authority that calls itself the same."""
    return Identities(ids.folder / "others").at("operator/alice")


def of_nobody(ids: Identities, uris: list[str]) -> Path:
    """Of this authority, for a certificate that names whatever stands in its URIs."""
    names = [x509.DNSName("nobody.example"), *map(x509.UniformResourceIdentifier, uris)]
    folder = ids.folder / "nobody"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pki, "_build_alternative_names", lambda principal, hosts: x509.SubjectAlternativeName(names))
        ids.authority.issue("operator/alice", folder)
    return folder


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (of_others, grpc.StatusCode.UNAVAILABLE),
        (lambda ids: None, grpc.StatusCode.UNAVAILABLE),
        (lambda ids: of_nobody(ids, []), grpc.StatusCode.PERMISSION_DENIED),
        (lambda ids: of_nobody(ids, ["spiffe://other.example/operator/alice"]), grpc.StatusCode.PERMISSION_DENIED),
        (lambda ids: of_nobody(ids, ["spiffe://ward.example/king/alice"]), grpc.StatusCode.PERMISSION_DENIED),
        (
            lambda ids: of_nobody(ids, [f"spiffe://ward.example/operator/{name}" for name in ("alice", "bob")]),
            grpc.StatusCode.PERMISSION_DENIED,
        ),
        (lambda ids: ids.at("operator/alice"), grpc.StatusCode.OK),
    ],
    ids=["another authority", "none", "names nobody", "another domain", "no role", "two names", "right"],
)
async def test_who_shows_another_certificate_is_refused_by_every_server(
    tmp_path: Path, make: Callable[[Identities], Path | None], code: grpc.StatusCode
) -> None:
    ids = Identities(tmp_path / "ids")
    folder = make(ids)
    async with network(tmp_path, ["ann"], identities=ids) as up:
        for house in HOUSES:
            to = raw_channel(folder, ids.at("operator/alice"), address(up, house), host(house))
            assert await checked(to) is code, house


@pytest.mark.parametrize("days", [-3.0, 3.0], ids=["has ended", "has not begun"])
async def test_a_certificate_out_of_its_time_is_refused_by_every_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    ids = Identities(tmp_path / "ids")
    folder = elsewhen(monkeypatch, ids, days)
    async with network(tmp_path, ["ann"], identities=ids) as up:
        for house in HOUSES:
            to = raw_channel(folder, ids.at("operator/alice"), address(up, house), host(house))
            assert await checked(to) is grpc.StatusCode.UNAVAILABLE, house


async def test_who_speaks_in_the_clear_is_refused_by_every_server(tmp_path: Path) -> None:
    async with network(tmp_path, ["ann"], identities=Identities(tmp_path / "ids")) as up:
        for house in HOUSES:
            assert await checked(grpc.aio.insecure_channel(address(up, house))) is grpc.StatusCode.UNAVAILABLE, house


async def test_a_client_finds_out_that_somebody_else_is_there(tmp_path: Path) -> None:
    """A learner's certificate is no coordinator's, and ann's none of ben's; nor is a service in the clear any of these."""
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, ["ann"], identities=ids) as up:
        with pytest.raises(Unavailable, match="another service is there"):
            await coordinator_commands.list_runs(up.addresses["ann"], credentials=up.operator)
        right = raw_channel(
            ids.at("operator/alice"), ids.at("operator/alice"), up.addresses["ann"], "ann.learner.ward.example"
        )
        wrong = raw_channel(
            ids.at("operator/alice"), ids.at("operator/alice"), up.addresses["ann"], "ben.learner.ward.example"
        )
        assert await checked(right) is grpc.StatusCode.OK
        assert await checked(wrong) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Unavailable, match="encrypted"):
            await coordinator_commands.list_runs(up.coordinator)
    async with network(tmp_path / "clear", []) as up:
        with pytest.raises(Unavailable, match="in the clear"):
            await coordinator_commands.list_runs(up.coordinator, credentials=ids.of("operator/alice"))


async def test_what_is_revoked_is_refused_at_once_and_streams_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ben is revoked while he is in a run: his stream to the coordinator ends, and he cannot come back."""
    monkeypatch.setattr(access, "_RECHECK_INTERVAL_S", 0.05)
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, ["ann", "ben"], identities=ids) as up:
        await up.until_here("ben")
        ids.authority.revoke("learner/ben")
        given, skipped = ids.authority.distribute_revocations(ids.folder)
        assert (ids.at("coordinator/main") in given, skipped) == (True, {})
        await up.until_gone("ben")
        to = raw_channel(ids.at("learner/ben"), ids.at("learner/ben"), up.coordinator, host("coordinator"))
        assert await checked(to) is grpc.StatusCode.PERMISSION_DENIED
        assert (
            await checked(
                raw_channel(ids.at("learner/ann"), ids.at("learner/ann"), up.coordinator, host("coordinator"))
            )
            is grpc.StatusCode.OK
        )


async def test_a_connection_outlives_its_certificate_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ben's is renewed, and then the one that he has joined with ends."""
    monkeypatch.setattr(access, "_RECHECK_INTERVAL_S", 0.05)
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, ["ben"], identities=ids) as up:
        await up.until_here("ben")
        ids.authority.renew(ids.at("learner/ben"), days=200)
        monkeypatch.setattr(Elsewhen, "off", datetime.timedelta(days=100))
        monkeypatch.setattr(credentials, "datetime", Elsewhen)
        await up.until_gone("ben")
        await up.until_here("ben")


async def test_renewed_files_are_taken_up_while_a_service_runs(tmp_path: Path) -> None:
    """And a half-written renewal changes nothing."""
    ids = Identities(tmp_path / "ids")
    own = ids.at("coordinator/main")
    async with network(tmp_path, [], identities=ids) as up:
        before = await shown(up.coordinator)
        ids.authority.renew(own)
        renewed = await shown(up.coordinator)
        assert renewed != before
        (own / KEY_FILE).write_bytes(b"half a k")
        assert await shown(up.coordinator) == renewed
        await coordinator_commands.list_runs(up.coordinator, credentials=up.operator)


async def shown(at: str) -> str:
    """The certificate that a server shows."""
    import ssl

    name, port = at.rsplit(":", 1)
    return await asyncio.to_thread(_served, name, int(port), ssl)


def _served(name: str, port: int, ssl: Any) -> str:
    import socket

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((name, port), PATIENCE_S) as raw, context.wrap_socket(raw) as made:
        return str(ssl.DER_cert_to_PEM_cert(made.getpeercert(binary_form=True)))


# ---- without an identity -------------------------------------------------------------------------------------


async def test_beyond_this_machine_there_is_no_channel_in_the_clear(tmp_path: Path) -> None:
    for service in (
        Coordinator(CoordinatorConfig("0.0.0.0:0")),
        Learner(LearnerConfig("ann", "127.0.0.1:1", "0.0.0.0:0", "here:1", state_folder=tmp_path)),
    ):
        with pytest.raises(SpecError, match=r"--identity FOLDER.*--insecure"):
            await service.start()
    with pytest.raises(SpecError, match=r"--identity FOLDER.*--insecure"):
        await coordinator_commands.list_runs("ward.example:7400")
    open_to_all = Coordinator(CoordinatorConfig("0.0.0.0:0", credentials=Credentials(insecure=True)))
    port = (await open_to_all.start()).rsplit(":", 1)[1]
    await coordinator_commands.list_runs(f"127.0.0.1:{port}")
    await open_to_all.stop()


_BY_NOBODY = """
import os, sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
os.setuid(65_534)
try:
    channel.unary_unary("/sottovoce_wire.v1.Coordinator/ListRuns")(b"", timeout=float(sys.argv[2]))
    print("answered")
except grpc.RpcError as error:
    print(f"{error.code().name}: {error.details()}")
"""
"""Asks a coordinator as another user of this machine."""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a while")
async def test_another_user_of_this_machine_is_not_answered() -> None:
    coordinator = Coordinator(CoordinatorConfig())
    at = await coordinator.start()
    try:
        command = [sys.executable, "-c", _BY_NOBODY, at, str(PATIENCE_S)]
        asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await asked.communicate()
        await coordinator_commands.list_runs(at)
    finally:
        await coordinator.stop()
    assert said.decode().strip() == "PERMISSION_DENIED: not allowed: this service does not trust the caller"


def test_whose_a_connection_is_is_read_off_the_kernels_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

    def line(local: str, state: str, user: int) -> str:
        queues = "00000000:00000000 00:00000000 00000000"
        return f"   0: {local} 0100007F:1CE8 {state} {queues} {user:5d}        0 1234 1 0 20 4 30 10 -1\n"

    four, six = tmp_path / "tcp", tmp_path / "tcp6"
    mine, other = os.getuid(), os.getuid() + 17
    four.write_text(
        head + line("0100007F:1000", "01", mine) + line("0100007F:1001", "01", other) + line("0100007F:1002", "06", 0)
    )
    six.write_text(
        head
        + line("0000000000000000FFFF00000100007F:1003", "01", mine)
        + line("00000000000000000000000001000000:1004", "01", mine)
        + line("0100007F:1005", "01", mine)
        + line("0100007F:1005", "01", other)
    )
    monkeypatch.setattr("sottovoce_rpc.addresses._TABLES", (four, six))
    found = {port: is_same_user(f"ipv4:127.0.0.1:{port}") for port in range(0x1000, 0x1007)}
    assert [port for port, own in found.items() if own] == [0x1000, 0x1003]
    assert is_same_user(f"ipv6:%5B::1%5D:{0x1004}")
    assert not is_same_user("ipv4:127.0.0.2:4096")
    monkeypatch.setattr("sottovoce_rpc.addresses._TABLES", (tmp_path / "none",))
    assert is_same_user("ipv4:127.0.0.1:4097")  # where nobody can tell, everybody is let in


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_says_of_one_connection_whose_it_is(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for the very connection, it lists none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    monkeypatch.setattr("sottovoce_rpc.addresses._list_users", lambda host, port: set())
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind((host, 0))
        server.listen()
        client.connect((host, server.getsockname()[1]))
        accepted, _ = server.accept()
        with accepted:
            at = f"[{host}]:{server.getsockname()[1]}".replace("[127.0.0.1]", "127.0.0.1")
            port = client.getsockname()[1]
            peer = f"ipv6:%5B::1%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
            if not is_same_user(peer, [at]):
                pytest.skip("this kernel, or sandbox, answers no such question")
            assert is_same_user(peer, ["127.0.0.1:1", at, "localhost:2", "ward.example:3"])
            assert not is_same_user(peer, [])  # the table, which is empty here
            assert not is_same_user(peer, ["127.0.0.1:1"])  # no server of ours has it
            monkeypatch.setattr("os.getuid", lambda: 4_321)
            assert is_same_user(peer, [at]) == (client.fileno() >= 0 and os.geteuid() == 0)  # root may always
            client.close()
            assert not is_same_user(peer, [at])  # nobody's any more


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a while")
def test_the_kernel_names_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is asked for the connection, or lists all."""
    connect = "import os, socket, sys\nos.setuid(65_534)\nto = socket.socket()\n"
    connect += "to.connect(('127.0.0.1', int(sys.argv[1])))\nto.recv(1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        at = f"127.0.0.1:{server.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", connect, at.rpartition(":")[2]]) as process:
            accepted, other = server.accept()
            with accepted:
                peer = f"ipv4:127.0.0.1:{other[1]}"
                assert not is_same_user(peer) and not is_same_user(peer, [at])
                monkeypatch.setattr("os.getuid", lambda: 65_534)
                assert is_same_user(peer) and is_same_user(peer, [at])
            process.wait(PATIENCE_S)


# ---- files ---------------------------------------------------------------------------------------------------


def spoilt(folder: Path, how: str, ids: Identities) -> None:
    if how == "key of another":
        (folder / KEY_FILE).write_bytes((ids.at("operator/bob") / KEY_FILE).read_bytes())
    elif how == "key for all":
        (folder / KEY_FILE).chmod(0o644)
    elif how == "no key":
        (folder / KEY_FILE).unlink()
    elif how == "no authorities":
        (folder / AUTHORITIES_FILE).unlink()
    elif how == "garbage":
        (folder / CERTIFICATE_FILE).write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    elif how == "too large":
        (folder / CERTIFICATE_FILE).write_bytes(bytes(2**21))
    else:
        others = Identities(ids.folder / "others")
        (folder / REVOCATION_FILE).write_bytes((others.authority.folder / REVOCATION_FILE).read_bytes())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("key of another", "tls.key must be the key of tls.crt"),
        ("key for all", "chmod 600"),
        ("no key", "tls.key: No such file"),
        ("no authorities", "ca.crt: No such file"),
        ("garbage", "cannot be used"),
        ("too large", "at most 1048576 bytes"),
        ("list of others", "crl.pem must be signed by an authority of ca.crt"),
    ],
)
async def test_an_identity_that_cannot_be_used_is_said_at_the_start(tmp_path: Path, how: str, words: str) -> None:
    ids = Identities(tmp_path / "ids")
    folder = ids.at("coordinator/main")
    spoilt(folder, how, ids)
    with pytest.raises(FailedPrecondition, match=words):
        await Coordinator(CoordinatorConfig(credentials=Credentials(folder))).start()


async def test_a_service_has_an_identity_of_its_own_kind(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    with pytest.raises(
        FailedPrecondition,
        match=r"must be of coordinator/NAME, got learner/ann: `sottovoce pki issue coordinator/NAME`",
    ):
        await Coordinator(CoordinatorConfig(credentials=ids.of("learner/ann"))).start()
    config = LearnerConfig("ben", "127.0.0.1:1", state_folder=tmp_path / "state", credentials=ids.of("learner/ann"))
    with pytest.raises(FailedPrecondition, match=r"must be of learner/ben, got learner/ann"):
        await Learner(config).start()


@pytest.mark.parametrize(
    "name", ["north", "North", "Krankenhaus Süd", "a--b", "x" * 60, "h--00", "a.b", "-north"[1:], "n_1"]
)
def test_a_name_is_one_host_and_one_uri(name: str) -> None:
    own = Principal.parse("ward.example", f"learner/{name}")
    assert Principal.from_uri(own.uri) == own
    assert all(0 < len(label) <= 63 for label in own.host.split("."))
    others = {
        Principal.parse("ward.example", f"learner/{other}").host
        for other in ("north", "south", "h--00")
        if other != name
    }
    assert own.host not in others
    assert own.host == own.host.lower()


def test_a_channel_with_an_identity_says_whom_it_is_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="requires the role of the service"):
        open_channel("127.0.0.1:1", credentials=Identities(tmp_path / "ids").of("operator/alice"))


def test_an_identity_and_insecure_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="exclude each other"):
        Credentials(tmp_path, insecure=True)
