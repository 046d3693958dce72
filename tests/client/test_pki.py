"""An authority of one's own, by the command, as a user has it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.pki import AUTHORITY_KEY, REQUEST, Authority, read_certificate
from sottovoce_client.runs.local_services import issue_local_identities
from sottovoce_core.errors import AlreadyExists, FailedPrecondition, NotFound, PermissionDenied, SpecError
from sottovoce_rpc.certificates import (
    AUTHORITIES_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOCATION_FILE,
    has_chain_to_root,
    parse_certificates,
    parse_revocation_lists,
    read_principal,
    read_trust_domain,
)
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Principal
from tests.services.identities import Elsewhen

HERE = "sottovoce-authority"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*command: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pki", *command])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_from_nothing_to_an_identity(here: Path) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "coordinator/main", "learner/Krankenhaus Süd")
    own = Credentials(here / "identities" / "learner-north")
    assert (str(own.principal), own.principal and own.principal.domain) == ("learner/north", "ward.example")
    assert own.expiry is not None
    assert timedelta(days=89) < own.expiry - datetime.now(UTC) <= timedelta(days=90)
    assert str(Credentials(here / "identities" / "learner-Krankenhaus Süd").principal) == "learner/Krankenhaus Süd"
    assert {
        mode(here / "sottovoce-authority" / AUTHORITY_KEY),
        mode(here / "identities" / "learner-north" / KEY_FILE),
    } == {0o600}
    assert {mode(here / "sottovoce-authority"), mode(here / "identities" / "learner-north")} == {0o700}
    assert "learner/north" in said("show")
    assert "learner/north" in said("show", "identities/learner-north")
    assert "coordinator/main" not in said("show", "identities/learner-north")


def test_a_renewed_identity_is_the_same_principal_with_another_key(here: Path) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "--hostname", "north.local", "--hostname", "10.0.0.7")
    folder = here / "identities" / "learner-north"
    before, key = read_certificate(folder), (folder / KEY_FILE).read_bytes()
    said("issue", "identities/learner-north", "--days", "7")
    after = read_certificate(folder)

    def names(certificate: x509.Certificate) -> list[str]:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return sorted(str(each.value) for each in found)

    assert names(before) == names(after)
    assert {"10.0.0.7", "north.local", "learner.ward.example", "north.learner.ward.example"} < set(names(after))
    assert after.serial_number != before.serial_number
    assert (folder / KEY_FILE).read_bytes() != key


def test_what_is_revoked_is_listed_and_told_to_identities(here: Path) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "learner/south")
    north = read_certificate(here / "identities" / "learner-north")
    assert "2 identities" in said("revoke", "learner/north")
    listed = x509.load_pem_x509_crl((here / "identities" / "learner-south" / REVOCATION_FILE).read_bytes())
    assert [each.serial_number for each in listed] == [north.serial_number]
    assert "revoked" in said("show")
    with pytest.raises(SpecError, match="has no valid certificate; valid certificates: learner/south"):
        Authority(here / "sottovoce-authority").revoke("learner/north")
    with pytest.raises(FailedPrecondition, match="was revoked: issue another one"):
        Authority(here / "sottovoce-authority").renew(here / "identities" / "learner-north")
    said("issue", "learner/north")
    assert read_certificate(here / "identities" / "learner-north").serial_number != north.serial_number
    said("revoke", "learner/south")
    listed = x509.load_pem_x509_crl((here / "sottovoce-authority" / REVOCATION_FILE).read_bytes())
    assert len({each.serial_number for each in listed}) == 2


def test_what_ends_soon_is_said_by_the_exit_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "--days", "13")
    assert "ends soon" in said("show", code=1)
    assert "ends soon" in said("show", "identities/learner-north", code=1)
    said("issue", "identities/learner-north")
    assert "ends soon" not in said("show")
    monkeypatch.setattr(Elsewhen, "off", timedelta(days=100))
    monkeypatch.setattr("sottovoce_client.pki.datetime", Elsewhen)
    assert "ended" in said("show", code=1)


def test_no_identity_outlives_its_authority(here: Path) -> None:
    Authority.init(here / "short", "ward.example", days=5)
    issued = Authority(here / "short").issue("learner/north", here / "north", days=90)
    assert issued.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=5)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ("issue", "learner/north", "--authority", "none"),
            "no authority in none: .*make one with `sottovoce pki init`",
        ),
        (("issue", "king/north"), "a role of learner, coordinator, eavesdropper, feeder, operator"),
        (("issue", "north"), "an identity must be ROLE/NAME"),
        (("issue", "learner/../../etc"), "an identity must be ROLE/NAME"),
        (("issue", "learner/new", "--hostname", "süd.example"), "a host must be an ASCII name or an address"),
        (("issue", "learner/new@east.example"), "must be of ward.example, the trust domain of this authority"),
        (("revoke", "learner/south@east.example"), "has no valid certificate"),
        (("issue", "learner/south"), "there is an identity in identities/learner-south already"),
        (("init", "--domain", "ward.example"), "there is an authority in sottovoce-authority already"),
        (("init", "--domain", "Ward Example", "--authority", "b"), "a trust domain must look like ward.example"),
        (("issue", "nowhere"), "an identity must be ROLE/NAME"),
        (("issue", "others"), "must be issued by this authority"),
        (("revoke", "learner/nobody"), "has no valid certificate"),
        (("show", "nowhere"), "no certificate in nowhere/tls.crt"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(here: Path, command: tuple[str, ...], words: str) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/south")
    Authority.init(here / "b-authority", "ward.example").issue("learner/x", here / "others")
    result = CliRunner().invoke(app, ["pki", *command])
    assert isinstance(result.exception, FailedPrecondition | SpecError | NotFound | AlreadyExists)
    with pytest.raises(type(result.exception), match=words):
        raise result.exception
    assert "\n" not in str(result.exception)


def test_what_died_half_way_is_begun_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any file: of an authority, of an identity, and of one that is renewed."""
    real = os.replace

    def dying(most: int) -> Callable[[], None]:
        left = most

        def replace(source: Path, target: Path) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt  # nothing after it happens
            left -= 1
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        return lambda: monkeypatch.setattr(os, "replace", real)

    for most in range(9):
        folder, own = here / f"authority-{most}", here / f"own-{most}"
        for work in (
            lambda folder=folder: Authority.init(folder, "ward.example"),
            lambda folder=folder, own=own: Authority(folder).issue("learner/north", own),
            lambda folder=folder, own=own: Authority(folder).renew(own),
        ):
            alive = dying(most)
            with contextlib.suppress(KeyboardInterrupt):
                work()
                alive()
                continue
            alive()
            work()
        assert str(Credentials(own).principal) == "learner/north"


