"""Atomic and durable files on disks that may hang or be full, and files in memory.

Everything that a run writes except checkpoints is optional: training continues without it. Such writes go through
:func:`write_optional` or report to :class:`OptionalFile`, which log one warning with the path, count the failed writes,
and log one line when writing works again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from outlast.wording import count

log = logging.getLogger(__name__)
T = TypeVar("T")
DISK_S = 2.0
"""Seconds for which a process with more urgent work waits for a disk."""
overdue: dict[str, Future[Any]] = {}
"""Mount point to the call that hangs there."""

NOT_ALLOWED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""Errors of a system call that the kernel lacks or the container forbids."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system or quota that is full."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
"""Errors of a file system without hard links."""
PRIVATE = 0o600
"""Permissions of a file that only its owner can read."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file by ``data``: readers see the old or the new content, also after a crash.

    Args:
        mode: Permissions before the umask; ``PRIVATE`` for command lines or output.

    Raises: OSError: The disk is full, or the folder is not writable; the old file stays.
    """
    temporary = _temporary(path)
    try:
        write_durably(temporary, data, mode=mode)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def create_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Create a file with ``data``; of several concurrent calls, on any machines, exactly one succeeds.

    The file gets its name by a hard link once it is complete and durable. On file systems without links it is created
    under its name, and may be read while incomplete.

    Returns:
        Whether this call created it; otherwise the existing file is unchanged.

    Raises: OSError: The disk is full, or the folder is not writable.
    """
    temporary = _temporary(path)
    try:
        write_durably(temporary, data, mode=mode)
        try:
            os.link(temporary, path)
            is_made = True
        except FileExistsError:
            # NFS repeats a request whose reply was lost, and then finds its own link: the link count shows it.
            is_made = os.stat(temporary).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            is_made = _make_new(path, data, mode)
    finally:
        temporary.unlink(missing_ok=True)
    if is_made:
        fsync_folder(path.parent)
    return is_made


def begin(work: Callable[[], T], name: str = "outlast-disk") -> Future[T]:
    """Start work that may hang in a daemon thread of its own; return its outcome. Thread: any."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised by result()
            # Without the entry of this frame, whose variables would form a cycle with the error.
            outcome.set_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def in_time(path: str | os.PathLike[str], work: Callable[[], T], timeout_s: float | None = None) -> T:
    """Run work that a hung disk may block, and abandon it after a timeout; its thread ends when the disk responds.

    While earlier work hangs on the same file system, nothing more is tried there.

    Raises: TimeoutError: This or earlier work exceeded its timeout; an ``OSError``.

    Blocks: up to the timeout. Thread: any.
    """
    where = _mount_point(path)
    if (earlier := overdue.get(where)) is not None:
        if not earlier.done():
            raise TimeoutError(f"the disk at {where} does not respond")
        overdue.pop(where, None)
    outcome = begin(work)
    wait((outcome,), DISK_S if timeout_s is None else timeout_s)
    if not outcome.done():
        overdue[where] = outcome
        raise TimeoutError(f"the disk at {where} does not respond")
    return outcome.result()


class OptionalFile:
    """Log and count failed writes of one kind of file that training does not need.

    Args:
        what: The kind of file, as a plural: the subject of the log lines.
        otherwise: Consequence of a failure, as a clause.

    Thread: any; one at a time.
    """

    def __init__(
        self, what: str, path: str | os.PathLike[str], otherwise: str = "training continues without them"
    ) -> None:
        self.what, self.path, self.otherwise = what, os.fspath(path), otherwise
        self.num_missed = 0
        """Failed writes since the last success."""

    def note_missed(self, reason: object) -> None:
        """Count a failed write; the first of a series is logged."""
        self.num_missed += 1
        level = logging.WARNING if self.num_missed == 1 else logging.DEBUG
        log.log(level, "%s cannot be written to %s (%s); %s", self.what, self.path, reason, self.otherwise)

    def note_written(self) -> None:
        """Record a successful write; the first one after failures is logged with their number."""
        if self.num_missed:
            num, self.num_missed = self.num_missed, 0
            log.warning("%s are written to %s again; %s failed", self.what, self.path, count(num, "write"))


_optional: dict[str, OptionalFile] = {}
"""State by kind of file, while :func:`write_optional` fails."""


def write_optional(
    what: str,
    path: str | os.PathLike[str],
    work: Callable[[], T],
    *,
    otherwise: str = "training continues without them",
    timeout_s: float | None = None,
) -> T | None:
    """Write files that training does not need; a full, read-only, missing or hung disk is logged and counted.

    Args:
        otherwise: Consequence of a failure, as a clause.

    Returns:
        The result of ``work``; ``None`` = not written.

    Blocks: up to the timeout. Thread: any.
    """
    try:
        done = in_time(path, work, timeout_s)
    except OSError as error:
        _optional.setdefault(what, OptionalFile(what, path, otherwise)).note_missed(error)
        return None
    if (missed := _optional.pop(what, None)) is not None:
        missed.note_written()
    return done


def _mount_point(path: str | os.PathLike[str]) -> str:
    """Return the mount point of a path without a call to its file system."""
    full = os.path.abspath(path)
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "/"
    points = {re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines}
    while full not in points and full != "/":
        full = os.path.dirname(full)
    return full


def memory_file(name: str, *, can_be_sealed: bool = False) -> int:
    """Return the descriptor of a new file in memory, which other processes open at ``/proc/<pid>/fd/<number>``.

    Where ``memfd_create`` is missing or forbidden, it is an unnamed file of ``/dev/shm``, which cannot be sealed.

    Raises: OSError: There is no memory, or neither is possible.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_be_sealed else 0))
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
    fd, path = tempfile.mkstemp(prefix=f"{name}.", dir="/dev/shm")
    os.unlink(path)
    return fd


def memory_files(pid: int, name: str) -> list[str]:
    """Return the paths of a process's open files of :func:`memory_file`, each once.

    Empty if the process has ended or belongs to another user.
    """
    folder = f"/proc/{pid}/fd"
    paths: dict[tuple[int, int], str] = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            path = f"{folder}/{number}"
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path).startswith((f"/memfd:{name}", f"/dev/shm/{name}.")):
                    status = os.stat(path)
                    paths[status.st_dev, status.st_ino] = path
    return list(paths.values())


def write_durably(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Create a file with ``data`` that survives a crash once its folder is durable. Raises: OSError."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders atomically.

    Returns:
        ``False`` if the file system does not support it.

    Raises:
        FileNotFoundError: One of them does not exist; nothing is changed.
        OSError: The folder is not writable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(one), None, os.fspath(other))


def make_private_folder(path: Path) -> None:
    """Create a folder with access for its owner only; its parents get the usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def check_folder(path: Path) -> None:
    """Check that a folder, if it exists, is not a link. Raises: NotADirectoryError: It is a symbolic link or a file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(mode := os.lstat(path).st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a file"
            raise NotADirectoryError(errno.ENOTDIR, f"it is {kind}, not a folder; remove it", os.fspath(path))


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file; a new one is readable by its owner only, as it may contain command lines and output.

    Raises: OSError: It cannot be opened, or another user created a link, pipe or device in its place.
    """
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise OSError(
                errno.EINVAL, f"user {found.st_uid} put it there, and it is not a regular file; remove it", path
            )
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE)


def fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    """Return a unique name in the same folder, across processes and machines."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")


def _make_new(path: Path, data: bytes, mode: int) -> bool:
    try:
        write_durably(path, data, mode=mode)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)  # never leave an incomplete file
        raise
    return True
