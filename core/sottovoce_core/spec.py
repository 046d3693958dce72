"""The run spec: one YAML file for `run`, `up` and `simulate` alike.

A spec is validated once, here, and is immutable afterwards. Each section is defined by its own class: `losses`,
`decision_sets`, `network`, `data`, `algorithms`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sottovoce_core.algorithms import AnyAlgorithm
from sottovoce_core.algorithms.run_context import broadcast_to_learners
from sottovoce_core.data.files import RECORD_FILE_SUFFIXES
from sottovoce_core.data.memory import FILE_ADVICE, MemoryRecords
from sottovoce_core.data.spec import DataSpec, Schema
from sottovoce_core.decision_sets import AnyDecisionSet, L2Ball
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import AnyLoss
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.network.participation_schedule import OfflineInterval, ParticipationSchedule, resolve_learner_names
from sottovoce_core.network.topology import Topology
from sottovoce_core.registry import UNBOUNDED_ROUNDS, Count, Positive, Seconds, Section
from sottovoce_core.validation_errors import explain
from sottovoce_core.yaml_files import parse_document, read_text_file, require_mapping, write_yaml

LEARNER_NAME_PATTERN = r"^\w[\w .-]{0,62}(@[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?)?$"
"""Pattern of learner names, which are parts of file names: no slashes. With several trust domains a name ends in its
domain: `east@east.example`."""
LEARNER_NAME_RULE = (
    "1 to 63 letters and digits of any language, after the first also blanks, dots and hyphens, and where learners are of "
    "several trust domains then @DOMAIN"
)
"""Description of `LEARNER_NAME_PATTERN` for error messages."""
_RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


def _require_learner_name(name: str) -> str:
    if re.fullmatch(LEARNER_NAME_PATTERN, name) is None:
        raise ValueError(f"a learner's name must be {LEARNER_NAME_RULE}, for it is part of file names")
    return name


def _require_run_name(name: str) -> str:
    if re.fullmatch(_RUN_NAME_PATTERN, name) is None:
        raise ValueError(
            "a run's name must be 1 to 63 of the letters a to z, digits, and after the first also dots, hyphens and underscores, "
            "for folders and addresses are made of it"
        )
    return name


_LearnerName = Annotated[
    str, AfterValidator(_require_learner_name), Field(json_schema_extra={"pattern": LEARNER_NAME_PATTERN})
]
_MIN_PERIOD_S = 0.002
"""Minimum period of a paced clock: a shorter one keeps the coordinator fully busy."""
DEFAULT_COORDINATOR_TIMEOUT_S = 4 * 3600.0
DEFAULT_STALENESS_TIMEOUT_S = 1.0
MAX_LEARNERS = 4096
"""Maximum number of learners: a network has several matrices of learners by learners."""
MAX_OFFLINE_INTERVALS = 4096
"""Maximum number of offline intervals: the participants are computed for each of them."""


if TYPE_CHECKING:
    Rounds = int
else:
    Rounds = Annotated[
        Count | None,
        AfterValidator(lambda rounds: UNBOUNDED_ROUNDS if rounds is None else rounds),
        PlainSerializer(lambda rounds: None if rounds == UNBOUNDED_ROUNDS else rounds, return_type=int | None),
    ]
    """Number of rounds; null: no planned end (`UNBOUNDED_ROUNDS`)."""


class PrivacySpec(Section):
    """Privacy budgets of the learners."""

    budget: Positive | tuple[Positive, ...] | None = None
    """Epsilon at which a learner stops sending (None: it counts, and never stops)."""
    delta: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Delta at which the budget holds, and at which epsilon is stated; 0: pure epsilon."""


