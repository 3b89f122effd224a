"""Node health checks: disks, memory, clock, descriptors, network, and the user's commands.

Run as a program, this is the probe process of :class:`~outlast.health.probing.Prober`: it runs the checks that its
parent sends and sends back each outcome.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from outlast import env
from outlast.config.launching import HealthConfig
from outlast.health.devices import ComputeCheck, DeviceCount, DeviceMemoryCheck, DeviceMemoryUse, DriverCheck
from outlast.health.probing import Check, CheckOutcome, CheckResult, Prober, Status, failed, ok, skipped
from outlast.runtime.files import memory_file
from outlast.runtime.processes import (
    channel_to_parent,
    die_with_parent,
    ignore_group_signals,
    raise_descriptor_limit,
)

if TYPE_CHECKING:
    from outlast.config import Config

_PROBE_BYTES = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")
_WHOSE_SHM = "DataLoader workers and NCCL; outlast itself uses none"
_SHM_HINT = "start the container with a larger --shm-size"


def check_node(
    config: HealthConfig | None = None,
    *,
    places: Sequence[str] = (),
    node: str | None = None,
    network: bool = True,
    num_products: int = 4,
) -> tuple[CheckResult, ...]:
    """Check this node: disks, memory, clock, network, the CPU's arithmetic, and the user's commands.

    The checks run in a separate process; a check that takes too long has failed.

    Args:
        config: The requirements.
        places: Folders and URLs of tiers, and the run directory; for a folder that does not exist yet, the nearest
            existing parent is checked.
        node: This node's name, for ``simulate_wrong_gemm``; ``None`` = the host name.
        network: Off: only interfaces in ``network_interfaces`` must be up; for a job of one node.
        num_products: Matrix products of each number format; 0 = the arithmetic is not checked.

    Blocks: up to ``check_timeout`` for each check; on a healthy node all checks take a fraction of a second.
    """
    with Prober() as prober:
        return probe_node(
            prober, config or HealthConfig(), places=places, node=node, network=network, num_products=num_products
        )


def probe_node(
    prober: Prober,
    config: HealthConfig,
    *,
    places: Sequence[str],
    node: str | None = None,
    network: bool = True,
    num_products: int = 4,
) -> tuple[CheckResult, ...]:
    """Run the checks of :func:`check_node` with a prober, which stays open."""
    checks: list[tuple[Check, str, str]] = []
    for place in dict.fromkeys(places):
        if "://" in place and not place.startswith("file://"):
            checks.append((StoreCheck(url=place), "store", place))
        else:
            path = place.removeprefix("file://")
            checks.append((DiskCheck(path=path, min_free_bytes=_bytes(config.min_free_disk_gib)), "disk", path))
            checks.append((ClockCheck(path=path, max_skew_s=config.max_clock_skew), "clock", path))
    flip = config.simulate_wrong_gemm == (node or env.clean_name(env.hostname()))
    checks += [
        (SharedMemoryCheck(min_free_bytes=_bytes(config.min_free_shm_gib)), "shm", "/dev/shm"),
        (MemoryCheck(min_free_bytes=_bytes(config.min_free_memory_gib)), "memory", "node"),
        (OpenFilesCheck(min_open_files=config.min_open_files), "files", "process"),
        *([(ComputeCheck(flip=flip, num_rounds=num_products), "compute", "cpu")] if num_products else []),
        *((CommandCheck(command=command), "command", command) for command in config.commands),
    ]
    if interfaces := config.network_interfaces:
        checks.append((NetworkCheck(interfaces=interfaces), "network", ",".join(interfaces)))
    elif network:
        checks.append((NetworkCheck(), "network", "any"))
    results: list[CheckResult] = []
    hung: set[str] = set()
    for check, name, target in checks:
        if name == "clock" and target in hung:
            continue  # the disk check has reported it, and this check would wait as long
        results.append(prober.ask(check, name, target, timeout_s=config.check_timeout))
        if results[-1].status == Status.TIMED_OUT:
            hung.add(target)
    return tuple(results)


def places_of(config: Config) -> tuple[str, ...]:
    """Return a run's directories for ``places``: the run directory and the configured tiers."""
    tiers = () if config.checkpoint is None else (config.checkpoint.directory, config.checkpoint.local_directory)
    return tuple(place for place in (config.run_dir, *tiers) if place is not None)


