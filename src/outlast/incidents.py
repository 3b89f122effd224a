"""Incidents, decisions and journal events: one schema for everything that happened.

An *incident* is one observed problem; a *decision* is the recovery policy's decision; an *event* is one line of the
journal. All are plain msgspec structs, written as JSON, and carry facts, never live objects.
"""

from __future__ import annotations

import signal
from enum import IntEnum, StrEnum
from typing import Any

import msgspec

from outlast.decoding import convert

__all__ = ["CYCLE_ENDING", "Cause", "Decision", "Event", "EventKind", "Incident", "IncidentKind", "RecoveryLevel"]


class RecoveryLevel(IntEnum):
    """The recovery levels, cheapest first."""

    RERUN_STEP = 0
    """Run the step again in place."""
    RESTART_IN_PROCESS = 1
    """Rebuild the process groups in the same processes."""
    RESTART_WORKERS = 2
    """Start new worker processes on the same nodes."""
    REPLACE_NODE = 3
    """Move the slot of a faulty or lost node to a spare."""
    REQUEUE_JOB = 4
    """End the job so that the scheduler requeues it."""
    STOP = 5
    """Stop the job, with a diagnosis."""


class IncidentKind(StrEnum):
    """The kind of an incident."""

    WORKER_DIED = "worker_died"
    """A worker was ended by a signal."""
    WORKER_FAILED = "worker_failed"
    """A worker exited with an exit code other than 0."""
    WORKER_HUNG = "worker_hung"
    """A worker sent no heartbeat within a timeout."""
    NODE_LOST = "node_lost"
    """The agent of a node exited or cannot be reached any more."""
    CANNOT_START = "cannot_start"
    """A node could not start its workers."""
    NODE_UNHEALTHY = "node_unhealthy"
    """A node failed its health check; the evidence holds the checks that failed."""
    WRONG_ANSWER = "wrong_answer"
    """A rank returned a wrong result in the check that all ranks of the process group respond."""
    SAVE_FAILED = "save_failed"
    """A checkpoint could not be made durable; the earlier ones stay."""
    COPY_REJECTED = "copy_rejected"
    """A stored copy failed its verification and was skipped."""
    REPLICATION_FAILED = "replication_failed"
    """A partner node did not store a correct copy; checkpoints are committed without the copy until the partner
    recovers."""
    WRITER_LOST = "writer_lost"
    """The checkpoint writer process of a node died; another one replaces it, with empty memory."""
    COPY_UNTRUSTED = "copy_untrusted"
    """A copy led to invalid results soon after it was loaded, or each load of the copy was followed by the same
    failure; the copy and the checkpoints based on it are not loaded again."""
    INVALID_RESULT = "invalid_result"
    """A result of a step was rejected; the evidence holds the diagnosis."""
    STRAGGLER = "straggler"
    """A rank is slower than the others, or than it was, for several consecutive windows; the evidence lists the slow
    operations."""


CYCLE_ENDING = frozenset(
    {
        IncidentKind.WORKER_DIED,
        IncidentKind.WORKER_FAILED,
        IncidentKind.WORKER_HUNG,
        IncidentKind.NODE_LOST,
        IncidentKind.CANNOT_START,
        IncidentKind.NODE_UNHEALTHY,
    }
)
"""Incidents that end a cycle or prevent its start: one of them is the cause, the others follow from it."""


class Cause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a worker ended, as the worker recorded: the last exception, a fatal signal, or an exit."""

    type: str
    """The exception's type, with its module unless builtin; ``SystemExit`` for an exit with a code or text, ``fatal
    signal`` for a signal caught by ``faulthandler``."""
    bases: tuple[str, ...] = ()
    """Names of the type's base classes, nearest first."""
    text: str = ""
    """The exception's text, in one line."""
    frame: str = ""
    """The innermost line of the user's code, such as ``train.py:29 in next_batch``; empty = not known."""
    mono_ns: int = 0
    """Time of the raise, or of the catch at the outermost level, on the node's monotonic clock; 0 = not known."""
    is_usage_error: bool = False
    """A command line parser refused the script's arguments."""

    def describe(self) -> str:
        """Return the last line of a traceback, followed by the frame."""
        line = self.type if not self.text else f"{self.type}: {self.text}"
        if self.type in ("SystemExit", "fatal signal"):
            line = self.text or self.type
        return f"{line} ({self.frame})" if self.frame else line


