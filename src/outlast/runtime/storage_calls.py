"""Calls on a directory or an object store that may not respond: each runs in a daemon thread and has a deadline.

A call on a mount that hangs cannot be interrupted. Its thread is abandoned once the call has made no progress for the
deadline, and the caller gets :class:`outlast.errors.Unavailable`. At most ``MAX_BLOCKED`` threads wait for one place;
further calls on that place fail at once. Calls on other places are not affected, and the threads do not keep the
process from exiting.

Nothing here imports torch.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from outlast import clock
from outlast.errors import CheckpointError, Unavailable
from outlast.runtime.files import begin

log = logging.getLogger(__name__)
R = TypeVar("R")
MAX_BLOCKED = 3
"""Maximum number of threads that wait for one place."""
LOG_S = 10.0
"""Seconds between two lines about a call that does not return."""
_POLL_S = 0.25
_OUTAGE = frozenset(
    {
        *(errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EREMOTEIO, errno.ENOLINK),
        *(errno.ECOMM, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
"""Errors of a file system whose server, disk or network fails; whether a file exists is unknown then."""


def is_outage(error: BaseException | None) -> bool:
    """Return whether an error means that a place is unavailable, so that its content is unknown."""
    if isinstance(error, Unavailable):
        return True
    if isinstance(error, OSError):
        return error.errno in _OUTAGE
    return isinstance(error, CheckpointError) and is_outage(error.__cause__)


_lock = threading.Lock()
_blocked: dict[str, dict[Future[Any], int]] = {}
"""Abandoned calls that have not returned, and when they started (monotonic nanoseconds), by place."""


class CallProgress:
    """Count the progress of a call. Thread: any."""

    def __init__(self) -> None:
        self.count = 0
        self.is_abandoned = False

    def add(self, number: int = 1) -> None:
        """Add to the count. Raises: Unavailable, in the thread of an abandoned call, to end it."""
        self.count += number
        if self.is_abandoned:
            raise Unavailable("the call was abandoned, as it made no progress")


class StorageCalls:
    """Run calls on directories and object stores for one rank.

    Args:
        who: The rank and its node, for log lines and errors.
        timeout_s: Seconds without progress after which a call is abandoned.

    Thread: any.
    """

    def __init__(self, who: str, *, timeout_s: float) -> None:
        self.who, self.timeout_s = who, timeout_s

    def run(
        self,
        place: str,
        work: Callable[[], R],
        *,
        operation: str,
        target: Callable[[], str] | None = None,
        progress: CallProgress | None = None,
        discard: Callable[[R], object] | None = None,
    ) -> R:
        """Return the result of ``work()``.

        Args:
            place: The directory or URL; calls on one place are limited together.
            work: The call; runs in a daemon thread.
            operation: Name of the operation for people, such as ``list``.
            target: Returns the path that the call waits for; ``None`` = the place.
            progress: Counts the call's progress; while it changes, the call is not abandoned.
            discard: Releases a result that arrives after the call was abandoned.

        Raises:
            Unavailable: The call made no progress for ``timeout_s``, or too many calls on the place are blocked.
            BaseException: An error of ``work``.

        Blocks: up to ``timeout_s`` without progress.
        """
        with _lock:
            blocked = _blocked.get(place)
            if blocked is not None and len(blocked) >= MAX_BLOCKED:
                waited_s = (clock.now_ns() - min(blocked.values())) / 1e9
                raise Unavailable(self._describe(place, waited_s, operation))
        begin_ns = clock.now_ns()
        call = begin(work, "outlast-storage")
        try:
            self._wait(call, begin_ns, operation, target or (lambda: place), progress)
            return call.result()
        finally:
            if not call.done():
                with _lock:
                    _blocked.setdefault(place, {})[call] = begin_ns
                if progress is not None:
                    progress.is_abandoned = True
                call.add_done_callback(partial(_end_late, place, discard))
            del call  # a cycle with its error's traceback would keep the variables of all callers alive

    def _wait(
        self,
        call: Future[Any],
        begin_ns: int,
        operation: str,
        target: Callable[[], str],
        progress: CallProgress | None,
    ) -> None:
        """Wait until a call is done. Raises: Unavailable, once it has made no progress for the timeout."""
        count, since_ns, num_lines, pause_s = 0, begin_ns, 0, min(_POLL_S, self.timeout_s)
        while not wait((call,), pause_s).done:
            if progress is not None and progress.count != count:
                count, since_ns, num_lines = progress.count, clock.now_ns(), 0
            waited_s = (clock.now_ns() - since_ns) / 1e9
            if waited_s >= self.timeout_s:
                raise Unavailable(self._describe(target(), waited_s, operation))
            if waited_s >= (num_lines + 1) * LOG_S:
                num_lines = int(waited_s / LOG_S)
                log.warning("%s has waited %.0f s for %s (%s)", self.who, waited_s, target(), operation)
            pause_s = min(_POLL_S, max(self.timeout_s - waited_s, 0.01))

    def _describe(self, where: str, waited_s: float, operation: str) -> str:
        return f"{where} has not responded for {waited_s:.0f} s ({operation}, {self.who})"


def _end_late(place: str, discard: Callable[[Any], object] | None, call: Future[Any]) -> None:
    """Forget an abandoned call that has returned, and release its result."""
    with _lock:
        del _blocked[place][call]
        if not _blocked[place]:
            del _blocked[place]
    if discard is not None and call.exception() is None:
        discard(call.result())


def is_blocked(place: str) -> bool:
    """Return whether a call on a place was abandoned and has not returned."""
    with _lock:
        return bool(_blocked.get(place))


def in_threads(work: Callable[[Any], R], items: list[Any], *, num_threads: int, name: str) -> list[R]:
    """Return the results of ``work`` for all items, in their order, computed by daemon threads.

    Raises: Exception: The first error in the order of the items; after an error no further item is started.

    Blocks: until all started calls have returned.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    turns, lock = iter(enumerate(items)), threading.Lock()

    def act() -> None:
        while True:
            with lock:
                index, item = next(turns, (-1, None)) if not errors else (-1, None)
            if index < 0:
                return
            try:
                results[index] = work(item)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller, in its thread
                errors[index] = error

    wait([begin(act, f"{name}-{number}") for number in range(min(num_threads, len(items)))])
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]
