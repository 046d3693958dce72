"""What a learner tells its owner of the run that it is in: its spec, its model, and what handing that out costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from sottovoce_client import terminal
from sottovoce_client.live.sending import At
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import NotReady, SpecError
from sottovoce_core.losses.linear import Softmax
from sottovoce_core.losses.loss import MarginLoss
from sottovoce_core.running.run import Publication, build_run, publication
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.codec import from_tensor, to_tensor
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.specs import spec_from_wire
from sottovoce_rpc.tasks import answered
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

_REACH_S, _CALL_S = 10.0, 60.0
_MOST_NUMBERS = 4_000_000
"""Of the features in a call: 32 MB."""
SOURCE = "predict"
"""Under which nobody brings records."""


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What a model says.

    Attributes:
        scores: `(records, ...)`.
        labels: `(records,)`, as the loss makes them of scores.
        rounds_done: that the model has learned from: at the first record, and at the last.
    """

    scores: FloatArray
    labels: FloatArray
    rounds_done: tuple[int, int]


class Owner:
    """A learner in a run, as its owner sees it. `as_owner` makes it.

    Attributes:
        run_id, spec, n_features: of the run.
        status: of the learner, when it was asked first.
    """

    def __init__(
        self, at: At, stub: Any, told: learner_pb2.IntakeResponse, status: LearnerStatus, *, imports: bool
    ) -> None:
        self._at, self._stub = at, stub
        self.run_id, self.n_features, self.status = told.run_id, told.n_features, status
        self.spec: RunSpec = spec_from_wire(told.spec, imports=imports)

    async def publication(self, rounds: int) -> Publication:
        """What it costs to hand out the model after so many rounds, or what it says.

        Raises:
            SottovoceError: the learner is in another run by now, or the spec is none that this version knows.
        """
        now = await _status(self._at, self._stub)
        if now.run_id != self.run_id:
            raise NotReady(f"{now.learner} is in another run by now: {now.run_id or 'none'}, not {self.run_id}")
        run, index = build_run(self.spec, self.n_features), self.spec.names.index(now.learner)
        return publication(run, index, rounds, now.epsilon_spent, private=not now.noise_is_not_private)

    async def predict(self, rows: FloatArray) -> Predictions:
        """What the model in use says of rows of the run.

        Raises:
            NotReady: the run did not opt in.
            SottovoceError: it does not answer, or not to this caller.
        """
        each = max(1, _MOST_NUMBERS // self.n_features)
        scores, labels, rounds = list[FloatArray](), list[FloatArray](), list[int]()
        for first in range(0, len(rows), each):
            request = learner_pb2.PredictRequest(features=to_tensor(rows[first : first + each]))
            answer = await _asked(self._at, self._stub.Predict(request, timeout=_CALL_S))
            scores.append(from_tensor(answer.scores))
            labels.append(from_tensor(answer.labels))
            rounds.append(answer.rounds_done)
        return Predictions(np.concatenate(scores), np.concatenate(labels), (rounds[0], rounds[-1]))

    async def weights(self) -> tuple[FloatArray, int]:
        """The parameters of a linear model, `(features,)` or `(classes, features)`, and the rounds that it has learned from.

        They are its scores of rows that are zero but in one place; a power of two there keeps them as they are.

        Raises:
            SpecError: the loss's scores are not linear.
            NotReady: as `predict`; or the model moved meanwhile.
        """
        require_linear(self.spec)
        size = 2.0 ** min(0.0, np.floor(np.log2(self.spec.loss.feature_bound)))
        found, rounds, each = list[FloatArray](), set[int](), max(1, _MOST_NUMBERS // self.n_features)
        for first in range(0, self.n_features, each):
            part = np.zeros((min(each, self.n_features - first), self.n_features))
            part[:, first : first + len(part)] = size * np.eye(len(part))
            said = await self.predict(part)
            found.append(said.scores / size)
            rounds |= set(said.rounds_done)
        if len(rounds) > 1:
            raise NotReady("the model moved while it was asked for, part by part: ask again when its run is over")
        return np.concatenate(found).T.copy(), rounds.pop()


def require_linear(spec: RunSpec) -> None:
    """Raises `SpecError` where a model is more than weights for scores."""
    if not isinstance(spec.loss, MarginLoss | Softmax):
        raise SpecError(
            f"a model of the {spec.loss.kind} loss cannot be exported: only those whose scores are linear can, of built-in losses"
        )


@asynccontextmanager
async def as_owner(at: At, *, imports: bool = False) -> AsyncIterator[Owner]:
    """The learner at an address, and the run that it is in.

    Args:
        at: where it is, and who asks.
        imports: whether its spec may name code to import.

    Raises:
        SottovoceError: it does not answer, not to this caller, or is in no run.
    """
    async with at.channel() as to:
        stub = learner_pb2_grpc.LearnerStub(to)
        first = stub.Status(learner_pb2.StatusRequest(), timeout=_REACH_S)
        told = await _asked(at, answered(first, to, f"the learner at {at.address}", terminal.say))
        status = LearnerStatus.from_wire(told.status)
        if at.name and status.learner != at.name:
            raise NotReady(f"at {at.address} is the learner {status.learner!r}, not {at.name!r}")
        run = await _asked(at, stub.Intake(learner_pb2.IntakeRequest(source=SOURCE), timeout=_CALL_S))
        yield Owner(at, stub, run, status, imports=imports)


async def _status(at: At, stub: Any) -> LearnerStatus:
    answer = await _asked(at, stub.Status(learner_pb2.StatusRequest(), timeout=_CALL_S))
    return LearnerStatus.from_wire(answer.status)


async def _asked(at: At, call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise at.error(error) from None
