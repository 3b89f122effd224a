"""The end of a cycle: what all nodes know of it, brought together."""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.incidents import Incident, IncidentKind
from outlast.launch import messages as m
from outlast.policy.culprit import Position, find_culprit
from outlast.policy.deadlines import Expired
from outlast.policy.ladder import CycleEnd
from outlast.policy.quarantine import Distrusted
from outlast.policy.slots import root_cause
from outlast.policy.timeouts import Observation

__all__ = ["Ending", "copy_untrusted", "highest_durable", "observations"]


@dataclass(slots=True, kw_only=True)
class Ending:
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

    def summarise(self, *, num_spares: int) -> CycleEnd:
        """Return what the ladder judges: the cause among all incidents, and how far the cycle got."""
        return CycleEnd(
            cycle=self.cycle,
            incident=self._cause(),
            durable_iteration=highest_durable(self.facts),
            progress_known=any(facts.progress_known for facts in self.facts),
            num_spares=num_spares,
            load=next((facts.load for facts in self.facts if facts.load is not None), None),
        )

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
            return _with_culprit(cause, positions)
        return cause


def highest_durable(facts: list[m.CycleFacts]) -> int | None:
    """Return the highest iteration that any node knows to be durable; ``None`` = none."""
    return max((one.durable_iteration for one in facts if one.durable_iteration is not None), default=None)


def observations(facts: list[m.CycleFacts]) -> list[Observation]:
    """Return what the nodes' ranks observed of their durations."""
    return [one.observation for one in facts if one.observation is not None]


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


def _with_culprit(incident: Incident, positions: list[Position]) -> Incident:
    """Return the incident of a hang with the one rank that all others waited for."""
    culprit = find_culprit(positions)
    position = culprit.position
    evidence = {
        **incident.evidence,
        "summary": culprit.reason,
        "first_reported_rank": incident.rank,
        "process_state": position.process_state,
    }
    if position.stack_line:
        evidence["stack_line"] = position.stack_line
    return Incident(
        kind=incident.kind,
        job=incident.job,
        cycle=incident.cycle,
        node=position.node,
        rank=position.global_rank,
        pid=position.pid,
        section="/".join(position.sections) or incident.section,
        iteration=position.iteration,
        detected_after_s=incident.detected_after_s,
        evidence=evidence,
    )
