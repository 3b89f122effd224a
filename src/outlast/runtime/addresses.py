"""Addresses: parsing and formatting ``host:port``, and the address at which peers reach this machine.

A machine has several addresses, and its own name often resolves to a loopback one (Debian's ``/etc/hosts``). The
address used is that of the interface on the route to an endpoint that all peers know, in that endpoint's family.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from outlast import clock, env
from outlast.errors import ConfigError, RendezvousError
from outlast.runtime.files import begin

_ELSEWHERE: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849): the route to them is the default route."""
_DISCARD_PORT = 9
_AGAIN_S = 0.3
"""Seconds between two of the four queries to a name server that responds with a temporary failure."""

Addresses = list[tuple[int, tuple[str, int]]]
"""Family and address."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and port on which a process listens, or may listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """Family of the sockets that listen there; a name means IPv4."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


def parse_endpoint(text: str) -> Endpoint:
    """Parse one ``host:port``, as :class:`Endpoint` formats it.

    Raises: ConfigError: The text is not such an endpoint.
    """
    endpoints = parse_endpoints(text, default_port=-1, where="address")
    if len(endpoints) != 1 or endpoints[0].port <= 0:
        raise ConfigError(f"{text!r} is not an address; write host:port")
    return endpoints[0]


def parse_endpoints(text: str, *, default_port: int = 29400, where: str = "--rdzv-endpoint") -> tuple[Endpoint, ...]:
    """Parse ``host[:port][,host[:port]...]``.

    Raises: ConfigError: A port is not a number between 0 and 65535, or a host is missing.
    """
    endpoints = []
    for part in text.split(","):
        name, _, port_text = part.strip().rpartition(":") if _has_port(part.strip()) else (part.strip(), "", "")
        name = name.strip("[]")
        if not name:
            raise ConfigError(f"{where}={text!r} names no host; write host:port[,host:port...]")
        if port_text and not (port_text.strip().isdecimal() and int(port_text) < 65536):
            raise ConfigError(f"{where}={text!r}: {port_text!r} is not a port; write host:port[,host:port...]")
        endpoints.append(Endpoint(name, int(port_text) if port_text else default_port))
    return tuple(endpoints)


def _has_port(text: str) -> bool:
    return "]:" in text if text.startswith("[") else text.count(":") == 1


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means the local machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address(towards: str | None) -> str:
    """Return the address at which peers reach this machine; nothing is sent.

    Args:
        towards: Host (name or address) that the peers reach as well. If it is this machine, the result is the address
            of the default route, or a loopback one without a network. ``None``: all peers are on this machine. With
            ``--interface``, the result is an address of that interface, in the family of the host.

    Raises:
        ConfigError: The interface does not exist here.
        RendezvousError: The host name is unknown, there is no route to it, or the interface has no address of its
            family.

    Blocks: for the name lookup.
    """
    if towards is None or is_loopback(towards):
        return "::1" if towards is not None and ":" in towards else "127.0.0.1"
    interface = env.interface()
    own_there = interface_addresses(interface) if interface is not None else []
    why: OSError | None = None
    try:
        found = socket.getaddrinfo(towards, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        found, why = [], error
    if interface is not None:
        for family, *_ in found:
            for own_family, text in own_there:
                if own_family == family:
                    return text
        if found:
            raise RendezvousError(
                f"--interface={interface} has no address of the family in which {towards} is reached; name another "
                "interface, or an endpoint of the other family"
            )
    for family, _, _, _, address in found:
        try:
            own = _source_address(family, address)
        except OSError as error:
            why = error  # no route in this family
            continue
        if is_loopback(own):
            outward = _outward_addresses(interface)
            same = [one for one in outward if one[0] == family]
            return (same or outward or [(family, own)])[0][1]
        return own
    raise RendezvousError(f"host {towards!r} cannot be reached from here ({why}); check its name and the network")


def address_for_peers(endpoints: Sequence[Endpoint], *, is_one_machine: bool) -> str:
    """Return the address at which the agents of a job reach this machine.

    Args:
        endpoints: Where the agents may meet; the first one whose host is known here is used.

    Raises:
        ConfigError: The interface does not exist here, or the address is a loopback one and there are other machines.
        RendezvousError: No host is known here, or none can be reached.

    Blocks: for the name lookups.
    """
    first_error: RendezvousError | None = None
    for endpoint in endpoints:
        try:
            own = own_address(endpoint.host)
        except RendezvousError as error:
            first_error = first_error or error
            continue
        if is_loopback(own) and not is_one_machine and not any(is_loopback(one.host) for one in endpoints):
            raise ConfigError(
                f"the other nodes cannot reach this one at its own address {own} (towards {endpoint.host}); name its "
                "interface (--interface) or its address (--local-addr), or correct its name in /etc/hosts"
            )
        return own
    assert first_error is not None, "no endpoint"
    raise first_error


def listening_addresses(host: str, *, interface: str | None = None) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of this machine at which the host of an endpoint must listen; empty: it is another machine.

    A name that resolves to a loopback address here (127.0.1.1) resolves to another one on the peers, so both are
    returned.

    Args:
        host: Name or address.
        interface: Interface of that other address; ``None``: that of the default route.

    Raises: ConfigError: There is no such interface. Blocks: for the name lookup.
    """
    if host in ("0.0.0.0", "::"):
        return [(Endpoint(host, 0).family, host)]  # listen on all addresses
    if is_loopback(host):
        literal = "127.0.0.1" if host == "localhost" else host
        return [(Endpoint(literal, 0).family, literal)]
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    own: dict[tuple[socket.AddressFamily, str], None] = {}
    for family, _, _, _, address in found:
        text = str(address[0])
        try:
            # The source towards an own address is that address. Binding would prove less (ip_nonlocal_bind).
            is_own = _source_address(family, address) == text or is_loopback(text)
        except OSError:
            continue
        if is_own:
            own[family, text] = None
    is_named_so = not own and host in (socket.gethostname(), env.hostname())  # its name leads to a gateway's address
    if is_named_so or any(is_loopback(text) for _, text in own):
        own.update(dict.fromkeys(_outward_addresses(interface)))
    return list(own)


def interface_addresses(names: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of the first interface of a list that this machine has; link-local addresses come last.

    Raises: ConfigError: The machine has none of them, or it has no address; the error lists the interfaces.
    """
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: addresses
        for name, all_of in psutil.net_if_addrs().items()
        if (addresses := [(one.family, one.address) for one in all_of if one.family in families])
    }
    for name in (part.strip() for part in names.split(",")):
        if name in found:
            return sorted(found[name], key=lambda one: one[1].startswith("fe80:"))
    raise ConfigError(f"--interface={names}: no such interface with an address here; there are {', '.join(found)}")


