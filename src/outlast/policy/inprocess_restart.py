"""Decisions of in-process restarts: when members exit the function, when all are ready, which ranks they get.

:func:`advance` is a pure function of the state (:class:`RestartState`) and an event; its actions are orders to members.
The in-process restart coordinator (:mod:`outlast.inprocess.hub`) carries both. Times come with the events.

``FORMING(i)`` ends when every living member is ready for call i of the function: one of them is asked to assign the
active ranks, then all go. ``RUNNING(i)`` ends with a fault of an active member (then ``FORMING(i+1)``) or when all
active members have completed. Every wait has a deadline: a member that is not ready in time, or does not assign the
ranks in time, is expelled; a running one is bounded by its agent process. Reports on an older call are dropped. The
death of a spare, or of a member that has completed before all have, causes no restart.

An event visits one member; only a change of phase visits all, as ten thousand members report within a second. So the
state's dicts are changed in place, and unready and running members are counted; copying the dicts for each event would
take time quadratic in the number of members.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from outlast.policy import inprocess_protocol as p
from outlast.policy.rank_assignment import Member

_MAX_FAULTS = 16
"""Limit of faults sent to every member; a thousand ranks may all report a lost connection."""


def add_fault(known: tuple[p.RankFault, ...], fault: p.RankFault) -> tuple[p.RankFault, ...]:
    """Return the faults with one more, unless it is known: a rank may report it to two coordinators."""
    if any(_name(other) == _name(fault) for other in known):
        return known
    return (*known, fault)


def _name(fault: p.RankFault) -> tuple[int, int, p.RankFaultKind]:
    return fault.initial_rank, fault.restart_count, fault.kind


def add_earlier_faults(go: p.Go, restart: p.Restart | None) -> p.Go:
    """Return the order to go with the faults of its restart order, which are not sent twice."""
    if restart is None or restart.restart_count != go.restart_count:
        return go
    faults = restart.faults
    for fault in go.faults:
        faults = add_fault(faults, fault)
    return msgspec.structs.replace(go, faults=judge(faults)[:_MAX_FAULTS])


def judge(faults: tuple[p.RankFault, ...]) -> tuple[p.RankFault, ...]:
    """Return the faults, root causes first; ranks that waited for one that hung or was ended are not blamed."""
    ended = any(fault.kind == p.RankFaultKind.HARD_TIMEOUT for fault in faults)
    judged = (
        msgspec.structs.replace(fault, is_consequence=True)
        if fault.is_victims or (ended and fault.kind == p.RankFaultKind.SOFT_TIMEOUT)
        else fault
        for fault in faults
    )
    return tuple(sorted(judged, key=lambda fault: fault.is_consequence))


def count_causes(before: Mapping[int, int], faults: tuple[p.RankFault, ...]) -> dict[int, int]:
    """Return the number of root causes by initial rank, at most one per rank and call added to those before."""
    counts = {**before}
    for rank, _ in {(fault.initial_rank, fault.restart_count) for fault in judge(faults) if not fault.is_consequence}:
        counts[rank] = counts.get(rank, 0) + 1
    return counts


class RestartPhase(StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class RestartMember(msgspec.Struct, frozen=True, kw_only=True):
    """A living member."""

    node: str
    is_here: bool = False
    """It has connected; before, it is only expected."""
    active_rank: int | None = None
    """In the call that runs or ran last."""
    store_address: str | None = None
    """Where it would host the store of the call that forms; ``None`` = it is not ready."""
    completed: bool = False
    labels: Mapping[str, str] = {}
    faults: tuple[tuple[int, p.RankFaultKind], ...] = ()
    """Its recorded faults, by call and kind."""

    @property
    def is_ready(self) -> bool:
        return self.store_address is not None

    @property
    def is_running(self) -> bool:
        """Whether it is in the running call, and has not completed it."""
        return self.active_rank is not None and not self.completed

    def as_member(self, rank: int, *, alive: bool = True) -> Member:
        return Member(initial_rank=rank, node=self.node, rank=self.active_rank, alive=alive, labels=self.labels)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A member has been asked to assign the ranks."""

    ordinal: int
    to: int
    asked_s: float