class ClockSpec(Section):
    """The round clock: leases of windows of rounds, not barriers."""

    mode: Literal["free", "paced", "data", "async"] = "free"
    """free: as fast as data and neighbours allow. paced: one round a period. data: when every learner has its batch. async: as
    free, without waiting for neighbours: the newest message is used."""
    window: Count = 100
    """Rounds leased at a time; no learner gets further ahead of the slowest one."""
    period_s: Annotated[float, Field(ge=_MIN_PERIOD_S, le=1e9, allow_inf_nan=False)] | None = None
    """Seconds per round (paced mode)."""
    deadline_s: Seconds = 60.0
    """Seconds that a run waits for a disconnected or silent learner, for records or for a lease before it fails."""
    outage_timeout_s: Seconds | None = None
    """Seconds that learners wait for a disconnected coordinator that keeps its runs (`--state`), and for free disk space; None:
    four hours."""

    staleness: Literal["wait", "reuse", "drop"] | None = None  # None, as for wait: async has no other policy
    """Policy for a missing message of a neighbour. wait: the round waits for it. reuse: after `stale_after_s` the newest message
    of that neighbour is used again. drop: the round waits, and the run continues without a learner that is disconnected for
    longer than `deadline_s`."""
    stale_after_s: Seconds | None = None
    """Seconds after which a message is late, with `staleness: reuse`; None: one."""

    @property
    def staleness_timeout_s(self) -> float | None:
        """Seconds that a round waits for a neighbour before it uses its newest message; None: it waits without limit."""
        if self.mode == "async":
            return 0.0
        return (
            (DEFAULT_STALENESS_TIMEOUT_S if self.stale_after_s is None else self.stale_after_s)
            if self.staleness == "reuse"
            else None
        )

    @property
    def coordinator_timeout_s(self) -> float:
        """Seconds that learners wait for a disconnected coordinator."""
        return DEFAULT_COORDINATOR_TIMEOUT_S if self.outage_timeout_s is None else self.outage_timeout_s

    @model_validator(mode="after")
    def _require_period(self) -> ClockSpec:
        if (self.mode == "paced") != (self.period_s is not None):
            raise ValueError("period_s must be given in paced mode, and only there")
        return self

    @model_validator(mode="after")
    def _require_one_policy(self) -> ClockSpec:
        if self.mode == "async" and (self.staleness is not None or self.stale_after_s is not None):
            raise ValueError(
                "staleness and stale_after_s must be left out in async mode, where rounds wait for no neighbour"
            )
        if self.stale_after_s is not None and self.staleness != "reuse":
            raise ValueError("stale_after_s must be given with staleness: reuse, and only there")
        if self.staleness_timeout_s is not None and self.staleness_timeout_s >= self.deadline_s:
            raise ValueError(
                f"stale_after_s must be below deadline_s, got {self.staleness_timeout_s:g} and {self.deadline_s:g}"
            )
        return self


class TelemetrySpec(Section):
    """Reports of learners to their operator beyond rounds, bytes and budget. All of them are outside the privacy guarantee."""

    accuracy: bool = False
    """Report prequential accuracy: data-dependent."""
    predict: bool = False
    """Answer Predict calls: the answers depend on the private model."""


