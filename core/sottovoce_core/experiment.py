"""Experiments: a run spec made in Python or read from a file, with its records, its run and its guarantees.

`prepare` is the lower-level step that every command uses: it turns a spec into a run and its data, ready to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import ValidationError, ValidationInfo, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.arrays import summarize_fields
from sottovoce_core.budget.composition import check_lattice
from sottovoce_core.budget.cost import LearnerCost, combine_costs
from sottovoce_core.data import LearnerData, PlacedData, load_dataset
from sottovoce_core.data.catalogue import get_data_folders
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import Guarantee
from sottovoce_core.registry import Section
from sottovoce_core.runs.placement import create_empty_live_data, estimate_live_data, place_data
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.run_warnings import find_budget_warnings, find_data_warnings
from sottovoce_core.spec import RunSpec, dump_spec, inline_schema, read_document
from sottovoce_core.table import Table
from sottovoce_core.text import abbreviate_names, suggest_name
from sottovoce_core.validation_errors import abbreviate_value, explain
from sottovoce_core.yaml_files import write_yaml

_MAX_SECTION_CHARACTERS = 300
"""Maximum length of a section in the table of an experiment."""
PAUSES = "PAUSES"
"""Code of the warning about a live run that fails when its records pause."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun:
    """A run that may start, with its placed data.

    `warnings` name what of the budget ends the run early, and what of the records limits the meaning of its numbers.
    """

    run: Run
    data: PlacedData
    warnings: tuple[RunWarning, ...] = ()

    __repr__ = summarize_fields

    def find_worst_case_learner(self) -> int:
        """Return the index of the learner with the largest epsilon over the whole run."""
        counts = [np.diff(own.offsets) for own in self.data.learners]
        return int(np.argmax([self.run.guarantee(i, each).epsilon() for i, each in enumerate(counts)]))


def prepare(
    spec: RunSpec, *, folders: Sequence[Path] = (), live: bool = False, labels_required: bool = True
) -> PreparedRun:
    """Load and place the data, and check the run.

    Args:
        spec: the run spec.
        folders: folders to search for named data sets (`get_data_folders`).
        live: whether records may arrive later, from elsewhere; then there are none now.
        labels_required: whether labels are learned. If not, the meaning of a single label may stay open: the cost is the same.

    Raises:
        SpecError: the spec cannot be run as it is, or has no records yet.
        DataError: its data cannot be used.
    """
    if spec.data.is_live and not live:
        raise SpecError(
            "data.source: live has no records before services run it (sottovoce up, sottovoce run): name a data set or a file"
        )
    if not spec.data.is_live:
        dataset = load_dataset(spec.data, spec.loss, folders=folders, labels_required=labels_required)
        ready = _prepare(spec, data := place_data(spec, dataset))
        return replace(ready, warnings=(*ready.warnings, *find_data_warnings(spec, dataset, data)))
    found = _prepare(spec, create_empty_live_data(spec))
    return replace(found, run=replace(found.run, warnings=(*found.run.warnings, *_find_pause_warnings(spec))))


def _find_pause_warnings(spec: RunSpec) -> Iterator[RunWarning]:
    """Warn about a run that fails if its records pause."""
    if spec.clock.mode in ("free", "async"):
        yield RunWarning(
            PAUSES,
            f"clock.mode {spec.clock.mode} waits in every round for a record at each learner, and the run fails if none arrives "
            f"for {spec.clock.deadline_s:g} s (clock.deadline_s): take paced where streams pause",
        )


def estimate_live_run(spec: RunSpec, rounds: int | None, rate: float, horizon: float | None = None) -> PreparedRun:
    """Prepare a run of live records as if they arrived evenly: its cost depends only on their numbers.

    Args:
        spec: the run spec.
        rounds: number of rounds to examine (None: all planned ones, or else the horizon).
        rate: mean number of records a round.
        horizon: rounds that a guarantee must cover; infinity: all rounds there will ever be. The rounds with the fewest
            records count then.

    Raises:
        SpecError: its records are not live, no number of rounds is known, or it cannot be run as it is.
    """
    if not spec.data.is_live:
        raise SpecError(
            f"the source {spec.data.source} fixes the records of each round: leave out the rate and the horizon"
        )
    if horizon == math.inf:
        rounds, rate = (
            rounds or 2,
            math.floor(rate) if rate >= 1.0 else min(rate, 0.5),
        )  # so that one of two brings none
    elif rounds is None and spec.is_unbounded and horizon is not None and horizon >= 1.0:
        rounds = int(horizon)
    if rounds is None and spec.is_unbounded:
        raise SpecError("a run without a planned end needs the number of rounds to examine (--rounds), got none")
    if rounds is not None:
        spec = spec.model_copy(update={"rounds": rounds})
    return _prepare(spec, estimate_live_data(spec, rate))


