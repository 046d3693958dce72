"""A gRPC server with health checking and reflection, and the one ladder by which every service ends.

The ladder: a signal (or the end of standard input) asks it to stop; the service drains within `_DRAIN_TIMEOUT_S`; calls still open
get `_GRACE_TIMEOUT_S` more; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_rpc.access import AccessInterceptor, Refusals
from sottovoce_rpc.addresses import listen_addresses, require_address
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import explain_handshake_failure, explain_unreachable
from sottovoce_rpc.logs import hide_error_texts
from sottovoce_rpc.principals import Role
from sottovoce_rpc.tasks import Tasks, run_cleanup, run_in_background

log = structlog.get_logger()

_DRAIN_TIMEOUT_S = 3.0
_GRACE_TIMEOUT_S = 0.5
HELLO_TIMEOUT_S = 10.0
"""For whoever opens a stream to say who it is: one on which nobody speaks is not kept."""
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Bytes of a message where models, records or copies of what was said are carried."""
MAX_OVERHEAD_BYTES = 1024 * 1024
"""Bytes around the numbers of a message, at most: names of fields, of its round and sender, of those who get a copy."""
MAX_CONTROL_BYTES = 8 * 1024 * 1024
"""Bytes of what a coordinator is told: a spec with all edges that it serves has about one million."""
MAX_CONCURRENT_CALLS = 4_096
"""At a time, of one server: gRPC itself bounds neither calls nor connections."""
DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 100, 1_000

T = TypeVar("T")

Channel = grpc.aio.Channel
Options = tuple[tuple[str, int], ...]

SERVER_OPTIONS: Options = (
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message must not become a large one
    ("grpc.so_reuseport", 0),  # else a second server on a port in use would start without an error
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", 10_000),  # a caller that vanished without a word is noticed, too
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # who connects and says nothing costs a descriptor
    ("grpc.max_concurrent_streams", 128),  # of a connection; a caller of ours has one for each service that it talks to
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
)
CHANNEL_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a partition without a reset is noticed only by a ping that nobody answers
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # else up to two minutes, with a service that is back long since
    ("grpc.enable_http_proxy", 0),
)


def limit_message_size(options: Options, max_message_bytes: int) -> Options:
    """The options of a server or a channel where what comes has at most so many bytes."""
    return tuple({**dict(options), "grpc.max_receive_message_length": max_message_bytes}.items())


