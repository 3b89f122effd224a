"""Parts go to another node's writer and come back."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
from replica_nodes import Arriving, Memory

from outlast.checkpoint.manifest import MANIFEST_PART, CopyKey
from outlast.checkpoint.replica import client
from outlast.checkpoint.replica.client import ReplicaError, Replicator, Target, fetch, push, read_small
from outlast.checkpoint.replica.protocol import Put, Working
from outlast.checkpoint.shard import CHUNK_BYTES, digest

KEY = b"k" * 32
COPY = CopyKey(120, "job-0", 3)
SIZES = [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 11 * CHUNK_BYTES + 12345]


def make_bytes(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


def digests_of(data: bytes) -> tuple[str, ...]:
    return tuple(digest(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_copy_is_what_was_sent(node, hold: Callable[[bytes], int], num_bytes: int) -> None:
    """Whatever its size, the other node holds the same bytes, and says so by digests of its own."""
    data = make_bytes(num_bytes)
    replicator = Replicator(KEY)
    (outcome,) = replicator.replicate(COPY, hold(data), num_bytes, (node.target,), timeout_s=10)
    replicator.close()
    assert outcome.error is None
    assert outcome.chunks == digests_of(data)
    assert node.memory.parts == {COPY: data}
    assert node.memory.num_open == 0


@pytest.mark.parametrize("num_connections", [1, 2, 3])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_fetched_is_what_is_held(
    node, hold: Callable[[bytes], int], monkeypatch, num_bytes: int, num_connections: int
) -> None:
    """A part comes back whole, over however many connections, with the digests of what arrived."""
    monkeypatch.setattr(client, "NUM_CONNECTIONS", num_connections)
    data = make_bytes(num_bytes)
    node.memory.parts[COPY] = data
    fd = hold(bytes(num_bytes))
    assert fetch(node.target, KEY, COPY, fd, num_bytes, timeout_s=10) == digests_of(data)
    assert os.pread(fd, num_bytes + 1, 0) == data


def test_a_flipped_byte_in_the_held_copy_shows_in_the_digests(node, hold: Callable[[bytes], int]) -> None:
    """The digests are those of the bytes that arrived, not of those that were once sent."""
    data = make_bytes(3 * CHUNK_BYTES)
    push(node.target, KEY, COPY, hold(data), range(3), len(data), timeout_s=10)
    bad = bytearray(data)
    bad[CHUNK_BYTES + 7] ^= 1
    node.memory.parts[COPY] = bytes(bad)
    right = digests_of(data)
    found = fetch(node.target, KEY, COPY, hold(bytes(len(data))), len(data), timeout_s=10)
    assert [number for number in range(3) if found[number] != right[number]] == [1]


def test_several_targets_get_their_copies_at_once(make_node, hold: Callable[[bytes], int]) -> None:
    """Every target has its own outcome, in the order asked for."""
    data = make_bytes(CHUNK_BYTES + 5)
    nodes = [make_node(name) for name in "abc"]
    replicator = Replicator(KEY)
    outcomes = replicator.replicate(COPY, hold(data), len(data), tuple(n.target for n in nodes), timeout_s=10)
    replicator.close()
    assert [(outcome.node, outcome.chunks) for outcome in outcomes] == [(name, digests_of(data)) for name in "abc"]
    assert all(node.memory.parts == {COPY: data} for node in nodes)


def test_a_small_part_is_read_whole_or_refused(node) -> None:
    """A manifest is read into memory, unless it is larger than what was let in."""
    key = CopyKey(120, "job-0", 0, MANIFEST_PART)
    node.memory.parts[key] = b"{}" * 100
    assert read_small(node.target, KEY, key, max_bytes=200, timeout_s=10) == b"{}" * 100
    with pytest.raises(ReplicaError, match="200 bytes, more than the 199"):
        read_small(node.target, KEY, key, max_bytes=199, timeout_s=10)


def test_a_part_that_is_not_there_is_named(node, hold: Callable[[bytes], int]) -> None:
    """The error says which node lacks what."""
    with pytest.raises(ReplicaError, match=r"node other: it does not hold the shard of rank 3 of checkpoint 120"):
        fetch(node.target, KEY, COPY, hold(bytes(10)), 10, timeout_s=10)


def test_a_part_of_another_size_is_refused(node, hold: Callable[[bytes], int]) -> None:
    """What is held must be as long as the manifest says."""
    node.memory.parts[COPY] = bytes(11)
    with pytest.raises(ReplicaError, match=r"holds 11 bytes of the shard .* instead of 10"):
        fetch(node.target, KEY, COPY, hold(bytes(10)), 10, timeout_s=10)


def test_a_node_without_room_says_why(node, hold: Callable[[bytes], int]) -> None:
    """A refused copy is an outcome with its reason; the node is asked again next time."""
    node.memory.refusal = "the disk is full"
    data = make_bytes(100)
    replicator = Replicator(KEY)
    fd = hold(data)
    (first,) = replicator.replicate(COPY, fd, 100, (node.target,), timeout_s=10)
    (second,) = replicator.replicate(COPY, fd, 100, (node.target,), timeout_s=10)
    node.memory.refusal = None
    (third,) = replicator.replicate(COPY, fd, 100, (node.target,), timeout_s=10)
    replicator.close()
    assert first.error == "node other: the disk is full"
    assert (first.is_new, second.is_new) == (True, False)
    assert third.chunks == digests_of(data)


def test_a_copy_that_cannot_be_written_leaves_nothing(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """A disk that fills up midway: the sender hears why, the receiver forgets the part and goes on serving."""
    data = make_bytes(6 * CHUNK_BYTES)

    def full(fd: int, piece: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outlast.checkpoint.replica.service.write_all", full)
    with pytest.raises(ReplicaError, match="it cannot be written: No space left on device"):
        push(node.target, KEY, COPY, hold(data), range(6), len(data), timeout_s=10)
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: node.memory.num_open == 0, timeout=10)
    assert not node.memory.parts
    monkeypatch.undo()
    push(node.target, KEY, COPY, hold(data), range(6), len(data), timeout_s=10)
    assert node.memory.parts == {COPY: data}


def test_a_sender_that_breaks_off_leaves_nothing(node, hold: Callable[[bytes], int]) -> None:
    """A file that is shorter than announced ends the connection; the half part is forgotten."""
    with pytest.raises(ReplicaError, match="the file ends 5 bytes too early"):
        push(node.target, KEY, COPY, hold(bytes(95)), range(1), 100, timeout_s=10)
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: node.memory.num_open == 0, timeout=10)
    assert not node.memory.parts


def test_nobody_there_is_an_outcome(hold: Callable[[bytes], int]) -> None:
    """A port that nobody listens on."""
    replicator = Replicator(KEY)
    (outcome,) = replicator.replicate(COPY, hold(b"x"), 1, (Target("gone", "127.0.0.1", 1),), timeout_s=10)
    replicator.close()
    assert outcome.chunks is None
    assert outcome.is_new
    assert outcome.error == "node gone (127.0.0.1:1): Connection refused"


def test_one_connection_that_breaks_fails_the_fetch(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """A part is never returned with a range missing, and all threads end."""
    monkeypatch.setattr(client, "NUM_CONNECTIONS", 2)
    data = make_bytes(12 * CHUNK_BYTES)
    node.memory.parts[COPY] = data
    original = client._fetch_ranges

    def break_second(*arguments) -> None:
        if threading.current_thread().name == "outlast-fetch":
            raise ConnectionResetError("it ended the connection")
        original(*arguments)

    monkeypatch.setattr(client, "_fetch_ranges", break_second)
    with pytest.raises(ReplicaError, match="it ended the connection"):
        fetch(node.target, KEY, COPY, hold(bytes(len(data))), len(data), timeout_s=10)
    assert not [thread for thread in threading.enumerate() if thread.name in ("outlast-fetch", "outlast-map")]


def test_a_file_that_is_too_short_to_land_in_is_refused(node, hold: Callable[[bytes], int]) -> None:
    """The caller's mistake is an error, not a signal."""
    node.memory.parts[COPY] = bytes(10)
    with pytest.raises(ReplicaError, match="no room for the 10 bytes"):
        fetch(node.target, KEY, COPY, hold(bytes(9)), 10, timeout_s=10)


