"""Files that are whole or not there, on disks that may hang or be full, and files in memory.

Everything that a run writes besides checkpoints is optional: training continues without it. Each such write goes
through :func:`write_optional`, or reports to :class:`OptionalFile`: one warning with the path, a count of what was not
written, and one line when writing works again.
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
"""How long a process that has more urgent things to do waits for a disk."""
_overdue: dict[str, Future[Any]] = {}
"""Mount point to what hangs there."""

NOT_ALLOWED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""What a system call answers that the kernel does not have, or that a container may not make."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system, or a quota, that takes no more."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
"""Errors of a file system without hard links."""
PRIVATE = 0o600
"""Permissions of a file that only its owner can read."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file by ``data``: readers see the old one or the new one, also after a crash.

    Args:
        path: The file.
        data: What it is to hold.
        mode: Permissions, before the umask; ``PRIVATE`` for what holds command lines or output.

    Raises:
        OSError: The disk is full, or the folder is not writable; the old file stays.
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
    """Make a new file of ``data``; of several processes that try at once, on any machines, one succeeds.

    The file gets its name by a hard link once it is whole and durable, so that nobody reads half of it. Where there are
    no links it is made by its name, and may be read before it is whole.

    Args:
        path: The file.
        data: What it holds.
        mode: Who may read and write it, as far as the process's mask permits.

    Returns:
        Whether this call made it; otherwise it was there, and is what it was.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    temporary = _temporary(path)
    try:
        write_durably(temporary, data, mode=mode)
        try:
            os.link(temporary, path)
            is_made = True
        except FileExistsError:
            # NFS repeats a request whose answer was lost, and then finds its own link: the count of links shows it.
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


def begin(work: Callable[[], T]) -> Future[T]:
    """Begin what a hung disk may keep from ending, in a thread of its own; return its outcome.

    Thread: any.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="outlast-disk", daemon=True).start()
    return outcome


def in_time(path: str | os.PathLike[str], work: Callable[[], T], timeout_s: float | None = None) -> T:
    """Do what a hung disk may keep from ending, and go on without it if it takes too long; it ends when it can.

    While something earlier still hangs on the same file system, nothing more is tried there.

    Args:
        path: A file or folder that the work is about.
        work: What to do.
        timeout_s: How long to wait; ``None`` = :data:`DISK_S`.

    Raises:
        TimeoutError: It took longer, or something earlier still does; it is an ``OSError``.

    Blocks: up to that.
    Thread: any.
    """
    where = _mount_point(path)
    if (earlier := _overdue.get(where)) is not None:
        if not earlier.done():
            raise TimeoutError(f"the disk at {where} does not respond")
        _overdue.pop(where, None)
    outcome = begin(work)
    wait((outcome,), DISK_S if timeout_s is None else timeout_s)
    if not outcome.done():
        _overdue[where] = outcome
        raise TimeoutError(f"the disk at {where} does not respond")
    return outcome.result()


class OptionalFile:
    """Report writes of one kind that training does not need.

    Args:
        what: The kind of file, as a plural: the subject of the log lines.
        path: The file or folder.
        otherwise: What the failure means, as a clause.

    Thread: any; one at a time.
    """

    def __init__(
        self, what: str, path: str | os.PathLike[str], otherwise: str = "training continues without them"
    ) -> None:
        self.what, self.path, self.otherwise = what, os.fspath(path), otherwise
        self.num_missed = 0
        """Writes that have failed since the last one that succeeded."""

    def note_missed(self, reason: object) -> None:
        """Count a write that failed; the first of several is logged."""
        self.num_missed += 1
        level = logging.WARNING if self.num_missed == 1 else logging.DEBUG
        log.log(level, "%s cannot be written to %s (%s); %s", self.what, self.path, reason, self.otherwise)

    def note_written(self) -> None:
        """Note a write that succeeded; the first one after failures is logged, with the number of these."""
        if self.num_missed:
            num, self.num_missed = self.num_missed, 0
            log.warning("%s are written to %s again; %s failed", self.what, self.path, count(num, "write"))


_optional: dict[str, OptionalFile] = {}
"""Kind of file to its state, of what :func:`write_optional` has failed to write."""


def write_optional(
    what: str,
    path: str | os.PathLike[str],
    work: Callable[[], T],
    *,
    otherwise: str = "training continues without them",
    timeout_s: float | None = None,
) -> T | None:
    """Write files that training does not need: a disk that is full, read-only, gone or hung is logged and counted.

    Args:
        what: The kind of file, as a plural.
        path: The file or folder.
        work: Writes it.
        otherwise: What the failure means, as a clause.
        timeout_s: How long to wait; ``None`` = :data:`DISK_S`.

    Returns:
        What ``work`` returned; ``None`` = it is not written.

    Blocks: up to that.
    Thread: any.
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
    """Return where the file system of a path is mounted, without asking that file system."""
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
    """Return the descriptor of a new file in memory, which others open at ``/proc/<pid>/fd/<number>``.

    Where the kernel, or what guards a container, lets nobody call ``memfd_create``, it is a file of ``/dev/shm``
    without a name, which no seal can be put on.

    Raises:
        OSError: There is no memory, or neither can be had.
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
    """Return the paths of the files that a process holds of :func:`memory_file`, each once.

    None where the process has ended, or belongs to another user.
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
    """Make a new file of ``data`` that outlasts a crash once its folder does. Raises: OSError."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders in one step.

    Returns:
        Whether it is done; ``False``: the file system cannot do it.

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
    """Make a folder that only its owner can look into, if it does not exist; those above it get the usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def check_folder(path: Path) -> None:
    """Check that a folder, if it exists, is not a link that was put in its place.

    Raises:
        NotADirectoryError: It is a symbolic link or a file; the text says so.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(mode := os.lstat(path).st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a file"
            raise NotADirectoryError(errno.ENOTDIR, f"it is {kind}, not a folder; remove it", os.fspath(path))


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file; a new one can only be read by its owner, as it may contain command lines and output.

    Raises:
        OSError: It cannot be opened, or another user put a link, a pipe or a device in its place.
    """
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise OSError(
                errno.EINVAL, f"user {found.st_uid} put it there, and it is not a regular file; remove it", path
            )
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE)


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    """Return a name beside a file that no process of any machine takes at the same time."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")


def _make_new(path: Path, data: bytes, mode: int) -> bool:
    try:
        write_durably(path, data, mode=mode)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)  # a part of it must not stand for the whole
        raise
    return True
