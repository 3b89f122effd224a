"""The agent: one per node, starts, watches and stops the workers, and carries out what the coordinator says.

Everything comes in through one ``select``: the zygote's socket (starts and deaths), and a mailbox into which the
link's threads, the watchdog and the signal handlers put their news. Nothing is polled, and nothing that can block on
the network runs in this thread. Its states are those of :class:`outlast.launch.agent_state.AgentState`.
"""

from __future__ import annotations

import logging
import select
import signal

from outlast.errors import ExitReason, OutlastError
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.agent_events import Broken, HangSeen, RunDirectoryLost, SignalReceived, Timers, WriterDied
from outlast.launch.agent_state import AgentState
from outlast.launch.coordinator_client import GOODBYE_S, CoordinatorClient, LinkDown, LinkFailed, LinkUp
from outlast.launch.crew import Crew
from outlast.launch.cycle import ALONE_S, Cycle
from outlast.launch.membership import SAY_S
from outlast.launch.mending import Mending
from outlast.launch.node_health import CheckedUp, Checkups, Fitness
from outlast.launch.node_journal import NodeJournal
from outlast.launch.options import RunOptions
from outlast.launch.torchrun_backend import open_cycle_store
from outlast.launch.verdicts import name_culprit
from outlast.policy.causes import SAME_FAULT_S
from outlast.policy.protection import Protection, describe_nodes
from outlast.runtime.mailbox import Mailbox
from outlast.runtime.store import TCPStore
from outlast.runtime.zygote import Cleared, Exited, FailedToStart, Started, ZygoteReady

__all__ = ["NodeAgent"]

log = logging.getLogger(__name__)
_ANSWER_MARGIN_S = 15.0
_PARTING_S = 0.2
"""What a host that leaves before the first cycle gives its word to go out."""
_PLAIN_AFTER_S = 60.0
"""A script that has shown no sign of life by then may well have no session."""


