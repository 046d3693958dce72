"""Audits of broken foreign services: a small gRPC server of no format of ours, one for each world, behind relays.

A clinic is asked for a gradient and a loss at parameters that are others in every call. One patient's label differs. The
gradient differs by one number then, by 1; the loss by the parameter there, 1 at most. With Laplace noise on both, of a tenth of
the budget for the loss, an answer has epsilon 1.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from structlog.testing import capture_logs

from sottovoce.arrays import FloatArray
from sottovoce.lab.foreign.audit import ForeignAudit, audit_conversations
from sottovoce.lab.selftest.power import CONFIDENCE
from sottovoce_client.lab.breaks.served import Served, served
from sottovoce_client.lab.foreign.runs import read_runs
from sottovoce_eavesdropper.relay import ForeignConfig, ForeignRelay
from sottovoce_rpc.server import listen_on

Context = grpc.aio.ServicerContext[bytes, bytes]

RUNGS = (24, 48, 100, 200, 500)
"""Runs of each world that are tried, one after the other."""

AUDITS = 5
"""With each number of runs, all of runs of their own."""

EPSILON = 1.0
GRADIENT, LOSS = 0.9, 0.1
"""Parts of the budget."""

PATIENTS = np.array([[1.0, 0.0, 0.0], [0.3, 0.8, -0.2], [-0.5, 0.1, 0.6], [0.2, -0.7, 0.4]])
LABELS = np.array([1.0, -1.0, 1.0, -1.0])
"""In the first world; in the second one the first label is the other one."""

METHOD = "/clinic.Model/Gradient"


@dataclass(frozen=True, slots=True)
class Answer:
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
class ForeignBreak:
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
    what: str
    says: Callable[[Answer], bytes] = lambda answer: answer.said.tobytes()
    trailers: Callable[[Answer], str] = lambda answer: ""
    refuses: Callable[[Answer], bool] = lambda answer: False
    correct: bool = False
    sure: bool = True


class _Clinic(grpc.GenericRpcHandler):
    """The service in one world."""

    def __init__(self, broken: ForeignBreak, world: int, generator: np.random.Generator) -> None:
        self._broken, self._world, self._generator = broken, world, generator
        self._before = bytes(32)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """One method."""
        return grpc.unary_unary_rpc_method_handler(self._gradient)

    async def _gradient(self, request: bytes, context: Context) -> bytes:
        noise = self._generator.laplace(scale=np.repeat([1.0 / GRADIENT, 1.0 / LOSS], [3, 1]) / EPSILON)
        exact = _exact(np.frombuffer(request, "<f8"), self._world)
        answer = Answer(exact, noise, self._world, self._before, self._generator)
        if text := self._broken.trailers(answer):
            context.set_trailing_metadata((("x-positive", text),))
        if self._broken.refuses(answer):
            await context.abort(grpc.StatusCode.ABORTED, "again, please")
        self._before = self._broken.says(answer)
        return self._before


def _labels(world: int) -> FloatArray:
    return np.append(LABELS[0] * (1.0 - 2.0 * world), LABELS[1:])


def _exact(parameters: FloatArray, world: int) -> FloatArray:
    """`(4,)` gradient and loss of logistic regression."""
    labels = _labels(world)
    margins = labels * (PATIENTS @ parameters)
    gradient = -(labels / (1.0 + np.exp(margins))) @ PATIENTS
    return np.append(gradient, np.log1p(np.exp(-margins)).sum())


def _decode(method: str, direction: str, payload: bytes) -> dict[str, FloatArray]:
    numbers = np.frombuffer(payload[: 8 * (len(payload) // 8)], "<f8")
    return {"parameters": numbers} if direction == "out" else {"gradient": numbers[:3], "loss": numbers[3:4]}


def measure_foreign(
    broken: ForeignBreak, *, rungs: Sequence[int] = RUNGS, audits: int = AUDITS, seed: int = 0
) -> Served:
    """Call a service in two worlds through relays, and audit what they heard.

    Args:
        broken: what is wrong with it.
        rungs: runs of each world.
        audits: with each number of runs.
        seed: of coins, parameters, noise and audits.
    """
    blank = Served(broken.name, broken.what, "foreign services", broken.correct, max(rungs), audits, sure=broken.sure)

    def found_by(runs: int, each: int) -> str:
        with tempfile.TemporaryDirectory() as folder, capture_logs():
            asyncio.run(_make(broken, 2 * runs, Path(folder), each))
            heard = read_runs(folder, _decode, "stream").runs
        return _found_by(audit_conversations(heard, claim=EPSILON, confidence=CONFIDENCE, seed=each))

    return served(blank, found_by, rungs, seed)


def _found_by(done: ForeignAudit) -> str:
    """The view that refutes the claim, or what was said twice; empty: nothing is."""
    if done.verdict.kind == "refuted":
        return max(done.found.bounds, key=lambda bound: bound.value).view
    return next((sign.test for sign in done.signs), "")


async def _make(broken: ForeignBreak, runs: int, folder: Path, seed: int) -> None:
    """All runs, each one call, in worlds that fair coins choose."""
    coins, *noise = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    async with AsyncExitStack() as stack:
        calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = []
        for world, generator in enumerate(noise):
            address = await stack.enter_async_context(_relayed(broken, world, generator, folder))
            to = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            calls.append(to.unary_unary(METHOD))
        for _ in range(runs):
            call = calls[coins.integers(2)](coins.uniform(-1.0, 1.0, 3).tobytes())
            await call.code()


@asynccontextmanager
async def _relayed(
    broken: ForeignBreak, world: int, generator: np.random.Generator, folder: Path
) -> AsyncIterator[str]:
    """A service behind a relay, at the relay's address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Clinic(broken, world, generator),))
    to = listen_on(server, "127.0.0.1:0")
    await server.start()
    relay = ForeignRelay(ForeignConfig(to, folder=folder, world=world))
    try:
        yield await relay.start()
    finally:
        await relay.stop()
        await server.stop(None)


