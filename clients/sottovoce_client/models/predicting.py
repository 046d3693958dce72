"""What a learner tells its owner of the run that it is in: its model, what that says of records, and what handing it out costs.

`sottovoce predict` asks about the records of a file.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client import terminal
from sottovoce_client.atomic_files import create_file
from sottovoce_client.live.sender import LearnerEndpoint
from sottovoce_client.models.input_format import InputFormat
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.catalogue import get_data_folders
from sottovoce_core.errors import FailedPrecondition, SpecError
from sottovoce_core.losses.linear import SoftmaxLoss
from sottovoce_core.losses.loss import MarginLoss
from sottovoce_core.runs.run import Publication, assess_publication, build_run
from sottovoce_core.runs.transcript import import_parquet
from sottovoce_core.spec import RunSpec
from sottovoce_core.table import Table
from sottovoce_core.text import escape_formula
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.specs import spec_from_wire
from sottovoce_rpc.tasks import await_answer
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

OUTPUT_SUFFIXES = (".csv", ".parquet")
_CONNECT_TIMEOUT_S = 10.0
_MAX_VALUES_PER_CALL = 4_000_000
"""Of the features in a call: 32 MB."""
_SOURCE = "predict"
"""Under which nobody brings records."""


@dataclass(frozen=True, slots=True, eq=False)
class _Predictions:
    """What a model says.

    Attributes:
        scores: `(records, ...)`.
        labels: `(records,)`, as the loss makes them of scores.
        rounds_done: that the model has learned from: at the first record, and at the last.
    """

    scores: FloatArray
    labels: FloatArray
    rounds_done: tuple[int, int]


class _Owner:
    """A learner in a run, as its owner sees it. `connect_as_owner` makes it.

    Attributes:
        run_id, spec, n_features: of the run.
        status: of the learner, when it was asked first.
    """

    def __init__(
        self,
        at: LearnerEndpoint,
        stub: Any,
        told: learner_pb2.GetIntakeResponse,
        status: LearnerStatus,
        *,
        imports: bool,
    ) -> None:
        self._at, self._stub = at, stub
        self.run_id, self.n_features, self.status = told.run_id, told.n_features, status
        self.spec: RunSpec = spec_from_wire(told.spec, imports=imports)

    async def compute_publication(self, rounds: int) -> Publication:
        """What it costs to hand out the model after so many rounds, or what it says.

        Raises:
            SottovoceError: the learner is in another run by now, or the spec is none that this version knows.
        """
        now = await self._at.fetch_status(self._stub)
        if now.run_id != self.run_id:
            raise FailedPrecondition(
                f"{now.learner} is in another run by now: {now.run_id or 'none'}, not {self.run_id}"
            )
        run, index = build_run(self.spec, self.n_features), self.spec.names.index(now.learner)
        return assess_publication(run, index, rounds, now.epsilon_spent, has_private_noise=not now.noise_is_not_private)

    async def predict(self, rows: FloatArray) -> _Predictions:
        """What the model in use says of rows of the run.

        Raises:
            FailedPrecondition: the run did not opt in.
            SottovoceError: it does not answer, or not to this caller.
        """
        each = max(1, _MAX_VALUES_PER_CALL // self.n_features)
        parts = [await self._at.predict(self._stub, rows[first : first + each]) for first in range(0, len(rows), each)]
        scores, labels, rounds = zip(*parts, strict=True)
        return _Predictions(np.concatenate(scores), np.concatenate(labels), (rounds[0], rounds[-1]))

    async def fetch_weights(self) -> tuple[FloatArray, int]:
        """The parameters of a linear model, `(features,)` or `(classes, features)`, and the rounds that it has learned from.

        They are its scores of rows that are zero but in one place; a power of two there keeps them as they are.

        Raises:
            SpecError: the loss's scores are not linear.
            FailedPrecondition: as `predict`; or the model moved meanwhile.
        """
        require_linear(self.spec)
        size = 2.0 ** min(0.0, np.floor(np.log2(self.spec.loss.feature_bound)))
        found, rounds, n = list[FloatArray](), set[int](), self.n_features
        each = max(1, _MAX_VALUES_PER_CALL // n)
        for first in range(0, n, each):
            rows = size * np.eye(min(each, n - first), n, first)
            scores, _, done = await self._at.predict(self._stub, rows)
            found.append(scores / size)
            rounds.add(done)
        if len(rounds) > 1:
            raise FailedPrecondition(
                "the model moved while it was asked for, part by part: ask again when its run is over"
            )
        return np.concatenate(found).T.copy(), rounds.pop()


def require_linear(spec: RunSpec) -> None:
    """Raises `SpecError` where a model is more than weights for scores."""
    if not isinstance(spec.loss, MarginLoss | SoftmaxLoss):
        raise SpecError(
            f"a model of the {spec.loss.kind} loss cannot be exported: only those whose scores are linear can, of built-in losses"
        )


@asynccontextmanager
async def connect_as_owner(endpoint: LearnerEndpoint, *, imports: bool = False) -> AsyncIterator[_Owner]:
    """The learner at an address, and the run that it is in.

    Args:
        at: where it is, and who asks.
        imports: whether its spec may name code to import.

    Raises:
        SottovoceError: it does not answer, not to this caller, or is in no run.
    """
    async with endpoint.open_channel() as to:
        stub = learner_pb2_grpc.LearnerStub(to)
        first = stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=_CONNECT_TIMEOUT_S)
        told = await endpoint.await_answer(
            await_answer(first, to, f"the learner at {endpoint.address}", terminal.print_notice)
        )
        status = LearnerStatus.from_wire(told.status)
        endpoint.require_name(status)
        yield _Owner(endpoint, stub, await endpoint.fetch_intake(stub, _SOURCE), status, imports=imports)


@dataclass(frozen=True, slots=True, eq=False)
class PredictionResult:
    """What came of a file.

    Attributes:
        learner, run_id: whose model it is.
        rounds_done: that it has learned from, at the last record.
        table: a row for each record: `record` from 0, `label`, `score` or one for each class, and probabilities where the loss
            gives some.
        publication: what handing these out costs.
    """

    learner: str
    run_id: str
    rounds_done: int
    table: Table
    publication: Publication

    def write(self, out: Path | None) -> None:
        """To a new file, by its suffix; None: to standard output, as CSV."""
        table = self.table
        if out is None:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow([escape_formula(name) for name in table.columns])
            writer.writerows([[escape_formula(cell) for cell in row] for row in table.rows()])
            return
        with create_file(out) as file:
            if out.suffix.lower() == ".csv":
                table.to_csv(file.name)
            else:
                import_parquet().write_table(table.to_arrow(), file)


async def predict(
    endpoint: LearnerEndpoint, file: Path, local_spec: RunSpec | None, *, imports: bool = False
) -> PredictionResult:
    """Ask a learner about the records of a file.

    Args:
        at: where it is, and who asks.
        file: of records; labels in it are not looked at.
        own: the run's spec, whose data are here; None: it is not known.
        imports: whether the spec that the learner tells may name code to import.

    Raises:
        SottovoceError: it does not answer, or not to this caller; or the records are not those of the run.
    """
    async with connect_as_owner(endpoint, imports=imports) as owner:
        inputs = InputFormat.from_spec(owner.spec, owner.n_features, local_spec, get_data_folders())
        said = await owner.predict(inputs.read_rows(file))
        cost = await owner.compute_publication(said.rounds_done[-1])
        return PredictionResult(owner.status.learner, owner.run_id, said.rounds_done[-1], _table(inputs, said), cost)


def _table(inputs: InputFormat, said: _Predictions) -> Table:
    loss, schema = inputs.spec.loss, inputs.spec.data.schema
    columns: dict[str, Any] = {"record": np.arange(len(said.scores))}
    names = inputs.classes
    if names is None:
        columns["label"] = said.scores if schema is None else schema.label.unscale(said.scores)
        return Table(columns)
    if any(isinstance(name, str) for name in names):
        names = tuple(map(str, names))  # a column is of one type
    columns["label"] = np.array([names[int(label)] for label in said.labels])
    if said.scores.ndim == 1:
        columns["score"] = said.scores
    else:
        columns |= {f"score {names[k]}": said.scores[:, k] for k in range(said.scores.shape[1])}
    chances = loss.probabilities(said.scores)
    if chances is not None:
        columns |= {f"probability {names[k]}": chances[:, k] for k in range(chances.shape[1])}
    return Table(columns)


def require_writable(out: Path | None) -> None:
    """Raises `SpecError` for a file of a format that is not written."""
    if out is not None and out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise SpecError(f"--out must be a {' or '.join(OUTPUT_SUFFIXES)} file, got {out}")