def test_a_damaged_authority_is_said_so(here: Path) -> None:
    said("init", "--domain", "ward.example")
    (here / "sottovoce-authority" / AUTHORITY_KEY).write_text("garbage")
    with pytest.raises(FailedPrecondition, match=r"sottovoce-authority/ca\.key must hold a private key in PEM"):
        Authority(here / "sottovoce-authority")


def test_another_authority_may_have_signed(here: Path) -> None:
    """Two authorities are believed at the same time while one takes the other's place."""
    old, new = (Authority.init(here / name, "ward.example") for name in ("old", "new"))
    old.issue("learner/north", here / "north")
    new.issue("coordinator/main", here / "main")
    both = (here / "old" / AUTHORITIES_FILE).read_bytes() + (here / "new" / AUTHORITIES_FILE).read_bytes()
    for folder in ("north", "main"):
        (here / folder / AUTHORITIES_FILE).write_bytes(both)
    assert str(Credentials(here / "north").principal) == "learner/north"
    own = Credentials(here / "main")
    assert (
        own.authenticate_certificate((here / "north" / CERTIFICATE_FILE).read_bytes())
        == Credentials(here / "north").principal
    )


def believed(folder: Path) -> set[bytes]:
    return {
        each.fingerprint(hashes.SHA256()) for each in parse_certificates((folder / AUTHORITIES_FILE).read_bytes(), "")
    }


def listed(folder: Path) -> set[int]:
    return {
        each.serial_number for one in parse_revocation_lists((folder / REVOCATION_FILE).read_bytes()) for each in one
    }


