"""The replica port of a node's writer: accepts peers that prove the run's key.

Nothing else of a peer is read before that. A newcomer costs a thread and some kilobytes for at most ``HANDSHAKE_S``; of
more than ``MAX_STRANGERS`` newcomers the oldest is closed; each refused address is reported once. Nothing here imports
torch.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from outlast.checkpoint.manifest import Holdings
from outlast.checkpoint.replica.parity import Parities
from outlast.checkpoint.replica.protocol import ReplicaChannel
from outlast.checkpoint.replica.service import DiskWork, Service
from outlast.runtime.addresses import listen_at
from outlast.runtime.listener import ThreadedListener
from outlast.runtime.wire import ProtocolError

log = logging.getLogger(__name__)
BACKLOG = 128
HANDSHAKE_S = 5.0
IDLE_S = 60.0
"""Seconds without progress after which an authenticated peer is disconnected; its own timeouts are shorter."""
CLOSE_S = 2.0
"""Time limit in seconds for all threads together: a thread that waits for a disk cannot be woken."""
MAX_STRANGERS = 32
MAX_PEERS = 128
MAX_SOURCES = 1024
"""Number of addresses that are reported; further ones are not."""


def _warn_of_refused(source: str, reason: str) -> None:
    log.warning("refused a connection from %s to the replica port: %s", source, reason)


class ReplicaServer:
    """Listen for peers.

    Args:
        key: The run's key; ``None``: no peer is accepted. May be replaced later.
        port: The port to listen at if it is free; 0: any.
        on_refused: Called once for each source address that was refused, with the address and the reason; logs them.
            Thread: the connection's.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        host: str,
        key: bytes | None,
        port: int = 0,
        on_refused: Callable[[str, str], None] = _warn_of_refused,
    ) -> None:
        self.host, self.key = host, key
        self._holdings, self._on_refused = holdings, on_refused
        self._parities, self._disk_work = Parities(holdings), DiskWork()
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        listening = listen_at(host, backlog=BACKLOG, port=port)
        self.port: int = listening.getsockname()[1]
        self._listener = ThreadedListener(
            [listening],
            self._serve,
            name="the replica port",
            max_newcomers=MAX_STRANGERS,
            max_admitted=MAX_PEERS,
        )
        self._thread = threading.Thread(target=self._listener.run, name="outlast-replica-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent. Blocks: until their threads end, ``CLOSE_S`` at most."""
        self._listener.stop(CLOSE_S)
        self._thread.join(CLOSE_S)
        self._parities.close()

    def _serve(self, connection: socket.socket) -> None:
        threading.current_thread().name = "outlast-replica-peer"
        source = "an unknown address"
        try:
            source = connection.getpeername()[0]
            channel = ReplicaChannel(connection, HANDSHAKE_S)
            if not self._admit(connection, channel, source):
                return
            channel.timeout_s = IDLE_S
            Service(channel, self._holdings, self._parities, self._disk_work).run()
        except ProtocolError as error:
            self._refuse(source, str(error))
        except OSError as error:
            log.debug("the connection from %s ended: %s", source, error)

    def _admit(self, connection: socket.socket, channel: ReplicaChannel, source: str) -> bool:
        try:
            if not channel.prove_key(self.key, is_server=True, within_s=HANDSHAKE_S):
                return False
        except TimeoutError:
            self._refuse(source, "it did not authenticate in time")
            return False
        except OSError as error:
            self._refuse(source, str(error))
            return False
        if not self._listener.admit(connection):
            self._refuse(source, f"{MAX_PEERS} peers are connected already")
            return False
        return True

    def _refuse(self, source: str, reason: str) -> None:
        with self._lock:
            if self._listener.is_stopping or source in self._reported or len(self._reported) >= MAX_SOURCES:
                return
            self._reported.add(source)
        self._on_refused(source, reason)
