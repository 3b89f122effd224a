"""Accepted connections: newcomers are limited in number and time, and a lack of descriptors is survived."""

from __future__ import annotations

import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from outlast import clock
from outlast.runtime.listener import Listener, ThreadedListener
from outlast.runtime.wire import BufferedChannel, Handshake, SelectedChannel, encode_frame

LIMIT_S = 100.0
Link = SelectedChannel["Name"]


class Name(msgspec.Struct, tag=True):
    """The first message of a peer."""

    text: str


class Server:
    """An event loop with a listener that admits every peer which sends its name."""

    def __init__(self, *, key: bytes | None = None, join_s: float = LIMIT_S, max_newcomers: int = 8) -> None:
        family = socket.AF_UNIX if key is None else socket.AF_INET
        listening = socket.socket(family)
        listening.bind("" if key is None else ("127.0.0.1", 0))
        listening.listen(128)
        self.family, self.address = family, listening.getsockname()
        self.selector = selectors.DefaultSelector()
        self.admitted: dict[str, Link] = {}
        self.listener: Listener[Name] = Listener(
            self.selector,
            [listening],
            Name,
            self._admit,
            name="the test",
            join_s=join_s,
            max_newcomers=max_newcomers,
            handshake=None if key is None else partial(Handshake, key, "test", is_server=True),
        )

    def connect(self) -> socket.socket:
        peer = socket.socket(self.family)
        peer.settimeout(LIMIT_S)
        peer.connect(self.address)
        return peer

    def turn(self, wait_s: float = 0.2) -> None:
        for key, events in self.selector.select(wait_s):
            key.data(events)
        self.listener.serve(clock.now_s())

    def talk(self, channel: BufferedChannel[Any]) -> None:
        while True:
            self.turn(0.01)
            channel.receive()

    def close(self) -> None:
        self.listener.close()
        for link in self.admitted.values():
            link.close()
        self.selector.close()

    def _admit(self, link: Link, received: list[Name]) -> None:
        self.listener.admit(link)
        link.on_broken = lambda link, error: link.close()
        self.admitted[received[0].text] = link


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Prevent this process from opening another descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        try:
            while True:
                opened.callback(os.close, os.dup(0))
        except OSError:
            pass
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_closed(peer: socket.socket) -> bool:
    try:
        while peer.recv(1 << 12):
            pass
    except ConnectionError:
        return True
    return True


def test_flood_of_newcomers_closes_the_oldest() -> None:
    """One newcomer above the limit costs the oldest newcomer its connection; new peers can still connect."""
    with closing(Server(max_newcomers=3)) as server, ExitStack() as stack:
        peers = [stack.enter_context(server.connect()) for _ in range(5)]
        server.turn()
        assert all(map(is_closed, peers[:2]))
        peers[4].sendall(encode_frame(Name(text="the last")))
        server.turn()
        assert list(server.admitted) == ["the last"]


@pytest.mark.parametrize("key", [None, b"the key"])
def test_silent_newcomer_is_closed_after_join_s(key: bytes | None) -> None:
    """A peer that sends nothing, or too little to prove the key, is disconnected after ``join_s``; an admitted peer
    is not."""
    with closing(Server(key=key, join_s=0.2)) as server, server.connect() as silent, server.connect() as known:
        if key is None:
            known.sendall(encode_frame(Name(text="known")))
        else:
            silent.sendall(b"OLw1")
        server.turn()
        assert server.listener.deadline_s is not None
        while server.listener.deadline_s is not None:
            server.turn()
        assert is_closed(silent)
        assert list(server.admitted) == (["known"] if key is None else [])


