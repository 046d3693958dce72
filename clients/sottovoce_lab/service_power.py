"""Audits of broken services: coordinator, learners and relay or wiretap over gRPC, in one process; and a small foreign service.

The foreign service is a clinic of no format of ours, one for each world, behind relays. It answers with a gradient and a loss at
parameters that are others in every call. One patient's label differs between the worlds. The gradient differs by one number then,
by 1; the loss by the parameter there, 1 at most. With Laplace noise on both, of a tenth of the budget for the loss, an answer has
epsilon 1.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from structlog.testing import capture_logs

from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.auditing.audit_files import CaptureMethod, RunLedgerEntry, prepare_audit_spec
from sottovoce_client.auditing.audit_runs import AuditRuns, collect_runs
from sottovoce_client.auditing.captures import audit_captures
from sottovoce_client.auditing.captures import list_captures as captures_in
from sottovoce_client.auditing.foreign_runs import read_runs
from sottovoce_client.auditing.network import (
    audit_ciphertext,
    draw_seeded_coins,
    interleave_pairs,
    plan_ciphertext_audit,
)
from sottovoce_client.runs.local_services import issue_local_identities
from sottovoce_client.runs.run_client import run_on_services
from sottovoce_client.terminal import ignore_progress
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.foreign.audit import ForeignAudit, audit_traffic
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.grpc_proxy import StandaloneProxy, StandaloneProxyConfig
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_lab.auditor_evaluation import (
    CONFIDENCE,
    PowerMeasurement,
    ServiceKind,
    find_refuting_part,
    search_run_count,
)
from sottovoce_lab.mutants import BASE_RUNS, BaseRun
from sottovoce_lab.service_mutants import CustomNoiseLearner, ServiceMutant, build_learners
from sottovoce_learner.config import LearnerConfig
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.server import listen_on
from sottovoce_rpc.tasks import Tasks

# ---- network ---------------------------------------------------------------------------------------------------------

SERVICE_RUN_COUNTS = (24, 48, 100)
"""Runs of each world that are tried, one after the other."""

SERVICE_AUDIT_COUNT = 3
"""With each number of runs, all of runs of their own."""

_BASE = BASE_RUNS["ldp-dol, epsilon 1"]
SERVICE_BASE_RUN = replace(_BASE, sections={**_BASE.sections, "learners": 2})
"""What runs: the fewer edges there are, the faster."""

_ACCEPTING, _CALLING = 1, 0
"""The learner that is audited by what relays hear, and by what wiretaps note: the one accepts streams, so it can end them; the
other one opens them, so it can open more."""

_LISTENING: dict[CaptureMethod, tuple[ServiceKind, int]] = {
    "relay": ("on real services", _ACCEPTING),
    "wiretap": ("by wiretap", _CALLING),
}


def _blank(
    broken: ServiceMutant | _ForeignBreak, kind: ServiceKind, rungs: Sequence[int], audits: int
) -> PowerMeasurement:
    return PowerMeasurement(
        broken.name, broken.description, kind, max(rungs), audits, correct=broken.is_correct, sure=broken.must_be_found
    )


def measure_service_power(
    broken: ServiceMutant,
    capture: CaptureMethod,
    *,
    run_counts: Sequence[int] = SERVICE_RUN_COUNTS,
    audits: int = SERVICE_AUDIT_COUNT,
    seed: int = 0,
) -> PowerMeasurement:
    """Run real services in two worlds, and audit what relays heard, or what wiretaps noted of encrypted channels.

    Args:
        broken: what is wrong with them.
        capture: who listens.
        rungs: runs of each world.
        audits: with each number of runs.
        seed: of coins and audits; noise and times are those of the machine.
    """
    kind, learner = _LISTENING[capture]

    def found_by(runs: int, each: int) -> str:
        plan = _plan_beside_numbers(SERVICE_BASE_RUN, runs, each, learner=learner)
        with _made_with(broken, plan, capture) as made:
            if capture == "relay":
                done = audit_captures(plan, made, ignore_progress)
                return find_refuting_part(done.findings) if done.verdict.kind == "refuted" else ""
            return _found_in_calls(audit_ciphertext(plan, made, each, ignore_progress))

    return search_run_count(_blank(broken, kind, run_counts, audits), found_by, run_counts, seed)


def _plan_beside_numbers(
    base: BaseRun, runs: int, seed: int, confidence: float = CONFIDENCE, *, learner: int = _CALLING
) -> AuditPlan:
    """An audit of what passes beside numbers: a loud record against a silent one, which whatever depends on a norm tells apart.

    Args:
        base: what runs.
        runs: of each world.
        seed: of coins and audit.
        confidence: with which a correct learner is not refuted.
        learner: who is audited.
    """
    prepared = PreparedRun(*base.build())
    asked = AuditRequest(prepared.run.spec.names[learner], runs=runs, confidence=confidence, seed=seed)
    return plan_ciphertext_audit(prepared, asked)


@contextmanager
def _made_with(broken: ServiceMutant, plan: AuditPlan, capture: CaptureMethod) -> Iterator[AuditRuns]:
    """All runs, as `sottovoce audit --on network` or `--on wiretap` makes them."""
    with tempfile.TemporaryDirectory() as folder, capture_logs():  # broken services have much to say
        pairs = interleave_pairs(plan)
        ledger = asyncio.run(_make_runs(broken, plan, pairs, Path(folder), capture))
        captures = captures_in(open_folder(Path(folder) / "captures"))
        yield collect_runs(captures, plan.run, ledger, lambda replica: pairs[int(str(replica))])


# ---- runs ------------------------------------------------------------------------------------------------------------


async def _make_runs(
    broken: ServiceMutant, plan: AuditPlan, pairs: Sequence[int], folder: Path, capture: CaptureMethod
) -> dict[int, RunLedgerEntry]:
    """All runs, one after the other, and what became of them."""
    spec, ledger = prepare_audit_spec(plan.run.spec, capture), dict[int, RunLedgerEntry]()
    data = [[pair.worlds.build_data(plan.data, world) for world in (0, 1)] for pair in plan.pairs]
    identities = folder / "identities" if capture == "wiretap" else None
    if identities is not None:
        await asyncio.to_thread(issue_local_identities, identities, spec.names)
    own = _identity(identities, "operator-local")
    async with _services(broken, plan, spec, folder, identities) as (coordinator, learners):
        for k, (pair, world) in enumerate(zip(pairs, draw_seeded_coins(plan).tolist(), strict=True)):
            for learner in learners:
                learner.world = world
            records = data[pair][world]
            outcome = await run_on_services(
                coordinator, spec, records, lambda *seen: None, world=world, replica=k, credentials=own
            )
            ledger[k] = RunLedgerEntry(run_id=outcome.run_id, outcome=outcome.state, world=world)
            if (
                broken.is_capture_lost is not None
                and broken.is_capture_lost(world)
                and outcome.capture_location is not None
            ):
                shutil.rmtree(outcome.capture_location)
    return ledger


@asynccontextmanager
async def _services(
    broken: ServiceMutant, plan: AuditPlan, spec: RunSpec, folder: Path, identities: Path | None
) -> AsyncIterator[tuple[str, list[CustomNoiseLearner]]]:
    """All services of a run: their coordinator's address, and the learners."""
    own = _identity(identities, "eavesdropper-local")
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=folder / "captures", credentials=own))
    own = _identity(identities, "coordinator-local")
    coordinator = Coordinator(CoordinatorConfig(eavesdropper=await eavesdropper.start(), credentials=own))
    address = await coordinator.start()
    learners = build_learners(
        broken,
        plan,
        lambda name: LearnerConfig(
            name,
            address,
            state_folder=folder / "learner-state",
            policy=Policy.from_spec(spec),
            credentials=_identity(identities, f"learner-{name}"),
            owners=("operator/local",),
        ),
    )
    async with Tasks() as following:
        try:
            for learner in learners:
                following.start(learner.follow(await learner.start()))
            yield address, learners
        finally:
            for learner in learners:
                await learner.stop()
            await coordinator.stop()
            await eavesdropper.stop()


