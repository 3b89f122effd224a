"""All nodes see the same checkpoint directory, or nothing is loaded and nothing is trained."""

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


def test_a_mount_that_is_missing_on_one_node_ends_the_start(tmp_path: Path) -> None:
    """The job ends with 2 before anything is trained, and the line names both nodes, what each one sees, and where."""
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


def test_a_mount_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """A node whose mount appears while the ranks agree takes part in the save; nothing stays in the directory."""
    with closing(WriterProcess()) as one, closing(WriterProcess()) as two:
        ended = start(tmp_path / "ckpt", SEE_IT_LATE, world=2, nodes={"one": one, "two": two})
    for code, told in ended:
        assert code == 0, told
        assert not [name for name in told["left"] if name.startswith(".probe-")]
        assert "step-1" in told["left"]


@pytest.mark.extended
def test_a_source_that_one_node_does_not_see_is_not_taken_for_empty(tmp_path: Path) -> None:
    """Where rank 0 sees no checkpoint in the directory to load from and another node sees some, all ranks refuse."""
    (tmp_path / "source" / "step-10").mkdir(parents=True)
    with closing(WriterProcess()) as one, closing(WriterProcess()) as two:
        ended = start(tmp_path / "ckpt", LOAD_FROM_A_SOURCE, world=2, nodes={"one": one, "two": two})
    for code, told in ended:
        assert code == 0, told
        assert "is not the same on all nodes" in told["error"]
        assert f"node one sees no checkpoint in {tmp_path / 'bare'}" in told["error"]
        assert f"node two sees 1 checkpoint (iteration 10) in {tmp_path / 'source'}" in told["error"]


def test_ranks_that_save_in_other_kinds_of_places_refuse_the_start(tmp_path: Path) -> None:
    """Where one rank has a local directory and another one has none, all ranks end with the same line, and none waits
    for another."""
    with closing(WriterProcess()) as one, closing(WriterProcess()) as two:
        ended = start(tmp_path / "ckpt", SAVE_IN_OTHER_PLACES, world=2, nodes={"one": one, "two": two})
    (code, told), (other_code, other_told) = ended
    assert (code, other_code) == (0, 0), ended
    assert told == other_told
    assert "rank 0 uses directory:path,local_directory:path" in told["error"]
    assert "rank 1 uses directory:path,local_directory:none" in told["error"]


def test_a_folder_that_one_rank_cannot_read_is_not_taken_for_empty(tmp_path: Path) -> None:
    """All ranks get the same error, which names the folder; none of them begins from the start."""
    with closing(WriterProcess()) as one, closing(WriterProcess()) as two:
        ended = start(tmp_path / "ckpt", LOSE_A_FOLDER, world=2, nodes={"one": one, "two": two})
    (code, told), (other_code, other_told) = ended
    assert (code, other_code) == (0, 0), ended
    assert told["error"].split(" contains checkpoints")[1] == other_told["error"].split(" contains checkpoints")[1]
    assert str(tmp_path / "ckpt" / "two") in told["error"]
