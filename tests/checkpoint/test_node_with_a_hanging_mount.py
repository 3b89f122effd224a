"""A node whose mount of the checkpoint directory hangs is treated by the recovery policy: a spare takes its slot."""

from __future__ import annotations

from pathlib import Path

import pytest
from hanging_mount import HangingMount

from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

TRAIN = """
import os, sys
import torch
import outlast

source, mounted = sys.argv[1:]
directory = mounted if os.environ["OUTLAST_NODE"] == "node-1" else source
checkpoint = outlast.CheckpointConfig(directory=directory, save_interval=2, response_timeout=2.0, replication=False)
run = outlast.init(outlast.Config(checkpoint=checkpoint))
state = {"weight": torch.zeros(10)}
for iteration in run.steps(state, total=6):
    state["weight"] += 1
"""


def test_a_spare_takes_the_slot_of_a_node_whose_mount_hangs(tmp_path: Path) -> None:
    """The directory hangs on node-1 alone: the failure counts for node-1, and training ends well without it."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with HangingMount(tmp_path / "source", tmp_path / "mounted") as mount:
        mount.hang()
        with Cluster(
            script,
            str(mount.source),
            str(mount.path),
            run_dir=tmp_path / "run",
            num_nodes=2,
            num_spares=1,
            nproc_per_node=1,
            options=("--ft-max-node-faults=1",),
        ) as cluster:
            codes = cluster.wait(timeout_s=400)
            output = "".join(agent.output() for agent in cluster.agents)
    assert codes[0] == codes[2] == 0, output
    assert f"{mount.path} has not responded for" in output
    assert "on node node-1" in output
    assert "the run is finished" in output
