"""The watch of one machine in a Ray Train run: it notices workers that hang, and ends the one that the others wait for.

A Ray actor without resources of its own, beside the workers and not in them, so that a worker that holds its
interpreter's lock, or is stopped, is noticed like any other. It outlives the workers and keeps the machine's checkpoint
writer, so that the newest generation stays in memory while they are replaced. Ray Train sees a worker that it ended as
one that died, and restarts the group.

When a watch finds a timeout exceeded, one of them, the judge, asks all for what their machines' workers do, names the
culprit and has it ended; the others wait for it, and are ended by Ray Train.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
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
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.monitor.examination import examine
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.culprit import Culprit, Position, find_culprit
from outlast.policy.deadlines import Timeouts, expired
from outlast.ray.replies import ReplyFault, await_replies, describe_error
from outlast.runtime.board import Board
from outlast.runtime.journal import Journal
from outlast.runtime.processes import open_pidfd, send_signal
from outlast.wording import count

log = logging.getLogger(__name__)

_ASK_S = 5.0
"""Seconds for another machine's watch to report what its workers do; that takes it at most about two."""


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the machine."""

    local_rank: int
    global_rank: int
    pid: int


class AttemptFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a watch knows of an attempt."""

    durable_iteration: int | None = None
    """Newest checkpoint that a worker knows to survive the end of the job; ``None`` = none yet."""
    committed_iteration: int | None = None
    """Newest checkpoint that a worker knows to be committed in any tier; ``None`` = none yet."""
    progress_known: bool = False
    """The workers report what they save."""
    incident: Incident | None = None
    """The hang that this watch judged."""


