"""The web console."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.errors import SpecError
from sottovoce_client.cli.app import address, app
from sottovoce_client.cli.common_options import DEFAULT_COORDINATOR, NETWORK, common


@app.command(rich_help_panel="Services", uses=("coordinator", "log_level", *NETWORK))
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
) -> None:
    """Show runs in the browser: the graph and its traffic, budgets, streams, the watch, reports. Changes nothing.

    Prints the address to open; nobody can look without the token in it. Needs the extra console.
    """
    from sottovoce_client.web.serve import serve_console
    from sottovoce_client.web.services import Asked, Places
    from sottovoce_rpc.logs import configure_logs

    if folder is not None and not folder.is_dir():
        raise SpecError(f"FOLDER must be a folder of results, and there is none at {folder}")
    coordinator = common().coordinator or ("" if folder else DEFAULT_COORDINATOR)
    configure_logs(common().log_level or "warning")
    asked = Asked(folder, Places(coordinator, eavesdropper or "", common().identity), watch or "", common().insecure)
    asyncio.run(serve_console(asked, listen, token_file))
