"""The command `sottovoce`."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
from collections.abc import Callable, Coroutine
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from sottovoce.errors import SottovoceError, SpecError
from sottovoce.spec import RunSpec, dump_spec, load_spec, parse_spec, spec_schema

app = typer.Typer(
    name="sottovoce",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Differentially private decentralized online learning, and an eavesdropper that checks it.\n\n"
        "Start with [bold]sottovoce demo[/]: five learners, a coordinator and an eavesdropper on this machine."
    ),
)
spec_app = typer.Typer(no_args_is_help=True, help="Check and print run specs.")
app.add_typer(spec_app, name="spec", rich_help_panel="Specs")
eavesdropper_app = typer.Typer(invoke_without_command=True)
transcript_app = typer.Typer(no_args_is_help=True, help="Look into what was overheard, or simulated.")
app.add_typer(transcript_app, name="transcript", rich_help_panel="Runs")
app.add_typer(eavesdropper_app, name="eavesdropper", rich_help_panel="Services")

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The run spec, a YAML file.", show_default=False)]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/NAME-TIME")
]
Listen = Annotated[str, typer.Option(envvar="SOTTOVOCE_LISTEN", help="host:port to listen on; port 0 picks one.")]
AllowImports = Annotated[
    bool,
    typer.Option(
        "--allow-imports",
        envvar="SOTTOVOCE_ALLOW_IMPORTS",
        help="Import code that a run spec names (module:Class). Whoever starts a run can then run any installed code.",
    ),
]
LogLevel = Annotated[str, typer.Option(envvar="SOTTOVOCE_LOG_LEVEL", help="debug, info, warning or error.")]
StopWithStdin = Annotated[bool, typer.Option(help="Stop when standard input ends.", hidden=True)]


def _config(context: typer.Context, path: Path | None) -> Path | None:
    """Defaults from a file: weaker than flags and environment."""
    if path is not None:
        try:
            defaults = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise SpecError(f"cannot read the configuration {path}: {' '.join(str(error).split())}") from None
        known = {parameter.name for parameter in context.command.params}
        if not isinstance(defaults, dict) or not defaults.keys() <= known:
            unknown = sorted(defaults.keys() - known) if isinstance(defaults, dict) else type(defaults).__name__
            raise SpecError(
                f"{path} must map options of this command to values; unknown: {unknown}; known: {sorted(known)}"
            )
        context.default_map = {**(context.default_map or {}), **defaults}
    return path


Canaries = Annotated[
    int,
    typer.Option(
        min=0,
        help="Hide so many coins in the records, for watch --canaries to guess. They replace records, so they cost accuracy.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="SOTTOVOCE_CONFIG",
        is_eager=True,
        callback=_config,
        help="YAML file with values for these options; flags and environment win.",
    ),
]


# ---- runs ------------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Runs")
def demo(
    data: Annotated[
        str | None,
        typer.Option(help="breast_cancer, digits, mushrooms, adult, letter …, or a .npz, .csv or .parquet file."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to run.", show_default="500")] = None,
    out: Out = None,
    print_spec: Annotated[bool, typer.Option("--print-spec", help="Print the demo's run spec and exit.")] = False,
) -> None:
    """The main job on this machine: five learners, a coordinator and an eavesdropper, each its own process.

    Learners run LDP-DOL on a ring; every edge passes through the eavesdropper. Ends with a summary and an HTML report.
    """
    text = resources.files("sottovoce_client.running").joinpath("demo.yaml").read_text(encoding="utf-8")
    if print_spec:
        typer.echo(text, nl=False)
        return
    document = yaml.safe_load(text)
    if data is not None:
        document["data"]["source"] = data
    if rounds is not None:
        document["rounds"] = rounds
    _up(parse_spec(document, source="demo"), out, per_process=1)


@app.command(rich_help_panel="Runs")
def up(
    spec: SpecFile,
    out: Out = None,
    per_process: Annotated[int, typer.Option(min=1, help="Learners in one process.")] = 1,
    recorded_noise: Annotated[
        Path | None, typer.Option(help="Use this noise instead of drawing it. Protects nobody: for tests.")
    ] = None,
    canaries: Canaries = 0,
) -> None:
    """Start all services of a spec on this machine, run it, stop them."""
    _up(load_spec(spec), out, per_process=per_process, noise=recorded_noise, canaries=canaries)


@app.command(rich_help_panel="Runs")
def run(
    spec: SpecFile,
    coordinator: Annotated[
        str, typer.Option(envvar="SOTTOVOCE_COORDINATOR", help="Address of the coordinator.")
    ] = "127.0.0.1:7400",
    out: Out = None,
    canaries: Canaries = 0,
) -> None:
    """Run a spec on services that are already up, feeding the learners from here."""
    from sottovoce_client.running.operate import run_on

    _conduct(
        load_spec(spec),
        out,
        lambda prepared, watch, stop: run_on(coordinator, prepared.run.spec, prepared.data, watch, stop),
        canaries,
    )


@app.command(rich_help_panel="Runs")
def simulate(
    spec: SpecFile,
    out: Out = None,
    replicas: Annotated[int, typer.Option(min=1, help="Independent repetitions, side by side.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    noise: Annotated[
        Path | None, typer.Option(help="Recorded noise to use instead (.parquet or .npz; zeros are allowed).")
    ] = None,
    record_noise: Annotated[bool, typer.Option("--record-noise", help="Write the noise that was drawn.")] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Measure losses, regrets and accuracy: metrics.parquet, metrics.json.")
    ] = False,
) -> None:
    """Run a spec without a network, many replicas at once. Writes transcript.parquet and decisions.parquet."""
    from sottovoce_client.running.simulation import simulate_to

    prepared = _prepare(load_spec(spec))
    folder = _folder(prepared.run.spec.name, out)
    simulate_to(folder, prepared, replicas=replicas, seed=seed, noise=noise, record_noise=record_noise, metrics=metrics)


@app.command(rich_help_panel="Runs")
def compare(
    specs: Annotated[
        list[Path] | None, typer.Argument(metavar="SPEC...", help="Run specs with the same data.", show_default=False)
    ] = None,
    field: Annotated[bool, typer.Option("--field", help="Every built-in algorithm on one problem.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/compare-TIME")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Independent repetitions of each, side by side.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
) -> None:
    """Run several specs in the simulator and show what they came to in one table.

    Writes compare.json, compare.md and compare.html. Exits with 1 if a spec could not be run.
    """
    from sottovoce_client.running.compare import compare as run_all
    from sottovoce_client.running.compare import from_files, the_field

    sources = [*(the_field() if field else []), *from_files(specs or [])]
    if not sources:
        raise SpecError("compare needs specs, or --field for every built-in algorithm")
    raise typer.Exit(run_all(sources, _prepare, _folder("compare", out), replicas=replicas, seed=seed))


def _up(spec: RunSpec, out: Path | None, *, per_process: int, noise: Path | None = None, canaries: int = 0) -> None:
    from sottovoce_client.running.launch import run_up

    folder = _folder(spec.name, out)
    _conduct(
        spec,
        folder,
        lambda prepared, watch, stop: run_up(
            prepared.run.spec, prepared.data, folder, watch, stop, per_process=per_process, noise=noise
        ),
        canaries,
    )


def _conduct(
    spec: RunSpec, out: Path | None, start: Callable[..., Coroutine[Any, Any, Any]], canaries: int = 0
) -> None:
    """Prepare, run while the console shows it, then summarise."""
    from sottovoce_client.running.conduct import conduct

    folder, prepared = _folder(spec.name, out), _prepare(spec)
    if canaries:
        from sottovoce_client.watching.canaries import with_canaries

        prepared = with_canaries(prepared, canaries, folder)
    raise typer.Exit(conduct(prepared, folder, start))


def _prepare(spec: RunSpec) -> Any:
    from sottovoce_client.prepare import prepare

    return prepare(spec, data_folder=os.environ.get("SOTTOVOCE_DATA"))


def _folder(name: str, out: Path | None) -> Path:
    if out is None:
        out = Path("sottovoce-runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write to the folder {out}: {error.strerror}") from None
    return out


# ---- transcripts -----------------------------------------------------------------------------------------

Overheard = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="A capture, a folder with captures or runs, or a .parquet file; also a URL.",
        show_default=False,
    ),
]


@transcript_app.command("show")
def transcript_show(
    folder: Overheard,
    sender: Annotated[int, typer.Option(min=0, help="Whose first messages to show, by index.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="How many of them.")] = 3,
) -> None:
    """Who spoke when, how much, what is missing, what was said first, and what was noticed that must never happen."""
    from sottovoce_client.transcripts.show import show

    show(folder, sender=sender, first=first)


@transcript_app.command("query")
def transcript_query(
    folder: Overheard,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT statement.", show_default=False)],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.parquet", help="Write all rows to this file.")
    ] = None,
) -> None:
    """Ask in SQL. Tables: messages (the raw records) and said (run, world, replica, round, sender, field, value).

    A query sees these tables and nothing else: no file, no network.
    """
    from sottovoce_client.transcripts.query import query

    query(folder, sql, out=out, as_csv=sys.stdout if as_csv else None)


# ---- services --------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Services")
def coordinator(
    listen: Listen = "127.0.0.1:7400",
    eavesdropper: Annotated[
        str | None,
        typer.Option(envvar="SOTTOVOCE_EAVESDROPPER", help="Address of the eavesdropper, for runs that are captured."),
    ] = None,
    allow_imports: AllowImports = False,
    log_level: LogLevel = "info",
    stop_with_stdin: StopWithStdin = False,
    config: ConfigFile = None,
) -> None:
    """Start a [bold]coordinator[/] in the foreground: it distributes the topology and the round clock."""
    from sottovoce_coordinator.service import CoordinatorConfig, serve

    _serve(lambda: serve(CoordinatorConfig(listen, eavesdropper, allow_imports), with_stdin=stop_with_stdin), log_level)


@app.command(rich_help_panel="Services")
def learner(
    name: Annotated[
        list[str], typer.Option(envvar="SOTTOVOCE_NAME", help="Its name; repeat for several learners in one process.")
    ],
    coordinator: Annotated[str, typer.Option(envvar="SOTTOVOCE_COORDINATOR", help="Address of the coordinator.")],
    listen: Listen = "127.0.0.1:0",
    advertise: Annotated[
        str | None, typer.Option(envvar="SOTTOVOCE_ADVERTISE", help="Address for others, where it differs.")
    ] = None,
    state: Annotated[
        Path, typer.Option(envvar="SOTTOVOCE_STATE", help="Folder for the journal. It must survive restarts.")
    ] = Path("sottovoce-state"),
    budget: Annotated[
        float | None,
        typer.Option(
            envvar="SOTTOVOCE_BUDGET", help="Epsilon that it may spend in all runs together, by the ledger in --state."
        ),
    ] = None,
    join_timeout: Annotated[
        float, typer.Option(envvar="SOTTOVOCE_JOIN_TIMEOUT", help="Seconds to wait for the coordinator at the start.")
    ] = 30.0,
    recorded_noise: Annotated[
        Path | None,
        typer.Option(help="Use this noise instead of drawing it. Protects nobody: loopback only, for tests."),
    ] = None,
    noise: Annotated[
        Literal["bitwise", "opendp"],
        typer.Option(envvar="SOTTOVOCE_NOISE", help="What draws the noise. OpenDP is slower, and an extra."),
    ] = "bitwise",
    noise_seed: Annotated[
        str | None,
        typer.Option(
            envvar="SOTTOVOCE_NOISE_SEED",
            help="Draw the same noise in every run of that name. Protects nobody: loopback only, for tests.",
        ),
    ] = None,
    allow_imports: AllowImports = False,
    log_level: LogLevel = "info",
    stop_with_stdin: StopWithStdin = False,
    config: ConfigFile = None,
) -> None:
    """Start a [bold]learner[/] in the foreground: it learns from its owner's stream and talks to its neighbours."""
    from sottovoce_learner.service import LearnerConfig, serve

    if len(name) > 1 and not listen.endswith(":0"):
        raise SpecError(f"several learners in one process need --listen HOST:0, got {listen}")
    configs = [
        LearnerConfig(
            each,
            coordinator,
            listen,
            advertise,
            state,
            join_timeout,
            recorded_noise,
            allow_imports,
            budget,
            noise,
            noise_seed,
        )
        for each in name
    ]
    _serve(lambda: serve(configs, with_stdin=stop_with_stdin), log_level)


