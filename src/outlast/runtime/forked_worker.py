"""A forked worker: runs its script as a fresh interpreter would.

A fork inherits random state, settings and open files of the fork server. Everything that a fresh interpreter creates
for itself (random seeds, an authentication key, the folder for temporary files, the ``__main__`` module) is recreated
here. Environment variables that torch read during its import are compared when the script imports torch itself, see
:class:`Preloaded`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import logging
import multiprocessing
import os
import pkgutil
import runpy
import signal
import site
import stat
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from typing import Any, NoReturn

from outlast import env, logs
from outlast.errors import OutlastError, PeerLost
from outlast.runtime import postmortem, processes
from outlast.runtime.files import NO_ROOM

log = logging.getLogger(__name__)

_NATIVE_PREFIXES = ("GOMP_", "GOTO_", "KMP_", "MKL_", "OMP_", "OPENBLAS_")
"""Variables that C libraries read when they are loaded, unseen by Python."""
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that torch can also apply later; the first one that is set counts."""
_COMMON = frozenset({"CI", "HOME", "LNAME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME"})
"""Variables that are read again whenever they are needed."""
_FLUSHED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
_INSTALLED = (
    *site.getsitepackages(),
    site.getusersitepackages(),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
)
_LAST_WRITE_S = 5.0
_UNFLUSHED = 120
"""Exit code of an interpreter that could not write its last output."""


class Preloaded:
    """Modules that the fork server imported before the script, for one name.

    They are absent from ``sys.modules`` until the script imports one of them. A fresh interpreter would run the import
    at that point and see the environment variables that the script has set before.

    Args:
        read: Variables that Python code read during the import.
    """

    def __init__(self, name: str, modules: Mapping[str, types.ModuleType], read: set[str]) -> None:
        self._name, self.modules, self._read = name, dict(modules), read - _COMMON
        self._values: dict[str, str] = {}

    def hide(self) -> None:
        """Remove the modules from ``sys.modules``, and save the environment."""
        self._values = env.environ()
        for name in self.modules:
            sys.modules.pop(name, None)

    def reveal(self) -> None:
        """Restore the modules; apply environment variables that the script has set since, or warn about them."""
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)
        values = env.environ()
        changed = {name for name in {*values, *self._values} if values.get(name) != self._values.get(name)}
        unheeded = changed & self._read
        if "torch" in self.modules:
            if not changed.isdisjoint(_THREADS):
                set_torch_threads(values)
            unheeded |= {name for name in changed.difference(_THREADS) if name.startswith(_NATIVE_PREFIXES)}
        if unheeded and values.get("LOCAL_RANK", "0") == "0":
            log.warning(
                "%s: set by the script, but `import %s` read it before the script began, so it may have no effect; "
                "set it in the environment of outlast run, or add --no-warm-start",
                ", ".join(sorted(unheeded)),
                self._name,
            )


class PreloadedFinder:
    """Import preloaded modules when the script imports them."""

    def __init__(self, groups: list[Preloaded]) -> None:
        self._groups = groups
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = next((group.modules[name] for group in self._groups if name in group.modules), None)
        if module is None:
            return None
        self._specs[name] = own = getattr(module, "__spec__", None)
        spec = copy.copy(own) if own is not None else ModuleSpec(name, None)
        spec.name, spec.loader = name, self
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        last = next(index for index, group in enumerate(self._groups) if spec.name in group.modules)
        module = self._groups[last].modules[spec.name]
        # A later import may need the earlier ones.
        revealed, self._groups[:] = self._groups[: last + 1], self._groups[last + 1 :]
        for group in revealed:
            group.reveal()
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def preload(names: Iterable[str], failed: dict[str, str]) -> list[Preloaded]:
    """Import modules; ``failed`` gets those that could not be imported, and why."""
    groups: list[Preloaded] = []
    present = {name.partition(".")[0] for name in sys.modules}  # this package's own dependencies stay visible
    for name in names:
        before = set(sys.modules)
        with env.noting_reads() as read:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  a module's import may raise anything; it is reported to the agent
                failed[name] = f"{type(error).__name__}: {error}"
        package = name.partition(".")[0]
        modules = {
            key: module
            for key, module in sys.modules.items()
            if key not in before and key.partition(".")[0] == package and package not in present
        }
        if modules:
            groups.append(Preloaded(name, modules, read))
    return groups


