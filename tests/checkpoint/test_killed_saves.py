"""Whatever dies while a generation is saved, the newest whole one is loaded, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from saving_ranks import start

SAVE_AND_DIE = """
import threading
STAGE = {stage!r}
saves = 0
parked = threading.Event()
def at_stage(name):
    global saves
    saves += name == STAGE
    if saves == 2 and rank == 0:
        kill_self()
manager = manage(at_stage=at_stage)
train()
manager.save(state, 1).wait(20)
tell(saved=content())
train()
manager.save(state, 2)
if rank == 0:
    parked.wait(20)
else:
    os._exit(0)
"""

LOAD = """
manager = manage()
restored = manager.load_latest(state)
tell(iteration=restored.iteration, loaded=content(), rejected=[str(one) for one in restored.rejected])
train()
manager.save(state, restored.iteration + 1).wait(20)
manager.close()
"""


@pytest.mark.process
@pytest.mark.parametrize(("stage", "expected"), [("data", 1), ("manifest", 1), ("rename", 1), ("tracker", 2)])
def test_a_rank_killed_at_any_stage_loses_no_committed_generation(tmp_path: Path, stage: str, expected: int) -> None:
    """Killed before the rename the older generation loads as saved, after it the newer; saving then goes on."""
    folder = tmp_path / "ckpt"
    ((code, told),) = start(folder, SAVE_AND_DIE.format(stage=stage))
    assert code == -9, told
    ((code, loaded),) = start(folder, LOAD, cycle=1)
    assert code == 0, loaded
    assert loaded["iteration"] == expected
    assert loaded["rejected"] == []
    if expected == 1:
        assert loaded["loaded"] == told["saved"]
    assert (folder / f"step-{expected + 1}" / "manifest.json").exists()
    assert not list(folder.glob("*.tmp-*")), "what the killed attempt left is removed"


WRITER_DIES = """
manager = manage(writer_arguments=("--die-at=data",) if rank == 0 else ())
train()
failed = manager.save(state, 1)
try:
    failed.wait(20)
except CheckpointError as error:
    text = str(error)
manager._writer.arguments = ()
train()
manager.save(state, 2).wait(20)
tell(error=text, generations=sorted(os.listdir(folder)), saved=content())
manager.close()
"""


@pytest.mark.process
def test_a_killed_writer_fails_one_save_on_all_ranks(tmp_path: Path) -> None:
    """The save of the dead writer fails everywhere and names it; a new writer makes the next one durable."""
    folder = tmp_path / "ckpt"
    ended = start(folder, WRITER_DIES, world=2)
    for code, told in ended:
        assert code == 0, told
        assert "rank 0: the writer process is gone" in told["error"]
        assert "step-2" in told["generations"]
        assert "step-1" not in told["generations"]
    loaded = start(folder, LOAD, world=2, cycle=1)
    assert [one["loaded"] for _, one in loaded] == [one["saved"] for _, one in ended]
    journal = (tmp_path / "ckpt-journal" / "journal").glob("*.jsonl")
    assert all("save_failed" in path.read_text() for path in journal)
