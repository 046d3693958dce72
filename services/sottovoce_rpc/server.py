"""gRPC server with health checking and reflection, and the shutdown sequence of every service.

Shutdown: a signal (or the end of standard input) asks the service to stop; it drains within `_DRAIN_TIMEOUT_S`; open calls get
`_GRACE_TIMEOUT_S` more; a second signal ends the process at once.
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
"""Time in which the opener of a stream must send its first message; after that the stream is closed."""
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Maximum bytes of a message with models, records, or copies of learners' messages."""
MAX_OVERHEAD_BYTES = 1024 * 1024
"""Maximum bytes of a message beside its numbers: names of fields, round and sender, recipients of a copy."""
MAX_CONTROL_BYTES = 8 * 1024 * 1024
"""Maximum bytes of a message to a coordinator: a spec with all edges that it serves has about one million."""
MAX_CONCURRENT_CALLS = 4_096
"""Maximum number of concurrent calls of one server: gRPC itself bounds neither calls nor connections."""
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
    ("grpc.keepalive_time_ms", 10_000),  # detects a caller that vanished without closing its connection
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # a silent connection holds a file descriptor
    ("grpc.max_concurrent_streams", 128),  # per connection; our clients open one connection per service
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
)
CHANNEL_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a network partition without a reset is detected only by an unanswered ping
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # gRPC's default, two minutes, delays calls to a service that is back
    ("grpc.enable_http_proxy", 0),
)


def choose_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the loop factory of uvloop if it is installed (optional dependency `fast`), else asyncio's."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


def limit_message_size(options: Options, max_message_bytes: int) -> Options:
    """Return server or channel options with this maximum size of incoming messages."""
    return tuple({**dict(options), "grpc.max_receive_message_length": max_message_bytes}.items())


