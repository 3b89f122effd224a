"""A function that is restarted in process, on a real Slurm cluster of three nodes whose tasks ``srun`` starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import slurm_ranks
import torch
from slurm_cluster import NODES, SlurmCluster
from slurm_train import make_optimizer

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SCRIPT = """#!/usr/bin/env bash
#SBATCH --nodes=3 --ntasks-per-node=1 --no-kill --output={folder}/output
# The nodes of this cluster are names of Slurm's alone, which no resolver knows.
export MASTER_ADDR=127.0.0.1
# What a cluster may have as its defaults: KillOnBadExit=1 and WaitTime=1 in slurm.conf.
export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=1
srun --kill-on-bad-exit=0 --wait=0 --no-kill {python} {ranks} {folder} {then}; code=$?
echo "$code" > {folder}/code
if [ -e {folder}/finished ]; then code=0; fi
exit "$code"
"""


def ran(folder: Path, task: int) -> list[list[str]]:
    """Return the records of a task, one per iteration: call, iteration, rank, world size, process, node, place on
    it."""
    path = folder / f"task-{task}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def expected(world_sizes: list[int]) -> torch.Tensor:
    """Return the weights of a training with the given world size in each iteration."""
    weight = torch.nn.Parameter(torch.zeros(16))
    optimizer = make_optimizer(weight)
    for iteration, world_size in enumerate(world_sizes):
        weight.grad = slurm_ranks.mean_gradient(weight.detach(), iteration, world_size)
        optimizer.step()
    return weight.detach()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("then", ["spare", "shrink"])
def test_job_survives_a_killed_rank(slurm: SlurmCluster, tmp_path: Path, then: str) -> None:
    """When a rank is killed the others finish in their processes; srun's exit code is the killed rank's.

    A spare replaces it, or the world shrinks; the only rank of its node is lost, so the checkpoint is loaded. The
    job succeeds because the completion plug-in has recorded the end.
    """
    script = SCRIPT.format(folder=tmp_path, python=sys.executable, ranks=slurm_ranks.__file__, then=then)
    (tmp_path / "job.sbatch").write_text(script)
    job = slurm.call("sbatch", "--parsable", str(tmp_path / "job.sbatch"), cwd=tmp_path).strip()

    def output() -> str:
        path = tmp_path / "output"
        return path.read_text(errors="replace") if path.exists() else "no output"

    facts = slurm.wait_for_end(job, told=output)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), output()
    assert (tmp_path / "code").read_text() == "137\n", output()
    first, killed, last = (ran(tmp_path, task) for task in range(3))
    assert [int(line[1]) for line in killed] == list(range(slurm_ranks.FAULT_ITERATION)), output()
    assert {tuple(line[5:]) for line in first + killed + last} == {(node, "0", "1") for node in NODES}
    for survivor in (first, last):
        assert len({line[4] for line in survivor}) == 1, "it was started again"
    after = [line for line in first if line[0] == "1"]
    resumed = int(after[0][1])
    assert [int(line[1]) for line in after] == list(range(resumed, slurm_ranks.TOTAL))
    assert [line[:2] for line in last if line[0] == "1"] == [line[:2] for line in after]
    trained = torch.load(tmp_path / "trained", weights_only=True)
    assert [int(line[1]) for line in first if line[0] == "0"] == list(range(slurm_ranks.FAULT_ITERATION))
    assert resumed == 10, "it did not resume from what was saved"
    if then == "spare":
        assert torch.equal(trained, expected([2] * slurm_ranks.TOTAL))
    else:
        sizes = [3] * resumed + [2] * (slurm_ranks.TOTAL - resumed)
        assert torch.allclose(trained, expected(sizes), rtol=1e-4)
    assert {line[2] for line in after} == {"0"}
    assert {line[2] for line in last if line[0] == "1"} == {"1"}


WATCHED = """#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output={folder}/output
export MASTER_ADDR=127.0.0.1 OUTLAST_LOG_LEVEL=debug
srun --nodes=2 --ntasks=4 --overcommit {python} {ranks}
"""
RANK = """
import os, time
from pathlib import Path
from outlast.config import FaultToleranceConfig
from outlast.monitor import RankMonitor

monitor = RankMonitor(FaultToleranceConfig(rank_section_timeouts={"step": 600.0}))
Path(os.environ["SLURM_PROCID"]).touch()
while len(list(Path().glob("[0-9]"))) < 4:
    time.sleep(0.05)
monitor.close()
"""


@pytest.mark.slow
def test_tasks_of_a_node_share_an_agent_process(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Each node has one agent process for all its tasks, although Slurm starts each task alone; the step ends with
    the tasks."""
    (tmp_path / "rank.py").write_text(RANK)
    script = WATCHED.format(folder=tmp_path, python=sys.executable, ranks=tmp_path / "rank.py")
    (tmp_path / "job.sbatch").write_text(script)
    job = slurm.call("sbatch", "--parsable", str(tmp_path / "job.sbatch"), cwd=tmp_path).strip()
    facts = slurm.wait_for_end(job)
    text = (tmp_path / "output").read_text(errors="replace")
    assert facts["JobState"] == "COMPLETED", text
    found = re.findall(r"agent process (\d+) of node (\S+) watches rank (\d)", text)
    assert sorted(rank for _, _, rank in found) == ["0", "1", "2", "3"], text
    assert len({pid for pid, _, _ in found}) == len({node for _, node, _ in found}) == 2, text
