"""Digests of replicas, compared over all ranks: with two integers while they agree, and in detail when they do not.

While replicas agree, one reduction is all: each rank's digests, each times a factor, are summed over all ranks. The
factors of the holders of the same tensors add up to 0, and so does the sum when they agree; when they do not, it is 0
for less than one disagreement in 2**50. So one small reduction compares any number of groups of replicas, of any size,
and every rank knows the outcome: all of them enter what follows, in which they exchange their digests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist
import xxhash

from outlast.decoding import from_json
from outlast.runtime.process_groups import broadcast_bytes, gather_bytes

__all__ = ["Agreement", "Holdings", "Replica", "agree_equal", "find_minority", "gather_differences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One rank's replica that differs from others."""

    rank: int
    """Global rank."""
    node: str
    """Its node."""
    device: str
    """What it computes on, as :func:`outlast.runtime.device.device_name` names it."""
    tensor: str
    """The first tensor that differs; empty = not looked for, as too many replicas differ."""

    def __str__(self) -> str:
        where = f" in {self.tensor}" if self.tensor else ""
        return f"rank {self.rank} on node {self.node} (device {self.device}){where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a check found.

    Whether replicas agree, and who does not, is the same on all ranks; the numbers are this rank's own.
    """

    iteration: int
    """Number of optimizer steps done."""
    agrees: bool
    """Whether all replicas on all ranks are bit-identical."""
    num_replicas: int
    """Largest number of replicas of a tensor of this rank; 1 = there is nothing to compare."""
    num_bytes: int
    """Bytes of this rank that were compared."""
    num_single_bytes: int
    """Bytes of this rank that no other rank holds, as shards are; nothing can be compared with them."""
    culprits: tuple[Replica, ...] = ()
    """Replicas that differ from the majority of at least three, by rank."""
    undecided: tuple[Replica, ...] = ()
    """Replicas that differ without a majority, as two always do, by rank: one of them is bad, or several."""

    @property
    def tensor(self) -> str:
        """The first tensor that differs; empty = none."""
        return next((replica.tensor for replica in (*self.culprits, *self.undecided) if replica.tensor), "")

    def describe(self) -> str:
        """Return one line for people."""
        if not self.agrees:
            line = f"replicas differ at iteration {self.iteration}: "
            if self.culprits:
                line += f"from the majority {', '.join(map(str, self.culprits))}"
            if self.undecided:
                line += f"{'; ' if self.culprits else ''}without a majority {', '.join(map(str, self.undecided))}"
            return line
        line = f"replicas agree at iteration {self.iteration}"
        if self.num_replicas == 1:
            return (
                f"{line}: nothing to compare, as no other rank holds any of this rank's {self.num_single_bytes} bytes"
            )
        line += f": {self.num_bytes} bytes, up to {self.num_replicas} replicas"
        return line + (f"; {self.num_single_bytes} bytes are on no other rank" if self.num_single_bytes else "")


Holdings: TypeAlias = dict[tuple[int, ...], list[tuple[str, int]]]
"""Ranks that hold the same tensors, this rank among them, to the name and digest of each of these tensors here."""
MAX_LOCATED = 8
"""Replicas whose first differing tensor is looked for; each takes two broadcasts."""
_MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1


class _GroupDigest(msgspec.Struct, frozen=True):
    """One rank's digest of what a group of ranks holds alike."""

    holders: int
    """Digest of who they are."""
    num_holders: int
    digest: int


class _RankDigests(msgspec.Struct, frozen=True):
    """What a rank sends when replicas differ."""

    node: str
    device: str
    groups: list[_GroupDigest]


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
    group: dist.ProcessGroup, holdings: Holdings, *, node: str, device: str
) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    """Return the replicas that differ from a majority, and those that differ without one; the same on all ranks.

    Args:
        group: A gloo group of all ranks.
        holdings: What was compared.
        node: This rank's node.
        device: What this rank computes on.

    Raises:
        RuntimeError: A peer is gone, or did not come in time.

    Collective: all ranks of the group.
    Blocks: up to the group's timeout.
    """
    own = {_identity(holders): (len(holders), tensors) for holders, tensors in holdings.items()}
    digests = [_GroupDigest(key, size, _digest(tensors)) for key, (size, tensors) in own.items()]
    gathered = gather_bytes(group, msgspec.json.encode(_RankDigests(node, device, digests)))
    ranks = [from_json(data, _RankDigests) for data in gathered]
    by_holders: dict[int, dict[int, _GroupDigest]] = {}
    for rank, one in enumerate(ranks):
        for part in one.groups:
            by_holders.setdefault(part.holders, {})[rank] = part
    culprits: dict[int, Replica] = {}
    undecided: dict[int, Replica] = {}
    num_located = 0

    def add(replicas: dict[int, Replica], suspects: Iterable[int], key: int, reference: int, other: int) -> None:
        """Add the suspects with the first tensor that two ranks hold differently. Collective: all ranks."""
        nonlocal num_located
        num_located += 1
        tensors = own.get(key, (0, []))[1]
        name = _gather_first_difference(group, tensors, reference, other) if num_located <= MAX_LOCATED else ""
        for rank in suspects:
            one = Replica(rank=rank, node=ranks[rank].node, device=ranks[rank].device, tensor=name)
            replicas.setdefault(rank, one)

    for key, by_rank in by_holders.items():  # in the same order on all ranks: that of what was gathered
        by_digest = {rank: part.digest for rank, part in by_rank.items()}
        num_replicas = max(part.num_holders for part in by_rank.values())
        if len(by_digest) == num_replicas and len(set(by_digest.values())) == 1:
            continue
        if (found := find_minority(by_digest, num_replicas)) is not None:
            reference, minority = found
            for rank in minority:
                add(culprits, [rank], key, reference, rank)
        else:
            reference = min(by_digest)
            differing = (rank for rank in sorted(by_digest) if by_digest[rank] != by_digest[reference])
            add(undecided, by_digest, key, reference, next(differing, reference))
    return _by_rank(culprits), _by_rank(undecided)


def _gather_first_difference(
    group: dist.ProcessGroup, tensors: list[tuple[str, int]], reference: int, other: int
) -> str:
    """Return the name of the first tensor that two ranks hold differently. Collective: all ranks."""
    mine = msgspec.json.encode(tensors)
    first, second = (
        from_json(broadcast_bytes(group, mine, rank), list[tuple[str, int]]) for rank in (reference, other)
    )
    pairs = zip_longest(first, second, fillvalue=("", 0))
    return next((two[0] or one[0] for one, two in pairs if one != two), "")


def _by_rank(replicas: Mapping[int, Replica]) -> tuple[Replica, ...]:
    return tuple(replicas[rank] for rank in sorted(replicas))


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
