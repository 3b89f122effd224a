"""What a run's account holds: the parts of its wall time, its jobs, cycles, incidents, saves, loads and slow ranks.

All are plain structs in seconds since the run began, and become JSON as they are. :mod:`outlast.goodput.ledger` makes
them from a journal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from outlast.incidents import Event, Incident, Verdict


class Part(StrEnum):
    """What a stretch of a run's wall time went into; the parts of a run add up to its wall time."""

    PRODUCTIVE = "productive"
    """Steps whose result still counts, without what slow ranks added to them."""
    STRAGGLER = "straggler"
    """What slow ranks added to such steps, while the straggler detector named one."""
    REDONE = "redone"
    """Steps whose result was lost: they were done again, or have to be; and second runs of a step in place."""
    SAVE_STALL = "save_stall"
    """Training waited for a save."""
    DETECTION = "detection"
    """From a fault until it was noticed, where the fault's time is known."""
    RESTART = "restart"
    """From the notice of a fault until new workers could be started, or until the processes were back in the script."""
    RENDEZVOUS = "rendezvous"
    """Nodes meet and start workers."""
    LOAD = "load"
    """A generation is loaded and verified."""
    START_UP = "start_up"
    """Workers run, and train not yet or no longer: imports, model, first compilation; a last save, the exit. Before
    them, the start of the agent that joined first."""
    IDLE = "idle"
    """The job waits for nodes that are missing."""
    QUEUED = "queued"
    """No job of the run was running: it waited for a scheduler, or for a person."""
    UNOBSERVED = "unobserved"
    """Workers ran a script that reports no steps, so that nothing is known about the time."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stretch of the run's wall time; segments follow one another without gap or overlap."""

    start_s: float
    end_s: float
    part: Part
    job: str = ""
    cycle: int | None = None
    incident: int | None = None
    """Place in :attr:`Ledger.incidents` of what caused it."""
    straggler_s: float = 0.0
    """Of a productive one: how much of it slow ranks added; it counts as :attr:`Part.STRAGGLER`."""


class JobSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job of the run."""

    job: str
    start_s: float
    end_s: float
    exit_code: int | None = None
    """``None`` = it runs, or its end is not in the journal."""
    reason: str = ""
    command: tuple[str, ...] = ()
    launcher: str = ""
    """What started its workers, as their sessions knew it; empty = not known."""
    version: str = ""


class NodeSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of one node in one cycle."""

    node: str
    node_rank: int | None = None
    ranks: tuple[int, ...] = ()
    start_s: float
    end_s: float


class CycleSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cycle: from the start of its workers to their end."""

    job: str
    cycle: int
    start_s: float
    end_s: float
    steps_start_s: float | None = None
    """When all ranks had begun their first step; ``None`` = they never did, or report none."""
    world_size: int = 0
    from_iteration: int | None = None
    """Optimizer steps that were done when it began to train."""
    to_iteration: int | None = None
    """The last iteration that any of its ranks finished."""
    nodes: tuple[NodeSpan, ...] = ()
    num_in_process: int = 0
    """Restarts within its processes."""
    reason: str = ""
    """Why it ended."""


class IncidentCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incident that something was done about, and what it cost."""

    index: int
    """Its place in :attr:`Ledger.incidents`."""
    kind: str
    """As in :class:`outlast.incidents.IncidentKind`; ``preempted`` for a shutdown that was requested."""
    text: str
    """One line for people: who, what, where."""
    rung: str
    """Name of the ladder's rung in small letters; empty = nothing was decided."""
    reason: str = ""
    """Why that one."""
    job: str
    cycle: int
    node: str = ""
    rank: int | None = None
    iteration: int | None = None
    """The last iteration that any rank had finished when it happened."""
    at_s: float
    """When it was noticed."""
    since_s: float | None = None
    """When the fault happened, where that is known."""
    recovered_s: float | None = None
    """When every rank had begun its first step again; ``None`` = that has not happened."""
    resumed_iteration: int | None = None
    """Where training continued."""
    lost_iterations: int | None = 0
    """Finished iterations that had to be done again; ``None`` = not known, as the script has no session."""
    parts: dict[str, float] = {}
    """Name of a part to the seconds of it that this incident caused."""
    cost_s: float = 0.0
    """The sum of them."""
    simulated: str = ""
    """Label of the injected fault that caused it; empty = none did, as far as is known."""
    fault: Event | None = None
    """The event of that fault."""
    incident: Incident | None = None
    verdict: Verdict | None = None
    evidence: dict[str, Any] = {}
    """The incident's evidence, and what the journal has besides: ``exited`` (what became of its worker)."""

    @property
    def detected_after_s(self) -> float | None:
        """Seconds from the fault to its notice, where the fault's time is known."""
        return None if self.since_s is None else max(0.0, self.at_s - self.since_s)

    @property
    def recovered_after_s(self) -> float | None:
        """Seconds from the notice until every rank had begun a step again; ``None`` = that has not happened."""
        return None if self.recovered_s is None else max(0.0, self.recovered_s - self.at_s)