def _identity(folder: Path | None, name: str) -> Credentials:
    """Of a service; none where channels are not encrypted."""
    return Credentials() if folder is None else Credentials(folder / name)


# ---- foreign ---------------------------------------------------------------------------------------------------------

_Context = grpc.aio.ServicerContext[bytes, bytes]

FOREIGN_RUN_COUNTS = (24, 48, 100, 200, 500)
"""Runs of each world that are tried, one after the other."""

FOREIGN_AUDIT_COUNT = 5
"""With each number of runs, all of runs of their own."""

_EPSILON = 1.0
_GRADIENT, _LOSS = 0.9, 0.1
"""Parts of the budget."""

_PATIENTS = np.array([[1.0, 0.0, 0.0], [0.3, 0.8, -0.2], [-0.5, 0.1, 0.6], [0.2, -0.7, 0.4]])
_LABELS = np.array([1.0, -1.0, 1.0, -1.0])
"""In the first world; in the second one the first label is the other one."""

_METHOD = "/clinic.Model/Gradient"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a service is about to say."""

    exact: FloatArray
    """`(4,)` gradient and loss."""
    noise: FloatArray
    """`(4,)` that it may have."""
    world: int
    before: bytes
    """The answer to the call before."""
    generator: np.random.Generator

    @property
    def said(self) -> FloatArray:
        """With noise."""
        return self.exact + self.noise


@dataclass(frozen=True, slots=True)
class _ForeignBreak:
    """What is wrong with a foreign service.

    Attributes:
        name: in a word or two.
        what: is wrong, in a few words.
        says: an answer's bytes.
        trailers: what stands behind it.
        refuses: whether a call fails.
        correct: nothing is wrong.
        sure: it must be found; without an algorithm, guesses alone tell of too little noise, and need very many runs.
    """

    name: str
    description: str
    says: Callable[[_Answer], bytes] = lambda answer: answer.said.tobytes()
    trailers: Callable[[_Answer], str] = lambda answer: ""
    refuses: Callable[[_Answer], bool] = lambda answer: False
    is_correct: bool = False
    must_be_found: bool = True


class _Clinic(grpc.GenericRpcHandler):
    """The service in one world."""

    def __init__(self, broken: _ForeignBreak, world: int, generator: np.random.Generator) -> None:
        self._broken, self._world, self._generator = broken, world, generator
        self._before = bytes(32)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """One method."""
        return grpc.unary_unary_rpc_method_handler(self._gradient)

    async def _gradient(self, request: bytes, context: _Context) -> bytes:
        noise = self._generator.laplace(scale=np.repeat([1.0 / _GRADIENT, 1.0 / _LOSS], [3, 1]) / _EPSILON)
        exact = _exact(np.frombuffer(request, "<f8"), self._world)
        answer = _Answer(exact, noise, self._world, self._before, self._generator)
        if text := self._broken.trailers(answer):
            context.set_trailing_metadata((("x-positive", text),))
        if self._broken.refuses(answer):
            await context.abort(grpc.StatusCode.ABORTED, "again, please")
        self._before = self._broken.says(answer)
        return self._before


def _labels(world: int) -> FloatArray:
    return np.append(_LABELS[0] * (1.0 - 2.0 * world), _LABELS[1:])


def _exact(parameters: FloatArray, world: int) -> FloatArray:
    """`(4,)` gradient and loss of logistic regression."""
    labels = _labels(world)
    margins = labels * (_PATIENTS @ parameters)
    gradient = -(labels / (1.0 + np.exp(margins))) @ _PATIENTS
    return np.append(gradient, np.log1p(np.exp(-margins)).sum())


def _decode(method: str, direction: str, payload: bytes) -> dict[str, FloatArray]:
    numbers = np.frombuffer(payload[: 8 * (len(payload) // 8)], "<f8")
    return {"parameters": numbers} if direction == "out" else {"gradient": numbers[:3], "loss": numbers[3:4]}


def measure_foreign_power(
    broken: _ForeignBreak,
    *,
    run_counts: Sequence[int] = FOREIGN_RUN_COUNTS,
    audits: int = FOREIGN_AUDIT_COUNT,
    seed: int = 0,
) -> PowerMeasurement:
    """Call a service in two worlds through relays, and audit what they heard.

    Args:
        broken: what is wrong with it.
        rungs: runs of each world.
        audits: with each number of runs.
        seed: of coins, parameters, noise and audits.
    """
    blank = _blank(broken, "foreign services", run_counts, audits)

    def found_by(runs: int, each: int) -> str:
        with tempfile.TemporaryDirectory() as folder, capture_logs():
            asyncio.run(_make_calls(broken, 2 * runs, Path(folder), each))
            heard = read_runs(folder, _decode, "stream").runs
        done = audit_traffic(heard, claim=_EPSILON, confidence=CONFIDENCE, seed=each)
        return _found_in_calls(done) or next((sign.test for sign in done.anomalies), "")

    return search_run_count(blank, found_by, run_counts, seed)


def _found_in_calls(done: ForeignAudit) -> str:
    """The view that refutes the claim; empty: none does."""
    return max(done.findings.bounds, key=lambda bound: bound.value).view if done.verdict.kind == "refuted" else ""


async def _make_calls(broken: _ForeignBreak, runs: int, folder: Path, seed: int) -> None:
    """All runs, each one call, in worlds that fair coins choose."""
    coins, *noise = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    async with AsyncExitStack() as stack:
        calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = []
        for world, generator in enumerate(noise):
            address = await stack.enter_async_context(_relayed(broken, world, generator, folder))
            to = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            calls.append(to.unary_unary(_METHOD))
        for _ in range(runs):
            call = calls[coins.integers(2)](coins.uniform(-1.0, 1.0, 3).tobytes())
            await call.code()


@asynccontextmanager
async def _relayed(
    broken: _ForeignBreak, world: int, generator: np.random.Generator, folder: Path
) -> AsyncIterator[str]:
    """A service behind a relay, at the relay's address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Clinic(broken, world, generator),))
    to = listen_on(server, "127.0.0.1:0")
    await server.start()
    relay = StandaloneProxy(StandaloneProxyConfig(to, folder=folder, world=world))
    try:
        yield await relay.start()
    finally:
        await relay.stop()
        await server.stop(None)


