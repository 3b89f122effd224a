"""The restart in process, decided: who has to leave the function, when all are ready, who goes where.

:func:`advance` is a pure function of what is known (:class:`~outlast.policy.restart_state.RestartState`) and what just
happened; its actions are orders to members. The hub (:mod:`outlast.inprocess.hub`) carries both. Times come with the
events.

``FORMING(i)`` ends when every living member is ready for iteration i: one of them is asked to assign the active
ranks, and then all go. ``RUNNING(i)`` ends with a fault of an active member (then ``FORMING(i+1)``) or when all active
members have completed. Everybody who is waited for has a deadline: a member that is not ready in time is expelled, and
one that does not answer the question for the ranks too; one that runs is bounded by its own monitor process.

What a member says of an older iteration is dropped. A reserve may die at any time without a restart; so may a member
that has completed, before all have.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outlast.policy.restart_draft import Draft, describe_member
from outlast.policy.restart_limits import RestartLimits
from outlast.policy.restart_orders import (
    Abort,
    Assign,
    Assigned,
    Completed,
    Expel,
    Fault,
    FaultKind,
    Finish,
    Go,
    Left,
    Ready,
    Report,
    Restart,
    Standing,
)
from outlast.policy.restart_state import (
    Came,
    Event,
    Isolated,
    Lost,
    Member,
    Phase,
    Question,
    RestartState,
    Said,
    Send,
    Tick,
)

__all__ = ["advance", "next_deadline_s"]


def next_deadline_s(state: RestartState, limits: RestartLimits) -> float | None:
    """Return when the next :class:`Tick` is due; ``None``: time changes nothing."""
    if state.phase == Phase.RUNNING and state.first_completed_s is not None:
        return state.first_completed_s + limits.completion_timeout_s
    if state.phase != Phase.FORMING:
        return None
    if state.question is not None:
        return state.question.asked_s + limits.barrier_timeout_s
    if state.last_call_s is not None:
        return state.last_call_s
    return state.began_s + limits.barrier_timeout_s


def advance(state: RestartState, event: Event, limits: RestartLimits) -> tuple[RestartState, tuple[Send, ...]]:
    """Return what is known after an event, and the orders to give, in this order."""
    turn = _Turn(state, limits, event.at_s)
    match event:
        case Came():
            turn.come(event)
        case Said():
            turn.hear(event.initial_rank, event.report)
        case Lost():
            turn.lose(event.initial_rank, event.kind, event.summary)
        case Tick():
            turn.look()
        case Isolated():
            turn.give_up(event.reason)
    return turn.state, tuple(turn.actions)


class _Turn(Draft):
    """One call of :func:`advance`."""

    # -- what happened -----------------------------------------------------------------------------------------

    def come(self, event: Came) -> None:
        rank, standing, state = event.initial_rank, event.standing, self.state
        if state.end is not None:
            return self.send(rank, state.end)
        member = state.members.get(rank)
        if member is None:
            return self.send(rank, Expel(reason="the others resumed without this rank"))
        self.set_member(rank, msgspec.structs.replace(member, node=event.node, labels=event.labels, is_here=True))
        if self._catch_up(standing):
            state = self.state  # the order to restart went to this member, too
        elif state.phase == Phase.FORMING:
            if standing.restart < state.iteration and state.iteration > 0:
                self.send(rank, Restart(iteration=state.iteration, faults=self.told_faults))
            elif state.question is not None and state.question.to == rank:
                self._ask_again()
        elif standing.iteration < state.iteration and state.go is not None:
            self.send(rank, state.go)
        for fault in standing.faults:
            self.hear(rank, fault)
        if standing.completed >= 0:
            self.hear(rank, Completed(iteration=standing.completed))
        if standing.ready is not None:
            self.hear(rank, standing.ready)

    def hear(self, rank: int, report: Report) -> None:
        if self.state.end is not None or rank not in self.state.members:
            return
        match report:
            case Fault():
                self._hear_fault(rank, report)
            case Ready():
                self._hear_ready(rank, report)
            case Completed():
                self._hear_completed(rank, report.iteration)
            case Assigned():
                self._hear_assigned(rank, report)
            case Left():
                self._hear_left(rank, report)

    def lose(self, rank: int, kind: FaultKind, summary: str) -> None:
        state = self.state
        if state.end is not None or (member := state.members.get(rank)) is None:
            return
        self.remove(rank)
        if state.phase == Phase.RUNNING and (member.active_rank is None or member.completed):
            return self._finish_if_complete()
        at = state.iteration if state.phase == Phase.RUNNING else max(0, state.iteration - 1)
        self.note(Fault(initial_rank=rank, iteration=at, kind=kind, summary=summary))
        if state.phase == Phase.RUNNING:
            self._restart()
        else:
            self._form()

    def look(self) -> None:
        due = next_deadline_s(self.state, self.limits)
        if due is None or self.at_s < due:
            return
        state = self.state
        if state.phase == Phase.RUNNING:
            for rank, member in state.members.items():
                if member.active_rank is not None and not member.completed:
                    self.note(
                        Fault(
                            initial_rank=rank,
                            iteration=state.iteration,
                            kind=FaultKind.COMPLETION_TIMEOUT,
                            summary=f"not completed {self.limits.completion_timeout_s:g} s after the first",
                        )
                    )
            self._restart()
        elif state.question is not None:
            self._expel(state.question.to, "it did not assign the ranks in time")
            self._form()
        elif state.last_call_s is not None:
            self._ask()
        else:
            for rank, member in state.members.items():
                if member.store_address is None:
                    self._expel(rank, "it was not ready in time" if member.is_here else "it did not come in time")
            self._form()

    def give_up(self, reason: str) -> None:
        if self.state.end is None:
            self._abort(reason)

    # -- reports -----------------------------------------------------------------------------------------------

    def _hear_fault(self, rank: int, fault: Fault) -> None:
        state = self.state
        fault = msgspec.structs.replace(fault, initial_rank=rank)
        if state.phase == Phase.FORMING:
            if fault.iteration >= state.iteration - 1:
                self.note(fault)
                if not fault.is_consequence and state.last_call_s is not None and state.question is None:
                    self._form()
        elif fault.iteration == state.iteration:
            self.note(fault)
            if state.members[rank].active_rank is not None:
                self._restart()

    def _hear_ready(self, rank: int, ready: Ready) -> None:
        state = self.state
        if state.phase == Phase.RUNNING and ready.iteration == state.iteration + 1:
            # It left the function, and why did not reach this hub.
            summary = "it left the function"
            self.note(Fault(initial_rank=rank, iteration=state.iteration, kind=FaultKind.EXCEPTION, summary=summary))
            self._restart()
            state = self.state
        if state.phase != Phase.FORMING or ready.iteration != state.iteration:
            return
        self.set_member(rank, msgspec.structs.replace(state.members[rank], store_address=ready.store_address))
        if state.question is None:
            self._form()

    def _hear_completed(self, rank: int, iteration: int) -> None:
        state = self.state
        member = state.members[rank]
        if state.phase != Phase.RUNNING or iteration != state.iteration or member.active_rank is None:
            return
        self.set_member(rank, msgspec.structs.replace(member, completed=True))
        if state.first_completed_s is None:
            self.replace(first_completed_s=self.at_s)
        self._finish_if_complete()

    def _hear_assigned(self, rank: int, answer: Assigned) -> None:
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

    def _hear_left(self, rank: int, left: Left) -> None:
        if left.fatal:
            self.remove(rank)
            return self._abort(left.reason)
        member, state = self.state.members[rank], self.state
        if state.phase == Phase.RUNNING and member.active_rank is not None and not member.completed:
            return self.lose(rank, FaultKind.DIED, left.reason)
        self.remove(rank)
        if state.phase == Phase.FORMING:
            self._form()
        else:
            self._finish_if_complete()

    def _catch_up(self, standing: Standing) -> bool:
        """Restart beyond what a member has seen, where that is more than this hub knows of; return whether it was."""
        state = self.state
        wanted = max(standing.restart, 0 if standing.iteration < 0 else standing.iteration + 1)
        if wanted <= state.iteration + (state.phase == Phase.RUNNING and standing.restart <= state.iteration):
            return False
        if standing.iteration >= state.iteration:
            members = {
                rank: msgspec.structs.replace(member, active_rank=standing.ranks.get(rank))
                for rank, member in state.members.items()
            }
            self.replace(members=members, fault_counts=standing.fault_counts)
        self.replace(iteration=wanted - 1, question=None, last_call_s=None)
        self._restart()
        return True

    # -- what follows ------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Have everybody leave the function."""
        state = self.state
        if not state.members:
            return self._abort("no rank is left")
        if self.limits.max_iterations is not None and state.iteration >= self.limits.max_iterations:
            return self._abort(f"all restarts are spent (max_iterations={self.limits.max_iterations})")
        self.replace(
            phase=Phase.FORMING,
            iteration=state.iteration + 1,
            members={
                rank: msgspec.structs.replace(member, completed=False, store_address=None)
                for rank, member in state.members.items()
            },
            began_s=self.at_s,
            first_completed_s=None,
            go=None,
        )
        self.send_all(Restart(iteration=self.state.iteration, faults=self.told_faults))

    def _form(self) -> None:
        """Ask for the ranks if everybody is ready."""
        state = self.state
        if state.end is not None:
            return
        if not state.members:
            return self._abort("no rank is left")
        if any(member.store_address is None for member in state.members.values()):
            self.replace(last_call_s=None)
            return
        if state.faults and all(fault.is_consequence for fault in state.faults) and self.limits.last_call_wait_s > 0:
            if state.last_call_s is None:
                self.replace(last_call_s=self.at_s + self.limits.last_call_wait_s)
            if self.at_s < (self.state.last_call_s or 0.0):
                return
        self._ask()

    def _ask(self) -> None:
        ordinal = self.state.num_questions + 1
        question = Question(ordinal=ordinal, to=min(self.state.members), asked_s=self.at_s)
        self.replace(question=question, num_questions=ordinal)
        self._ask_again()

    def _ask_again(self) -> None:
        state = self.state
        assert state.question is not None
        members = [describe_member(rank, member) for rank, member in state.members.items()] + list(state.gone)
        self.send(
            state.question.to,
            Assign(
                ordinal=state.question.ordinal,
                iteration=state.iteration,
                members=tuple(sorted(members, key=lambda member: member.initial_rank)),
            ),
        )

    def _go(self, ranks: Mapping[int, int | None]) -> None:
        state = self.state
        host = next(rank for rank, active in ranks.items() if active == 0)
        counts = self.fault_counts
        go = Go(
            iteration=state.iteration,
            ranks=dict(ranks),
            active_world_size=sum(active is not None for active in ranks.values()),
            store_address=state.members[host].store_address or "",
            faults=self.told_faults,
            fault_counts=counts,
        )
        self.send_all(go)
        self.replace(
            phase=Phase.RUNNING,
            members={
                rank: Member(node=member.node, labels=member.labels, is_here=member.is_here, active_rank=ranks[rank])
                for rank, member in state.members.items()
                if rank in ranks
            },
            began_s=self.at_s,
            go=go,
            gone=(),
            faults=(),
            fault_counts=counts,
            question=None,
            last_call_s=None,
        )

    def _finish_if_complete(self) -> None:
        state = self.state
        if all(member.completed or member.active_rank is None for member in state.members.values()):
            order = Finish(iteration=state.iteration)
            self.send_all(order)
            self.replace(phase=Phase.FINISHED, end=order)

    def _abort(self, reason: str) -> None:
        order = Abort(reason=reason, iteration=self.state.iteration, fault_counts=self.fault_counts)
        self.send_all(order)
        self.replace(phase=Phase.ABORTED, end=order, question=None)

    def _expel(self, rank: int, reason: str) -> None:
        is_here = self.state.members[rank].is_here
        self.remove(rank)
        at = max(0, self.state.iteration - 1)
        self.note(Fault(initial_rank=rank, iteration=at, kind=FaultKind.BARRIER_TIMEOUT, summary=reason))
        if is_here:
            self.send(rank, Expel(reason=reason))
