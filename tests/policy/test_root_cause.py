"""The root cause: one rank, the one that the others wait for."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outlast.policy.root_cause import Collective, Position, find_root_cause


def waiting(rank: int, **facts) -> Position:
    """A victim: it answers, and stands in a collective."""
    values = {"node": "n", "global_rank": rank, "iteration": 7, "num_entries": 1, "collectives": 20}
    return Position(**{**values, "process_state": "S", "waits_in_collective": True, **facts})


def test_rank_behind_in_iteration_is_named():
    """The lowest iteration decides before anything else."""
    root_cause = find_root_cause([waiting(0), waiting(1, expired=True), waiting(2, iteration=6), waiting(3)])
    assert root_cause.position.global_rank == 2
    assert "at iteration 6 while others reached 7" in root_cause.reason


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
    root_cause = find_root_cause([waiting(0, expired=True), waiting(1, expired=True), waiting(2, **facts), waiting(3)])
    assert root_cause.position.global_rank == 2
    assert reason in root_cause.reason


def test_reason_tells_the_line():
    """The reason ends with the line that the root cause hangs on."""
    line = 'File "train.py", line 9 in load'
    root_cause = find_root_cause([waiting(0), waiting(1, waits_in_collective=False, stack_line=line)])
    assert root_cause.reason.endswith(f"at {line}")


def test_waiting_rank_that_could_not_answer_is_a_victim():
    """A rank that stands in a collective is a victim, though it was too slow to answer."""
    busy = waiting(3, waits_in_collective=False)
    assert find_root_cause([waiting(0, responsive=False, collectives=-1), busy]).position == busy


def nobody(*ranks: Position) -> str:
    """Return why no rank is named, and no node either; the same for any order."""
    root_cause = find_root_cause(ranks)
    assert (root_cause.position, root_cause.node) == (None, "")
    assert find_root_cause(ranks[::-1]) == root_cause
    return root_cause.reason


def inside(rank: int, op: str = "ALLREDUCE", seq: int = 7, *, shape: str = "", group: str = "0", **facts) -> Position:
    """A rank in a collective, as the flight recorder has it."""
    groups = facts.pop("groups", {"0": seq} if group == "0" else {"0": 6, group: seq})
    label = "" if group == "0" else group
    call = Collective(op=op, seq=seq, group=group, label=label, shape=shape)
    return waiting(rank, **{"collectives": sum(groups.values()), "groups": groups, "waiting_in": call, **facts})


def test_an_exceeded_timeout_tells_ranks_apart_only_in_other_sections():
    """Of ranks in the same sections one exceeds the timeout first, by chance; in other sections it is evidence."""
    assert "ranks 1, 2, 4 are indistinguishable" in nobody(waiting(1), waiting(4, expired=True), waiting(2))
    late = waiting(4, expired=True, sections=("evaluation",))
    assert find_root_cause([waiting(1), late, waiting(2)]).position == late


def test_equal_slowness_is_nobodys():
    """All ranks compute for too long, at the same line: nobody is named, and the line is."""
    slow = [waiting(rank, waits_in_collective=False, stack_line="line 9", expired=rank == 0) for rank in range(4)]
    assert nobody(*slow) == "ranks 0, 1, 2, 3 are indistinguishable; all are at line 9"


def test_ranks_in_different_collectives_are_told_and_nobody_is_named():
    """Who waits in what is said, whichever of them is an iteration or a section behind."""
    others = [inside(0), inside(1, expired=True), inside(3)]
    where = "ranks wait in different collectives: 0, 1, 3 in ALLREDUCE seq 7, 2 in BROADCAST seq 7"
    for facts in ({}, {"iteration": 8}, {"iteration": 6}, {"num_entries": 3}):
        assert nobody(*others, inside(2, "BROADCAST", **facts)) == where
    assert nobody(inside(0), inside(1, "BROADCAST", iteration=8)).startswith(
        "ranks wait in different collectives: 0 in"
    )


def test_the_same_collective_of_other_sizes_is_another_one():
    """Gradients in another order: the sizes are said."""
    text = nobody(inside(0, shape="[[4]]"), inside(1, shape="[[4]]"), inside(2, shape="[[1000]]"))
    assert text.endswith("0, 1 in ALLREDUCE seq 7 of [[4]], 2 in ALLREDUCE seq 7 of [[1000]]")


def test_ranks_that_wait_for_each_other_are_nobodys_victims():
    """A rank that skips a collective of one group and waits in another's, or for the step's end, closes a circle."""
    others = [inside(rank, groups={"0": 7, "tp": 3}) for rank in (0, 1, 3)]
    text = nobody(*others, inside(2, seq=4, group="tp", num_entries=2))
    assert text.endswith("0, 1, 3 in ALLREDUCE seq 7, 2 in ALLREDUCE seq 4 of group tp")
    end = Collective(op="an agreement of outlast", is_own=True)
    assert nobody(*others, waiting(2, groups={"0": 6, "tp": 3}, waiting_in=end)).endswith(
        "2 in an agreement of outlast"
    )


def test_a_skipped_collective_is_told():
    """A rank that is an iteration ahead, or has finished, without the collective that the others wait in."""
    others = [inside(0), inside(1, expired=True), inside(3)]
    ahead = waiting(2, iteration=8, waits_in_collective=False, groups={"0": 6})
    text = "ranks 0, 1, 3 wait in ALLREDUCE seq 7, rank 2"
    assert nobody(*others, ahead) == f"{text} continued to iteration 8 without it"
    assert nobody(*others, waiting(2, finished=True, process_state="Z")) == f"{text} finished without it"


def test_an_agreement_cannot_be_skipped():
    """A rank that still stands in an agreement of an iteration that the others are past, or finished, hangs itself:
    they could only get on because it took part."""
    end = Collective(op="an agreement of outlast", is_own=True)
    stuck = waiting(2, iteration=6, groups={"0": 6}, waiting_in=end)
    root_cause = find_root_cause([inside(0), inside(1, expired=True), stuck, inside(3)])
    assert root_cause.position == stuck
    assert "at iteration 6 while others reached 7" in root_cause.reason
    done = [waiting(rank, finished=True, process_state="Z") for rank in (0, 1, 3)]
    assert find_root_cause([*done, stuck]).position == stuck
    assert nobody(inside(0), inside(1), *done[2:], waiting(2, waiting_in=end)).endswith("rank 3 finished without it")
    behind = waiting(1, iteration=6, waits_in_collective=False)
    assert find_root_cause([inside(0), behind, waiting(2, waiting_in=end), inside(3)]).position == behind


def test_a_collective_that_does_not_return_is_nobodys():
    """All ranks have entered it: the network between them is suspected."""
    text = nobody(inside(0, iteration=6), inside(1), inside(2, expired=True))
    assert text.startswith("all ranks wait in ALLREDUCE seq 7, which does not return")


def test_the_rank_that_has_not_come_is_named_with_the_collective():
    """A rank in no collective, such as one that writes a checkpoint, is the one that the others wait for."""
    writes = waiting(2, groups={"0": 6}, collectives=6, waits_in_collective=None)
    root_cause = find_root_cause([inside(0), inside(1), writes, inside(3)])
    assert root_cause.position == writes
    late = waiting(2, groups={"0": 6}, collectives=6)
    root_cause = find_root_cause([inside(0), inside(1), late, inside(3)])
    assert root_cause.position == late
    assert "not in the collective that others wait in: ranks 0, 1, 3 wait in ALLREDUCE seq 7" in root_cause.reason


def test_sums_over_other_groups_tell_nothing():
    """A rank in fewer groups has entered fewer collectives, and is not behind for that."""
    first = waiting(0, collectives=20, groups={"0": 10, "pp": 10})
    assert "ranks 0, 1 are indistinguishable" in nobody(first, waiting(1, collectives=10, groups={"0": 10}))


def test_a_node_whose_ranks_all_stand_still_is_told_from_the_others():
    """Two stopped ranks cannot be told apart, their node can."""
    stopped = [waiting(rank, node="b", process_state="T", responsive=False) for rank in (2, 3)]
    root_cause = find_root_cause([waiting(0), waiting(1), *stopped])
    assert (root_cause.position, root_cause.node) == (None, "b")
    assert "ranks 2, 3 are indistinguishable" in root_cause.reason
    assert "stopped" in root_cause.reason


def test_finished_rank_is_not_blamed():
    """A rank that finished is behind nobody."""
    done = waiting(0, iteration=1, finished=True, process_state="Z")
    late = waiting(2, waits_in_collective=False)
    assert find_root_cause([done, waiting(1), late]).position == late


def test_plain_process_is_blamed_only_at_the_start():
    """A process that never attached is suspected while the others have not begun, not later."""
    plain = Position(node="n", global_rank=2, attached=False, process_state="T")
    assert find_root_cause([waiting(0, iteration=0), plain]).position == plain
    assert find_root_cause([waiting(0), plain]).position.global_rank == 0
    assert find_root_cause([plain]).position == plain


def test_nobody_to_name_is_an_error():
    """No position, no root cause."""
    with pytest.raises(ValueError, match="no rank was examined"):
        find_root_cause([])


positions = st.lists(
    st.builds(
        Position,
        node=st.sampled_from(["a", "b"]),
        global_rank=st.integers(0, 50),
        iteration=st.integers(0, 3),
        num_entries=st.integers(0, 3),
        collectives=st.integers(-1, 3),
        groups=st.dictionaries(st.sampled_from(["0", "tp"]), st.integers(1, 3)),
        waiting_in=st.none()
        | st.builds(
            Collective,
            op=st.sampled_from(["ALLREDUCE", "BROADCAST"]),
            seq=st.integers(-1, 3),
            group=st.sampled_from(["0", "tp"]),
            is_own=st.booleans(),
        ),
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
    named = find_root_cause(ranks).position
    assert named is None or named.iteration == min(one.iteration for one in ranks)


@given(positions)
def test_victim_is_not_named_beside_a_stopped_peer(ranks):
    """Among the ranks that are furthest behind, one that waits is never named while another is stopped."""
    root_cause = find_root_cause(ranks).position
    assume(root_cause is not None)
    peers = [one for one in ranks if one.iteration == root_cause.iteration]
    if any(one.process_state == "T" for one in peers):
        assert root_cause.process_state in ("T", "t", "Z", "X")
    if any(one.waits_in_collective is False for one in peers):
        assert not root_cause.waits_in_collective or root_cause.process_state in ("T", "t", "Z", "X")


@given(positions, st.randoms())
def test_order_of_the_nodes_reports_does_not_matter(ranks, random):
    """The same positions name the same rank, in whatever order they came, and through JSON."""
    shuffled = random.sample(ranks, len(ranks))
    sent = msgspec.json.decode(msgspec.json.encode(shuffled), type=list[Position])
    assert find_root_cause(sent) == find_root_cause(ranks)
