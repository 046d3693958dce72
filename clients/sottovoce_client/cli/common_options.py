"""Options that many commands share: declared once, on `sottovoce` itself, and read from one object.

They may be given before or after the command. The command line overrides environment variables, these override the file of
`--config`, and this overrides the file of `--profile`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sottovoce_core.errors import SpecError
from sottovoce_core.text import escape_control

if TYPE_CHECKING:
    from sottovoce_rpc.credentials import Credentials

COMMON_OPTIONS = (
    *("as_json", "coordinator", "identity", "insecure", "allow_imports"),
    *("log_level", "log_format", "profile", "config", "stop_with_stdin"),
)
"""Parameter names of the common options."""
NETWORK_OPTIONS = ("identity", "insecure")
"""Common options of commands that open or serve channels."""
OPERATOR_OPTIONS = ("as_json", "coordinator", *NETWORK_OPTIONS)
"""Common options of commands that ask a coordinator."""
SERVICE_OPTIONS = (*NETWORK_OPTIONS, "allow_imports", "log_level", "log_format", "config", "stop_with_stdin")
"""Common options of services."""
DEFAULT_COORDINATOR = "127.0.0.1:7400"
"""Address of a coordinator on this machine."""
_GIVEN, _HELP = "sottovoce.given", "sottovoce.help"


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Values of the common options for the active command; options that it does not take have their defaults.

    Attributes:
        as_json: Whether the result is printed as JSON.
        coordinator: Address of the coordinator; None: not given.
        identity: Folder of the identity; None: none.
        insecure: Whether channels to other machines may be unencrypted.
        allow_imports: Whether code that a run spec names may be imported.
        log_level: Level of the log; None: the command's own default.
        log_format: `auto`, `json` or `people`.
        stop_with_stdin: Whether a service stops when standard input ends.
    """

    as_json: bool = False
    coordinator: str | None = None
    identity: Path | None = None
    insecure: bool = False
    allow_imports: bool = False
    log_level: str | None = None
    log_format: str = "auto"
    stop_with_stdin: bool = False

    @property
    def credentials(self) -> Credentials:
        """Credentials of the identity."""
        from sottovoce_rpc.credentials import Credentials

        return Credentials(self.identity, self.insecure)

    @property
    def coordinator_or_local(self) -> str:
        """Address of the coordinator, by default the one on this machine."""
        return self.coordinator or DEFAULT_COORDINATOR


_CURRENT: ContextVar[CommonOptions | None] = ContextVar("_CURRENT", default=None)


def get_common_options() -> CommonOptions:
    """Return the common options of the command that runs."""
    return _CURRENT.get() or CommonOptions()


class _Common:
    """A command or a group that accepts the common options among its own."""

    common_options: frozenset[str] = frozenset()

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)  # type: ignore[misc]
        if ctx.meta.get(_HELP):
            return list(own)
        taken = {flag for each in own if each.name not in COMMON_OPTIONS for flag in each.opts}
        common_ones = [each for each in _plain(ctx.find_root().command) if not taken & {*each.opts}]
        return [*(each for each in own if each.name not in COMMON_OPTIONS), *common_ones]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_HELP] = True
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        given = ctx.meta.setdefault(_GIVEN, {})
        for name in COMMON_OPTIONS:
            value, source = ctx.params.pop(name, None), ctx.get_parameter_source(name)
            if value is not None and source.name == "COMMANDLINE":
                given[name] = value
        if not ctx.resilient_parsing and not (
            hasattr(self, "commands") and (ctx._protected_args or not self.common_options)
        ):
            self._resolve(ctx, given)
        return rest

    def _resolve(self, ctx: Any, given: Mapping[str, Any]) -> None:
        """Set the common options that this command uses.

        Raises:
            SpecError: Another one was given on the command line.
        """
        values = dict[str, Any]()
        own = {flag for each in ctx.command.params for flag in each.opts}
        for option in ctx.find_root().command.params:
            if option.name not in COMMON_OPTIONS or option.name in ("profile", "config"):
                continue
            if option.name in given and option.name not in self.common_options:
                also = " before it, but has its own" if own & {*option.opts} else ": leave it out"
                raise SpecError(f"`{ctx.command_path}` takes no {option.opts[0]}{also}")
            if option.name in given:
                values[option.name] = given[option.name]
            elif option.name in self.common_options:
                option.handle_parse_result(ctx, {}, [])
                values[option.name] = ctx.params.pop(option.name)
        if identity := values.get("identity"):
            values["identity"] = Path(identity)
        _CURRENT.set(CommonOptions(**values))
        if values.get("as_json"):
            from sottovoce_client.terminal import reserve_stdout_for_json

            ctx.with_resource(reserve_stdout_for_json())


