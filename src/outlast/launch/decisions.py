"""The end of a cycle, and the recovery policy's decision on it.

:class:`CycleEnding` collects the reports of all nodes on an ending cycle. :class:`RecoveryStateClient` queries the
policy, and saves its state (``recovery_policy.json``) before any node learns of the decision.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from outlast.decoding import convert
from outlast.incidents import Decision, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch import protocol as m
from outlast.launch.membership import Nodes
from outlast.policy import recovery_policy
from outlast.policy.causes import permanent_cause, root_cause
from outlast.policy.deadlines import Expired, Observation
from outlast.policy.recovery_point import Exclusion
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState
from outlast.policy.rerun import Diagnosis
from outlast.policy.root_cause import Position, find_root_cause, is_hang_explained
from outlast.runtime.board import RankState

log = logging.getLogger(__name__)
REPORT_S = 2.0
"""Time in which all nodes report an in-process restart, unless one has no worker left to detect it."""


@dataclass(slots=True, kw_only=True)
class CycleEnding:
    """The reports on a cycle that is ending."""

    job: str
    cycle: int
    has_begun: bool = True
    """All nodes had started their workers."""
    has_trained: bool = False
    """A node reported a completed step while the cycle ran."""
    incidents: list[Incident] = field(default_factory=list)
    expired: list[Expired] = field(default_factory=list)
    facts: list[m.CycleFacts] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)
    """Nodes that have reported."""

    def take(self, node: str, facts: m.CycleFacts) -> None:
        """Add one node's report; a repeated one counts once."""
        if node in self.reported:
            return
        self.reported.add(node)
        self.facts.append(facts)
        if facts.incident is not None:
            self.incidents.append(facts.incident)

    def lose(self, node: str, why: str, *, detected_after_s: float | None = None) -> Incident:
        """Add the loss of a node; return its incident."""
        incident = Incident(
            kind=IncidentKind.NODE_LOST,
            job=self.job,
            cycle=self.cycle,
            node=node,
            detected_after_s=detected_after_s,
            evidence={"summary": why},
        )
        self.incidents.append(incident)
        return incident

    def summarise(self, *, num_successors: Callable[[str], int], may_shrink: bool, num_nodes: int) -> CycleEnd:
        """Return the policy's input: the root cause among all incidents, and the progress of the cycle.

        Args:
            num_successors: Returns how many spares could take a node's slot.
            may_shrink: The world may continue without one of its nodes.
            num_nodes: Number of nodes that took part.
        """
        is_permanent = self._is_permanent(num_nodes)
        cause = self._cause(is_permanent=is_permanent)
        diagnosis = diagnosis_in(cause)
        if diagnosis is not None:
            cause = _by_who_saw_it(cause, diagnosis)
        return CycleEnd(
            cycle=self.cycle,
            incident=cause,
            durable_iteration=highest_durable(self.facts),
            committed_iteration=highest_committed(self.facts),
            progress_known=any(facts.progress_known for facts in self.facts),
            had_session=any(facts.had_session for facts in self.facts),
            num_spares=num_successors(diagnosis.node if diagnosis is not None and diagnosis.node else cause.node),
            may_shrink=may_shrink,
            num_nodes=num_nodes,
            has_trained=self.has_begun and (self.has_trained or any(facts.has_trained for facts in self.facts)),
            load=next((facts.load for facts in self.facts if facts.load is not None), None),
            diagnosis=diagnosis,
            is_permanent=is_permanent,
        )

    def exceeded(self) -> list[Expired]:
        """Return the exceeded timeouts, marked as explained if another cause than a short timeout explains them."""
        positions = [position for facts in self.facts for position in facts.positions]
        others = any(one.kind != IncidentKind.WORKER_HUNG for one in self.incidents)
        is_explained = others or is_hang_explained(positions)
        return [msgspec.structs.replace(one, is_explained=is_explained) for one in self.expired]

    def _is_permanent(self, num_nodes: int) -> bool:
        """Return whether all ranks of all nodes failed with the same cause before their first step, and would again."""
        causes = [facts.permanent for facts in self.facts]
        return len(causes) == num_nodes and permanent_cause(causes, has_session=True) is not None  # each node judged it

    def _cause(self, *, is_permanent: bool) -> Incident:
        failed = [one for one in self.incidents if one.kind != IncidentKind.NODE_LOST]
        # If all ranks failed with the same cause, that precedes the loss of a node that has reported it.
        cause = root_cause(failed if is_permanent and failed else self.incidents)
        positions = [position for facts in self.facts for position in facts.positions]
        if cause is None:
            return Incident(
                kind=IncidentKind.WORKER_FAILED,
                job=self.job,
                cycle=self.cycle,
                evidence={"summary": "the cycle ended without a report of why"},
            )
        if cause.kind == IncidentKind.WORKER_HUNG and positions:
            return identify_root_cause(cause, positions)
        return cause


