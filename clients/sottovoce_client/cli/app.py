"""The command-line application, and parts that all commands share: options, specs, and result folders."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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


_created_folders: list[Path] = []
"""Folders that this command has created, inner ones last."""
INTERRUPTED_MESSAGE = "sottovoce: interrupted\n"


@contextlib.contextmanager
def _handle_interrupt() -> Iterator[None]:
    """Turn an interrupt by Ctrl-C into one line of text and exit code 130."""
    try:
        yield
    except (SottovoceError, typer.Exit):
        raise
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        warnings.simplefilter("ignore")  # from interrupted work
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(INTERRUPTED_MESSAGE, end="", file=sys.stderr, flush=True)
        raise typer.Exit(130) from None


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused this error. C code may raise another one, such as pydantic's, which names it in its text."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return error is not None


_PREFIX = "SOTTOVOCE_"
_NAMES = (
    "ADVERTISE ADVERTISE_HOST ALLOW_IMPORTS AUTHORITY BUDGET CAPTURES CONFIG COORDINATOR COORDINATOR_STATE DATA "
    "EAVESDROPPER FEEDER FEED_PASSWORD FEED_USER HOST IDENTITY INSECURE JOIN_TIMEOUT KEEP_LOG LEARNER LISTEN "
    "LOG_FORMAT LOG_LEVEL METRICS METRICS_PROCESS NAME NOISE NOISE_SEED OWNER POLICY PROFILE REMOTE_WORKERS SOURCE "
    "STATE TRACE TRACE_EVERY WORKERS"
)
VARIABLES = frozenset(_PREFIX + name for name in _NAMES.split())
"""Environment variables that any command reads."""
_SERVICE_LINK = re.compile(
    r"\w+?(_SERVICE_HOST=.+|_SERVICE_PORT(_\w+)?=\d+|_PORT(_\d+_(TCP|UDP|SCTP))?=\w+://.+"
    r"|_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.+)"
)
"""Variables that Kubernetes sets in every pod for each service, which may be called sottovoce-coordinator."""
_MIN_NAME_SIMILARITY = 0.75
"""Minimum similarity of two names at which one is taken for a misspelling of the other."""


def reject_misspelled_variables(environment: Mapping[str, str]) -> list[str]:
    """Reject a variable whose name is similar to a setting: it would be ignored.

    Args:
        environment: Environment of the process.

    Returns:
        Names of other variables that are not settings; they are ignored.

    Raises:
        SpecError: A name is similar to a setting.
    """
    others = []
    for name, value in sorted(environment.items()):
        if not name.startswith(_PREFIX) or name in VARIABLES or _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        known = [each.removeprefix(_PREFIX) for each in sorted(VARIABLES)]
        if matches := difflib.get_close_matches(name.removeprefix(_PREFIX).upper(), known, 1, _MIN_NAME_SIMILARITY):
            raise SpecError(
                f"the environment variable {escape_control(name)} is not a setting, but similar to "
                f"{_PREFIX}{matches[0]}: rename or unset it"
            )
        others.append(name)
    return others


class _Sottovoce(CommandGroup):
    """Group of all commands; Ctrl-C ends them with one line, independently of the version of Typer."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _handle_interrupt():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        if not {"-h", "--help"} & {*ctx.args, *ctx._protected_args}:
            others = reject_misspelled_variables(os.environ)
            if not ctx.obj:  # a service logs them, perhaps as JSON
                for name in others:
                    text = (
                        f"sottovoce: the environment variable {escape_control(name)} is not a setting, and is ignored"
                    )
                    print(text, file=sys.stderr)
        try:
            with _handle_interrupt():
                return super().invoke(ctx)
        finally:  # a refused command leaves no empty folder
            while _created_folders:
                with contextlib.suppress(OSError):
                    _created_folders.pop().rmdir()


class _Application(CommandApp):
    """Application that builds the options of the called command alone: all options take a third of the start time."""

    def __call__(self, args: Sequence[str] | None = None, **more: Any) -> Any:
        application, first = copy.copy(self), [*strip_common_options(sys.argv[1:] if args is None else args), ""][0]
        application.registered_commands = [
            each for each in self.registered_commands if _get_command_name(each) == first
        ]
        application.registered_groups = [each for each in self.registered_groups if each.name == first]
        is_known = application.registered_commands or application.registered_groups
        return super(_Application, application if is_known else self).__call__(args, **more)


def _get_command_name(command: Any) -> str:
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
"""Package of all messages and methods of the wire protocol."""


def get_installed_version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import version

    return version("sottovoce")


def _print_version(requested: bool) -> None:
    if requested:
        from sottovoce_core.spec_versions import FORMAT
        from sottovoce_eavesdropper import CAPTURE_FORMAT as CAPTURES

        print(f"sottovoce {get_installed_version()}")
        print(f"wire {WIRE_PACKAGE}, run specs of format {FORMAT}, captures {CAPTURES}")
        raise typer.Exit


