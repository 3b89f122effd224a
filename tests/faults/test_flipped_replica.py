"""A copy that another node holds in memory is proven like any other."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from world_of_copies import NEWEST, make_world

from outlast.checkpoint.manifest import SHARD_PART


@pytest.mark.slow
@pytest.mark.process
def test_a_byte_flipped_in_a_peers_memory_is_found_and_not_loaded(tmp_path: Path) -> None:
    """Node 0 is replaced, and in node 1's memory one bit of its shard is wrong: the digests taken where the shard came
    from tell, and the global tier gives the rank what was saved."""
    dice = Random(4)
    with make_world(tmp_path, num_nodes=2, has_disks=False) as world:
        first, second = world.nodes
        (key,) = [key for key in second.parts if (key.rank, key.part) == (0, SHARD_PART)]
        first.empty_memory()
        assert [told["tiers"] for told in world.load()] == [["replica", "memory"]] * 2
        for _ in range(10):
            world.heal()
            first.empty_memory()
            second.flip_bit(key, dice.randrange(len(second.parts[key])), dice.randrange(8))
            for rank, told in enumerate(world.load()):
                assert told["iteration"] == NEWEST
                assert told["tiers"] == ["global", "memory"]
                assert told["digest"] == world.digests[rank][NEWEST]
                assert [one[:3] for one in told["rejected"]] == [[NEWEST, "replica", 0]]
