"""Rank assignment rules at a restart, for every world and any deaths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import ConfigError, OutlastError, RestartAbort
from outlast.inprocess.plugins import (
    ActiveWorldSizeDivisibleBy,
    Compose,
    FillGaps,
    Level,
    MaxActiveWorldSize,
    ShiftRanks,
    Tree,
)
from outlast.policy.rank_assignment import Assignment, Member, Rule, assign


def world(size: int, per_node: int = 1) -> list[Member]:
    """Return members that have no ranks yet; racks hold two nodes each."""
    return [
        Member(
            initial_rank=initial,
            node=f"n{initial // per_node}",
            labels={"tree-0": f"rack{initial // per_node // 2}"},
        )
        for initial in range(size)
    ]


def after(members: list[Member], ranks: Mapping[int, int | None], *dead: int) -> list[Member]:
    """Return the members after an assignment and some deaths; earlier deaths left no gap."""
    return [
        replace(member, rank=ranks.get(member.initial_rank), alive=member.alive and member.initial_rank not in dead)
        for member in members
    ]


def active(ranks: Mapping[int, int | None]) -> dict[int, int]:
    return {initial: rank for initial, rank in ranks.items() if rank is not None}


def test_first_call_keeps_the_launchers_ranks() -> None:
    """Before any restart, ranks are those of the launcher; ranks beyond the active world are spares."""
    assert assign(FillGaps(), world(3), iteration=0, active_world_size=None) == {0: 0, 1: 1, 2: 2}
    assert assign(FillGaps(), world(3), iteration=0, active_world_size=2) == {0: 0, 1: 1, 2: None}


def test_spare_takes_the_rank_of_a_dead_member() -> None:
    """FillGaps gives a dead member's rank to a spare; all other ranks stay."""
    members = world(5)
    ranks = assign(FillGaps(), members, iteration=0, active_world_size=4)
    ranks = assign(FillGaps(), after(members, ranks, 1), iteration=1, active_world_size=4)
    assert ranks == {0: 0, 2: 2, 3: 3, 4: 1}


def test_fill_gaps_aborts_or_shrinks_without_spares() -> None:
    """Without enough spares FillGaps aborts, or moves the last ranks into the gaps if shrinking is allowed."""
    members = world(5)
    ranks = assign(FillGaps(), members, iteration=0, active_world_size=None)
    left = after(members, ranks, 1, 2)
    with pytest.raises(RestartAbort, match="of 5 ranks 2 cannot be filled from 0 spares"):
        assign(FillGaps(), left, iteration=1, active_world_size=None)
    left = after(members, ranks, 1)
    assert assign(FillGaps(may_shrink=True), left, iteration=1, active_world_size=None) == {0: 0, 2: 2, 3: 3, 4: 1}
    assert assign(ShiftRanks(), left, iteration=1, active_world_size=None) == {0: 0, 2: 1, 3: 2, 4: 3}


def test_ranks_beyond_a_limit_become_spares() -> None:
    """Ranks beyond a limit wait, and fill the next gap."""
    members = world(7)
    rule = Compose(ShiftRanks(), MaxActiveWorldSize(6), ActiveWorldSizeDivisibleBy(4))
    ranks = assign(rule, members, iteration=0, active_world_size=None)
    assert ranks == {0: 0, 1: 1, 2: 2, 3: 3, 4: None, 5: None, 6: None}
    rule = Compose(FillGaps(), MaxActiveWorldSize(6), ActiveWorldSizeDivisibleBy(4))
    assert assign(rule, after(members, ranks, 2), iteration=1, active_world_size=None) == {
        **dict.fromkeys((5, 6)),
        **{0: 0, 1: 1, 3: 3, 4: 2},
    }


def test_incomplete_node_is_replaced_as_a_whole() -> None:
    """With granularity node the ranks of an incomplete node move together to a node with room; its survivors become
    spares."""
    members = world(6, per_node=2)
    rule = FillGaps(granularity="node")
    ranks = assign(rule, members, iteration=0, active_world_size=4)
    ranks = assign(rule, after(members, ranks, 1), iteration=1, active_world_size=4)
    assert ranks == {0: None, 2: 2, 3: 3, 4: 0, 5: 1}
    with pytest.raises(RestartAbort, match="2 cannot be filled from 2 spares that sit together"):
        assign(rule, after([replace(members[1], alive=False), *members[:1], *members[2:]], ranks, 3), iteration=2,
               active_world_size=4)  # fmt: skip


def test_node_prefers_its_own_spares() -> None:
    """With granularity node a spare of the same node is enough, and no other rank moves."""
    members = world(5, per_node=5)
    ranks = assign(FillGaps(granularity="node"), members, iteration=0, active_world_size=4)
    ranks = assign(FillGaps(granularity="node"), after(members, ranks, 0), iteration=1, active_world_size=4)
    assert ranks == {1: 1, 2: 2, 3: 3, 4: 0}


def test_tree_uses_the_nearest_spare() -> None:
    """A gap is filled from its node, then from its rack, then from anywhere."""
    members = world(12, per_node=3)  # two racks of two nodes of three
    tree = Tree(Level("RACK", spare=1), Level("node", spare=1))
    ranks = assign(tree, members, iteration=0, active_world_size=None)
    assert ranks == {0: 0, 1: 1, 2: None, 3: 2, 4: None, 5: None, 6: 3, 7: 4, 8: None, 9: 5, 10: None, 11: None}
    lost = after(members, ranks, 1, 3)
    ranks = assign(tree, lost, iteration=1, active_world_size=None)
    assert (ranks[2], ranks[4]) == (1, 2), "each from its own node"
    lost = after(lost, ranks, 0)
    ranks = assign(tree, lost, iteration=2, active_world_size=None)
    assert ranks[5] == 0, "from the other node of the rack"
    lost = after(lost, ranks, 5)
    ranks = assign(tree, lost, iteration=3, active_world_size=None)
    assert ranks[8] == 0, "from the other rack"


