"""A full or read-only place fails saves only: older checkpoints stay, and later saves succeed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gated_nodes import empty_memory
from obedient_ranks import Ranks

from outlast.checkpoint.writer_client import WriterProcess
from outlast.incidents import EventKind, IncidentKind
from outlast.journal import read

SMALL_BYTES = 2 << 20


class SmallDisk:
    """A mounted file system of ``SMALL_BYTES``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with (self.path / "filler").open("wb") as file:
            free = os.statvfs(self.path)
            file.write(bytes(free.f_bavail * free.f_frsize - (100 << 10)))

    def make_room(self) -> None:
        (self.path / "filler").unlink()

    def make_read_only(self) -> None:
        _run("mount", "-o", "remount,ro", os.fspath(self.path))

    def make_writable(self) -> None:
        _run("mount", "-o", "remount,rw", os.fspath(self.path))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A small disk; the test is skipped only if mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "outlast-test", os.fspath(path))
    except (OSError, subprocess.CalledProcessError) as error:
        message = error.stderr if isinstance(error, subprocess.CalledProcessError) else b"there is no mount"
        if os.geteuid() == 0 and not any(word in message for word in (b"denied", b"permitted", b"no mount")):
            raise  # root is permitted to mount: the error has another reason
        pytest.skip(f"a disk of its own needs the right to mount one ({error})")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "-l", os.fspath(path))


@pytest.mark.process
@pytest.mark.parametrize("tier", ["local", "global"])
@pytest.mark.parametrize("problem", ["full", "read-only"])
def test_a_full_or_read_only_place_fails_saves_until_repaired(
    tmp_path: Path, disk: SmallDisk, tier: str, problem: str
) -> None:
    """A save to a full or read-only place fails as an incident, and training continues.

    The older checkpoint stays valid. After the place is repaired, the next save succeeds.
    """
    break_disk, repair_disk, reason = {
        "full": (disk.fill, disk.make_room, "No space left"),
        "read-only": (disk.make_read_only, disk.make_writable, "Read-only file system"),
    }[problem]
    place = "local_directory" if tier == "local" else "directory"
    config: dict[str, Any] = {place: os.fspath(disk.path / "run"), "save_timeout": 60.0, "suspect_window": 0}
    run = os.fspath(tmp_path / "events")
    with closing(WriterProcess()) as writer, Ranks({"node": writer}, tmp_path / "log") as ranks:

        def save(iteration: int) -> tuple[dict[str, Any], dict[str, Any]]:
            (started,) = ranks.tell(do="begin", config=config, iteration=iteration, num_more=1, journal=run)
            (finished,) = ranks.tell(do="finish", leave=iteration == 3)
            return started, finished

        first, finished = save(1)
        assert finished["error"] is None
        break_disk()
        second, finished = save(2)
        assert reason in finished["error"]
        assert second["now"] != second["saved"], "training went on"
        repair_disk()
        third, finished = save(3)
        assert finished["error"] is None

        incidents = [event for event in read(run) if event.kind == EventKind.INCIDENT]
        assert [(one.data["incident"]["kind"], one.iteration) for one in incidents] == [(IncidentKind.SAVE_FAILED, 2)]
        assert incidents[0].data["incident"]["evidence"]["tier"] == tier
        for saved, iteration in ((third, 3), (first, 1)):
            empty_memory(writer)
            (loaded,) = ranks.tell(do="load", config=config)
            assert (loaded["iteration"], loaded["tiers"], loaded["digest"]) == (iteration, [tier], saved["saved"])
            assert not loaded["rejected"]
            (folder,) = (disk.path / "run").rglob(f"step-{iteration}")
            shutil.rmtree(folder)
        assert not list((disk.path / "run").rglob("step-*")), "the failed save left something behind"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)