class Incident(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One observed problem: kind, rank or node, position, evidence."""

    kind: IncidentKind
    job: str = ""
    cycle: int = 0
    node: str = ""
    rank: int | None = None
    """Global rank; ``None`` = a whole node is concerned or, without a node, the rank is not known."""
    pid: int | None = None
    section: str | None = None
    """Path of the open sections, outermost first, joined by ``/``."""
    iteration: int | None = None
    exit_code: int | None = None
    """Exit code of the process; negative = the number of the signal that ended the process."""
    detected_after_s: float | None = None
    """Seconds from the cause to its detection, if the time of the cause is known."""
    evidence: dict[str, Any] = {}
    """Facts for the reader: the stack line, the last heartbeat, the error's text. The worker recorded ``cause`` (a
    :class:`Cause`) and ``output`` (its last printed lines); ``file`` is the path of the complete record."""

    @property
    def cause(self) -> Cause | None:
        """The worker's record of its end; ``None`` = no readable record."""
        try:
            return convert(self.evidence["cause"], Cause)
        except (KeyError, msgspec.ValidationError):
            return None

    def describe(self) -> str:
        """Return one line for people; a known cause comes first."""
        if (cause := self.cause) is not None and self.rank is not None:
            return self._describe_cause(cause)
        unknown = {IncidentKind.WORKER_HUNG: "the group of ranks", IncidentKind.NODE_LOST: "a node"}
        who = f"node {self.node}" if self.node else unknown.get(self.kind, "the job")
        if self.rank is not None:
            who = f"rank {self.rank} on node {self.node}"
        if self.pid is not None:
            who += f" (pid {self.pid})"
        code = self.exit_code
        what = {
            IncidentKind.WORKER_DIED: f"was ended by {_signal_name(code)}",
            IncidentKind.WORKER_FAILED: "failed" + ("" if code is None else f" with exit code {code}"),
            IncidentKind.WORKER_HUNG: "hangs",
            IncidentKind.NODE_LOST: "is lost",
            IncidentKind.CANNOT_START: "could not start its workers",
            IncidentKind.NODE_UNHEALTHY: "is unhealthy",
            IncidentKind.WRONG_ANSWER: "returned a wrong result in the check of the process group",
            IncidentKind.SAVE_FAILED: "could not save",
            IncidentKind.COPY_REJECTED: "rejected a stored copy",
            IncidentKind.REPLICATION_FAILED: "could not copy its shard to another node",
            IncidentKind.WRITER_LOST: "lost its checkpoint writer",
            IncidentKind.COPY_UNTRUSTED: "loaded a copy that led to invalid results",
            IncidentKind.INVALID_RESULT: "computed an invalid result",
            IncidentKind.STRAGGLER: "is slow",
        }[self.kind]
        where = f" in section {self.section!r}" if self.section else ""
        when = f" at iteration {self.iteration}" if self.iteration is not None else ""
        text = self.evidence.get("summary")
        return f"{who} {what}{where}{when}" + (f": {text}" if text else "")

    def _describe_cause(self, cause: Cause) -> str:
        ended = self.kind == IncidentKind.WORKER_DIED
        what = f"was ended by {_signal_name(self.exit_code)}" if ended else "failed"
        if cause.type == "SystemExit" and self.exit_code is not None:
            what = f"failed with exit code {self.exit_code}"
        where = [f"node {self.node}"] if self.node else []
        where += [f"pid {self.pid}"] if self.pid is not None else []
        where += [f"section {self.section!r}"] if self.section else []
        where += [f"iteration {self.iteration}"] if self.iteration is not None else []
        return f"rank {self.rank} {what}: {cause.describe()} [{', '.join(where)}]"


def _signal_name(exit_code: int | None) -> str:
    try:
        return signal.Signals(-(exit_code or 0)).name
    except ValueError:
        return f"signal {-(exit_code or 0)}"


class Decision(msgspec.Struct, rename={"recovery_level": "rung"}, frozen=True, kw_only=True, omit_defaults=True):
    """The recovery policy's decision at the end of a cycle, with the reason."""

    recovery_level: RecoveryLevel
    reason: str
    """One line for people."""
    exit_code: int | None = None
    """The job's exit code if ``recovery_level`` is ``STOP`` (0: finished) or ``REQUEUE_JOB``; else ``None``."""
    quarantine: tuple[str, ...] = ()
    """Nodes that get no slot in the rest of this job."""
    hold_back: tuple[str, ...] = ()
    """Nodes that get no slot in the next cycle, because the suspect step is replayed elsewhere."""
    replay: dict[str, Any] | None = None
    """The steps that the next cycle replays first: the fields of :class:`outlast.policy.rerun.Replay`."""
    delay_s: float = 0.0
    """Seconds until the next cycle starts, after repeated failures without progress."""


