"""TCP stores: hosting one, and connecting to one.

A call on a store whose server died or stopped can block past the store's own timeout. Whoever must not block makes
its calls in a thread that it can give up on; nothing here hides that.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

from torch.distributed import DistError
from torch.distributed import TCPStore as _TCPStore  # type: ignore[attr-defined]

from outlast.errors import RendezvousError
from outlast.runtime.addresses import Endpoint, is_loopback, own_address

__all__ = ["TCPStore", "connect", "host", "open_cycle_store"]

TCPStore = Any
"""torch's ``TCPStore``, whose type stubs lack half of its methods."""


def host(endpoint: Endpoint, *, timeout_s: float) -> TCPStore | None:
    """Host a store; return ``None`` when somebody else already listens there.

    Args:
        endpoint: Where; port 0 takes a free one.
        timeout_s: Timeout of the calls made through the returned store.
    """
    listener = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        # Bound by us, so that losing the race for a port is an answer, not an exception's text.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_any_address(endpoint.host), endpoint.port))
        listener.listen(2048)
    except OSError:
        listener.close()
        return None
    port = listener.getsockname()[1]
    return _TCPStore(
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
        store = _TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (OSError, DistError, RuntimeError) as error:
        raise RendezvousError(
            f"no control store answers at {endpoint} ({error}); is the first agent running?"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=call_timeout_s))
    return store


def _any_address(name: str) -> str:
    if is_loopback(name):
        return own_address(name)
    return "::" if ":" in name else "0.0.0.0"


def open_cycle_store(addr: str, *, timeout_s: float = 600.0) -> TCPStore:
    """Host a cycle's own store on a fresh port of this machine; it dies with the last reference."""
    hosted = host(Endpoint(addr, 0), timeout_s=timeout_s)
    assert hosted is not None, "port 0 is never taken"
    return hosted
