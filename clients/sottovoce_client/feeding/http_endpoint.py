"""HTTP endpoint for records: `POST /records` answers when the learner has stored them.

Each source that clients name is its own connection, which feeds records in order of arrival.
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
"""Maximum number of simultaneously connected HTTP sources."""
_MAX_REASONS, _MAX_CONNECTIONS = 100, 128
_BODY_TIMEOUT_S, _RETRY_INTERVAL_S, _STATUS_INTERVAL_S = 30.0, 1.0, 1.0
_MIN_TOKEN_CHARS, _MAX_SOURCE_CHARS = 16, 128


class _ErrorResponse(Exception):
    """Error response to a client."""

    def __init__(self, status: int, error: str, *, retry_s: float | None = None, **more: Any) -> None:
        super().__init__()
        headers = {} if retry_s is None else {"Retry-After": str(math.ceil(retry_s))}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.response = JSONResponse({"error": error, **more}, status, headers)


@dataclass(eq=False, slots=True)
class _SourceConnection:
    """Connected source."""

    connection: connect_learner
    learner: ConnectedLearner
    converter: RecordConverter
    last_position: int
    request_count: int = 0


class _Endpoint:
    """Handler of requests, which feeds their records; `async with` connects to the learner and closes all connections.

    Args:
        target: the learner; its source is used where a client names none.
        options: conversion of records. An unfit record is returned to its client.
        counters: counts of records, updated here.
        source_config: URL with its settings.
        token: token that every request must have; empty: only requests of this machine's user are answered.
    """

    def __init__(
        self, target: FeedTarget, options: FeedOptions, counters: FeedCounters, source_config: SourceConfig, token: str
    ) -> None:
        self._target, self._options, self._counters, self._source_config, self._token = (
            target,
            options,
            counters,
            source_config,
            token,
        )
        self._connections = dict[str, _SourceConnection]()
        """Connected sources by name; the last one was used last."""
        self._connect_lock, self._space_condition, self._tasks = asyncio.Lock(), asyncio.Condition(), Tasks()

    async def __aenter__(self) -> _Endpoint:
        """Connect to the learner.

        Raises:
            SottovoceError: as of `connect_learner`, and where a map does not fit.
        """
        self._counters.refusal_destination = "sent back"
        await self._connect(self._target.source)
        self._tasks.start(self._watch_runs())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()
        for source in list(self._connections):
            await self._close(source)

    async def _watch_runs(self) -> None:
        """Watch the learner's status, run after run."""
        while True:
            for source_connection in list(self._connections.values())[-1:]:
                try:
                    await watch_run(source_connection.learner, self._counters)
                except FailedPrecondition:
                    self._counters.status = None
            await asyncio.sleep(_STATUS_INTERVAL_S)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def records(self, request: Request) -> Response:
        """Accept records; every response except 200 means that none was accepted, or that the learner is unreachable."""
        try:
            await self._require_authorised(request)
            source, positions = _parse_query(request)
            records = _parse_records(await self._read_body(request))
            if positions is not None and len(positions) == 1:
                positions = range(positions[0], positions[0] + len(records))
            if positions is not None and len(positions) != len(records):
                raise _ErrorResponse(400, f"positions must be one, or one for each of {len(records)} records")
            return JSONResponse(await self._feed_records(source or self._target.source, records, positions))
        except _ErrorResponse as answer:
            return answer.response
        except ClientDisconnect:
            return Response(status_code=400)
        except SottovoceError as error:
            return _build_error_response(error)
        except Exception as error:  # noqa: BLE001 - its text may quote a record
            log.error("bug", **describe_failure(error))
            return _ErrorResponse(500, "a bug: see the feeder's log").response

    async def _require_authorised(self, request: Request) -> None:
        """Authenticate a request, and reject requests of web pages.

        Raises:
            _Answer: it is not authorised.
        """
        if self._token:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
                raise _ErrorResponse(401, "a bearer token is needed")
        elif is_loopback(self._source_config.addresses[0]) and request.client is not None:
            host, port = request.client
            peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
            if not await asyncio.to_thread(is_same_user, peer):
                raise _ErrorResponse(
                    403, "only the user of this feeder is answered: start it with --token-file for others"
                )
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _ErrorResponse(415, "records are JSON: Content-Type: application/json")
        if "idempotency-key" in request.headers:
            raise _ErrorResponse(
                400,
                "idempotency keys are not supported: give source and positions, and repeated records are learned once",
            )

    async def _read_body(self, request: Request) -> bytes:
        """Return the body.

        Raises:
            _Answer: it is too long, or takes too long.
        """
        max_bytes, found = self._source_config.settings["max-bytes"], bytearray()
        too_long = _ErrorResponse(413, f"a request has at most {max_bytes:,} bytes: send fewer records at a time")
        content_length = request.headers.get("content-length", "0")
        if content_length.isdigit() and int(content_length) > max_bytes:
            raise too_long
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    found += part
                    if len(found) > max_bytes:
                        raise too_long
        except TimeoutError:
            raise _ErrorResponse(408, f"the body must come within {_BODY_TIMEOUT_S:.0f} s") from None
        return bytes(found)

    # ---- feeding -----------------------------------------------------------------------------------------------------

    async def _feed_records(
        self, source: str, records: Sequence[Mapping[str, Any]], positions: Sequence[int] | None
    ) -> dict[str, Any]:
        """Feed all or none of the records; return the receipt when they are stored.

        Args:
            source: name under which they are counted.
            records: at least one.
            positions: their positions, ascending. None: they are in a field, or numbered consecutively.

        Raises:
            _Answer: some do not fit, or there is no space for them, now or within the timeout.
            Unavailable, FailedPrecondition: the learner is unreachable; it may have stored them.
        """
        source_connection = await self._get_connection(source)
        source_connection.request_count += 1
        try:
            encoded, positions = self._encode(source_connection, records, positions)
            async with self._reserve_space(len(records)):
                # no await between the choice of positions and their place in the queue of `feed`
                first = source_connection.last_position + 1
                places = list(positions or range(first, first + len(records)))
                source_connection.last_position = max(source_connection.last_position, places[-1])
                new = await source_connection.learner.feed(encoded, positions=places)
        except (Unavailable, FailedPrecondition):
            if self._connections.get(source) is source_connection:  # the next request opens a new connection
                await self._close(source)
            raise
        finally:
            source_connection.request_count -= 1
        self._counters.records_fed += new
        self._counters.duplicate_count += len(records) - new
        return {"records": len(records), "new": new, "positions": [places[0], places[-1]]}

    def _encode(
        self,
        source_connection: _SourceConnection,
        records: Sequence[Mapping[str, Any]],
        positions: Sequence[int] | None,
    ) -> tuple[Any, Sequence[int] | None]:
        """Return encoded records, and their positions where these are given.

        Raises:
            _Answer: some do not fit; with reasons by number.
        """
        by_field = positions is None and bool(self._options.position)
        counter = PositionCounter(self._options.position if by_field else "", -1)
        converted = source_connection.converter.convert([counter.number_message(each) for each in records], -1)
        if reasons := converted.refusals:
            self._counters.refusals.update(reasons.values())
            number, reason = next(iter(reasons.items()))
            more = "" if len(reasons) == 1 else f", and {len(reasons) - 1} more do not fit"
            listed = {str(each): reasons[each] for each in list(reasons)[:_MAX_REASONS]}
            raise _ErrorResponse(
                400, f"record {number} (counted from 0): {reason}{more}; none was taken", refused=listed
            )
        assert converted.fitting_records is not None  # noqa: S101 - all of one record at least
        encoded, content_length = converted.fitting_records
        return encoded, content_length if by_field else positions

    @asynccontextmanager
    async def _reserve_space(self, records: int) -> AsyncIterator[None]:
        """Reserve space for records, as soon as fewer wait for receipts; a single request may have any size.

        Raises:
            _Answer: there is none.
        """

        def has_space() -> bool:
            return (
                self._counters.messages_waiting == 0
                or self._counters.messages_waiting + records <= MAX_WAITING_MESSAGES
            )

        if not has_space():
            if self._source_config.settings["when-full"] == "reject":
                raise self._build_full_response()
            try:
                async with asyncio.timeout(self._target.patience_s), self._space_condition:
                    await self._space_condition.wait_for(has_space)
            except TimeoutError:
                raise self._build_full_response() from None
        self._counters.messages_waiting += records
        try:
            yield
        finally:
            self._counters.messages_waiting -= records
            async with self._space_condition:
                self._space_condition.notify_all()

    def _build_full_response(self) -> _ErrorResponse:
        status = 429 if self._source_config.settings["when-full"] == "reject" else 503
        return _ErrorResponse(status, "too many records wait: none of these was taken", retry_s=_RETRY_INTERVAL_S)

    # ---- connections -------------------------------------------------------------------------------------------------

    async def _get_connection(self, source: str) -> _SourceConnection:
        """Return the connection of a source, opened in order of the requests.

        Raises:
            Unavailable: the learner does not answer within the timeout; and as of `connect_learner`.
        """
        if source not in self._connections:
            try:
                async with asyncio.timeout(self._target.patience_s), self._connect_lock:
                    if source not in self._connections:
                        await self._connect(source)
            except TimeoutError:
                raise Unavailable(f"the learner at {self._target.address} does not answer") from None
        self._connections[source] = source_connection = self._connections.pop(source)
        return source_connection

    async def _connect(self, source: str) -> None:
        """Connect a source, and disconnect the least recently used one where there are too many."""
        if len(self._connections) >= MAX_SOURCES:
            idle = next(
                (each for each, source_connection in self._connections.items() if not source_connection.request_count),
                None,
            )
            if idle is None:
                raise self._build_full_response()
            await self._close(idle)
        connection = self._target.connect(source, self._counters)
        learner = await connection.__aenter__()
        try:
            converter = self._options.build_converter(learner)
        except SottovoceError:
            await connection.__aexit__(None, None, None)
            raise
        self._counters.run_id = learner.run_id
        self._counters.sources.add(source)
        self._connections[source] = _SourceConnection(connection, learner, converter, learner.position)

    async def _close(self, source: str) -> None:
        await self._connections.pop(source).connection.__aexit__(None, None, None)


