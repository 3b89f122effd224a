"""Python processes for the tests, forked from a process that has imported torch.

Most tests start several Python processes, and importing torch takes each of them more than a second of CPU time. After
:func:`install`, ``subprocess.Popen`` with this interpreter as its program forks the process from a server that has done
the imports. Tests cannot distinguish the process from a started one: it is a child of the caller (``waitpid``, SIGCHLD,
``PR_SET_PDEATHSIG`` work), ``/proc`` shows its arguments and environment, it has only the descriptors that it was
given, it has its own random seed, and its program is ``__main__``. Processes that it starts are forked in the same way,
from their own server.

The following are started without the server: other interpreter options than ``-u``, ``-P``, ``-c`` and ``-m``,
``preexec_fn``, other users, and variables that are read while libraries load (except ``TORCH_CPP_LOG_LEVEL``, which is
set as by ``outlast run``). A test marked ``cold`` starts all its processes without the server, and
``OUTLAST_TESTS_COLD=1`` disables it.

How a child becomes the caller's: the server is a child of the caller, single-threaded, and creates the process with
``CLONE_PARENT``. Rejected: ``PR_SET_CHILD_SUBREAPER`` and forking twice (the caller would adopt every orphan of the
test); a stub process that forwards signals (SIGKILL and SIGSTOP cannot be forwarded).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import outlast
from outlast.runtime import forked_worker
from outlast.runtime.forked_worker import Preloaded

__all__ = ["cold", "install"]

_MAX_PACKET_BYTES = 400_000
_MAX_FDS = 200
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
_AT_LOAD = ("LD_", "MALLOC_", "GLIBC_", "GOMP_", "KMP_", "MKL_", "TORCH_LOGS", "TORCH_TRACE")
_PYTHON_THAT_MAY_DIFFER = {"PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_LEFT_COLD = {"outlast.health.node", "outlast.runtime.agent_process"}
"""Modules that start quickly."""
_LEFT_OUT = ("ray", "integrations")
"""Packages that import other frameworks, which read environment variables (like fsspec) or import many modules."""
_CHILDLESS = {"outlast.checkpoint.writer"}
"""Modules that start no Python process, and so need no server."""

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.pthread_self.restype = ctypes.c_void_p
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]


class _Client:
    """The caller's side of its server."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.cold = 0
        self.load_variables = _read_at_load(os.environ)

    def start(self, request: dict[str, Any], fds: Sequence[int]) -> int | None:
        """Return the new process's id, or ``None`` if it must be started without the server."""
        data = json.dumps(request).encode("utf-8", "surrogateescape")
        if len(data) > _MAX_PACKET_BYTES or len(fds) > _MAX_FDS:
            return None
        with self.lock:
            try:
                socket.send_fds(self.channel, [data], list(fds))
                reply = json.loads(self.channel.recv(4096) or b"null")
            except OSError:
                return None
        return reply if isinstance(reply, int) and reply > 0 else None


_client: _Client | None = None
_start_cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_start_cold)


class cold:
    """Start processes without the server within this block."""

    def __enter__(self) -> None:
        if _client is not None:
            _client.cold += 1

    def __exit__(self, *_: object) -> None:
        if _client is not None:
            _client.cold -= 1


def install() -> None:
    """Start the server and make ``subprocess.Popen`` use it; at most once in a process."""
    if os.environ.get("OUTLAST_TESTS_COLD") == "1" or _SYS_CLONE is None:
        return
    ours, theirs = _channel()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
    server.returncode = 0  # it exits with this process, and is not waited for
    _use(ours)


def _use(channel: socket.socket) -> None:
    global _client
    _client = _Client(channel)
    atexit.register(channel.close)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _channel() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_PACKET_BYTES)
    return ends


def _read_at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process reads before its program could change them."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_LOAD) or (name.startswith("PYTHON") and name not in _PYTHON_THAT_MAY_DIFFER)
    }


