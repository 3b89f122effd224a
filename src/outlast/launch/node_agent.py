"""The agent of a node: starts, watches and ends the workers as the coordinator decides.

The agent is a torch elastic agent, so that torch's options, results and error reports work with it.

All events come through one ``poll``: the fork server's socket (starts and exits), the workers' datagrams, and a mailbox
for the connection's threads, the watchdog and the signal handlers. Nothing in this thread blocks on the network. A
timer of this loop drives the heartbeat counter: if the loop hangs, the coordinator replaces the node.

States::

    OUTSIDE   not yet known to be healthy, or unhealthy: no slot is requested
    JOINING   requested a slot in the next cycle (a spare stays here)
    RUNNING   the cycle's workers run
    FINISHED  all workers exited with 0; other nodes may still fail
    LEAVING   a signal requested a shutdown; the workers may save
    STOPPING  the job is over; running workers are ended in order

From RUNNING a failure on any node leads to JOINING at once: the agent requests the next cycle while the fork server
still kills the workers. The next workers start once the coordinator has answered, the fork server has reported that all
old workers are gone, and their GPU memory is free.
"""

from __future__ import annotations

import logging
import math
import select
import signal
from enum import StrEnum

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from outlast.checkpoint.writer_client import WriterProcess
from outlast.errors import ExitReason, OutlastError
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.agent_events import AgentStops, HangSeen, SignalReceived, WatchdogFailed, WriterDied
from outlast.launch.checkups import CheckedUp, Checkups
from outlast.launch.control_link import GOODBYE_S, LinkDown, LinkFailed, LinkUp
from outlast.launch.coordinator_client import CoordinatorClient
from outlast.launch.cycle import ALONE_S, Cycle, WorkerLaunch
from outlast.launch.decisions import describe_notice, identify_root_cause
from outlast.launch.device_memory import MemoryReclaim, MemoryReclaimed
from outlast.launch.lingering import LingeringRanks
from outlast.launch.membership import REMIND_S
from outlast.launch.node_health import NodeHealth
from outlast.launch.node_journal import NodeJournal
from outlast.launch.node_metrics import AgentOutlook
from outlast.launch.workers import NodeWorkers, WorkerProcess
from outlast.policy.deadlines import NO_INIT, NO_SESSION, NOT_YET, Protection, Timeouts, describe_nodes
from outlast.policy.recovery_policy import Limits, describe_next_job, describe_saved
from outlast.runtime.board import KeptDurability
from outlast.runtime.event_loop import Mailbox, Timers
from outlast.runtime.fork_server import Cleared, Exited, FailedToStart, ForkServerReady, Started
from outlast.runtime.processes import describe_stuck
from outlast.runtime.store import TCPStore, open_cycle_store

log = logging.getLogger(__name__)
_ANSWER_MARGIN_S = 15.0
_BRIEF_GOODBYE_S = 0.2
"""How long a host that exits before the first cycle waits until its messages are sent."""
_PROTECTION_AFTER_S = 5.0
"""When the line on a run's protection is logged if no session has reported by then."""
_PLAIN_AFTER_S = 60.0
"""A script that has sent no heartbeat by then probably has no session."""
REAP_S = 30.0
"""How long a killed worker may take to end: one that takes longer is stuck in the kernel, in a driver or on a disk."""
_REPORT_S = 2.0
"""How long a worker's datagram may follow its write to the heartbeat memory, and its exit its peers' reports."""


class AgentState(StrEnum):
    """The agent's state; see the module's docstring."""

    OUTSIDE = "outside"
    JOINING = "joining"
    RUNNING = "running"
    FINISHED = "finished"
    LEAVING = "leaving"
    STOPPING = "stopping"


