"""The writer process from outside: its owner starts, monitors and replaces it, and workers send it requests.

The owner, the agent of ``outlast run`` or the node's agent process (:func:`run_duty`), also owns the listening socket,
an abstract one that leaves no file behind. A writer that dies is replaced, one that stops responding
(:mod:`outlast.checkpoint.writer_pings`) is killed first; new connections wait in the socket's queue meanwhile. The
checkpoints in its memory are lost; a restore uses other nodes' replicas, and the next save fills the memory again.
"""

from __future__ import annotations

import errno
import itertools
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
from outlast.decoding import from_json
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError
from outlast.runtime.agent_process import AgentDuty
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
"""Seconds in which a killed writer ends, unless it waits in the kernel."""
_NAME_FREE_S = 10.0
"""Seconds in which the writer of an owner that is gone releases its name."""
_AGAIN_S = 0.05
_START_S = 60.0
"""Seconds in which the agent process has to start a writer."""


class WriterProcess:
    """One writer at a time, replaced when it dies or stops responding.

    Args:
        address: Name of the socket, taken over from an owner that is gone; empty = the kernel chooses one.
        node: Name of this node, for its log; empty = this machine's own name.
        on_death: Called with a line for people when a writer died by itself, or was replaced because it stopped
            responding. Thread: a separate one.
        silent_s: Seconds without a response after which an idle writer is replaced.

    Raises:
        OSError: The system cannot create a socket or a process.
    """

    def __init__(
        self,
        *,
        address: str = "",
        node: str = "",
        on_death: Callable[[str], None] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self._on_death, self._silent_s = on_death, silent_s
        self._node = node or env.node_name()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._closed = False
        self._replaced_s: list[tuple[float, float]] = []
        """Times at which a writer died or stopped responding, and for how many seconds each counts."""
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
        return self._process.pid

    def kill(self) -> None:
        """Kill the writer from a signal handler: takes no lock, waits for nothing."""
        self._closed = True
        self._process.kill()

    def close(self) -> None:
        """Kill the writer, dropping what it holds. Idempotent. Blocks: up to 2 s. Thread: any."""
        with self._lock:
            self._closed = True
            self._process.kill()
            self._socket.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(2.0)
            if self._watcher.is_alive():  # killed, and in the kernel
                log.warning(
                    "checkpoint writer (pid %d) still gives memory back, or waits for a disk", self._process.pid
                )

    def _bind(self, address: str) -> None:
        end_s = clock.now_s() + _NAME_FREE_S
        while True:
            try:
                return self._socket.bind(b"\0" + address.encode() if address else "")  # the kernel chooses a name
            except OSError as error:
                if error.errno != errno.EADDRINUSE or clock.now_s() >= end_s:
                    raise
            time.sleep(0.05)

    def _start(self) -> ChildProcess:
        fd = self._socket.fileno()
        arguments = (str(fd), str(os.getpid()), self._node)
        return ChildProcess("outlast.checkpoint.writer", *arguments, fds=[fd], own_session=False)

    def _watch(self) -> None:
        """Thread: the watcher's."""
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
                    self._socket.close()  # new connections are refused
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
        name = f"the checkpoint writer of node {self._node}"
        if silence is None:
            return f"{name} (pid {process.pid}) ended: {describe_exit(process.wait())}"
        what = f"{name}, {silence.process}, did not respond for {silence.silent_s:.0f} s and was killed"
        if process.close(end_s=_END_S) is None:
            what += f", but has not ended after {_END_S:g} s: {describe_stuck(process.pid)}"
        return what


class WriterTask(msgspec.Struct, frozen=True, kw_only=True):
    """The agent process's duty to keep a node's writer for its workers."""

    node: str
    number: int
    """Number of the client in its process: each client has a writer, as the ranks share memory with theirs."""


class _SharedWriter:
    """The writer of this agent process, kept while a worker needs it."""

    def __init__(self, node: str) -> None:
        self.num_workers = 0
        self.outcome = b""
        """``+`` and the writer's address, or ``-`` and an error."""
        self._node = node
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        threading.Thread(target=self._keep, name="outlast-writer-owner", daemon=True).start()
        self._is_ready.wait()

    def close(self) -> None:
        """End the writer. Blocks: never."""
        self._is_over.set()

    def _keep(self) -> None:
        # In one thread: a writer dies with the thread that starts it.
        try:
            writer = WriterProcess(node=self._node)
        except OSError as error:
            self.outcome = f"-{error}".encode()
            self._is_ready.set()
            return
        with closing(writer):
            self.outcome = f"+{writer.address}".encode()
            self._is_ready.set()
            self._is_over.wait()


_sharing = threading.Lock()
_shared: dict[int, _SharedWriter] = {}
_numbers: set[int] = set()
"""Numbers of the clients in this process that need a duty."""


def run_duty(task: bytes, line: socket.socket, fds: list[int], pidfd: int) -> None:
    """Keep the node's writer until a worker is gone or closes the line; see
    :class:`~outlast.runtime.agent_process.AgentDuty`.

    Args:
        task: A :class:`WriterTask`, as JSON.
        line: Receives :attr:`_SharedWriter.outcome`.
        fds: None.
        pidfd: Descriptor of the worker's process.
    """
    given = from_json(task, WriterTask)
    with _sharing:
        if (writer := _shared.get(given.number)) is None:
            writer = _shared[given.number] = _SharedWriter(given.node)
        writer.num_workers += 1
    try:
        line.send(writer.outcome)
        poll = select.poll()
        poll.register(line, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        poll.poll()
    finally:
        os.close(pidfd)
        with _sharing:
            writer.num_workers -= 1
            if writer.num_workers == 0:
                del _shared[given.number]
                writer.close()


class WriterSilent(CheckpointError):
    """The checkpoint writer did not respond in time."""


class WriterClient:
    """Send requests to a writer process.

    Args:
        address: That of the agent of ``outlast run``; ``None`` = the node's agent process starts one on the first
            request.
        place: This worker's place; ``None`` = from its environment.
        patience_s: Seconds to wait for another writer at the address, if the owner of the first one may be replaced.

    Thread: any; each request uses a connection exclusively.
    """

    def __init__(self, address: str | None, *, place: WorkerEnv | None = None, patience_s: float = 0.0) -> None:
        self._address, self._patience_s = address, patience_s
        self.outlives_worker = address is not None
        """Whether the writer's memory outlives all workers of the node."""
        self._place = place
        self._duty: AgentDuty | None = None
        self._number = -1
        self._idle: list[MessageChannel[f.Reply]] = []
        self._busy: set[MessageChannel[f.Reply]] = set()
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._closed = False
        self._serving: f.Serve | None = None
        """The granted request to serve peers, with the port that peers know; sent first to a writer that replaces this
        one."""

    def start(self) -> None:
        """Have the node's agent process start a writer if none runs.

        Raises:
            CheckpointError: It cannot, or the client is closed meanwhile.

        Blocks: until the agent process has started one, about 0.2 s.
        """
        with self._starting:  # not _lock: close() does not wait for a start
            with self._lock:
                duty = self._duty
                if self.outlives_worker or self._closed or (duty is not None and not _is_readable(duty.line)):
                    return
            try:
                if duty is None:
                    duty = self._begin_duty()
                else:
                    log.warning("agent process %d ended, and the checkpoint writer with it", duty.pid)
                    duty.restart()
                self._adopt(duty)
                _is_readable(duty.line, _START_S)
                outcome = duty.line.recv(1 << 16, socket.MSG_DONTWAIT).decode()
            except (OSError, ValueError) as error:  # ValueError: close() has closed the line
                raise CheckpointError(f"no writer process can be started: {error}") from error
            if not outcome.startswith("+"):
                raise CheckpointError(f"no writer process can be started: {outcome[1:] or 'the agent process ended'}")
            self._address = outcome[1:]

    def _adopt(self, duty: AgentDuty) -> None:
        with self._lock:
            if self._closed:
                duty.release()
                raise CheckpointError("the checkpoint writer is not needed anymore")
            self._duty = duty

    def _begin_duty(self) -> AgentDuty:
        place = env.read_worker() if self._place is None else self._place
        if self._number < 0:
            with _sharing:
                self._number = next(number for number in itertools.count() if number not in _numbers)
                _numbers.add(self._number)
        return AgentDuty("outlast.checkpoint.writer_client", WriterTask(node=place.node, number=self._number), place)

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
            self._drop(channel)  # not replaced: its owner does so if it does not respond to pings
            raise WriterSilent(
                f"the checkpoint writer did not respond within {timeout_s:.3g} s; is the disk stuck?"
            ) from None
        except OSError as error:
            self._drop(channel)
            raise CheckpointError(f"the checkpoint writer is gone ({error}); another one takes its place") from None
        except BaseException:  # the pending reply must not be read by another request
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
        raise CheckpointError(
            f"the checkpoint writer sent {type(answer).__name__} in response to {type(request).__name__}"
        )

    def close(self) -> None:
        """End all waits, and the writer unless another worker needs it. Idempotent. Blocks: never. Thread: any."""
        with self._lock:
            self._closed = True
            for channel in self._busy:
                channel.abort()
            for channel in self._idle:
                channel.close()
            self._idle.clear()
            if self._duty is not None:
                self._duty.release()
            with _sharing:
                _numbers.discard(self._number)

    def _serve_again(self, channel: MessageChannel[f.Reply], serve: f.Serve, timeout_s: float) -> None:
        """Have a new writer serve peers at the known port, if it does not yet."""
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
                if not _is_readable(channel):
                    self._busy.add(channel)
                    return channel, False
                channel.close()  # it has ended, or has unexpected data
            address = self._address
        end_s = clock.now_s() + min(self._patience_s, timeout_s)
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


def _is_readable(connection: socket.socket | MessageChannel[f.Reply], timeout_s: float = 0.0) -> bool:
    poll = select.poll()  # select() does not support descriptors beyond 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
