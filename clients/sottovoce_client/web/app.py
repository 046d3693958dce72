"""The console over HTTP: who may ask, the page with its server-sent events, results to open, and the server."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from sottovoce_client.web.poller import Poller
from sottovoce_client.web.service_clients import ConsoleOptions
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_rpc.addresses import is_loopback, is_same_user, parse_address
from sottovoce_rpc.server import serve_until_stopped
from sottovoce_rpc.tasks import Tasks

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every answer; one that has such a header already keeps its own."""
MIN_TOKEN_CHARS, _MAX_TOKEN_CHARS = 20, 200


def _token_of(path: Path | None) -> str:
    """The secret that opens the page: of a file that is made where it is missing; without one, a new one.

    Raises:
        SpecError: the file holds none, or others may read it.
    """
    if path is None:
        return secrets.token_urlsafe(32)
    try:
        path.touch(mode=0o600, exist_ok=True)
        if path.stat().st_mode & 0o077:
            raise SpecError(f"other users may read the token in {path}: chmod 600 {path}")
        if not path.stat().st_size:
            path.write_text(secrets.token_urlsafe(32) + "\n", encoding="ascii")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise SpecError(f"--token-file {path} cannot be used: {getattr(error, 'strerror', None) or error}") from None
    if not MIN_TOKEN_CHARS <= len(token) <= _MAX_TOKEN_CHARS or not all(
        each.isalnum() or each in "-_" for each in token
    ):
        raise SpecError(
            f"a token has {MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS} letters, digits, - and _; {path} holds none"
        )
    return token


class _Guard:
    """Refuses whoever may not look, before anything else is asked.

    Args:
        app: behind it.
        token: that opens the page: in its address at first, in a cookie from then on.
        cookie: its name.
        ours: whether the other end of a connection is this user's.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str, ours: Callable[[str], bool] = is_same_user) -> None:
        self._app, self._token, self._cookie, self._ours = app, token, cookie, ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(*refusal, send)
            return
        shown = scope["path"] == "/" and self._in_address(scope)

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                given = {name.lower() for name, _ in headers}
                headers += [
                    (k.encode(), v.encode()) for k, v in RESPONSE_HEADERS.items() if k.lower().encode() not in given
                ]
                if shown:
                    cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append((b"Set-Cookie", cookie.encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, dressed)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """A status and why; None: come in."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, port = scope.get("client") or ("", 0)
        if not self._ours(f"ipv{6 if ':' in host else 4}:{f'[{host}]' if ':' in host else host}:{port}"):
            return 403, "This console is another user's."
        if not _is_own_host(headers.get("host", "")):
            return 421, "This console answers under the names of this machine alone: 127.0.0.1 and localhost."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This console changes nothing: it answers GET alone."
        # Pages of other ports of this machine are of the same site, and their requests bring the cookie.
        if scope["path"] != "/" and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "This was asked by a page of somebody else."
        if not (self._in_cookie(headers.get("cookie", "")) or (scope["path"] == "/" and self._in_address(scope))):
            return 403, "Open the address that `sottovoce console` printed: it holds the token that opens this page."
        return None

    def _in_address(self, scope: Scope) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])
        return self._right(given[0])

    def _in_cookie(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return False
        return found is not None and self._right(found.value)

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _is_own_host(header: str) -> bool:
    """Whether a page under this `Host` is this machine's: else a name of somebody's could be made to lead here."""
    name, _, port = header.rpartition(":")
    host = name if port.isdecimal() else header
    return re.fullmatch(r"[a-z0-9.]+|\[[0-9a-f:]+\]", host) is not None and is_loopback(f"{host}:0")


async def _refuse(status: int, why: str, send: Send) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        *((k.encode(), v.encode()) for k, v in RESPONSE_HEADERS.items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


_KINDS = {"index.html": "text/html", "console.css": "text/css", "console.js": "text/javascript"}
_SANDBOX = {
    # A page of results may run its own scripts, as a stranger of this one: it reaches neither the console nor anybody else.
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
}


def create_console_app(
    poller: Poller, token: str, cookie: str, is_own_connection: Callable[[str], bool] = is_same_user
) -> _Guard:
    """The console as an ASGI application.

    Args:
        known: what is shown.
        token: that opens the page.
        cookie: name of the cookie that keeps the token.
        ours: whether the other end of a connection is this user's.
    """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    page = resources.files("sottovoce_client.web").joinpath("page")
    content = {name: page.joinpath(name).read_bytes() for name in _KINDS}

    async def own(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _KINDS:
            return PlainTextResponse("There is nothing of this name.\n", 404)
        return Response(content[name], media_type=_KINDS[name])

    async def events(request: Request) -> Response:
        if poller.is_full:
            return PlainTextResponse("Too many pages are open.\n", 503, {"Retry-After": "10"})
        run_id = request.query_params.get("run", "")[:200]
        return StreamingResponse(_sent(poller.stream_states(run_id)), media_type="text/event-stream")

    async def opened(request: Request) -> Response:
        found = await asyncio.to_thread(poller.files.read_file, request.path_params["path"])
        if found is None:
            return PlainTextResponse("There is nothing of this name to open.\n", 404)
        return Response(found[0], headers=_SANDBOX, media_type=found[1])

    routes = [
        Route("/", own),
        Route("/events", events),
        Route("/files/{path:path}", opened),
        Route("/{name}", own),
    ]
    return _Guard(Starlette(routes=routes), token, cookie, is_own_connection)


async def _sent(pages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """As server-sent events; a browser that lost us asks again after a second."""
    yield b"retry: 1000\n\n"
    async for page in pages:
        yield b"data: " + page + b"\n\n"


_SHUTDOWN_TIMEOUT_S = 1


async def serve_console(options: ConsoleOptions, listen: str, token_file: Path | None) -> None:
    """Serve until told to stop.

    Args:
        asked: what to show.
        listen: host:port of this machine; port 0 picks one.
        token_file: keeps the token for the next time; None: there is a new one each time.

    Raises:
        SpecError: others could reach the address, the token cannot be used, or the extra is not installed.
        Unavailable: the address is taken.
    """
    import_optional("starlette", "starlette", "the console", "console")
    token, listening = _token_of(token_file), _listening(listen)
    host, port = listening.getsockname()[:2]
    gathering = Poller(options)
    app = create_console_app(gathering, token, f"sottovoce-console-{port}")
    server = create_server(app)
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

        await serve_until_stopped(stop, [gathering.run(), served()], log_stop=False)


def _listening(listen: str) -> socket.socket:
    """A socket of this machine alone."""
    host, port = parse_address(listen, "--listen", allow_port_zero=True)
    if not is_loopback(listen):
        raise SpecError(
            f"the console answers on this machine alone, got {listen}: listen on 127.0.0.1, and come from another machine by "
            f"`ssh -L {port}:127.0.0.1:{port} HOST`"
        )
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise Unavailable(f"the console cannot listen on {listen}: {error.strerror or error}") from None


def create_server(app: Any) -> Any:
    """A server of uvicorn's for an application; it leaves signals to us, and believes no proxy about who asks.

    Raises:
        SpecError: the extra is not installed.
    """
    uvicorn = import_optional("uvicorn", "uvicorn", "the console", "console")

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
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )
    return Quiet(config)
