"""The store on which the ranks of one iteration meet: its own for each, hosted by the iteration's rank 0.

Everybody who may become rank 0 binds a socket beforehand and tells its address; the one who does hands its socket to
the store. So the address is known before the iteration begins, and no port is ever taken by somebody else.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

from torch.distributed import TCPStore as _TCPStore  # type: ignore[attr-defined]

__all__ = ["IterationStore"]


class IterationStore:
    """A bound socket that may become an iteration's store.

    Args:
        host: Address of this machine at which the other ranks reach it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener: socket.socket | None = socket.create_server((host, 0), family=family, backlog=2048)
        self._port: int = self._listener.getsockname()[1]
        self._host = host
        self._store: Any = None

    @property
    def address(self) -> str:
        """``host port``."""
        return f"{self._host} {self._port}"

    def serve(self, *, timeout_s: float) -> None:
        """Host the store. Blocks: never."""
        assert self._listener is not None, "closed, or served already"
        self._store = _TCPStore(
            self._host,
            self._port,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        self._listener = None

    def close(self) -> None:
        """Stop hosting; whoever still uses the store fails. Idempotent."""
        self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
