"""Rebuild the shard of a lost node from its group's parities and the shards of the others.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.channel import SLICE_BYTES, Channel
from outlast.checkpoint.replica.client import ReplicaError, Target, connect, describe, naming
from outlast.checkpoint.replica.frames import Data, FrameError, Get
from outlast.checkpoint.replica.landing import Landing
from outlast.checkpoint.replica.parity import PARITY_PART, blocks_of, holders_of, xor_into
from outlast.checkpoint.shard import CHUNK_BYTES, digest

__all__ = ["Member", "rebuild"]

CHUNKS_AHEAD = 2


class Member(msgspec.Struct, frozen=True):
    """A rank of a parity group."""

    rank: int
    num_bytes: int
    """Of its shard."""
    target: Target
    """Its node's writer; that of the lost one is not asked."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes that go into a chunk."""

    member: int
    key: CopyKey
    offset: int
    num_bytes: int


def rebuild(lost: CopyKey, members: Sequence[Member], key: bytes, fd: int, *, timeout_s: float) -> tuple[str, ...]:
    """Rebuild a shard; return the digests of what came out, which are right only if all that went in was.

    Args:
        lost: The shard.
        members: All of its group, in the group's order.
        key: The run's key.
        fd: File or memfd of at least the shard's size, to write it to.
        timeout_s: Seconds without progress.

    Raises:
        ReplicaError: Another member does not hold its parity or its shard, or stopped answering.

    Blocks: until all is read; the other members give as many bytes each as the shard has.
    """
    num_bytes = next(member.num_bytes for member in members if member.rank == lost.rank)
    if not num_bytes:
        return ()
    plan = _plan(lost, members)
    try:
        landing = Landing(fd, num_bytes)
    except (OSError, ValueError) as error:
        raise ReplicaError(f"no room for the {num_bytes} bytes of {describe(lost)}: {error}") from error
    try:
        with ExitStack() as stack:
            channels = {
                number: stack.enter_context(connect(member.target, key, timeout_s=timeout_s))
                for number, member in enumerate(members)
                if member.rank != lost.rank
            }
            return _combine(plan, members, channels, landing.view)
    finally:
        landing.close()


def _plan(lost: CopyKey, members: Sequence[Member]) -> list[list[_Piece]]:
    """Return the pieces whose XOR is each chunk of the lost shard; the first one is as long as the chunk."""
    group = [member.rank for member in members]
    sizes = {member.rank: member.num_bytes for member in members}
    plan = []
    holders = holders_of(group, lost.rank)
    for holder, block in zip(holders, blocks_of(sizes[lost.rank], len(holders)), strict=True):
        others = {}
        for rank in group:
            if rank not in (lost.rank, holder):
                others[rank] = blocks_of(sizes[rank], len(holders))[holders_of(group, rank).index(holder)]
        parity = CopyKey(lost.iteration, lost.attempt, holder, PARITY_PART)
        for place, chunk in enumerate(block):
            size = min(CHUNK_BYTES, sizes[lost.rank] - chunk * CHUNK_BYTES)
            pieces = [_Piece(group.index(holder), parity, place * CHUNK_BYTES, size)]
            for rank, theirs in others.items():
                offset = (theirs.start + place) * CHUNK_BYTES
                if place < len(theirs):  # else it has ended there: nothing but zeros went in
                    shard = CopyKey(lost.iteration, lost.attempt, rank)
                    pieces.append(_Piece(group.index(rank), shard, offset, min(size, sizes[rank] - offset)))
            plan.append(pieces)
    return plan


def _combine(
    plan: list[list[_Piece]], members: Sequence[Member], channels: dict[int, Channel], view: memoryview
) -> tuple[str, ...]:
    """Ask for the pieces of a few chunks ahead, and XOR them as they come."""
    scratch = memoryview(bytearray(SLICE_BYTES))
    digests = []
    num_asked = 0
    for number, pieces in enumerate(plan):
        while num_asked < min(len(plan), number + CHUNKS_AHEAD):
            for piece in plan[num_asked]:
                with naming(members[piece.member].target):
                    channels[piece.member].send(Get(piece.key, piece.offset, piece.num_bytes))
            num_asked += 1
        chunk = view[number * CHUNK_BYTES : min(len(view), (number + 1) * CHUNK_BYTES)]
        for piece in pieces:
            with naming(members[piece.member].target):
                channel = channels[piece.member]
                data = channel.expect(Data)
                if data.num_bytes != piece.num_bytes:
                    raise FrameError(f"it holds only {data.total} bytes of {describe(piece.key)}")
                if piece is pieces[0]:
                    channel.receive_into(chunk)
                else:
                    _xor_from(channel, chunk[: piece.num_bytes], scratch)
        digests.append(digest(chunk))
    return tuple(digests)


def _xor_from(channel: Channel, into: memoryview, scratch: memoryview) -> None:
    for start in range(0, len(into), SLICE_BYTES):
        part = scratch[: min(SLICE_BYTES, len(into) - start)]
        channel.receive_into(part)
        xor_into(into[start : start + len(part)], part)
