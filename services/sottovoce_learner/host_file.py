"""File of many learners in one process, each with its own policy, identity and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError

from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.registry import Section
from sottovoce_core.runs.policy import Policy
from sottovoce_core.validation_errors import describe_requirement
from sottovoce_core.yaml_files import parse_document, read_text_file
from sottovoce_learner.config import LearnerConfig
from sottovoce_rpc.credentials import Credentials


class _Settings(Section):
    """Settings of one learner, or of all learners of a file; each is named like its option of `sottovoce learner`."""

    coordinator: str | None = None
    listen: str | None = None
    advertise: str | None = None
    state: Path | None = None
    join_timeout: float | None = None
    recorded_noise: Path | None = None
    allow_imports: bool = False
    budget: float | None = None
    noise: Literal["bitwise", "opendp"] | None = None
    noise_seed: str | None = None
    identity: Path | None = None
    insecure: bool = False
    owner: tuple[str, ...] = ()
    feeder: tuple[str, ...] = ()
    policy: Path | None = None
    keep_log: bool = False

    @property
    def set_fields(self) -> dict[str, Any]:
        """Fields that were set."""
        return {name: getattr(self, name) for name in self.model_fields_set if name in _Settings.model_fields}


def _normalise_learners(learners: object) -> object:
    """Convert a list of names, or names with empty settings, to a mapping of names to settings."""
    if isinstance(learners, list):
        if duplicates := [each for k, each in enumerate(learners) if each in learners[:k]]:
            raise ValueError(f"each must have its own name, got {duplicates[0]!r} twice")
        learners = dict.fromkeys(learners)
    if not isinstance(learners, dict) or not learners:
        raise ValueError(f"must be names, or map each name to its own settings, got {repr(learners)[:80]}")
    return {name: {} if own is None else own for name, own in learners.items()}


class _HostFile(_Settings):
    """Content of the file: settings shared by all learners, and the learners' names or settings by name."""

    learners: Annotated[dict[str, _Settings], BeforeValidator(_normalise_learners)]


_FIELDS = {"state": "state_folder", "join_timeout": "join_timeout_s", "owner": "owners", "feeder": "feeders"}
"""Fields of `LearnerConfig` whose names differ from their options."""
_CONVERTED_OPTIONS = ("identity", "insecure", "policy")


def build_configs(names: Sequence[str], options: Mapping[str, Any]) -> list[LearnerConfig]:
    """Build the settings of learners that share all options but the name. With several, each has its own identity subfolder.

    Args:
        names: learner names.
        options: options of the command, by name.

    Raises:
        SpecError: the options of one of them are not valid.
    """
    if duplicates := {each for each in names if names.count(each) > 1}:
        raise SpecError(f"each learner needs its own name, got {sorted(duplicates)[0]!r} twice")
    has_several, identity = len(names) > 1, options["identity"]
    allowed = Policy.load(options["policy"])
    return _require_distinct_addresses(
        [
            _build_config(
                name, options, identity / f"learner-{name}" if has_several and identity else identity, allowed
            )
            for name in names
        ]
    )


def load_host_file(path: Path, options: Mapping[str, Any]) -> list[LearnerConfig]:
    """Load the learners of a file. A learner's own settings come before the file's shared settings, and these before the options.

    Args:
        path: path of the file.
        options: options of the command, by name.

    Raises:
        SpecError: it cannot be read, or has an unknown field; or the settings of a learner are not valid.
    """
    file, policy, configs = _read(path), cache(Policy.load), []  # few policies, of many learners
    for name, own in file.learners.items():
        given = {**options, **file.set_fields, **own.set_fields}
        identity = given["identity"]
        if identity is not None and own.identity is None:  # a shared identity folder has a subfolder for each
            identity = identity / f"learner-{name}"
        try:
            config = _build_config(name, given, identity, policy(given["policy"]))
            config.check()
        except SottovoceError as error:
            raise SpecError(f"{path}: learner {name}: {error}") from None
        configs.append(config)
    return _require_distinct_addresses(configs)


def _read(path: Path) -> _HostFile:
    text = read_text_file(path, "a file of learners")
    document = parse_document(text, str(path), "a file of learners")
    try:
        return _HostFile.model_validate(document)
    except ValidationError as error:
        raise SpecError("\n".join(_describe_problem(each, str(path)) for each in error.errors())) from None


def _describe_problem(problem: Any, source: str) -> str:
    """Describe one validation error of a file on one line."""
    where = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "extra_forbidden":
            known = ", ".join(_Settings.model_fields)
            return f"{source}: unknown field {where}; the fields of a learner, or of all, are {known}"
        case "missing":
            return f"{source}: field {where} is required: names, or a mapping of names to settings"
        case "value_error":
            return f"{source}: {where}: {problem['ctx']['error']}"
        case _:
            return f"{source}: {where}: {describe_requirement(problem)}, got {repr(problem.get('input'))[:80]}"


def _build_config(name: str, given: Mapping[str, Any], identity: Path | None, policy: Policy) -> LearnerConfig:
    if given["coordinator"] is None:
        raise SpecError("a learner needs the address of its coordinator: --coordinator HOST:PORT")
    fields = {_FIELDS.get(option, option): value for option, value in given.items() if option not in _CONVERTED_OPTIONS}
    return LearnerConfig(name, credentials=Credentials(identity, given["insecure"]), policy=policy, **fields)


def _require_distinct_addresses(configs: list[LearnerConfig]) -> list[LearnerConfig]:
    """Check that no two learners listen on or advertise the same address; return them.

    Raises:
        SpecError: two of them do.
    """
    seen = dict[tuple[str, str], str]()
    for each in configs:
        addresses = {"listen": "" if each.listen.endswith(":0") else each.listen, "advertise": each.advertise or ""}
        for option, address in addresses.items():
            if address and (other := seen.setdefault((option, address), each.name)) != each.name:
                raise SpecError(
                    f"several learners in one process need an address each, got {option} {address} for both {other} and "
                    f"{each.name}: let all listen on HOST:0, or give each its own"
                )
    return configs
