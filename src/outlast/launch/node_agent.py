"""The agent: one per node, starts, watches and stops the workers, and carries out what the coordinator says.

Everything comes in through one ``select``: the zygote's socket (starts and deaths), and a mailbox into which the
link's threads, the watchdog and the signal handlers put their news. Nothing is polled, and nothing that can block on
the network runs in this thread.

States::

    JOINING   asked for a place in the next cycle (a spare stays here)
    RUNNING   the cycle's workers run
    FINISHED  they all ended with 0; the others may still fail
    LEAVING   told to leave by a signal; the workers may save
    STOPPING  the job is over; what still runs is ended in order

From RUNNING a failure here or elsewhere leads to JOINING at once: the request for the next cycle goes out while the
zygote still kills what is left of this one, and the next workers start when both the answer and the zygote's word
that all are gone are there.
"""

from __future__ import annotations

import logging
import select
import signal
from enum import StrEnum

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from outlast.checkpoint.writer_process import WriterProcess
from outlast.errors import ExitReason, OutlastError
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch import messages as m
from outlast.launch.cycle import Cycle
from outlast.launch.link import LinkDown, LinkFailed, LinkUp
from outlast.launch.member import Member
from outlast.launch.news import Broken, Hang, Notice, WriterDied
from outlast.launch.node_journal import NodeJournal
from outlast.launch.options import RunOptions
from outlast.launch.preparation import prepare, torch_workers
from outlast.launch.rendezvous import open_cycle_store
from outlast.launch.timers import Timers
from outlast.launch.workers import Workers
from outlast.runtime.mailbox import Mailbox
from outlast.runtime.store import TCPStore
from outlast.runtime.zygote import Cleared, Exited, FailedToStart, Ready, Started

__all__ = ["NodeAgent", "State"]

log = logging.getLogger(__name__)
_ANSWER_MARGIN_S = 15.0


