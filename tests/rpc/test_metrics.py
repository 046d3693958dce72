"""Metrics in Prometheus' words, and who may ask for them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sottovoce_coordinator.metrics import CATALOGUE as COORDINATOR
from sottovoce_core.errors import FailedPrecondition, SpecError, Unavailable
from sottovoce_eavesdropper.service import CATALOGUE as EAVESDROPPER
from sottovoce_learner.metrics import CATALOGUE as LEARNER
from sottovoce_rpc import metrics
from sottovoce_rpc.access import CONDITION, ROLE, UNTRUSTED, Refusals
from sottovoce_rpc.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, REVOCATION_FILE
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.metrics import (
    COMMON_METRICS,
    Catalogue,
    Exposition,
    MetricSample,
    MetricsEndpoint,
    collect_common_metrics,
    serve_metrics,
)
from tests.services.authorities import OtherAuthority, Signer, pem
from tests.services.identities import Federation, Identities
from tests.services.scrapes import asked, said, series, shown

pytest.importorskip("prometheus_client")

PROMTOOL = shutil.which("promtool")
CATALOGUE = Catalogue("sottovoce_test")
WAITING = CATALOGUE.add_metric("waiting", "What waits.", "learner")
DONE = CATALOGUE.add_metric("done_total", "What is done.")
ALL = {each.name: each for kind in (COMMON_METRICS, LEARNER, COORDINATOR, EAVESDROPPER) for each in kind.metrics}


def readings() -> list[MetricSample]:
    return [WAITING.sample(3, 'Ward\n"7" \\'), DONE.sample(41)]


@asynccontextmanager
async def served(
    credentials: Credentials | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[str, Refusals]]:
    """The address of somebody who tells metrics, and whom it refused."""
    refused = Refusals()
    async with serve_metrics(
        MetricsEndpoint(listen, credentials or Credentials()), CATALOGUE, readings, refused
    ) as address:
        yield address, refused


async def nothing_said(address: str, tls: ssl.SSLContext | None = None) -> bool:
    """Whether somebody is let go without a word."""
    try:
        return await said(address, b"GET /metrics HTTP/1.1\r\n\r\n", tls, "learner.ward.example") == b""
    except (ssl.SSLError, ConnectionError):
        return True


# ---- what is said ----------------------------------------------------------------------------------------------------


async def test_what_is_asked_for_is_told() -> None:
    async with served() as (address, _):
        answer = await asked(address)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert int(answer.headers["content-length"]) == len(answer.body.encode())
    told = series(answer.body)
    assert told['sottovoce_test_waiting{learner="Ward\\n\\"7\\" \\\\"}'] == 3
    assert told["sottovoce_test_done_total"] == 41
    assert "# HELP sottovoce_certificate_expiry_timestamp_seconds" in answer.body  # though there is none
    assert told["process_resident_memory_bytes"] > 0


async def test_an_address_of_version_six() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with served(listen="[::1]:0") as (address, _):
        assert address.startswith("[::1]:") and (await asked(address)).status == 200


async def test_openmetrics_where_that_is_wanted() -> None:
    async with served() as (address, _):
        answer = await asked(address, header="Accept: application/openmetrics-text; version=1.0.0\r\n")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith("# EOF\n")


def test_a_learner_does_not_tell_what_its_process_uses_unless_that_is_wanted() -> None:
    texts = [
        Exposition(CATALOGUE.metrics, include_process=process).render_text(readings())[1] for process in (False, True)
    ]
    assert [b"process_cpu_seconds_total" in text for text in texts] == [False, True]
    assert b"python_" not in texts[0]


def test_names_are_as_prometheus_has_them() -> None:
    assert len(ALL) == sum(len(each.metrics) for each in (COMMON_METRICS, LEARNER, COORDINATOR, EAVESDROPPER))
    for metric in ALL.values():
        assert re.fullmatch(r"sottovoce(_[a-z]+)+", metric.name)
        assert re.fullmatch(r"[A-Z0-9].*\.", metric.description), metric.name
        assert set(metric.labels) <= {
            "learner", "state", "run", "cause", "scope", "to", "rule", "kind", "reason", "identity", "version",
        }  # fmt: skip


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say() -> None:
    catalogue = Catalogue("any", list(ALL.values()))
    made = [each.sample(1, *("x" for _ in each.labels)) for each in catalogue.metrics]
    _, text = Exposition(catalogue.metrics, include_process=True).render_text(made)
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ---- who is told -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="only root can be another user for a while")
async def test_another_user_of_the_machine_is_told_nothing() -> None:
    ask = "import os, socket, sys\nos.setuid(65_534)\nto = socket.socket()\n"
    ask += "to.connect(('127.0.0.1', int(sys.argv[1])))\n"
    ask += "to.sendall(b'GET /metrics HTTP/1.1\\r\\n\\r\\n')\nprint(to.makefile().read())"
    async with served() as (address, refused):
        command = [sys.executable, "-c", ask, address.rpartition(":")[2]]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.stdout.startswith("HTTP/1.1 403 ") and "these metrics are another user's" in done.stdout, done.stderr
    assert refused.counts_by_reason == {UNTRUSTED: 1, ROLE: 0, CONDITION: 0}


async def test_a_page_under_a_name_of_somebody_elses_is_told_nothing() -> None:
    async with served() as (address, _):
        request = b"GET /metrics HTTP/1.1\r\nHost: evil.example:9400\r\n\r\n"
        assert (await said(address, request)).startswith(b"HTTP/1.1 421 ")


async def test_with_an_identity_monitors_and_operators_are_told_over_tls(tmp_path: Path) -> None:
    ids = Identities(tmp_path)
    async with served(ids.of("learner/ann")) as (address, refused):
        for whom in ("monitor/prometheus", "operator/alice"):
            assert (await asked(address, shown(ids.at(whom), ids.at("learner/ann")))).status == 200
        for whom in ("learner/ben", "feeder/ann", "coordinator/main", "eavesdropper/ear"):
            answer = await asked(address, shown(ids.at(whom), ids.at("learner/ann")))
            assert (answer.status, answer.body) == (403, f"metrics are for monitor and operator, not for {whom}\n")
        assert await nothing_said(address, shown(None, ids.at("learner/ann")))
        assert await nothing_said(address)  # in the clear
    assert refused.counts_by_reason == {UNTRUSTED: 0, ROLE: 4, CONDITION: 0}


async def test_who_is_of_another_deployment_or_authority_is_told_nothing(tmp_path: Path) -> None:
    ids, others = Identities(tmp_path / "own"), Identities(tmp_path / "others")
    async with served(ids.of("learner/ann")) as (address, _):
        assert await nothing_said(address, shown(others.at("monitor/prometheus"), ids.at("learner/ann")))


async def test_a_monitor_of_another_trust_domain_is_told_nothing(tmp_path: Path) -> None:
    """Of its own authority, or of one that speaks for the first domain without having to."""
    ids = Federation(tmp_path, ("ward.example", "east.example"))
    async with served(ids.of("learner/ann")) as (address, refused):
        for folder, words in (
            (
                ids.at("monitor/prometheus@east.example"),
                "of this trust domain, not for monitor/prometheus@east.example",
            ),
            (ids.at("monitor/prometheus", "east.example"), "this service does not trust the caller's certificate"),
        ):
            answer = await asked(address, shown(folder, ids.at("learner/ann")))
            assert (answer.status, words in answer.body) == (403, True)
        assert (await asked(address, shown(ids.at("monitor/prometheus"), ids.at("learner/ann")))).status == 200
    assert refused.counts_by_reason == {UNTRUSTED: 1, ROLE: 1, CONDITION: 0}


async def test_a_certificate_is_of_a_host_that_a_scraper_can_insist_on(tmp_path: Path) -> None:
    ids = Identities(tmp_path)
    async with served(ids.of("learner/ann")) as (address, _):
        tls = shown(ids.at("monitor/prometheus"), ids.at("learner/ann"))
        for host in ("learner.ward.example", "ann.learner.ward.example"):
            assert (await asked(address, tls, host=host)).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await asked(address, tls, host="ben.learner.ward.example")


async def test_a_renewed_certificate_is_shown_and_a_revoked_one_refused_without_a_restart(tmp_path: Path) -> None:
    ids = Identities(tmp_path)
    own, monitor = ids.at("learner/ann"), ids.at("monitor/prometheus")

    async def serial() -> bytes:
        _, writer = await asyncio.open_connection(
            *address.split(":"), ssl=shown(monitor, own), server_hostname="learner.ward.example"
        )
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return ssl.DER_cert_to_PEM_cert(der).encode()

    async with served(Credentials(own)) as (address, refused):
        before = await serial()
        ids.authority.renew(own)
        assert before != (own / CERTIFICATE_FILE).read_bytes() == await serial()
        assert (await asked(address, shown(monitor, own))).status == 200
        ids.authority.revoke("monitor/prometheus")
        (own / REVOCATION_FILE).write_bytes((ids.authority.folder / REVOCATION_FILE).read_bytes())
        answer = await asked(address, shown(monitor, own))
    assert (answer.status, answer.body) == (403, "this service does not trust the caller's certificate\n")
    assert refused.counts_by_reason[UNTRUSTED] == 1


async def test_a_chain_is_believed_until_one_between_is_revoked(tmp_path: Path) -> None:
    ids = OtherAuthority(tmp_path, 2)
    own, monitor = ids.at("learner/ann"), ids.at("monitor/prometheus")
    async with served(Credentials(own)) as (address, _):
        assert (await asked(address, shown(monitor, monitor))).status == 200
        (own / REVOCATION_FILE).write_bytes(pem(ids.chain[1].revoking(ids.chain[0].certificate)))
        assert (await asked(address, shown(monitor, monitor))).status == 403


async def test_a_root_is_rotated_while_metrics_are_told(tmp_path: Path) -> None:
    """First both are believed, then the new one issues, then the old one is believed no longer."""
    old, new = (Signer.of("An authority") for _ in range(2))
    both = [old.certificate, new.certificate]
    before, after = (
        OtherAuthority(tmp_path / "old", root=old),
        OtherAuthority(tmp_path / "new", root=new, believed=both),
    )
    own, early, late = before.at("learner/ann"), before.at("monitor/prometheus"), after.at("monitor/prometheus")
    async with served(Credentials(own)) as (address, _):
        assert await nothing_said(address, shown(late, late))
        (own / AUTHORITIES_FILE).write_bytes(pem(*both))
        assert (await asked(address, shown(late, late))).status == 200
        for name in (KEY_FILE, CERTIFICATE_FILE):
            shutil.copy(after.at("learner/ann") / name, own / name)
        assert (await asked(address, shown(late, late))).status == 200
        (own / AUTHORITIES_FILE).write_bytes(pem(new.certificate))
        assert await nothing_said(address, shown(early, late))
        assert (await asked(address, shown(late, late))).status == 200


async def test_where_others_can_reach_it_an_identity_is_needed_or_to_be_told_not() -> None:
    with pytest.raises(SpecError, match=r"0.0.0.0:0 is reached from other machines"):
        async with served(listen="0.0.0.0:0"):
            pass
    async with served(Credentials(insecure=True), "0.0.0.0:0") as (address, _):
        port = address.rpartition(":")[2]
        assert (await asked(f"127.0.0.1:{port}")).status == 200


# ---- what is not said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 8_192, b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"200"),
    ],
)
async def test_a_request_that_is_none(request_: bytes, status: bytes) -> None:
    async with served() as (address, _):
        assert (await said(address, request_)).split()[1] == status


async def test_who_says_nothing_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_TIMEOUT_S", 0.05)
    async with served() as (address, _):
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(metrics._MAX_CONNECTIONS)]
        for reader, _ in silent:
            async with asyncio.timeout(100):
                assert await reader.read() == b""  # it is let go
        assert (await asked(address)).status == 200
        for _, writer in silent:
            writer.close()


async def test_there_are_as_many_at_a_time_as_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_CONNECTIONS", 0)
    async with served() as (address, _):
        assert await nothing_said(address)


@pytest.mark.parametrize("listen", ["9400", ":9400", "127.0.0.1:", "127.0.0.1:99999", "a b:c", "::1:9400"])
async def test_an_address_that_is_none(listen: str) -> None:
    with pytest.raises(SpecError, match="--metrics must be HOST:PORT with a port from 0 to 65535, got"):
        async with served(listen=listen):
            pass


async def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"--metrics cannot listen on {at}: "):
            async with served(listen=at):
                pass


async def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SpecError, match=r"--metrics needs prometheus_client: .*, pip install '\.\[metrics\]'"):
        async with served():
            pass


async def test_without_the_flag_nothing_listens() -> None:
    async with serve_metrics(None, CATALOGUE, readings, Refusals()) as address:
        assert address == ""


def test_without_the_flag_nothing_is_imported() -> None:
    code = "import sys, sottovoce_learner.service, sottovoce_coordinator.service, sottovoce_eavesdropper.service\n"
    code += "print([each for each in sys.modules if each.startswith(('prometheus_client', 'opentelemetry'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_when_certificates_end_and_who_was_refused(tmp_path: Path) -> None:
    ids, refusals = Identities(tmp_path), [Refusals(), Refusals()]
    refusals[0].record_refusal(ROLE)
    refusals[1].record_refusal(ROLE)
    own = ids.of("learner/ann")
    told = {
        (each.metric.name, each.labels): each.value for each in collect_common_metrics([own, Credentials()], refusals)
    }
    assert own.expiry is not None
    assert told["sottovoce_certificate_expiry_timestamp_seconds", ("learner/ann",)] == own.expiry.timestamp()
    assert told["sottovoce_calls_refused_total", ("role",)] == 2
    assert told["sottovoce_calls_refused_total", ("untrusted",)] == 0


def test_an_identity_that_never_was_has_no_end(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    with pytest.raises(FailedPrecondition):
        _ = credentials.expiry
    assert [each.metric.name for each in collect_common_metrics([credentials], [])][
        1
    ] == "sottovoce_calls_refused_total"
