"""Jobs on a real Slurm of three nodes: told to leave, re-queued, out of time, robbed of a node, crashing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, free_ports, run_slurm

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

OUTLAST = Path(sys.executable).with_name("outlast")

TRAIN = """
import os, time
import torch
import outlast
from outlast.config import CheckpointConfig

weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.5)
run = outlast.init(outlast.Config(checkpoint=CheckpointConfig(directory={checkpoints!r}, save_interval=10)))
for iteration in run.steps({{"weight": weight, "optimizer": optimizer}}, total={total}):
    (weight.sum() - 1).square().backward()
    optimizer.step()
    optimizer.zero_grad()
    if run.global_rank == 0:
        with open({seen!r}, "a") as file:
            print(os.environ.get("SLURM_RESTART_COUNT", "0"), iteration, file=file)
    time.sleep(0.05)
"""

STAND_IN = """#!/usr/bin/env bash
# Stands in for `outlast run` in the jobs that are about Slurm alone; all else is the real one.
[ "$1" = run ] || exec {outlast} "$@"
attempt="${{SLURM_RESTART_COUNT:-0}}"
echo "started $attempt on $SLURMD_NODENAME" >> {told}
{body}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with run_slurm() as cluster:
        yield cluster


def submit(slurm: SlurmCluster, folder: Path, *options: str, script: Path) -> str:
    """Submit a job with the tool; its run directory is ``folder/run``."""
    arguments = ["--run-dir", str(folder / "run"), "--nproc-per-node=1", *options]
    return slurm.call(str(OUTLAST), "slurm", "submit", *arguments, "--", str(script), cwd=folder).strip()


def submit_stand_in(slurm: SlurmCluster, folder: Path, body: str, *options: str) -> str:
    """Submit a job whose agents are the given lines of bash."""
    program = folder / "outlast"
    program.write_text(STAND_IN.format(outlast=OUTLAST, told=folder / "told", body=body))
    program.chmod(0o755)
    script = folder / "train.py"
    script.touch()
    return submit(slurm, folder, f"--outlast={program}", *options, script=script)


def told(folder: Path) -> list[str]:
    path = folder / "told"
    return path.read_text().splitlines() if path.exists() else []


