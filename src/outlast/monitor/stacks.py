"""Python stacks of another process, also while it holds the GIL or is stopped.

``faulthandler`` writes them inside the C handler of a real-time signal, so no bytecode needs to run. It writes into a
memory file of the process, which leaves no file in the run directory, cannot hang on a network file system, and ends
with the process; the sender of the signal reads it through ``/proc/<pid>/fd`` before the process is killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outlast import clock
from outlast.runtime.files import memory_file, memory_files

DUMP_SIGNAL = signal.SIGRTMIN + 10
"""The real-time signal on which a registered process writes its stacks."""

_MEMFD_NAME = "outlast-stacks"
_POLL_S = 0.002
_OUTLAST = str(Path(__file__).resolve().parent.parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_INTERPRETER = re.compile(
    rf"<|(?:{re.escape(_STDLIB)}|.*/lib/python3\.\d+/)(?!site-packages|dist-packages)",
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_MAIN = re.compile(r"^main thread 0x(?P<ident>[0-9a-f]+)$", re.MULTILINE)
_registered_pid = 0
_followed = 0
_fd = -1


def register() -> None:
    """Make this process write its Python stacks on :data:`DUMP_SIGNAL`; idempotent, also after a fork.

    Imports hardly more than the standard library, so that a worker can call it first.
    """
    global _registered_pid, _followed, _fd
    if _registered_pid == os.getpid():
        return
    if _fd >= 0:  # inherited through a fork: the file is the parent's
        faulthandler.unregister(DUMP_SIGNAL)
        os.close(_fd)
        _followed = 0
    _fd = memory_file(_MEMFD_NAME)
    os.set_blocking(_fd, True)
    os.write(_fd, _head(threading.main_thread().ident or 0))
    faulthandler.register(DUMP_SIGNAL, file=_fd, all_threads=True, chain=False)
    _registered_pid = os.getpid()


def follow(ident: int) -> None:
    """Use the stack of this thread for the process, where another than the main thread trains.

    Args:
        ident: The thread's ``threading.get_ident()``; call :func:`register` before.
    """
    global _followed
    _followed = ident
    if _registered_pid == os.getpid():
        os.pwrite(_fd, _head(ident), 0)


def followed() -> int:
    """Return the identity of the thread whose stack is used for this process: the main thread's by default."""
    return _followed or threading.main_thread().ident or 0


def _head(ident: int) -> bytes:
    return f"main thread 0x{ident:016x}\n".encode()


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    name: str

    @property
    def is_library(self) -> bool:
        """Whether the file is of the standard library, an installed package, or outlast."""
        return (
            self.file.startswith(("<frozen", _STDLIB, _OUTLAST))
            or "/site-packages/" in self.file
            or "/dist-packages/" in self.file
            or re.search(r"/lib/python3\.\d+/", self.file) is not None
        )

    @property
    def may_wait(self) -> bool:
        """Whether the frame belongs to a collective, or to a backward pass."""
        return any(part in self.file for part in _WAITS)

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line} in {self.name}'


_AGREEMENT = tuple(f"{_OUTLAST}runtime/{module}.py" for module in ("process_groups", "consensus"))
_WAITS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/distributed.py", *_AGREEMENT)
_C10D = "/torch/distributed/distributed_c10d.py"
_MAY_WAIT = re.compile(r"\.(wait|backward|item|synchronize|result|join)\(|\b(barrier|all_reduce|recv)\(")


@dataclass(frozen=True, slots=True)
class Stack:
    """The main thread's stack, innermost frame first."""

    frames: tuple[Frame, ...]

    @property
    def line(self) -> str | None:
        """The innermost line of the user's code, else the innermost of all; ``None`` for an empty stack."""
        return (
            str(next((frame for frame in self.frames if not frame.is_library), self.frames[0])) if self.frames else None
        )

    @property
    def waits_in_collective(self) -> bool | None:
        """Whether the thread is in a collective or in a backward pass.

        ``None``: unknown, since there is no stack, or the user's own line calls a C function that may wait for other
        ranks (``work.wait()``, ``loss.item()``).
        """
        if not self.frames:
            return None
        if any(frame.may_wait for frame in self._library):
            return True
        innermost = self.frames[0]
        if not innermost.is_library and _MAY_WAIT.search(_source_line(innermost)):
            return None
        return False

    @property
    def collective(self) -> str | None:
        """The function of ``torch.distributed`` that the thread is in, such as ``all_reduce``; ``None``: in none."""
        inside = [frame.name for frame in self._library if frame.file.endswith(_C10D)]
        return next((name for name in inside if not name.startswith("_")), inside[0] if inside else None)

    @property
    def is_in_agreement(self) -> bool:
        """Whether the thread is in a reduction or a gathering of outlast, as at the end of a step."""
        return any(frame.file in _AGREEMENT for frame in self._library)

    @property
    def _library(self) -> list[Frame]:
        return list(itertools.takewhile(lambda frame: frame.is_library or frame.may_wait, self.frames))


