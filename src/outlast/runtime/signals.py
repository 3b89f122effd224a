"""Notices: signals that tell a process to leave, seen at once and handled later.

Python runs signal handlers only when the main thread is back in bytecode; a rank that waits inside a
collective would learn of a SIGTERM after it, or never. The C-level handler, however, writes the signal's
number to the descriptor of :func:`signal.set_wakeup_fd` at once, whatever the main thread does. A watcher
thread reads it.

Rejected: raising from the handler (it would cut a save in two), a plain flag set by a Python handler (late,
as said), ``signal.sigwait`` in a thread (needs the signal blocked in every thread, those of libraries too).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from outlast import clock
from outlast.errors import OutlastError

__all__ = ["Notice", "Notices"]

log = logging.getLogger(__name__)
_CLOSE = 0  # no signal has this number
_open: weakref.WeakSet[Notices] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Notice:
    """One signal that told this process to leave."""

    signal: int
    """Number of the signal."""
    ordinal: int
    """1 for the first notice, 2 for the second; echoes of one are not counted."""
    seen_ns: int
    """When the watcher saw it, on the monotonic clock."""


class Notices:
    """Watch for signals that tell this process to leave.

    Earlier Python handlers of the same signals are called as before; the signals' default action (to end the
    process) is suspended until :meth:`close`. A forked child gets the earlier handlers back and never reports
    here.

    Args:
        signals: The signals to watch.
        on_notice: Called with each notice, in the watcher's thread, while the main thread may be anywhere;
            must not raise and must return soon.
        echo_s: A signal within this many seconds of a notice is taken for an echo of it: a scheduler signals
            every process of a job, and the launcher passes the same signal on.

    Raises:
        OutlastError: Not called from the main thread; Python sets signal handlers nowhere else.

    Thread: make and close it in the main thread; everything else from any.
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM,),
        *,
        on_notice: Callable[[Notice], None] | None = None,
        echo_s: float = 1.0,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OutlastError("signals can be watched from the main thread only; call outlast.init() there")
        self.signals = tuple(int(number) for number in signals)
        self._on_notice = on_notice
        self._echo_ns = int(echo_s * 1e9)
        self._last_ns: int | None = None
        self._first: Notice | None = None
        self._num_seen = 0
        self._changed = threading.Condition()
        self._closed = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._earlier_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._earlier: dict[int, Any] = {}
        for number in self.signals:
            self._earlier[number] = signal.signal(number, self._handle)
        _open.add(self)
        self._thread = threading.Thread(target=self._watch, name="outlast-notices", daemon=True)
        self._thread.start()

    @property
    def first(self) -> Notice | None:
        """The first notice; ``None`` while there was none."""
        return self._first

    @property
    def num_seen(self) -> int:
        """Number of notices so far."""
        return self._num_seen

    def wait(self, timeout_s: float, *, ordinal: int = 1) -> bool:
        """Wait until notice number ``ordinal`` was seen; return whether it was.

        Blocks: up to ``timeout_s`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._num_seen >= ordinal, timeout_s)

    def close(self) -> None:
        """Restore the earlier handlers and end the watcher. Idempotent.

        Blocks: up to 1 s, for a callback that is still running.
        Thread: the main thread.
        """
        if self._closed:
            return
        self._restore()
        self._writer.send(bytes([_CLOSE]))
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._writer.close()
        self._reader.close()

    def _restore(self) -> None:
        self._closed = True
        _open.discard(self)
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._handle:  # somebody who came after us keeps theirs
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if (current := signal.set_wakeup_fd(self._earlier_fd)) != self._writer.fileno():
            signal.set_wakeup_fd(current)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The wake-up descriptor did our part already, when the signal arrived.
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _watch(self) -> None:
        try:
            while True:
                numbers = self._reader.recv(64)
                others = bytes(number for number in numbers if number != _CLOSE)
                if others and self._earlier_fd >= 0:
                    self._forward(others)
                for number in numbers:
                    if number == _CLOSE:
                        return
                    if number in self._earlier:
                        self._see(number)
        except OSError:
            if not self._closed:
                log.exception("signals are not noticed any more")
        except BaseException:
            log.exception("signals are not noticed any more: a callback failed")
            raise

    def _see(self, number: int) -> None:
        now_ns = clock.now_ns()
        with self._changed:
            if self._last_ns is not None and now_ns - self._last_ns < self._echo_ns:
                return
            self._last_ns = now_ns
            self._num_seen += 1
            notice = Notice(signal=number, ordinal=self._num_seen, seen_ns=now_ns)
            self._first = self._first or notice
            self._changed.notify_all()
        if self._on_notice is not None:
            self._on_notice(notice)

    def _forward(self, numbers: bytes) -> None:
        try:
            os.write(self._earlier_fd, numbers)
        except BlockingIOError:
            log.debug("the earlier wake-up descriptor is full; it has been woken already")


def _forget_in_child() -> None:
    # A child shares the descriptor: a signal to it (a data loader's worker being ended) would look like ours.
    for notices in list(_open):
        notices._restore()
        notices._reader.close()
        notices._writer.close()


os.register_at_fork(after_in_child=_forget_in_child)