def _parse_query(request: Request) -> tuple[str, Sequence[int] | None]:
    """Return the source that a request names, empty for none, and positions.

    Raises:
        _Answer: they are not valid.
    """
    query = request.query_params
    if unknown := query.keys() - {"source", "positions"}:
        raise _ErrorResponse(400, f"a request may have source and positions in its query, and has {len(unknown)} more")
    source = query.get("source", "")
    if len(source) > _MAX_SOURCE_CHARS or not source.isprintable():
        raise _ErrorResponse(400, f"a source has at most {_MAX_SOURCE_CHARS} printable characters")
    if "positions" not in query:
        return source, None
    given = query["positions"].split(",")
    if not all(each.isascii() and each.isdigit() and len(each) < 20 and int(each) < 2**62 for each in given):
        raise _ErrorResponse(400, "positions must be whole numbers from 0, with commas between them")
    positions = [int(each) for each in given]
    if positions != sorted(set(positions)):
        raise _ErrorResponse(400, "positions must be whole numbers, ascending from 0")
    return source, positions


def _parse_records(body: bytes) -> Sequence[Mapping[str, Any]]:
    """Return the records of a request.

    Raises:
        _Answer: it has none.
    """
    try:
        found = parse_json(body)
    except UnfitRecordError as reason:
        raise _ErrorResponse(400, f"a request is a JSON object, or an array of them: {reason}") from None
    records = found if isinstance(found, list) else [found]
    for number, each in enumerate(records):
        if not isinstance(each, Mapping):
            raise _ErrorResponse(400, f"record {number} (counted from 0) is not a JSON object")
    if not records:
        raise _ErrorResponse(400, "a request must have at least one record")
    return records


