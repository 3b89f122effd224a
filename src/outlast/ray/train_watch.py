"""Monitors one machine's workers in a Ray Train run, and ends a worker that hangs.

A Ray actor without resources, separate from the workers, so that it detects workers that are stopped or hold the
interpreter lock. It outlives them and owns the machine's checkpoint writer, so that the newest checkpoint stays in
memory while workers are replaced. Ray Train treats an ended worker as dead and restarts the group.

When a timeout is exceeded, the first watch, the judge, gathers the positions of all machines' workers, identifies the
root cause and has that worker ended; Ray Train ends the others, which wait for it.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from outlast import clock, env, logs
from outlast.checkpoint.writer_client import WriterProcess
from outlast.config import FaultToleranceConfig
from outlast.incidents import EventKind, Incident
from outlast.launch.decisions import highest_committed, highest_durable, identify_root_cause
from outlast.launch.protocol import CycleFacts
from outlast.monitor.examination import examine
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.deadlines import Timeouts, expired
from outlast.policy.root_cause import Position
from outlast.ray.replies import ReplyFault, await_replies, describe_error
from outlast.runtime.board import Board
from outlast.runtime.journal import Journal
from outlast.runtime.processes import end_process, open_pidfd
from outlast.wording import count

log = logging.getLogger(__name__)

_ASK_S = 5.0
"""Limit for another machine's watch to report its workers' positions, which takes at most about two seconds."""


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    local_rank: int
    global_rank: int
    pid: int


class TrainWatch:
    """Monitors one machine's workers, attempt by attempt.

    Args:
        node: Name of the machine.
        config: Timeouts.
        run_id: Name of the run.
        job: Id of the run.
        run_dir: Directory of journal and stacks; ``None`` = no journal, and stacks in a temporary directory.
        keeps_writer: Whether a checkpoint writer is needed.

    Thread: any; Ray calls the methods from several.
    """

    def __init__(
        self, node: str, config: FaultToleranceConfig, *, run_id: str, job: str, run_dir: str | None, keeps_writer: bool
    ) -> None:
        logs.configure(f"watch {node}", node=node)
        self.node, self._config, self._run_dir = node, config, run_dir
        self._timeouts = Timeouts.from_config(config)
        self._journal = Journal(run_dir, run_id=run_id, job=job, node=node, proc="ray-train-watch")
        self._writer = WriterProcess(node=node) if keeps_writer else None
        self._lock = threading.Lock()
        self._attempt = -1
        self._board: Board | None = None
        self._watchdog: Watchdog | None = None
        self._workers: dict[int, tuple[int, int]] = {}  # global rank to pidfd, since pids may be reused, and pid
        self._peers: tuple[Any, ...] = ()
        self._judge: Any = None
        self._incident: Incident | None = None
        self._stacks_dir = ""

    def begin(self, attempt: int, workers: Sequence[WorkerPlace]) -> dict[str, str | None]:
        """Monitor the workers of a new attempt; return their variables for heartbeat memory and writer."""
        self.stop()
        with self._lock:
            self._attempt, self._incident = attempt, None
            self._journal.cycle = attempt
            self._stacks_dir = (
                "" if self._run_dir is None else os.path.join(self._run_dir, "stacks", f"cycle-{attempt}")
            )
            self._board = board = Board.create(num_ranks=max(worker.local_rank for worker in workers) + 1)
            for worker in workers:
                board.assign(worker.local_rank, pid=worker.pid, global_rank=worker.global_rank, cycle=attempt)
                try:
                    self._workers[worker.global_rank] = open_pidfd(worker.pid), worker.pid
                except ProcessLookupError:
                    log.warning("rank %d (pid %d) ended before it could be watched", worker.global_rank, worker.pid)
            self._watchdog = Watchdog(board, self._timeouts, node=self.node, on_hang=self._on_hang)
            self._watchdog.start()
            return {env.BOARD: board.path, env.WRITER: None if self._writer is None else self._writer.address}

    def meet(self, watches: Sequence[Any]) -> None:
        """Set the watches of this attempt's machines, including this one; the first is the judge."""
        here = ray.get_runtime_context().get_actor_id()
        self._peers = tuple(one for one in watches if one._actor_id.hex() != here)
        self._judge = None if watches[0]._actor_id.hex() == here else watches[0]

    def examine(self, attempt: int) -> list[Position]:
        """Return the positions of the machine's workers and write their stacks; empty if the attempt is over.

        Blocks: up to about a second.
        """
        with self._lock:
            board = self._board
            if board is None or attempt != self._attempt:
                return []
            self._stacks_dir = self._stacks_dir or tempfile.mkdtemp(prefix="outlast-stacks-")
            now_ns = clock.now_ns()
            late = [one for state in board.read_all() for one in expired(state, self._timeouts, now_ns)]
            return examine(board, node=self.node, stacks_dir=self._stacks_dir, expired=late)

    def judge(self, attempt: int, first: Incident) -> None:
        """Identify the root cause, once for each attempt, and have that worker ended.

        Blocks: up to some seconds if a machine does not respond.
        """
        with self._lock:
            if attempt != self._attempt or self._incident is not None:
                return
            self._incident = first  # claims the decision: later reports are of the same hang
        asked = [peer.examine.remote(attempt) for peer in self._peers]
        positions = self.examine(attempt)
        for answer in answers_of(asked, _ASK_S, "report what its workers do"):
            positions += answer
        if not positions:
            return
        with_stacks = {**first.evidence, "stacks": self._stacks_dir}
        incident = identify_root_cause(msgspec.structs.replace(first, evidence=with_stacks), positions)
        with self._lock:
            if attempt == self._attempt:
                self._incident = incident
        self._journal.write(
            EventKind.INCIDENT, cycle=attempt, rank=incident.rank, iteration=incident.iteration, incident=incident
        )
        log.error("%s; stacks in %s", incident.evidence["summary"], self._stacks_dir)
        # Without a root cause one worker is ended anyway, so that Ray Train restarts the group.
        by_rank: dict[int | None, Position] = {one.global_rank: one for one in positions}
        self._have_ended(attempt, by_rank.get(incident.rank) or by_rank.get(first.rank) or positions[0])

    def end_worker(self, attempt: int, rank: int) -> bool:
        """End a worker of this machine; return whether it is one. Blocks: up to the grace period, unless SIGKILL."""
        with self._lock:
            if attempt != self._attempt or rank not in self._workers:
                return False
            pidfd, pid = self._workers[rank]
            worker = os.dup(pidfd)
        try:
            wanted = signal.Signals[self._config.rank_termination_signal]
            log.error("rank %d is ended with %s, so that Ray Train restarts the group", rank, wanted.name)
            grace_s = self._config.rank_termination_grace
            end_process(worker, pid, wanted, grace_s=grace_s, name=f"rank {rank}")
        finally:
            os.close(worker)
        return True

    def facts(self) -> CycleFacts:
        with self._lock:
            states = self._board.read_all() if self._board is not None else []
            return CycleFacts(
                cycle=self._attempt,
                durable_iteration=highest_durable(states),
                committed_iteration=highest_committed(states),
                progress_known=any(state.reports_progress for state in states),
                incident=self._incident,
            )

    def stop(self) -> None:
        """Stop monitoring before the workers are ended. Idempotent."""
        with self._lock:
            watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()  # its thread may be in judge(), which takes the lock
        with self._lock:
            if self._board is not None:
                self._board.close()
                self._board = None
            for pidfd, _ in self._workers.values():
                os.close(pidfd)
            self._workers.clear()

    def close(self) -> None:
        """End the writer and stop monitoring. Idempotent. Blocks: up to 2 s."""
        self.stop()
        if self._writer is not None:
            self._writer.close()
        self._journal.close()

    # -- details -----------------------------------------------------------------------------------------------

    def _on_hang(self, report: HangReport) -> None:
        """Report to the judge; if it does not respond, judge here. Thread: the watchdog's."""
        attempt = self._attempt
        first = report.incident(job=self._journal.job, cycle=attempt, node=self.node)
        if self._judge is not None:
            try:
                timeout_s = 2 * (_ASK_S + self._config.rank_termination_grace)
                ray.get(self._judge.judge.remote(attempt, first), timeout=timeout_s)
            except ray.exceptions.RayError as error:
                log.warning(
                    "the monitor actor that decides for this run does not respond; the one on this node decides: %s",
                    describe_error(error),
                )
            else:
                return
        self.judge(attempt, first)

    def _have_ended(self, attempt: int, position: Position) -> None:
        if self.end_worker(attempt, position.global_rank):
            return
        asked = [peer.end_worker.remote(attempt, position.global_rank) for peer in self._peers]
        if not any(answers_of(asked, _ASK_S + self._config.rank_termination_grace, "end its worker")):
            log.error("rank %d (node %s) could not be ended", position.global_rank, position.node)


def answers_of(asked: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Return the watches' replies that come in time; ``what`` describes the request in the log."""
    replies = list(await_replies(dict(enumerate(asked)), timeout_s).values())
    if silent := sum(reply.fault == ReplyFault.LATE for reply in replies):
        log.warning("%s did not %s within %g s", count(silent, "machine"), what, timeout_s)
    for reply in replies:
        if reply.fault not in (None, ReplyFault.LATE):  # the watch is dead
            log.warning("a machine did not %s: %s", what, describe_error(reply.error))
    return [reply.value for reply in replies if reply.fault is None]