def output(folder: Path, job_id: str) -> str:
    return (folder / "run" / f"slurm-{job_id}.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def limited(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job that outlasts its time limit, begun before the other tests: Slurm counts limits in minutes."""
    folder = tmp_path_factory.mktemp("limited")
    body = """
[ "$attempt" = 0 ] || exit 0
trap 'echo "told to leave $attempt" >> %s; exit 75' TERM
for _ in {1..900}; do sleep 0.1; done
"""
    return folder, submit_stand_in(slurm, folder, body % (folder / "told"), "--time=1", "--preempt-time=50")


class Training:
    """A real training under ``outlast run``, submitted as a job."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *options: str, total: int = 150) -> None:
        self.slurm, self.folder, self.total = slurm, folder, total
        self.seen = folder / "seen"
        script = folder / "train.py"
        checkpoints = str(folder / "checkpoints")
        script.write_text(TRAIN.format(checkpoints=checkpoints, total=total, seen=str(self.seen)))
        port = free_ports(1)[0]
        arguments = ["--run-dir", str(folder / "run"), "--nproc-per-node=1", *options]
        # The nodes of this cluster are names of Slurm's alone, which no resolver knows.
        command = ["--", f"--rdzv-endpoint=127.0.0.1:{port}", str(script)]
        self.job_id = slurm.call(str(OUTLAST), "slurm", "submit", *arguments, *command, cwd=folder).strip()

    def iterations(self, attempt: int) -> list[int]:
        """Return the iterations that one start of the job has run, as rank 0 saw them."""
        lines = self.seen.read_text().splitlines() if self.seen.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(f"{attempt} ") and len(line.split()) == 2]

    def wait_for(self, attempt: int, iteration: int) -> None:
        self.slurm.wait_until(
            lambda: max(self.iterations(attempt), default=-1) >= iteration, 90, lambda: output(self.folder, self.job_id)
        )

    def trainers(self) -> list[str]:
        """Return the nodes that have workers."""
        journals = "".join(path.read_text() for path in (self.folder / "run" / "journal").iterdir())
        events = [json.loads(line) for line in journals.splitlines()]
        return sorted(event["node"] for event in events if event["kind"] == "cycle_started")

    def nodes(self) -> list[str]:
        """Return the job's nodes."""
        return self.slurm.call("scontrol", "show", "hostnames", self.slurm.job(self.job_id)["NodeList"]).split()

    def output(self) -> str:
        return output(self.folder, self.job_id)


def test_job_told_to_leave_and_job_requeued_by_hand_resume_and_finish(
    slurm: SlurmCluster, limited: tuple[Path, str], tmp_path: Path
) -> None:
    """After `scancel --signal=TERM` and `scontrol requeue` a run goes on from what it saved, and once done stays so."""
    training = Training(slurm, tmp_path, "--nodes=2")
    training.wait_for(0, 15)
    slurm.call("scancel", "--signal=TERM", training.job_id)
    training.wait_for(1, 30)
    assert "state saved" in training.output()
    left_at = training.iterations(0)[-1]
    assert training.iterations(1)[0] == left_at + 1, "it lost or repeated iterations"

    slurm.call("scontrol", "requeue", training.job_id)
    job = slurm.wait_for_end(training.job_id)
    assert job["JobState"] == "COMPLETED", training.output()
    assert job["Restarts"] == "2", "a finished run was re-queued"
    assert 0 < training.iterations(2)[0] <= training.iterations(1)[-1] + 1
    assert training.iterations(2)[-1] == training.total - 1
    assert "is not re-queued: the run is finished" in training.output()


def test_lost_node_costs_one_requeue_onto_others(tmp_path: Path) -> None:
    """When a node dies, Slurm starts the job on other nodes, and the run resumes from what was saved and finishes."""
    with run_slurm() as slurm:
        training = Training(slurm, tmp_path, "--nodes=2", total=100)
        training.wait_for(0, 15)
        first = training.nodes()
        slurm.power_off(first[1])
        job = slurm.wait_for_end(training.job_id)
        assert job["JobState"] == "COMPLETED", training.output()
        assert first[1] not in training.nodes(), training.output() + slurm.log()
    assert training.iterations(1)[0] >= 10, "it began anew"
    assert training.iterations(1)[-1] == training.total - 1


def test_spare_takes_a_lost_nodes_slot_without_a_requeue(tmp_path: Path) -> None:
    """With a spare node in the job, the loss of a node costs no re-queue: the spare takes its slot."""
    with run_slurm() as slurm:
        training = Training(slurm, tmp_path, "--nodes=2", "--spares=1", total=100)
        training.wait_for(0, 15)
        head = training.nodes()[0]  # runs the batch script, without which Slurm has no job
        slurm.power_off(next(node for node in training.trainers() if node != head))
        job = slurm.wait_for_end(training.job_id)
    assert job["JobState"] == "COMPLETED", training.output()
    assert job["Restarts"] == "0", training.output()
    assert training.iterations(0)[-1] == training.total - 1


def test_time_limit_is_announced_and_the_job_goes_on(slurm: SlurmCluster, limited: tuple[Path, str]) -> None:
    """Before its time limit the job's steps are told to leave; it is re-queued, and not again once it has finished."""
    folder, job_id = limited
    job = slurm.wait_for_end(job_id)
    assert job["JobState"] == "COMPLETED", output(folder, job_id)
    assert job["Restarts"] == "1"
    assert [line.split(" on ")[0] for line in told(folder)] == ["started 0", "told to leave 0", "started 1"]


def test_crash_loop_ends(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job that fails each time is re-queued as often as allowed, and then fails."""
    job_id = submit_stand_in(slurm, tmp_path, "exit 1", "--num-job-retries-on-failure=2")
    job = slurm.wait_for_end(job_id)
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] == "1:0"
    assert [line.split(" on ")[0] for line in told(tmp_path)] == ["started 0", "started 1", "started 2"]
    assert "all 2 retries are used" in output(tmp_path, job_id)


def test_quarantined_node_is_excluded(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A node that the run's ladder quarantined gets none of its later jobs, re-queued or submitted."""
    ladder = tmp_path / "run" / "ladder.json"
    body = f"""
if [ "$attempt" = 0 ] && [ ! -e {tmp_path}/again ]; then
  echo '{{"quarantined": ["'$SLURMD_NODENAME'"]}}' > {ladder}
  touch {tmp_path}/again
  exit 75
fi
"""
    job_id = submit_stand_in(slurm, tmp_path, body)
    job = slurm.wait_for_end(job_id)
    assert job["JobState"] == "COMPLETED", output(tmp_path, job_id)
    first, second = (line.split(" on ")[1] for line in told(tmp_path))
    assert first != second
    assert job["ExcNodeList"] == first

    later = submit_stand_in(slurm, tmp_path, body)
    assert slurm.wait_for_end(later)["ExcNodeList"] == first
    assert told(tmp_path)[2].split(" on ")[1] != first
    assert json.loads((tmp_path / "run" / "requeue.json").read_text())["excluded"] == [first]


@pytest.mark.parametrize(
    ("options", "facts", "per_node"),
    [
        (("--nodes=3", "--ntasks-per-node=2"), "3 2 (2, 2, 2)", 2),  # 2(x3)
        (("--nodes=3", "--ntasks=5"), "3 3 (3, 1, 1)", 3),  # 3,1(x2)
    ],
)
def test_what_a_job_knows_of_itself(
    slurm: SlurmCluster, tmp_path: Path, options: tuple[str, ...], facts: str, per_node: int
) -> None:
    """Slurm's own variables, in the forms that this Slurm gives them, are understood; the job is logged once."""
    code = (
        "import logging, sys; logging.basicConfig(level=20, stream=sys.stdout, format='%(message)s');"
        "from outlast.integrations.slurm import log_job_info; info = log_job_info();"
        "print('info', info.num_nodes, info.ntasks_per_node, info.tasks_per_node, *info.nodes, info.restart_count)"
    )
    lines = slurm.call("srun", "--job-name=who", *options, sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert {line for line in lines if line.startswith("info")} == {f"info {facts} n1 n2 n3 0"}
    (logged,) = [line for line in lines if line.startswith("Slurm job")]
    expected = rf"Slurm job \d+ 'who': 3 nodes \(n\[1-3\]\), {per_node} tasks each, partition main"
    assert re.fullmatch(expected, logged), logged
