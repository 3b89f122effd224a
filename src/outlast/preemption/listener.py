"""The listener: it gathers all notices that this process must leave, and ends it at the deadline."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from outlast import clock
from outlast.errors import ExitReason
from outlast.preemption.deadline import ExitDeadline
from outlast.preemption.signals import SignalWatch
from outlast.preemption.sources import NoticeReceived, NoticeSource

__all__ = ["Notice", "ShutdownListener"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One notice that this process must leave."""

    source: str
    """``signal``, or the name of another source."""
    reason: str
    """One line for people."""
    ordinal: int
    """1 for the first notice; echoes of a signal are not counted."""
    seen_ns: int
    """When it was seen, on the monotonic clock."""
    signal: int | None = None
    """Number of the signal; ``None`` when it was none."""
    deadline_s: float | None = None
    """Seconds from then until the process is ended; ``None`` = nothing ends it."""
    gives_up: bool = False
    """It is a second signal: nothing is to be waited for any more."""


class ShutdownListener:
    """Listen for signals and other notices to leave; the training loop asks :attr:`is_requested` when it likes::

        with ShutdownListener(deadline_s=600) as listener:
            for step in range(num_steps):
                train(step)
                if listener.is_requested:
                    save(step)
                    sys.exit(75)

    A signal is seen at once, also while the main thread is in C code that releases the interpreter's lock (as torch
    does). From the first notice the process has ``deadline_s`` seconds. Then it is ended with ``exit_code``, wherever
    its main thread is; also one that keeps the interpreter's lock inside C code, if the notice was seen before. A
    second signal, a second or more after the first, leaves ``impatience_s`` seconds.

    Earlier Python handlers of the signals are called as before, and are back after :meth:`close`.

    Args:
        signals: The signals; none at all if empty.
        sources: What else may give notice; see :class:`NoticeSource`.
        poll_interval_s: Seconds from one poll of them to the next.
        deadline_s: Seconds from the first notice within which the process has ended; 0 or ``None`` = no deadline.
        exit_code: Its exit code then, or what returns it at that time.
        on_notice: Called with each notice, in a thread of the listener; must not raise and must return soon.
        before_exit: Called with the exit code just before the deadline ends the process, to log what is lost; in a
            thread of the listener.
        impatience_s: Seconds that a second signal leaves.
        echo_s: A signal within so many seconds of another is its echo: a scheduler signals every process of a job, and
            launchers pass the same signal on.
        keep_forked: What is forked from this process (a DataLoader's workers) outlives the signals while this one
            lives. For workers that are spawned see :func:`outlive_sigterm`.

    Raises:
        OutlastError: Not called from the main thread, with signals to listen for.

    Thread: make and close it in the main thread; everything else from any.
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM,),
        *,
        sources: Sequence[NoticeSource] = (),
        poll_interval_s: float = 5.0,
        deadline_s: float | None = None,
        exit_code: int | Callable[[], int] = ExitReason.PREEMPTED,
        on_notice: Callable[[Notice], None] | None = None,
        before_exit: Callable[[int], None] | None = None,
        impatience_s: float = 3.0,
        echo_s: float = 1.0,
        keep_forked: bool = False,
    ) -> None:
        self.deadline_s = deadline_s or None
        self._on_notice = on_notice
        self._impatience_s, self._echo_ns = impatience_s, int(echo_s * 1e9)
        self._last_signal_ns: int | None = None
        self._first: Notice | None = None
        self._num_seen = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._deadline = ExitDeadline(exit_code if callable(exit_code) else lambda: int(exit_code), before_exit)
        self._watch: SignalWatch | None = None
        if signals:
            self._watch = SignalWatch(signals, on_signal=self._on_signal, keep_forked=keep_forked)
        self._poller: threading.Thread | None = None
        if sources:
            arguments = (tuple(sources), poll_interval_s)
            self._poller = threading.Thread(target=self._poll, args=arguments, name="outlast-notices", daemon=True)
            self._poller.start()

    def __enter__(self) -> ShutdownListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_requested(self) -> bool:
        """Whether this process must leave."""
        return self._first is not None

    @property
    def first(self) -> Notice | None:
        """The first notice; ``None`` while there was none."""
        return self._first

    @property
    def num_seen(self) -> int:
        """Number of notices so far, without echoes."""
        return self._num_seen

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the process is ended; ``None`` = nothing ends it (yet)."""
        return self._deadline.remaining_s

    @property
    def should_give_up(self) -> bool:
        """Whether what is under way, such as a save, is to be given up: by a second signal, or the near deadline."""
        return (left_s := self._deadline.give_up_in_s) is not None and left_s <= 0

    def wait(self, timeout_s: float, *, ordinal: int = 1) -> bool:
        """Wait until notice number ``ordinal`` was seen; return whether it was.

        Blocks: up to ``timeout_s`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._num_seen >= ordinal, timeout_s)

    def wait_to_give_up(self, timeout_s: float) -> bool:
        """Wait until :attr:`should_give_up`; return whether it is so. Blocks: up to ``timeout_s`` seconds."""
        until_s = clock.now_s() + timeout_s
        with self._changed:
            while not self.should_give_up and (left_s := until_s - clock.now_s()) > 0:
                give_up_s = self._deadline.give_up_in_s
                self._changed.wait(left_s if give_up_s is None else min(left_s, give_up_s))
        return self.should_give_up

    def request(self, reason: str, *, source: str = "script", left_s: float | None = None) -> None:
        """Request that this process leaves, as a signal would.

        Args:
            reason: One line for people.
            source: One word for where it comes from.
            left_s: Seconds until others end the process; it brings the deadline forward.
        """
        now_ns = clock.now_ns()
        self._see(now_ns, source=source, reason=reason, left_s=left_s)

    def close(self) -> None:
        """Restore the earlier handlers, and cancel the deadline. Idempotent.

        Blocks: up to 1 s, for a callback that is still running.
        Thread: the main thread.
        """
        self._closing.set()
        self._deadline.close()
        if self._watch is not None:
            self._watch.close()

    def _on_signal(self, number: int, seen_ns: int) -> None:
        last_ns, is_second = self._last_signal_ns, self._last_signal_ns is not None
        if last_ns is not None and seen_ns - last_ns < self._echo_ns:
            return
        self._last_signal_ns = seen_ns
        self._see(seen_ns, source="signal", reason=f"signal {number}", number=number, gives_up=is_second)

    def _see(
        self,
        seen_ns: int,
        *,
        source: str,
        reason: str,
        left_s: float | None = None,
        number: int | None = None,
        gives_up: bool = False,
    ) -> None:
        if self._closing.is_set():
            return
        with self._changed:
            limits = [] if self._first is not None or self.deadline_s is None else [self.deadline_s]
            limits += [] if left_s is None else [left_s]
            limits += [self._impatience_s] if gives_up else []
            if limits:
                self._deadline.bring_forward(min(limits), give_up_now=gives_up)
            self._num_seen += 1
            notice = Notice(
                source=source,
                reason=reason,
                ordinal=self._num_seen,
                seen_ns=seen_ns,
                signal=number,
                deadline_s=self._deadline.remaining_s,
                gives_up=gives_up,
            )
            self._first = self._first or notice
            self._changed.notify_all()
        if self._on_notice is not None:
            self._on_notice(notice)

    def _poll(self, sources: tuple[NoticeSource, ...], interval_s: float) -> None:
        silent, failed = list(sources), set[str]()
        while silent:
            for source in list(silent):
                try:
                    received = source.poll()
                    if received is not None and not isinstance(received, NoticeReceived):
                        raise TypeError(f"poll() returned {received!r}; it must return a NoticeReceived, or None")
                except Exception as error:  # noqa: BLE001  a plug-in's own; it is logged, and asked again
                    received = None
                    if source.name not in failed:
                        failed.add(source.name)
                        log.warning("the notice source %r does not answer and is tried again: %s", source.name, error)
                if received is not None:
                    silent.remove(source)
                    self.request(received.reason, source=source.name, left_s=received.left_s)
            if self._closing.wait(interval_s):
                return
