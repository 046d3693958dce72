"""Policy of a learner's owner: conditions for taking part in a run, for any requester.

A run spec comes from a coordinator, and sets the noise, the data that leaves the learner besides messages, and the recording of
messages. A policy is the owner's condition. Every run is checked against it before the learner takes part: when the run begins,
when it is resumed, and when it is reconfigured.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from sottovoce_core.algorithms import ALGORITHMS
from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import Adjacency, GuaranteeBasis, ThreatModel
from sottovoce_core.privacy.loss import EpsilonLimit
from sottovoce_core.registry import Count, Positive, Section
from sottovoce_core.runs.run import Run, build_run, format_above
from sottovoce_core.spec import LEARNER_NAME_PATTERN, RunSpec, find_imports
from sottovoce_core.validation_errors import explain
from sottovoce_core.yaml_files import parse_document, read_text_file, write_yaml

MAX_POLICY_BYTES = 64 * 1024
"""Maximum size of a policy's file."""
DAYS_PER_MONTH = 30
"""Number of days that count as a month."""

_ADJACENCIES = (Adjacency.RECORD_USE, Adjacency.ROUND, Adjacency.LEARNER)
_THREAT_MODELS = (ThreatModel.OUTPUT, ThreatModel.NEIGHBOUR, ThreatModel.WIRE)
"""Adjacencies from the weakest guarantee to the strongest: each covers those before it."""


