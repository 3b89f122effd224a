"""A full file system of the run directory costs records, never the training."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.extended]

TRAINING = """
import os, pathlib, sys, time
import torch
import outlast
from outlast.config import CheckpointConfig, Config

checkpoints, end = map(pathlib.Path, sys.argv[1:])
cycle, model = os.environ["OUTLAST_CYCLE"], torch.nn.Linear(2, 2)
run = outlast.init(Config(checkpoint=CheckpointConfig(directory=str(checkpoints), save_interval=5)))
if os.environ["RANK"] == "1":
    end.with_name(f"pid-{cycle}").write_text(str(os.getpid()))
deadline = time.monotonic() + 280
for iteration in run.steps({"model": model}, total=1_000_000):
    for attempt in run.attempts():
        attempt.validate(model(torch.ones(1, 2)).sum())
    with (end.parent / f"iterations-{cycle}").open("a") as file:
        print(iteration, file=file)
    print("x" * 1000, flush=True)
    time.sleep(0.02)
    assert time.monotonic() < deadline
    if end.exists():
        sys.exit(0)
"""
NUM_BYTES = 1200 << 20
"""More than the health check of a joining agent requires; the image is sparse."""


class SmallDisk:
    """A mounted ext4 file system of ``NUM_BYTES`` in an image."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def use_up_bytes(self) -> None:
        """Fill the disk to the last block."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            for shift in range(30, -1, -1):
                try:
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, 1 << shift)
                except OSError:
                    continue

    def use_up_files(self) -> None:
        """Create files until no inode is left."""
        folder = self.path / "fillers"
        folder.mkdir()
        try:
            for number in itertools.count():
                (folder / str(number)).touch()
        except OSError:
            return

    def make_room(self) -> None:
        """Free all blocks and inodes that were used up."""
        _run("rm", "-rf", *map(os.fspath, self.path.glob("filler*")))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A small disk; the test is skipped where mounting is not permitted."""
    image, path = tmp_path / "image", tmp_path / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(NUM_BYTES)
    try:
        _run("mkfs.ext4", "-q", "-F", "-N", "256", os.fspath(image))
        _run("mount", "-o", "loop", os.fspath(image), os.fspath(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this test mounts a small ext4 image, which is not permitted here: {error}")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "-l", os.fspath(path))


def wait_for_iteration(cluster: Cluster, folder: Path, *, cycle: int, least: int = 12) -> int:
    """Return the iteration of a cycle once it is reached; the script writes it outside the full disk."""
    path = folder / f"iterations-{cycle}"
    deadline = time.monotonic() + 280
    while (before := max(map(int, path.read_text().split()), default=0) if path.exists() else 0) < least:
        assert time.monotonic() < deadline, cluster.tails()
        assert cluster.agent(0).running, cluster.tails()
        time.sleep(0.02)
    return before


@pytest.mark.slow
@pytest.mark.parametrize("resource", ["bytes", "files"])
def test_a_full_run_directory_costs_no_restart(resource: str, disk: SmallDisk, tmp_path: Path) -> None:
    """Without space or inodes a worker's death costs one restart, as always. Each kind of file that cannot be written
    is logged once with its path, and with the number of losses once it can be written again."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    (disk.path / "run").mkdir()
    (tmp_path / "agents").mkdir()
    (disk.path / "run" / "agents").symlink_to(tmp_path / "agents")  # the agent's own log stays on another disk
    with Cluster(
        script,
        *(str(tmp_path / "checkpoints"), str(tmp_path / "end")),
        run_dir=disk.path / "run",
        num_nodes=1,
        options=["--redirects=3", "--max-restarts=3"],
    ) as cluster:
        wait_for_iteration(cluster, tmp_path, cycle=0)
        disk.use_up_bytes() if resource == "bytes" else disk.use_up_files()
        os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGKILL)
        wait_for_iteration(cluster, tmp_path, cycle=1, least=30)
        lines = cluster.agent(0).output().splitlines()
        for text in ("reports of failed workers", "log files of the workers", "decisions of the recovery policy"):
            (line,) = (line for line in lines if f"{text} cannot be written" in line)
            assert f"to {disk.path}/run/" in line
            assert "No space left on device" in line
        assert "(restart 1 of 3 without progress)" in cluster.agent(0).output()
        disk.make_room()
        cluster.wait_for("decisions of the recovery policy are written", timeout_s=200)
        assert (disk.path / "run" / "ladder.json").exists()
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        before = wait_for_iteration(cluster, tmp_path, cycle=2)
        disk.use_up_bytes()
        wait_for_iteration(cluster, tmp_path, cycle=2, least=before + 40)  # print() to a full disk ends none
        disk.make_room()
        wait_for_iteration(cluster, tmp_path, cycle=2, least=before + 80)
        (tmp_path / "end").touch()
        assert cluster.wait(timeout_s=200) == [0], cluster.tails()
        output = cluster.agent(0).output()
        assert re.search(r"log files of the workers are written to \S+ again; 1 write failed", output)
        assert re.search(r"reports of failed workers are written to \S+ again; \d+ writes? failed", output)
        (printed,) = (disk.path / "run" / "logs").glob("*/attempt_2/0/stdout.log")
        assert re.search(
            r"^outlast: the disk was full; \d+ writes of output were dropped$", printed.read_text(), re.MULTILINE
        )
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} >= {0, 2}


WAITS = """
import os, pathlib, sys, time
from outlast.monitor import RankMonitor

folder, cycle = pathlib.Path(sys.argv[1]), os.environ["OUTLAST_CYCLE"]
monitor = RankMonitor()
with monitor.section("step"):
    pass
(folder / f"pid-{cycle}-{os.environ['RANK']}").write_text(f"{os.environ['OUTLAST_NODE']} {os.getpid()}")
deadline = time.monotonic() + 900
while not (folder / "end").exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def wait_for_pids(cluster: Cluster, folder: Path, *, cycle: int) -> dict[str, int]:
    """Return the process ids of a cycle's two ranks by node, once both run."""
    deadline = time.monotonic() + 280
    while True:
        texts = [path.read_text().split() for path in folder.glob(f"pid-{cycle}-*")]
        if len(texts) == 2 and all(map(len, texts)):
            return {node: int(pid) for node, pid in texts}
        assert time.monotonic() < deadline, cluster.tails()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_takeover_on_a_full_disk_counts_used_restarts(disk: SmallDisk, tmp_path: Path) -> None:
    """After a restart with a full run directory and the loss of the coordinator's node, the new coordinator counts the
    restart, although no file has it, and the spent budget ends the job."""
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    (disk.path / "run").mkdir()
    (tmp_path / "agents").mkdir()
    (disk.path / "run" / "agents").symlink_to(tmp_path / "agents")
    with Cluster(
        *(script, str(tmp_path)),
        run_dir=disk.path / "run",
        num_nodes=2,
        num_spares=1,
        num_started=0,
        nproc_per_node=1,
        options=["--max-restarts=2", "--no-health-check"],
    ) as cluster:
        host = cluster.add_node("host")
        cluster.wait_for("hosts the coordinator", timeout_s=280)
        others = [cluster.add_node("other")]
        pids = wait_for_pids(cluster, tmp_path, cycle=0)
        others.append(cluster.add_node("spare"))
        cluster.wait_for("node spare waits", timeout_s=280)
        disk.use_up_bytes()
        os.kill(pids["other"], signal.SIGKILL)
        assert "host" in wait_for_pids(cluster, tmp_path, cycle=1)
        assert "decisions of the recovery policy cannot be written" in host.output()
        assert "(restart 1 of 2)" in host.output()
        host.kill()
        pids = wait_for_pids(cluster, tmp_path, cycle=2)
        assert pids.keys() == {"other", "spare"}
        assert any("(restart 2 of 2)" in agent.output() for agent in others), cluster.tails()
        os.kill(pids["other"], signal.SIGKILL)
        for agent in others:
            assert agent.wait(280) == ExitReason.FAILED
            assert "all 2 restarts are used" in agent.output()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)
