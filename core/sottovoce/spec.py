"""The run spec: one YAML file that `run`, `up` and `simulate` read alike.

A spec is checked once, here, and is a frozen value afterwards. What a section means is decided by the module that it
names: `topology`, `data`, `losses`, `decision_sets`, `algorithms`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    create_model,
    model_validator,
)

from sottovoce.errors import SpecError

if TYPE_CHECKING:
    from sottovoce.machine import Algorithm
    from sottovoce.setting import Finding, Setting

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
LEARNER_NAME = r"^\w[\w .-]{0,62}$"
"""It is part of file names: no slashes."""
LearnerName = Annotated[str, Field(pattern=LEARNER_NAME)]


def _shorthand(value: object) -> object:
    """`ring` stands for `{kind: ring}`."""
    return {"kind": value} if isinstance(value, str) else value


class Section(BaseModel):
    """Part of a spec: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---- topology --------------------------------------------------------------------------------------------


class Ring(Section):
    """Every learner has two neighbours."""

    kind: Literal["ring"]


class PathGraph(Section):
    """A line."""

    kind: Literal["path"]


class Star(Section):
    """The first learner is everybody's neighbour."""

    kind: Literal["star"]


class Complete(Section):
    """Everybody is everybody's neighbour."""

    kind: Literal["complete"]


class Grid(Section):
    """A rectangular grid of `rows` times `columns` learners."""

    kind: Literal["grid"]
    rows: PositiveInt
    columns: PositiveInt


class ErdosRenyi(Section):
    """Every pair is an edge with this probability; `directed`: every ordered pair."""

    kind: Literal["erdos_renyi"]
    probability: Annotated[float, Field(gt=0, le=1)]
    seed: NonNegativeInt = 0
    directed: bool = False


class WattsStrogatz(Section):
    """A ring in which everybody knows the `nearest` next ones, each edge rewired with this probability."""

    kind: Literal["watts_strogatz"]
    nearest: PositiveInt
    probability: Annotated[float, Field(ge=0, le=1)]
    seed: NonNegativeInt = 0


class Edges(Section):
    """The edges, as pairs of learner indices counted from 0; `directed`: the first one tells the second one."""

    kind: Literal["edges"]
    edges: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    directed: bool = False


class GraphFile(Section):
    """A file: GraphML (`.graphml`), or an edge list of two whitespace-separated node names a line.

    `directed`: the first node of an edge, its source, tells the second one.
    """

    kind: Literal["file"]
    path: Path
    directed: bool = False


Graph = Annotated[
    Ring | PathGraph | Star | Complete | Grid | ErdosRenyi | WattsStrogatz | Edges | GraphFile,
    Field(discriminator="kind"),
    BeforeValidator(_shorthand),
]


class PeriodicGraphs(Section):
    """These graphs, one a round, from the first one again when they have run out."""

    kind: Literal["periodic"]
    graphs: Annotated[tuple[Graph, ...], Field(min_length=1)]


class RandomGraphs(Section):
    """A new graph every round, in which every pair is an edge with this probability; `directed`: every ordered pair.

    The seed is public: everybody can draw the graph of every round alone.
    """

    kind: Literal["random"]
    probability: Annotated[float, Field(gt=0, le=1)]
    seed: NonNegativeInt = 0
    directed: bool = False


GraphSequence = Annotated[PeriodicGraphs | RandomGraphs, Field(discriminator="kind")]


class WeightRule(Section):
    """A rule for weights. `lazy` halves what is heard, and keeps the rest: (I + P) / 2 in place of the mixing matrix P."""

    lazy: bool = False


class ConstantWeights(WeightRule):
    """`w_ij = value` for every edge."""

    kind: Literal["constant"]
    value: Positive


class MetropolisWeights(WeightRule):
    """`w_ij = 1 / (1 + max(degree_i, degree_j))`."""

    kind: Literal["metropolis"]


class MaxDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + largest degree)`."""

    kind: Literal["max_degree"]


class LaplacianWeights(WeightRule):
    """`w_ij = step` for every edge, below one over the largest number of heard neighbours: `I - step L`."""

    kind: Literal["laplacian"]
    step: Positive


class OutDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom j tells)`: columns sum to one, as push-sum needs it."""

    kind: Literal["out_degree"]


class InDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom i hears)`: rows sum to one."""

    kind: Literal["in_degree"]


Weights = Annotated[
    ConstantWeights | MetropolisWeights | MaxDegreeWeights | LaplacianWeights | OutDegreeWeights | InDegreeWeights,
    Field(discriminator="kind"),
    BeforeValidator(_shorthand),
]


class TopologySpec(Section):
    """Who hears whom, and with which weights: one graph (default: a ring), or a sequence of graphs."""

    graph: Graph | None = None
    sequence: GraphSequence | None = None
    weights: Weights = MetropolisWeights(kind="metropolis")

    @model_validator(mode="before")
    @classmethod
    def _ring_by_default(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and fields.get("graph") is None and fields.get("sequence") is None:
            return {**fields, "graph": {"kind": "ring"}}
        return fields

    @model_validator(mode="after")
    def _graph_or_sequence(self) -> TopologySpec:
        if self.graph is not None and self.sequence is not None:
            raise ValueError("graph and sequence exclude each other; leave one of them out")
        return self


# ---- data ------------------------------------------------------------------------------------------------


class Iid(Section):
    """Records are dealt out at random."""

    kind: Literal["iid"]


class ByLabel(Section):
    """Records are sorted by label and cut into equal parts: most learners see one label only.

    `mixed` is the share of each learner's records that is dealt out at random instead (0: the hardest skew).
    """

    kind: Literal["by_label"]
    mixed: Annotated[float, Field(ge=0, le=1)] = 0.0


class Dirichlet(Section):
    """For each label, shares over learners drawn from a symmetric Dirichlet law: small concentration, strong skew."""

    kind: Literal["dirichlet"]
    concentration: Positive


class Paper4060(Section):
    """40 % of class c to learner c mod learners, the rest of it dealt out evenly (Chen & Wang, experiments B and C)."""

    kind: Literal["paper_40_60"]


class Shared(Section):
    """Every learner has every record, in the same rounds: for one global objective that all know (the dpsda family)."""

    kind: Literal["shared"]


Partition = Annotated[
    Iid | ByLabel | Dirichlet | Paper4060 | Shared, Field(discriminator="kind"), BeforeValidator(_shorthand)
]


class DataSpec(Section):
    """Where records come from, who gets which, and in what order."""

    source: str = "breast_cancer"
    """`breast_cancer` and `digits` (shipped with scikit-learn), or a path to a `.npz`, `.csv` or `.parquet` file."""
    label: str | None = None
    """Label column of a `.csv` or `.parquet` file (default: `label`, else `y`, else the last column)."""
    positive: tuple[int | str, ...] | None = None
    """Labels that count as 1 in a binary problem (default: the later half of the sorted labels)."""
    partition: Partition = Iid(kind="iid")
    """Ignored where the file carries a `learner` column."""
    order: Literal["given", "shuffled"] = "shuffled"
    batch_size: PositiveInt | Literal["all"] = 1
    """Records per learner and round; `all`: all in round 0 (with `reuse`, in every round).

    Ignored where the file carries a `round` column.
    """
    reuse: bool = False
    """Start again from the first record when a learner's records run out. Each use is an event of its own."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Held out for accuracy. Treated as public: the constants of `scale` are read off it."""
    scale: Literal["none", "standard", "range"] = "none"
    """Per-feature scaling by constants of the held-out part, so that no constant depends on a learner's records."""
    intercept: bool = True
    """Append a constant feature."""
    seed: NonNegativeInt = 0
    """For the split, the partition and the order. Not for noise."""


# ---- learning --------------------------------------------------------------------------------------------


class LossSpec(Section):
    """The loss of one record: what every kind has. Each kind has its own class."""

    kind: Literal["logistic", "ridge", "least_squares", "hinge", "smoothed_hinge", "softmax", "torch"] = "logistic"
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Coefficient r of the exact term r*theta in every gradient."""
    feature_bound: Positive = 1.0
    """Every row is scaled to at most this l2 norm, row by row, before use."""
    clip_norm: Positive | None = None
    """Clip every record's data gradient to this l2 norm (None: no clipping)."""


class LogisticSpec(LossSpec):
    """Cross-entropy of two classes."""

    kind: Literal["logistic"] = "logistic"
    history: Literal["exact", "pass_glm"] = "exact"
    """pass_glm: learn the loss's quadratic approximation, whose history takes constant time and memory."""
    score_bound: Positive | None = None
    """pass_glm only: the approximation is close where scores lie in [-score_bound, score_bound]."""

    @model_validator(mode="after")
    def _bound_when_approximate(self) -> LogisticSpec:
        if (self.history == "pass_glm") != (self.score_bound is not None):
            raise ValueError("score_bound must be given with history pass_glm, and only there")
        if self.history == "pass_glm" and self.clip_norm is not None:
            raise ValueError("clip_norm must not be given with history pass_glm: to clip, one needs the records")
        return self


class SquaredSpec(LossSpec):
    """Squared error, with either default of the ridge."""

    label_bound: Positive = 1.0
    """Labels are clipped to [-label_bound, label_bound]."""


class RidgeSpec(SquaredSpec):
    """Squared error, by default with a ridge."""

    kind: Literal["ridge"] = "ridge"


class LeastSquaresSpec(SquaredSpec):
    """Squared error, by default without ridge."""

    kind: Literal["least_squares"] = "least_squares"
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class HingeSpec(LossSpec):
    """The support vector machine's loss of two classes. It is not smooth."""

    kind: Literal["hinge"] = "hinge"


class SmoothedHingeSpec(LossSpec):
    """The hinge with a rounded corner."""

    kind: Literal["smoothed_hinge"] = "smoothed_hinge"
    width: Positive = 1.0
    """Of the corner, in units of the score: the smoothness is feature_bound^2 / width."""


class ManyClassesSpec(LossSpec):
    """Cross-entropy of many classes."""

    classes: Annotated[int, Field(ge=2)]
    """Labels are the numbers 0 to classes - 1."""


class SoftmaxSpec(ManyClassesSpec):
    """Linear scores: one parameter for each class and feature."""

    kind: Literal["softmax"] = "softmax"


class TorchLossSpec(ManyClassesSpec):
    """The scores of any PyTorch module. Needs the extra `torch`."""

    kind: Literal["torch"] = "torch"
    classes: Annotated[int, Field(ge=2)] = 10
    """Labels are the numbers 0 to classes - 1, and the module gives each a score."""
    module: str
    """`mnist-cnn`, `cifar-cnn`, or `package.module:Class` of your own: a subclass of `torch.nn.Module`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    shape: tuple[PositiveInt, ...] | None = None
    """Of a record as the module takes it, without the batch (default: that of a built-in module)."""
    seed: NonNegativeInt = 0
    """For the parameters that learning starts from: public. Not for noise."""
    dtype: Literal["float64", "float32"] = "float64"
    """In which the module computes."""
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    feature_bound: Positive = 1e6
    """Guards against overflow: what bounds a gradient is `clip_norm`, which a module must have."""


_LOSSES: dict[str, type[LossSpec]] = {
    each.model_fields["kind"].default: each
    for each in (LogisticSpec, RidgeSpec, LeastSquaresSpec, HingeSpec, SmoothedHingeSpec, SoftmaxSpec, TorchLossSpec)
}


def _loss_of_kind(value: object) -> object:
    """The section `loss` by the class of its kind, logistic by default; other kinds are refused by `LossSpec`."""
    value = _shorthand(value)
    if not isinstance(value, Mapping):
        return value
    return _LOSSES.get(str(value.get("kind", "logistic")), LossSpec).model_validate(value)


AnyLossSpec = Annotated[
    LogisticSpec | RidgeSpec | LeastSquaresSpec | HingeSpec | SmoothedHingeSpec | SoftmaxSpec | TorchLossSpec,
    Field(discriminator="kind"),
    BeforeValidator(_loss_of_kind),
]


class L2BallSpec(Section):
    """All theta with l2 norm at most `radius`."""

    kind: Literal["l2_ball"]
    radius: Positive


class BoxSpec(Section):
    """All theta with every coordinate in [low, high]."""

    kind: Literal["box"]
    low: Finite
    high: Finite


class L1BallSpec(Section):
    """All theta with l1 norm at most `radius`."""

    kind: Literal["l1_ball"]
    radius: Positive


class SimplexSpec(Section):
    """All theta without negative coordinates whose sum is `radius`. The origin is not among them."""

    kind: Literal["simplex"]
    radius: Positive = 1.0


class TraceNormSpec(Section):
    """Matrices whose singular values have a sum of at most `radius`, flattened row by row: of `softmax`, one a class."""

    kind: Literal["trace_norm"]
    rows: PositiveInt
    columns: PositiveInt
    radius: Positive


SimpleSetSpec = Annotated[
    L2BallSpec | BoxSpec | L1BallSpec | SimplexSpec | TraceNormSpec,
    Field(discriminator="kind"),
]


class BlockSpec(Section):
    """The next `size` parameters, and the set that they lie in."""

    size: PositiveInt
    set: SimpleSetSpec


class ProductSpec(Section):
    """Consecutive blocks of parameters, each with a set of its own."""

    kind: Literal["product"]
    blocks: Annotated[tuple[BlockSpec, ...], Field(min_length=1)]


DecisionSetSpec = Annotated[
    L2BallSpec | BoxSpec | L1BallSpec | SimplexSpec | TraceNormSpec | ProductSpec,
    Field(discriminator="kind"),
    BeforeValidator(_shorthand),
]

PerLearner = float | tuple[float, ...]
"""One number for all learners, or a list with one number each."""


def times(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """Every learner's number times its factor; one number where all are equal.

    Raises:
        SpecError: a list of another length than `factors`.
    """
    values = value if isinstance(value, tuple) else (value,) * len(factors)
    if len(values) != len(factors):
        raise SpecError(f"a list must have one number per learner ({len(factors)}), got {len(values)}")
    products = tuple(each * factor for each, factor in zip(values, factors, strict=True))
    return products[0] if len(set(products)) == 1 else products


def divided(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """As `times`, divided: for what a loss is, not a noise."""
    return times(value, tuple(1.0 / factor for factor in factors))


class AlgorithmSpec(Section):
    """The parameters of an algorithm. Each has its own class, beside the algorithm: see `sottovoce.algorithms`."""

    name: str
    """Of a built-in algorithm, of one that an installed package offers, or `module:Class`."""

    def build(self, setting: Setting) -> tuple[Algorithm[Any], tuple[Finding, ...]]:
        """The algorithm in its surroundings, checked; and the conditions that only void a theorem.

        Raises:
            SpecError: a parameter does not fit the surroundings.
            CheckFailed: a condition does not hold without which there is no guarantee.
        """
        raise NotImplementedError

    one_noise: ClassVar[bool] = False
    """Do all learners share one number for their noise?"""

    def noisier(self, factors: tuple[float, ...]) -> AlgorithmSpec:
        """The same with every learner's noise multiplied: by `factors`, one for each.

        Raises:
            SpecError: there is no noise, or no way to scale it.
        """
        raise SpecError("this algorithm's noise cannot be calibrated: its class of parameters has no method `noisier`")


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
