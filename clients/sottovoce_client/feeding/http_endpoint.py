"""Records by HTTP: `POST /records` answers when they are in the learner's keeping.

Each source that clients name is a connection of its own, which feeds in the order in which records came.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sottovoce_client.feeding.broker import SourceConfig, read_secret
from sottovoce_client.feeding.feeder import MAX_WAITING_MESSAGES, FeedOptions, FeedTarget, run_unless_stopped, watch_run
from sottovoce_client.feeding.progress import FeedCounters, FeedTask
from sottovoce_client.feeding.records import PositionCounter, RecordConverter, UnfitRecordError, parse_json
from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_core.errors import (
    DataError,
    FailedPrecondition,
    RemoteProtocolError,
    SottovoceError,
    SpecError,
    Unavailable,
)
from sottovoce_rpc.addresses import is_loopback, is_same_user
from sottovoce_rpc.logs import describe_failure
from sottovoce_rpc.tasks import Tasks, run_in_background

log = structlog.get_logger()

MAX_SOURCES = 64
"""That are connected at once."""
_MAX_REASONS, _MAX_CONNECTIONS = 100, 128
_BODY_TIMEOUT_S, _RETRY_INTERVAL_S, _STATUS_INTERVAL_S = 30.0, 1.0, 1.0
_MIN_TOKEN_CHARS, _MAX_SOURCE_CHARS = 16, 128


class _Answer(Exception):
    """What a client is told in place of a receipt."""

    def __init__(self, status: int, error: str, *, retry_s: float | None = None, **more: Any) -> None:
        super().__init__()
        headers = {} if retry_s is None else {"Retry-After": str(math.ceil(retry_s))}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.response = JSONResponse({"error": error, **more}, status, headers)


@dataclass(eq=False, slots=True)
class _Sink:
    """One source, connected."""

    connection: connect_learner
    learner: ConnectedLearner
    sieve: RecordConverter
    last: int
    users: int = 0


class _Endpoint:
    """What answers requests and feeds their records; `async with` reaches the learner and closes all connections.

    Args:
        target: the learner; its own source is taken where a client names none.
        terms: what a record is. One that does not fit goes back to its client.
        account: what becomes of them is counted here.
        at: the URL, with its settings.
        token: that every request must have; empty: this machine's user alone is answered.
    """

    def __init__(
        self, target: FeedTarget, terms: FeedOptions, account: FeedCounters, at: SourceConfig, token: str
    ) -> None:
        self._target, self._terms, self._account, self._at, self._token = target, terms, account, at, token
        self._sinks = dict[str, _Sink]()
        """By source; the last one in order was used last."""
        self._turn, self._less, self._tasks = asyncio.Lock(), asyncio.Condition(), Tasks()

    async def __aenter__(self) -> _Endpoint:
        """Reach the learner.

        Raises:
            SottovoceError: as `connect_learner`, and where a map does not fit.
        """
        self._account.refusal_destination = "sent back"
        await self._connect(self._target.source)
        self._tasks.start(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()
        for source in list(self._sinks):
            await self._close(source)

    async def _look(self) -> None:
        """How the learner stands, run after run."""
        while True:
            for sink in list(self._sinks.values())[-1:]:
                try:
                    await watch_run(sink.learner, self._account)
                except FailedPrecondition:
                    self._account.status = None
            await asyncio.sleep(_STATUS_INTERVAL_S)

    # ---- requests ----------------------------------------------------------------------------------------------------

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
            return JSONResponse(await self._take(source or self._target.source, records, positions))
        except _Answer as answer:
            return answer.response
        except ClientDisconnect:
            return Response(status_code=400)
        except SottovoceError as error:
            return _unfed(error)
        except Exception as error:  # noqa: BLE001 - its text may quote a record
            log.error("bug", **describe_failure(error))
            return _Answer(500, "a bug: see the feeder's log").response

    async def _require_known(self, request: Request) -> None:
        """Who asks, and that no page in a browser does.

        Raises:
            _Answer: it is somebody else.
        """
        if self._token:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
                raise _Answer(401, "a bearer token is needed")
        elif is_loopback(self._at.addresses[0]) and request.client is not None:
            host, port = request.client
            peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
            if not await asyncio.to_thread(is_same_user, peer):
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
        most, found = self._at.settings["max-bytes"], bytearray()
        too_long = _Answer(413, f"a request has at most {most:,} bytes: send fewer records at a time")
        said = request.headers.get("content-length", "0")
        if said.isdigit() and int(said) > most:
            raise too_long
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    found += part
                    if len(found) > most:
                        raise too_long
        except TimeoutError:
            raise _Answer(408, f"the body must come within {_BODY_TIMEOUT_S:.0f} s") from None
        return bytes(found)

    # ---- feeding -----------------------------------------------------------------------------------------------------

    async def _take(
        self, source: str, records: Sequence[Mapping[str, Any]], positions: Sequence[int] | None
    ) -> dict[str, Any]:
        """Feed records, all or none; the receipt comes when they are in keeping.

        Args:
            source: under which they are counted.
            records: one at least.
            positions: where each stands, ascending. None: a field says it, or they are counted on.

        Raises:
            _Answer: some do not fit, or there is no room for them, now or within patience.
            Unavailable, FailedPrecondition: the learner is away; it may have taken them in.
        """
        sink = await self._connected(source)
        sink.users += 1
        try:
            encoded, positions = self._fitting(sink, records, positions)
            async with self._room(len(records)):
                # nothing is awaited between the choice of positions and their turn in `feed`
                first = sink.last + 1
                places = list(positions or range(first, first + len(records)))
                sink.last = max(sink.last, places[-1])
                new = await sink.learner.feed(encoded, positions=places)
        except (Unavailable, FailedPrecondition):
            if self._sinks.get(source) is sink:  # the next request makes another connection
                await self._close(source)
            raise
        finally:
            sink.users -= 1
        self._account.records_fed += new
        self._account.duplicate_count += len(records) - new
        return {"records": len(records), "new": new, "positions": [places[0], places[-1]]}

    def _fitting(
        self, sink: _Sink, records: Sequence[Mapping[str, Any]], positions: Sequence[int] | None
    ) -> tuple[Any, Sequence[int] | None]:
        """Records as they are learned, and their positions where these are said.

        Raises:
            _Answer: some do not fit; by their number, why.
        """
        by_field = positions is None and bool(self._terms.position)
        numbered = PositionCounter(self._terms.position if by_field else "", -1)
        sifted = sink.sieve.convert([numbered.number_message(each) for each in records], -1)
        if reasons := sifted.refusals:
            self._account.refusals.update(reasons.values())
            number, why = next(iter(reasons.items()))
            more = "" if len(reasons) == 1 else f", and {len(reasons) - 1} more do not fit"
            listed = {str(each): reasons[each] for each in list(reasons)[:_MAX_REASONS]}
            raise _Answer(400, f"record {number} (counted from 0): {why}{more}; none was taken", refused=listed)
        assert sifted.fitting_records is not None  # noqa: S101 - all of one record at least
        encoded, said = sifted.fitting_records
        return encoded, said if by_field else positions

    @asynccontextmanager
    async def _room(self, records: int) -> AsyncIterator[None]:
        """Have room for records, as soon as fewer wait for their receipts; one request alone may be of any size.

        Raises:
            _Answer: there is none.
        """

        def there_is() -> bool:
            return (
                self._account.messages_waiting == 0 or self._account.messages_waiting + records <= MAX_WAITING_MESSAGES
            )

        if not there_is():
            if self._at.settings["when-full"] == "reject":
                raise self._full()
            try:
                async with asyncio.timeout(self._target.patience_s), self._less:
                    await self._less.wait_for(there_is)
            except TimeoutError:
                raise self._full() from None
        self._account.messages_waiting += records
        try:
            yield
        finally:
            self._account.messages_waiting -= records
            async with self._less:
                self._less.notify_all()

    def _full(self) -> _Answer:
        status = 429 if self._at.settings["when-full"] == "reject" else 503
        return _Answer(status, "too many records wait: none of these was taken", retry_s=_RETRY_INTERVAL_S)

    # ---- connections -------------------------------------------------------------------------------------------------

    async def _connected(self, source: str) -> _Sink:
        """At once, or after those who came before.

        Raises:
            Unavailable: the learner does not answer within patience; and as `connect_learner`.
        """
        if source not in self._sinks:
            try:
                async with asyncio.timeout(self._target.patience_s), self._turn:
                    if source not in self._sinks:
                        await self._connect(source)
            except TimeoutError:
                raise Unavailable(f"the learner at {self._target.address} does not answer") from None
        self._sinks[source] = sink = self._sinks.pop(source)
        return sink

    async def _connect(self, source: str) -> None:
        """Under a name, in place of the one that was used least recently where there are too many."""
        if len(self._sinks) >= MAX_SOURCES:
            idle = next((each for each, sink in self._sinks.items() if not sink.users), None)
            if idle is None:
                raise self._full()
            await self._close(idle)
        connection = self._target.connect(source, self._account)
        learner = await connection.__aenter__()
        try:
            sieve = self._terms.build_converter(learner)
        except SottovoceError:
            await connection.__aexit__(None, None, None)
            raise
        self._account.run_id = learner.run_id
        self._account.sources.add(source)
        self._sinks[source] = _Sink(connection, learner, sieve, learner.position)

    async def _close(self, source: str) -> None:
        await self._sinks.pop(source).connection.__aexit__(None, None, None)


def _named(request: Request) -> tuple[str, Sequence[int] | None]:
    """The source that a request names, empty for none, and positions.

    Raises:
        _Answer: they are none.
    """
    query = request.query_params
    if unknown := query.keys() - {"source", "positions"}:
        raise _Answer(400, f"a request may have source and positions in its query, and has {len(unknown)} more")
    source = query.get("source", "")
    if len(source) > _MAX_SOURCE_CHARS or not source.isprintable():
        raise _Answer(400, f"a source has at most {_MAX_SOURCE_CHARS} printable characters")
    if "positions" not in query:
        return source, None
    given = query["positions"].split(",")
    if not all(each.isascii() and each.isdigit() and len(each) < 20 and int(each) < 2**62 for each in given):
        raise _Answer(400, "positions must be whole numbers from 0, with commas between them")
    positions = [int(each) for each in given]
    if positions != sorted(set(positions)):
        raise _Answer(400, "positions must be whole numbers, ascending from 0")
    return source, positions


def _records(body: bytes) -> Sequence[Mapping[str, Any]]:
    """The records of a request.

    Raises:
        _Answer: it has none.
    """
    try:
        found = parse_json(body)
    except UnfitRecordError as why:
        raise _Answer(400, f"a request is a JSON object, or an array of them: {why}") from None
    records = found if isinstance(found, list) else [found]
    for number, each in enumerate(records):
        if not isinstance(each, Mapping):
            raise _Answer(400, f"record {number} (counted from 0) is no JSON object")
    if not records:
        raise _Answer(400, "a request has a record at least")
    return records


def _unfed(error: SottovoceError) -> Response:
    """Why records were not fed."""
    if isinstance(error, Unavailable | FailedPrecondition):
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


def _configured(app: Starlette, at: SourceConfig, patience_s: float) -> uvicorn.Config:
    """Settings of the server.

    Raises:
        SpecError: the files for TLS cannot be used.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=math.ceil(patience_s),
        ssl_certfile=at.credentials.certificate,
        ssl_keyfile=at.credentials.key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"the files for TLS cannot be used: {error.strerror or type(error).__name__}") from None
    return config


