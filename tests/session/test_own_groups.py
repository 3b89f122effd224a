"""The number of process groups and connections that a session adds to those of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import Ranks

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
import outlast
from outlast import config
from outlast.runtime import connections

folder = sys.argv[1]
torch.set_num_threads(1)
made, new_group = [], dist.new_group

def counted(*args, **kwargs):
    made.append(kwargs.get("timeout"))
    return new_group(*args, **kwargs)

dist.init_process_group("gloo")
before = len(connections.connected_sockets())
dist.new_group = counted
run = outlast.init(outlast.Config(
    checkpoint=outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=4),
    straggler_detection=outlast.StragglerDetectionConfig(enabled=True, report_time_interval=0.001),
    replica_digest=config.ReplicaDigestConfig(interval=1),
    rerun_state_machine=config.RerunStateMachineConfig(rerun_mode="validate_results"),
    health=config.HealthConfig(process_group_interval=2),
    run_dir=folder + "/run",
))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optim = torch.optim.SGD(net.parameters(), lr=0.1)
number = 0
for iteration in run.steps({"net": net, "optim": optim}, total=12):
    for attempt in run.attempts():
        optim.zero_grad()
        loss = net(torch.ones(2, 4)).sum()
        loss.backward()
        attempt.validate(loss, "loss")
    optim.step()
    number = max(number, len(connections.connected_sockets()) - before)
Path(folder, f"{run.global_rank}.json").write_text(json.dumps({"groups": len(made), "sockets": number}))
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_session_adds_three_process_groups(tmp_path: Path) -> None:
    """Slow rank detection and the comparison of replicas share one group; the start, whose agreements may take
    longer, and the check of all ranks, which aborts silent ranks, have one each; agreements in each step use a mesh
    of sockets."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), world_size=2) as ranks:
        codes, outputs = ranks.end()
    assert codes == [0, 0], outputs
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["groups"] == 3
        assert found["sockets"] <= 12
