"""The agent as torch knows it: an elastic agent, so that torch's options, results and error reports work with it.

What it does on its node is :mod:`outlast.launch.node_agent`'s.
"""

from __future__ import annotations

import signal

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs

from outlast.checkpoint.writer_client import WriterProcess
from outlast.launch import protocol as m
from outlast.launch.coordinator_client import CoordinatorClient
from outlast.launch.crew import Crew
from outlast.launch.node_agent import NodeAgent
from outlast.launch.node_health import Checkups
from outlast.launch.options import RunOptions
from outlast.launch.workers import Workers
from outlast.runtime.mailbox import Mailbox

__all__ = ["Agent"]


class Agent(SimpleElasticAgent):
    """Run workers under the coordinator's word.

    Args:
        spec: torch's description of the workers.
        options: The launcher's options.
        command: Kind and argv of a worker.
        base_env: Environment that every worker gets.
        logs_specs: Where output goes.
        workers: This node's hold on its workers; the agent closes it.
        writer: The node's checkpoint writer, which outlives the workers; the agent closes it. ``None`` = none could be
            started: each worker starts its own.
        member: This node's membership; its link is not yet started.
        checkups: Looks at this node; the agent closes it. ``None`` = nothing is looked at.
        mailbox: Where the link and the signal handlers deliver.

    Thread: the main thread.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        options: RunOptions,
        command: tuple[str, tuple[str, ...]],
        base_env: dict[str, str],
        logs_specs: LogsSpecs,
        workers: Workers,
        writer: WriterProcess | None,
        member: CoordinatorClient,
        checkups: Checkups | None,
        mailbox: Mailbox[object],
    ) -> None:
        super().__init__(spec)
        self._crew = Crew(
            self._worker_group,
            options=options,
            command=command,
            base_env=base_env,
            logs_specs=logs_specs,
            workers=workers,
            writer=writer,
            node=member.node,
        )
        self._node_agent = NodeAgent(options, self._crew, member, checkups, mailbox)

    @property
    def stop(self) -> m.Stop:
        """How the job ended for this node."""
        return self._node_agent.stop

    @property
    def job(self) -> str:
        """Name of the job, once the coordinator told it."""
        return self._node_agent.job

    @property
    def is_host(self) -> bool:
        """Whether this process hosts the control store."""
        return self._node_agent.is_host

    # -- torch's interface -------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        self._node_agent.run()
        failures = self._crew.failures
        state = WorkerState.FAILED if failures and self.stop.exit_code else WorkerState.SUCCEEDED
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        returned = {} if state == WorkerState.FAILED else dict.fromkeys(ranks)
        return RunResult(state=state, return_values=returned, failures=failures)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        raise AssertionError("the agent starts workers by itself")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("the agent watches workers by itself")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._node_agent.close()
