"""The writer process from outside: started, watched and replaced by its owner, and asked by a worker.

The owner, the node's agent or a worker without one, also owns the listening socket, an abstract one that leaves no file
behind. A writer that dies is replaced, and one that stops responding (:mod:`outlast.checkpoint.writer_pings`) is killed
and replaced: whoever connects meanwhile waits in the socket's queue for the next one. The checkpoints that the old one
held in memory are lost; a restore takes them from replicas on other nodes, and the next save fills the memory again.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import msgspec

from outlast import clock, env
from outlast.checkpoint import protocol as f
from outlast.checkpoint.writer_pings import SILENT_S, WriterPings, WriterSilence
from outlast.errors import CheckpointError
from outlast.runtime.processes import ChildProcess, describe_exit, describe_stuck
from outlast.runtime.wire import MessageChannel

log = logging.getLogger(__name__)
R = TypeVar("R", bound=msgspec.Struct)
BACKLOG = 128
MAX_DEATHS = 5
"""Replacements within ``DEATHS_WITHIN_S`` after which no other writer is started: something else is wrong."""
DEATHS_WITHIN_S = 60.0
HANGS_WITHIN_S = 600.0
"""As :data:`DEATHS_WITHIN_S`, for writers that stopped responding: each costs at least ``SILENT_S``."""
_END_S = 5.0
"""Seconds in which a writer that was killed ends, unless it waits within the kernel."""
_NAME_FREE_S = 10.0
"""Seconds in which the writer of an owner that is gone releases its name."""
_AGAIN_S = 0.05


class WriterProcess:
    """One writer at a time, replaced when it dies or stops responding.

    Args:
        address: Name of the socket, of one whose owner is gone; empty = the kernel draws one.
        owner: Whose writer this is, for its log; empty = this node's.
        node: Name of this node, for its log; empty = the one that the machine knows itself by.
        on_death: Called with a line for people when a writer died by itself, or was replaced because it stopped
            responding. Thread: one of its own.
        silent_s: Seconds without a response after which a writer that does not run at all is replaced.

    Raises:
        OSError: The system gives no socket or starts no process.
    """

    def __init__(
        self,
        *,
        address: str = "",
        owner: str = "",
        node: str = "",
        on_death: Callable[[str], None] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self._on_death, self._silent_s = on_death, silent_s
        node = node or env.node_name()
        self._whose = owner or f"node {node}"
        self._names = ("--owner", owner or node, "--node", node)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._closed = False
        self._replaced_s: list[tuple[float, float]] = []
        """When a writer died or stopped responding, and for how long that counts."""
        try:
            self._bind(address)
            self._socket.listen(BACKLOG)
            self._process = self._start()
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
            if self._watcher.is_alive():  # killed, and within the kernel
                log.warning(
                    "checkpoint writer (pid %d) still gives memory back, or waits for a disk", self._process.pid
                )

    def _bind(self, address: str) -> None:
        end_s = clock.now_s() + _NAME_FREE_S
        while True:
            try:
                return self._socket.bind(b"\0" + address.encode() if address else "")  # the kernel draws a name
            except OSError as error:
                if error.errno != errno.EADDRINUSE or clock.now_s() >= end_s:
                    raise
            time.sleep(0.05)

    def _start(self) -> ChildProcess:
        fd = self._socket.fileno()
        arguments = (str(fd), str(os.getpid()), *self._names)
        return ChildProcess("outlast.checkpoint.writer", *arguments, fds=[fd], own_session=False)

    def _watch(self) -> None:
        """Reap the writer and start the next. Thread: the watcher's."""
        while True:
            silence = self._wait_for_end()
            with self._lock:
                process, is_closed = self._process, self._closed
            what, within_s = self._end(process, silence), DEATHS_WITHIN_S if silence is None else HANGS_WITHIN_S
            with self._lock:
                if is_closed or self._closed:
                    return
                now_s = clock.now_s()
                self._replaced_s = [one for one in self._replaced_s if now_s - one[0] < one[1]] + [(now_s, within_s)]
                if len(self._replaced_s) >= MAX_DEATHS:
                    log.error("%s; %d times within %g s: no new one is started", what, MAX_DEATHS, within_s)
                    self._socket.close()  # whoever asks is refused at once
                    return
                try:
                    self._process = self._start()
                except OSError as error:
                    log.error("%s, and a new one cannot be started (%s)", what, error)
                    self._socket.close()
                    return
            log.warning(
                "%s; a new one runs (pid %d). The checkpoints in its memory are lost: a restore loads replicas, the "
                "local disk or the global directory, and the next save fills the memory again",
                what,
                self._process.pid,
            )
            if self._on_death is not None:
                self._on_death(what)

    def _wait_for_end(self) -> WriterSilence | None:
        """Wait until the writer has ended, or return how it stopped responding. Thread: the watcher's."""
        try:
            pings = WriterPings(self._process.pid, self.address, silent_s=self._silent_s)
        except OSError as error:
            if not self._closed and not isinstance(error, ProcessLookupError):
                log.warning("the checkpoint writer (pid %d) cannot be pinged (%s)", self._process.pid, error)
            self._process.wait()
            return None
        with closing(pings):
            return pings.wait()

    def _end(self, process: ChildProcess, silence: WriterSilence | None) -> str:
        """Reap a writer that ended, or kill one that does not respond; return a line for people."""
        name = f"the checkpoint writer of {self._whose}"
        if silence is None:
            return f"{name} (pid {process.pid}) ended: {describe_exit(process.wait())}"
        what = f"{name}, {silence.process}, did not respond for {silence.silent_s:.0f} s and was killed"
        if process.close(end_s=_END_S) is None:
            what += f", but has not ended after {_END_S:g} s: {describe_stuck(process.pid)}"
        return what


