"""Processes: parent death signals, process groups, identities, exit descriptions, and child processes.

A :class:`ChildProcess` runs a module of this package as ``__main__``. It imports this package from its parent's
location (which the parent may have found through its own ``sys.path``) and nothing from the working directory. It
inherits only the given descriptors, reads nothing from the terminal, and is reaped by its starter. Its task, secrets
included, is the first message on a socket pair between the two (:class:`~outlast.runtime.wire.MessageChannel`), never
on the command line, which other users can read.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from outlast import env
from outlast.policy.lease import Process
from outlast.runtime.files import NOT_ALLOWED
from outlast.runtime.wire import MessageChannel, socket_pair

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_OF_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
_ENDED = (b"Z", b"X", b"x")
"""States of a process that has ended but was not reaped."""
_LOOK_MS = 50
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer, according to the kernel."""
_SCM_CREDENTIALS = 2
_MAX_DATAGRAMS = 1000
"""Datagrams that are read in a row before other work continues."""
_FORK_S = 10.0
"""Longest wait of a fork for the start of a child process by another thread, which takes milliseconds."""
_libc = ctypes.CDLL(None, use_errno=True)
_starting = threading.RLock()
"""Held while a child process is started, and by ``os.fork()``."""
_fork = threading.local()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Delay ``os.fork()``, and the start of child processes, in other threads meanwhile, up to :data:`_FORK_S`.

    A forked process that executes no other program, such as a worker of a data loader, keeps all descriptors of its
    parent. If it kept the pipe with which :class:`subprocess.Popen` waits for its child, the start would not end before
    the forked process does; if it kept a child's end of a connection, the child's death would not close it; and a
    listening socket that it kept would accept connections that it never serves.

    Blocks: while another thread forks or starts a child process, up to :data:`_FORK_S`. Thread: any.
    """
    lock = _starting
    is_held = lock.acquire(timeout=_FORK_S)
    try:
        yield
    finally:
        if is_held:
            lock.release()


def _before_fork() -> None:
    _fork.is_held = _starting.acquire(timeout=_FORK_S)


def _after_fork_in_parent() -> None:
    if _fork.is_held:
        _starting.release()


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.RLock()  # another thread, which does not exist here, may hold the former one


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

GROUP_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGXCPU),
)
"""Signals that a terminal sends to a process group, or a scheduler to all processes of a job, and that end or stop a
process."""


def ignore_group_signals(*, starts_programs: bool = False) -> None:
    """Ignore :data:`GROUP_SIGNALS` in a helper process: its user handles them, and may need the helper for that.

    Args:
        starts_programs: Programs that this process starts must receive them: ignored signals are inherited, handlers
            are not.

    Thread: the main thread.
    """
    for number in GROUP_SIGNALS:
        signal.signal(number, (lambda *_: None) if starts_programs else signal.SIG_IGN)


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``sig`` to this process when its parent's thread ends.

    Args:
        parent_pid: The parent at the start of this process; if it is gone already, this process exits at once.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent_pid:
        os._exit(128 + sig)


def fork_from_init() -> None:
    """Continue in a child; this process, the first of a container (pid 1), remains as the container's init.

    Orphans in a container become children of its first process, and stay zombies until that reaps them. An agent cannot
    reap unknown processes: the exit codes of its own children belong to their starters. So a small init reaps, forwards
    signals, and exits as the child does; the kernel then ends the remaining processes.

    Thread: the only one of the process.
    """
    passed_on = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, *_OF_FAULTS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with_parent(1)
        return
    while True:
        received = signal.sigwaitinfo(passed_on)
        # The kernel's own signals, such as a terminal's Ctrl-C, go to the whole process group, child included.
        if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
            os.kill(child, received.si_signo)
        while True:  # one signal may stand for several exits
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                ended = 0
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            if ended == 0:
                break


def show_command(argv: Sequence[str]) -> None:
    """Change the command that ``ps`` and ``pgrep -f`` show for this process, cut to the available space.

    The command line is stored in the process's own memory; if its last byte is not zero, the kernel shows it up to the
    first zero byte.
    """
    fields = _stat("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    if (room := end - start - 2) > 0:
        shown = " ".join(argv).encode(errors="surrogateescape")[:room]
        ctypes.memmove(start, shown + b"\0" * (end - start - len(shown) - 1) + b" ", end - start)


def this_process() -> Process:
    """Return the identity of this process; a pid alone may be reused."""
    return Process(host=env.hostname(), machine=machine_id(), pid=os.getpid(), started=_started(_stat("self")))


def describe_self() -> dict[str, Any]:
    """Return :func:`this_process` as fields of the journal."""
    own = this_process()
    return {"pid": own.pid, "pid_started": own.started, "host": own.host, "machine": own.machine}


def job_started_s() -> float:
    """Return when the job of this worker started on its node, in seconds since the epoch; exact to two seconds.

    A job starts with its agent: that of outlast, that of torchrun, or else this process.
    """
    environment = env.environ()
    if text := environment.get(env.AGENT_STARTED):
        return float(text)
    return start_time_s(os.getppid() if "TORCHELASTIC_RUN_ID" in environment else os.getpid())


def start_time_s(pid: int) -> float:
    """Return when a process started, in seconds since the epoch; exact to two seconds."""
    boot = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
    return int(boot[1] if boot else 0) + _started(_stat(str(pid))) / os.sysconf("SC_CLK_TCK")


def this_program() -> str | None:
    """Return :func:`name_program` of the script that this process runs; ``None``: none (``python -c``, a prompt)."""
    path = sys.argv[0] if sys.argv else ""
    return name_program(path) if path and os.path.isfile(path) else None


def name_program(path: str) -> str:
    """Return a script's real path, for comparison and for files; bytes that are not UTF-8 become escapes."""
    return os.fsencode(os.path.realpath(path)).decode(errors="backslashreplace")


