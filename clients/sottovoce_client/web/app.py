"""The page and what it asks for, over HTTP: server-sent events, three files, and results to open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import TYPE_CHECKING, Protocol

from sottovoce_client.web.files import Files
from sottovoce_client.web.guard import Guard
from sottovoce_rpc.addresses import of_this_user

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_KINDS = {"index.html": "text/html", "console.css": "text/css", "console.js": "text/javascript"}
_SANDBOX = {
    # A page of results may run its own scripts, as a stranger of this one: it reaches neither the console nor anybody else.
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
}


class Known(Protocol):
    """What the console knows; of a real one it is a `Gathering`."""

    @property
    def files(self) -> Files:
        """What may be opened."""
        ...

    @property
    def full(self) -> bool:
        """Whether nobody more may look."""
        ...

    def pages(self, run_id: str) -> AsyncIterator[bytes]:
        """The page as JSON, again and again; of this run, or of the newest."""
        ...


def console_app(known: Known, token: str, cookie: str, ours: Callable[[str], bool] = of_this_user) -> Guard:
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
        if known.full:
            return PlainTextResponse("Too many pages are open.\n", 503, {"Retry-After": "10"})
        run_id = request.query_params.get("run", "")[:200]
        return StreamingResponse(_sent(known.pages(run_id)), media_type="text/event-stream")

    async def opened(request: Request) -> Response:
        found = await asyncio.to_thread(known.files.opened, request.path_params["path"])
        if found is None:
            return PlainTextResponse("There is nothing of this name to open.\n", 404)
        return Response(found[0], headers=_SANDBOX, media_type=found[1])

    routes = [
        Route("/", own),
        Route("/events", events),
        Route("/files/{path:path}", opened),
        Route("/{name}", own),
    ]
    return Guard(Starlette(routes=routes), token, cookie, ours)


async def _sent(pages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """As server-sent events; a browser that lost us asks again after a second."""
    yield b"retry: 1000\n\n"
    async for page in pages:
        yield b"data: " + page + b"\n\n"