class RestartState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the restarts. :func:`advance` takes ownership: its dicts belong to the next state."""

    phase: RestartPhase
    restart_count: int
    """The call that forms, runs, or ran last."""
    members: dict[int, RestartMember]
    """Living members, ordered by initial rank."""
    num_unready: int
    num_running: int
    began_s: float
    gone: dict[int, Member] = {}
    """Members lost since the last order to go that had an active rank, by initial rank; they leave gaps."""
    go: p.Go | None = None
    """The order to enter the running call, if this coordinator gave it."""
    restart: p.Restart | None = None
    """The order to exit the call before the one that forms, if this coordinator gave it."""
    all_know_faults: bool = False
    """Every connected member got ``restart`` from this coordinator: its faults need not be sent again."""
    noted: list[p.RankFault] = []
    """Faults since the last order to go, in order."""
    num_causes: int = 0
    """Number of them that are not consequences."""
    iteration: int = -1
    """Highest number of optimizer steps that a rank had completed before the previous call; -1 = unknown."""
    ready_iteration: int = -1
    """Highest number reported by members that are ready for the call that forms."""
    num_no_progress: int = 0
    """Restarts in a row that did not raise it."""
    fault_counts: Mapping[int, int] = {}
    """Root causes by initial rank, up to the last order to go."""
    question: Question | None = None
    num_questions: int = 0
    """Ordinal of the last question; another coordinator's begin elsewhere, so that responses to it are rejected."""
    last_call_s: float | None = None
    """Until when the root cause of the known faults is waited for."""
    first_completed_s: float | None = None
    exit_code: int = 0
    """Exit code of an active member of the running call; 0 = none exited."""
    end: p.Finish | p.Abort | None = None

    @property
    def faults(self) -> tuple[p.RankFault, ...]:
        return tuple(self.noted)


class MemberJoined(msgspec.Struct, frozen=True, kw_only=True):
    """A member is connected to the coordinator, for the first time or again."""

    initial_rank: int
    node: str
    standing: p.MemberStanding
    at_s: float
    labels: Mapping[str, str] = {}


class MemberReported(msgspec.Struct, frozen=True, kw_only=True):
    initial_rank: int
    report: p.Report
    at_s: float


class MemberLost(msgspec.Struct, frozen=True, kw_only=True):
    """A member's process is gone, or counts as gone."""

    initial_rank: int
    kind: p.RankFaultKind
    at_s: float
    summary: str = ""


class TimePassed(msgspec.Struct, frozen=True, kw_only=True):
    """See :func:`next_deadline_s`."""

    at_s: float


class Isolated(msgspec.Struct, frozen=True, kw_only=True):
    """Most members cannot be reached and may continue elsewhere: those here must not."""

    reason: str
    at_s: float