@pytest.fixture
def three(here: Path) -> dict[str, Authority]:
    """Authorities of three organisations; each has the certificates and the lists of all in its own folder."""
    made = {name: Authority.init(here / f"{name}-authority", f"{name}.example") for name in ("north", "east", "south")}
    for name, own in made.items():
        own.issue(f"learner/{name}-old", here / "gone" / f"{name}-old")
        own.revoke(f"learner/{name}-old")
    for file in (AUTHORITIES_FILE, REVOCATION_FILE):
        contents = {name: (own.folder / file).read_bytes() for name, own in made.items()}
        for name, own in made.items():
            others = [content for other, content in contents.items() if other != name]
            (own.folder / file).write_bytes(b"".join([*others, contents[name]]))
    return {name: Authority(own.folder) for name, own in made.items()}


def test_what_other_authorities_wrote_stays(here: Path, three: dict[str, Authority]) -> None:
    """Every command that writes ca.crt or crl.pem leaves three authorities and their three lists there."""
    place, first = ("--authority", "north-authority"), "identities/learner-north"
    said("issue", "learner/north", "operator/alice", *place)
    authorities, lists = believed(here / first), listed(here / first)
    assert (len(authorities), len(lists)) == (3, 3)
    said("issue", first, *place)
    assert (believed(here / first), listed(here / first)) == (authorities, lists)
    alice = read_certificate(here / "identities" / "operator-alice").serial_number
    said("revoke", "operator/alice", *place)
    for folder in (here / first, here / "north-authority"):
        assert (believed(folder), listed(folder)) == (authorities, {*lists, alice})
    assert "revoked" in said("show", "identities/operator-alice")
    assert str(Credentials(here / first).principal) == "learner/north"


def test_authorities_that_only_the_identity_knows_stay(here: Path, three: dict[str, Authority]) -> None:
    """An authority that has its own certificate alone takes nothing away; a newer foreign list is kept."""
    north, own = here / "north-authority", here / "identities" / "learner-north"
    said("issue", "learner/north", "--authority", "north-authority")
    authorities = believed(own)
    (north / AUTHORITIES_FILE).write_bytes(x509_pem(north, "north.example"))
    three["east"].issue("learner/late", here / "late")
    three["east"].revoke("learner/late")
    (own / REVOCATION_FILE).write_bytes((here / "east-authority" / REVOCATION_FILE).read_bytes())
    lists = listed(own)
    said("issue", str(own), "--authority", "north-authority")
    assert (believed(own), listed(own)) == (authorities, lists)


def x509_pem(folder: Path, domain: str) -> bytes:
    found = parse_certificates((folder / AUTHORITIES_FILE).read_bytes(), "")
    return next(each.public_bytes(serialization.Encoding.PEM) for each in found if read_trust_domain(each) == domain)


def test_a_new_root_takes_the_place_of_the_old_one(here: Path) -> None:
    """As docs/operate/identities.md has it: both in every ca.crt, then certificates of the new one, which revokes both."""
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "learner/south", "operator/alice")
    folders = [here / "identities" / name for name in ("learner-north", "learner-south", "operator-alice")]
    said("revoke", "learner/south")
    (here / "identities" / "other").mkdir()
    (here / "identities" / "other" / AUTHORITIES_FILE).write_bytes(
        (Authority.init(here / "b", "b.example").folder / AUTHORITIES_FILE).read_bytes()
    )
    told = " ".join(said("init", "--domain", "ward.example", "--authority", "new", "--replaces", HERE, code=1).split())
    assert "3 identities in identities trust both now" in told
    assert "not copied to identities/other: its ca.crt does not hold the replaced authority" in told
    shutil.rmtree(here / "identities" / "other")
    assert [len(believed(folder)) for folder in folders] == [2, 2, 2]
    assert all((own := Credentials(folder).load_identity()) and own.is_rooted for folder in folders)
    said("issue", str(folders[0]))
    first = read_certificate(folders[0]).serial_number
    said("issue", str(folders[0]), str(folders[2]), "--authority", "new")
    root = Authority(here / "new")._certificate
    assert has_chain_to_root(read_certificate(folders[0]), (), [root]) and not has_chain_to_root(
        read_certificate(folders[1]), (), [root]
    )
    with pytest.raises(FailedPrecondition, match="was revoked"):
        Authority(here / "new").renew(folders[1])

    assert "copied to 3 identities" in said("revoke", "learner/north", "--authority", "new")
    assert {first, read_certificate(folders[0]).serial_number} < listed(folders[2])
    known = Credentials(folders[2])
    for folder in (folders[0], folders[1]):
        with pytest.raises(PermissionDenied, match="a revoked certificate"):
            known.authenticate_certificate((folder / CERTIFICATE_FILE).read_bytes())
    old = (here / "sottovoce-authority" / "issued" / f"{first:x}.crt").read_bytes()
    with pytest.raises(PermissionDenied, match="a revoked certificate"):
        known.authenticate_certificate(old)


