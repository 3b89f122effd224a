"""How often to save, which nodes and ranks hold whose copies and parities, and which checkpoints are kept.

Young's first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974): with
a save that costs ``C`` seconds of training and failures at a rate of ``lambda``, saving every ``sqrt(2 C / lambda)``
seconds minimizes the sum of both costs, while the interval is short compared with the time between failures.

Ranks are paired by location: normally with the same local rank of another node, so that every node sends and receives
the same amount.

Retention is chosen after every save and must include what a later save will need: whether a checkpoint that is deleted
now would later be older than the suspect window cannot be known. Hence two may stay beyond the newest K: one that is
older than the window, and the one that will be next; and, while the newest contain numbers that are infinite or NaN,
the newest one that does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

GLOBAL_SHARE = 1 / 16
"""Share of failures that also destroy the node-local copies: what the global tier is for. An assumption, to which the
interval is not sensitive (square root)."""
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
    """Return the time between two saves that loses the least time, in seconds, at least the cost itself.

    Args:
        cost_s: Seconds of training that one save costs.
        failures_per_s: Rate of failures, in 1/s, above 0.
    """
    return max(cost_s, math.sqrt(2.0 * cost_s / failures_per_s))


def iterations_between(cost_s: float, step_s: float, failures_per_s: float) -> int:
    """Return the number of iterations of ``step_s`` seconds between two saves, at least 1."""
    if step_s <= 0:
        return 1
    return max(1, min(MAX_ITERATIONS, round(optimal_interval_s(cost_s, failures_per_s) / step_s)))


def choose_partners(nodes: Sequence[str], *, factor: int, jump: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Choose for every rank the ranks whose nodes hold copies of its shard.

    Args:
        nodes: For each rank, the name of its node.
        factor: Nodes that hold each shard, the rank's own included; at least 1.
        jump: Distance from a rank to the one whose node holds its first copy, from that one to the next, and so on;
            ``None`` = the number of ranks on its node, that is, the same local rank of the next node.

    Returns:
        For each rank ``factor - 1`` ranks, fewer where there are fewer other nodes, on distinct nodes, none on the
        rank's own. Where a jump reaches a node that was chosen already, the next rank on another one is taken.
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
    """Divide the ranks into groups that share parities; each group survives the loss of any one node.

    Args:
        nodes: For each rank, the name of its node.
        k: Nodes whose shards go into one parity, at least 1; a group has one more.

    Returns:
        Groups that contain every rank exactly once and no node twice: the same local rank of ``k + 1`` nodes, by rank.
            Remaining ranks join the last group of their local rank or, where a local rank exists on one node only, the
            smallest group without that node. A group of one rank protects nothing: there was no other node.
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


KEEP_ALL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """How many checkpoints of a directory are kept; see :func:`choose_kept`."""

    most_recent_k: int
    retain_interval: int = 0
    suspect_window: int = 0


def choose_kept(
    checkpoints: Iterable[int],
    *,
    most_recent_k: int,
    retain_interval: int = 0,
    suspect_window: int = 0,
    not_finite: Collection[int] = (),
) -> frozenset[int]:
    """Choose the checkpoints to keep.

    Args:
        checkpoints: Iterations of the *valid* checkpoints, in any order: torn or excluded ones must not be counted, or
            they would displace good ones.
        most_recent_k: How many of the newest to keep, at least 1; -1 = all.
        retain_interval: Checkpoints whose iteration is a multiple of it are kept forever; 0 = none.
        suspect_window: Iterations after a load in which an invalid result casts doubt on the loaded checkpoint.
        not_finite: Checkpoints known to contain numbers that are infinite or NaN.

    Returns:
        The newest K; the newest finite one; the multiples; the newest that is more than ``suspect_window`` iterations
        older than the newest of all, if any; and the oldest that is not, which will replace it. Applied at each save,
        there is always one beyond the window once there was one, at most two windows and two save intervals from the
        newest.

    Raises:
        ValueError: ``most_recent_k`` is 0 or below -1, or another number is negative.
    """
    if most_recent_k < 1 and most_recent_k != KEEP_ALL:
        raise ValueError(f"most_recent_k={most_recent_k} must be at least 1, or -1 to keep all")
    if retain_interval < 0 or suspect_window < 0:
        raise ValueError(f"retain_interval={retain_interval} and suspect_window={suspect_window} must not be negative")
    present = sorted(set(checkpoints), reverse=True)
    if not present or most_recent_k == KEEP_ALL:
        return frozenset(present)
    kept = set(present[:most_recent_k])
    kept.update([checkpoint for checkpoint in present if checkpoint not in not_finite][:1])
    if retain_interval:
        kept.update(checkpoint for checkpoint in present if checkpoint % retain_interval == 0)
    doubtful = [checkpoint for checkpoint in present if present[0] - checkpoint <= suspect_window]
    kept.add(doubtful[-1])
    kept.update(present[len(doubtful) : len(doubtful) + 1])
    return frozenset(kept)


def choose_removed(
    present: Iterable[int],
    valid: Collection[int],
    *,
    committed: int,
    rules: RetentionRules,
    not_finite: Collection[int],
) -> list[int]:
    """Choose the checkpoints to remove from a directory after a commit.

    Args:
        present: Iterations of all checkpoints that exist, complete or not.
        valid: Those known to be committed; others may be torn or excluded, and do not count.
        committed: The last committed checkpoint. It counts even if not known to be valid, but then not as a finite one.
        rules: How many to keep; if all, nothing is removed.
        not_finite: Checkpoints known to contain numbers that are infinite or NaN.

    Returns:
        Some of ``present``, in its order; none newer than the newest that counts: after a rollback, newer excluded
        checkpoints stay for analysis, and displace no other one.

    Raises:
        ValueError: The rules are invalid.
    """
    there = list(present)
    counted = {*(checkpoint for checkpoint in there if checkpoint in valid), committed}
    kept = choose_kept(
        counted,
        most_recent_k=rules.most_recent_k,
        retain_interval=rules.retain_interval,
        suspect_window=rules.suspect_window,
        not_finite={*not_finite, *({committed} - set(valid))},
    )
    if rules.most_recent_k == KEEP_ALL:
        return []
    return [checkpoint for checkpoint in there if checkpoint not in kept and checkpoint < max(counted)]
