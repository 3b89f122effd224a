"""The strikes: what was done to the run on purpose, from outside or by the plan of faults, as the journal has it. Pure.

All nodes of the demo are one machine, so that the monotonic times of all events may be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outlast.demo.plan import Deed
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict

__all__ = ["Strike", "find_strikes", "kind_of", "split_jobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault that was caused."""

    fault: str
    """What was done, for people."""
    target: str
    """To whom or what, for people."""
    expected: IncidentKind
    """What it should be noticed as."""
    at_ns: int
    """Monotonic time."""
    cycle: int | None
    node: str
    rank: int | None
    """Global rank that it befell; ``None`` = a whole node."""
    iteration: int | None
    """Iterations done by then."""
    tensor: str | None = None
    """Which tensor was changed, or which module's output; ``None`` = none."""
    copies_spoiled: int | None = None
    """Copies on other nodes that were damaged before; ``None`` = none was meant to be."""

    @property
    def is_transient(self) -> bool:
        """Whether no restart is to follow."""
        return self.fault == Deed.NAN

    def caused(self, incident: Incident, verdict: Verdict, event: Event) -> bool:
        """Return whether an incident, on which an event tells the verdict, is the one that must have followed."""
        if self.cycle != event.cycle or self.at_ns > event.mono_ns or kind_of(incident) != self.expected:
            return False
        if self.is_transient != (verdict.rung == Rung.RERUN_STEP):
            return False
        return incident.node == self.node if self.rank is None else incident.rank == self.rank


def kind_of(incident: Incident) -> IncidentKind:
    """Return what an incident is about: a worker that failed with a diagnosis did so for an invalid result."""
    return IncidentKind.INVALID_RESULT if "diagnosis" in incident.evidence else incident.kind


def split_jobs(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each job of the run, the first job first: cycles are numbered anew in each."""
    jobs: dict[str, list[Event]] = {}
    for event in events:
        jobs.setdefault(event.job, []).append(event)
    return list(jobs.values())


def find_strikes(events: Iterable[Event]) -> list[Strike]:
    """Return all strikes that are to be noticed as incidents that something is done about, by time."""
    struck = (event for event in events if event.kind == EventKind.FAULT_SIMULATED and _is_incident(event))
    return sorted((_strike(event) for event in struck), key=lambda strike: strike.at_ns)


def _is_incident(event: Event) -> bool:
    return event.data["fault"] not in [deed for deed in Deed if deed.expected is None]


def _strike(event: Event) -> Strike:
    data, tensor = event.data, event.data.get("tensor")
    if event.proc == "demo":
        target, expected, node = data["target"], IncidentKind(data["expected"]), data["node"]
    else:
        where = data["target"] if tensor is None else f"{tensor}, element {data['element']}"
        target, expected, node = f"rank {event.rank}, {where}", IncidentKind.INVALID_RESULT, event.node
    return Strike(
        fault=data["fault"],
        target=target,
        expected=expected,
        at_ns=event.mono_ns,
        cycle=event.cycle,
        node=node,
        rank=event.rank,
        iteration=event.iteration,
        tensor=tensor,
        copies_spoiled=data.get("copies_spoiled"),
    )
