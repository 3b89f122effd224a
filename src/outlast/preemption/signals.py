"""Signals that request a process to exit, detected at once and handled later.

Python runs signal handlers only when the main thread is back in bytecode; a rank that waits in a collective would
handle a SIGTERM afterwards, or never. The C-level handler, however, writes the signal's number to the descriptor of
:func:`signal.set_wakeup_fd` at once, and a watcher thread reads the descriptor.

Rejected: raising from the handler (interrupts a save), a flag set by a Python handler (late), ``signal.sigwait`` in a
thread (needs the signal blocked in every thread, including those of libraries).

Data loader workers must outlive the same signals: a scheduler signals every process of a job, and a dead worker makes
its rank fail before the rank can save. So a forked worker blocks such signals and accepts them in a thread: one from
its parent ends the worker, as torch's handler would; others take effect once the parent is gone.

Rejected for forked workers: ``SIG_IGN`` and a Python handler: torch replaces both when a worker starts, and neither
knows the sender, so that a loader could not end its workers.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from outlast import clock
from outlast.errors import OutlastError

log = logging.getLogger(__name__)
_CLOSE = 0  # no signal has this number
_LOOK_S = 0.5
_outlived: frozenset[int] = frozenset()
open_watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


def does_nothing_else(number: int) -> bool:
    """Return whether a signal has its default action in this process.

    Handlers of C extensions (``faulthandler.register``) count too; :func:`signal.getsignal` does not report those.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn")))
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in fields.values())


class SignalWatch:
    """Watch for signals.

    Earlier Python handlers of the same signals are still called; the signals' default action (to end the process) is
    suspended until :meth:`close`. A forked child gets the earlier handlers back and never reports here.

    Args:
        signals: The signals to watch.
        on_signal: Called with the number of each signal and the monotonic time of its detection in nanoseconds, in the
            watcher's thread. Must not raise and must return soon.
        keep_forked: Forked children outlive these signals; see :func:`outlive_signals`.

    Raises:
        OutlastError: Not called from the main thread, where alone Python sets signal handlers; or a process cannot
            handle one of the signals.

    Thread: create and close it in the main thread.
    """

    def __init__(
        self, signals: Sequence[int], *, on_signal: Callable[[int, int], None], keep_forked: bool = False
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OutlastError("signals can be watched from the main thread only; call outlast.init() there")
        self._on_signal, self._keep_forked = on_signal, keep_forked
        self._closed = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._earlier_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._earlier: dict[int, Any] = {}
        # Started before the handlers are set, so that no signal waits for the thread.
        self._thread = threading.Thread(target=self._watch, name="outlast-signals", daemon=True)
        self._thread.start()
        for number in dict.fromkeys(map(int, signals)):
            self._earlier[number] = None
            try:
                self._earlier[number] = signal.signal(number, self._handle)
            except (OSError, ValueError) as error:
                del self._earlier[number]
                self.close()
                raise OutlastError(f"signal {number} cannot be handled ({error}); name another one") from None
        open_watches.add(self)

    def close(self) -> None:
        """Restore the earlier handlers and end the watcher. Idempotent.

        Blocks: up to 1 s, for a callback that is still running.
        Thread: the main thread.
        """
        if self._closed:
            return
        self.restore()
        self._writer.send(bytes([_CLOSE]))
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._writer.close()
        self._reader.close()

    def restore(self) -> None:
        self._closed = True
        open_watches.discard(self)
        for later in open_watches:  # a watch created after this one must not call or wake this one any more
            later._take_over(self)
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._handle:  # a handler set later stays
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        current = signal.set_wakeup_fd(-1)
        wanted = self._earlier_fd if current == self._writer.fileno() else current
        ours = {watch._writer.fileno() for watch in open_watches}
        try:
            signal.set_wakeup_fd(wanted, warn_on_full_buffer=wanted not in ours)
        except (OSError, ValueError) as error:  # its owner closed it meanwhile
            log.debug("the earlier wake-up descriptor is gone: %s", error)

    def _take_over(self, closed: SignalWatch) -> None:
        """Replace references to ``closed`` by what ``closed`` had replaced."""
        for number, handler in self._earlier.items():
            if handler == closed._handle:
                self._earlier[number] = closed._earlier[number]
        if self._earlier_fd == closed._writer.fileno():
            self._earlier_fd = closed._earlier_fd

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The watcher thread has received the signal through the wake-up descriptor.
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)
        elif self._closed and earlier != signal.SIG_IGN and signal.getsignal(number) == self._handle:
            # Other code saved this handler and restored it after the end of the watch.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
            signal.raise_signal(number)

    def _watch(self) -> None:
        try:
            while True:
                numbers = self._reader.recv(64)
                seen_ns = clock.now_ns()
                others = bytes(number for number in numbers if number != _CLOSE)
                if others and self._earlier_fd >= 0:
                    try:
                        os.write(self._earlier_fd, others)
                    except BlockingIOError:
                        log.debug("the earlier wake-up descriptor is full; it has been woken already")
                for number in numbers:
                    if number == _CLOSE:
                        return
                    if number in self._earlier:
                        self._on_signal(number, seen_ns)
        except OSError:
            if not self._closed:
                log.exception("signal handling stopped")
        except BaseException:
            log.exception("signal handling stopped: a callback failed")
            raise

    def _forget_in_child(self) -> None:
        # A child shares the descriptor: a signal to the child, such as the end of a data loader worker, would be
        # reported here.
        self.restore()
        self._reader.close()
        self._writer.close()
        if self._keep_forked:
            outlive_signals(tuple(self._earlier))


def outlive_signals(signals: Collection[int]) -> None:
    """Make this process, just forked by one that trains, outlive signals until its parent ends.

    A signal that the parent sends still ends this process, and so do those of others once the parent is gone.

    Thread: the main thread, before others are started: those would still receive the signals.
    """
    global _outlived
    numbers = frozenset(int(number) for number in signals) - _outlived
    if numbers:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        _outlived |= numbers
        _start(numbers)


def outlive_sigterm(worker_id: int) -> None:
    """Make a data loader worker that was not forked outlive SIGTERM: ``DataLoader(worker_init_fn=outlive_sigterm)``.

    Libraries have started threads by now, so the worker ignores the signal permanently, also from its parent. It exits
    when its loader requests it or its parent is gone, which torch monitors.

    Args:
        worker_id: The worker's number; not used.

    Thread: the main thread.
    """
    if signal.SIGTERM not in _outlived:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start(numbers: frozenset[int]) -> None:
    threading.Thread(target=_take, args=(numbers, os.getppid()), name="outlast-outlive-signals", daemon=True).start()


def _take(numbers: frozenset[int], parent: int) -> None:
    waiting: int | None = None
    while os.getppid() == parent:
        info = signal.sigtimedwait(numbers, _LOOK_S)
        if info is None:
            continue
        if info.si_pid == parent:
            os._exit(0)
        waiting = info.si_signo
    # The signals can end the process through this thread now; the main thread still blocks them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if waiting is not None:
        os.kill(os.getpid(), waiting)


def _after_fork() -> None:
    if _outlived:  # a loader had forked this process's parent
        _start(_outlived)
    for watch in list(open_watches):
        watch._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
