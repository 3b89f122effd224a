"""Bytes that the ranks of a group tell each other: lengths first, then the bytes, by collectives of integers.

``torch.distributed`` itself passes objects only as pickles, which nobody should read from a network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed

__all__ = ["broadcast_bytes", "gather_bytes"]


def gather_bytes(group: torch.distributed.ProcessGroup, data: bytes) -> list[bytes]:
    """Return what every rank of a gloo group gave, in the order of the ranks.

    Raises:
        RuntimeError: A peer is gone, or did not come in time.

    Collective: all ranks of the group.
    Blocks: up to the group's timeout.
    """
    import torch
    import torch.distributed as dist

    world_size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size)]
    if longest:
        dist.all_gather(parts, _tensor(data, longest), group=group)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def broadcast_bytes(group: torch.distributed.ProcessGroup, data: bytes, source: int) -> bytes:
    """Return what the rank ``source`` gave; what the others give is ignored.

    Args:
        group: A gloo group.
        data: What to tell.
        source: A rank of the group, by its number in it.

    Raises:
        RuntimeError: A peer is gone, or did not come in time.

    Collective: all ranks of the group, with the same ``source``.
    Blocks: up to the group's timeout.
    """
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=source)
    is_source = dist.get_rank(group) == source
    told = _tensor(data, len(data)) if is_source else torch.zeros(int(length), dtype=torch.uint8)
    if told.numel():
        dist.broadcast(told, group=group, group_src=source)
    return told.numpy().tobytes()


def _tensor(data: bytes, num_bytes: int) -> torch.Tensor:
    """Return bytes as a tensor, with zeros behind them."""
    import torch

    told = torch.zeros(num_bytes, dtype=torch.uint8)
    told.numpy()[: len(data)] = memoryview(data)
    return told
