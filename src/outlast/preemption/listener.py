"""Collect all notices that request this process to exit, and end the process at the deadline.

Notices are signals and the results of sources: a time limit, a file, a URL, or a plug-in. A source is an object with
``poll()``. One separate thread polls all of them, so a poll may take a second, never a minute.

At the deadline the process ends, whatever it is doing. A thread waits for the deadline, but needs the interpreter's
lock, which a main thread inside C code may hold forever. So a POSIX timer calls ``_exit`` in a thread of the C library,
which needs no lock.

Rejected: a timer that sends a signal (a Python handler needs the main thread, and the default action has another exit
code), a separate process (one more for each rank, for a rare case).
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
    """A preemption notice from a source."""

    reason: str
    """One line for people."""
    left_s: float | None = None
    """Seconds until the process is ended from outside; ``None`` = not known."""


class NoticeSource(Protocol):
    """A source of preemption notices."""

    name: str
    """One word for the journal."""

    def poll(self) -> NoticeReceived | None:
        """Return a notice; ``None`` = not yet.

        An exception counts as "not yet" and is logged the first time.

        Blocks: a second or two at most.
        Thread: the listener's.
        """
        ...


class EndTime:
    """Report a notice some time before the process will be ended.

    Args:
        left_s: Seconds until the end, from now.
        lead_s: Seconds before the end at which the notice comes; at half time if fewer than twice as many are left,
            since a job with such a short limit would otherwise never do a step.
        what: Event at the end time, for people.
        is_hard: The process is really ended then; otherwise the time only requests the exit.
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
    """Report a notice when a file is created, replaced or written.

    A file that existed before the job started is logged once and ignored: otherwise each job of a chain would train one
    step, save and exit.

    Args:
        path: The file. Its first line, if any, is the reason.
        job_started_s: Start of the job in seconds since the epoch, comparable with file times.
    """

    name = "file"

    def __init__(self, path: str, *, job_started_s: float = 0.0) -> None:
        self._path, self._job_started_s = Path(path), job_started_s
        self._is_reported = False

    def poll(self) -> NoticeReceived | None:
        """Return the notice if the file exists."""
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
    """Report a notice when a URL responds with one, as the clouds' metadata servers do.

    Status 200 with a text is a notice, unless the text is empty, ``none``, ``false``, ``0`` or ``null``; 204 and 404
    mean not yet. Proxies are not used.

    Args:
        url: http or https.
        header: Request header, ``Name: value``.
        timeout_s: Seconds for a response.
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
        """Query the URL and return the notice if there is one.

        Raises:
            OSError: There is no response, or one with another status.
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
    """Create a source by calling ``package.module:name`` without arguments.

    Raises:
        ConfigError: The name cannot be imported, or the result has no ``poll``.
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
    """``struct sigevent``; the function reads the value, its argument, as a number."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_int * 8),
    ]


class _Times(ctypes.Structure):
    """``struct itimerspec``: interval and first expiration, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("period_s", "period_ns", "first_s", "first_ns")]


class LastResort:
    """End this process at a given time, whatever it is doing.

    A forked child has no such timer. Nothing can end a process with a thread that the kernel cannot interrupt (state D:
    a dead file server, a driver).

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._pid = os.getpid()
        self._library: Any = ctypes.CDLL(None, use_errno=True)

    def arm(self, after_s: float, exit_code: int) -> None:
        """End the process after some seconds, replacing an earlier timer; logs a warning if timers are unavailable."""
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
    """One notice that requests this process to exit."""

    source: str
    """``signal``, or the name of another source."""
    reason: str
    """One line for people."""
    ordinal: int
    """1 for the first notice; echoes of a signal are not counted."""
    seen_ns: int
    """Monotonic time of its detection."""
    signal: int | None = None
    """Number of the signal; ``None`` = another source."""
    deadline_s: float | None = None
    """Seconds from the detection until the process is ended; ``None`` = no deadline."""
    gives_up: bool = False
    """A second signal: the process must not wait for anything any more."""


