"""A writer process, started, watched and replaced by whoever owns it: the node's agent, or a worker without one.

The owner also owns the listening socket, an abstract one that leaves no file behind. When a writer dies, whoever
connects meanwhile waits in the socket's queue for the next one; what the dead one held in memory is gone.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from outlast import clock, env
from outlast.runtime.processes import describe_exit

__all__ = ["WriterProcess"]

log = logging.getLogger(__name__)
BACKLOG = 128
MAX_DEATHS = 5
"""Deaths within ``DEATHS_WITHIN_S`` after which no other writer is started: something else is wrong."""
DEATHS_WITHIN_S = 60.0
_NAME_FREE_S = 10.0
"""Seconds in which the writer of an owner that is gone lets go of its name."""


class WriterProcess:
    """One writer at a time, replaced when it dies.

    Args:
        arguments: More arguments for the first process, for fault injection.
        address: Name of the socket, of one whose owner is gone; empty = the kernel draws one.
        owner: Whose writer this is, for its log; empty = this node's.
        node: Name of this node, for its log; empty = the one that the machine knows itself by.
        on_death: Called with a line for people when a writer died by itself. Thread: one of its own.

    Raises:
        OSError: The system gives no socket or starts no process.
    """

    def __init__(
        self,
        arguments: tuple[str, ...] = (),
        *,
        address: str = "",
        owner: str = "",
        node: str = "",
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._on_death = on_death
        node = node or env.node_name()
        self._names = ("--owner", owner or node, "--node", node)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._closed = False
        self._deaths: list[int] = []
        try:
            self._bind(address)
            self._socket.listen(BACKLOG)
            self._process = self._start(arguments)
        except OSError:
            self._socket.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="outlast-writer-watch", daemon=True)
        self._watcher.start()

    @property
    def address(self) -> str:
        """Name of the abstract socket, without its leading zero byte."""
        name: bytes = self._socket.getsockname()
        return name[1:].decode()

    @property
    def pid(self) -> int:
        """Process id of the writer that runs now, or ran last."""
        return self._process.pid

    def replace(self) -> None:
        """End the writer that runs, whatever it does; the next one takes its place. Thread: any."""
        with self._lock:
            if not self._closed:
                self._process.kill()

    def kill(self) -> None:
        """End the writer at once, from a signal handler: no lock is taken, and nobody is waited for."""
        self._closed = True
        self._process.kill()

    def close(self) -> None:
        """End the writer, and give up what it held and did. Idempotent. Blocks: up to 2 s. Thread: any."""
        with self._lock:
            self._closed = True
            self._process.kill()
            self._socket.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(2.0)
            if self._watcher.is_alive():  # in the kernel, writing to a disk that does not answer
                log.warning("checkpoint writer (pid %d) does not end; the system will end it", self._process.pid)

    def _bind(self, address: str) -> None:
        end_s = clock.now_s() + _NAME_FREE_S
        while True:
            try:
                return self._socket.bind(b"\0" + address.encode() if address else "")  # the kernel draws a name
            except OSError as error:
                if error.errno != errno.EADDRINUSE or clock.now_s() >= end_s:
                    raise
            time.sleep(0.05)

    def _start(self, arguments: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        fd = self._socket.fileno()
        command = [sys.executable, "-P", "-m", "outlast.checkpoint.writer", str(fd), str(os.getpid())]
        command += [*self._names, *arguments]
        return subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)

    def _watch(self) -> None:
        """Reap the writer and start the next. Thread: the watcher's."""
        while True:
            code = self._process.wait()
            with self._lock:
                if self._closed:
                    return
                now_ns = clock.now_ns()
                self._deaths = [at_ns for at_ns in self._deaths if now_ns - at_ns < DEATHS_WITHIN_S * 1e9] + [now_ns]
                what = f"the checkpoint writer (pid {self._process.pid}) ended: {describe_exit(code)}"
                if len(self._deaths) >= MAX_DEATHS:
                    log.error("%s; %d times within %g s: no new one is started", what, MAX_DEATHS, DEATHS_WITHIN_S)
                    self._socket.close()  # whoever asks is refused at once
                    return
                try:
                    self._process = self._start()
                except OSError as error:
                    log.error("%s, and a new one cannot be started (%s)", what, error)
                    self._socket.close()
                    return
            log.warning("%s; a new one runs (pid %d), and checkpoints in memory are lost", what, self._process.pid)
            if self._on_death is not None:
                self._on_death(what)
