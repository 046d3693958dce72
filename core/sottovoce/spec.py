"""The run spec: one YAML file that `run`, `up` and `simulate` read alike.

A spec is checked once, here, and is a frozen value afterwards. What a section means is decided by the module that it
names: `topology`, `data`, `losses`, `decision_sets`, `algorithms`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml
from pydantic import (
    Field,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    create_model,
    model_validator,
)

from sottovoce.algorithms.parameters import AlgorithmSpec
from sottovoce.data.specs import DataSpec
from sottovoce.decision_sets_specs import DecisionSetSpec, L2BallSpec
from sottovoce.errors import SpecError
from sottovoce.losses.specs import AnyLossSpec, LogisticSpec
from sottovoce.network.specs import TopologySpec
from sottovoce.registry import Positive, Section

LEARNER_NAME = r"^\w[\w .-]{0,62}$"
"""It is part of file names: no slashes."""
LearnerName = Annotated[str, Field(pattern=LEARNER_NAME)]


# ---- topology --------------------------------------------------------------------------------------------


# ---- data ------------------------------------------------------------------------------------------------


# ---- learning --------------------------------------------------------------------------------------------


class PrivacySpec(Section):
    """What a learner may spend."""

    budget: Positive | tuple[Positive, ...] | None = None
    """Epsilon at which a learner stops speaking (None: it counts, and never stops)."""


# ---- running ---------------------------------------------------------------------------------------------


class ClockSpec(Section):
    """The round clock: grants of windows of rounds, not barriers."""

    mode: Literal["free", "paced", "data"] = "free"
    """free: as fast as data and neighbours allow. paced: one round a period. data: when every learner has its batch."""
    window: PositiveInt = 100
    """Rounds granted at a time (free mode)."""
    period_s: Positive | None = None
    """Seconds per round (paced mode)."""
    deadline_s: Positive = 60.0
    """How long a learner waits for a neighbour, a grant or its data before the run fails."""

    @model_validator(mode="after")
    def _period_when_paced(self) -> ClockSpec:
        if (self.mode == "paced") != (self.period_s is not None):
            raise ValueError("period_s must be given in paced mode, and only there")
        return self


class TelemetrySpec(Section):
    """What learners tell their operator beyond rounds, bytes and budget. All of it is outside the privacy guarantee."""

    accuracy: bool = False
    """Report prequential accuracy: data-dependent."""
    predict: bool = False
    """Answer Predict calls: the answers depend on the private model."""


class RunSpec(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    rounds: PositiveInt
    learners: PositiveInt | Annotated[tuple[LearnerName, ...], Field(min_length=1)] = 5
    """How many, or their names."""
    algorithm: SerializeAsAny[AlgorithmSpec]
    loss: AnyLossSpec = LogisticSpec()
    decision_set: DecisionSetSpec = L2BallSpec(kind="l2_ball", radius=100.0)
    topology: TopologySpec = TopologySpec()
    data: DataSpec = DataSpec()
    privacy: PrivacySpec = PrivacySpec()
    clock: ClockSpec = ClockSpec()
    capture: Literal["relay", "mirror", "none"] = "none"
    """relay: every edge passes through the eavesdropper. mirror: learners copy their messages to it."""
    durability: Literal["process", "power"] = "power"
    """What a journaled message survives: kill -9 of the learner, or loss of power (fsync before every send)."""
    telemetry: TelemetrySpec = TelemetrySpec()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the learners, by index."""
        return (
            self.learners if isinstance(self.learners, tuple) else tuple(f"learner-{i}" for i in range(self.learners))
        )

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return len(self.names)

    @model_validator(mode="after")
    def _names_differ(self) -> RunSpec:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"learner names must differ, got {list(self.names)}")
        return self


# ---- reading and writing ---------------------------------------------------------------------------------


