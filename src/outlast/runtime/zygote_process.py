"""The zygote process: imports once, forks workers, watches them, and outlives none of them.

It is single-threaded and never runs a multi-threaded torch operation, owns no process group and no CUDA context: a
child forked after any of those hangs or crashes in ways that show up much later.

:class:`outlast.runtime.zygote.Zygote` starts it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys

import msgspec

from outlast import clock
from outlast.decoding import msgpack_decoder
from outlast.runtime import processes
from outlast.runtime.forked_worker import Preloaded, become_worker, preload
from outlast.runtime.zygote import (
    MAX_PACKET_BYTES,
    Clear,
    Cleared,
    Exited,
    FailedToStart,
    Ready,
    Request,
    SendSignal,
    Spawn,
    Started,
)

__all__ = ["main"]

_decoder: msgspec.msgpack.Decoder[Request] = msgpack_decoder(Request)
_encoder = msgspec.msgpack.Encoder()


class _Children:
    """The workers that were started and not yet cleared."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()

    def take_ended(self) -> list[Exited]:
        """Return those that ended since the last call, without reaping them."""
        news: list[Exited] = []
        for key, pid in self.pids.items():
            if key in self.ended:
                continue
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.ended.add(key)
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                news.append(Exited(key=key, pid=pid, exit_code=code, mono_ns=clock.now_ns()))
        return news

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


def main(argv: list[str]) -> None:
    """Serve requests until the agent closes its end.

    Args:
        argv: Descriptor of the channel; modules to import; more of them, and the folder where the script looks for its
            own first. Names are separated by commas.
    """
    fd, modules, own_modules, folder = argv
    channel = socket.socket(fileno=int(fd))
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children = _Children()
    preloaded: list[Preloaded] = []
    try:
        started_s, failed = clock.now_s(), dict[str, str]()
        preloaded += preload(filter(None, modules.split(",")), failed)
        sys.path.insert(0, folder)
        preloaded += preload(filter(None, own_modules.split(",")), failed)
        sys.path.remove(folder)
        gc.collect()
        gc.freeze()
        channel.send(_encoder.encode(Ready(import_s=clock.now_s() - started_s, failed=failed)))
        request = _serve(channel, wake_read, children)
    except ConnectionError:
        request = None
    if request is None:
        # The agent is gone, or is done with us: nobody may outlive it.
        children.signal(signal.SIGKILL)
        deadline_s = clock.now_s() + 2.0
        while not children.reap() and clock.now_s() < deadline_s:
            select.select([wake_read], [], [], 0.05)
        os._exit(0)
    # Only a forked worker comes here.
    signal.set_wakeup_fd(-1)
    os.close(wake_read)
    os.close(wake_write)
    channel.close()
    become_worker(request, preloaded)


def _serve(channel: socket.socket, wake_read: int, children: _Children) -> Spawn | None:
    """Serve; return a request in the worker that was forked for it, or ``None`` when the agent is gone."""
    clearing: int | None = None
    own_pid = os.getpid()
    while True:
        # Once in a while look without being told: SIGCHLD may come while its pipe is being drained.
        readable, _, _ = select.select([channel.fileno(), wake_read], [], [], 1.0)
        if wake_read in readable:
            os.read(wake_read, 4096)
        for news in children.take_ended():
            channel.send(_encoder.encode(news))
        if clearing is not None and children.reap():
            channel.send(_encoder.encode(Cleared(token=clearing)))
            clearing = None
        if channel.fileno() not in readable:
            continue
        data = channel.recv(MAX_PACKET_BYTES)
        if not data:
            return None
        request = _decoder.decode(data)
        if isinstance(request, Spawn):
            try:
                pid = _start(request, own_pid)
            except OSError as error:
                channel.send(_encoder.encode(FailedToStart(key=request.key, error=str(error))))
                continue
            if pid == 0:
                return request
            children.pids[request.key] = pid
            channel.send(_encoder.encode(Started(key=request.key, pid=pid)))
        elif isinstance(request, SendSignal):
            children.signal(request.signal, request.key, group=request.group)
        elif isinstance(request, Clear):
            children.signal(signal.SIGKILL)
            clearing = request.token
            if children.reap():
                channel.send(_encoder.encode(Cleared(token=clearing)))
                clearing = None


def _start(request: Spawn, parent_pid: int) -> int:
    """Fork; return the pid, or 0 in a child that is to run Python code here."""
    stdout = _open_log(request.stdout)
    stderr = stdout if request.stderr == request.stdout else _open_log(request.stderr)
    # A child would ignore SIGTERM as its parent does until it is set up: it waits for it until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for fd in {stdout, stderr} - {-1}:
            os.close(fd)
        return pid
    try:
        os.setsid()
        processes.die_with_parent(parent_pid)
        # Also what a shell or nohup has ignored: torchrun handles these, so that its workers do not ignore them.
        for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(sig, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if stdout >= 0:
            os.dup2(stdout, 1)
        if stderr >= 0:
            os.dup2(stderr, 2)
        if request.kind == "exec":
            # A handler that is a Python function is reset by exec, what is ignored stays so: python ignores SIGPIPE.
            for sig in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(sig, signal.SIG_DFL)
            os.execvpe(request.argv[0], list(request.argv), request.env)
    except BaseException as error:  # noqa: BLE001  a child must never return into the zygote's loop
        sys.stderr.write(f"outlast: cannot start {request.argv[0]}: {error}\n")
        sys.stderr.flush()
        os._exit(127)
    return 0


def _open_log(path: str) -> int:
    if not path:
        return -1
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