class RunSpec(Section):
    """The spec of a whole run."""

    name: Annotated[str, AfterValidator(_require_run_name), Field(json_schema_extra={"pattern": _RUN_NAME_PATTERN})] = (
        "run"
    )
    """Name of the run, for folders and addresses: at most 63 letters a to z, digits, dots, hyphens and underscores."""
    rounds: Rounds
    """Number of rounds; null: until the run is stopped or a learner's budget is spent. For live records."""
    learners: (
        Annotated[int, Field(gt=0, le=MAX_LEARNERS)]
        | Annotated[tuple[_LearnerName, ...], Field(min_length=1, max_length=MAX_LEARNERS)]
    ) = 5
    """Number of learners, or their names."""
    algorithm: AnyAlgorithm
    """Algorithm, with its parameters."""
    loss: AnyLoss = LogisticLoss()
    """Loss of a record."""
    decision_set: AnyDecisionSet = L2Ball(radius=100.0)
    """Set of the decisions."""
    topology: Topology = Topology()
    """Graph and mixing weights."""
    offline_intervals: Annotated[tuple[OfflineInterval, ...], Field(max_length=MAX_OFFLINE_INTERVALS)] = ()
    """Intervals of rounds in which learners are offline: they join late, leave early, or pause."""
    data: DataSpec = DataSpec()
    """Records."""
    privacy: PrivacySpec = PrivacySpec()
    """Budget of each learner."""
    clock: ClockSpec = ClockSpec()
    """Timing of rounds."""
    capture: Literal["relay", "mirror", "wiretap", "none"] = "none"
    """relay: every edge passes through the eavesdropper, which reads it. mirror: learners copy their messages to it. wiretap:
    every edge passes through it encrypted, and only sizes and times are recorded."""
    capture_gap: Literal["mark", "fail"] = "mark"
    """Effect of a gap in the capture. mark: the capture names it. fail: the run fails within seconds."""
    on_violation: Literal["stop", "drop", "clip"] = "stop"
    """Reaction to a neighbour that violates the protocol. stop: the run fails at once. drop: it continues without a learner that
    most of its neighbours accuse. clip: as stop, and numbers beyond those of any correct learner are clipped before use."""
    durability: Literal["process", "power"] = "power"
    """Failure that a logged message survives: kill -9 of the learner, or loss of power (fsync before every send)."""
    telemetry: TelemetrySpec = TelemetrySpec()
    """Reports of learners beside the messages."""

    @property
    def is_unbounded(self) -> bool:
        """True if the run has no planned end."""
        return self.rounds == UNBOUNDED_ROUNDS

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the learners, by index."""
        return resolve_learner_names(self.learners)

    @property
    def is_proxied(self) -> bool:
        """True if every edge leads through the eavesdropper."""
        return self.capture in ("relay", "wiretap")

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return len(self.names)

    @property
    def can_drop_learners(self) -> bool:
        """True if the run may continue without a lost learner."""
        return "drop" in (self.clock.staleness, self.on_violation)

    def get_budget(self, learner: int) -> float | None:
        """Return the epsilon at which the learner of this index stops sending; None: no limit."""
        whole = self.privacy.budget
        return None if whole is None else broadcast_to_learners(whole, self.n_learners, "privacy.budget")[learner]

    @property
    def participation(self) -> ParticipationSchedule:
        """Participation of all learners by round."""
        return ParticipationSchedule(self.names, self.offline_intervals)

    def to_document(self) -> dict[str, Any]:
        """Return the fields as a spec file has them; records in memory remain an object."""
        document = super().model_dump(mode="json")
        if isinstance(self.data.source, MemoryRecords):
            document["data"]["source"] = self.data.source
        return document

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the fields as Pydantic does.

        Raises:
            SpecError: they are for JSON or YAML, and the records are in memory.
        """
        if options.get("mode") == "json":
            self._require_source_without_memory()
        return super().model_dump(**options)

    def model_dump_json(self, **options: Any) -> str:
        """Return the fields as JSON, as Pydantic does.

        Raises:
            SpecError: the records are in memory.
        """
        self._require_source_without_memory()
        return super().model_dump_json(**options)

    def _require_source_without_memory(self) -> None:
        if isinstance(self.data.source, MemoryRecords):
            raise SpecError(
                f"a spec that is written or sent must name its records, and those of {self.name!r} are in memory: {FILE_ADVICE}"
            )

    @field_validator("learners")
    @classmethod
    def _require_distinct_names(cls, learners: int | tuple[str, ...]) -> int | tuple[str, ...]:
        names = Counter(resolve_learner_names(learners))
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"learner names must differ, and {twice[0]!r} is there {names[twice[0]]} times")
        if 0 < len(without := [name for name in names if "@" not in name]) < len(names):
            raise ValueError(
                f"all learner names must hold a trust domain (NAME@DOMAIN), or none of them, got {without[0]!r} without one"
            )
        return learners

    @field_validator("offline_intervals")
    @classmethod
    def _require_valid_intervals(
        cls, offline_intervals: tuple[OfflineInterval, ...], before: ValidationInfo
    ) -> tuple[OfflineInterval, ...]:
        if (
            offline_intervals and {"rounds", "learners"} <= before.data.keys()
        ):  # else those fields are reported as wrong
            ParticipationSchedule(resolve_learner_names(before.data["learners"]), offline_intervals).check(
                before.data["rounds"]
            )
        return offline_intervals

    @model_validator(mode="after")
    def _require_live_records(self) -> RunSpec:
        if self.is_unbounded and not self.data.is_live:
            raise ValueError(f"rounds: null needs records that go on, data.source: live, got {self.data.source}")
        return self


# ---- reading and writing ---------------------------------------------------------------------------------


def parse_spec(document: object, *, allow_imports: bool, source: str = "spec") -> RunSpec:
    """Check a parsed document.

    Args:
        document: parsed YAML or JSON.
        allow_imports: whether a spec may name code to import (`module:Class`). Not if it is from another party: from the
            wire, a capture, a ledger. So there is no default.
        source: name of the document in errors.

    Raises:
        SpecError: one line per problem, each with the field, the value and what is allowed.
    """
    document = require_mapping(document, source)
    try:
        return RunSpec.model_validate(document, context={"imports": allow_imports})
    except ValidationError as error:
        raise SpecError(explain(error, source, document, RunSpec)) from None


def find_first_import(section: object) -> str | None:
    """Return the first `module:Class` that a spec, as parsed YAML or JSON, names; None: it names none."""
    return next(find_imports(section), None)


