"""What the doctor finds in real services, folders and certificates, and what it says to do."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.metadata import requires
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client import doctor
from sottovoce_client.cli import app
from sottovoce_client.doctor import CheckTargets, Finding, print_findings, run_checks
from sottovoce_coordinator.metrics import CATALOGUE as COORDINATOR
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.certificates import AUTHORITIES_FILE, REVOCATION_FILE
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.metrics import MetricsEndpoint, collect_common_metrics, serve_metrics
from sottovoce_rpc.principals import Role
from tests.examples import made_up, small_spec
from tests.services.authorities import Signer
from tests.services.identities import Elsewhen, Federation, Identities
from tests.services.network import network

NAMES = ["ann", "ben"]


def of(findings: list[Finding], what: str) -> Finding:
    (found,) = (each for each in findings if each.subject == what)
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
        found = await run_checks(CheckTargets(up.operator, services, [tmp_path / "journals"]))
    assert {each.subject: each.text for each in found if each.state != "ok"} == {}
    state = f"state {tmp_path / 'journals'}"
    assert of(found, f"{state}: ann").text == "1 runs in its ledger: nothing is lost"
    assert of(found, f"coordinator {up.coordinator}: clock").text == "as this machine's"
    assert print_findings(found, Console(quiet=True)) == 0


async def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is off, a service that nobody hears, one in another one's place, a folder for everybody, damage, no list."""
    ids = Identities(tmp_path / "ids")
    monkeypatch.setattr(doctor, "_REQUEST_TIMEOUT_S", 1.0)
    async with network(tmp_path, NAMES, identities=ids) as up:
        spec = small_spec(5, NAMES)
        await up.run(spec, made_up(spec))
    async with network(tmp_path, [], identities=ids) as up:
        monkeypatch.setattr(Elsewhen, "off", timedelta(seconds=100))
        monkeypatch.setattr(doctor, "datetime", Elsewhen)
        (ids.at("operator/alice") / REVOCATION_FILE).unlink()
        journals = tmp_path / "journals"
        journals.chmod(0o755)
        lines = (journals / "ann.runs").read_bytes()
        (journals / "ann.runs").write_bytes(bytes([lines[0] ^ 1]) + lines[1:])
        services = [(Role.COORDINATOR, up.coordinator), (Role.LEARNER, up.eavesdropper), (Role.LEARNER, "127.0.0.1:1")]
        found = await run_checks(CheckTargets(up.operator, services, [journals, tmp_path / "nowhere"]))
    wrong = {each.subject: each.text for each in found if each.state == "error"}
    assert "set both by NTP" in wrong[f"coordinator {up.coordinator}: clock"]
    assert "another service is there" in wrong[f"learner {up.eavesdropper}"]
    assert "is it running" in wrong["learner 127.0.0.1:1"]
    assert "no such folder" in wrong[f"state {tmp_path / 'nowhere'}"]
    assert "ann.runs" in wrong[f"state {journals}: ann"]
    assert len(wrong) == 5
    warned = {each.subject: each.text for each in found if each.state == "warning"}
    assert warned.keys() == {"revoked", f"state {journals}"}
    assert "chmod 700" in warned[f"state {journals}"]
    assert print_findings(found, Console(quiet=True)) == 1


async def test_who_may_not_ask_for_the_clock_is_told_the_rest(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, [], identities=ids) as up:
        found = await run_checks(CheckTargets(ids.of("learner/ann"), [(Role.COORDINATOR, up.coordinator)]))
    assert of(found, f"coordinator {up.coordinator}").text == "it answers"
    assert not any(each.subject.endswith("clock") for each in found)


