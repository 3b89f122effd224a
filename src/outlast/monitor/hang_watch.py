"""The duty of a :class:`~outlast.monitor.RankMonitor` in the node's agent process: end the rank when it hangs.

Used without ``outlast run``: under ``torchrun``, ``srun`` or ``python``. The duty watches the rank's heartbeat memory;
when the rank hangs it writes the stacks and ends the rank, so that its launcher restarts it. See
:mod:`outlast.runtime.agent_process`. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import tempfile
from collections.abc import Sequence
from functools import partial

import msgspec

from outlast.config.launching import FaultToleranceConfig
from outlast.decoding import from_json
from outlast.monitor.examination import examine
from outlast.monitor.learned_timeouts import MERGE_S, LearnedTimeouts, enforceable, observe
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.deadlines import Observation, Timeouts
from outlast.policy.root_cause import Position, find_root_cause, is_hang_explained
from outlast.runtime.board import Board
from outlast.runtime.files import write_optional
from outlast.runtime.processes import end_process

log = logging.getLogger(__name__)


class HangWatchTask(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    rank: int
    node: str
    config: str
    """The fault tolerance settings in force, as JSON."""
    stacks_dir: str | None
    """Folder for the stacks of a hung worker; ``None``: a new temporary folder."""
    cycle: str = ""
    """Identifies job and cycle, for learned timeouts."""
    configured: str = "{}"
    """The settings without learned timeouts, as JSON."""
    learned_in: str | None = None
    """Folder of the learned timeouts; ``None``: none are learned."""
    counts_in: str | None = None
    """Folder of the counts of hangs at calculated timeouts; ``None``: they are not counted."""
    is_first: bool = True
    """Log the timeouts: one rank does it for the job, since all ranks have the same."""


class HangWatch:
    """End one worker when it hangs.

    Args:
        task: The task.
        board: The worker's heartbeat memory; this object owns it.
        worker: A pidfd: the pid may be another process by the time of the signal.
    """

    def __init__(self, task: HangWatchTask, board: Board, worker: int) -> None:
        self._task, self._board, self._worker = task, board, worker
        self._config = FaultToleranceConfig.from_json(task.config)
        configured = FaultToleranceConfig.from_json(task.configured)
        self._timeouts = Timeouts.of_rank(self._config, configured=configured, replaces_dead_ranks=False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def _enforceable(self) -> Timeouts | None:
        """Return the timeouts to enforce; ``None`` while they change: a message about the change follows."""
        text = self._board.timeouts(0)
        return (
            None
            if text is None
            else enforceable(self._timeouts, text, rank=self._task.rank, folder=self._task.counts_in)
        )

    def run(self, line: socket.socket) -> None:
        watchdog = Watchdog(
            self._board,
            self._enforceable() or self._timeouts,
            node=self._task.node,
            on_hang=self.end_worker,
            on_error=lambda _: os.eventfd_write(self._wake, 1),
            level=logging.INFO if self._task.is_first else logging.DEBUG,
        )
        watchdog.start()
        poll = select.poll()
        for watched in (self._worker, self._wake, line):
            poll.register(watched, select.POLLIN)
        while {fd for fd, _ in poll.poll()} == {line.fileno()} and line.recv(1):  # a byte: the timeouts have changed
            if (timeouts := self._enforceable()) is not None:
                watchdog.enforce(timeouts, f"calculated: {timeouts.describe()}")
        if watchdog.stop():
            self._board.close()
            os.close(self._wake)

    def end_worker(self, report: HangReport) -> None:
        folder = self._task.stacks_dir or tempfile.mkdtemp(prefix="outlast-stacks-")
        positions = examine(self._board, node=self._task.node, stacks_dir=folder, expired=report.expired)
        rank = report.expired[0].global_rank
        if positions:
            log.error("%s; stacks in %s", find_root_cause(positions).reason, folder)
        self._doubt_timeouts(report, positions)
        wanted = signal.Signals[self._config.rank_termination_signal]
        name = f"rank {rank} (pid {self._task.pid})"
        log.error("%s is ended with %s", name, wanted.name)
        end_process(self._worker, self._task.pid, wanted, grace_s=self._config.rank_termination_grace, name=name)

    def _doubt_timeouts(self, report: HangReport, positions: Sequence[Position]) -> None:
        """Record that timeouts were exceeded: a learned one may be too short, unless this rank's position explains it.

        A rank that waits in a collective waits for another one, which has its own duty.
        """
        is_explained = is_hang_explained(positions) or any(one.waits_in_collective for one in positions)
        late = [msgspec.structs.replace(one, is_explained=is_explained) for one in report.expired]
        folder, seen = self._task.learned_in, observe(report.states)
        if folder is None:  # hangs at timeouts that the script calculated are counted nevertheless
            late = [one for one in late if one.is_calculated and not one.is_explained]
            folder, seen = self._task.counts_in, Observation()
        if folder is None or not late:
            return
        config, cycle = FaultToleranceConfig.from_json(self._task.configured), self._task.cycle
        update = partial(LearnedTimeouts.update, folder, seen, cycle=cycle, config=config, faulted=late)
        write_optional("learned timeouts", folder, update, timeout_s=MERGE_S)


def run_duty(task: bytes, line: socket.socket, fds: list[int], pidfd: int) -> None:
    """Watch a worker's heartbeat memory; see :class:`~outlast.runtime.agent_process.AgentDuty`.

    Args:
        task: A :class:`HangWatchTask`, as JSON.
        line: The worker closes it to end the watch.
        fds: The worker's heartbeat memory.
        pidfd: Of the worker's process.
    """
    board = Board.open(f"/proc/self/fd/{fds[0]}")
    os.close(fds[0])
    try:
        HangWatch(from_json(task, HangWatchTask), board, pidfd).run(line)
    finally:
        os.close(pidfd)