def is_alive(process: Process) -> bool | None:
    """Return whether a process still runs, stopped or not; ``None``: this machine cannot determine it."""
    if not process.machine or process.machine != machine_id() or process.pid <= 0:
        return None
    try:
        fields = _stat(str(process.pid))
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, where /proc hides those
            return True
        return True
    return fields[0] not in _ENDED and process.started in (0, _started(fields))


@cache
def machine_id() -> str:
    """Return an identifier of this boot of the machine and of this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = env.hostname()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: str) -> list[bytes]:
    """Return the fields of proc(5)'s ``stat`` from the third on (after the process's name)."""
    return Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()


def _started(fields: list[bytes]) -> int:
    return int(fields[19])  # starttime, field 22 of proc(5)


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; ``X``: it is gone."""
    try:
        return _stat(str(pid))[0].decode()
    except (OSError, IndexError):
        return "X"


def describe_stuck(pid: int) -> str:
    """Describe a process that does not end: its state, and the kernel function in which it waits."""
    try:
        state = _stat(str(pid))[0].decode()
        waits_in = Path("/proc", str(pid), "wchan").read_text(encoding="ascii").strip()
    except OSError:
        return f"pid {pid} (gone)"
    return f"pid {pid} (state {state}{f', in {waits_in}' if waits_in not in ('', '0') else ''})"


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a process, according to ``/proc``."""

    cpu_ticks: int
    """Clock ticks of CPU time used."""
    is_stopped: bool
    """Stopped by a signal or a debugger."""
    is_active: bool
    """A thread is runnable, or waits in the kernel, as for a disk."""

    def is_idle_since(self, before: Activity | None) -> bool:
        """Return whether the process has not run since an earlier moment, and is not about to run."""
        has_run = before is None or before.cpu_ticks != self.cpu_ticks
        return not (has_run or self.is_active)


def read_activity(pid: int) -> Activity | None:
    """Return the activity of a process; ``None``: it is gone, or ``/proc`` does not show it."""
    try:
        fields = _stat(str(pid))
        states = [_stat(f"{pid}/task/{task}")[0] for task in os.listdir(f"/proc/{pid}/task")]
    except (OSError, IndexError):
        return None
    return Activity(
        cpu_ticks=int(fields[11]) + int(fields[12]),  # utime and stime, fields 14 and 15 of proc(5)
        is_stopped=fields[0] in (b"T", b"t"),
        is_active=any(state in (b"R", b"D") for state in states),
    )


def describe_exit(exit_code: int) -> str:
    """Return the meaning of an exit code, for people; negative: the signal that ended the process."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def kill_group(pgid: int, sig: int) -> bool:
    """Send a signal to a process group; return whether it has a process."""
    try:
        os.killpg(pgid, sig)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a member changed its user; the others got the signal
    return True


