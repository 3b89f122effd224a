"""Replication partners of each rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.checkpoint_plan import choose_partners, parity_groups

WORLDS = st.lists(st.integers(1, 4), min_size=1, max_size=7).map(
    lambda sizes: [f"node{number}" for number, size in enumerate(sizes) for _ in range(size)]
)
SHUFFLED = WORLDS.flatmap(st.permutations)


def test_partner_is_the_same_local_rank_of_the_next_node() -> None:
    """Three nodes of two ranks with one copy each."""
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert choose_partners(nodes, factor=2) == ((2,), (3,), (4,), (5,), (0,), (1,))


def test_each_copy_is_one_jump_further() -> None:
    """The i-th copy is stored i jumps away."""
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert choose_partners(nodes, factor=3)[0] == (2, 4)
    assert choose_partners(nodes, factor=3, jump=4)[0] == (4, 2)


def test_jump_never_ends_on_the_same_node() -> None:
    """A jump shorter than a node continues to the next node."""
    assert choose_partners(["a", "a", "b", "b"], factor=2, jump=1) == ((2,), (2,), (0,), (0,))


def test_one_node_has_no_partners() -> None:
    """A single node has no other node to replicate to."""
    assert choose_partners(["a", "a"], factor=2) == ((), ())


@pytest.mark.parametrize(("factor", "jump"), [(0, None), (2, 0)])
def test_invalid_factor_and_jump_are_rejected(factor: int, jump: int | None) -> None:
    """A factor or a jump below 1 is an error."""
    with pytest.raises(ValueError, match="at least 1"):
        choose_partners(["a", "b"], factor=factor, jump=jump)


@given(SHUFFLED, st.integers(1, 5), st.none() | st.integers(1, 30))
def test_copies_are_on_distinct_other_nodes(nodes: list[str], factor: int, jump: int | None) -> None:
    """In any world every shard is stored on the requested number of nodes, or on all nodes."""
    partners = choose_partners(nodes, factor=factor, jump=jump)
    assert len(partners) == len(nodes)
    for rank, chosen in enumerate(partners):
        holders = {nodes[rank], *(nodes[partner] for partner in chosen)}
        assert len(holders) == len(chosen) + 1 == min(factor, len(set(nodes)))


@given(st.integers(2, 6), st.integers(1, 4))
def test_even_worlds_balance_copies(num_nodes: int, ranks: int) -> None:
    """If all nodes have the same number of ranks, every rank's node stores one copy per rank."""
    nodes = [f"node{number}" for number in range(num_nodes) for _ in range(ranks)]
    taken = [partner for (partner,) in choose_partners(nodes, factor=2)]
    assert sorted(taken) == list(range(len(nodes)))


def test_groups_are_the_same_local_rank_of_neighbouring_nodes() -> None:
    """Four nodes of two ranks, two nodes per group."""
    nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert parity_groups(nodes, 1) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_remaining_nodes_join_the_last_group() -> None:
    """Five nodes, three per group: the last two nodes join that group."""
    assert parity_groups(list("abcde"), 2) == ((0, 1, 2, 3, 4),)
    assert parity_groups(list("abcdefg"), 2) == ((0, 1, 2), (3, 4, 5, 6))


@given(SHUFFLED, st.integers(1, 5))
def test_groups_contain_each_rank_once_and_no_node_twice(nodes: list[str], k: int) -> None:
    """Losing a node loses at most one shard of any group, and a rank is alone only if there is no other node."""
    groups = parity_groups(nodes, k)
    assert sorted(rank for group in groups for rank in group) == list(range(len(nodes)))
    for group in groups:
        assert len({nodes[rank] for rank in group}) == len(group)
        if len(group) == 1:
            others = [other for other in groups if other != group]
            assert all(nodes[group[0]] in {nodes[rank] for rank in other} for other in others)


@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 5))
def test_groups_of_even_worlds_have_the_requested_size(num_nodes: int, ranks: int, k: int) -> None:
    """A group has at least k + 1 ranks if there are as many nodes, and fewer than two groups' worth."""
    nodes = [f"node{number}" for number in range(num_nodes) for _ in range(ranks)]
    for group in parity_groups(nodes, k):
        assert min(k + 1, num_nodes) <= len(group) <= 2 * k + 1 or len(group) == num_nodes
