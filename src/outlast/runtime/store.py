"""torch's TCP stores, where torch itself needs one: hosting one, connecting to one.

A call on a store whose server died or stopped can block past the store's own timeout. Whoever must not block makes
its calls in a thread that it can give up on; nothing here hides that.
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
    """Host a store; return ``None`` when somebody else already listens there.

    Args:
        endpoint: Where; port 0 takes a free one.
        timeout_s: Timeout of the calls made through the returned store.
    """
    found = listening_addresses(endpoint.host, interface=env.interface())
    if not found:
        return None
    family, address = found[0]
    if len(found) > 1:  # torch's store has one socket: peers and local ranks are led to different addresses
        families = {one for one, _ in found}
        family, address = (socket.AF_INET6, "::") if socket.AF_INET6 in families else (socket.AF_INET, "0.0.0.0")
    try:
        # Bound by us, so that losing the race for a port is an answer, not an exception's text.
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
    """Connect to a store.

    Args:
        endpoint: Where it is hosted.
        timeout_s: How long to try.
        call_timeout_s: Timeout of the calls made through it.

    Raises:
        RendezvousError: Nobody answers there in time.

    Blocks: up to ``timeout_s``.
    """
    from torch.distributed import DistError

    try:
        # A plain connection first: it fails at once where nobody listens, and without lines of C++ log.
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
    """Host a cycle's own store on a fresh port of this machine; it dies with the last reference.

    Args:
        addr: This node's address, by which its own ranks reach the store as well. One that is another machine's (a
            gateway that passes connections on) has the store listen on all addresses.
        timeout_s: Timeout of the calls made through the returned store.

    Raises:
        RendezvousError: No port is free.
    """
    here = [address for _, address in listening_addresses(addr)]
    everywhere = "::" if ":" in addr else "0.0.0.0"
    try:
        listener = listen_at(here[-1] if here else everywhere, backlog=2048)  # the last one is what peers reach
    except OSError as error:
        raise RendezvousError(f"the ranks' store cannot listen at {addr} ({error.strerror or error})") from error
    return _serve(here[-1] if here else "localhost", listener, timeout_s)
