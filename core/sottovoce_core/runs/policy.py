"""The policy of a learner's owner: in which runs a learner takes part, whoever asks.

A run spec comes from a coordinator, and sets the noise, what leaves the learner beside its messages, and who records them. A
policy is what the learner's owner says to that. It is held against every run before the learner takes part: when the run
begins, when it is taken up again, and when it is changed.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, PlainSerializer, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import Adjacency, GuaranteeBasis, ThreatModel
from sottovoce_core.registry import Count, Positive, Section
from sottovoce_core.runs.run import Run, build_run, format_above
from sottovoce_core.spec import LEARNER_NAME_PATTERN, RunSpec, find_imports
from sottovoce_core.validation_errors import explain
from sottovoce_core.yaml_files import parse_document, read_text_file, write_yaml

MAX_POLICY_BYTES = 64 * 1024
"""Bytes of a policy's file: a few lines, and nobody's records."""
MAX_ACCOUNTED_ROUNDS = 100_000
"""Rounds of a run that are priced before it begins: the limit holds while it goes on in any case."""
DAYS_PER_MONTH = 30
"""What a month is: so many days, whichever they are."""

_ADJACENCIES = (Adjacency.RECORD_USE, Adjacency.ROUND, Adjacency.LEARNER)
_THREAT_MODELS = (ThreatModel.OUTPUT, ThreatModel.NEIGHBOUR, ThreatModel.WIRE)
"""From the weakest promise to the strongest: each covers those before it."""


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for name in names:
            if ":" not in name:
                ALGORITHMS.find(name)
    except SpecError as error:
        raise PydanticCustomError("kind", "{text}", {"text": str(error)}) from None
    return names


def _of_role(role: str) -> AfterValidator:
    """Names of identities of one role: some, for none would be nobody to take part with."""

    def fits(identity: str) -> bool:
        own, _, name = identity.partition("/")
        return own == role and re.fullmatch(LEARNER_NAME_PATTERN, name) is not None

    def require(identities: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [each for each in identities if not fits(each)]
        if wrong or not identities:
            raise PydanticCustomError(
                "identity", "must name one or more as {role}/NAME, got {got}", {"role": role, "got": str(wrong)}
            )
        return identities

    return AfterValidator(require)


def _ways(value: object) -> object:
    if isinstance(value, list) and "never" in value:
        raise PydanticCustomError(
            "way",
            "must be some of 'relay', 'mirror' and 'wiretap', got {got}; `never` stands alone: `capture_modes: never`",
            {"got": str(value)},
        )
    return () if value == "never" else value


_Algorithms = Annotated[tuple[str, ...], AfterValidator(_known)]
_Coordinators = Annotated[tuple[str, ...], _of_role("coordinator")]
_Eavesdroppers = Annotated[tuple[str, ...], _of_role("eavesdropper")]
_Telemetry = Literal["accuracy", "predict"]
_Ways = Annotated[
    tuple[Literal["relay", "mirror", "wiretap"], ...],
    BeforeValidator(_ways),
    PlainSerializer(lambda ways: list(ways) or "never"),
]


class GuaranteeRequirements(Section):
    """What must be promised of a learner's messages."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    adjacency: Adjacency = Adjacency.RECORD_USE
    """What two data sets that must look alike may differ in, at least: `record` (one use of one record), `round` (all records of
    a round) or `learner` (all records of the learner). Each covers those before it."""
    threat_model: ThreatModel = ThreatModel.WIRE
    """Against whom it must hold: `wire` (everybody on every channel), `neighbour` (one of them) or `output` (who sees published
    decisions only)."""
    proof: bool = False
    """Whether it must name its proof. All built-in algorithms do."""


