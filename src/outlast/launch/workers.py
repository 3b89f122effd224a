"""The workers of a node, as its agent sees them: the fork server that starts, signals and clears them away."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outlast.errors import OutlastError
from outlast.incidents import Incident
from outlast.runtime.zygote import (
    Clear,
    Cleared,
    Exited,
    FailedToStart,
    SendSignal,
    Spawn,
    Started,
    Zygote,
    ZygoteReady,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker of a cycle, as its node's agent knows it."""

    local_rank: int
    global_rank: int
    pid: int = 0
    started_ns: int = 0
    """When it was known to run, on the node's monotonic clock; 0 = not yet."""
    exit_code: int | None = None
    ended_ns: int = 0
    """When its end was seen, on the node's monotonic clock; 0 = it runs."""
    lost: Incident | None = None
    """What ended it, if the other ranks continue without it; else ``None``."""


class NodeWorkers:
    """Start, signal and clear away the workers of this node.

    Args:
        zygote: A running one; it is ended by :meth:`close`.
        new_zygote: Makes another one, should it die.

    Thread: the agent's main thread.
    """

    def __init__(self, zygote: Zygote, new_zygote: Callable[[], Zygote]) -> None:
        self._zygote, self._new_zygote = zygote, new_zygote
        self._num_clearing = 0

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something."""
        return self._zygote.fileno()

    def receive(self) -> ZygoteReady | Started | FailedToStart | Exited | Cleared | None:
        """Return the next event of the workers; ``None`` when the zygote died (a new one is there already).

        Blocks: until there is one; call it when :meth:`fileno` is readable.
        """
        event = self._zygote.receive()
        if isinstance(event, ZygoteReady):
            for module, error in event.failed.items():
                log.warning("module %s could not be preloaded: %s", module, error)
        elif isinstance(event, Cleared):
            self._num_clearing -= 1
        elif event is None:
            log.error(
                "the fork server (pid %d), which starts the workers, died, and the workers with it; starting a new one",
                self._zygote.pid,
            )
            self._zygote.close()
            self._zygote, self._num_clearing = self._new_zygote(), 0
        return event

    @property
    def are_cleared(self) -> bool:
        """Whether nothing is left of the workers of earlier cycles; nothing new may start before."""
        return not self._num_clearing

    def start(self, spawns: Iterable[tuple[Spawn, Sequence[int]]]) -> None:
        """Start a cycle's workers, each with the descriptors of its output.

        Raises:
            OutlastError: The zygote is gone, or a worker's environment is too large.
        """
        for request, fds in spawns:
            self._zygote.send(request, fds)

    def notify(self, workers: Mapping[int, WorkerProcess]) -> None:
        """Request the workers that still run to shut down: SIGTERM to each alone, as its data loaders must live on."""
        for key, worker in workers.items():
            if worker.exit_code is None:
                self._send(SendSignal(signal=signal.SIGTERM, key=key, group=False))

    def sweep(self, key: int) -> None:
        """Kill what a worker that ended has left in its process group."""
        self._send(SendSignal(signal=signal.SIGKILL, key=key))

    def kill(self) -> None:
        """Send SIGKILL to every worker's process group."""
        self._send(SendSignal(signal=signal.SIGKILL))

    def begin_clearing(self, *, gently: bool) -> None:
        """Begin to end the workers; nothing new starts until a :meth:`clear` is done.

        Args:
            gently: Send SIGTERM to every worker's process group now; the caller calls :meth:`clear` later. Otherwise
                they are killed at once.
        """
        self._num_clearing += 1
        if gently:
            self._send(SendSignal(signal=signal.SIGTERM))
        else:
            self.clear()

    def clear(self) -> None:
        """Kill what is left, and reap it; :class:`Cleared` comes when all is gone.

        Nothing happens if nothing is being ended any more: a zygote that died took its workers with it, and those of
        the new one belong to a later cycle.
        """
        if self._num_clearing:
            self._send(Clear())

    def close(self) -> None:
        """End the zygote and whatever worker is left."""
        self._zygote.close()

    def _send(self, request: Clear | SendSignal) -> None:
        try:
            self._zygote.send(request)
        except OutlastError as error:
            log.debug("%s", error)  # the loop sees its end, and continues with another one
