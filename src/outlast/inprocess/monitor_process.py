"""The monitor process: it watches one rank from outside, and reports for it.

One per rank, started by its :class:`~outlast.inprocess.monitor_client.MonitorLink`. It carries the rank's reports to
the hub and the hub's orders to the rank (:mod:`outlast.inprocess.hub_client`), reports what the rank cannot (that it is
gone, that its main thread makes no progress), and ends a rank that is stuck. One of the monitor processes hosts the
hub, beside all that.

Before a hang is reported, the rank's stack is read: a rank that waits for others is a victim of the hang, not the
cause.

It ends with its rank, however that one ends, unless its hub is still needed. It is an event loop in one thread, waits
for deadlines, and imports no torch.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass

import msgspec

from outlast import clock, logs
from outlast.decoding import from_json
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.failover.bootstrap import BootstrapProxy
from outlast.inprocess.hub_client import HubClient
from outlast.inprocess.progress import Page, RankWatch, SoftTimeout
from outlast.inprocess.protocol import MonitorTask
from outlast.monitor import stacks
from outlast.policy.inprocess_protocol import WAITS

__all__ = ["StackPosition", "main", "read_stack_position"]


_LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class StackPosition:
    """Where a rank stood when its stack was taken."""

    line: str
    """The innermost line of the user's code."""
    waits: bool | None
    """It waits for other ranks; ``None`` = that cannot be told."""

    @property
    def evidence(self) -> dict[str, str]:
        """What a fault tells of it."""
        waits = {True: "yes", False: "no", None: "unknown"}[self.waits]
        return {"stack_line": self.line, WAITS: waits}


def read_stack_position(pid: int, timeout_s: float = 0.1) -> StackPosition | None:
    """Return where the main thread of a process stands; ``None`` where it does not tell.

    Blocks: usually a few milliseconds, at most ``timeout_s``.
    """
    dump = stacks.Dump(pid)
    if not dump.request():
        return None
    end_s = clock.now_s() + timeout_s
    while not dump.is_complete():
        if clock.now_s() >= end_s:
            return None
        time.sleep(_LOOK_S)  # the file tells nobody when it grows
    stack = stacks.parse(dump.text())
    return StackPosition(stack.line, stack.waits_in_collective) if stack.line is not None else None


log = logging.getLogger("outlast.inprocess.monitor_process")

_CLOSED_S = 1.0
"""Seconds between the end of the rank's socket and the end of its process; later, it left the wrapper and lives."""
_LATE_S = 0.5
"""Seconds that this process may be late before it excuses the silence of others by its own."""


