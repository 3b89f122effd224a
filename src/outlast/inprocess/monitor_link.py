"""The rank's end of its monitor process: start it, tell it, hear it.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from outlast import env as environment
from outlast.errors import OutlastError
from outlast.inprocess import messages as m
from outlast.inprocess.monitor_task import MonitorTask
from outlast.inprocess.page import Page

__all__ = ["MonitorLink"]


class MonitorLink:
    """A rank's monitor process.

    Args:
        task: What it is told.
        page: The page that it watches; stays the caller's.

    Raises:
        OSError: No process can be started.

    Thread: :meth:`send` from any, :meth:`receive` from one.
    """

    def __init__(self, task: MonitorTask, page: Page) -> None:
        self._task, self._page = task, page
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, m.MAX_PACKET_BYTES)
        variables = environment.environ()
        # The rank may have found outlast through its own sys.path.
        package_root = str(Path(__file__).resolve().parents[2])
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, variables.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "outlast.inprocess.monitor_process",
                    str(theirs.fileno()),
                    str(self._page.fd),
                    msgspec.json.encode(self._task).decode(),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._page.fd],
                env=variables,
                start_new_session=True,  # Ctrl-C is for the rank; this process ends with it
            )
        self._socket = ours
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something; it stays the same for ever."""
        return self._socket.fileno()

    def send(self, message: m.FromRank) -> None:
        """Tell the monitor process something.

        Raises:
            OutlastError: It is gone.

        Blocks: hardly; a packet fits into the socket's buffer.
        """
        try:
            with self._lock:
                self._socket.send(m.encode(message))
        except OSError as error:
            raise OutlastError(f"the monitor process (pid {self.pid}) is gone: {error}") from error

    def receive(self) -> m.FromMonitor | None:
        """Return the next message; ``None`` once the monitor process is gone for good.

        Blocks: until there is one; call it when :meth:`fileno` is readable.
        """
        try:
            data = self._socket.recv(m.MAX_PACKET_BYTES)
        except OSError:
            return None
        return m.decode_from_monitor(data) if data else None

    def close(self, timeout_s: float = 1.0) -> None:
        """Let go of the monitor process: it ends, unless other members still need its hub; idempotent.

        Blocks: up to ``timeout_s``, while it ends.
        """
        self._socket.close()
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _still_needed.append(self._process)


_still_needed: list[subprocess.Popen[bytes]] = []
"""Monitor processes whose hub outlives their rank; they end by themselves."""
