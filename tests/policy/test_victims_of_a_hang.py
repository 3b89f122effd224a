"""The rank that hangs is at fault, not the ranks that wait for it."""

from __future__ import annotations

from outlast.policy import inprocess_protocol as o
from outlast.policy.inprocess_protocol import RestartLimits
from outlast.policy.inprocess_restart import MemberJoined, MemberReported, add_earlier_faults, advance, begin

LIMITS = RestartLimits(barrier_timeout_s=120.0, completion_timeout_s=120.0, last_call_wait_s=1.0, max_iterations=6)


def test_ranks_waiting_for_a_hung_rank_are_not_charged() -> None:
    """All ranks exceed the timeout; the one that does not wait is at fault, and is listed first."""
    state, restart, go = begin(3, 0.0), None, None

    def send_report(rank: int, report: o.Report) -> None:
        nonlocal state, restart, go
        state, actions = advance(state, MemberReported(initial_rank=rank, report=report, at_s=1.0), LIMITS)
        for action in actions:
            if isinstance(action.order, o.Assign):
                ordinal = action.order.ordinal
                send_report(action.to[0], o.Assigned(ordinal=ordinal, ranks={0: 0, 1: 1, 2: 2}))
            restart = action.order if isinstance(action.order, o.Restart) else restart
            go = action.order if isinstance(action.order, o.Go) else go

    for rank in range(3):
        state, _ = advance(
            state, MemberJoined(initial_rank=rank, node="a", standing=o.MemberStanding(), at_s=0.0), LIMITS
        )
    for rank in range(3):
        send_report(rank, o.RankReady(restart_count=0, store_address="127.0.0.1 1"))
    for rank, waits in ((0, "yes"), (1, "yes"), (2, "no")):
        evidence = {o.WAITS: waits}
        send_report(
            rank,
            o.RankFault(
                initial_rank=rank, restart_count=0, kind=o.RankFaultKind.SOFT_TIMEOUT, summary="", evidence=evidence
            ),
        )
    for rank in range(3):
        send_report(rank, o.RankReady(restart_count=1, store_address="127.0.0.1 1"))
    assert go is not None
    assert go.restart_count == 1
    assert [fault.initial_rank for fault in add_earlier_faults(go, restart).faults] == [2, 0, 1]
    assert go.fault_counts == {2: 1}
