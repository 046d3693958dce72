"""Many learners of one process, as a file says who they are: each with a policy, an identity and settings of its own."""

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
    """Of one learner, or of all of a file. Each is what the option of that name of `sottovoce learner` says."""

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
    def said(self) -> dict[str, Any]:
        """What it says, and nothing that it leaves open."""
        return {name: getattr(self, name) for name in self.model_fields_set if name in _Settings.model_fields}


def _by_name(learners: object) -> object:
    """Names alone are learners of which all is as for all; so is a name with nothing after it."""
    if isinstance(learners, list):
        if twice := [each for k, each in enumerate(learners) if each in learners[:k]]:
            raise ValueError(f"each must have a name of its own, got {twice[0]!r} twice")
        learners = dict.fromkeys(learners)
    if not isinstance(learners, dict) or not learners:
        raise ValueError(f"must be names, or say of each name what is its own, got {repr(learners)[:80]}")
    return {name: {} if own is None else own for name, own in learners.items()}


class _HostFile(_Settings):
    """The learners of a process: their names, or what is said of each of them, and before that what is said of all."""

    learners: Annotated[dict[str, _Settings], BeforeValidator(_by_name)]


_FIELDS = {"state": "state_folder", "join_timeout": "join_timeout_s", "owner": "owners", "feeder": "feeders"}
"""Names of options in `LearnerConfig`, where they are other ones."""
_CONVERTED_OPTIONS = ("identity", "insecure", "policy")


def build_configs(names: Sequence[str], options: Mapping[str, Any]) -> list[LearnerConfig]:
    """Learners of which all but the name is as the options say. Of several, the identity's folder has one for each.

    Args:
        names: of all of them.
        options: of the command, by name.

    Raises:
        SpecError: one of them cannot be as they say.
    """
    if twice := {each for each in names if names.count(each) > 1}:
        raise SpecError(f"each learner needs a name of its own, got {sorted(twice)[0]!r} twice")
    several, identity = len(names) > 1, options["identity"]
    allowed = Policy.load(options["policy"])
    return _distinct(
        [
            _config(name, options, identity / f"learner-{name}" if several and identity else identity, allowed)
            for name in names
        ]
    )


def load_host_file(path: Path, options: Mapping[str, Any]) -> list[LearnerConfig]:
    """The learners that a file names. What it says of one holds, else what it says of all, else the options.

    Args:
        path: of the file.
        options: of the command, by name.

    Raises:
        SpecError: it cannot be read, or says something that is not known; or one of them cannot be as it says.
    """
    file, policy, configs = _read(path), cache(Policy.load), []  # few policies, of many learners
    for name, own in file.learners.items():
        said = {**options, **file.said, **own.said}
        identity = said["identity"]
        if identity is not None and own.identity is None:  # that of all has a folder for each
            identity = identity / f"learner-{name}"
        try:
            config = _config(name, said, identity, policy(said["policy"]))
            config.check()
        except SottovoceError as error:
            raise SpecError(f"{path}: learner {name}: {error}") from None
        configs.append(config)
    return _distinct(configs)


def _read(path: Path) -> _HostFile:
    text = read_text_file(path, "a file of learners")
    document = parse_document(text, str(path), "a file of learners")
    try:
        return _HostFile.model_validate(document)
    except ValidationError as error:
        raise SpecError("\n".join(_explained(each, str(path)) for each in error.errors())) from None


def _explained(problem: Any, source: str) -> str:
    """One problem of a file as a line for a person."""
    where = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "extra_forbidden":
            known = ", ".join(_Settings.model_fields)
            return f"{source}: unknown field {where}; of a learner, or of all, there are {known}"
        case "missing":
            return f"{source}: field {where} is required: names, or what is said of each name"
        case "value_error":
            return f"{source}: {where}: {problem['ctx']['error']}"
        case _:
            return f"{source}: {where}: {describe_requirement(problem)}, got {repr(problem.get('input'))[:80]}"


def _config(name: str, said: Mapping[str, Any], identity: Path | None, policy: Policy) -> LearnerConfig:
    if said["coordinator"] is None:
        raise SpecError("a learner needs the address of its coordinator: --coordinator HOST:PORT")
    fields = {_FIELDS.get(option, option): value for option, value in said.items() if option not in _CONVERTED_OPTIONS}
    return LearnerConfig(name, credentials=Credentials(identity, said["insecure"]), policy=policy, **fields)


def _distinct(configs: list[LearnerConfig]) -> list[LearnerConfig]:
    """The same learners, where no two of them would listen in one place, or be found there.

    Raises:
        SpecError: two would.
    """
    seen = dict[tuple[str, str], str]()
    for each in configs:
        places = {"listen": "" if each.listen.endswith(":0") else each.listen, "advertise": each.advertise or ""}
        for option, place in places.items():
            if place and (other := seen.setdefault((option, place), each.name)) != each.name:
                raise SpecError(
                    f"several learners in one process need an address each, got {option} {place} for both {other} and "
                    f"{each.name}: let all listen on HOST:0, or give each its own"
                )
    return configs
