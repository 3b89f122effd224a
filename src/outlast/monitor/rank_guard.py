"""The rank guard: the one process beside a rank that watches it from outside.

It has *duties*. For the :class:`~outlast.monitor.RankMonitor` of a worker under ``torchrun``, ``srun`` or ``python`` it
watches the worker's board; when the worker hangs it keeps the stacks and ends the worker, so that its launcher starts
it again. :class:`outlast.inprocess.Wrapper` has a duty of its own. The first duty starts the guard, later ones join it:
a duty is the name of a module that has ``run_duty``, and runs in a thread of the guard. So the guard depends on none of
them, nor they on each other.

A duty ends when it returns; the rank sees the end of its line. The guard ends when the rank has released all duties or
is gone, however it ended, and the duties have returned. It imports no torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from outlast import logs
from outlast.config.launching import FaultToleranceConfig
from outlast.decoding import from_json
from outlast.monitor.examination import examine
from outlast.monitor.watchdog import MERGE_S, HangReport, LearnedTimeouts, Watchdog, enforceable, observe
from outlast.policy.culprit import Position, find_culprit, is_hang_explained
from outlast.policy.deadlines import Observation, Timeouts
from outlast.runtime.board import Board
from outlast.runtime.files import write_optional
from outlast.runtime.processes import ChildProcess, channel_to_parent, ignore_group_signals, open_pidfd, send_signal
from outlast.runtime.wire import MessageChannel, socket_pair

log = logging.getLogger("outlast.monitor.rank_guard")

_JOIN_S = 60.0
"""Seconds in which a guard that runs, or starts, must have begun a duty."""
_REAP_S = 1.0
_MAX_FDS = 8


class _GuardTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the guard is told when it is started."""

    pid: int
    """The rank's process."""
    rank: int
    """Its global rank."""
    node: str


