"""Whoever does not know the run's key changes nothing, learns nothing, and keeps nobody out."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from outlast import env
from outlast.checkpoint.manifest import CopyKey, HoldingsError
from outlast.checkpoint.replica import protocol as f
from outlast.checkpoint.replica import server as server_module
from outlast.checkpoint.replica.client import ReplicaError, Replicator, Target, fetch, ping, push
from outlast.checkpoint.replica.protocol import ReplicaChannel
from outlast.checkpoint.shard import CHUNK_BYTES, digest
from outlast.runtime.run_key import RunKey, accept_offer, make_offer
from outlast.runtime.wire import encode_frame

KEY = b"k" * 32
HELLO = struct.pack("!4sH32sq32s", b"OLw1", 1, bytes(32), 0, bytes(32))
"""A client's, with a proof of nothing."""
COPY = CopyKey(120, "job-0", 3)


def connect(node) -> socket.socket:
    return socket.create_connection((node.target.host, node.target.port), 10)


def join(node) -> tuple[socket.socket, ReplicaChannel]:
    """Connect as a peer that knows the key."""
    raw = connect(node)
    channel = ReplicaChannel(raw, 10)
    assert channel.prove_key(KEY, is_server=False, within_s=10)
    return raw, channel


def read_to_end(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes; a timeout fails the test."""
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionResetError:
        pass  # closed with bytes of ours unread
    return data


def end_sending(connection: socket.socket) -> None:
    """Close this side's half; the other side may have closed the whole connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def assert_unharmed(node, hold: Callable[[bytes], int]) -> None:
    """A peer is served as before."""
    assert set(node.memory.parts) <= {COPY}
    assert push(node.target, KEY, COPY, hold(b"shard"), range(1), 5, timeout_s=10) == (digest(b"shard"),)
    assert fetch(node.target, KEY, COPY, hold(bytes(5)), 5, timeout_s=10) == (digest(b"shard"),)


def test_a_wrong_key_is_refused_and_reported_once(node, hold: Callable[[bytes], int]) -> None:
    """The client hears that it is the key; the node reports the address once."""
    for _ in range(3):
        with pytest.raises(ReplicaError, match="rejected this run's key"):
            push(node.target, b"wrong" * 7, COPY, hold(b"evil!"), range(1), 5, timeout_s=10)
    assert node.await_refusal() == ("127.0.0.1", "the other side does not know this run's key")
    assert not node.memory.parts
    assert_unharmed(node, hold)
    assert len(node.refused) == 1


def test_a_node_without_a_key_lets_nobody_in(make_node, hold: Callable[[bytes], int]) -> None:
    """Not even who proves an empty one."""
    node = make_node(key=None)
    with pytest.raises(ReplicaError, match="rejected this run's key"):
        ping(node.target, b"", timeout_s=10)
    assert node.await_refusal()[1] == "this node has no key yet"
    node.server.key = KEY
    assert_unharmed(node, hold)


def test_a_server_that_does_not_know_the_key_gets_nothing() -> None:
    """A stranger on a node's port, who says welcome to everybody, is not given a byte."""
    got: list[bytes] = []

    def impostor(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(10)
            connection.sendall(struct.pack("!4sH32s", b"OLw1", 1, bytes(32)))
            hello = connection.recv(len(HELLO), socket.MSG_WAITALL)
            connection.sendall(hello[-32:])  # the client's own proof
            got.append(read_to_end(connection))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=impostor, args=(listening,))
        thread.start()
        with pytest.raises(ReplicaError, match="the other side does not know this run's key"):
            ping(Target("other", "127.0.0.1", listening.getsockname()[1]), KEY, timeout_s=10)
        thread.join(10)
    assert got == [b""]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 100) + b"\x91" * 100,
        encode_frame(f.Ping()),
        encode_frame(f.Put(COPY, 5)) + b"evil!",
        HELLO + encode_frame(f.Put(COPY, 5)),
    ],
    ids=["foreign", "oversized", "malformed", "ping", "put", "wrong-proof"],
)
def test_who_does_not_authenticate_is_refused(node, hold: Callable[[bytes], int], sent: bytes) -> None:
    """The connection is closed, the address reported, nothing stored; peers are served on."""
    with connect(node) as connection:
        connection.sendall(sent)
        end_sending(connection)
        answer = read_to_end(connection)
    assert len(answer) < 100, "a stranger sees a challenge and nothing more"
    assert node.await_refusal()[0] == "127.0.0.1"
    assert_unharmed(node, hold)