def open_channel(
    address: str,
    role: Role | None = None,
    name: str = "",
    *,
    credentials: Credentials = NO_IDENTITY,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Channel:
    """A channel to one of our services.

    Args:
        address: where it listens.
        whom: the role of whoever must be there, where this process has an identity.
        name: its name; empty: whoever has that role.
        credentials: of this process.
        max_message: bytes of what is answered.

    Raises:
        SpecError: it is on another machine, and this process has no identity.
        FailedPrecondition: the files of the identity cannot be used.
    """
    return credentials.open_channel(address, role, name, limit_message_size(CHANNEL_OPTIONS, max_message_bytes))


async def wait_until_reachable(
    to: Channel, who: str, seconds: float, notify: Callable[[str, bool], None] | None = None
) -> None:
    """Wait until a service is there.

    Args:
        to: leads to it.
        who: it is, for people.
        seconds: to wait.
        tell: called with why it is not, as soon as that is known, and whether that is for waiting to mend (False), or not (True).

    Raises:
        Unavailable: it is not there by then, and why, as far as that is known.
    """
    try:
        async with asyncio.timeout(seconds), run_in_background(*([] if notify is None else [_wondering(to, notify)])):
            await to.channel_ready()
    except TimeoutError:
        why = explain_handshake_failure(await _why_not(to)) or "is it running, and is the address right?"
        raise Unavailable(f"cannot reach {who} within {seconds:g} s: {why}") from None


async def _wondering(to: Channel, tell: Callable[[str, bool], None]) -> None:
    """Tell each reason once, at the first failure that shows it."""
    told = ""
    while True:
        if (state := to.get_state(try_to_connect=True)) is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            text = await _why_not(to)
            why = explain_handshake_failure(text) or explain_unreachable(text)
            if why not in ("", told):
                told = why
                tell(why, bool(explain_handshake_failure(text)))
        await to.wait_for_state_change(state)


async def _why_not(to: Channel) -> str:
    """How the last try to reach the other end of a channel failed, in gRPC's words; empty: nothing is known."""
    stub: Any = health_pb2_grpc.HealthStub(to)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=HELLO_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    return ""


@dataclass(slots=True)
class RunningServer:
    """A started server and where it listens, and whom it refused."""

    server: grpc.aio.Server
    address: str
    health: health.aio.HealthServicer
    refusals: Refusals

    async def stop(self) -> None:
        """Tell health checkers, let open calls end, then cut them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(_GRACE_TIMEOUT_S)


async def start_server(
    listen: str,
    add: Callable[[grpc.aio.Server], None],
    names: Iterable[str],
    credentials: Credentials = NO_IDENTITY,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> RunningServer:
    """Start a server.

    Args:
        listen: `host:port`; port 0 picks a free one.
        add: registers the servicers.
        names: full names of the services, for health and reflection.
        credentials: of this process.
        max_message: bytes of what it is sent.

    Raises:
        SpecError: other machines can reach the address, and this process has no identity.
        FailedPrecondition: the files of the identity cannot be used.
        Unavailable: the address cannot be listened on.
    """
    secured = credentials.build_server_credentials(require_address(listen, "--listen", allow_port_zero=True))
    access = AccessInterceptor(credentials, max_message_bytes=max_message_bytes, max_request_bytes=MAX_CONTROL_BYTES)
    server = grpc.aio.server(
        interceptors=[access],
        options=limit_message_size(SERVER_OPTIONS, max_message_bytes),
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )
    add(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    services = [*names, ""]
    reflection.enable_server_reflection([*services[:-1], health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    address = listen_on(server, listen, secured)
    credentials.register_server(server, address)
    await server.start()
    for name in services:
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return RunningServer(server, address, checks, access.refusals)


def listen_on(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind a server to an address, with TLS if there are credentials, and return it with its port.

    Raises:
        Unavailable: the address is taken, or not one of this machine's.
    """
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError:
        port = 0
    if port == 0:
        raise Unavailable(f"cannot listen on {listen}: the port is in use, or the host is not this machine's")
    if listen.startswith("unix:"):
        Path(listen.removeprefix("unix:").removeprefix("//")).chmod(0o600)  # for this user alone
        return listen
    address = f"{listen.rsplit(':', 1)[0]}:{port}"
    listen_addresses[server] = address
    return address


def announce(service: str, **facts: str) -> None:
    """One JSON line on standard output: whoever started this process reads where it listens."""
    print(json.dumps({"service": service, **facts}), flush=True)


async def _until_told_to_stop(*, with_stdin: bool = False) -> str:
    """Wait for SIGTERM, SIGINT or (`with_stdin`) the end of standard input; says which. A second signal kills."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[str] = loop.create_future()

    def tell(reason: str) -> None:
        if told.done():
            os._exit(130)
        told.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number.name)
    async with Tasks() as tasks:
        if with_stdin:
            reader = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            ended = tasks.start(reader.read())
            ended.add_done_callback(lambda _: None if told.done() else told.set_result("standard input ended"))
        return await told


async def serve_until_stopped(
    stop: Callable[[str], Coroutine[Any, Any, None]],
    work: Iterable[Coroutine[Any, Any, object]] = (),
    *,
    stop_with_stdin: bool = False,
    drain_timeout_s: float = _DRAIN_TIMEOUT_S,
    log_stop: bool = True,
) -> None:
    """Run a started service: until it is told to stop, or one of its endless works fails; then the ladder.

    Args:
        stop: drains and closes the service, and is told why it ends.
        work: what it does in the meantime.
        with_stdin: stop when standard input ends, so that no service outlives whoever started it.
        drain_s: how long `stop` may take; then it is cut off.
        logged: whether the log says that it ends, and why.

    Raises:
        SottovoceError: what a work failed with.
    """
    gc.freeze()  # what imports made stays for good: no later collection need look at it again
    hide_error_texts(asyncio.get_running_loop())
    async with Tasks() as signals:  # ended last: a second signal during the drain must still kill
        told = signals.start(_until_told_to_stop(with_stdin=stop_with_stdin))
        why = "cancelled"
        try:
            async with Tasks() as works:
                done, _ = await asyncio.wait(
                    [told, *(works.start(each) for each in work)], return_when=asyncio.FIRST_COMPLETED
                )
            why = told.result() if told in done else "its work has failed"
        finally:
            if log_stop:
                log.info("stopping", reason=why)
            in_time = await run_cleanup(stop(why), drain_timeout_s)
            if log_stop:
                log.info("stopped", reason=why, drained=in_time)
    for task in done:
        task.result()


def paginate(items: Mapping[str, T], size: int, token: str) -> tuple[list[T], str]:
    """One page of items.

    Args:
        items: by id, in the order of the list.
        size: items on a page; 0: the usual.
        token: of the page, as the page before gave it: the id of its last item; empty: the first page.

    Returns:
        The items, and the token of the next page; empty: there is none.

    Raises:
        SpecError: a token that is none, or of an item that is no longer here.
    """
    ids = list(items)
    if token and token not in items:
        raise SpecError(f"the page token must be one that this service gave, got {token!r}: begin with the first page")
    first = ids.index(token) + 1 if token else 0
    last = first + min(size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    return [items[each] for each in ids[first:last]], ids[last - 1] if last < len(ids) else ""
