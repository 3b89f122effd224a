"""Addresses: reading and writing ``host:port``, and the address under which peers reach this machine.

A machine has several addresses, and its own name often leads to a loopback one (Debian's ``/etc/hosts``). The address
that counts is that of the interface on the way to an endpoint that all peers know, in that endpoint's family.
"""

from __future__ import annotations

import queue
import socket
import threading
from dataclasses import dataclass

from outlast import clock
from outlast.errors import ConfigError, RendezvousError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ELSEWHERE: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that nobody has (RFC 5737, RFC 3849): the way to them is the default route."""
_DISCARD_PORT = 9
_AGAIN_S = 0.3
"""Between two questions to a name server that asks to be asked again; there are four."""

Addresses = list[tuple[int, tuple[str, int]]]
"""Family and address."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where something listens, or may."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the host's name means this machine."""
        from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

        return bool(_matches_machine_hostname(self.host))

    @property
    def family(self) -> socket.AddressFamily:
        """The family of sockets that listen there; a name means IPv4."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint that :class:`Endpoint` wrote as ``host:port``.

    Raises:
        ConfigError: It is another text.
    """
    endpoints = parse_endpoints(text, default_port=-1, where="address")
    if len(endpoints) != 1 or endpoints[0].port <= 0:
        raise ConfigError(f"{text!r} is not an address; write host:port")
    return endpoints[0]


def parse_endpoints(text: str, *, default_port: int = 29400, where: str = "--rdzv-endpoint") -> tuple[Endpoint, ...]:
    """Return the endpoints in ``host[:port][,host[:port]...]``.

    Args:
        text: The endpoints.
        default_port: What a host without a port gets.
        where: What the text was given as, for errors.

    Raises:
        ConfigError: A port is not a number between 0 and 65535, or there is no host.
    """
    endpoints = []
    for part in text.split(","):
        name, _, port_text = part.strip().rpartition(":") if _has_port(part.strip()) else (part.strip(), "", "")
        name = name.strip("[]")
        if not name:
            raise ConfigError(f"{where}={text!r} names no host; write host:port[,host:port...]")
        try:
            port = int(port_text) if port_text else default_port
        except ValueError:
            port = 65536
        if port_text and not 0 <= port < 65536:
            raise ConfigError(f"{where}={text!r}: {port_text!r} is not a port; write host:port[,host:port...]")
        endpoints.append(Endpoint(name, port))
    return tuple(endpoints)


def _has_port(text: str) -> bool:
    return "]:" in text if text.startswith("[") else text.count(":") == 1


def is_loopback(host: str) -> bool:
    """Return whether a host, as it was given, means whatever machine one is on."""
    return host in _LOOPBACK


def own_address(towards: str | None) -> str:
    """Return the address under which peers reach this machine; nothing is sent.

    Args:
        towards: A host that the peers reach as well: name or address. If it is this machine, the answer is the address
            of the default route, or a loopback one where there is no network. ``None``: all peers are on this machine.

    Raises:
        RendezvousError: The host's name is not known here, or there is no route to it.

    Blocks: while the name is looked up.
    """
    if towards is None or is_loopback(towards):
        return "::1" if towards == "::1" else "127.0.0.1"
    why: OSError | None = None
    try:
        found = socket.getaddrinfo(towards, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        found, why = [], error
    for family, _, _, _, address in found:
        try:
            own = _source_address(family, address)
        except OSError as error:
            why = error  # no route in this family
            continue
        if own.startswith("127.") or own == "::1":
            try:
                return _source_address(family, (_ELSEWHERE[family], _DISCARD_PORT))
            except OSError:
                pass  # there is no network beyond this machine
        return own
    raise RendezvousError(f"host {towards!r} cannot be reached from here ({why}); check its name and the network")


def listening_addresses(host: str, *, interface: str | None = None) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of this machine at which the host of an endpoint listens; none: it is another machine's."""
    if is_loopback(host):
        return [(socket.AF_INET6, "::1")] if host == "::1" else [(socket.AF_INET, "127.0.0.1")]
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    own: dict[tuple[socket.AddressFamily, str], None] = {}
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
        own[family, str(address[0])] = None
        if str(address[0]).startswith("127."):
            try:
                own[family, _source_address(family, (_ELSEWHERE[family], _DISCARD_PORT))] = None
            except OSError:
                pass
    return list(own)


def _source_address(family: int, address: tuple[object, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def look_up(endpoint: Endpoint, timeout_s: float) -> Addresses | str | None:
    """Return the addresses of an endpoint, or why there are none; ``None``: no name server answered in time.

    Blocks: up to ``timeout_s``.
    """
    answers: queue.SimpleQueue[Addresses | str] = queue.SimpleQueue()

    def ask() -> None:
        until_s = clock.now_s() + 3 * _AGAIN_S
        while True:
            try:
                found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
                answers.put([(one[0], one[4]) for one in found])  # type: ignore[misc]
                return
            except (OSError, UnicodeError) as error:
                passes = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
                if not passes or clock.now_s() > until_s:
                    answers.put(getattr(error, "strerror", None) or str(error))
                    return
            threading.Event().wait(_AGAIN_S)

    threading.Thread(target=ask, name="outlast-look-up", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return None
