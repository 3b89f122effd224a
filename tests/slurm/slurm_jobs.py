"""Jobs for the tests: a real training under ``outlast run``, and jobs whose agents are lines of bash."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import slurm_train
from slurm_cluster import SlurmCluster

from outlast.testing.ranks import free_port

OUTLAST = Path(sys.executable).with_name("outlast")
TRAIN = Path(__file__).with_name("slurm_train.py")

STAND_IN = """#!/usr/bin/env bash
# Stands in for `outlast run` in the jobs that are about Slurm alone; all else is the real one.
[ "$1" = run ] || exec {outlast} "$@"
attempt="${{SLURM_RESTART_COUNT:-0}}"
echo "started $attempt on $SLURMD_NODENAME" >> "{told}"
{body}
"""


class Ran(NamedTuple):
    """An iteration that a rank ran."""

    start: int
    """The job's start, from 0."""
    cycle: int
    iteration: int
    node: str


class Job:
    """A job submitted with `outlast slurm submit`; its run directory is ``folder/run``."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *arguments: str) -> None:
        self.slurm, self.folder = slurm, folder
        options = ["--run-dir", str(folder / "run"), "--run-id", "try", *arguments]
        self.id = slurm.call(str(OUTLAST), "slurm", "submit", *options, cwd=folder).strip()

    def facts(self) -> dict[str, str]:
        """Return Slurm's record of the job."""
        return self.slurm.job(self.id)

    def nodes(self) -> list[str]:
        """Return the nodes of the job; the first one runs the batch script."""
        return self.slurm.call("scontrol", "show", "hostnames", self.facts()["NodeList"]).split()

    def wait_for_end(self) -> dict[str, str]:
        return self.slurm.wait_for_end(self.id, told=self.output)

    def output(self) -> str:
        """Return the output of the batch script and, with several nodes, of the agent of each node."""
        paths = sorted((self.folder / "run").glob(f"slurm-{self.id}*.log"))
        return "".join(path.read_text(errors="replace") for path in paths) or "no output"

    def remembered(self) -> dict[str, Any]:
        """Return the content of requeue.json, which the run's next job reads."""
        remembered: dict[str, Any] = json.loads((self.folder / "run" / "requeue.json").read_text())
        return remembered


class StandIn(Job):
    """A job whose agents are the given lines of bash."""

    def __init__(self, slurm: SlurmCluster, folder: Path, body: str, *options: str) -> None:
        program = folder / "outlast"
        program.write_text(STAND_IN.format(outlast=OUTLAST, told=folder / "told", body=body))
        program.chmod(0o755)
        (folder / "train.py").touch()
        super().__init__(slurm, folder, f"--outlast={shlex.quote(str(program))}", *options, "--", "train.py")

    def told(self) -> list[str]:
        """Return the lines that the starts of the job wrote."""
        return (self.folder / "told").read_text().splitlines()


class Training(Job):
    """A real training of two ranks under ``outlast run``."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *options: str,
        total: int,
        agent: tuple[str, ...] = (),
        script: tuple[str, ...] = (),
    ) -> None:
        self.total = total
        # The nodes of this cluster are names of Slurm's alone, which no resolver knows.
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        train = [endpoint, *agent, str(TRAIN), str(folder), f"--total={total}", *script]
        super().__init__(slurm, folder, *options, "--", *train)

    def ran(self, rank: int, start: int | None = None) -> list[Ran]:
        """Return the iterations of a rank, in all starts of the job or in one."""
        path = self.folder / f"rank-{rank}"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        ran = [Ran(int(one[0]), int(one[1]), int(one[2]), one[3]) for one in words if len(one) == 4]
        return [one for one in ran if start in (None, one.start)]

    def iterations(self, start: int, rank: int = 0) -> list[int]:
        return [one.iteration for one in self.ran(rank, start)]

    def wait_for(self, start: int, iteration: int) -> None:
        """Wait until a start of the job has run an iteration and a checkpoint exists."""

        def is_there() -> bool:
            has_saved = any(self.folder.glob("checkpoints/step-*/manifest.json"))
            return has_saved and max(self.iterations(start), default=-1) >= iteration

        self.slurm.wait_until(is_there, 180, self.output)

    def assert_finished_as_undisturbed(self) -> None:
        """Assert that the job succeeded, with the weights of an undisturbed run."""
        facts = self.wait_for_end()
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), self.output()
        assert (self.folder / "digest").read_text() == slurm_train.undisturbed(self.total), "trained something else"