class Dump:
    """A request for the stacks of another process, and their collection.

    Args:
        pid: A process on this machine, of this user.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.requested = False
        self._path = next(map(Path, memory_files(pid, _MEMFD_NAME)), None)
        self._before = self._size()
        self._seen = self._before

    def request(self) -> bool:
        """Send the signal; return whether the process can respond: it registered, and lives."""
        # Without a handler the signal would end the process.
        if self._path is not None and _is_caught(self.pid, DUMP_SIGNAL):
            with suppress(ProcessLookupError):
                _signal_main_thread(self.pid, DUMP_SIGNAL)
                self.requested = True
        return self.requested

    def is_complete(self) -> bool:
        """Return whether the main thread is in the dump and nothing was added since the last call.

        The file has no end mark and sends no event when it grows, so a caller polls.
        """
        size = self._size()
        grew, self._seen = size != self._seen, size
        return not grew and bool(parse(self.text()).frames)

    def text(self) -> str:
        """Return what the process wrote since this object was made, after the line with the main thread's number."""
        if self._path is None:
            return ""
        try:
            content = self._path.read_bytes()
        except OSError:
            return ""  # the process and its memory are gone
        head = content.split(b"\n", 1)[0] + b"\n"
        body = content[max(self._before, len(head)) :]
        return (head + body).decode(errors="replace") if body else ""

    def _size(self) -> int:
        try:
            return self._path.stat().st_size if self._path is not None else 0
        except OSError:
            return 0


def dump(pid: int, *, timeout_s: float) -> str:
    """Return the Python stacks of a registered process; empty if it does not write them in time.

    Blocks: usually a few milliseconds, at most ``timeout_s``.
    """
    dump = Dump(pid)
    if not dump.request():
        return ""
    end_s = clock.now_s() + timeout_s
    while not dump.is_complete():
        if clock.now_s() >= end_s:
            return ""
        time.sleep(_POLL_S)  # nothing signals that the file grows
    return dump.text()


def parse(text: str) -> Stack:
    """Return the main thread's stack in a dump; py-spy's format is accepted, too."""
    main = _MAIN.search(text)
    wanted = int(main["ident"], 16) if main else None
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            inside = int(thread["ident"], 16) == wanted
            if inside:
                frames = []  # a later dump replaces an earlier one
        elif inside and (match := _FRAME.match(line)):
            frames.append(Frame(match["file"], match["line"], match["name"]))
    return Stack(tuple(frames)) if frames else _parse_py_spy(text)


def arrange(text: str) -> str:
    """Return a dump for people: the user's own lines first, the training thread, then other threads but outlast's.

    Text in another format than that of ``faulthandler`` is returned unchanged.
    """
    main = _MAIN.search(text)
    blocks: list[tuple[int, list[str]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            blocks.append((int(thread["ident"], 16), [line]))
        elif blocks and line.strip():
            blocks[-1][1].append(line)
    if main is None or not blocks:
        return text
    training = int(main["ident"], 16)
    frames = parse(text).frames
    own = [f"  {frame}" for frame in frames if not frame.is_library]
    parts = [["the user's code, innermost line first:", *(own or ["  (none on this stack)"])]]
    newest = dict(blocks)  # a later dump replaces an earlier one
    if training in newest:
        parts.append(newest[training])
    parts += [lines for ident, lines in newest.items() if ident != training and not _is_our_thread(lines)]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _is_our_thread(lines: list[str]) -> bool:
    files = [match["file"] for line in lines if (match := _FRAME.match(line))]
    outer = next((file for file in reversed(files) if not _INTERPRETER.match(file)), "")
    return outer.startswith(_OUTLAST)


def _parse_py_spy(text: str) -> Stack:
    frames: list[Frame] = []
    for line in text.partition('"MainThread"')[2].splitlines()[1:]:
        match = re.match(r"^ {4}(?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$", line)
        if match is None:
            break
        frames.append(Frame(match["file"], match["line"], match["name"]))
    return Stack(tuple(frames))


def py_spy(pid: int, *, native: bool = False, timeout_s: float = 3.0) -> str:
    """Return py-spy's view of a process; empty when py-spy is not installed or fails.

    Args:
        pid: The process.
        native: Include frames of C code. The process is paused, and symbols of libraries are read, for seconds.
        timeout_s: Time limit in seconds.

    Blocks: up to ``timeout_s``.
    """
    installed = Path(sys.executable).with_name("py-spy")
    program = installed if installed.exists() else shutil.which("py-spy")
    if program is None:
        return ""
    try:
        mode = "--native" if native else "--nonblocking"
        command = [str(program), "dump", mode, "--full-filenames", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal that the process's main thread, and no other, handles before it continues.

    A signal to the process is handled by whichever thread of a stopped process wakes first.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):  # a C library from before 2019
        os.kill(pid, number)
    elif libc.tgkill(pid, pid, number) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _is_caught(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def _source_line(frame: Frame) -> str:
    with suppress(OSError), open(frame.file, encoding="utf-8", errors="replace") as file:
        return next((line for number, line in enumerate(file, 1) if str(number) == frame.line), "")
    return ""
