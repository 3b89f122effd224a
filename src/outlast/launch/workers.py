"""The workers of a node, as its agent sees them: the fork server that starts, signals and clears them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outlast.errors import OutlastError
from outlast.incidents import Incident
from outlast.runtime.fork_server import (
    Clear,
    Cleared,
    Exited,
    FailedToStart,
    ForkServer,
    ForkServerReady,
    SendSignal,
    Spawn,
    Started,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker of a cycle, as its node's agent knows it."""

    local_rank: int
    global_rank: int
    pid: int = 0
    started_ns: int = 0
    """When its start was reported, on the node's monotonic clock; 0: not yet."""
    exit_code: int | None = None
    ended_ns: int = 0
    """When its end was reported, on the node's monotonic clock; 0: it runs."""
    lost: Incident | None = None
    """The incident that ended it if the other ranks continue without it; otherwise ``None``."""


class NodeWorkers:
    """Start, signal and clear the workers of this node.

    Args:
        fork server: A running fork server, which :meth:`close` ends.
        new_fork_server: Makes another fork server if it dies.

    Thread: the agent's main thread.
    """

    def __init__(self, fork_server: ForkServer, new_fork_server: Callable[[], ForkServer]) -> None:
        self._fork_server, self._new_fork_server = fork_server, new_fork_server
        self._num_clearing = 0

    def fileno(self) -> int:
        return self._fork_server.fileno()

    def receive(self) -> ForkServerReady | Started | FailedToStart | Exited | Cleared | None:
        """Return the next event of the workers; ``None`` if the fork server died (it has been replaced).

        Blocks: until there is an event; to be called when :meth:`fileno` is readable.
        """
        event = self._fork_server.receive()
        if isinstance(event, ForkServerReady):
            for module, error in event.failed.items():
                log.warning("module %s could not be preloaded: %s", module, error)
        elif isinstance(event, Cleared):
            self._num_clearing -= 1
        elif event is None:
            log.error(
                "the fork server (pid %d), which starts the workers, died, and the workers with it; starting a new one",
                self._fork_server.pid,
            )
            self._fork_server.close()
            self._fork_server, self._num_clearing = self._new_fork_server(), 0
        return event

    @property
    def are_cleared(self) -> bool:
        """Whether all workers of earlier cycles are gone; no new one may start before."""
        return not self._num_clearing

    def start(self, spawns: Iterable[tuple[Spawn, Sequence[int]]]) -> None:
        """Start a cycle's workers, each with the descriptors of its output.

        Raises:
            OutlastError: The fork server is gone, or a worker's environment is too large.
        """
        for request, fds in spawns:
            self._fork_server.send(request, fds)

    def notify(self, workers: Mapping[int, WorkerProcess]) -> None:
        """Send SIGTERM to each running worker alone: its data loaders must live on."""
        for key, worker in workers.items():
            if worker.exit_code is None:
                self._send(SendSignal(signal=signal.SIGTERM, key=key, group=False))

    def sweep(self, key: int) -> None:
        """Kill the remaining processes in an ended worker's process group."""
        self._send(SendSignal(signal=signal.SIGKILL, key=key))

    def kill(self) -> None:
        """Send SIGKILL to every worker's process group."""
        self._send(SendSignal(signal=signal.SIGKILL))

    def begin_clearing(self, *, gently: bool) -> None:
        """Begin to end the workers; no new one starts until a :meth:`clear` is done.

        Args:
            gently: Send SIGTERM to every worker's process group; the caller calls :meth:`clear` later. Otherwise kill
                them.
        """
        self._num_clearing += 1
        if gently:
            self._send(SendSignal(signal=signal.SIGTERM))
        else:
            self.clear()

    def clear(self) -> None:
        """Kill and reap the remaining workers; :class:`Cleared` follows.

        Does nothing if no clearing is pending: a dead fork server took its workers with it, and those of the new one
        belong to a later cycle.
        """
        if self._num_clearing:
            self._send(Clear())

    def close(self) -> None:
        """End the fork server and the remaining workers."""
        self._fork_server.close()

    def _send(self, request: Clear | SendSignal) -> None:
        try:
            self._fork_server.send(request)
        except OutlastError as error:
            log.debug("%s", error)  # the loop detects its end and replaces it