def peer_user(connection: socket.socket) -> int:
    """Return the user whose process opened a connection to a Unix socket, according to the kernel."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


class DatagramSocket:
    """A socket at an abstract address, for datagrams of processes of this user and root.

    An abstract address has no permissions: any user of the machine can send to it. Datagrams of other users are
    dropped; only the first problem of a socket is logged, so that a flood does not fill the log.

    Args:
        address: Abstract address (first byte zero).
        max_bytes: Longer datagrams are cut.

    Raises: OSError: The address is in use, or no descriptor is left.
    """

    def __init__(self, address: bytes, max_bytes: int) -> None:
        self._max_bytes, self._has_warned = max_bytes, False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that is readable when a datagram has arrived; -1 once closed."""
        return self._socket.fileno()

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield the pending datagrams with each sender's address, up to a limit, so that a flood ends."""
        for _ in range(_MAX_DATAGRAMS):
            try:
                data, control, _, sender = self._socket.recvmsg(self._max_bytes, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            user = next((_CREDENTIALS.unpack(found)[1] for _, kind, found in control if kind == _SCM_CREDENTIALS), None)
            if user in (0, os.getuid(), os.geteuid()):
                yield data, sender or None
            else:
                self.warn(f"user {user} of this machine sends datagrams to this process, which drops them")

    def send(self, data: bytes, address: bytes) -> None:
        """Send a datagram. Raises: OSError, if no process receives there or the receiver's buffer is full."""
        self._socket.sendto(data, address)

    def warn(self, problem: str) -> None:
        """Log a problem of a datagram; further problems of this socket are logged at DEBUG."""
        log.log(logging.DEBUG if self._has_warned else logging.WARNING, "%s; further ones are not logged", problem)
        self._has_warned = True

    def close(self) -> None:
        self._socket.close()


def open_pidfd(pid: int) -> int:
    """Return a descriptor that is readable once a process has ended, reaped or not.

    Where ``pidfd_open`` is missing or forbidden, a thread polls ``/proc`` instead.

    Raises:
        ProcessLookupError: There is no such process.
        OSError: Such as too many open files.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
    try:
        started = _started(_stat(str(pid)))
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    read, write = os.pipe2(os.O_CLOEXEC)

    def watch() -> None:
        poll = select.poll()
        poll.register(write, 0)  # reports an error once the other end is closed
        try:
            while not poll.poll(_LOOK_MS):
                fields = _stat(str(pid))
                if fields[0] in _ENDED or _started(fields) != started:
                    break
        except OSError:
            pass  # gone
        finally:
            os.close(write)

    threading.Thread(target=watch, name="outlast-process-watch", daemon=True).start()
    return read


def send_signal(pidfd: int, pid: int, number: int) -> None:
    """Send a signal to a process of :func:`open_pidfd`, unless it has ended.

    Raises:
        ProcessLookupError: It has ended.
        PermissionError: It may not be signalled.
    """
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError as error:
        if error.errno not in NOT_ALLOWED | {errno.EBADF}:
            raise
        if has_ended(pidfd, 0.0):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
        os.kill(pid, number)


def has_ended(pidfd: int, timeout_s: float) -> bool:
    """Return whether a process of :func:`open_pidfd` ends in time. Blocks: up to ``timeout_s``."""
    poll = select.poll()  # not select(): an agent with many nodes has descriptors above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def end_process(pidfd: int, pid: int, number: signal.Signals, *, grace_s: float, name: str) -> None:
    """Send a signal to a process of :func:`open_pidfd`, and SIGKILL if it still runs after the grace period.

    Args:
        name: Of the process, for the log.

    Raises:
        PermissionError: It may not be signalled.

    Blocks: up to ``grace_s``; never for SIGKILL.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended
        send_signal(pidfd, pid, number)
        if number != signal.SIGKILL:
            send_signal(pidfd, pid, signal.SIGCONT)  # a stopped process handles no other signal
            if not has_ended(pidfd, grace_s):
                log.error("%s still runs %g s after %s: sending SIGKILL", name, grace_s, number.name)
                send_signal(pidfd, pid, signal.SIGKILL)


class ChildProcess:
    """One child process.

    Args:
        *arguments: Its arguments; no secrets.
        task: Sent to the child as the first message on :attr:`channel`, whose other end the child gets with
            :func:`channel_to_parent`; ``None``: no channel.
        receives: Union of the messages from the child.
        fds: Descriptors that the child inherits under the same numbers; they stay the caller's.
        interpreter: Options of the interpreter and code to run instead of the module.
        environment: The child's whole environment; ``None``: that of this process, and the location of this package.
        quiet: Discard the child's output; otherwise it goes where this process's goes.
        stdin: As for :class:`subprocess.Popen`; ``None``: this process's.
        own_session: Run in a new session and process group: Ctrl-C does not reach it, and :meth:`kill` also ends the
            processes that it started.

    Raises: OSError: No process can be started.

    Blocks: until the process exists, a few milliseconds.
    Thread: any; the kernel may tie a child to the thread that starts it (``die_with_parent``).
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        task: msgspec.Struct | None = None,
        receives: Any = None,
        fds: Sequence[int] = (),
        interpreter: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
        own_session: bool = True,
    ) -> None:
        self._own_session = own_session
        with no_fork():
            ours, theirs = socket_pair() if task is not None else (None, None)
            try:
                channel_fds = [] if theirs is None else [theirs.fileno()]
                self._process = subprocess.Popen(
                    [sys.executable, *(interpreter or ("-P", "-m", module)), *map(str, channel_fds), *arguments],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL if quiet else stdout,
                    stderr=subprocess.DEVNULL if quiet else None,
                    pass_fds=[*channel_fds, *fds],
                    env=_with_package_path() if environment is None else dict(environment),
                    start_new_session=own_session,
                )
            except BaseException:
                if ours is not None:
                    ours.close()
                raise
            finally:
                if theirs is not None:
                    theirs.close()
        self.pid = self._process.pid
        self._channel: MessageChannel[Any] | None = None
        if ours is not None and task is not None:
            self._channel = MessageChannel(ours, receives)
            with contextlib.suppress(ConnectionError):  # it has ended already; poll() returns how
                self._channel.send(task)

    @property
    def channel(self) -> MessageChannel[Any]:
        """The connection to the child; its end means that the child is gone."""
        assert self._channel is not None, "a child without a task has no channel"
        return self._channel

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; ``None`` while the child runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the child's end, up to ``timeout_s``; return its exit code. Raises: subprocess.TimeoutExpired."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End the child at once, with the processes of its session if it has its own. Blocks: never. Thread: any."""
        if self._process.returncode is None and not (self._own_session and kill_group(self.pid, signal.SIGKILL)):
            self._process.kill()

    def close(self, *, grace_s: float = 0.0, end_s: float = 2.0) -> int | None:
        """Close the channel, end the child and reap it.

        Args:
            grace_s: Seconds in which it may end by itself once the channel is closed.
            end_s: Seconds in which it must be gone once it is killed.

        Returns:
            Its exit code; ``None``: it is blocked in the kernel, in a driver or on a network disk, and a thread reaps
            it when it returns from there.

        Blocks: up to ``grace_s + end_s``.
        """
        if self._channel is not None:
            self._channel.close()
        if grace_s and self._process.returncode is None:
            ended = open_pidfd(self.pid)  # not reaped before its group is ended, so its pid is not reused
            try:
                has_ended(ended, grace_s)
            finally:
                os.close(ended)
        self.kill()
        try:
            return self._process.wait(end_s)
        except subprocess.TimeoutExpired:
            threading.Thread(target=self._process.wait, name="outlast-reaper", daemon=True).start()
            return None


def _with_package_path() -> dict[str, str]:
    """Return this process's environment with the location of this package, for a child."""
    variables = env.environ()
    root = str(Path(__file__).resolve().parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    return variables


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files, of this process and its children, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a container may not permit it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def channel_to_parent(fd: str, receives: Any) -> MessageChannel[Any]:
    """Return the child's end of the channel to its parent, on which the task comes first."""
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    return MessageChannel(connection, receives)