def free_groups_last() -> None:
    """Make each ``DistributedDataParallel`` free its process group after its reducer and logger.

    A reducer that holds the last reference to a gloo group destroys the group under the GIL. The destructor waits for
    the group's threads, one of which may wait for the GIL to drop a Python object: a deadlock (torch 2.13). torch
    destroys a group without the GIL if a Python reference is the last one.

    A fresh interpreter usually never destroys the default group: torch.optim imports torch._dynamo after
    init_process_group(), and functions of that import have the group as a default argument. A forked worker has
    imported torch._dynamo before.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return
    model_class: Any = module.DistributedDataParallel
    initialize = model_class.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        initialize(self, *args, **kwargs)
        for holder in (getattr(self, "reducer", None), getattr(self, "logger", None)):
            if holder is not None:
                # The reference is dropped after the holder's C++ object is destroyed.
                weakref.finalize(holder, lambda _: None, self.process_group).atexit = False

    model_class.__init__ = __init__


def become_worker(
    argv: Sequence[str],
    *,
    is_module: bool,
    environment: Mapping[str, str],
    on_start: str,
    preloaded: list[Preloaded],
) -> NoReturn:
    """Run a script as ``__main__`` of this process, as a fresh interpreter would.

    Args:
        on_start: ``module:function`` to call first; empty: none.
    """
    env.replace_environ(environment)
    time.tzset()
    postmortem.begin()
    sys.stdout = sys.__stdout__ = _by_lines(sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _by_lines(sys.stderr)  # type: ignore[misc]
    reseed()
    if (rank := environment.get("RANK", "")).isdecimal():
        logs.configure_worker(int(rank), environment.get(env.NODE, ""), least=logging.WARNING)
    if on_start:
        module, _, function = on_start.partition(":")
        getattr(importlib.import_module(module), function)()
    known = {name.partition(".")[0] for name in sys.modules}
    for group in preloaded:
        group.hide()
    if preloaded:
        sys.meta_path.insert(0, PreloadedFinder(preloaded))
    exit_interpreter(_run_main(list(argv), is_module=is_module), known)


def _by_lines(stream: Any) -> Any:
    """Return a stream that writes whole lines: ranks share one output, and print() writes a line in parts.

    The fork server's own stream writes each part separately, like ``python -u``.
    """
    if stream is None:  # closed before the launcher started
        return None
    raw = _Output(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    lines: Any = io.TextIOWrapper(
        _LineBuffer(raw), encoding=stream.encoding, errors=stream.errors, newline="\n", write_through=True
    )
    lines.mode = stream.mode
    return lines


class _Output(io.FileIO):
    """Record the last output, and continue when its reader is gone (``outlast run ... | head``).

    Output to a file on a full file system is dropped; a line in the file reports it once there is room.
    """

    _num_dropped = 0

    def write(self, data: Any) -> int:
        if (kept := postmortem.recorder()) is not None:
            kept.output(memoryview(data).cast("B"))
        try:
            if self._num_dropped:
                super().write(
                    f"\noutlast: the disk was full; {self._num_dropped} writes of output were dropped\n".encode()
                )
                self._num_dropped = 0
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        except OSError as error:
            if error.errno not in NO_ROOM or not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise
            self._num_dropped += 1
        return len(data)


class _LineBuffer(io.BufferedWriter):
    """Flush after a newline or a carriage return (progress bars)."""

    def write(self, data: Any) -> int:
        written = super().write(data)
        text = bytes(data)
        if b"\n" in text or b"\r" in text:
            self.flush()
        return written


def reseed() -> None:
    """Renew the random state that a fresh interpreter draws; Python's own generator reseeds itself after a fork."""
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    if torch is not None:
        torch.default_generator.seed()  # device generators are created and seeded at first use
    if numpy_random is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # determined at first use, from TMPDIR at that time


def set_torch_threads(values: Mapping[str, str]) -> None:
    """Apply the number of threads in the environment to torch, which was loaded before."""
    text = next((values[name] for name in _THREADS if name in values), "").partition(",")[0].strip()
    num_threads = int(text) if text.isdecimal() else len(os.sched_getaffinity(0))
    if num_threads:
        sys.modules["torch"].set_num_threads(num_threads)


def _run_main(argv: list[str], *, is_module: bool) -> Any:
    """Run the script; return its argument of ``sys.exit``, ``None`` or an exit code, or the ``KeyboardInterrupt``."""
    sys.argv = argv
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if is_module else []), *argv]
    processes.show_command(sys.orig_argv)
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    sys.modules["__mp_main__"] = main  # spawned processes send back objects of its classes
    try:
        if is_module:
            _put_first(os.getcwd())
            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]  # what `python -m` calls
        elif pkgutil.get_importer(argv[0]) is not None:
            sys.path.insert(0, argv[0])  # a folder or archive with a __main__
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            return run_script(argv[0], main)
    except SystemExit as leave:
        if leave.code:
            _record(leave)
        return leave.code
    except BaseException as error:  # noqa: BLE001  treat an uncaught exception as a fresh interpreter does
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        is_kept = _record(error.with_traceback(own))
        if is_kept and isinstance(error, OutlastError):
            # The message is enough for the log: the run directory has the traceback, and agents report lost peers.
            level = logging.INFO if isinstance(error, PeerLost) else logging.ERROR
            log.log(level, "%s: %s", type(error).__qualname__, error)
            return 1
        return report_uncaught(error)
    return 0


