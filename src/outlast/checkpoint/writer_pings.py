"""Detect a checkpoint writer that runs and does not respond, from its owner's side.

The owner keeps one connection to the writer, and sends a :class:`~outlast.checkpoint.protocol.PingWriter` on it every
:data:`PING_EVERY_S`. A separate thread of the writer responds, even while all others wait for a hung directory. A
stopped (``SIGSTOP``), deadlocked or frozen writer does not respond.

A slow writer must not be killed, since the checkpoints in its memory would be lost. So the limit is :data:`SILENT_S`
only if the process has used no processor time meanwhile and has no thread that is ready to run or waits in the kernel;
else :data:`BUSY_S`. Time in which the owner itself did not run does not count.

Rejected: judging by the duration of requests. A hung directory makes requests slow, and a new writer would hang there,
    too.
"""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass

from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.runtime.processes import Activity, describe_stuck, open_pidfd, read_activity
from outlast.runtime.wire import MessageChannel

PING_EVERY_S = 5.0
"""Seconds between a response and the next ping."""
SILENT_S = 20.0
"""Seconds without a response after which an idle writer is replaced."""
BUSY_S = 60.0
"""Seconds without a response after which a writer that seems to be busy is replaced."""
START_S = 120.0
"""Seconds until the first response of a writer that is not stopped: its interpreter starts and imports modules."""
_SLICE_S = 1.0
"""Seconds between two checks of the process; if more have passed, the owner did not run, and two of these count."""


@dataclass(frozen=True, slots=True)
class WriterSilence:
    silent_s: float
    process: str


class WriterPings:
    """Wait until one writer process ends or stops responding.

    Args:
        silent_s: Seconds without a response after which an idle writer counts as hung.

    Raises:
        OSError: The process cannot be watched, for example for lack of descriptors.

    Thread: one.
    """

    def __init__(self, pid: int, address: str, *, silent_s: float = SILENT_S) -> None:
        self._pid, self._address, self._silent_s = pid, address, silent_s
        self._every_s = min(PING_EVERY_S, silent_s / 4)
        self._ended = open_pidfd(pid)
        self._channel: MessageChannel[f.Reply] | None = None
        self._has_responded = False

    def close(self) -> None:
        os.close(self._ended)
        self._disconnect()

    def wait(self) -> WriterSilence | None:
        """Return how the writer stopped responding; ``None`` = the process has ended.

        Blocks: as long as the writer responds.
        """
        while True:
            if (outcome := self._ping()) is not True:
                return outcome or None
            if self._wait_readable(self._every_s, self._ended):
                return None

    def _ping(self) -> WriterSilence | bool:
        """Send a ping and wait for the response; return whether the process still runs, or its silence."""
        silent_s = idle_s = 0.0
        activity = read_activity(self._pid)
        is_sent = False
        while True:
            began_s = clock.now_s()
            if not is_sent:
                is_sent = self._send()
            sources = [self._ended]
            if is_sent and self._channel is not None:
                sources.append(self._channel.fileno())
            readable = self._wait_readable(_SLICE_S, *sources)
            if self._ended in readable:
                return False
            if readable and self._receive():
                self._has_responded = True
                self._disconnect()  # the next ping tests whether it still accepts connections and starts threads
                return True
            if readable:  # the connection ended, and the process has not
                is_sent = False
                if self._wait_readable(_SLICE_S, self._ended):
                    return False
            passed_s = min(clock.now_s() - began_s, 2 * _SLICE_S)
            silent_s += passed_s
            before, activity = activity, read_activity(self._pid)
            idle_s = idle_s + passed_s if self._is_idle(before, activity) else 0.0
            is_hung = silent_s >= self._silent_s and idle_s >= self._silent_s / 2
            if is_hung or silent_s >= (BUSY_S if self._has_responded else START_S):
                return WriterSilence(silent_s, describe_stuck(self._pid))

    def _is_idle(self, before: Activity | None, activity: Activity | None) -> bool:
        if activity is None:
            return False
        return activity.is_stopped or (self._has_responded and activity.is_idle_since(before))

    def _send(self) -> bool:
        try:
            if self._channel is None:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    connection.settimeout(_SLICE_S)
                    connection.connect(b"\0" + self._address.encode())
                except OSError:
                    connection.close()
                    raise
                self._channel = MessageChannel(connection, f.Reply, timeout_s=_SLICE_S)
            self._channel.send(f.PingWriter())
        except OSError:
            self._disconnect()
            return False
        return True

    def _receive(self) -> bool:
        assert self._channel is not None
        try:
            if self._channel.receive() is not None:
                return True
        except OSError:
            pass
        self._disconnect()
        return False

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @staticmethod
    def _wait_readable(timeout_s: float, *fds: int) -> list[int]:
        poll = select.poll()  # select() does not support descriptors beyond 1023
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(timeout_s * 1e3)]
