"""A local checkpoint of the NVRx API that leads to NaN is excluded in favour of Megatron's global checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

SCRIPT = """
import os, sys, types, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from outlast.integrations import nvrx
nvrx.install()
import torch
from megatron.core import rerun_state_machine as rerun
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

torch.cuda.current_device = lambda: 0  # what Megatron-Core calls whatever the device
torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, lambda state: None
rerun.RerunStateMachine._reduce_any = lambda self, value: tuple(value) if isinstance(value, list) else value

# Megatron-LM's save, as far as its tracker goes.
checkpointing = types.ModuleType("megatron.training.checkpointing")
exec('''
import os
def get_checkpoint_tracker_filename(folder):
    return os.path.join(folder, "latest_checkpointed_iteration.txt")

def save_checkpoint(folder, iteration, weight):
    import torch
    torch.save(weight, os.path.join(folder, f"iter_{iteration:07d}"))
    with open(get_checkpoint_tracker_filename(folder), "w") as file:
        file.write(str(iteration))
''', vars(checkpointing))
sys.modules["megatron.training.checkpointing"] = checkpointing

folder, cycle = Path(sys.argv[1]), int(os.environ["OUTLAST_CYCLE"])
(store := folder / "global").mkdir(exist_ok=True)
client = RankMonitorClient()
client.init_workload_monitoring()
local = LocalCheckpointManager(folder / "local", session_id="s")
rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
machine = rerun.get_rerun_state_machine()

iteration, weight, source = 0, torch.zeros(8), "start"
tracker = Path(checkpointing.get_checkpoint_tracker_filename(store))
newest = int(tracker.read_text()) if tracker.exists() else -1
found = local.find_latest()
if found > newest:
    saved, _ = local.load()
    iteration, weight, source = found, next(iter(saved.tensors)).clone(), "local"
elif newest >= 0:
    iteration, weight, source = newest, torch.load(store / f"iter_{newest:07d}"), "global"
print("cycle", cycle, "resumes at", iteration, "from", source, flush=True)
machine.current_iteration = iteration
while iteration < 24:
    while machine.should_run_forward_backward(None):
        # What the copy of iteration 15 lost makes the loss of the third step after it NaN.
        loss = torch.tensor(float("nan")) if iteration >= 17 and weight[0] != iteration else weight.sum()
        machine.validate_result(loss, torch.isnan, "found NaN in local forward loss calculation")
    saves, exits, code = machine.should_checkpoint_and_exit()
    if saves:
        checkpointing.save_checkpoint(store, iteration, weight)
    if exits:
        sys.exit(code)
    if iteration == 16 and cycle == 0:
        raise RuntimeError("the node is lost")
    weight = weight + 1
    iteration += 1
    if iteration % 10 == 0:
        checkpointing.save_checkpoint(store, iteration, weight)
    elif iteration % 5 == 0:
        copy = weight - 1 if cycle == 0 else weight
        local.save(BasicTensorAwareStateDict({"weight": copy.clone()}), iteration)
client.shutdown_workload_monitoring()
print("ends with", weight[0].item(), flush=True)
"""


@pytest.mark.extended
def test_nan_after_a_local_load_resumes_from_global(tmp_path: Path) -> None:
    """After a NaN three steps after a local load, the next cycle resumes from Megatron's older global checkpoint,
    and the diagnostic save does not become the newest."""
    pytest.importorskip("megatron.core")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        codes = cluster.wait(timeout_s=500)
        output = cluster.agents[0].output()
    assert codes == [0], output
    resumed = [line for line in output.splitlines() if line.startswith("cycle")]
    assert resumed == [
        "cycle 0 resumes at 0 from start",
        "cycle 1 resumes at 15 from local",
        "cycle 2 resumes at 10 from global",
    ], output
    assert "ends with 24.0" in output
    recovery_state = json.loads((tmp_path / "run" / "ladder.json").read_text())
    assert [load["generation"] for load in recovery_state["loads"]] == [15]  # copies that are only found do not count
    (excluded,) = recovery_state["distrusted"]
    assert (excluded["generation"], excluded["iteration"]) == (15, 17)
    assert (tmp_path / "global" / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert (tmp_path / "global" / "latest_checkpointed_iteration.txt.diagnostic").read_text() == "17"
