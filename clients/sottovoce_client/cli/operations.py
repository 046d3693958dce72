"""Commands for a coordinator's runs and learners, and for the status of services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import app, make_address_option, runs_app
from sottovoce_client.cli.common_options import (
    DEFAULT_COORDINATOR,
    NETWORK_OPTIONS,
    OPERATOR_OPTIONS,
    get_common_options,
)
from sottovoce_core.errors import SpecError

RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id from `runs show`, or a unique prefix.", show_default=False)
]


@runs_app.command("show", common_options=OPERATOR_OPTIONS)
def show_runs(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run to show: its id, or a unique prefix.", show_default="all runs"),
    ] = "",
) -> None:
    """List the coordinator's runs, the newest first; or show one: learners, rounds, epsilon, disconnected learners."""
    from sottovoce_client.runs import coordinator_commands
    from sottovoce_client.terminal import print_json

    coordinator, credentials = get_common_options().coordinator_or_local, get_common_options().credentials
    if get_common_options().as_json:
        found = asyncio.run(coordinator_commands.get_run_documents(coordinator, run, credentials))
        print_json(found[0] if run else found)
    elif run:
        asyncio.run(coordinator_commands.show_run(coordinator, run, credentials=credentials))
    else:
        asyncio.run(coordinator_commands.list_runs(coordinator, credentials=credentials))


def _call(function: str, *words: str, **more: bool) -> None:
    """Call a function of `sottovoce_client.runs.coordinator_commands`."""
    from sottovoce_client.runs import coordinator_commands

    asyncio.run(
        getattr(coordinator_commands, function)(
            get_common_options().coordinator_or_local, *words, credentials=get_common_options().credentials, **more
        )
    )


@runs_app.command("stop", common_options=OPERATOR_OPTIONS)
def stop_run(
    run: RunId,
) -> None:
    """Stop a run before its last round, permanently: only a failed run can be resumed. Other runs continue.

    Refused if the run has ended; the error says how.
    """
    _call("stop_run", run)


@runs_app.command("resume", common_options=OPERATOR_OPTIONS)
def resume_run(
    run: RunId,
) -> None:
    """Resume a failed run: its learners continue from the ends of their logs.

    Refused if one of them was in another run since. The run waits for disconnected learners. A closed capture is not continued,
    and the output reports this. Records that learners lack must be sent again: `sottovoce run SPEC --resume RUN` resumes the
    run and sends them.
    """
    _call("resume_run", run)


LearnerArgument = Annotated[str, typer.Argument(metavar="LEARNER", help="Name of the learner.", show_default=False)]


@runs_app.command("leave", common_options=OPERATOR_OPTIONS)
def leave_run(
    run: RunId,
    learner: LearnerArgument,
) -> None:
    """Let an active run continue without a learner.

    A connected learner sends its last round, which the others receive. A disconnected learner is lost to the run at once, and
    cannot take part in it again. All learners pause, and continue from their logs. Refused if the graph without the learner is
    not connected, or the algorithm's guarantee needs all learners.
    """
    _call("reconfigure_run", run, learner, joins=False)


@runs_app.command("join", common_options=OPERATOR_OPTIONS)
def join_run(
    run: RunId,
    learner: LearnerArgument,
) -> None:
    """Let a learner take part from now on that is offline by the run's spec, or has left."""
    _call("reconfigure_run", run, learner, joins=True)


@app.command(rich_help_panel="Services", common_options=OPERATOR_OPTIONS)
def status(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Output folder of a running `sottovoce up` or `demo`, with the addresses of its services.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Run to show: its id, or a unique prefix.",
            show_default="the newest active run, else the newest",
        ),
    ] = "",
    learner: Annotated[
        list[str] | None,
        make_address_option("--learner-address", help="Address of your learner; repeatable.", show_default="none"),
    ] = None,
    eavesdropper: Annotated[
        str | None,
        make_address_option(
            envvar="SOTTOVOCE_EAVESDROPPER",
            help="Address of your eavesdropper.",
            show_default="the one in FOLDER",
        ),
    ] = None,
) -> None:
    """Show the current status: runs, rounds and rates, disconnected, slow or stopped learners, epsilon spent, faults.

    Operators may ask a coordinator and an eavesdropper, owners their learner. Values that depend on records are shown only if the
    run opted in. Exits with 1 on any fault, an unreachable service included. `sottovoce console` shows the status continuously.

    Example: sottovoce status --coordinator 127.0.0.1:7400 --learner-address 127.0.0.1:7401
    """
    from sottovoce_client.runs import status as run_status
    from sottovoce_client.runs.monitoring import ServiceAddresses
    from sottovoce_client.terminal import print_json
    from sottovoce_client.web.service_clients import ConsoleOptions
    from sottovoce_rpc.credentials import Credentials

    coordinator = get_common_options().coordinator
    if folder is None and not (coordinator or learner or eavesdropper):
        coordinator = DEFAULT_COORDINATOR
    addresses = ServiceAddresses(coordinator or "", eavesdropper or "", get_common_options().identity)
    if folder is not None:
        addresses = ConsoleOptions(folder, addresses).resolve_addresses()
    credentials = Credentials(addresses.identity, get_common_options().insecure)
    current = asyncio.run(run_status.collect_status(addresses, learner or (), run, credentials))
    if get_common_options().as_json:
        print_json(run_status.make_document(current))
    else:
        run_status.show(current)
    raise typer.Exit(1 if current.faults else 0)


