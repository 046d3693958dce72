"""The web console."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.errors import SpecError
from sottovoce_client.cli.app import IdentityFolder, Insecure, LogLevel, address, app


@app.command(rich_help_panel="Services")
def console(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Results to open: of `sottovoce up` or `demo`, whose services are found there, or a folder of many.",
            show_default=False,
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        address(
            envvar="SOTTOVOCE_COORDINATOR",
            help="Address of the coordinator.",
            show_default="the one in FOLDER, else 127.0.0.1:7400",
        ),
    ] = None,
    eavesdropper: Annotated[
        str | None,
        address(envvar="SOTTOVOCE_EAVESDROPPER", help="Address of the eavesdropper.", show_default="the one in FOLDER"),
    ] = None,
    watch: Annotated[
        str | None,
        address(metavar="HOST:PORT", help="Show what `sottovoce watch --metrics HOST:PORT` sees.", show_default="none"),
    ] = None,
    listen: Annotated[
        str, address(listen=True, envvar="SOTTOVOCE_LISTEN", help="host:port of this machine; port 0 picks one.")
    ] = "127.0.0.1:7480",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the token here, so that pages outlive the console.", show_default="a new one"
        ),
    ] = None,
    identity: IdentityFolder = None,
    insecure: Insecure = False,
    log_level: LogLevel = "warning",
) -> None:
    """Show runs in the browser: the graph and its traffic, budgets, streams, the watch, reports. Changes nothing.

    Prints the address to open; nobody can look without the token in it. Needs the extra console.
    """
    from sottovoce_client.running.monitoring import Places
    from sottovoce_client.web.app import serve_console
    from sottovoce_client.web.services import Asked
    from sottovoce_rpc.logs import configure_logs

    if folder is not None and not folder.is_dir():
        raise SpecError(f"FOLDER must be a folder of results, and there is none at {folder}")
    if folder is None and coordinator is None:
        coordinator = "127.0.0.1:7400"
    configure_logs(log_level)
    asked = Asked(folder, Places(coordinator or "", eavesdropper or "", identity), watch or "", insecure)
    asyncio.run(serve_console(asked, listen, token_file))