class State(StrEnum):
    """What the agent is doing; see the module's head."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHED = "finished"
    LEAVING = "leaving"
    STOPPING = "stopping"


class NodeAgent:
    """Run workers under the coordinator's word.

    Args:
        worker_group: torch's view of the workers, kept up to date.
        options: The launcher's options.
        command: Kind and argv of a worker.
        base_env: Environment that every worker gets.
        logs_specs: Where output goes.
        workers: This node's hold on its workers; the agent closes it.
        writer: The node's checkpoint writer, which outlives the workers; the agent closes it. ``None`` = none could be
            started: each worker starts its own.
        member: This node's membership; its link is not yet started.
        mailbox: Where the link and the signal handlers deliver.

    Thread: the main thread.
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
        member: Member,
        mailbox: Mailbox[object],
    ) -> None:
        self.options, self.stop = options, m.Stop(exit_code=ExitReason.FAILED, reason="the agent did not run")
        self.is_host = False
        """Whether this process hosts the control store."""
        self.failures: dict[int, ProcessFailure] = {}
        """Workers that failed by themselves in the newest cycle, by global rank."""
        self._worker_group = worker_group
        self._command, self._base_env, self._logs_specs = command, base_env, logs_specs
        self._workers, self._writer = workers, writer
        self._member, self._mailbox = member, mailbox
        self._journal, self._timers = NodeJournal(options, member.node), Timers()
        self._state = State.JOINING
        self._cycle: Cycle | None = None
        self._start: m.Start | None = None
        """A cycle to start once the zygote has cleared away the last one."""
        self._cycle_store: TCPStore | None = None
        self._signal = 0
        self._final = False

    @property
    def job(self) -> str:
        """Name of the job, once the coordinator told it."""
        return self._journal.job

    def run(self) -> None:
        """Take part in the job. Blocks: until it is over."""
        self._member.link.start()
        while not self._final:
            self._wait_and_handle()

    def close(self) -> None:
        """Free everything; whatever worker is left is killed."""
        if self._cycle is not None:
            self._cycle.close(wait_for_logs=True)
            self._cycle = None
        self._workers.close()
        if self._writer is not None:
            self._writer.close()
        self._member.link.close()
        self._cycle_store = None
        self._journal.close()

    # -- the loop ----------------------------------------------------------------------------------------------

    def _wait_and_handle(self) -> None:
        sources = [self._workers.fileno(), self._mailbox.fileno()]
        readable, _, _ = select.select(sources, [], [], self._timers.until_next_s())
        if self._workers.fileno() in readable:
            self._on_workers()
        if self._mailbox.fileno() in readable:
            for news in self._mailbox.take_all():
                self._on_news(news)
        self._timers.fire()

    def _on_workers(self) -> None:
        match self._workers.receive():
            case None:
                self._on_workers_lost()
            case Ready():
                pass
            case Started() as news:
                self._on_started(news)
            case FailedToStart() as news:
                self._fail(self._journal.incident(IncidentKind.CANNOT_START, news.error))
            case Exited() as news:
                self._on_exited(news)
            case Cleared():
                self._start_if_ready()

    def _on_news(self, news: object) -> None:
        match news:
            case m.Prepare():
                self._on_prepare(news)
            case m.Start():
                self._timers.cancel("answer")
                self._start = news
                self._start_if_ready()
            case m.CycleOver():
                self._on_cycle_over(news)
            case m.Stop():
                self._on_stop(news)
            case m.Wait():
                self._timers.cancel("answer")
                log.info("[outlast] node %s waits: %s", self._member.node, news.reason)
            case Hang():
                self._on_hang(news)
            case Notice():
                self._on_notice(news)
            case WriterDied():
                self._journal.write(EventKind.WRITER_ENDED, summary=news.summary)
            case LinkUp():
                self._on_link_up(news)
            case LinkDown():
                log.warning(
                    "[outlast] the control store is out of reach (%s); training goes on without it",
                    news.error,
                )
                if self._state in (State.JOINING, State.FINISHED):
                    self._timers.set("link", self.options.join_timeout_s, self._give_up_on_link)
            case LinkFailed():
                self._finish(m.Stop(exit_code=ExitReason.FAILED, reason=news.error))
            case Broken():
                log.error("[outlast] %s ended on an error: %r", news.what, news.error)
                self._fail(self._journal.incident(IncidentKind.CANNOT_START, f"{news.what} ended: {news.error!r}"))
            case _:
                raise AssertionError(f"unexpected news {news!r}")

    # -- joining and starting ----------------------------------------------------------------------------------

    def _on_link_up(self, news: LinkUp) -> None:
        self._timers.cancel("link")
        self.is_host = news.is_host
        if not news.is_first:
            log.warning("[outlast] the control store is back, at %s", self._member.link.endpoint)
            self._member.register(
                is_running=self._state == State.RUNNING,
                is_joining=self._state == State.JOINING,
                has_finished=self._state == State.FINISHED,
            )
            return
        node = self._member.node
        self._journal.open(news.job, self._command[1], self._worker_group.spec.local_world_size)
        if news.is_host:
            log.info("[outlast] node %s hosts the control store at %s", node, self._member.link.endpoint)
        self._join(None)

    def _join(self, ended: m.CycleFacts | None) -> None:
        if self._state != State.LEAVING:
            self._state = State.JOINING
        if ended is not None:
            # The coordinator gives up earlier than this, if it still runs: a stopped one answers nothing at all.
            self._timers.set("answer", self.options.join_timeout_s + _ANSWER_MARGIN_S, self._give_up_on_link)
        self._member.join(ended)

    def _on_prepare(self, request: m.Prepare) -> None:
        self._cycle_store = open_cycle_store(self._member.addr)
        self._member.host_cycle(request.cycle, self._cycle_store.port)

    def _start_if_ready(self) -> None:
        start = self._start
        if start is None or not self._workers.are_cleared or self._state != State.JOINING:
            return
        self._start = None
        if not self._member.take_place(start):
            return
        if start.node_rank != 0:
            self._cycle_store = None
        spec = self._worker_group.spec
        try:
            cycle = prepare(
                start,
                spec=spec,
                options=self.options,
                job=self._journal.job,
                node=self._member.node,
                base_env=self._base_env,
                logs_specs=self._logs_specs,
                command=self._command,
                writer=self._writer_address(),
            )
        except (OSError, OutlastError) as error:
            self._join(
                m.CycleFacts(
                    cycle=start.cycle,
                    incident=self._journal.incident(IncidentKind.CANNOT_START, str(error), cycle=start.cycle),
                )
            )
            return
        self._cycle, self._state = cycle, State.RUNNING
        self._journal.begin_cycle(start.cycle)
        self.failures = {}
        self._worker_group.workers = torch_workers(start, spec)
        self._worker_group.group_rank = start.node_rank  # type: ignore[assignment]
        self._worker_group.group_world_size = start.num_nodes  # type: ignore[assignment]
        number, put = start.cycle, self._mailbox.put
        try:
            self._workers.start(cycle)
            cycle.watch(
                on_hang=lambda report: put(Hang(number, report)),
                on_error=lambda error: put(Broken("the watchdog", error)),
            )
        except OutlastError as error:
            self._fail(self._journal.incident(IncidentKind.CANNOT_START, str(error)))
            return
        self._worker_group.state = WorkerState.HEALTHY

    def _on_started(self, news: Started) -> None:
        cycle = self._cycle
        if cycle is None or cycle.over or news.key not in cycle.workers:
            return  # it started while its cycle was being ended: it is killed with the rest
        worker = cycle.workers[news.key]
        worker.pid = news.pid
        cycle.board.assign(worker.local_rank, pid=news.pid, global_rank=worker.global_rank, cycle=cycle.number)
        if all(w.pid for w in cycle.workers.values()):
            self._journal.write_started(cycle)

    # -- a worker's end ----------------------------------------------------------------------------------------

    def _on_exited(self, news: Exited) -> None:
        cycle = self._cycle
        worker = cycle.note_exit(news) if cycle is not None else None
        if cycle is None or worker is None:
            return
        killed_by_us = cycle.over or self._state == State.STOPPING
        self._journal.write(
            EventKind.WORKER_EXITED,
            rank=worker.global_rank,
            pid=news.pid,
            exit_code=news.exit_code,
            killed_by_us=killed_by_us,
        )
        if killed_by_us:
            if self._state == State.STOPPING and cycle.all_ended:
                self._finish(self.stop)
        elif self._state == State.LEAVING:
            if cycle.all_ended:
                self._leave(saved=cycle.is_saved)
        elif news.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED):
            if cycle.all_ended:
                self._on_all_ended(cycle)
        else:
            incident = cycle.describe_death(worker)
            self.failures[worker.global_rank] = ProcessFailure(
                local_rank=worker.local_rank,
                pid=news.pid,
                exitcode=news.exit_code,
                error_file=cycle.logs.destinations.error_files.get(worker.local_rank) or "",
            )
            self._fail(incident)

    def _on_all_ended(self, cycle: Cycle) -> None:
        if ExitReason.PREEMPTED in cycle.exit_codes:
            # The notice reached the workers past this agent: from a peer's, or straight from the scheduler.
            self._leave(saved=cycle.is_saved)
            return
        self._state = State.FINISHED
        facts = cycle.facts(None)
        self._journal.write_ended(cycle, "finished")
        self._member.finish(facts)

    def _fail(self, incident: Incident) -> None:
        """End the running cycle because of what happened here."""
        if self._cycle is None or self._cycle.over or self._state not in (State.RUNNING, State.FINISHED):
            return
        self._journal.write_incident(incident)
        log.warning("[outlast] %s", incident.describe())
        self._end_cycle(self._cycle.facts(incident), incident.describe())

    def _on_hang(self, hang: Hang) -> None:
        cycle = self._cycle
        if cycle is None or cycle.number != hang.cycle or cycle.over or self._state != State.RUNNING:
            return
        incident = cycle.describe_hang(hang.report)
        self._journal.write_incident(incident)
        # The other nodes look at their ranks while this one does.
        self._member.report_hang(incident, hang.report.expired, cycle.number)
        positions = cycle.examine(hang.report)
        self._end_cycle(cycle.facts(None, positions), incident.describe())

    def _on_cycle_over(self, over: m.CycleOver) -> None:
        cycle = self._cycle
        if cycle is None or cycle.number != over.cycle or cycle.over:
            return
        if self._state not in (State.RUNNING, State.FINISHED):
            return
        log.warning("[outlast] cycle %d is over: %s", over.cycle, over.reason)
        positions = cycle.examine(None) if over.examine and self._state == State.RUNNING else ()
        self._end_cycle(cycle.facts(None, positions), over.reason)

    def _end_cycle(self, facts: m.CycleFacts, reason: str) -> None:
        cycle = self._cycle
        assert cycle is not None
        cycle.over = True
        self._journal.write_ended(cycle, reason)
        self._join(facts)
        self._workers.expect_clear()
        if self.options.restart_grace_s > 0 and not cycle.all_ended:
            self._workers.terminate()
            self._timers.set("grace", self.options.restart_grace_s, self._workers.clear)
        else:
            self._workers.clear()
        cycle.close()

    def _on_workers_lost(self) -> None:
        """Go on after the process that starts workers died; the kernel has killed the workers with it."""
        if self._state == State.STOPPING:
            self._finish(self.stop)
        elif self._state == State.LEAVING:
            self._leave(saved=False)
        elif self._state == State.RUNNING and self._cycle is not None and not self._cycle.over:
            cycle = self._cycle
            incident = self._journal.incident(
                IncidentKind.WORKER_DIED, "the process that starts workers died", exit_code=-9
            )
            facts = cycle.facts(incident)
            cycle.over = True
            self._journal.write_incident(incident)
            self._journal.write_ended(cycle, incident.describe())
            cycle.close()
            self._join(facts)
        else:
            self._start_if_ready()

    # -- leaving -----------------------------------------------------------------------------------------------

    def _on_notice(self, notice: Notice) -> None:
        name = signal.Signals(notice.signal).name
        if self._state in (State.LEAVING, State.STOPPING):
            log.warning("[outlast] received %s again: ending the workers now", name)
            self._timers.cancel("grace")
            self._workers.kill()
            return
        self._signal = notice.signal
        self._journal.write(EventKind.NOTICE, signal=notice.signal)
        cycle = self._cycle
        if self._state != State.RUNNING or cycle is None or cycle.over:
            log.info("[outlast] received %s: leaving", name)
            self._leave(saved=False, whole_job=self._state != State.FINISHED and cycle is not None)
            return
        grace_s = self.options.fault_tolerance.shutdown_grace
        log.info(
            "[outlast] received %s: the workers have %.0f s to save (a second signal ends them)",
            name,
            grace_s,
        )
        self._state = State.LEAVING
        self._workers.notify(cycle)
        self._timers.set("grace", grace_s, self._on_grace_over)

    def _on_grace_over(self) -> None:
        log.warning("[outlast] the workers did not end in time; killing them")
        self._workers.kill()

    def _leave(self, *, saved: bool, whole_job: bool = True) -> None:
        cycle = self._cycle
        facts = cycle.facts(None) if cycle is not None and not cycle.over else None
        if cycle is not None and not cycle.over:
            self._journal.write_ended(cycle, "left")
        number = self._signal or signal.SIGTERM
        self._member.leave(saved=saved, signal=number, facts=facts, whole_job=whole_job)
        code = ExitReason.PREEMPTED if saved else 128 + number
        what = "state saved" if saved else "nothing was saved on the way out"
        self.failures = {}
        self._finish(m.Stop(exit_code=code, reason=f"told to leave; {what}"))

    # -- the end -----------------------------------------------------------------------------------------------

    def _on_stop(self, stop: m.Stop) -> None:
        if self._state == State.LEAVING:
            return  # its own end is under way
        self.stop = stop
        cycle = self._cycle
        if cycle is None or cycle.over or cycle.all_ended:
            self._finish(stop)
            return
        self._state = State.STOPPING
        self._workers.notify(cycle)
        preempted = stop.exit_code == ExitReason.PREEMPTED
        grace_s = self.options.fault_tolerance.shutdown_grace if preempted else self.options.workers_stop_timeout_s
        self._timers.set("grace", grace_s, self._on_grace_over)

    def _finish(self, stop: m.Stop) -> None:
        self.stop = stop
        self._final = True
        self._journal.write(EventKind.JOB_ENDED, exit_code=stop.exit_code, reason=stop.reason)

    def _give_up_on_link(self) -> None:
        seconds = self.options.join_timeout_s
        reason = f"the control store gave no answer for {seconds:.0f} s (--rdzv-conf join_timeout=...)"
        self._finish(m.Stop(exit_code=ExitReason.FAILED, reason=reason))

    def _writer_address(self) -> str:
        """Return the address of the checkpoint writer; empty when there is none, or it died too often."""
        try:
            return self._writer.address if self._writer is not None else ""
        except OSError:
            return ""
