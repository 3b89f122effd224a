"""Orders to the members of an in-process restart, case by case."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable

import msgspec
import pytest

from outlast.policy import inprocess_protocol as o
from outlast.policy.inprocess_protocol import RestartLimits
from outlast.policy.inprocess_restart import (
    Event,
    Isolated,
    MemberJoined,
    MemberLost,
    MemberReported,
    RestartPhase,
    RestartState,
    Send,
    TimePassed,
    add_earlier_faults,
    advance,
    begin,
    count_causes,
    next_deadline_s,
    take_over,
)

LIMITS = RestartLimits(barrier_timeout_s=100.0, completion_timeout_s=50.0, last_call_wait_s=1.0)


class Coordinator:
    """The state machine with a clock and the orders that it gave."""

    def __init__(self, state: RestartState, limits: RestartLimits = LIMITS) -> None:
        self.state, self.limits, self.now_s = state, limits, 0.0
        self.orders: list[Send] = []

    def on(self, event: Event) -> list[Send]:
        self.state, actions = advance(self.state, event, self.limits)
        self.orders += actions
        return list(actions)

    def join(self, rank: int, standing: o.MemberStanding | None = None) -> list[Send]:
        return self.on(
            MemberJoined(initial_rank=rank, node="n", standing=standing or o.MemberStanding(), at_s=self.now_s)
        )

    def receive(self, rank: int, report: o.Report) -> list[Send]:
        return self.on(MemberReported(initial_rank=rank, report=report, at_s=self.now_s))

    def ready(self, restart_count: int, ranks: Iterable[int]) -> list[Send]:
        found: list[Send] = []
        for rank in ranks:
            found += self.receive(rank, o.RankReady(restart_count=restart_count, store_address=f"host {rank}"))
        return found

    def assign(self, ranks: dict[int, int | None]) -> list[Send]:
        assert self.state.question is not None
        return self.receive(self.state.question.to, o.Assigned(ordinal=self.state.question.ordinal, ranks=ranks))

    def die(self, rank: int) -> list[Send]:
        return self.on(MemberLost(initial_rank=rank, kind=o.RankFaultKind.DIED, summary="gone", at_s=self.now_s))

    def fault(self, rank: int, restart_count: int, *, is_consequence: bool = False) -> list[Send]:
        kind = o.RankFaultKind.EXCEPTION
        return self.receive(
            rank, o.RankFault(initial_rank=rank, restart_count=restart_count, kind=kind, is_consequence=is_consequence)
        )

    def wait(self) -> list[Send]:
        due_s = next_deadline_s(self.state, self.limits)
        assert due_s is not None
        self.now_s = due_s
        return self.on(TimePassed(at_s=self.now_s))


def running(num_active: int, num: int, limits: RestartLimits = LIMITS) -> Coordinator:
    coordinator = Coordinator(begin(num, 0.0), limits)
    for rank in range(num):
        coordinator.join(rank)
    coordinator.ready(0, range(num))
    coordinator.assign({rank: rank if rank < num_active else None for rank in range(num)})
    assert coordinator.state.phase == RestartPhase.RUNNING
    return coordinator


def only(actions: list[Send]) -> tuple[tuple[int, ...], o.Order]:
    (action,) = actions
    return action.to, action.order


def test_first_call_begins_when_all_are_ready() -> None:
    """No member enters before the last one is ready; then the lowest rank assigns the ranks, and all enter with its
    assignment."""
    coordinator = Coordinator(begin(3, 0.0))
    for rank in range(3):
        assert coordinator.join(rank) == []
    assert coordinator.ready(0, [2, 0]) == []
    to, order = only(coordinator.ready(0, [1]))
    assert to == (0,)
    assert isinstance(order, o.Assign)
    to, order = only(coordinator.assign({0: 1, 1: 0, 2: None}))
    assert to == (0, 1, 2)
    assert isinstance(order, o.Go)
    assert (order.active_world_size, order.store_address) == (2, "host 1")


def test_fault_restarts_all_members_once() -> None:
    """The first fault orders all members out of the function; other faults of the same call are only recorded."""
    coordinator = running(3, 4)
    to, order = only(coordinator.fault(1, 0))
    assert to == (0, 1, 2, 3)
    assert isinstance(order, o.Restart)
    assert order.restart_count == 1
    assert coordinator.fault(2, 0, is_consequence=True) == []
    assert [fault.initial_rank for fault in coordinator.state.faults] == [1, 2]


def test_death_of_a_spare_restarts_no_member() -> None:
    """The death of a spare changes nothing for the others, and the next restart does not wait for it."""
    coordinator = running(2, 4)
    assert coordinator.die(3) == []
    assert only(coordinator.fault(1, 0))[0] == (0, 1, 2)
    _, order = only(coordinator.ready(1, [0, 1, 2]))
    assert isinstance(order, o.Assign)
    assert [member.initial_rank for member in order.members if member.alive] == [0, 1, 2]
    assert [fault.initial_rank for fault in coordinator.state.faults] == [1]


def test_deaths_during_a_restart_are_part_of_it() -> None:
    """Members that die before they are ready are replaced in the same restart, and each of them is recorded."""
    coordinator = running(4, 6)
    coordinator.die(0)
    coordinator.die(3)
    assert coordinator.ready(1, [1, 2, 4]) == []
    _, order = only(coordinator.ready(1, [5]))
    assert isinstance(order, o.Assign)
    assert [member.initial_rank for member in order.members if member.alive] == [1, 2, 4, 5]
    to, order = only(coordinator.assign({1: 1, 2: 2, 4: 0, 5: 3}))
    assert to == (1, 2, 4, 5)
    assert isinstance(order, o.Go)
    assert (order.restart_count, order.fault_counts) == (1, {0: 1, 3: 1})


def test_death_of_the_assigning_member_is_handled() -> None:
    """If the member that was requested to assign the ranks dies, the next one is requested."""
    coordinator = running(3, 4)
    coordinator.fault(1, 0)
    assert only(coordinator.ready(1, [0, 1, 2, 3]))[0] == (0,)
    to, order = only(coordinator.die(0))
    assert to == (1,)
    assert isinstance(order, o.Assign)
    assert [member.initial_rank for member in order.members if member.alive] == [1, 2, 3]


def test_exit_during_a_restart_is_not_a_fault() -> None:
    """A member that exits instead of getting ready is not waited for and is not at fault."""
    coordinator = running(3, 4)
    coordinator.fault(0, 0)
    coordinator.ready(1, [0, 2, 3])
    _, order = only(coordinator.receive(1, o.Left(reason="unhealthy")))
    assert isinstance(order, o.Assign)
    _, order = only(coordinator.assign({0: 0, 2: 2, 3: 1}))
    assert isinstance(order, o.Go)
    assert order.fault_counts == {0: 1}


def test_error_of_the_assignment_stops_all_members() -> None:
    """If the requested member cannot assign the ranks, no member enters, and all get its error and the counts."""
    coordinator = running(3, 3)
    coordinator.die(1)
    coordinator.ready(1, [0, 2])
    assert coordinator.state.question is not None
    failed = o.Assigned(ordinal=coordinator.state.question.ordinal, error="no spare is left")
    to, order = only(coordinator.receive(0, failed))
    assert to == (0, 2)
    assert isinstance(order, o.Abort)
    assert (order.reason, order.fault_counts) == ("no spare is left", {1: 1})


def test_stale_reports_change_nothing() -> None:
    """Reports about an earlier call are dropped."""
    coordinator = running(2, 2)
    coordinator.fault(0, 0)
    coordinator.ready(1, [0, 1])
    coordinator.assign({0: 0, 1: 1})
    before = copy.deepcopy(coordinator.state)
    assert coordinator.fault(1, 0) == []
    assert coordinator.ready(1, [1]) == []
    assert coordinator.receive(1, o.Completed(restart_count=0)) == []
    assert coordinator.receive(1, o.Assigned(ordinal=1, ranks={0: None, 1: 0})) == []
    assert coordinator.state == before


def test_members_are_finished_together() -> None:
    """The completion of the last active rank finishes all members, including spares."""
    coordinator = running(2, 3)
    assert coordinator.receive(0, o.Completed(restart_count=0)) == []
    to, order = only(coordinator.receive(1, o.Completed(restart_count=0)))
    assert (to, order) == ((0, 1, 2), o.Finish(restart_count=0))
    assert coordinator.state.phase == RestartPhase.FINISHED


def test_spares_exit_with_the_code_of_the_active_ranks() -> None:
    """If the function ends by an orderly exit instead of a return, the last order contains its code, for spares too."""
    coordinator = running(2, 3)
    coordinator.receive(0, o.Completed(restart_count=0, exit_code=75))
    _, order = only(coordinator.receive(1, o.Completed(restart_count=0, exit_code=75)))
    assert order == o.Finish(restart_count=0, exit_code=75)


def test_completed_rank_may_die() -> None:
    """A rank that completed and died before the others counts as completed."""
    coordinator = running(2, 2)
    coordinator.receive(0, o.Completed(restart_count=0))
    assert coordinator.die(0) == []
    assert only(coordinator.receive(1, o.Completed(restart_count=0))) == ((1,), o.Finish(restart_count=0))


def test_fault_restarts_completed_ranks_too() -> None:
    """Ranks that had completed take part in the next call like all others."""
    coordinator = running(2, 2)
    coordinator.receive(0, o.Completed(restart_count=0))
    assert only(coordinator.fault(1, 0))[0] == (0, 1)
    coordinator.ready(1, [0, 1])
    coordinator.assign({0: 0, 1: 1})
    assert coordinator.receive(1, o.Completed(restart_count=1)) == []
    assert coordinator.state.phase == RestartPhase.RUNNING


def test_late_completion_is_a_fault() -> None:
    """A rank that has not completed long after the first one is faulted, and all restart."""
    coordinator = running(3, 3)
    coordinator.receive(0, o.Completed(restart_count=0))
    coordinator.wait()
    assert coordinator.now_s == LIMITS.completion_timeout_s
    assert {(f.initial_rank, f.kind) for f in coordinator.state.faults} == {
        (1, o.RankFaultKind.COMPLETION_TIMEOUT),
        (2, o.RankFaultKind.COMPLETION_TIMEOUT),
    }
    assert (coordinator.state.phase, coordinator.state.restart_count) == (RestartPhase.FORMING, 1)


def test_lost_connections_wait_for_their_root_cause() -> None:
    """If all faults are lost connections, the restart waits briefly for the root cause, and no longer once it is
    reported."""
    coordinator = running(3, 3)
    coordinator.fault(0, 0, is_consequence=True)
    assert coordinator.ready(1, [0, 1, 2]) == []
    assert next_deadline_s(coordinator.state, LIMITS) == LIMITS.last_call_wait_s
    (action,) = coordinator.die(2)
    assert isinstance(action.order, o.Assign)


def test_missing_root_cause_is_waited_for_once() -> None:
    """After the last-call period the restart continues with the consequences only."""
    coordinator = running(2, 2)
    coordinator.fault(0, 0, is_consequence=True)
    coordinator.ready(1, [0, 1])
    (action,) = coordinator.wait()
    assert isinstance(action.order, o.Assign)
    assert coordinator.state.fault_counts == {}


def test_known_root_cause_needs_no_wait() -> None:
    """If a root cause is known, the rank assignment is requested at once."""
    coordinator = running(2, 2)
    coordinator.fault(0, 0)
    (action,) = coordinator.ready(1, [0, 1])
    assert isinstance(action.order, o.Assign)


def test_soft_timeouts_around_a_stuck_rank_are_consequences() -> None:
    """Ranks that waited for one that had to be ended are not at fault."""
    coordinator = running(3, 4)
    for rank in (0, 2):
        kind = o.RankFaultKind.SOFT_TIMEOUT
        coordinator.receive(rank, o.RankFault(initial_rank=rank, restart_count=0, kind=kind))
    coordinator.ready(1, [0, 2, 3])
    coordinator.on(MemberLost(initial_rank=1, kind=o.RankFaultKind.HARD_TIMEOUT, summary="stopped", at_s=0.0))
    _, order = only(coordinator.assign({0: 0, 2: 2, 3: 1}))
    assert isinstance(order, o.Go)
    (restart,) = [sent.order for sent in coordinator.orders if isinstance(sent.order, o.Restart)]
    assert (0, o.RankFaultKind.SOFT_TIMEOUT) not in {(one.initial_rank, one.kind) for one in order.faults}
    order = add_earlier_faults(order, restart)
    assert order.fault_counts == {1: 1}
    assert [(f.initial_rank, f.is_consequence) for f in order.faults] == [(1, False), (0, True), (2, True)]


def test_late_members_are_expelled() -> None:
    """A member that is not ready in time counts as dead, and the others continue without it."""
    coordinator = running(3, 4)
    coordinator.fault(0, 0)
    coordinator.ready(1, [0, 2, 3])
    expelled, requested = coordinator.wait()
    assert coordinator.now_s == LIMITS.barrier_timeout_s
    assert expelled.to == (1,)
    assert isinstance(expelled.order, o.Expel)
    assert isinstance(requested.order, o.Assign)
    assert {(f.initial_rank, f.alive) for f in requested.order.members} == {(0, True), (1, False), (2, True), (3, True)}


def test_missing_assignment_expels_the_member() -> None:
    """A member that does not assign the ranks in time is expelled, and the next one is requested to."""
    coordinator = running(2, 2)
    coordinator.fault(1, 0)
    coordinator.ready(1, [0, 1])
    expelled, requested = coordinator.wait()
    assert (expelled.to, requested.to) == ((0,), (1,))
    assert isinstance(expelled.order, o.Expel)


@pytest.mark.parametrize("ranks", [{}, {0: None, 1: None}, {0: 0, 1: 0}, {0: 1, 1: 2}, {0: 0, 7: 1}])
def test_invalid_assignments_stop_all_members(ranks: dict[int, int | None]) -> None:
    """Active ranks are 0, 1, 2, ... of living members; otherwise no member enters."""
    coordinator = running(2, 2)
    coordinator.fault(1, 0)
    coordinator.ready(1, [0, 1])
    to, order = only(coordinator.assign(ranks))
    assert to == (0, 1)
    assert isinstance(order, o.Abort)


def test_restarts_are_bounded() -> None:
    """After ``max_iterations`` restarts the next fault stops all members, with the counts."""
    coordinator = running(2, 2, msgspec.structs.replace(LIMITS, max_iterations=1))
    coordinator.fault(1, 0)
    coordinator.ready(1, [0, 1])
    coordinator.assign({0: 0, 1: 1})
    _, order = only(coordinator.fault(1, 1))
    assert isinstance(order, o.Abort)
    assert (order.restart_count, order.fault_counts) == (1, {1: 2})


def fail_at(coordinator: Coordinator, iteration: int) -> o.Order:
    """Let rank 1 fail, both ranks get ready after so many steps and enter the next call; return the last order."""
    restart_count = coordinator.state.restart_count + 1
    coordinator.fault(1, restart_count - 1)
    for rank in (0, 1):
        ready = o.RankReady(restart_count=restart_count, store_address="host 1", iteration=iteration - rank)
        coordinator.receive(rank, ready)
    if coordinator.state.question is not None:
        coordinator.assign({0: 0, 1: 1})
    return coordinator.orders[-1].order


@pytest.mark.parametrize("reached", [-1, 40])
def test_restarts_without_progress_are_bounded(reached: int) -> None:
    """If no rank gets beyond the highest iteration before, or none is known, the limit of consecutive restarts stops
    all members."""
    coordinator = running(2, 2, msgspec.structs.replace(LIMITS, max_no_progress_restarts=3))
    for _ in range(3):
        assert isinstance(fail_at(coordinator, reached), o.Go)
    order = fail_at(coordinator, reached)
    assert isinstance(order, o.Abort)
    assert "3 restarts in a row made no progress (max_no_progress_restarts=3)" in order.reason
    assert ("beyond iteration 40" in order.reason) == (reached == 40)


def test_progress_resets_the_restart_count() -> None:
    """A call that gets further than any before resets the count; one that repeats earlier steps does not."""
    coordinator = running(2, 2, msgspec.structs.replace(LIMITS, max_no_progress_restarts=2))
    for iteration in range(0, 100, 10):
        assert isinstance(fail_at(coordinator, iteration), o.Go)
        assert isinstance(fail_at(coordinator, iteration // 2), o.Go)
    assert isinstance(fail_at(coordinator, 90), o.Abort)


def test_fatal_exit_stops_all_members() -> None:
    """If one rank gives up for all, every member including that rank receives the order to stop with its reason and the
    counts."""
    coordinator = running(2, 3)
    order = o.Abort(reason="enough", restart_count=0)
    assert only(coordinator.receive(2, o.Left(reason="enough", fatal=True))) == ((0, 1, 2), order)


def test_unassigned_member_is_removed() -> None:
    """A member without an assignment is notified by the order to enter, and is not waited for afterwards."""
    coordinator = running(3, 3)
    coordinator.fault(1, 0)
    coordinator.ready(1, [0, 1, 2])
    assert only(coordinator.assign({0: 0, 2: 1}))[0] == (0, 1, 2)
    coordinator.fault(0, 1)
    (action,) = coordinator.ready(2, [0, 2])
    assert isinstance(action.order, o.Assign)


def test_missed_order_is_repeated_after_reconnection() -> None:
    """An order given while a member's link was broken is repeated when the member reconnects."""
    coordinator = running(2, 2)
    coordinator.fault(1, 0)
    here = o.MemberStanding(restart_count=0, runs=o.rank_runs({0: 0, 1: 1}))
    assert only(coordinator.join(0, here))[1] == o.Restart(restart_count=1, faults=coordinator.state.faults)
    coordinator.ready(1, [0, 1])
    coordinator.assign({0: 0, 1: 1})
    assert isinstance(only(coordinator.join(0, here))[1], o.Go)
    coordinator.receive(0, o.Completed(restart_count=1))
    coordinator.receive(1, o.Completed(restart_count=1))
    assert only(coordinator.join(0, here))[1] == o.Finish(restart_count=1)


