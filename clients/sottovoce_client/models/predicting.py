"""`sottovoce predict`: what a learner's model says of the records of a file."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.documents import new_file
from sottovoce_client.live.sending import At
from sottovoce_client.models.inputs import Inputs
from sottovoce_client.models.owner import Predictions, as_owner
from sottovoce_core.data.known import data_folders
from sottovoce_core.errors import SpecError
from sottovoce_core.running.run import Publication
from sottovoce_core.running.transcript import parquet
from sottovoce_core.spec import RunSpec
from sottovoce_core.table import Table
from sottovoce_core.text import cell_of

WRITES = (".csv", ".parquet")


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
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


async def predict(at: At, file: Path, own: RunSpec | None, *, imports: bool = False) -> Predicted:
    """Ask a learner about the records of a file.

    Args:
        at: where it is, and who asks.
        file: of records; labels in it are not looked at.
        own: the run's spec, whose data are here; None: it is not known.
        imports: whether the spec that the learner tells may name code to import.

    Raises:
        SottovoceError: it does not answer, or not to this caller; or the records are not those of the run.
    """
    async with as_owner(at, imports=imports) as owner:
        inputs = Inputs.of(owner.spec, owner.n_features, own, data_folders())
        said = await owner.predict(inputs.rows(file))
        cost = await owner.publication(said.rounds_done[-1])
        return Predicted(owner.status.learner, owner.run_id, said.rounds_done[-1], _table(inputs, said), cost)


def _table(inputs: Inputs, said: Predictions) -> Table:
    loss, schema = inputs.spec.loss, inputs.spec.data.schema
    columns: dict[str, Any] = {"record": np.arange(len(said.scores))}
    names = inputs.classes
    if names is None:
        columns["label"] = said.scores if schema is None else schema.label.unscaled(said.scores)
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
    if out is not None and out.suffix.lower() not in WRITES:
        raise SpecError(f"--out must be a {' or '.join(WRITES)} file, got {out}")


def write(table: Table, out: Path | None) -> None:
    """To a new file, by its suffix; None: to standard output, as CSV."""
    if out is None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([cell_of(name) for name in table.columns])
        writer.writerows([[cell_of(cell) for cell in row] for row in table.rows()])
    elif out.suffix.lower() == ".csv":
        with new_file(out) as file:
            table.to_csv(file.name)
    else:
        with new_file(out) as file:
            parquet().write_table(table.to_arrow(), file)
