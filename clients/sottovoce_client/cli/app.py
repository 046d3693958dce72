"""The command's parts that all share: the application, options, and where a spec and its results lie."""

from __future__ import annotations

import contextlib
import copy
import datetime
import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.common_options import (
    DEFAULT_COORDINATOR,
    SERVICE_OPTIONS,
    CommandApp,
    CommandGroup,
    bind_common_options,
    format_options_help,
    read_config,
    read_profile,
)
from sottovoce_client.command_words import strip_common_options
from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.text import escape_control

if TYPE_CHECKING:
    from sottovoce_core.spec import RunSpec


_made: list[Path] = []
"""Folders that this command has made, the inner ones last."""
INTERRUPTED_MESSAGE = "sottovoce: interrupted\n"


@contextlib.contextmanager
def _ending_in_a_line() -> Iterator[None]:
    try:
        yield
    except (SottovoceError, typer.Exit):
        raise
    except BaseException as error:
        if not _of_ctrl_c(error):
            raise
        warnings.simplefilter("ignore")  # of what is cut short
        with contextlib.suppress(OSError):  # of a terminal that was closed
            print(INTERRUPTED_MESSAGE, end="", file=sys.stderr, flush=True)
        raise typer.Exit(130) from None


def _of_ctrl_c(error: BaseException | None) -> bool:
    """Is this what came of it? Where C code is imported, or runs, another exception may: pydantic's has its name in the text."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return error is not None


_PREFIX = "SOTTOVOCE_"
_NAMES = (
    "ADVERTISE ADVERTISE_HOST ALLOW_IMPORTS AUTHORITY BUDGET CAPTURES CONFIG COORDINATOR COORDINATOR_STATE DATA "
    "EAVESDROPPER FEEDER FEED_PASSWORD FEED_USER HOST IDENTITY INSECURE JOIN_TIMEOUT KEEP_LOG LEARNER LISTEN "
    "LOG_FORMAT LOG_LEVEL METRICS METRICS_PROCESS NAME NOISE NOISE_SEED OWNER POLICY PROFILE SOURCE STATE TRACE "
    "TRACE_EVERY"
)
VARIABLES = frozenset(_PREFIX + name for name in _NAMES.split())
"""Environment variables that are read, by any command."""
_SERVICE_LINK = re.compile(
    r"\w+?(_SERVICE_HOST=.+|_SERVICE_PORT(_\w+)?=\d+|_PORT(_\d+_(TCP|UDP|SCTP))?=\w+://.+"
    r"|_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.+)"
)
"""Variables that Kubernetes gives every pod for each service beside it, which may be called sottovoce-coordinator."""
_MIN_NAME_SIMILARITY = 0.75
"""How alike two names are of which one may be meant by the other."""


def reject_misspelled_variables(environment: Mapping[str, str]) -> list[str]:
    """Refuse a variable that is nearly one that is read: as a setting it would be ignored.

    Args:
        environment: of the process.

    Returns:
        Names of other variables that are no settings, and are ignored.

    Raises:
        SpecError: a name is nearly that of a setting.
    """
    others = []
    for name, value in sorted(environment.items()):
        if not name.startswith(_PREFIX) or name in VARIABLES or _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        known = [each.removeprefix(_PREFIX) for each in sorted(VARIABLES)]
        if near := difflib.get_close_matches(name.removeprefix(_PREFIX).upper(), known, 1, _MIN_NAME_SIMILARITY):
            raise SpecError(
                f"the environment variable {escape_control(name)} is no setting: {_PREFIX}{near[0]} is one; rename it, or unset it"
            )
        others.append(name)
    return others


class _Sottovoce(CommandGroup):
    """All commands; Ctrl-C ends them in a line, whatever version of Typer would say of it."""

    def make_context(self, *words: Any, **more: Any) -> Any:
        with _ending_in_a_line():
            return super().make_context(*words, **more)

    def invoke(self, ctx: Any) -> Any:
        if not {"-h", "--help"} & {*ctx.args, *ctx._protected_args}:
            others = reject_misspelled_variables(os.environ)
            if not ctx.obj:  # a service logs them, perhaps as JSON
                for name in others:
                    text = f"sottovoce: the environment variable {escape_control(name)} is no setting, and is ignored"
                    print(text, file=sys.stderr)
        try:
            with _ending_in_a_line():
                return super().invoke(ctx)
        finally:  # what was refused leaves no folder behind in which there is nothing
            while _made:
                with contextlib.suppress(OSError):
                    _made.pop().rmdir()


class _Application(CommandApp):
    """Builds the options of the called command alone: those of all commands take a third of the time of a start."""

    def __call__(self, args: Sequence[str] | None = None, **more: Any) -> Any:
        asked, first = copy.copy(self), [*strip_common_options(sys.argv[1:] if args is None else args), ""][0]
        asked.registered_commands = [each for each in self.registered_commands if _name(each) == first]
        asked.registered_groups = [each for each in self.registered_groups if each.name == first]
        known = asked.registered_commands or asked.registered_groups
        return super(_Application, asked if known else self).__call__(args, **more)


def _name(command: Any) -> str:
    return str(command.name or command.callback.__name__)


app = _Application(
    name="sottovoce",
    cls=_Sottovoce,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Differentially private online learning without a central server, and an audit of the recorded traffic.\n\n"
        "Start with [bold]sottovoce demo[/]: five learners, a coordinator and an eavesdropper on this machine."
    ),
)


WIRE_PACKAGE = "sottovoce_wire.v1"
"""The package of all messages and methods."""


def get_installed_version() -> str:
    """Of the package that is installed."""
    from importlib.metadata import version

    return version("sottovoce")


def _print_version(asked: bool) -> None:
    if asked:
        from sottovoce_core.spec_versions import FORMAT
        from sottovoce_eavesdropper import CAPTURE_FORMAT as CAPTURES

        print(f"sottovoce {get_installed_version()}")
        print(f"wire {WIRE_PACKAGE}, run specs of format {FORMAT}, captures {CAPTURES}")
        raise typer.Exit


def make_address_option(
    *flags: str, listen: bool = False, check: Callable[[str, str], object] | None = None, **options: Any
) -> Any:
    """An option that is an address, or a list of them; as `typer.Option`.

    Args:
        flags, options: as of `typer.Option`.
        listen: whether it is to be listened on.
        check: raises `SpecError` for what is none, given that and the option's name; None: it is of a service of ours.
    """
    return typer.Option(*flags, callback=_required_address(listen, check), **options)


def _required_address(listen: bool = False, check: Callable[[str, str], object] | None = None) -> Any:
    """Callback of an option that is an address."""

    def held(parameter: typer.CallbackParam, value: Any) -> Any:
        from sottovoce_rpc.addresses import require_address

        what, wrong = parameter.opts[0], list[str]()
        for each in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            try:
                if check is None:
                    require_address(each, what, allow_port_zero=listen)
                else:
                    check(each, what)
            except SpecError as error:
                wrong.append(str(error))
        if wrong:
            raise SpecError("\n".join(wrong))
        # What is done with None there differs between versions of typer.
        return [] if value is None and getattr(parameter, "multiple", False) else value

    return held


def make_number_option(*flags: str, min_value: float, max_value: float, **options: Any) -> Any:
    """An option that is a number from `least` to `most`; as `typer.Option`, some versions of which take not-a-number, too."""

    def held(parameter: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise SpecError(f"{parameter.opts[0]} must be a number from {min_value:g} to {max_value:g}, got nan")
        return value

    return typer.Option(*flags, min=min_value, max=max_value, callback=held, **options)


def _shared(name: str, help_: str, *, variable: bool = True, **more: Any) -> Any:
    """An option of every command."""
    more["envvar"] = f"{_PREFIX}{name.upper().replace('-', '_')}" if variable else None
    return typer.Option(
        f"--{name}", help=help_, rich_help_panel="Options of every command, before it or after it", **more
    )


@app.callback()
def _sottovoce(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the version, and the formats of wire, specs and captures.",
        ),
    ] = False,
    as_json: Annotated[
        bool, _shared("json", "Print the result as JSON, for programs; words go to standard error.", variable=False)
    ] = False,
    coordinator: Annotated[
        str | None,
        _shared(
            "coordinator",
            "Address of the coordinator.",
            callback=_required_address(),
            show_default=DEFAULT_COORDINATOR,
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        _shared(
            "identity",
            "Folder with tls.crt, tls.key and ca.crt: who this is, and whom it believes. Channels are encrypted. Of several "
            "learners in one process: the folder with a folder learner-NAME for each.",
            show_default="none: this machine only",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        _shared(
            "insecure",
            "Without an identity, use unencrypted channels to other machines, too: anybody in between may do anything.",
        ),
    ] = False,
    allow_imports: Annotated[
        bool,
        _shared(
            "allow-imports",
            "Import code that a run spec names (module:Class). A user who starts a run can then run any installed code.",
        ),
    ] = False,
    log_level: Annotated[
        str | None, _shared("log-level", "debug, info, warning or error.", show_default="info")
    ] = None,
    log_format: Annotated[
        Literal["auto", "json", "people"],
        _shared("log-format", "How logs are written; auto: for people on a terminal, as JSON elsewhere."),
    ] = "auto",
    profile: Annotated[
        str | None,
        _shared(
            "profile",
            "Take values for these options from the file sottovoce/NAME.yaml in your configuration folder.",
            metavar="NAME",
            is_eager=True,
            callback=read_profile,
            show_default="none",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _shared(
            "config",
            "Of a service: YAML file with values for its options; the command line and the environment win.",
            is_eager=True,
            callback=read_config,
            show_default="none",
        ),
    ] = None,
    stop_with_stdin: Annotated[
        bool,
        _shared("stop-with-stdin", "Of a service: stop when standard input ends.", variable=False, hidden=True),
    ] = False,
) -> None:
    """The options of every command."""


def _group(name: str, panel: str, **more: Any) -> CommandApp:
    made = CommandApp(**{"no_args_is_help": not more.get("invoke_without_command"), **more})
    app.add_typer(made, name=name, rich_help_panel=panel)
    return made


data_app = _group("data", "Runs", help="Data sets that have a name: list, fetch and describe them.")
models_app = _group("models", "Runs", help="A learner's model as a file, and what handing it out costs.")
runs_app = _group("runs", "Runs", help="Show the runs of a coordinator, stop them, take them up again.")
transcript_app = _group("transcript", "Runs", help="Look into recorded or simulated messages.")
eavesdropper_app = _group(
    "eavesdropper",
    "Services",
    cls=bind_common_options(CommandGroup, *SERVICE_OPTIONS),
    epilog=format_options_help(*SERVICE_OPTIONS),
    invoke_without_command=True,
)
pki_app = _group("pki", "Services", help="Identities: a certificate authority of your own.")
spec_app = _group("spec", "Specs", help="Check and print run specs, and values of the Helm chart.")

SpecFile = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC",
        help="The run spec, a YAML file.",
        show_default=False,
        autocompletion=completion.complete_spec_files,
    ),
]


def make_results_option(name: str) -> Any:
    """The option that says where results go; without it, to a folder of this name and the time."""
    return typer.Option(
        "--out", help="Folder for the results; none is replaced.", show_default=f"sottovoce-runs/{name}-TIME"
    )


OutputFolder = Annotated[Path | None, make_results_option("NAME")]
MAX_COUNT, MAX_JOBS = 10**7, 4096
"""Of runs, repetitions, records and the like that an option asks for; and of those at a time."""
MAX_DURATION_S = 1e9
"""Thirty years: what timers take."""
SERVICE_FILES = ("captures", "journals", "logs", "identities", "ca.crt", "services.json", "learners.json")
"""What services that a command has started write into its folder."""
ExportFormats = Annotated[
    str,
    typer.Option(
        metavar="FORMATS",
        help="Also as files for papers: tables as csv, latex; figures as svg, pdf, png; commas between.",
        show_default="none",
        autocompletion=completion.make_list_completer(("csv", "latex", "svg", "pdf", "png")),
    ),
]
ListenAddress = Annotated[
    str, make_address_option(listen=True, envvar="SOTTOVOCE_LISTEN", help="host:port to listen on; port 0 picks one.")
]
KeepLogFlag = Annotated[
    bool,
    typer.Option(
        "--keep-log",
        envvar="SOTTOVOCE_KEEP_LOG",
        help="Keep the logs of runs, with the records in them, in the state folder, below kept: for `sottovoce watch --state`.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    make_address_option(
        "--metrics",
        listen=True,
        metavar="HOST:PORT",
        envvar="SOTTOVOCE_METRICS",
        help="Serve metrics for Prometheus there, at /metrics: with an identity over TLS, to monitors and operators; without "
        "one to this user of this machine. An extra.",
        show_default="none",
    ),
]


def _backend(backend: str, _: str) -> None:
    from sottovoce_client.backends import parse_backend

    parse_backend(backend)


BackendName = Annotated[
    str,
    make_address_option(
        "--backend",
        check=_backend,
        metavar="WHAT",
        autocompletion=completion.make_list_completer(("processes", "ray", "dask")),
        help="What works on simulated runs: processes; ray or dask (RAY_ADDRESS or DASK_SCHEDULER_ADDRESS, or a cluster of this "
        "machine's own); or a cluster's address, ray://HOST:PORT or dask://HOST:PORT.",
    ),
]
CanaryCount = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_COUNT,
        help="Hide so many coins in the records, for watch --canary-file to guess. They replace records, so they cost accuracy.",
    ),
]


def parse_privacy_levels(text: str, least: int = 1, option: str = "--epsilons") -> tuple[float, ...]:
    """Privacy levels, such as 1,2,5: ascending, each once.

    Raises:
        SpecError: not numbers above 0, or fewer than `least`.
    """
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise SpecError(f"{option} must be numbers with commas between them, got {text!r}") from None
    if not all(0 < level < math.inf for level in found):
        raise SpecError(f"{option} must be above 0 and finite, got {text!r}")
    if len(found) < least:
        raise SpecError(f"{option} must be at least {least} different levels, got {len(found)}: {text!r}")
    return tuple(found)


def prepare_run(spec: RunSpec, *, live: bool = False, needs_labels: bool = True) -> Any:
    """The run and its data, ready to start.

    Raises:
        SottovoceError: the spec cannot be run as it is, or its data cannot be used.
    """
    from sottovoce_core.data.catalogue import get_data_folders
    from sottovoce_core.experiment import prepare

    return prepare(spec, folders=get_data_folders(), live=live, labels_required=needs_labels)


class WarningPrinter:
    """Says on standard error what `spec check` would warn of in the records of a run, each thing once."""

    def __init__(self) -> None:
        self._said = set[str]()

    def __call__(self, prepared: Any) -> Any:
        """The same run, once it is said."""
        from sottovoce_client.terminal import print_notice

        for finding in prepared.warnings:
            if (line := f"warning: {finding.text} [{finding.code}]") not in self._said:
                self._said.add(line)
                print_notice(escape_control(line))
        return prepared


def prepare_for_accounting(
    spec: RunSpec, rounds: int | None, records: float | None, horizon: float | None = None
) -> Any:
    """The run, and how many records its rounds bring: of live ones, as many as are asked for, over the horizon.

    Raises:
        SottovoceError: as `prepare_run`; or something was asked for that the data say.
    """
    from sottovoce_core.experiment import estimate_live_run

    if spec.data.is_live or rounds is not None or records is not None:
        return estimate_live_run(spec, rounds, 1.0 if records is None else records, horizon)
    return prepare_run(spec, needs_labels=False)


def make_results_folder(name: str, out: Path | None, writes: Collection[str], spec: str | None = None) -> Path:
    """The folder for results, made where it is missing. What earlier results wrote there is never replaced.

    Args:
        name: what a folder is called that nobody has named, with the time behind it.
        out: the folder that somebody has named; None: nobody.
        writes: names of what will be written there.
        spec: what will be written there as `spec.yaml`, which may stand there already; None: nothing.

    Raises:
        SpecError: it cannot be written to, or has results of these names.
    """
    if out is None:
        return _new_folder(Path("sottovoce-runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    missing = _missing(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write to the folder {out}: {error.strerror}") from None
    _made.extend(missing)
    if not os.access(out, os.W_OK):  # before there are results that would be lost
        raise SpecError(f"cannot write to the folder {out}")
    there = [each for each in writes if os.path.lexists(out / each)]
    if spec is not None and _says_else(out / "spec.yaml", spec):
        there.insert(0, "a spec.yaml that says something else")
    if there:
        raise SpecError(
            f"{out} holds results that would be replaced: {', '.join(there)}; choose another --out, or move them away"
        )
    return out


def _new_folder(wanted: Path) -> Path:
    """A folder that nobody else has, whoever else makes one in the same second.

    Raises:
        SpecError: it cannot be made.
    """
    folder, number = wanted, 1
    while True:
        missing = _missing(folder)
        try:
            folder.mkdir(parents=True)
            _made.extend(missing)
            return folder
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise SpecError(f"cannot write to the folder {folder}: {error.strerror}") from None


def _missing(folder: Path) -> list[Path]:
    """It, and those that it would lie in, which are not there; the outer ones first."""
    return [each for each in (*reversed(folder.parents), folder) if not each.exists()]


def _says_else(path: Path, text: str) -> bool:
    """Is something there, and not this text?"""
    try:
        return path.read_text(encoding="utf-8") != text
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return True
