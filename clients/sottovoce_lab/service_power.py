"""Power of audits of faulty services: real services over gRPC in one process, and a foreign service.

The foreign service is a small clinic with a format of its own, one server for each world, behind relays. It answers with a
gradient and a loss at other parameters in every call. One patient's label differs between the worlds. The gradient then differs
in one entry, by 1; the loss by the parameter there, 1 at most. With Laplace noise on both, and a tenth of the budget for the
loss, an answer has epsilon 1.
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
from sottovoce_client.auditing.captures import audit_captures, list_captures
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
"""Numbers of runs of each world that are tried, in order."""

SERVICE_AUDIT_COUNT = 3
"""Audits with each number of runs, each with runs of its own."""

_BASE = BASE_RUNS["ldp-dol, epsilon 1"]
SERVICE_BASE_RUN = replace(_BASE, sections={**_BASE.sections, "learners": 2})
"""Base run on services: the fewer edges, the faster."""

_ACCEPTING, _CALLING = 1, 0
"""Audited learner on relays and on wiretaps: one accepts streams, so it can end them; the other opens streams, so it can open
additional ones."""

_AUDITED: dict[CaptureMethod, tuple[ServiceKind, int]] = {
    "relay": ("on real services", _ACCEPTING),
    "wiretap": ("by wiretap", _CALLING),
}


def _create_blank(
    mutant: ServiceMutant | _ForeignMutant, kind: ServiceKind, run_counts: Sequence[int], audits: int
) -> PowerMeasurement:
    return PowerMeasurement(
        mutant.name,
        mutant.description,
        kind,
        max(run_counts),
        audits,
        correct=mutant.is_correct,
        must_be_found=mutant.must_be_found,
    )


def measure_service_power(
    mutant: ServiceMutant,
    capture: CaptureMethod,
    *,
    run_counts: Sequence[int] = SERVICE_RUN_COUNTS,
    audits: int = SERVICE_AUDIT_COUNT,
    seed: int = 0,
) -> PowerMeasurement:
    """Run real services in two worlds, and audit their messages, or the sizes and times of encrypted channels.

    Args:
        mutant: the fault.
        capture: the method of recording.
        run_counts: numbers of runs of each world to try.
        audits: audits with each number of runs.
        seed: seed of coins and audits; noise and times are those of the machine.
    """
    kind, learner = _AUDITED[capture]

    def audit(runs: int, each: int) -> str:
        plan = _plan_norm_audit(SERVICE_BASE_RUN, runs, each, learner=learner)
        with _collect_runs(mutant, plan, capture) as audit_runs:
            if capture == "relay":
                result = audit_captures(plan, audit_runs, ignore_progress)
                return find_refuting_part(result.findings) if result.verdict.kind == "refuted" else ""
            return _find_refuting_view(audit_ciphertext(plan, audit_runs, each, ignore_progress))

    return search_run_count(_create_blank(mutant, kind, run_counts, audits), audit, run_counts, seed)


def _plan_norm_audit(
    base: BaseRun, runs: int, seed: int, confidence: float = CONFIDENCE, *, learner: int = _CALLING
) -> AuditPlan:
    """Plan an audit with a record of large norm against one of norm 0, which any side channel that depends on a norm separates.

    Args:
        base: the base run.
        runs: runs of each world.
        seed: seed of coins and audit.
        confidence: confidence of the audit.
        learner: the audited learner.
    """
    prepared = PreparedRun(*base.build())
    request = AuditRequest(prepared.run.spec.names[learner], runs=runs, confidence=confidence, seed=seed)
    return plan_ciphertext_audit(prepared, request)


@contextmanager
def _collect_runs(mutant: ServiceMutant, plan: AuditPlan, capture: CaptureMethod) -> Iterator[AuditRuns]:
    """Make all runs as `sottovoce audit --on network` or `--on wiretap` does."""
    with tempfile.TemporaryDirectory() as folder, capture_logs():  # faulty services write many logs
        pairs = interleave_pairs(plan)
        ledger = asyncio.run(_make_runs(mutant, plan, pairs, Path(folder), capture))
        captures = list_captures(open_folder(Path(folder) / "captures"))
        yield collect_runs(captures, plan.run, ledger, lambda replica: pairs[int(str(replica))])


# ---- runs ------------------------------------------------------------------------------------------------------------


async def _make_runs(
    mutant: ServiceMutant, plan: AuditPlan, pairs: Sequence[int], folder: Path, capture: CaptureMethod
) -> dict[int, RunLedgerEntry]:
    """Make all runs, one after the other, and return their ledger."""
    spec, ledger = prepare_audit_spec(plan.run.spec, capture), dict[int, RunLedgerEntry]()
    data = [[pair.worlds.build_data(plan.data, world) for world in (0, 1)] for pair in plan.pairs]
    identities = folder / "identities" if capture == "wiretap" else None
    if identities is not None:
        await asyncio.to_thread(issue_local_identities, identities, spec.names)
    own = _identity(identities, "operator-local")
    async with _start_services(mutant, plan, spec, folder, identities) as (coordinator, learners):
        for k, (pair, world) in enumerate(zip(pairs, draw_seeded_coins(plan).tolist(), strict=True)):
            for learner in learners:
                learner.world = world
            records = data[pair][world]
            outcome = await run_on_services(
                coordinator, spec, records, lambda *progress: None, world=world, replica=k, credentials=own
            )
            ledger[k] = RunLedgerEntry(run_id=outcome.run_id, outcome=outcome.state, world=world)
            if (
                mutant.is_capture_lost is not None
                and mutant.is_capture_lost(world)
                and outcome.capture_location is not None
            ):
                shutil.rmtree(outcome.capture_location)
    return ledger


@asynccontextmanager
async def _start_services(
    mutant: ServiceMutant, plan: AuditPlan, spec: RunSpec, folder: Path, identities: Path | None
) -> AsyncIterator[tuple[str, list[CustomNoiseLearner]]]:
    """Start all services of a run; yield the coordinator's address and the learners."""
    own = _identity(identities, "eavesdropper-local")
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=folder / "captures", credentials=own))
    own = _identity(identities, "coordinator-local")
    coordinator = Coordinator(CoordinatorConfig(eavesdropper=await eavesdropper.start(), credentials=own))
    address = await coordinator.start()
    learners = build_learners(
        mutant,
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
    async with Tasks() as tasks:
        try:
            for learner in learners:
                tasks.start(learner.follow(await learner.start()))
            yield address, learners
        finally:
            for learner in learners:
                await learner.stop()
            await coordinator.stop()
            await eavesdropper.stop()


def _identity(folder: Path | None, name: str) -> Credentials:
    """Return the credentials of a service; empty without encrypted channels."""
    return Credentials() if folder is None else Credentials(folder / name)


# ---- foreign ---------------------------------------------------------------------------------------------------------

_Context = grpc.aio.ServicerContext[bytes, bytes]

FOREIGN_RUN_COUNTS = (24, 48, 100, 200, 500)
"""Numbers of runs of each world that are tried, in order."""

FOREIGN_AUDIT_COUNT = 5
"""Audits with each number of runs, each with runs of its own."""

_EPSILON = 1.0
_GRADIENT, _LOSS = 0.9, 0.1
"""Fractions of the budget."""

_PATIENTS = np.array([[1.0, 0.0, 0.0], [0.3, 0.8, -0.2], [-0.5, 0.1, 0.6], [0.2, -0.7, 0.4]])
_LABELS = np.array([1.0, -1.0, 1.0, -1.0])
"""Labels in the first world; in the second one the first label is inverted."""

_METHOD = "/clinic.Model/Gradient"


@dataclass(frozen=True, slots=True)
class _Answer:
    """Input of a faulty service when it builds an answer."""

    exact: FloatArray
    """Gradient and loss, `(4,)`."""
    noise: FloatArray
    """Noise of a correct service, `(4,)`."""
    world: int
    before: bytes
    """Answer to the previous call."""
    generator: np.random.Generator

    @property
    def noisy_values(self) -> FloatArray:
        """Gradient and loss with noise."""
        return self.exact + self.noise


@dataclass(frozen=True, slots=True)
class _ForeignMutant:
    """A fault of a foreign service.

    Attributes:
        name: one or two words.
        description: the fault, in a few words.
        encode: encodes an answer.
        build_trailer: builds the text in the trailers; empty: none.
        fails: whether a call fails.
        is_correct: whether there is no fault.
        must_be_found: whether a miss counts; without an algorithm, only guesses show too little noise, and need very many runs.
    """

    name: str
    description: str
    encode: Callable[[_Answer], bytes] = lambda answer: answer.noisy_values.tobytes()
    build_trailer: Callable[[_Answer], str] = lambda answer: ""
    fails: Callable[[_Answer], bool] = lambda answer: False
    is_correct: bool = False
    must_be_found: bool = True


class _Clinic(grpc.GenericRpcHandler):
    """The clinic's server in one world."""

    def __init__(self, mutant: _ForeignMutant, world: int, generator: np.random.Generator) -> None:
        self._mutant, self._world, self._generator = mutant, world, generator
        self._before = bytes(32)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return the handler of the only method."""
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: _Context) -> bytes:
        noise = self._generator.laplace(scale=np.repeat([1.0 / _GRADIENT, 1.0 / _LOSS], [3, 1]) / _EPSILON)
        exact = _compute_gradient_and_loss(np.frombuffer(request, "<f8"), self._world)
        answer = _Answer(exact, noise, self._world, self._before, self._generator)
        if text := self._mutant.build_trailer(answer):
            context.set_trailing_metadata((("x-positive", text),))
        if self._mutant.fails(answer):
            await context.abort(grpc.StatusCode.ABORTED, "again, please")
        self._before = self._mutant.encode(answer)
        return self._before


def _get_labels(world: int) -> FloatArray:
    return np.append(_LABELS[0] * (1.0 - 2.0 * world), _LABELS[1:])


def _compute_gradient_and_loss(parameters: FloatArray, world: int) -> FloatArray:
    """Compute gradient and loss of logistic regression, `(4,)`."""
    labels = _get_labels(world)
    margins = labels * (_PATIENTS @ parameters)
    gradient = -(labels / (1.0 + np.exp(margins))) @ _PATIENTS
    return np.append(gradient, np.log1p(np.exp(-margins)).sum())


def _decode(method: str, direction: str, payload: bytes) -> dict[str, FloatArray]:
    numbers = np.frombuffer(payload[: 8 * (len(payload) // 8)], "<f8")
    return {"parameters": numbers} if direction == "out" else {"gradient": numbers[:3], "loss": numbers[3:4]}


def measure_foreign_power(
    mutant: _ForeignMutant,
    *,
    run_counts: Sequence[int] = FOREIGN_RUN_COUNTS,
    audits: int = FOREIGN_AUDIT_COUNT,
    seed: int = 0,
) -> PowerMeasurement:
    """Call a service in two worlds through relays, and audit the captures.

    Args:
        mutant: the fault.
        run_counts: numbers of runs of each world to try.
        audits: audits with each number of runs.
        seed: seed of coins, parameters, noise and audits.
    """
    blank = _create_blank(mutant, "foreign services", run_counts, audits)

    def audit(runs: int, each: int) -> str:
        with tempfile.TemporaryDirectory() as folder, capture_logs():
            asyncio.run(_make_calls(mutant, 2 * runs, Path(folder), each))
            traffic = read_runs(folder, _decode, "stream").runs
        result = audit_traffic(traffic, claim=_EPSILON, confidence=CONFIDENCE, seed=each)
        return _find_refuting_view(result) or next((anomaly.test for anomaly in result.anomalies), "")

    return search_run_count(blank, audit, run_counts, seed)


def _find_refuting_view(audit: ForeignAudit) -> str:
    """Return the view that refutes the claim; empty if none does."""
    if audit.verdict.kind != "refuted":
        return ""
    return max(audit.findings.bounds, key=lambda bound: bound.value).view


async def _make_calls(mutant: _ForeignMutant, runs: int, folder: Path, seed: int) -> None:
    """Make all runs, one call each, in worlds that fair coins choose."""
    coins, *noise = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    async with AsyncExitStack() as stack:
        calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = []
        for world, generator in enumerate(noise):
            address = await stack.enter_async_context(_serve_behind_relay(mutant, world, generator, folder))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            calls.append(channel.unary_unary(_METHOD))
        for _ in range(runs):
            call = calls[coins.integers(2)](coins.uniform(-1.0, 1.0, 3).tobytes())
            await call.code()


@asynccontextmanager
async def _serve_behind_relay(
    mutant: _ForeignMutant, world: int, generator: np.random.Generator, folder: Path
) -> AsyncIterator[str]:
    """Start a service behind a relay, and yield the relay's address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Clinic(mutant, world, generator),))
    address = listen_on(server, "127.0.0.1:0")
    await server.start()
    relay = StandaloneProxy(StandaloneProxyConfig(address, folder=folder, world=world))
    try:
        yield await relay.start()
    finally:
        await relay.stop()
        await server.stop(None)


# ---- foreign mutants -------------------------------------------------------------------------------------------------


def _omit_noise(*places: int) -> Callable[[_Answer], bytes]:
    return lambda answer: np.where(np.isin(np.arange(4), places), answer.exact, answer.noisy_values).tobytes()


def _scale_noise(answer: _Answer, factor: float) -> bytes:
    return (answer.exact + factor * answer.noise).tobytes()


FOREIGN_SERVICE_MUTANTS = (
    _ForeignMutant("correct", "nothing", is_correct=True),
    _ForeignMutant(
        "six digits",
        "nothing: answers are rounded",
        encode=lambda answer: np.array([float(f"{number:.6g}") for number in answer.noisy_values]).tobytes(),
        is_correct=True,
    ),
    _ForeignMutant("no noise", "gradient and loss without noise", encode=_omit_noise(0, 1, 2, 3)),
    _ForeignMutant("exact loss", "a gradient with noise, a loss without", encode=_omit_noise(3)),
    _ForeignMutant(
        "a quarter of the noise", "epsilon 4, where 1 is claimed", encode=partial(_scale_noise, factor=0.25)
    ),
    _ForeignMutant(
        "half the noise", "epsilon 2, where 1 is claimed", encode=partial(_scale_noise, factor=0.5), must_be_found=False
    ),
    _ForeignMutant(
        "repeated",
        "one answer in ten repeats the previous one",
        encode=lambda answer: answer.before if answer.generator.random() < 0.1 else answer.noisy_values.tobytes(),
    ),
    _ForeignMutant(
        "length",
        "half of the answers are longer in one world",
        encode=lambda answer: (
            answer.noisy_values.tobytes() + bytes(8 * (answer.world == 1 and answer.generator.random() < 0.5))
        ),
    ),
    _ForeignMutant(
        "metadata",
        "number of labels 1 in the trailers",
        build_trailer=lambda answer: str(np.count_nonzero(_get_labels(answer.world) > 0.0)),
    ),
    _ForeignMutant(
        "status",
        "half of the calls fail in one world",
        fails=lambda answer: answer.world == 1 and answer.generator.random() < 0.5,
    ),
)
"""Mutants of the foreign service, two correct services among them."""
