"""The culprit: one rank, the one that the others wait for."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.culprit import Position, find_culprit


def waiting(rank: int, **facts) -> Position:
    """A victim: it answers, and stands in a collective."""
    values = {"node": "n", "global_rank": rank, "iteration": 7, "num_entries": 1, "collectives": 20}
    return Position(**{**values, "process_state": "S", "waits_in_collective": True, **facts})


def test_rank_behind_in_iteration_is_named():
    """The lowest iteration decides before anything else."""
    culprit = find_culprit([waiting(0), waiting(1, expired=True), waiting(2, iteration=6), waiting(3)])
    assert culprit.position.global_rank == 2
    assert "at iteration 6 while others reached 7" in culprit.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"process_state": "T", "responsive": False, "waits_in_collective": None}, "stopped (state T)"),
        ({"process_state": "T", "waits_in_collective": True}, "stopped (state T)"),
        ({"process_state": "X", "responsive": False, "waits_in_collective": None}, "gone"),
        ({"responsive": False, "waits_in_collective": False}, "holds the GIL"),
        ({"waits_in_collective": False, "collectives": 19}, "has not come to the collective"),
        ({"collectives": 19}, "19 collectives entered, others 20"),
        ({"num_entries": 0}, "0 sections entered in this iteration, others 1"),
    ],
)
def test_kind_of_hang_is_told_from_waiting(facts, reason):
    """Whatever keeps a rank from the collective that the others wait in, it is named, with the evidence."""
    culprit = find_culprit([waiting(0, expired=True), waiting(1, expired=True), waiting(2, **facts), waiting(3)])
    assert culprit.position.global_rank == 2
    assert reason in culprit.reason


def test_reason_tells_the_line():
    """The reason ends with the line that the culprit hangs on."""
    line = 'File "train.py", line 9 in load'
    culprit = find_culprit([waiting(0), waiting(1, waits_in_collective=False, stack_line=line)])
    assert culprit.reason.endswith(f"at {line}")


def test_waiting_rank_that_could_not_answer_is_a_victim():
    """A rank that stands in a collective is a victim, though it was too slow to answer."""
    busy = waiting(3, waits_in_collective=False)
    assert find_culprit([waiting(0, responsive=False, collectives=-1), busy]).position == busy


def test_ties_go_to_the_expired_one_then_the_lowest():
    """Where nothing else differs, an exceeded timeout decides, then the lowest rank; the reason says so."""
    assert find_culprit([waiting(1), waiting(4, expired=True), waiting(2)]).position.global_rank == 4
    culprit = find_culprit([waiting(5), waiting(3)])
    assert culprit.position.global_rank == 3
    assert "nothing tells ranks 3, 5 apart" in culprit.reason


def test_finished_rank_is_not_blamed():
    """A rank that finished is behind nobody."""
    done = waiting(0, iteration=1, finished=True, process_state="Z")
    assert find_culprit([done, waiting(1), waiting(2)]).position.global_rank == 1


def test_plain_process_is_blamed_only_at_the_start():
    """A process that never attached is suspected while the others have not begun, not later."""
    plain = Position(node="n", global_rank=2, attached=False, process_state="T")
    assert find_culprit([waiting(0, iteration=0), plain]).position == plain
    assert find_culprit([waiting(0), plain]).position.global_rank == 0
    assert find_culprit([plain]).position == plain


def test_nobody_to_name_is_an_error():
    """No position, no culprit."""
    with pytest.raises(ValueError, match="no rank was examined"):
        find_culprit([])


positions = st.lists(
    st.builds(
        Position,
        node=st.sampled_from(["a", "b"]),
        global_rank=st.integers(0, 50),
        iteration=st.integers(0, 3),
        num_entries=st.integers(0, 3),
        collectives=st.integers(-1, 3),
        responsive=st.booleans(),
        process_state=st.sampled_from(["R", "S", "D", "T", "t", "Z", "X", ""]),
        waits_in_collective=st.sampled_from([None, True, False]),
        expired=st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.global_rank,
)


@given(positions)
def test_nobody_ahead_is_named(ranks):
    """Never a rank that is ahead of another in iteration."""
    assert find_culprit(ranks).position.iteration == min(one.iteration for one in ranks)


@given(positions)
def test_victim_is_not_named_beside_a_stopped_peer(ranks):
    """Among the ranks that are furthest behind, one that waits is never named while another is stopped."""
    culprit = find_culprit(ranks).position
    peers = [one for one in ranks if one.iteration == culprit.iteration]
    if any(one.process_state == "T" for one in peers):
        assert culprit.process_state in ("T", "t", "Z", "X")
    if any(one.waits_in_collective is False for one in peers):
        assert not culprit.waits_in_collective or culprit.process_state in ("T", "t", "Z", "X")


@given(positions, st.randoms())
def test_order_of_the_nodes_reports_does_not_matter(ranks, random):
    """The same positions name the same rank, in whatever order they came, and through JSON."""
    shuffled = random.sample(ranks, len(ranks))
    sent = msgspec.json.decode(msgspec.json.encode(shuffled), type=list[Position])
    assert find_culprit(sent) == find_culprit(ranks)
