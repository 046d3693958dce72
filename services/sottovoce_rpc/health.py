"""Health check of a container image: check that the service of this container answers under its own identity.

    python -m sottovoce_rpc.health

Calls the gRPC health service on loopback, at the port of SOTTOVOCE_LISTEN, with the identity of SOTTOVOCE_IDENTITY, or in the
clear if there is none. Exit code 0: it serves. It runs every few seconds in every container, so it imports no service code.
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
    """Check the service; print on standard error what is wrong.

    Returns:
        The exit code.
    """
    port = os.environ.get("SOTTOVOCE_LISTEN", "").rpartition(":")[2]
    folder = os.environ.get("SOTTOVOCE_IDENTITY", "")
    try:
        with _open_channel(f"127.0.0.1:{port}", Path(folder) if folder else None) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_CHECK_TIMEOUT_S, wait_for_ready=True)
    except grpc.RpcError as error:
        call: Any = error  # the error of a started call is the call itself
        return _report_failure(f"port {port}: {call.code().name}: {call.details()}")
    except (OSError, ValueError) as error:
        return _report_failure(f"the identity in {folder} cannot be used: {error}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return _report_failure(f"port {port}: the service answers, but is not serving: {answer.status}")
    return 0


def _open_channel(address: str, folder: Path | None) -> grpc.Channel:
    """Open a channel that accepts only this identity's own certificate name."""
    if folder is None:
        return grpc.insecure_channel(address)
    authorities, key, chain = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    own = x509.load_pem_x509_certificate(chain).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    host = own.get_values_for_type(x509.DNSName)[0]
    options = [("grpc.ssl_target_name_override", host)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authorities, key, chain), options)


def _report_failure(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
