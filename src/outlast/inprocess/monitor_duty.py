"""The duty of the agent process for a rank in a wrapped function: watch the rank from outside, and report for it.

A rank's :class:`~outlast.inprocess.monitor_client.MonitorLink` begins the duty (:mod:`outlast.runtime.agent_process`).
It carries the rank's reports to the relay and orders to the rank (:mod:`outlast.inprocess.relay_client`), reports a
rank that died or hangs, and ends a rank that cannot be interrupted. Before it reports a hang it reads the rank's stack:
a rank that waits for others is not the root cause.

The duty ends with its rank. It is an event loop in one thread, and imports no torch.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from outlast import clock, logs
from outlast.decoding import from_json
from outlast.inprocess import protocol as m
from outlast.inprocess.agent_link import AgentLink, close_link, open_link
from outlast.inprocess.progress import Page, RankWatch
from outlast.inprocess.protocol import MonitorTask
from outlast.inprocess.relay_client import RelayClient
from outlast.monitor import stacks
from outlast.policy import inprocess_protocol as p
from outlast.policy.inprocess_protocol import WAITS
from outlast.runtime import files
from outlast.runtime.processes import send_signal

log = logging.getLogger(__name__)

_CLOSED_S = 1.0
"""Seconds between the end of the rank's socket and the end of its process; later, the rank has left the wrapper."""


def read_stack_position(pid: int, timeout_s: float = 0.1) -> tuple[str, bool | None] | None:
    """Return the main thread's innermost line of user code, and whether it waits for others (``None``: unknown).

    ``None`` where the process does not respond or has no such line. Blocks: some milliseconds, at most ``timeout_s``.
    """
    stack = stacks.parse(stacks.dump(pid, timeout_s=timeout_s))
    return (stack.line, stack.waits_in_collective) if stack.line is not None else None


