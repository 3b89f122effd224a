"""Parity instead of copies: how shards are cut into blocks, and blocks combined to parities where they arrive.

As in RAID 5: a shard's chunks are cut into as many blocks as its group has other members, one block for each of them.
A member XORs the blocks that it gets, one from every other member, into a parity. When a member is lost, each block
of its shard is the XOR of a parity and of the blocks of the others that went into it; ``replica.client`` rebuilds it.
Blocks consist of whole chunks, so that the source's digests of its shard are digests of its blocks. Nothing here
imports torch.
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
"""Parities of a rank that may lack blocks: the one of the save under way, and one for which a member is late."""


def holders_of(group: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the members that take the blocks of a rank's shard, in the order of the blocks."""
    place = group.index(rank)
    return (*group[place + 1 :], *group[:place])


def blocks_of(num_bytes: int, num_holders: int) -> tuple[range, ...]:
    """Cut a shard into blocks.

    Args:
        num_holders: Blocks to cut it into, at least 1.

    Returns:
        The numbers of each block's chunks; equally many, the last blocks fewer or none.
    """
    chunks = num_chunks(num_bytes)
    each = -(-chunks // num_holders)
    return tuple(range(min(chunks, n * each), min(chunks, (n + 1) * each)) for n in range(num_holders))


def xor_into(into: memoryview | bytearray, piece: memoryview | bytes) -> None:
    """XOR a piece into the beginning of ``into``, which is at least as long."""
    left = np.frombuffer(into, dtype=np.uint8, count=len(piece))
    np.bitwise_xor(left, np.frombuffer(piece, dtype=np.uint8), out=left)


@dataclass(slots=True)
class _Parity:
    """One parity that still lacks blocks."""

    key: CopyKey
    num_contributors: int
    fd: int
    num_bytes: int = 0
    begun: set[int] = field(default_factory=set)
    num_done: int = 0
    error: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise HoldingsError when it was given up; under the lock."""
        if self.error is not None:
            raise HoldingsError(f"the parity was given up: {self.error}")

    def give_up(self, error: str) -> None:
        """Free its memory; remember why, for those that are still to come."""
        with self.lock:
            if self.error is None:
                self.error = error
                os.close(self.fd)


class Parities:
    """The parities of which a node has begun to receive blocks. Thread: any.

    A block that breaks off has changed its parity already: the parity is given up, and everybody that contributes to it
    gets an error. Bounded: a rank has at most ``MAX_UNFINISHED``, older ones are given up.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._lock = threading.Lock()
        self._parities: dict[CopyKey, _Parity] = {}

    def begin(self, key: CopyKey, contributor: int, num_contributors: int) -> Block:
        """Begin to take a block.

        Raises:
            HoldingsError: The parity was given up, the block was given before, or there is no room.
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
        """Hand a whole parity to the holdings.

        Raises:
            HoldingsError: It was given up meanwhile, or cannot be kept.
        """
        with self._lock:
            if self._parities.get(parity.key) is not parity:  # its descriptor may be another's by now
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
    """One member's block on its way into a parity. Thread: one."""

    def __init__(self, parities: Parities, parity: _Parity, contributor: int) -> None:
        self._parities, self._parity, self._contributor = parities, parity, contributor
        self._scratch = bytearray(PIECE_BYTES)
        self._done = False

    def write(self, piece: memoryview, offset: int) -> None:
        """XOR a piece into the parity.

        Raises:
            HoldingsError: The parity was given up, or there is no room.
        """
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
        """The block is in; with the last one the parity is handed over.

        Raises:
            HoldingsError: The parity was given up, or cannot be kept.
        """
        self._done = True
        with self._parity.lock:
            self._parity.check()
            self._parity.num_done += 1
            is_whole = self._parity.num_done == self._parity.num_contributors
        if is_whole:
            self._parities.finish(self._parity)

    def drop(self) -> None:
        """The block broke off. Idempotent; does nothing after :meth:`keep`."""
        if not self._done:
            self._done = True
            self._parity.give_up(f"the block of rank {self._contributor} broke off")


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset.

    Raises:
        OSError: The place is full, or broken.
    """
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
