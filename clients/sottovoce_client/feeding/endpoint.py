"""Records by HTTP: `POST /records` answers when they are in the learner's keeping."""

from __future__ import annotations

import asyncio
import hmac
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sottovoce_client.feeding.progress import Account, Work
from sottovoce_client.feeding.pump import Target, Terms, unless
from sottovoce_client.feeding.records import Unfit, json_of
from sottovoce_client.feeding.sinks import Full, Refused, Sinks, WhenFull
from sottovoce_core.errors import DataError, NotReady, RemoteProtocolError, SottovoceError, SpecError, Unavailable
from sottovoce_rpc.addresses import is_loopback, of_this_user, place_of
from sottovoce_rpc.logs import failure
from sottovoce_rpc.tasks import Tasks

log = structlog.get_logger()

MOST_BYTES, MOST_REASONS, _MOST_CONNECTIONS = 1024 * 1024, 100, 128
_BODY_S, _RETRY_S = 30.0, 1.0
_LEAST_TOKEN, _LONGEST_SOURCE = 16, 128


class _Answer(Exception):
    """What a client is told in place of a receipt."""

    def __init__(self, status: int, error: str, *, retry_s: float | None = None, **more: Any) -> None:
        super().__init__()
        headers = {} if retry_s is None else {"Retry-After": str(math.ceil(retry_s))}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.response = JSONResponse({"error": error, **more}, status, headers)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and to whom an endpoint listens.

    Attributes:
        listen: `host:port`; port 0 picks one.
        token_file: with the bearer token that every request must have; None: this machine's user alone is answered.
        tls_cert, tls_key: PEM files; None: in the clear.
        insecure: on other addresses than this machine's own without a token and TLS, too.
        most_bytes: of a request's body.
    """

    listen: str = "127.0.0.1:7490"
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    most_bytes: int = MOST_BYTES
    token: bytes = field(default=b"", init=False, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SpecError("TLS needs both: --tls-cert and --tls-key")
        if not is_loopback(self.listen) and not self.insecure and (self.token_file is None or self.tls_cert is None):
            raise SpecError(
                f"listening on {self.listen}, which other machines reach, needs --token-file, --tls-cert and --tls-key; or "
                "--insecure, and then anybody may bring records"
            )
        if self.token_file is not None:
            object.__setattr__(self, "token", _token(self.token_file))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            SpecError: there are none.
        """
        return place_of(self.listen, "--listen", listen=True)


def _token(path: Path) -> bytes:
    """What stands in a file, without blanks around it."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise SpecError(f"cannot read the token in {path}: {error.strerror}") from None
    if len(token) < _LEAST_TOKEN:
        raise SpecError(
            f"the token in {path} must have {_LEAST_TOKEN} characters at least: openssl rand -hex 32 > {path}"
        )
    return token


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What answers requests.

    Attributes:
        sinks: where records go.
        listening: to whom it listens.
    """

    sinks: Sinks
    listening: Listening

    @property
    def app(self) -> Starlette:
        """For a server of ASGI."""
        return Starlette(routes=[Route("/records", self.records, methods=["POST"])])

    async def records(self, request: Request) -> Response:
        """Take records in; every answer but 200 says that none was taken, or that the learner is away."""
        try:
            await self._require_known(request)
            source, positions = _named(request)
            records = _records(await self._body(request))
            if positions is not None and len(positions) == 1:
                positions = range(positions[0], positions[0] + len(records))
            if positions is not None and len(positions) != len(records):
                raise _Answer(400, f"positions must be one, or one for each of {len(records)} records")
            taken = await self.sinks.take(source, records, positions)
        except _Answer as answer:
            return answer.response
        except ClientDisconnect:
            return Response(status_code=400)
        except SottovoceError as error:
            return _unfed(error)
        except Refused as refused:
            return _refused(refused).response
        except Full:
            status = 429 if self.sinks.when_full == "reject" else 503
            return _Answer(status, "too many records wait: none of these was taken", retry_s=_RETRY_S).response
        except Exception as error:  # noqa: BLE001 - its text may quote a record
            log.error("bug", **failure(error))
            return _Answer(500, "a bug: see the feeder's log").response
        return JSONResponse({"records": len(records), "new": taken.new, "positions": [taken.first, taken.last]})

    async def _require_known(self, request: Request) -> None:
        """Who asks, and that no page in a browser does.

        Raises:
            _Answer: it is somebody else.
        """
        if token := self.listening.token:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token):
                raise _Answer(401, "a bearer token is needed")
        elif is_loopback(self.listening.listen) and request.client is not None:
            host, port = request.client
            peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
            if not await asyncio.to_thread(of_this_user, peer):
                raise _Answer(403, "only the user who runs this feeder is answered: give it a --token-file for others")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _Answer(415, "records are JSON: Content-Type: application/json")
        if "idempotency-key" in request.headers:
            raise _Answer(
                400, "keys are not remembered here: give source and positions, and what is sent again is learned once"
            )

    async def _body(self, request: Request) -> bytes:
        """All of it.

        Raises:
            _Answer: it is too long, or takes too long.
        """
        most, found = self.listening.most_bytes, bytearray()
        too_long = _Answer(413, f"a request has at most {most:,} bytes: send fewer records at a time")
        said = request.headers.get("content-length", "0")
        if said.isdigit() and int(said) > most:
            raise too_long
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    found += part
                    if len(found) > most:
                        raise too_long
        except TimeoutError:
            raise _Answer(408, f"the body must come within {_BODY_S:.0f} s") from None
        return bytes(found)


