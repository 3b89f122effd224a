"""The side process: it watches a worker where no agent of ours does (``torchrun``, ``srun``, ``python``).

One per worker, started by its :class:`~outlast.monitor.RankMonitor`. It shares the worker's board, and
when the worker hangs it keeps its stacks and ends it, so that whoever launched it starts it again. It ends
with the worker, however that one ends, and imports no torch.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from outlast import env as environment
from outlast import logs
from outlast.clock import now_s
from outlast.config.launching import FaultToleranceConfig
from outlast.decoding import from_json
from outlast.monitor.examination import examine
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.causes import find_culprit
from outlast.policy.deadlines import Timeouts
from outlast.runtime.board import Board

__all__ = ["Task", "main", "start"]

log = logging.getLogger("outlast.monitor.side_process")

_GRACE_S = 10.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a side process is told, as JSON on its command line."""

    pid: int
    """The worker."""
    board_fd: int
    """The worker's board, inherited."""
    rank: int
    """The worker's global rank."""
    node: str
    config: str
    """The fault tolerance settings in force, as JSON."""
    stacks_dir: str | None
    """Where stacks of a hung worker go; ``None`` = a new folder for temporary files."""


def start(task: Task) -> subprocess.Popen[bytes]:
    """Start a side process for this worker.

    Raises:
        OSError: No process can be started.
    """
    variables = environment.environ()
    # The worker may have found outlast through its own sys.path.
    package_root = str(Path(__file__).resolve().parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, variables.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "outlast.monitor.side_process", msgspec.json.encode(task).decode()],
        stdin=subprocess.DEVNULL,
        pass_fds=[task.board_fd],
        env=variables,
        start_new_session=True,  # Ctrl-C is for the worker; this process ends with it
    )


class _Guard:
    """Ends one worker when it hangs."""

    def __init__(self, task: Task, worker: int) -> None:
        self._task = task
        self._worker = worker  # a pidfd: the pid may be another process by the time of the signal
        self._config = FaultToleranceConfig.from_json(task.config)
        self._failed = False
        self._board = Board.open(f"/proc/self/fd/{task.board_fd}")
        os.close(task.board_fd)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def run(self) -> int:
        """Watch until the worker is gone, and return this process's exit code."""
        watchdog = Watchdog(
            self._board,
            Timeouts.from_config(self._config),
            node=self._task.node,
            on_hang=self._on_hang,
            on_error=self._on_error,
        )
        watchdog.start()
        poll = select.poll()
        poll.register(self._worker, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.poll()
        watchdog.stop()
        return 1 if self._failed else 0

    def _on_hang(self, report: HangReport) -> None:
        folder = self._task.stacks_dir or tempfile.mkdtemp(prefix="outlast-stacks-")
        positions = examine(self._board, node=self._task.node, stacks_dir=folder, expired=report.expired)
        rank = report.expired[0].global_rank
        if positions:
            log.error("%s; stacks in %s", find_culprit(positions).reason, folder)
        wanted = signal.Signals[self._config.rank_termination_signal]
        log.error("rank %d (pid %d) is ended with %s", rank, self._task.pid, wanted.name)
        self._send(wanted)
        if wanted != signal.SIGKILL:
            self._send(signal.SIGCONT)  # a stopped process handles nothing else
            if not self._is_gone(_GRACE_S):
                log.error(
                    "rank %d (pid %d) still runs %g s after %s: sending SIGKILL",
                    *(rank, self._task.pid, _GRACE_S, wanted.name),
                )
                self._send(signal.SIGKILL)

    def _on_error(self, _: BaseException) -> None:
        self._failed = True
        os.eventfd_write(self._wake, 1)

    def _send(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._worker, number)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile

    def _is_gone(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._worker, select.POLLIN)
        until = now_s() + timeout_s
        while not (ready := poll.poll(max(0.0, until - now_s()) * 1e3)) and now_s() < until:
            pass
        return bool(ready)


def main(arguments: list[str] | None = None) -> int:
    """Run as a side process; return its exit code."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    task = from_json(text, Task)
    least = logging.INFO if task.rank == 0 else logging.WARNING  # all say alike which timeouts they enforce
    logs.configure(f"monitor rank {task.rank}", node=task.node, rank=task.rank, least=least)
    try:
        worker = os.pidfd_open(task.pid)
    except ProcessLookupError:
        return 0
    if os.getppid() != task.pid:  # the worker ended before the descriptor was there
        return 0
    return _Guard(task, worker).run()


if __name__ == "__main__":
    sys.exit(main())
