"""Addresses as people write them."""

from __future__ import annotations

import pytest

from sottovoce.errors import SpecError
from sottovoce_rpc.addresses import place_of, require_address

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
    assert place_of(address, "--to") == place
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
    assert place_of("127.0.0.1:0", "--listen", listen=True) == ("127.0.0.1", 0)


def test_a_socket_in_the_file_system_is_an_address() -> None:
    assert require_address("unix:/run/learner.sock", "--listen", listen=True) == "unix:/run/learner.sock"