class _MonitorDuty:
    """The watch over one rank.

    Args:
        task: Of the duty.
        rank: The socket to the rank; this object owns it.
        page: The rank's page; this object owns it.
        pidfd: Of the rank's process; this object owns it.
        link: To the coordinator; ``None``: the agent of ``outlast run`` has it.
    """

    def __init__(self, task: MonitorTask, rank: socket.socket, page: Page, pidfd: int, link: AgentLink | None) -> None:
        self._task, self._rank, self._page, self._pidfd = task, rank, page, pidfd
        self._selector = selectors.DefaultSelector()
        self._watch = RankWatch(page, task)
        self._rank_is_gone = False
        self._has_left = False
        self._closed_s: float | None = None
        self._kill_s: float | None = None
        self._stuck: p.RankFault | None = None
        self._self_report: p.RankFault | None = None
        self._link, self._known = link, m.Coordinators(addresses=())
        relay = task.relay if link is None else link.relay_address
        self._coordinator = RelayClient(self._selector, task, relay, on_order=self._on_order)
        rank.setblocking(False)
        self._selector.register(rank, selectors.EVENT_READ, self._on_rank)
        self._selector.register(pidfd, selectors.EVENT_READ, self._on_death)

    def run(self) -> None:
        if self._link is not None:
            self._send_to_rank(m.Listening(address=self._link.address, offer=self._link.offer))
        try:
            while not (self._rank_is_gone and self._coordinator.is_over):
                due_s = self._look()
                for key, events in self._selector.select(max(0.0, due_s - clock.now_s())):
                    # An event before this one may have closed it, and its number may be in use again.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(events)
        finally:
            self._coordinator.close()
            self._rank.close()
            os.close(self._pidfd)
            self._selector.close()
            self._page.close()

    def _look(self) -> float:
        """Do what is due, and return when the next call is due."""
        now_s = clock.now_s()
        if self._link is not None and (known := self._link.known) != self._known:
            self._known = known
            self._send_to_rank(known)
        due = [now_s + self._task.process_interval_s]
        if not self._rank_is_gone:
            due += self._look_at_rank(now_s)
        due.append(self._coordinator.look(now_s))
        return min(due)

    # -- the rank ----------------------------------------------------------------------------------------------

    def _look_at_rank(self, now_s: float) -> list[float]:
        due = []
        if self._closed_s is not None:
            if now_s >= self._closed_s:
                self._lose_rank(p.Left(reason="the rank left the wrapper"))
                return [now_s]
            due.append(self._closed_s)
        if self._kill_s is not None:
            if now_s >= self._kill_s:
                self._signal(signal.SIGKILL)
                self._kill_s = None
            else:
                due.append(self._kill_s)
        if self._self_report is not None:
            self._coordinator.report(self._self_report)
            self._self_report = None
        found, next_ns = self._watch.look(clock.now_ns())
        if found is not None and found.kind == p.RankFaultKind.SOFT_TIMEOUT:
            log.warning("rank %d: %s", self._task.initial_rank, found.summary)
            self._coordinator.report(self._add_position(found))
        elif found is not None and self._stuck is None:
            log.warning("rank %d is ended: %s", self._task.initial_rank, found.summary)
            self._stuck = found
            due.append(self._end_rank())
        if next_ns is not None:
            due.append(next_ns / 1e9)
        return due

    def _on_rank(self, _: int) -> None:
        if self._take_report() is False:
            self._selector.unregister(self._rank)
            self._closed_s = clock.now_s() + (0.0 if self._coordinator.is_over or self._has_left else _CLOSED_S)

    def _take_report(self) -> bool | None:
        """Process a packet of the rank; return ``False`` at the end of the socket, ``None`` without a packet."""
        try:
            data = self._rank.recv(m.MAX_PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if data:
            self._on_report(data)
        return bool(data)

    def _on_report(self, data: bytes) -> None:
        message: m.FromRank = m.decode(data, m.FromRank)
        match message:
            case m.Connect() as order:
                if self._link is not None:
                    self._link.connect(order, is_new=False)
                self._coordinator.connect()
            case m.Reconnect() as known:
                if known.final_report is not None:
                    self._note_left()
                if self._link is not None:
                    self._link.connect(known.connect, is_new=True)
                self._coordinator.reconnect(known)
            case report:
                if isinstance(report, p.Left):
                    self._note_left()
                if self._stuck is None:  # else it is being ended, and must not be in the next call
                    self._coordinator.report(report)

    def _note_left(self) -> None:
        self._has_left = True
        self._watch.note_end()

    def _on_death(self, _: int) -> None:
        while self._take_report():
            pass  # sent before it ended
        if not self._coordinator.is_over and not self._has_left:
            log.info("rank %d (pid %d) is gone", self._task.initial_rank, self._task.pid)
        fault = p.RankFault(
            initial_rank=self._task.initial_rank,
            restart_count=self._coordinator.restart_count,
            kind=p.RankFaultKind.DIED,
        )
        self._lose_rank(m.Gone(fault=self._stuck or fault))

    def _lose_rank(self, final_report: m.Gone | p.Left) -> None:
        if self._rank_is_gone:
            return
        self._rank_is_gone = True
        for watched in (self._pidfd, self._rank):
            with suppress(KeyError):  # the socket ended before
                self._selector.unregister(watched)
        self._coordinator.end(final_report)

    def _on_order(self, order: p.Order) -> None:
        now_ns = clock.now_ns()
        match order:
            case p.Go(restart_count=restart_count, ranks=ranks):
                if ranks.get(self._task.initial_rank) is not None:
                    self._watch.note_go(restart_count, now_ns)
            case p.Restart(faults=faults):
                self._self_report = self._report_self(faults)
                self._watch.note_leave(now_ns)
            case p.Finish() | p.Abort():
                self._watch.note_leave(now_ns)
                self._watch.note_end()
            case p.Expel():
                self._watch.note_end()
                self._expel()
        if not self._rank_is_gone:
            self._send_to_rank(order)

    def _expel(self) -> None:
        log.warning("rank %d is removed and ended", self._task.initial_rank)
        self._end_rank()

    def _end_rank(self) -> float:
        if self._kill_s is None:
            grace_s = self._task.termination_grace_s
            self._kill_s = clock.now_s() + grace_s
            if grace_s > 0:
                self._signal(signal.SIGTERM)
                self._signal(signal.SIGCONT)  # a stopped process handles nothing else
        return self._kill_s

    def _signal(self, number: signal.Signals) -> None:
        with suppress(OSError):  # it ended by itself meanwhile
            send_signal(self._pidfd, self._task.pid, number)

    def _send_to_rank(self, message: m.FromMonitor) -> None:
        try:
            self._rank.send(m.encode(message))
        except OSError as error:
            log.debug("the rank accepts nothing: %s", error)  # its end is detected elsewhere

    def _report_self(self, faults: tuple[p.RankFault, ...]) -> p.RankFault | None:
        """Return the fault of this rank where all that reported waited for another one; ``None``: this rank waited,
        too.

        The rank is about to be interrupted, a moment before its own timeout would have been exceeded.
        """
        if not faults or not all(fault.is_victims for fault in faults):
            return None
        idle = self._watch.describe_idle(clock.now_ns())
        fault = None if idle is None else self._add_position(idle)
        return None if fault is None or fault.is_victims else fault

    def _add_position(self, fault: p.RankFault) -> p.RankFault:
        if (position := read_stack_position(self._task.pid)) is None:
            return fault
        line, waits = position
        summary = f"{fault.summary}, {'waiting for other ranks at' if waits else 'at'} {line}"
        evidence = {"stack_line": line, WAITS: {True: "yes", False: "no", None: "unknown"}[waits]}
        return msgspec.structs.replace(fault, summary=summary, evidence=evidence)


def run_duty(task: bytes, rank: socket.socket, fds: list[int], pidfd: int) -> None:
    """Run in the agent process; see :class:`outlast.runtime.agent_process.AgentDuty`.

    Args:
        task: A :class:`~outlast.inprocess.protocol.MonitorTask`, as JSON.
        rank: The socket to the rank.
        fds: The rank's page.
        pidfd: Of the rank's process.
    """
    given = from_json(task, MonitorTask)
    with _logging:
        if given.log_path:
            logs.configure("agent", node=given.node, path=given.log_path, least=logging.INFO)
        elif not log.isEnabledFor(logging.DEBUG):
            for part in ("outlast.inprocess", "outlast.launch"):
                logging.getLogger(part).setLevel(logging.WARNING)
    if given.pid_path:
        _write_pid(Path(given.pid_path))
    link = None if given.relay else open_link(given)
    try:
        _MonitorDuty(given, rank, Page(fds[0]), pidfd, link).run()
    finally:
        if link is not None:
            close_link(given)


_logging = threading.Lock()


def _write_pid(path: Path) -> None:
    """Write this process's id to a file; a failure is logged.

    Blocks: up to ``files.DISK_S`` where the disk does not respond.
    """
    try:
        files.in_time(path, lambda: files.write_atomically(path, f"{os.getpid()}\n".encode()))
    except OSError as error:
        log.warning("the agent process's id is not in %s (monitor_process_pidfile): %s", path, error)