@lru_cache(maxsize=2)
def _plain(root: Any) -> list[Any]:
    """Return the common options without environment and defaults: what the command line itself gives."""
    found = []
    for option in root.params:
        if option.name in COMMON_OPTIONS:
            given = copy.copy(option)
            given.envvar, given.default = None, None
            found.append(given)
    return found


class _Command(_Common, TyperCommand):
    pass


class CommandGroup(_Common, TyperGroup):
    """Commands behind a common word."""


def format_options_help(*names: str) -> str | None:
    """Return the line of a command's help that lists the common options it uses."""
    listed = [f"--{name.removeprefix('as_').replace('_', '-')}" for name in names if name != "stop_with_stdin"]
    return f"Also takes {', '.join(listed)}: see sottovoce --help." if listed else None


def bind_common_options(group: type[CommandGroup], *names: str) -> type[CommandGroup]:
    """Return the class of a group that is a command, too, and uses these common options."""
    return type(group.__name__, (group,), {"common_options": frozenset(names)})


class CommandApp(typer.Typer):
    """Typer application whose commands declare the common options they use: by default `--json`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"cls": CommandGroup, **more})

    def command(
        self, name: str | None = None, *, common_options: tuple[str, ...] = ("as_json",), **more: Any
    ) -> Callable[[Any], Any]:
        command = type("Command", (_Command,), {"common_options": frozenset(common_options)})
        return super().command(name, cls=command, **{"epilog": format_options_help(*common_options), **more})


def read_profile(context: typer.Context, name: str | None) -> str | None:
    """Take defaults of common options from a profile; the callback of `--profile`.

    Raises:
        SpecError: The profile does not exist, or has other options.
    """
    name = _read_option(context, "profile", name)
    if name is not None and _is_command(context):
        if not name or {*name} & {"/", "\\", "."}:
            raise SpecError(
                f"--profile must be the NAME of NAME.yaml in {_config_folder()}, got {escape_control(name)!r}"
            )
        known = {*COMMON_OPTIONS} - {"profile", "config", "stop_with_stdin", "as_json"} | {"json"}
        found = _defaults(_config_folder() / f"{name}.yaml", "a profile", known)
        if "json" in found:
            found["as_json"] = found.pop("json")
        context.default_map = {**found, **(context.default_map or {})}
    return None


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take defaults of a service's options from a file; the callback of `--config`.

    Raises:
        SpecError: It has options of other commands.
    """
    path = _read_option(context, "config", path)
    common_options: frozenset[str] = getattr(context.command, "common_options", frozenset())
    if path is not None and _is_command(context):
        if "config" not in common_options:
            if context.meta.get(_GIVEN, {}).get("config") is None:  # from the environment, for services
                return None
            raise SpecError(f"`{context.command_path}` takes no --config: leave it out")
        known = {str(each.name) for each in context.command.params} | {*common_options} - {"config"}
        context.default_map = {**(context.default_map or {}), **_defaults(Path(path), "a configuration", known)}
    return None


def _read_option(context: typer.Context, name: str, value: Any) -> Any:
    """Return a value from the command line, before or after the command, else from the environment."""
    given = context.meta.setdefault(_GIVEN, {})
    if value is not None:
        given[name] = value
    return given.get(name) or os.environ.get(f"SOTTOVOCE_{name.upper()}") or None


def _is_command(context: typer.Context) -> bool:
    command = context.command
    return not context.resilient_parsing and (
        not hasattr(command, "commands") or bool(getattr(command, "common_options", ()))
    )


def _config_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sottovoce"


def _defaults(path: Path, what: str, known: set[str]) -> dict[str, Any]:
    from sottovoce_core.yaml_files import parse_document, read_text_file

    text = read_text_file(path, what)
    if not any(line and not line.startswith("#") for line in map(str.strip, text.splitlines())):
        return {}
    found = {str(name).replace("-", "_"): value for name, value in parse_document(text, str(path), what).items()}
    if unknown := sorted(found.keys() - known):
        raise SpecError(
            f"{path} must map options of this command to values; unknown: {unknown}; known: {sorted(known)}"
        )
    return found
