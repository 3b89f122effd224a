"""The listener: it gathers all notices that this process must leave, and ends the process at the deadline.

Besides signals, notices come from sources: a time limit, a file, an address, or a plug-in of one's own. A source is
anything with ``poll()``. All are polled in a thread of their own, so a poll may take a second, never a minute.

At the deadline the process has ended, whatever it is doing. A thread of ours waits for the deadline, but it needs the
interpreter's lock; a main thread that keeps that lock inside C code would keep the process alive forever. So a POSIX
timer calls ``_exit`` in a thread of the C library, which needs no lock.

Rejected: a timer that sends a signal (a Python handler needs the main thread, and a signal's default action gives an
exit code of its own), a process beside it (one more process for each rank, for a second that hardly ever comes).
"""

from __future__ import annotations

import ctypes
import http.client
import importlib
import logging
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outlast import clock
from outlast.decoding import open_file
from outlast.errors import ConfigError, ExitReason
from outlast.preemption.signals import SignalWatch

log = logging.getLogger(__name__)
_NOT_YET = frozenset({"", "none", "false", "0", "null"})
_MOST_BYTES = 4096
_CLOCK_ERROR_S = 2.0
"""Times of processes and files may differ by this much: a file hardly older than the job is a preemption notice."""


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """A notice that a source received: it is time to leave."""

    reason: str
    """One line for people."""
    left_s: float | None = None
    """Seconds until the process is ended by others; ``None`` = not known."""


class NoticeSource(Protocol):
    """Something that knows when this process must leave."""

    name: str
    """One word for the journal."""

    def poll(self) -> NoticeReceived | None:
        """Return the notice to leave; ``None`` = not yet.

        An exception counts as "not yet", and is logged the first time.

        Blocks: a second or two at most.
        Thread: the listener's own.
        """
        ...


class EndTime:
    """Give notice a while before a time at which the process will be ended.

    Args:
        left_s: Seconds until then, from now.
        lead_s: Seconds before it that the notice comes. With less than twice as many left, it comes at half time: a job
            whose limit is that short would else never do a step.
        what: What ends then.
        is_hard: Whether the process really is ended then; else the time only asks it to leave.
    """

    def __init__(self, left_s: float, *, lead_s: float, what: str, name: str, is_hard: bool = True) -> None:
        self.name = name
        self._what, self._is_hard = what, is_hard
        self._end_s = clock.now_s() + left_s
        self._due_s = self._end_s - min(lead_s, left_s / 2)

    def poll(self) -> NoticeReceived | None:
        """Return the notice once the time has come."""
        now_s = clock.now_s()
        if now_s < self._due_s:
            return None
        if not self._is_hard:
            return NoticeReceived(self._what)
        left_s = max(0.0, self._end_s - now_s)
        return NoticeReceived(f"{self._what} in {left_s:.0f} s", left_s)


