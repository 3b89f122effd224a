"""Being told to leave: by a signal to this rank, or by its agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from outlast.incidents import EventKind
from outlast.runtime.journal import Journal
from outlast.runtime.signals import Notice, Notices

__all__ = ["Departure"]

log = logging.getLogger(__name__)
PATIENCE_S = 3.0
"""After a second signal the process ends within this, even if the main thread is stuck."""


class Departure:
    """What this rank knows about having to leave.

    Off the main thread no signal can be watched: SIGTERM then ends the process as if there were no session.

    Args:
        journal: Where notices are written.
        rank: This worker's global rank.
        stop_requested: Whether the agent asked this rank to stop.
        write_end: Writes the end of the session with its exit code.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        rank: int,
        stop_requested: Callable[[], bool],
        write_end: Callable[[int], None],
    ) -> None:
        self._journal, self._rank = journal, rank
        self._stop_requested, self._write_end = stop_requested, write_end
        self._notices: Notices | None = None
        if threading.current_thread() is threading.main_thread():
            self._notices = Notices([signal.SIGTERM], on_notice=self._on_notice)

    @property
    def watches_signals(self) -> bool:
        """Whether SIGTERM leads to a graceful stop."""
        return self._notices is not None

    def asked(self) -> int:
        """Return the number of the signal that told this rank to leave (SIGTERM for the agent's word), or 0."""
        if self._notices is not None and (notice := self._notices.first) is not None:
            return notice.signal
        return int(signal.SIGTERM) if self._stop_requested() else 0

    def wait_for_second(self, timeout_s: float) -> bool:
        """Wait until this rank is told a second time; return whether it was. Blocks: up to ``timeout_s``."""
        if self._notices is not None:
            return self._notices.wait(timeout_s, ordinal=2)
        return threading.Event().wait(timeout_s)

    def close(self) -> None:
        """Let SIGTERM end this process again. Idempotent. Thread: the main thread."""
        if self._notices is not None:
            self._notices.close()

    def _on_notice(self, notice: Notice) -> None:
        # In the watcher's thread: the main thread may be inside a collective.
        self._journal.write(EventKind.NOTICE, rank=self._rank, signal=notice.signal)
        if notice.ordinal == 1:
            log.warning("Received signal %d, initiating graceful stop", notice.signal)
        elif notice.ordinal == 2:
            log.warning("Received signal %d again, leaving at once", notice.signal)
            last_resort = threading.Timer(PATIENCE_S, self._exit_hard, [128 + notice.signal])
            last_resort.daemon = True
            last_resort.start()

    def _exit_hard(self, code: int) -> None:
        self._write_end(code)
        log.warning("the main thread does not come back; exit code %d", code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
