"""Train while the global directory rejects writes and the node-local tiers are ahead, under agents.

Run as a script to try random moments and print a table: ``python tests/faults/behind_tier.py [NUMBER]``.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from outlast.incidents import Event, EventKind
from outlast.testing import Cluster

SCRIPT = """
import sys, time
import torch
import outlast

folder, total, lag = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
checkpoint = outlast.CheckpointConfig(
    directory=folder,
    save_interval=5,
    non_persistent_save_interval=1,
    max_consecutive_save_failures=0,
    max_durable_lag=lag,
)
run = outlast.init(outlast.Config(checkpoint=checkpoint))
model = torch.nn.Linear(4, 4)
for iteration in run.steps({"model": model}, total=total):
    with torch.no_grad():
        model.weight += 1
    time.sleep(0.02)
"""
FOREVER = 10**9
_RESUME_POINT = re.compile(r"the next job resumes (from the start|from iteration (\d+))")


class ReadOnlyDisk:
    """A mounted file system that can be made read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self) -> None:
        """Make the file system read-only."""
        _run("mount", "-o", "remount,ro", os.fspath(self.path))

    def recover(self) -> None:
        """Make the file system writable."""
        _run("mount", "-o", "remount,rw", os.fspath(self.path))


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[ReadOnlyDisk]:
    """Mount a disk, and unmount it afterwards. Raises: OSError or CalledProcessError if mounting is not permitted."""
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "size=64m", "outlast-test", os.fspath(path))
    try:
        yield ReadOnlyDisk(path)
    finally:
        _run("umount", "-l", os.fspath(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The announced resume point of a job whose global directory was behind, and the checkpoint of the next start."""

    exit_code: int | None
    """Exit code of the agent; ``None`` if it was killed."""
    completed: int
    """Iterations that the job completed, by its journal."""
    announced: int
    """Announced resume iteration; 0 = from the start."""
    last_line: str
    loaded: int
    """Iteration that the next start loaded; 0 = none."""
    lost: int
    """Lost iterations in the report before the next start that are due to the end of the job, not to a restart."""


def end_behind(folder: Path, disk: ReadOnlyDisk, *, num_ahead: int, kills: bool, restarts: bool = False) -> Moment:
    """End a job whose global directory is behind, and start the run again.

    Args:
        folder: An empty one.
        disk: Holds the global directory.
        num_ahead: Commits to the node-local tiers after the directory stopped accepting data.
        kills: Whether everything gets SIGKILL; otherwise the agent gets SIGTERM.
        restarts: Whether the worker is killed before, so that the job continues from memory.
    """
    script, run_dir = folder / "train.py", folder / "run"
    script.write_text(SCRIPT)
    directory = str(disk.path / "checkpoints")

    def cluster(total: int) -> Cluster:
        return Cluster(script, directory, str(total), "0", run_dir=run_dir, num_nodes=1, nproc_per_node=1)

    with cluster(FOREVER) as first:
        last_global = first.wait_for(lambda one: commits(one, "global"), timeout_s=300)
        assert last_global is not None
        disk.fail()
        first.wait_for(
            lambda one: commits(one, "memory") and (one.iteration or 0) >= (last_global.iteration or 0) + num_ahead, 300
        )
        if restarts:
            os.kill(first.worker_pid(0), signal.SIGKILL)
            restored = first.wait_for(lambda one: one.kind == EventKind.RESTORED and one.cycle == 1, timeout_s=300)
            assert restored is not None
            first.wait_for(lambda one: commits(one, "memory") and (one.iteration or 0) > (restored.iteration or 0), 300)
        if kills:
            for process in first.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            first.assert_no_orphans(60)
            code = None
        else:
            first.agent(0).signal(signal.SIGTERM)
            (code,) = first.wait(timeout_s=300)
        last_line = first.agent(0).output().strip().splitlines()[-1]
        completed = max(one.iteration or 0 for one in first.events())
        jobs = {one.job for one in first.events()}
    status = _outlast("status", str(run_dir))
    durable = msgspec.json.decode(_outlast("status", str(run_dir), "--json"))["durability"]["job"] or 0
    report = msgspec.json.decode(_outlast("report", str(run_dir), "--json"))
    lost = report["lost_iterations"] - sum(one.get("lost_iterations") or 0 for one in report["incidents"])
    announcement = _RESUME_POINT.search(status if kills else last_line)
    assert announcement is not None, f"nothing is announced: {last_line}\n{status}"
    announced = int(announcement[2] or 0)
    assert announced == durable, f"the last line and the status differ: {last_line}\n{status}"
    disk.recover()
    with cluster(completed + 10) as second:
        assert second.wait(timeout_s=300) == [0], second.tails()
        loaded = [one.iteration for one in second.events() if one.kind == EventKind.RESTORED and one.job not in jobs]
    return Moment(
        exit_code=code,
        completed=completed,
        announced=announced,
        last_line=last_line,
        loaded=max(filter(None, loaded), default=0),
        lost=lost,
    )


def commits(event: Event, tier: str) -> bool:
    """Return whether an event reports a commit to a tier."""
    return event.kind == EventKind.SAVE_COMMITTED and tier in (event.data.get("tiers") or ())


def _outlast(*arguments: str) -> str:
    command = [sys.executable, "-m", "outlast", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def main(number: int) -> None:
    """Try random moments, alternately with SIGTERM and SIGKILL, and print a table."""
    rng, num_correct = random.Random(35), 0
    print("| moment | ended by | done | announced | loaded |\n| --- | --- | --- | --- | --- |")
    for trial in range(number):
        kills = trial % 2 == 1
        with tempfile.TemporaryDirectory() as folder, mounted(Path(folder) / "disk") as disk:
            moment = end_behind(Path(folder), disk, num_ahead=rng.randint(1, 40), kills=kills)
        num_correct += moment.announced == moment.loaded
        name = "SIGKILL" if kills else "SIGTERM"
        print(f"| {trial} | {name} | {moment.completed} | {moment.announced} | {moment.loaded} |", flush=True)
    print(f"{num_correct} of {number} as announced")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
