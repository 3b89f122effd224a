"""Ranks that still run after the first clean exit of their cycle: log their stacks, and decide when to end them.

Such a rank may export a model for hours, or hang while its interpreter shuts down. The agent checks them from a timer.
A thread takes the stacks, as py-spy reads the symbols of torch's libraries for seconds.
"""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from outlast import clock
from outlast.incidents import Incident, IncidentKind
from outlast.monitor import stacks
from outlast.policy.deadlines import ExitLimit, LateRank
from outlast.runtime.files import in_time, make_private_folder, open_private
from outlast.runtime.processes import process_state

if TYPE_CHECKING:
    from outlast.launch.cycle import Cycle
    from outlast.launch.workers import WorkerProcess

log = logging.getLogger(__name__)
REPORT_S = 30.0
"""A rank that still runs this long after the first clean exit, without a heartbeat since, is reported."""
_LOOK_S = 10.0
_ACTIVE_SHARE = 0.01
"""Processes below this share of one processor are idle: threads of NCCL and gloo poll now and then."""
_NATIVE_STACK_S, _PYTHON_STACK_S = 60.0, 5.0


class LingeringRanks:
    """Follow the ranks of a node that still run although a rank of their cycle exited with 0.

    Thread: the agent's main thread.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle, self._first_exit_ns = cycle, clock.now_ns()
        self._limit = ExitLimit.from_config(cycle.layers.config)
        self._used_s: dict[int, float] = {}
        self._active_ns: dict[int, int] = {}
        self._looked_ns = self._first_exit_ns
        self._report: threading.Thread | None = None
        self._sample()

    @property
    def look_s(self) -> float:
        """Seconds until the next call of :meth:`look`."""
        return min(_LOOK_S, (self._limit.seconds or math.inf) / 4)

    def look(self) -> Incident | None:
        """Report the ranks once; return the incident of a rank to end, after its stack was read."""
        self._sample()
        now_ns, late = clock.now_ns(), self._late()
        expired = self._limit.overdue(late, first_exit_ns=self._first_exit_ns, now_ns=now_ns)
        silent = [one for one in late if one.idle_s(self._first_exit_ns, now_ns, counts_processor=False) >= REPORT_S]
        if self._report is None and (silent or expired):
            self._report = self._begin_report([one.global_rank for one in silent or expired])
        if not expired or (self._report is not None and self._report.is_alive()):
            return None
        return self._describe(expired[0], now_ns)

    def _late(self) -> list[LateRank]:
        board = self._cycle.board
        return [
            LateRank(
                global_rank=worker.global_rank,
                last_heartbeat_ns=board.read(worker.local_rank).last_heartbeat_ns,
                last_active_ns=self._active_ns.get(worker.pid, 0),
            )
            for worker in self._running()
        ]

    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._cycle.workers.values() if worker.exit_code is None and worker.pid]

    def _sample(self) -> None:
        """Note which ranks have used a processor since the last call."""
        now_ns = clock.now_ns()
        least_s = _ACTIVE_SHARE * (now_ns - self._looked_ns) / 1e9
        for worker in self._running():
            used_s = _processor_time_s(worker.pid)
            if used_s - self._used_s.get(worker.pid, used_s) > least_s:
                self._active_ns[worker.pid] = now_ns
            self._used_s[worker.pid] = used_s
        self._looked_ns = now_ns

    def _begin_report(self, ranks: list[int]) -> threading.Thread:
        end = "no exit_timeout is in force, so the job waits for it"
        if self._limit.seconds is not None:
            end = f"it is ended {self._limit.seconds:g} s after that exit (exit_timeout)"
            if not self._limit.is_given:
                end = f"it is ended after {self._limit.seconds:g} s without any use of a processor"
                end += "; set exit_timeout to end a rank that uses one"
        pids = {worker.global_rank: worker.pid for worker in self._cycle.workers.values()}
        folder = self._cycle.options.run_dir / "stacks" / f"cycle-{self._cycle.number}"

        def report() -> None:
            for rank in ranks:
                path = folder / f"exit-rank-{rank}.txt"
                log.warning(
                    "rank %d still runs %.0f s after another rank exited with 0; %s; its stack: %s",
                    rank,
                    (clock.now_ns() - self._first_exit_ns) / 1e9,
                    end,
                    _keep_stack(pids[rank], path),
                )

        thread = threading.Thread(target=report, name="outlast-exit-stacks", daemon=True)
        thread.start()
        return thread

    def _describe(self, rank: LateRank, now_ns: int) -> Incident:
        worker = next(one for one in self._cycle.workers.values() if one.global_rank == rank.global_rank)
        after_s = (now_ns - self._first_exit_ns) / 1e9
        state = self._cycle.board.read(worker.local_rank)
        summary = f"rank {rank.global_rank} did not exit within {self._limit.seconds:g} s after another rank "
        summary += "exited with 0 (exit_timeout)"
        return Incident(
            kind=IncidentKind.WORKER_HUNG,
            job=self._cycle.job,
            cycle=self._cycle.number,
            node=self._cycle.node,
            rank=rank.global_rank,
            pid=worker.pid,
            iteration=state.iteration if state.reports_iteration else None,
            detected_after_s=round(after_s, 4),
            evidence={"summary": summary, "timeout_s": self._limit.seconds},
        )


def _processor_time_s(pid: int) -> float:
    """Return the processor time of a process and its descendants; 0 if it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0.0
    used_s = 0.0
    for one in family:
        try:
            times = one.cpu_times()
        except psutil.Error:
            continue
        used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


def _keep_stack(pid: int, path: Path) -> str:
    """Write a process's stack to a file, with native frames if py-spy can read them; return the path."""
    # py-spy does not read native frames of a stopped process, and may not be permitted to trace at all.
    text = stacks.py_spy(pid, native=True, timeout_s=_NATIVE_STACK_S) or stacks.py_spy(pid)
    text = text or stacks.dump(pid, timeout_s=_PYTHON_STACK_S)
    if not text:
        return f"it cannot be read (process state {process_state(pid)}; py-spy must be installed and permitted)"

    def keep() -> None:
        make_private_folder(path.parent.parent)
        make_private_folder(path.parent)
        with open(path, "w", opener=open_private) as file:
            file.write(text)

    try:
        in_time(path, keep)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)
        return text
    return str(path)
