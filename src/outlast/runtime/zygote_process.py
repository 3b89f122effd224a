"""The zygote process: imports once, forks workers, watches them, and outlives none of them.

It is single-threaded and never runs a multi-threaded torch operation, owns no process group and no CUDA context: a
child forked after any of those hangs or crashes in ways that show up much later.

``python -m outlast.runtime.zygote_process FD [MODULE ...]``
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

import msgspec

from outlast import clock, env
from outlast.runtime import processes
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

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
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


def _import_all(modules: list[str]) -> Ready:
    started_s, failed = clock.now_s(), {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  a module's import may raise anything; it is reported to the agent
            failed[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    return Ready(import_s=clock.now_s() - started_s, failed=failed)


def main(argv: list[str]) -> None:
    """Serve requests until the agent closes its end."""
    channel = socket.socket(fileno=int(argv[0]))
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children = _Children()
    try:
        channel.send(_encoder.encode(_import_all(argv[1:])))
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
    _become_worker(request)


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
        for sig in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(sig, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if stdout >= 0:
            os.dup2(stdout, 1)
        if stderr >= 0:
            os.dup2(stderr, 2)
        if request.kind == "exec":
            # A handler that is a Python function is reset by exec; the wakeup descriptor is closed by it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
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


def _become_worker(request: Spawn) -> NoReturn:
    """Run the script as ``__main__`` of this process, as a fresh interpreter would."""
    env.replace_environ(request.env)
    time.tzset()
    sys.stdout = sys.__stdout__ = _by_lines(sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _by_lines(sys.stderr)  # type: ignore[misc]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # python's own generator reseeds itself after a fork; numpy's would be a copy
    if request.on_start:
        module, _, function = request.on_start.partition(":")
        getattr(importlib.import_module(module), function)()
    _leave(_run_main(list(request.argv), is_module=request.kind == "module"))


def _by_lines(stream: Any) -> Any:
    """Return a stream that writes line by line: ranks share one output, and print() hands over a line in parts.

    With ``PYTHONUNBUFFERED``, as in many container images, each part would go out by itself.
    """
    if isinstance(stream.buffer, io.RawIOBase):
        buffer = io.BufferedWriter(io.FileIO(stream.fileno(), "w", closefd=False))
        stream = io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors)
    stream.reconfigure(line_buffering=True, write_through=True)
    return stream


def _leave(code: int | str | None) -> NoReturn:
    """End as an interpreter does, but for taking every module apart.

    Threads are waited for, exit handlers run, output is flushed. Tearing down what torch has imported costs a forked
    process seconds (it copies every page that it only wanted to free), and the kernel frees it anyway; forked
    children of ``multiprocessing`` leave the same way.
    """
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001  what an interpreter does at its end: say so and go on
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(0 if code is None else code & 0xFF)


def _run_main(argv: list[str], *, is_module: bool) -> int | str | None:
    sys.argv = argv
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(argv[0])
    except SystemExit as leave:
        return leave.code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001  what a fresh interpreter does with an uncaught exception
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            own = own.tb_next
        sys.excepthook(type(error), error.with_traceback(own), own)
        return 1
    return 0


def _run_script(path: str) -> None:
    """Execute a file as ``__main__``; the module stays, unlike with runpy, for threads and exit handlers."""
    if os.path.isdir(path) or path.endswith(".zip"):
        runpy.run_path(path, run_name="__main__")
        return
    module: Any = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)  # the script that the user asked us to run


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        raise
