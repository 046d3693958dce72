"""What the doctor finds in real services, folders and certificates, and what it says to do."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client import doctor
from sottovoce_client.cli import app
from sottovoce_client.doctor import Finding, Patient, examine, show
from sottovoce_rpc.certificates import REVOKED
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from tests.examples import made_up, small_spec
from tests.services.identities import Elsewhen, Identities
from tests.services.network import network

NAMES = ["ann", "ben"]


def of(findings: list[Finding], what: str) -> Finding:
    (found,) = (each for each in findings if each.what == what)
    return found


async def test_all_is_well(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, NAMES, identities=ids) as up:
        spec = small_spec(5, NAMES)
        await up.run(spec, made_up(spec))
        services = [
            (Role.COORDINATOR, up.coordinator),
            (Role.EAVESDROPPER, up.eavesdropper),
            (Role.LEARNER, up.addresses["ann"]),
        ]
        found = await examine(Patient(up.operator, services, [tmp_path / "journals"]))
    assert {each.what: each.text for each in found if each.state != "well"} == {}
    state = f"state {tmp_path / 'journals'}"
    assert of(found, f"{state}: ann").text == "1 runs in its ledger: nothing is lost"
    assert of(found, f"coordinator {up.coordinator}: clock").text == "as this machine's"
    assert show(found, Console(quiet=True)) == 0


async def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is off, a service that nobody hears, one in another one's place, a folder for everybody, damage, no list."""
    ids = Identities(tmp_path / "ids")
    monkeypatch.setattr(doctor, "_REACH_S", 1.0)
    async with network(tmp_path, NAMES, identities=ids) as up:
        spec = small_spec(5, NAMES)
        await up.run(spec, made_up(spec))
    async with network(tmp_path, [], identities=ids) as up:
        monkeypatch.setattr(Elsewhen, "off", timedelta(seconds=100))
        monkeypatch.setattr(doctor, "datetime", Elsewhen)
        (ids.at("operator/alice") / REVOKED).unlink()
        journals = tmp_path / "journals"
        journals.chmod(0o755)
        lines = (journals / "ann.runs").read_bytes()
        (journals / "ann.runs").write_bytes(bytes([lines[0] ^ 1]) + lines[1:])
        services = [(Role.COORDINATOR, up.coordinator), (Role.LEARNER, up.eavesdropper), (Role.LEARNER, "127.0.0.1:1")]
        found = await examine(Patient(up.operator, services, [journals, tmp_path / "nowhere"]))
    wrong = {each.what: each.text for each in found if each.state == "wrong"}
    assert "set both by NTP" in wrong[f"coordinator {up.coordinator}: clock"]
    assert "somebody else is there" in wrong[f"learner {up.eavesdropper}"]
    assert "is it running" in wrong["learner 127.0.0.1:1"]
    assert "no such folder" in wrong[f"state {tmp_path / 'nowhere'}"]
    assert "ann.runs" in wrong[f"state {journals}: ann"]
    assert len(wrong) == 5
    warned = {each.what: each.text for each in found if each.state == "warning"}
    assert warned.keys() == {"revoked", f"state {journals}"}
    assert "chmod 700" in warned[f"state {journals}"]
    assert show(found, Console(quiet=True)) == 1


async def test_who_may_not_ask_for_the_clock_is_told_the_rest(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, [], identities=ids) as up:
        found = await examine(Patient(ids.of("learner/ann"), [(Role.COORDINATOR, up.coordinator)]))
    assert of(found, f"coordinator {up.coordinator}").text == "it answers"
    assert not any(each.what.endswith("clock") for each in found)


def test_an_identity_that_ends_soon_or_cannot_be_used(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    ids.authority.issue("operator/soon", tmp_path / "soon", days=3)
    (soon,) = (each for each in doctor._identity(Credentials(tmp_path / "soon")))
    assert (soon.state, soon.text.endswith(": renew it")) == ("warning", True)
    (lost,) = (each for each in doctor._identity(Credentials(tmp_path / "nowhere")))
    assert (lost.state, "tls.key" in lost.text) == ("wrong", True)
    (open_to_all,) = doctor._identity(Credentials(insecure=True))
    assert open_to_all.state == "warning"


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["doctor", "--state", "nowhere"])
    assert result.exit_code == 1
    assert "no such folder" in " ".join(result.output.split())
