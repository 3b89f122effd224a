"""The fork server: a process that imports torch once, and from which workers are forked.

:class:`ForkServer` is the agent's side, :func:`main` the process; they exchange the messages below over a socket pair
(:mod:`outlast.runtime.wire`). The process is single-threaded, never runs a multi-threaded torch operation, and has no
process group and no CUDA context: a child forked after any of those hangs or crashes much later.

Ownership: the agent owns the fork server, which owns the workers. If the agent dies, the fork server's connection ends,
and it kills every worker's process group before it exits. If the fork server dies, the kernel kills the workers
(``PR_SET_PDEATHSIG``), and the agent's connection ends. An ended worker is not reaped before :class:`Clear`, so that
neither its pid nor its process group is reused meanwhile.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import msgspec

from outlast import clock
from outlast.errors import OutlastError
from outlast.runtime import processes
from outlast.runtime.forked_worker import Preloaded, become_worker, free_groups_last, preload
from outlast.runtime.processes import GROUP_SIGNALS, ChildProcess, channel_to_parent, ignore_group_signals
from outlast.runtime.wire import MessageChannel, ProtocolError

_MAIN = f"""
import sys
if not sys.flags.safe_path:
    del sys.path[0]  # the working directory: its modules belong to the script
from {__name__} import main
main(sys.argv[1])
"""
_END_S = 2.0
"""Seconds in which killed workers are reaped when the agent is gone."""
_MAX_FDS = 2
"""Descriptors per request."""


class Preload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Imports of the fork server; see :class:`ForkServer`."""

    modules: tuple[str, ...]
    own_modules: tuple[str, ...]
    folder: bytes


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a worker in its own session and process group."""

    key: int
    """Identifies the worker in later messages; chosen by the caller, unique until :class:`Clear`."""
    argv: tuple[bytes, ...]
    """The script (or module, or program) and its arguments; bytes, like the environment, as both may not be text."""
    kind: str = "script"
    """``script`` and ``module`` run in a fork of the fork server, ``exec`` is a separate program."""
    env: dict[bytes, bytes]
    """The whole environment."""
    stdout: bool = False
    """The request carries a descriptor for standard output; otherwise it is the fork server's own."""
    stderr: bool = False
    """The same for standard error; its descriptor is the last one."""
    on_start: str = ""
    """``module:function`` to call in a forked worker before its script; empty: none."""


class SendSignal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to one worker, or to all (``key`` is ``None``)."""

    signal: int
    key: int | None = None
    group: bool = True
    """To the whole process group; otherwise to the worker alone."""


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill the remaining workers (SIGKILL to their groups), reap them, then send :class:`Cleared`."""

    token: int = 0


class ForkServerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The imports are done."""

    failed: dict[str, str] = {}
    """Modules that could not be imported, and why."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    key: int
    pid: int


class FailedToStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    key: int
    error: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    key: int
    pid: int
    exit_code: int
    """Negative: the signal that ended it."""
    mono_ns: int
    """When the fork server detected it."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    token: int = 0


Request = Preload | Spawn | SendSignal | Clear
Reply = ForkServerReady | Started | FailedToStart | Exited | Cleared


class ForkServer:
    """Start and control a fork server.

    Args:
        preload: Modules to import before the first worker, not searched for in the working directory; empty for fresh
            interpreters only.
        own_preload: Further modules, also searched for in ``folder``.
        env: Its environment. Variables that libraries read when they are loaded (``OMP_NUM_THREADS``) must be here, not
            only in a worker's.

    Thread: one (the agent's main thread).
    """

    def __init__(
        self, *, preload: Sequence[str], env: Mapping[str, str], own_preload: Sequence[str] = (), folder: str = ""
    ) -> None:
        # Not isolated from the environment like other children: workers inherit what it reads at its start.
        self._child = ChildProcess(
            "outlast.runtime.fork_server",
            interpreter=("-u", "-c", _MAIN),
            environment=env,
            task=Preload(modules=tuple(preload), own_modules=tuple(own_preload), folder=os.fsencode(folder)),
            receives=Reply,
            stdin=None,  # workers inherit the agent's, as under torchrun
        )
        self._has_spawned = False
        self.pid = self._child.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has a reply."""
        return self._child.channel.fileno()

    def send(self, request: Request, fds: Sequence[int] = ()) -> None:
        """Send a request.

        Args:
            fds: Descriptors of a worker's output, as :class:`Spawn` announces them; they stay the caller's. The fork
                server opens no output file itself: a file system that does not respond would keep it from ending
                workers.

        Raises: OutlastError: The fork server is gone, or the request is too large.
        """
        self._has_spawned |= isinstance(request, Spawn)
        try:
            self._child.channel.send(request, fds)
        except ProtocolError as error:
            raise OutlastError(
                f"a worker's environment and arguments are too large; make them smaller ({error})"
            ) from error
        except OSError as error:
            raise OutlastError(f"the process that starts workers (pid {self.pid}) is gone: {error}") from error

    def receive(self) -> Reply | None:
        """Return the next reply; ``None`` once the fork server is gone.

        Blocks: until there is one; call it when :meth:`fileno` is readable.
        """
        try:
            reply: Reply | None = self._child.channel.receive()
        except ConnectionError:
            return None
        return reply

    def kill(self) -> None:
        """End the fork server, and with it its workers, at once; its parent reaps it. Blocks: never."""
        self._child.kill()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the fork server, which first kills its remaining workers; then reap it. Blocks: up to ``timeout_s``."""
        # Without workers it has nothing to clean up, and may still be importing.
        self._child.close(grace_s=timeout_s if self._has_spawned else 0.0)


class _Children:
    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()

    def take_ended(self) -> list[Exited]:
        """Return the workers that ended since the last call, without reaping them."""
        found: list[Exited] = []
        for key, pid in self.pids.items():
            if key in self.ended:
                continue
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.ended.add(key)
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                found.append(Exited(key=key, pid=pid, exit_code=code, mono_ns=clock.now_ns()))
        return found

    def signal(self, sig: int, key: int | None = None, *, group: bool = True) -> None:
        for child, pid in self.pids.items():
            if key is not None and child != key:
                continue
            if not group or not processes.kill_group(pid, sig):
                # An unreaped child, so the pid is not reused; one just forked may not have its group yet.
                os.kill(pid, sig)

    def reap(self) -> bool:
        """Reap ended workers; return whether none is left."""
        for key, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[key]
                self.ended.discard(key)
        return not self.pids


def main(fd: str) -> None:
    """Serve requests until the agent closes its end of the connection ``fd``."""
    channel: MessageChannel[Request] = channel_to_parent(fd, Request)
    ignore_group_signals()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children = _Children()
    preloaded: list[Preloaded] = []
    spawn: Spawn | None = None
    with suppress(ConnectionError):
        task = channel.receive()
        if isinstance(task, Preload):
            ready, preloaded = _preload(task)
            channel.send(ready)
            spawn = _serve(channel, wake_read, children)
    if spawn is None:
        # The agent is gone or needs no workers any more: none may outlive it.
        children.signal(signal.SIGKILL)
        deadline_s, woken = clock.now_s() + _END_S, select.poll()
        woken.register(wake_read, select.POLLIN)
        while not children.reap() and clock.now_s() < deadline_s:
            woken.poll(50)
        os._exit(0)
    # Only a forked worker reaches this line.
    signal.set_wakeup_fd(-1)
    os.close(wake_read)
    os.close(wake_write)
    channel.close()
    become_worker(
        [os.fsdecode(word) for word in spawn.argv],
        is_module=spawn.kind == "module",
        environment={os.fsdecode(name): os.fsdecode(value) for name, value in spawn.env.items()},
        on_start=spawn.on_start,
        preloaded=preloaded,
    )


def _preload(task: Preload) -> tuple[ForkServerReady, list[Preloaded]]:
    failed = dict[str, str]()
    preloaded = preload(task.modules, failed)
    folder = os.fsdecode(task.folder)
    sys.path.insert(0, folder)
    preloaded += preload(task.own_modules, failed)
    sys.path.remove(folder)
    free_groups_last()
    gc.collect()
    gc.freeze()
    return ForkServerReady(failed=failed), preloaded


def _serve(channel: MessageChannel[Request], wake_read: int, children: _Children) -> Spawn | None:
    """Serve requests; return the request in the worker that was forked for it, ``None`` when the agent is gone."""
    clearing: int | None = None
    own_pid = os.getpid()
    poll = select.poll()  # unlike select() with any descriptor: an agent that hosts thousands has high ones
    for fd in (channel.fileno(), wake_read):
        poll.register(fd, select.POLLIN)
    while True:
        # Check at least once a second: SIGCHLD may arrive while its pipe is being drained.
        readable = {fd for fd, _ in poll.poll(1000)}
        if wake_read in readable:
            os.read(wake_read, 4096)
        for exited in children.take_ended():
            channel.send(exited)
        if clearing is not None and children.reap():
            channel.send(Cleared(token=clearing))
            clearing = None
        if channel.fileno() not in readable:
            continue
        received = channel.receive_with_fds(_MAX_FDS)
        if received is None:
            return None
        request, fds = received
        if isinstance(request, Spawn):
            try:
                pid = _start(request, fds, own_pid)
            except OSError as error:
                channel.send(FailedToStart(key=request.key, error=str(error)))
                continue
            if pid == 0:
                return request
            children.pids[request.key] = pid
            channel.send(Started(key=request.key, pid=pid))
        elif isinstance(request, SendSignal):
            children.signal(request.signal, request.key, group=request.group)
        elif isinstance(request, Clear):
            children.signal(signal.SIGKILL)
            clearing = request.token
            if children.reap():
                channel.send(Cleared(token=clearing))
                clearing = None


def _start(request: Spawn, fds: Sequence[int], parent_pid: int) -> int:
    """Fork; return the pid, or 0 in a child that will run Python code here. Closes the descriptors."""
    with ExitStack() as opened:
        for fd in fds:
            opened.callback(os.close, fd)
        # Block signals until the child is set up: until then it ignores them like its parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        opened.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, GROUP_SIGNALS)
        if pid := os.fork():
            return pid
        opened.pop_all()
    try:
        os.setsid()
        processes.die_with_parent(parent_pid)
        # Also those that a shell or nohup ignored: torchrun handles these, so its workers do not ignore them.
        for sig in (signal.SIGCHLD, *GROUP_SIGNALS):
            signal.signal(sig, signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
        if request.stdout:
            os.dup2(fds[0], 1)
        if request.stderr:
            os.dup2(fds[-1], 2)
        for fd in fds:
            if fd > 2:
                os.close(fd)
        if request.kind == "exec":
            # A handler that is a Python function is reset by exec, what is ignored stays so: python ignores SIGPIPE.
            for sig in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(sig, signal.SIG_DFL)
            os.execvpe(request.argv[0], list(request.argv), request.env)
    except BaseException as error:  # noqa: BLE001  a child must never return into the fork server's loop
        sys.stderr.write(f"outlast: cannot start {os.fsdecode(request.argv[0])}: {error}\n")
        sys.stderr.flush()
        os._exit(127)
    return 0
