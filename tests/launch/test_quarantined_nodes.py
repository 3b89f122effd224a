"""A checkpoint that leads to invalid results is not loaded again, nor are checkpoints trained from it: end to end,
with the session, the checkpoint tiers and `outlast run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.extended]

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import outlast

folder, what, has_global = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
config = outlast.Config(checkpoint=outlast.CheckpointConfig(
    directory=folder + "/global" if has_global else None, save_interval=10 if has_global else 0,
    local_directory=folder + "/local", non_persistent_save_interval=5, suspect_window=20, async_save=False))
cycle = int(os.environ["OUTLAST_CYCLE"])
with outlast.init(config) as run:
    state = {"weight": torch.zeros(1000), "seen": []}
    begun = None
    for iteration in run.steps(state, total=30):
        begun = iteration if begun is None else begun
        if cycle == 0 and iteration == 16:
            run._saves.manager.wait()  # on every rank, before any of them leaves
            dist.barrier()
            os._exit(7)
        if what == "once" and cycle == 1 and iteration == 22 and run.global_rank == 1:
            run._saves.manager.wait()
            raise SystemExit(outlast.ExitReason.FAILED_VALIDATION)
        if what == "always" and cycle >= 1 and iteration == begun + 2:
            raise SystemExit(outlast.ExitReason.FAILED_VALIDATION)
        total = torch.ones(1)
        dist.all_reduce(total)
        state["weight"] += total
        state["seen"].append(iteration if cycle != 1 else -iteration)
    print("RESULT " + json.dumps({"seen": state["seen"], "weight": state["weight"][0].item()}), flush=True)
"""


def _cluster(tmp_path: Path, mode: str, *, has_global: bool) -> Cluster:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    args = (str(tmp_path), mode, str(has_global))
    return Cluster(script, *args, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2)


def _restored(cluster: Cluster) -> dict[int | None, Event]:
    return {event.cycle: event for event in cluster.events() if event.kind == EventKind.RESTORED}


@pytest.mark.slow
@pytest.mark.parametrize("has_global", [pytest.param(True, marks=pytest.mark.campaign), False])
def test_descendants_of_an_excluded_checkpoint_are_not_loaded(has_global: bool, tmp_path: Path) -> None:
    """Cycle 1 loads iteration 15 from a node-local tier, saves 20 to all tiers, and finds an invalid result at 22.
    Cycle 2 loads an older checkpoint instead of 15 or 20; the final state is that of a training without cycle 1."""
    with _cluster(tmp_path, "once", has_global=has_global) as cluster:
        assert cluster.wait(timeout_s=300) == [0], cluster.tails()
        restored = _restored(cluster)
        assert restored[1].iteration == 15
        assert restored[1].data["tier"] != "global"
        assert restored[2].iteration in ((10,) if has_global else (5, 10))
        assert max(cycle for cycle in restored if cycle is not None) == 2
        results = [line for line in cluster.agent(0).output().splitlines() if "RESULT " in line]
        assert len(results) == 2
        for line in results:
            result = json.loads(line.partition("RESULT ")[2])
            assert result == {"seen": [*range(30)], "weight": 60.0}
        (one,) = json.loads((tmp_path / "run" / "ladder.json").read_text())["distrusted"]
        assert (one["generation"], one["iteration"]) == (15, 22)
        assert one["tier"] == restored[1].data["tier"]


@pytest.mark.slow
@pytest.mark.parametrize("has_global", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_invalid_results_from_every_checkpoint_end_with_17(has_global: bool, tmp_path: Path) -> None:
    """If every checkpoint leads to an invalid result, the run ends with 17 after a bounded number of cycles, and no
    cycle loads a checkpoint from the same kind of tier as an earlier cycle did."""
    with _cluster(tmp_path, "always", has_global=has_global) as cluster:
        assert cluster.wait(timeout_s=300) == [ExitReason.FAILED_VALIDATION], cluster.tails()
        loads = [(event.iteration, event.data["tier"] == "global") for event in _restored(cluster).values()]
        assert 2 <= len(loads) <= 4
        assert len(set(loads)) == len(loads)
        assert not (tmp_path / "global" / "step-30").exists()
