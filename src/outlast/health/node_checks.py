"""What the probe process looks at on a node: disks, memory, clock, descriptors, network, the user's own checks."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from outlast.health.result import Outcome, Status
from outlast.health.tasks import Clock, Command, Disk, Memory, Network, OpenFiles, SharedMemory, Store

__all__ = ["CHECKS"]

_PROBE_BYTES = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")
_WHOSE_SHM = "DataLoader workers and NCCL; outlast itself uses none"
_SHM_HINT = "start the container with a larger --shm-size"


def _ok(reason: str, **facts: Any) -> Outcome:
    return Outcome(status=Status.OK, reason=reason, facts=facts)


def _failed(reason: str, **facts: Any) -> Outcome:
    return Outcome(status=Status.FAILED, reason=reason, facts=facts)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def check_disk(task: Disk) -> Outcome:
    """Write, read back and delete a file, then look at the room that is left."""
    folder = _nearest(Path(task.path))
    data = secrets.token_bytes(_PROBE_BYTES)
    try:
        written = _write_and_read(folder, data)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "is full" if full else "cannot be written"
        return _failed(f"{folder} {what} ({error.strerror})", errno=error.errno)
    if written != data:
        return _failed(f"{folder} gives back other bytes than were written")
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    facts = {"free_bytes": free, "total_bytes": space.f_blocks * space.f_frsize, "free_files": space.f_favail}
    if free < task.min_free_bytes:
        hint = f"; {_SHM_HINT}" if folder.is_relative_to("/dev/shm") else ""
        return _failed(f"{_gib(free)} left, {_gib(task.min_free_bytes)} needed (min_free_disk_gib){hint}", **facts)
    if space.f_files and not space.f_favail:
        return _failed("no file can be made any more: all inodes are used", **facts)
    return _ok(f"writable, {_gib(free)} left", **facts)


def _nearest(path: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _write_and_read(folder: Path, data: bytes) -> bytes:
    path = folder / f".outlast-probe-{os.getpid()}-{secrets.token_hex(4)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pieces, position = [], 0
        while piece := os.pread(fd, _PROBE_BYTES, position):
            pieces.append(piece)
            position += len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)
        path.unlink()


def check_store(task: Store) -> Outcome:
    """Write, read back and delete an object."""
    import fsspec  # type: ignore[import-untyped]

    data = secrets.token_bytes(4096)
    files, root = fsspec.core.url_to_fs(task.url)
    name = f"{root.rstrip('/')}/.outlast-probe-{secrets.token_hex(8)}"
    try:
        files.pipe_file(name, data)
        found = files.cat_file(name)
        files.rm_file(name)
    except Exception as error:  # noqa: BLE001 - every store has exceptions of its own
        return _failed(f"cannot be written ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
    return _ok("writable") if found == data else _failed("gives back other bytes than were written")


def check_shared_memory(task: SharedMemory) -> Outcome:
    """Look whether ``/dev/shm`` has what the script needs there; containers often give it 64 MiB.

    Nothing of outlast's lies there: its shared memory has no file (``memfd``), counts as memory, and is not bounded by
    the size of ``/dev/shm``. So without a number of the user's it cannot be too small.
    """
    if not task.min_free_bytes:
        try:
            space = os.statvfs(task.path)
        except OSError as error:
            reason = f"{error.strerror}; it is for {_WHOSE_SHM}"
            return Outcome(status=Status.SKIPPED, reason=reason)
        free = space.f_bavail * space.f_frsize
        facts = {"free_bytes": free, "total_bytes": space.f_blocks * space.f_frsize}
        return _ok(f"{_gib(free)} left for {_WHOSE_SHM}", **facts)
    found = check_disk(Disk(path=task.path, min_free_bytes=0))
    if found.status != Status.OK:
        return found
    free = found.facts["free_bytes"]
    if free < task.min_free_bytes:
        needed = _gib(task.min_free_bytes)
        return _failed(f"{_gib(free)} left, {needed} needed (min_free_shm_gib); {_SHM_HINT}", **found.facts)
    return _ok(f"{_gib(free)} left for {_WHOSE_SHM}", **found.facts)


def check_memory(task: Memory) -> Outcome:
    """Look at what the machine has left, and at what this container may still take."""
    machine = psutil.virtual_memory()
    free, total, whose = machine.available, machine.total, "node"
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None and limit - used < free:
        free, total, whose = limit - used, limit, "container"
    facts = {"free_bytes": free, "total_bytes": total, "of": whose}
    if free < task.min_free_bytes:
        needed = _gib(task.min_free_bytes)
        return _failed(f"the {whose} has {_gib(free)} left, {needed} needed (min_free_memory_gib)", **facts)
    return _ok(f"{_gib(free)} of the {whose}'s {_gib(total)} left", **facts)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def check_open_files(task: OpenFiles) -> Outcome:
    """Look at the limit of descriptors that this process was given."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if soft != resource.RLIM_INFINITY and soft < task.min_open_files:
        return _failed(f"{soft} allowed, {task.min_open_files} needed; raise it (ulimit -n, at most {hard})", **facts)
    return _ok("no limit" if soft == resource.RLIM_INFINITY else f"{soft} allowed", **facts)


