"""All nodes must see the same checkpoint directory before anything is loaded or trained."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from saving_ranks import start

from outlast.checkpoint.writer_client import WriterProcess
from outlast.errors import ExitReason
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

TRAIN = """
import os, sys
import torch
import outlast

directory = os.path.join(sys.argv[1], "bare" if os.environ["OUTLAST_NODE"] == "node-0" else "mounted")
checkpoint = outlast.CheckpointConfig(directory=directory, save_interval=10, most_recent_k=-1)
run = outlast.init(outlast.Config(checkpoint=checkpoint))
state = {"weight": torch.zeros(1000)}
for iteration in run.steps(state, total=40):
    print("begins", iteration, flush=True)
    state["weight"] += 1
"""
SEE_IT_LATE = """
import threading, time, pathlib
shared = pathlib.Path(folder).with_name("shared")
late = pathlib.Path(folder).with_name("late")

def mount_late():
    while not (shared.exists() and any(name.startswith(".probe-") for name in os.listdir(shared))):
        time.sleep(0.01)
    os.symlink(shared, late)

if rank == 1:
    threading.Thread(target=mount_late, daemon=True).start()
manager = manage(config={"directory": str(late if rank == 1 else shared), "local_directory": None})
train()
manager.save(state, 1).wait(100)
manager.close()
tell(left=os.listdir(shared))
"""

LOAD_FROM_A_SOURCE = """
from outlast.errors import ConfigError
source = os.path.join(os.path.dirname(folder), "bare" if rank == 0 else "source")
manager = manage(config={"load": source})
try:
    manager.load_latest(state)
except ConfigError as error:
    tell(error=str(error))
manager.close()
"""

SAVE_IN_OTHER_PLACES = """
from outlast.errors import ConfigError
places = {"local_directory": os.path.dirname(folder) if rank == 0 else None, "directory": folder + "-global"}
try:
    manager = manage(config=places)
except ConfigError as error:
    tell(error=str(error))
"""
LOSE_A_FOLDER = """
import shutil
manager = manage()
train()
manager.save(state, 1, tiers=["local"]).wait(100)
manager.close()
manager = manage()
if rank == 1:
    own = os.path.join(folder, os.environ["OUTLAST_NODE"])
    shutil.rmtree(own)
    open(own, "w").close()
try:
    manager.load_latest(state)
    tell(error="")
except CheckpointError as error:
    tell(error=str(error))
manager.close()
"""


def test_a_mount_missing_on_one_node_fails_the_start(tmp_path: Path) -> None:
    """The job exits with 2 before training, and the line has both nodes, their directories and their checkpoints."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for iteration in (10, 20, 30):
        (tmp_path / "mounted" / f"step-{iteration}").mkdir(parents=True)
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=1) as cluster:
        codes = cluster.wait(timeout_s=400)
        output = "".join(agent.output() for agent in cluster.agents)
    assert codes == [ExitReason.BAD_INPUT] * 2, output
    assert "begins" not in output
    assert f"node node-0 sees no checkpoint in {tmp_path / 'bare'}" in output
    assert f"node node-1 sees 3 checkpoints (iterations 10 to 30) in {tmp_path / 'mounted'}" in output
    assert "mount the same file system on all of them" in output


def test_a_late_mount_is_waited_for(tmp_path: Path) -> None:
    """A node whose mount appears during the agreement takes part in the save, and no probe file remains."""
    with closing(WriterProcess()) as first, closing(WriterProcess()) as second:
        results = start(tmp_path / "ckpt", SEE_IT_LATE, world=2, nodes={"one": first, "two": second})
    for code, report in results:
        assert code == 0, report
        assert not [name for name in report["left"] if name.startswith(".probe-")]
        assert "step-1" in report["left"]


@pytest.mark.extended
def test_a_load_source_missing_on_one_node_fails_the_load(tmp_path: Path) -> None:
    """If only some nodes see checkpoints in the directory to load from, all ranks fail."""
    (tmp_path / "source" / "step-10").mkdir(parents=True)
    with closing(WriterProcess()) as first, closing(WriterProcess()) as second:
        results = start(tmp_path / "ckpt", LOAD_FROM_A_SOURCE, world=2, nodes={"one": first, "two": second})
    for code, report in results:
        assert code == 0, report
        assert "is not the same on all nodes" in report["error"]
        assert f"node one sees no checkpoint in {tmp_path / 'bare'}" in report["error"]
        assert f"node two sees 1 checkpoint (iteration 10) in {tmp_path / 'source'}" in report["error"]


def test_ranks_with_different_kinds_of_places_fail_the_start(tmp_path: Path) -> None:
    """If only one rank has a local directory, all ranks fail with the same line, without waiting for each other."""
    with closing(WriterProcess()) as first, closing(WriterProcess()) as second:
        results = start(tmp_path / "ckpt", SAVE_IN_OTHER_PLACES, world=2, nodes={"one": first, "two": second})
    (code, report), (other_code, other_report) = results
    assert (code, other_code) == (0, 0), results
    assert report == other_report
    assert "rank 0 uses directory:path,local_directory:path" in report["error"]
    assert "rank 1 uses directory:path,local_directory:none" in report["error"]


def test_an_unreadable_folder_on_one_rank_fails_the_load(tmp_path: Path) -> None:
    """All ranks fail with the same error, which contains the folder; none starts from scratch."""
    with closing(WriterProcess()) as first, closing(WriterProcess()) as second:
        results = start(tmp_path / "ckpt", LOSE_A_FOLDER, world=2, nodes={"one": first, "two": second})
    (code, report), (other_code, other_report) = results
    assert (code, other_code) == (0, 0), results
    assert report["error"].split(" contains checkpoints")[1] == other_report["error"].split(" contains checkpoints")[1]
    assert str(tmp_path / "ckpt" / "two") in report["error"]
