"""Access of an owner to a learner's model: predictions, parameters, and the privacy cost of publishing them.

`sottovoce predict` predicts the labels of the records of a file.
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
"""Maximum number of feature values in a call: 32 MB."""
_SOURCE = "predict"
"""Source name for the intake request; no feeder uses it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Predictions:
    """Predictions of a model.

    Attributes:
        scores: `(records, ...)`.
        labels: `(records,)`, derived from the scores by the loss.
        rounds_done: Numbers of rounds that the model had learned from at the first and at the last record.
    """

    scores: FloatArray
    labels: FloatArray
    rounds_done: tuple[int, int]


class _Owner:
    """Owner's connection to a learner in a run, created by `connect_as_owner`.

    Attributes:
        run_id, spec, n_features: Properties of the run.
        status: Status of the learner when the connection was made.
    """

    def __init__(
        self,
        endpoint: LearnerEndpoint,
        stub: Any,
        intake: learner_pb2.GetIntakeResponse,
        status: LearnerStatus,
        *,
        imports: bool,
    ) -> None:
        self._endpoint, self._stub = endpoint, stub
        self.run_id, self.n_features, self.status = intake.run_id, intake.n_features, status
        self.spec: RunSpec = spec_from_wire(intake.spec, imports=imports)

    async def compute_publication(self, rounds: int) -> Publication:
        """Return the privacy cost of releasing the model after this round, or its predictions.

        Raises:
            SottovoceError: The learner is in another run by now, or this version cannot read the spec.
        """
        now = await self._endpoint.fetch_status(self._stub)
        if now.run_id != self.run_id:
            raise FailedPrecondition(
                f"{now.learner} must still be in run {self.run_id}, and is in {now.run_id or 'none'}"
            )
        run, index = build_run(self.spec, self.n_features), self.spec.names.index(now.learner)
        return assess_publication(run, index, rounds, now.epsilon_spent, has_private_noise=not now.noise_is_not_private)

    async def predict(self, rows: FloatArray) -> _Predictions:
        """Predict rows of the run by the current model.

        Raises:
            FailedPrecondition: The run's spec does not enable predictions.
            SottovoceError: The learner does not answer, or rejects the caller.
        """
        size = max(1, _MAX_VALUES_PER_CALL // self.n_features)
        parts = [
            await self._endpoint.predict(self._stub, rows[first : first + size]) for first in range(0, len(rows), size)
        ]
        scores, labels, rounds = zip(*parts, strict=True)
        return _Predictions(np.concatenate(scores), np.concatenate(labels), (rounds[0], rounds[-1]))

    async def fetch_weights(self) -> tuple[FloatArray, int]:
        """Fetch the parameters of a linear model, `(features,)` or `(classes, features)`, and its number of rounds.

        The parameters are the scores of rows with a single nonzero value; a power of two as this value keeps them exact.

        Raises:
            SpecError: The loss's scores are not linear.
            FailedPrecondition: As `predict`; or the model changed between the calls.
        """
        require_linear(self.spec)
        size = 2.0 ** min(0.0, np.floor(np.log2(self.spec.loss.feature_bound)))
        found, rounds, n = list[FloatArray](), set[int](), self.n_features
        each = max(1, _MAX_VALUES_PER_CALL // n)
        for first in range(0, n, each):
            rows = size * np.eye(min(each, n - first), n, first)
            scores, _, done = await self._endpoint.predict(self._stub, rows)
            found.append(scores / size)
            rounds.add(done)
        if len(rounds) > 1:
            raise FailedPrecondition(
                "the model must not change while its parts are fetched, and it did: try again when its run has ended"
            )
        return np.concatenate(found).T.copy(), rounds.pop()


def require_linear(spec: RunSpec) -> None:
    """Raise `SpecError` if the loss's scores are not linear in the features."""
    if not isinstance(spec.loss, MarginLoss | SoftmaxLoss):
        raise SpecError(
            f"an exported model must have a built-in loss with linear scores, got the {spec.loss.kind} loss"
        )


@asynccontextmanager
async def connect_as_owner(endpoint: LearnerEndpoint, *, imports: bool = False) -> AsyncIterator[_Owner]:
    """Connect to a learner that is in a run.

    Args:
        endpoint: Address of the learner, and credentials of the caller.
        imports: Allow its spec to name code to import.

    Raises:
        SottovoceError: The learner does not answer, rejects the caller, or is in no run.
    """
    async with endpoint.open_channel() as channel:
        stub = learner_pb2_grpc.LearnerStub(channel)
        call = stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=_CONNECT_TIMEOUT_S)
        answer = await endpoint.await_answer(
            await_answer(call, channel, f"the learner at {endpoint.address}", terminal.print_notice)
        )
        status = LearnerStatus.from_wire(answer.status)
        endpoint.require_name(status)
        yield _Owner(endpoint, stub, await endpoint.fetch_intake(stub, _SOURCE), status, imports=imports)


@dataclass(frozen=True, slots=True, eq=False)
class PredictionResult:
    """Predictions for the records of a file.

    Attributes:
        learner, run_id: Learner and run of the model.
        rounds_done: Number of rounds that the model had learned from at the last record.
        table: A row for each record: `record` from 0, `label`, `score` or one score for each class, and probabilities if the
            loss has them.
        publication: Privacy cost of publishing the predictions.
    """

    learner: str
    run_id: str
    rounds_done: int
    table: Table
    publication: Publication

    def write(self, out: Path | None) -> None:
        """Write to a new file, in the format of its suffix; None: to standard output, as CSV."""
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
    """Predict the labels of the records of a file by a learner's model.

    Args:
        endpoint: Address of the learner, and credentials of the caller.
        file: File of records; its labels are ignored.
        local_spec: Spec of the run with paths to local data; None: not available.
        imports: Allow the learner's spec to name code to import.

    Raises:
        SottovoceError: The learner does not answer or rejects the caller, or the records do not fit the run.
    """
    async with connect_as_owner(endpoint, imports=imports) as owner:
        inputs = InputFormat.from_spec(owner.spec, owner.n_features, local_spec, get_data_folders())
        predictions = await owner.predict(inputs.read_rows(file))
        rounds = predictions.rounds_done[-1]
        cost = await owner.compute_publication(rounds)
        return PredictionResult(owner.status.learner, owner.run_id, rounds, _make_table(inputs, predictions), cost)


def _make_table(inputs: InputFormat, predictions: _Predictions) -> Table:
    loss, schema, scores = inputs.spec.loss, inputs.spec.data.schema, predictions.scores
    columns: dict[str, Any] = {"record": np.arange(len(scores))}
    names = inputs.classes
    if names is None:
        columns["label"] = scores if schema is None else schema.label.unscale(scores)
        return Table(columns)
    if any(isinstance(name, str) for name in names):
        names = tuple(map(str, names))  # a column has one type
    columns["label"] = np.array([names[int(label)] for label in predictions.labels])
    if scores.ndim == 1:
        columns["score"] = scores
    else:
        columns |= {f"score {names[k]}": scores[:, k] for k in range(scores.shape[1])}
    probabilities = loss.probabilities(scores)
    if probabilities is not None:
        columns |= {f"probability {names[k]}": probabilities[:, k] for k in range(probabilities.shape[1])}
    return Table(columns)


def require_writable(out: Path | None) -> None:
    """Raise `SpecError` if the suffix of an output file names no supported format."""
    if out is not None and out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise SpecError(f"--out must be a {' or '.join(OUTPUT_SUFFIXES)} file, got {out}")