def test_garbage_of_all_kinds_changes_nothing(node, hold: Callable[[bytes], int]) -> None:
    """Two hundred connections that send random bytes, cut or changed frames."""
    chance = random.Random(7)
    good = [encode_frame(f.Put(COPY, 5)), encode_frame(f.Get(COPY, 0, 5)), HELLO]
    for _ in range(200):
        frame = bytearray(chance.choice(good))
        kind = chance.randrange(3)
        if kind == 0:
            frame = bytearray(chance.randbytes(chance.randrange(200)))
        elif kind == 1:
            del frame[chance.randrange(len(frame)) :]
        else:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        with connect(node) as connection:
            connection.sendall(frame)
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused already
            assert len(read_to_end(connection)) < 100
    assert not node.memory.parts
    assert_unharmed(node, hold)
    assert len(node.refused) == 1


def test_garbage_from_a_peer_changes_nothing(node, hold: Callable[[bytes], int]) -> None:
    """A peer that authenticated and then sends what is no message, unsigned or signed, is refused as well."""
    chance = random.Random(11)
    for number in range(60):
        raw, channel = join(node)
        body = chance.randbytes(chance.randrange(1, 200))
        head = struct.pack("<I", len(body))
        assert channel._signer is not None
        tag = channel._signer.sign(head, body) if number % 2 else chance.randbytes(16)
        raw.settimeout(10)
        raw.sendall(head + body + tag)
        assert read_to_end(raw) == b""
        channel.close()
    node.await_refusal()
    assert_unharmed(node, hold)


@pytest.mark.parametrize(
    "message",
    [f.Put(CopyKey(1, "../../etc", 0), 5), f.Get(CopyKey(1, "a", 0, "../passwd"), 0, 5), f.Chunk("x"), f.Kept()],
)
def test_a_peer_cannot_ask_for_what_is_no_request(node, hold: Callable[[bytes], int], message: f.Message) -> None:
    """Names that leave their folder, and messages that are no requests, end the connection."""
    _, channel = join(node)
    channel.send(message)
    assert channel.receive() is None
    channel.close()
    node.await_refusal()
    assert_unharmed(node, hold)


def test_a_crowd_of_silent_strangers_keeps_no_peer_out(node, hold: Callable[[bytes], int]) -> None:
    """The oldest are sent away for the next: threads are bounded, and a peer gets in."""
    most = server_module.MAX_STRANGERS + 2
    crowd = [connect(node) for _ in range(3 * server_module.MAX_STRANGERS)]
    try:
        assert_unharmed(node, hold)
        end = time.monotonic() + 60
        while len([None for one in threading.enumerate() if one.name == "outlast-replica-peer"]) > most:
            assert time.monotonic() < end, "threads are not bounded"
            time.sleep(0.01)
        crowd[0].settimeout(60)
        assert len(read_to_end(crowd[0])) < 100
    finally:
        for connection in crowd:
            connection.close()


def test_who_says_nothing_or_trickles_is_sent_away(make_node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """The time to authenticate is one for all of it."""
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.2)
    node = make_node()
    with connect(node) as silent, connect(node) as trickling:
        trickling.sendall(b"OLr")
        assert len(read_to_end(silent)) < 100
        assert len(read_to_end(trickling)) < 100
    assert node.await_refusal() == ("127.0.0.1", "it did not authenticate in time")
    monkeypatch.undo()
    assert_unharmed(node, hold)


def test_who_leaves_without_a_word_is_not_reported(node, hold: Callable[[bytes], int]) -> None:
    """A probe of the port is no attack, and must not use up the report of one."""
    with connect(node) as connection:
        connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    assert_unharmed(node, hold)
    assert not node.refused


def test_a_closed_server_lets_go_of_everything(make_node, hold: Callable[[bytes], int]) -> None:
    """Its port, its connections and its threads."""
    node = make_node()
    stranger = connect(node)
    _, peer = join(node)
    node.server.close()
    assert len(read_to_end(stranger)) < 100
    assert peer.receive() is None
    stranger.close()
    peer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outlast-replica")]
    with pytest.raises(ReplicaError, match="Connection refused"):
        ping(node.target, KEY, timeout_s=10)


def test_closing_a_server_waits_once_for_all_that_a_disk_keeps(make_node, monkeypatch) -> None:
    """However many peers wait for a disk that hangs, closing takes no longer than with one."""
    node = make_node()
    stuck, freed = threading.Semaphore(0), threading.Event()

    def receive(key: CopyKey, num_bytes: int) -> None:
        stuck.release()
        freed.wait(60)
        raise HoldingsError("the disk came back too late")

    monkeypatch.setattr(node.memory, "receive", receive)
    monkeypatch.setattr(server_module, "CLOSE_S", 1.0)
    peers = [join(node) for _ in range(8)]
    for _, peer in peers:
        peer.send(f.Put(COPY, 5))
        assert stuck.acquire(timeout=10)
    before_s = time.monotonic()
    node.server.close()
    took_s = time.monotonic() - before_s
    freed.set()
    for _, peer in peers:
        peer.close()
    assert took_s < 5, f"{took_s:.1f} s for 8 peers"