@functools.wraps(_start_cold)
def _execute_child(self: Any, *args: Any, **kwargs: Any) -> None:
    given = _signature.bind(self, *args, **kwargs).arguments
    pid = _ask(given)
    if pid is None:
        _start_cold(self, *args, **kwargs)
        return
    self.pid = pid
    self._child_created = True
    _wait_until_shown(pid, given["args"])
    self._close_pipe_fds(
        *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _wait_until_shown(pid: int, argv: Sequence[Any]) -> None:
    """Return when a process shows the arguments and environment that it was started with, as after an exec."""
    shown = b"".join(os.fsencode(part) + b"\0" for part in argv)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return
        if now in (shown, b""):  # empty: it has already exited
            return
        time.sleep(0.0005)


def _ask(given: Mapping[str, Any]) -> int | None:
    client = _client
    if client is None or client.cold or client.owner != os.getpid():
        return None
    if (
        given["shell"]
        or given["preexec_fn"] is not None
        or not given["close_fds"]
        or isinstance(given["args"], str | bytes)
    ):
        return None
    others = ("unused_gid", "gid", "unused_gids", "gids", "unused_uid", "uid")
    if any(given.get(name) is not None for name in others) or given.get("umask", -1) != -1:
        return None
    if given.get("process_group", -1) not in (None, -1) or not given.get("restore_signals", True):
        return None
    argv = [os.fsdecode(part) for part in given["args"]]
    if argv[:1] != [sys.executable] or given["executable"] not in (None, sys.executable):
        return None
    what = _what_to_run(argv)
    if what is None:
        return None
    environment = dict(os.environ)
    if given["env"] is not None:
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given["env"].items()}
    if _read_at_load(environment) != client.load_variables or environment.get("OUTLAST_TESTS_COLD") == "1":
        return None
    cwd = os.path.abspath(os.fsdecode(given["cwd"] or "."))
    if not os.path.isdir(cwd):
        return None
    kept = sorted({int(fd) for fd in given["pass_fds"]} - {0, 1, 2})
    standard = [
        fd if fd != -1 else own for own, fd in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))
    ]
    umask = os.umask(0o077)
    os.umask(umask)
    request = {
        "argv": argv,
        "what": what,
        "env": environment,
        "cwd": cwd,
        "kept": kept,
        "new_session": bool(given["start_new_session"]),
        "umask": umask,
        "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        "ignored": [
            int(number)
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGQUIT,
                signal.SIGUSR1,
                signal.SIGUSR2,
                signal.SIGCHLD,
            )
            if signal.getsignal(number) == signal.SIG_IGN
        ],
        "masked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    try:
        return client.start(request, [*standard, *kept])
    except (OSError, ValueError):
        return None


def _what_to_run(argv: Sequence[str]) -> tuple[str, list[str], str] | None:
    """Return the kind (``c``, ``m``, ``script``), its arguments, and the letters of the options."""
    options, rest = "", list(argv[1:])
    while rest and rest[0] in ("-u", "-P"):
        options, rest = options + rest[0][1:], rest[1:]
    if not rest:
        return None
    if rest[0] in ("-c", "-m"):
        if len(rest) < 2 or rest[1] in _LEFT_COLD:
            return None
        return rest[0][1:], rest[1:], options
    if rest[0].startswith("-") or "P" in options:
        return None
    return "script", rest, options


# ---------------------------------------------------------------------------------------------------- the server


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; return the request in that process, or ``None`` when the caller is gone."""
    while True:
        try:
            data, fds, flags, _ = socket.recv_fds(channel, 1 << 20, _MAX_FDS + 8)
        except ConnectionError:
            return None
        if not data:
            return None
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "a request was cut"
        request: dict[str, Any] = json.loads(data.decode("utf-8", "surrogateescape"))
        pid = _fork_sibling()
        if pid == 0:
            request["fds"] = fds
            return request
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(pid).encode())


def _fork_sibling() -> int:
    """Fork like :func:`os.fork`, with this process's parent as the parent; this thread must be the only one."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | int(signal.SIGCHLD)
    tid = ctypes.c_void_p(_thread_id_address())
    if os.uname().machine == "x86_64":
        pid: int = _libc.syscall(_SYS_CLONE, ctypes.c_ulong(flags), None, None, tid, None)
    else:  # other architectures swap the last two arguments
        pid = _libc.syscall(_SYS_CLONE, ctypes.c_ulong(flags), None, None, None, tid)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


@functools.cache
def _thread_id_address() -> int:
    """Return where the C library stores this thread's id: a fork must write the new id there."""
    start: int = _libc.pthread_self()
    for offset in range(0, 2048, 4):
        if ctypes.c_int.from_address(start + offset).value == threading.get_native_id():
            return start + offset
    raise RuntimeError("the C library's record of this thread has no id in it")


def _import_all() -> Preloaded:
    """Import torch and outlast; return the modules to hide until a program imports torch."""
    import torch._dynamo  # imported by the first optimizer
    import torch.distributed.checkpoint
    import torch.distributed.run  # noqa: F401

    for module in pkgutil.walk_packages(outlast.__path__, "outlast."):
        if not module.name.endswith("__main__") and module.name.split(".")[1] not in _LEFT_OUT:
            with contextlib.suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    return Preloaded("torch", hidden, set())


def _main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # signals for a new process stay pending until it can handle them
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    _die_with(int(sys.argv[2]))
    preloaded = _import_all()
    while (request := _serve(channel)) is not None:
        channel.close()
        own = _become(request)
        if own is None:
            _run(request, preloaded)
        channel = own
    os._exit(0)


