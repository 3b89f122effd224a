"""A copy that another node holds in memory is verified like any other."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from world_of_copies import NEWEST, make_world

from outlast.checkpoint.manifest import SHARD_PART

pytestmark = pytest.mark.extended


@pytest.mark.slow
@pytest.mark.process
def test_a_byte_flipped_in_a_peers_memory_is_found_and_not_loaded(tmp_path: Path) -> None:
    """Node 0 is replaced, and in node 1's memory one bit of its shard is wrong: the digests taken where the shard came
    from tell, the global tier gives the rank what was saved, and node 0 does not keep what came as its copy."""
    dice = Random(4)
    with make_world(tmp_path, num_nodes=2, has_disks=False) as world:
        first, second = world.nodes
        (key,) = [key for key in second.parts if (key.rank, key.part) == (0, SHARD_PART)]
        first.empty_memory()
        assert [told["tiers"] for told in world.load()] == [["replica", "memory"]] * 2
        (own,) = [own for own in first.parts if (own.rank, own.part) == (0, SHARD_PART)]
        for _ in range(10):
            world.heal()
            first.empty_memory()
            second.flip_bit(key, dice.randrange(len(second.parts[key])), dice.randrange(8))
            for rank, told in enumerate(world.load()):
                assert told["iteration"] == NEWEST
                assert told["tiers"] == ["global", "memory"]
                assert told["digest"] == world.digests[rank][NEWEST]
                assert [one[:3] for one in told["rejected"]] == [[NEWEST, "replica", 0]]
            assert not first.holds(own)


@pytest.mark.process
def test_what_replaces_a_bad_copy_in_memory_is_found_in_its_place(tmp_path: Path) -> None:
    """A byte flips in node 0's memory: its rank loads the replica, and the next time from memory again."""
    with make_world(tmp_path, num_nodes=2, has_disks=False) as world:
        first, _ = world.nodes
        (own,) = [own for own in first.parts if (own.rank, own.part) == (0, SHARD_PART)]
        first.flip_bit(own, len(first.parts[own]) - 1, 0)
        assert [told["tiers"] for told in world.load()] == [["replica", "memory"]] * 2
        for rank, told in enumerate(world.load()):
            assert told["tiers"] == ["memory", "memory"]
            assert told["digest"] == world.digests[rank][NEWEST]