def test_who_revokes_is_told_of_another_authority_of_the_domain(here: Path) -> None:
    """The old one does not know what the new one has issued; nor does one that was made beside it."""
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "learner/south")
    said("init", "--domain", "ward.example", "--authority", "new", "--replaces", HERE)
    new = Authority(here / "new")._certificate.serial_number
    told = " ".join(said("revoke", "learner/north", code=1).split())
    assert "certificates of another authority of ward.example are not revoked: revoke them there (CN=" in told
    assert f"{new:x}" in told
    result = CliRunner().invoke(app, ["pki", "init", "--domain", "b.example", "--authority", "b", "--replaces", "new"])
    assert isinstance(result.exception, SpecError)
    assert "must be of b.example, got one of ward.example" in str(result.exception)


def test_folders_that_do_not_get_the_list_are_named(here: Path, three: dict[str, Authority]) -> None:
    said("issue", "learner/north", "learner/south", "learner/west", "--authority", "north-authority")
    own = here / "identities"
    (own / "learner-south" / AUTHORITIES_FILE).write_bytes(x509_pem(here / "east-authority", "east.example"))
    (own / "learner-west" / REVOCATION_FILE).write_bytes(b"garbage")
    (own / "somebody").mkdir()
    told = " ".join(said("revoke", "learner/north", "--authority", "north-authority", code=1).split())
    assert "copied to 1 identities" in told
    assert "not copied to identities/learner-south: its ca.crt does not hold this authority" in told
    assert (
        "not copied to identities/learner-west: identities/learner-west/crl.pem must hold revocation lists in PEM"
        in told
    )
    assert "somebody" not in told
    assert read_certificate(own / "learner-north").serial_number in listed(own / "learner-north")


def test_one_that_cannot_be_renewed_keeps_none_from_it(here: Path) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "learner/south")
    before = read_certificate(here / "identities" / "learner-south")
    result = CliRunner().invoke(app, ["pki", "issue", "nowhere", "identities/learner-south", "neither"])
    assert isinstance(result.exception, FailedPrecondition)
    assert "nowhere" in str(result.exception)
    assert "neither" in str(result.exception)
    assert read_certificate(here / "identities" / "learner-south") != before


def test_a_list_of_an_unknown_authority_is_not_lost_in_silence(here: Path, three: dict[str, Authority]) -> None:
    said("issue", "learner/north", "--authority", "north-authority")
    own = here / "identities" / "learner-north"
    (own / AUTHORITIES_FILE).write_bytes(x509_pem(here / "north-authority", "north.example"))
    (here / "north-authority" / AUTHORITIES_FILE).write_bytes(x509_pem(here / "north-authority", "north.example"))
    before = {path: path.read_bytes() for path in own.iterdir()}
    with pytest.raises(
        FailedPrecondition, match=r"must be signed by an authority of ca.crt, got one of CN=.*add that authority to"
    ):
        Authority(here / "north-authority").renew(own)
    assert {path: path.read_bytes() for path in own.iterdir()} == before


