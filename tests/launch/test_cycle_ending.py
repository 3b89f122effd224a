"""The reason of a cycle's end, from the reports of its nodes."""

from __future__ import annotations

from outlast.incidents import Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.decisions import CycleEnding
from outlast.policy.causes import Cause


def test_a_fault_of_all_ranks_precedes_a_later_lost_node() -> None:
    """When all ranks failed identically before their first step and then a node was lost, the reason is the failure."""
    ending = CycleEnding(job="j", cycle=0)
    for node in ("a", "b"):
        incident = Incident(kind=IncidentKind.WORKER_FAILED, job="j", cycle=0, node=node)
        cause = Cause(type="ValueError", text="no such file", frame="train.py:3")
        ending.take(node, m.CycleFacts(cycle=0, incident=incident, permanent=cause))
    ending.lose("b", "its connection ended")
    end = ending.summarise(num_successors=lambda node: 0, may_shrink=False, num_nodes=2)
    assert end.is_permanent
    assert end.incident is not None
    assert end.incident.kind is IncidentKind.WORKER_FAILED
    ending.facts.pop()
    end = ending.summarise(num_successors=lambda node: 0, may_shrink=False, num_nodes=2)
    assert not end.is_permanent
    assert end.incident is not None
    assert end.incident.kind is IncidentKind.NODE_LOST