def _named(request: Request) -> tuple[str, Sequence[int] | None]:
    """The source that a request names, empty for none, and positions.

    Raises:
        _Answer: they are none.
    """
    query = request.query_params
    if unknown := query.keys() - {"source", "positions"}:
        raise _Answer(400, f"a request may have source and positions in its query, and has {len(unknown)} more")
    source = query.get("source", "")
    if len(source) > _LONGEST_SOURCE or not source.isprintable():
        raise _Answer(400, f"a source has at most {_LONGEST_SOURCE} printable characters")
    if "positions" not in query:
        return source, None
    given = query["positions"].split(",")
    if not all(each.isascii() and each.isdigit() and len(each) < 20 and int(each) < 2**62 for each in given):
        raise _Answer(400, "positions must be whole numbers from 0, with commas between them")
    return source, [int(each) for each in given]


def _records(body: bytes) -> Sequence[Mapping[str, Any]]:
    """The records of a request.

    Raises:
        _Answer: it has none.
    """
    try:
        found = json_of(body)
    except Unfit as why:
        raise _Answer(400, f"a request is a JSON object, or an array of them: {why}") from None
    records = found if isinstance(found, list) else [found]
    for number, each in enumerate(records):
        if not isinstance(each, Mapping):
            raise _Answer(400, f"record {number} (counted from 0) is no JSON object")
    if not records:
        raise _Answer(400, "a request has a record at least")
    return records


def _refused(refused: Refused) -> _Answer:
    """Which records do not fit, and why."""
    reasons = dict(sorted(refused.reasons.items()))
    number, why = next(iter(reasons.items()))
    more = "" if len(reasons) == 1 else f", and {len(reasons) - 1} more do not fit"
    listed = {str(each): reasons[each] for each in list(reasons)[:MOST_REASONS]}
    return _Answer(400, f"record {number} (counted from 0): {why}{more}; none was taken", refused=listed)


def _unfed(error: SottovoceError) -> Response:
    """Why records were not fed."""
    if isinstance(error, Unavailable | NotReady):
        text = "the learner is away, or in no run: it may have taken these records. With source and positions, send them again"
        return _Answer(503, text, retry_s=5.0).response
    if isinstance(error, DataError | RemoteProtocolError):  # the latter is the learner's, as of too many sources
        return _Answer(400, str(error)).response
    log.error("records are not fed", reason=str(error))
    return _Answer(500, "the feeder cannot feed: see its log").response


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Listen while the block lasts; gives the address, and what serves.

    Raises:
        SpecError: it cannot listen there, or the files for TLS cannot be used.
    """
    at = endpoint.listening
    try:
        config = uvicorn.Config(
            endpoint.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=math.ceil(endpoint.sinks.target.patience_s),
            ssl_certfile=at.tls_cert,
            ssl_keyfile=at.tls_key,
        )
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"the files for TLS cannot be used: {error.strerror or type(error).__name__}") from None
    host, port = at.address
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family)
    except OSError as error:
        raise SpecError(f"cannot listen on {at.listen}: {error.strerror}") from None
    with listener:
        server = _Server(config)
        async with Tasks() as tasks:
            task = tasks.start(server.serve(sockets=[listener]))
            scheme = "http" if at.tls_cert is None else "https"
            shown = f"[{host}]" if ":" in host else host
            try:
                yield f"{scheme}://{shown}:{listener.getsockname()[1]}/records", task
            finally:
                server.should_exit = True
                await asyncio.shield(task)


def serve(target: Target, terms: Terms, listening: Listening, when_full: WhenFull, tell: Callable[[str], None]) -> Work:
    """The work of an endpoint.

    Args:
        target: the learner; its source is taken where a client names none.
        terms: what a record is.
        listening: where and to whom it listens.
        when_full: whether a request that finds no room waits or is refused.
        tell: is told the address.
    """

    async def work(account: Account, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            sinks = await unless(stop, stack.enter_async_context(Sinks(target, terms, account, when_full)))
            if sinks is None:
                return
            address, task = await stack.enter_async_context(serving(Endpoint(sinks, listening)))
            tell(address)
            async with Tasks() as tasks:
                await asyncio.wait([task, tasks.start(stop.wait())], return_when=asyncio.FIRST_COMPLETED)

    return work
