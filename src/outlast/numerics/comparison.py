"""Digests of replicas, compared over all ranks: for two integers while they agree, and in words when they do not.

While replicas agree, one reduction is all: each rank's digests, each times a factor, are summed over all ranks. The
factors of the holders of the same tensors add up to 0, and so does the sum when they agree; when they do not, it is 0
for less than one disagreement in 2**50. So one small reduction compares any number of groups of replicas, of any size,
and every rank knows the outcome: all of them enter what follows, in which they tell each other their digests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist
import xxhash

from outlast.decoding import from_json
from outlast.numerics.replica_agreement import Replica
from outlast.runtime.gathering import broadcast_bytes, gather_bytes

__all__ = ["Holdings", "agree_equal", "find_minority", "gather_differences"]

Holdings: TypeAlias = dict[tuple[int, ...], list[tuple[str, int]]]
"""Ranks that hold the same tensors, this rank among them, to the name and digest of each of these tensors here."""
MAX_LOCATED = 8
"""Replicas whose first differing tensor is looked for; each takes two broadcasts."""
_MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1


class _Holding(msgspec.Struct, frozen=True):
    holders: int
    """Digest of who they are."""
    num_holders: int
    digest: int


class _Word(msgspec.Struct, frozen=True):
    """What a rank tells when replicas differ."""

    node: str
    device: str
    holdings: list[_Holding]


def agree_equal(group: dist.ProcessGroup, rank: int, holdings: Holdings) -> bool:
    """Return whether the holders of the same tensors have the same digests, on all ranks.

    Raises:
        RuntimeError: A peer is gone, or did not come in time.

    Collective: all ranks of the group, a gloo group of all ranks.
    Blocks: up to the group's timeout.
    """
    total = 0
    for holders, tensors in holdings.items():
        total += _digest(tensors) * _factor(holders.index(rank), len(holders))
    total &= _MASK
    halves = torch.tensor([total & _HALF, total >> 32])  # no sum of halves overflows
    dist.all_reduce(halves, group=group)
    low, high = (int(half) for half in halves)
    return (low + (high << 32)) & _MASK == 0


def gather_differences(
    group: dist.ProcessGroup, rank: int, holdings: Holdings, *, node: str, device: str
) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    """Return the replicas that differ from a majority, and those that differ without one; the same on all ranks.

    Args:
        group: A gloo group of all ranks.
        rank: This rank.
        holdings: What was compared.
        node: This rank's node.
        device: What this rank computes on.

    Raises:
        RuntimeError: A peer is gone, or did not come in time.

    Collective: all ranks of the group.
    Blocks: up to the group's timeout.
    """
    differences = _Differences(group, holdings)
    differences.gather(node, device)
    return differences.culprits(), differences.undecided()


class _Differences:
    """What the ranks tell each other once replicas differ."""

    def __init__(self, group: dist.ProcessGroup, holdings: Holdings) -> None:
        self._group = group
        self._mine = {_identity(holders): (len(holders), tensors) for holders, tensors in holdings.items()}
        self._culprits: dict[int, Replica] = {}
        self._undecided: dict[int, Replica] = {}
        self._num_located = 0

    def culprits(self) -> tuple[Replica, ...]:
        return tuple(self._culprits[rank] for rank in sorted(self._culprits))

    def undecided(self) -> tuple[Replica, ...]:
        return tuple(self._undecided[rank] for rank in sorted(self._undecided))

    def gather(self, node: str, device: str) -> None:
        word = _Word(node, device, [_Holding(key, size, _digest(own)) for key, (size, own) in self._mine.items()])
        told = gather_bytes(self._group, msgspec.json.encode(word))
        words = [from_json(data, _Word) for data in told]
        by_holders: dict[int, dict[int, _Holding]] = {}
        for rank, one in enumerate(words):
            for holding in one.holdings:
                by_holders.setdefault(holding.holders, {})[rank] = holding
        for key, by_rank in by_holders.items():  # in the same order everywhere: that of the words
            digests = {rank: holding.digest for rank, holding in by_rank.items()}
            num_replicas = max(holding.num_holders for holding in by_rank.values())
            if len(digests) < num_replicas or len(set(digests.values())) > 1:
                self._judge(key, digests, num_replicas, words)

    def _judge(self, key: int, digests: dict[int, int], num_replicas: int, words: list[_Word]) -> None:
        def note(replicas: dict[int, Replica], rank: int, tensor: str) -> None:
            replica = Replica(rank=rank, node=words[rank].node, device=words[rank].device, tensor=tensor)
            replicas.setdefault(rank, replica)

        found = find_minority(digests, num_replicas)
        if found is not None:
            reference, minority = found
            for rank in minority:
                note(self._culprits, rank, self._gather_tensor(key, reference, rank))
            return
        reference = min(digests)
        other = next((rank for rank in sorted(digests) if digests[rank] != digests[reference]), reference)
        tensor = self._gather_tensor(key, reference, other)
        for rank in digests:
            note(self._undecided, rank, tensor)

    def _gather_tensor(self, key: int, reference: int, other: int) -> str:
        """Return the name of the first tensor that two ranks hold differently."""
        self._num_located += 1
        if self._num_located > MAX_LOCATED:
            return ""
        _, own = self._mine.get(key, (0, []))
        mine = msgspec.json.encode(own)
        first, second = (
            from_json(broadcast_bytes(self._group, mine, rank), list[tuple[str, int]]) for rank in (reference, other)
        )
        pairs = zip_longest(first, second, fillvalue=("", 0))
        return next((two[0] or one[0] for one, two in pairs if one != two), "")


def find_minority(digests: Mapping[int, int], num_replicas: int) -> tuple[int, list[int]] | None:
    """Return a rank of the majority, and the ranks that differ from it; ``None`` = there is no majority.

    Args:
        digests: Rank to digest.
        num_replicas: How many there should be; more than half of them are a majority, so that of two neither is.
    """
    ((digest, count),) = Counter(digests.values()).most_common(1)
    if 2 * count <= num_replicas:
        return None
    reference = min(rank for rank, other in digests.items() if other == digest)
    return reference, sorted(rank for rank, other in digests.items() if other != digest)


def _digest(tensors: list[tuple[str, int]]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(digest.to_bytes(8, "little") for _, digest in tensors))


def _identity(holders: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(holders))


def _factor(index: int, num_holders: int) -> int:
    """Return the factor of a holder; those of all ``num_holders`` add up to 0 modulo 2**64."""
    if index < num_holders - 1:
        return xxhash.xxh3_64_intdigest(index.to_bytes(8, "little")) | 1
    return _last_factor(num_holders)


@lru_cache
def _last_factor(num_holders: int) -> int:
    return -sum(_factor(index, num_holders) for index in range(num_holders - 1)) & _MASK
