"""A thousand random faults: each is caught, and the ranks go on from the nearest copies that are left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from damage import Fault, draw_decoy, draw_fault
from world_of_copies import ITERATIONS, Spot, World, make_world

from outlast.policy.recovery_point import Tier

SEED = 20261121
NUM_FAULTS = {"one node": 450, "two nodes": 350, "two nodes without disks": 200}
SAMPLE = 40
"""So many of each kind are drawn where not all of the thousand are; the same ones as the first of those."""


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "num_faults"),
    [(name, SAMPLE) for name in NUM_FAULTS]
    + [
        pytest.param(name, count, marks=[pytest.mark.campaign, pytest.mark.timeout(1200)])
        for name, count in NUM_FAULTS.items()
    ],
)
def test_every_fault_is_caught_and_the_right_copies_are_loaded(name: str, num_faults: int, tmp_path: Path) -> None:
    """Whatever befalls memory, disks, replicas and the global tier: all ranks load the newest checkpoint that is left,
    each from its nearest tier that is, every bit as it was saved; no bad byte is loaded, and nobody crashes."""
    struck: Counter[Tier] = Counter()
    trial = 0
    num_nodes, has_disks = 1 if name == "one node" else 2, "without disks" not in name
    with make_world(tmp_path, num_nodes=num_nodes, has_disks=has_disks) as world:
        while struck.total() < num_faults:
            faults, decoys = _befall(Random(f"{SEED} {name} {trial}"), world)
            told = [f"seed {SEED}, {name}, trial {trial}", *decoys, *(fault.name for fault, _ in faults)]
            spoiled = {spot for fault, _ in faults for spot in fault.spoils}
            expected = world.expect(spoiled)
            assert expected is not None
            _check(world, world.load(), expected, faults, told)
            struck.update(spot.tier for fault, spot in faults if _is_in_the_way(spot, expected))
            world.heal()
            trial += 1
        assert not (tmp_path / "trapped").exists(), "what was in .metadata was unpickled"
    assert set(struck) == {spot.tier for spot in world.spots}, struck


@pytest.mark.process
def test_when_every_copy_is_bad_all_ranks_say_so_and_nothing_is_touched(tmp_path: Path) -> None:
    """With no good copy left the load fails on every rank alike, names copies and reasons, and leaves the live state
    alone."""
    with make_world(tmp_path, num_nodes=2, has_disks=True) as world:
        for trial in range(5):
            dice = Random(f"{SEED} nothing left {trial}")
            spoiled: set[Spot] = set()
            names = []
            for spot in sorted(world.spots):
                if spot not in spoiled:
                    fault = draw_fault(dice, world, spot)
                    fault.strike()
                    spoiled |= fault.spoils
                    names.append(fault.name)
            first, second = world.load()
            assert first["untouched"], (names, first)
            assert second["untouched"], (names, second)
            assert "none that all ranks can load" in first["error"], (names, first)
            told = [(one["kind"], one["error"].partition(" holds ")[2]) for one in (first, second)]
            assert told[0] == told[1], "but for their own node's folder they say the same"
            world.heal()
        assert [told["iteration"] for told in world.load()] == [ITERATIONS[-1]] * 2


def _befall(dice: Random, world: World) -> tuple[list[tuple[Fault, Spot]], list[str]]:
    """Strike some of each rank's nearest copies; return the faults, each with the copy that it was meant for."""
    faults: list[tuple[Fault, Spot]] = []
    spoiled: set[Spot] = set()
    for rank in dice.sample(range(len(world.nodes)), len(world.nodes)):
        order = sorted((-spot.checkpoint, spot.tier, spot) for spot in world.spots if spot.rank == rank)
        for *_, spot in order[: _how_many(dice, len(order))]:
            if spot in spoiled:
                continue
            fault = draw_fault(dice, world, spot)
            if world.expect(spoiled | fault.spoils) is None:
                continue  # something must be left
            fault.strike()
            spoiled |= fault.spoils
            faults.append((fault, spot))
    decoys = [draw_decoy(dice, world)] if dice.random() < 0.2 else []
    return faults, [_strike_decoy(decoy) for decoy in decoys]


def _how_many(dice: Random, most: int) -> int:
    """Return how many of a rank's copies to strike: mostly a few, sometimes nearly all."""
    return min(most, int(dice.expovariate(0.4)))


def _strike_decoy(decoy: tuple[str, Any]) -> str:
    name, strike = decoy
    try:
        strike()
    except OSError as error:  # a fault has struck the very place
        return f"{name}: not laid ({error})"
    return name


def _is_in_the_way(spot: Spot, expected: tuple[int, list[Tier]]) -> bool:
    """Whether a copy would have been loaded before the one that was."""
    checkpoint, tiers = expected
    return spot.checkpoint > checkpoint or (spot.checkpoint == checkpoint and spot.tier < tiers[spot.rank])


def _check(
    world: World,
    loaded: list[dict[str, Any]],
    expected: tuple[int, list[Tier]],
    faults: list[tuple[Fault, Spot]],
    told: list[str],
) -> None:
    checkpoint, tiers = expected
    story = "\n".join([*told, *map(str, loaded)])
    for rank, one in enumerate(loaded):
        assert one.get("iteration") == checkpoint, story
        assert one["tiers"] == [str(tier) for tier in tiers], story
        assert one["digest"] == world.digests[rank][checkpoint], story
        assert one["rejected"] == loaded[0]["rejected"], story
        assert list(one["read"]) == [str(tiers[rank])], story
    named = {(checkpoint, tier, rank) for checkpoint, tier, rank, _ in loaded[0]["rejected"]}
    for index, (fault, spot) in enumerate(faults):
        if any(spot in later.spoils for later, _ in faults[index + 1 :]):
            continue  # there may be nothing left of it to be read
        if fault.is_told and spot.checkpoint == checkpoint and spot.tier < tiers[spot.rank]:
            assert (checkpoint, str(spot.tier), spot.rank) in named, f"{fault.name} is not told\n{story}"
