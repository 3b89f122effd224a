"""After a process dies during a save, the newest complete checkpoint is loaded bit by bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from saving_ranks import start

from outlast.checkpoint.writer_client import WriterProcess

pytestmark = pytest.mark.extended

SAVE_AND_DIE = """
STAGE, VICTIM = {stage!r}, {victim}
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
reached = 0
def kill_at_the_second(attempt):
    global reached
    reached += 1
    if reached == 2 and rank == (VICTIM if STAGE == "data" else 0):
        os.kill(pids[VICTIM], signal.SIGKILL)
from outlast.runtime.injection import armed
arming = armed("checkpoint." + STAGE, kill_at_the_second)
arming.__enter__()
manager = manage(config={{"save_timeout": 20.0}})
train()
manager.save(state, 1).wait(100)
dist.barrier()
saved = [content()]
train()
saved.append(content())
tell(saved=saved)
try:
    manager.save(state, 2).wait(100)
except CheckpointError as error:
    pass
os._exit(0)
"""

LOAD = """
manager = manage()
restored = manager.load_latest(state)
tell(iteration=restored.iteration, loaded=content(), rejected=[str(one) for one in restored.rejected])
train()
manager.save(state, restored.iteration + 1).wait(100)
manager.close()
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("victim", "stage", "expected"),
    [
        (0, "data", 1),
        (1, "manifest", 2),
        *(
            pytest.param(*other, marks=pytest.mark.campaign)
            for other in ((0, "manifest", 1), (0, "rename", 1), (0, "tracker", 2), (1, "data", 1))
        ),
    ],
)
def test_a_rank_killed_during_a_save_loses_no_checkpoint(
    tmp_path: Path, victim: int, stage: str, expected: int
) -> None:
    """Both ranks load the same checkpoint: the older one before the rename, the newer one after it.

    A rank that dies after its shard is durable costs nothing. Later saves succeed, and no file of the killed attempt
    remains.
    """
    folder = tmp_path / "ckpt"
    saves = start(folder, SAVE_AND_DIE.format(stage=stage, victim=victim), world=2)
    assert saves[victim][0] == -9, saves
    for code, loaded in (loads := start(folder, LOAD, world=2, cycle=1)):
        assert code == 0, loaded
        assert loaded["iteration"] == expected
        assert loaded["rejected"] == []
    assert [loaded["loaded"] for _, loaded in loads] == [report["saved"][expected - 1] for _, report in saves]
    assert (folder / f"step-{expected + 1}" / "manifest.json").exists()
    assert not list(folder.glob("*.tmp-*")), "what the killed attempt left is removed"


WRITER_DIES = """
from outlast.runtime.injection import Injection, armed_in_children
halfway = Injection(point="checkpoint.file.halfway", do="kill", once=folder + "-killed")
with armed_in_children(halfway):
    manager = manage()
    manager._writer.start()
train()
failed = manager.save(state, 1)
try:
    failed.wait(100)
except CheckpointError as error:
    text = str(error)
train()
manager.save(state, 2).wait(100)
tell(error=text, checkpoints=sorted(os.listdir(folder)), saved=content())
manager.close()
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_writer_fails_one_save_on_all_ranks(tmp_path: Path) -> None:
    """The save of a killed writer fails on all ranks with its name; the next save uses a new writer."""
    folder = tmp_path / "ckpt"
    saves = start(folder, WRITER_DIES, world=2)
    for code, report in saves:
        assert code == 0, report
        assert re.search(rf"rank . on node {folder.name} \({folder}\): the checkpoint writer is gone", report["error"])
        assert "step-2" in report["checkpoints"]
        assert "step-1" not in report["checkpoints"]
    loaded = start(folder, LOAD, world=2, cycle=1)
    assert [one["loaded"] for _, one in loaded] == [one["saved"] for _, one in saves]
    journal = (tmp_path / "ckpt-journal" / "journal").glob("*.jsonl")
    assert all("save_failed" in path.read_text() for path in journal)


DIE_IN_THE_COPY = """
from outlast.checkpoint import arena

manager = manage()
state["big"] = torch.arange(24 << 20, dtype=torch.float32)
manager.save(state, 1).wait(100)
tell(saved=content())
train()
copy, copied = arena.np.copyto, 0

def copying(target, source):
    global copied
    copy(target, source)
    copied += len(source)
    if copied >= 64 << 20:
        kill_self()

arena.np.copyto = copying
state["big"] += 1
manager.save(state, 2)
"""


@pytest.mark.process
def test_a_rank_killed_during_its_copy_loads_the_older_checkpoint(tmp_path: Path) -> None:
    """A partly copied shard is never committed or listed: the older checkpoint is loaded.

    The memory of the agent's writer serves the next save.
    """
    folder = tmp_path / "ckpt"
    writer = WriterProcess()
    try:
        ((code, report),) = start(folder, DIE_IN_THE_COPY, nodes={"ckpt": writer})
        assert code == -9, report
        load = "state['big'] = torch.zeros(24 << 20)\n" + LOAD
        ((code, loaded),) = start(folder, load, cycle=1, nodes={"ckpt": writer})
    finally:
        writer.close()
    assert code == 0, loaded
    assert loaded["iteration"] == 1
    assert loaded["rejected"] == []
    assert loaded["loaded"] == report["saved"]
    assert sorted(path.name for path in (folder / "ckpt").glob("step-*")) == ["step-1", "step-2"]