Event = MemberJoined | MemberReported | MemberLost | TimePassed | Isolated


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Give these members an order."""

    to: tuple[int, ...]
    order: p.Order


def begin(world_size: int, at_s: float) -> RestartState:
    """Return the state before any member has connected."""
    members = {rank: RestartMember(node="") for rank in range(world_size)}
    return RestartState(phase=RestartPhase.FORMING, restart_count=0, began_s=at_s, **_counted(members))


def _counted(members: dict[int, RestartMember]) -> dict[str, Any]:
    """Return members as fields of the state, with their counts."""
    num_unready = sum(not member.is_ready for member in members.values())
    num_running = sum(member.is_running for member in members.values())
    return {"members": members, "num_unready": num_unready, "num_running": num_running}


def take_over(
    standings: Mapping[int, p.MemberStanding], nodes: Mapping[int, str], world_size: int, at_s: float
) -> RestartState:
    """Return the state for a coordinator that replaces one that is gone.

    No member is connected in this state: follow with :class:`MemberJoined` for each that came, :class:`MemberLost` for
    each that did not.

    Args:
        standings: Of the members that came, by initial rank.
        nodes: Node of every member that lived at the old coordinator's last message; empty = no call was formed yet.
        world_size: Initial one.
        at_s: The time.
    """
    newest = max(standings.values(), key=lambda standing: standing.restart_count)
    ranks = newest.ranks
    restart = max(standing.restart for standing in standings.values())
    if newest.restart_count < 0 or not nodes:
        return msgspec.structs.replace(begin(world_size, at_s), num_questions=int(at_s * 1e6))
    members = {
        rank: RestartMember(node=node, active_rank=ranks.get(rank))
        for rank, node in sorted(nodes.items())
        # Members left out of the last call are removed, whatever the old coordinator managed to order.
        if rank in ranks
    }
    all_went = all(standing.restart_count == newest.restart_count for standing in standings.values())
    forming = restart > newest.restart_count or not all_went
    return RestartState(
        phase=RestartPhase.FORMING if forming else RestartPhase.RUNNING,
        restart_count=newest.restart_count + 1 if forming else newest.restart_count,
        **_counted(members),
        began_s=at_s,
        num_questions=int(at_s * 1e6),
        gone={
            rank: Member(initial_rank=rank, node="", rank=active, alive=False)
            for rank, active in ranks.items()
            if active is not None and rank not in nodes
        },
        fault_counts=newest.fault_counts,
    )


def next_deadline_s(state: RestartState, limits: p.RestartLimits) -> float | None:
    """Return when the next :class:`TimePassed` is due; ``None`` = time changes nothing."""
    if state.phase == RestartPhase.RUNNING and state.first_completed_s is not None:
        return state.first_completed_s + limits.completion_timeout_s
    if state.phase != RestartPhase.FORMING:
        return None
    if state.question is not None:
        return state.question.asked_s + limits.barrier_timeout_s
    if state.last_call_s is not None:
        return state.last_call_s
    return state.began_s + limits.barrier_timeout_s


def advance(state: RestartState, event: Event, limits: p.RestartLimits) -> tuple[RestartState, tuple[Send, ...]]:
    """Return the state after an event, and the orders to give, in this order.

    The dicts of ``state`` are changed in place: continue with the returned state.
    """
    step = _RestartTransition(state, limits, event.at_s)
    match event:
        case MemberJoined():
            step.join(event)
        case MemberReported():
            step.report(event.initial_rank, event.report)
        case MemberLost():
            step.lose(event.initial_rank, event.kind, event.summary)
        case TimePassed():
            step.check_time()
        case Isolated():
            step.abort(event.reason)
    return step.state, tuple(step.actions)


class _RestartTransition:
    """One call of :func:`advance`: the state and the orders so far."""

    def __init__(self, state: RestartState, limits: p.RestartLimits, at_s: float) -> None:
        self.state, self.limits, self.at_s = state, limits, at_s
        self.actions: list[Send] = []

    # -- events ----------------------------------------------------------------------------------------------------

    def join(self, event: MemberJoined) -> None:
        rank, standing, state = event.initial_rank, event.standing, self.state
        if state.end is not None:
            return self.send(rank, state.end)
        if rank not in state.members:
            return self.send(rank, p.Expel(reason="the others resumed without this rank"))
        is_new = not state.members[rank].is_here
        self.set_member(rank, node=event.node, labels=event.labels, is_here=True)
        if self._catch_up(standing):
            state = self.state  # the order to restart went to this member, too
        elif state.phase == RestartPhase.FORMING:
            if standing.restart < state.restart_count and state.restart_count > 0:
                if state.restart is None:
                    self._note_restart()
                assert self.state.restart is not None
                self.send(rank, self.state.restart)
            else:
                if is_new:
                    self.replace(all_know_faults=False)  # it has the order from another coordinator
                if state.question is not None and state.question.to == rank:
                    self._ask_again()
        elif standing.restart_count < state.restart_count and state.go is not None:
            self.send(rank, state.go)
        for fault in standing.faults:
            self.report(rank, fault)
        if standing.completed >= 0:
            self.report(rank, p.Completed(restart_count=standing.completed, exit_code=standing.exit_code))
        if standing.ready is not None:
            self.report(rank, standing.ready)

    def report(self, rank: int, report: p.Report) -> None:
        if self.state.end is not None or rank not in self.state.members:
            return
        match report:
            case p.RankFault():
                self._on_fault(rank, report)
            case p.RankReady():
                self._on_ready(rank, report)
            case p.Completed():
                self._on_completed(rank, report)
            case p.Assigned():
                self._on_assigned(rank, report)
            case p.Left():
                self._on_left(rank, report)

    def lose(self, rank: int, kind: p.RankFaultKind, summary: str) -> None:
        state = self.state
        if state.end is not None or (member := state.members.get(rank)) is None:
            return
        if state.phase == RestartPhase.RUNNING and not member.is_running:
            self.remove(rank)
            return self._finish_if_complete()
        at = state.restart_count if state.phase == RestartPhase.RUNNING else max(0, state.restart_count - 1)
        self.note_new(rank, kind, summary, at)
        self.remove(rank)
        if state.phase == RestartPhase.RUNNING:
            self._restart()
        else:
            self._form()

    def check_time(self) -> None:
        due = next_deadline_s(self.state, self.limits)
        if due is None or self.at_s < due:
            return
        state = self.state
        if state.phase == RestartPhase.RUNNING:
            for rank, member in state.members.items():
                if member.is_running:
                    summary = f"not completed {self.limits.completion_timeout_s:g} s after the first"
                    self.note_new(rank, p.RankFaultKind.COMPLETION_TIMEOUT, summary, state.restart_count)
            self._restart()
        elif state.question is not None:
            self._expel(state.question.to, "it did not assign the ranks in time")
            self._form()
        elif state.last_call_s is not None:
            self._ask()
        else:
            for rank, member in list(state.members.items()):
                if not member.is_ready:
                    self._expel(rank, "it was not ready in time" if member.is_here else "it did not come in time")
            self._form()

    def abort(self, reason: str) -> None:
        if self.state.end is None:
            self._abort(reason)

    # -- reports -----------------------------------------------------------------------------------------------

    def _on_fault(self, rank: int, fault: p.RankFault) -> None:
        state = self.state
        fault = msgspec.structs.replace(fault, initial_rank=rank)
        if state.phase == RestartPhase.FORMING:
            if fault.restart_count >= state.restart_count - 1:
                self.note(fault)
                if not fault.is_consequence and state.last_call_s is not None and state.question is None:
                    self._form()
        elif fault.restart_count == state.restart_count:
            self.note(fault)
            if state.members[rank].active_rank is not None:
                self._restart()

    def _on_ready(self, rank: int, ready: p.RankReady) -> None:
        state = self.state
        if state.phase == RestartPhase.RUNNING and ready.restart_count == state.restart_count + 1:
            # It exited the function, and the reason did not reach this coordinator.
            summary = "it left the function"
            self.note_new(rank, p.RankFaultKind.EXCEPTION, summary, state.restart_count)
            self._restart()
            state = self.state
        if state.phase != RestartPhase.FORMING or ready.restart_count != state.restart_count:
            return
        self.set_member(rank, store_address=ready.store_address)
        self.replace(ready_iteration=max(state.ready_iteration, ready.iteration))
        if state.question is None:
            self._form()

    def _on_completed(self, rank: int, report: p.Completed) -> None:
        state = self.state
        member = state.members[rank]
        is_of_this_call = state.phase == RestartPhase.RUNNING and report.restart_count == state.restart_count
        if not is_of_this_call or member.active_rank is None:
            return
        self.set_member(rank, completed=True)
        self.replace(exit_code=state.exit_code or report.exit_code)
        if state.first_completed_s is None:
            self.replace(first_completed_s=self.at_s)
        self._finish_if_complete()

    def _on_assigned(self, rank: int, answer: p.Assigned) -> None:
        state = self.state
        question = state.question
        if question is None or (question.ordinal, question.to) != (answer.ordinal, rank):
            return
        if answer.error:
            return self._abort(answer.error)
        order = sorted(active for active in answer.ranks.values() if active is not None)
        if not order or order != list(range(len(order))) or not answer.ranks.keys() <= state.members.keys():
            return self._abort(f"rank_assignment gave {answer.ranks}: active ranks have to be 0, 1, ... of members")
        self._go(answer.ranks)

    def _on_left(self, rank: int, left: p.Left) -> None:
        if left.fatal:
            return self._abort(left.reason)  # the rank gets the order, too: it waits for the counts
        member, state = self.state.members[rank], self.state
        if state.phase == RestartPhase.RUNNING and member.is_running:
            return self.lose(rank, p.RankFaultKind.DIED, left.reason)
        self.remove(rank)
        if state.phase == RestartPhase.FORMING:
            self._form()
        else:
            self._finish_if_complete()

    def _catch_up(self, standing: p.MemberStanding) -> bool:
        """Restart beyond what a member has seen, if that is more than this coordinator knows; return whether it was."""
        state = self.state
        wanted = max(standing.restart, 0 if standing.restart_count < 0 else standing.restart_count + 1)
        if wanted <= state.restart_count + (
            state.phase == RestartPhase.RUNNING and standing.restart <= state.restart_count
        ):
            return False
        if standing.restart_count >= state.restart_count:
            ranks = standing.ranks
            members = {
                rank: msgspec.structs.replace(member, active_rank=ranks.get(rank))
                for rank, member in state.members.items()
            }
            self.replace(**_counted(members), fault_counts=standing.fault_counts)
        self.replace(restart_count=wanted - 1, question=None, last_call_s=None)
        self._restart()
        return True

    # -- consequences ----------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Order all members to exit the function."""
        state = self.state
        if not state.members:
            return self._abort("no rank is left")
        if self.limits.max_iterations is not None and state.restart_count >= self.limits.max_iterations:
            return self._abort(f"all restarts are spent (max_iterations={self.limits.max_iterations})")
        self.replace(
            phase=RestartPhase.FORMING,
            restart_count=state.restart_count + 1,
            **_counted(
                {
                    rank: msgspec.structs.replace(member, completed=False, store_address=None)
                    for rank, member in state.members.items()
                }
            ),
            began_s=self.at_s,
            first_completed_s=None,
            exit_code=0,
            go=None,
            all_know_faults=True,
        )
        self.send_all(self._note_restart())

    def _note_restart(self) -> p.Restart:
        """Return the order to restart, which members that connect later get, too."""
        order = p.Restart(restart_count=self.state.restart_count, faults=self.sent_faults)
        self.replace(restart=order)
        return order

    def _form(self) -> None:
        """Ask for the ranks if all members are ready."""
        state = self.state
        if state.end is not None:
            return
        if not state.members:
            return self._abort("no rank is left")
        if state.num_unready:
            if state.last_call_s is not None:
                self.replace(last_call_s=None)
            return
        if state.noted and state.num_causes == 0 and self.limits.last_call_wait_s > 0:
            if state.last_call_s is None:
                self.replace(last_call_s=self.at_s + self.limits.last_call_wait_s)
            if self.at_s < (self.state.last_call_s or 0.0):
                return
        self._ask()

    def _spent_without_progress(self) -> str | None:
        """Return why there were enough restarts in a row without progress; ``None`` = another one is allowed.

        Progress is an iteration higher than before. Unknown progress counts as none: a function that fails repeatedly
        would be called forever.
        """
        state, limit = self.state, self.limits.max_no_progress_restarts
        if limit is None or state.restart_count == 0 or state.num_no_progress < limit:
            return None
        if state.ready_iteration > state.iteration:
            return None
        text = f"{limit} restarts in a row made no progress (max_no_progress_restarts={limit})"
        if state.iteration < 0:
            return f"{text}: no rank has reported an iteration; look at the faults, or raise the limit"
        return f"{text}: no rank got beyond iteration {state.iteration}; look at the faults before"

    def _ask(self) -> None:
        if (reason := self._spent_without_progress()) is not None:
            return self._abort(reason)
        ordinal = self.state.num_questions + 1
        question = Question(ordinal=ordinal, to=next(iter(self.state.members)), asked_s=self.at_s)
        self.replace(question=question, num_questions=ordinal)
        return self._ask_again()

    def _ask_again(self) -> None:
        state = self.state
        assert state.question is not None
        members = [member.as_member(rank) for rank, member in state.members.items()] + list(state.gone.values())
        self.send(
            state.question.to,
            p.Assign(
                ordinal=state.question.ordinal,
                restart_count=state.restart_count,
                runs=p.member_runs(members),
            ),
        )

    def _go(self, ranks: Mapping[int, int | None]) -> None:
        state = self.state
        host = next(rank for rank, active in ranks.items() if active == 0)
        counts, faults = self.fault_counts, self.sent_faults
        go = p.Go(
            restart_count=state.restart_count,
            runs=p.rank_runs(ranks),
            active_world_size=sum(active is not None for active in ranks.values()),
            store_address=state.members[host].store_address or "",
            faults=faults,
            fault_counts=counts,
        )
        known: frozenset[tuple[int, int, p.RankFaultKind]] = frozenset()
        if state.restart is not None and state.all_know_faults:
            known = frozenset(_name(fault) for fault in state.restart.faults)
        self.send_all(msgspec.structs.replace(go, faults=tuple(one for one in faults if _name(one) not in known)))
        members = {
            rank: RestartMember(node=member.node, labels=member.labels, is_here=member.is_here, active_rank=ranks[rank])
            for rank, member in state.members.items()
            if rank in ranks
        }
        has_advanced = state.restart_count == 0 or state.ready_iteration > state.iteration
        self.replace(
            phase=RestartPhase.RUNNING,
            iteration=max(state.iteration, state.ready_iteration),
            ready_iteration=-1,
            num_no_progress=int(state.restart_count > 0) if has_advanced else state.num_no_progress + 1,
            **_counted(members),
            began_s=self.at_s,
            go=go,
            restart=None,
            all_know_faults=False,
            gone={},
            noted=[],
            num_causes=0,
            fault_counts=counts,
            question=None,
            last_call_s=None,
        )

    def _finish_if_complete(self) -> None:
        state = self.state
        if state.num_running == 0:
            order = p.Finish(restart_count=state.restart_count, exit_code=state.exit_code)
            self.send_all(order)
            self.replace(phase=RestartPhase.FINISHED, end=order)

    def _abort(self, reason: str) -> None:
        order = p.Abort(reason=reason, restart_count=self.state.restart_count, fault_counts=self.fault_counts)
        self.send_all(order)
        self.replace(phase=RestartPhase.ABORTED, end=order, question=None)

    def _expel(self, rank: int, reason: str) -> None:
        is_here = self.state.members[rank].is_here
        at = max(0, self.state.restart_count - 1)
        self.note_new(rank, p.RankFaultKind.BARRIER_TIMEOUT, reason, at)
        self.remove(rank)
        if is_here:
            self.send(rank, p.Expel(reason=reason))

    # -- changes of the state --------------------------------------------------------------------------------------

    @property
    def sent_faults(self) -> tuple[p.RankFault, ...]:
        """Faults since the last order to go as members get them, root causes first."""
        return judge(self.state.faults)[:_MAX_FAULTS]

    @property
    def fault_counts(self) -> dict[int, int]:
        """Root causes by initial rank, including those since the last order to go."""
        return count_causes(self.state.fault_counts, self.state.faults)

    def note_new(self, rank: int, kind: p.RankFaultKind, summary: str, restart_count: int) -> None:
        self.note(p.RankFault(initial_rank=rank, restart_count=restart_count, kind=kind, summary=summary))

    def note(self, fault: p.RankFault) -> None:
        """Record a member's fault, unless it is known: it may report the same to two coordinators."""
        state, name = self.state, (fault.restart_count, fault.kind)
        known = state.members[fault.initial_rank].faults
        if name in known:
            return
        self.set_member(fault.initial_rank, faults=(*known, name))
        state.noted.append(fault)
        self.replace(num_causes=state.num_causes + (not fault.is_consequence))

    def remove(self, rank: int) -> None:
        """Remove a member; an assignment in progress is then outdated."""
        member = self.state.members[rank]
        if member.active_rank is not None:
            self.state.gone[rank] = member.as_member(rank, alive=False)
        self._put(rank, None)
        self.replace(question=None)

    def set_member(self, rank: int, **changes: object) -> None:
        self._put(rank, msgspec.structs.replace(self.state.members[rank], **changes))

    def _put(self, rank: int, member: RestartMember | None) -> None:
        state, before = self.state, self.state.members[rank]
        if member is None:
            del state.members[rank]
        else:
            state.members[rank] = member
        self.replace(
            num_unready=state.num_unready + (member is not None and not member.is_ready) - (not before.is_ready),
            num_running=state.num_running + (member is not None and member.is_running) - before.is_running,
        )

    def replace(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def send(self, rank: int, order: p.Order) -> None:
        self.actions.append(Send(to=(rank,), order=order))

    def send_all(self, order: p.Order) -> None:
        to = tuple(rank for rank, member in self.state.members.items() if member.is_here)
        self.actions.append(Send(to=to, order=order))
