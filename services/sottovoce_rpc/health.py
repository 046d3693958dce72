"""What an image's health check runs: does this container's service answer its own identity?

    python -m sottovoce_rpc.health

Asks the gRPC health service where SOTTOVOCE_LISTEN says, on loopback, with the identity of SOTTOVOCE_IDENTITY; in the clear where
there is none. Exit code 0: it serves. It runs every few seconds in every container, so it imports none of what services do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

_CHECK_TIMEOUT_S = 5.0


def main() -> int:
    """Ask, and say on standard error what is not well.

    Returns:
        The exit code.
    """
    port = os.environ.get("SOTTOVOCE_LISTEN", "").rpartition(":")[2]
    folder = os.environ.get("SOTTOVOCE_IDENTITY", "")
    try:
        with _channel(f"127.0.0.1:{port}", Path(folder) if folder else None) as to:
            stub: Any = health_pb2_grpc.HealthStub(to)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_CHECK_TIMEOUT_S, wait_for_ready=True)
    except grpc.RpcError as error:
        call: Any = error  # of a call that was begun, it is one
        return _unwell(f"port {port}: {call.code().name}: {call.details()}")
    except (OSError, ValueError) as error:
        return _unwell(f"the identity in {folder} cannot be used: {error}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return _unwell(f"port {port}: it is there, and does not serve")
    return 0


def _channel(address: str, folder: Path | None) -> grpc.Channel:
    """To whoever has this very certificate."""
    if folder is None:
        return grpc.insecure_channel(address)
    authorities, key, chain = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    own = x509.load_pem_x509_certificate(chain).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    host = own.get_values_for_type(x509.DNSName)[0]
    options = [("grpc.ssl_target_name_override", host)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authorities, key, chain), options)


def _unwell(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