def test_expelled_member_cannot_rejoin() -> None:
    """A member that was given up and reconnects is ended."""
    coordinator = running(2, 3)
    coordinator.die(1)
    assert isinstance(only(coordinator.join(1))[1], o.Expel)


def test_isolated_coordinator_stops_its_members() -> None:
    """If most members may still train elsewhere, the members of this coordinator stop."""
    coordinator = running(3, 3)
    assert isinstance(only(coordinator.on(Isolated(reason="alone", at_s=0.0)))[1], o.Abort)


def test_next_coordinator_continues_a_running_call() -> None:
    """A new coordinator does not interrupt members that are all in the same call, and knows the completed ones."""
    ranks: dict[int, int | None] = {0: 0, 1: 1, 2: None}
    standings = {
        rank: o.MemberStanding(
            restart_count=3, runs=o.rank_runs(ranks), restart=3, fault_counts={0: 3}, completed=3 if rank == 1 else 2
        )
        for rank in ranks
    }
    coordinator = Coordinator(take_over(standings, dict.fromkeys(ranks, "n"), 3, 0.0))
    assert [coordinator.join(rank, standing) for rank, standing in standings.items()] == [[], [], []]
    assert (coordinator.state.phase, coordinator.state.restart_count, dict(coordinator.state.fault_counts)) == (
        RestartPhase.RUNNING,
        3,
        {0: 3},
    )
    assert isinstance(only(coordinator.receive(0, o.Completed(restart_count=3)))[1], o.Finish)


