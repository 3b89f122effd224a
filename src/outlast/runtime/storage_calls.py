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
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outlast import clock
from outlast.errors import CheckpointError, Unavailable

log = logging.getLogger(__name__)
R = TypeVar("R")
MAX_BLOCKED = 3
"""Maximum number of threads that wait for one place."""
LOG_S = 10.0
"""Seconds between two lines about a call that does not return."""
_POLL_S = 0.25
_OUTAGE = frozenset(
    {
        errno.EIO,
        errno.ENXIO,
        errno.ENODEV,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ENOLINK,
        errno.ECOMM,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
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


@dataclass(slots=True, eq=False)
class _BoundedCall:
    """A call in a thread. Its fields are changed under ``_lock``."""

    since_ns: int
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None
    is_abandoned: bool = False


_lock = threading.Lock()
_blocked: dict[str, list[_BoundedCall]] = {}
"""Abandoned calls that have not returned, by place."""


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
            blocked = _blocked.get(place, ())
            if len(blocked) >= MAX_BLOCKED:
                waited_s = (clock.now_ns() - min(call.since_ns for call in blocked)) / 1e9
                raise Unavailable(self._describe(place, waited_s, operation))
        call = _BoundedCall(clock.now_ns())

        def act() -> None:
            try:
                value, error = work(), None
            except BaseException as raised:  # noqa: BLE001 - raised again by the caller, in its thread
                value, error = None, raised
            with _lock:
                if call.is_abandoned:
                    left = _blocked.get(place, [])
                    left[:] = [other for other in left if other is not call]
                    if not left:
                        _blocked.pop(place, None)
                call.value, call.error = value, error
                call.done.set()
                is_late = call.is_abandoned
            if is_late and error is None and discard is not None:
                discard(value)  # type: ignore[arg-type]

        threading.Thread(target=act, name="outlast-storage", daemon=True).start()
        try:
            self._wait(place, call, operation, target, progress)
        finally:
            with _lock:
                if not call.done.is_set():
                    call.is_abandoned = True
                    _blocked.setdefault(place, []).append(call)
                    if progress is not None:
                        progress.is_abandoned = True
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle that would keep the variables of all callers
        return call.value  # type: ignore[no-any-return]

    def _wait(
        self,
        place: str,
        call: _BoundedCall,
        operation: str,
        target: Callable[[], str] | None,
        progress: CallProgress | None,
    ) -> None:
        """Wait until a call is done. Raises: Unavailable, once it has made no progress for the timeout."""
        count, since_ns, num_lines = 0, call.since_ns, 0
        if call.done.wait(min(_POLL_S, self.timeout_s)):
            return
        while True:
            if progress is not None and progress.count != count:
                count, since_ns, num_lines = progress.count, clock.now_ns(), 0
            waited_s = (clock.now_ns() - since_ns) / 1e9
            if waited_s >= self.timeout_s:
                where = place if target is None else target()
                raise Unavailable(self._describe(where, waited_s, operation))
            if waited_s >= (num_lines + 1) * LOG_S:
                num_lines = int(waited_s / LOG_S)
                where = place if target is None else target()
                log.warning("%s has waited %.0f s for %s (%s)", self.who, waited_s, where, operation)
            if call.done.wait(min(_POLL_S, max(self.timeout_s - waited_s, 0.01))):
                return

    def _describe(self, where: str, waited_s: float, operation: str) -> str:
        return f"{where} has not responded for {waited_s:.0f} s ({operation}, {self.who})"


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
                result = work(item)
                with lock:
                    results[index] = result
            except BaseException as error:  # noqa: BLE001 - raised again by the caller, in its thread
                with lock:
                    errors[index] = error

    threads = [
        threading.Thread(target=act, name=f"{name}-{number}", daemon=True)
        for number in range(min(num_threads, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]