class EventKind(StrEnum):
    """Names of the journal's events; the text under each gives the writer and the content of ``data``."""

    JOB_STARTED = "job_started"
    """Agent: ``command``, ``num_nodes``, ``max_nodes``, ``min_nodes``, ``nproc_per_node``, ``endpoints`` (possible
    addresses of the coordinator), ``limits`` (``max_restarts``, ``max_restarts_total``, ``max_no_progress_cycles``),
    ``join_timeout_s``, ``version``, ``start_up_s`` (seconds from the agent's start until it found the coordinator,
    including imports and health checks); the agent's process: ``pid``, ``pid_started`` (its start in clock ticks since
    the machine's boot), ``host``, ``machine`` (identifies the boot and the process namespace in which the pid is
    valid)."""
    NODE_JOINED = "node_joined"
    """Coordinator: ``name``, ``spare``."""
    QUEUED = "queued"
    """Agent of a scheduler's job, right after ``job_started``: ``started_wall_ns`` (nanoseconds since the epoch when
    the scheduler started the job; the job was queued until then), ``scheduler``."""
    FORMING = "forming"
    """Coordinator: ``missing``, the number of slots without a node, when some are missing, and 0 when all are
    filled."""
    CYCLE_STARTED = "cycle_started"
    """Agent, once its workers run: ``node_rank``, ``ranks``, ``pids``, ``world_size``, ``master``; on nodes with GPUs
    ``gpu_memory_wait_s`` (duration of the wait until the previous workers' memory was released)."""
    WORKER_EXITED = "worker_exited"
    """Agent: ``pid``, ``exit_code``, ``killed_by_us``; ``spared`` (the other ranks continue without it, in process)."""
    INCIDENT = "incident"
    """The process that detected it: ``incident`` (an ``Incident``); a worker that decided on it: also ``verdict``."""
    DECISION = "verdict"
    """Coordinator: ``verdict`` (a ``Decision``) and the ``incident`` decided on."""
    WRITER_ENDED = "writer_ended"
    """Agent: the checkpoint writer died, or did not respond and was replaced: ``summary``."""
    EVENTS_LOST = "events_lost"
    """The process that lost them: ``num`` events before this one could not be written: the disk was full, not
    available, or did not respond."""
    CYCLE_ENDED = "cycle_ended"
    """Agent: ``reason``, ``iterations`` (global rank -> last iteration in the heartbeat memory), ``stop_s``."""
    JOB_ENDED = "job_ended"
    """Agent: ``exit_code``, ``reason``."""
    SESSION_STARTED = "session_started"
    """Worker: ``world_size``, ``launcher``, ``directory`` and ``local_directory`` (of the checkpoints, if set),
    ``max_no_progress_cycles`` (if given), ``version``; its process as in ``job_started``: ``pid``, ``pid_started``,
    ``host``, ``machine``."""
    RESTORED = "restored"
    """Worker: ``generation``, ``tier``, ``rejected`` (list of texts), ``load_s``; the envelope has
    ``iteration``."""
    RESTARTED_IN_PROCESS = "restarted_in_process"
    """Worker: all ranks run the wrapped function again: ``restart_iteration``, ``faults`` (``rank``, ``kind``,
    ``summary``), ``active_world_size``, ``replaced`` (the active ranks that spares took over), ``duration_s``."""
    STEPS_STARTED = "steps_started"
    """Worker: the first step of a cycle, or of a call in the same processes, begins; the envelope has the number of
    completed steps; ``total`` (number of steps of the complete run, if known)."""
    PROGRESS = "progress"
    """Worker: written for the first finished iteration of a cycle, then at most every few seconds: ``step_s`` (mean
    seconds of a step since the previous event), ``loss`` (the newest validated one, if there is one)."""
    SAVE_SCHEDULED = "save_scheduled"
    """Worker: ``stall_s``."""
    SAVE_COMMITTED = "save_committed"
    """Worker: ``generation``, ``duration_s``, ``num_bytes``."""
    DETERMINISM_REPORT = "determinism_report"
    """Worker: ``report``: for each validated value how often, and by how much, two runs of a step differed."""
    ACTORS_RECOVERED = "actors_recovered"
    """Driver of an actor group: ``report``: the lost actors, the evidence, the actors that were kept, the durations."""
    STRAGGLER_REPORT = "straggler_report"
    """Rank 0: ``named`` (ranks), ``metrics`` (least, median and largest scores), ``scores`` (relative scores of all
    ranks, in their order, rounded; ``null`` = none), ``why_nobody``, ``notes``, ``machines``, ``processing_s``."""
    FAULT_SIMULATED = "fault_simulated"
    """The process that injects the fault: ``fault``, ``target``. For a fault plan also ``fault_id``, ``device``, and
    for a changed number ``tensor``, ``element``, ``bit``, ``before``, ``after``."""
    NOTICE = "notice"
    """Worker or agent: shutdown requested; ``signal``, if it was one; worker: ``source``, ``reason``, ``deadline_s``
    (seconds until the process is ended). Driver of a group of actors: Ray drains a node; the same, and ``ray_node``."""
    SESSION_ENDED = "session_ended"
    """Worker: ``exit_code``."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the journal."""

    kind: EventKind
    time: str = ""
    """``wall_ns`` for people: ISO 8601 in UTC; empty in journals of earlier versions."""
    wall_ns: int
    """Nanoseconds since the epoch, to align nodes for a reader."""
    mono_ns: int
    """The node's monotonic clock, for durations within a node."""
    run_id: str
    job: str
    node: str
    proc: str
    """``agent``, ``coordinator``, ``monitor``, ``rank-<global rank>``, ``inprocess-<initial rank>``,
    ``ray-train-watch``, ``chaos``."""
    cycle: int | None = None
    rank: int | None = None
    iteration: int | None = None
    data: dict[str, Any] = {}
