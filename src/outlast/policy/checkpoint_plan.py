"""How often to save: often enough that a failure costs little, seldom enough that saves cost little.

Young's first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974): with
a save that costs ``C`` seconds of training and failures at a rate of ``lambda``, saving every ``sqrt(2 C / lambda)``
seconds makes the sum of both smallest. It holds while the interval is short against the time between failures.

[policy.partners] Which other nodes take the copies of a rank's shard, and which ranks share a parity.

Ranks are paired by where they sit: normally with the same local rank of another node, so that every node sends and
takes the same amount. Worlds whose nodes carry different numbers of ranks pair with what is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = [
    "GLOBAL_SHARE",
    "choose_partners",
    "failures_per_s",
    "iterations_between",
    "optimal_interval_s",
    "parity_groups",
]


GLOBAL_SHARE = 1 / 16
"""Share of failures that take the near copies along as well, where there are some: what the global tier is for. An
assumption, to which the interval is not sensitive: it goes with the square root."""
MAX_ITERATIONS = 1 << 40


def failures_per_s(world_size: int, rank_mttf_hours: float, *, share: float = 1.0) -> float:
    """Return the rate of failures of the whole world, in 1/s.

    Args:
        world_size: Number of ranks, each of which ends the cycle when it fails.
        rank_mttf_hours: Mean time to a failure of one rank, in hours.
        share: Share of the failures that count.
    """
    assert world_size >= 1, world_size
    assert rank_mttf_hours > 0, rank_mttf_hours
    return share * world_size / (rank_mttf_hours * 3600.0)


def optimal_interval_s(cost_s: float, failures_per_s: float) -> float:
    """Return the time between two saves that loses the least time, in seconds.

    Args:
        cost_s: Seconds of training that one save costs.
        failures_per_s: Rate of failures, in 1/s, above 0.

    Returns:
        ``sqrt(2 * cost_s / failures_per_s)``, and never less than the cost itself.
    """
    return max(cost_s, math.sqrt(2.0 * cost_s / failures_per_s))


def iterations_between(cost_s: float, step_s: float, failures_per_s: float) -> int:
    """Return the number of iterations between two saves, at least 1.

    Args:
        cost_s: Seconds of training that one save costs.
        step_s: Seconds of one iteration without a save.
        failures_per_s: Rate of failures, in 1/s, above 0.
    """
    if step_s <= 0:
        return 1
    return max(1, min(MAX_ITERATIONS, round(optimal_interval_s(cost_s, failures_per_s) / step_s)))


def choose_partners(nodes: Sequence[str], *, factor: int, jump: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Choose for every rank the ranks whose nodes take copies of its shard.

    Args:
        nodes: For each rank, the name of its node.
        factor: Nodes that are to hold each shard, the rank's own included; at least 1.
        jump: Ranks from a rank to the one whose node takes its first copy, from that one to the next, and so on;
            ``None`` = the number of ranks on its node, so that it is the same local rank of the next node.

    Returns:
        For each rank ``factor - 1`` ranks, fewer where there are fewer other nodes; they lie on distinct nodes, none on
        the rank's own. Where a jump lands on a node that was chosen already, the next rank on another one is taken.
    """
    if factor < 1 or (jump is not None and jump < 1):
        raise ValueError(f"factor={factor} and jump={jump} must be at least 1")
    world_size = len(nodes)
    num_nodes = len(set(nodes))
    chosen = []
    for rank, own in enumerate(nodes):
        step = jump if jump is not None else nodes.count(own)
        used, partners = {own}, list[int]()
        for number in range(1, min(factor, num_nodes)):
            first = rank + number * step
            partner = next(
                r % world_size for r in range(first, first + world_size) if nodes[r % world_size] not in used
            )
            used.add(nodes[partner])
            partners.append(partner)
        chosen.append(tuple(partners))
    return tuple(chosen)


def parity_groups(nodes: Sequence[str], k: int) -> tuple[tuple[int, ...], ...]:
    """Divide the ranks into groups that share parities; of each group any one node can be lost.

    Args:
        nodes: For each rank, the name of its node.
        k: Nodes whose shards go into one parity, at least 1; a group has one more.

    Returns:
        Groups in which every rank is exactly once and no node twice: the same local rank of ``k + 1`` nodes, in the
        order of their ranks. What is left over joins the last group of its local rank, or, where a local rank exists
        on one node only, the smallest group without that node. A group of one rank protects nothing: there was no
        other node to share with.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    by_local_rank: list[list[int]] = []
    seen: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        local_rank = seen.get(node, 0)
        seen[node] = local_rank + 1
        if local_rank == len(by_local_rank):
            by_local_rank.append([])
        by_local_rank[local_rank].append(rank)
    groups: list[list[int]] = []
    alone: list[int] = []
    for ranks in by_local_rank:
        if len(ranks) == 1:
            alone += ranks
            continue
        num_groups = max(1, len(ranks) // (k + 1))
        for number in range(num_groups):
            end = (number + 1) * (k + 1) if number < num_groups - 1 else len(ranks)
            groups.append(ranks[number * (k + 1) : end])
    for rank in alone:
        joinable = [group for group in groups if nodes[rank] not in {nodes[other] for other in group}]
        if joinable:
            group = min(joinable, key=len)
            group.append(rank)
            group.sort()
        else:
            groups.append([rank])
    return tuple(sorted(tuple(group) for group in groups))
