"""Commands that run a service in the foreground."""

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
        make_address_option(envvar="SOTTOVOCE_EAVESDROPPER", help="Address of the eavesdropper, for captured runs."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            envvar="SOTTOVOCE_COORDINATOR_STATE",
            help="Folder for runs and learners: runs continue when the coordinator is restarted with it.",
            show_default="none: a run ends with its coordinator",
        ),
    ] = None,
    metrics: MetricsAddress = None,
) -> None:
    """Start a [bold]coordinator[/] in the foreground: it distributes the topology and the round clock."""
    from sottovoce_coordinator.service import CoordinatorConfig, serve
    from sottovoce_rpc.metrics import MetricsEndpoint

    service_config = CoordinatorConfig(
        listen, eavesdropper, get_common_options().allow_imports, state, get_common_options().credentials
    )
    endpoint = None if metrics is None else MetricsEndpoint(metrics, service_config.credentials)
    _serve(lambda: serve(service_config, stop_with_stdin=get_common_options().stop_with_stdin, metrics=endpoint))


@app.command(rich_help_panel="Services", common_options=("coordinator", *SERVICE_OPTIONS))
def learner(
    name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SOTTOVOCE_NAME",
            help="Name; repeat for several learners in one process with the same options.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SOTTOVOCE_HOST",
            help="Instead of --name: YAML file of several learners in one process, each with its own settings, named like these "
            "options. The options give the defaults.",
            show_default="none",
        ),
    ] = None,
    listen: ListenAddress = "127.0.0.1:0",
    advertise: Annotated[
        str | None,
        make_address_option(envvar="SOTTOVOCE_ADVERTISE", help="Address for other processes, if it differs."),
    ] = None,
    state: Annotated[
        Path,
        typer.Option(
            envvar="SOTTOVOCE_STATE", help="State folder, with the write-ahead log. It must survive restarts."
        ),
    ] = Path("sottovoce-state"),
    budget: Annotated[
        float | None,
        typer.Option(
            envvar="SOTTOVOCE_BUDGET", help="Maximum epsilon over all runs together, by the ledger in --state."
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
            help="YAML file: the runs it takes part in, and their maximum cost (`sottovoce policy`).",
            show_default="the one of `sottovoce policy`",
        ),
    ] = None,
    recorded_noise: Annotated[
        Path | None,
        typer.Option(help="Use this noise instead of drawing it, for tests. Gives no privacy; loopback only."),
    ] = None,
    noise: Annotated[
        Literal["bitwise", "opendp"],
        typer.Option(envvar="SOTTOVOCE_NOISE", help="Noise sampler. OpenDP is slower, and an optional dependency."),
    ] = "bitwise",
    noise_seed: Annotated[
        str | None,
        typer.Option(
            envvar="SOTTOVOCE_NOISE_SEED",
            help="Draw the same noise in every run of that name, for tests. Gives no privacy; loopback only.",
        ),
    ] = None,
    owner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE/NAME",
            envvar="SOTTOVOCE_OWNER",
            help="Identity that may read its ledger, request predictions, and send records; repeatable.",
            show_default="learner/NAME",
        ),
    ] = None,
    feeder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE/NAME",
            envvar="SOTTOVOCE_FEEDER",
            help="Identity that may send records, besides its owners; repeatable.",
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
            help="Also CPU and memory usage of the process. These may depend on records.",
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            envvar="SOTTOVOCE_TRACE",
            help="Send the times of rounds to an OpenTelemetry collector (OTEL_EXPORTER_OTLP_ENDPOINT). They may depend on "
            "records. Needs an optional dependency.",
        ),
    ] = False,
    trace_every: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, envvar="SOTTOVOCE_TRACE_EVERY", help="Interval of traced rounds.")
    ] = 1,
) -> None:
    """Start a [bold]learner[/] in the foreground: it learns from its owner's stream and exchanges noisy messages."""
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
        raise SpecError("a learner requires --name, or several learners a --host file: give exactly one of the two")
    configs = build_configs(name or (), options) if host is None else load_host_file(host, options)
    endpoint = None if metrics is None else MetricsEndpoint(metrics, configs[0].credentials, metrics_process)
    interval = trace_every if trace else None
    _serve(
        lambda: serve(
            configs, with_stdin=get_common_options().stop_with_stdin, metrics=endpoint, trace_interval_rounds=interval
        )
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
        typer.Option(envvar="SOTTOVOCE_ADVERTISE_HOST", help="Name of this host for learners, if it differs."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            envvar="SOTTOVOCE_WORKERS",
            help="Processes that serve relays and wiretaps; 0: this one.",
            show_default="half of the cores, at most 8, none below four",
        ),
    ] = None,
    remote_workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            envvar="SOTTOVOCE_REMOTE_WORKERS",
            help="Workers on other hosts that serve relays and wiretaps in place of these, each started with --join.",
            show_default="none",
        ),
    ] = 0,
    join: Annotated[
        str | None,
        make_address_option(
            help="Be a worker of the eavesdropper at this address, with its identity.", show_default=False
        ),
    ] = None,
    metrics: MetricsAddress = None,
) -> None:
    """Start an [bold]eavesdropper[/] in the foreground: it relays the channels between learners and records every byte.

    Its subcommands are for other gRPC services.
    """
    if context.invoked_subcommand is not None:
        return
    from sottovoce_eavesdropper import service
    from sottovoce_eavesdropper.worker_pool import count_default_workers
    from sottovoce_rpc.metrics import MetricsEndpoint

    if workers and remote_workers:
        raise SpecError(f"--workers and --remote-workers exclude each other, got {workers} and {remote_workers}")
    if join is not None and (workers or remote_workers):
        raise SpecError(
            "--join makes this process a worker, which has no workers: leave out --workers and --remote-workers"
        )
    options = get_common_options()
    config = service.EavesdropperConfig(
        listen,
        folder,
        advertise_host,
        options.allow_imports,
        options.credentials,
        count_default_workers() if workers is None else workers,
        remote_workers,
    )
    endpoint = None if metrics is None else MetricsEndpoint(metrics, config.credentials)
    ends = options.stop_with_stdin
    if join is None:
        _serve(lambda: service.serve(config, stop_with_stdin=ends, metrics=endpoint))
    else:
        _serve(lambda: service.join(config, join, stop_with_stdin=ends, metrics=endpoint))


