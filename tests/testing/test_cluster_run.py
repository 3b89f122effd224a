"""The test cluster with the real launcher: faults, recovery and the restart budget."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outlast.chaos import Fault, FaultPlan, verify_fired
from outlast.errors import ConfigError, ExitReason
from outlast.incidents import Event, EventKind
from outlast.testing import Cluster

pytestmark = pytest.mark.process

WAITS_FOR_LEAVE = """
import os, pathlib, sys, time
print("start of rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
deadline = time.monotonic() + 250
while not pathlib.Path(sys.argv[1]).exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def write(folder: Path, code: str) -> Path:
    script = folder / "train.py"
    script.write_text(code)
    return script


def started_ranks(cluster: Cluster, cycle: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return, for each node, the ranks that it started in a cycle, and the world size."""
    return {
        event.node: (tuple(event.data["ranks"]), event.data["world_size"])
        for event in cluster.events()
        if event.kind == EventKind.CYCLE_STARTED and event.cycle == cycle
    }


def wait_for_cycle(cluster: Cluster, cycle: int, num_nodes: int) -> None:
    """Wait until every node that runs ranks has started its workers."""

    def is_last_start(event: Event) -> bool:
        is_start = event.kind == EventKind.CYCLE_STARTED and event.cycle == cycle
        return is_start and len(started_ranks(cluster, cycle)) == num_nodes

    cluster.wait_for(is_last_start, timeout_s=300)


@pytest.mark.slow
def test_ranks_restart_on_their_nodes_after_a_kill(tmp_path: Path) -> None:
    """After a SIGKILL of one rank all ranks restart on their previous nodes, and the run finishes."""
    go_file = tmp_path / "leave"
    script = write(tmp_path, WAITS_FOR_LEAVE)
    with Cluster(script, str(go_file), run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=2) as cluster:
        wait_for_cycle(cluster, 0, 2)
        before = started_ranks(cluster, 0)
        os.kill(cluster.worker_pid(3), signal.SIGKILL)
        wait_for_cycle(cluster, 1, 2)
        go_file.touch()
        assert cluster.wait(timeout_s=300) == [0, 0]
        assert started_ranks(cluster, 1) == before
        incidents = [event.data["incident"] for event in cluster.events() if event.kind == EventKind.INCIDENT]
        assert [(found["kind"], found["rank"]) for found in incidents] == [("worker_died", 3)]


@pytest.mark.slow
def test_spare_replaces_a_killed_agent_without_orphans(tmp_path: Path) -> None:
    """The workers of a SIGKILLed agent end, the spare takes its ranks, and the other ranks keep their nodes."""
    go_file = tmp_path / "leave"
    script = write(tmp_path, WAITS_FOR_LEAVE)
    with Cluster(
        script, str(go_file), run_dir=tmp_path / "run", num_nodes=2, num_spares=1, nproc_per_node=1
    ) as cluster:
        wait_for_cycle(cluster, 0, 2)
        before = started_ranks(cluster, 0)
        host = next(agent.name for agent in cluster.agents if "hosts the coordinator" in agent.output())
        lost = next(name for name in before if name != host)
        cluster.agent(lost).kill()
        cluster.assert_no_orphans(within_s=60)
        wait_for_cycle(cluster, 1, 2)
        after = started_ranks(cluster, 1)
        go_file.touch()
        codes = dict(zip((agent.name for agent in cluster.agents), cluster.wait(timeout_s=300), strict=True))
        assert codes.pop(lost) == -signal.SIGKILL
        assert set(codes.values()) == {0}
        assert lost not in after
        assert sorted(after.values()) == sorted(before.values())
        if host in before:
            assert after[host] == before[host]


def test_crashing_plain_script_gets_torchruns_restart_budget(tmp_path: Path) -> None:
    """A script without a session that crashes in every cycle gets 4 starts and torchrun's exit code."""
    script = write(tmp_path, "print('one more start', flush=True); raise SystemExit(5)")
    options = ["--max-restarts=3"]
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(timeout_s=300) == [ExitReason.FAILED]
        assert cluster.agent(0).output().splitlines().count("one more start") == 4
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {
            0,
            1,
            2,
            3,
        }


TRAINS = """
import sys, time
from pathlib import Path
import torch
import outlast

folder = sys.argv[1]
saves = outlast.CheckpointConfig(directory=folder + "/global", local_directory=folder + "/local", save_interval=5)
run = outlast.init(outlast.Config(checkpoint=saves))
model = torch.nn.Linear(4, 4)
for iteration in run.steps({"model": model}, total=400):
    if Path(folder, "enough").exists():
        break
    time.sleep(0.05)
"""


@pytest.mark.extended
@pytest.mark.slow
def test_supervised_cluster_replaces_nodes_and_preempted_jobs(tmp_path: Path) -> None:
    """Each requested fault is injected once, when the test requests it; a lost node and a preempted job are
    replaced, and the run finishes."""
    lost = Fault(kind="lose_node", on_request=True)
    preempted = Fault(kind="sigterm", rank=0, on_request=True)
    plan = FaultPlan(seed=1, faults=(lost, preempted))
    script, pending = write(tmp_path, TRAINS), [lost, preempted]
    with Cluster(
        script, str(tmp_path), run_dir=tmp_path / "run", num_spares=1, nproc_per_node=1, fault_plan=plan
    ) as cluster:
        with pytest.raises(ConfigError, match="not a fault of the plan with on_request=True"):
            cluster.inject(Fault(kind="kill", rank=0, on_request=True))
        for fault in cluster.supervise(timeout_s=300):
            assert fault is None, "none is due by itself"
            assert cluster.exit_code is None or not pending
            if pending and cluster.inject(pending[0]):
                pending.pop(0)
            elif not pending and cluster.num_jobs == 2:
                (tmp_path / "enough").touch()
        assert cluster.exit_code == 0
        cluster.assert_no_orphans(within_s=10)
        events = cluster.events()
    assert verify_fired(plan, tmp_path / "run") == []
    assert len(cluster.agents) == 7, "three, a replacement for the lost one, and three of the second job"
    codes = [event.data["exit_code"] for event in events if event.kind == EventKind.JOB_ENDED]
    assert set(codes) == {75, 0}


def test_injection_without_a_fault_plan_is_rejected(tmp_path: Path) -> None:
    """The error contains the missing argument."""
    cluster = Cluster(tmp_path / "train.py", run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="give it fault_plan="):
        cluster.inject(Fault(kind="kill", rank=0, on_request=True))