def _prepare(spec: RunSpec, data: PlacedData) -> PreparedRun:
    """Raise `SpecError` if the run is not possible."""
    run = build_run(spec, data.n_features)
    if run.algorithm.accountant(0).has_shared_records and not all(
        _has_equal_schedule(data.learners[0], other) for other in data.learners[1:]
    ):
        raise SpecError(
            f"{spec.algorithm.name} needs the same records at every learner in every round: set data.partition to shared, "
            "without own_order"
        )
    if run.algorithm.accountant(0).has_shared_records and spec.data.is_live:
        raise SpecError(
            f"{spec.algorithm.name} needs the same records at every learner in every round, and live ones are each learner's own"
        )
    slack = check_lattice(run)
    return PreparedRun(replace(run, warnings=run.warnings + slack), data, tuple(find_budget_warnings(run, data)))


def _has_equal_schedule(one: LearnerData, other: LearnerData) -> bool:
    parts = ("features", "labels", "order", "offsets")
    return one is other or all(np.array_equal(getattr(one, part), getattr(other, part)) for part in parts)


class Experiment(RunSpec):
    """A run spec to work with in Python.

    Every field of a spec file is a keyword here, and a section is given as in a file (a word, or a mapping of fields) or as an
    object of the section's class. An experiment is immutable; `replace` makes a changed copy. Records are loaded and placed
    when they are first needed (named data sets from $SOTTOVOCE_DATA or from the folder of `sottovoce data fetch`).

    Raises:
        SpecError: one line per problem, each with the field, the value and what is allowed.

    >>> from sottovoce_core.losses.linear import LogisticLoss
    >>> experiment = Experiment(
    ...     rounds=30,
    ...     learners=["north", "east", "south"],
    ...     algorithm={"name": "ldp-dol", "sigma": 2.0},
    ...     loss=LogisticLoss(ridge=0.01),
    ...     topology={"graph": "complete"},
    ...     data={"source": "breast_cancer", "scale": "standard"},
    ... )
    >>> experiment
    Experiment 'run': ldp-dol, 3 learners, 30 rounds of breast_cancer
    >>> round(experiment.guarantee("north").epsilon(), 3)
    53.748
    >>> Experiment(rounds=0, algorithm="ldp-dol")
    Traceback (most recent call last):
    sottovoce_core.errors.SpecError: experiment: rounds: must be greater than 0, got 0
    """

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, fields: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Reword errors as for a spec file; read a schema that is named as a file."""
        fields = inline_schema(fields, Path())
        try:
            return handler(fields)
        except ValidationError as error:
            source = (info.context or {}).get("source", "experiment")
            raise SpecError(explain(error, source, fields, RunSpec)) from None

    def __repr__(self) -> str:
        size = f"{self.n_learners} learners, {self.rounds:,} rounds of {self.data.source}"
        return f"Experiment {self.name!r}: {self.algorithm.name}, {size}"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Render the experiment as a table, for notebooks; it loads no records."""
        budget = "none" if self.privacy.budget is None else self.privacy.budget
        facts = {
            "name": self.name,
            "rounds": self.rounds,
            "learners": abbreviate_names(self.names),
            "records": str(self.data.source),
            "budget": budget,
            "delta": self.privacy.delta,
        }
        sections = {name: getattr(self, name) for name in ("algorithm", "loss", "decision_set", "topology")}
        return Table.from_facts(
            {**facts, **{name: _describe_section(each) for name, each in sections.items()}}
        )._repr_html_()

    def to_yaml(self, path: Path | str | None = None) -> str:
        """Return the spec file of this experiment, complete with defaults; write it to `path` if given."""
        text = dump_spec(self, None if path is None else Path(path).parent)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def replace(self, **changes: Any) -> Experiment:
        """Return a copy with some fields changed, checked like any experiment.

        Args:
            changes: field to value; a field of a section as `section.field`.

        Raises:
            SpecError: no such section or field, or a value that is not allowed.

        >>> experiment = Experiment(rounds=10, algorithm={"name": "ldp-dol", "sigma": 1.0})
        >>> experiment.replace(rounds=20, **{"algorithm.sigma": 2.0}).algorithm.sigma
        2.0
        """
        document = self.to_document()
        for dotted, value in changes.items():
            *sections, field = dotted.split(".")
            inner: Any = document
            for depth, section in enumerate(sections, 1):
                outer, inner = inner, inner.get(section)
                if not isinstance(inner, dict):
                    where = ".".join(sections[:depth])
                    got = abbreviate_value(inner) if section in outer else f"none{suggest_name(section, outer)}"
                    raise SpecError(f"experiment: {dotted}: {where} must be a section with fields, got {got}")
            inner[field] = value
        return Experiment.model_validate(document)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as Pydantic does, without the records and the run of the original, which need not be those of the copy."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("prepared_run", None)
        return copied

    # ---- run, records, guarantees ------------------------------------------------------------------------------

    @cached_property
    def prepared_run(self) -> PreparedRun:
        """The run and its records, ready to start; built once.

        Raises:
            SpecError: the run is not possible; `AssumptionViolated`: by a named condition of the algorithm.
            DataError: the data cannot be used.
        """
        return prepare(self, folders=get_data_folders())

    @property
    def run(self) -> Run:
        """The algorithm, the network and the warnings, from `prepared_run`."""
        return self.prepared_run.run

    @property
    def records(self) -> PlacedData:
        """The placed and the held-out records, from `prepared_run`."""
        return self.prepared_run.data

    def index(self, learner: str | int) -> int:
        """Return the index of a learner, given its name or index.

        Raises:
            SpecError: no such learner.
        """
        if learner in self.names:
            return self.names.index(str(learner))
        if isinstance(learner, int) and 0 <= learner < self.n_learners:
            return learner
        raise SpecError(
            f"learner must be one of {', '.join(self.names)}, or an index below them, got {abbreviate_value(learner)}"
            f"{suggest_name(learner, self.names)}"
        )

    def guarantee(self, learner: str | int) -> Guarantee:
        """Return the guarantee of one learner's messages, for the records that it will learn.

        Args:
            learner: name or index.

        Raises:
            SpecError: no such learner, or the experiment cannot be run as it is.
            DataError: the data cannot be used.

        >>> promise = Experiment(rounds=10, algorithm="ldp-dol").guarantee("learner-0")
        >>> promise.round_losses.shape, promise.basis.threat_model.value
        ((10,), 'wire')
        >>> promise.epsilon(5) < promise.epsilon()
        True
        >>> promise.epsilon(delta=1e-6) < promise.epsilon()
        True
        """
        i = self.index(learner)
        counts, end = np.diff(self.records.learners[i].offsets), self.run.participation(i).end
        renyi = self.run.algorithm.accountant(i).total_renyi(counts[:end])
        return replace(self.run.guarantee(i, counts), renyi=renyi)

    def find_worst_case_learner(self) -> int:
        """Return the index of the learner with the largest epsilon over the whole run."""
        return self.prepared_run.find_worst_case_learner()

    def epsilon(self, *, delta: float = 0.0) -> float:
        """Return the largest epsilon of a learner over the whole run; with shared records that of all learners together.

        Args:
            delta: epsilon at this delta; 0: pure epsilon.

        Raises:
            SpecError: delta is not at least 0 and below 1, or dp-accounting is missing.
        """
        return combine_costs(
            [LearnerCost(self.run, i, own) for i, own in enumerate(self.records.learners)], delta=delta
        )


