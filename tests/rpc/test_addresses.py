"""Addresses as people write them."""

from __future__ import annotations

import pytest

from sottovoce_core.errors import SpecError
from sottovoce_rpc.addresses import parse_address, parse_url, require_address, require_host

pytestmark = pytest.mark.each


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:7400", ("127.0.0.1", 7400)),
        ("[::1]:65535", ("::1", 65535)),
        ("learner-north.ward.svc:1", ("learner-north.ward.svc", 1)),
        ("dns:///learner_1:7400", ("learner_1", 7400)),
    ],
)
def test_a_host_and_a_port(address: str, place: tuple[str, int]) -> None:
    assert parse_address(address, "--to") == place
    assert require_address(address, "--to") == address


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:", "127.0.0.1", ":7400", "", "a b:1", "::1:7400",
     "http://127.0.0.1:7400", "127.0.0.1:٣", "127.0.0.1:0"],
)  # fmt: skip
def test_what_is_none_is_refused(address: str) -> None:
    with pytest.raises(SpecError, match=r"--to must be HOST:PORT with a port from 1 to 65535, got "):
        require_address(address, "--to")


def test_a_port_may_be_left_to_the_system_where_one_listens() -> None:
    assert parse_address("127.0.0.1:0", "--listen", allow_port_zero=True) == ("127.0.0.1", 0)


def test_a_socket_in_the_file_system_is_an_address() -> None:
    assert require_address("unix:/run/learner.sock", "--listen", allow_port_zero=True) == "unix:/run/learner.sock"


# ---- URLs of others' services ------------------------------------------------------------------------------------------

NATS = {"nats": 4222, "tls": 4222}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("nats://host", ("nats", "host", 4222)),
        ("host", ("nats", "host", 4222)),
        ("host:1/", ("nats", "host", 1)),
        ("TLS://[::1]", ("tls", "::1", 4222)),
        ("[::1]:5", ("nats", "::1", 5)),
    ],
)
def test_a_url_has_a_usual_beginning_and_port(url: str, place: tuple[str, str, int]) -> None:
    assert parse_url(url, NATS, "--server") == place


@pytest.mark.parametrize(
    "url",
    ["nats://host:99999", "nats://host:0", "host:0", "nats://host:", "nats://:4222", "nats://", "", "http://host:1", "nats:/host",
     "nats://host/x", "nats://host?x=1", "nats://host:1,host:2", "nats://a b:1", "nats://::1", "host:http", " nats://host"],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url: str) -> None:
    wanted = r"--server must be like nats://HOST:4222, with a port from 1 to 65535, and begin with nats:// or tls://, or .*, got "
    with pytest.raises(SpecError, match=wanted) as refused:
        parse_url(url, NATS, "--server")
    assert repr(url) in str(refused.value)


@pytest.mark.parametrize("url", ["nats://ann:secret@host", "secret@host:1", "nats://ann:se/secret@host:99999"])
def test_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SpecError, match="--server must hold no user or password") as refused:
        parse_url(url, NATS, "--server")
    assert "secret" not in str(refused.value)


def test_what_stands_behind_the_port_is_for_some() -> None:
    assert parse_url("https://host/a@b/c?d", {"https": 443}, "--from", allow_path=True) == ("https", "host", 443)


@pytest.mark.parametrize("host", ["ward-1.example.org", "10.0.0.1", "[::1]"])
def test_a_machine(host: str) -> None:
    assert require_host(host, "--advertise-host") == host


@pytest.mark.parametrize("host", ["host:7500", "a b", "", "http://host", "::1", "host/x"])
def test_what_is_no_machine_is_refused(host: str) -> None:
    with pytest.raises(
        SpecError, match="--advertise-host must be the name or address of a machine, without a port, got "
    ):
        require_host(host, "--advertise-host")