def test_next_coordinator_restarts_a_partial_entry() -> None:
    """If the old coordinator died while it sent the order to enter, the members that received it exit the call
    again."""
    ranks: dict[int, int | None] = {0: 0, 1: 1}
    standings = {
        0: o.MemberStanding(restart_count=1, runs=o.rank_runs(ranks), restart=1),
        1: o.MemberStanding(
            restart_count=0, runs=o.rank_runs(ranks), restart=1, ready=o.RankReady(restart_count=1, store_address="b 1")
        ),
    }
    coordinator = Coordinator(take_over(standings, dict.fromkeys(ranks, "n"), 2, 0.0))
    orders = [only(coordinator.join(rank, standing))[1] for rank, standing in standings.items()]
    assert orders == [o.Restart(restart_count=2), o.Restart(restart_count=2)]


def test_assignment_for_the_old_coordinator_is_ignored() -> None:
    """An assignment for the request of another coordinator does not count."""
    ranks: dict[int, int | None] = {0: 0, 1: 1}
    standings = {
        rank: o.MemberStanding(
            restart_count=0,
            runs=o.rank_runs(ranks),
            restart=1,
            ready=o.RankReady(restart_count=1, store_address=f"h {rank + 1}"),
        )
        for rank in ranks
    }
    coordinator = Coordinator(take_over(standings, dict.fromkeys(ranks, "n"), 2, 7.0))
    for rank, standing in standings.items():
        coordinator.join(rank, standing)
    assert coordinator.receive(0, o.Assigned(ordinal=1, ranks={0: 1, 1: 0})) == []
    assert isinstance(only(coordinator.assign({0: 0, 1: 1}))[1], o.Go)