@app.command(rich_help_panel="Privacy")
def ledger(
    state: Annotated[
        Path, typer.Option(envvar="SOTTOVOCE_STATE", help="Folder where the learner keeps its journals.")
    ] = Path("sottovoce-state"),
    learner: Annotated[str | None, typer.Option(help="Only this one.")] = None,
) -> None:
    """What learners have spent in all their runs, on what, and by which guarantee. Reads the state folder; no service needed."""
    from sottovoce_client.privacy.ledger import show_ledger

    show_ledger(state, learner)


@eavesdropper_app.callback()
def eavesdropper(
    context: typer.Context,
    listen: Listen = "127.0.0.1:7500",
    folder: Annotated[
        str,
        typer.Option(envvar="SOTTOVOCE_CAPTURES", help="Folder for captures, or a URL such as s3://bucket/captures."),
    ] = "sottovoce-captures",
    advertise_host: Annotated[
        str | None,
        typer.Option(envvar="SOTTOVOCE_ADVERTISE_HOST", help="Name of this host for learners, where it differs."),
    ] = None,
    allow_imports: AllowImports = False,
    log_level: LogLevel = "info",
    stop_with_stdin: StopWithStdin = False,
    config: ConfigFile = None,
) -> None:
    """Start an [bold]eavesdropper[/] in the foreground: it relays the channels between learners and records every byte.

    Its commands are for gRPC services that are not ours.
    """
    if context.invoked_subcommand is not None:
        return
    from sottovoce_eavesdropper.service import EavesdropperConfig, serve

    deployed = EavesdropperConfig(listen, folder, advertise_host, allow_imports)
    _serve(lambda: serve(deployed, with_stdin=stop_with_stdin), log_level)


