"""Mending: what an agent does while its workers go on inside their processes, without a new cycle."""

from __future__ import annotations

import logging
from collections.abc import Callable

from outlast.launch import protocol as m
from outlast.launch.agent_events import Timers
from outlast.launch.coordinator_client import CoordinatorClient
from outlast.launch.cycle import Cycle
from outlast.launch.node_journal import NodeJournal
from outlast.launch.worker_process import WorkerProcess
from outlast.launch.workers import Workers

__all__ = ["Mending"]

log = logging.getLogger(__name__)
_WORD_S = 2.0
"""How long a worker's datagram may come after its words on the board, and its end after its peers saw it."""


class Mending:
    """Follow the workers' own restarts.

    Args:
        workers: The hold on their processes.
        member: Tells the coordinator.
        journal: This node's.
        timers: The agent's.
        is_running: Whether the agent's workers are to run.
        end_cycle: Ends a cycle whose workers did not get on: the cycle, what is known of it, and why.

    Thread: the agent's main thread.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        member: CoordinatorClient,
        journal: NodeJournal,
        timers: Timers,
        is_running: Callable[[], bool],
        end_cycle: Callable[[Cycle, m.CycleFacts, str], None],
    ) -> None:
        self._workers, self._member, self._journal, self._timers = workers, member, journal, timers
        self._is_running, self._end_cycle = is_running, end_cycle

    def look(self, cycle: Cycle, *, waits: bool = True) -> None:
        """Tell the coordinator of a restart inside the processes, if there was one."""
        if cycle.over:
            return
        mended = cycle.in_process.take_mended(waits=waits)
        cycle.look()
        if not self._is_running():
            return
        if mended is None:
            if cycle.in_process.owes_word:
                self._timers.set("in-process", _WORD_S, lambda: self.look(cycle, waits=False))
            return
        incident = cycle.describe_mended(mended)
        if incident.node == self._member.node and not cycle.has_lost(incident.rank):
            self._journal.write_incident(incident)
        log.warning("restart %d in process, after: %s", mended.iteration, incident.describe())
        self._member.report_restart(mended, incident, cycle)

    def go_on_without(self, worker: WorkerProcess, key: int, cycle: Cycle) -> None:
        """Leave a lost worker's replacement to its peers, for as long as that may take.

        Args:
            worker: The one that was lost.
            key: Its key in the zygote's messages.
            cycle: Its cycle.
        """
        assert worker.lost is not None
        self._workers.sweep(key)
        self._journal.write_incident(worker.lost)
        log.warning("%s; the other ranks recover in process", worker.lost.describe())
        if (patience_s := cycle.in_process.patience_s(worker)) is not None:
            self._timers.set(f"lost-{key}", patience_s, lambda: self._on_patience_over(worker, cycle))

    def _on_patience_over(self, worker: WorkerProcess, cycle: Cycle) -> None:
        if cycle.over or not self._is_running() or cycle.in_process.has_resumed(worker):
            return
        assert worker.lost is not None
        reason = f"{worker.lost.describe()}; the other ranks did not recover in process in time"
        log.warning("%s", reason)
        self._end_cycle(cycle, cycle.facts(worker.lost), reason)
