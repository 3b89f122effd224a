"""A slow rank's node, process or work is identified from the same work on three ranks."""

from __future__ import annotations

import pytest

from outlast.policy.stragglers import MachineTimes, Scope, SlownessCause, choose_others, judge_machine

NODES = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
ROLES = dict.fromkeys(NODES, "")


def times(rank: int, product_s: float = 0.01, copy_s: float = 0.02, **exchange_s: float) -> MachineTimes:
    named = {name.removeprefix("r"): seconds for name, seconds in exchange_s.items()}
    return MachineTimes(rank=rank, product_s=product_s, copy_s=copy_s, exchange_s=named)


OTHERS = (times(1, 0.0105, 0.021, r2=0.001), times(2, 0.0098, 0.0195))


@pytest.mark.parametrize(
    ("suspect", "cause"),
    [
        (times(0, 0.0135, 0.02, r1=0.001, r2=0.001), SlownessCause.MACHINE),
        (times(0, 0.01, 0.03, r1=0.001, r2=0.001), SlownessCause.MACHINE),
        (times(0, 0.01, 0.02, r1=0.002, r2=0.003), SlownessCause.LINK),
        (times(0, 0.01, 0.02, r1=0.001, r2=0.009), SlownessCause.WORK),
        (times(0, 0.0115, 0.023, r1=0.0012, r2=0.0011), SlownessCause.WORK),
        (times(0, 0.03, 0.02, r1=0.01, r2=0.01), SlownessCause.MACHINE),
    ],
)
def test_cause_is_the_resource_slower_than_on_both_others(suspect: MachineTimes, cause: SlownessCause) -> None:
    """A product or copy slower than on both other ranks identifies the node, or the rank's process or GPU if only part
    of the node is slow in training; slow messages to both identify its link; otherwise its work is the cause."""
    decision = judge_machine(suspect, OTHERS, node="n0", scope=Scope.NODE)
    assert decision.cause == cause
    assert "on rank 1 and 2" in decision.describe()
    of_rank = judge_machine(suspect, OTHERS, node="n0", scope=Scope.RANK)
    assert of_rank.cause == (SlownessCause.PROCESS if cause == SlownessCause.MACHINE else cause)
    assert "the node is slow" not in of_rank.describe()


def test_shared_memory_copies_identify_only_a_node() -> None:
    """Without GPUs the ranks of a node share its memory: a slow copy identifies a whole node only."""
    suspect = times(0, 0.01, 0.09)
    alone = judge_machine(suspect, OTHERS, node="n0", shares_memory=True)
    assert (alone.cause, "memory copy" in alone.reason) == (SlownessCause.WORK, False)
    assert (
        judge_machine(suspect, OTHERS, node="n0", scope=Scope.NODE, shares_memory=True).cause == SlownessCause.MACHINE
    )
    assert judge_machine(suspect, OTHERS, node="n0").cause == SlownessCause.PROCESS


def test_two_ranks_identify_no_slow_link() -> None:
    """With two ranks, the slow end of the connection cannot be identified."""
    decision = judge_machine(times(0, 0.02, 0.02, r1=0.5), OTHERS[1:], node="n0")
    assert decision.cause == SlownessCause.PROCESS
    assert "messages" not in decision.reason


def test_cause_is_unknown_if_all_others_are_slow() -> None:
    """If all other ranks are slow too, no cause is reported."""
    assert judge_machine(times(0), (), node="n0").cause == SlownessCause.UNKNOWN


@pytest.mark.parametrize(
    ("suspect", "scores", "slow", "others"),
    [
        (0, dict.fromkeys(NODES, 1.0), (0,), (2, 4)),
        (0, {2: 0.8, 3: 0.9, 4: 1.0, 5: 1.0}, (0,), (3, 4)),
        (0, {}, (0, 2, 3), (1, 4)),
        (0, {}, (0, 1, 2, 3, 4), (5,)),
        (0, {}, tuple(NODES), ()),
    ],
)
def test_suspect_is_compared_with_fast_ranks_elsewhere(
    suspect: int, scores: dict[int, float], slow: tuple[int, ...], others: tuple[int, ...]
) -> None:
    """A suspect is compared with ranks of its role that are not slow, on separate nodes if possible."""
    assert choose_others(suspect, NODES, ROLES, scores, slow) == others


def test_ranks_of_the_same_role_are_preferred() -> None:
    """A rank of another role is used only if there is none of the same role."""
    roles = {rank: "stage-0" if rank in (0, 3) else "stage-1" for rank in NODES}
    assert 3 in choose_others(0, NODES, roles, {}, (0,))
