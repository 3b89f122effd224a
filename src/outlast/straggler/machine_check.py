"""Benchmark of a slow rank's machine: the same work on it and on two other ranks.

A matrix product and a memory copy on the training device, and messages between each pair of the three, over gloo: the
nodes' network, not the one between GPUs. Of several products and copies the fastest counts, since another process may
delay some of them on a healthy rank; of the messages the median. All other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import msgspec
import torch
import torch.distributed as dist

from outlast import clock
from outlast.decoding import from_msgpack
from outlast.policy.slowness import lower_median
from outlast.policy.stragglers import (
    MachineDecision,
    MachineTimes,
    Scope,
    judge_machine,
)
from outlast.runtime.device_timing import time_on_device
from outlast.runtime.process_groups import gather_bytes

NUM_TIMES = 9
"""Repetitions; the first one warms up, and does not count."""
SIDE, DEVICE_SIDE = 384, 4096
"""Rows of the matrices, on a CPU and on a device."""
COPY_BYTES, DEVICE_COPY_BYTES = 16 << 20, 256 << 20
MESSAGE_BYTES = 1 << 20


def gather_machine_decision(
    group: dist.ProcessGroup,
    suspect: int,
    others: Sequence[int],
    nodes: Mapping[int, str],
    *,
    scope: Scope,
    device: torch.device,
) -> MachineDecision:
    """Return the benchmark's result for a suspect, the same on all ranks.

    Args:
        group: A gloo group of all ranks, with global rank numbers.
        suspect: The slow rank.
        others: Ranks to compare it with, at most two.
        nodes: Node of each rank. Within a node no messages are measured.
        scope: Whether the suspect or its whole node is slow in training.
        device: This rank's training device.

    Raises:
        RuntimeError: A peer exited, or did not respond in time.

    Collective: all ranks of the group, with the same suspect and others.
    Blocks: about a second; up to the group's timeout.
    """
    rank, taking_part = dist.get_rank(group), (suspect, *others)
    is_apart = all(nodes[other] != nodes[suspect] for other in others)
    mine = b""
    if rank in taking_part:
        product_s, copy_s = time_product(device), time_copy(device)
        exchange_s = {}
        for first, second in combinations(taking_part if is_apart else (), 2):
            if rank in (first, second):
                seconds = _time_exchange(group, second if rank == first else first, begins=rank == first)
                if rank == first:
                    exchange_s[str(second)] = seconds
        mine = msgspec.msgpack.encode(
            MachineTimes(rank=rank, product_s=product_s, copy_s=copy_s, exchange_s=exchange_s)
        )
    measured = [from_msgpack(data, MachineTimes) for data in gather_bytes(group, mine) if data]
    by_rank = {times.rank: times for times in measured}
    return judge_machine(
        by_rank[suspect],
        [by_rank[other] for other in others],
        node=nodes[suspect],
        scope=scope,
        shares_memory=device.type == "cpu",
    )


def time_product(device: torch.device) -> float:
    """Return the seconds of a matrix product."""
    side = SIDE if device.type == "cpu" else DEVICE_SIDE
    left, right = torch.ones(side, side, device=device), torch.ones(side, side, device=device)
    result = torch.empty(side, side, device=device)
    return _fastest_s(lambda: torch.mm(left, right, out=result), device)


def time_copy(device: torch.device) -> float:
    """Return the seconds of a copy within the device's memory."""
    num_bytes = COPY_BYTES if device.type == "cpu" else DEVICE_COPY_BYTES
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _fastest_s(lambda: target.copy_(source), device)


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    with torch.no_grad():
        return min([time_on_device(work, device) for _ in range(NUM_TIMES)][1:])


def _time_exchange(group: dist.ProcessGroup, peer: int, *, begins: bool) -> float:
    """Return the seconds of a message round trip."""
    data = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    times_s = []
    for _ in range(NUM_TIMES):
        begin_ns = clock.now_ns()
        if begins:
            dist.send(data, group=group, group_dst=peer)
            dist.recv(data, group=group, group_src=peer)
        else:
            dist.recv(data, group=group, group_src=peer)
            dist.send(data, group=group, group_dst=peer)
        times_s.append((clock.now_ns() - begin_ns) / 1e9)
    return lower_median(times_s[1:])