def _build_error_response(error: SottovoceError) -> Response:
    """Convert an error of feeding to a response."""
    if isinstance(error, Unavailable | FailedPrecondition):
        text = (
            "the learner is unreachable, or in no run: it may have stored these records. Send them again with positions"
        )
        return _ErrorResponse(503, text, retry_s=5.0).response
    if isinstance(error, DataError | RemoteProtocolError):  # the latter is the learner's, such as too many sources
        return _ErrorResponse(400, str(error)).response
    log.error("records are not fed", reason=str(error))
    return _ErrorResponse(500, "the feeder cannot feed: see its log").response


class _Server(uvicorn.Server):
    """Server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _build_server_config(app: Starlette, source_config: SourceConfig, patience_s: float) -> uvicorn.Config:
    """Build the settings of the server.

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
        ssl_certfile=source_config.credentials.certificate,
        ssl_keyfile=source_config.credentials.key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"the files for TLS cannot be used: {error.strerror or type(error).__name__}") from None
    return config


def _open_socket(source_config: SourceConfig) -> socket.socket:
    """Open a listening socket.

    Raises:
        SpecError: it cannot.
    """
    ((host, port),) = source_config.servers
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise SpecError(f"cannot listen on {source_config.addresses[0]}: {error.strerror}") from None


