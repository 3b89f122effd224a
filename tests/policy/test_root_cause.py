"""The root cause of a hang: the one rank that the others wait for."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outlast.policy.root_cause import Collective, Position, find_root_cause


def waiting(rank: int, **facts) -> Position:
    """Return a victim: a rank that responds and waits in a collective."""
    values = {"node": "n", "global_rank": rank, "iteration": 7, "num_entries": 1, "collectives": 20}
    return Position(**{**values, "process_state": "S", "waits_in_collective": True, **facts})


def test_rank_behind_in_iteration_is_identified():
    """The lowest iteration takes precedence over all other evidence."""
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
def test_hanging_rank_is_distinguished_from_waiting_ranks(facts, reason):
    """For each kind of hang, the rank outside the collective that the others wait in is identified, with the
    evidence."""
    root_cause = find_root_cause([waiting(0, expired=True), waiting(1, expired=True), waiting(2, **facts), waiting(3)])
    assert root_cause.position.global_rank == 2
    assert reason in root_cause.reason


def test_reason_contains_the_code_line():
    """The reason ends with the code line at which the root cause hangs."""
    line = 'File "train.py", line 9 in load'
    root_cause = find_root_cause([waiting(0), waiting(1, waits_in_collective=False, stack_line=line)])
    assert root_cause.reason.endswith(f"at {line}")


def test_slow_responder_in_a_collective_is_a_victim():
    """A rank in a collective is a victim, even if it was too slow to respond."""
    busy = waiting(3, waits_in_collective=False)
    assert find_root_cause([waiting(0, responsive=False, collectives=-1), busy]).position == busy


def assert_no_root_cause(*ranks: Position) -> str:
    """Return the reason why neither a rank nor a node is identified; it is the same for any order of the ranks."""
    root_cause = find_root_cause(ranks)
    assert (root_cause.position, root_cause.node) == (None, "")
    assert find_root_cause(ranks[::-1]) == root_cause
    return root_cause.reason


def in_collective(
    rank: int, op: str = "ALLREDUCE", seq: int = 7, *, shape: str = "", group: str = "0", **facts
) -> Position:
    """Return a rank in a collective as the flight recorder reports it."""
    groups = facts.pop("groups", {"0": seq} if group == "0" else {"0": 6, group: seq})
    label = "" if group == "0" else group
    call = Collective(op=op, seq=seq, group=group, label=label, shape=shape)
    return waiting(rank, **{"collectives": sum(groups.values()), "groups": groups, "waiting_in": call, **facts})


def test_exceeded_timeout_is_evidence_across_sections_only():
    """Of ranks in the same sections one exceeds the timeout first by chance; in different sections it is evidence."""
    assert "ranks 1, 2, 4 are indistinguishable" in assert_no_root_cause(
        waiting(1), waiting(4, expired=True), waiting(2)
    )
    late = waiting(4, expired=True, sections=("evaluation",))
    assert find_root_cause([waiting(1), late, waiting(2)]).position == late


def test_equally_slow_ranks_identify_no_rank():
    """If all ranks compute for too long at the same line, the reason contains that line and no rank is identified."""
    slow = [waiting(rank, waits_in_collective=False, stack_line="line 9", expired=rank == 0) for rank in range(4)]
    assert assert_no_root_cause(*slow) == "ranks 0, 1, 2, 3 are indistinguishable; all are at line 9"


def test_different_collectives_identify_no_rank():
    """The reason lists the collective that each rank waits in, whichever of them is an iteration or a section
    behind."""
    others = [in_collective(0), in_collective(1, expired=True), in_collective(3)]
    where = "ranks wait in different collectives: 0, 1, 3 in ALLREDUCE seq 7, 2 in BROADCAST seq 7"
    for facts in ({}, {"iteration": 8}, {"iteration": 6}, {"num_entries": 3}):
        assert assert_no_root_cause(*others, in_collective(2, "BROADCAST", **facts)) == where
    assert assert_no_root_cause(in_collective(0), in_collective(1, "BROADCAST", iteration=8)).startswith(
        "ranks wait in different collectives: 0 in"
    )


def test_collectives_of_different_sizes_differ():
    """Collectives with other sizes, as of gradients in another order, differ, and the reason contains the sizes."""
    text = assert_no_root_cause(
        in_collective(0, shape="[[4]]"), in_collective(1, shape="[[4]]"), in_collective(2, shape="[[1000]]")
    )
    assert text.endswith("0, 1 in ALLREDUCE seq 7 of [[4]], 2 in ALLREDUCE seq 7 of [[1000]]")


def test_circular_wait_identifies_no_rank():
    """A rank that skips a collective of one group and waits in another group's, or for the end of the step, closes a
    circle."""
    others = [in_collective(rank, groups={"0": 7, "tp": 3}) for rank in (0, 1, 3)]
    text = assert_no_root_cause(*others, in_collective(2, seq=4, group="tp", num_entries=2))
    assert text.endswith("0, 1, 3 in ALLREDUCE seq 7, 2 in ALLREDUCE seq 4 of group tp")
    end = Collective(op="an agreement of outlast", is_own=True)
    assert assert_no_root_cause(*others, waiting(2, groups={"0": 6, "tp": 3}, waiting_in=end)).endswith(
        "2 in an agreement of outlast"
    )


def test_skipped_collective_identifies_the_rank_ahead():
    """A rank that is an iteration ahead, or finished, without the collective that the others wait in is the root
    cause."""
    others = [in_collective(0), in_collective(1, expired=True), in_collective(3)]
    ahead = waiting(2, iteration=8, waits_in_collective=False, groups={"0": 6})
    text = "ranks 0, 1, 3 wait in ALLREDUCE seq 7, rank 2"
    assert assert_no_root_cause(*others, ahead) == f"{text} continued to iteration 8 without it"
    assert assert_no_root_cause(*others, waiting(2, finished=True, process_state="Z")) == f"{text} finished without it"


def test_rank_in_a_completed_agreement_is_the_root_cause():
    """A rank still in an agreement of an iteration that the others completed hangs itself, since they could complete it
    only because it took part."""
    end = Collective(op="an agreement of outlast", is_own=True)
    stuck = waiting(2, iteration=6, groups={"0": 6}, waiting_in=end)
    root_cause = find_root_cause([in_collective(0), in_collective(1, expired=True), stuck, in_collective(3)])
    assert root_cause.position == stuck
    assert "at iteration 6 while others reached 7" in root_cause.reason
    done = [waiting(rank, finished=True, process_state="Z") for rank in (0, 1, 3)]
    assert find_root_cause([*done, stuck]).position == stuck
    assert assert_no_root_cause(in_collective(0), in_collective(1), *done[2:], waiting(2, waiting_in=end)).endswith(
        "rank 3 finished without it"
    )
    behind = waiting(1, iteration=6, waits_in_collective=False)
    assert find_root_cause([in_collective(0), behind, waiting(2, waiting_in=end), in_collective(3)]).position == behind


def test_entered_collective_suspects_the_network():
    """If all ranks have entered the collective, the network between them is suspected."""
    text = assert_no_root_cause(in_collective(0, iteration=6), in_collective(1), in_collective(2, expired=True))
    assert text.startswith("all ranks wait in ALLREDUCE seq 7, which does not return")


def test_rank_missing_in_a_collective_is_identified():
    """A rank in no collective, such as one that writes a checkpoint, is the root cause, and the reason contains the
    collective."""
    writes = waiting(2, groups={"0": 6}, collectives=6, waits_in_collective=None)
    root_cause = find_root_cause([in_collective(0), in_collective(1), writes, in_collective(3)])
    assert root_cause.position == writes
    late = waiting(2, groups={"0": 6}, collectives=6)
    root_cause = find_root_cause([in_collective(0), in_collective(1), late, in_collective(3)])
    assert root_cause.position == late
    assert "not in the collective that others wait in: ranks 0, 1, 3 wait in ALLREDUCE seq 7" in root_cause.reason


def test_collective_counts_of_other_groups_are_no_evidence():
    """A rank in fewer groups has entered fewer collectives, and is not behind because of that."""
    first = waiting(0, collectives=20, groups={"0": 10, "pp": 10})
    assert "ranks 0, 1 are indistinguishable" in assert_no_root_cause(
        first, waiting(1, collectives=10, groups={"0": 10})
    )


def test_node_with_all_ranks_stopped_is_identified():
    """Two stopped ranks cannot be distinguished, but their node can."""
    stopped = [waiting(rank, node="b", process_state="T", responsive=False) for rank in (2, 3)]
    root_cause = find_root_cause([waiting(0), waiting(1), *stopped])
    assert (root_cause.position, root_cause.node) == (None, "b")
    assert "ranks 2, 3 are indistinguishable" in root_cause.reason
    assert "stopped" in root_cause.reason


def test_finished_rank_is_not_the_root_cause():
    """A rank that finished is not behind."""
    done = waiting(0, iteration=1, finished=True, process_state="Z")
    late = waiting(2, waits_in_collective=False)
    assert find_root_cause([done, waiting(1), late]).position == late


def test_unattached_process_is_suspected_at_the_start_only():
    """A process that never attached is suspected only before the others have begun."""
    plain = Position(node="n", global_rank=2, attached=False, process_state="T")
    assert find_root_cause([waiting(0, iteration=0), plain]).position == plain
    assert find_root_cause([waiting(0), plain]).position.global_rank == 0
    assert find_root_cause([plain]).position == plain


def test_empty_positions_are_an_error():
    """No position is an error."""
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
def test_rank_ahead_is_never_identified(ranks):
    """A rank that is ahead of another in iteration is never the root cause."""
    named = find_root_cause(ranks).position
    assert named is None or named.iteration == min(one.iteration for one in ranks)


@given(positions)
def test_waiting_rank_is_not_identified_over_a_stopped_one(ranks):
    """Among the ranks that are furthest behind, a waiting one is never the root cause while another is stopped."""
    root_cause = find_root_cause(ranks).position
    assume(root_cause is not None)
    peers = [one for one in ranks if one.iteration == root_cause.iteration]
    if any(one.process_state == "T" for one in peers):
        assert root_cause.process_state in ("T", "t", "Z", "X")
    if any(one.waits_in_collective is False for one in peers):
        assert not root_cause.waits_in_collective or root_cause.process_state in ("T", "t", "Z", "X")


@given(positions, st.randoms())
def test_report_order_does_not_change_the_root_cause(ranks, random):
    """The same positions identify the same rank, in any order and through JSON."""
    shuffled = random.sample(ranks, len(ranks))
    sent = msgspec.json.decode(msgspec.json.encode(shuffled), type=list[Position])
    assert find_root_cause(sent) == find_root_cause(ranks)
