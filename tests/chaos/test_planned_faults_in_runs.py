"""Plans in real runs: injected once per run, bound to a device or a section, and reported if not injected."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.chaos import Fault, FaultPlan, verify_fired
from outlast.incidents import Event, EventKind
from outlast.testing import Cluster

pytestmark = pytest.mark.extended

SCRIPT = """
import sys
import time
from pathlib import Path
import torch
import outlast

folder, waits_in_cycle = sys.argv[1], int(sys.argv[2])
run = outlast.init(folder + "/outlast.toml")
cycle = outlast.env.read_worker().cycle
model = torch.nn.Linear(2, 2, bias=False)
with torch.no_grad():
    model.weight.fill_(1.0)
for iteration in run.steps({"model": model}, total=6):
    while cycle == waits_in_cycle and iteration == 3:
        time.sleep(0.05)  # until the test kills this node
    with torch.no_grad():
        model.weight += 1
print(f"rank {run.global_rank} ends with {model.weight.tolist()}", flush=True)
"""
CONFIG = """
fault_plan = "{folder}/plan.toml"
[checkpoint]
directory = "{folder}/ckpt"
save_interval = 2
async_save = false
"""


def _write(folder: Path, plan: FaultPlan) -> Path:
    (folder / "plan.toml").write_text(plan.to_toml())
    (folder / "outlast.toml").write_text(CONFIG.format(folder=folder))
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def _strikes(cluster: Cluster) -> list[Event]:
    return [event for event in cluster.events() if event.kind == EventKind.FAULT_SIMULATED]


@pytest.mark.slow
@pytest.mark.process
def test_process_faults_are_injected_once_per_run(tmp_path: Path) -> None:
    """A drawn rank is killed and another raises in a section: each fault is injected once, and the result is unchanged.

    A fault for an iteration that the run does not reach is reported as not injected.
    """
    plan = FaultPlan(
        seed=5,
        faults=[
            Fault(kind="kill", iteration=3),
            Fault(kind="exception", rank=1, iteration=4, section="checkpointing"),
            Fault(kind="sleep", rank=0, iteration=5, section="step", duration_s=0.01),
            Fault(kind="stop", rank=0, iteration=60),
        ],
    )
    run_dir = tmp_path / "run"
    script = _write(tmp_path, plan)
    with Cluster(script, str(tmp_path), "-1", run_dir=run_dir, num_nodes=1) as cluster:
        assert cluster.wait(timeout_s=300) == [0], cluster.tails()
        injected = {(event.data["fault"], event.iteration, event.cycle) for event in _strikes(cluster)}
        assert injected == {("kill", 3, 0), ("exception", 4, 1), ("sleep", 5, 2)}
        assert cluster.agents[0].output().count("ends with [[7.0, 7.0], [7.0, 7.0]]") == 2
    assert [missing.index for missing in verify_fired(plan, run_dir)] == [3]
    assert verify_fired(FaultPlan(seed=5, faults=plan.faults[:3]), run_dir) == []


@pytest.mark.slow
@pytest.mark.process
def test_a_persistent_device_fault_stays_on_the_device(tmp_path: Path) -> None:
    """The fault is injected again after a restart on the same device; on the spare's device the same rank computes
    correctly."""
    plan = FaultPlan(
        faults=[
            Fault(kind="sign_flip", target="weight", device="node-0/cpu-0", iteration=3, persistent=True),
            Fault(kind="exit", rank=0, iteration=3, section="step"),
        ],
    )
    run_dir = tmp_path / "run"
    script = _write(tmp_path, plan)
    with Cluster(script, str(tmp_path), "1", run_dir=run_dir, num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.FAULT_SIMULATED and event.cycle == 1, timeout_s=300)
        spare = cluster.add_node()
        cluster.wait_for("the node is a spare", timeout_s=300)
        cluster.agent("node-0").kill()
        assert spare.wait(timeout_s=300) == 0, cluster.tails()
        assert "rank 0 ends with [[7.0, 7.0], [7.0, 7.0]]" in spare.output()
        injected = [(event.data["fault"], event.cycle, event.node) for event in _strikes(cluster)]
    assert injected == [("sign_flip", 0, "node-0"), ("exit", 0, "node-0"), ("sign_flip", 1, "node-0")]
    assert verify_fired(plan, run_dir) == []