class NodeAgent(SimpleElasticAgent):
    """Run this node's workers as the coordinator decides.

    Args:
        launch: How the workers are started.
        workers: Starts and ends their processes; the agent closes it.
        writer: The node's checkpoint writer, which outlives the workers; the agent closes it. ``None``: each worker
            starts
            its own.
        client: This node's connection to the coordinator, not yet started.
        checkups: Checks this node; closed with the agent. ``None``: no health checks.
        memory: Waits for the GPU memory of ended workers; closed with the agent.
        mailbox: Receives the events of other threads and of signal handlers.
        began_s: Start time of the agent, by the monotonic clock.

    Thread: the main thread.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        *,
        workers: NodeWorkers,
        writer: WriterProcess | None,
        client: CoordinatorClient,
        checkups: Checkups | None,
        memory: MemoryReclaim,
        mailbox: Mailbox[object],
        began_s: float,
    ) -> None:
        super().__init__(launch.spec)
        self._launch, self.options = launch, launch.options
        self.stop = m.Stop(exit_code=ExitReason.FAILED, reason="the agent did not run")
        """How the job ended for this node."""
        self.is_host = False
        """Whether this process hosts the coordinator."""
        self.has_left = False
        """Whether this node was shut down while it held no slot, so that the job continues without it."""
        self._workers, self._writer, self._client, self._mailbox = workers, writer, client, mailbox
        self._memory = memory
        self._relay = client.link.relay
        self._journal, self._timers = NodeJournal(self.options, client.node, began_s=began_s), Timers()
        self._health = NodeHealth(
            checkups,
            client=client,
            journal=self._journal,
            timers=self._timers,
            is_alone=self.options.max_nodes == 1,
            run_dir=str(self.options.run_dir),
        )
        self._state = AgentState.OUTSIDE
        self._cycle: Cycle | None = None
        self._kept: tuple[KeptDurability, ...] = ()
        self._failures: dict[int, ProcessFailure] = {}
        """Workers of the newest cycle that failed by themselves, by global rank."""
        self._start: m.Start | None = None  # a cycle to start once the last one's workers are gone
        self._cycle_store: TCPStore | None = None
        self._signal, self._is_done = 0, False
        self._waits_for = ""
        self._num_missing = 0
        """Slots without a node at the coordinator's last report; meaningless once a cycle starts."""
        self._has_no_slot = False
        """The coordinator has reported that this node gets no slot."""
        self._protection: str | None = None
        """The last logged line on the protection; ``None``: none yet."""

    @property
    def job(self) -> str:
        """Name of the job; empty: not yet known."""
        return self._journal.job

    def outlook(self) -> AgentOutlook:
        """Return a snapshot for the metrics. Thread: any."""
        cycle, recovery_state, options = self._cycle, self._client.link.recovery_state, self.options
        config = options.fault_tolerance if cycle is None else cycle.layers.config
        timeouts = Timeouts.from_config(config, with_defaults=True)
        if cycle is not None and cycle.watchdog is not None and cycle.script_settings is not None:
            timeouts = cycle.timeouts
        limits = Limits(
            max_restarts=options.torchrun.max_restarts,
            max_restarts_total=options.torchrun.max_restarts_total,
            max_no_progress_cycles=config.max_no_progress_cycles,
        )
        return AgentOutlook(
            job=self.job,
            state=self._state,
            is_host=self.is_host,
            cycle=cycle,
            num_spares=self._client.num_spares,
            num_missing=self._num_missing if self._state == AgentState.JOINING else 0,
            recovery_state=recovery_state,
            budgets=None if recovery_state is None else m.LiveBudgets.of(recovery_state, limits),
            timeouts={
                **timeouts.by_setting(),
                "exit_timeout": config.exit_timeout,
                "node_heartbeat_timeout": config.node_heartbeat_timeout,
                "shutdown_grace": config.shutdown_grace,
                "join_timeout": options.join_timeout_s,
            },
            exit_code=self.stop.exit_code if self._is_done else None,  # the workers' exit codes are known then
        )

    @property
    def _running(self) -> Cycle | None:
        return self._cycle if self._cycle is not None and not self._cycle.over else None

    # -- torch's interface -------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        self._client.link.start()
        self._heartbeat()
        self._wait_for_link(self.options.join_timeout_s)
        while not self._is_done:
            self.wait_and_handle()
        has_failed = self._failures and self.stop.exit_code
        state = WorkerState.FAILED if has_failed else WorkerState.SUCCEEDED
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(state, {} if has_failed else dict.fromkeys(ranks), self._failures)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Close everything; remaining workers are killed."""
        never_ran = self._cycle is None
        self._health.close()
        self._memory.close()
        if self._cycle is not None:
            self._cycle.close(wait_for_logs=True)
            self._cycle.over = True  # metrics still show how its ranks ended
        self._workers.close()
        if self._writer is not None:
            self._writer.close()
        # A shutdown before the first cycle does not end the job: no node waits for a message.
        self._client.link.close(goodbye_timeout_s=_BRIEF_GOODBYE_S if never_ran and self._signal else GOODBYE_S)
        self._cycle_store = None
        self._journal.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        raise AssertionError("the agent starts workers by itself")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("the agent watches workers by itself")

    # -- the loop ----------------------------------------------------------------------------------------------

    def wait_and_handle(self) -> None:
        sources = [self._workers.fileno(), self._mailbox.fileno()]
        cycle = self._running
        reports = cycle.in_process.fileno() if cycle is not None else -1
        if reports >= 0:
            sources.append(reports)
        readable = _wait_readable(sources, self._timers.until_next_s())
        if reports in readable and cycle is not None:
            self._look_at_recovery(cycle)
            self._take_settings(cycle)
        if self._workers.fileno() in readable:
            self._on_worker_event(self._workers.receive())
        if self._mailbox.fileno() in readable:
            for event in self._mailbox.take_all():
                self._on_event(event)
        self._timers.fire()
        if cycle is not None and cycle.script_settings is None:
            self._take_settings(cycle)  # another reader may have taken the datagram of a worker that attached
        elif cycle is not None:
            cycle.apply_calculated_timeouts()
        self._advance()

    def _on_worker_event(self, event: ForkServerReady | Started | FailedToStart | Exited | Cleared | None) -> None:
        match event:
            case Started() if self._cycle is not None:
                if self._cycle.note_started(event):
                    self._client.send(m.Running(cycle=self._cycle.number))
                    workers, waited_s = list(self._cycle.workers.values()), self._memory.waited_s
                    self._journal.write_started(self._cycle.start, workers, gpu_memory_wait_s=waited_s)
            case FailedToStart():
                self._fail(self._journal.incident(IncidentKind.CANNOT_START, event.error))
            case Exited():
                self._on_exited(event)
            case Cleared():
                self._timers.cancel("reap")
                self._health.note_cleared()
            case None:
                self._timers.cancel("reap")
                self._on_workers_lost()

    def _on_event(self, event: object) -> None:
        match event:
            case m.Prepare():
                self._cycle_store = open_cycle_store(self._client.addr)
                self._client.send(m.Master(cycle=event.cycle, addr=self._client.addr, port=self._cycle_store.port))
            case m.Start():
                self._timers.cancel("answer")
                self._start = event
            case m.CycleOver():
                self._on_cycle_over(event)
            case m.Stop():
                self._on_stop(event)
            case m.Ran():
                self._client.note_ran(event)
                if self._protection is not None:  # spares may have come or gone
                    self._log_protection()
            case m.Wait():
                self._timers.cancel("answer")
                if event.place is not None:
                    self._num_missing = 0
                    self._client.wait_as_spare(event.place)
                level = logging.DEBUG if event.reason == self._waits_for else logging.INFO
                self._waits_for, self._has_no_slot = event.reason, True
                log.log(level, "node %s waits: %s", self._client.node, event.reason)
            case m.PeersFinished():
                if (cycle := self._running) is not None and cycle.number == event.cycle:
                    self._watch_lingering(cycle)
            case m.Decided():
                self._client.link.recovery_state = event.recovery_state
            case m.NodesMissing():
                self._num_missing = event.missing
                log.info("%s", event.reason)
            case m.Remark():
                log.warning("%s", event.text)
            case CheckedUp():
                self._health.take(event)
            case MemoryReclaimed():
                self._memory.take(event)
            case AgentStops():
                self._finish(event.stop)
            case HangSeen():
                self._on_hang(event)
            case SignalReceived():
                self._on_signal(event)
            case WriterDied():
                self._journal.write(EventKind.WRITER_ENDED, summary=event.summary)
            case LinkUp():
                self._on_link_up(event)
            case LinkDown():
                log.warning("the coordinator is out of reach (%s); training continues without it", event.error)
                if self._state in (AgentState.OUTSIDE, AgentState.JOINING, AgentState.FINISHED):
                    self._timers.set("link", self.options.join_timeout_s, self._give_up_on_link)
            case LinkFailed():
                self._finish(m.Stop(exit_code=event.exit_code, reason=event.error))
            case WatchdogFailed():
                log.error("the watchdog ended on an error: %r", event.error)
                why = f"the watchdog ended: {event.error!r}"
                self._fail(self._journal.incident(IncidentKind.CANNOT_START, why))
            case _:
                raise AssertionError(f"unexpected event {event!r}")

    def _heartbeat(self) -> None:
        """Show the coordinator that this loop runs, and report the first step of a cycle."""
        self._client.link.count += 1
        if (cycle := self._running) is not None and cycle.has_trained:
            self._client.report_step(cycle.number)
        self._timers.set("heartbeat", self._client.link.settings.heartbeat_interval_s, self._heartbeat)

    def _wait_for_link(self, left_s: float) -> None:
        """Log every ten seconds that the coordinator is not found yet."""

        def remind() -> None:
            problem = self._client.link.problem or "no response yet"
            log.info("waiting for the coordinator: %s; gives up in %.0f s", problem, max(0.0, left_s - REMIND_S))
            self._wait_for_link(left_s - REMIND_S)

        self._timers.set("first link", REMIND_S, remind)

    # -- joining and starting ----------------------------------------------------------------------------------

    def _on_link_up(self, event: LinkUp) -> None:
        self._timers.cancel("link")
        self._timers.cancel("first link")
        client, self.is_host = self._client, event.is_host
        is_other_job = event.job != self.job and not event.is_first
        if is_other_job and self._state in (AgentState.LEAVING, AgentState.STOPPING):
            return  # its own shutdown is under way
        if is_other_job:
            self._leave_job(event.job)
        client.note_term(event.term)
        if not event.is_first and not is_other_job:
            log.warning("the coordinator is reached again at %s", client.link.endpoint)
        else:
            endpoints = [str(endpoint) for endpoint in client.link.endpoints]
            self._journal.open(event.job, self._launch.argv, self._launch.spec.local_world_size, endpoints)
            if event.is_host:
                level = logging.INFO if self.options.max_nodes > 1 else logging.DEBUG
                log.log(level, "node %s hosts the coordinator at %s", client.node, client.link.endpoint)
        if self._state == AgentState.OUTSIDE:
            self._health.note_connected(is_host=event.is_host)
        elif is_other_job:
            self._join(None)
        else:
            client.register(
                is_running=self._state == AgentState.RUNNING,
                is_joining=self._state == AgentState.JOINING,
                has_finished=self._state == AgentState.FINISHED,
            )

    def _leave_job(self, other: str) -> None:
        """Abandon this node's part in its job: the run's coordinator serves another job."""
        reason = f"job {self.job} is over: the coordinator of this run began job {other}"
        log.warning("%s; this node joins it", reason)
        self._client.begin_job()
        self._start = None
        self._timers.cancel("answer")
        if (cycle := self._running) is not None:
            self._end_cycle(cycle, None, reason)
        self._kept = ()
        self._journal.write(EventKind.JOB_ENDED, exit_code=ExitReason.FAILED, reason=reason)

    def _join(self, ended: m.CycleFacts | None) -> None:
        self._num_missing = 0
        if self._state != AgentState.LEAVING:
            self._state = AgentState.JOINING
        if ended is not None:
            # A running coordinator gives up earlier than this; a stopped one never answers.
            self._timers.set("answer", self.options.join_timeout_s + _ANSWER_MARGIN_S, self._give_up_on_link)
        self._client.join(ended)

    def _advance(self) -> None:
        """Exit, join or start the next workers as soon as the conditions hold; called after all events."""
        if self._is_done:
            return
        if self._health.stop is not None:
            self._finish(self._health.stop)
            return
        if self._state == AgentState.OUTSIDE and self._health.may_join:
            self._join(None)
        if self._state != AgentState.JOINING or not self._workers.are_cleared:
            return
        if not self._health.uses_gpus:  # a health check uses GPU memory: it goes first
            self._memory.begin()
        if self._start is not None and not self._health.is_looking and not self._memory.is_awaited:
            start, self._start = self._start, None
            self._start_cycle(start)

    def _start_cycle(self, start: m.Start) -> None:
        if not self._client.take_place(start):
            return
        if start.node_rank != 0:
            self._cycle_store = None
        if (unhealthy := self._health.refuse(start.cycle)) is not None:
            self._journal.write_incident(unhealthy)
            self._join(m.CycleFacts(cycle=start.cycle, incident=unhealthy))
            return
        try:
            self._cycle = Cycle.prepare(
                self._launch,
                start,
                job=self.job,
                node=self._client.node,
                writer=self._writer_address(),
                relay=self._relay.address if self._relay is not None else "",
                kept=self._kept,
            )
        except (OSError, OutlastError) as error:
            incident = self._journal.incident(IncidentKind.CANNOT_START, str(error), cycle=start.cycle)
            self._join(m.CycleFacts(cycle=start.cycle, incident=incident))
            return
        base, size, ranks = start.base_rank, start.world_size, range(self._launch.spec.local_world_size)
        self._failures = {}
        self._worker_group.workers = [Worker(rank, base + rank, base + rank, size, size) for rank in ranks]
        self._worker_group.group_rank = start.node_rank  # type: ignore[assignment]
        self._worker_group.group_world_size = start.num_nodes  # type: ignore[assignment]
        self._state, self._has_no_slot = AgentState.RUNNING, False
        self._journal.begin_cycle(start.cycle)
        self._memory.note_started()
        if self._relay is not None:
            self._relay.begin_cycle(start.cycle)
        try:
            self._workers.start(self._cycle.spawns)
            self._cycle.watch(self._mailbox.put)
        except OutlastError as error:
            self._fail(self._journal.incident(IncidentKind.CANNOT_START, str(error)))
        self._timers.set("protection", _PROTECTION_AFTER_S, self._log_protection)
        self._timers.set("plain", _PLAIN_AFTER_S, self._log_protection)

    def _writer_address(self) -> str:
        """Return the address of the checkpoint writer; empty if there is none, or it died too often."""
        try:
            return self._writer.address if self._writer is not None else ""
        except OSError:
            return ""

    def _take_settings(self, cycle: Cycle) -> None:
        """Apply the settings of the script's config once a worker has reported them."""
        if cycle.over:
            return
        cycle.apply_script_settings()
        if cycle.script_settings is not None:
            self._client.report_settings(cycle.script_settings)
        if cycle.session_protection:
            self._log_protection()

    def _log_protection(self) -> None:
        """Log in one line what the run is protected against, once it is known and whenever it changes."""
        cycle = self._running
        if cycle is None or cycle.all_ended:
            return
        is_early = not cycle.had_session and self._timers.is_set("plain")
        if is_early and self._protection is not None:
            return
        options = self.options
        protection = Protection(
            max_restarts=options.torchrun.max_restarts,
            hangs=cycle.describe_hang_detection(is_early=is_early),
            nodes=describe_nodes(
                num_slots=options.num_slots,
                max_nodes=options.max_nodes,
                min_nodes=cycle.layers.config.min_nodes,
                num_spares=self._client.num_spares,
            ),
            of_session=cycle.session_protection,
            why_unknown=NOT_YET if is_early else NO_INIT if cycle.had_session else NO_SESSION,
        )
        text = protection.describe()
        if text == self._protection:
            return
        self._protection = text
        level = logging.WARNING if protection.has_gap else logging.INFO
        log.log(level if cycle.start.node_rank == 0 else logging.DEBUG, "%s", text)

    # -- a worker's end ----------------------------------------------------------------------------------------

    def _on_exited(self, event: Exited) -> None:
        cycle = self._cycle
        worker = cycle.note_exit(event) if cycle is not None else None
        if cycle is None or worker is None:
            return
        killed_by_us = cycle.over or self._state == AgentState.STOPPING
        self._look_at_recovery(cycle, waits=not cycle.all_ended)
        spared = bool(event.exit_code) and not killed_by_us and cycle.continues_without(worker)
        if cycle.job == self.job:  # otherwise this node has left the cycle's job
            self._journal.write_exited(worker, event, killed_by_us=killed_by_us)
        if spared:
            self._continue_without(worker, event.key, cycle)
            self._look_at_recovery(cycle)
        if killed_by_us:
            if self._state == AgentState.STOPPING and cycle.all_ended:
                self._finish(self.stop)
            elif self._state == AgentState.JOINING and cycle.all_ended and self._timers.is_set("grace"):
                self._timers.cancel("grace")  # no worker is left to wait for
                self._clear()
        elif self._state == AgentState.LEAVING:
            if cycle.all_ended:
                self._leave()
            elif cycle.lacks_a_rank and not self._timers.is_set("alone"):
                self._timers.set("alone", ALONE_S, self._on_grace_over)
        elif spared or event.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED):
            if cycle.lacks_a_rank:
                self._fail_when_clear(cycle)  # another worker failed a moment ago
            elif cycle.all_ended:
                self._on_all_ended(cycle)
            elif event.exit_code == ExitReason.FINISHED:
                self._watch_lingering(cycle)
        else:
            self._failures[worker.global_rank] = ProcessFailure(
                local_rank=worker.local_rank,
                pid=event.pid,
                exitcode=event.exit_code,
                error_file=cycle.logs.destinations.error_files.get(worker.local_rank) or "",
            )
            self._fail_when_clear(cycle)

    def _fail_when_clear(self, cycle: Cycle) -> None:
        """End the cycle for a failed worker once the first failure is clear: other workers may be about to fail,
        too."""
        wait_s = cycle.wait_for_others_s
        if not wait_s:
            self._timers.cancel("clear")
            self._fail(cycle.describe_failure())
        elif not self._timers.is_set("clear"):
            self._timers.set("clear", wait_s, lambda: self._fail(cycle.describe_failure()))

    def _watch_lingering(self, cycle: Cycle) -> None:
        """Follow the workers that still run after the first clean exit of the cycle."""
        if self._state != AgentState.RUNNING or self._timers.is_set("lingering"):
            return
        lingering = LingeringRanks(cycle)

        def look() -> None:
            if cycle.over or cycle.all_ended or self._state != AgentState.RUNNING:
                return
            if (incident := lingering.look()) is not None:
                self._fail(incident)
            else:
                self._timers.set("lingering", lingering.look_s, look)

        self._timers.set("lingering", lingering.look_s, look)

    def _on_all_ended(self, cycle: Cycle) -> None:
        if ExitReason.PREEMPTED in cycle.exit_codes:
            # A peer's workers or the scheduler delivered the preemption notice, not this agent.
            self._leave()
            return
        self._state = AgentState.FINISHED
        incident = cycle.in_process.describe_unfinished()
        self._write_ended(cycle, "finished" if incident is None else incident.describe())
        self._client.finish(cycle.facts(incident))

    def _fail(self, incident: Incident) -> None:
        """End the running cycle because of an incident here."""
        cycle = self._running
        if cycle is None or self._state not in (AgentState.RUNNING, AgentState.FINISHED):
            return
        self._journal.write_incident(incident)
        self._log_incident(incident)
        self._end_cycle(cycle, cycle.facts(incident), incident.describe())

    def _write_ended(self, cycle: Cycle, reason: str) -> None:
        self._journal.write(EventKind.CYCLE_ENDED, reason=reason, iterations=cycle.iterations())

    def _log_incident(self, incident: Incident) -> None:
        """Log an incident of this node; on the coordinator's node its decision contains the same."""
        log.log(logging.DEBUG if self.is_host else logging.WARNING, "%s", incident.describe())

    def _on_hang(self, hang: HangSeen) -> None:
        cycle = self._running
        if cycle is None or cycle.number != hang.cycle or self._state != AgentState.RUNNING:
            return
        incident = hang.report.incident(job=cycle.job, cycle=cycle.number, node=cycle.node)
        # The other nodes examine their ranks at the same time.
        self._client.send(m.Hung(cycle=cycle.number, incident=incident, expired=tuple(hang.report.expired)))
        positions = cycle.examine(hang.report)
        if is_alone := cycle.start.num_nodes == 1:
            incident = identify_root_cause(incident, positions)
        self._journal.write_incident(incident)
        log.debug("%s", incident.describe())  # the watchdog has logged the exceeded timeout
        # The root cause is found from the reports of all nodes; the coordinator's decision contains it.
        reason = incident.describe() if is_alone else f"a hang; first seen: {incident.evidence['summary']}"
        self._end_cycle(cycle, cycle.facts(None, positions), reason)
        self._health.suspect()

    def _on_cycle_over(self, over: m.CycleOver) -> None:
        start = self._start
        if start is not None and start.cycle == over.cycle:  # it ended before it could start here
            self._start = None
            if self._client.take_place(start):
                self._join(m.CycleFacts(cycle=start.cycle))
            return
        cycle = self._running
        if cycle is None or cycle.number != over.cycle or self._state not in (AgentState.RUNNING, AgentState.FINISHED):
            return
        if over.awaits_exits and not cycle.all_ended:
            # The ranks here are about to exit like those elsewhere, or wait for them.
            if not self._timers.is_set("clear"):  # otherwise a worker has failed, and the others' time runs
                self._timers.set("clear", cycle.follow_s, lambda: self._fail_or_follow(cycle, over.reason))
            return
        level = logging.DEBUG if self.is_host else logging.WARNING  # the decision is logged there
        log.log(level, "cycle %d is over: %s", over.cycle, over.reason)
        positions = cycle.examine(None) if over.examine and self._state == AgentState.RUNNING else ()
        self._end_cycle(cycle, cycle.facts(None, positions), over.reason)

    def _fail_or_follow(self, cycle: Cycle, reason: str) -> None:
        """End a cycle that has ended elsewhere, with the failures here since then."""
        if any(code not in (None, ExitReason.FINISHED) for code in cycle.exit_codes):
            self._fail(cycle.describe_failure())
        elif cycle is self._running and self._state in (AgentState.RUNNING, AgentState.FINISHED):
            self._end_cycle(cycle, cycle.facts(None), reason)

    def _end_cycle(self, cycle: Cycle, facts: m.CycleFacts | None, reason: str, *, are_gone: bool = False) -> None:
        """End the cycle here and request the next one.

        Args:
            cycle: The running one.
            facts: The report on it; ``None``: the coordinator does not know the cycle.
            reason: Why it ends.
            are_gone: Its workers are gone already.
        """
        cycle.over = True
        if self._relay is not None:
            self._relay.end_cycle()
        for name in ("clear", "lingering"):
            self._timers.cancel(name)
        self._write_ended(cycle, reason)
        if facts is not None:
            self._join(facts)
        else:
            self._state = AgentState.JOINING
        grace_s = self.options.torchrun.restart_grace
        gently = grace_s > 0 and not cycle.all_ended and not are_gone
        if not are_gone:
            self._workers.begin_clearing(gently=gently)
        if gently:
            self._timers.set("grace", grace_s, self._clear)
        elif not are_gone:
            self._timers.set("reap", REAP_S, self._on_unreapable)
        self._kept = cycle.kept
        cycle.close()
        if facts is not None and facts.incident is not None:
            self._health.suspect()

    def _clear(self) -> None:
        """Kill the remaining workers, with a time limit for their end."""
        self._workers.clear()
        self._timers.set("reap", REAP_S, self._on_unreapable)

    def _kill(self) -> None:
        for name in ("grace", "alone"):
            self._timers.cancel(name)
        self._workers.kill()
        self._timers.set("reap", REAP_S, self._on_unreapable)

    def _on_unreapable(self) -> None:
        """Leave the job because killed workers do not end: no worker can start here, and a spare may take the slot."""
        cycle = self._cycle
        stuck = [worker for worker in cycle.workers.values() if worker.exit_code is None] if cycle is not None else []
        if self._state in (AgentState.STOPPING, AgentState.LEAVING) and not stuck:
            return
        names = [f"rank {one.global_rank}, {describe_stuck(one.pid)}" for one in stuck if one.pid]
        what = "; ".join(names) or "the process that starts them does not report their end"
        summary = f"killed workers have not ended within {REAP_S:g} s: {what}; the node needs to be looked at"
        incident = self._journal.incident(IncidentKind.NODE_UNHEALTHY, summary)
        self._journal.write_incident(incident)
        log.error("%s", incident.describe())
        if self._state == AgentState.STOPPING:
            self._finish(self.stop)
        elif self._state == AgentState.LEAVING:
            self._leave()
        else:
            self._client.send(m.Unhealthy(incident=incident, stays=self.options.max_nodes > 1))
            if self.options.max_nodes > 1:
                self._client.send(m.Leave(signal=signal.SIGKILL, whole_job=False))
            self._finish(m.Stop(exit_code=ExitReason.UNHEALTHY_NODE, reason=incident.describe()))

    def _on_workers_lost(self) -> None:
        """Continue after the fork server's death; the kernel has killed its workers with it."""
        if self._state == AgentState.STOPPING:
            self._finish(self.stop)
        elif self._state == AgentState.LEAVING:
            self._leave()
        else:
            if self._state == AgentState.RUNNING and (cycle := self._running) is not None:
                why = "the process that starts workers died"
                incident = self._journal.incident(IncidentKind.WORKER_DIED, why, exit_code=-9)
                self._journal.write_incident(incident)
                self._end_cycle(cycle, cycle.facts(incident), incident.describe(), are_gone=True)
            self._health.note_cleared()  # a health check may wait for the workers' end

    # -- restarts inside the processes -------------------------------------------------------------------------

    def _look_at_recovery(self, cycle: Cycle, *, waits: bool = True) -> None:
        """Report an in-process restart to the coordinator, if there was one."""
        if cycle.over:
            return
        recovered = cycle.in_process.take_recovered(waits=waits)
        cycle.look()
        if self._state != AgentState.RUNNING:
            return
        if recovered is None:
            if cycle.in_process.awaits_report and not self._timers.is_set("in-process"):
                self._timers.set("in-process", _REPORT_S, lambda: self._look_at_recovery(cycle, waits=False))
            return
        self._timers.cancel("in-process")
        incident = cycle.in_process.incident_of(recovered)
        if incident.node == self._client.node and not cycle.has_lost(incident.rank):
            self._journal.write_incident(incident)
        log.warning("restart %d in process, after: %s", recovered.restart_count, incident.describe())
        self._client.send(
            m.Restarted(
                cycle=cycle.number,
                call=recovered.call,
                restart_count=recovered.restart_count,
                incident=incident,
                durable_iteration=cycle.durable_iteration,
                committed_iteration=cycle.committed_iteration,
                progress_known=cycle.progress_known,
            )
        )
        if cycle.in_process.awaits_report:
            self._look_at_recovery(cycle)

    def _continue_without(self, worker: WorkerProcess, key: int, cycle: Cycle) -> None:
        """Let the peers of a lost worker replace it, within their time limit."""
        assert worker.lost is not None
        self._workers.sweep(key)
        if self._relay is not None:
            self._relay.lose(worker.global_rank)
        self._journal.write_incident(worker.lost)
        log.warning("%s; the other ranks recover in process", worker.lost.describe())
        if (patience_s := cycle.in_process.patience_s(worker)) is not None:
            self._timers.set(f"lost-{key}", patience_s, lambda: self._end_if_not_recovered(worker, cycle))

    def _end_if_not_recovered(self, worker: WorkerProcess, cycle: Cycle) -> None:
        if cycle.over or self._state != AgentState.RUNNING or cycle.in_process.has_resumed(worker):
            return
        assert worker.lost is not None
        reason = f"{worker.lost.describe()}; the other ranks did not recover in process in time"
        log.warning("%s", reason)
        self._end_cycle(cycle, cycle.facts(worker.lost), reason)

    # -- leaving -----------------------------------------------------------------------------------------------

    def _on_signal(self, received: SignalReceived) -> None:
        name = signal.Signals(received.signal).name
        if self._state in (AgentState.LEAVING, AgentState.STOPPING):
            log.warning("received %s again: ending the workers now", name)
            self._kill()
            return
        self._signal = received.signal
        self._journal.write(EventKind.NOTICE, signal=received.signal)
        cycle = self._running
        if self._state != AgentState.RUNNING or cycle is None or not cycle.has_started:
            log.info("received %s: shutting down", name)
            self._leave(whole_job=self._state != AgentState.FINISHED and self._cycle is not None)
            return
        grace_s = cycle.layers.config.shutdown_grace
        log.info("received %s: the workers have %.0f s to save (a second signal ends them)", name, grace_s)
        self._state = AgentState.LEAVING
        self._client.send(m.Detected(signal=received.signal))  # first: other nodes shut down because of these workers
        self._workers.notify(cycle.workers)
        self._timers.set("grace", grace_s, self._on_grace_over)

    def _on_grace_over(self) -> None:
        log.warning("the workers did not end in time: killing them")
        self._kill()

    def _leave(self, *, whole_job: bool = True) -> None:
        cycle = self._running
        saved = cycle.can_be_resumed if cycle is not None else self._client.has_saved
        facts = cycle.facts(None) if cycle is not None else None
        if cycle is not None:
            self._write_ended(cycle, "left")
        self._client.send(m.Leave(saved=saved, signal=self._signal, facts=facts, whole_job=whole_job))
        self._failures = {}
        code = ExitReason.PREEMPTED if saved else 128 + (self._signal or signal.SIGTERM)
        what = describe_saved(saved, has_session=facts is None or facts.had_session)
        if cycle is not None and facts is not None and facts.progress_known:
            has_looked = facts.durable_iteration is not None or not cycle.start.has_checkpoint
            what += f"; {describe_next_job(facts.committed_iteration, facts.durable_iteration)}" if has_looked else ""
        self.has_left = self._has_no_slot and cycle is None
        if self.has_left:
            what = "this node held no slot, and the job continues without it"
        received = f"{describe_notice({self._client.node: self._signal})}; " if self._signal else ""
        self._finish(m.Stop(exit_code=code, reason=f"{received}shutdown requested; {what}"))

    # -- the end -----------------------------------------------------------------------------------------------

    def _on_stop(self, stop: m.Stop) -> None:
        if self._state in (AgentState.LEAVING, AgentState.STOPPING) and not stop.is_replaced:
            return  # its own shutdown is under way
        # The host waits for this message, but not for this node's workers, checkpoint writer and logs.
        self._client.send(m.Bye())
        self._client.link.stop_taking_over()
        if self._state == AgentState.OUTSIDE:
            stop = self._health.stop_outside(stop)
        if stop.is_replaced:
            self._journal.close()  # later events would be attributed to the other agent
        self.stop = stop
        cycle = self._running
        if cycle is None or cycle.all_ended:
            self._finish(stop)
            return
        self._state = AgentState.STOPPING
        if stop.is_replaced:  # their saves no longer count
            self._kill()
            return
        self._workers.notify(cycle.workers)
        preempted = stop.exit_code == ExitReason.PREEMPTED
        grace_s = cycle.layers.config.shutdown_grace if preempted else self.options.workers_stop_timeout_s
        self._timers.set("grace", grace_s, self._on_grace_over)

    def _finish(self, stop: m.Stop) -> None:
        self.stop, self._is_done = stop, True
        self._client.link.stop_taking_over()
        self._journal.write(EventKind.JOB_ENDED, exit_code=stop.exit_code, reason=stop.reason)

    def _give_up_on_link(self) -> None:
        reason = f"the coordinator did not respond for {self.options.join_timeout_s:.0f} s (--rdzv-conf join_timeout=)"
        code = ExitReason.FAILED
        if self._client.has_saved:
            code, reason = ExitReason.PREEMPTED, f"{reason}; a saved checkpoint exists"
        self._finish(m.Stop(exit_code=code, reason=reason))


def _wait_readable(descriptors: list[int], timeout_s: float | None) -> set[int]:
    """Return the readable descriptors; ``select`` supports none above 1023."""
    waiting = select.poll()
    for fd in descriptors:
        waiting.register(fd, select.POLLIN)
    return {fd for fd, _ in waiting.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3))}