class Policy(Section):
    """What a learner's owner allows. A limit of `null` is none."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    algorithms: _Algorithms | None = None
    """Which algorithms, by the names that a run spec gives them; null: all that are built in or that an installed package
    offers, and `module:Class` where the learner was started with `--allow-imports`."""
    imports: tuple[str, ...] | None = None
    """Which code a spec may name in any of its sections, as `module:Class`, where the learner was started with
    `--allow-imports`; null: any. Without that option none is imported, whatever stands here."""
    epsilon_per_run: Positive | None = 100.0
    """Epsilon of one run. A run that is planned to cost more is refused, and a learner stops before it has spent more. The
    default is a guard against noise that is all but switched off, no advice: set what you can answer for."""
    epsilon_per_month: Positive | None = 1000.0
    """Epsilon of all runs of the last 30 days, by the ledger. A run counts whole while it goes on, and for 30 days after its
    end."""
    epsilon: Positive | None = None
    """Epsilon of all runs that there ever are, by the ledger: as `--budget`. Of both the smaller one holds."""
    guarantees: GuaranteeRequirements = GuaranteeRequirements()
    """What must be promised of the learner's messages."""
    telemetry: tuple[_Telemetry, ...] = ()
    """What may leave the learner outside the guarantee: `accuracy` (prequential, to the coordinator), `predict` (answers of the
    private model, to whoever asks)."""
    capture_modes: _Ways = ("relay", "mirror", "wiretap")
    """Which recorded runs the learner takes part in: `relay` (the eavesdropper stands between learners), `mirror` (they copy
    their messages to it), `wiretap` (it passes on what is encrypted, as anybody on the network may); or `capture_modes: never`,
    alone. A guarantee holds for whoever hears every message."""
    eavesdroppers: _Eavesdroppers | None = None
    """Who may record, as `eavesdropper/NAME` of its certificate; null: any of the deployment. Needs an identity."""
    coordinators: _Coordinators | None = None
    """Which coordinators the learner joins, as `coordinator/NAME` of their certificates; null: any of the deployment. Needs an
    identity."""
    max_features: Count | None = 1_000_000
    """Features of a record."""
    max_parameters: Count | None = 10_000_000
    """Numbers in the model, and so in a message: features times classes, mostly."""
    max_rounds: Count | None = 10_000_000
    """Rounds of a run. One that is to go on until it is stopped (`rounds: null`) has more than any number."""
    max_learners: Count | None = 1024
    """Learners of a run."""

    _source: str = PrivateAttr("the default one")

    @classmethod
    def from_spec(cls, spec: RunSpec) -> Policy:
        """What a spec asks for and no more, at any price: for who starts learners for a spec of one's own."""
        return cls(
            algorithms=(spec.algorithm.name,),
            imports=tuple(find_imports(spec.model_dump(mode="json"))),
            epsilon_per_run=None,
            epsilon_per_month=None,
            guarantees=GuaranteeRequirements(threat_model=ThreatModel.OUTPUT),
            telemetry=tuple(name for name in get_args(_Telemetry) if getattr(spec.telemetry, name)),
            capture_modes=() if spec.capture == "none" else (spec.capture,),
            max_features=None,
            max_parameters=None,
            max_rounds=None if spec.is_unbounded else spec.rounds,
            max_learners=spec.n_learners,
        )

    @classmethod
    def load(cls, path: Path | None) -> Policy:
        """Read a YAML file; without one, the default.

        Raises:
            SpecError: unreadable, too long, not YAML, or no valid policy: one line per problem.
        """
        if path is None:
            return cls()
        text = read_text_file(path, "a policy", MAX_POLICY_BYTES)
        if not text.strip():
            raise SpecError(f"{path}: a policy must be a mapping of clauses, got an empty file; {_DEFAULT_POLICY_HINT}")
        document = parse_document(text, str(path), "a policy")
        try:
            policy = cls.model_validate(document)
        except ValidationError as error:
            raise SpecError(explain(error, str(path), document, cls)) from None
        policy._source = path.name
        return policy

    def dump(self) -> str:
        """The policy as YAML, every clause with what it says."""
        head = "# What a learner's owner allows. A clause that is left out is that of the default."
        return "\n\n".join([head, *_clauses(self, "")]) + "\n"

    def require_identity(self) -> None:
        """Of a learner that has none: without one, nobody can tell who is at the other end.

        Raises:
            SpecError: the policy names whom it trusts.
        """
        named = [name for name in ("coordinators", "eavesdroppers") if getattr(self, name) is not None]
        if named:
            clauses = " and ".join(named)
            raise SpecError(
                f"the owner's policy ({self._source}) names {clauses}, and a learner without an identity cannot tell who they "
                f"are: give it one (--identity FOLDER), or take {clauses} out of the policy"
            )

    def require_allowed_imports(self, document: object) -> None:
        """Refuse code before it is imported.

        Args:
            document: a run spec as JSON gives it.

        Raises:
            SpecError: it names code that may not be.
        """
        self._require([self._code(document)])

    def admit(
        self,
        spec: RunSpec,
        n_features: int,
        learner: int,
        *,
        is_mirrored: bool = False,
        build: Callable[[RunSpec, int], Run] = build_run,
    ) -> Run:
        """The run, where a learner may take part in it.

        Args:
            spec: of the run.
            n_features: of a record.
            learner: its index.
            mirrored: whether it was told to copy its messages to somebody, whatever the spec says.
            build: as `build_run`: learners of one process need not build it more than once.

        Raises:
            SpecError: it may not, with all clauses that say so; or as `build_run`.
        """
        sizes, run = list(self._sizes(spec, n_features)), None
        findings = [*sizes, *self._terms(spec, mirrored=is_mirrored)]
        if all(each.is_satisfied for each in sizes):  # else it is too large to be built
            run = build(spec, n_features)
            findings += self._promises(run, learner)
        self._require(findings)
        assert run is not None  # noqa: S101 - what did not fit was refused
        return run

    def findings(self, run: Run, n_features: int, learner: int) -> list[_Finding]:
        """Every clause, held against a run; arguments as of `admit`."""
        code = self._code(run.spec.model_dump(mode="json"))
        return [*self._sizes(run.spec, n_features), code, *self._terms(run.spec), *self._promises(run, learner)]

    def _code(self, document: object) -> _Finding:
        named = dict.fromkeys(find_imports(document))
        fits = self.imports is None or named.keys() <= set(self.imports)
        both = dict.fromkeys([*(self.imports or ()), *named])
        return _Finding("imports", _listed(self.imports), _listed(named), fits, _listed(both))

    def _sizes(self, spec: RunSpec, n_features: int) -> Iterator[_Finding]:
        yield _at_most("max_features", self.max_features, n_features)
        yield _at_most("max_parameters", self.max_parameters, spec.loss.dim(n_features))
        yield _at_most("max_rounds", self.max_rounds, spec.rounds, "rounds without an end" if spec.is_unbounded else "")
        yield _at_most("max_learners", self.max_learners, spec.n_learners)

    def _terms(self, spec: RunSpec, *, mirrored: bool = False) -> Iterator[_Finding]:
        """What a spec asks for beside its guarantee."""
        name = spec.algorithm.name
        fits = self.algorithms is None or name in self.algorithms
        yield _Finding("algorithms", _listed(self.algorithms), name, fits, _listed([*(self.algorithms or ()), name]))
        told = [what for what, asked in spec.telemetry.model_dump().items() if asked]
        both = _listed(dict.fromkeys([*self.telemetry, *told]))
        yield _Finding("telemetry", _listed(self.telemetry), _listed(told), set(told) <= set(self.telemetry), both)
        ways = {way for way in (spec.capture, "mirror" if mirrored else "none") if way != "none"}
        allowed = _listed(self.capture_modes) if self.capture_modes else "never"
        both = _listed(dict.fromkeys([*self.capture_modes, *sorted(ways)]))
        yield _Finding("capture_modes", allowed, _listed(sorted(ways)), ways <= set(self.capture_modes), both)

    def _promises(self, run: Run, learner: int) -> Iterator[_Finding]:
        """What a run promises of a learner's messages, and what it costs."""
        accountant, least = run.algorithm.accountant(learner), self.guarantees
        grounds, event = accountant.basis, accountant.adjacency
        yield _at_least("adjacency", least.adjacency, event, _ADJACENCIES)
        yield _at_least("threat_model", least.threat_model, grounds.threat_model, _THREAT_MODELS)
        stated = grounds.proof != GuaranteeBasis().proof
        yield _Finding("guarantees.proof", str(least.proof).lower(), grounds.proof, stated or not least.proof)
        if (limit := self.epsilon_per_run) is None:
            yield _Finding("epsilon_per_run", _NO_LIMIT, "not priced", is_satisfied=True)
        else:
            cost = _planned_cost(run, learner, limit)
            yield _Finding("epsilon_per_run", f"{limit:.6g}", format_above(cost, limit), cost <= limit)

    def _require(self, findings: Iterable[_Finding]) -> None:
        """Raises `SpecError` with every finding that does not fit."""
        if refused := [each for each in findings if not each.is_satisfied]:
            told = "; and ".join(
                f"{each.clause} {each.allowed_value}, the spec asks for {each.requested_value}" for each in refused
            )
            raise SpecError(f"the owner's policy ({self._source}) allows {told}; {_remedy(refused)}")


