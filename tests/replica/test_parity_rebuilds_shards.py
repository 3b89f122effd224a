"""Parity instead of copies: the shard of any one lost node comes back."""

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
    """A parity group whose members have replicated their shards."""

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
def test_any_one_lost_shard_comes_back(
    make_node, hold: Callable[[bytes], int], ranks: tuple[int, ...], sizes: list[int]
) -> None:
    """Whichever node of a group is lost and whatever the shards' sizes, all its bytes are rebuilt."""
    group = Group(make_node, ranks, sizes)
    for rank in ranks:
        outcomes = group.replicate(rank, hold(group.shards[rank]))
        blocks = blocks_of(len(group.shards[rank]), len(ranks) - 1)
        right = digests_of(group.shards[rank])
        assert [outcome.chunks for outcome in outcomes] == [right[block.start : block.stop] for block in blocks]
    group.hold_shards()
    for rank in ranks:
        fd = hold(bytes(len(group.shards[rank])))
        found = rebuild(CopyKey(7, "a", rank), group.members, KEY, fd, timeout_s=10)
        assert os.pread(fd, len(group.shards[rank]) + 1, 0) == group.shards[rank]
        assert found == digests_of(group.shards[rank])


@pytest.mark.extended
def test_a_parity_takes_a_fraction_of_a_shard(make_node, hold: Callable[[bytes], int]) -> None:
    """With four nodes, what a node holds for the others is a third of a shard."""
    group = Group(make_node, (0, 1, 2, 3), [6 * CHUNK_BYTES] * 4)
    for rank in group.ranks:
        group.replicate(rank, hold(group.shards[rank]))
    for rank, node in group.nodes.items():
        assert list(node.memory.parts) == [CopyKey(7, "a", rank, PARITY_PART)]
        assert len(node.memory.parts[CopyKey(7, "a", rank, PARITY_PART)]) == 2 * CHUNK_BYTES


def test_a_parity_exists_only_when_every_block_is_in(make_node, hold: Callable[[bytes], int]) -> None:
    """Until the last member has given its block nothing can be fetched, so nothing half can be rebuilt from."""
    group = Group(make_node, (0, 1, 2), [CHUNK_BYTES] * 3)
    group.replicate(0, hold(group.shards[0]))
    group.replicate(1, hold(group.shards[1]))
    assert not group.nodes[0].memory.parts
    group.replicate(2, hold(group.shards[2]))
    assert all(CopyKey(7, "a", rank, PARITY_PART) in group.nodes[rank].memory.parts for rank in (0, 1))


def test_a_flipped_byte_in_a_parity_shows_in_the_digests(make_node, hold: Callable[[bytes], int]) -> None:
    """What is rebuilt from a bad parity differs from the source's digests."""
    group = Group(make_node, (0, 1, 2), [2 * CHUNK_BYTES] * 3)
    for rank in group.ranks:
        group.replicate(rank, hold(group.shards[rank]))
    group.hold_shards()
    key = CopyKey(7, "a", 1, PARITY_PART)
    bad = bytearray(group.nodes[1].memory.parts[key])
    bad[99] ^= 4
    group.nodes[1].memory.parts[key] = bytes(bad)
    found = rebuild(CopyKey(7, "a", 0), group.members, KEY, hold(bytes(2 * CHUNK_BYTES)), timeout_s=10)
    right = digests_of(group.shards[0])
    assert found[0] != right[0]
    assert found[1] == right[1]


def test_a_second_lost_node_is_named(make_node, hold: Callable[[bytes], int]) -> None:
    """Two lost members are one too many, and the error says which one it could not do without."""
    group = Group(make_node, (0, 1, 2), [CHUNK_BYTES] * 3)
    for rank in group.ranks:
        group.replicate(rank, hold(group.shards[rank]))
    group.nodes[2].server.close()
    with pytest.raises(ReplicaError, match=r"node node2 .*Connection refused"):
        rebuild(CopyKey(7, "a", 0), group.members, KEY, hold(bytes(CHUNK_BYTES)), timeout_s=10)