class ShutdownListener:
    """Listen for signals and other preemption notices; the training loop checks :attr:`is_requested`::

        with ShutdownListener(deadline_s=600) as listener:
            for step in range(num_steps):
                train(step)
                if listener.is_requested:
                    save(step)
                    sys.exit(75)

    A signal is detected at once, also while the main thread is in C code that releases the interpreter's lock (as torch
    does). From the first notice the process has ``deadline_s`` seconds. Then the process is ended with ``exit_code``,
    wherever its main thread is, even if that holds the interpreter's lock, provided that the notice was detected
    before. A second signal, a second or more after the first, leaves ``impatience_s`` seconds.

    Some time before the deadline (a fifth of the time, 2 s at most) work in progress should be abandoned, so that the
    main thread can exit in order. Otherwise a thread logs what is lost and ends the process a little before the
    deadline; if that thread cannot run either, the C library ends it at the deadline.

    Earlier Python handlers of the signals are still called, and are restored by :meth:`close`.

    Args:
        signals: The signals; empty = none.
        sources: Other sources of notices; see :class:`NoticeSource`.
        poll_interval_s: Seconds between polls of the sources.
        deadline_s: Seconds from the first notice to the end of the process; 0 or ``None`` = no deadline.
        exit_code: Exit code at the deadline, or a function that returns the code at that time.
        on_notice: Called with each notice, in a thread of the listener; must not raise and must return soon.
        before_exit: Called with the exit code just before the deadline ends the process, to log what is lost; in a
            thread of the listener.
        impatience_s: Seconds that a second signal leaves.
        echo_s: A signal within this time after another one is an echo: a scheduler signals every process of a job, and
            launchers forward the same signal.
        keep_forked: Forked children (workers of a DataLoader) outlive the signals while this process lives. For spawned
            workers see :func:`outlive_sigterm`.

    Raises:
        OutlastError: Not called from the main thread, with signals to listen for.

    Thread: create and close it in the main thread; all else from any.
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
        """When the process is ended; ``None`` = no deadline."""
        self._hard_s = 0.0
        """When the thread ends the process."""
        self._give_up_s: float | None = None
        """When work in progress should be abandoned; ``None`` = no limit."""
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
        """Whether this process must exit."""
        return self._first is not None

    @property
    def first(self) -> Notice | None:
        """The first notice; ``None`` = none yet."""
        return self._first

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the process is ended; ``None`` = no deadline (yet)."""
        return None if self._end_s is None else max(0.0, self._end_s - clock.now_s())

    @property
    def should_give_up(self) -> bool:
        """Whether work in progress, such as a save, must be abandoned: by a second signal, or near the deadline."""
        return self._give_up_s is not None and self._give_up_s <= clock.now_s()

    def wait(self, timeout_s: float, *, ordinal: int = 1) -> bool:
        """Wait until notice number ``ordinal`` was detected; return whether it was.

        Blocks: up to ``timeout_s`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._num_seen >= ordinal, timeout_s)

    def wait_to_give_up(self, timeout_s: float) -> bool:
        """Wait until :attr:`should_give_up`; return its value. Blocks: up to ``timeout_s`` seconds."""
        until_s = clock.now_s() + timeout_s
        with self._changed:
            while not self.should_give_up and (left_s := until_s - clock.now_s()) > 0:
                if self._give_up_s is not None:
                    left_s = min(left_s, max(0.0, self._give_up_s - clock.now_s()))
                self._changed.wait(left_s)
        return self.should_give_up

    def request(self, reason: str, *, source: str = "script", left_s: float | None = None) -> None:
        """Request that this process exits, as a signal would.

        Args:
            reason: One line for people.
            source: One word for the origin.
            left_s: Seconds until the process is ended from outside; brings the deadline forward.
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
            limits = (None if self._first else self.deadline_s, left_s, self._impatience_s if gives_up else None)
            if known := [limit for limit in limits if limit is not None]:
                self._bring_end_forward(min(known), give_up_now=gives_up)
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
        """Bring the deadline forward, if it is later. Holds ``_changed``; the caller notifies."""
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
                except Exception as error:  # noqa: BLE001  of a plug-in: logged, and polled again
                    received = None
                    if source.name not in failed:
                        failed.add(source.name)
                        log.warning("preemption source %r failed and is polled again: %s", source.name, error)
                if received is not None:
                    silent.remove(source)
                    self.request(received.reason, source=source.name, left_s=received.left_s)
            if self._closing.wait(interval_s):
                return
