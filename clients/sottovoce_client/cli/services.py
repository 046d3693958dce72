"""Services in the foreground."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sottovoce_client.cli.app import (
    MAX_COUNT,
    MAX_DURATION_S,
    KeepLogFlag,
    ListenAddress,
    MetricsAddress,
    app,
    eavesdropper_app,
    make_address_option,
    make_number_option,
    make_results_folder,
    make_results_option,
    reject_misspelled_variables,
)
from sottovoce_client.cli.common_options import SERVICE_OPTIONS, get_common_options
from sottovoce_core.errors import SottovoceError, SpecError


@app.command(rich_help_panel="Services", common_options=SERVICE_OPTIONS)
def coordinator(
    listen: ListenAddress = "127.0.0.1:7400",
    eavesdropper: Annotated[
        str | None,
        make_address_option(
            envvar="SOTTOVOCE_EAVESDROPPER", help="Address of the eavesdropper, for runs that are captured."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            envvar="SOTTOVOCE_COORDINATOR_STATE",
            help="Folder for runs and learners: a run goes on when the coordinator is started on it again.",
            show_default="none: a run ends with its coordinator",
        ),
    ] = None,
    metrics: MetricsAddress = None,
) -> None:
    """Start a [bold]coordinator[/] in the foreground: it distributes the topology and the round clock."""
    from sottovoce_coordinator.service import CoordinatorConfig, serve
    from sottovoce_rpc.metrics import MetricsEndpoint

    deployed = CoordinatorConfig(
        listen, eavesdropper, get_common_options().allow_imports, state, get_common_options().credentials
    )
    at = None if metrics is None else MetricsEndpoint(metrics, deployed.credentials)
    _serve(lambda: serve(deployed, stop_with_stdin=get_common_options().stop_with_stdin, metrics=at))


@app.command(rich_help_panel="Services", common_options=("coordinator", *SERVICE_OPTIONS))
def learner(
    name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SOTTOVOCE_NAME",
            help="Its name; repeat for several learners in one process, of which all else is the same.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SOTTOVOCE_HOST",
            help="In place of --name: YAML file with learners of one process, each with settings of its own, by the names of "
            "these options. What it leaves open, the options say.",
            show_default="none",
        ),
    ] = None,
    listen: ListenAddress = "127.0.0.1:0",
    advertise: Annotated[
        str | None, make_address_option(envvar="SOTTOVOCE_ADVERTISE", help="Address for others, where it differs.")
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
        float,
        make_number_option(
            min_value=0.0,
            max_value=MAX_DURATION_S,
            envvar="SOTTOVOCE_JOIN_TIMEOUT",
            help="Seconds to wait for the coordinator at the start.",
        ),
    ] = 30.0,
    policy: Annotated[
        Path | None,
        typer.Option(
            envvar="SOTTOVOCE_POLICY",
            help="YAML file that says in which runs it takes part, and what they may cost (`sottovoce policy`).",
            show_default="that of `sottovoce policy`",
        ),
    ] = None,
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
    owner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE/NAME",
            envvar="SOTTOVOCE_OWNER",
            help="Who may see its ledger, ask it for predictions, and bring records; repeat for several.",
            show_default="learner/NAME",
        ),
    ] = None,
    feeder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE/NAME",
            envvar="SOTTOVOCE_FEEDER",
            help="Who may bring records, besides its owners; repeat for several.",
            show_default="feeder/NAME",
        ),
    ] = None,
    keep_log: KeepLogFlag = False,
    metrics: MetricsAddress = None,
    metrics_process: Annotated[
        bool,
        typer.Option(
            "--metrics-process",
            envvar="SOTTOVOCE_METRICS_PROCESS",
            help="Also what the process has used of processor and memory. That may depend on records.",
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            envvar="SOTTOVOCE_TRACE",
            help="Send the times of rounds to an OpenTelemetry collector (OTEL_EXPORTER_OTLP_ENDPOINT). They may depend on "
            "records. An extra.",
        ),
    ] = False,
    trace_every: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, envvar="SOTTOVOCE_TRACE_EVERY", help="Of every so many rounds one.")
    ] = 1,
) -> None:
    """Start a [bold]learner[/] in the foreground: it learns from its owner's stream and talks to its neighbours."""
    from sottovoce_learner.host import serve
    from sottovoce_learner.host_file import build_configs, load_host_file
    from sottovoce_rpc.metrics import MetricsEndpoint

    options = {
        "coordinator": get_common_options().coordinator,
        "listen": listen,
        "advertise": advertise,
        "state": state,
        "join_timeout": join_timeout,
        "recorded_noise": recorded_noise,
        "allow_imports": get_common_options().allow_imports,
        "budget": budget,
        "noise": noise,
        "noise_seed": noise_seed,
        "identity": get_common_options().identity,
        "insecure": get_common_options().insecure,
        "owner": tuple(owner or ()),
        "feeder": tuple(feeder or ()),
        "policy": policy,
        "keep_log": keep_log,
    }
    if bool(name) == (host is not None):
        raise SpecError("a learner has a name (--name), or several stand in a file (--host): give one of the two")
    configs = build_configs(name or (), options) if host is None else load_host_file(host, options)
    at = None if metrics is None else MetricsEndpoint(metrics, configs[0].credentials, metrics_process)
    every = trace_every if trace else None
    _serve(
        lambda: serve(configs, with_stdin=get_common_options().stop_with_stdin, metrics=at, trace_interval_rounds=every)
    )