def test_restart_goes_beyond_the_newest_known_call() -> None:
    """A coordinator that knows no call restarts beyond the one that a member is in, instead of waiting for it."""
    coordinator = Coordinator(begin(2, 0.0))
    coordinator.join(1)
    coordinator.ready(0, [1])
    to, order = only(
        coordinator.join(
            0, o.MemberStanding(restart_count=2, runs=o.rank_runs({0: 0, 1: None}), restart=2, fault_counts={0: 2})
        )
    )
    assert (to, order) == ((0, 1), o.Restart(restart_count=3))
    assert coordinator.state.fault_counts == {0: 2}


def test_rank_is_at_fault_once_per_iteration() -> None:
    """Several faults of a rank in one iteration count once, in addition to earlier counts; a rank that only waited is
    not counted."""
    faults = (
        o.RankFault(initial_rank=1, restart_count=4, kind=o.RankFaultKind.SOFT_TIMEOUT),
        o.RankFault(initial_rank=1, restart_count=4, kind=o.RankFaultKind.EXCEPTION),
        o.RankFault(initial_rank=2, restart_count=4, kind=o.RankFaultKind.EXCEPTION, is_consequence=True),
    )
    assert count_causes({1: 2, 3: 1}, faults) == {1: 3, 3: 1}


def count_lines(num: int) -> dict[str, int]:
    """Lead ``num`` members through all events; return how many lines each part executed."""
    executed: dict[str, int] = {}
    num_lines = 0

    def count(frame: object, event: str, _: object) -> object:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    def end(what: str) -> None:
        nonlocal num_lines
        executed[what], num_lines = num_lines, 0

    before = sys.gettrace()
    sys.settrace(count)
    try:
        lead_through_all_events(num, end)
    finally:
        sys.settrace(before)
    return executed


