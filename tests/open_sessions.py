"""The end of a session in this process, also of one whose training was interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outlast.monitor.rank_monitor import open_monitor

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def open_sessions() -> Iterator[list[Any]]:
    """Yield a list for the sessions to close at the end; their changes to this process are undone."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    sessions: list[Any] = []
    try:
        yield sessions
    finally:
        for run in sessions:
            if run._saves is not None:
                run._saves.manager.close()
            run._preemption._outlives_session = False  # its deadline would end pytest
            run._preemption.close()
            run._let_go()
        if not sessions and (monitor := open_monitor()) is not None:  # init() raised
            monitor.close()
        for number, handler in before.items():
            signal.signal(number, handler)