@eavesdropper_app.command("relay")
def eavesdropper_relay(
    to: Annotated[str, typer.Option(help="host:port of the server.", show_default=False)],
    listen: Listen = "127.0.0.1:7600",
    folder: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_CAPTURES",
            help="Folder, or URL, below which the capture gets its own; relays may share it.",
        ),
    ] = "sottovoce-captures",
    world: Annotated[
        int | None, typer.Option(min=0, max=1, help="What the server holds: 0 or 1. For an audit.", show_default=False)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file: clients speak TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None,
    to_tls: Annotated[bool, typer.Option("--to-tls", help="The server speaks TLS.")] = False,
    to_ca: Annotated[
        Path | None, typer.Option(help="PEM file: who vouches for the server.", show_default="the system's authorities")
    ] = None,
    log_level: LogLevel = "info",
    stop_with_stdin: StopWithStdin = False,
    config: ConfigFile = None,
) -> None:
    """Record what passes between any gRPC server and its clients, until Ctrl-C. Point the clients at --listen."""
    from sottovoce_eavesdropper.foreign import ForeignConfig, serve

    relayed = ForeignConfig(to, listen, folder, world, tls_cert, tls_key, to_tls, to_ca)
    _serve(lambda: serve(relayed, with_stdin=stop_with_stdin), log_level)


