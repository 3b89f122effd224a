"""Addresses: endpoints as text, and the address under which peers reach this machine."""

from __future__ import annotations

import socket

import pytest

from outlast import env
from outlast.errors import ConfigError, RendezvousError
from outlast.runtime import addresses
from outlast.runtime.addresses import (
    Endpoint,
    address_for_peers,
    interface_addresses,
    listen_at,
    listening_addresses,
    own_address,
    parse_endpoint,
    parse_port_range,
)


@pytest.mark.parametrize("endpoint", [Endpoint("node-1", 29400), Endpoint("10.0.0.1", 1), Endpoint("fe80::1", 65535)])
def test_endpoint_text_round_trips(endpoint: Endpoint) -> None:
    """``str`` and ``parse_endpoint`` are inverse, for names and for addresses of both families."""
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:99999", "a:1,b:2", "::1"])
def test_invalid_endpoint_is_rejected(text: str) -> None:
    """An address between processes needs a host and a port."""
    with pytest.raises(ConfigError):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("towards", "expected"),
    [(None, "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")],
)
def test_own_address_towards_a_loopback_peer_is_loopback(towards: str | None, expected: str) -> None:
    """A peer at a loopback address is given a loopback address of the same family."""
    assert own_address(towards) == expected


def test_own_address_is_not_the_loopback_of_the_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the endpoint is this machine and its name resolves to 127.0.1.1, peers get the address of the default
    route."""
    sources = {("127.0.1.1", 9): "127.0.0.1", ("192.0.2.1", 9): "10.1.2.3"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]
    )

    def source(_: int, address: tuple[str, int]) -> str:
        if address not in sources:
            raise OSError("network is unreachable")
        return sources[address]

    monkeypatch.setattr(addresses, "_source_address", source)
    assert own_address("this-node") == "10.1.2.3"
    sources["127.0.1.1", 9] = "127.0.1.1"
    assert listening_addresses("this-node") == [(socket.AF_INET, "127.0.1.1"), (socket.AF_INET, "10.1.2.3")]


def test_address_family_without_a_route_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with addresses of both families is reached over the family that has a route."""

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


def test_unknown_host_is_reported() -> None:
    """A host that cannot be resolved is an error with its name."""
    with pytest.raises(RendezvousError, match=r"no\.such\.host\.invalid"):
        own_address("no.such.host.invalid")


def test_only_addresses_of_this_machine_are_listened_at() -> None:
    """Loopback literals and localhost yield listening addresses; an address of another machine yields none."""
    assert listening_addresses("localhost") == [(socket.AF_INET, "127.0.0.1")]
    assert listening_addresses("127.0.0.2") == [(socket.AF_INET, "127.0.0.2")]
    assert listening_addresses("::1") == [(socket.AF_INET6, "::1")]
    assert listening_addresses("192.0.2.77") == []
    assert listening_addresses("no.such.host.invalid") == []


def test_own_name_of_a_gateway_listens_at_the_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the machine's own name resolves to a gateway, the address of the route to it is used; another name with
    that address is not this machine's."""
    gateway = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("203.0.113.7", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gateway)
    monkeypatch.setattr(addresses, "_source_address", lambda *_: "10.1.2.3")
    assert (socket.AF_INET, "10.1.2.3") in listening_addresses(socket.gethostname())
    assert listening_addresses("elsewhere") == []


def test_unknown_interface_is_rejected_with_the_known_ones() -> None:
    """The first existing interface is used; if none exists, the error lists the existing ones."""
    assert (socket.AF_INET, "127.0.0.1") in interface_addresses("nosuch0,lo")
    with pytest.raises(ConfigError, match=r"--interface=nosuch0: .*; there are .*lo"):
        interface_addresses("nosuch0")


@pytest.mark.parametrize("text", ["", "1", "5-4", "0-5", "1-65536", "a-b", "-1-4"])
def test_invalid_port_range_is_rejected(text: str) -> None:
    """A range has a low and a high port."""
    with pytest.raises(ConfigError, match="LOW-HIGH"):
        parse_port_range(text)


def test_small_port_range_is_rejected_with_the_needed_size() -> None:
    """The error has the number of ports that the processes of a node need."""
    with pytest.raises(ConfigError, match="has 2 ports, and this node needs 9"):
        parse_port_range("30000-30001", needed=9)


def test_exhausted_port_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets listen at ports of the range and at the given address only; without a free port the call fails at
    once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv(env.PORT_RANGE, f"{port}-{port}")
    with listen_at("127.0.0.1", backlog=1) as first:
        assert first.getsockname() == ("127.0.0.1", port)
        with pytest.raises(OSError, match=f"no port of {port}-{port} is free"):
            listen_at("127.0.0.1", backlog=1)


def test_unresolvable_endpoints_are_skipped() -> None:
    """An endpoint host that cannot be resolved is skipped; if none can, the error has its name."""
    dead = Endpoint("no.such.host.invalid", 1)
    assert address_for_peers([dead, Endpoint("127.0.0.1", 1)], is_one_machine=False) == "127.0.0.1"
    with pytest.raises(RendezvousError, match=r"no\.such\.host\.invalid"):
        address_for_peers([dead], is_one_machine=False)


def test_loopback_address_is_rejected_with_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the own name resolves to a loopback address, the error has the remedy; on one machine that address is
    accepted."""
    monkeypatch.setattr(addresses, "own_address", lambda _: "127.0.1.1")
    with pytest.raises(ConfigError, match="--local-addr"):
        address_for_peers([Endpoint("here", 1)], is_one_machine=False)
    assert address_for_peers([Endpoint("here", 1)], is_one_machine=True) == "127.0.1.1"