def make_address_option(
    *flags: str, listen: bool = False, check: Callable[[str, str], object] | None = None, **options: Any
) -> Any:
    """Build an option that is an address, or a list of them, like `typer.Option`.

    Args:
        flags, options: Arguments of `typer.Option`.
        listen: Whether the address is listened on.
        check: Raises `SpecError` for an invalid value, given the value and the option's name; None: checks a service address.
    """
    return typer.Option(*flags, callback=_make_address_check(listen, check), **options)


def _make_address_check(listen: bool = False, check: Callable[[str, str], object] | None = None) -> Any:
    """Return the callback of an option that is an address."""

    def check_value(parameter: typer.CallbackParam, value: Any) -> Any:
        from sottovoce_rpc.addresses import require_address

        option, errors = parameter.opts[0], list[str]()
        for each in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            try:
                if check is None:
                    require_address(each, option, allow_port_zero=listen)
                else:
                    check(each, option)
            except SpecError as error:
                errors.append(str(error))
        if errors:
            raise SpecError("\n".join(errors))
        # The effect of returning None for a list differs between versions of Typer.
        return [] if value is None and getattr(parameter, "multiple", False) else value

    return check_value


def make_number_option(*flags: str, min_value: float, max_value: float, **options: Any) -> Any:
    """Build an option that is a number in a range, like `typer.Option`, which accepts not-a-number in some versions."""

    def check_value(parameter: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise SpecError(f"{parameter.opts[0]} must be a number from {min_value:g} to {max_value:g}, got nan")
        return value

    return typer.Option(*flags, min=min_value, max=max_value, callback=check_value, **options)


CalibrationTarget = Annotated[
    float | None,
    typer.Option(
        help="Calibrate the noise of every run to this epsilon of one use of a record first.",
        show_default="the noise of the spec",
    ),
]
TunedFields = Annotated[
    list[str] | None,
    typer.Option(
        "--tune",
        metavar="FIELD=V,V,...",
        help="Give every run the best of these values, as tuned on the held-out records, which are public; repeat for several.",
        show_default="the values of the spec",
    ),
]
ResultDelta = Annotated[
    float,
    make_number_option(
        min_value=0.0,
        max_value=1.0,
        help="Delta of the target, and of the epsilons in the results.",
        show_default="that of the spec",
    ),
]
"""Options of commands that simulate several runs."""
MetricNames = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="NAMES",
        help="Compute these metrics alone, such as average_loss,error; commas between. Regrets and tracking errors take the "
        "longest.",
        show_default="losses, regrets, agreement, accuracy",
        autocompletion=completion.complete_metrics,
    ),
]
CheckpointList = Annotated[
    str,
    typer.Option(
        "--checkpoints",
        metavar="N|T,T,...",
        help="Measure after these numbers of rounds (one: 100,); or N times, evenly spread on a logarithmic scale.",
    ),
]
"""Options of commands that measure simulated runs."""


