"""Lifelines: connections that carry nothing, and tell by their end that an agent died.

The kernel closes a killed process's sockets at once, long before its beats are missed. A connection can also break
for reasons of the network, so its end is a question, not an answer: an agent that lives connects again at once,
and only one that does not within :data:`PATIENCE_S` is taken for dead. What dies without a word (a machine without
power) is found by its beats.

Rejected: judging by the store's own connections (``TCPStore`` tells nobody of them), and beats so frequent that a
miss is noticed as soon (a loaded machine misses such beats).
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable

import msgspec

from outlast import clock
from outlast.decoding import from_json

__all__ = ["PATIENCE_S", "Lifeline", "LifelineServer"]

log = logging.getLogger(__name__)
PATIENCE_S = 0.3
"""How long an agent has to connect again."""
_MAX_HELLO_BYTES = 4096


class _LifelineHello(msgspec.Struct, frozen=True):
    node: str
    epoch: str


class LifelineServer:
    """Hold every agent's lifeline, in a thread of the control store's host.

    Args:
        host: Address to listen at; the port is a fresh one.
        on_death: Called in the server's thread with the node, its epoch, and what was seen.
    """

    def __init__(self, host: str, on_death: Callable[[str, str, str], None]) -> None:
        self._on_death = on_death
        self._listener = socket.create_server((host, 0), backlog=2048, reuse_port=False)
        self.port: int = self._listener.getsockname()[1]
        self._stop_read, self._stop_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._held: dict[socket.socket, _LifelineHello | None] = {}
        self._suspects: dict[_LifelineHello, float] = {}
        """Whose lifeline ended, and when they are taken for dead."""
        self._thread = threading.Thread(target=self._run, name="outlast-lifelines", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and let go of every lifeline."""
        self._stop_write.close()
        self._thread.join(2.0)

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        try:
            while self._serve_once():
                pass
        except Exception:
            # Beats still tell who is alive; only the quick way is gone, and that is said.
            log.exception("the connections to the agents failed; lost nodes are now noticed by missing heartbeats only")
        finally:
            for connection in (*self._held, self._listener, self._stop_read):
                connection.close()
            self._selector.close()

    def _serve_once(self) -> bool:
        next_s = min(self._suspects.values(), default=None)
        timeout_s = None if next_s is None else max(0.0, next_s - clock.now_s())
        for key, _ in self._selector.select(timeout_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._stop_read:
                return False
            if connection is self._listener:
                self._accept()
            else:
                self._read(connection)
        now_s = clock.now_s()
        for hello in [one for one, deadline_s in self._suspects.items() if now_s >= deadline_s]:
            del self._suspects[hello]
            self._on_death(hello.node, hello.epoch, "its agent's connection ended and did not come back")
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._held[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_MAX_HELLO_BYTES)
        except OSError:
            data = b""
        if data and self._held[connection] is None:
            try:
                hello = from_json(data, _LifelineHello)
            except msgspec.DecodeError:
                data = b""  # none of ours
            else:
                self._held[connection] = hello
                self._suspects.pop(hello, None)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            gone = self._held.pop(connection)
            if gone is not None and gone not in self._held.values():
                self._suspects[gone] = clock.now_s() + PATIENCE_S


class Lifeline:
    """This agent's lifeline to the control store's host; connects again when it breaks.

    Args:
        host: Where the lifelines' server listens.
        port: Its port.
        node: Name of this node.
        epoch: Names this life of the agent.

    Thread: owns one.
    """

    def __init__(self, host: str, port: int, *, node: str, epoch: str) -> None:
        self._address = (host, port)
        self._hello = msgspec.json.encode(_LifelineHello(node, epoch))
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="outlast-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go."""
        self._closing.set()
        held = self._socket
        if held is not None:
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("the lifeline was broken already: %s", error)
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with socket.create_connection(self._address, timeout=2.0) as held:
                    held.settimeout(None)
                    self._socket = held
                    held.sendall(self._hello)
                    held.recv(1)  # nothing ever comes: this returns when the connection ends
            except OSError as error:
                log.debug("the lifeline broke: %s", error)
                self._closing.wait(PATIENCE_S / 3)