def test_a_private_key_stays_with_its_owner(here: Path) -> None:
    """A request goes to the authority, a certificate comes back; renewed the same way."""
    said("init", "--domain", "ward.example")
    said("request", "learner/north", "--out", "hospital")
    own = here / "hospital" / "learner-north"
    key = (own / KEY_FILE).read_bytes()
    assert mode(own / KEY_FILE) == 0o600
    back = here / "identities" / "learner-north"
    for _ in range(2):
        assert "asked for" not in said("issue", "learner/north", "--csr", str(own / REQUEST))
        assert sorted(path.name for path in back.iterdir()) == [AUTHORITIES_FILE, REVOCATION_FILE, CERTIFICATE_FILE]
        for path in back.iterdir():
            (own / path.name).write_bytes(path.read_bytes())
        assert str(Credentials(own).principal) == "learner/north"
        said("request", "learner/north", "--out", "hospital")
        assert (own / KEY_FILE).read_bytes() == key
    with pytest.raises(FailedPrecondition, match="is kept elsewhere: make a new request there"):
        Authority(here / "sottovoce-authority").renew(back)
    assert "copied to 1 identities" in said("revoke", "learner/north")


def asked(folder: Path, key: PrivateKeyTypes, name: str = "learner/north", uri: str | None = None) -> Path:
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    if uri is not None:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri), x509.DNSName("evil.example")])
        builder = builder.add_extension(names, critical=False)
    path = folder / "asked.csr"
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    path.write_bytes(builder.sign(key, algorithm).public_bytes(serialization.Encoding.DER))  # type: ignore[arg-type]
    return path


def test_the_authority_names_whom_it_certifies(here: Path) -> None:
    said("init", "--domain", "ward.example")
    path = asked(here, ec.generate_private_key(ec.SECP384R1()), uri="spiffe://ward.example/operator/root")
    told = " ".join(said("issue", "learner/north", "--csr", str(path)).split())
    assert "the request names spiffe://ward.example/operator/root; the certificate is for learner/north" in told
    names = read_certificate(here / "identities" / "learner-north").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert "evil.example" not in names.value.get_values_for_type(x509.DNSName)
    assert read_principal(read_certificate(here / "identities" / "learner-north")) == Principal.parse(
        "ward.example", "learner/north"
    )


def test_requests_that_cannot_be_certified(here: Path) -> None:
    said("init", "--domain", "ward.example")
    own = Authority(here / "sottovoce-authority")
    good = asked(here, ec.generate_private_key(ec.SECP256R1())).read_bytes()
    wrong = here / "wrong.csr"
    wrong.write_bytes(good[:-4] + bytes([good[-4] ^ 1]) + good[-3:])
    with pytest.raises(FailedPrecondition, match="must be signed by the key that it requests a certificate for"):
        own.issue("learner/north", here / "out", request=wrong)
    for key, kind in (
        (ed25519.Ed25519PrivateKey.generate(), "Ed25519"),
        (ec.generate_private_key(ec.SECP521R1()), "secp521r1"),
        (rsa.generate_private_key(65537, 1024), "RSA of 1024 bits"),  # noqa: S505 - refused
    ):
        with pytest.raises(FailedPrecondition, match=f"asked.csr must be of ECDSA on .*, got .*{kind}"):
            own.issue("learner/north", here / "out", request=asked(here, key))
    wrong.write_bytes(b"-----BEGIN CERTIFICATE REQUEST-----\ngarbage")
    with pytest.raises(FailedPrecondition, match="must hold a certificate signing request"):
        own.issue("learner/north", here / "out", request=wrong)
    with pytest.raises(NotFound, match=r"no certificate signing request in .*: No such file"):
        own.issue("learner/north", here / "out", request=here / "none.csr")
    assert not (here / "out").exists()
    said("issue", "learner/north", "learner/south")
    result = CliRunner().invoke(app, ["pki", "issue", "learner/a", "learner/b", "--csr", "asked.csr"])
    assert isinstance(result.exception, SpecError)
    path = asked(here, ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(FailedPrecondition, match=r"tls.key must be the key of the request"):
        own.issue("learner/north", here / "identities" / "learner-north", request=path)
    with pytest.raises(FailedPrecondition, match="must be of learner/west, got learner/north"):
        own.issue("learner/west", here / "identities" / "learner-north", request=path)


def test_a_run_on_this_machine_is_of_one_domain(here: Path) -> None:
    with pytest.raises(
        SpecError,
        match=r"need learners of one trust domain, got 'north@north.example': omit --tls, or remove the domains",
    ):
        issue_local_identities(here / "ids", ("north@north.example", "east@east.example"))
    assert not (here / "ids").exists()