class Warned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An incident that ended nothing: a rejected copy, a failed save, a slow rank."""

    kind: str
    text: str
    at_s: float
    job: str
    cycle: int | None = None
    node: str = ""
    rank: int | None = None
    iteration: int | None = None
    num_reports: int = 1
    """Ranks that reported the same."""
    evidence: dict[str, Any] = {}


class SaveSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One save of all ranks."""

    job: str
    cycle: int | None
    iteration: int
    at_s: float
    """When training went on."""
    stall_s: float = 0.0
    """The longest that any rank waited for it."""
    tiers: tuple[str, ...] = ()
    """Tiers that it was committed to, the nearest first; empty = to none, as far as is known."""
    duration_s: float | None = None
    """Until it was committed to the last of them, on the slowest rank."""
    num_bytes: int = 0
    """Of all ranks together."""


class LoadSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One load by all ranks."""

    job: str
    cycle: int | None
    iteration: int
    at_s: float
    """When the last rank had it."""
    load_s: float
    """On the slowest rank."""
    tiers: dict[str, int] = {}
    """Tier to the number of ranks that loaded from it."""
    bytes_read: dict[str, int] = {}
    """Tier to the bytes that all ranks read there."""
    rejected: tuple[str, ...] = ()
    """Copies that were skipped, each in a line."""


class SlowRanksWindow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One report of the straggler detector."""

    job: str
    cycle: int | None
    iteration: int
    start_s: float
    end_s: float
    named: tuple[int, ...] = ()
    scores: dict[int, float] = {}
    """Global rank to its relative score, from 0 to 1; journals of earlier versions have the five worst."""
    excess: float = 0.0
    """Share of a step by which it took longer than with the median rank's work, from 0 to below 1."""
    why_nobody: str = ""


class StepSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How training went at one moment, as a rank reported it."""

    at_s: float
    iteration: int
    step_s: float | None = None
    """Mean seconds of a step since the sample before."""
    loss: float | None = None
    """The last validated loss of that rank."""


class NodeClock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a node's wall clock was read."""

    job: str
    node: str
    offset_s: float
    """Seconds by which its clock is ahead of the reference node's; this much was taken off."""
    num_anchors: int = 0
    """Events by which it was aligned, each seen by another node, too; 0 = there was none: its clock was trusted."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the incidents of a run; names of kinds, or of rungs, to seconds."""

    num_incidents: dict[str, int]
    """Kind to how many there were, requested shutdowns left out of ``all``."""
    mtbf_s: dict[str, float]
    """Kind, or ``all``, to the mean time between failures: the time in which jobs ran, by the number of incidents."""
    mttd_s: dict[str, float]
    """Kind, or ``all``, to the mean time to detect, over those whose fault's time is known."""
    mttr_s: dict[str, float]
    """Rung, or ``all``, to the mean time from the notice until every rank trained again."""
