"""The port at which a node's writer takes and gives copies, and what it does with strangers there.

Whoever connects must prove the run's key before anything else is listened to. A stranger costs a thread and some
kilobytes for at most ``HANDSHAKE_S``, no more than ``MAX_STRANGERS`` do at a time (the oldest is sent away for the
next), and each address is reported once. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from outlast.checkpoint.manifest import Holdings
from outlast.checkpoint.replica.channel import Channel, NotAuthenticated
from outlast.checkpoint.replica.frames import FrameError
from outlast.checkpoint.replica.parity import Parities
from outlast.checkpoint.replica.service import Service

__all__ = ["ReplicaServer"]

log = logging.getLogger(__name__)
BACKLOG = 128
HANDSHAKE_S = 5.0
IDLE_S = 60.0
"""Seconds without progress after which an authenticated peer is left; its own timeouts are shorter."""
ACCEPT_PAUSE_S = 0.1
"""Seconds before the next attempt when the system gives no connection, for lack of descriptors."""
MAX_STRANGERS = 32
MAX_PEERS = 128
MAX_SOURCES = 1024
"""Addresses that are remembered as reported; from then on no other is reported."""


class ReplicaServer:
    """Listen for peers.

    Args:
        holdings: What this node keeps.
        host: Address of the interface to listen on.
        key: Returns the run's key, or ``None`` while there is none: nobody is let in then.
        on_refused: Called once for each source address that was refused, with the address and the reason.
            Thread: the connection's.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        host: str,
        key: Callable[[], bytes | None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._holdings, self._key, self._on_refused = holdings, key, on_refused
        self._parities = Parities(holdings)
        self._lock = threading.Lock()
        self._strangers: dict[Channel, threading.Thread] = {}
        self._peers: dict[Channel, threading.Thread] = {}
        self._reported: set[str] = set()
        self._stopping = threading.Event()
        self._socket = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
        self._acceptor = threading.Thread(target=self._accept, name="outlast-replica-port", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """The port that the system chose."""
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent. Blocks: until their threads end, about 2 s at most."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            threads = [self._acceptor, *self._strangers.values(), *self._peers.values()]
            for channel in (*self._strangers, *self._peers):
                channel.abort()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        for thread in threads:
            thread.join(2.0)
        self._socket.close()
        self._parities.close()

    def _accept(self) -> None:
        """Thread: the acceptor's."""
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._stopping.wait(ACCEPT_PAUSE_S):
                    return
                log.warning("the replica port cannot accept a connection (%s)", error.strerror)
                continue
            try:
                channel = Channel(connection, HANDSHAKE_S)
            except OSError:
                connection.close()  # it was reset meanwhile
                continue
            source = address[0]
            thread = threading.Thread(
                target=self._serve, args=(channel, source), name="outlast-replica-peer", daemon=True
            )
            with self._lock:
                if self._stopping.is_set():
                    channel.close()
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.abort()
                self._strangers[channel] = thread
            thread.start()

    def _serve(self, channel: Channel, source: str) -> None:
        """Thread: the connection's."""
        try:
            if not self._admit(channel, source):
                return
            channel.set_timeout(IDLE_S)
            Service(channel, self._holdings, self._parities).run()
        except FrameError as error:
            self._refuse(source, str(error))
        except OSError as error:
            log.debug("the connection from %s ended: %s", source, error)
        finally:
            with self._lock:
                self._strangers.pop(channel, None)
                self._peers.pop(channel, None)
            channel.close()

    def _admit(self, channel: Channel, source: str) -> bool:
        """Let a stranger prove that it is a peer."""
        try:
            if not channel.challenge_client(self._key(), HANDSHAKE_S):
                return False
        except TimeoutError:
            self._refuse(source, "it did not authenticate in time")
            return False
        except (NotAuthenticated, FrameError, OSError) as error:
            self._refuse(source, str(error))
            return False
        with self._lock:
            if self._stopping.is_set():
                return False
            if len(self._peers) >= MAX_PEERS:
                is_full = True
            else:
                is_full = False
                self._strangers.pop(channel, None)
                self._peers[channel] = threading.current_thread()
        if is_full:
            self._refuse(source, f"{MAX_PEERS} peers are connected already")
        return not is_full

    def _refuse(self, source: str, reason: str) -> None:
        """Report a source, once."""
        with self._lock:
            if self._stopping.is_set() or source in self._reported or len(self._reported) >= MAX_SOURCES:
                return
            self._reported.add(source)
        self._on_refused(source, reason)
