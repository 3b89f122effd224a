"""Verification of a copy that another node holds in memory."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from world_of_copies import NEWEST, make_world

from outlast.checkpoint.manifest import SHARD_PART

pytestmark = pytest.mark.extended


@pytest.mark.slow
@pytest.mark.process
def test_a_corrupt_replica_in_memory_is_not_loaded(tmp_path: Path) -> None:
    """A replacement node rejects a replica with a flipped bit by its digests and loads its shard from the global tier.

    The node does not keep the corrupt replica.
    """
    dice = Random(4)
    with make_world(tmp_path, num_nodes=2, has_disks=False) as world:
        first, second = world.nodes
        (key,) = [key for key in second.parts if (key.rank, key.part) == (0, SHARD_PART)]
        first.empty_memory()
        assert [loaded["tiers"] for loaded in world.load()] == [["replica", "memory"]] * 2
        (own_part,) = [own_part for own_part in first.parts if (own_part.rank, own_part.part) == (0, SHARD_PART)]
        for _ in range(10):
            world.heal()
            first.empty_memory()
            second.flip_bit(key, dice.randrange(len(second.parts[key])), dice.randrange(8))
            for rank, loaded in enumerate(world.load()):
                assert loaded["iteration"] == NEWEST
                assert loaded["tiers"] == ["global", "memory"]
                assert loaded["digest"] == world.digests[rank][NEWEST]
                assert [one[:3] for one in loaded["rejected"]] == [[NEWEST, "replica", 0]]
            assert not first.holds(own_part)


@pytest.mark.process
def test_a_replica_replaces_a_corrupt_copy_in_memory(tmp_path: Path) -> None:
    """A rank with a corrupt copy in memory loads the replica, and loads from memory the next time."""
    with make_world(tmp_path, num_nodes=2, has_disks=False) as world:
        first, _ = world.nodes
        (own_part,) = [own_part for own_part in first.parts if (own_part.rank, own_part.part) == (0, SHARD_PART)]
        first.flip_bit(own_part, len(first.parts[own_part]) - 1, 0)
        assert [loaded["tiers"] for loaded in world.load()] == [["replica", "memory"]] * 2
        for rank, loaded in enumerate(world.load()):
            assert loaded["tiers"] == ["memory", "memory"]
            assert loaded["digest"] == world.digests[rank][NEWEST]
