"""Accept connections: the one accept loop of the package.

* :class:`Acceptor` passes each connection to its owner.
* :class:`Listener` keeps newcomers, connections whose peers have not identified themselves, in an event loop, and
  bounds their number and time.
* :class:`ThreadedListener` serves each connection in a thread, and bounds the number of newcomers.

A process without free descriptors leaves connections in the kernel's backlog and retries: a loop that continued to poll
the socket would use a whole core. Peers at a Unix address are accepted from this user only, since an abstract address
has no permissions. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from outlast import clock
from outlast.runtime.processes import peer_user
from outlast.runtime.wire import MAX_MESSAGE_BYTES, AuthenticationFailed, BufferedChannel, Handshake, SelectedChannel

log = logging.getLogger(__name__)
R = TypeVar("R")
_ACCEPTS = 256
"""Connections accepted at once, before others are served again."""
_PAUSE_S = 0.1
"""Seconds without accepting while the system has no descriptor for another connection."""
_WARN_S = 10.0
"""Seconds between two warnings of one kind: a flood of connections must not fill the log."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNUSABLE = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)


class Acceptor:
    """Accept connections in an event loop.

    Args:
        selector: Of the loop; what it reports with a callable as data is called with the events.
        sockets: Bound and listening; this object owns them.
        on_connection: Receives each connection, and owns it.
        name: Of the listener, for the log.

    Thread: the loop's.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sockets: Sequence[socket.socket],
        on_connection: Callable[[socket.socket], object],
        *,
        name: str,
    ) -> None:
        self._selector, self._sockets, self._on_connection = selector, sockets, on_connection
        self._name = name
        self._accepts_again_s: float | None = None
        self._warns_again_s: dict[str, float] = {}
        for listening in sockets:
            listening.setblocking(False)
        self._resume()

    @property
    def deadline_s(self) -> float | None:
        return self._accepts_again_s

    def serve(self, now_s: float) -> None:
        if self._accepts_again_s is not None and now_s >= self._accepts_again_s:
            self._resume()

    def run_once(self, wait_s: float | None = None) -> bool:
        """Handle the loop's next events, for an owner that has no loop.

        Args:
            wait_s: Seconds to wait for events; ``None``: any number.

        Returns:
            ``False``: there was no event, and no connection waits for a descriptor.
        """
        is_paused = self._accepts_again_s is not None
        due = [one for one in (wait_s, _left_s(self.deadline_s)) if one is not None]
        came = self._selector.select(min(due, default=None))
        for key, events in came:
            key.data(events)
        self.serve(clock.now_s())
        return bool(came) or is_paused

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for listening in self._sockets:
            if self._accepts_again_s is None and listening.fileno() >= 0:
                self._selector.unregister(listening)
            listening.close()
        self._accepts_again_s = None

    def _resume(self) -> None:
        self._accepts_again_s = None
        for listening in self._sockets:
            self._selector.register(listening, selectors.EVENT_READ, partial(self._accept, listening))

    def _accept(self, listening: socket.socket, _: int) -> None:
        for _number in range(
            _ACCEPTS if self._accepts_again_s is None else 0
        ):  # another socket's event may have paused
            try:
                connection, _address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _UNUSABLE:
                    raise
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # the peer closed the connection before it was accepted
            if connection.family == socket.AF_UNIX and peer_user(connection) != os.getuid():
                connection.close()
                continue
            self._on_connection(connection)

    def _pause(self, error: OSError) -> None:
        self._warn(
            "exhausted",
            "%s cannot accept connections (%s) and retries every %g s; raise the limit of open files (ulimit -n)",
            *(self._name, error.strerror, _PAUSE_S),
        )
        for listening in self._sockets:
            self._selector.unregister(listening)
        self._accepts_again_s = clock.now_s() + _PAUSE_S

    def _warn(self, kind: str, text: str, *args: object) -> None:
        if clock.now_s() >= self._warns_again_s.get(kind, 0.0):
            self._warns_again_s[kind] = clock.now_s() + _WARN_S
            log.warning(text, *args)


class Listener(Acceptor, Generic[R]):
    """Accept connections, and keep each as a newcomer until its owner admits it.

    Args:
        selector: Of the loop; what it reports with a callable as data is called with the events.
        sockets: Bound and listening; this object owns them.
        receives: Union of the messages that come.
        on_newcomer: Receives the messages of a newcomer; calls :meth:`admit` or :meth:`drop`, or leaves the connection
            to its time limit.
        name: Of the listener, for the log.
        join_s: Time limit in seconds for a newcomer.
        max_newcomers: One more closes the oldest.
        handshake: Makes this side's part in the proof of a key; ``None``: peers need none.
        max_bytes: Limit of a newcomer's message.

    Thread: the loop's.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sockets: Sequence[socket.socket],
        receives: Any,
        on_newcomer: Callable[[SelectedChannel[R], list[R]], None],
        *,
        name: str,
        join_s: float,
        max_newcomers: int,
        handshake: Callable[[], Handshake] | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._receives, self._on_newcomer, self._handshake, self._max_bytes = (
            receives,
            on_newcomer,
            handshake,
            max_bytes,
        )
        self._join_s, self._max_newcomers = join_s, max_newcomers
        self._newcomers: dict[SelectedChannel[R], float] = {}
        """Time limits of newcomers, oldest first."""
        super().__init__(selector, sockets, self._take, name=name)

    @property
    def deadline_s(self) -> float | None:
        due = [one for one in (super().deadline_s, next(iter(self._newcomers.values()), None)) if one is not None]
        return min(due, default=None)

    def serve(self, now_s: float) -> None:
        """Accept again, and close newcomers whose time is over. Blocks: never."""
        super().serve(now_s)
        while self._newcomers and now_s >= next(iter(self._newcomers.values())):
            self.drop(next(iter(self._newcomers)), f"its peer did not join within {self._join_s:g} s")

    def is_newcomer(self, link: SelectedChannel[R]) -> bool:
        return link in self._newcomers

    def admit(self, link: SelectedChannel[R]) -> None:
        """Give a newcomer to the caller, which owns it and replaces its callbacks."""
        del self._newcomers[link]

    def drop(self, link: SelectedChannel[R], why: object) -> None:
        log.debug("%s closed a connection: %s", self._name, why)
        del self._newcomers[link]
        link.close()

    def drop_all(self, why: str) -> None:
        """Close all newcomers, after sending their pending data. Blocks: up to 0.05 s for each."""
        for link in list(self._newcomers):
            link.channel.drain(0.05)
            self.drop(link, why)

    def close(self) -> None:
        super().close()
        self.drop_all("it stops listening")

    def _take(self, connection: socket.socket) -> None:
        channel: BufferedChannel[R] = BufferedChannel(
            connection,
            self._receives,
            handshake=None if self._handshake is None else self._handshake(),
            max_bytes=self._max_bytes,
        )
        link = SelectedChannel(self._selector, channel, self._on_newcomer, self._on_broken)
        self._newcomers[link] = clock.now_s() + self._join_s
        if len(self._newcomers) > self._max_newcomers:
            self.drop(next(iter(self._newcomers)), "too many connections have not joined")

    def _on_broken(self, link: SelectedChannel[R], error: OSError) -> None:
        if isinstance(error, AuthenticationFailed):
            self._warn("refused", "%s refused a connection: %s", self._name, error)
        self.drop(link, error)

    def _pause(self, error: OSError) -> None:
        super()._pause(error)
        for link in [link for link in self._newcomers if not link.channel.is_authenticated]:
            self.drop(link, "no descriptors are left, and it has not proved the key")


