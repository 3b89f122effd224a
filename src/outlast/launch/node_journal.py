"""The agent's journal of its node, and the incidents that belong to no worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outlast import clock, env
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch.options import RunOptions
from outlast.launch.protocol import Start
from outlast.launch.workers import WorkerProcess
from outlast.runtime.fork_server import Exited
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.version import __version__
from outlast.wording import name_ranks

log = logging.getLogger(__name__)


class NodeJournal:
    """Write the journal of one node. Thread: the agent's main thread."""

    def __init__(self, options: RunOptions, node: str, *, began_s: float) -> None:
        self._options, self._node, self._began_s = options, node, began_s
        self._journal: Journal | None = None
        self._cycle: int | None = None
        self.job = ""
        """Name of the job; empty: not yet known, and nothing is written."""

    def open(self, job: str, command: tuple[str, ...], nproc: int, endpoints: Sequence[str]) -> None:
        """Begin the journal of a job that has admitted this agent; the last job's journal is closed."""
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
        """Set the cycle of the events that follow."""
        self._cycle = number

    def write_started(self, start: Start, workers: Sequence[WorkerProcess], *, gpu_memory_wait_s: float) -> None:
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

    def write_exited(self, worker: WorkerProcess, exited: Exited, *, killed_by_us: bool) -> None:
        rank, pid, code = worker.global_rank, exited.pid, exited.exit_code
        lost = {"spared": True} if worker.lost is not None else {}
        self.write(EventKind.WORKER_EXITED, rank=rank, pid=pid, exit_code=code, killed_by_us=killed_by_us, **lost)

    def write_incident(self, incident: Incident) -> None:
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
        if self._journal is not None:
            self._journal.close()
