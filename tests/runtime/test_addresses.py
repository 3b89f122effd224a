"""Addresses: endpoints as text, and the address under which peers reach this machine."""

from __future__ import annotations

import socket

import pytest

from outlast.errors import ConfigError, RendezvousError
from outlast.runtime import addresses
from outlast.runtime.addresses import Endpoint, own_address, parse_endpoint


@pytest.mark.parametrize("endpoint", [Endpoint("node-1", 29400), Endpoint("10.0.0.1", 1), Endpoint("fe80::1", 65535)])
def test_an_endpoint_is_read_as_it_is_written(endpoint: Endpoint) -> None:
    """``str`` and ``parse_endpoint`` are inverse, for names and for addresses of both families."""
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:99999", "a:1,b:2", "::1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    """An address between processes has a host and a port."""
    with pytest.raises(ConfigError):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("towards", "own"), [(None, "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")]
)
def test_peers_on_this_machine_reach_it_at_the_loopback_address(towards: str | None, own: str) -> None:
    """Who meets at a loopback address is reached at one, of the same family."""
    assert own_address(towards) == own


def test_a_machine_whose_own_name_leads_to_loopback_has_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the endpoint is this machine and its name means 127.0.1.1, peers get the address of the default route."""
    seen = {("127.0.1.1", 9): "127.0.0.1", ("192.0.2.1", 9): "10.1.2.3"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]
    )
    monkeypatch.setattr(addresses, "_source_address", lambda _, address: seen[address])
    assert own_address("this-node") == "10.1.2.3"


def test_a_family_without_a_route_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with addresses of both families is reached over the one that has a route."""

    def source(family: int, _: object) -> str:
        if family == socket.AF_INET6:
            raise OSError("network is unreachable")
        return "10.1.2.3"

    found = [
        (family, socket.SOCK_DGRAM, 0, "", (address, 9))
        for family, address in ((socket.AF_INET6, "2001:db8::9"), (socket.AF_INET, "10.0.0.9"))
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(addresses, "_source_address", source)
    assert own_address("both") == "10.1.2.3"


def test_an_unknown_host_is_named() -> None:
    """A host that cannot be resolved is an error that names it."""
    with pytest.raises(RendezvousError, match=r"no\.such\.host\.invalid"):
        own_address("no.such.host.invalid")