def test_peer_without_the_key_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A flood of connections with a wrong key is logged once, and their messages are not decoded."""
    with closing(Server(key=b"the key")) as server, ExitStack() as stack:
        for _ in range(20):
            channel: BufferedChannel[Any] = BufferedChannel(
                server.connect(), Name, handshake=Handshake(b"another", "test", is_server=False)
            )
            stack.enter_context(closing(channel))
            channel.send(Name(text="stranger"))
            with pytest.raises(ConnectionError):
                server.talk(channel)
    assert not server.admitted
    assert [record.levelno for record in caplog.records if "refused a connection" in record.message] == [
        logging.WARNING
    ]


@pytest.mark.parametrize("key", [None, b"the key"])
def test_listener_survives_a_lack_of_descriptors(key: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """Without a free descriptor the loop pauses without spinning, drops peers that have not proved the key and keeps
    the others; waiting connections are accepted once descriptors are free again."""
    with closing(Server(key=key)) as server, server.connect() as early, server.connect() as late:
        server.turn()
        with server.connect() as third, no_free_descriptors():
            server.turn()
            began_s, turns = time.monotonic(), 0
            while time.monotonic() < began_s + 0.3:
                server.turn(0.05)
                turns += 1
            assert turns < 30
            (record,) = [record for record in caplog.records if "cannot accept connections" in record.message]
            assert "ulimit" in record.message
            third.close()
        if key is not None:
            assert is_closed(early)
            return
        late.sendall(encode_frame(Name(text="late")))
        while not server.admitted:
            server.turn()


@contextmanager
def threaded(
    serve: Callable[[ThreadedListener, socket.socket], None],
    *,
    linger_s: float | None = None,
    max_newcomers: int | None = None,
    max_admitted: int | None = None,
) -> Iterator[tuple[ThreadedListener, threading.Thread, Callable[[], socket.socket]]]:
    """Run a listener that serves each connection in a thread; yield it, its thread and a function that connects."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("")
    listening.listen(128)
    address = listening.getsockname()
    listener = ThreadedListener(
        [listening],
        lambda connection: serve(listener, connection),
        name="the test",
        max_newcomers=max_newcomers,
        max_admitted=max_admitted,
    )
    thread = threading.Thread(target=listener.run, args=(linger_s,))
    thread.start()

    def connect() -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(LIMIT_S)
        try:
            peer.connect(address)
        except OSError:
            peer.close()
            raise
        return peer

    try:
        yield listener, thread, connect
    finally:
        listener.stop(LIMIT_S)
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def echo_if_admitted(listener: ThreadedListener, connection: socket.socket) -> None:
    """Admit a peer that sends something, and send everything back."""
    while data := connection.recv(1 << 12):
        if data == b"admit" and not listener.admit(connection):
            return
        connection.sendall(data)


def test_each_connection_is_served_in_a_thread() -> None:
    """A silent newcomer does not delay another peer, and one newcomer above the limit closes the oldest; admitted
    connections do not count as newcomers."""
    with threaded(echo_if_admitted, max_newcomers=2, max_admitted=1) as (_, _, connect), ExitStack() as stack:
        admitted = stack.enter_context(connect())
        admitted.sendall(b"admit")
        assert admitted.recv(16) == b"admit"
        peers = [stack.enter_context(connect()) for _ in range(3)]
        assert is_closed(peers[0])
        peers[1].sendall(b"admit")
        assert is_closed(peers[1])  # one is admitted already
        peers[2].sendall(b"ping")
        admitted.sendall(b"ping")
        assert peers[2].recv(16) == admitted.recv(16) == b"ping"


def test_stopped_listener_closes_all_connections() -> None:
    """``stop()`` wakes threads that wait for a peer; new connections are refused, and a second call does nothing."""
    with threaded(echo_if_admitted) as (listener, thread, connect), connect() as known, connect() as newcomer:
        known.sendall(b"admit")
        assert known.recv(16) == b"admit"
        newcomer.sendall(b"ping")
        assert newcomer.recv(16) == b"ping"
        listener.stop(LIMIT_S)
        assert is_closed(known)
        assert is_closed(newcomer)
        thread.join(LIMIT_S)
        with pytest.raises(ConnectionRefusedError):
            connect()
        listener.stop(0.0)


def test_listener_ends_linger_s_after_its_last_connection() -> None:
    """With ``linger_s`` a listener lives as long as a connection is open, and ``linger_s`` longer."""
    with threaded(echo_if_admitted, linger_s=0.2) as (_, thread, connect):
        with connect() as peer:
            peer.sendall(b"ping")
            assert peer.recv(16) == b"ping"
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_idle_listener_survives_a_lack_of_descriptors() -> None:
    """A peer that waits for a descriptor is served later, although no connection was open for longer than
    ``linger_s``."""
    with threaded(echo_if_admitted, linger_s=0.3) as (_, thread, connect):
        with connect() as first:
            first.sendall(b"ping")
            assert first.recv(16) == b"ping"
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.settimeout(LIMIT_S)
            with connect() as address:
                peer = address.getpeername()
            with no_free_descriptors():
                waiting.connect(peer)
                thread.join(0.8)
                assert thread.is_alive()
            waiting.sendall(b"ping")
            assert waiting.recv(16) == b"ping"