def _listener(at: SourceConfig) -> socket.socket:
    """A socket that listens.

    Raises:
        SpecError: it cannot.
    """
    ((host, port),) = at.servers
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise SpecError(f"cannot listen on {at.addresses[0]}: {error.strerror}") from None


def serve(
    at: SourceConfig,
    target: FeedTarget,
    terms: FeedOptions,
    tell: Callable[[str], None],
    *,
    token_file: Path | None = None,
    insecure: bool = False,
) -> FeedTask:
    """The work of an endpoint.

    Args:
        at: where it listens, with its certificate; port 0 picks one.
        target: the learner; its source is taken where a client names none.
        terms: what a record is.
        tell: is told the address.
        token_file: with the bearer token that every request must have; None: this machine's user alone is answered.
        insecure: listen on other addresses than this machine's own without a token and TLS, too.

    Raises:
        SpecError: the options do not fit one another, or the token is too short.
        FailedPrecondition: there is no token.
    """
    (listen,), tls = at.addresses, at.credentials.certificate is not None
    if tls != (at.scheme == "https"):
        raise SpecError(f"https:// needs --tls-cert and --tls-key, and http:// has neither, got {at.scheme}://")
    if not is_loopback(listen) and not insecure and (token_file is None or not tls):
        raise SpecError(
            f"listening on {listen}, which other machines reach, needs --token-file, --tls-cert and --tls-key; or "
            "--insecure, and then anybody may bring records"
        )
    token = "" if token_file is None else read_secret(token_file, "token").strip()
    if token_file is not None and len(token) < _MIN_TOKEN_CHARS:
        raise SpecError(
            f"the token in {token_file} must have {_MIN_TOKEN_CHARS} characters at least: openssl rand -hex 32 > {token_file}"
        )

    async def work(account: FeedCounters, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            endpoint = await run_unless_stopped(
                stop, stack.enter_async_context(_Endpoint(target, terms, account, at, token))
            )
            if endpoint is None:
                return
            app = Starlette(routes=[Route("/records", endpoint.records, methods=["POST"])])
            server = _Server(_configured(app, at, target.patience_s))
            listener = stack.enter_context(_listener(at))

            async def ending() -> None:
                await stop.wait()
                server.should_exit = True

            tell(f"{at.scheme}://{listen.rpartition(':')[0]}:{listener.getsockname()[1]}/records")
            async with run_in_background(ending()):
                await server.serve(sockets=[listener])

    return work
