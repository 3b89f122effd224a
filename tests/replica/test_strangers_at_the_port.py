"""A process without the run's key reads nothing, stores nothing and does not block authenticated peers."""

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
"""A client's handshake with an invalid proof of the key."""
COPY = CopyKey(120, "job-0", 3)


def connect(node) -> socket.socket:
    return socket.create_connection((node.target.host, node.target.port), 10)


def join(node) -> tuple[socket.socket, ReplicaChannel]:
    """Connect and authenticate as a peer."""
    raw = connect(node)
    channel = ReplicaChannel(raw, 10)
    assert channel.prove_key(KEY, is_server=False, within_s=10)
    return raw, channel


def read_to_end(connection: socket.socket) -> bytes:
    """Return the bytes received until the other side closes; a timeout fails the test."""
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionResetError:
        pass  # closed with unread bytes of this side
    return data


def end_sending(connection: socket.socket) -> None:
    """Close this side's half; the other side may have closed the whole connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def assert_serving(node, hold: Callable[[bytes], int]) -> None:
    """Check that the node still serves an authenticated peer."""
    assert set(node.memory.parts) <= {COPY}
    assert push(node.target, KEY, COPY, hold(b"shard"), range(1), 5, timeout_s=10) == (digest(b"shard"),)
    assert fetch(node.target, KEY, COPY, hold(bytes(5)), 5, timeout_s=10) == (digest(b"shard"),)


def test_a_wrong_key_is_rejected_and_reported_once(node, hold: Callable[[bytes], int]) -> None:
    """The client's error contains the key as the reason; the node reports the address once."""
    for _ in range(3):
        with pytest.raises(ReplicaError, match="rejected this run's key"):
            push(node.target, b"wrong" * 7, COPY, hold(b"evil!"), range(1), 5, timeout_s=10)
    assert node.await_refusal() == ("127.0.0.1", "the other side does not know this run's key")
    assert not node.memory.parts
    assert_serving(node, hold)
    assert len(node.refused) == 1


def test_a_node_without_a_key_rejects_all_clients(make_node, hold: Callable[[bytes], int]) -> None:
    """A node without a key also rejects a client that authenticates with an empty key."""
    node = make_node(key=None)
    with pytest.raises(ReplicaError, match="rejected this run's key"):
        ping(node.target, b"", timeout_s=10)
    assert node.await_refusal()[1] == "this node has no key yet"
    node.server.key = KEY
    assert_serving(node, hold)


def test_a_server_without_the_key_receives_nothing() -> None:
    """A client sends no data to a server that does not prove the key."""
    received: list[bytes] = []

    def run_impostor(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(10)
            connection.sendall(struct.pack("!4sH32s", b"OLw1", 1, bytes(32)))
            hello = connection.recv(len(HELLO), socket.MSG_WAITALL)
            connection.sendall(hello[-32:])  # the client's own proof
            received.append(read_to_end(connection))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run_impostor, args=(listening,))
        thread.start()
        with pytest.raises(ReplicaError, match="the other side does not know this run's key"):
            ping(Target("other", "127.0.0.1", listening.getsockname()[1]), KEY, timeout_s=10)
        thread.join(10)
    assert received == [b""]