def highest_durable(facts: Iterable[m.CycleFacts | m.Restarted | RankState]) -> int | None:
    """Return the highest iteration that any node or rank knows to survive the end of the job; ``None``: none."""
    return max((one.durable_iteration for one in facts if one.durable_iteration is not None), default=None)


def highest_committed(facts: Iterable[m.CycleFacts | m.Restarted | RankState]) -> int | None:
    """Return the highest iteration that any node or rank knows to be committed in any tier; ``None``: none."""
    return max((one.committed_iteration for one in facts if one.committed_iteration is not None), default=None)


@dataclass(slots=True)
class RestartReports:
    """Collect the nodes' reports on the newest in-process restart until the restart is charged to the budget.

    Each node reports a restart with the checkpoints that its own ranks know. If progress counts, the restart is charged
    once all nodes have reported it, the next restart begins, or :data:`REPORT_S` has passed.
    """

    counted: tuple[int, int] = (0, 0)
    """Call and number of the newest restart that was charged."""
    _pending: list[m.Restarted] = field(default_factory=list)
    _since_s: float = 0.0

    def add(self, report: m.Restarted, now_s: float) -> CycleEnd | None:
        """Add a node's report; return an earlier restart that must be charged now."""
        newest = _restart_of(self._pending[0]) if self._pending else self.counted
        if _restart_of(report) < newest or _restart_of(report) == self.counted:
            return None
        earlier = self._charge() if self._pending and _restart_of(report) > newest else None
        if not self._pending:
            self._since_s = now_s
        self._pending.append(report)
        return earlier

    def due(self, nodes: Collection[str], now_s: float, *, progress_counts: bool) -> CycleEnd | None:
        """Return the restart that must be charged now; ``None``: there is none.

        Args:
            nodes: Nodes of the running cycle.
            now_s: Monotonic seconds.
            progress_counts: Earlier cycles of the run reported progress.
        """
        if not self._pending:
            return None
        progress_counts |= any(one.progress_known for one in self._pending)
        is_late = now_s >= self._since_s + REPORT_S
        if progress_counts and not is_late and not {one.node for one in self._pending} >= set(nodes):
            return None
        return self._charge()

    def _charge(self) -> CycleEnd:
        reports, self._pending = self._pending, []
        self.counted = _restart_of(reports[0])
        # The node of the failed rank knows most about it.
        first = next((one for one in reports if one.incident.node == one.node), reports[0])
        return CycleEnd(
            cycle=first.cycle,
            incident=first.incident,
            recovered_in_process=True,
            durable_iteration=highest_durable(reports),
            committed_iteration=highest_committed(reports),
            progress_known=any(one.progress_known for one in reports),
        )


def _restart_of(report: m.Restarted) -> tuple[int, int]:
    return report.call, report.restart_count


def observations(facts: list[m.CycleFacts]) -> list[Observation]:
    return [one.observation for one in facts if one.observation is not None]


