"""What leaves a rank's node with each save: whole copies to partners, or blocks for the parities of its group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.checkpoint.places import Places
from outlast.checkpoint.replica.parity import holders_of
from outlast.checkpoint.replica.replicator import Holder, Target
from outlast.config import CheckpointConfig
from outlast.policy.partners import choose_partners, parity_groups

__all__ = ["Replication", "group_of", "plan_replication", "say_what_is_off"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Who takes what of one rank's shard."""

    targets: tuple[Target, ...] = ()
    """Writers that take a whole copy."""
    holders: tuple[Holder, ...] = ()
    """Members of the rank's parity group, each of which takes a block."""
    parity: int = 0
    """Nodes whose shards share one parity; 0 = copies, or nothing."""
    timeout_s: float = 10.0
    """Seconds without progress after which another node is given up."""


def plan_replication(config: CheckpointConfig, places: Places, rank: int) -> Replication:
    """Return what leaves a rank's node; nothing where there is no other node that could take it."""
    timeout_s = config.replication_timeout
    if not places.targets:
        return Replication(timeout_s=timeout_s)
    if not config.replication_parity:
        partners = choose_partners(places.nodes, factor=config.replication_factor, jump=config.replication_jump)[rank]
        targets = tuple(places.targets[places.nodes[partner]] for partner in partners)
        return Replication(targets=targets, timeout_s=timeout_s)
    members = holders_of(group_of(places.nodes, config.replication_parity, rank), rank)
    holders = tuple(Holder(member, places.targets[places.nodes[member]]) for member in members)
    return Replication(holders=holders, parity=config.replication_parity, timeout_s=timeout_s)


def group_of(nodes: Sequence[str], parity: int, rank: int) -> tuple[int, ...]:
    """Return the ranks with which a rank shares parities, itself included."""
    return next(group for group in parity_groups(nodes, parity) if rank in group)


def say_what_is_off(config: CheckpointConfig, places: Places) -> None:
    """Say in the log why there are fewer copies than one might think, or others. Rank 0 does."""
    if config.non_persistent_local_ckpt_algo == "fully_parallel" and places.local is not None:
        log.info(
            "non_persistent_local_ckpt_algo=fully_parallel is understood as atomic: each rank's local file holds all "
            "of its own state, so that a lost node takes no other rank's along"
        )
    if config.replication is False:
        return
    if places.local is None and not places.memory:
        return
    if len(places.leaders) == 1:
        log.debug("one node: nothing is copied to other nodes")
    elif config.replication_factor > len(places.leaders):
        log.warning(
            "replication_factor=%d is more than the number of nodes: each shard has %d copies",
            config.replication_factor,
            len(places.leaders),
        )