@pytest.mark.parametrize(
    "payload",
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
def test_an_unauthenticated_client_is_rejected(node, hold: Callable[[bytes], int], payload: bytes) -> None:
    """The connection is closed, the address is reported, nothing is stored, and peers are still served."""
    with connect(node) as connection:
        connection.sendall(payload)
        end_sending(connection)
        answer = read_to_end(connection)
    assert len(answer) < 100, "a stranger sees a challenge and nothing more"
    assert node.await_refusal()[0] == "127.0.0.1"
    assert_serving(node, hold)


def test_random_bytes_change_nothing(node, hold: Callable[[bytes], int]) -> None:
    """Two hundred connections with random bytes and truncated or corrupt frames change nothing."""
    rng = random.Random(7)
    valid_frames = [encode_frame(f.Put(COPY, 5)), encode_frame(f.Get(COPY, 0, 5)), HELLO]
    for _ in range(200):
        frame = bytearray(rng.choice(valid_frames))
        kind = rng.randrange(3)
        if kind == 0:
            frame = bytearray(rng.randbytes(rng.randrange(200)))
        elif kind == 1:
            del frame[rng.randrange(len(frame)) :]
        else:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        with connect(node) as connection:
            connection.sendall(frame)
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # already rejected
            assert len(read_to_end(connection)) < 100
    assert not node.memory.parts
    assert_serving(node, hold)
    assert len(node.refused) == 1


def test_invalid_messages_from_a_peer_are_rejected(node, hold: Callable[[bytes], int]) -> None:
    """An authenticated peer that sends invalid messages, with or without a valid signature, is rejected."""
    rng = random.Random(11)
    for number in range(60):
        raw, channel = join(node)
        body = rng.randbytes(rng.randrange(1, 200))
        head = struct.pack("<I", len(body))
        assert channel.signer is not None
        tag = channel.signer.sign(head, body) if number % 2 else rng.randbytes(16)
        raw.settimeout(10)
        raw.sendall(head + body + tag)
        assert read_to_end(raw) == b""
        channel.close()
    node.await_refusal()
    assert_serving(node, hold)


@pytest.mark.parametrize(
    "message",
    [f.Put(CopyKey(1, "../../etc", 0), 5), f.Get(CopyKey(1, "a", 0, "../passwd"), 0, 5), f.Chunk("x"), f.Kept()],
)
def test_invalid_requests_from_a_peer_are_rejected(node, hold: Callable[[bytes], int], message: f.Message) -> None:
    """Requests with names that leave their folder, and messages that are not requests, end the connection."""
    _, channel = join(node)
    channel.send(message)
    assert channel.receive() is None
    channel.close()
    node.await_refusal()
    assert_serving(node, hold)


def test_many_silent_clients_do_not_block_a_peer(node, hold: Callable[[bytes], int]) -> None:
    """The oldest unauthenticated connections are closed first: threads are bounded, and a peer is served."""
    max_threads = server_module.MAX_STRANGERS + 2
    strangers = [connect(node) for _ in range(3 * server_module.MAX_STRANGERS)]
    try:
        assert_serving(node, hold)
        end = time.monotonic() + 60
        while len([None for one in threading.enumerate() if one.name == "outlast-replica-peer"]) > max_threads:
            assert time.monotonic() < end, "threads are not bounded"
            time.sleep(0.01)
        strangers[0].settimeout(60)
        assert len(read_to_end(strangers[0])) < 100
    finally:
        for connection in strangers:
            connection.close()


def test_a_slow_handshake_times_out(make_node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """One timeout covers the whole handshake of a silent or slow client."""
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.2)
    node = make_node()
    with connect(node) as silent_client, connect(node) as slow_client:
        slow_client.sendall(b"OLr")
        assert len(read_to_end(silent_client)) < 100
        assert len(read_to_end(slow_client)) < 100
    assert node.await_refusal() == ("127.0.0.1", "it did not authenticate in time")
    monkeypatch.undo()
    assert_serving(node, hold)


def test_a_port_probe_is_not_reported(node, hold: Callable[[bytes], int]) -> None:
    """A connection that closes without sending is not reported, so that it does not use up the one report."""
    with connect(node) as connection:
        connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    assert_serving(node, hold)
    assert not node.refused


def test_close_releases_port_connections_and_threads(make_node, hold: Callable[[bytes], int]) -> None:
    """``close`` releases the server's port, connections and threads."""
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


def test_close_waits_once_for_a_hung_disk(make_node, monkeypatch) -> None:
    """Closing takes one timeout however many peers wait for a hung disk."""
    node = make_node()
    num_blocked, released = threading.Semaphore(0), threading.Event()

    def receive(key: CopyKey, num_bytes: int) -> None:
        num_blocked.release()
        released.wait(60)
        raise HoldingsError("the disk came back too late")

    monkeypatch.setattr(node.memory, "receive", receive)
    monkeypatch.setattr(server_module, "CLOSE_S", 1.0)
    peers = [join(node) for _ in range(8)]
    for _, peer in peers:
        peer.send(f.Put(COPY, 5))
        assert num_blocked.acquire(timeout=10)
    start_s = time.monotonic()
    node.server.close()
    duration_s = time.monotonic() - start_s
    released.set()
    for _, peer in peers:
        peer.close()
    assert duration_s < 5, f"{duration_s:.1f} s for 8 peers"


class BitFlippingProxy:
    """A proxy that flips one bit of the stream in one direction."""

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
        except OSError:  # one side closed: close the other
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


@pytest.fixture
def flip(node):
    proxies: list[BitFlippingProxy] = []

    def make(*, towards_server: bool, offset: int) -> Target:
        proxies.append(BitFlippingProxy(node.target.port, towards_server=towards_server, offset=offset))
        return proxies[-1].target

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize(("towards_server", "corrupt_chunk"), [(True, 1), (False, 2)], ids=["pushed", "fetched"])
def test_corruption_in_the_network_changes_the_digests(
    node, hold: Callable[[bytes], int], flip, towards_server: bool, corrupt_chunk: int
) -> None:
    """A bit flipped in the network changes the digest of exactly its chunk."""
    data = random.Random(1).randbytes(3 * CHUNK_BYTES)
    target = flip(towards_server=towards_server, offset=corrupt_chunk * CHUNK_BYTES + 12345)
    if towards_server:
        replicator = Replicator(KEY)
        (outcome,) = replicator.replicate(COPY, hold(data), len(data), (target,), timeout_s=10)
        replicator.close()
        received_digests = outcome.chunks
    else:
        node.memory.parts[COPY] = data
        received_digests = fetch(target, KEY, COPY, hold(bytes(len(data))), len(data), timeout_s=10)
    expected_digests = [digest(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)]
    assert received_digests is not None
    assert [number for number in range(3) if received_digests[number] != expected_digests[number]] == [corrupt_chunk]


@pytest.mark.parametrize("offset", range(0, 220, 13))
@pytest.mark.parametrize("towards_server", [True, False])
def test_a_corrupt_frame_stores_no_wrong_bytes(
    node, hold: Callable[[bytes], int], flip, towards_server: bool, offset: int
) -> None:
    """A bit flipped in a frame fails the copy, or the stored part equals the sent one under its key."""
    data = random.Random(3).randbytes(40)
    target = flip(towards_server=towards_server, offset=offset)
    replicator = Replicator(KEY)
    (outcome,) = replicator.replicate(COPY, hold(data), len(data), (target,), timeout_s=1)
    replicator.close()
    assert set(node.memory.parts) <= {COPY}
    if outcome.chunks == (digest(data),):
        assert node.memory.parts == {COPY: data}
    assert_serving(node, hold)


def test_a_recorded_session_cannot_be_replayed(
    make_node, hold: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded connection is rejected by the writers of the same cycle and of the next cycle.

    Both cycles' keys derive from the same run key.
    """
    monkeypatch.setenv(env.RUN_KEY, RunKey.of_run_id("run").as_variable())
    keys = [accept_offer(make_offer(), "replica port") for _ in range(2)]
    assert keys[0] != keys[1]
    nodes = [make_node(key=key) for key in keys]
    recorded: list[bytes] = []

    def relay(source: socket.socket, target: socket.socket, record_to: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                record_to.append(data)
                target.sendall(data)
        end_sending(target)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def record() -> None:
            connection, _ = listening.accept()
            with connection, connect(nodes[0]) as forward:
                back = threading.Thread(target=relay, args=(forward, connection, []))
                back.start()
                relay(connection, forward, recorded)
                back.join(10)

        recorder = threading.Thread(target=record)
        recorder.start()
        target = Target("other", "127.0.0.1", listening.getsockname()[1])
        assert push(target, keys[0], COPY, hold(b"shard"), range(1), 5, timeout_s=10) == (digest(b"shard"),)
        recorder.join(10)
    assert len(b"".join(recorded)) > len(HELLO)
    for number, node in enumerate(nodes):
        node.memory.parts.clear()
        with connect(node) as replay:
            with contextlib.suppress(OSError):  # the connection may be closed before all is sent
                replay.sendall(b"".join(recorded))
            end_sending(replay)
            read_to_end(replay)
        assert node.await_refusal()[1] == "the other side does not know this run's key", number
        assert not node.memory.parts
        assert push(node.target, keys[number], COPY, hold(b"shard"), range(1), 5, timeout_s=10) == (digest(b"shard"),)