def departure(cycle: int, leave: m.Leave) -> CycleEnd:
    """Return the end of a cycle whose job was requested to shut down."""
    facts = leave.facts or m.CycleFacts(cycle=cycle)
    return CycleEnd(
        cycle=cycle,
        incident=None,
        preempted=True,
        preempted_saved=leave.saved,
        durable_iteration=facts.durable_iteration,
        committed_iteration=facts.committed_iteration,
        progress_known=facts.progress_known,
        had_session=facts.had_session,
    )


def describe_notice(detected: Mapping[str, int]) -> str:
    """Return which nodes received the shutdown signal of a job, for people.

    Args:
        noticed: Signal by node whose agent received one; other nodes followed.
    """
    if not detected:
        return "the workers received a preemption notice"  # from the scheduler itself, or a file
    names = sorted(detected)
    which = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    known = {one.value: one.name for one in signal.Signals}
    signals = " and ".join(sorted({known.get(number, f"signal {number}") for number in detected.values()}))
    return f"{'node' if len(names) == 1 else 'nodes'} {which} received {signals}"


def diagnosis_in(incident: Incident) -> Diagnosis | None:
    """Return the diagnosis that a worker left; ``None``: there is none, or it cannot be decoded."""
    try:
        return convert(incident.evidence["diagnosis"], Diagnosis)
    except (KeyError, msgspec.ValidationError):
        return None


def copy_untrusted(one: Exclusion, cause: Incident | None) -> Incident:
    """Return the incident of a checkpoint copy that is excluded because of the invalid result in ``cause``."""
    assert cause is not None
    what = f"checkpoint {one.checkpoint} (attempt {one.attempt})"
    return Incident(
        kind=IncidentKind.COPY_UNTRUSTED,
        job=cause.job,
        cycle=cause.cycle,
        node=cause.node,
        rank=cause.rank,
        iteration=one.iteration,
        evidence={
            "summary": f"{what} gave {one.why}",
            "generation": one.checkpoint,
            "attempt": one.attempt,
            "tier": one.tier,
            "tainted": list(one.tainted),
        },
    )


def _by_who_saw_it(incident: Incident, diagnosis: Diagnosis) -> Incident:
    """Return the incident of the rank with the invalid result, if only ranks that exited with it reported."""
    if incident.rank == diagnosis.rank:
        return incident
    return msgspec.structs.replace(
        incident,
        node=diagnosis.node or incident.node,
        rank=diagnosis.rank,
        pid=None,
        evidence={**incident.evidence, "first_reported_rank": incident.rank},
    )


def identify_root_cause(incident: Incident, positions: Sequence[Position]) -> Incident:
    """Return the incident of a hang with the rank that all others waited for, if it can be identified."""
    found = find_root_cause(positions)
    position = found.position
    evidence = {**incident.evidence, "summary": found.reason, "first_reported_rank": incident.rank}
    if position is None:
        return msgspec.structs.replace(
            incident, node=found.node, rank=None, pid=None, section=None, iteration=None, evidence=evidence
        )
    evidence["process_state"] = position.process_state
    if position.stack_line:
        evidence["stack_line"] = position.stack_line
    return msgspec.structs.replace(
        incident,
        node=position.node,
        rank=position.global_rank,
        pid=position.pid,
        section="/".join(position.sections) or incident.section,
        iteration=position.iteration,
        evidence=evidence,
    )


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event to the journal."""

    kind: EventKind
    cycle: int
    data: dict[str, object]


@dataclass(frozen=True, slots=True)
class Remember:
    """Save the recovery policy's state, before any node learns of the decision."""

    state: RecoveryState


@dataclass(frozen=True, slots=True)
class Learn:
    """Learn timeouts from a cycle."""

    cycle: int
    observations: list[Observation]
    expired: list[Expired] | None
    """The timeouts that were exceeded; ``None``: the cycle finished."""


Effects = list[Record | Remember | Learn]
"""What the coordinator's host must do, in this order, before it sends any message."""


