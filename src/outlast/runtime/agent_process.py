"""The agent process: the one helper process of a node that its ranks start without ``outlast run``.

It has *duties*, such as the hang watch of a rank (:mod:`outlast.monitor.hang_watch`), its in-process restarts
(:mod:`outlast.inprocess.monitor_duty`) and the node's checkpoint writer (:mod:`outlast.checkpoint.writer_client`). A
duty is the name of a module with ``run_duty``, and runs in a thread of the agent process; so the agent process imports
none of them, nor they each other.

Ranks elect the process by binding an abstract Unix socket whose name follows from the user, the job, the cycle and the
node: the kernel lets one rank bind the name, and frees it with the last process that has the socket. That rank starts
the process, which inherits the socket; all ranks connect, and wait in the socket's queue until the process has started.
The election needs no file, so it works where the ranks of a node have separate Slurm tasks with private folders.

The process has a session of its own and outlives the rank that started it. A duty ends with its rank, and the process
``_LINGER_S`` after its last duty. Where the process is killed, the ranks detect the end of their connections and elect
another one. It imports no torch. Any user can bind an abstract name, so both sides check the user of the other side,
and ranks use the next name where another user has bound the first one.

Rejected: a lock file (private folders, network file systems without locks, files left behind); a process for each rank
(four ranks had four processes and four checkpoint writers).
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from outlast import clock, env, logs
from outlast.env import WorkerEnv
from outlast.policy.lease import Process
from outlast.runtime.listener import ThreadedListener
from outlast.runtime.processes import (
    ChildProcess,
    ignore_group_signals,
    is_alive,
    machine_id,
    no_fork,
    open_pidfd,
    peer_user,
    raise_descriptor_limit,
    this_process,
)
from outlast.runtime.wire import PACKET_BUFFER_BYTES, MessageChannel

log = logging.getLogger("outlast.runtime.agent_process")

_JOIN_S = 60.0
"""Time limit in seconds for an agent process, running or starting, to begin a duty."""
_AGAIN_S = 0.005
_LINGER_S = 1.0
"""Seconds without a duty after which the agent process ends."""
_BACKLOG = 512
_MAX_NEWCOMERS = 512
"""Connections without a requested duty; one more closes the oldest, and its rank connects again."""
_MAX_FDS = 8
_MAX_NAMES = 4
"""Number of names to try where other users have bound the first ones."""


class _BeginDuty(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin a duty; the duty's descriptors are sent with it."""

    module: str
    task: bytes
    process: Process


class _DutyBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A duty runs; from now on the connection is the duty's."""

    pid: int


# -- the rank's side ---------------------------------------------------------------------------------------------

_own_name: tuple[int, str] | None = None
"""This process, and the name of its node's agent process: an in-process restart changes variables that the name is
derived from."""


class AgentDuty:
    """One duty of the node's agent process for this rank. Starts the agent process unless it runs.

    Args:
        module: Full name of a module with ``run_duty(task, line, fds, pidfd)``, which owns its arguments: the encoded
            task, the other end of :attr:`line`, a copy of ``fds``, and a descriptor that is readable once the rank has
            ended.
        task: Sent to the duty.
        place: Of this rank.
        fds: Descriptors for the duty; they stay the caller's.

    Raises:
        OSError: No process can be started.

    Blocks: some milliseconds; the first rank of a node waits until the process has started. Thread: any.
    """

    def __init__(self, module: str, task: msgspec.Struct, place: WorkerEnv, *, fds: Sequence[int] = ()) -> None:
        self._module, self._task, self._fds = module, msgspec.json.encode(task), list(fds)
        self._place = place
        self.pid = 0
        self.line = self._begin()
        """The rank's end of a connection whose messages are packets; the duty has the other end."""

    def restart(self) -> None:
        """Begin the duty again, in another agent process where the first one is gone; the line keeps its descriptor.

        Raises:
            OSError: No process can be started.
        """
        with self._begin() as line:
            os.dup2(line.fileno(), self.line.fileno(), inheritable=False)

    def release(self) -> None:
        """End the duty. Idempotent. Blocks: never."""
        if self.line.fileno() < 0:
            return
        try:
            self.line.shutdown(socket.SHUT_RDWR)  # processes that the rank forked have the socket, too
        except OSError as error:
            log.debug("the duty has ended before: %s", error)
        self.line.close()

    def _begin(self) -> socket.socket:
        end_s = clock.now_s() + _JOIN_S
        order = _BeginDuty(module=self._module, task=self._task, process=this_process())
        while True:
            line = _connect(_name_of(self._place), self._place.node)
            try:
                channel: MessageChannel[_DutyBegun] = MessageChannel(line, _DutyBegun)
                channel.send(order, self._fds)
                begun = channel.receive(within_s=end_s - clock.now_s())
            except ConnectionError as error:
                log.debug("the agent process is gone again: %s", error)
                begun = None
            except BaseException:
                line.close()
                raise
            if begun is not None:
                self.pid = begun.pid
                return line
            line.close()  # the agent process ended meanwhile
            if clock.now_s() >= end_s:
                raise TimeoutError(
                    f"no agent process of node {self._place.node} has begun the duty within {_JOIN_S:g} s"
                )