def find_imports(section: object, place: tuple[object, ...] = ()) -> Iterator[str]:
    """Iterate over every `module:Class` that a spec, as parsed YAML or JSON, names; `place` locates the section in the spec."""
    if place == ("data", "schema"):  # names there are columns
        return
    if isinstance(section, Mapping):
        for key, value in section.items():
            if key in ("kind", "name", "module") and isinstance(value, str) and ":" in value:
                yield value
            yield from find_imports(value, (*place, key))
    elif isinstance(section, list | tuple):
        for value in section:
            yield from find_imports(value, (*place, None))


def load_spec(path: Path) -> RunSpec:
    """Read a YAML file.

    Raises:
        SpecError: unreadable, not YAML, or not a valid spec.
    """
    return parse_spec(read_document(path), source=str(path), allow_imports=True)


def read_document(path: Path) -> Mapping[Any, Any]:
    """Read a YAML file without validation; a schema that is named as a file is inlined.

    Relative paths in a file start at the file's folder. The result has them relative to the working directory.

    Raises:
        SpecError: unreadable, not YAML, or no mapping of fields; or its schema is.
    """
    document: dict[Any, Any] = dict(inline_schema(_read_document(path, "a run spec"), path.parent))
    move_paths(document, path.parent, Path())
    return document


def move_paths(document: dict[Any, Any], begin: Path, end: Path) -> None:
    """Rewrite the relative paths of a document for another folder: those of `data.source` and of graphs."""
    data, topology = document.get("data"), document.get("topology")
    if (
        isinstance(data, Mapping)
        and isinstance(source := data.get("source"), str)
        and Path(source).suffix.lower() in RECORD_FILE_SUFFIXES
    ):
        document["data"] = {**data, "source": _move_path(source, begin, end)}
    if isinstance(topology, Mapping):
        document["topology"] = _move_graph_paths(topology, begin, end)


def _move_graph_paths(section: Any, begin: Path, end: Path) -> Any:
    """Rewrite the paths of the section `topology` or of a part of it: one graph, or a sequence of several."""
    if isinstance(section, list | tuple):
        return [_move_graph_paths(part, begin, end) for part in section]
    if not isinstance(section, Mapping):
        return section
    moved = {key: _move_graph_paths(part, begin, end) for key, part in section.items()}
    if isinstance(path := section.get("path"), str):
        moved["path"] = _move_path(path, begin, end)
    return moved


def _move_path(path: str, begin: Path, end: Path) -> str:
    if Path(path).is_absolute() or begin.absolute() == end.absolute():
        return path
    try:
        return os.path.relpath(begin / path, end)
    except ValueError:  # on another drive
        return str((begin / path).absolute())


def _read_document(path: Path, what: str) -> Mapping[Any, Any]:
    try:
        return parse_document(read_text_file(path, what), str(path), what)
    except SpecError as error:
        if path.suffix.lower() not in RECORD_FILE_SUFFIXES or not path.is_file():
            raise
        more = "" if what == "a run spec" else " --schema-only"
        raise SpecError(
            f"{error}; this is a file of records: `sottovoce init {path}{more}` writes {what} for them"
        ) from None


def inline_schema(document: Any, folder: Path) -> Any:
    """Return the document with its schema inlined, if `data.schema` is the path of a file.

    Args:
        document: parsed spec.
        folder: start of relative paths.

    Raises:
        SpecError: the schema's file is unreadable, not YAML, or no mapping of fields.
    """
    data = document.get("data") if isinstance(document, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(named := data.get("schema"), str | Path):
        return document
    return {**document, "data": {**data, "schema": _read_document(folder / named, "a schema")}}


def load_schema(path: Path) -> Schema:
    """Read a schema of records from a YAML file.

    Raises:
        SpecError: unreadable, not YAML, or not a valid schema: one line per problem.
    """
    document = _read_document(path, "a schema")
    try:
        return Schema.model_validate(document)
    except ValidationError as error:
        raise SpecError(explain(error, str(path), document, Schema)) from None


def describe_spec(spec: RunSpec) -> str:
    """Write the spec as YAML for people: as `dump_spec`, but `records in memory` in the place of such records."""
    return write_yaml(Section.model_dump(spec, mode="json"))


def dump_spec(spec: RunSpec, folder: Path | None = None) -> str:
    """Write the spec as YAML, complete with defaults.

    Args:
        spec: its relative paths begin in the working directory.
        folder: folder of the file, where its paths will start; None: paths stay as they are.

    Raises:
        SpecError: its records are in memory.
    """
    document = spec.model_dump(mode="json")
    if folder is not None:
        move_paths(document, Path(), folder)
    return write_yaml(document)


def build_spec_json_schema() -> str:
    """Build the JSON schema of a run spec, for editors, with all built-in kinds."""
    return json.dumps(RunSpec.model_json_schema(), indent=2)