@eavesdropper_app.command("audit")
def eavesdropper_audit(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="With captures of both worlds.", show_default=False)],
    decoder: Annotated[
        str | None, typer.Option(help="module:function that reads a message.", show_default="only bytes")
    ] = None,
    run_is: Annotated[Literal["connection", "stream"], typer.Option(help="What one run is.")] = "connection",
    claim: Annotated[
        float | None,
        typer.Option(min=0.0, help="Epsilon that the service's owner claims for a run.", show_default="none"),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999999, help="With which a claim that holds is not refuted.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the classifiers.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/audit-TIME")
    ] = None,
) -> None:
    """Tell from captures alone what a service leaks about the world it is in, and hold it against a claim.

    Writes audit.json. Exits with 1 if the claim is refuted.
    """
    from sottovoce_client.foreign.audit import audit_foreign

    code = audit_foreign(
        folder,
        decoder=decoder,
        run_is=run_is,
        claim=claim,
        confidence=confidence,
        seed=seed,
        out=_folder("audit", out),
    )
    raise typer.Exit(code)


def _serve(work: Callable[[], Coroutine[Any, Any, None]], log_level: str) -> None:
    from sottovoce_rpc.logs import configure_logs

    configure_logs(log_level)
    with asyncio.Runner(loop_factory=_event_loop()) as runner:
        runner.run(work())


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """The loop of uvloop where that is installed (extra `fast`), else Python's own."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


# ---- privacy ---------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Privacy")
def budget(
    spec: SpecFile,
    delta: Annotated[float | None, typer.Option(help="Also epsilon at this delta (needs dp-accounting).")] = None,
    learner: Annotated[
        list[str] | None, typer.Option(help="Show this learner; repeat for several.", show_default="all")
    ] = None,
    group: Annotated[int | None, typer.Option(min=1, help="Also for so many records of one learner.")] = None,
    uses: Annotated[bool, typer.Option("--uses", help="Also per record, in all of its uses.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/budget-TIME")
    ] = None,
) -> None:
    """Say what a run promises: epsilon of every learner, and what it rests on. Nothing is run.

    Writes budget.json and budget.html.
    """
    from sottovoce_client.privacy.budget import Question
    from sottovoce_client.privacy.budget import budget as show

    prepared = _prepare(load_spec(spec))
    show(prepared, _folder("budget", out), learner or [], Question(delta, group, uses))


@app.command(rich_help_panel="Privacy")
def calibrate(
    spec: SpecFile,
    epsilon: Annotated[float | None, typer.Option(help="What every learner may spend.")] = None,
    learner: Annotated[list[str] | None, typer.Option(metavar="NAME=E", help="What this one may; repeatable.")] = None,
    horizon: Annotated[
        str | None, typer.Option(metavar="ROUNDS|inf", help="Over so many rounds.", show_default="all of the run")
    ] = None,
    per: Annotated[
        Literal["event", "record"], typer.Option(help="For an event, or a record in all of its uses.")
    ] = "event",
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write the spec to.", show_default="standard output")
    ] = None,
) -> None:
    """Write a spec with the noise that a privacy budget asks for."""
    from sottovoce_client.privacy.calibrate import budget_of, calibrate_to

    prepared = _prepare(load_spec(spec))
    calibrate_to(spec, prepared, budget_of(prepared.run.spec, epsilon, learner or [], horizon, per), out)


@app.command(rich_help_panel="Privacy")
def tradeoff(
    spec: SpecFile,
    epsilons: Annotated[str, typer.Option(metavar="E,E,E,...", help="Levels to simulate at, at least three.")],
    metric: Annotated[
        str, typer.Option(help="What accuracy lost means: error, or a metric of simulate.")
    ] = "average_loss",
    weights: Annotated[tuple[float, float, float, float], typer.Option(help="w1 to w4 of the worth of privacy.")] = (
        0.02,
        6.0,
        9.0,
        1.0,
    ),
    threshold: Annotated[
        float | None, typer.Option(help="Largest acceptable loss.", show_default="that at the smallest level")
    ] = None,
    ceiling: Annotated[
        float | None, typer.Option(help="Largest acceptable epsilon.", show_default="the largest level")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Independent repetitions at every level.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/tradeoff-TIME")
    ] = None,
) -> None:
    """Find the privacy level at which accuracy lost and privacy gained balance best, by simulated runs.

    Writes tradeoff.json and tradeoff.html.
    """
    from sottovoce.privacy.tradeoff import Utility
    from sottovoce_client.privacy.tradeoff import Problem, levels
    from sottovoce_client.privacy.tradeoff import tradeoff as trade

    problem = Problem(levels(epsilons), metric, Utility(*weights), threshold, ceiling, replicas, seed)
    trade(_prepare(load_spec(spec)), _folder("tradeoff", out), problem)


@app.command(rich_help_panel="Privacy")
def audit(
    spec: SpecFile,
    runs: Annotated[int, typer.Option(min=10, help="Runs of each of the two worlds.")] = 1000,
    learner: Annotated[
        str | None, typer.Option(help="Whose messages.", show_default="the one with the largest epsilon")
    ] = None,
    record: Annotated[
        int | None,
        typer.Option(min=0, help="Row of the learner's record to swap.", show_default="the swap that shows most"),
    ] = None,
    replacement: Annotated[
        str, typer.Option(metavar="WHAT", help="For it: mirror, label, LEARNER:ROW, or a .json file.")
    ] = "mirror",
    threat: Annotated[Literal["wire", "neighbour", "output"], typer.Option(help="Who listens.")] = "wire",
    neighbour: Annotated[
        str | None, typer.Option(help="At which neighbour.", show_default="the first that hears it")
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999999, help="With which a correct learner is not refuted.")
    ] = 0.95,
    backend: Annotated[
        Literal["processes", "ray", "dask"], typer.Option(help="Where simulated runs are worked on.")
    ] = "processes",
    jobs: Annotated[int | None, typer.Option(min=1, help="How many at a time.", show_default="one per core")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the coins and the noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/audit-TIME")
    ] = None,
) -> None:
    """Try to refute what a run promises about one learner: many runs in two worlds that differ in one record.

    Writes audit.json and audit.html. Exits with 1 if the promise is refuted.
    """
    from functools import partial

    from sottovoce.audit.audit import audit_simulated
    from sottovoce.privacy.guarantee import ThreatModel
    from sottovoce_client.auditing.audit import Question, audit_to
    from sottovoce_client.auditing.spread import spread_over

    asked = Question(learner, record, replacement, ThreatModel(threat), neighbour, runs, confidence, seed)
    prepared = _prepare(load_spec(spec))
    with spread_over(backend, jobs) as spread:
        code = audit_to(_folder("audit", out), prepared, asked, partial(audit_simulated, spread=spread))
    raise typer.Exit(code)


@app.command(rich_help_panel="Privacy")
def gallery(
    capture: Annotated[
        Path | None,
        typer.Option("--from", metavar="CAPTURE", help="Attack this capture, a folder, in place of simulated runs."),
    ] = None,
    epsilons: Annotated[
        str, typer.Option(metavar="E,E,...", help="Noise of the pictures: epsilon of a record over the whole run.")
    ] = "100000,10000,1000,100,1",
    runs: Annotated[int, typer.Option(min=10, help="Simulated runs in which membership is guessed.")] = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of noise, coins and searches.")] = 0,
    allow_imports: AllowImports = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/gallery-TIME")
    ] = None,
) -> None:
    """Show what an eavesdropper can rebuild of the records, in pictures, with and without noise.

    Writes gallery.json and gallery.html. Searching in a network's gradients needs the extra torch.
    """
    from sottovoce_client.gallery.gallery import gallery as show
    from sottovoce_client.gallery.gallery import gallery_of, levels

    folder = _folder("gallery", out)
    if capture is None:
        show(folder, levels(epsilons), runs, seed)
    else:
        gallery_of(capture, folder, seed, os.environ.get("SOTTOVOCE_DATA"), allow_imports=allow_imports)


@app.command(rich_help_panel="Privacy")
def watch(
    capture: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="A capture's folder, or the run's that it is in.", show_default=False),
    ] = None,
    eavesdropper: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Fetch the capture of --run from this eavesdropper.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN_ID", help="Which run; with --eavesdropper.")] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="Watch this learner; repeat for several. You need its records.", show_default="all"),
    ] = None,
    alpha: Annotated[float, typer.Option(help="The chance of a false alarm.")] = 0.001,
    canaries: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's canaries.json: guess its coins, too.")
    ] = None,
    commitment: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Of FILE.", show_default="commitment.json beside it")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Watch on after an alarm.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Do not wait for more than is there.")] = False,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve e-values and alarms to Prometheus.")
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Watch a run while it goes on: is every learner's noise what is claimed? May be looked at in every round.

    Exits with 1 at the first alarm, which is a log line, too. You need the records: the spec's data.source must be here.
    """
    from sottovoce_client.watching.watch import Question, where
    from sottovoce_client.watching.watch import watch as follow
    from sottovoce_rpc.logs import configure_logs

    configure_logs(log_level)
    question = Question(alpha, tuple(learner or ()), canaries, commitment, keep_going, once)
    raise typer.Exit(follow(where(capture, eavesdropper, run), question, _prepare, metrics=metrics))


# ---- specs -----------------------------------------------------------------------------------------------


@spec_app.command("check")
def spec_check(spec: SpecFile) -> None:
    """Check a spec, its algorithm's conditions and its data, without running anything."""
    prepared = _prepare(load_spec(spec))
    for finding in prepared.run.warnings:
        typer.echo(f"warning: {finding.text} [{finding.code}]")
    typer.echo(f"{spec}: {prepared.run.spec.n_learners} learners, {prepared.data.n_features} features: fine")


@spec_app.command("show")
def spec_show(spec: SpecFile) -> None:
    """Print a spec with all defaults filled in."""
    typer.echo(dump_spec(load_spec(spec)), nl=False)


@spec_app.command("schema")
def spec_schema_() -> None:
    """Print the JSON schema of a run spec, for editors."""
    typer.echo(spec_schema())


@app.command(rich_help_panel="Specs")
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("sottovoce"))


def main() -> None:
    """Run the command; what goes wrong is said in a line and exits with code 2."""
    try:
        app()
    except SottovoceError as error:
        print(f"sottovoce: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
