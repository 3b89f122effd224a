"""Hosting and connecting to torch's TCPStores, where torch itself needs one.

A call on a store whose server died or stopped can block past the store's own timeout. Callers that must not block make
their calls in a thread that they can abandon.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

from outlast import env
from outlast.errors import RendezvousError
from outlast.runtime.addresses import Endpoint, listen_at, listening_addresses

TCPStore = Any
"""torch's ``TCPStore``, whose type stubs lack half of its methods."""


def host(endpoint: Endpoint, *, timeout_s: float) -> TCPStore | None:
    """Host a TCPStore; return ``None`` if another process already listens there."""
    found = listening_addresses(endpoint.host, interface=env.interface())
    if not found:
        return None
    family, address = found[0]
    if len(found) > 1:  # torch's store has one socket, but peers and local ranks use different addresses
        families = {one for one, _ in found}
        family, address = (socket.AF_INET6, "::") if socket.AF_INET6 in families else (socket.AF_INET, "0.0.0.0")
    try:
        # Bound here, so that a lost race for a port is a return value, not the text of an exception.
        listener = socket.create_server(
            (address, endpoint.port), family=family, backlog=2048, dualstack_ipv6=address == "::"
        )
    except OSError:
        return None
    return _serve(endpoint.host, listener, timeout_s)


def _serve(name: str, listener: socket.socket, timeout_s: float) -> TCPStore:
    endpoint = Endpoint(name, listener.getsockname()[1])
    return _torch_store(endpoint, timeout_s, is_master=True, master_listen_fd=listener.detach())


def connect(endpoint: Endpoint, *, timeout_s: float, call_timeout_s: float) -> TCPStore:
    """Connect to a TCPStore.

    Args:
        timeout_s: How long to try.
        call_timeout_s: Timeout of calls through it.

    Raises: RendezvousError: No store responds in time. Blocks: up to ``timeout_s``.
    """
    from torch.distributed import DistError

    try:
        # A plain connection first: it fails at once if no process listens, and without C++ log lines.
        socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s).close()
        store = _torch_store(endpoint, timeout_s, is_master=False)
    except (OSError, DistError, RuntimeError) as error:
        raise RendezvousError(
            f"the TCPStore at {endpoint} does not respond ({error}); check that the process that hosts it is running"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=call_timeout_s))
    return store


def _torch_store(endpoint: Endpoint, timeout_s: float, **options: Any) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(endpoint.host, endpoint.port, timeout=timeout, wait_for_workers=False, **options)


def open_cycle_store(addr: str, *, timeout_s: float = 600.0) -> TCPStore:
    """Host the TCPStore of a cycle on a fresh port of this machine; it ends with the last reference.

    Args:
        addr: This node's address, by which its own ranks reach the store as well. If it belongs to another machine (a
            gateway that forwards connections), the store listens on all addresses.

    Raises: RendezvousError: No port is free.
    """
    here = [address for _, address in listening_addresses(addr)]
    everywhere = "::" if ":" in addr else "0.0.0.0"
    try:
        listener = listen_at(here[-1] if here else everywhere, backlog=2048)  # peers reach the last one
    except OSError as error:
        raise RendezvousError(f"the ranks' store cannot listen at {addr} ({error.strerror or error})") from error
    return _serve(here[-1] if here else "localhost", listener, timeout_s)