class NoticeFile:
    """Give notice when a file appears, or is replaced or written again.

    A file that was there before the job started is reported once and ignored: each job of a chain would otherwise train
    one step, save and exit.

    Args:
        path: The file. Its first line is the reason, if it has one.
        job_started_s: When the job started, in seconds since the epoch, as file systems record times.
    """

    name = "file"

    def __init__(self, path: str, *, job_started_s: float = 0.0) -> None:
        self._path, self._job_started_s = Path(path), job_started_s
        self._is_reported = False

    def poll(self) -> NoticeReceived | None:
        """Return the notice if the file is there."""
        try:
            with open(open_file(self._path, follows_links=True), "rb") as file:
                changed_s = os.fstat(file.fileno()).st_ctime
                text = file.read(_MOST_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        if changed_s < self._job_started_s - _CLOCK_ERROR_S:
            if not self._is_reported:
                self._is_reported = True
                log.warning(
                    "notice_file %s was there %.0f s before the job started, so it is ignored; remove it, and "
                    "create it again to stop this job",
                    self._path,
                    self._job_started_s - changed_s,
                )
            return None
        why = f": {text.splitlines()[0]}" if text else ""
        return NoticeReceived(f"{self._path} is there{why}")


class NoticeURL:
    """Give notice when an address answers so.

    The answer means to leave with status 200 and a text other than nothing, ``none``, ``false``, ``0`` and ``null``;
    204 and 404 mean not yet, as do the texts. That is the way of the clouds' metadata servers. No proxy is asked.

    Args:
        url: The address, http or https.
        header: Header to ask with, ``Name: value``.
        timeout_s: Seconds that an answer may take.
    """

    name = "url"

    def __init__(self, url: str, *, header: str | None = None, timeout_s: float = 2.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"invalid URL of a preemption source {url!r}: it must begin with http:// or https://")
        name, _, value = (header or "").partition(":")
        self._request = urllib.request.Request(url, headers={name.strip(): value.strip()} if header else {})
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._timeout_s = timeout_s

    def poll(self) -> NoticeReceived | None:
        """Ask, and return the notice if the answer is one.

        Raises:
            OSError: There is no answer, or one with another status.
        """
        try:
            with self._opener.open(self._request, timeout=self._timeout_s) as answer:
                text = answer.read(_MOST_BYTES).decode(errors="replace").strip()
                status = answer.status
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise
        except http.client.HTTPException as error:
            raise OSError(f"unreadable response: {error!r}") from error
        if status != 200 or text.lower() in _NOT_YET:
            return None
        return NoticeReceived(f"{self._request.full_url.partition('?')[0]} reports {text.splitlines()[0][:200]!r}")


def load_source(where: str) -> NoticeSource:
    """Make the source that ``package.module:name`` makes when it is called without arguments.

    Raises:
        ConfigError: There is no such thing, or what it returns has no ``poll``.
    """
    module, _, name = where.partition(":")
    try:
        source = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"notice_plugin={where!r} is unavailable: {error}") from error
    if not callable(getattr(source, "poll", None)):
        raise ConfigError(f"notice_plugin={where!r} returned {source!r}, which has no poll()")
    if not isinstance(getattr(source, "name", None), str):
        source.name = "plugin"
    plugin: NoticeSource = source
    return plugin


_MONOTONIC, _SIGEV_THREAD = 1, 2


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``; its value is the argument of the function, which reads it as a number."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_int * 8),
    ]


