"""Who takes whose copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.checkpoint_plan import choose_partners, parity_groups

WORLDS = st.lists(st.integers(1, 4), min_size=1, max_size=7).map(
    lambda sizes: [f"node{number}" for number, size in enumerate(sizes) for _ in range(size)]
)
SHUFFLED = WORLDS.flatmap(st.permutations)


def test_the_partner_is_the_same_local_rank_of_the_next_node() -> None:
    """Three nodes of two ranks, one copy each."""
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert choose_partners(nodes, factor=2) == ((2,), (3,), (4,), (5,), (0,), (1,))


def test_a_third_copy_goes_one_jump_further() -> None:
    """The i-th copy lies i jumps away."""
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert choose_partners(nodes, factor=3)[0] == (2, 4)
    assert choose_partners(nodes, factor=3, jump=4)[0] == (4, 2)


def test_a_jump_onto_the_own_node_goes_on_to_the_next() -> None:
    """A jump that is shorter than a node still leaves it."""
    assert choose_partners(["a", "a", "b", "b"], factor=2, jump=1) == ((2,), (2,), (0,), (0,))


def test_one_node_has_no_partners() -> None:
    """There is nobody to copy to."""
    assert choose_partners(["a", "a"], factor=2) == ((), ())


@pytest.mark.parametrize(("factor", "jump"), [(0, None), (2, 0)])
def test_settings_that_mean_nothing_are_refused(factor: int, jump: int | None) -> None:
    """A factor or a jump below 1."""
    with pytest.raises(ValueError, match="at least 1"):
        choose_partners(["a", "b"], factor=factor, jump=jump)


@given(SHUFFLED, st.integers(1, 5), st.none() | st.integers(1, 30))
def test_copies_lie_on_distinct_other_nodes(nodes: list[str], factor: int, jump: int | None) -> None:
    """In any world every shard lies on as many nodes as asked for, or on all there are."""
    partners = choose_partners(nodes, factor=factor, jump=jump)
    assert len(partners) == len(nodes)
    for rank, chosen in enumerate(partners):
        holders = {nodes[rank], *(nodes[partner] for partner in chosen)}
        assert len(holders) == len(chosen) + 1 == min(factor, len(set(nodes)))


@given(st.integers(2, 6), st.integers(1, 4))
def test_even_worlds_share_the_load_evenly(num_nodes: int, ranks: int) -> None:
    """Where all nodes have the same number of ranks, every rank's node takes one copy per rank."""
    nodes = [f"node{number}" for number in range(num_nodes) for _ in range(ranks)]
    taken = [partner for (partner,) in choose_partners(nodes, factor=2)]
    assert sorted(taken) == list(range(len(nodes)))


def test_groups_are_the_same_local_rank_of_neighbouring_nodes() -> None:
    """Four nodes of two ranks, two nodes to a group."""
    nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert parity_groups(nodes, 1) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_a_tail_joins_the_last_group() -> None:
    """Five nodes, three to a group: the last two stay together with it."""
    assert parity_groups(list("abcde"), 2) == ((0, 1, 2, 3, 4),)
    assert parity_groups(list("abcdefg"), 2) == ((0, 1, 2), (3, 4, 5, 6))


@given(SHUFFLED, st.integers(1, 5))
def test_every_rank_is_in_one_group_and_no_node_twice(nodes: list[str], k: int) -> None:
    """Losing a node takes at most one shard of any group, and a rank is alone only if there was nobody else."""
    groups = parity_groups(nodes, k)
    assert sorted(rank for group in groups for rank in group) == list(range(len(nodes)))
    for group in groups:
        assert len({nodes[rank] for rank in group}) == len(group)
        if len(group) == 1:
            others = [other for other in groups if other != group]
            assert all(nodes[group[0]] in {nodes[rank] for rank in other} for other in others)


@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 5))
def test_groups_of_even_worlds_are_as_large_as_asked(num_nodes: int, ranks: int, k: int) -> None:
    """At least k + 1 where there are as many nodes, and less than two groups' worth."""
    nodes = [f"node{number}" for number in range(num_nodes) for _ in range(ranks)]
    for group in parity_groups(nodes, k):
        assert min(k + 1, num_nodes) <= len(group) <= 2 * k + 1 or len(group) == num_nodes
