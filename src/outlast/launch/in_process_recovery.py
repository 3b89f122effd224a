"""In-process restarts of a cycle's workers, as the node's agent sees them: without which ranks the cycle continues.

Workers in :class:`outlast.inprocess.Wrapper` write their state to the heartbeat memory and wake the agent when it
changes. If such a worker ends, the others continue, with a spare rank in its place, or end themselves. A recovery costs
the agent one message to the coordinator, which charges it to the restart budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast.decoding import msgpack_decoder
from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind
from outlast.launch.workers import WorkerProcess
from outlast.policy.causes import OWN_DECISIONS
from outlast.policy.inprocess_protocol import (
    HAS_BEGUN,
    InProcessState,
    has_resumed,
    is_survivable,
    needs_restart,
    newest_begun,
    next_begun,
)
from outlast.runtime.board import Board, InProcessFault, MarkChanged, RankState, agent_address
from outlast.runtime.processes import DatagramSocket

_MAX_DATAGRAM = 1 << 16
_DECISIONS = frozenset({*OWN_DECISIONS, ExitReason.NO_PROGRESS})
"""Exit codes with which a worker decides for the whole job."""
_decoder = msgpack_decoder(MarkChanged)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredInProcess:
    """The workers run their function again after a fault."""

    call: int
    restart_count: int
    fault: InProcessFault | None
    """The root cause; ``None``: no rank reported one."""


@dataclass(slots=True)
class InProcessRecovery:
    """Follow the in-process restarts of a cycle's workers.

    Thread: the agent's main thread.
    """

    board: Board
    workers: Mapping[int, WorkerProcess]
    """By key in the fork server's messages."""
    is_alone: bool
    """No other node takes part in the cycle."""
    job: str
    cycle: int
    node: str
    _channel: DatagramSocket = field(init=False)
    _reached: tuple[int, int] = (0, 0)
    _faults: dict[tuple[int, int], tuple[InProcessFault, ...]] = field(default_factory=dict)
    _reported: set[tuple[int, int]] = field(default_factory=set)
    """Calls and restart counts whose beginning a datagram reported."""
    _last_states: dict[int, RankState] = field(default_factory=dict)
    """Last states of the lost workers."""
    _left_at: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Iteration at which workers left the call before a restart: by call and restart count, then local rank."""

    def __post_init__(self) -> None:
        self._channel = DatagramSocket(agent_address(self.board.token), _MAX_DATAGRAM)

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`take_recovered` may have a result; -1 once closed."""
        return self._channel.fileno()

    def lose(self, worker: WorkerProcess, incident: Incident) -> bool:
        """Return whether the cycle continues without a worker that failed; if so, mark it as lost."""
        state = self.board.read(worker.local_rank)
        continues = is_survivable(
            state,
            living=self._read(lambda other: other.exit_code is None),
            done=self._read(lambda other: other.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED)),
            has_unseen_peers=not self.is_alone,
        )
        if worker.exit_code in _DECISIONS or not continues:
            return False
        worker.lost = incident
        self._last_states[worker.local_rank] = state
        self.board.retire(worker.local_rank)
        return True

    def patience_s(self, worker: WorkerProcess) -> float | None:
        """Return how long the others may take to restart without a lost worker; ``None``: no limit here.

        That is so if no restart is needed, or no other worker of this node runs: other agents report it then.
        """
        state = self._last_states[worker.local_rank]
        if not needs_restart(state) or all(other.exit_code is not None for other in self.workers.values()):
            return None
        return state.in_process_patience_s

    def has_resumed(self, worker: WorkerProcess) -> bool:
        """Return whether the others on this node resumed after the loss of a worker."""
        return has_resumed(self._last_states[worker.local_rank], max(self._reached, self._newest()))

    @property
    def is_one_leaving(self) -> bool:
        """Whether a running worker was permanently removed, and is about to end."""
        running = self._read(lambda worker: worker.exit_code is None)
        return any(state.in_process == InProcessState.LEFT for state in running)

    @property
    def unrecovered_loss(self) -> Incident | None:
        """The first loss after which the others on this node have not resumed; ``None``: there is none."""
        for worker in self.workers.values():
            if worker.lost is None:
                continue
            state = self._last_states[worker.local_rank]
            is_missed = needs_restart(state) or state.in_process == InProcessState.LEFT
            if is_missed and not self.has_resumed(worker):
                return worker.lost
        return None

    @property
    def awaits_report(self) -> bool:
        """Whether a restart has begun that :meth:`take_recovered` has not returned yet."""
        return next_begun(self._reached, {*self._reported, self._newest()}) is not None

    def take_recovered(self, *, waits: bool = True) -> RecoveredInProcess | None:
        """Return the oldest new restart after which workers run their function again; ``None``: there is none.

        Args:
            waits: Withhold the newest restart until it is known completely: its faults, as a worker writes to the
                heartbeat memory before it sends its datagram; a death that the fork server has not reported yet; and
                the checkpoint that the workers load, as a save may have been committed after the fault.
        """
        self._receive()
        newest = self._newest()
        while (begun := next_begun(self._reached, {*self._reported, newest})) is not None:
            is_unknown = begun not in self._reported or self._awaits_exit(begun) or self._awaits_load()
            if waits and begun == newest and is_unknown:
                return None
            self._reached = begun
            self._reported = {one for one in self._reported if one > begun}
            cause = self._cause_of(begun)
            self._faults = {one: faults for one, faults in self._faults.items() if one > begun}
            self._left_at = {one: left for one, left in self._left_at.items() if one >= begun}
            if begun[1]:  # otherwise another call of a wrapped function begins
                return RecoveredInProcess(call=begun[0], restart_count=begun[1], fault=cause)
        return None

    def _cause_of(self, restart: tuple[int, int]) -> InProcessFault | None:
        faults = self._faults.get(restart, ())
        return next((fault for fault in faults if not fault.is_consequence), faults[0] if faults else None)

    def _awaits_exit(self, restart: tuple[int, int]) -> bool:
        """Return whether peers saw a worker of this node die before a restart, and its exit is not reported yet."""
        cause = self._cause_of(restart)
        if cause is None or cause.kind != IncidentKind.WORKER_DIED:
            return False
        return any(worker.global_rank == cause.rank and worker.lost is None for worker in self.workers.values())

    def _awaits_load(self) -> bool:
        """Return whether a worker that reports its saves has begun a call, but neither its setup nor a step."""

        def is_ready(state: RankState) -> bool:
            since_ns = state.in_process_since_ns
            has_set_up = state.attached_ns > since_ns and "setup" in state.counts
            return state.finished or has_set_up or state.last_heartbeat_ns > since_ns

        active = self._read(lambda worker: worker.exit_code is None)
        return any(
            state.reports_progress and state.in_process == InProcessState.ACTIVE and not is_ready(state)
            for state in active
        )

    def incident_of(self, recovered: RecoveredInProcess) -> Incident:
        """Return the incident that caused a restart; for a worker that this node lost, the incident of its end."""
        fault = recovered.fault
        if fault is None:
            summary = f"the ranks left restart {recovered.restart_count - 1} in process for a reason that none reported"
            return self._incident(IncidentKind.WORKER_FAILED, summary)
        if fault.is_consequence and fault.kind == IncidentKind.WORKER_HUNG:
            summary = f"every rank that exceeded its timeout waited for others; the first report: {fault.summary}"
            return self._incident(fault.kind, summary)
        worker = next((one for one in self.workers.values() if one.global_rank == fault.rank), None)
        if worker is None:
            return self._incident(fault.kind, fault.summary, rank=fault.rank)
        if worker.lost is not None:
            if fault.kind != IncidentKind.WORKER_HUNG:
                return worker.lost
            summary = f"{fault.summary}; it was ended for it"
            return msgspec.structs.replace(worker.lost, kind=fault.kind, evidence={"summary": summary})
        state = self.board.read(worker.local_rank)
        left_at = self._left_at.get((recovered.call, recovered.restart_count), {})
        iteration = left_at.get(worker.local_rank, state.iteration if state.attached else None)
        known = {"node": self.node, "rank": fault.rank, "pid": worker.pid, "iteration": iteration}
        return self._incident(fault.kind, fault.summary, **known)

    def describe_unfinished(self) -> Incident | None:
        """Return why no worker here finished, now that all have ended or were lost; ``None``: one did."""
        if any(state.in_process != InProcessState.LEFT for state in self._read(lambda worker: worker.lost is None)):
            return None
        lost = next((worker.lost for worker in self.workers.values() if worker.lost is not None), None)
        summary = "every worker of the node was permanently removed"
        return lost or self._incident(IncidentKind.WORKER_FAILED, summary, node=self.node)

    def _incident(self, kind: IncidentKind, summary: str, **known: Any) -> Incident:
        evidence = {"summary": summary} if summary else {}
        return Incident(kind=kind, job=self.job, cycle=self.cycle, evidence=evidence, **known)

    def close(self) -> None:
        self._channel.close()

    def _newest(self) -> tuple[int, int]:
        return newest_begun(self._read(lambda worker: worker.lost is None))

    def _read(self, wanted: Callable[[WorkerProcess], bool]) -> list[RankState]:
        return [self.board.read(worker.local_rank) for worker in self.workers.values() if wanted(worker)]

    def _receive(self) -> None:
        for data, _ in self._channel.receive():
            if not data:
                continue  # a worker attached to the heartbeat memory
            try:
                change = _decoder.decode(data)
            except msgspec.DecodeError as error:
                self._channel.warn(f"a worker's report about restarts in process cannot be read: {error}")
                continue
            if change.state == InProcessState.RESTARTING and change.iteration is not None:
                left_at = self._left_at.setdefault((change.call, change.restart_count), {})
                left_at[change.local_rank] = change.iteration
            if change.state in HAS_BEGUN:  # before that the cause may not be known
                self._reported.add((change.call, change.restart_count))
                if change.faults:
                    self._faults.setdefault((change.call, change.restart_count), change.faults)