class TrainWatch:
    """Watch one machine's workers, attempt by attempt.

    Args:
        node: Name of the machine.
        config: Timeouts.
        run_id: Name of the run.
        job: Id of the run.
        run_dir: Where the journal and stacks are written; ``None`` = no journal, and stacks among temporary files.
        keeps_writer: Whether something is saved, so that a checkpoint writer is wanted.

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
        self._pids: dict[int, int] = {}
        self._workers: dict[int, int] = {}  # global rank to pidfd: the pid may be another process by then
        self._peers: tuple[Any, ...] = ()
        self._judge: Any = None
        self._incident: Incident | None = None
        self._stacks_dir = ""

    def begin(self, attempt: int, workers: Sequence[WorkerPlace]) -> dict[str, str | None]:
        """Watch the workers of a new attempt; return the variables by which they find their board and writer."""
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
                    self._workers[worker.global_rank] = open_pidfd(worker.pid)
                    self._pids[worker.global_rank] = worker.pid
                except ProcessLookupError:
                    log.warning("rank %d (pid %d) ended before it could be watched", worker.global_rank, worker.pid)
            self._watchdog = Watchdog(board, self._timeouts, node=self.node, on_hang=self._on_hang)
            self._watchdog.start()
            return {env.BOARD: board.path, env.WRITER: None if self._writer is None else self._writer.address}

    def meet(self, watches: Sequence[Any]) -> None:
        """Take in who watches this attempt's machines, this watch included; the first is the judge."""
        here = ray.get_runtime_context().get_actor_id()
        self._peers = tuple(one for one in watches if one._actor_id.hex() != here)
        self._judge = None if watches[0]._actor_id.hex() == here else watches[0]

    def examine(self, attempt: int) -> list[Position]:
        """Look where the machine's workers are, and write their stacks; nothing, if the attempt is over.

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
        """Name who the others wait for, once an attempt, and have it ended.

        Blocks: up to some seconds, where a machine does not answer.
        """
        with self._lock:
            if attempt != self._attempt or self._incident is not None:
                return
            self._incident = first  # the judgement: what others report meanwhile is the same hang
        asked = [peer.examine.remote(attempt) for peer in self._peers]
        positions = self.examine(attempt)
        for answer in answers_of(asked, _ASK_S, "report what its workers do"):
            positions += answer
        if not positions:
            return
        culprit = find_culprit(positions)
        incident = self._describe(first, culprit)
        with self._lock:
            if attempt == self._attempt:
                self._incident = incident
        self._journal.write(
            EventKind.INCIDENT, cycle=attempt, rank=incident.rank, iteration=incident.iteration, incident=incident
        )
        log.error("%s; stacks in %s", culprit.reason, self._stacks_dir)
        # Where no culprit is found, one is ended all the same, for Ray Train to restart the group.
        late = next((one for one in positions if one.global_rank == first.rank), positions[0])
        self._have_ended(attempt, culprit.position or late)

    def end_worker(self, attempt: int, rank: int) -> bool:
        """End a worker of this machine; return whether it is one. Blocks: up to the grace, with SIGKILL never."""
        with self._lock:
            if attempt != self._attempt or rank not in self._workers:
                return False
            worker, pid = os.dup(self._workers[rank]), self._pids[rank]
        try:
            wanted = signal.Signals[self._config.rank_termination_signal]
            log.error("rank %d is ended with %s, so that Ray Train restarts the group", rank, wanted.name)
            _send(worker, pid, wanted)
            if wanted != signal.SIGKILL:
                _send(worker, pid, signal.SIGCONT)  # a stopped process handles nothing else
                grace_s = self._config.rank_termination_grace
                if not _is_gone(worker, grace_s):
                    log.error("rank %d still runs %g s after %s: sending SIGKILL", rank, grace_s, wanted.name)
                    _send(worker, pid, signal.SIGKILL)
        finally:
            os.close(worker)
        return True

    def facts(self) -> AttemptFacts:
        """Return what is known of the attempt so far."""
        with self._lock:
            states = self._board.read_all() if self._board is not None else []
            return AttemptFacts(
                durable_iteration=max(
                    (s.durable_iteration for s in states if s.durable_iteration is not None), default=None
                ),
                committed_iteration=max(
                    (s.committed_iteration for s in states if s.committed_iteration is not None), default=None
                ),
                progress_known=any(state.reports_progress for state in states),
                incident=self._incident,
            )

    def stop(self) -> None:
        """Stop watching: the attempt's workers are about to be ended by who started them. Idempotent."""
        with self._lock:
            watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()  # its thread may be judging, which takes the lock
        with self._lock:
            if self._board is not None:
                self._board.close()
                self._board = None
            for worker in self._workers.values():
                os.close(worker)
            self._workers.clear()

    def close(self) -> None:
        """End the writer, and stop watching. Idempotent. Blocks: up to 2 s."""
        self.stop()
        if self._writer is not None:
            self._writer.close()
        self._journal.close()

    # -- details -----------------------------------------------------------------------------------------------

    def _on_hang(self, report: HangReport) -> None:
        """Take the report to the judge; where that one is gone, judge here. Thread: the watchdog's."""
        attempt, late = self._attempt, report.expired[0]
        state = next(one for one in report.states if one.local_rank == late.local_rank)
        first = Incident(
            kind=IncidentKind.WORKER_HUNG,
            job=self._journal.job,
            cycle=attempt,
            node=self.node,
            rank=state.global_rank,
            pid=state.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=state.iteration,
            detected_after_s=round(late.elapsed_s, 4),
            evidence={"summary": late.describe(self.node), "timeout_s": late.timeout_s},
        )
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

    def _describe(self, first: Incident, culprit: Culprit) -> Incident:
        position = culprit.position
        evidence = {
            **first.evidence,
            "summary": culprit.reason,
            "first_reported_rank": first.rank,
            "stacks": self._stacks_dir,
        }
        if position is None:
            return msgspec.structs.replace(
                first, node=culprit.node, rank=None, pid=None, section=None, iteration=None, evidence=evidence
            )
        evidence["process_state"] = position.process_state
        if position.stack_line:
            evidence["stack_line"] = position.stack_line
        return msgspec.structs.replace(
            first,
            node=position.node,
            rank=position.global_rank,
            pid=position.pid,
            section="/".join(position.sections) or first.section,
            iteration=position.iteration,
            evidence=evidence,
        )


def answers_of(asked: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Return the answers of the machines' watches that come in time; ``what`` they do, for the log."""
    replies = list(await_replies(dict(enumerate(asked)), timeout_s).values())
    if silent := sum(reply.fault == ReplyFault.LATE for reply in replies):
        log.warning("%s did not %s within %g s", count(silent, "machine"), what, timeout_s)
    for reply in replies:
        if reply.fault not in (None, ReplyFault.LATE):  # it is gone
            log.warning("a machine did not %s: %s", what, describe_error(reply.error))
    return [reply.value for reply in replies if reply.fault is None]


def _send(worker: int, pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
        send_signal(worker, pid, number)


def _is_gone(worker: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
