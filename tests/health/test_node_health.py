"""Checks of a node say what is wrong, tell no answer from a wrong one, and never block who asks."""

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


def test_sound_folder_is_left_as_it_was(tmp_path: Path) -> None:
    """A writable folder with room passes, its room is told, and nothing stays behind in it."""
    outcome = check(DiskCheck(path=str(tmp_path), min_free_bytes=1))
    assert outcome.status == Status.OK
    assert outcome.facts["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    """A tier's folder that a run has still to make is judged by where it will be made, and is not made."""
    assert check(DiskCheck(path=str(tmp_path / "a" / "b"), min_free_bytes=1)).status == Status.OK
    assert list(tmp_path.iterdir()) == []


def test_disk_nearly_full(tmp_path: Path) -> None:
    """Too little room fails, with both figures and the setting's name."""
    outcome = check(DiskCheck(path=str(tmp_path), min_free_bytes=HUGE))
    assert outcome.status == Status.FAILED
    assert "left" in outcome.reason
    assert "min_free_disk_gib" in outcome.reason


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no more bytes is said to be full, and the probe's file does not stay."""

    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    outcome = check(DiskCheck(path=str(tmp_path), min_free_bytes=1))
    assert (outcome.status, "is full" in outcome.reason) == (Status.FAILED, True)
    assert str(tmp_path) in outcome.reason
    assert f"{outcome.facts['free_bytes']} bytes free" in outcome.reason
    assert list(tmp_path.iterdir()) == []


def test_unwritable_tier() -> None:
    """A place where nothing can be written fails; its clock cannot be compared, which is not a failure of its own."""
    assert check(DiskCheck(path="/proc/run", min_free_bytes=1)).status == Status.FAILED
    assert check(ClockCheck(path="/proc/run", max_skew_s=30)).status == Status.SKIPPED


def test_disk_that_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives back other bytes than it was given fails."""
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real(fd, count, offset)[:-1])
    assert "different bytes" in check(DiskCheck(path=str(tmp_path), min_free_bytes=1)).reason


def test_object_store(tmp_path: Path) -> None:
    """A store is written to, read and left as it was; one that cannot be reached fails with its own words."""
    assert check(StoreCheck(url="memory://bucket/run")).status == Status.OK
    outcome = check(StoreCheck(url="file:///proc/none"))
    assert outcome.status == Status.FAILED
    assert "cannot be written" in outcome.reason


def test_a_store_that_gives_nothing_back_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes a file and cannot be read has failed, and the file is removed from it all the same."""
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
def test_what_is_lacking_is_named(task: Check, named: str) -> None:
    """Each check that fails says what is lacking, and by which setting."""
    outcome = check(task)
    assert outcome.status == Status.FAILED
    assert named in outcome.reason


def test_a_soft_limit_of_open_files_below_the_hard_one_is_raised() -> None:
    """A node whose soft limit is small is healthy where the hard limit is enough: the soft limit is raised to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        (files,) = [one for one in check_node(HealthConfig(min_open_files=257)) if one.name == "files"]
        assert (files.status, files.facts["soft"]) == (Status.OK, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256  # the check is made in another process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["/dev/shm", "/proc", "/nosuch/shm"], ids=["there", "unwritable", "missing"])
def test_shared_memory_that_nothing_needs(path: str) -> None:
    """However small, full or missing /dev/shm is: nothing of outlast's lies there, so no node is kept out for it unless
    ``min_free_shm_gib`` says what the script needs; nothing is written there either."""
    outcome = check(SharedMemoryCheck(min_free_bytes=0, path=path))
    assert outcome.status in (Status.OK, Status.SKIPPED)
    assert "outlast itself uses none" in outcome.reason
    assert check(SharedMemoryCheck(min_free_bytes=HUGE, path=path)).status == Status.FAILED


def test_a_tier_in_shared_memory_needs_room_there() -> None:
    """A tier's folder in /dev/shm is judged like any other, and the remedy is the container's."""
    outcome = check(DiskCheck(path="/dev/shm/outlast-tier", min_free_bytes=HUGE))
    assert outcome.status == Status.FAILED
    assert "min_free_disk_gib" in outcome.reason
    assert "--shm-size" in outcome.reason


def test_shared_memory_of_outlast_has_no_file() -> None:
    """A board and a staged image are memory without a name, which no size of /dev/shm bounds: only therefore may it be
    as small as it likes."""
    with contextlib.closing(Board.create(num_ranks=2)) as board:
        image = Vault().take(0, 1 << 20, (), may_steal=False)
        assert image is not None
        for path in (board.path, f"/proc/self/fd/{image.fd}"):
            assert os.readlink(path).startswith("/memfd:outlast-")


def test_clocks_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that differs from the file server's is said to be ahead or behind, by how much."""
    monkeypatch.setattr("outlast.health.node._time_of_new_memory", lambda: 1000.0)
    monkeypatch.setattr("outlast.health.node._time_of_new_file", lambda folder: 1100.0)
    outcome = check(ClockCheck(path=str(tmp_path), max_skew_s=30))
    assert (outcome.status, outcome.facts) == (Status.FAILED, {"skew_s": -100.0})
    assert "100.0 s behind" in outcome.reason


@pytest.mark.process
def test_sound_node_passes(tmp_path: Path) -> None:
    """All checks of this machine are made, and none fails; its arithmetic is right to the bit."""
    results = check_node(HealthConfig(min_open_files=16), places=[str(tmp_path)])
    assert has_failed(results) is None, results
    assert by_name(results).keys() == {"disk", "clock", "shm", "memory", "files", "network", "compute"}
    assert by_name(results)["compute"].facts == {"formats": ["float32", "float64"]}


@pytest.mark.process
def test_wrong_arithmetic_is_found_on_the_named_node_alone() -> None:
    """One flipped bit in a matrix product fails the node that it was injected into, with both digests."""
    config = HealthConfig(simulate_wrong_gemm="bad", min_open_files=16)
    found = by_name(check_node(config, node="bad"))["compute"]
    assert found.status == Status.FAILED
    assert "instead of d95868279b2af29f" in found.reason
    assert by_name(check_node(config, node="good"))["compute"].status == Status.OK
    why = has_failed((found,))
    assert why is not None
    assert why.startswith("compute cpu: failed: wrong matrix product")


@pytest.mark.process
def test_check_that_hangs_is_answered_for_and_ended(tmp_path: Path) -> None:
    """A check past its time counts as no answer; what it started is ended, and the checks after it are made."""
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
def test_check_that_crashes_its_process_is_answered_for() -> None:
    """A check whose process is killed, as by a driver's crash, fails with the signal's name; the next one is made."""
    with Prober() as prober:
        first = prober.ask(CommandCheck(command=f"kill -{int(signal.SIGSEGV)} $PPID"), "command", "it", timeout_s=300)
        second = prober.ask(CommandCheck(command="true"), "command", "it", timeout_s=300)
    assert (first.status, second.status) == (Status.FAILED, Status.OK)
    assert "SIGSEGV" in first.reason


@pytest.mark.parametrize(
    "wrong",
    [{"check_timeout": 0}, {"min_free_disk_gib": -1}, {"commands": ("",)}, {"min_open_files": -1}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    """A limit below zero, or an empty command, is refused by name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HealthConfig(**wrong)  # type: ignore[arg-type]
