"""torch's TCP stores, where torch itself needs one: hosting one, connecting to one.

A call on a store whose server died or stopped can block past the store's own timeout. Whoever must not block makes
its calls in a thread that it can give up on; nothing here hides that.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

from outlast.errors import RendezvousError
from outlast.runtime.addresses import Endpoint, is_loopback, own_address

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
        any_address = "::" if ":" in endpoint.host else "0.0.0.0"
        address = own_address(endpoint.host) if is_loopback(endpoint.host) else any_address
        listener.bind((address, endpoint.port))
        listener.listen(2048)
    except OSError:
        listener.close()
        return None
    port = listener.getsockname()[1]
    return _torch_store(Endpoint(endpoint.host, port), timeout_s, is_master=True, master_listen_fd=listener.detach())


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
            f"no store answers at {endpoint} ({error}); is the process that hosts it running?"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=call_timeout_s))
    return store


def _torch_store(endpoint: Endpoint, timeout_s: float, **options: Any) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(endpoint.host, endpoint.port, timeout=timeout, wait_for_workers=False, **options)


def open_cycle_store(addr: str, *, timeout_s: float = 600.0) -> TCPStore:
    """Host a cycle's own store on a fresh port of this machine; it dies with the last reference."""
    hosted = host(Endpoint(addr, 0), timeout_s=timeout_s)
    assert hosted is not None, "port 0 is never taken"
    return hosted
