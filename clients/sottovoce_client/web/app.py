"""HTTP application of the web console: access control, the page with its server-sent events, result files, the server."""

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
"""Default headers of every response; a response that sets one of them keeps its own value."""
MIN_TOKEN_CHARS, _MAX_TOKEN_CHARS = 20, 200


def _load_token(path: Path | None) -> str:
    """Read the secret token of the page from a file, which is created if missing; without a file create a new token.

    Raises:
        SpecError: The file holds no token, or other users may read it.
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
            f"a token must have {MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS} letters, digits, - and _; {path} holds none"
        )
    return token


class _AccessGuard:
    """ASGI middleware that rejects unauthorised requests before the application sees them.

    Args:
        app: The application.
        token: Secret of the page: in its address at first, in a cookie afterwards.
        cookie: Name of the cookie.
        is_own_connection: Predicate: the peer address belongs to a process of this user.
    """

    def __init__(
        self, app: ASGIApp, token: str, cookie: str, is_own_connection: Callable[[str], bool] = is_same_user
    ) -> None:
        self._app, self._token, self._cookie, self._is_own_connection = app, token, cookie, is_own_connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, or reject it."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(*refusal, send)
            return
        sets_cookie = scope["path"] == "/" and self._has_token(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                given = {name.lower() for name, _ in headers}
                headers += [
                    (k.encode(), v.encode()) for k, v in RESPONSE_HEADERS.items() if k.lower().encode() not in given
                ]
                if sets_cookie:
                    cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append((b"Set-Cookie", cookie.encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the HTTP status and the reason of a rejection; None if the request is authorised."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, port = scope.get("client") or ("", 0)
        if not self._is_own_connection(f"ipv{6 if ':' in host else 4}:{f'[{host}]' if ':' in host else host}:{port}"):
            return 403, "This console belongs to another user."
        if not _is_own_host(headers.get("host", "")):
            return 421, "This console must be opened as 127.0.0.1 or localhost."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This console is read-only: it accepts only GET requests."
        # Pages on other ports of this machine belong to the same site, so their requests carry the cookie.
        if scope["path"] != "/" and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "This request came from a page of another site."
        if not (self._has_cookie(headers.get("cookie", "")) or (scope["path"] == "/" and self._has_token(scope))):
            return 403, "Open the address that `sottovoce console` printed: it contains the token of this page."
        return None

    def _has_token(self, scope: Scope) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])
        return self._is_token(given[0])

    def _has_cookie(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return False
        return found is not None and self._is_token(found.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _is_own_host(header: str) -> bool:
    """Return whether this `Host` is a loopback name: a foreign name could resolve to this machine (DNS rebinding)."""
    name, _, port = header.rpartition(":")
    host = name if port.isdecimal() else header
    return re.fullmatch(r"[a-z0-9.]+|\[[0-9a-f:]+\]", host) is not None and is_loopback(f"{host}:0")


async def _refuse(status: int, reason: str, send: Send) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        *((k.encode(), v.encode()) for k, v in RESPONSE_HEADERS.items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


_MEDIA_TYPES = {"index.html": "text/html", "console.css": "text/css", "console.js": "text/javascript"}
_SANDBOX = {
    # A page of the results may run its own scripts, in an origin of its own: it reaches neither the console nor a network.
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
}


def create_console_app(
    poller: Poller, token: str, cookie: str, is_own_connection: Callable[[str], bool] = is_same_user
) -> _AccessGuard:
    """Create the console as an ASGI application.

    Args:
        poller: Source of the state.
        token: Secret of the page.
        cookie: Name of the cookie that holds the token.
        is_own_connection: Predicate: the peer address belongs to a process of this user.
    """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    page = resources.files("sottovoce_client.web").joinpath("page")
    content = {name: page.joinpath(name).read_bytes() for name in _MEDIA_TYPES}

    async def serve_page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _MEDIA_TYPES:
            return PlainTextResponse("There is no page of this name.\n", 404)
        return Response(content[name], media_type=_MEDIA_TYPES[name])

    async def stream_events(request: Request) -> Response:
        if poller.is_full:
            return PlainTextResponse("Too many pages are open.\n", 503, {"Retry-After": "10"})
        run_id = request.query_params.get("run", "")[:200]
        return StreamingResponse(_format_events(poller.stream_states(run_id)), media_type="text/event-stream")

    async def serve_file(request: Request) -> Response:
        found = await asyncio.to_thread(poller.files.read_file, request.path_params["path"])
        if found is None:
            return PlainTextResponse("There is no file of this name that may be opened.\n", 404)
        return Response(found[0], headers=_SANDBOX, media_type=found[1])

    routes = [
        Route("/", serve_page),
        Route("/events", stream_events),
        Route("/files/{path:path}", serve_file),
        Route("/{name}", serve_page),
    ]
    return _AccessGuard(Starlette(routes=routes), token, cookie, is_own_connection)


async def _format_events(states: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Format states as server-sent events; a browser reconnects after one second."""
    yield b"retry: 1000\n\n"
    async for state in states:
        yield b"data: " + state + b"\n\n"


_SHUTDOWN_TIMEOUT_S = 1


async def serve_console(options: ConsoleOptions, listen: str, token_file: Path | None) -> None:
    """Serve the console until the process is stopped.

    Args:
        options: What to show.
        listen: Loopback address, host:port; port 0 picks a free one.
        token_file: File that keeps the token across starts; None: a new token each time.

    Raises:
        SpecError: The address is not a loopback address, the token cannot be used, or an optional dependency is missing.
        Unavailable: The address is in use.
    """
    import_optional("starlette", "starlette", "the console", "console")
    token, sock = _load_token(token_file), _open_socket(listen)
    host, port = sock.getsockname()[:2]
    poller = Poller(options)
    app = create_console_app(poller, token, f"sottovoce-console-{port}")
    server = create_server(app)
    url_host = f"[{host}]" if ":" in host else host
    print(f"console: http://{url_host}:{port}/?token={token}", flush=True)
    async with Tasks() as tasks:
        serving = tasks.start(server.serve([sock]))

        async def stop(_: str) -> None:
            await poller.end()
            server.should_exit = True
            await serving

        async def wait_for_server() -> None:
            await asyncio.shield(serving)

        await serve_until_stopped(stop, [poller.run(), wait_for_server()], log_stop=False)


def _open_socket(listen: str) -> socket.socket:
    """Open a listening socket on a loopback address."""
    host, port = parse_address(listen, "--listen", allow_port_zero=True)
    if not is_loopback(listen):
        raise SpecError(
            f"the console must listen on a loopback address, got {listen}: use 127.0.0.1, and connect from another machine by "
            f"`ssh -L {port}:127.0.0.1:{port} HOST`"
        )
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise Unavailable(f"the console cannot listen on {listen}: {error.strerror or error}") from None


def create_server(app: Any) -> Any:
    """Create a uvicorn server that leaves signal handling to the caller and ignores proxy headers about the client.

    Raises:
        SpecError: The optional dependency is not installed.
    """
    uvicorn = import_optional("uvicorn", "uvicorn", "the console", "console")

    class Server(uvicorn.Server):  # type: ignore[name-defined, misc] # uvicorn may be missing where types are checked
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
    return Server(config)
