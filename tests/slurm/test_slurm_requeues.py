"""Jobs that end on a real Slurm cluster: which are requeued, how often, and on which nodes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_jobs import StandIn

from outlast.env import expand_nodes

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def num_starts(job: StandIn) -> int:
    return len([line for line in job.told() if line.startswith("started ")])


@pytest.mark.extended
@pytest.mark.slow
def test_crash_loop_ends(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job that fails each time is requeued as often as allowed, and then fails; a shutdown request does not count."""
    body = '[ "$attempt" = 1 ] && exit 75; exit 1'
    job = StandIn(slurm, tmp_path, body, "--num-job-retries-on-failure=2")
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "1:0")
    assert num_starts(job) == 4, job.output()
    assert "all 2 retries are used" in job.output()
    assert job.remembered()["failures"] == 2


def test_cancelled_job_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`scancel` stops a run: its steps get SIGTERM, and the job is not requeued."""
    body = f"""
trap 'echo "told to leave" >> {tmp_path}/told; exit 75' TERM
touch {tmp_path}/ready
for _ in {{1..900}}; do sleep 0.1; done
"""
    job = StandIn(slurm, tmp_path, body)
    slurm.wait_until((tmp_path / "ready").exists, 60, job.output)
    slurm.call("scancel", job.id)
    slurm.wait_until(lambda: job.id not in slurm.call("squeue", "--noheader", "--format=%i").split(), 60, job.output)
    facts = job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.output()
    assert job.told()[1:] == ["told to leave"]


@pytest.mark.parametrize(("exit_code", "state"), [(0, "COMPLETED"), (17, "FAILED"), (93, "FAILED")])
def test_finished_or_hopeless_job_is_not_requeued(
    slurm: SlurmCluster, tmp_path: Path, exit_code: int, state: str
) -> None:
    """A finished run, an invalid result and a used-up budget end the job after one start, with the same exit code."""
    job = StandIn(slurm, tmp_path, f"exit {exit_code}", "--num-job-retries-on-failure=5")
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == (state, f"{exit_code}:0", "0"), job.output()
    assert num_starts(job) == 1
    assert "is not re-queued" in job.output()


@pytest.mark.extended
@pytest.mark.slow
def test_quarantined_node_is_excluded(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A quarantined node is excluded from the run's later jobs, requeued or submitted."""
    recovery_state = tmp_path / "run" / "ladder.json"
    body = f"""
if [ "$attempt" = 0 ] && [ ! -e {tmp_path}/again ]; then
  echo '{{"quarantined": ["'$SLURMD_NODENAME'"]}}' > {recovery_state}
  touch {tmp_path}/again
  exit 18
fi
"""
    job = StandIn(slurm, tmp_path, body)
    facts = job.wait_for_end()
    assert facts["JobState"] == "COMPLETED", job.output()
    first, second = (line.split(" on ")[1] for line in job.told())
    assert first != second
    assert facts["ExcNodeList"] == first
    assert job.remembered()["failures"] == 1, "a node that is bad is charged"

    later = StandIn(slurm, tmp_path, body)
    assert later.wait_for_end()["ExcNodeList"] == first
    assert later.told()[2].split(" on ")[1] != first
    assert later.remembered()["excluded"] == [first]


