"""Progress between faults reaches the restart budgets in time, and each fault is reported with its iteration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.extended]
FAULTS = range(8, 58, 10)
SCRIPT = """
import os, pathlib, sys, time
import torch, outlast
from outlast import inprocess

here, mode, faults = pathlib.Path(sys.argv[1]), sys.argv[2], [int(one) for one in sys.argv[3:]]


def make_model():
    torch.manual_seed(1)
    return torch.nn.Linear(8, 8)


def is_committed(iteration):
    return any((here / "near").glob(f"*/step-{iteration}/manifest*"))


def train(call=None):
    places = {"directory": str(here / "far"), "local_directory": str(here / "near")}
    checkpoint = outlast.CheckpointConfig(save_interval=5, **places)
    with outlast.init(outlast.Config(checkpoint=checkpoint, in_process=call is not None)) as run:
        model = make_model() if call is None else call.keep("model", make_model)
        for iteration in run.steps({"model": model}, total=faults[-1] + 4):
            mark = here / f"fault-{iteration}"
            if iteration in faults and run.global_rank == 1 and not mark.exists():
                while not is_committed(iteration // 5 * 5):
                    time.sleep(0.01)
                mark.touch()
                raise ValueError(f"planned at {iteration}")


if mode == "in process":

    @inprocess.Wrapper(outlast.InProcessRestartConfig(soft_timeout=200, hard_timeout=250, barrier_timeout=300))
    def wrapped(call: inprocess.Handle):
        train(call)

    wrapped()
else:
    train()
"""


@pytest.mark.parametrize("mode", ["in process", "new workers"])
def test_a_fault_after_a_commit_counts_with_progress(mode: str, tmp_path: Path) -> None:
    """With a checkpoint committed before each fault, one allowed restart suffices for all faults; each decision has the
    iteration at which the fault was raised."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(tmp_path), mode, *map(str, FAULTS)]
    with Cluster(script, *arguments, run_dir=tmp_path / "run", num_nodes=1, options=["--max-restarts=1"]) as job:
        codes = job.wait(timeout_s=500)
        decisions = [event.data for event in job.events() if event.kind == EventKind.DECISION]
    assert codes == [0], decisions
    planned = [re.search(r"planned at (\d+)", one["verdict"]["reason"]) for one in decisions[:-1]]
    assert [one and int(one[1]) for one in planned] == list(FAULTS), decisions
    assert [one["incident"]["iteration"] for one in decisions[:-1]] == list(FAULTS), decisions
