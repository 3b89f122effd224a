"""Types of a run's account: the parts of its wall time, its jobs, cycles, incidents, saves, loads and slow ranks.

Plain structs in seconds since the run began, which become JSON unchanged. :mod:`outlast.goodput.ledger` builds them
from a journal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from outlast.incidents import Decision, Event, Incident


class Part(StrEnum):
    """Use of a run's wall time; the parts of a run add up to its wall time."""

    PRODUCTIVE = "productive"
    """Steps whose result still counts, without the delay that slow ranks added."""
    STRAGGLER = "straggler"
    """Delay that slow ranks added to such steps, while the straggler detector reported one."""
    REDONE = "redone"
    """Steps whose result was lost and that were, or have to be, done again; and second runs of a step in place."""
    SAVE_STALL = "save_stall"
    """Training waited for a save."""
    DETECTION = "detection"
    """From a fault until its detection, where the fault's time is known."""
    RESTART = "restart"
    """From the detection of a fault until new workers could be started, or until the processes were back in the script.
    """
    RENDEZVOUS = "rendezvous"
    """Nodes meet and start workers."""
    LOAD = "load"
    """A checkpoint is loaded and verified."""
    START_UP = "start_up"
    """Workers run but do not train: imports, model, first compilation; a last save, the exit. Before that, the start of
    the agent that joined first."""
    IDLE = "idle"
    """The job waits for missing nodes."""
    QUEUED = "queued"
    """No job of the run was running: it waited for a scheduler, or for a person."""
    UNOBSERVED = "unobserved"
    """Workers ran a script that reports no steps, so that the use of the time is not known."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A period of the run's wall time; segments follow one another without gap or overlap."""

    start_s: float
    end_s: float
    part: Part
    job: str = ""
    cycle: int | None = None
    incident: int | None = None
    """Index in :attr:`Ledger.incidents` of its cause."""
    straggler_s: float = 0.0
    """The part of a productive segment that slow ranks added; counts as :attr:`Part.STRAGGLER`."""


class JobSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    job: str
    start_s: float
    end_s: float
    exit_code: int | None = None
    """``None`` = it runs, or its end is not in the journal."""
    reason: str = ""
    command: tuple[str, ...] = ()
    launcher: str = ""
    """Launcher of its workers, as reported by their sessions; empty = not known."""
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
    """When all ranks had begun their first step; ``None`` = they never did, or do not report it."""
    world_size: int = 0
    from_iteration: int | None = None
    """Optimizer steps done when it began to train."""
    to_iteration: int | None = None
    """The last iteration that any of its ranks finished."""
    nodes: tuple[NodeSpan, ...] = ()
    num_in_process: int = 0
    """Number of in-process restarts."""
    reason: str = ""


class IncidentCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incident that caused a decision, and its cost."""

    index: int
    """Index in :attr:`Ledger.incidents`."""
    kind: str
    """As in :class:`outlast.incidents.IncidentKind`; ``preempted`` for a requested shutdown."""
    text: str
    """One line: who, what, where."""
    recovery_level: str
    """Name of the recovery level in lower case; empty = no decision."""
    reason: str = ""
    job: str
    cycle: int
    node: str = ""
    rank: int | None = None
    iteration: int | None = None
    """The last iteration that any rank had finished when it happened."""
    at_s: float
    """When it was detected."""
    since_s: float | None = None
    """When the fault happened, where known."""
    recovered_s: float | None = None
    """When every rank had begun a step again; ``None`` = that has not happened."""
    resumed_iteration: int | None = None
    """Where training continued."""
    lost_iterations: int | None = 0
    """Finished iterations that had to be done again; ``None`` = not known, as the script has no session."""
    parts: dict[str, float] = {}
    """Name of a part to its seconds that this incident caused."""
    cost_s: float = 0.0
    """The sum of ``parts``."""
    simulated: str = ""
    """Label of the injected fault that caused it; empty = none, as far as known."""
    fault: Event | None = None
    """The event of that fault."""
    incident: Incident | None = None
    decision: Decision | None = None
    evidence: dict[str, Any] = {}
    """The incident's evidence, and from the journal: ``exited`` (the end of its worker)."""

    @property
    def detected_after_s(self) -> float | None:
        """Seconds from the fault to its detection, where the fault's time is known."""
        return None if self.since_s is None else max(0.0, self.at_s - self.since_s)

    @property
    def recovered_after_s(self) -> float | None:
        """Seconds from the detection until every rank had begun a step again; ``None`` = that has not happened."""
        return None if self.recovered_s is None else max(0.0, self.recovered_s - self.at_s)


class Warned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An incident that ended no cycle: a rejected copy, a failed save, a slow rank."""

    kind: str
    text: str
    at_s: float
    job: str
    cycle: int | None = None
    node: str = ""
    rank: int | None = None
    iteration: int | None = None
    num_reports: int = 1
    """Number of ranks that reported it."""
    evidence: dict[str, Any] = {}


class SaveSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One save of all ranks."""

    job: str
    cycle: int | None
    iteration: int
    at_s: float
    """When training continued."""
    stall_s: float = 0.0
    """The longest wait of any rank."""
    tiers: tuple[str, ...] = ()
    """Tiers that it was committed to, the nearest first; empty = none, as far as known."""
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
    """When the last rank had loaded."""
    load_s: float
    """On the slowest rank."""
    tiers: dict[str, int] = {}
    """Tier to the number of ranks that loaded from it."""
    bytes_read: dict[str, int] = {}
    """Tier to the bytes that all ranks read there."""
    rejected: tuple[str, ...] = ()
    """Copies that were skipped, one line each."""


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
    """Share of a step that slow ranks added compared with the median rank, from 0 to below 1."""
    why_none: str = ""


class StepSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Training progress at one moment, as a rank reported it."""

    at_s: float
    iteration: int
    step_s: float | None = None
    """Mean seconds of a step since the sample before."""
    loss: float | None = None
    """The last validated loss of that rank."""


class NodeClock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Alignment of a node's wall clock."""

    job: str
    node: str
    offset_s: float
    """Seconds by which its clock was ahead of the reference node's; subtracted."""
    num_anchors: int = 0
    """Events by which it was aligned, each seen by another node, too; 0 = none: its clock was trusted."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the incidents of a run; names of kinds, or of recovery levels, to seconds."""

    num_incidents: dict[str, int]
    """Kind to count; ``all`` excludes requested shutdowns."""
    mtbf_s: dict[str, float]
    """Kind, or ``all``, to the mean time between failures: the time in which jobs ran, divided by the number of
    incidents."""
    mttd_s: dict[str, float]
    """Kind, or ``all``, to the mean time to detect, over those whose fault's time is known."""
    mttr_s: dict[str, float]
    """Recovery level, or ``all``, to the mean time from the detection until every rank trained again."""