def test_an_identity_that_ends_soon_or_cannot_be_used(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    ids.authority.issue("operator/soon", tmp_path / "soon", days=3)
    (soon,) = (each for each in doctor._check_identity(Credentials(tmp_path / "soon")))
    assert (soon.state, soon.text.endswith(": renew it")) == ("warning", True)
    (lost,) = (each for each in doctor._check_identity(Credentials(tmp_path / "nowhere")))
    assert (lost.state, "tls.key" in lost.text) == ("error", True)
    (open_to_all,) = doctor._check_identity(Credentials(insecure=True))
    assert open_to_all.state == "warning"


def test_authorities_of_several_domains_are_told(tmp_path: Path) -> None:
    """And one that no name is believed of."""
    ids = Federation(tmp_path, ("ward.example", "east.example"))
    folder = ids.at("operator/alice")
    found = list(doctor._check_identity(Credentials(folder)))
    assert of(found, "authorities").text.startswith("1 of ward.example, 1 of east.example: each is believed")
    with (folder / AUTHORITIES_FILE).open("ab") as file:
        file.write(Signer.of("no domain").certificate.public_bytes(Encoding.PEM))
    wrong = [each for each in doctor._check_identity(Credentials(folder)) if each.subject == "authorities"]
    assert [each.state for each in wrong] == ["ok", "warning"]
    assert "1 that name no trust domain" in wrong[1].text


async def test_an_identity_that_was_revoked_is_wrong(tmp_path: Path) -> None:
    """By the list beside it; and where only that of a service has it, by what the service says."""
    ids = Identities(tmp_path / "ids")
    own, coordinator = ids.at("operator/alice"), ids.at("coordinator/main")
    ids.authority.revoke("operator/alice")
    shutil.copy(ids.authority.folder / REVOCATION_FILE, coordinator / REVOCATION_FILE)
    async with network(tmp_path, [], identities=ids) as up:
        asked = CheckTargets(up.operator, [(Role.COORDINATOR, up.coordinator)])
        unlisted = await run_checks(asked)
        shutil.copy(ids.authority.folder / REVOCATION_FILE, own / REVOCATION_FILE)
        listed = await run_checks(CheckTargets(Credentials(own)))
    assert of(unlisted, "identity").state == "ok"
    refused = of(unlisted, f"coordinator {up.coordinator}")
    assert (refused.state, "this identity was revoked, or is of another" in refused.text) == ("error", True)
    found = of(listed, "identity")
    assert (found.state, "was revoked, by crl.pem" in found.text) == ("error", True)
    assert print_findings(listed, Console(quiet=True)) == 1


# ---- metrics ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def told(credentials: Credentials, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Where a service tells metrics."""
    pytest.importorskip("prometheus_client")
    refused = Refusals()
    at = MetricsEndpoint(listen, credentials)
    async with serve_metrics(
        at, COORDINATOR, lambda: collect_common_metrics([credentials], [refused]), refused
    ) as address:
        yield address


async def test_metrics_are_asked_for_and_whose_certificate_is_shown(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with told(ids.of("learner/ann")) as address:
        found = await run_checks(CheckTargets(ids.of("operator/alice"), metrics_addresses=[address]))
        other = await run_checks(CheckTargets(ids.of("feeder/ann"), metrics_addresses=[address]))
    assert of(found, f"metrics {address}").state == "ok"
    assert "it answers: " in of(found, f"metrics {address}").text
    assert of(found, f"metrics {address}: certificate").text.startswith("learner/ann of ward.example, until ")
    assert not any(each.subject.endswith("channel") for each in found)
    assert "not for feeder/ann" in of(other, f"metrics {address}").text
    assert of(other, f"metrics {address}: certificate").state == "ok"


async def test_metrics_with_a_certificate_that_ends_soon(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    ids.authority.issue("learner/soon", tmp_path / "soon", days=3)
    async with told(Credentials(tmp_path / "soon")) as address:
        found = await run_checks(CheckTargets(ids.of("monitor/prometheus"), metrics_addresses=[address]))
    shown = of(found, f"metrics {address}: certificate")
    assert (shown.state, shown.text.endswith(": renew it")) == ("warning", True)


async def test_metrics_in_the_clear_are_warned_of_where_others_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a service without an identity, whether who asks has one or not."""
    ids = Identities(tmp_path / "ids")
    async with told(Credentials(insecure=True)) as address:
        here = await run_checks(CheckTargets(Credentials(), metrics_addresses=[address]))
        monkeypatch.setattr(doctor, "is_loopback", lambda address: False)  # as seen from another machine
        there = [
            await run_checks(CheckTargets(each, metrics_addresses=[address]))
            for each in (Credentials(), ids.of("operator/alice"))
        ]
    assert [of(here, f"metrics {address}").state, len(there)] == ["ok", 2]
    assert not any(each.subject.endswith("channel") for each in here)
    for found in there:
        channel = of(found, f"metrics {address}: channel")
        assert (channel.state, channel.text.startswith("in the clear")) == ("warning", True)


async def test_metrics_that_are_not_told_are_said_with_why(tmp_path: Path) -> None:
    ids, others = Identities(tmp_path / "ids"), Identities(tmp_path / "others")
    async with told(ids.of("learner/ann")) as address:
        found = [
            await run_checks(CheckTargets(credentials, metrics_addresses=[address]))
            for credentials in (Credentials(), others.of("operator/alice"))
        ]
    nobody = await run_checks(CheckTargets(Credentials(), metrics_addresses=["127.0.0.1:1", "nonsense"]))
    silent, stranger = (of(each, f"metrics {address}") for each in found)
    assert (silent.state, "--identity" in silent.text) == ("error", True)
    assert (stranger.state, "no authority that this process trusts" in stranger.text) == ("error", True)
    assert "is it running with --metrics" in of(nobody, "metrics 127.0.0.1:1").text
    assert "HOST:PORT" in of(nobody, "metrics nonsense").text


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["doctor", "--state", "nowhere"])
    assert result.exit_code == 1
    assert "no such folder" in " ".join(result.output.split())


@pytest.mark.parametrize("extra", doctor._EXTRAS)
def test_an_extra_is_known_by_what_it_asks_for(extra: str) -> None:
    """Otherwise it would be said to lack what nobody installs."""
    asked = [each.lower() for each in requires("sottovoce") or () if f'extra == "{extra}"' in each.replace("'", '"')]
    for module in doctor._EXTRAS[extra]:
        name = module.replace(".", "-").replace("_", "-")
        assert any(each.startswith(name) for each in asked), module