def test_a_slow_disk_is_waited_for(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """A partner that takes longer to make a copy durable than the timeout says that it goes on."""
    monkeypatch.setattr("outlast.checkpoint.replica.service.WORKING_S", 0.05)
    keep = Arriving.keep

    def slow(self) -> None:
        threading.Event().wait(4.0)
        keep(self)

    monkeypatch.setattr(Arriving, "keep", slow)
    push(node.target, KEY, COPY, hold(b"shard"), range(1), 5, timeout_s=2)
    assert node.memory.parts == {COPY: b"shard"}


def test_a_sender_that_leaves_while_room_is_made_leaves_nothing(
    node, hold: Callable[[bytes], int], monkeypatch
) -> None:
    """A disk that is slow to give room: when it does, and nobody waits any more, the room is given back."""
    monkeypatch.setattr("outlast.checkpoint.replica.service.WORKING_S", 0.02)
    may_go_on = threading.Event()
    receive = Memory.receive

    def slow(self, key: CopyKey, num_bytes: int) -> Arriving:
        assert may_go_on.wait(10)
        return receive(self, key, num_bytes)

    monkeypatch.setattr(Memory, "receive", slow)
    with client.connect(node.target, KEY, timeout_s=10) as channel:
        channel.send(Put(COPY, 5))
        assert isinstance(channel.receive(), Working)
    may_go_on.set()
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: node.memory.num_received and not node.memory.num_open, timeout=10)
    assert not node.memory.parts
