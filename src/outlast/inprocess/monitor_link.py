"""The rank's end of its monitor process: start it, tell it, hear it, start it again where it is gone.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outlast import env as environment
from outlast.errors import OutlastError
from outlast.inprocess import messages as m
from outlast.inprocess.monitor_task import MonitorTask
from outlast.inprocess.page import Page
from outlast.inprocess.record import Record

__all__ = ["MonitorLink"]

log = logging.getLogger(__name__)

_MAX_STARTS = 3


class MonitorLink:
    """A rank's monitor process.

    One that is killed is replaced by another one, which joins the hub (wherever that is then) in its place.

    Args:
        task: What it is told.
        page: The page that it watches; stays the caller's.

    Raises:
        OSError: No process can be started.

    Thread: :meth:`send` from any, :meth:`receive` from one, :meth:`close` when :meth:`receive` is called no more.
    """

    def __init__(self, task: MonitorTask, page: Page) -> None:
        self._task, self._page = task, page
        self._lock = threading.Lock()
        self._record = Record()
        self._known = m.Candidates(candidates=())
        self._token = ""
        self._last_words: m.Left | None = None
        self._is_over = False
        self._num_starts = 0
        self._socket = self._start()

    def _start(self) -> socket.socket:
        self._num_starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, m.MAX_PACKET_BYTES)
            variables = environment.environ()
            # The rank may have found outlast through its own sys.path.
            package_root = str(Path(__file__).resolve().parents[2])
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, variables.get("PYTHONPATH")]))
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "outlast.inprocess.monitor_process",
                    str(theirs.fileno()),
                    str(self._page.fd),
                    msgspec.json.encode(self._task).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # who reads the rank's output waits for its end, not for this process's
                pass_fds=[theirs.fileno(), self._page.fd],
                env=variables,
                start_new_session=True,  # Ctrl-C is for the rank; this process ends with it
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        return ours

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something; it stays the same."""
        return self._socket.fileno()

    def send(self, message: m.Connect | m.Report) -> None:
        """Tell the monitor process something; if it is gone, the next one is told.

        Blocks: hardly; a packet fits into the socket's buffer.
        """
        with self._lock:
            if isinstance(message, m.Connect):
                self._token = message.token
            else:
                self._record.note_report(message)
            if isinstance(message, m.Left):
                self._last_words = message
                self._is_over = True
            self._send(message)

    def receive(self) -> tuple[m.Listening | m.Order, ...]:
        """Return what the monitor process has said since the last call; call it when :meth:`fileno` is readable.

        Raises:
            OutlastError: The monitor process is gone, and no other one is of use.

        Blocks: hardly; while another monitor process is started, some milliseconds.
        """
        return tuple(self._received())

    def _received(self) -> Iterator[m.Listening | m.Order]:
        while True:
            try:
                data = self._socket.recv(m.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("the monitor process's socket broke: %s", error)
                data = b""
            if not data:
                self._replace()
                return
            message = m.decode_from_monitor(data)
            with self._lock:
                if isinstance(message, m.Candidates):
                    self._known = message
                    continue
                if isinstance(message, m.Finish | m.Abort | m.Expel):
                    self._is_over = True
                elif not isinstance(message, m.Listening):
                    self._record.note_order(message)
            if isinstance(message, m.Listening) and self._num_starts > 1:
                continue  # the rank has used the address of the first one
            yield message

    def _replace(self) -> None:
        """Start another monitor process in place of one that is gone."""
        exit_code = self._process.wait()
        with self._lock:
            if self._is_over or not self._known.candidates or self._num_starts >= _MAX_STARTS:
                raise OutlastError(
                    f"the monitor process (pid {self.pid}) of rank {self._task.initial_rank} ended with {exit_code}; "
                    "its log says why"
                )
            log.warning("the monitor process (pid %d) ended with code %d; a new one is started", self.pid, exit_code)
            try:
                new = self._start()
            except OSError as error:
                raise OutlastError(f"the monitor process is gone, and no other one can be started: {error}") from error
            with new:
                os.dup2(new.fileno(), self._socket.fileno(), inheritable=False)
            self._send(
                m.Reconnect(
                    token=self._token,
                    known=self._known,
                    standing=self._record.standing,
                    last_words=self._last_words,
                )
            )

    def _send(self, message: m.FromRank) -> None:
        try:
            self._socket.send(m.encode(message))
        except OSError as error:
            log.debug("the monitor process is gone: %s", error)  # receive() sees it, too

    def close(self, timeout_s: float = 1.0) -> None:
        """Let go of the monitor process: it ends, unless other members still need its hub; idempotent.

        Blocks: up to ``timeout_s``, while it ends.
        """
        if not self._is_over:
            self.send(m.Left(reason="the rank left the wrapper"))
        try:
            # Processes that the rank forked have the socket, too.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the monitor process is gone: %s", error)
        self._socket.close()
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            if self._process not in _still_needed:
                _still_needed.append(self._process)


_still_needed: list[subprocess.Popen[bytes]] = []
"""Monitor processes whose hub outlives their rank; they end by themselves."""