def _record(error: BaseException) -> bool:
    """Record for the agent why this worker ends; return whether there is a recorder."""
    kept = postmortem.recorder()
    if kept is not None:
        kept.exception(error)
    return kept is not None


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def run_script(path: str, main: types.ModuleType) -> int:
    full = os.path.join(os.getcwd(), path)
    main.__file__, main.__cached__ = full, None  # type: ignore[attr-defined]
    if path.endswith(".pyc"):
        main.__loader__ = SourcelessFileLoader("__main__", full)
        code: Any = main.__loader__.get_code("__main__")
    else:
        main.__loader__ = SourceFileLoader("__main__", full)
        try:
            with open(full, "rb") as file:
                source = file.read()
        except OSError as error:
            sys.stderr.write(f"{sys.executable}: can't open file {full!r}: [Errno {error.errno}] {error.strerror}\n")
            return 2
        code = compile(source, full, "exec", dont_inherit=True)
    _put_first(os.path.dirname(os.path.realpath(path)))
    exec(code, vars(main))  # the user's script
    return 0


def report_uncaught(error: BaseException) -> Any:
    """Print an uncaught exception as an interpreter does; return the exit code."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leave:
        return leave.code
    except BaseException as worse:  # noqa: BLE001  the script's own hook
        if worse.__context__ is error:
            worse.__context__ = None
        own = worse.__traceback__
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exception(worse.with_traceback(own.tb_next if own is not None else None))
        sys.stderr.write("\nOriginal exception was:\n")
        traceback.print_exception(error)
    return KeyboardInterrupt() if isinstance(error, KeyboardInterrupt) else 1


def exit_interpreter(code: Any, known: set[str]) -> NoReturn:
    """End the process as an interpreter does, except for the teardown of installed modules.

    Threads are joined, exit handlers run, and the objects of the script and its own modules are freed, so that
    ``__del__`` methods run and files are written. Tearing down torch would cost a forked process seconds (it copies
    every page that it frees), and the kernel frees it anyway; ``multiprocessing``'s forked children exit the same way.

    Args:
        code: As for ``SystemExit``, or a ``KeyboardInterrupt`` to end by SIGINT.
    """
    interrupted = isinstance(code, KeyboardInterrupt)
    if code is not None and not interrupted and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    written = True

    def flush() -> None:
        nonlocal written
        written &= _flush_output()
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, name, getattr(sys, f"__{name}__"))

    for step in (threading._shutdown, atexit._run_exitfuncs, flush, lambda: _let_go(known), flush):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as error:  # noqa: BLE001  report it and continue, as an interpreter does
            report_uncaught(error)
    ctypes.CDLL(None).fflush(None)  # output of C libraries
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_UNFLUSHED if not written else 0 if code is None else code & 0xFF)


def _let_go(known: set[str]) -> None:
    """Free the objects of the script's own modules, and flush open files."""
    others = threading.active_count() > 1
    if others:  # daemon threads: an interpreter would stop them here, so ignore their exceptions
        threading.excepthook = lambda args: None
        writer = threading.Thread(target=_flush_files, daemon=True)
        writer.start()
        writer.join(_LAST_WRITE_S)  # a daemon thread may hold a file's lock forever
    else:
        _flush_files()
    sys.last_value = sys.last_traceback = None
    names = [name for name, module in list(sys.modules.items()) if _is_own(name, module, known)]
    own = [weakref.ref(sys.modules.pop(name)) for name in names]
    gc.collect()
    for reference in () if others else reversed(own):
        if (left := reference()) is not None:
            vars(left).update({name: None for name in vars(left) if name != "__builtins__"})
    gc.collect()
    if not others:
        _flush_files()


def _is_own(name: str, module: object, known: set[str]) -> bool:
    """Return whether a module belongs to the script rather than to an installed package."""
    if not isinstance(module, types.ModuleType):
        return False
    if name in ("__main__", "__mp_main__"):
        return True
    path = str(vars(module).get("__file__"))
    return name.partition(".")[0] not in known and path.endswith(".py") and not path.startswith(_INSTALLED)


def _flush_files() -> None:
    for thing in gc.get_objects():
        if type(thing) in _FLUSHED:
            with contextlib.suppress(Exception):  # lost, as in an interpreter
                thing.flush()


def _flush_output() -> bool:
    """Flush the standard streams; return whether that worked."""
    worked = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # noqa: BLE001  a stream of the script's own may raise anything
            worked = False
            with contextlib.suppress(Exception):
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    return worked