def check_clock(task: Clock) -> Outcome:
    """Compare the time that a folder's file server gives a new file with the time that this node's kernel gives one."""
    try:
        here, there = _time_of_new_memory(), _time_of_new_file(_nearest(Path(task.path)))
    except OSError as error:
        return Outcome(status=Status.SKIPPED, reason=f"no file can be made to read its time ({error.strerror})")
    skew_s = here - there
    facts = {"skew_s": round(skew_s, 3)}
    if abs(skew_s) > task.max_skew_s:
        how = "ahead of" if skew_s > 0 else "behind"
        return _failed(f"{abs(skew_s):.1f} s {how} the file server's (max_clock_skew={task.max_skew_s:g})", **facts)
    return _ok(f"within {abs(skew_s):.1f} s of the file server's", **facts)


def _time_of_new_memory() -> float:
    """Return the time that this node's kernel gives a file; one without a name is on no server's disk."""
    fd = os.memfd_create("outlast-clock", os.MFD_CLOEXEC)
    try:
        os.write(fd, b"0")
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _time_of_new_file(folder: Path) -> float:
    path = folder / f".outlast-clock-{os.getpid()}-{secrets.token_hex(4)}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, b"0")
        os.fsync(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        path.unlink()


def check_network(task: Network) -> Outcome:
    """Look whether interfaces are up."""
    up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    others = {name: is_up for name, is_up in up.items() if name != "lo"}
    if not task.interfaces:
        if not others:
            return Outcome(status=Status.SKIPPED, reason="there is only the loopback: enough for one node")
        running = sorted(name for name, is_up in others.items() if is_up)
        return (
            _ok(f"up: {', '.join(running)}", up=running) if running else _failed("no interface is up", down=[*others])
        )
    wrong = []
    for name in task.interfaces:
        is_up = up.get(name, _infiniband_state(name))
        if not is_up:
            wrong.append(f"{name} {'is down' if is_up is False else 'is not there'}")
    return _failed("; ".join(wrong)) if wrong else _ok(f"up: {', '.join(task.interfaces)}", up=[*task.interfaces])


def _infiniband_state(name: str) -> bool | None:
    """Return whether all ports of an InfiniBand device are active; ``None``: there is no such device."""
    try:
        ports = sorted(Path("/sys/class/infiniband", name, "ports").iterdir())
        states = [(port / "state").read_text() for port in ports]
    except OSError:
        return None
    return bool(states) and all("ACTIVE" in state for state in states)


def check_command(task: Command) -> Outcome:
    """Run a command of the user's; the prober ends it when it takes too long."""
    done = subprocess.run(
        ["/bin/sh", "-c", task.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    said = lines[-1][:300] if lines else ""
    if done.returncode == 0:
        return _ok(said or "exit code 0", exit_code=0)
    how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
    return _failed(f"{how}: {said}" if said else how, exit_code=done.returncode)


CHECKS: dict[type, Callable[[Any], Outcome]] = {
    Disk: check_disk,
    Store: check_store,
    SharedMemory: check_shared_memory,
    Memory: check_memory,
    OpenFiles: check_open_files,
    Clock: check_clock,
    Network: check_network,
    Command: check_command,
}
"""The function for each task."""
