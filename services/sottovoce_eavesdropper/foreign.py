"""A relay on its own, in front of any gRPC server: what passes is recorded, nobody behind or before it need know."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from sottovoce.errors import CaptureError, SpecError, Unavailable
from sottovoce_eavesdropper.records import WRITE_S, CaptureFile
from sottovoce_eavesdropper.relay import FINISH_S, Relay
from sottovoce_eavesdropper.storage import open_folder, require_folder
from sottovoce_rpc.addresses import require_address
from sottovoce_rpc.logs import log_start
from sottovoce_rpc.server import CHANNEL_OPTIONS, SERVER_OPTIONS, announce, serve_until_stopped
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()

_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TO_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].endswith("message_length")),
    *_ANY_SIZE,
    ("grpc.enable_retries", 0),  # what is said again is the caller's choice
    ("grpc.initial_reconnect_backoff_ms", 100),  # the server may start after the relay
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_OURS = ("message_length", "algorithms_bitset", "max_concurrent_streams", "connection_idle_ms", "metadata_size")
_LISTEN_OPTIONS = (*(option for option in SERVER_OPTIONS if not option[0].endswith(_OURS)), *_ANY_SIZE)


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A relay in front of a server that is not ours.

    Attributes:
        to: `host:port` of the server.
        listen: `host:port` for its clients; port 0 picks one.
        folder: gets one folder with a capture: a path, or a URL for fsspec.
        world: 0 or 1, for an audit.
        tls_cert, tls_key: PEM files; with them, clients speak TLS.
        to_tls: the server speaks TLS.
        to_ca: PEM file with the authorities that vouch for the server (default: the system's).
    """

    to: str
    listen: str = "127.0.0.1:0"
    folder: str | Path = "sottovoce-captures"
    world: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    to_tls: bool = False
    to_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SpecError("--tls-cert and --tls-key belong together, got one of them")
        if self.to_ca is not None and not self.to_tls:
            raise SpecError("--to-ca needs --to-tls")
        require_address(self.to, "--to")
        require_address(self.listen, "--listen", listen=True)

    def listen_credentials(self) -> grpc.ServerCredentials | None:
        """Of the side where clients call; None: no TLS.

        Raises:
            SpecError: a file cannot be read.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        return grpc.ssl_server_credentials([(_pem(self.tls_key), _pem(self.tls_cert))])

    def channel(self) -> grpc.aio.Channel:
        """To the server.

        Raises:
            SpecError: the file of authorities cannot be read.
        """
        if not self.to_tls:
            return grpc.aio.insecure_channel(self.to, options=_TO_OPTIONS)
        authorities = None if self.to_ca is None else _pem(self.to_ca)
        return grpc.aio.secure_channel(self.to, grpc.ssl_channel_credentials(authorities), options=_TO_OPTIONS)


class ForeignRelay:
    """One relay and its capture."""

    def __init__(self, config: ForeignConfig) -> None:
        self._config = config
        world = "" if config.world is None else f"world-{config.world}-"
        capture_id = f"relay-{world}{uuid.uuid4().hex[:6]}"
        require_folder(config.folder)
        self.folder = open_folder(config.folder).below(capture_id).name
        credentials, to = config.listen_credentials(), config.channel()
        try:
            self.file = CaptureFile(self.folder, capture_id, capture_id, "{}", world=config.world)
        except OSError as error:
            raise CaptureError(f"cannot write to the folder {self.folder}: {error.strerror or error}") from None
        route = eavesdropper_pb2.Route(caller=0, callee=1, target=config.to)
        self._relay, self._credentials = Relay(route, self.file, to=to, options=_LISTEN_OPTIONS), credentials
        self._writing = Tasks()

    async def start(self) -> str:
        """Listen; returns the address.

        Raises:
            Unavailable: the address is taken, or the certificate and its key cannot be used.
        """
        try:
            address = await self._relay.listen(self._config.listen, self._credentials)
        except Unavailable as error:
            await self.file.close()
            if self._credentials is None:
                raise
            raise Unavailable(f"{error}, or --tls-cert and --tls-key are not a certificate and its key") from None
        self._writing.start(self.file.write_parts(), "a capture is no longer written")
        log.info("capture opened", to=self._config.to, folder=self.folder)
        return address

    async def stop(self) -> None:
        """Let the last calls end, write the rest, close the capture."""
        await self._relay.stop()
        await self._writing.end(WRITE_S)
        await self.file.close()
        log.info("capture closed", messages=self.file.messages, bytes=self.file.bytes, folder=self.folder)


def _pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


async def serve(config: ForeignConfig, *, with_stdin: bool = False) -> None:
    """Run a relay in this process until it is told to stop.

    Raises:
        SottovoceError: the address is taken, or a file cannot be used.
    """
    relay = ForeignRelay(config)
    address = await relay.start()
    announce("relay", address=address, to=config.to, capture=relay.folder)
    log_start("relay", address=address, to=config.to, folder=relay.folder)
    await serve_until_stopped(lambda _: relay.stop(), with_stdin=with_stdin, drain_s=FINISH_S + WRITE_S)
