"""Post-mortem of a worker, for its agent: its last exception, a fatal signal's stack, its last output.

The agent creates a memory file for each worker: it outlives the worker however that ends, needs no disk (which may be
full), and is freed with the agent. The worker writes; the agent reads once the worker has ended or is about to. The
file has a header, the exception as JSON, a ring of the last output, and at the end, growing as needed, the output of
``faulthandler``. Nothing here imports torch.

Rejected: a pipe per worker's output that the agent copies to its own (a printing worker would wait for a slow agent,
and would no longer write to the terminal that a script may look for).
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import struct
import sys
import sysconfig
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from outlast import clock, env
from outlast.decoding import json_decoder
from outlast.errors import OutlastError
from outlast.incidents import Cause
from outlast.runtime.files import memory_file

_HEAD = struct.Struct("<QQ")
"""Total bytes of output; length of the exception's JSON."""
_RECORD_AT, _RECORD_BYTES = 64, 24 * 1024 - 64
_RING_AT, _RING_BYTES = 24 * 1024, 24 * 1024
_FAULT_AT = _RING_AT + _RING_BYTES
_MAX_TEXT = 600
_MAX_TRACE = 12_000
_MARK = "_outlast_kept"
"""Attribute of a recorded exception: its number in this process."""
_OUTLAST = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARIES = tuple({_OUTLAST, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib"))})
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    cause: Cause | None = None
    trace: str = ""


_decoder = json_decoder(_Record)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Remains:
    """The post-mortem of a worker."""

    cause: Cause | None
    """Its exception or fatal signal; ``None`` = neither."""
    trace: str
    """Traceback of the exception; empty without one."""
    fault: str
    """Output of ``faulthandler``; empty without a fatal signal."""
    output: tuple[str, ...]
    """Its last lines of output, oldest first."""


class Postmortem:
    """The agent's side: the memory files of one cycle's workers, by local rank.

    Raises: OSError: They cannot be created.
    """

    def __init__(self, num_ranks: int) -> None:
        self._fds: list[int] = []
        try:
            for _ in range(num_ranks):
                fd = memory_file("outlast-postmortem")
                self._fds.append(fd)
                os.ftruncate(fd, _FAULT_AT)
        except OSError:
            self.close()
            raise

    def path(self, local_rank: int) -> str:
        """Return the path at which a worker opens its file."""
        return f"/proc/{os.getpid()}/fd/{self._fds[local_rank]}"

    def read(self, local_rank: int) -> Remains:
        """Return what a worker has recorded so far; empty once this is closed."""
        if not self._fds:
            return Remains(None, "", "", ())
        fd = self._fds[local_rank]
        written, length = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        record = _Record()
        if 0 < length <= _RECORD_BYTES:
            with suppress(msgspec.DecodeError):  # the worker ended during the write
                record = _decoder.decode(os.pread(fd, length, _RECORD_AT))
        fault = os.pread(fd, 1 << 16, _FAULT_AT).decode(errors="replace")
        ring = os.pread(fd, _RING_BYTES, _RING_AT)
        start = written % _RING_BYTES
        text = ring[:written] if written <= _RING_BYTES else (ring[start:] + ring[:start]).partition(b"\n")[2]
        return Remains(
            cause=_cause_of_fault(fault) or record.cause,
            trace=record.trace,
            fault=fault,
            output=tuple(text.decode(errors="replace").splitlines()),
        )

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class Recorder:
    """The worker's side, for the file of :meth:`Postmortem.path`. Raises: OSError, if it cannot be opened.

    Thread: any. Output of several threads, and of forked processes that print too, may mix.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, _FAULT_AT)
        self._pid, self._num_kept = os.getpid(), 0

    def catch_fatal_signals(self) -> None:
        """Enable ``faulthandler`` for this file, unless it is already enabled elsewhere."""
        if not faulthandler.is_enabled():
            os.lseek(self._fd, _FAULT_AT, os.SEEK_SET)
            faulthandler.enable(file=self._fd, all_threads=False)

    def output(self, data: bytes | memoryview) -> None:
        data = bytes(data[-_RING_BYTES:])
        written = _HEAD.unpack_from(self._map, 0)[0]
        at = written % _RING_BYTES
        first = min(len(data), _RING_BYTES - at)
        self._map[_RING_AT + at : _RING_AT + at + first] = data[:first]
        self._map[_RING_AT : _RING_AT + len(data) - first] = data[first:]
        struct.pack_into("<Q", self._map, 0, written + len(data))

    def exception(self, error: BaseException) -> None:
        """Record an exception that is about to end this process; one that was recorded before keeps its first record.

        Exceptions of forked children are not recorded.
        """
        if os.getpid() != self._pid or vars(error).get(_MARK) == self._num_kept:
            return
        self._num_kept += 1
        # Mark the exception itself: a reference would keep its frames alive, and its id may be reused.
        vars(error)[_MARK] = self._num_kept
        trace = _encodable("".join(traceback.format_exception(error)))
        if len(trace) > _MAX_TRACE:
            trace = f"{trace[: _MAX_TRACE // 3]}\n...\n{trace[-_MAX_TRACE * 2 // 3 :]}"
        cause = describe_exception(error)
        struct.pack_into("<Q", self._map, 8, 0)
        data = _encoder.encode(_Record(cause, trace))
        if len(data) > _RECORD_BYTES:  # control characters take six bytes each
            data = _encoder.encode(_Record(cause))
        self._map[_RECORD_AT : _RECORD_AT + len(data)] = data
        struct.pack_into("<Q", self._map, 8, len(data))  # written last: a reader sees all or nothing

    def forget(self) -> None:
        """Clear an exception that did not end this process."""
        struct.pack_into("<Q", self._map, 8, 0)
        self._num_kept += 1


_recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """Return this process's recorder; ``None`` without an agent of this package."""
    return _recorder


def begin() -> Recorder | None:
    """Start recording a post-mortem of this process, if an agent requests one; idempotent.

    An interpreter that the agent did not fork records its exceptions by ``sys.excepthook``.
    """
    global _recorder
    path = env.postmortem_path()
    if _recorder is not None or path is None:
        return _recorder
    try:
        _recorder = Recorder(path)
    except OSError:  # the agent is gone
        return None
    _recorder.catch_fatal_signals()
    return _recorder


def begin_with_hook() -> None:
    """Start recording in an interpreter that the agent may not have forked; an exception recorded before is cleared."""
    if _recorder is not None:
        _recorder.forget()
    elif (kept := begin()) is not None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            kept.exception(error)
            return before(kind, error, trace)

        sys.excepthook = hook


def describe_exception(error: BaseException) -> Cause:
    """Return the cause of an exception: its type, its text, and the innermost line of the user's code."""
    frame, text, is_usage_error = _users_frame(error.__traceback__), _text_of(error), False
    if isinstance(error, SyntaxError) and error.filename:
        frame, text = f"{_short(error.filename)}:{error.lineno}", error.msg
    elif isinstance(error, SystemExit):
        is_usage_error = error.code == 2 and _comes_from_a_parser(error.__traceback__)
        if isinstance(error.code, int):
            text = ""
        if isinstance(error.__cause__, OutlastError):  # the session exited because of it
            text, error = _text_of(error.__cause__), error.__cause__
    module, name = type(error).__module__, type(error).__qualname__
    return Cause(
        type=name if module in ("builtins", "__main__") or module.startswith("outlast.") else f"{module}.{name}",
        bases=tuple(base.__name__ for base in type(error).__mro__[1:-1]),
        text=_encodable(text),
        frame=_encodable(frame),
        mono_ns=clock.now_ns(),
        is_usage_error=is_usage_error,
    )


def _encodable(text: str) -> str:
    """Return a text with escapes for bytes that are not UTF-8, as of file names."""
    return text.encode(errors="backslashreplace").decode()


def _comes_from_a_parser(trace: TracebackType | None) -> bool:
    files = (os.path.basename(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace))
    return any(name in ("argparse.py", "optparse.py") for name in files)


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as worse:  # noqa: BLE001  an exception of the script's own may raise anything in __str__
        text = f"its text cannot be made ({type(worse).__name__})"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = " ".join(lines[:1] if sum(map(len, lines)) > _MAX_TEXT else lines)
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."


def _users_frame(trace: TracebackType | None) -> str:
    found = ""
    for frame, line in traceback.walk_tb(trace):
        if not _is_library_file(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return found.removesuffix(" in <module>")


def _is_library_file(name: str) -> bool:
    return name.startswith(("<", *_LIBRARIES)) or "/site-packages/" in name or "/dist-packages/" in name


def _short(path: str) -> str:
    """Return a path relative to the working directory, if it is below it, else the file's name."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return os.path.basename(path) if relative.startswith("..") else relative


def _cause_of_fault(text: str) -> Cause | None:
    """Return the cause that ``faulthandler`` wrote, such as ``Fatal Python error: Segmentation fault``."""
    if not text.strip():
        return None
    head = text.strip().splitlines()[0].removeprefix("Fatal Python error: ")
    frames = list(_FAULT_FRAME.finditer(text))
    users = next((one for one in frames if not _is_library_file(one["file"])), None)
    frame = f"{_short(users['file'])}:{users['line']} in {users['name']}".removesuffix(" in <module>") if users else ""
    return Cause(type="fatal signal", text=head, frame=frame)
