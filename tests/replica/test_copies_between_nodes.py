"""Transfer of parts to another node's writer and back."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
from replica_nodes import IncomingPart, Memory

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
def test_a_replica_holds_the_bytes_that_were_sent(node, hold: Callable[[bytes], int], num_bytes: int) -> None:
    """The other node holds the same bytes at any size, and reports digests that it computed itself."""
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
def test_a_fetch_returns_the_bytes_that_are_held(
    node, hold: Callable[[bytes], int], monkeypatch, num_bytes: int, num_connections: int
) -> None:
    """A part is fetched completely over any number of connections, with the digests of the received bytes."""
    monkeypatch.setattr(client, "NUM_CONNECTIONS", num_connections)
    data = make_bytes(num_bytes)
    node.memory.parts[COPY] = data
    fd = hold(bytes(num_bytes))
    assert fetch(node.target, KEY, COPY, fd, num_bytes, timeout_s=10) == digests_of(data)
    assert os.pread(fd, num_bytes + 1, 0) == data


def test_a_flipped_byte_in_a_replica_changes_its_digest(node, hold: Callable[[bytes], int]) -> None:
    """A fetch returns the digests of the received bytes, not those of the bytes that were pushed."""
    data = make_bytes(3 * CHUNK_BYTES)
    push(node.target, KEY, COPY, hold(data), range(3), len(data), timeout_s=10)
    bad = bytearray(data)
    bad[CHUNK_BYTES + 7] ^= 1
    node.memory.parts[COPY] = bytes(bad)
    expected_digests = digests_of(data)
    received_digests = fetch(node.target, KEY, COPY, hold(bytes(len(data))), len(data), timeout_s=10)
    assert [number for number in range(3) if received_digests[number] != expected_digests[number]] == [1]


def test_a_shard_is_replicated_to_several_targets(make_node, hold: Callable[[bytes], int]) -> None:
    """Each target has an outcome, in the order of the targets."""
    data = make_bytes(CHUNK_BYTES + 5)
    nodes = [make_node(name) for name in "abc"]
    replicator = Replicator(KEY)
    outcomes = replicator.replicate(COPY, hold(data), len(data), tuple(n.target for n in nodes), timeout_s=10)
    replicator.close()
    assert [(outcome.node, outcome.chunks) for outcome in outcomes] == [(name, digests_of(data)) for name in "abc"]
    assert all(node.memory.parts == {COPY: data} for node in nodes)


def test_a_small_part_is_read_up_to_its_limit(node) -> None:
    """A manifest is read into memory; a larger one than the limit is rejected."""
    key = CopyKey(120, "job-0", 0, MANIFEST_PART)
    node.memory.parts[key] = b"{}" * 100
    assert read_small(node.target, KEY, key, max_bytes=200, timeout_s=10) == b"{}" * 100
    with pytest.raises(ReplicaError, match="200 bytes, more than the 199"):
        read_small(node.target, KEY, key, max_bytes=199, timeout_s=10)


def test_a_missing_part_is_reported_with_its_node(node, hold: Callable[[bytes], int]) -> None:
    """The error contains the node and the missing part."""
    with pytest.raises(ReplicaError, match=r"node other: it does not hold the shard of rank 3 of checkpoint 120"):
        fetch(node.target, KEY, COPY, hold(bytes(10)), 10, timeout_s=10)


def test_a_part_of_another_size_is_rejected(node, hold: Callable[[bytes], int]) -> None:
    """A held part whose size differs from the manifest is rejected."""
    node.memory.parts[COPY] = bytes(11)
    with pytest.raises(ReplicaError, match=r"holds 11 bytes of the shard .* instead of 10"):
        fetch(node.target, KEY, COPY, hold(bytes(10)), 10, timeout_s=10)


def test_a_rejected_copy_is_reported_with_its_reason(node, hold: Callable[[bytes], int]) -> None:
    """A rejected copy is an outcome with the node's reason; the next save tries the node again."""
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


