"""The rank's end of its agent process: the link, and the thread that reads orders from it.

The monitor thread runs in every rank during the wrapper's call. It receives orders while the main thread is busy, and
interrupts the main thread in the function. On the rank's page it shows that the interpreter is free and that the main
thread makes progress; the agent process judges both. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Callable

import msgspec

from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.progress import MainThreadProgress, Page, RankPhase
from outlast.inprocess.protocol import MemberRecord, MonitorTask
from outlast.policy import inprocess_protocol as p
from outlast.runtime import connections
from outlast.runtime.agent_process import AgentDuty
from outlast.runtime.interruption import SignalInterruption

log = logging.getLogger(__name__)

_LONGEST_LOOK_S = 0.25
"""Longest interval in seconds: both timeouts are kept within half a second."""
_FIRST_POKE_S, _LONGEST_POKE_S = 0.005, 0.05
_ALL_CALLS = 1 << 62

Instruction = m.Listening | p.Order | OutlastError
"""What the main thread receives: an order, or the error that no process is left to give orders."""


class MonitorThread:
    """Receive orders, and get the main thread out of the function.

    Args:
        link: To the agent process.
        page: Read by the agent process.
        interruption: Interrupts the main thread.
        interval_s: Longest time in seconds between two updates of the page.
        abort: Called once for each order to leave, after connections were cut; aborts other waits for peers.

    Thread: make, start and stop it on the main thread.
    """

    def __init__(
        self,
        link: MonitorLink,
        page: Page,
        interruption: SignalInterruption,
        *,
        interval_s: float,
        abort: Callable[[], None],
    ) -> None:
        self._link, self._page, self._interruption = link, page, interruption
        self._interval_s = min(interval_s, _LONGEST_LOOK_S)
        self._abort = abort
        self._progress = MainThreadProgress()
        self._pings_only = False
        self._must_abort = False
        self._poke_s = _FIRST_POKE_S
        self._is_stopped = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.inbox: queue.SimpleQueue[Instruction] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outlast-inprocess", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread. Idempotent. Blocks: up to ``timeout_s`` while a plug-in runs in it."""
        if self._is_stopped:
            return
        self._is_stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the monitor thread is still busy after %g s; it ends with the process", timeout_s)
        else:
            os.close(self._wake)

    def begin_call(self) -> None:
        self._pings_only = False

    def count_pings_only(self) -> None:
        """Count only pings as progress until the next call. Thread: any."""
        self._pings_only = True

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._is_stopped:
            wait_s = self._look()
            for fd, _ in poll.poll(wait_s * 1e3):
                if fd != self._wake:
                    self._receive()

    def _look(self) -> float:
        """Update the page, and continue to interrupt the main thread; return the seconds until the next call."""
        self._page.heartbeat()
        if self._progress.take() and not self._pings_only:
            self._page.stamp_progress()
        self._progress.ask()
        if not self._interruption.is_wanted:
            return self._interval_s
        return self._get_out()

    def _receive(self) -> None:
        try:
            received = self._link.receive()
        except OutlastError as error:
            log.error("%s", error)
            self._interruption.order(_ALL_CALLS)
            self._must_abort, self._poke_s = True, _FIRST_POKE_S
            self.inbox.put(error)
            self._is_stopped = True
            while self._interruption.is_wanted:
                threading.Event().wait(self._get_out())
            return
        for message in received:
            if isinstance(message, p.Restart):
                self._leave_before(message.restart_count)
            elif isinstance(message, p.Abort | p.Expel):
                self._leave_before(_ALL_CALLS)
            self.inbox.put(message)

    def _leave_before(self, restart_count: int) -> None:
        self._interruption.order(restart_count - 1)
        if self._interruption.is_wanted:
            self._page.set_phase(RankPhase.LEAVING)
        self._must_abort, self._poke_s = True, _FIRST_POKE_S

    def _get_out(self) -> float:
        """Cut the connections the main thread may wait on, and interrupt it; return the seconds until the next call."""
        if self._interruption.is_atomic:
            return _FIRST_POKE_S
        connections.cut_all(both_ways=self._poke_s >= _LONGEST_POKE_S)
        if self._interruption.is_put_off:
            return _FIRST_POKE_S
        self._interruption.poke()  # first: a wait that is woken below must not return to the function
        if self._poke_s > _FIRST_POKE_S:
            connections.end_lost_waits()
        if self._must_abort:
            self._must_abort = False
            self._abort()
            self._interruption.poke()
        poke_s, self._poke_s = self._poke_s, min(2 * self._poke_s, _LONGEST_POKE_S)
        return poke_s


