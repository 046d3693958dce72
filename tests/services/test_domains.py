"""Several trust domains: each authority speaks for its own names, and who is of another domain may do what the table says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import ValidationError
from rich.console import Console

from sottovoce_client.pki import _build_revocation_list
from sottovoce_client.transcripts.verify import verify
from sottovoce_core.errors import FailedPrecondition, PermissionDenied, Unavailable
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_learner import session
from sottovoce_learner.peers.connection import _build_hello, _require_authentic
from sottovoce_learner.session import Session
from sottovoce_rpc.access import ACCESS_RULES, CONDITION, ROLE, UNTRUSTED
from sottovoce_rpc.certificates import (
    AUTHORITIES_FILE,
    CERTIFICATE_FILE,
    REVOCATION_FILE,
    group_by_domain,
    parse_certificates,
    parse_revocations,
)
from sottovoce_rpc.principals import Principal, Role, build_host_name
from sottovoce_rpc.server import open_channel, wait_until_reachable
from sottovoce_rpc.signatures import EMPTY_DIGESTS, SignedStatement, Statement, compute_frame_digest
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2
from tests.examples import ALLOWING, made_up, small_spec
from tests.services.authorities import Signer
from tests.services.identities import DOMAIN, Federation, raw_channel
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.test_access import CONDITIONS, COORDINATOR, EAVESDROPPER, LEARNER, METHODS, _first, host

EAST, SOUTH = "east.example", "south.example"
ANN, BEN, CLEO = f"ann@{DOMAIN}", f"ben@{EAST}", f"cleo@{SOUTH}"
NAMES = [ANN, BEN, CLEO]
ALICE = f"operator/alice@{DOMAIN}"
CALLERS = ["learner/ann", "learner/ben", "coordinator/main", "feeder/ann", "eavesdropper/ear", "operator/alice"]
CALLERS += ["monitor/prometheus"]


@pytest.fixture(autouse=True)
def _signatures_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: nobody finishes without them because they took too long."""
    monkeypatch.setattr(session, "_SIGNATURE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def ids(tmp_path: Path) -> Federation:
    return Federation(tmp_path / "ids", (DOMAIN, EAST, SOUTH))


@asynccontextmanager
async def deployed(folder: Path, ids: Federation, *names: str) -> AsyncIterator[Network]:
    """The coordinator, the eavesdropper and the operator are of the first domain; the owners of learners name them."""
    async with network(folder, [], identities=ids) as up:
        named = {"coordinators": (f"coordinator/main@{DOMAIN}",), "eavesdroppers": (f"eavesdropper/ear@{DOMAIN}",)}
        up.policy, up.owners = ALLOWING.model_copy(update=named), (ALICE,)
        for name in names:
            await up.join(name)
        yield up


def spec_of(names: list[str], rounds: int = 40, capture: str = "none") -> RunSpec:
    more: dict[str, Any] = {"telemetry": {"predict": True}, "clock": {"deadline_s": PATIENCE_S}}
    return small_spec(rounds, names, capture=capture, **more)


def authority(folder: Path, ids: Federation, domain: str) -> Path:
    """A file with the certificate of one authority alone."""
    path = folder / f"{domain}.crt"
    own = parse_certificates((ids.authorities[domain].folder / AUTHORITIES_FILE).read_bytes(), "")[0]
    path.write_bytes(own.public_bytes(Encoding.PEM))
    return path


def verified(capture: str | None, authorities: Path) -> tuple[int, str]:
    console = Console(file=StringIO(), width=300)
    return verify(capture or "", authorities, console), console.file.getvalue()  # type: ignore[attr-defined]


# ---- who may do what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["none", "relay", "mirror"])
async def test_a_run_of_three_domains(tmp_path: Path, ids: Federation, capture: str) -> None:
    spec = spec_of(NAMES, capture=capture)
    async with deployed(tmp_path, ids, *NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.capture_error) == ("finished", ""), outcome.detail
    assert all(each is not None for each in outcome.predictions)
    if capture != "none":
        assert verified(outcome.capture_location, ids.at(f"learner/{BEN}") / AUTHORITIES_FILE)[0] == 0
        code, text = verified(outcome.capture_location, authority(tmp_path, ids, EAST))
        assert code == 1
        assert "a signature of learner/ann, of a trust domain without a trusted authority" in text
        assert f"{BEN}:" not in text


async def called(up: Network, folder: Path, believes: Path, house: str, method: str) -> grpc.StatusCode:
    """The status of an empty request, by whatever identity."""
    at = {"coordinator": up.coordinator, "eavesdropper": up.eavesdropper}.get(house, up.addresses.get(ANN, ""))
    async with raw_channel(folder, believes, at, host(house)) as to:
        call: Any = to.stream_stream(method)
        first = await _first(call(iter([b""]), timeout=PATIENCE_S))
        return grpc.StatusCode.OK if first is None else first.code()


async def test_who_is_of_another_domain_may_do_what_the_table_says(tmp_path: Path, ids: Federation) -> None:
    """Nothing by a role that is its own domain's to give, and what an owner must allow by name alone."""
    async with deployed(tmp_path, ids, ANN) as up:
        for house, method in METHODS:
            for each in CALLERS:
                rule, folder = ACCESS_RULES[method], ids.at(f"{each}@{EAST}")
                allowed = Role(each.split("/")[0]) in rule.roles and bool(rule.foreign) and method not in CONDITIONS
                denied = await called(up, folder, folder, house, method) is grpc.StatusCode.PERMISSION_DENIED
                assert denied != allowed, (method, each)


async def test_an_owner_names_who_is_of_another_domain(tmp_path: Path, ids: Federation) -> None:
    async with deployed(tmp_path, ids) as up:
        up.owners = (f"operator/bob@{EAST}",)
        await up.join(ANN)
        for method in CONDITIONS:
            for caller, code in (
                (f"operator/bob@{EAST}", False),
                ("operator/bob", True),
                (f"operator/bob@{SOUTH}", True),
            ):
                folder = ids.at(caller)
                denied = await called(up, folder, folder, "learner", method) is grpc.StatusCode.PERMISSION_DENIED
                assert denied is (code and not (caller == "operator/bob" and method.endswith("/GetStatus"))), (
                    method,
                    caller,
                )


async def later(up: Network) -> Session | None:
    await asyncio.sleep(0.01)
    return up.learners[ANN]._session


async def test_a_learner_joins_speaks_and_copies_as_itself_alone(tmp_path: Path, ids: Federation) -> None:
    """East's authority issues `learner/ann`, and that is ann of east, wherever it says that it is ann."""
    async with deployed(tmp_path, ids, *NAMES) as up:
        impostor = ids.at(f"learner/ann@{EAST}")
        for name in (ANN, "ann"):
            introduction = coordinator_pb2.Introduction(learner=name, address="127.0.0.1:1", store_id=b"x" * 16)
            event = coordinator_pb2.LearnerMessage(introduction=introduction).SerializeToString()
            async with raw_channel(impostor, impostor, up.coordinator, host("coordinator")) as to:
                call: Any = to.stream_stream(f"{COORDINATOR}/Join")
                failure = await refused(call(iter([event]), timeout=PATIENCE_S))
            assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
            assert failure.details() == f"learner/ann@{EAST} must join as itself, got {name!r}"
        started = await up.start(spec_of(NAMES, 10_000, "mirror"), 3)
        own = up.learners[ANN]._session
        while own is None or not own.plan.announced_rounds:
            own = await later(up)
        own_host = f"ben.learner.{EAST}"
        for caller in (f"learner/ann@{EAST}", f"learner/{CLEO}", f"eavesdropper/ear@{SOUTH}"):
            async with raw_channel(ids.at(caller), ids.at(caller), up.addresses[BEN], own_host) as to:
                call = to.stream_stream(f"{LEARNER}/Exchange")
                failure = await refused(call(iter([_build_hello(own, 1)]), timeout=PATIENCE_S))
            assert failure.code() is grpc.StatusCode.PERMISSION_DENIED
            assert f"must not send in the name of {ANN}" in str(failure.details())
        copy = eavesdropper_pb2.MirrorRequest(run_id=started.run_id, sender=0).SerializeToString()
        async with raw_channel(impostor, impostor, up.eavesdropper, host("eavesdropper")) as to:
            mirror: Any = to.stream_unary(f"{EAVESDROPPER}/Mirror")
            with pytest.raises(grpc.aio.AioRpcError, match=f"learner/ann@{EAST} must not send copies for {ANN}"):
                await mirror(iter([copy]), timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("named", "accepted"),
    [
        (None, {"eavesdropper/ear"}),
        (("eavesdropper/ear",), {"eavesdropper/ear"}),
        ((f"eavesdropper/ear@{DOMAIN}",), {"eavesdropper/ear"}),
        ((f"eavesdropper/ear@{EAST}",), {f"eavesdropper/ear@{EAST}"}),
    ],
)
def test_a_foreign_eavesdropper_is_accepted_by_its_name_alone(
    named: tuple[str, ...] | None, accepted: set[str]
) -> None:
    """Where the policy names none, any of one's own domain is."""
    role, policy = SimpleNamespace(spec=spec_of(NAMES, 5, "relay"), name=ANN), Policy(eavesdroppers=named)
    own = cast(Session, SimpleNamespace(assignment=role, policy=policy))
    for each in ("eavesdropper/ear", f"eavesdropper/ear@{EAST}", f"eavesdropper/ear@{SOUTH}"):
        with nullcontext() if each in accepted else pytest.raises(PermissionDenied, match="does not accept"):
            _require_authentic(own, 1, Principal.parse(DOMAIN, each))


# ---- impostors -------------------------------------------------------------------------------------------------------


async def test_no_authority_speaks_for_another_domain(tmp_path: Path, ids: Federation) -> None:
    """Every role, every method: east's authority names whom it likes in the first domain, and the first one in east's."""
    forged = [(each, EAST) for each in CALLERS] + [(f"{each}@{EAST}", DOMAIN) for each in CALLERS]
    async with deployed(tmp_path, ids, ANN) as up:
        for house, method in METHODS:
            for whom, by in forged:
                code = await called(up, ids.at(whom, by), ids.at("operator/alice"), house, method)
                assert code is grpc.StatusCode.PERMISSION_DENIED, (method, whom, by)
        assert up.coordinating is not None and up.coordinating.server is not None
        found = up.learners[ANN].service
        assert found is not None
        assert (found.refusals.counts_by_reason[UNTRUSTED] > 0, found.refusals.counts_by_reason[ROLE]) == (True, 0)
        assert found.refusals.counts_by_reason[CONDITION] == 0


@pytest.mark.parametrize(
    ("role", "name"),
    [(Role.LEARNER, BEN), (Role.LEARNER, ANN), (Role.COORDINATOR, ""), (Role.EAVESDROPPER, f"ear@{EAST}")],
)
async def test_a_client_believes_no_other_authority(ids: Federation, role: Role, name: str) -> None:
    """Whoever is in the place of a service with a certificate of another domain's authority is not talked to."""
    alice = ids.of("operator/alice")
    whom = f"{role}/{name or 'main'}"
    domain = name.partition("@")[2] or DOMAIN
    for by in (domain, EAST if domain == DOMAIN else DOMAIN):
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", ids.of(whom, by).build_server_credentials("127.0.0.1:0"))  # type: ignore[arg-type]
        await server.start()
        try:
            async with open_channel(f"127.0.0.1:{port}", role, name, credentials=alice) as to:
                if by == domain:
                    await wait_until_reachable(to, whom, PATIENCE_S)
                else:
                    with pytest.raises(Unavailable, match="cannot reach"):
                        await wait_until_reachable(to, whom, 1)
        finally:
            await server.stop(None)


def test_a_domain_of_which_no_authority_is_believed_is_said(ids: Federation) -> None:
    with pytest.raises(
        FailedPrecondition,
        match=r"ca.crt must hold an authority that names spiffe://west.example, and has only those of",
    ):
        open_channel("127.0.0.1:1", Role.LEARNER, "ben@west.example", credentials=ids.of("operator/alice"))


def test_signatures_are_believed_of_the_authority_of_the_domain(ids: Federation) -> None:
    said, own = (
        Statement("run-1", 1, 0, compute_frame_digest(b"a round") + EMPTY_DIGESTS[32:]),
        ids.of("operator/alice"),
    )
    assert str(own.verify_statement(ids.of(f"learner/{BEN}").sign_statement(said))) == f"learner/{BEN}"
    assert str(own.verify_statement(ids.of("learner/ann").sign_statement(said))) == "learner/ann"
    for whom, by in ((f"learner/{BEN}", DOMAIN), ("learner/ann", EAST)):
        with pytest.raises(PermissionDenied, match="do not lead to a trusted authority"):
            own.verify_statement(ids.of(whom, by).sign_statement(said))


async def test_a_capture_is_not_signed_by_another_authority(
    tmp_path: Path, ids: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps it has east's authority sign in the name of ann."""
    true_add, forger = CaptureWriter.add_row, ids.of("learner/ann", EAST)

    def add(self: CaptureWriter, row: Any) -> None:
        if row.kind == "signature" and row.sender == 0:
            row = row._replace(
                payload=forger.sign_statement(SignedStatement.decode(self.run_id, row.payload).statement).encode()
            )
        true_add(self, row)

    monkeypatch.setattr(CaptureWriter, "add_row", add)
    spec = spec_of(NAMES, capture="mirror")
    async with deployed(tmp_path, ids, *NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    code, text = verified(outcome.capture_location, ids.at("operator/alice") / AUTHORITIES_FILE)
    assert code == 1
    assert f"{ANN}: " in text and "do not lead to a trusted authority" in text
    assert f"{BEN}: " not in text


async def test_a_name_without_a_domain_is_verified_by_the_authorities_of_one(tmp_path: Path, ids: Federation) -> None:
    """Of several, each could have signed it in its own name."""
    spec = spec_of(["ann", "bob"], capture="mirror")
    async with deployed(tmp_path, ids, "ann", "bob") as up:
        outcome = await up.run(spec, made_up(spec))
    assert verified(outcome.capture_location, authority(tmp_path, ids, DOMAIN))[0] == 0
    code, text = verified(outcome.capture_location, ids.at("operator/alice") / AUTHORITIES_FILE)
    assert code == 1
    assert f"a signature of learner/ann of {DOMAIN} in the name of ann, which names no trust domain" in text


def test_an_authority_revokes_in_its_own_domain_alone(ids: Federation) -> None:
    """Though another one has its name."""
    own, other = (Signer.of("an authority") for _ in range(2))
    assert isinstance(other.key, ec.EllipticCurvePrivateKey)
    listed = _build_revocation_list([7], other.certificate.subject, other.key)
    revoked = parse_revocations(listed, {DOMAIN: [own.certificate], EAST: [other.certificate]})
    assert [(domain, {serial for _, serial in found}) for domain, found in revoked.items()] == [
        (DOMAIN, set()),
        (EAST, {7}),
    ]


def test_who_is_revoked_in_another_domain_is_refused(ids: Federation) -> None:
    ann, ben = ids.of("learner/ann"), ids.at(f"learner/{BEN}")
    certificate = (ben / CERTIFICATE_FILE).read_bytes()
    assert str(ann.authenticate_certificate(certificate)) == f"learner/{BEN}"
    ids.authorities[EAST].revoke("learner/ben")
    assert ann.folder is not None
    (ann.folder / REVOCATION_FILE).write_bytes((ids.authorities[EAST].folder / REVOCATION_FILE).read_bytes())
    with pytest.raises(PermissionDenied, match="a revoked certificate of learner/ben"):
        ann.authenticate_certificate(certificate)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_an_authority_without_a_domain_is_of_ones_own_where_no_other_names_it() -> None:
    own, other = Signer.of("one").certificate, Signer.of("two").certificate
    assert group_by_domain([own, other], DOMAIN) == {DOMAIN: [own, other]}
    assert group_by_domain([own, other]) == {"": [own, other]}


def test_an_authority_without_a_domain_is_believed_for_nobody_beside_one_that_names_it(ids: Federation) -> None:
    stranger = Signer.of("no domain").certificate
    named = parse_certificates((ids.authorities[DOMAIN].folder / AUTHORITIES_FILE).read_bytes(), "")
    found = group_by_domain([*named, stranger], DOMAIN)
    assert (set(found), found[""]) == ({DOMAIN, EAST, SOUTH, ""}, [stranger])
    east = [each for each in named if each not in found[DOMAIN]]
    assert group_by_domain([stranger, *east], DOMAIN)[DOMAIN] == [stranger]


def test_a_name_with_a_domain() -> None:
    ben = Principal.parse(DOMAIN, f"learner/{BEN}")
    assert (ben.domain, ben.is_foreign, str(ben)) == (EAST, True, f"learner/{BEN}")
    assert (ben.uri, ben.host) == (f"spiffe://{EAST}/learner/ben", f"ben.learner.{EAST}")
    assert build_host_name(DOMAIN, Role.LEARNER, BEN) == ben.host
    assert Principal.parse(EAST, f"learner/{BEN}") == Principal.parse(EAST, "learner/ben") == ben.qualify_for(EAST)
    assert ben.qualify_for(EAST).qualify_for(DOMAIN) == ben
    assert ben.is_one_of(f"learner/{BEN}") and not ben.is_one_of("learner/ben", f"feeder/{BEN}", f"learner/ben@{SOUTH}")
    assert ben.qualify_for(EAST).is_one_of("learner/ben") and ben.qualify_for(EAST).is_one_of(f"learner/{BEN}")
    assert Principal.from_uri(f"spiffe://{DOMAIN}/learner/ben%40{EAST}") is None
    assert replace(ben, domain=SOUTH) != ben


def test_all_learners_of_a_run_name_their_domain_or_none() -> None:
    assert small_spec(5, NAMES).names == tuple(NAMES)
    with pytest.raises(ValidationError, match=r"must hold a trust domain \(NAME@DOMAIN\), or none of them, got 'bob'"):
        RunSpec.model_validate(small_spec(5, NAMES).model_dump() | {"learners": [ANN, "bob"]})


async def test_a_ledger_by_the_other_name_is_not_passed_over(tmp_path: Path, ids: Federation) -> None:
    """Another learner's in the same folder is nothing to it."""
    async with deployed(tmp_path, ids, "ann") as up:
        spec = spec_of(["ann"], 5)
        await up.run(spec, made_up(spec))
        await up.leave("ann")
        with pytest.raises(FailedPrecondition, match="must have no ledger of 'ann', another name of this learner"):
            await up.join(ANN)
        await up.join(BEN)
        await up.join("ann")
