"""The crew: the workers of one node, those of the newest cycle, and all that it takes to start the next ones."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from outlast import clock
from outlast.checkpoint.writer_client import WriterProcess
from outlast.launch import protocol as m
from outlast.launch.agent_events import Broken, HangSeen, Timers
from outlast.launch.cycle import Cycle
from outlast.launch.options import RunOptions
from outlast.launch.preparation import prepare, torch_workers
from outlast.launch.worker_process import WorkerProcess
from outlast.launch.workers import Workers
from outlast.runtime.zygote import Exited, Started

__all__ = ["Crew"]


class Crew:
    """Start, know and end this node's workers.

    Args:
        worker_group: torch's view of them, kept up to date.
        options: The launcher's options.
        command: Kind and argv of a worker.
        base_env: Environment that every worker gets.
        logs_specs: Where output goes.
        workers: The hold on their processes; closed with this.
        writer: The node's checkpoint writer, which outlives the workers; closed with this. ``None`` = none could be
            started: each worker starts its own.
        node: Name of this node.

    Thread: the agent's main thread.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        *,
        options: RunOptions,
        command: tuple[str, tuple[str, ...]],
        base_env: dict[str, str],
        logs_specs: LogsSpecs,
        workers: Workers,
        writer: WriterProcess | None,
        node: str,
    ) -> None:
        self.command, self.workers = command, workers
        self.cycle: Cycle | None = None
        """The newest cycle, also after its end."""
        self.failures: dict[int, ProcessFailure] = {}
        """Workers that failed by themselves in it, by global rank."""
        self._worker_group, self._options, self._node = worker_group, options, node
        self._base_env, self._logs_specs, self._writer = base_env, logs_specs, writer

    @property
    def num_workers(self) -> int:
        """Workers of a cycle on this node."""
        return self._worker_group.spec.local_world_size

    @property
    def on_duty(self) -> Cycle | None:
        """The newest cycle, unless it is over."""
        return self.cycle if self.cycle is not None and not self.cycle.over else None

    def prepare(self, start: m.Start, job: str) -> None:
        """Lay out the next cycle.

        Raises:
            OSError: A file of it cannot be made.
            OutlastError: Its board cannot be made.
        """
        spec = self._worker_group.spec
        self.cycle = prepare(
            start,
            spec=spec,
            options=self._options,
            job=job,
            node=self._node,
            base_env=self._base_env,
            logs_specs=self._logs_specs,
            command=self.command,
            writer=self._writer_address(),
        )
        self.failures = {}
        self._worker_group.workers = torch_workers(start, spec)
        self._worker_group.group_rank = start.node_rank  # type: ignore[assignment]
        self._worker_group.group_world_size = start.num_nodes  # type: ignore[assignment]

    def start(self, put: Callable[[object], None]) -> None:
        """Start the workers that were prepared, and watch them.

        Args:
            put: Takes the watchdog's news, from its thread.

        Raises:
            OutlastError: They cannot be started.
        """
        cycle = self.cycle
        assert cycle is not None
        self.workers.start(cycle)
        cycle.watch(
            on_hang=lambda report: put(HangSeen(cycle.number, report)),
            on_error=lambda error: put(Broken("the watchdog", error)),
        )
        self._worker_group.state = WorkerState.HEALTHY

    def note_started(self, news: Started) -> Cycle | None:
        """Note that a worker runs; return its cycle once they all do.

        One that started while its cycle was being ended is passed over: it is killed with the rest.
        """
        cycle = self.on_duty
        worker = cycle.workers.get(news.key) if cycle is not None else None
        if cycle is None or worker is None:
            return None
        worker.pid, worker.started_ns = news.pid, clock.now_ns()
        cycle.board.assign(worker.local_rank, pid=news.pid, global_rank=worker.global_rank, cycle=cycle.number)
        return cycle if all(other.pid for other in cycle.workers.values()) else None

    def note_failure(self, cycle: Cycle, worker: WorkerProcess, news: Exited) -> None:
        """Note that a worker failed by itself, for torch's report."""
        self.failures[worker.global_rank] = ProcessFailure(
            local_rank=worker.local_rank,
            pid=news.pid,
            exitcode=news.exit_code,
            error_file=cycle.logs.destinations.error_files.get(worker.local_rank) or "",
        )

    def dismiss(self, cycle: Cycle, timers: Timers) -> None:
        """Have the workers of a cycle ended, at once or after their time of grace; nothing new starts before."""
        self.workers.expect_clear()
        if self._options.restart_grace_s > 0 and not cycle.all_ended:
            self.workers.terminate()
            timers.set("grace", self._options.restart_grace_s, self.workers.clear)
        else:
            self.workers.clear()
        cycle.close()

    def close(self) -> None:
        """Free everything; whatever worker is left is killed."""
        if self.cycle is not None:
            self.cycle.close(wait_for_logs=True)
            self.cycle = None
        self.workers.close()
        if self._writer is not None:
            self._writer.close()

    def _writer_address(self) -> str:
        """Return the address of the checkpoint writer; empty when there is none, or it died too often."""
        try:
            return self._writer.address if self._writer is not None else ""
        except OSError:
            return ""