@eavesdropper_app.command("relay", common_options=("log_level", "log_format", "config", "stop_with_stdin"))
def run_relay(
    to: Annotated[str, make_address_option(help="Address of the server, host:port.", show_default=False)],
    listen: ListenAddress = "127.0.0.1:7600",
    folder: Annotated[
        str,
        typer.Option(
            envvar="SOTTOVOCE_CAPTURES",
            help="Parent folder or URL of the capture's folder; several relays may share it.",
        ),
    ] = "sottovoce-captures",
    world: Annotated[
        int | None,
        typer.Option(min=0, max=1, help="World of the server's data, 0 or 1, for an audit.", show_default=False),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of a certificate: clients use TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None,
    to_tls: Annotated[bool, typer.Option("--to-tls", help="The server uses TLS.")] = False,
    to_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authorities for the server's certificate.", show_default="the system's authorities"
        ),
    ] = None,
) -> None:
    """Record the traffic between any gRPC server and its clients, until Ctrl-C. Point the clients at --listen."""
    from sottovoce_eavesdropper.grpc_proxy import StandaloneProxyConfig, serve

    proxy_config = StandaloneProxyConfig(to, listen, folder, world, tls_cert, tls_key, to_tls, to_ca)
    _serve(lambda: serve(proxy_config, stop_with_stdin=get_common_options().stop_with_stdin))


@eavesdropper_app.command("audit")
def audit_foreign_service(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder with captures of both worlds.", show_default=False)
    ],
    decoder: Annotated[
        str | None, typer.Option(help="module:function that decodes a message.", show_default="only bytes")
    ] = None,
    run_boundary: Annotated[
        str, typer.Option(metavar="BOUNDARY", help="Boundary of a run: connection, stream, or metadata:KEY.")
    ] = "connection",
    claim: Annotated[
        float | None,
        make_number_option(
            min_value=0.0, max_value=1e9, help="Epsilon that the service's owner claims for a run.", show_default="none"
        ),
    ] = None,
    delta: Annotated[
        float, make_number_option(min_value=0.0, max_value=0.5, help="Delta of the claimed and of the bounded epsilon.")
    ] = 0.0,
    noise: Annotated[
        Path | None,
        typer.Option(
            "--noise-distribution",
            help="YAML file: distribution, scale and centre of the noise in decoded fields.",
            show_default="none",
        ),
    ] = None,
    confidence: Annotated[
        float,
        make_number_option(min_value=0.5, max_value=0.999999, help="Probability that a true claim is not refuted."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the classifiers.")] = 0,
    out: Annotated[Path | None, make_results_option("audit")] = None,
) -> None:
    """Measure from captures alone how much a service reveals about its world, and test a claim.

    Writes audit.json and audit.html. Exits with 1 if the claim is refuted.
    """
    from sottovoce_client import terminal
    from sottovoce_client.auditing.foreign_audit import audit_foreign_captures
    from sottovoce_client.auditing.foreign_runs import ForeignRequest

    results_folder = make_results_folder("audit", out, ["audit.json", "audit.html"])
    request = ForeignRequest(
        folder, decoder, run_boundary, math.inf if claim is None else claim, delta, noise, confidence, seed
    )
    code = audit_foreign_captures(request, results_folder)
    terminal.print_json_file_if_requested(results_folder / "audit.json")
    raise typer.Exit(code)


def _serve(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    import structlog

    from sottovoce_rpc.logs import configure_logs, describe_failure, set_private_umask
    from sottovoce_rpc.server import choose_loop_factory

    configure_logs(get_common_options().log_level or "info", get_common_options().log_format)
    for name in reject_misspelled_variables(os.environ):
        structlog.get_logger().warning("unknown variable", variable=name)
    set_private_umask()
    try:
        with asyncio.Runner(loop_factory=choose_loop_factory()) as runner:
            runner.run(_run_service(work()))
    except SottovoceError:
        raise
    except Exception as error:  # noqa: BLE001 - a traceback ends with the error's text, and that may quote a record
        structlog.get_logger().critical("bug", **describe_failure(error))
        raise typer.Exit(1) from None


async def _run_service(work: Coroutine[Any, Any, None]) -> None:
    """Run a service. A signal before it serves stops it without an error; after that, it handles signals itself."""
    import structlog

    loop, task, signals = asyncio.get_running_loop(), asyncio.current_task(), list[signal.Signals]()
    assert task is not None  # noqa: S101 - asynchronous code runs in a task

    def stop(number: signal.Signals) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await work
    except asyncio.CancelledError:
        if not signals:
            raise
        structlog.get_logger().info("stopped", reason=signals[0].name, drained=True)