class NodeAgent:
    """Run workers under the coordinator's word.

    Args:
        options: The launcher's options.
        crew: This node's workers; the agent closes it.
        member: This node's membership; its link is not yet started.
        checkups: Looks at this node; closed with the agent. ``None`` = nothing is looked at.
        mailbox: Where the link and the signal handlers deliver.

    Thread: the main thread.
    """

    def __init__(
        self,
        options: RunOptions,
        crew: Crew,
        member: CoordinatorClient,
        checkups: Checkups | None,
        mailbox: Mailbox[object],
    ) -> None:
        self.options, self.stop = options, m.Stop(exit_code=ExitReason.FAILED, reason="the agent did not run")
        self._waits_for = ""
        self.is_host = False
        """Whether this process hosts the control store."""
        self._crew, self._workers, self._member, self._mailbox = crew, crew.workers, member, mailbox
        self._journal, self._timers = NodeJournal(options, member.node), Timers()
        self._state = AgentState.OUTSIDE
        self._fitness = Fitness(
            checkups,
            member=member,
            journal=self._journal,
            timers=self._timers,
            is_alone=options.max_nodes == 1,
            join=lambda: self._join(None),
            start=self._start_if_ready,
            leave=self._finish,
        )
        self._mending = Mending(
            crew.workers,
            member=member,
            journal=self._journal,
            timers=self._timers,
            is_running=lambda: self._state == AgentState.RUNNING,
            end_cycle=self._end_cycle,
        )
        self._start: m.Start | None = None  # a cycle to start once the zygote has cleared away the last one
        self._cycle_store: TCPStore | None = None
        self._signal, self._final = 0, False
        self._protection: str | None = None
        """What was last said of it; ``None`` = nothing yet."""

    @property
    def job(self) -> str:
        """Name of the job, once the coordinator told it."""
        return self._journal.job

    def run(self) -> None:
        """Take part in the job. Blocks: until it is over."""
        self._member.link.start()
        self._wait_for_link(self.options.join_timeout_s)
        while not self._final:
            self._wait_and_handle()

    def close(self) -> None:
        """Free everything; whatever worker is left is killed."""
        never_ran = self._crew.cycle is None
        self._fitness.close()
        self._crew.close()
        # Told to leave before the first cycle, the job is not over: there is nothing that others must hear.
        self._member.link.close(goodbye_timeout_s=_PARTING_S if never_ran and self._signal else GOODBYE_S)
        self._cycle_store = None
        self._journal.close()

    # -- the loop ----------------------------------------------------------------------------------------------

    def _wait_and_handle(self) -> None:
        sources = [self._workers.fileno(), self._mailbox.fileno()]
        cycle = self._crew.on_duty
        told = cycle.in_process.fileno() if cycle is not None else -1
        if told >= 0:
            sources.append(told)
        readable, _, _ = select.select(sources, [], [], self._timers.until_next_s())
        if told in readable and cycle is not None:
            self._mending.look(cycle)
            self._take_settings(cycle)
        if self._workers.fileno() in readable:
            self._on_news(self._workers.receive())
        if self._mailbox.fileno() in readable:
            for news in self._mailbox.take_all():
                self._on_news(news)
        self._timers.fire()
        if cycle is not None and cycle.script_settings is None:
            self._take_settings(cycle)  # whatever else looked may have taken the word of a worker that attached

    def _on_news(self, news: object) -> None:
        match news:
            case ZygoteReady():
                pass
            case Started():
                self._on_started(news)
            case FailedToStart():
                self._fail(self._journal.incident(IncidentKind.CANNOT_START, news.error))
            case Exited():
                self._on_exited(news)
            case Cleared():
                self._fitness.note_cleared()
                self._start_if_ready()
            case None:
                self._on_workers_lost()
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
                level, self._waits_for = logging.DEBUG if news.reason == self._waits_for else logging.INFO, news.reason
                log.log(level, "node %s waits: %s", self._member.node, news.reason)
            case m.NodesMissing():
                log.info("%s", news.reason)
            case m.Remark():
                log.warning("%s", news.text)
            case CheckedUp():
                self._fitness.take(news)
            case HangSeen():
                self._on_hang(news)
            case SignalReceived():
                self._on_notice(news)
            case WriterDied():
                self._journal.write(EventKind.WRITER_ENDED, summary=news.summary)
            case RunDirectoryLost():
                self._finish(m.Stop(exit_code=ExitReason.NO_PROGRESS, reason=news.why))
            case LinkUp():
                self._on_link_up(news)
            case LinkDown():
                log.warning("the control store is unreachable (%s); training continues without it", news.error)
                if self._state in (AgentState.OUTSIDE, AgentState.JOINING, AgentState.FINISHED):
                    self._timers.set("link", self.options.join_timeout_s, self._give_up_on_link)
            case LinkFailed():
                self._finish(m.Stop(exit_code=ExitReason.FAILED, reason=news.error))
            case Broken():
                log.error("%s ended on an error: %r", news.what, news.error)
                self._fail(self._journal.incident(IncidentKind.CANNOT_START, f"{news.what} ended: {news.error!r}"))
            case _:
                raise AssertionError(f"unexpected news {news!r}")

    def _wait_for_link(self, left_s: float) -> None:
        """Say every ten seconds that the control store is still looked for."""

        def remind() -> None:
            problem = self._member.link.problem or "no answer yet"
            log.info("waiting for the control store: %s; gives up in %.0f s", problem, left_s - SAY_S)
            self._wait_for_link(left_s - SAY_S)

        self._timers.set("first link", SAY_S, remind)

    # -- joining and starting ----------------------------------------------------------------------------------

    def _on_link_up(self, news: LinkUp) -> None:
        self._timers.cancel("link")
        self._timers.cancel("first link")
        member, self.is_host = self._member, news.is_host
        if not news.is_first:
            log.warning("the control store is reachable again at %s", member.link.endpoint)
        else:
            endpoints = [str(endpoint) for endpoint in member.link.endpoints]
            self._journal.open(news.job, self._crew.command[1], self._crew.num_workers, endpoints)
            if news.is_host:
                level = logging.INFO if self.options.max_nodes > 1 else logging.DEBUG
                log.log(level, "node %s hosts the control store at %s", member.node, member.link.endpoint)
        if self._state == AgentState.OUTSIDE:
            self._fitness.meet(is_host=news.is_host)
        else:
            member.register(
                is_running=self._state == AgentState.RUNNING,
                is_joining=self._state == AgentState.JOINING,
                has_finished=self._state == AgentState.FINISHED,
            )

    def _join(self, ended: m.CycleFacts | None) -> None:
        if self._state != AgentState.LEAVING:
            self._state = AgentState.JOINING
        if ended is not None:
            # The coordinator gives up earlier than this, if it still runs: a stopped one answers nothing at all.
            self._timers.set("answer", self.options.join_timeout_s + _ANSWER_MARGIN_S, self._give_up_on_link)
        self._member.join(ended)

    def _on_prepare(self, request: m.Prepare) -> None:
        self._cycle_store = open_cycle_store(self._member.addr)
        self._member.host_cycle(request.cycle, self._cycle_store.port)

    def _start_if_ready(self) -> None:
        start = self._start
        if (
            start is None
            or not self._workers.are_cleared
            or self._state != AgentState.JOINING
            or self._fitness.is_looking
        ):
            return
        self._start = None
        if not self._member.take_place(start):
            return
        if start.node_rank != 0:
            self._cycle_store = None
        if (unfit := self._fitness.refuse(start.cycle)) is not None:
            self._journal.write_incident(unfit)
            self._join(m.CycleFacts(cycle=start.cycle, incident=unfit))
            return
        try:
            self._crew.prepare(start, self._journal.job)
        except (OSError, OutlastError) as error:
            incident = self._journal.incident(IncidentKind.CANNOT_START, str(error), cycle=start.cycle)
            self._join(m.CycleFacts(cycle=start.cycle, incident=incident))
            return
        self._state = AgentState.RUNNING
        self._journal.begin_cycle(start.cycle)
        try:
            self._crew.start(self._mailbox.put)
        except OutlastError as error:
            self._fail(self._journal.incident(IncidentKind.CANNOT_START, str(error)))
        self._timers.set("protection", _PLAIN_AFTER_S, self._say_protection)

    def _take_settings(self, cycle: Cycle) -> None:
        """Use what the script's config sets, now that a worker may have told it."""
        if cycle.over:
            return
        cycle.settle()
        if cycle.script_settings is not None:
            self._member.report_settings(cycle.script_settings)
        if cycle.session_protection:
            self._say_protection()

    def _say_protection(self) -> None:
        """Say in one line what the run is protected against, once it is known and when it has changed."""
        cycle = self._crew.on_duty
        if cycle is None or cycle.all_ended:
            return
        self._timers.cancel("protection")
        options = self.options
        protection = Protection(
            max_restarts=options.torchrun.max_restarts,
            hangs=cycle.describe_hang_detection(),
            nodes=describe_nodes(
                num_slots=options.num_slots, max_nodes=options.max_nodes, min_nodes=cycle.layers.config.min_nodes
            ),
            of_session=cycle.session_protection,
        )
        text = protection.describe()
        if text == self._protection:
            return
        self._protection = text
        level = logging.WARNING if protection.has_gap else logging.INFO
        log.log(level if cycle.start.node_rank == 0 else logging.DEBUG, "%s", text)

    def _on_started(self, news: Started) -> None:
        if (cycle := self._crew.note_started(news)) is not None:
            self._journal.write_started(cycle)

    # -- a worker's end ----------------------------------------------------------------------------------------

    def _on_exited(self, news: Exited) -> None:
        cycle = self._crew.cycle
        worker = cycle.note_exit(news) if cycle is not None else None
        if cycle is None or worker is None:
            return
        killed_by_us = cycle.over or self._state == AgentState.STOPPING
        self._mending.look(cycle, waits=not cycle.all_ended)
        spared = bool(news.exit_code) and not killed_by_us and cycle.goes_on_without(worker)
        self._journal.write_exited(worker, news, killed_by_us=killed_by_us)
        if spared:
            self._mending.go_on_without(worker, news.key, cycle)
            self._mending.look(cycle)
        if killed_by_us:
            if self._state == AgentState.STOPPING and cycle.all_ended:
                self._finish(self.stop)
        elif self._state == AgentState.LEAVING:
            if cycle.all_ended:
                self._leave()
            elif cycle.lacks_a_rank:
                self._timers.set("grace", ALONE_S, self._on_grace_over)
        elif spared or news.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED):
            if cycle.lacks_a_rank:
                self._fail_when_clear(cycle)  # another one failed a moment ago
            elif cycle.all_ended:
                self._on_all_ended(cycle)
        else:
            self._crew.note_failure(cycle, worker, news)
            self._fail_when_clear(cycle)

    def _fail_when_clear(self, cycle: Cycle) -> None:
        """End the cycle for a worker that failed, once it is clear which one began; others may just be failing, too."""
        wait_s = cycle.wait_for_others_s
        if not wait_s:
            self._timers.cancel("clear")
            self._fail(cycle.describe_failure())
        elif not self._timers.is_set("clear"):
            self._timers.set("clear", wait_s, lambda: self._fail(cycle.describe_failure()))

    def _on_all_ended(self, cycle: Cycle) -> None:
        if ExitReason.PREEMPTED in cycle.exit_codes:
            # The notice reached the workers past this agent: from a peer's, or straight from the scheduler.
            self._leave()
            return
        self._state = AgentState.FINISHED
        incident = cycle.describe_unfinished()
        self._journal.write_ended(cycle, "finished" if incident is None else incident.describe())
        self._member.finish(cycle.facts(incident))

    def _fail(self, incident: Incident) -> None:
        """End the running cycle because of what happened here."""
        cycle = self._crew.on_duty
        if cycle is None or self._state not in (AgentState.RUNNING, AgentState.FINISHED):
            return
        self._journal.write_incident(incident)
        self._log_incident(incident)
        self._end_cycle(cycle, cycle.facts(incident), incident.describe())

    def _log_incident(self, incident: Incident) -> None:
        """Log what was seen on this node; where the coordinator is, its verdict says so in a moment."""
        log.log(logging.DEBUG if self.is_host else logging.WARNING, "%s", incident.describe())

    def _on_hang(self, hang: HangSeen) -> None:
        cycle = self._crew.on_duty
        if cycle is None or cycle.number != hang.cycle or self._state != AgentState.RUNNING:
            return
        incident = cycle.describe_hang(hang.report)
        # The other nodes look at their ranks while this one does.
        self._member.report_hang(incident, hang.report.expired, cycle.number)
        positions = cycle.examine(hang.report)
        if is_alone := cycle.start.num_nodes == 1:
            incident = name_culprit(incident, positions)
        self._journal.write_incident(incident)
        log.debug("%s", incident.describe())  # the watchdog has logged whose timeout passed
        # Who is to blame is found by what all nodes saw: the verdict says it.
        reason = incident.describe() if is_alone else f"a hang; first seen: {incident.evidence['summary']}"
        self._end_cycle(cycle, cycle.facts(None, positions), reason)
        self._fitness.suspect()

    def _on_cycle_over(self, over: m.CycleOver) -> None:
        start = self._start
        if start is not None and start.cycle == over.cycle:  # it ended before it could start here
            self._start = None
            if self._member.take_place(start):
                self._join(m.CycleFacts(cycle=start.cycle))
            return
        cycle = self._crew.on_duty
        if cycle is None or cycle.number != over.cycle or self._state not in (AgentState.RUNNING, AgentState.FINISHED):
            return
        if over.awaits_alike and not cycle.all_ended and not self._timers.is_set("clear"):
            # The ranks here are about to fail as those elsewhere did, or wait for them.
            self._timers.set("clear", SAME_FAULT_S, lambda: self._fail_or_follow(cycle, over.reason))
            return
        # On the coordinator's node its verdict follows, which says the same and more.
        log.log(logging.DEBUG if self.is_host else logging.WARNING, "cycle %d is over: %s", over.cycle, over.reason)
        positions = cycle.examine(None) if over.examine and self._state == AgentState.RUNNING else ()
        self._end_cycle(cycle, cycle.facts(None, positions), over.reason)

    def _fail_or_follow(self, cycle: Cycle, reason: str) -> None:
        """End a cycle that has ended elsewhere, with what failed here meanwhile."""
        if any(code not in (None, ExitReason.FINISHED) for code in cycle.exit_codes):
            self._fail(cycle.describe_failure())
        elif cycle is self._crew.on_duty and self._state in (AgentState.RUNNING, AgentState.FINISHED):
            self._end_cycle(cycle, cycle.facts(None), reason)

    def _end_cycle(self, cycle: Cycle, facts: m.CycleFacts, reason: str) -> None:
        cycle.over = True
        self._timers.cancel("clear")
        self._journal.write_ended(cycle, reason)
        self._join(facts)
        self._crew.dismiss(cycle, self._timers)
        if facts.incident is not None:
            self._fitness.suspect()

    def _on_workers_lost(self) -> None:
        """Go on after the process that starts workers died; the kernel has killed the workers with it."""
        if self._state == AgentState.STOPPING:
            self._finish(self.stop)
        elif self._state == AgentState.LEAVING:
            self._leave()
        elif self._state == AgentState.RUNNING and (cycle := self._crew.on_duty) is not None:
            why = "the process that starts workers died"
            incident = self._journal.incident(IncidentKind.WORKER_DIED, why, exit_code=-9)
            facts = cycle.facts(incident)
            cycle.over = True
            self._timers.cancel("clear")
            self._journal.write_incident(incident)
            self._journal.write_ended(cycle, incident.describe())
            cycle.close()
            self._join(facts)
            self._fitness.suspect()
            self._fitness.note_cleared()
        else:
            self._start_if_ready()

    # -- leaving -----------------------------------------------------------------------------------------------

    def _on_notice(self, notice: SignalReceived) -> None:
        name = signal.Signals(notice.signal).name
        if self._state in (AgentState.LEAVING, AgentState.STOPPING):
            log.warning("received %s again: ending the workers now", name)
            self._timers.cancel("grace")
            self._workers.kill()
            return
        self._signal = notice.signal
        self._journal.write(EventKind.NOTICE, signal=notice.signal)
        cycle = self._crew.on_duty
        if self._state != AgentState.RUNNING or cycle is None or not cycle.has_started:
            log.info("received %s: shutting down", name)
            self._leave(whole_job=self._state != AgentState.FINISHED and self._crew.cycle is not None)
            return
        grace_s = cycle.layers.config.shutdown_grace
        log.info("received %s: the workers have %.0f s to save (a second signal ends them)", name, grace_s)
        self._state = AgentState.LEAVING
        self._workers.notify(cycle)
        self._timers.set("grace", grace_s, self._on_grace_over)

    def _on_grace_over(self) -> None:
        log.warning("the workers did not end in time: killing them")
        self._workers.kill()

    def _leave(self, *, whole_job: bool = True) -> None:
        cycle = self._crew.on_duty
        saved = cycle is not None and cycle.can_be_resumed
        facts = cycle.facts(None) if cycle is not None else None
        if cycle is not None:
            self._journal.write_ended(cycle, "left")
        number = self._signal or signal.SIGTERM
        self._member.leave(saved=saved, signal=number, facts=facts, whole_job=whole_job)
        self._crew.failures = {}
        code = ExitReason.PREEMPTED if saved else 128 + number
        what = "a saved generation exists" if saved else "nothing was saved"
        self._finish(m.Stop(exit_code=code, reason=f"shutdown requested; {what}"))

    # -- the end -----------------------------------------------------------------------------------------------

    def _on_stop(self, stop: m.Stop) -> None:
        if self._state == AgentState.LEAVING:
            return  # its own end is under way
        if self._state == AgentState.OUTSIDE:
            stop = self._fitness.stop_outside(stop)
        self.stop = stop
        cycle = self._crew.on_duty
        if cycle is None or cycle.all_ended:
            self._finish(stop)
            return
        self._state = AgentState.STOPPING
        self._workers.notify(cycle)
        preempted = stop.exit_code == ExitReason.PREEMPTED
        grace_s = cycle.layers.config.shutdown_grace if preempted else self.options.workers_stop_timeout_s
        self._timers.set("grace", grace_s, self._on_grace_over)

    def _finish(self, stop: m.Stop) -> None:
        self.stop, self._final = stop, True
        self._journal.write(EventKind.JOB_ENDED, exit_code=stop.exit_code, reason=stop.reason)

    def _give_up_on_link(self) -> None:
        reason = f"the control store gave no answer for {self.options.join_timeout_s:.0f} s (--rdzv-conf join_timeout=)"
        self._finish(m.Stop(exit_code=ExitReason.FAILED, reason=reason))