def open_channel(
    address: str,
    role: Role | None = None,
    name: str = "",
    *,
    credentials: Credentials = NO_IDENTITY,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Channel:
    """Open a channel to one of our services.

    Args:
        address: address of the service.
        role: role that the service's certificate must have, if this process has an identity.
        name: name that it must have; empty: any of that role.
        credentials: credentials of this process.
        max_message_bytes: maximum bytes of an answer.

    Raises:
        SpecError: the service is on another machine, and this process has no identity.
        FailedPrecondition: the files of the identity cannot be used.
    """
    return credentials.open_channel(address, role, name, limit_message_size(CHANNEL_OPTIONS, max_message_bytes))


async def wait_until_reachable(
    channel: Channel, who: str, seconds: float, notify: Callable[[str, bool], None] | None = None
) -> None:
    """Wait until a service can be reached.

    Args:
        channel: channel to it.
        who: the service, for users.
        seconds: time limit.
        notify: called with each reason of failure as soon as it is known, and with True if waiting will not mend it.

    Raises:
        Unavailable: it cannot be reached in time; the text has the reason if it is known.
    """
    try:
        async with (
            asyncio.timeout(seconds),
            run_in_background(*([] if notify is None else [_report_failures(channel, notify)])),
        ):
            await channel.channel_ready()
    except TimeoutError:
        why = explain_handshake_failure(await _get_last_failure(channel)) or "is it running, and is the address right?"
        raise Unavailable(f"cannot reach {who} within {seconds:g} s: {why}") from None


async def _report_failures(channel: Channel, notify: Callable[[str, bool], None]) -> None:
    """Report each reason once, at the first failure that shows it."""
    last = ""
    while True:
        if (state := channel.get_state(try_to_connect=True)) is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            text = await _get_last_failure(channel)
            why = explain_handshake_failure(text) or explain_unreachable(text)
            if why not in ("", last):
                last = why
                notify(why, bool(explain_handshake_failure(text)))
        await channel.wait_for_state_change(state)


async def _get_last_failure(channel: Channel) -> str:
    """Return gRPC's text for the last failed connection attempt of a channel; empty if there is none."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=HELLO_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    return ""


@dataclass(slots=True)
class RunningServer:
    """A started server, its listen address, and its count of refused calls."""

    server: grpc.aio.Server
    address: str
    health: health.aio.HealthServicer
    refusals: Refusals

    async def stop(self) -> None:
        """Report NOT_SERVING to health checks, let open calls end, then cut them."""
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
        credentials: credentials of this process.
        max_message_bytes: maximum bytes of an incoming message.

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
    """Bind a server to an address, with TLS if there are credentials; return the address with its actual port.

    Raises:
        Unavailable: the address is in use, or not one of this machine's.
    """
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError:
        port = 0
    if port == 0:
        raise Unavailable(f"cannot listen on {listen}: the port is in use, or the host is not this machine's")
    if listen.startswith("unix:"):
        Path(listen.removeprefix("unix:").removeprefix("//")).chmod(0o600)  # accessible to this user only
        return listen
    address = f"{listen.rsplit(':', 1)[0]}:{port}"
    listen_addresses[server] = address
    return address


def announce(service: str, **facts: str) -> None:
    """Print one JSON line on standard output, from which the starter of this process reads where it listens."""
    print(json.dumps({"service": service, **facts}), flush=True)


async def _wait_for_stop(*, with_stdin: bool = False) -> str:
    """Wait for SIGTERM, SIGINT or (`with_stdin`) the end of standard input; return which. A second signal kills the process."""
    loop = asyncio.get_running_loop()
    stop_reason: asyncio.Future[str] = loop.create_future()

    def handle_signal(reason: str) -> None:
        if stop_reason.done():
            os._exit(130)
        stop_reason.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle_signal, number.name)
    async with Tasks() as tasks:
        if with_stdin:
            reader = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            ended = tasks.start(reader.read())
            ended.add_done_callback(
                lambda _: None if stop_reason.done() else stop_reason.set_result("standard input ended")
            )
        return await stop_reason


async def serve_until_stopped(
    stop: Callable[[str], Coroutine[Any, Any, None]],
    work: Iterable[Coroutine[Any, Any, object]] = (),
    *,
    stop_with_stdin: bool = False,
    drain_timeout_s: float = _DRAIN_TIMEOUT_S,
    log_stop: bool = True,
) -> None:
    """Run a started service until it is asked to stop or one of its works fails; then run the shutdown sequence.

    Args:
        stop: drains and closes the service; receives the reason.
        work: endless coroutines of the service.
        stop_with_stdin: stop when standard input ends, so that a service does not outlive its starter.
        drain_timeout_s: time for `stop`; then it is cut off.
        log_stop: log that the service stops, and why.

    Raises:
        SottovoceError: the error of a failed work.
    """
    gc.freeze()  # objects made by imports live forever: collections need not scan them
    hide_error_texts(asyncio.get_running_loop())
    async with Tasks() as signals:  # ended last: a second signal during the drain must still kill
        stopped = signals.start(_wait_for_stop(with_stdin=stop_with_stdin))
        why = "cancelled"
        try:
            async with Tasks() as works:
                done, _ = await asyncio.wait(
                    [stopped, *(works.start(each) for each in work)], return_when=asyncio.FIRST_COMPLETED
                )
            why = stopped.result() if stopped in done else "its work has failed"
        finally:
            if log_stop:
                log.info("stopping", reason=why)
            in_time = await run_cleanup(stop(why), drain_timeout_s)
            if log_stop:
                log.info("stopped", reason=why, drained=in_time)
    for task in done:
        task.result()


def paginate(items: Mapping[str, T], size: int, token: str) -> tuple[list[T], str]:
    """Return one page of items.

    Args:
        items: by id, in the order of the list.
        size: items per page; 0: the default.
        token: page token returned with the page before, the id of its last item; empty: the first page.

    Returns:
        The items, and the token of the next page; empty if there is none.

    Raises:
        SpecError: the token is unknown, or its item is no longer in the list.
    """
    ids = list(items)
    if token and token not in items:
        raise SpecError(
            f"the page token must be one that this service returned, got {token!r}: begin with the first page"
        )
    first = ids.index(token) + 1 if token else 0
    last = first + min(size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    return [items[each] for each in ids[first:last]], ids[last - 1] if last < len(ids) else ""
