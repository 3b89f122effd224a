"""The zygote: a process that imports torch once, and from which workers are forked.

:class:`Zygote` is the agent's side, :func:`main` the process; both exchange the messages below over a socket pair
(:mod:`outlast.runtime.wire`). The process is single-threaded and never runs a multi-threaded torch operation, owns no
process group and no CUDA context: a child forked after any of those hangs or crashes in ways that show up much later.

Ownership: the agent owns the zygote, the zygote owns the workers. If the agent dies, the zygote's connection ends, and
it kills every worker's process group before it ends itself. If the zygote dies, the kernel kills the workers
(``PR_SET_PDEATHSIG``), and the agent's connection ends. A worker that ended is not reaped before :class:`Clear`, so
that neither its pid nor its process group is given to another process in between.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

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
_MAX_FDS = 2
"""Descriptors that come with a request."""
"""Seconds in which killed workers are reaped when the agent is gone."""


class Preload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the zygote imports first; see :class:`Zygote`."""

    modules: tuple[str, ...]
    own_modules: tuple[str, ...]
    folder: bytes


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a worker in a session and process group of its own."""

    key: int
    """Names the worker in later messages; the caller's choice, unique until :class:`Clear`."""
    argv: tuple[bytes, ...]
    """The script (or module, or program) and its arguments; bytes, as the environment: both may be no text."""
    kind: str = "script"
    """``script`` and ``module`` run in a fork of the zygote, ``exec`` is a program of its own."""
    env: dict[bytes, bytes]
    """The whole environment."""
    stdout: bool = False
    """A descriptor of the file to write to comes with the request; otherwise it is the zygote's own."""
    stderr: bool = False
    """The same for errors; its descriptor is the last one."""
    on_start: str = ""
    """``module:function`` to call in a forked worker before its script; empty: none."""


class SendSignal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to one worker, or to all (``key`` is ``None``)."""

    signal: int
    key: int | None = None
    group: bool = True
    """To the whole process group; otherwise to the worker alone."""


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill what is left of all workers (SIGKILL to their groups), reap them, then send :class:`Cleared`."""

    token: int = 0


class ZygoteReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The zygote has imported what it was given."""

    import_s: float
    failed: dict[str, str] = {}
    """Modules that could not be imported, and why."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker runs."""

    key: int
    pid: int


class FailedToStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker could not be started."""

    key: int
    error: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker ended."""

    key: int
    pid: int
    exit_code: int
    """Negative: the signal that ended it."""
    mono_ns: int
    """When the zygote learned it."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every worker is gone and reaped."""

    token: int = 0


Request = Preload | Spawn | SendSignal | Clear
Reply = ZygoteReady | Started | FailedToStart | Exited | Cleared


class Zygote:
    """Start and drive a zygote process.

    Args:
        preload: Modules that it imports before the first worker; empty for fresh interpreters only. None of them is
            looked for in the working directory.
        own_preload: More of them, also looked for where the script looks for its own.
        folder: Where that is.
        env: Its environment. What libraries read when they are loaded (``OMP_NUM_THREADS``) must be here, not only in
            a worker's.

    Thread: one (the agent's main thread).
    """

    def __init__(
        self, *, preload: Sequence[str], env: Mapping[str, str], own_preload: Sequence[str] = (), folder: str = ""
    ) -> None:
        # Not isolated from the environment as other children are: what it reads as it starts is what workers have read.
        self._child = ChildProcess(
            "outlast.runtime.zygote",
            interpreter=("-u", "-c", _MAIN),
            environment=env,
            task=Preload(modules=tuple(preload), own_modules=tuple(own_preload), folder=os.fsencode(folder)),
            receives=Reply,
            stdin=None,  # the agent's is the workers', as under torchrun
        )
        self._has_spawned = False
        self.pid = self._child.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something."""
        return self._child.channel.fileno()

    def send(self, request: Request, fds: Sequence[int] = ()) -> None:
        """Send a request.

        Args:
            request: The request.
            fds: Descriptors of a worker's output, as :class:`Spawn` announces them; they stay the caller's. The zygote
                opens no file of it: a file system that does not respond would keep it from ending workers.

        Raises:
            OutlastError: The zygote is gone, or the request is too large.
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
        """Return the next reply; ``None`` once the zygote is gone.

        Blocks: until there is one; call it when :meth:`fileno` is readable.
        """
        try:
            reply: Reply | None = self._child.channel.receive()
        except ConnectionError:
            return None
        return reply

    def kill(self) -> None:
        """End the zygote at once, and with it its workers; whoever started it reaps it. Blocks: never."""
        self._child.kill()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the zygote, which first kills what is left of its workers; then reap it. Blocks: up to ``timeout_s``."""
        # Without workers it has nothing to end, and may still be importing.
        self._child.close(grace_s=timeout_s if self._has_spawned else 0.0)


class _Children:
    """The workers that were started and not yet cleared."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()

    def take_ended(self) -> list[Exited]:
        """Return those that ended since the last call, without reaping them."""
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
                # It is our child and not reaped, so the pid is its; one just forked may not have its group yet.
                os.kill(pid, sig)

    def reap(self) -> bool:
        """Reap those that ended; return whether none is left."""
        for key, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[key]
                self.ended.discard(key)
        return not self.pids


