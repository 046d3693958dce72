"""Identities of authorities that are not ours: each works at both ends, or is refused in one line that says what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from sottovoce_client import doctor
from sottovoce_client.runs import coordinator_commands
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_core.errors import FailedPrecondition
from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, REVOCATION_FILE, parse_certificates
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import explain_handshake_failure
from sottovoce_rpc.principals import Role
from tests.examples import made_up, small_spec
from tests.services.authorities import CLIENT, SERVER, OtherAuthority, Request, Signer, by_openssl, password, pem
from tests.services.identities import raw_channel
from tests.services.network import network
from tests.services.test_access import host
from tests.services.test_identity import checked, shown

pytestmark = pytest.mark.each

SERVED, CALLS = "coordinator/main", "operator/alice"


@asynccontextmanager
async def served(credentials: Credentials) -> AsyncIterator[str]:
    """A coordinator that shows an identity."""
    coordinator = Coordinator(CoordinatorConfig(credentials=credentials))
    try:
        yield await coordinator.start()
    finally:
        await coordinator.stop()


async def found_at(address: str, credentials: Credentials) -> dict[str, str]:
    """What the doctor finds that is not well."""
    found = await doctor.run_checks(doctor.CheckTargets(credentials, [(Role.COORDINATOR, address)]))
    return {each.subject: each.text for each in found if each.state != "ok" and each.subject != "revoked"}


# ---- what works ----------------------------------------------------------------------------------------------


def rotating(folder: Path, *, newest: bool) -> OtherAuthority:
    """In the middle of a rotation: two roots of one name are believed, and one of them issues."""
    old, new = Signer.of("An authority"), Signer.of("An authority")
    return OtherAuthority(folder, root=new if newest else old, believed=[old.certificate, new.certificate])


def keyed(key: str, form: str, folder: Path) -> OtherAuthority:
    return OtherAuthority(folder, request=Request(key, form))


WORKING: dict[str, Callable[[Path], OtherAuthority]] = {
    **{
        f"{key}, {form}": partial(keyed, key, form)
        for key in ("P-256", "P-384", "RSA-2048", "RSA-3072")
        for form in ("PKCS#8", "PKCS#1 or SEC1")
    },
    "one between": lambda folder: OtherAuthority(folder, 1),
    "two between": lambda folder: OtherAuthority(folder, 2),
    "an authority with Ed25519": lambda folder: OtherAuthority(folder, root=Signer.of("An authority", key="Ed25519")),
    "an authority with RSA": lambda folder: OtherAuthority(folder, 1, root=Signer.of("An authority", key="RSA-3072")),
    "for any usage": lambda folder: OtherAuthority(folder, request=Request(usages=(), signs=None)),
    "of the old root": lambda folder: rotating(folder, newest=False),
    "of the new root": lambda folder: rotating(folder, newest=True),
}


@pytest.mark.parametrize("kind", WORKING)
async def test_an_identity_works_at_both_ends(tmp_path: Path, kind: str) -> None:
    ids = WORKING[kind](tmp_path)
    async with served(ids.of(SERVED)) as at:
        await coordinator_commands.list_runs(at, credentials=ids.of(CALLS))
        assert await found_at(at, ids.of(CALLS)) == {}


OPENSSL = {
    "PKCS#1": ["genrsa", "-traditional", "2048"],
    "PKCS#8": ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072"],
    "SEC1, after its parameters": ["ecparam", "-name", "prime256v1", "-genkey"],
    "SEC1": ["ecparam", "-name", "secp384r1", "-genkey", "-noout"],
}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
@pytest.mark.parametrize("kind", OPENSSL)
async def test_an_identity_of_the_command_line_works_at_both_ends(tmp_path: Path, kind: str) -> None:
    own, calls = (Credentials(by_openssl(tmp_path, whom, OPENSSL[kind])) for whom in (SERVED, CALLS))
    async with served(own) as at:
        await coordinator_commands.list_runs(at, credentials=calls)
        assert await found_at(at, calls) == {}


def windows(raw: bytes) -> bytes:
    return raw.replace(b"\n", b"\r\n")


async def test_files_may_be_written_in_other_ways(tmp_path: Path) -> None:
    """Lines that end as on Windows; a chain with its root."""
    ids = OtherAuthority(tmp_path, 1)
    for whom in (SERVED, CALLS):
        folder = ids.at(whom)
        (folder / CERTIFICATE_FILE).write_bytes((folder / CERTIFICATE_FILE).read_bytes() + pem(ids.root.certificate))
        for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE):
            (folder / name).write_bytes(windows((folder / name).read_bytes()))
    async with served(ids.of(SERVED)) as at:
        await coordinator_commands.list_runs(at, credentials=ids.of(CALLS))


async def test_who_only_calls_needs_no_hosts_and_is_no_server(tmp_path: Path) -> None:
    ids = OtherAuthority(tmp_path)
    own = ids.of(SERVED)
    ids.request = Request(hosts=(), usages=(CLIENT,))
    async with served(own) as at:
        await coordinator_commands.list_runs(at, credentials=ids.of(CALLS))


async def test_a_run_that_is_overheard(tmp_path: Path) -> None:
    """Learners, coordinator, relay, feeders and operator, with keys of RSA and two certificates between."""
    names = ["ann", "ben"]
    spec = small_spec(4, names, capture="relay")
    ids = OtherAuthority(tmp_path / "ids", 2, Request("RSA-2048", "PKCS#1 or SEC1"))
    async with network(tmp_path, names, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished", outcome.detail


# ---- what is refused -----------------------------------------------------------------------------------------


def turned(folder: Path) -> None:
    """Those between come first."""
    certificates = parse_certificates((folder / CERTIFICATE_FILE).read_bytes(), CERTIFICATE_FILE)
    (folder / CERTIFICATE_FILE).write_bytes(pem(*reversed(certificates)))


def written(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)


def in_der(name: str, folder: Path) -> None:
    raw = (folder / name).read_bytes()
    if name == KEY_FILE:
        content = load_pem_private_key(raw, None).private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    else:
        content = x509.load_pem_x509_certificate(raw).public_bytes(Encoding.DER)
    (folder / name).write_bytes(content)


def as_it_is(folder: Path) -> None:
    pass


OWN_KEY = "have another one issued"
REFUSED: dict[str, tuple[Request, Callable[[Path], None], str]] = {
    "P-521": (
        Request("P-521"),
        as_it_is,
        f"RSA of 2048 bits or more, which gRPC accepts, got ECDSA on secp521r1: {OWN_KEY}",
    ),
    "Ed25519": (Request("Ed25519"), as_it_is, f"P-256 or P-384, or RSA .* got Ed25519: {OWN_KEY}"),
    "RSA-1024": (Request("RSA-1024"), as_it_is, f"got RSA of 1024 bits: {OWN_KEY}"),
    "encrypted": (Request(encryption=password()), as_it_is, "tls.key must not be encrypted.*openssl pkey"),
    "encrypted, PKCS#1": (
        Request("RSA-2048", "PKCS#1 or SEC1", password()),
        as_it_is,
        "tls.key must not be encrypted.*openssl pkey",
    ),
    "no hosts": (
        Request(hosts=()),
        as_it_is,
        r"must hold the hosts \(DNS names\) main.coordinator.ward.example and coordinator.ward.example beside its URI",
    ),
    "one host": (
        Request(hosts=("main.coordinator.ward.example",)),
        as_it_is,
        "it lacks coordinator.ward.example: have one",
    ),
    "any host": (
        Request(hosts=("*.coordinator.ward.example", "coordinator.ward.example")),
        as_it_is,
        "it lacks main.coordinator.ward.example: have one",
    ),
    "server only": (
        Request(usages=(SERVER,)),
        as_it_is,
        "must be for client auth and server auth .* is not for client auth:",
    ),
    "client only": (Request(usages=(CLIENT,)), as_it_is, "is not for server auth: have one issued for these usages"),
    "no signatures": (Request(signs=False), as_it_is, r"must be for digital signatures \(key usage\)"),
    "chain turned": (Request(), turned, "tls.crt must begin with the certificate of tls.key"),
    "certificate in DER": (Request(), partial(in_der, CERTIFICATE_FILE), "tls.crt must hold certificates in PEM"),
    "authorities in DER": (Request(), partial(in_der, AUTHORITIES_FILE), "ca.crt must hold certificates in PEM"),
    "no authorities": (Request(), partial(written, AUTHORITIES_FILE, b""), "ca.crt must hold certificates"),
    "key in DER": (Request(), partial(in_der, KEY_FILE), "tls.key must hold a private key in PEM"),
    "open to all": (
        Request(),
        lambda at: (at / KEY_FILE).chmod(0o644),
        "chmod 600 it, or .* Kubernetes secret.* defaultMode 0440",
    ),
    "torn list": (
        Request(),
        partial(written, REVOCATION_FILE, b"-----BEGIN X509 CRL-----\nMII"),
        "crl.pem must hold revocation lists",
    ),
    "empty list": (Request(), partial(written, REVOCATION_FILE, b""), "crl.pem must hold revocation lists"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_an_identity_that_would_not_work_is_refused_with_what_to_do(tmp_path: Path, kind: str) -> None:
    request, spoil, words = REFUSED[kind]
    folder = OtherAuthority(tmp_path, 1, request).at(SERVED)
    spoil(folder)
    with pytest.raises(FailedPrecondition, match=words) as refused:
        await Coordinator(CoordinatorConfig(credentials=Credentials(folder))).start()
    assert "\n" not in str(refused.value)
    (found,) = doctor._check_identity(Credentials(folder))
    assert (found.state, found.text) == ("error", str(refused.value))


# ---- what others are told ------------------------------------------------------------------------------------


def lacking_between(folder: Path) -> None:
    (own, *_) = parse_certificates((folder / CERTIFICATE_FILE).read_bytes(), CERTIFICATE_FILE)
    (folder / CERTIFICATE_FILE).write_bytes(pem(own))


TOLD: dict[str, tuple[Callable[[Path], OtherAuthority], Callable[[Path], None], str]] = {
    "no hosts": (
        lambda at: OtherAuthority(at, 0, Request(hosts=())),
        as_it_is,
        "lacks the hosts that follow from its name",
    ),
    "client only": (lambda at: OtherAuthority(at, 0, Request(usages=(CLIENT,))), as_it_is, "is not for a server"),
    "nothing between": (
        lambda at: OtherAuthority(at, 1),
        lacking_between,
        "comes without those between it and the authority",
    ),
}


@pytest.mark.parametrize("kind", TOLD)
async def test_who_calls_is_told_what_the_other_end_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A server that is not ours, and does not look at what it shows."""
    monkeypatch.setattr(doctor, "_REQUEST_TIMEOUT_S", 1.0)
    make, spoil, words = TOLD[kind]
    ids = make(tmp_path)
    folder = ids.at(SERVED)
    spoil(folder)
    ids.request = Request()
    server = grpc.aio.server()
    pair = ((folder / KEY_FILE).read_bytes(), (folder / CERTIFICATE_FILE).read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    try:
        found = await found_at(f"127.0.0.1:{port}", ids.of(CALLS))
    finally:
        await server.stop(None)
    assert words in found[f"coordinator 127.0.0.1:{port}"]


def test_a_root_of_the_same_name_is_told_from_none() -> None:
    """Where no key identifiers say which is which, newer versions of gRPC try the first one alone."""
    said = "UNKNOWN: ipv4:127.0.0.1:7400: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1a000064:"
    said += "ECDSA routines:OPENSSL_internal:BAD_SIGNATURE: certificate signature failure: OK"
    assert "of another authority than the one of that name" in explain_handshake_failure(said)


async def test_who_lacks_what_stands_between_is_told_by_the_doctor(tmp_path: Path) -> None:
    ids = OtherAuthority(tmp_path, 2)
    lacking_between(ids.at(CALLS))
    found = {each.subject: (each.state, each.text) for each in doctor._check_identity(ids.of(CALLS))}
    assert found["chain"][0] == "warning" and "add the intermediate certificates" in found["chain"][1]


# ---- what was revoked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PEM", "DER"])
async def test_whoever_a_list_of_an_intermediate_names_is_refused(tmp_path: Path, form: str) -> None:
    """As step-ca writes it. In PEM the root's list stands before it."""
    ids = OtherAuthority(tmp_path, 1)
    own, (gone, *_) = (
        ids.at(SERVED),
        parse_certificates((ids.at("operator/bob") / CERTIFICATE_FILE).read_bytes(), CERTIFICATE_FILE),
    )
    listed = ids.issuer.revoking(gone)
    content = pem(ids.root.revoking(), listed) if form == "PEM" else listed.public_bytes(Encoding.DER)
    (own / REVOCATION_FILE).write_bytes(content)
    async with served(Credentials(own)) as at:
        for whom, code in ((CALLS, grpc.StatusCode.OK), ("operator/bob", grpc.StatusCode.PERMISSION_DENIED)):
            assert await checked(raw_channel(ids.at(whom), ids.at(CALLS), at, host("coordinator"))) is code


async def test_whoever_shows_a_certificate_between_that_was_revoked_is_refused(tmp_path: Path) -> None:
    ids = OtherAuthority(tmp_path, 2)
    own = ids.at(SERVED)
    async with served(Credentials(own)) as at:
        called = raw_channel(ids.at(CALLS), ids.at(CALLS), at, host("coordinator"))
        assert await checked(called) is grpc.StatusCode.OK
        (own / REVOCATION_FILE).write_bytes(pem(ids.chain[1].revoking(ids.chain[0].certificate)))
        called = raw_channel(ids.at(CALLS), ids.at(CALLS), at, host("coordinator"))
        assert await checked(called) is grpc.StatusCode.PERMISSION_DENIED


# ---- what changes --------------------------------------------------------------------------------------------


def mount(at: Path, version: Path) -> None:
    """As Kubernetes mounts a secret: files are links into `..data`, a link that is swapped when the secret changes."""
    at.mkdir(exist_ok=True)
    (at / "..new").symlink_to(version, target_is_directory=True)
    os.replace(at / "..new", at / "..data")
    for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE):
        if not (at / name).is_symlink():
            (at / name).symlink_to(Path("..data") / name)