def parse_spec(document: object, *, source: str = "spec", imports: bool = True) -> RunSpec:
    """Check a parsed document.

    Args:
        document: as YAML or JSON gives it.
        source: what errors call it.
        imports: whether a spec may name code to import (`module:Class`). Not where it comes from somebody else: an
            installed package that offers its algorithm under a short name is the owner's own choice, this is not.

    Raises:
        SpecError: one line per problem, each with the field, the value and what is allowed.
    """
    if not isinstance(document, Mapping):
        raise SpecError(f"{source}: a run spec must be a mapping of fields, got {type(document).__name__}")
    if not imports and (named := code_to_import(document)):
        raise SpecError(
            f"{source}: a service imports no code that a spec from elsewhere names, got {named!r}: start it with "
            "--allow-imports, or install a package that offers the algorithm under a short name"
        )
    fields: dict[Any, Any] = dict(document)
    lines: list[str] = []
    try:
        fields["algorithm"] = _parse_algorithm(document.get("algorithm"))
    except ValidationError as error:
        known = _fields_of(document.get("algorithm"))
        lines = [_explain({**p, "loc": ("algorithm", *p["loc"])}, source, known) for p in error.errors()]
    except SpecError as error:
        lines = [f"{source}: {error}"]
    if lines:
        fields["algorithm"] = AlgorithmSpec(name="")
    try:
        spec = RunSpec.model_validate(fields)
    except ValidationError as error:
        raise SpecError("\n".join(lines + [_explain(problem, source) for problem in error.errors()])) from None
    if lines:
        raise SpecError("\n".join(lines))
    return spec


def code_to_import(document: Mapping[Any, Any]) -> str | None:
    """What a spec, as YAML or JSON gives it, names as `module:Class`; None: nothing."""
    places = (("algorithm", "name"), ("loss", "module"))
    sections = [(document.get(section), field) for section, field in places]
    named = [str(section.get(field, "")) for section, field in sections if isinstance(section, Mapping)]
    return next((name for name in named if ":" in name), None)


def _parse_algorithm(section: object) -> AlgorithmSpec:
    """The section `algorithm`, by the class that its name chooses.

    Raises:
        SpecError: there is no such algorithm.
        ValidationError: its parameters are wrong.
    """
    from sottovoce.algorithms import spec_class

    if isinstance(section, str):
        section = {"name": section}
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        return AlgorithmSpec.model_validate({} if section is None else section)
    return spec_class(section["name"]).model_validate(section)


def load_spec(path: Path) -> RunSpec:
    """Read a YAML file.

    Raises:
        SpecError: unreadable, not YAML, or not a valid spec.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the run spec {path}: {error}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return parse_spec(document, source=str(path))


def dump_spec(spec: RunSpec) -> str:
    """The spec as YAML, complete with defaults."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)


def spec_schema() -> str:
    """JSON schema of a run spec, for editors, with the algorithms that are installed."""
    from sottovoce.algorithms import spec_classes

    known: Any = Union[tuple(dict.fromkeys(spec_classes().values()))]  # noqa: UP007
    fields: dict[str, Any] = {"algorithm": (Annotated[known, Field()], ...)}
    return json.dumps(create_model("RunSpec", __base__=RunSpec, **fields).model_json_schema(), indent=2)


def _fields_of(section: object) -> tuple[str, ...]:
    """The parameters of an algorithm; none where it is not known which."""
    from sottovoce.algorithms import spec_class

    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        return ()
    return tuple(spec_class(section["name"]).model_fields)


def _explain(problem: Any, source: str, known: tuple[str, ...] = ()) -> str:
    """One pydantic problem as a line for a person; `known`: the fields of the section, where they are known."""
    where = ".".join(str(part) for part in problem["loc"]) or "spec"
    came = problem.get("input")
    match problem["type"]:
        case "extra_forbidden":
            there = (
                f"the fields are {', '.join(known)}"
                if known
                else "see `sottovoce spec schema` for the fields there are"
            )
            return f"{source}: unknown field {where}; {there}"
        case "missing":
            return f"{source}: field {where} is required"
        case _:
            text = problem["msg"].removeprefix("Value error, ")
            return f"{source}: {where}: {text[0].lower() + text[1:]}, got {came!r}"
