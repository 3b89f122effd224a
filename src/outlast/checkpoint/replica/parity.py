"""Parity instead of copies: shards are cut into blocks, which their receivers combine into parities.

As in RAID 5, a shard's chunks are cut into one block for each other member of its group, and each member XORs the
blocks that it receives, one from every other member, into a parity. Each block of a lost member's shard is the XOR of
one parity and the other members' blocks in it; ``replica.client`` rebuilds the shard. Blocks are whole chunks, so that
the shard's digests also verify its blocks. Must not import torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outlast.checkpoint.manifest import CopyKey, Holdings, HoldingsError
from outlast.checkpoint.shard import num_chunks
from outlast.runtime.files import memory_file

PARITY_PART = "parity"
PIECE_BYTES = 1 << 20
MAX_UNFINISHED = 2
"""Incomplete parities of a rank: that of the current save, and one for which a member is late."""


def holders_of(group: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the members that receive the blocks of a rank's shard, in block order."""
    place = group.index(rank)
    return (*group[place + 1 :], *group[:place])


def blocks_of(num_bytes: int, num_holders: int) -> tuple[range, ...]:
    """Return the chunk numbers of each block; the blocks have equal lengths, the last ones fewer chunks or none."""
    chunks = num_chunks(num_bytes)
    each = -(-chunks // num_holders)
    return tuple(range(min(chunks, n * each), min(chunks, (n + 1) * each)) for n in range(num_holders))


def xor_into(into: memoryview | bytearray, piece: memoryview | bytes) -> None:
    """XOR a piece into the beginning of ``into``, which must be at least as long."""
    left = np.frombuffer(into, dtype=np.uint8, count=len(piece))
    np.bitwise_xor(left, np.frombuffer(piece, dtype=np.uint8), out=left)


@dataclass(slots=True)
class _Parity:
    """A parity that still lacks blocks."""

    key: CopyKey
    num_contributors: int
    fd: int
    num_bytes: int = 0
    begun: set[int] = field(default_factory=set)
    num_done: int = 0
    error: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise HoldingsError if the parity was abandoned. The caller holds the lock."""
        if self.error is not None:
            raise HoldingsError(f"the parity was given up: {self.error}")

    def give_up(self, error: str) -> None:
        """Free the memory and record the reason for later contributors."""
        with self.lock:
            if self.error is None:
                self.error = error
                os.close(self.fd)


class Parities:
    """The incomplete parities of a node. Thread: any.

    An interrupted block has already changed its parity, so the parity is abandoned and all contributors get an error. A
    rank has at most ``MAX_UNFINISHED``; older ones are abandoned.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._lock = threading.Lock()
        self._parities: dict[CopyKey, _Parity] = {}

    def begin(self, key: CopyKey, contributor: int, num_contributors: int) -> Block:
        """Begin to receive a block.

        Raises: HoldingsError (the parity was abandoned, the block was received before, or there is no memory).
        """
        with self._lock:
            parity = self._parities.get(key)
            if parity is None:
                try:
                    fd = memory_file("outlast-parity")
                except OSError as error:
                    raise HoldingsError(f"no room for a parity: {error.strerror}") from error
                self._make_room(key.rank)
                parity = self._parities[key] = _Parity(key, num_contributors, fd)
        with parity.lock:
            parity.check()
            is_complete = len(parity.begun) == parity.num_contributors
            if is_complete or parity.num_contributors != num_contributors or contributor in parity.begun:
                raise HoldingsError(f"rank {contributor} contradicts what went into the parity already")
            parity.begun.add(contributor)
        return Block(self, parity, contributor)

    def close(self) -> None:
        with self._lock:
            parities, self._parities = list(self._parities.values()), {}
        for parity in parities:
            parity.give_up("this node stops")

    def _make_room(self, rank: int) -> None:
        mine = [key for key in self._parities if key.rank == rank]
        for key in mine[: max(0, len(mine) + 1 - MAX_UNFINISHED)]:
            self._parities.pop(key).give_up("a newer one replaced it")

    def finish(self, parity: _Parity) -> None:
        """Store a complete parity. Raises: HoldingsError (the parity was abandoned meanwhile, or cannot be stored)."""
        with self._lock:
            if self._parities.get(parity.key) is not parity:  # its descriptor may have been reused
                raise HoldingsError("the parity was given up: a newer one replaced it, or this node stops")
            del self._parities[parity.key]
        try:
            if not parity.num_bytes:
                return
            incoming = self._holdings.receive(parity.key, parity.num_bytes)
            try:
                scratch = memoryview(bytearray(PIECE_BYTES))
                for offset in range(0, parity.num_bytes, PIECE_BYTES):
                    piece = scratch[: min(PIECE_BYTES, parity.num_bytes - offset)]
                    os.preadv(parity.fd, [piece], offset)
                    write_all(incoming.fd, piece, offset)
                incoming.keep()
            except OSError as error:
                raise HoldingsError(f"the parity cannot be kept: {error.strerror}") from error
            finally:
                incoming.drop()
        finally:
            parity.give_up("it is whole already")


class Block:
    """A member's block that is being received. Thread: one."""

    def __init__(self, parities: Parities, parity: _Parity, contributor: int) -> None:
        self._parities, self._parity, self._contributor = parities, parity, contributor
        self._scratch = bytearray(PIECE_BYTES)
        self._done = False

    def write(self, piece: memoryview, offset: int) -> None:
        """XOR a piece into the parity. Raises: HoldingsError (the parity was abandoned, or there is no memory)."""
        parity = self._parity
        with parity.lock:
            parity.check()
            try:
                for start in range(0, len(piece), PIECE_BYTES):
                    part = piece[start : start + PIECE_BYTES]
                    old = memoryview(self._scratch)[: len(part)]
                    num = os.preadv(parity.fd, [old], offset + start)
                    old[num:] = bytes(len(part) - num)
                    xor_into(old, part)
                    write_all(parity.fd, old, offset + start)
            except OSError as error:
                raise HoldingsError(f"no room for a parity: {error.strerror}") from error
            parity.num_bytes = max(parity.num_bytes, offset + len(piece))

    def keep(self) -> None:
        """Complete the block; the last block stores the parity.

        Raises: HoldingsError (the parity was abandoned, or cannot be stored).
        """
        self._done = True
        with self._parity.lock:
            self._parity.check()
            self._parity.num_done += 1
            is_whole = self._parity.num_done == self._parity.num_contributors
        if is_whole:
            self._parities.finish(self._parity)

    def drop(self) -> None:
        """Abandon an interrupted block. Idempotent; no effect after :meth:`keep`."""
        if not self._done:
            self._done = True
            self._parity.give_up(f"the block of rank {self._contributor} broke off")


def write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