@app.command(rich_help_panel="Services", common_options=OPERATOR_OPTIONS)
def rebind(
    learner: LearnerArgument,
) -> None:
    """Let a learner whose state folder is lost join with another one.

    The new ledger lacks its earlier spending: the owner must lower its budget accordingly.
    """
    _call("rebind", learner)


@app.command(rich_help_panel="Services", common_options=OPERATOR_OPTIONS)
def doctor(
    eavesdropper: Annotated[
        str | None, make_address_option(help="Address of an eavesdropper.", show_default="none")
    ] = None,
    learner: Annotated[
        list[str] | None,
        make_address_option("--learner-address", help="Address of a learner; repeatable.", show_default="none"),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        make_address_option(
            "--metrics-address",
            help="Address of a service's metrics (its --metrics); repeatable.",
            show_default="none",
        ),
    ] = None,
    state: Annotated[
        list[Path] | None, typer.Option(help="State folder of a learner; repeatable.", show_default="none")
    ] = None,
) -> None:
    """Check a deployment from this machine, and report faults with their remedies: identity, services, clocks, folders.

    Exits with 1 if anything is wrong.
    """
    from sottovoce_client import terminal
    from sottovoce_client.doctor import CheckTargets, print_findings, run_checks
    from sottovoce_rpc.principals import Role

    given = (
        (Role.COORDINATOR, [get_common_options().coordinator]),
        (Role.EAVESDROPPER, [eavesdropper]),
        (Role.LEARNER, learner or []),
    )
    services = [(role, address) for role, addresses in given for address in addresses if address]
    findings = asyncio.run(
        run_checks(CheckTargets(get_common_options().credentials, services, state or [], metrics or []))
    )
    code = print_findings(findings, terminal.create_console())
    terminal.print_json_if_requested(lambda: {"ok": not code, "findings": findings})
    raise typer.Exit(code)


@app.command(rich_help_panel="Services", common_options=("coordinator", "log_level", *NETWORK_OPTIONS))
def console(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Results to open: output folder of `sottovoce up` or `demo`, with its services, or a parent folder.",
            show_default=False,
        ),
    ] = None,
    eavesdropper: Annotated[
        str | None,
        make_address_option(
            envvar="SOTTOVOCE_EAVESDROPPER", help="Address of the eavesdropper.", show_default="the one in FOLDER"
        ),
    ] = None,
    watch: Annotated[
        str | None,
        make_address_option(
            metavar="HOST:PORT", help="Show the results of `sottovoce watch --metrics HOST:PORT`.", show_default="none"
        ),
    ] = None,
    listen: Annotated[
        str,
        make_address_option(
            listen=True,
            envvar="SOTTOVOCE_LISTEN",
            help="Address of this machine, host:port; port 0 selects a free one.",
        ),
    ] = "127.0.0.1:7480",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the token in this file, so that pages stay valid after a restart.",
            show_default="a new one",
        ),
    ] = None,
) -> None:
    """Show runs in the browser: graph and traffic, budgets, streams, the watch, reports. Changes nothing.

    Prints the address to open; access requires the token in it. Needs the optional dependency console.
    """
    from sottovoce_client.runs.monitoring import ServiceAddresses
    from sottovoce_client.web.app import serve_console
    from sottovoce_client.web.service_clients import ConsoleOptions
    from sottovoce_rpc.logs import configure_logs

    if folder is not None and not folder.is_dir():
        raise SpecError(f"FOLDER must be a folder of results, got {folder}, which is not a folder")
    coordinator = get_common_options().coordinator or ("" if folder else DEFAULT_COORDINATOR)
    configure_logs(get_common_options().log_level or "warning")
    options = ConsoleOptions(
        folder,
        ServiceAddresses(coordinator, eavesdropper or "", get_common_options().identity),
        watch or "",
        get_common_options().insecure,
    )
    asyncio.run(serve_console(options, listen, token_file))
