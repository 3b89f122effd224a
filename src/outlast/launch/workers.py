"""The agent's hold on its workers: the zygote that starts them, signals to them, and clearing them away."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from outlast.errors import OutlastError
from outlast.launch.cycle import Cycle
from outlast.runtime.zygote import (
    Clear,
    Cleared,
    Exited,
    FailedToStart,
    SendSignal,
    Started,
    Zygote,
    ZygoteReady,
)

__all__ = ["Workers"]

log = logging.getLogger(__name__)


class Workers:
    """Start, signal and clear away the workers of this node.

    Args:
        zygote: A running one; it is ended by :meth:`close`.
        new_zygote: Makes another one, should it die.

    Thread: the agent's main thread.
    """

    def __init__(self, zygote: Zygote, new_zygote: Callable[[], Zygote]) -> None:
        self._zygote, self._new_zygote = zygote, new_zygote
        self._clearing = 0

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something."""
        return self._zygote.fileno()

    def receive(self) -> ZygoteReady | Started | FailedToStart | Exited | Cleared | None:
        """Return the next news of the workers; ``None`` when the zygote died (a new one is there already).

        Blocks: until there is one; call it when :meth:`fileno` is readable.
        """
        news = self._zygote.receive()
        if isinstance(news, ZygoteReady):
            for module, error in news.failed.items():
                log.warning("module %s could not be preloaded: %s", module, error)
        elif isinstance(news, Cleared):
            self._clearing -= 1
        elif news is None:
            log.error(
                "the zygote (pid %d), which starts the workers, died, and so did they; starting a new one",
                self._zygote.pid,
            )
            self._zygote.close()
            self._zygote, self._clearing = self._new_zygote(), 0
        return news

    @property
    def are_cleared(self) -> bool:
        """Whether nothing is left of the workers that were told to go."""
        return not self._clearing

    def start(self, cycle: Cycle) -> None:
        """Start a cycle's workers.

        Raises:
            OutlastError: The zygote is gone, or a worker's environment is too large.
        """
        for request in cycle.spawns:
            self._zygote.send(request)

    def notify(self, cycle: Cycle) -> None:
        """Tell the workers that still run to leave: SIGTERM to each alone, since its data loaders must live on."""
        for key, worker in cycle.workers.items():
            if worker.exit_code is None:
                self._send(SendSignal(signal=signal.SIGTERM, key=key, group=False))

    def sweep(self, key: int) -> None:
        """Kill what a worker that ended has left in its process group."""
        self._send(SendSignal(signal=signal.SIGKILL, key=key))

    def terminate(self) -> None:
        """Send SIGTERM to every worker's process group."""
        self._send(SendSignal(signal=signal.SIGTERM))

    def kill(self) -> None:
        """Send SIGKILL to every worker's process group."""
        self._send(SendSignal(signal=signal.SIGKILL))

    def expect_clear(self) -> None:
        """Count a :meth:`clear` that will follow: until it is done, nothing new may start."""
        self._clearing += 1

    def clear(self) -> None:
        """Kill what is left, and reap it; :class:`Cleared` comes when all is gone."""
        self._send(Clear())

    def close(self) -> None:
        """End the zygote and whatever worker is left."""
        self._zygote.close()

    def _send(self, request: Clear | SendSignal) -> None:
        try:
            self._zygote.send(request)
        except OutlastError as error:
            log.debug("%s", error)  # its end is seen by the loop, which then goes on with another
