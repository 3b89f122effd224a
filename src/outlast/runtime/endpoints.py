"""Addresses: where a control store may be hosted, and which of ours leads to a host."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from outlast.errors import ConfigError

__all__ = ["Endpoint", "address_towards", "parse_endpoints"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a store may be hosted."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the host's name means this machine."""
        from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

        return bool(_matches_machine_hostname(self.host))


def parse_endpoints(text: str, *, default_port: int = 29400, where: str = "--rdzv-endpoint") -> tuple[Endpoint, ...]:
    """Return the endpoints in ``host[:port][,host[:port]...]``.

    Args:
        text: The endpoints.
        default_port: What a host without a port gets.
        where: What the text was given as, for errors.

    Raises:
        ConfigError: A port is no number between 0 and 65535, or there is no host.
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
            port = -1
        if not 0 <= port < 65536:
            raise ConfigError(f"{where}={text!r}: {port_text!r} is no port; write host:port[,host:port...]")
        endpoints.append(Endpoint(name, port))
    return tuple(endpoints)


def _has_port(text: str) -> bool:
    return "]:" in text if text.startswith("[") else text.count(":") == 1


def address_towards(host: str) -> str:
    """Return the address of this machine's interface on the way to a host; nothing is sent.

    Raises:
        OSError: The host's name is not known, or there is no way to it.

    Blocks: while the name is looked up.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
