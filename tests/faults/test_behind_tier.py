"""The resume point announced for a job with a global directory behind is the one that the next start loads."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from behind_tier import FOREVER, SCRIPT, ReadOnlyDisk, commits, end_behind, mounted

from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ReadOnlyDisk]:
    """A small disk; the test is skipped if mounting is not permitted."""
    with ExitStack() as stack:
        try:
            new_disk = stack.enter_context(mounted(tmp_path / "disk"))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a disk of its own needs the right to mount one ({error})")
        yield new_disk


MOMENTS = itertools.product([(False, 3), (False, 17), (True, 9), (True, 24)], [False, True])


@pytest.mark.parametrize(
    ("kills", "num_ahead", "restarts"),
    [
        pytest.param(*moment, restarts, marks=[] if index == 0 else [pytest.mark.extended])
        for index, (moment, restarts) in enumerate(MOMENTS)
    ],
)
def test_the_next_start_loads_the_announced_checkpoint(
    kills: bool, num_ahead: int, restarts: bool, tmp_path: Path, disk: ReadOnlyDisk
) -> None:
    """The last line (SIGTERM) and ``outlast status`` (SIGKILL) announce the checkpoint that the next start loads."""
    moment = end_behind(tmp_path, disk, num_ahead=num_ahead, kills=kills, restarts=restarts)
    assert moment.announced == moment.loaded, moment
    assert moment.announced < moment.completed, "nothing was ahead of the global tier"
    if not kills:
        assert moment.exit_code == 75, moment
        assert "was in node-local tiers only and is lost" in moment.last_line
        assert moment.lost == moment.completed - moment.loaded, moment


@pytest.mark.extended
def test_a_run_whose_commits_are_overdue_stops(tmp_path: Path, disk: ReadOnlyDisk) -> None:
    """After ``max_durable_lag`` the run exits with 93; the line has the directory, the error and the lost iterations.

    Commits to memory do not count, and neither a restart nor a requeue continues the run.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    directory = str(disk.path / "checkpoints")
    with Cluster(
        script, directory, str(FOREVER), "6", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2
    ) as cluster:
        last_global = cluster.wait_for(lambda one: commits(one, "global"), timeout_s=300)
        assert last_global is not None
        disk.fail()
        cluster.wait_for(
            lambda one: commits(one, "memory") and (one.iteration or 0) > (last_global.iteration or 0) + 5, 300
        )
        os.kill(cluster.worker_pid(1), signal.SIGKILL)
        assert cluster.wait(timeout_s=300) == [93], cluster.tails()
        last_line = cluster.agent(0).output().strip().splitlines()[-1]
        completed = max(one.iteration or 0 for one in cluster.events() if one.kind == EventKind.SESSION_ENDED)
        durable = max(one.iteration or 0 for one in cluster.events() if commits(one, "global"))
    assert f"no checkpoint was committed to the global directory {directory} for" in last_line
    assert "max_durable_lag=6 s" in last_line
    assert "Read-only file system" in last_line
    assert f"is iteration {durable}: iterations {durable + 1} to {completed} are lost" in last_line
