"""The console as a process: it prints its address, and serves until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sottovoce.errors import SpecError, Unavailable
from sottovoce.optional import import_extra
from sottovoce_client.web.app import console_app
from sottovoce_client.web.gather import Gathering
from sottovoce_client.web.guard import token_of
from sottovoce_client.web.services import Asked
from sottovoce_rpc.addresses import is_loopback, place_of
from sottovoce_rpc.server import serve_until_stopped
from sottovoce_rpc.tasks import Tasks

_CLOSE_S = 1


async def serve_console(asked: Asked, listen: str, token_file: Path | None) -> None:
    """Serve until told to stop.

    Args:
        asked: what to show.
        listen: host:port of this machine; port 0 picks one.
        token_file: keeps the token for the next time; None: there is a new one each time.

    Raises:
        SpecError: others could reach the address, the token cannot be used, or the extra is not installed.
        Unavailable: the address is taken.
    """
    import_extra("starlette", "starlette", "the console", "console")
    token, listening = token_of(token_file), _listening(listen)
    host, port = listening.getsockname()[:2]
    gathering = Gathering(asked)
    app = console_app(gathering, token, f"sottovoce-console-{port}")
    server = server_of(app)
    shown = f"[{host}]" if ":" in host else host
    print(f"console: http://{shown}:{port}/?token={token}", flush=True)
    async with Tasks() as tasks:
        serving = tasks.start(server.serve([listening]))

        async def stop(_: str) -> None:
            await gathering.end()
            server.should_exit = True
            await serving

        async def served() -> None:
            await asyncio.shield(serving)

        await serve_until_stopped(stop, [gathering.run(), served()], logged=False)


def _listening(listen: str) -> socket.socket:
    """A socket of this machine alone."""
    host, port = place_of(listen, "--listen", listen=True)
    if not is_loopback(listen):
        raise SpecError(
            f"the console answers on this machine alone, got {listen}: listen on 127.0.0.1, and come from another machine by "
            f"`ssh -L {port}:127.0.0.1:{port} HOST`"
        )
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise Unavailable(f"the console cannot listen on {listen}: {error.strerror or error}") from None


def server_of(app: Any) -> Any:
    """A server of uvicorn's for an application; it leaves signals to us, and believes no proxy about who asks.

    Raises:
        SpecError: the extra is not installed.
    """
    uvicorn = import_extra("uvicorn", "uvicorn", "the console", "console")

    class Quiet(uvicorn.Server):  # type: ignore[name-defined, misc] # the extra may be missing where types are checked
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    return Quiet(config)
