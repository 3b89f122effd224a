"""Parities instead of copies: the shard of one lost node is rebuilt."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.manifest import CopyKey, HoldingsError
from outlast.checkpoint.replica import client, parity
from outlast.checkpoint.replica.client import CopyOutcome, Holder, ParityMember, ReplicaError, Replicator, push, rebuild
from outlast.checkpoint.replica.parity import PARITY_PART, Parities, blocks_of, holders_of, xor_into
from outlast.checkpoint.shard import CHUNK_BYTES, digest

KEY = b"k" * 32


class Group:
    """A parity group whose members replicate their shards."""

    def __init__(self, make_node, ranks: tuple[int, ...], sizes: list[int]) -> None:
        self.ranks = ranks
        self.nodes = {rank: make_node(f"node{rank}") for rank in ranks}
        self.shards = {rank: random.Random(rank).randbytes(n) for rank, n in zip(ranks, sizes, strict=True)}
        self.members = tuple(ParityMember(rank, len(self.shards[rank]), self.nodes[rank].target) for rank in ranks)

    def replicate(self, rank: int, fd: int) -> tuple[CopyOutcome, ...]:
        holders = tuple(Holder(other, self.nodes[other].target) for other in holders_of(self.ranks, rank))
        replicator = Replicator(KEY)
        try:
            return replicator.replicate(CopyKey(7, "a", rank), fd, len(self.shards[rank]), holders, timeout_s=10)
        finally:
            replicator.close()

    def hold_shards(self) -> None:
        for rank, node in self.nodes.items():
            node.memory.parts[CopyKey(7, "a", rank)] = self.shards[rank]


def digests_of(data: bytes) -> tuple[str, ...]:
    return tuple(digest(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        ((0, 1, 2), [5 * CHUNK_BYTES + 17, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES - 1]),
        ((1, 4, 9, 11), [100, 7 * CHUNK_BYTES, CHUNK_BYTES + 1, 0]),
        ((2, 3), [CHUNK_BYTES + 3, 5]),
    ],
)
def test_any_one_lost_shard_is_rebuilt(
    make_node, hold: Callable[[bytes], int], ranks: tuple[int, ...], sizes: list[int]
) -> None:
    """The shard of any one lost node is rebuilt byte by byte, for any shard sizes."""
    group = Group(make_node, ranks, sizes)
    for rank in ranks:
        outcomes = group.replicate(rank, hold(group.shards[rank]))
        blocks = blocks_of(len(group.shards[rank]), len(ranks) - 1)
        expected_digests = digests_of(group.shards[rank])
        assert [outcome.chunks for outcome in outcomes] == [
            expected_digests[block.start : block.stop] for block in blocks
        ]
    group.hold_shards()
    for rank in ranks:
        fd = hold(bytes(len(group.shards[rank])))
        rebuilt_digests = rebuild(CopyKey(7, "a", rank), group.members, KEY, fd, timeout_s=10)
        assert os.pread(fd, len(group.shards[rank]) + 1, 0) == group.shards[rank]
        assert rebuilt_digests == digests_of(group.shards[rank])


@pytest.mark.extended
def test_a_parity_needs_a_fraction_of_a_shard(make_node, hold: Callable[[bytes], int]) -> None:
    """With four nodes, each node holds one third of a shard for the others."""
    group = Group(make_node, (0, 1, 2, 3), [6 * CHUNK_BYTES] * 4)
    for rank in group.ranks:
        group.replicate(rank, hold(group.shards[rank]))
    for rank, node in group.nodes.items():
        assert list(node.memory.parts) == [CopyKey(7, "a", rank, PARITY_PART)]
        assert len(node.memory.parts[CopyKey(7, "a", rank, PARITY_PART)]) == 2 * CHUNK_BYTES


def test_a_parity_is_stored_after_its_last_block(make_node, hold: Callable[[bytes], int]) -> None:
    """A parity can be fetched only after the last member has sent its block."""
    group = Group(make_node, (0, 1, 2), [CHUNK_BYTES] * 3)
    group.replicate(0, hold(group.shards[0]))
    group.replicate(1, hold(group.shards[1]))
    assert not group.nodes[0].memory.parts
    group.replicate(2, hold(group.shards[2]))
    assert all(CopyKey(7, "a", rank, PARITY_PART) in group.nodes[rank].memory.parts for rank in (0, 1))


def test_a_flipped_byte_in_a_parity_changes_the_digests(make_node, hold: Callable[[bytes], int]) -> None:
    """A shard rebuilt from a corrupt parity has other digests than the original."""
    group = Group(make_node, (0, 1, 2), [2 * CHUNK_BYTES] * 3)
    for rank in group.ranks:
        group.replicate(rank, hold(group.shards[rank]))
    group.hold_shards()
    key = CopyKey(7, "a", 1, PARITY_PART)
    bad = bytearray(group.nodes[1].memory.parts[key])
    bad[99] ^= 4
    group.nodes[1].memory.parts[key] = bytes(bad)
    rebuilt_digests = rebuild(CopyKey(7, "a", 0), group.members, KEY, hold(bytes(2 * CHUNK_BYTES)), timeout_s=10)
    expected_digests = digests_of(group.shards[0])
    assert rebuilt_digests[0] != expected_digests[0]
    assert rebuilt_digests[1] == expected_digests[1]


def test_a_second_lost_node_is_reported(make_node, hold: Callable[[bytes], int]) -> None:
    """A rebuild with two lost members fails with an error that contains the second one."""
    group = Group(make_node, (0, 1, 2), [CHUNK_BYTES] * 3)
    for rank in group.ranks:
        group.replicate(rank, hold(group.shards[rank]))
    group.nodes[2].server.close()
    with pytest.raises(ReplicaError, match=r"node node2 .*Connection refused"):
        rebuild(CopyKey(7, "a", 0), group.members, KEY, hold(bytes(CHUNK_BYTES)), timeout_s=10)


def test_an_aborted_block_discards_its_parity_only(make_node, hold: Callable[[bytes], int]) -> None:
    """An aborted block discards its parity with an error for the others; the next attempt succeeds."""
    node = make_node()
    data = bytes(CHUNK_BYTES)

    def push_block(contributor: int, attempt: str, fd: int) -> None:
        key = CopyKey(7, attempt, 0, PARITY_PART)
        push(
            node.target,
            KEY,
            key,
            fd,
            range(1),
            CHUNK_BYTES,
            timeout_s=10,
            contributor=contributor,
            num_contributors=2,
        )

    with pytest.raises(ReplicaError, match="too early"):
        push_block(1, "a", hold(bytes(CHUNK_BYTES // 2)))
    with suppress(ReplicaError):  # the node may not have detected the abort yet
        push_block(2, "a", hold(data))
    with pytest.raises(ReplicaError, match=r"given up|contradicts"):
        push_block(1, "a", hold(data))
    assert not node.memory.parts
    push_block(1, "b", hold(data))
    push_block(2, "b", hold(data))
    assert list(node.memory.parts) == [CopyKey(7, "b", 0, PARITY_PART)]


def test_a_duplicate_block_is_rejected() -> None:
    """A second block of the same member is rejected, because it would cancel the first."""
    parities = Parities(None)
    key = CopyKey(7, "a", 0, PARITY_PART)
    parities.begin(key, 1, 2)
    with pytest.raises(HoldingsError, match="rank 1 contradicts"):
        parities.begin(key, 1, 2)
    with pytest.raises(HoldingsError, match="rank 2 contradicts"):
        parities.begin(key, 2, 3)
    parities.begin(key, 2, 2)
    with pytest.raises(HoldingsError, match="rank 3 contradicts"):
        parities.begin(key, 3, 2)
    parities.close()


def test_unfinished_parities_are_bounded() -> None:
    """A rank has at most two unfinished parities; the memory of older ones is released."""
    parities = Parities(None)
    num_fds_before = len(os.listdir("/proc/self/fd"))
    first = parities.begin(CopyKey(0, "a", 0, PARITY_PART), 1, 2)
    for iteration in range(1, 10):
        parities.begin(CopyKey(iteration, "a", 0, PARITY_PART), 1, 2)
    assert len(os.listdir("/proc/self/fd")) == num_fds_before + parity.MAX_UNFINISHED
    with pytest.raises(HoldingsError, match="a newer one replaced it"):
        first.write(memoryview(b"x"), 0)
    parities.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds_before


def test_a_parity_closed_during_its_last_block_is_not_stored(make_node, monkeypatch) -> None:
    """A parity that is closed while its last block is kept is not stored, because its memory is already released."""
    memory = make_node().memory
    parities = Parities(memory)
    block = parities.begin(CopyKey(0, "a", 0, PARITY_PART), 1, 1)
    block.write(memoryview(b"x"), 0)
    finish = parities.finish

    def close_before_finish(parity_file) -> None:
        parities.close()
        finish(parity_file)

    monkeypatch.setattr(parities, "finish", close_before_finish)
    with pytest.raises(HoldingsError, match="given up"):
        block.keep()
    assert not memory.parts


@given(st.integers(0, 100 * CHUNK_BYTES), st.integers(1, 9))
def test_blocks_cover_each_chunk_once(num_bytes: int, num_holders: int) -> None:
    """Blocks are consecutive, the longest first, and none exceeds its share rounded up."""
    blocks = blocks_of(num_bytes, num_holders)
    assert len(blocks) == num_holders
    assert [chunk for block in blocks for chunk in block] == list(range(-(-num_bytes // CHUNK_BYTES)))
    assert max(len(block) for block in blocks) <= -(-num_bytes // (CHUNK_BYTES * num_holders))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9, unique=True))
def test_each_member_holds_a_block_of_each_other(group: list[int]) -> None:
    """The first blocks of different members are sent to different members."""
    holders = {rank: holders_of(group, rank) for rank in group}
    assert all(sorted((rank, *holders[rank])) == sorted(group) for rank in group)
    assert sorted(holders[rank][0] for rank in group) == sorted(group)


@given(st.binary(min_size=1, max_size=64), st.binary(max_size=64))
def test_xor_changes_only_the_covered_bytes(base: bytes, piece: bytes) -> None:
    """Bytes after the end of the piece stay, as if the piece were padded with zeros."""
    piece = piece[: len(base)]
    output = bytearray(base)
    xor_into(output, piece)
    padded = piece + bytes(len(base) - len(piece))
    assert bytes(output) == bytes(a ^ b for a, b in zip(base, padded, strict=True))


@settings(max_examples=60)
@given(st.data())
def test_shards_of_unequal_sizes_are_rebuilt(data: st.DataObject) -> None:
    """For any group and shard sizes, each shard is the XOR of the pieces in its rebuild plan."""
    chunk = 4
    ranks = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True).map(sorted))
    shards = {rank: data.draw(st.binary(max_size=40)) for rank in ranks}
    with pytest.MonkeyPatch.context() as patch:
        for module in (parity, client):
            patch.setattr(module, "CHUNK_BYTES", chunk, raising=False)
        patch.setattr(parity, "num_chunks", lambda num_bytes: -(-num_bytes // chunk))
        parts: dict[CopyKey, bytes] = {CopyKey(1, "a", rank): shard for rank, shard in shards.items()}
        for holder in ranks:
            total = bytearray(64)
            length = 0
            for rank in ranks:
                if rank != holder:
                    block = blocks_of(len(shards[rank]), len(ranks) - 1)[holders_of(ranks, rank).index(holder)]
                    piece = shards[rank][block.start * chunk : block.stop * chunk]
                    xor_into(total, piece)
                    length = max(length, len(piece))
            parts[CopyKey(1, "a", holder, PARITY_PART)] = bytes(total[:length])
        members = [ParityMember(rank, len(shards[rank]), None) for rank in ranks]  # type: ignore[arg-type]
        for lost in ranks:
            rebuilt = b""
            for pieces in client.plan_rebuild(CopyKey(1, "a", lost), members):
                assert all(ranks[member] != lost for member, _ in pieces)
                out = bytearray(pieces[0][1].num_bytes)
                for _, piece in pieces:
                    source = parts[piece.key][piece.offset : piece.offset + piece.num_bytes]
                    assert len(source) == piece.num_bytes
                    xor_into(out, source)
                rebuilt += bytes(out)
            assert rebuilt == shards[lost]