def _describe_section(section: Section) -> str:
    """Return the fields of a section that differ from their defaults, with its kind, as in a spec file."""
    kind = {key: getattr(section, key) for key in ("kind", "name") if hasattr(section, key)}
    text = write_yaml({**kind, **section.model_dump(mode="json", exclude_defaults=True)}, flow=True).strip()
    return text if len(text) <= _MAX_SECTION_CHARACTERS else f"{text[:_MAX_SECTION_CHARACTERS]} …"


def resolve_experiment(source: Experiment | Path | str) -> Experiment:
    """Return the experiment itself, or load it from a spec file.

    Raises:
        SpecError: neither an experiment nor a path, or the file has no valid spec.
    """
    if isinstance(source, Experiment):
        return source
    if isinstance(source, Path | str):
        return load(source)
    raise SpecError(
        f"an experiment must be a sottovoce.Experiment or the path of a spec file, got {type(source).__name__}"
    )


def require_count(what: str, value: object) -> None:
    """Require a whole number of at least 1.

    Raises:
        SpecError: the value is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SpecError(f"{what} must be a whole number, got {abbreviate_value(value)}")
    if value < 1:
        raise SpecError(f"{what} must be at least 1, got {value}")


def load(path: Path | str) -> Experiment:
    """Load an experiment from a spec file (YAML), as the command line does.

    Args:
        path: the file. Relative paths in it start at the file's own folder.

    Raises:
        SpecError: unreadable, not YAML, or not a valid spec: one line per problem.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "wards.yaml").write_text("{name: wards, rounds: 20, algorithm: ldp-dol}", encoding="utf-8")
    ...     load(f"{folder}/wards.yaml")
    Experiment 'wards': ldp-dol, 5 learners, 20 rounds of breast_cancer
    """
    document = read_document(Path(path))
    return Experiment.model_validate(document, context={"source": str(path)})
