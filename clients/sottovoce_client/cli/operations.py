"""A coordinator's runs and learners, and looks at services that run."""

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
    str, typer.Argument(metavar="RUN", help="As `runs show` lists it, or its beginning.", show_default=False)
]


@runs_app.command("show", common_options=OPERATOR_OPTIONS)
def show_runs(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Show this run: its id, or its beginning.", show_default="all runs"),
    ] = "",
) -> None:
    """List the runs that the coordinator remembers, the newest first; or show one: its learners, rounds, epsilon, who is away."""
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


def _act(action: str, *words: str, **more: bool) -> None:
    """Ask the coordinator for a function of `sottovoce_client.runs.coordinator_commands`."""
    from sottovoce_client.runs import coordinator_commands

    asyncio.run(
        getattr(coordinator_commands, action)(
            get_common_options().coordinator_or_local, *words, credentials=get_common_options().credentials, **more
        )
    )


@runs_app.command("stop", common_options=OPERATOR_OPTIONS)
def stop_run(
    run: RunId,
) -> None:
    """End a run before its last round, for good: only a run that failed can be resumed. Other runs go on.

    Refused where it is over: it says how.
    """
    _act("stop_run", run)


@runs_app.command("resume", common_options=OPERATOR_OPTIONS)
def resume_run(
    run: RunId,
) -> None:
    """Take up a run that failed: its learners go on where their logs end.

    As long as none of them was in another run since. Who is not there is waited for. A capture that was closed is not gone on
    with, and that is said. Records that learners do not have yet must be brought again: `sottovoce run SPEC --resume RUN` takes
    the run up and brings them.
    """
    _act("resume_run", run)


LearnerArgument = Annotated[str, typer.Argument(metavar="LEARNER", help="Its name.", show_default=False)]


@runs_app.command("leave", common_options=OPERATOR_OPTIONS)
def leave_run(
    run: RunId,
    learner: LearnerArgument,
) -> None:
    """Let a run under way go on without a learner.

    One that is here says its last round, and the others hear it. One that is gone is lost to the run at once, and cannot take
    part in it again. All learners rest for a moment, and go on from their logs. Refused where the graph without it is not
    connected, or the algorithm's guarantee needs all learners.
    """
    _act("reconfigure_run", run, learner, joins=False)


@runs_app.command("join", common_options=OPERATOR_OPTIONS)
def join_run(
    run: RunId,
    learner: LearnerArgument,
) -> None:
    """Let a learner that is away by the run's spec, or has left, take part from now on."""
    _act("reconfigure_run", run, learner, joins=True)


@app.command(rich_help_panel="Services", common_options=OPERATOR_OPTIONS)
def status(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Of `sottovoce up` or `demo`, whose services are found there while it runs.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Look at this run: its id, or its beginning.",
            show_default="the newest, if possible under way",
        ),
    ] = "",
    learner: Annotated[
        list[str] | None,
        make_address_option(
            "--learner-address", help="Address of a learner of yours; repeat for several.", show_default="none"
        ),
    ] = None,
    eavesdropper: Annotated[
        str | None,
        make_address_option(
            envvar="SOTTOVOCE_EAVESDROPPER",
            help="Address of an eavesdropper of yours.",
            show_default="the one in FOLDER",
        ),
    ] = None,
) -> None:
    """One look at what goes on: the run, its rounds and pace, who is away, behind or has stopped, epsilon spent, faults.

    A coordinator and an eavesdropper answer operators, a learner its owner. What depends on records is there only where the run
    opted in. Exits with 1 if anything is wrong, an unreachable service included. `sottovoce console` goes on looking.

    Example: sottovoce status --coordinator 127.0.0.1:7400 --learner-address 127.0.0.1:7401
    """
    from sottovoce_client.runs import status as looking
    from sottovoce_client.runs.monitoring import ServiceAddresses
    from sottovoce_client.terminal import print_json
    from sottovoce_client.web.service_clients import ConsoleOptions
    from sottovoce_rpc.credentials import Credentials

    coordinator = get_common_options().coordinator
    if folder is None and not (coordinator or learner or eavesdropper):
        coordinator = DEFAULT_COORDINATOR
    places = ServiceAddresses(coordinator or "", eavesdropper or "", get_common_options().identity)
    if folder is not None:
        places = ConsoleOptions(folder, places).resolve_addresses()
    who = Credentials(places.identity, get_common_options().insecure)
    found = asyncio.run(looking.collect_status(places, learner or (), run, who))
    if get_common_options().as_json:
        print_json(looking.make_document(found))
    else:
        looking.show(found)
    raise typer.Exit(1 if found.faults else 0)


@app.command(rich_help_panel="Services", common_options=OPERATOR_OPTIONS)
def rebind(
    learner: LearnerArgument,
) -> None:
    """Let a learner whose state folder is lost join with another one.

    What it spent is then in no ledger that it has: its owner answers for a budget that leaves room for it.
    """
    _act("rebind", learner)


@app.command(rich_help_panel="Services", common_options=OPERATOR_OPTIONS)
def doctor(
    eavesdropper: Annotated[
        str | None, make_address_option(help="Address of an eavesdropper.", show_default="none")
    ] = None,
    learner: Annotated[
        list[str] | None,
        make_address_option("--learner-address", help="Address of a learner; repeat for several.", show_default="none"),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        make_address_option(
            "--metrics-address",
            help="Where a service serves metrics (its --metrics); repeat for several.",
            show_default="none",
        ),
    ] = None,
    state: Annotated[
        list[Path] | None, typer.Option(help="A learner's state folder; repeat for several.", show_default="none")
    ] = None,
) -> None:
    """Say what of a deployment is not as it must be, seen from here, and what to do: identity, services, clocks, folders.

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
    terminal.print_json_if_requested(lambda: {"well": not code, "findings": findings})
    raise typer.Exit(code)


@app.command(rich_help_panel="Services", common_options=("coordinator", "log_level", *NETWORK_OPTIONS))
def console(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Results to open: of `sottovoce up` or `demo`, whose services are found there, or a folder of many.",
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
            metavar="HOST:PORT", help="Show what `sottovoce watch --metrics HOST:PORT` sees.", show_default="none"
        ),
    ] = None,
    listen: Annotated[
        str,
        make_address_option(
            listen=True, envvar="SOTTOVOCE_LISTEN", help="host:port of this machine; port 0 picks one."
        ),
    ] = "127.0.0.1:7480",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the token here, so that pages outlive the console.", show_default="a new one"
        ),
    ] = None,
) -> None:
    """Show runs in the browser: the graph and its traffic, budgets, streams, the watch, reports. Changes nothing.

    Prints the address to open; nobody can look without the token in it. Needs the extra console.
    """
    from sottovoce_client.runs.monitoring import ServiceAddresses
    from sottovoce_client.web.app import serve_console
    from sottovoce_client.web.service_clients import ConsoleOptions
    from sottovoce_rpc.logs import configure_logs

    if folder is not None and not folder.is_dir():
        raise SpecError(f"FOLDER must be a folder of results, and there is none at {folder}")
    coordinator = get_common_options().coordinator or ("" if folder else DEFAULT_COORDINATOR)
    configure_logs(get_common_options().log_level or "warning")
    asked = ConsoleOptions(
        folder,
        ServiceAddresses(coordinator, eavesdropper or "", get_common_options().identity),
        watch or "",
        get_common_options().insecure,
    )
    asyncio.run(serve_console(asked, listen, token_file))