class RecoveryStateClient:
    """Query the recovery policy and keep its state.

    Args:
        state: The policy's state.
        limits: The restart budgets.
        nodes: Receive the new state whenever it changes.
        effects: Receives events and states to save.
        tell_time: Returns the wall-clock time as text, for the history; no decision uses it.

    Thread: the coordinator's.
    """

    def __init__(
        self, state: RecoveryState, limits: Limits, *, nodes: Nodes, effects: Effects, format_time: Callable[[], str]
    ) -> None:
        self.state, self.limits = state, limits
        self._nodes, self._effects, self._format_time = nodes, effects, format_time

    def rule(self, end: CycleEnd) -> Decision:
        """Return the decision on a cycle's end, or on an in-process restart."""
        before = self.state.excluded
        state, decision = recovery_policy.decide(self.state, end, self.limits)
        state = self._with_time(state)
        self._keep(state)
        for one in state.excluded:
            if one not in before and not one.settled:
                self._effects.append(
                    Record(EventKind.INCIDENT, end.cycle, {"incident": copy_untrusted(one, end.incident)})
                )
        data: dict[str, object] = {"verdict": decision}
        if end.incident is not None:
            data["incident"] = end.incident
            # A job's last log line contains the reason for its end.
            level = logging.DEBUG if decision.recovery_level == RecoveryLevel.STOP else logging.WARNING
            what = "continues" if decision.recovery_level == RecoveryLevel.RESTART_IN_PROCESS else "ended"
            log.log(level, "cycle %d %s: %s", end.cycle, what, decision.reason)
            if (
                not state.had_session
                and decision.recovery_level < RecoveryLevel.REQUEUE_JOB
                and state.restarts_without_progress == 1
            ):
                log.info("the script has no session: it continues from its own checkpoint, if it has one")
        self._effects.append(Record(EventKind.DECISION, end.cycle, data))
        return decision

    def would_replace(self, end: CycleEnd) -> bool:
        """Return whether such an end of a cycle would replace the node; the state does not change."""
        return recovery_policy.decide(self.state, end, self.limits)[1].recovery_level == RecoveryLevel.REPLACE_NODE

    def bar(self, node: str) -> None:
        """Quarantine a node for this job."""
        if node not in self.state.quarantined:
            self._keep(msgspec.structs.replace(self.state, quarantined=(*self.state.quarantined, node)))

    def admit(self, node: str) -> None:
        """End a node's quarantine."""
        if node in self.state.quarantined:
            others = tuple(name for name in self.state.quarantined if name != node)
            self._keep(msgspec.structs.replace(self.state, quarantined=others))

    def drop_replay(self, why: str) -> None:
        """Make the next cycle train as usual, because the node that was to replay is gone."""
        log.warning("%s: the next cycle trains without the replay", why)
        self._keep(recovery_policy.drop_replay(self.state))

    def learn(self, reported: RecoveryState) -> None:
        """Merge an agent's record of earlier decisions, which ``recovery_policy.json`` may lack."""
        if (merged := recovery_policy.merge(self.state, reported)) != self.state:
            self._replace(merged)  # with its number: another agent may have a later state

    def _with_time(self, state: RecoveryState) -> RecoveryState:
        """Return the state with the time at its newest step, if that is new."""
        if not state.history or state.history[-1].time or state.history == self.state.history:
            return state
        newest = msgspec.structs.replace(state.history[-1], time=self._format_time())
        return msgspec.structs.replace(state, history=(*state.history[:-1], newest))

    def _keep(self, state: RecoveryState) -> None:
        self._replace(msgspec.structs.replace(state, number=state.number + 1))

    def _replace(self, state: RecoveryState) -> None:
        self.state = state
        self._effects.append(Remember(state))
        decided = m.Decided(recovery_state=state)
        self._nodes.out += [(node.name, node.epoch, decided) for node in self._nodes]
