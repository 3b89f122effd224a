"""The end of a cycle: what all nodes know of it, brought together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from outlast.decoding import convert
from outlast.incidents import Incident, IncidentKind
from outlast.launch import messages as m
from outlast.policy.causes import permanent_cause
from outlast.policy.culprit import Position, find_culprit
from outlast.policy.deadlines import Expired
from outlast.policy.ladder import CycleEnd
from outlast.policy.quarantine import Distrusted
from outlast.policy.rerun import Diagnosis
from outlast.policy.slots import root_cause
from outlast.policy.timeouts import Observation

__all__ = [
    "CycleEnding",
    "copy_untrusted",
    "departure",
    "diagnosis_in",
    "highest_durable",
    "name_culprit",
    "observations",
]


@dataclass(slots=True, kw_only=True)
class CycleEnding:
    """What was gathered about a cycle that is ending."""

    job: str
    cycle: int
    incidents: list[Incident] = field(default_factory=list)
    expired: list[Expired] = field(default_factory=list)
    facts: list[m.CycleFacts] = field(default_factory=list)

    def take(self, facts: m.CycleFacts) -> None:
        """Add what one node knows."""
        self.facts.append(facts)
        if facts.incident is not None:
            self.incidents.append(facts.incident)

    def lose(self, node: str, why: str, *, detected_after_s: float | None = None) -> Incident:
        """Add the loss of a node, and return it."""
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

    def summarise(self, *, num_heirs: Callable[[str], int], may_shrink: bool, num_nodes: int) -> CycleEnd:
        """Return what the ladder judges: the cause among all incidents, and how far the cycle got.

        Args:
            num_heirs: Says how many spares could take a node's slot.
            may_shrink: The world may go on without one of its nodes.
            num_nodes: Nodes that took part.
        """
        cause = self._cause()
        diagnosis = diagnosis_in(cause)
        if diagnosis is not None:
            cause = _by_who_saw_it(cause, diagnosis)
        return CycleEnd(
            cycle=self.cycle,
            incident=cause,
            durable_iteration=highest_durable(self.facts),
            progress_known=any(facts.progress_known for facts in self.facts),
            had_session=any(facts.had_session for facts in self.facts),
            num_spares=num_heirs(diagnosis.node if diagnosis is not None and diagnosis.node else cause.node),
            may_shrink=may_shrink,
            load=next((facts.load for facts in self.facts if facts.load is not None), None),
            diagnosis=diagnosis,
            is_permanent=self._is_permanent(num_nodes),
        )

    def _is_permanent(self, num_nodes: int) -> bool:
        """Return whether all ranks of all nodes failed alike before their first step, and would do so again."""
        causes = [facts.permanent for facts in self.facts]
        return len(causes) == num_nodes and permanent_cause(causes, has_session=True) is not None  # each node judged it

    def _cause(self) -> Incident:
        cause = root_cause(self.incidents)
        positions = [position for facts in self.facts for position in facts.positions]
        if cause is None:
            return Incident(
                kind=IncidentKind.WORKER_FAILED,
                job=self.job,
                cycle=self.cycle,
                evidence={"summary": "the cycle ended without a report of why"},
            )
        if cause.kind == IncidentKind.WORKER_HUNG and positions:
            return name_culprit(cause, positions)
        return cause


def highest_durable(facts: list[m.CycleFacts]) -> int | None:
    """Return the highest iteration that any node knows to be durable; ``None`` = none."""
    return max((one.durable_iteration for one in facts if one.durable_iteration is not None), default=None)


def observations(facts: list[m.CycleFacts]) -> list[Observation]:
    """Return what the nodes' ranks observed of their durations."""
    return [one.observation for one in facts if one.observation is not None]


def departure(cycle: int, leave: m.Leave) -> CycleEnd:
    """Return the end of a cycle whose job was told to leave."""
    facts = leave.facts
    return CycleEnd(
        cycle=cycle,
        incident=None,
        preempted=True,
        preempted_saved=leave.saved,
        durable_iteration=facts.durable_iteration if facts else None,
        progress_known=facts.progress_known if facts else False,
        had_session=facts.had_session if facts else False,
    )


def diagnosis_in(incident: Incident) -> Diagnosis | None:
    """Return the diagnosis that a worker left; ``None`` where there is none that can be read."""
    try:
        return convert(incident.evidence["diagnosis"], Diagnosis)
    except (KeyError, msgspec.ValidationError):
        return None


def copy_untrusted(one: Distrusted, cause: Incident | None) -> Incident:
    """Return the incident of a copy that is not loaded again, because of the invalid result in ``cause``."""
    assert cause is not None
    what = f"generation {one.generation} (attempt {one.attempt})"
    return Incident(
        kind=IncidentKind.COPY_UNTRUSTED,
        job=cause.job,
        cycle=cause.cycle,
        node=cause.node,
        rank=cause.rank,
        iteration=one.iteration,
        evidence={
            "summary": f"{what} gave {one.why}",
            "generation": one.generation,
            "attempt": one.attempt,
            "tier": one.tier,
            "tainted": list(one.tainted),
        },
    )


def _by_who_saw_it(incident: Incident, diagnosis: Diagnosis) -> Incident:
    """Return the incident of the rank that saw the invalid result, where only ranks that left with it were heard."""
    if incident.rank == diagnosis.rank:
        return incident
    return msgspec.structs.replace(
        incident,
        node=diagnosis.node or incident.node,
        rank=diagnosis.rank,
        pid=None,
        evidence={**incident.evidence, "first_reported_rank": incident.rank},
    )


def name_culprit(incident: Incident, positions: Sequence[Position]) -> Incident:
    """Return the incident of a hang with the rank that all others waited for, if one can be told."""
    culprit = find_culprit(positions)
    position = culprit.position
    evidence = {**incident.evidence, "summary": culprit.reason, "first_reported_rank": incident.rank}
    if position is None:
        return msgspec.structs.replace(
            incident, node=culprit.node, rank=None, pid=None, section=None, iteration=None, evidence=evidence
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