def lead_through_all_events(num: int, end: Callable[[str], None]) -> None:
    """Let ``num`` members join, report, fail, reconnect and complete; call ``end`` after each part."""
    coordinator, ranks = Coordinator(begin(num, 0.0)), range(num)
    for rank in ranks:
        coordinator.join(rank)
    end("join")
    coordinator.ready(0, ranks)
    coordinator.assign({rank: rank for rank in ranks})
    assert coordinator.state.phase == RestartPhase.RUNNING
    end("ready and enter")
    for rank in ranks:
        coordinator.fault(rank, 0, is_consequence=rank > 0)
    end("fault")
    for rank in ranks:
        coordinator.join(rank, o.MemberStanding(restart_count=0))
    end("reconnect")
    for rank in ranks[: num // 2]:
        coordinator.die(rank)
    end("half of them die")
    rest = ranks[num // 2 :]
    coordinator.ready(1, rest)
    coordinator.assign({rank: rank - rest[0] for rank in rest})
    assert coordinator.state.phase == RestartPhase.RUNNING
    end("ready and enter again")
    for rank in rest:
        coordinator.receive(rank, o.Completed(restart_count=1))
    assert coordinator.state.phase == RestartPhase.FINISHED
    end("complete")
    runs = o.rank_runs({rank: rank for rank in ranks})
    standings = {rank: o.MemberStanding(restart_count=0, restart=1, runs=runs) for rank in ranks}
    coordinator = Coordinator(take_over(standings, dict.fromkeys(ranks, "n"), num, 0.0))
    for rank in reversed(ranks):
        coordinator.join(rank, standings[rank])
        coordinator.fault(rank, 0)
    end("join the next coordinator")


def test_cost_of_an_event_does_not_grow_with_members() -> None:
    """Joins, reports, faults and completions cost the same with 8 times as many members."""
    few, many = 80, 640
    base, found = count_lines(few), count_lines(many)
    for what in base:
        ratio = (found[what] / many) / (base[what] / few)
        print(f"{what}: {ratio:.2f} times the lines for an event among {few} members")
        assert ratio < 2.0, what  # 8 if each event visited all members


def test_each_fault_is_sent_once() -> None:
    """The order to enter contains only faults that the order to restart did not; a member that missed the latter
    receives all of them."""
    coordinator = running(3, 4)
    (restart,) = coordinator.fault(1, 0)
    coordinator.fault(2, 0, is_consequence=True)
    coordinator.ready(1, range(4))
    assert isinstance(restart.order, o.Restart)
    _, go = only(coordinator.assign({0: 0, 1: 1, 2: 2, 3: None}))
    assert isinstance(go, o.Go)
    assert [fault.initial_rank for fault in go.faults] == [2]
    assert [fault.initial_rank for fault in add_earlier_faults(go, restart.order).faults] == [1, 2]
    _, again = only(coordinator.join(3, o.MemberStanding(restart_count=0)))
    assert isinstance(again, o.Go)
    assert [fault.initial_rank for fault in again.faults] == [1, 2]