class WriterSilent(CheckpointError):
    """The checkpoint writer did not respond in time."""


class WriterClient:
    """Ask a writer process.

    Args:
        address: The agent's; ``None``: start one for this process, when first asked.
        owner: Whose a process of its own is, for the log; empty = the node's.
        node: Name of this node, for that log; empty = the one that the machine knows itself by.
        patience_s: Seconds to wait for another writer at the address, where the owner of the first one may be replaced.

    Thread: any; each request has a connection for itself while it runs.
    """

    def __init__(
        self,
        address: str | None,
        *,
        owner: str = "",
        node: str = "",
        patience_s: float = 0.0,
    ) -> None:
        self._address, self._patience_s = address, patience_s
        self._owner, self._node = owner, node
        self._own: WriterProcess | None = None
        self._idle: list[MessageChannel[f.Reply]] = []
        self._busy: set[MessageChannel[f.Reply]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._serving: f.Serve | None = None
        """The request to serve peers that a writer has granted, with the port that peers know: a writer that replaces
        it receives it first."""

    @property
    def outlives_worker(self) -> bool:
        return self._address is not None

    @property
    def pid(self) -> int | None:
        """Process id of a writer of our own; ``None`` when there is none."""
        return self._own.pid if self._own is not None else None

    def start(self) -> None:
        """Start a writer of our own if one is needed; it dies with the calling thread.

        Raises:
            CheckpointError: The system starts no process.
        """
        with self._lock:
            if self._address is None and self._own is None and not self._closed:
                try:
                    self._own = WriterProcess(owner=self._owner, node=self._node)
                except OSError as error:
                    raise CheckpointError(f"no writer process can be started: {error}") from error

    def ask(
        self, request: msgspec.Struct, reply: type[R], *, timeout_s: float, fd: int | None = None
    ) -> tuple[R, int | None]:
        """Send a request and wait for its reply.

        Args:
            fd: A descriptor that goes with the request; stays the caller's.

        Returns:
            The reply, and the descriptor that came with it, now the caller's.

        Raises:
            WriterSilent: The writer did not respond within ``timeout_s``.
            CheckpointError: The writer refused or died; the text has the reason.

        Blocks: up to ``timeout_s``.
        """
        channel, is_new = self._connect(timeout_s)
        try:
            if is_new and self._serving is not None and not isinstance(request, f.Serve):
                self._serve_again(channel, self._serving, timeout_s)
            channel.timeout_s = max(0.001, timeout_s)
            channel.send(request, () if fd is None else (fd,))
            received = channel.receive_with_fds()
            if received is None:
                raise ConnectionError("it ended the connection")
        except TimeoutError:
            self._drop(channel)  # its owner replaces a writer that does not respond to pings, and no other
            raise WriterSilent(
                f"the checkpoint writer did not respond within {timeout_s:.3g} s; is the disk stuck?"
            ) from None
        except OSError as error:
            self._drop(channel)
            raise CheckpointError(f"the checkpoint writer is gone ({error}); another one takes its place") from None
        except BaseException:  # the answer that is still to come must not meet another request
            self._drop(channel)
            raise
        with self._lock:
            self._busy.discard(channel)
            if self._closed:
                channel.close()
            else:
                self._idle.append(channel)
        answer, fds = received
        out = fds[0] if fds else None
        if isinstance(request, f.Serve) and isinstance(answer, f.Serving):
            self._serving = msgspec.structs.replace(request, port=answer.port)
        if isinstance(answer, reply):
            return answer, out
        if out is not None:
            os.close(out)
        if isinstance(answer, f.WriterRefusal):
            raise CheckpointError(answer.error)
        raise CheckpointError(f"the checkpoint writer answered {type(answer).__name__} to {type(request).__name__}")

    def close(self) -> None:
        """End a writer of our own, whatever it does, and all waits. Idempotent. Blocks: up to 2 s. Thread: any."""
        with self._lock:
            self._closed = True
            for channel in self._busy:
                channel.abort()
            for channel in self._idle:
                channel.close()
            self._idle.clear()
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def _serve_again(self, channel: MessageChannel[f.Reply], serve: f.Serve, timeout_s: float) -> None:
        """Have the writer at a new connection serve peers at the port that they know, if it does not yet."""
        channel.timeout_s = max(0.001, timeout_s)
        channel.send(serve)
        match channel.receive():
            case f.Serving() as serving if serving.port != serve.port:
                log.warning(
                    "the new checkpoint writer of this node listens at port %d, since %d is taken: other nodes send it "
                    "no replicas until the next restart",
                    serving.port,
                    serve.port,
                )
                self._serving = msgspec.structs.replace(serve, port=serving.port)
            case f.WriterRefusal() as refusal:
                log.warning("the new checkpoint writer of this node cannot serve other nodes: %s", refusal.error)
            case None:
                raise ConnectionError("the connection ended")

    def _connect(self, timeout_s: float) -> tuple[MessageChannel[f.Reply], bool]:
        self.start()
        with self._lock:
            while self._idle and not self._closed:
                channel = self._idle.pop()
                poll = select.poll()  # select() knows no descriptors beyond 1023
                poll.register(channel, select.POLLIN)
                if not poll.poll(0):
                    self._busy.add(channel)
                    return channel, False
                channel.close()  # it has ended, or there is data that nobody asked for
            address = self._address if self._own is None else self._own.address
        end_s = clock.now_s() + (min(self._patience_s, timeout_s) if self._own is None else 0.0)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(0.001, timeout_s))
                connection.connect(b"\0" + (address or "").encode())
            except OSError as error:
                connection.close()
                if self._closed or not isinstance(error, ConnectionRefusedError) or clock.now_s() >= end_s:
                    raise CheckpointError(f"there is no checkpoint writer ({error})") from None
                time.sleep(_AGAIN_S)
                continue
            channel = MessageChannel[f.Reply](connection, f.Reply, max_bytes=f.MAX_MESSAGE_BYTES)
            with self._lock:
                if not self._closed:
                    self._busy.add(channel)
                    return channel, True
            channel.close()
            raise CheckpointError("the checkpoint writer was ended")

    def _drop(self, channel: MessageChannel[f.Reply]) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()
