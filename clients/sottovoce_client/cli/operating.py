"""What a coordinator knows: its runs and its learners."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import HERE, AsJson, Coordinator, IdentityFolder, Insecure, address, app, runs_app

RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="As `runs list` shows it, or its beginning.", show_default=False)
]


@runs_app.command("list")
def list_runs(
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """The runs that the coordinator remembers, the newest first: several may be under way, each on learners of its own."""
    from sottovoce_client.running import known
    from sottovoce_client.terminal import print_json
    from sottovoce_rpc.credentials import Credentials

    if as_json:
        print_json(asyncio.run(known.run_documents(coordinator, credentials=Credentials(identity, insecure))))
    else:
        asyncio.run(known.list_runs(coordinator, credentials=Credentials(identity, insecure)))


@runs_app.command("show")
def show_run(
    run: RunId,
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """One run, and how its learners stand: rounds, epsilon, who is away."""
    from sottovoce_client.running import known
    from sottovoce_client.terminal import print_json
    from sottovoce_rpc.credentials import Credentials

    if as_json:
        print_json(asyncio.run(known.run_documents(coordinator, run, Credentials(identity, insecure)))[0])
    else:
        asyncio.run(known.show_run(coordinator, run, credentials=Credentials(identity, insecure)))


@runs_app.command("stop")
def stop_run(
    run: RunId,
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """End a run before its last round, for good: only a run that failed can be resumed. Other runs go on.

    Refused where it is over: it says how.
    """
    from sottovoce_client.running import known
    from sottovoce_rpc.credentials import Credentials

    asyncio.run(known.stop_run(coordinator, run, credentials=Credentials(identity, insecure)))


@runs_app.command("resume")
def resume_run(
    run: RunId,
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Take up a run that failed: its learners go on where their logs end.

    As long as none of them was in another run since. Who is not there is waited for. A capture that was closed is not gone on
    with, and that is said. Records that learners do not have yet must be brought again: `sottovoce run SPEC --resume RUN` takes
    the run up and brings them.
    """
    from sottovoce_client.running import known
    from sottovoce_rpc.credentials import Credentials

    asyncio.run(known.resume_run(coordinator, run, credentials=Credentials(identity, insecure)))


Learner = Annotated[str, typer.Argument(metavar="LEARNER", help="Its name.", show_default=False)]


@runs_app.command("leave")
def leave_run(
    run: RunId,
    learner: Learner,
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Let a run under way go on without a learner.

    One that is here says its last round, and the others hear it. One that is gone is lost to the run at once, and cannot take
    part in it again. All learners rest for a moment, and go on from their logs. Refused where the graph without it is not
    connected, or the algorithm's guarantee needs all learners.
    """
    from sottovoce_client.running import known
    from sottovoce_rpc.credentials import Credentials

    asyncio.run(known.leave_run(coordinator, run, learner, credentials=Credentials(identity, insecure)))


@runs_app.command("join")
def join_run(
    run: RunId,
    learner: Learner,
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Let a learner that is away by the run's spec, or has left, take part from now on."""
    from sottovoce_client.running import known
    from sottovoce_rpc.credentials import Credentials

    asyncio.run(known.join_run(coordinator, run, learner, credentials=Credentials(identity, insecure)))


@app.command(rich_help_panel="Services")
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
    coordinator: Annotated[
        str | None,
        address(
            envvar="SOTTOVOCE_COORDINATOR",
            help="Address of the coordinator.",
            show_default="the one in FOLDER; 127.0.0.1:7400 where nobody else is asked",
        ),
    ] = None,
    learner: Annotated[
        list[str] | None,
        address(help="Address of a learner of yours; repeat for several.", show_default="none"),
    ] = None,
    eavesdropper: Annotated[
        str | None,
        address(
            envvar="SOTTOVOCE_EAVESDROPPER",
            help="Address of an eavesdropper of yours.",
            show_default="the one in FOLDER",
        ),
    ] = None,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """One look at what goes on: the run, its rounds and pace, who is away, behind or has stopped, epsilon spent, faults.

    A coordinator and an eavesdropper answer operators, a learner its owner. What depends on records is there only where the run
    opted in. Exits with 1 if anything is wrong, an unreachable service included. `sottovoce console` goes on looking.

    Example: sottovoce status --coordinator 127.0.0.1:7400 --learner 127.0.0.1:7401
    """
    from sottovoce_client.running import status as looking
    from sottovoce_client.running.monitoring import Places
    from sottovoce_client.terminal import print_json
    from sottovoce_client.web.services import Asked
    from sottovoce_rpc.credentials import Credentials

    if folder is None and not (coordinator or learner or eavesdropper):
        coordinator = HERE
    places = Places(coordinator or "", eavesdropper or "", identity)
    if folder is not None:
        places = Asked(folder, places).now()
    who = Credentials(places.identity, insecure)
    found = asyncio.run(looking.look(looking.Asked(places, tuple(learner or ()), run, who)))
    if as_json:
        print_json(looking.document(found))
    else:
        looking.show(found)
    raise typer.Exit(1 if found.faults else 0)


@app.command(rich_help_panel="Services")
def rebind(
    learner: Learner,
    coordinator: Coordinator = HERE,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Let a learner whose state folder is lost join with another one.

    What it spent is then in no ledger that it has: its owner answers for a budget that leaves room for it.
    """
    from sottovoce_client.running import known
    from sottovoce_rpc.credentials import Credentials

    asyncio.run(known.rebind(coordinator, learner, credentials=Credentials(identity, insecure)))


@app.command(rich_help_panel="Services")
def doctor(
    coordinator: Annotated[str | None, address(help="Address of a coordinator.", show_default="none")] = None,
    eavesdropper: Annotated[str | None, address(help="Address of an eavesdropper.", show_default="none")] = None,
    learner: Annotated[
        list[str] | None, address(help="Address of a learner; repeat for several.", show_default="none")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        address(help="Where a service tells metrics (its --metrics); repeat for several.", show_default="none"),
    ] = None,
    state: Annotated[
        list[Path] | None, typer.Option(help="A learner's state folder; repeat for several.", show_default="none")
    ] = None,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Say what of a deployment is not as it must be, seen from here, and what to do: identity, services, clocks, folders.

    Exits with 1 if anything is wrong.
    """
    from sottovoce_client import terminal
    from sottovoce_client.doctor import Patient, examine, show
    from sottovoce_rpc.credentials import Credentials
    from sottovoce_rpc.principals import Role

    given = ((Role.COORDINATOR, [coordinator]), (Role.EAVESDROPPER, [eavesdropper]), (Role.LEARNER, learner or []))
    services = [(role, address) for role, addresses in given for address in addresses if address]
    findings = asyncio.run(examine(Patient(Credentials(identity, insecure), services, state or [], metrics or [])))
    code = show(findings, terminal.console())
    terminal.tell(lambda: {"well": not code, "findings": findings})
    raise typer.Exit(code)
