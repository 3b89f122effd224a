"""A save is a copy of that moment, kept as long as promised, and its failure costs nothing that was committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from saving_ranks import start


@pytest.mark.process
def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    """With a writer that waits, training goes on; values, optimizer steps and random numbers are those of the save."""
    script = """
fifo = folder + "-fifo"
os.mkfifo(fifo)
manager = manage(writer_arguments=("--wait-for=" + fifo,))
train()
handle = manager.save(state, 1)
expected, numbers = content(), [torch.rand(1).item(), random.random(), np.random.rand()]
train()
assert not handle.done and content() != expected
open(fifo, "w").close()
handle.wait(20)
manager.close()
again = manage()
again.load_latest(state)
assert numbers == [torch.rand(1).item(), random.random(), np.random.rand()]
tell(same=content() == expected, step=optim.state[model.weight]["step"].item())
again.close()
"""
    assert start(tmp_path / "ckpt", script) == [(0, {"same": True, "step": 1.0})]


@pytest.mark.process
def test_retention_and_saving_again(tmp_path: Path) -> None:
    """The newest two stay; a committed generation is not written again."""
    script = """
manager = manage(config={"most_recent_k": 2, "async_save": False})
for iteration in (1, 2, 3):
    assert manager.save(state, iteration).result.generation == iteration
before = os.stat(folder + "/step-3/manifest.json")
train()
assert manager.save(state, 3).done
after = os.stat(folder + "/step-3/manifest.json")
tell(
    names=sorted(os.listdir(folder)), latest=open(folder + "/latest").read(),
    untouched=(before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns),
)
manager.close()
"""
    ((code, told),) = start(tmp_path / "ckpt", script)
    assert code == 0, told
    assert told == {"names": ["latest", "run.json", "step-2", "step-3"], "latest": "step-3\n", "untouched": True}


@pytest.mark.process
def test_a_full_disk_fails_saves_until_there_is_room(tmp_path: Path) -> None:
    """A save that finds no room fails, older generations stay, the next tries again; too many in a row is an error."""
    script = """
import resource
manager = manage(config={"max_consecutive_save_failures": 2, "async_save": False})
assert manager.save(state, 1).error is None
def limit(num_bytes):
    resource.prlimit(manager._writer.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
limit(1000)
first = str(manager.save(state, 2).error)
limit(resource.RLIM_INFINITY)
assert manager.save(state, 3).error is None
limit(1000)
manager.save(state, 4), manager.save(state, 5)
try:
    manager.save(state, 6)
except CheckpointError as error:
    tell(first=first, last=str(error), durable=manager.durable_iteration, names=sorted(os.listdir(folder)))
manager.close()
"""
    ((code, told),) = start(tmp_path / "ckpt", script)
    assert code == 0, told
    assert "rank 0" in told["first"]
    assert "2 saves in a row failed" in told["last"]
    assert told["durable"] == 3
    assert {"step-1", "step-3"} <= set(told["names"])