def test_a_failed_write_discards_the_copy(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """A full disk during a copy fails it with the reason; the receiver drops the part and continues to serve."""
    data = make_bytes(6 * CHUNK_BYTES)

    def full_disk(fd: int, piece: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outlast.checkpoint.replica.service.write_all", full_disk)
    with pytest.raises(ReplicaError, match="it cannot be written: No space left on device"):
        push(node.target, KEY, COPY, hold(data), range(6), len(data), timeout_s=10)
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: node.memory.num_open == 0, timeout=10)
    assert not node.memory.parts
    monkeypatch.undo()
    push(node.target, KEY, COPY, hold(data), range(6), len(data), timeout_s=10)
    assert node.memory.parts == {COPY: data}


def test_an_aborted_transfer_discards_the_copy(node, hold: Callable[[bytes], int]) -> None:
    """A file shorter than announced ends the connection, and the receiver drops the partial part."""
    with pytest.raises(ReplicaError, match="the file ends 5 bytes too early"):
        push(node.target, KEY, COPY, hold(bytes(95)), range(1), 100, timeout_s=10)
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: node.memory.num_open == 0, timeout=10)
    assert not node.memory.parts


def test_a_refused_connection_is_an_outcome(hold: Callable[[bytes], int]) -> None:
    """A port without a listener gives an outcome with the error."""
    replicator = Replicator(KEY)
    (outcome,) = replicator.replicate(COPY, hold(b"x"), 1, (Target("gone", "127.0.0.1", 1),), timeout_s=10)
    replicator.close()
    assert outcome.chunks is None
    assert outcome.is_new
    assert outcome.error == "node gone (127.0.0.1:1): Connection refused"


def test_one_broken_connection_fails_the_fetch(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """A broken connection fails the whole fetch, and all its threads exit."""
    monkeypatch.setattr(client, "NUM_CONNECTIONS", 2)
    data = make_bytes(12 * CHUNK_BYTES)
    node.memory.parts[COPY] = data
    original = client.fetch_ranges

    def break_second(*arguments) -> None:
        if threading.current_thread().name == "outlast-fetch":
            raise ConnectionResetError("it ended the connection")
        original(*arguments)

    monkeypatch.setattr(client, "fetch_ranges", break_second)
    with pytest.raises(ReplicaError, match="it ended the connection"):
        fetch(node.target, KEY, COPY, hold(bytes(len(data))), len(data), timeout_s=10)
    assert not [thread for thread in threading.enumerate() if thread.name in ("outlast-fetch", "outlast-map")]


def test_a_target_file_that_is_too_short_is_rejected(node, hold: Callable[[bytes], int]) -> None:
    """A target file shorter than the part is rejected with an error instead of a SIGBUS."""
    node.memory.parts[COPY] = bytes(10)
    with pytest.raises(ReplicaError, match="no room for the 10 bytes"):
        fetch(node.target, KEY, COPY, hold(bytes(9)), 10, timeout_s=10)


def test_a_slow_disk_does_not_fail_the_copy(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """A partner that needs longer than the timeout to store a copy reports progress, and the copy succeeds."""
    monkeypatch.setattr("outlast.checkpoint.replica.service.WORKING_S", 0.05)
    keep = IncomingPart.keep

    def slow_call(self) -> None:
        threading.Event().wait(4.0)
        keep(self)

    monkeypatch.setattr(IncomingPart, "keep", slow_call)
    push(node.target, KEY, COPY, hold(b"shard"), range(1), 5, timeout_s=2)
    assert node.memory.parts == {COPY: b"shard"}


def test_memory_of_a_lost_sender_is_released(node, hold: Callable[[bytes], int], monkeypatch) -> None:
    """Memory that a slow disk allocates after the sender has disconnected is released."""
    monkeypatch.setattr("outlast.checkpoint.replica.service.WORKING_S", 0.02)
    release = threading.Event()
    receive = Memory.receive

    def slow_call(self, key: CopyKey, num_bytes: int) -> IncomingPart:
        assert release.wait(10)
        return receive(self, key, num_bytes)

    monkeypatch.setattr(Memory, "receive", slow_call)
    with client.connect(node.target, KEY, timeout_s=10) as channel:
        channel.send(Put(COPY, 5))
        assert isinstance(channel.receive(), Working)
    release.set()
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: node.memory.num_received and not node.memory.num_open, timeout=10)
    assert not node.memory.parts