def parse_metrics(text: str) -> tuple[str, ...] | None:
    """Parse `--metrics`; None: no choice."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) or None


def parse_field_values(texts: Iterable[str], option: str) -> dict[str, list[Any]]:
    """Parse `algorithm.sigma=1,2,4` into a field and its values, which are read as YAML.

    Raises:
        SpecError: One has another form, or two name the same field.
    """
    from sottovoce_core.yaml_files import parse_document

    found: dict[str, list[Any]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        try:
            parsed = parse_document(f"values: [{values}]", f"{option} {text}", "a value").get("values")
        except SpecError as error:
            raise SpecError(f"{option} must be FIELD=V,V,... with values as in a spec file: {error}") from None
        if not (field and equals and parsed):
            raise SpecError(f"{option} must be FIELD=V,V,... with values as in a spec file, got {text!r}")
        if field in found:
            raise SpecError(f"{option} must name each field once, with all its values, got {field} twice")
        found[field] = parsed
    return found


def parse_checkpoints(text: str) -> int | tuple[int, ...]:
    """Parse `--checkpoints`: how many, or with a comma the numbers of rounds.

    Raises:
        SpecError: It has another form.
    """
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise SpecError(f"--checkpoints must be a number, or numbers of rounds with commas between, got {text!r}")
    return numbers if "," in text else numbers[0]


def _make_common_option(name: str, help_: str, *, variable: bool = True, **more: Any) -> Any:
    """Build an option of every command."""
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
        bool, _make_common_option("json", "Print the result as JSON; text goes to standard error.", variable=False)
    ] = False,
    coordinator: Annotated[
        str | None,
        _make_common_option(
            "coordinator",
            "Address of the coordinator.",
            callback=_make_address_check(),
            show_default=DEFAULT_COORDINATOR,
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        _make_common_option(
            "identity",
            "Folder with tls.crt, tls.key and ca.crt: own identity and trusted authorities. Channels are encrypted. For several "
            "learners in one process: the parent folder of a folder learner-NAME for each.",
            show_default="none: this machine only",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        _make_common_option(
            "insecure",
            "Without an identity, also use unencrypted channels to other machines, open to any attacker on the network.",
        ),
    ] = False,
    allow_imports: Annotated[
        bool,
        _make_common_option(
            "allow-imports",
            "Import code that a run spec names (module:Class). A user who starts a run can then run any code that is installed "
            "here or lies in the working folder.",
        ),
    ] = False,
    log_level: Annotated[
        str | None, _make_common_option("log-level", "debug, info, warning or error.", show_default="info")
    ] = None,
    log_format: Annotated[
        Literal["auto", "json", "people"],
        _make_common_option("log-format", "Format of logs; auto: people on a terminal, else json."),
    ] = "auto",
    profile: Annotated[
        str | None,
        _make_common_option(
            "profile",
            "Read values of these options from the file sottovoce/NAME.yaml in your configuration folder.",
            metavar="NAME",
            is_eager=True,
            callback=read_profile,
            show_default="none",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _make_common_option(
            "config",
            "For a service: YAML file with values of its options; the command line and the environment have priority.",
            is_eager=True,
            callback=read_config,
            show_default="none",
        ),
    ] = None,
    stop_with_stdin: Annotated[
        bool,
        _make_common_option(
            "stop-with-stdin", "For a service: stop when standard input ends.", variable=False, hidden=True
        ),
    ] = False,
) -> None:
    """Declare the options of every command."""


def _add_group(name: str, panel: str, **more: Any) -> CommandApp:
    group = CommandApp(**{"no_args_is_help": not more.get("invoke_without_command"), **more})
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


data_app = _add_group("data", "Runs", help="Named data sets: list, fetch and describe them.")
models_app = _add_group("models", "Runs", help="Export a learner's model, with the privacy cost of publishing it.")
runs_app = _add_group("runs", "Runs", help="Show, stop and resume the runs of a coordinator.")
transcript_app = _add_group("transcript", "Runs", help="Show, query and verify recorded or simulated messages.")
eavesdropper_app = _add_group(
    "eavesdropper",
    "Services",
    cls=bind_common_options(CommandGroup, *SERVICE_OPTIONS),
    epilog=format_options_help(*SERVICE_OPTIONS),
    invoke_without_command=True,
)
pki_app = _add_group("pki", "Services", help="Identities: a certificate authority of your own.")
spec_app = _add_group("spec", "Specs", help="Check and print run specs, and values of the Helm chart.")

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
    """Build the option of the results folder; its default is named after `name` and the time."""
    return typer.Option(
        "--out",
        help="Folder for the results; existing ones are not replaced.",
        show_default=f"sottovoce-runs/{name}-TIME",
    )


OutputFolder = Annotated[Path | None, make_results_option("NAME")]
MAX_COUNT, MAX_JOBS = 10**7, 4096
"""Maximum number of runs, repetitions, records and the like in an option; and of concurrent jobs."""
MAX_DURATION_S = 1e9
"""Maximum duration that timers accept: thirty years."""
SERVICE_FILES = ("captures", "learner-state", "logs", "identities", "ca.crt", "services.json", "learners.json")
"""Files that the services of a command write into its folder."""
ExportFormats = Annotated[
    str,
    typer.Option(
        metavar="FORMATS",
        help="Also export files for papers: tables as csv, latex; figures as svg, pdf, png; commas between.",
        show_default="none",
        autocompletion=completion.make_list_completer(("csv", "latex", "svg", "pdf", "png")),
    ),
]
ListenAddress = Annotated[
    str,
    make_address_option(
        listen=True, envvar="SOTTOVOCE_LISTEN", help="Address to listen on, host:port; port 0: any free one."
    ),
]
KeepLogFlag = Annotated[
    bool,
    typer.Option(
        "--keep-log",
        envvar="SOTTOVOCE_KEEP_LOG",
        help="Keep the logs of runs, with their records, in the folder kept of the state folder, for `sottovoce watch --state`.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    make_address_option(
        "--metrics",
        listen=True,
        metavar="HOST:PORT",
        envvar="SOTTOVOCE_METRICS",
        help="Serve Prometheus metrics at this address, at /metrics: with an identity over TLS, to monitors and operators; "
        "without one to this user of this machine. Needs an optional dependency.",
        show_default="none",
    ),
]


def _check_backend(backend: str, _: str) -> None:
    from sottovoce_client.backends import parse_backend

    parse_backend(backend)


BackendName = Annotated[
    str,
    make_address_option(
        "--backend",
        check=_check_backend,
        metavar="BACKEND",
        autocompletion=completion.make_list_completer(("processes", "ray", "dask")),
        help="Backend of simulated runs: processes; ray or dask (RAY_ADDRESS or DASK_SCHEDULER_ADDRESS, or a local cluster); or "
        "the address of a cluster, ray://HOST:PORT or dask://HOST:PORT.",
    ),
]
CanaryCount = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_COUNT,
        help="Number of canaries in the records, which watch --canary-file guesses. They replace records and cost accuracy.",
    ),
]


def parse_privacy_levels(text: str, min_levels: int = 1, option: str = "--epsilons") -> tuple[float, ...]:
    """Parse privacy levels, such as 1,2,5; return them in ascending order without duplicates.

    Raises:
        SpecError: A level is not a number above 0, or there are fewer than `min_levels`.
    """
    try:
        levels = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise SpecError(f"{option} must be numbers with commas between them, got {text!r}") from None
    if not all(0 < level < math.inf for level in levels):
        raise SpecError(f"{option} must be above 0 and finite, got {text!r}")
    if len(levels) < min_levels:
        raise SpecError(f"{option} must be at least {min_levels} different levels, got {len(levels)}: {text!r}")
    return tuple(levels)


def prepare_run(spec: RunSpec, *, live: bool = False, needs_labels: bool = True) -> Any:
    """Prepare a run and its data.

    Raises:
        SottovoceError: The spec cannot be run, or its data cannot be used.
    """
    from sottovoce_core.data.catalogue import get_data_folders
    from sottovoce_core.experiment import prepare

    return prepare(spec, folders=get_data_folders(), live=live, labels_required=needs_labels)


class WarningPrinter:
    """Printer of the warnings of `spec check` about a run's records, on standard error, each once."""

    def __init__(self) -> None:
        self._printed = set[str]()

    def __call__(self, prepared: Any) -> Any:
        """Print the warnings; return the same run."""
        from sottovoce_client.terminal import print_notice

        for finding in prepared.warnings:
            if (line := f"warning: {finding.text} [{finding.code}]") not in self._printed:
                self._printed.add(line)
                print_notice(escape_control(line))
        return prepared