class _Times(ctypes.Structure):
    """``struct itimerspec``: period and first time, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("period_s", "period_ns", "first_s", "first_ns")]


class LastResort:
    """End this process at a given time, whatever it is doing.

    A forked child has no such timer. What keeps a process from ending is a thread of it that the kernel cannot
    interrupt (state D: a dead file server, a driver): nothing ends that.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._pid = os.getpid()
        self._library: Any = ctypes.CDLL(None, use_errno=True)

    def arm(self, after_s: float, exit_code: int) -> None:
        """End the process after so many seconds, in place of what was armed before, if that is possible here."""
        self.disarm()
        try:
            create = self._library.timer_create
        except AttributeError:
            log.warning("this C library has no timers: the deadline cannot end a process that is stuck in C code")
            return
        event = _SignalEvent(
            value=exit_code,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(self._library._exit, ctypes.c_void_p),
        )
        timer = ctypes.c_void_p()
        whole_s, rest_s = divmod(max(after_s, 1e-6), 1.0)
        times = _Times(first_s=int(whole_s), first_ns=int(rest_s * 1e9))
        if create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0 or (
            self._library.timer_settime(timer, 0, ctypes.byref(times), None) != 0
        ):
            log.warning("the deadline has no timer: %s", os.strerror(ctypes.get_errno()))
            return
        self._timer = timer

    def disarm(self) -> None:
        """Cancel the timer. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None and self._pid == os.getpid():
            self._library.timer_delete(timer)


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

    Some time before the deadline (a fifth of what there was, 2 s at most) what is under way should be given up, so that
    the main thread can leave in order. If it has not by then, a thread logs what is lost and ends the process, a little
    before the deadline; if that thread cannot run either, the C library ends it, at the deadline.

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
        self._on_notice, self._before_exit = on_notice, before_exit
        self._exit_code = exit_code if callable(exit_code) else lambda: int(exit_code)
        self._impatience_s, self._echo_ns = impatience_s, int(echo_s * 1e9)
        self._last_signal_ns: int | None = None
        self._first: Notice | None = None
        self._num_seen = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._end_s: float | None = None
        """When the process is ended; ``None`` = nothing ends it."""
        self._hard_s = 0.0
        """When the thread ends it."""
        self._give_up_s: float | None = None
        """When what is under way should be given up; ``None`` = it may take as long as it takes."""
        self._ending: threading.Thread | None = None
        self._last_resort = LastResort()
        self._watch: SignalWatch | None = None
        if signals:
            self._watch = SignalWatch(signals, on_signal=self._on_signal, keep_forked=keep_forked)
        if sources:
            arguments = (tuple(sources), poll_interval_s)
            threading.Thread(target=self._poll, args=arguments, name="outlast-notices", daemon=True).start()

    def __enter__(self) -> ShutdownListener:
        return self

    def __exit__(self, *exc_info: object) -> None:
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
    def remaining_s(self) -> float | None:
        """Seconds until the process is ended; ``None`` = nothing ends it (yet)."""
        return None if self._end_s is None else max(0.0, self._end_s - clock.now_s())

    @property
    def should_give_up(self) -> bool:
        """Whether what is under way, such as a save, is to be given up: by a second signal, or the near deadline."""
        return self._give_up_s is not None and self._give_up_s <= clock.now_s()

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
                if self._give_up_s is not None:
                    left_s = min(left_s, max(0.0, self._give_up_s - clock.now_s()))
                self._changed.wait(left_s)
        return self.should_give_up

    def request(self, reason: str, *, source: str = "script", left_s: float | None = None) -> None:
        """Request that this process leaves, as a signal would.

        Args:
            reason: One line for people.
            source: One word for where it comes from.
            left_s: Seconds until others end the process; it brings the deadline forward.
        """
        self._see(clock.now_ns(), source=source, reason=reason, left_s=left_s)

    def close(self) -> None:
        """Restore the earlier handlers, and cancel the deadline. Idempotent.

        Blocks: up to 1 s, for a callback that is still running.
        Thread: the main thread.
        """
        with self._changed:
            self._closing.set()
            self._last_resort.disarm()
            self._changed.notify_all()
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
        with self._changed:
            if self._closing.is_set():
                return
            limits = [] if self._first is not None or self.deadline_s is None else [self.deadline_s]
            limits += [] if left_s is None else [left_s]
            limits += [self._impatience_s] if gives_up else []
            if limits:
                self._bring_end_forward(min(limits), give_up_now=gives_up)
            self._num_seen += 1
            notice = Notice(
                source=source,
                reason=reason,
                ordinal=self._num_seen,
                seen_ns=seen_ns,
                signal=number,
                deadline_s=self.remaining_s,
                gives_up=gives_up,
            )
            self._first = self._first or notice
            self._changed.notify_all()
        if self._on_notice is not None:
            self._on_notice(notice)

    def _bring_end_forward(self, after_s: float, *, give_up_now: bool) -> None:
        """End the process after so many seconds, unless that is due earlier; ``_changed`` is held, and notified."""
        now_s, margin_s = clock.now_s(), min(2.0, after_s / 5)
        if self._end_s is None or now_s + after_s < self._end_s:
            self._end_s = now_s + after_s
            self._hard_s = self._end_s - margin_s / 2
            self._give_up_s = min(self._end_s - margin_s, self._give_up_s or self._end_s)
            self._last_resort.arm(after_s, self._exit_code())
        if give_up_now:
            self._give_up_s = now_s
        if self._ending is None:
            self._ending = threading.Thread(target=self._end_in_time, name="outlast-deadline", daemon=True)
            self._ending.start()

    def _end_in_time(self) -> None:
        with self._changed:
            while not self._closing.is_set() and (left_s := self._hard_s - clock.now_s()) > 0:
                self._changed.wait(left_s)
            if self._closing.is_set():
                return
            code = self._exit_code()
        try:
            if self._before_exit is not None:
                self._before_exit(code)
            log.warning("the deadline has passed and the main thread has not returned; exiting with code %d", code)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

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
                        log.warning("preemption source %r failed and is polled again: %s", source.name, error)
                if received is not None:
                    silent.remove(source)
                    self.request(received.reason, source=source.name, left_s=received.left_s)
            if self._closing.wait(interval_s):
                return
