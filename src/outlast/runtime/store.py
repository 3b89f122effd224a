"""TCP stores: hosting one, connecting to one, and who may host at an endpoint.

A call on a store whose server died or stopped can block past the store's own timeout. Whoever must not block makes
its calls in a thread that it can give up on; nothing here hides that.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass

from torch.distributed import DistError, TCPStore

from outlast.errors import ConfigError, RendezvousError

__all__ = ["Endpoint", "connect", "host", "parse_endpoints"]


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


def parse_endpoints(text: str, *, default_port: int = 29400) -> tuple[Endpoint, ...]:
    """Return the endpoints in ``host[:port][,host[:port]...]``.

    Raises:
        ConfigError: A port is no number between 0 and 65535, or there is no host.
    """
    endpoints = []
    for part in text.split(","):
        name, _, port_text = part.strip().rpartition(":") if _has_port(part.strip()) else (part.strip(), "", "")
        name = name.strip("[]")
        if not name:
            raise ConfigError(f"--rdzv-endpoint={text!r} names no host; write host:port[,host:port...]")
        try:
            port = int(port_text) if port_text else default_port
        except ValueError:
            port = -1
        if not 0 <= port < 65536:
            raise ConfigError(f"--rdzv-endpoint={text!r}: {port_text!r} is no port; write host:port[,host:port...]")
        endpoints.append(Endpoint(name, port))
    return tuple(endpoints)


def _has_port(text: str) -> bool:
    return "]:" in text if text.startswith("[") else text.count(":") == 1


def host(endpoint: Endpoint, *, timeout_s: float) -> TCPStore | None:
    """Host a store; return ``None`` when somebody else already listens there.

    Args:
        endpoint: Where; port 0 takes a free one.
        timeout_s: Timeout of the calls made through the returned store.
    """
    listener = socket.socket(_family(endpoint.host), socket.SOCK_STREAM)
    try:
        # Bound by us, so that losing the race for a port is an answer, not an exception's text.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_any_address(endpoint.host), endpoint.port))
        listener.listen(2048)
    except OSError:
        listener.close()
        return None
    port = listener.getsockname()[1]
    return TCPStore(
        endpoint.host,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(endpoint: Endpoint, *, timeout_s: float, call_timeout_s: float) -> TCPStore:
    """Connect to a store.

    Args:
        endpoint: Where it is hosted.
        timeout_s: How long to try.
        call_timeout_s: Timeout of the calls made through it.

    Raises:
        RendezvousError: Nobody answers there in time.

    Blocks: up to ``timeout_s``.
    """
    try:
        # A plain connection first: it fails at once where nobody listens, and without lines of C++ log.
        socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s).close()
        store = TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (OSError, DistError, RuntimeError) as error:
        raise RendezvousError(f"no control store answers at {endpoint} ({error}); is the first agent running?") from error
    store.set_timeout(datetime.timedelta(seconds=call_timeout_s))
    return store


def _family(name: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in name else socket.AF_INET


def _any_address(name: str) -> str:
    if name in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1" if ":" not in name else "::1"
    return "::" if ":" in name else "0.0.0.0"