def test_a_block_that_breaks_off_spoils_its_parity_only(make_node, hold: Callable[[bytes], int]) -> None:
    """Half a block cannot be taken out again: the others are told, and the next attempt has a parity of its own."""
    node = make_node()
    data = bytes(CHUNK_BYTES)

    def give(contributor: int, attempt: str, fd: int) -> None:
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
        give(1, "a", hold(bytes(CHUNK_BYTES // 2)))
    with suppress(ReplicaError):  # the node may not have noticed yet
        give(2, "a", hold(data))
    with pytest.raises(ReplicaError, match=r"given up|contradicts"):
        give(1, "a", hold(data))
    assert not node.memory.parts
    give(1, "b", hold(data))
    give(2, "b", hold(data))
    assert list(node.memory.parts) == [CopyKey(7, "b", 0, PARITY_PART)]


def test_a_block_goes_into_a_parity_once() -> None:
    """The same block twice would cancel itself."""
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


def test_parities_that_nobody_finishes_are_bounded() -> None:
    """A rank has at most two unfinished parities; the memory of older ones is given back."""
    parities = Parities(None)
    before = len(os.listdir("/proc/self/fd"))
    first = parities.begin(CopyKey(0, "a", 0, PARITY_PART), 1, 2)
    for iteration in range(1, 10):
        parities.begin(CopyKey(iteration, "a", 0, PARITY_PART), 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before + parity.MAX_UNFINISHED
    with pytest.raises(HoldingsError, match="a newer one replaced it"):
        first.write(memoryview(b"x"), 0)
    parities.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_parity_given_up_while_its_last_block_is_kept_is_not_handed_over(make_node, monkeypatch) -> None:
    """Its memory is given back by then: other bytes must not pass for the parity."""
    memory = make_node().memory
    parities = Parities(memory)
    block = parities.begin(CopyKey(0, "a", 0, PARITY_PART), 1, 1)
    block.write(memoryview(b"x"), 0)
    finish = parities.finish

    def finish_late(whole) -> None:
        parities.close()
        finish(whole)

    monkeypatch.setattr(parities, "finish", finish_late)
    with pytest.raises(HoldingsError, match="given up"):
        block.keep()
    assert not memory.parts


@given(st.integers(0, 100 * CHUNK_BYTES), st.integers(1, 9))
def test_blocks_cover_every_chunk_once(num_bytes: int, num_holders: int) -> None:
    """Blocks follow each other, the longest first, and none is more than its share rounded up."""
    blocks = blocks_of(num_bytes, num_holders)
    assert len(blocks) == num_holders
    assert [chunk for block in blocks for chunk in block] == list(range(-(-num_bytes // CHUNK_BYTES)))
    assert max(len(block) for block in blocks) <= -(-num_bytes // (CHUNK_BYTES * num_holders))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9, unique=True))
def test_every_member_holds_a_block_of_every_other(group: list[int]) -> None:
    """The first blocks of different members go to different members."""
    holders = {rank: holders_of(group, rank) for rank in group}
    assert all(sorted((rank, *holders[rank])) == sorted(group) for rank in group)
    assert sorted(holders[rank][0] for rank in group) == sorted(group)


@given(st.binary(min_size=1, max_size=64), st.binary(max_size=64))
def test_xor_changes_what_it_covers(base: bytes, piece: bytes) -> None:
    """Bytes beyond the piece stay, as if it went on with zeros."""
    piece = piece[: len(base)]
    into = bytearray(base)
    xor_into(into, piece)
    padded = piece + bytes(len(base) - len(piece))
    assert bytes(into) == bytes(a ^ b for a, b in zip(base, padded, strict=True))


@settings(max_examples=60)
@given(st.data())
def test_ragged_groups_come_back_whole(data: st.DataObject) -> None:
    """For groups of any size and shards of any sizes, each shard is the XOR that the plan of its rebuild names."""
    chunk = 4
    ranks = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True).map(sorted))
    shards = {rank: data.draw(st.binary(max_size=40)) for rank in ranks}
    with pytest.MonkeyPatch.context() as patch:
        for place in (parity, client):
            patch.setattr(place, "CHUNK_BYTES", chunk, raising=False)
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
            for pieces in client._plan(CopyKey(1, "a", lost), members):
                assert all(ranks[member] != lost for member, _ in pieces)
                out = bytearray(pieces[0][1].num_bytes)
                for _, piece in pieces:
                    source = parts[piece.key][piece.offset : piece.offset + piece.num_bytes]
                    assert len(source) == piece.num_bytes
                    xor_into(out, source)
                rebuilt += bytes(out)
            assert rebuilt == shards[lost]