def _require_known(names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for name in names:
            if ":" not in name:
                ALGORITHMS.find(name)
    except SpecError as error:
        raise PydanticCustomError("kind", "{text}", {"text": str(error)}) from None
    return names


def _build_role_validator(role: str) -> AfterValidator:
    """Build the validator of a list of identities of one role; an empty list is refused, because it would allow no run."""

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


def _parse_capture_modes(value: object) -> object:
    if isinstance(value, list) and "never" in value:
        raise PydanticCustomError(
            "way",
            "must be some of 'relay', 'mirror' and 'wiretap', got {got}; `never` must be alone: `capture_modes: never`",
            {"got": str(value)},
        )
    return () if value == "never" else value


_Algorithms = Annotated[tuple[str, ...], AfterValidator(_require_known)]
_Coordinators = Annotated[tuple[str, ...], _build_role_validator("coordinator")]
_Eavesdroppers = Annotated[tuple[str, ...], _build_role_validator("eavesdropper")]
_Telemetry = Literal["accuracy", "predict"]
_CaptureModes = Annotated[
    tuple[Literal["relay", "mirror", "wiretap"], ...],
    BeforeValidator(_parse_capture_modes),
    PlainSerializer(lambda ways: list(ways) or "never"),
]


class GuaranteeRequirements(Section):
    """Minimum guarantee of a learner's messages."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    adjacency: Adjacency = Adjacency.RECORD_USE
    """Minimum difference that the guarantee must cover: `record_use` (one use of one record), `round` (all records of a round) or
    `learner` (all records of the learner). Each covers those before it."""
    threat_model: ThreatModel = ThreatModel.WIRE
    """Adversary that the guarantee must cover: `wire` (sees every channel), `neighbour` (one of them) or `output` (sees only
    published decisions)."""
    proof: bool = False
    """Require that the guarantee names its proof. All built-in algorithms do."""


class Policy(Section):
    """Conditions of a learner's owner. A limit of `null` means no limit."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    algorithms: _Algorithms | None = None
    """Allowed algorithms, by their names in run specs; null: all built-in ones and those of installed packages, and
    `module:Class` if the learner was started with `--allow-imports`."""
    imports: tuple[str, ...] | None = None
    """Code that any section of a spec may name, as `module:Class`, if the learner was started with `--allow-imports`; null: any.
    Without that option none is imported, even if allowed here."""
    epsilon_per_run: Positive | None = 100.0
    """Maximum epsilon of one run. A run planned to cost more is refused, and a learner stops before it has spent more. The
    default is a guard against nearly disabled noise, not a recommendation: set a value that you can answer for."""
    epsilon_per_month: Positive | None = 1000.0
    """Maximum epsilon of all runs of the last 30 days, by the ledger. A run counts in full while it goes on, and for 30 days
    after its end."""
    epsilon: Positive | None = None
    """Maximum epsilon of all runs ever, by the ledger: as `--budget`. The smaller of both applies."""
    delta: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Delta at which the three limits of epsilon hold; 0: they are pure. Choose it far below one in the number of
    records, such as 1e-6: many messages of small losses count much less then."""
    guarantees: GuaranteeRequirements = GuaranteeRequirements()
    """Required guarantee of the learner's messages."""
    telemetry: tuple[_Telemetry, ...] = ()
    """Data that may leave the learner outside the guarantee: `accuracy` (prequential, to the coordinator), `predict` (answers of
    the private model, to any caller)."""
    capture_modes: _CaptureModes = ("relay", "mirror", "wiretap")
    """Capture modes of runs in which the learner takes part: `relay` (the eavesdropper is between learners), `mirror` (they copy
    their messages to it), `wiretap` (it forwards encrypted traffic, as anyone on the network may); or `capture_modes: never`,
    alone. A guarantee holds for an adversary that receives every message."""
    eavesdroppers: _Eavesdroppers | None = None
    """Allowed eavesdroppers, as `eavesdropper/NAME` of their certificates; null: any of the deployment. Needs an identity."""
    coordinators: _Coordinators | None = None
    """Allowed coordinators, as `coordinator/NAME` of their certificates; null: any of the deployment. Needs an identity."""
    max_features: Count | None = 1_000_000
    """Maximum number of features of a record."""
    max_parameters: Count | None = 10_000_000
    """Maximum number of parameters of the model, and so of numbers in a message: mostly features times classes."""
    max_rounds: Count | None = 10_000_000
    """Maximum number of rounds. A run without a planned end (`rounds: null`) exceeds any number."""
    max_learners: Count | None = 1024
    """Maximum number of learners of a run."""

    _source: str = PrivateAttr("the default one")

    @classmethod
    def from_spec(cls, spec: RunSpec) -> Policy:
        """Make the policy that allows exactly a spec, at any price: for learners started for one's own spec."""
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
        """Read a policy from a YAML file; without one, return the default.

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
        """Write the policy as YAML, every clause with its description."""
        head = "# Conditions of a learner's owner. A clause that is left out has its default value."
        return "\n\n".join([head, *_iterate_clauses(self, "")]) + "\n"

    def require_identity(self) -> None:
        """Refuse a learner without an identity if the policy names identities: it could not authenticate the other end.

        Raises:
            SpecError: the policy names identities.
        """
        named = [name for name in ("coordinators", "eavesdroppers") if getattr(self, name) is not None]
        if named:
            clauses = " and ".join(named)
            raise SpecError(
                f"the owner's policy ({self._source}) names {clauses}, and needs a learner with an identity to authenticate "
                f"them: give it one (--identity FOLDER), or take {clauses} out of the policy"
            )

    def require_allowed_imports(self, document: object) -> None:
        """Refuse code that the policy does not allow, before it is imported.

        Args:
            document: a run spec as parsed JSON.

        Raises:
            SpecError: the spec names such code.
        """
        self._require_satisfied([self._check_imports(document)])

    def admit(
        self,
        spec: RunSpec,
        n_features: int,
        learner: int,
        *,
        is_mirrored: bool = False,
        build: Callable[[RunSpec, int], Run] = build_run,
    ) -> Run:
        """Return the run if the policy allows a learner to take part in it.

        Args:
            spec: spec of the run.
            n_features: number of features of a record.
            learner: index of the learner.
            is_mirrored: whether the learner must copy its messages to an eavesdropper, independently of the spec.
            build: as `build_run`: learners of one process need not build the run more than once.

        Raises:
            SpecError: the policy does not allow it (the message has all clauses that do not); or as `build_run`.
        """
        sizes, run = list(self._check_sizes(spec, n_features)), None
        findings = [*sizes, *self._check_terms(spec, mirrored=is_mirrored)]
        if all(each.is_satisfied for each in sizes):  # else it is too large to be built
            run = build(spec, n_features)
            findings += self._check_guarantee(run, learner)
        self._require_satisfied(findings)
        assert run is not None  # noqa: S101 - oversized runs were refused
        return run

    def findings(self, run: Run, n_features: int, learner: int) -> list[_Finding]:
        """Check every clause against a run; arguments as of `admit`."""
        code = self._check_imports(run.spec.model_dump(mode="json"))
        return [
            *self._check_sizes(run.spec, n_features),
            code,
            *self._check_terms(run.spec),
            *self._check_guarantee(run, learner),
        ]

    def _check_imports(self, document: object) -> _Finding:
        named = dict.fromkeys(find_imports(document))
        fits = self.imports is None or named.keys() <= set(self.imports)
        both = dict.fromkeys([*(self.imports or ()), *named])
        return _Finding("imports", _format_list(self.imports), _format_list(named), fits, _format_list(both))

    def _check_sizes(self, spec: RunSpec, n_features: int) -> Iterator[_Finding]:
        yield _check_maximum("max_features", self.max_features, n_features)
        yield _check_maximum("max_parameters", self.max_parameters, spec.loss.dim(n_features))
        yield _check_maximum(
            "max_rounds", self.max_rounds, spec.rounds, "rounds without an end" if spec.is_unbounded else ""
        )
        yield _check_maximum("max_learners", self.max_learners, spec.n_learners)

    def _check_terms(self, spec: RunSpec, *, mirrored: bool = False) -> Iterator[_Finding]:
        """Check the clauses about a spec's terms other than its guarantee."""
        name = spec.algorithm.name
        fits = self.algorithms is None or name in self.algorithms
        yield _Finding(
            "algorithms", _format_list(self.algorithms), name, fits, _format_list([*(self.algorithms or ()), name])
        )
        asked_for = [what for what, asked in spec.telemetry.model_dump().items() if asked]
        both = _format_list(dict.fromkeys([*self.telemetry, *asked_for]))
        yield _Finding(
            "telemetry",
            _format_list(self.telemetry),
            _format_list(asked_for),
            set(asked_for) <= set(self.telemetry),
            both,
        )
        ways = {way for way in (spec.capture, "mirror" if mirrored else "none") if way != "none"}
        allowed = _format_list(self.capture_modes) if self.capture_modes else "never"
        both = _format_list(dict.fromkeys([*self.capture_modes, *sorted(ways)]))
        yield _Finding("capture_modes", allowed, _format_list(sorted(ways)), ways <= set(self.capture_modes), both)

    def _check_guarantee(self, run: Run, learner: int) -> Iterator[_Finding]:
        """Check the clauses about a run's guarantee for the learner, and its cost."""
        accountant, least = run.algorithm.accountant(learner), self.guarantees
        grounds, adjacency = accountant.basis, accountant.adjacency
        yield _check_minimum("adjacency", least.adjacency, adjacency, _ADJACENCIES)
        yield _check_minimum("threat_model", least.threat_model, grounds.threat_model, _THREAT_MODELS)
        stated = grounds.proof != GuaranteeBasis().proof
        yield _Finding("guarantees.proof", str(least.proof).lower(), grounds.proof, stated or not least.proof)
        if (limit := self.epsilon_per_run) is None:
            yield _Finding("epsilon_per_run", _NO_LIMIT, "not priced", is_satisfied=True)
        else:
            cost = _compute_planned_cost(run, learner, EpsilonLimit(limit, self.delta))
            yield _Finding("epsilon_per_run", f"{limit:.6g}", format_above(cost, limit), cost <= limit)

    def _require_satisfied(self, findings: Iterable[_Finding]) -> None:
        """Raise `SpecError` with every finding that is not satisfied."""
        if refused := [each for each in findings if not each.is_satisfied]:
            refusals = "; and ".join(
                f"{each.clause} {each.allowed_value}, the spec asks for {each.requested_value}" for each in refused
            )
            raise SpecError(f"the owner's policy ({self._source}) allows {refusals}; {_describe_remedy(refused)}")


def find_default_policy_warnings(run: Run) -> Iterator[RunWarning]:
    """Warn if learners under the default policy would refuse the run because of its cost."""
    limit = Policy().epsilon_per_run or math.inf
    allowed = EpsilonLimit(limit, Policy().delta)
    if (cost := max(_compute_planned_cost(run, i, allowed) for i in range(run.spec.n_learners))) > limit:
        yield RunWarning(
            "DEFAULT_POLICY",
            f"services started without --policy refuse this run: the default policy allows epsilon_per_run {limit:g}, and the "
            f"spec asks for {format_above(cost, limit)} (sottovoce policy SPEC); `sottovoce up` and simulations do not apply "
            "it",
        )


def extract_identity_names(identities: tuple[str, ...] | None) -> tuple[str, ...]:
    """Extract the names of a clause of identities of one role; a single empty name means any."""
    return ("",) if identities is None else tuple(each.partition("/")[2] for each in identities)


@dataclass(frozen=True, slots=True)
class _Finding:
    """Result of checking one clause of a policy against a run.

    Attributes:
        clause: name of the clause.
        allowed_value: value in the policy.
        requested_value: value in the run.
        is_satisfied: whether the policy allows it.
        sufficient_value: smallest value of the clause that would allow the run; empty if the owner must decide.
    """

    clause: str
    allowed_value: str
    requested_value: str
    is_satisfied: bool
    sufficient_value: str = ""


_DEFAULT_POLICY_HINT = "`sottovoce policy` prints one to start from"


def _iterate_clauses(section: Section, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        text, value = " ".join((field.description or "").split()), getattr(section, name)
        lines = textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(value, Section):
            lines += [f"{indent}{name}:", *_iterate_clauses(value, f"{indent}  ")]
        else:
            line = {name: section.model_dump(mode="json")[name]}
            lines.append(indent + write_yaml(line, flow=True).strip()[1:-1])
        yield "\n".join(lines)


# ---- clauses ---------------------------------------------------------------------------------------------------------

_NO_LIMIT = "anything"


def _check_maximum(clause: str, limit: int | None, asked: int, shown: str = "") -> _Finding:
    fits = limit is None or asked <= limit
    allows, asks = _NO_LIMIT if limit is None else str(limit), shown or str(asked)
    return _Finding(clause, allows, asks, fits, "null" if shown else asks)


def _describe_remedy(refused: Sequence[_Finding]) -> str:
    """Describe the change of the policy that would allow the run."""
    if all(each.sufficient_value for each in refused):
        clauses = " and ".join(f"`{each.clause}: {each.sufficient_value}`" for each in refused)
        return f"{clauses} in the file of --policy allows it"
    return "an owner who can answer for it sets other clauses in the file of --policy (`sottovoce policy` prints them)"


def _check_minimum(clause: str, least: Any, promised: Any, order: tuple[Any, ...]) -> _Finding:
    fits = order.index(promised) >= order.index(least)
    return _Finding(f"guarantees.{clause}", least.value, promised.value, fits)


def _compute_planned_cost(run: Run, learner: int, limit: EpsilonLimit) -> float:
    """Return the maximum epsilon of the first planned rounds at the limit's delta; a budget of the spec is an upper bound.

    So it is if it is pure, or holds at the same delta or a smaller one.
    """
    budget = run.spec.get_budget(learner) if run.spec.privacy.delta <= limit.delta else None
    if budget is not None and budget <= limit.epsilon:
        return budget
    planned = run.planned_loss(learner, limit.delta).epsilon(limit.delta)
    return min(math.inf if budget is None else budget, planned)


def _format_list(names: Iterable[str] | None) -> str:
    return _NO_LIMIT if names is None else f"[{', '.join(names)}]"