def find_default_policy_warnings(run: Run) -> Iterator[RunWarning]:
    """The refusal to expect of learners whose owners go by the default policy, where a run costs more than that allows."""
    limit = Policy().epsilon_per_run or math.inf
    if (cost := max(_planned_cost(run, i, limit) for i in range(run.spec.n_learners))) > limit:
        yield RunWarning(
            "DEFAULT_POLICY",
            f"services started without --policy refuse this run: the default policy allows epsilon_per_run {limit:g}, and the "
            f"spec asks for {format_above(cost, limit)} (sottovoce policy SPEC); `sottovoce up` and simulations do not ask "
            "for it",
        )


def extract_identity_names(identities: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of a clause that names identities of one role; a single empty one: any."""
    return ("",) if identities is None else tuple(each.partition("/")[2] for each in identities)


@dataclass(frozen=True, slots=True)
class _Finding:
    """A clause of a policy, held against a run.

    Attributes:
        clause: its name.
        allows: what the policy says.
        asks: what the run asks for.
        fits: whether the policy allows that.
        enough: the least that would allow it, as the clause says it; empty where the owner must weigh that.
    """

    clause: str
    allowed_value: str
    requested_value: str
    is_satisfied: bool
    sufficient_value: str = ""


_DEFAULT_POLICY_HINT = "`sottovoce policy` prints one to begin with"


def _clauses(section: Section, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        text, value = " ".join((field.description or "").split()), getattr(section, name)
        lines = textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(value, Section):
            lines += [f"{indent}{name}:", *_clauses(value, f"{indent}  ")]
        else:
            line = {name: section.model_dump(mode="json")[name]}
            lines.append(indent + write_yaml(line, flow=True).strip()[1:-1])
        yield "\n".join(lines)


# ---- clauses ---------------------------------------------------------------------------------------------------------

_NO_LIMIT = "anything"


def _at_most(clause: str, limit: int | None, asked: int, shown: str = "") -> _Finding:
    fits = limit is None or asked <= limit
    allows, asks = _NO_LIMIT if limit is None else str(limit), shown or str(asked)
    return _Finding(clause, allows, asks, fits, "null" if shown else asks)


def _remedy(refused: Sequence[_Finding]) -> str:
    """What the owner would do who wants the run."""
    if all(each.sufficient_value for each in refused):
        return f"{' and '.join(f'`{each.clause}: {each.sufficient_value}`' for each in refused)} in the file of --policy allows it"
    return "an owner who can answer for it sets other clauses in the file of --policy (`sottovoce policy` prints them)"


def _at_least(clause: str, least: Any, promised: Any, order: tuple[Any, ...]) -> _Finding:
    fits = order.index(promised) >= order.index(least)
    return _Finding(f"guarantees.{clause}", least.value, promised.value, fits)


def _planned_cost(run: Run, learner: int, limit: float) -> float:
    """Epsilon that a learner spends at most in the first `MAX_ACCOUNTED_ROUNDS` rounds as they are planned; the spec's budget bounds it."""
    budget = run.spec.get_budget(learner)
    if budget is not None and budget <= limit:
        return budget
    return min(math.inf if budget is None else budget, run.planned_epsilon(learner, MAX_ACCOUNTED_ROUNDS))


def _listed(names: Iterable[str] | None) -> str:
    return _NO_LIMIT if names is None else f"[{', '.join(names)}]"