class MonitorProcess:
    """One monitor process.

    Args:
        task: What it was told.
        rank: The socket to the rank; this object owns it.
        page: The rank's page; this object owns it.
        pidfd: Of the rank's process; this object owns it.
    """

    def __init__(self, task: MonitorTask, rank: socket.socket, page: Page, pidfd: int) -> None:
        self._task, self._rank, self._page, self._pidfd = task, rank, page, pidfd
        self._selector = selectors.DefaultSelector()
        self._watch = RankWatch(page, task)
        self._rank_is_gone = False
        self._has_left = False
        self._closed_s: float | None = None
        self._kill_s: float | None = None
        self._stuck: m.RankFault | None = None
        self._self_report: m.RankFault | None = None
        self._connect: m.Connect | None = None
        self._is_ready = False
        self._stand_in: BootstrapProxy | None = None
        self._is_asking = False
        self._looked_s = clock.now_s()
        self._uplink = HubClient(self._selector, task, on_order=self._order, on_candidates=self._tell_rank)
        rank.setblocking(False)
        self._selector.register(rank, selectors.EVENT_READ, self._on_rank)
        self._selector.register(pidfd, selectors.EVENT_READ, self._on_death)

    def run(self) -> int:
        """Serve until nobody needs this process; return its exit code."""
        self._tell_rank(m.Listening(address=self._uplink.address))
        try:
            while not (self._rank_is_gone and not self._is_asking and self._uplink.is_done):
                due_s = self._look()
                for key, events in self._selector.select(max(0.0, due_s - clock.now_s())):
                    # Not what an event before this one has closed; its number may be another's by now.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(events)
        finally:
            if self._stand_in is not None:
                self._stand_in.close()
            self._uplink.close()
            self._rank.close()
            os.close(self._pidfd)
            self._selector.close()
            self._page.close()
        return 0

    def _look(self) -> float:
        """Do what is due, and return when to look again."""
        now_s = clock.now_s()
        if now_s > self._looked_s + self._task.process_interval_s + _LATE_S:
            log.info("this process did not run for a while")
            self._uplink.discount_pause()
        self._looked_s = now_s
        due = [now_s + self._task.process_interval_s]
        if not self._rank_is_gone:
            due.append(self._look_at_rank(now_s))
        due.append(self._uplink.look(now_s))
        return min(due)

    # -- the rank ----------------------------------------------------------------------------------------------

    def _look_at_rank(self, now_s: float) -> float:
        due = [now_s + self._task.process_interval_s]
        if self._closed_s is not None:
            if now_s >= self._closed_s:
                self._lose_rank(m.Left(reason="the rank left the wrapper"))
                return now_s
            due.append(self._closed_s)
        if self._kill_s is not None:
            if now_s >= self._kill_s:
                self._signal(signal.SIGKILL)
                self._kill_s = None
            else:
                due.append(self._kill_s)
        if self._self_report is not None:
            self._uplink.report(self._self_report)
            self._self_report = None
        found, next_ns = self._watch.look(clock.now_ns())
        if isinstance(found, SoftTimeout):
            log.warning("rank %d: %s", self._task.initial_rank, found.summary)
            self._uplink.report(self._soft_timeout(found))
        elif found is not None and self._stuck is None:
            log.warning("rank %d is ended: %s", self._task.initial_rank, found.summary)
            self._stuck = self._fault(found.restart_count, found.kind, found.summary)
            self._signal(signal.SIGKILL)
        if next_ns is not None:
            due.append(next_ns / 1e9)
        return min(due)

    def _on_rank(self, _: int) -> None:
        if (data := self._receive()) is None:
            return
        if data:
            self._hear(data)
        else:
            self._selector.unregister(self._rank)
            self._closed_s = clock.now_s() + (0.0 if self._uplink.is_over or self._has_left else _CLOSED_S)

    def _receive(self) -> bytes | None:
        """Return a packet of the rank's; empty: it was the last one; ``None``: there is none now."""
        try:
            return self._rank.recv(m.MAX_PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _hear(self, data: bytes) -> None:
        match m.decode_from_rank(data):
            case m.Connect() as order:
                self._connect = order
                self._uplink.connect(order)
            case m.Reconnect() as known:
                if known.final_report is not None:
                    self._has_left = True
                    self._watch.note_end()
                self._is_ready = True  # or whoever takes the hub's place knows
                self._uplink.reconnect(known)
            case report:
                self._is_ready |= isinstance(report, m.RankReady)
                if isinstance(report, m.Left):
                    self._has_left = True
                    self._watch.note_end()
                self._uplink.report(report)

    def _on_death(self, _: int) -> None:
        while data := self._receive():
            self._hear(data)  # what it said before it ended
        if not self._uplink.is_over and not self._has_left:
            log.info("rank %d (pid %d) is gone", self._task.initial_rank, self._task.pid)
        fault = self._fault(self._uplink.restart_count, m.RankFaultKind.DIED, "its process is gone")
        self._lose_rank(m.Gone(fault=self._stuck or fault))

    def _lose_rank(self, final_report: m.Gone | m.Left) -> None:
        """The rank is gone, or has left."""
        if self._rank_is_gone:
            return
        self._rank_is_gone = True
        for watched in (self._pidfd, self._rank):
            try:
                self._selector.unregister(watched)
            except KeyError:
                pass  # the socket ended before
        if self._has_come_to_meet or isinstance(final_report, m.Left):
            self._uplink.end(final_report)
        else:
            self._ask_in_its_place(final_report)

    @property
    def _has_come_to_meet(self) -> bool:
        """Whether the rank knows where the hub is and, if it is with initial rank 0, has told everybody."""
        return self._is_ready or (self._connect is not None and self._task.initial_rank != 0) or not self._task.meeting

    def _ask_in_its_place(self, final_report: m.Gone) -> None:
        def go_on(answer: m.Connect | None) -> None:
            self._is_asking = False
            if answer is not None and self._connect is None:
                self._uplink.connect(answer)
            self._uplink.end(final_report)

        self._stand_in = BootstrapProxy(
            self._selector,
            key=self._task.meeting,
            address=self._uplink.address,
            known=self._connect,
            timeout_s=self._task.limits.barrier_timeout_s,
            on_answer=go_on,
        )
        self._is_asking = True

    def _order(self, order: m.Order) -> None:
        """Give the rank an order."""
        now_ns = clock.now_ns()
        match order:
            case m.Go(restart_count=restart_count, ranks=ranks):
                if ranks.get(self._task.initial_rank) is not None:
                    self._watch.note_go(restart_count, now_ns)
            case m.Restart(faults=faults):
                self._self_report = self._own_up(faults)
                self._watch.note_leave(now_ns)
            case m.Finish() | m.Abort():
                self._watch.note_leave(now_ns)
                self._watch.note_end()
            case m.Expel():
                self._watch.note_end()
                self._expel()
        if not self._rank_is_gone:
            self._tell_rank(order)

    def _expel(self) -> None:
        """End a rank that counts as dead; it has a grace period first."""
        log.warning("rank %d is removed and ended", self._task.initial_rank)
        grace_s = self._task.termination_grace_s
        if grace_s > 0:
            self._signal(signal.SIGTERM)
        self._kill_s = clock.now_s() + grace_s

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:
            pass  # it ended by itself meanwhile

    def _tell_rank(self, message: m.FromMonitor) -> None:
        try:
            self._rank.send(m.encode(message))
        except OSError as error:
            log.debug("the rank takes nothing: %s", error)  # its end is seen elsewhere

    def _own_up(self, faults: tuple[m.RankFault, ...]) -> m.RankFault | None:
        """Return what this rank did while all who speak up waited for another; ``None`` = it waited, too.

        It is about to be interrupted, a moment before its own timeout would have told.
        """
        if not faults or not all(fault.is_victims for fault in faults):
            return None
        idle = self._watch.describe_idle(clock.now_ns())
        fault = None if idle is None else self._soft_timeout(idle)
        return None if fault is None or fault.is_victims else fault

    def _soft_timeout(self, found: SoftTimeout) -> m.RankFault:
        fault = self._fault(found.restart_count, m.RankFaultKind.SOFT_TIMEOUT, found.summary)
        place = read_stack_position(self._task.pid)
        if place is None:
            return fault
        what = "waiting for other ranks at" if place.waits else "at"
        summary = f"{found.summary}, {what} {place.line}"
        return msgspec.structs.replace(fault, summary=summary, evidence=place.evidence)

    def _fault(self, restart_count: int, kind: m.RankFaultKind, summary: str) -> m.RankFault:
        return m.RankFault(
            initial_rank=self._task.initial_rank, restart_count=restart_count, kind=kind, summary=summary
        )


def main(arguments: list[str] | None = None) -> int:
    """Run as a monitor process; return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal every process of a job; this one ends with its rank
    rank_fd, page_fd, text = sys.argv[1:] if arguments is None else arguments
    task = from_json(text, MonitorTask)
    logs.configure(
        f"monitor rank {task.initial_rank}",
        node=task.node,
        rank=task.initial_rank,
        path=task.log_path,
        least=logging.INFO if task.log_path else logging.WARNING,
    )
    pidfd = _open_pidfd(task.pid)
    try:
        return MonitorProcess(task, socket.socket(fileno=int(rank_fd)), Page(int(page_fd)), pidfd).run()
    except OutlastError:
        log.exception("the monitor of rank %d failed; the rank is no longer watched", task.initial_rank)
        return 1


def _open_pidfd(pid: int) -> int:
    """Return what is readable once the rank, whose child this process is, has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        if os.getppid() == pid:
            return pidfd
        os.close(pidfd)  # the rank ended before the descriptor was there, and the number is another's
    ended, other_end = os.pipe()
    os.close(other_end)
    return ended


if __name__ == "__main__":
    sys.exit(main())