def parse_port_range(text: str, *, where: str = "--port-range", needed: int = 1) -> range:
    """Parse the ports in ``LOW-HIGH``. Raises: ConfigError: The text is not a range, or the range is too small."""
    low, _, high = text.partition("-")
    if not (low.strip().isdecimal() and high.strip().isdecimal() and 0 < int(low) <= int(high) < 65536):
        raise ConfigError(f"{where}={text} is not LOW-HIGH with 0 < LOW <= HIGH < 65536; write for example 30000-30099")
    ports = range(int(low), int(high) + 1)
    if len(ports) < needed:
        raise ConfigError(f"{where}={text} has {len(ports)} ports, and this node needs {needed}; name a wider range")
    return ports


def listen_at(host: str, *, backlog: int, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address, on a free port, within ``--port-range`` if there is one.

    Args:
        port: Port to use if it is free; 0 = any.

    Raises:
        ConfigError: The range is invalid.
        OSError: The address is not this machine's, or no port of the range is free.
    """
    text = env.port_range()
    ports: Sequence[int] = (0,) if text is None else parse_port_range(text, where=env.PORT_RANGE)
    first = secrets.randbelow(len(ports))  # processes that start together try different ones
    wanted = [port] if port else []
    for number in (*wanted, *ports[first:], *ports[:first]):
        try:
            return socket.create_server((host, number), family=Endpoint(host, 0).family, backlog=backlog)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE or (error.errno == errno.EACCES and number not in wanted)
            if not is_taken or (text is None and number not in wanted):
                raise
    raise OSError(errno.EADDRINUSE, f"no port of {text} is free at {host}; name a wider range (--port-range)")


def _outward_addresses(interface: str | None) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of an interface, or of the default routes; empty without a network."""
    if interface is not None:
        return interface_addresses(interface)
    found = []
    for family, elsewhere in _ELSEWHERE.items():
        with suppress(OSError):  # there is no network of this family beyond this machine
            found.append((socket.AddressFamily(family), _source_address(family, (elsewhere, _DISCARD_PORT))))
    return [one for one in found if not is_loopback(one[1])]


def _source_address(family: int, address: tuple[object, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def look_up(endpoint: Endpoint, timeout_s: float) -> Addresses | str | None:
    """Return the addresses of an endpoint, or why there are none; ``None``: no name server responded in time.

    Blocks: up to ``timeout_s``.
    """

    def resolve() -> Addresses | str:
        until_s = clock.now_s() + 3 * _AGAIN_S
        while True:
            try:
                found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
                return [(one[0], one[4]) for one in found]  # type: ignore[misc]
            except (OSError, UnicodeError) as error:
                passes = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
                if not passes or clock.now_s() > until_s:
                    return getattr(error, "strerror", None) or str(error)
            time.sleep(_AGAIN_S)

    try:
        return begin(resolve, "outlast-look-up").result(timeout_s)
    except TimeoutError:
        return None