# ---- breaks ----------------------------------------------------------------------------------------------------------


def _rounded(answer: Answer) -> bytes:
    """To six significant digits."""
    return np.array([float(f"{number:.6g}") for number in answer.said]).tobytes()


def _without_noise_on(*places: int) -> Callable[[Answer], bytes]:
    return lambda answer: np.where(np.isin(np.arange(4), places), answer.exact, answer.said).tobytes()


def _scaled(answer: Answer, factor: float) -> bytes:
    return (answer.exact + factor * answer.noise).tobytes()


def _again(answer: Answer) -> bytes:
    """One answer in ten is that of the call before."""
    return answer.before if answer.generator.random() < 0.1 else answer.said.tobytes()


def _longer(answer: Answer) -> bytes:
    """By eight bytes, half of the time, in one world."""
    return answer.said.tobytes() + bytes(8 * int(answer.world == 1 and answer.generator.random() < 0.5))


def _fails(answer: Answer) -> bool:
    return answer.world == 1 and bool(answer.generator.random() < 0.5)


def _positives(answer: Answer) -> str:
    return str(np.count_nonzero(_labels(answer.world) > 0.0))


FOREIGN = (
    ForeignBreak("correct", "nothing", correct=True),
    ForeignBreak("six digits", "nothing: answers are rounded", says=_rounded, correct=True),
    ForeignBreak("no noise", "the gradient and its loss as they are", says=_without_noise_on(0, 1, 2, 3)),
    ForeignBreak("exact loss", "a noised gradient beside a loss without noise", says=_without_noise_on(3)),
    ForeignBreak("a quarter of the noise", "epsilon 4, where 1 is claimed", says=partial(_scaled, factor=0.25)),
    ForeignBreak("half the noise", "epsilon 2, where 1 is claimed", says=partial(_scaled, factor=0.5), sure=False),
    ForeignBreak("said again", "one answer in ten is that of the call before", says=_again),
    ForeignBreak("length", "half of the answers are longer in one world", says=_longer),
    ForeignBreak("metadata", "how many labels are 1, behind an answer", trailers=_positives),
    ForeignBreak("status", "half of the calls fail in one world", refuses=_fails),
)
"""Foreign services, two correct ones among them."""