class _BeginDuty(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin a duty; beside it come the duty's line and its own descriptors."""

    ordinal: int
    module: str
    task: bytes


class _DutyBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A duty runs."""

    ordinal: int


# -- the rank's side ---------------------------------------------------------------------------------------------


class _Guard:
    """The guard of this process."""

    def __init__(self, rank: int, node: str) -> None:
        self.owner = os.getpid()
        self.num_duties = 0
        self._ordinal = 0
        self.child = ChildProcess(
            "outlast.monitor.rank_guard",
            task=_GuardTask(pid=self.owner, rank=rank, node=node),
            receives=_DutyBegun,
            packets=True,
            stdout=subprocess.DEVNULL,  # who reads the rank's output waits for its end, not for this process's
        )

    def begin(self, module: str, task: bytes, fds: Sequence[int], *, wait: bool) -> socket.socket:
        """Begin a duty; return the rank's end of its line."""
        ours, theirs = socket_pair(packets=True)
        try:
            self._ordinal += 1
            order = _BeginDuty(ordinal=self._ordinal, module=module, task=task)
            self.child.channel.send(order, [theirs.fileno(), *fds])
            while wait:
                begun = self.child.channel.receive(within_s=_JOIN_S)
                if begun is None:
                    raise ConnectionResetError("the guard is gone")
                wait = begun.ordinal != self._ordinal
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.num_duties += 1
        return ours


_lock = threading.Lock()
_guard: _Guard | None = None
_outliving: list[_Guard] = []
"""Guards that a duty keeps after the rank released it, such as one that hosts a hub; they end by themselves."""


class GuardDuty:
    """One duty of this rank's guard. Starts the guard unless it runs.

    Args:
        module: Full name of a module with ``run_duty(task, line, fds, pidfd)``, which owns its arguments: what follows,
            the other end of :attr:`line`, a copy of ``fds``, and a descriptor that is readable once the rank is gone.
        task: What it is to do.
        fds: Descriptors that it gets; they stay the caller's.
        rank: Global rank of this process.
        node: Name of the node.

    Raises:
        OSError: No process can be started.

    Blocks: some milliseconds.
    Thread: any.
    """

    def __init__(self, module: str, task: msgspec.Struct, *, fds: Sequence[int], rank: int, node: str) -> None:
        self._module, self._task, self._fds = module, msgspec.json.encode(task), list(fds)
        self._rank, self._node = rank, node
        self._guard: _Guard | None = None
        self.line = self._begin()
        """The rank's end of a socket pair whose messages are packets; its end is the duty's."""

    def _begin(self) -> socket.socket:
        global _guard
        with _lock:
            guard = _guard
            if guard is not None and guard.owner == os.getpid() and guard.child.poll() is None:
                try:
                    line = guard.begin(self._module, self._task, self._fds, wait=True)
                    self._guard = guard
                    return line
                except ConnectionError as error:
                    log.debug("guard %d is gone: %s", guard.child.pid, error)
            guard = _Guard(self._rank, self._node)
            try:
                line = guard.begin(self._module, self._task, self._fds, wait=False)
            except BaseException:
                guard.child.close()
                raise
            self._guard = _guard = guard
            return line

    @property
    def pid(self) -> int:
        """Of the guard."""
        assert self._guard is not None
        return self._guard.child.pid

    def exit_code(self, timeout_s: float = _REAP_S) -> int | None:
        """Return the guard's exit code, once the line has ended; ``None``: only this duty has.

        Blocks: up to ``timeout_s``.
        """
        assert self._guard is not None
        try:
            return self._guard.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def restart(self) -> None:
        """Begin the duty again, in another guard where that is gone; the line keeps its descriptor.

        Raises:
            OSError: No process can be started.
        """
        before = self._guard
        with self._begin() as line:
            os.dup2(line.fileno(), self.line.fileno(), inheritable=False)
        if before is not None:
            _leave(before, 0.0)

    def release(self, timeout_s: float = 5.0) -> None:
        """End the duty, and with the last one the guard. Idempotent.

        Blocks: up to ``timeout_s``, while the guard ends.
        """
        guard, self._guard = self._guard, None
        if guard is None:
            return
        try:
            self.line.shutdown(socket.SHUT_RDWR)  # processes that the rank forked have it, too
        except OSError as error:
            log.debug("the duty has ended before: %s", error)
        self.line.close()
        _leave(guard, timeout_s)


def _leave(guard: _Guard, timeout_s: float) -> None:
    """End a guard with its last duty."""
    global _guard
    with _lock:
        guard.num_duties -= 1
        if guard.num_duties:
            return
        if _guard is guard:
            _guard = None
        guard.child.channel.abort()
        guard.child.channel.close()
    try:
        guard.child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _outliving.append(guard)


# -- the guard ---------------------------------------------------------------------------------------------------


def _serve(pid: int, parent: MessageChannel[_GuardTask | _BeginDuty]) -> None:
    """Begin duties, each in a thread of its own, until no more can come and all have returned."""
    pidfd = _open_pidfd(pid)
    threads: list[threading.Thread] = []
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    # Where only the other descriptor is ready, the rank is gone, and left nothing to begin.
    while parent.fileno() in {fd for fd, _ in poll.poll()}:
        try:
            received = parent.receive_with_fds(_MAX_FDS)
        except OSError as error:
            log.debug("the rank's end broke: %s", error)
            break
        if received is None:
            break
        order, fds = received
        assert isinstance(order, _BeginDuty)
        arguments = (order, socket.socket(fileno=fds[0]), fds[1:], os.dup(pidfd))
        thread = threading.Thread(target=_run, args=arguments, name=order.module.rpartition(".")[2], daemon=True)
        thread.start()
        threads = [other for other in threads if other.is_alive()] + [thread]
        try:
            parent.send(_DutyBegun(ordinal=order.ordinal))
        except OSError as error:
            log.debug("the rank does not wait for the duty: %s", error)
    parent.close()
    for thread in threads:
        thread.join()


def _run(order: _BeginDuty, line: socket.socket, fds: list[int], pidfd: int) -> None:
    try:
        importlib.import_module(order.module).run_duty(order.task, line, fds, pidfd)
    except Exception:
        log.exception("a duty of the guard failed (%s): the rank is no longer watched by it", order.module)
    finally:
        line.close()


def _open_pidfd(pid: int) -> int:
    """Return what is readable once the rank, whose child this process is, has ended."""
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        pass
    else:
        if os.getppid() == pid:
            return pidfd
        os.close(pidfd)  # the rank ended before the descriptor was there, and the number is another's
    ended, other_end = os.pipe()
    os.close(other_end)
    return ended


def main() -> int:
    """Run as a guard; return its exit code."""
    ignore_group_signals()
    parent: MessageChannel[_GuardTask | _BeginDuty] = channel_to_parent(sys.argv[1], _GuardTask | _BeginDuty)
    task = parent.receive()
    if task is None:
        return 0
    assert isinstance(task, _GuardTask)
    least = logging.INFO if task.rank == 0 else logging.WARNING  # all enforce the same timeouts: one line is enough
    logs.configure(f"monitor rank {task.rank}", node=task.node, rank=task.rank, least=least)
    _serve(task.pid, parent)
    return 0


# -- the duty of RankMonitor -------------------------------------------------------------------------------------


class HangWatchTask(msgspec.Struct, frozen=True, kw_only=True):
    """The duty of a :class:`~outlast.monitor.RankMonitor`."""

    pid: int
    """The worker."""
    rank: int
    """Its global rank."""
    node: str
    config: str
    """The fault tolerance settings in force, as JSON."""
    stacks_dir: str | None
    """Where stacks of a hung worker go; ``None`` = a new folder for temporary files."""
    cycle: str = ""
    """Names the job and cycle, for what is learned about timeouts."""
    configured: str = "{}"
    """The settings without learned timeouts, as JSON."""
    learned_in: str | None = None
    """Folder of the learned timeouts; ``None`` = none are learned."""
    counts_in: str | None = None
    """Folder in which hangs at calculated timeouts are counted; ``None`` = they are not."""


class HangWatch:
    """End one worker when it hangs.

    Args:
        task: What to do.
        board: The worker's board; this object owns it.
        worker: A pidfd: the pid may be another process by the time of the signal.
    """

    def __init__(self, task: HangWatchTask, board: Board, worker: int) -> None:
        self._task, self._board, self._worker = task, board, worker
        self._config = FaultToleranceConfig.from_json(task.config)
        configured = FaultToleranceConfig.from_json(task.configured)
        self._timeouts = Timeouts.of_rank(self._config, configured=configured, has_agent=False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def _enforceable(self) -> Timeouts | None:
        """Return what is to be enforced; ``None`` while it changes: a message that it has changed is still to come."""
        text = self._board.timeouts(0)
        return (
            None
            if text is None
            else enforceable(self._timeouts, text, rank=self._task.rank, folder=self._task.counts_in)
        )

    def run(self, line: socket.socket) -> None:
        """Watch until the worker is gone, or has closed the line."""
        watchdog = Watchdog(
            self._board,
            self._enforceable() or self._timeouts,
            node=self._task.node,
            on_hang=self.end_worker,
            on_error=lambda _: os.eventfd_write(self._wake, 1),
        )
        watchdog.start()
        poll = select.poll()
        for watched in (self._worker, self._wake, line):
            poll.register(watched, select.POLLIN)
        while {fd for fd, _ in poll.poll()} == {line.fileno()} and line.recv(1):  # it says that they have changed
            if (timeouts := self._enforceable()) is not None:
                watchdog.enforce(timeouts, f"calculated: {timeouts.describe()}")
        if watchdog.stop():
            self._board.close()
            os.close(self._wake)

    def end_worker(self, report: HangReport) -> None:
        """Keep the stacks of a hung worker, and end it."""
        folder = self._task.stacks_dir or tempfile.mkdtemp(prefix="outlast-stacks-")
        positions = examine(self._board, node=self._task.node, stacks_dir=folder, expired=report.expired)
        rank = report.expired[0].global_rank
        if positions:
            log.error("%s; stacks in %s", find_culprit(positions).reason, folder)
        self._doubt_timeouts(report, positions)
        wanted = signal.Signals[self._config.rank_termination_signal]
        log.error("rank %d (pid %d) is ended with %s", rank, self._task.pid, wanted.name)
        self._send(wanted)
        if wanted != signal.SIGKILL:
            self._send(signal.SIGCONT)  # a stopped process handles nothing else
            grace_s = self._config.rank_termination_grace
            if not self._is_gone(grace_s):
                log.error(
                    "rank %d (pid %d) still runs %g s after %s: sending SIGKILL",
                    *(rank, self._task.pid, grace_s, wanted.name),
                )
                self._send(signal.SIGKILL)

    def _doubt_timeouts(self, report: HangReport, positions: Sequence[Position]) -> None:
        """Record that timeouts were exceeded: a learned one may be too short, unless this rank's position explains it.

        A rank that waits in a collective waits for another one, whose own guard judges it.
        """
        is_explained = is_hang_explained(positions) or any(one.waits_in_collective for one in positions)
        late = [msgspec.structs.replace(one, is_explained=is_explained) for one in report.expired]
        folder, seen = self._task.learned_in, observe(report.states)
        if folder is None:  # hangs at timeouts that the script calculated are counted all the same
            late = [one for one in late if one.is_calculated and not one.is_explained]
            folder, seen = self._task.counts_in, Observation()
        if folder is None or not late:
            return
        config, cycle = FaultToleranceConfig.from_json(self._task.configured), self._task.cycle
        update = partial(LearnedTimeouts.update, folder, seen, cycle=cycle, config=config, faulted=late)
        write_optional("learned timeouts", folder, update, timeout_s=MERGE_S)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it ended by itself meanwhile
            send_signal(self._worker, self._task.pid, number)

    def _is_gone(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._worker, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))


def run_duty(task: bytes, line: socket.socket, fds: list[int], pidfd: int) -> None:
    """Watch a worker's board; see :class:`GuardDuty`.

    Args:
        task: A :class:`HangWatchTask`, as JSON.
        line: Closed by the worker when it is not to be watched any more.
        fds: The worker's board.
        pidfd: Of the worker's process.
    """
    board = Board.open(f"/proc/self/fd/{fds[0]}")
    os.close(fds[0])
    try:
        HangWatch(from_json(task, HangWatchTask), board, pidfd).run(line)
    finally:
        os.close(pidfd)


if __name__ == "__main__":
    # Under the module's own name, by which its duty is found: what is run as __main__ is another copy.
    sys.exit(importlib.import_module("outlast.monitor.rank_guard").main())