@pytest.mark.parametrize(
    ("options", "facts", "per_node"),
    [
        (("--nodes=3", "--ntasks-per-node=2"), "3 2 (2, 2, 2)", 2),  # 2(x3)
        (("--nodes=3", "--ntasks=5"), "3 3 (3, 1, 1)", 3),  # 3,1(x2)
    ],
)
def test_job_info_matches_slurm(
    slurm: SlurmCluster, tmp_path: Path, options: tuple[str, ...], facts: str, per_node: int
) -> None:
    """Slurm's variables are parsed in the forms of this Slurm version; the job is logged once."""
    code = (
        "import logging, sys; logging.basicConfig(level=20, stream=sys.stdout, format='%(message)s');"
        "from outlast import env; from outlast.integrations.slurm import log_job_info; info = log_job_info();"
        "print('info', info.num_nodes, info.ntasks_per_node, info.tasks_per_node, *info.nodes, info.restart_count);"
        "place = env.read_worker(); print('on', place.node, place.local_world_size, place.launcher)"
    )
    lines = slurm.call("srun", "--job-name=who", *options, sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert {line for line in lines if line.startswith("info")} == {f"info {facts} n1 n2 n3 0"}
    counts = [int(one) for one in re.findall(r"\d+", facts)[2:]]
    on = [line for line in lines if line.startswith("on ")]
    assert sorted(on) == [f"on n{node + 1} {count} srun" for node, count in enumerate(counts) for _ in range(count)]
    (logged,) = [line for line in lines if line.startswith("Slurm job")]
    expected = rf"Slurm job \d+ 'who': 3 nodes \(n\[1-3\]\), {per_node} tasks each, partition main"
    assert re.fullmatch(expected, logged), logged


@pytest.mark.parametrize("text", ["gpu[07-09,12],login1", "gpu[098-101]", "rack[1-2]n[01-02]", "n1,a-b[3,5-6]"])
def test_node_lists_are_expanded_like_in_slurm(slurm: SlurmCluster, text: str) -> None:
    """A node list is expanded as `scontrol show hostnames` does."""
    assert list(expand_nodes(text)) == slurm.call("scontrol", "show", "hostnames", text).split()


def test_batch_shell_is_not_a_rank(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A program in the batch script waits for no other rank, although Slurm counts it as the first of many tasks."""
    code = "from outlast import env; place = env.read_worker(); print(place.launcher, place.world_size, place.node)"
    out = tmp_path / "out"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{sys.executable} -c '{code}'\n")
    slurm.call("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={out}", str(tmp_path / "job.sh"))
    assert out.read_text().split() == ["python", "1", "n1"]


def test_each_node_writes_its_own_output(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With options for srun, two nodes and a space in the path of a new run directory, each node's agent gets the
    options, and writes to its own file."""
    folder = tmp_path / "a b"
    folder.mkdir()
    body = 'echo "$SLURMD_NODENAME: $*"; echo "$SLURMD_NODENAME: error" >&2'
    options = ["--nodes=2", "--cpus-per-task=1", "--srun=--label", "--srun=--mpi=none", "--srun=--chdir=/"]
    job = StandIn(slurm, folder, body + "; pwd", *options, "--setup=export OUTLAST_TEST=1")
    assert job.wait_for_end()["JobState"] == "COMPLETED", job.output()
    files = sorted((folder / "run").glob(f"slurm-{job.id}-*.log"))
    assert [file.name.split("-")[2] for file in files] == ["0", "1"], job.output()
    for rank, (file, node) in enumerate(zip(files, job.nodes(), strict=True)):
        lines = file.read_text().splitlines()
        assert sorted(lines)[0].startswith(f"{rank}: /")
        assert {line.split()[1] for line in lines} == {f"{node}:", "/"}, "the lines of two nodes are mixed"
        assert f"--run-dir={folder}/run " in file.read_text()
    assert "is not re-queued" in (folder / "run" / f"slurm-{job.id}.log").read_text()


def test_failing_setup_command_ends_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The first setup command that fails ends the job with exit code 2 and a line with that command; no agent
    starts."""
    setup = ["--setup=export A=1", "--setup=cd /nowhere # not there", f"--setup=touch {tmp_path}/later"]
    job = StandIn(slurm, tmp_path, "exit 0", *setup, "--num-job-retries-on-failure=5")
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), job.output()
    expected_line = "outlast: the setup command failed with exit code 1, and the job ends: cd /nowhere # not there\n"
    assert expected_line in job.output()
    assert not (tmp_path / "told").exists()
    assert not (tmp_path / "later").exists()