_MAX_STARTS = 3


class MonitorLink:
    """A rank's end of its duty in the node's agent process.

    An agent process that is killed is replaced by another one, which receives the rank's standing.

    Args:
        task: Of the duty.
        place: Of this rank.
        page: Read by the duty; stays the caller's.

    Raises:
        OSError: No process can be started.

    Thread: :meth:`send` from any; :meth:`receive` from one; :meth:`close` after the last :meth:`receive`.
    """

    def __init__(self, task: MonitorTask, place: WorkerEnv, page: Page) -> None:
        self._initial_rank = task.initial_rank
        self._lock = threading.Lock()
        self._record = MemberRecord()
        self._connect: m.Connect | None = None
        self._known = m.Coordinators(addresses=())
        self._final_report: p.Left | None = None
        self._is_over = False
        self._was_listening = False
        self._num_starts = 1
        self._duty = AgentDuty("outlast.inprocess.monitor_duty", task, place, fds=[page.fd])

    @property
    def pid(self) -> int:
        return self._duty.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`receive` has messages; it never changes."""
        return self._duty.line.fileno()

    def send(self, message: m.Connect | p.Report) -> None:
        """Send a message to the agent process, or to the next one where it is gone.

        Blocks: hardly; a packet fits into the socket's buffer.
        """
        with self._lock:
            if isinstance(message, m.Connect):
                self._connect = message
            else:
                self._record.note_report(message)
            if isinstance(message, p.Left):
                self._final_report = message
                self._is_over = True
            self._send(message)

    def receive(self) -> list[m.Listening | p.Order]:
        """Return the messages since the last call; call it when :meth:`fileno` is readable.

        Raises:
            OutlastError: The agent process is gone, and no other one can replace it.

        Blocks: some milliseconds while another agent process is started.
        """
        found: list[m.Listening | p.Order] = []
        while True:
            try:
                data = self._duty.line.recv(m.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except OSError as error:
                log.debug("the agent process's socket broke: %s", error)
                data = b""
            if not data:
                self._replace()
                return found
            message: m.FromMonitor = m.decode(data, m.FromMonitor)
            with self._lock:
                if isinstance(message, m.Coordinators):
                    self._known = message
                    continue
                if isinstance(message, p.Finish | p.Abort | p.Expel):
                    self._is_over = True
                elif not isinstance(message, m.Listening):
                    self._record.note_order(message)
            if isinstance(message, m.Listening):
                if self._was_listening:
                    continue  # the rank uses the first address, at which the next process listens, too
                self._was_listening = True
            found.append(message)

    def _replace(self) -> None:
        pid = self.pid
        with self._lock:
            if self._is_over or self._num_starts >= _MAX_STARTS:
                raise OutlastError(f"the agent process (pid {pid}) of rank {self._initial_rank} ended; look at its log")
            log.warning("agent process %d ended; rank %d connects to another one", pid, self._initial_rank)
            self._num_starts += 1
            try:
                self._duty.restart()
            except OSError as error:
                raise OutlastError(f"the agent process is gone, and no other one can be started: {error}") from error
            if self._connect is not None:
                addresses = self._known.addresses or self._connect.addresses
                again = m.Reconnect(
                    connect=msgspec.structs.replace(self._connect, addresses=addresses),
                    standing=self._record.standing,
                    final_report=self._final_report,
                    ranks=self._known.ranks,
                )
                self._send(again)

    def _send(self, message: m.FromRank) -> None:
        try:
            self._duty.line.send(m.encode(message))
        except OSError as error:
            log.debug("the agent process is gone: %s", error)  # receive() detects it, too

    def close(self) -> None:
        if not self._is_over:
            self.send(p.Left(reason="the rank left the wrapper"))
        self._duty.release()
