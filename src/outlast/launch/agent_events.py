"""What wakes an agent beside its workers, and what it writes to the journal.

It is woken by its mailbox, with the events of threads and signal handlers, and by timers. What the coordinator sends
arrives in the same mailbox: see :mod:`outlast.launch.protocol`.

:class:`NodeJournal` writes the node's events, and makes the incidents that are no worker's own.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outlast import clock, env
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch.options import RunOptions
from outlast.launch.protocol import Start, Stop
from outlast.launch.workers import WorkerProcess
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.runtime.zygote import Exited
from outlast.version import __version__
from outlast.wording import name_ranks

if TYPE_CHECKING:
    from outlast.monitor.watchdog import HangReport


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal requests this agent to shut down."""

    signal: int


@dataclass(frozen=True, slots=True)
class WriterDied:
    """The node's checkpoint writer died by itself; its owner starts another."""

    summary: str


@dataclass(frozen=True, slots=True)
class HangSeen:
    """The watchdog saw ranks of a cycle exceed a timeout."""

    cycle: int
    report: HangReport


@dataclass(frozen=True, slots=True)
class WatchdogFailed:
    """The thread that watches the workers ended on an error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class NodeFit:
    """No health check is in this node's way any more: it may join, and workers that waited for one may start."""


@dataclass(frozen=True, slots=True)
class AgentStops:
    """This agent ends: its node failed its health check before it joined, or another job has its run directory."""

    stop: Stop


class Mailbox(Generic[T]):
    """An unbounded queue whose owner can wait for it with ``select``.

    Thread: :meth:`put` any, and signal handlers; the rest the owner only.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor that is readable while something is in the box."""
        return self._fd

    def put(self, item: T) -> None:
        """Put an item; never blocks."""
        self._queue.put(item)
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def take_all(self) -> list[T]:
        """Return what is in the box, oldest first; never blocks."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        items: list[T] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items

    def close(self) -> None:
        """Free the descriptor; items put later are kept nowhere."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Timers:
    """Named deadlines of one loop. Thread: the loop's."""

    def __init__(self) -> None:
        self._deadlines: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call an action in ``seconds``; it replaces the one that the name stood for."""
        self._deadlines[name] = (clock.now_s() + seconds, action)

    def cancel(self, name: str) -> None:
        """Drop a timer, if it is set."""
        self._deadlines.pop(name, None)

    def is_set(self, name: str) -> bool:
        """Return whether a timer is set."""
        return name in self._deadlines

    def until_next_s(self) -> float | None:
        """Return the seconds until the next one; ``None`` = there is none."""
        next_s = min((at_s for at_s, _ in self._deadlines.values()), default=None)
        return None if next_s is None else max(0.0, next_s - clock.now_s())

    def fire(self) -> None:
        """Call the actions that are due."""
        now_s = clock.now_s()
        for name in [name for name, (at_s, _) in self._deadlines.items() if now_s >= at_s]:
            at_s, action = self._deadlines.get(name, (now_s + 1, None))
            if action is not None and now_s >= at_s:  # an earlier action may have dropped it, or set it anew
                del self._deadlines[name]
                action()


log = logging.getLogger(__name__)


class NodeJournal:
    """Write for one node.

    Args:
        options: The launcher's options.
        node: Name of the node.
        began_s: When the agent began, by the monotonic clock.

    Thread: the agent's main thread.
    """

    def __init__(self, options: RunOptions, node: str, *, began_s: float) -> None:
        self._options, self._node, self._began_s = options, node, began_s
        self._journal: Journal | None = None
        self._cycle: int | None = None
        self.job = ""
        """Name of the job, once it is known; nothing is written before."""

    def open(self, job: str, command: tuple[str, ...], nproc: int, endpoints: Sequence[str]) -> None:
        """Begin with a job, which has admitted this agent; the journal of the last one is closed."""
        options = self._options
        self.close()
        self.job, self._cycle = job, None
        self._journal = Journal(options.run_dir, run_id=options.run_id, job=job, node=self._node, proc="agent")
        self._journal.write(
            EventKind.JOB_STARTED,
            command=list(command),
            num_nodes=options.num_slots,
            max_nodes=options.max_nodes,
            min_nodes=options.fault_tolerance.min_nodes,
            nproc_per_node=nproc,
            endpoints=list(endpoints),
            limits={
                "max_restarts": options.torchrun.max_restarts,
                "max_restarts_total": options.torchrun.max_restarts_total,
                "max_no_progress_cycles": options.fault_tolerance.max_no_progress_cycles,
            },
            join_timeout_s=options.join_timeout_s,
            version=__version__,
            start_up_s=round(clock.now_s() - self._began_s, 3),
            **describe_self(),
        )
        if (started_ns := env.scheduler_start_ns()) is not None:
            self._journal.write(EventKind.QUEUED, started_wall_ns=started_ns, scheduler="slurm")

    def begin_cycle(self, number: int) -> None:
        """Note which cycle what follows belongs to."""
        self._cycle = number

    def write_started(self, start: Start, workers: Sequence[WorkerProcess], *, gpu_memory_wait_s: float) -> None:
        """Write that all workers of a cycle run."""
        waited: dict[str, Any] = {"gpu_memory_wait_s": round(gpu_memory_wait_s, 3)} if gpu_memory_wait_s else {}
        self.write(
            EventKind.CYCLE_STARTED,
            node_rank=start.node_rank,
            ranks=[worker.global_rank for worker in workers],
            pids=[worker.pid for worker in workers],
            world_size=start.world_size,
            master=f"{start.master_addr}:{start.master_port}",
            **waited,
        )
        log.info(
            "cycle %d: %s %s here%s",
            start.cycle,
            name_ranks(start.base_rank, len(workers), start.world_size),
            "runs" if len(workers) == 1 else "run",
            f" (node rank {start.node_rank} of {start.num_nodes})" if start.num_nodes > 1 else "",
        )

    def write_exited(self, worker: WorkerProcess, news: Exited, *, killed_by_us: bool) -> None:
        """Write that a worker ended."""
        rank, pid, code = worker.global_rank, news.pid, news.exit_code
        lost = {"spared": True} if worker.lost is not None else {}
        self.write(EventKind.WORKER_EXITED, rank=rank, pid=pid, exit_code=code, killed_by_us=killed_by_us, **lost)

    def write_incident(self, incident: Incident) -> None:
        """Write an incident."""
        self.write(EventKind.INCIDENT, rank=incident.rank, iteration=incident.iteration, incident=incident)

    def write(self, kind: EventKind, *, rank: int | None = None, iteration: int | None = None, **data: object) -> None:
        """Write an event of the newest cycle."""
        if self._journal is not None:
            self._journal.write(kind, cycle=self._cycle, rank=rank, iteration=iteration, **data)

    def incident(
        self, kind: IncidentKind, summary: str, *, cycle: int | None = None, exit_code: int | None = None
    ) -> Incident:
        """Return an incident of the node itself, by default one of the newest cycle."""
        return Incident(
            kind=kind,
            job=self.job,
            cycle=cycle if cycle is not None else self._cycle or 0,
            node=self._node,
            exit_code=exit_code,
            evidence={"summary": summary},
        )

    def close(self) -> None:
        """End the journal."""
        if self._journal is not None:
            self._journal.close()