def _become(request: dict[str, Any]) -> socket.socket | None:
    """Turn the forked process into the requested one, and fork a server for it if it may need one.

    Returns:
        In the server, its channel; ``None`` in the process itself.
    """
    _place_descriptors(request["fds"], request["kept"])
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    for limit, pair in zip(_LIMITS, request["limits"], strict=True):
        if resource.getrlimit(limit) != tuple(pair):
            resource.setrlimit(limit, pair)
    path_before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*path, *(part for part in sys.path if part not in path_before.split(os.pathsep))]
    kind, (name, *_), _ = request["what"]
    if kind == "m" and name in _CHILDLESS:
        _show_in_proc(request["argv"], request["env"])
        return None
    ours, theirs = _channel()
    me = os.getpid()
    if os.fork() == 0:
        _die_with(me)
        ours.close()
        _show_in_proc(["fork_server", str(me)], {})  # hidden from tests that search for their processes
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        keep = theirs.fileno()
        _close_others({0, 1, 2, keep})
        return theirs
    theirs.close()
    _use(ours)
    _show_in_proc(request["argv"], request["env"])  # last: a search by arguments finds only this process
    return None


def _die_with(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _place_descriptors(fds: Sequence[int], kept: Sequence[int]) -> None:
    """Give the process the descriptors that it was sent, at the requested numbers, and no others."""
    targets = [0, 1, 2, *kept]
    above = max(*targets, *fds) + 1
    aside = []
    for fd in fds:  # first away from all targets
        moved = os.dup2(fd, above + len(aside))
        aside.append(moved)
    for fd, target in zip(aside, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
    _close_others(set(targets))


def _close_others(keep: set[int]) -> None:
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:  # the descriptor of the listing
                pass


def _show_in_proc(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make ``/proc/PID/cmdline`` and ``environ`` show the arguments and variables of the process.

    Raises:
        OSError: The kernel does not allow it.
    """
    global _shown
    arguments = b"".join(os.fsencode(part) + b"\0" for part in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    shown = ctypes.create_string_buffer(arguments + variables, len(arguments) + len(variables))
    start = ctypes.addressof(shown)
    middle = start + len(arguments)
    stat = Path("/proc/self/stat").read_text()
    fields = [0, 0, *stat[stat.rindex(")") + 2 :].split()]  # numbered as in proc(5), less one
    code, data = (int(fields[25]), int(fields[26])), (int(fields[44]), int(fields[45]))
    heap, stack = int(fields[46]), int(fields[27])
    numbers = [*code, *data, heap, _libc.sbrk(0), stack, start, middle, middle, middle + len(variables)]
    # start_code, end_code, start_data, end_data, start_brk, brk, start_stack, arg, env; no auxv, no other executable
    layout = ctypes.create_string_buffer(13 * 8)
    ctypes.memmove(layout, (ctypes.c_uint64 * 11)(*numbers), 88)
    ctypes.memmove(ctypes.addressof(layout) + 96, (ctypes.c_uint32 * 2)(0, 0xFFFFFFFF), 8)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(104), 0):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot give the process its own arguments: {os.strerror(error)}")
    _shown = shown  # the kernel reads it as long as the process lives


_shown: Any = None


def _run(request: Mapping[str, Any], preloaded: Preloaded) -> NoReturn:
    """Run the requested program as ``__main__``, and exit like an interpreter."""
    kind, rest, options = request["what"]
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["masked"])
    _open_standard_streams("u" in options or bool(os.environ.get("PYTHONUNBUFFERED")))
    forked_worker.reseed()
    forked_worker.set_torch_threads(os.environ)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv = list(request["argv"])
    known = {name.partition(".")[0] for name in sys.modules}
    if kind == "m" and rest[0] in sys.modules:  # the main program: runpy warns of a module that is already imported
        _forget(rest[0], preloaded)
    preloaded.hide()
    sys.meta_path.insert(0, forked_worker.PreloadedFinder([preloaded]))
    code: Any = 0
    try:
        _run_main(kind, list(rest), is_safe="P" in options)
    except SystemExit as leave:
        code = leave.code
    except BaseException as error:  # noqa: BLE001  an interpreter handles an uncaught exception here
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        code = forked_worker.report_uncaught(error.with_traceback(trace))
    forked_worker.exit_interpreter(code, known)


def _open_standard_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = io.FileIO(fd, "w", closefd=False)
        by_line = fd == 2 or os.isatty(fd)
        buffer = raw if unbuffered else io.BufferedWriter(raw)
        errors = "strict" if fd == 1 else "backslashreplace"
        stream = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=by_line, write_through=unbuffered)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_main(kind: str, rest: list[str], *, is_safe: bool) -> None:
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if kind == "m":
        sys.argv = ["-m", *rest[1:]]
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if kind == "c":
        sys.argv = ["-c", *rest[1:]]
        if not is_safe:
            sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), vars(main))
        return
    sys.argv = rest
    if (code := forked_worker.run_script(rest[0], main)) != 0:
        raise SystemExit(code)


def _forget(name: str, preloaded: Preloaded) -> None:
    module = sys.modules.pop(name)
    preloaded.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if getattr(sys.modules.get(parent), child, None) is module:
        delattr(sys.modules[parent], child)


if __name__ == "__main__":
    _main()