def main(fd: str) -> None:
    """Serve requests until the agent closes its end.

    Args:
        fd: Descriptor of the connection to the agent.
    """
    channel: MessageChannel[Request] = channel_to_parent(fd, Request)
    ignore_group_signals()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children = _Children()
    preloaded: list[Preloaded] = []
    spawn: Spawn | None = None
    try:
        task = channel.receive()
        if isinstance(task, Preload):
            ready, preloaded = _preload(task)
            channel.send(ready)
            spawn = _serve(channel, wake_read, children)
    except ConnectionError:
        pass
    if spawn is None:
        # The agent is gone, or needs no workers any more: none may outlive it.
        children.signal(signal.SIGKILL)
        deadline_s, woken = clock.now_s() + _END_S, select.poll()
        woken.register(wake_read, select.POLLIN)
        while not children.reap() and clock.now_s() < deadline_s:
            woken.poll(50)
        os._exit(0)
    # Only a forked worker comes here.
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


def _preload(task: Preload) -> tuple[ZygoteReady, list[Preloaded]]:
    started_s, failed = clock.now_s(), dict[str, str]()
    preloaded = preload(task.modules, failed)
    folder = os.fsdecode(task.folder)
    sys.path.insert(0, folder)
    preloaded += preload(task.own_modules, failed)
    sys.path.remove(folder)
    free_groups_last()
    gc.collect()
    gc.freeze()
    return ZygoteReady(import_s=clock.now_s() - started_s, failed=failed), preloaded


def _serve(channel: MessageChannel[Request], wake_read: int, children: _Children) -> Spawn | None:
    """Serve; return a request in the worker that was forked for it, or ``None`` when the agent is gone."""
    clearing: int | None = None
    own_pid = os.getpid()
    poll = select.poll()  # unlike select() with any descriptor: an agent that hosts thousands has high ones
    for fd in (channel.fileno(), wake_read):
        poll.register(fd, select.POLLIN)
    while True:
        # Once in a while look without being woken: SIGCHLD may come while its pipe is being drained.
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
    """Fork; return the pid, or 0 in a child that is to run Python code here. The descriptors are closed here."""
    with ExitStack() as opened:
        for fd in fds:
            opened.callback(os.close, fd)
        # A child would ignore signals as its parent does until it is set up: they wait until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        opened.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, GROUP_SIGNALS)
        if pid := os.fork():
            return pid
        opened.pop_all()
    try:
        os.setsid()
        processes.die_with_parent(parent_pid)
        # Also what a shell or nohup has ignored: torchrun handles these, so that its workers do not ignore them.
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
    except BaseException as error:  # noqa: BLE001  a child must never return into the zygote's loop
        sys.stderr.write(f"outlast: cannot start {os.fsdecode(request.argv[0])}: {error}\n")
        sys.stderr.flush()
        os._exit(127)
    return 0
