"""A thousand random faults: each is detected, and all ranks load the nearest undamaged copies."""

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
"""Number of faults of each kind outside campaigns: the first ones of the thousand."""


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
def test_every_fault_is_detected_and_undamaged_copies_load(name: str, num_faults: int, tmp_path: Path) -> None:
    """After any fault all ranks load the newest undamaged checkpoint, each from its nearest undamaged tier, bit by bit.

    No corrupt byte is loaded, and no rank crashes.
    """
    num_injected: Counter[Tier] = Counter()
    trial = 0
    num_nodes, has_disks = 1 if name == "one node" else 2, "without disks" not in name
    with make_world(tmp_path, num_nodes=num_nodes, has_disks=has_disks) as world:
        while num_injected.total() < num_faults:
            faults, decoys = _inject_faults(Random(f"{SEED} {name} {trial}"), world)
            descriptions = [f"seed {SEED}, {name}, trial {trial}", *decoys, *(fault.name for fault, _ in faults)]
            spoiled = {spot for fault, _ in faults for spot in fault.spoils}
            expected = world.expect(spoiled)
            assert expected is not None
            _check(world, world.load(), expected, faults, descriptions)
            num_injected.update(spot.tier for fault, spot in faults if _is_in_the_way(spot, expected))
            world.heal()
            trial += 1
        assert not (tmp_path / "trapped").exists(), "what was in .metadata was unpickled"
    assert set(num_injected) == {spot.tier for spot in world.spots}, num_injected


@pytest.mark.process
def test_without_an_undamaged_copy_all_ranks_fail(tmp_path: Path) -> None:
    """Without an undamaged copy, the load fails on all ranks with the same copies and reasons.

    The live state stays unchanged.
    """
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
            descriptions = [(one["kind"], one["error"].partition(" holds ")[2]) for one in (first, second)]
            assert descriptions[0] == descriptions[1], "but for their own node's folder they say the same"
            world.heal()
        assert [descriptions["iteration"] for descriptions in world.load()] == [ITERATIONS[-1]] * 2


def _inject_faults(dice: Random, world: World) -> tuple[list[tuple[Fault, Spot]], list[str]]:
    """Inject faults into some of each rank's nearest copies; return each fault with its intended copy."""
    faults: list[tuple[Fault, Spot]] = []
    spoiled: set[Spot] = set()
    for rank in dice.sample(range(len(world.nodes)), len(world.nodes)):
        order = sorted((-spot.checkpoint, spot.tier, spot) for spot in world.spots if spot.rank == rank)
        for *_, spot in order[: _how_many(dice, len(order))]:
            if spot in spoiled:
                continue
            fault = draw_fault(dice, world, spot)
            if world.expect(spoiled | fault.spoils) is None:
                continue  # one copy must remain
            fault.strike()
            spoiled |= fault.spoils
            faults.append((fault, spot))
    decoys = [draw_decoy(dice, world)] if dice.random() < 0.2 else []
    return faults, [_strike_decoy(decoy) for decoy in decoys]


def _how_many(dice: Random, num_copies: int) -> int:
    """Return the number of a rank's copies to damage: mostly a few, sometimes nearly all."""
    return min(num_copies, int(dice.expovariate(0.4)))


def _strike_decoy(decoy: tuple[str, Any]) -> str:
    name, strike = decoy
    try:
        strike()
    except OSError as error:  # a fault has already removed the place
        return f"{name}: not laid ({error})"
    return name


def _is_in_the_way(spot: Spot, expected: tuple[int, list[Tier]]) -> bool:
    """Return whether a copy would have been loaded before the expected one."""
    checkpoint, tiers = expected
    return spot.checkpoint > checkpoint or (spot.checkpoint == checkpoint and spot.tier < tiers[spot.rank])


def _check(
    world: World,
    loaded: list[dict[str, Any]],
    expected: tuple[int, list[Tier]],
    faults: list[tuple[Fault, Spot]],
    descriptions: list[str],
) -> None:
    checkpoint, tiers = expected
    context = "\n".join([*descriptions, *map(str, loaded)])
    for rank, one in enumerate(loaded):
        assert one.get("iteration") == checkpoint, context
        assert one["tiers"] == [str(tier) for tier in tiers], context
        assert one["digest"] == world.digests[rank][checkpoint], context
        assert one["rejected"] == loaded[0]["rejected"], context
        assert list(one["read"]) == [str(tiers[rank])], context
    reported = {(checkpoint, tier, rank) for checkpoint, tier, rank, _ in loaded[0]["rejected"]}
    for index, (fault, spot) in enumerate(faults):
        if any(spot in later.spoils for later, _ in faults[index + 1 :]):
            continue  # a later fault may have removed the damaged copy
        if fault.is_told and spot.checkpoint == checkpoint and spot.tier < tiers[spot.rank]:
            assert (checkpoint, str(spot.tier), spot.rank) in reported, f"{fault.name} is not told\n{context}"