class DiskCheck(Check, frozen=True, kw_only=True):
    """A folder, or its nearest existing parent, accepts data, returns the same data, and has free space."""

    path: str
    min_free_bytes: int

    def run(self) -> CheckOutcome:
        folder = _nearest(Path(self.path))
        data = secrets.token_bytes(_PROBE_BYTES)
        try:
            written = _write_and_read(folder, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                return failed(f"{folder} cannot be written ({error.strerror})", errno=error.errno)
            facts = _room(os.statvfs(folder))
            return failed(f"{folder} is full ({error.strerror}): {facts['free_bytes']} bytes free", **facts)
        if written != data:
            return failed(f"{folder} returned different bytes than were written")
        space = os.statvfs(folder)
        facts = {**_room(space), "free_files": space.f_favail}
        free = facts["free_bytes"]
        if free < self.min_free_bytes:
            hint = f"; {_SHM_HINT}" if folder.is_relative_to("/dev/shm") else ""
            return failed(f"{_gib(free)} left, {_gib(self.min_free_bytes)} needed (min_free_disk_gib){hint}", **facts)
        if space.f_files and not space.f_favail:
            return failed("no file can be made any more: all inodes are used", **facts)
        return ok(f"writable, {_gib(free)} left", **facts)


class StoreCheck(Check, frozen=True, kw_only=True):
    """An object store accepts, returns and deletes a file."""

    url: str

    def run(self) -> CheckOutcome:
        import fsspec  # type: ignore[import-untyped]

        data = secrets.token_bytes(4096)
        files, root = fsspec.core.url_to_fs(self.url)
        name = f"{root.rstrip('/')}/.outlast-probe-{secrets.token_hex(8)}"
        try:
            files.pipe_file(name, data)
            try:
                found = files.cat_file(name)
            finally:
                files.rm_file(name)
        except Exception as error:  # noqa: BLE001  every object store has different exceptions
            return failed(f"cannot be written ({type(error).__name__}: {' '.join(str(error).split())[:300]})")
        return ok("writable") if found == data else failed("returned different bytes than were written")


class SharedMemoryCheck(Check, frozen=True, kw_only=True):
    """``/dev/shm`` is writable and has the space that the script needs; containers often limit it to 64 MiB.

    outlast stores nothing there: its shared memory (``memfd``) has no file, counts as memory, and is not limited by the
    size of ``/dev/shm``. So ``/dev/shm`` is only too small for a limit that the user sets.
    """

    min_free_bytes: int
    """0 = no requirement: the free space is only reported."""
    path: str = "/dev/shm"

    def run(self) -> CheckOutcome:
        if not self.min_free_bytes:
            try:
                facts: dict[str, Any] = _room(os.statvfs(self.path))
            except OSError as error:
                return skipped(f"{error.strerror}; it is for {_WHOSE_SHM}")
        else:
            found = DiskCheck(path=self.path, min_free_bytes=0).run()
            if found.status != Status.OK:
                return found
            facts = found.facts
        free = facts["free_bytes"]
        if free < self.min_free_bytes:
            needed = _gib(self.min_free_bytes)
            return failed(f"{_gib(free)} left, {needed} needed (min_free_shm_gib); {_SHM_HINT}", **facts)
        return ok(f"{_gib(free)} left for {_WHOSE_SHM}", **facts)


class MemoryCheck(Check, frozen=True, kw_only=True):
    """The node or the container has enough free memory."""

    min_free_bytes: int

    def run(self) -> CheckOutcome:
        machine = psutil.virtual_memory()
        free, total, whose = machine.available, machine.total, "node"
        limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
        if limit is not None and used is not None and limit - used < free:
            free, total, whose = limit - used, limit, "container"
        facts = {"free_bytes": free, "total_bytes": total, "of": whose}
        if free < self.min_free_bytes:
            needed = _gib(self.min_free_bytes)
            return failed(f"the {whose} has {_gib(free)} left, {needed} needed (min_free_memory_gib)", **facts)
        return ok(f"{_gib(free)} of the {whose}'s {_gib(total)} left", **facts)


class OpenFilesCheck(Check, frozen=True, kw_only=True):
    """A process may open enough files after raising its soft limit to the hard one, as all processes of a run do."""

    min_open_files: int

    def run(self) -> CheckOutcome:
        raise_descriptor_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        facts = {"soft": soft, "hard": hard}
        if soft != resource.RLIM_INFINITY and soft < self.min_open_files:
            return failed(
                f"{soft} open files allowed, {self.min_open_files} needed (min_open_files); raise the hard limit "
                f"(ulimit -Hn, now {hard}) where the node's processes are started: limits.conf, or LimitNOFILE of "
                "systemd",
                **facts,
            )
        return ok("no limit" if soft == resource.RLIM_INFINITY else f"{soft} allowed", **facts)


class ClockCheck(Check, frozen=True, kw_only=True):
    """This node's clock agrees with a file server's, by the times that both give to a new file."""

    path: str
    max_skew_s: float

    def run(self) -> CheckOutcome:
        try:
            here, there = _time_of_new_memory(), _time_of_new_file(_nearest(Path(self.path)))
        except OSError as error:
            return skipped(f"no file can be made to read its time ({error.strerror})")
        skew_s = here - there
        facts = {"skew_s": round(skew_s, 3)}
        if abs(skew_s) > self.max_skew_s:
            how = "ahead of" if skew_s > 0 else "behind"
            return failed(f"{abs(skew_s):.1f} s {how} the file server's (max_clock_skew={self.max_skew_s:g})", **facts)
        return ok(f"within {abs(skew_s):.1f} s of the file server's", **facts)


class NetworkCheck(Check, frozen=True, kw_only=True):
    """The given interfaces are up; by default, any other than the loopback."""

    interfaces: tuple[str, ...] = ()

    def run(self) -> CheckOutcome:
        up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
        others = {name: is_up for name, is_up in up.items() if name != "lo"}
        if not self.interfaces:
            if not others:
                return skipped("there is only the loopback: enough for one node")
            running = sorted(name for name, is_up in others.items() if is_up)
            if not running:
                return failed("no interface is up", down=[*others])
            return ok(f"up: {', '.join(running)}", up=running)
        wrong = []
        for name in self.interfaces:
            is_up = up.get(name, _infiniband_state(name))
            if not is_up:
                wrong.append(f"{name} {'is down' if is_up is False else 'is not there'}")
        return failed("; ".join(wrong)) if wrong else ok(f"up: {', '.join(self.interfaces)}", up=[*self.interfaces])


class CommandCheck(Check, frozen=True, kw_only=True):
    """A command of the user exits with 0; the prober ends a command that takes too long."""

    command: str

    def run(self) -> CheckOutcome:
        done = subprocess.run(
            ["/bin/sh", "-c", self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        last_line = lines[-1][:300] if lines else ""
        if done.returncode == 0:
            return ok(last_line or "exit code 0", exit_code=0)
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        return failed(f"{how}: {last_line}" if last_line else how, exit_code=done.returncode)


def _nearest(path: Path) -> Path:
    """Return the nearest existing folder at or above a path."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@contextmanager
def _new_file(folder: Path) -> Iterator[int]:
    """Create a temporary file and yield its descriptor."""
    path = folder / f".outlast-probe-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def _write_and_read(folder: Path, data: bytes) -> bytes:
    with _new_file(folder) as fd:
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


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _time_of_new_memory() -> float:
    """Return the time that this node's kernel gives to a file without a server: one in memory."""
    fd = memory_file("outlast-clock")
    try:
        os.write(fd, b"0")
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _time_of_new_file(folder: Path) -> float:
    with _new_file(folder) as fd:
        os.write(fd, b"0")
        os.fsync(fd)
        return os.fstat(fd).st_mtime


def _infiniband_state(name: str) -> bool | None:
    """Return whether all ports of an InfiniBand device are active; ``None`` = no such device."""
    try:
        ports = sorted(Path("/sys/class/infiniband", name, "ports").iterdir())
        states = [(port / "state").read_text() for port in ports]
    except OSError:
        return None
    return bool(states) and all("ACTIVE" in state for state in states)


def _room(space: os.statvfs_result) -> dict[str, int]:
    return {"free_bytes": space.f_bavail * space.f_frsize, "total_bytes": space.f_blocks * space.f_frsize}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _bytes(gib: float) -> int:
    return int(gib * 2**30)


def main() -> None:
    """Make checks until the parent closes the channel."""
    ignore_group_signals(starts_programs=True)
    node_checks = DiskCheck | StoreCheck | SharedMemoryCheck | MemoryCheck | OpenFilesCheck | ClockCheck | NetworkCheck
    device_checks = DeviceCount | ComputeCheck | DeviceMemoryCheck | DeviceMemoryUse | DriverCheck
    channel = channel_to_parent(sys.argv[1], node_checks | CommandCheck | device_checks)
    die_with_parent(int(sys.argv[2]))
    while (check := channel.receive()) is not None:
        try:
            outcome = check.run()
        except Exception as error:  # noqa: BLE001  any error of a driver or library is the outcome
            text = " ".join(str(error).split())[:500]
            outcome = CheckOutcome(status=Status.ERROR, reason=f"{type(error).__name__}: {text}")
        channel.send(outcome)


if __name__ == "__main__":
    main()