async def test_a_mounted_secret_that_is_swapped_is_taken_up(tmp_path: Path) -> None:
    ids = OtherAuthority(tmp_path / "ids", 1)
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        ids.write(SERVED, folder)
    os.utime(new / KEY_FILE, ns=((old / KEY_FILE).stat().st_mtime_ns,) * 2)
    mount(tmp_path / "mounted", old)
    async with served(Credentials(tmp_path / "mounted")) as at:
        before = await shown(at)
        mount(tmp_path / "mounted", new)
        after = await shown(at)
        await coordinator_commands.list_runs(at, credentials=ids.of(CALLS))
    files = [parse_certificates((folder / CERTIFICATE_FILE).read_bytes(), CERTIFICATE_FILE)[0] for folder in (old, new)]
    assert [x509.load_pem_x509_certificate(each.encode()) for each in (before, after)] == files


async def test_a_root_is_rotated_while_a_service_runs(tmp_path: Path) -> None:
    """First both are believed, then the new one issues, then the old one is believed no longer."""
    old, new = (Signer.of("An authority") for _ in range(2))
    both = [old.certificate, new.certificate]
    before = OtherAuthority(tmp_path / "old", root=old)
    after = OtherAuthority(tmp_path / "new", root=new, believed=both)
    own = before.at(SERVED)
    async with served(Credentials(own)) as at:
        assert await checked(raw_channel(after.at(CALLS), after.at(CALLS), at, host("coordinator"))) is (
            grpc.StatusCode.UNAVAILABLE
        )
        (own / AUTHORITIES_FILE).write_bytes(pem(*both))
        await coordinator_commands.list_runs(at, credentials=after.of(CALLS))
        for name in (KEY_FILE, CERTIFICATE_FILE):
            shutil.copy(after.at(SERVED) / name, own / name)
        await coordinator_commands.list_runs(at, credentials=after.of(CALLS))
        (own / AUTHORITIES_FILE).write_bytes(pem(new.certificate))
        believing = raw_channel(before.at(CALLS), after.at(CALLS), at, host("coordinator"))
        assert await checked(believing) is grpc.StatusCode.UNAVAILABLE
