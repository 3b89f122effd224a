"""The recovery policy replaces a node whose mount of the checkpoint directory hangs with a spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from hanging_mount import HangingMount
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]

TRAIN = """
import os, sys
import torch
import outlast

source, mounted, file = sys.argv[1:]
node = os.environ["OUTLAST_NODE"]
if os.environ["RANK"] == "1" and not os.path.exists(file):  # any of the three nodes may be the spare
    with open(file, "w") as record:
        record.write(node)
directory = mounted if os.path.exists(file) and open(file).read() == node else source
checkpoint = outlast.CheckpointConfig(directory=directory, save_interval=2, response_timeout=2.0, replication=False)
run = outlast.init(outlast.Config(checkpoint=checkpoint))
state = {"weight": torch.zeros(10)}
for iteration in run.steps(state, total=6):
    state["weight"] += 1
"""


def test_a_spare_replaces_a_node_with_a_hung_mount(tmp_path: Path) -> None:
    """A directory that hangs on one node counts as a failure of that node, and training finishes without it."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with HangingMount(tmp_path / "source", tmp_path / "mounted") as mount:
        mount.hang()
        with Cluster(
            script,
            str(mount.source),
            str(mount.path),
            str(tmp_path / "hangs"),
            run_dir=tmp_path / "run",
            num_nodes=2,
            num_spares=1,
            nproc_per_node=1,
            options=("--ft-max-node-faults=1",),
        ) as cluster:
            codes = cluster.wait(timeout_s=400)
            output = "".join(agent.output() for agent in cluster.agents)
    node = (tmp_path / "hangs").read_text()
    assert [code for number, code in enumerate(codes) if f"node-{number}" != node] == [0, 0], output
    assert f"{mount.path} has not responded for" in output
    assert f"on node {node}" in output
    assert "the run is finished" in output
