"""An authority of one's own, by the command, as a user has it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from sottovoce.errors import NotReady, SpecError
from sottovoce_client.cli import app
from sottovoce_client.pki import AUTHORITY_KEY, Authority, certificate_of
from sottovoce_rpc.certificates import AUTHORITIES, CERTIFICATE, KEY, REVOKED
from sottovoce_rpc.credentials import Credentials
from tests.services.identities import Elsewhen


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
    assert own.expires is not None
    assert timedelta(days=89) < own.expires - datetime.now(UTC) <= timedelta(days=90)
    assert str(Credentials(here / "identities" / "learner-Krankenhaus Süd").principal) == "learner/Krankenhaus Süd"
    assert {mode(here / "sottovoce-authority" / AUTHORITY_KEY), mode(here / "identities" / "learner-north" / KEY)} == {
        0o600
    }
    assert {mode(here / "sottovoce-authority"), mode(here / "identities" / "learner-north")} == {0o700}
    assert "learner/north" in said("show")
    assert "learner/north" in said("show", "identities/learner-north")
    assert "coordinator/main" not in said("show", "identities/learner-north")


def test_a_renewed_identity_is_the_same_principal_with_another_key(here: Path) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "--host", "north.local", "--host", "10.0.0.7")
    folder = here / "identities" / "learner-north"
    before, key = certificate_of(folder), (folder / KEY).read_bytes()
    said("renew", "identities/learner-north", "--days", "7")
    after = certificate_of(folder)

    def names(certificate: x509.Certificate) -> list[str]:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return sorted(str(each.value) for each in found)

    assert names(before) == names(after)
    assert {"10.0.0.7", "north.local", "learner.ward.example", "north.learner.ward.example"} < set(names(after))
    assert after.serial_number != before.serial_number
    assert (folder / KEY).read_bytes() != key


def test_what_is_revoked_is_listed_and_told_to_identities(here: Path) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "learner/south")
    north = certificate_of(here / "identities" / "learner-north")
    assert "2 identities" in said("revoke", "learner/north")
    listed = x509.load_pem_x509_crl((here / "identities" / "learner-south" / REVOKED).read_bytes())
    assert [each.serial_number for each in listed] == [north.serial_number]
    assert "revoked" in said("show")
    with pytest.raises(SpecError, match="has no certificate that is valid; there are those of learner/south"):
        Authority(here / "sottovoce-authority").revoke("learner/north")
    with pytest.raises(NotReady, match="was revoked: issue another one"):
        Authority(here / "sottovoce-authority").renew(here / "identities" / "learner-north")
    said("revoke", "learner/south")
    listed = x509.load_pem_x509_crl((here / "sottovoce-authority" / REVOKED).read_bytes())
    assert len({each.serial_number for each in listed}) == 2


def test_what_ends_soon_is_said_by_the_exit_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/north", "--days", "13")
    assert "ends soon" in said("show", code=1)
    assert "ends soon" in said("show", "identities/learner-north", code=1)
    said("renew", "identities/learner-north")
    assert "ends soon" not in said("show")
    monkeypatch.setattr(Elsewhen, "off", timedelta(days=100))
    monkeypatch.setattr("sottovoce_client.pki.datetime", Elsewhen)
    assert "ended" in said("show", code=1)


def test_no_identity_outlives_its_authority(here: Path) -> None:
    Authority.init(here / "short", "ward.example", days=5)
    issued = Authority(here / "short").issue("learner/north", here / "north", days=90)
    assert issued.ends - datetime.now(UTC) <= timedelta(days=5)


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
        (("issue", "learner/new", "--host", "süd.example"), "a host must be a name in plain letters or an address"),
        (("issue", "learner/south"), "there is an identity in identities/learner-south already"),
        (("init", "--domain", "ward.example"), "there is an authority in sottovoce-authority already"),
        (("init", "--domain", "Ward Example", "--authority", "b"), "a trust domain must look like ward.example"),
        (("renew", "nowhere"), "no certificate in nowhere/tls.crt"),
        (("renew", "others"), "must be of this authority"),
        (("revoke", "learner/nobody"), "has no certificate that is valid"),
        (("show", "nowhere"), "no certificate in nowhere/tls.crt"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(here: Path, command: tuple[str, ...], words: str) -> None:
    said("init", "--domain", "ward.example")
    said("issue", "learner/south")
    Authority.init(here / "b-authority", "ward.example").issue("learner/x", here / "others")
    result = CliRunner().invoke(app, ["pki", *command])
    assert isinstance(result.exception, NotReady | SpecError)
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
    with pytest.raises(NotReady, match=r"the authority in .* cannot be used"):
        Authority(here / "sottovoce-authority")


def test_another_authority_may_have_signed(here: Path) -> None:
    """Two authorities are believed at the same time while one takes the other's place."""
    old, new = (Authority.init(here / name, "ward.example") for name in ("old", "new"))
    old.issue("learner/north", here / "north")
    new.issue("coordinator/main", here / "main")
    both = (here / "old" / AUTHORITIES).read_bytes() + (here / "new" / AUTHORITIES).read_bytes()
    for folder in ("north", "main"):
        (here / folder / AUTHORITIES).write_bytes(both)
    assert str(Credentials(here / "north").principal) == "learner/north"
    own = Credentials(here / "main")
    assert own.known((here / "north" / CERTIFICATE).read_bytes()) == Credentials(here / "north").principal