def prepare_for_accounting(
    spec: RunSpec, rounds: int | None, records: float | None, horizon: float | None = None
) -> Any:
    """Prepare a run with its numbers of records per round; for live records, assumed ones, over the horizon.

    Raises:
        SottovoceError: As in `prepare_run`; or an option contradicts the data.
    """
    from sottovoce_core.experiment import estimate_live_run

    if spec.data.is_live or rounds is not None or records is not None:
        return estimate_live_run(spec, rounds, 1.0 if records is None else records, horizon)
    return prepare_run(spec, needs_labels=False)


def make_results_folder(name: str, out: Path | None, writes: Collection[str], spec: str | None = None) -> Path:
    """Return the folder for results, created if it is missing. Existing results are never replaced.

    Args:
        name: Prefix of the default folder, which the time follows.
        out: Folder that the user has named; None: the default folder.
        writes: Names of the files that will be written there.
        spec: Content of the `spec.yaml` that will be written there, which may exist already; None: no such file.

    Raises:
        SpecError: The folder cannot be written to, or has results of these names.
    """
    if out is None:
        return _create_unique_folder(Path("sottovoce-runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    missing = _list_missing_folders(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write to the folder {out}: {error.strerror}") from None
    _created_folders.extend(missing)
    if not os.access(out, os.W_OK):  # checked before there are results to lose
        raise SpecError(f"cannot write to the folder {out}")
    existing = [each for each in writes if os.path.lexists(out / each)]
    if spec is not None and _differs(out / "spec.yaml", spec):
        existing.insert(0, "a different spec.yaml")
    if existing:
        raise SpecError(
            f"{out} holds results that would be replaced: {', '.join(existing)}; choose another --out, or move them away"
        )
    return out


def _create_unique_folder(wanted: Path) -> Path:
    """Create a folder that no other process has, also if another one creates one in the same second.

    Raises:
        SpecError: It cannot be created.
    """
    folder, number = wanted, 1
    while True:
        missing = _list_missing_folders(folder)
        try:
            folder.mkdir(parents=True)
            _created_folders.extend(missing)
            return folder
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise SpecError(f"cannot write to the folder {folder}: {error.strerror}") from None


def _list_missing_folders(folder: Path) -> list[Path]:
    """List the folder and its parents that do not exist, outer ones first."""
    return [each for each in (*reversed(folder.parents), folder) if not each.exists()]


def _differs(path: Path, text: str) -> bool:
    """Return whether the file exists and has another content."""
    try:
        return path.read_text(encoding="utf-8") != text
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return True