# ---- breaks ----------------------------------------------------------------------------------------------------------


def _without_noise_on(*places: int) -> Callable[[_Answer], bytes]:
    return lambda answer: np.where(np.isin(np.arange(4), places), answer.exact, answer.said).tobytes()


def _scaled(answer: _Answer, factor: float) -> bytes:
    return (answer.exact + factor * answer.noise).tobytes()


FOREIGN_SERVICE_MUTANTS = (
    _ForeignBreak("correct", "nothing", is_correct=True),
    _ForeignBreak(
        "six digits",
        "nothing: answers are rounded",
        says=lambda answer: np.array([float(f"{number:.6g}") for number in answer.said]).tobytes(),
        is_correct=True,
    ),
    _ForeignBreak("no noise", "the gradient and its loss as they are", says=_without_noise_on(0, 1, 2, 3)),
    _ForeignBreak("exact loss", "a noised gradient beside a loss without noise", says=_without_noise_on(3)),
    _ForeignBreak("a quarter of the noise", "epsilon 4, where 1 is claimed", says=partial(_scaled, factor=0.25)),
    _ForeignBreak(
        "half the noise", "epsilon 2, where 1 is claimed", says=partial(_scaled, factor=0.5), must_be_found=False
    ),
    _ForeignBreak(
        "said again",
        "one answer in ten is that of the call before",
        says=lambda answer: answer.before if answer.generator.random() < 0.1 else answer.said.tobytes(),
    ),
    _ForeignBreak(
        "length",
        "half of the answers are longer in one world",
        says=lambda answer: answer.said.tobytes() + bytes(8 * (answer.world == 1 and answer.generator.random() < 0.5)),
    ),
    _ForeignBreak(
        "metadata",
        "how many labels are 1, behind an answer",
        trailers=lambda answer: str(np.count_nonzero(_labels(answer.world) > 0.0)),
    ),
    _ForeignBreak(
        "status",
        "half of the calls fail in one world",
        refuses=lambda answer: answer.world == 1 and answer.generator.random() < 0.5,
    ),
)
"""Foreign services, two correct ones among them."""