def serve(
    source_config: SourceConfig,
    target: FeedTarget,
    options: FeedOptions,
    notify: Callable[[str], None],
    *,
    token_file: Path | None = None,
    insecure: bool = False,
) -> FeedTask:
    """Build the task of an endpoint.

    Args:
        source_config: address to listen on, with its certificate; port 0 picks a free one.
        target: the learner; its source is used where a client names none.
        options: conversion of records.
        notify: receives the address.
        token_file: file of the bearer token that every request must have; None: only requests of this machine's user are
            answered.
        insecure: also listen on addresses that other machines reach without a token and TLS.

    Raises:
        SpecError: the options do not fit one another, or the token is too short.
        FailedPrecondition: there is no token.
    """
    (listen,), tls = source_config.addresses, source_config.credentials.certificate is not None
    if tls != (source_config.scheme == "https"):
        raise SpecError(
            f"https:// needs --tls-cert and --tls-key, and http:// has neither, got {source_config.scheme}://"
        )
    if not is_loopback(listen) and not insecure and (token_file is None or not tls):
        raise SpecError(
            f"listening on {listen}, which other machines reach, needs --token-file, --tls-cert and --tls-key; or "
            "--insecure, and then any client may send records"
        )
    token = "" if token_file is None else read_secret(token_file, "token").strip()
    if token_file is not None and len(token) < _MIN_TOKEN_CHARS:
        raise SpecError(
            f"the token in {token_file} must have at least {_MIN_TOKEN_CHARS} characters: openssl rand -hex 32 > {token_file}"
        )

    async def run_endpoint(counters: FeedCounters, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            endpoint = await run_unless_stopped(
                stop, stack.enter_async_context(_Endpoint(target, options, counters, source_config, token))
            )
            if endpoint is None:
                return
            app = Starlette(routes=[Route("/records", endpoint.records, methods=["POST"])])
            server = _Server(_build_server_config(app, source_config, target.patience_s))
            listener = stack.enter_context(_open_socket(source_config))

            async def request_exit() -> None:
                await stop.wait()
                server.should_exit = True

            notify(f"{source_config.scheme}://{listen.rpartition(':')[0]}:{listener.getsockname()[1]}/records")
            async with run_in_background(request_exit()):
                await server.serve(sockets=[listener])

    return run_endpoint