@eavesdropper_app.callback()
def eavesdropper(
    context: typer.Context,
    listen: ListenAddress = "127.0.0.1:7500",
    folder: Annotated[
        str,
        typer.Option(envvar="SOTTOVOCE_CAPTURES", help="Folder for captures, or a URL such as s3://bucket/captures."),
    ] = "sottovoce-captures",
    advertise_host: Annotated[
        str | None,
        typer.Option(envvar="SOTTOVOCE_ADVERTISE_HOST", help="Name of this host for learners, where it differs."),
    ] = None,
    metrics: MetricsAddress = None,
) -> None:
    """Start an [bold]eavesdropper[/] in the foreground: it relays the channels between learners and records every byte.

    Its commands are for gRPC services that are not ours.
    """
    if context.invoked_subcommand is not None:
        return
    from sottovoce_eavesdropper.service import EavesdropperConfig, serve
    from sottovoce_rpc.metrics import MetricsEndpoint

    deployed = EavesdropperConfig(
        listen, folder, advertise_host, get_common_options().allow_imports, get_common_options().credentials
    )
    at = None if metrics is None else MetricsEndpoint(metrics, deployed.credentials)
    _serve(lambda: serve(deployed, stop_with_stdin=get_common_options().stop_with_stdin, metrics=at))


@eavesdropper_app.command("relay", common_options=("log_level", "log_format", "config", "stop_with_stdin"))
def run_relay(
    to: Annotated[str, make_address_option(help="host:port of the server.", show_default=False)],
    listen: ListenAddress = "127.0.0.1:7600",
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
) -> None:
    """Record what passes between any gRPC server and its clients, until Ctrl-C. Point the clients at --listen."""
    from sottovoce_eavesdropper.grpc_proxy import StandaloneProxyConfig, serve

    relayed = StandaloneProxyConfig(to, listen, folder, world, tls_cert, tls_key, to_tls, to_ca)
    _serve(lambda: serve(relayed, stop_with_stdin=get_common_options().stop_with_stdin))


@eavesdropper_app.command("audit")
def audit_foreign_service(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="With captures of both worlds.", show_default=False)],
    decoder: Annotated[
        str | None, typer.Option(help="module:function that reads a message.", show_default="only bytes")
    ] = None,
    run_is: Annotated[
        str, typer.Option(metavar="WHAT", help="What one run is: connection, stream, or metadata:KEY.")
    ] = "connection",
    claim: Annotated[
        float | None,
        make_number_option(
            min_value=0.0, max_value=1e9, help="Epsilon that the service's owner claims for a run.", show_default="none"
        ),
    ] = None,
    delta: Annotated[
        float, make_number_option(min_value=0.0, max_value=0.5, help="Delta at which epsilon is claimed, and bounded.")
    ] = 0.0,
    noise: Annotated[
        Path | None,
        typer.Option(
            "--noise-law", help="YAML file: law, scale and centre of the noise in decoded fields.", show_default="none"
        ),
    ] = None,
    confidence: Annotated[
        float,
        make_number_option(min_value=0.5, max_value=0.999999, help="With which a claim that holds is not refuted."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the classifiers.")] = 0,
    out: Annotated[Path | None, make_results_option("audit")] = None,
) -> None:
    """Tell from captures alone what a service leaks about the world it is in, and hold it against a claim.

    Writes audit.json and audit.html. Exits with 1 if the claim is refuted.
    """
    from sottovoce_client import terminal
    from sottovoce_client.auditing.foreign_audit import audit_foreign_captures
    from sottovoce_client.auditing.foreign_runs import ForeignRequest

    folder_of_results = make_results_folder("audit", out, ["audit.json", "audit.html"])
    asked = ForeignRequest(
        folder, decoder, run_is, math.inf if claim is None else claim, delta, noise, confidence, seed
    )
    code = audit_foreign_captures(asked, folder_of_results)
    terminal.print_json_file_if_requested(folder_of_results / "audit.json")
    raise typer.Exit(code)


def _serve(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    import structlog

    from sottovoce_rpc.logs import configure_logs, describe_failure, set_private_umask

    configure_logs(get_common_options().log_level or "info", get_common_options().log_format)
    for name in reject_misspelled_variables(os.environ):
        structlog.get_logger().warning("no setting", variable=name)
    set_private_umask()
    try:
        with asyncio.Runner(loop_factory=_event_loop()) as runner:
            runner.run(_until_told(work()))
    except SottovoceError:
        raise
    except Exception as error:  # noqa: BLE001 - a traceback ends with the error's text, and that may quote a record
        structlog.get_logger().critical("bug", **describe_failure(error))
        raise typer.Exit(1) from None


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """Run a service. Told to stop before it serves, it ends well; from then on it listens to signals itself."""
    import structlog

    loop, own, told = asyncio.get_running_loop(), asyncio.current_task(), list[signal.Signals]()
    assert own is not None  # noqa: S101 - asynchronous code runs in one

    def stop(number: signal.Signals) -> None:
        told.append(number)
        own.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await work
    except asyncio.CancelledError:
        if not told:
            raise
        structlog.get_logger().info("stopped", reason=told[0].name, drained=True)


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """The loop of uvloop where that is installed (extra `fast`), else Python's own."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop
