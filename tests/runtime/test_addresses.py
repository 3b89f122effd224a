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

    def source(_: int, address: tuple[str, int]) -> str:
        if address not in seen:
            raise OSError("network is unreachable")
        return seen[address]

    monkeypatch.setattr(addresses, "_source_address", source)
    assert own_address("this-node") == "10.1.2.3"
    seen["127.0.1.1", 9] = "127.0.1.1"
    assert listening_addresses("this-node") == [(socket.AF_INET, "127.0.1.1"), (socket.AF_INET, "10.1.2.3")]


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


def test_a_loopback_endpoint_is_this_machine_and_a_foreign_one_is_not() -> None:
    """Loopback literals and localhost are listened at as such; an address that this machine lacks gives none."""
    assert listening_addresses("localhost") == [(socket.AF_INET, "127.0.0.1")]
    assert listening_addresses("127.0.0.2") == [(socket.AF_INET, "127.0.0.2")]
    assert listening_addresses("::1") == [(socket.AF_INET6, "::1")]
    assert listening_addresses("192.0.2.77") == []
    assert listening_addresses("no.such.host.invalid") == []


def test_a_name_of_this_machine_that_leads_to_a_gateway_listens_where_the_gateway_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine's own name may stand for the address of a gateway; another name with that address is not its own."""
    gateway = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("203.0.113.7", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gateway)
    monkeypatch.setattr(addresses, "_source_address", lambda *_: "10.1.2.3")
    assert (socket.AF_INET, "10.1.2.3") in listening_addresses(socket.gethostname())
    assert listening_addresses("elsewhere") == []


def test_an_interface_that_is_not_here_is_refused_with_those_that_are() -> None:
    """The first interface that is here counts; where there is none of them, the error names what there is."""
    assert (socket.AF_INET, "127.0.0.1") in interface_addresses("nosuch0,lo")
    with pytest.raises(ConfigError, match=r"--interface=nosuch0: .*; there are .*lo"):
        interface_addresses("nosuch0")


@pytest.mark.parametrize("text", ["", "1", "5-4", "0-5", "1-65536", "a-b", "-1-4"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    """A range has a low and a high port."""
    with pytest.raises(ConfigError, match="LOW-HIGH"):
        parse_port_range(text)


def test_a_range_that_is_too_small_names_how_many_ports_are_needed() -> None:
    """A node's processes need a number of ports."""
    with pytest.raises(ConfigError, match="has 2 ports, and this node needs 9"):
        parse_port_range("30000-30001", needed=9)


def test_a_used_up_range_of_ports_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets listen at ports of the range, at the given address alone; one more than it has is refused at once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv(env.PORT_RANGE, f"{port}-{port}")
    with listen_at("127.0.0.1", backlog=1) as first:
        assert first.getsockname() == ("127.0.0.1", port)
        with pytest.raises(OSError, match=f"no port of {port}-{port} is free"):
            listen_at("127.0.0.1", backlog=1)


def test_the_first_endpoint_that_is_known_names_the_own_address() -> None:
    """A host of several endpoints that nobody knows any more is no obstacle; without any other it is named."""
    dead = Endpoint("no.such.host.invalid", 1)
    assert address_for_peers([dead, Endpoint("127.0.0.1", 1)], is_one_machine=False) == "127.0.0.1"
    with pytest.raises(RendezvousError, match=r"no\.such\.host\.invalid"):
        address_for_peers([dead], is_one_machine=False)


def test_a_loopback_address_is_refused_with_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the own name leads to one, agents of both launchers say what to do; on one machine it will do."""
    monkeypatch.setattr(addresses, "own_address", lambda _: "127.0.1.1")
    with pytest.raises(ConfigError, match="--local-addr"):
        address_for_peers([Endpoint("here", 1)], is_one_machine=False)
    assert address_for_peers([Endpoint("here", 1)], is_one_machine=True) == "127.0.1.1"
