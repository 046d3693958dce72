"""Who may look: this machine's user, in a browser that was shown the token, on a page of ours."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from sottovoce.errors import SpecError
from sottovoce_rpc.addresses import is_loopback, of_this_user

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OWN = {
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
LEAST_TOKEN, _MOST_TOKEN = 20, 200


def token_of(path: Path | None) -> str:
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
    if not LEAST_TOKEN <= len(token) <= _MOST_TOKEN or not all(each.isalnum() or each in "-_" for each in token):
        raise SpecError(f"a token has {LEAST_TOKEN} to {_MOST_TOKEN} letters, digits, - and _; {path} holds none")
    return token


class Guard:
    """Refuses whoever may not look, before anything else is asked.

    Args:
        app: behind it.
        token: that opens the page: in its address at first, in a cookie from then on.
        cookie: its name.
        ours: whether the other end of a connection is this user's.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str, ours: Callable[[str], bool] = of_this_user) -> None:
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
                headers += [(k.encode(), v.encode()) for k, v in OWN.items() if k.lower().encode() not in given]
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
        if not is_own_host(headers.get("host", "")):
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


def is_own_host(header: str) -> bool:
    """Whether a page under this `Host` is this machine's: else a name of somebody's could be made to lead here."""
    name, _, port = header.rpartition(":")
    host = name if port.isdecimal() else header
    return re.fullmatch(r"[a-z0-9.]+|\[[0-9a-f:]+\]", host) is not None and is_loopback(f"{host}:0")


async def _refuse(status: int, why: str, send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *((k.encode(), v.encode()) for k, v in OWN.items())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})
