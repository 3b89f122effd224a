"""Node checks report faults with their reason, tell a timeout from a failure, and never block the caller."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from outlast.checkpoint.vault import Vault
from outlast.config import HealthConfig
from outlast.errors import ConfigError
from outlast.health import CheckResult, Status, check_node, has_failed
from outlast.health.node import (
    ClockCheck,
    CommandCheck,
    DiskCheck,
    MemoryCheck,
    NetworkCheck,
    OpenFilesCheck,
    SharedMemoryCheck,
    StoreCheck,
)
from outlast.health.probing import Check, CheckOutcome, Prober
from outlast.runtime.board import Board

HUGE = 1 << 60


def check(task: Check) -> CheckOutcome:
    return task.run()


def by_name(results: tuple[CheckResult, ...]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


def test_disk_check_leaves_no_file(tmp_path: Path) -> None:
    """A writable folder with room passes with its free bytes, and no file stays in it."""
    outcome = check(DiskCheck(path=str(tmp_path), min_free_bytes=1))
    assert outcome.status == Status.OK
    assert outcome.facts["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_checked_but_not_created(tmp_path: Path) -> None:
    """A missing tier folder is checked at its nearest existing parent, and not created."""
    assert check(DiskCheck(path=str(tmp_path / "a" / "b"), min_free_bytes=1)).status == Status.OK
    assert list(tmp_path.iterdir()) == []


def test_nearly_full_disk_fails(tmp_path: Path) -> None:
    """Too little room fails, with both sizes and the setting's name."""
    outcome = check(DiskCheck(path=str(tmp_path), min_free_bytes=HUGE))
    assert outcome.status == Status.FAILED
    assert "left" in outcome.reason
    assert "min_free_disk_gib" in outcome.reason


def test_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that accepts no more bytes is reported as full, and the probe file is removed."""

    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    outcome = check(DiskCheck(path=str(tmp_path), min_free_bytes=1))
    assert (outcome.status, "is full" in outcome.reason) == (Status.FAILED, True)
    assert str(tmp_path) in outcome.reason
    assert f"{outcome.facts['free_bytes']} bytes free" in outcome.reason
    assert list(tmp_path.iterdir()) == []


def test_unwritable_tier_fails() -> None:
    """An unwritable place fails; its clock check is skipped and not a second failure."""
    assert check(DiskCheck(path="/proc/run", min_free_bytes=1)).status == Status.FAILED
    assert check(ClockCheck(path="/proc/run", max_skew_s=30)).status == Status.SKIPPED


def test_disk_with_wrong_content_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that returns other bytes than were written fails."""
    original = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: original(fd, count, offset)[:-1])
    assert "different bytes" in check(DiskCheck(path=str(tmp_path), min_free_bytes=1)).reason


def test_object_store_is_checked(tmp_path: Path) -> None:
    """An object store is written, read and cleaned; an unreachable one fails with its own error."""
    assert check(StoreCheck(url="memory://bucket/run")).status == Status.OK
    outcome = check(StoreCheck(url="file:///proc/none"))
    assert outcome.status == Status.FAILED
    assert "cannot be written" in outcome.reason