class Flipper:
    """A proxy that flips one bit at a place of the stream towards the server or back."""

    def __init__(self, port: int, *, towards_server: bool, offset: int) -> None:
        self._port, self._towards_server, self._offset = port, towards_server, offset
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.target = Target("other", "127.0.0.1", self._listening.getsockname()[1])
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listening.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port), 10)
            back = threading.Thread(target=self._pump, args=(server, client, not self._towards_server))
            back.start()
            self._pump(client, server, self._towards_server)
            back.join(10)
            client.close()
            server.close()

    def _pump(self, source: socket.socket, sink: socket.socket, must_flip: bool) -> None:
        at = 0
        try:
            while part := source.recv(1 << 16):
                data = bytearray(part)
                if must_flip and at <= self._offset < at + len(data):
                    data[self._offset - at] ^= 0x10
                at += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side broke off: so does the other
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


@pytest.fixture
def flip(node):
    flippers: list[Flipper] = []

    def make(*, towards_server: bool, offset: int) -> Target:
        flippers.append(Flipper(node.target.port, towards_server=towards_server, offset=offset))
        return flippers[-1].target

    yield make
    for flipper in flippers:
        flipper.close()


@pytest.mark.parametrize(("towards_server", "wrong"), [(True, 1), (False, 2)], ids=["pushed", "fetched"])
def test_corruption_on_the_way_shows_in_the_receivers_digests(
    node, hold: Callable[[bytes], int], flip, towards_server: bool, wrong: int
) -> None:
    """A bit that flips in the network: exactly that chunk's digest differs from the source's."""
    data = random.Random(1).randbytes(3 * CHUNK_BYTES)
    target = flip(towards_server=towards_server, offset=wrong * CHUNK_BYTES + 12345)
    if towards_server:
        replicator = Replicator(KEY)
        (outcome,) = replicator.replicate(COPY, hold(data), len(data), (target,), timeout_s=10)
        replicator.close()
        found = outcome.chunks
    else:
        node.memory.parts[COPY] = data
        found = fetch(target, KEY, COPY, hold(bytes(len(data))), len(data), timeout_s=10)
    right = [digest(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)]
    assert found is not None
    assert [number for number in range(3) if found[number] != right[number]] == [wrong]


@pytest.mark.parametrize("offset", range(0, 220, 13))
@pytest.mark.parametrize("towards_server", [True, False])
def test_corruption_of_what_is_said_stores_nothing_wrong(
    node, hold: Callable[[bytes], int], flip, towards_server: bool, offset: int
) -> None:
    """A bit that flips in a frame: the copy fails, or what is kept is what was sent under its own name."""
    data = random.Random(3).randbytes(40)
    target = flip(towards_server=towards_server, offset=offset)
    replicator = Replicator(KEY)
    (outcome,) = replicator.replicate(COPY, hold(data), len(data), (target,), timeout_s=1)
    replicator.close()
    assert set(node.memory.parts) <= {COPY}
    if outcome.chunks == (digest(data),):
        assert node.memory.parts == {COPY: data}
    assert_unharmed(node, hold)


def test_a_recorded_session_is_worth_nothing(
    make_node, hold: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a writer of one cycle sent is refused by that cycle's writers, and by those of the next, whose key comes
    from the same run key."""
    monkeypatch.setenv(env.RUN_KEY, RunKey.of_run_id("run").as_variable())
    keys = [accept_offer(make_offer(), "replica port") for _ in range(2)]
    assert keys[0] != keys[1]
    nodes = [make_node(key=key) for key in keys]
    recorded: list[bytes] = []

    def relay(source: socket.socket, target: socket.socket, note: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                note.append(data)
                target.sendall(data)
        end_sending(target)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def record() -> None:
            connection, _ = listening.accept()
            with connection, connect(nodes[0]) as onward:
                back = threading.Thread(target=relay, args=(onward, connection, []))
                back.start()
                relay(connection, onward, recorded)
                back.join(10)

        recorder = threading.Thread(target=record)
        recorder.start()
        target = Target("other", "127.0.0.1", listening.getsockname()[1])
        assert push(target, keys[0], COPY, hold(b"shard"), range(1), 5, timeout_s=10) == (digest(b"shard"),)
        recorder.join(10)
    assert len(b"".join(recorded)) > len(HELLO)
    for number, node in enumerate(nodes):
        node.memory.parts.clear()
        with connect(node) as again:
            with contextlib.suppress(OSError):  # it may be refused before all is sent
                again.sendall(b"".join(recorded))
            end_sending(again)
            read_to_end(again)
        assert node.await_refusal()[1] == "the other side does not know this run's key", number
        assert not node.memory.parts
        assert push(node.target, keys[number], COPY, hold(b"shard"), range(1), 5, timeout_s=10) == (digest(b"shard"),)