def _name_of(place: WorkerEnv) -> str:
    """Return the name of the agent process of this rank's node; all ranks of the node compute the same."""
    global _own_name
    if _own_name is not None and _own_name[0] == os.getpid():
        return _own_name[1]
    variables = env.environ()
    parts = [os.getuid(), machine_id(), place.run_id, place.job, place.cycle, place.node, place.node_rank]
    parts.append(place.world_size)
    parts += [variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", env.RUN_KEY)]
    if place.world_size == 1:  # its environment may equal that of the user's other processes
        parts.append(os.getpid())
    _own_name = os.getpid(), "outlast-agent-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return _own_name[1]


def _connect(name: str, node: str) -> socket.socket:
    """Return a connection to the agent process; start it where none runs.

    Raises:
        OSError: No process can be started.
    """
    number = 0
    while number < _MAX_NAMES:
        address = f"\0{name}-{number}"
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BUFFER_BYTES)
            line.settimeout(_JOIN_S)
            line.connect(address)
            if peer_user(line) == os.getuid():
                return line
            log.warning("user %d of this machine has bound the name of the agent process", peer_user(line))
            number += 1
        except ConnectionRefusedError:
            line.close()
            _start(address, node)
            continue
        except BaseException:
            line.close()
            raise
        line.close()
    raise PermissionError(errno.EPERM, "other users of this machine have bound the names of the agent process")


def _start(address: str, node: str) -> None:
    with no_fork(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(_AGAIN_S)
            return
        listener.listen(_BACKLOG)
        fd = listener.fileno()
        child = ChildProcess(
            "outlast.runtime.agent_process",
            *(str(fd), node),
            fds=[fd],
            stdout=subprocess.DEVNULL,  # a reader of the rank's output must not wait for this process
        )
    threading.Thread(target=child.wait, name="outlast-agent-reaper", daemon=True).start()


# -- the agent process -------------------------------------------------------------------------------------------


def _run_duty(listener: ThreadedListener, connection: socket.socket) -> None:
    try:
        channel: MessageChannel[_BeginDuty] = MessageChannel(connection, _BeginDuty)
        received = channel.receive_with_fds(_MAX_FDS, within_s=_JOIN_S)
        if received is None:
            return
        listener.admit(connection)
        order, fds = received
        threading.current_thread().name = f"outlast-{order.module.rpartition('.')[2]}"
        duty = importlib.import_module(order.module)
        pidfd = _watch(order.process)
        channel.send(_DutyBegun(pid=os.getpid()))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BUFFER_BYTES)
        duty.run_duty(order.task, connection, fds, pidfd)
    except OSError as error:
        log.debug("a rank was gone before its duty began: %s", error)
    except Exception:
        log.exception("a duty of the agent process failed: its rank is no longer watched by it")


def _watch(process: Process) -> int:
    try:
        pidfd = open_pidfd(process.pid)
    except ProcessLookupError:
        pass
    else:
        if is_alive(process) is not False:
            return pidfd
        os.close(pidfd)  # the rank ended before, and its process id is in use again
    read, write = os.pipe()
    os.close(write)
    return read


def main() -> int:
    ignore_group_signals()
    raise_descriptor_limit()
    logs.configure("agent", node=sys.argv[2], least=logging.INFO)
    listening = socket.socket(fileno=int(sys.argv[1]))
    listening.set_inheritable(False)
    listener = ThreadedListener(
        [listening],
        lambda connection: _run_duty(listener, connection),
        name="the agent process",
        max_newcomers=_MAX_NEWCOMERS,
    )
    listener.run(_LINGER_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