def test_unreadable_object_store_fails_and_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store that accepts a file but cannot be read fails, and the file is removed."""
    files = fsspec.filesystem("memory")

    def fail(*_: object) -> bytes:
        raise PermissionError("may not be read")

    monkeypatch.setattr(type(files), "cat_file", fail)
    assert check(StoreCheck(url="memory://bucket/unread")).status == Status.FAILED
    assert files.find("bucket/unread") == []


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (SharedMemoryCheck(min_free_bytes=HUGE), "min_free_shm_gib"),
        (MemoryCheck(min_free_bytes=HUGE), "min_free_memory_gib"),
        (OpenFilesCheck(min_open_files=1 << 40), "ulimit -Hn"),
        (NetworkCheck(interfaces=("nosuch0",)), "nosuch0 is not there"),
        (CommandCheck(command="echo first; echo no tokens; exit 3"), "exit code 3: no tokens"),
        (CommandCheck(command="kill -9 $$"), "signal 9"),
    ],
)
def test_failed_check_has_a_reason(task: Check, named: str) -> None:
    """Each failed check reports the missing resource and its setting."""
    outcome = check(task)
    assert outcome.status == Status.FAILED
    assert named in outcome.reason


def test_soft_limit_of_open_files_is_raised() -> None:
    """A node with a small soft limit is healthy if the hard limit is sufficient: the soft limit is raised to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        (files,) = [one for one in check_node(HealthConfig(min_open_files=257)) if one.name == "files"]
        assert (files.status, files.facts["soft"]) == (Status.OK, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256  # the check runs in another process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["/dev/shm", "/proc", "/nosuch/shm"], ids=["there", "unwritable", "missing"])
def test_small_shared_memory_is_accepted_by_default(path: str) -> None:
    """A small, full or missing /dev/shm is accepted, since outlast does not use it, unless ``min_free_shm_gib``
    states the script's need; the check writes nothing there."""
    outcome = check(SharedMemoryCheck(min_free_bytes=0, path=path))
    assert outcome.status in (Status.OK, Status.SKIPPED)
    assert "outlast itself uses none" in outcome.reason
    assert check(SharedMemoryCheck(min_free_bytes=HUGE, path=path)).status == Status.FAILED


def test_tier_in_shared_memory_needs_room() -> None:
    """A tier folder in /dev/shm is checked like any other, and the remedy is the container's option."""
    outcome = check(DiskCheck(path="/dev/shm/outlast-tier", min_free_bytes=HUGE))
    assert outcome.status == Status.FAILED
    assert "min_free_disk_gib" in outcome.reason
    assert "--shm-size" in outcome.reason


def test_shared_memory_of_outlast_has_no_file() -> None:
    """Heartbeat memory and staged images are unnamed memory, which the size of /dev/shm does not limit: that is why
    a small /dev/shm is accepted."""
    with contextlib.closing(Board.create(num_ranks=2)) as board:
        image = Vault().take(0, 1 << 20, (), may_steal=False)
        assert image is not None
        for path in (board.path, f"/proc/self/fd/{image.fd}"):
            assert os.readlink(path).startswith("/memfd:outlast-")


def test_clock_skew_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that differs from the file server's is reported as ahead or behind, with the difference."""
    monkeypatch.setattr("outlast.health.node._time_of_new_memory", lambda: 1000.0)
    monkeypatch.setattr("outlast.health.node._time_of_new_file", lambda folder: 1100.0)
    outcome = check(ClockCheck(path=str(tmp_path), max_skew_s=30))
    assert (outcome.status, outcome.facts) == (Status.FAILED, {"skew_s": -100.0})
    assert "100.0 s behind" in outcome.reason


@pytest.mark.process
def test_healthy_node_passes(tmp_path: Path) -> None:
    """All checks of this machine run, and none fails; its arithmetic is exact."""
    results = check_node(HealthConfig(min_open_files=16), places=[str(tmp_path)])
    assert has_failed(results) is None, results
    assert by_name(results).keys() == {"disk", "clock", "shm", "memory", "files", "network", "compute"}
    assert by_name(results)["compute"].facts == {"formats": ["float32", "float64"]}


@pytest.mark.process
def test_wrong_arithmetic_is_detected_on_the_injected_node() -> None:
    """One flipped bit in a matrix product fails only the node of the injection, with both digests."""
    config = HealthConfig(simulate_wrong_gemm="bad", min_open_files=16)
    found = by_name(check_node(config, node="bad"))["compute"]
    assert found.status == Status.FAILED
    assert "instead of d95868279b2af29f" in found.reason
    assert by_name(check_node(config, node="good"))["compute"].status == Status.OK
    reason_of_failure = has_failed((found,))
    assert reason_of_failure is not None
    assert reason_of_failure.startswith("compute cpu: failed: wrong matrix product")


@pytest.mark.process
def test_hung_check_times_out_and_is_killed(tmp_path: Path) -> None:
    """A check past its timeout is reported as timed out; its processes are killed, and later checks run."""
    pid_file = tmp_path / "pid"
    config = HealthConfig(commands=(f"sleep 1000 & echo $! > {pid_file}; wait", "true"), check_timeout=0.5)
    with Prober() as prober:
        assert prober.ask(CommandCheck(command="true"), "command", "before", timeout_s=300).status == Status.OK
        first = prober.ask(CommandCheck(command=config.commands[0]), "command", "hangs", timeout_s=2.5)
        second = prober.ask(CommandCheck(command=config.commands[1]), "command", "after", timeout_s=300)
    assert (first.status, second.status) == (Status.TIMED_OUT, Status.OK)
    stat = Path(f"/proc/{int(pid_file.read_text())}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.process
def test_crashed_check_fails() -> None:
    """A check whose process is killed, as by a driver crash, fails with the signal's name; the next check runs."""
    with Prober() as prober:
        first = prober.ask(CommandCheck(command=f"kill -{int(signal.SIGSEGV)} $PPID"), "command", "it", timeout_s=300)
        second = prober.ask(CommandCheck(command="true"), "command", "it", timeout_s=300)
    assert (first.status, second.status) == (Status.FAILED, Status.OK)
    assert "SIGSEGV" in first.reason


@pytest.mark.parametrize(
    "wrong",
    [{"check_timeout": 0}, {"min_free_disk_gib": -1}, {"commands": ("",)}, {"min_open_files": -1}],
)
def test_invalid_health_settings_are_rejected(wrong: dict[str, object]) -> None:
    """A negative limit or an empty command is rejected with its name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HealthConfig(**wrong)  # type: ignore[arg-type]