def test_tree_levels_come_from_variables_or_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level is given by an environment variable or a function; a missing variable is an error with its name."""
    monkeypatch.setenv("SWITCH", "s7")
    tree = Tree(Level("SWITCH"), Level(lambda: "shelf"), Level("node"))
    assert Compose(tree, MaxActiveWorldSize(2)).labels() == {"tree-0": "s7", "tree-1": "shelf"}
    monkeypatch.delenv("SWITCH")
    with pytest.raises(ConfigError, match="'SWITCH'"):
        tree.labels()


def test_tree_with_too_few_active_ranks_aborts() -> None:
    """Fewer ranks than the active world needs is an abort with both numbers."""
    with pytest.raises(RestartAbort, match="leave 2 of 6 ranks, but active_world_size=4"):
        assign(Tree(Level("node", spare=2)), world(6, per_node=3), iteration=0, active_world_size=4)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({0: 0, 1: 0}, "must be 0, 1, 2"),
        ({0: 0, 1: 2}, "must be 0, 1, 2"),
        ({0: 0, 9: 1}, r"initial ranks \[9\], which do not live"),
        ({}, "none of 2 living ranks active"),
    ],
)
def test_invalid_plugin_assignments_are_rejected(ranks: dict[int, int], message: str) -> None:
    """A plug-in that assigns a rank twice, leaves a gap, revives a dead member or stops all members is an error."""
    with pytest.raises(OutlastError, match=message):
        assign(lambda started: replace(started, ranks=ranks), world(2), iteration=0, active_world_size=None)
    with pytest.raises(ConfigError, match="returned NoneType"):
        assign(lambda started: None, world(2), iteration=0, active_world_size=None)  # type: ignore[arg-type,return-value]


RULES: dict[str, Rule] = {
    "fill": FillGaps(),
    "fill-shrink": FillGaps(may_shrink=True),
    "node": FillGaps(granularity="node"),
    "node-shrink": FillGaps(granularity="node", may_shrink=True),
    "shift": ShiftRanks(),
    "tree": Tree(Level("RACK"), Level("node", spare=1)),
    "tree-whole": Tree(Level("RACK"), Level("node", whole=True), may_shrink=True),
    "divisible": Compose(ShiftRanks(), ActiveWorldSizeDivisibleBy(2)),
    "limited": Compose(FillGaps(may_shrink=True), MaxActiveWorldSize(3)),
}


@settings(max_examples=300)
@given(data=st.data(), rule_name=st.sampled_from(sorted(RULES)), size=st.integers(1, 12), per_node=st.integers(1, 4))
def test_every_assignment_is_dense_and_minimal(data: st.DataObject, rule_name: str, size: int, per_node: int) -> None:
    """For any deaths, ranks are 0..n-1, each once and never assigned to a dead member; survivors keep their ranks if
    the rule promises that."""
    rule = RULES[rule_name]
    members = world(size, per_node)
    target = data.draw(st.none() | st.integers(1, size))
    try:
        ranks = assign(rule, members, iteration=0, active_world_size=target)
    except RestartAbort:
        return
    for iteration in range(1, 5):
        living = [member.initial_rank for member in members if member.alive]
        dead = data.draw(st.sets(st.sampled_from(living)))
        before, members = active(ranks), after(members, ranks, *dead)
        survivors = {initial: rank for initial, rank in before.items() if initial not in dead}
        spares = [initial for initial, rank in ranks.items() if rank is None and initial not in dead]
        try:
            ranks = assign(rule, members, iteration=iteration, active_world_size=target)
        except RestartAbort:
            assert rule_name != "fill-shrink" or len(dead) == len(living)
            if rule_name == "fill":
                assert len(survivors) + len(spares) < len(before)
            return
        chosen = active(ranks)
        assert sorted(ranks) == [initial for initial in living if initial not in dead]
        assert sorted(chosen.values()) == list(range(len(chosen)))
        assert len(chosen) <= (target or size)
        if rule_name in ("fill", "tree"):
            assert len(chosen) == len(before)
            assert chosen.items() >= survivors.items(), "a survivor's rank changed"
        if rule_name == "fill-shrink":
            kept = {initial: rank for initial, rank in survivors.items() if rank < len(chosen)}
            assert chosen.items() >= kept.items(), "a survivor's rank changed without need"
            assert len(chosen) == min(target or len(before), len(survivors) + len(spares))
        if rule_name == "node":
            assert len(chosen) == len(before)
            hit = {members[initial].node for initial in dead if initial in before}
            for initial, rank in survivors.items():
                if members[initial].node not in hit:
                    assert chosen[initial] == rank, "a rank of a complete node moved"
        if rule_name in ("shift", "divisible"):
            order = [initial for initial, _ in sorted(chosen.items(), key=lambda item: item[1])]
            kept_order = [initial for initial in order if initial in survivors]
            assert kept_order == sorted(kept_order, key=lambda initial: survivors[initial])


def test_assignment_does_not_depend_on_member_order() -> None:
    """Every order of members gives the same assignment."""
    members = world(6, per_node=2)
    ranks = assign(FillGaps(), members, iteration=0, active_world_size=4)
    left = after(members, ranks, 0, 3)
    one = assign(FillGaps(), left, iteration=1, active_world_size=4)
    assert one == assign(FillGaps(), reversed(left), iteration=1, active_world_size=4)
    assert isinstance(Assignment(members=tuple(left), iteration=1).previous[0], Member)