class ThreadedListener(Acceptor):
    """Accept connections, and serve each in a thread.

    Args:
        sockets: Bound and listening; this object owns them.
        serve_connection: Called with each connection in its thread; the connection is closed after the call.
        name: Of the listener, for the log.
        max_newcomers: Connections that may be open without :meth:`admit`; one more shuts the oldest down; ``None``: any
            number. ``serve_connection`` limits their time.
        max_admitted: Connections that may be open after :meth:`admit`; ``None``: any number.

    Thread: :meth:`run` in one; :meth:`admit` in the connection's; :meth:`stop` in any.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        serve_connection: Callable[[socket.socket], None],
        *,
        name: str,
        max_newcomers: int | None = None,
        max_admitted: int | None = None,
    ) -> None:
        self._serve_connection = serve_connection
        self._max_newcomers, self._max_admitted = max_newcomers, max_admitted
        self._lock = threading.Lock()
        self._newcomers: dict[socket.socket, threading.Thread] = {}
        self._admitted: dict[socket.socket, threading.Thread] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.is_stopping = False
        selector = selectors.DefaultSelector()
        selector.register(self._wake, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wake))
        super().__init__(selector, sockets, self._begin, name=name)

    def run(self, linger_s: float | None = None) -> None:
        """Accept until :meth:`stop`, or until no connection has been open for ``linger_s`` seconds; then close."""
        with self._selector:
            while not self.is_stopping:
                is_idle = linger_s is not None and not self._newcomers and not self._admitted
                if not self.run_once(linger_s if is_idle else None) and is_idle:
                    break
            self.close()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def admit(self, connection: socket.socket) -> bool:
        """Count a newcomer as identified; return ``False`` where :meth:`stop` was called or there is no room."""
        with self._lock:
            is_full = self._max_admitted is not None and len(self._admitted) >= self._max_admitted
            if is_full or self.is_stopping:
                return False
            self._newcomers.pop(connection, None)
            self._admitted[connection] = threading.current_thread()
            return True

    def stop(self, timeout_s: float) -> None:
        """Stop listening and shut all connections down. Idempotent. Blocks: until their threads end, ``timeout_s`` at
        most."""
        with self._lock:
            if self.is_stopping:
                return
            self.is_stopping = True
            threads = {**self._newcomers, **self._admitted}
            for connection in threads:
                _shut_down(connection)
            self._wake_loop()
        end_s = clock.now_s() + timeout_s
        for thread in threads.values():
            thread.join(max(0.0, end_s - clock.now_s()))

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._run_thread, args=(connection,), name="outlast-connection", daemon=True)
        with self._lock:
            if self.is_stopping:
                connection.close()
                return
            if self._max_newcomers is not None and len(self._newcomers) >= self._max_newcomers:
                oldest = next(iter(self._newcomers))
                del self._newcomers[oldest]
                _shut_down(oldest)
            try:
                thread.start()
            except RuntimeError as error:
                self._warn("threads", "%s closed a connection: %s", self._name, error)
                connection.close()
            else:
                self._newcomers[connection] = thread

    def _run_thread(self, connection: socket.socket) -> None:
        try:
            self._serve_connection(connection)
        finally:
            with self._lock:
                self._newcomers.pop(connection, None)
                self._admitted.pop(connection, None)
                connection.close()
                self._wake_loop()

    def _wake_loop(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)


def _shut_down(connection: socket.socket) -> None:
    """End what a connection's thread waits for; that thread closes the connection."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer ended it before


def _left_s(until_s: float | None) -> float | None:
    return None if until_s is None else max(0.0, until_s - clock.now_s())
