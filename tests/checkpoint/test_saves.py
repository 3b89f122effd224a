"""Saves: the state of the call, retention, and failures that do not affect committed checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from saving_ranks import start


@pytest.mark.process
def test_a_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    """A delayed save has the values, optimizer steps and random numbers of its call while training continues."""
    script = """
fifo = folder + "-fifo"
os.mkfifo(fifo)
from outlast.runtime.injection import Injection, armed_in_children
with armed_in_children(Injection(point="checkpoint.writer.write", do="wait", path=fifo)):
    manager = manage()
    manager._writer.start()
train()
handle = manager.save(state, 1)
expected, numbers = content(), [torch.rand(1).item(), random.random(), np.random.rand()]
train()
assert not handle.done and content() != expected
open(fifo, "w").close()
handle.wait(100)
manager.close()
again = manage()
again.load_latest(state)
assert numbers == [torch.rand(1).item(), random.random(), np.random.rand()]
tell(same=content() == expected, step=optim.state[model.weight]["step"].item())
again.close()
"""
    assert start(tmp_path / "ckpt", script) == [(0, {"same": True, "step": 1.0})]


@pytest.mark.process
def test_retention_keeps_two_and_skips_committed_checkpoints(tmp_path: Path) -> None:
    """The newest two checkpoints are kept, and a committed one is not written again.

    Only saves that are scheduled are logged.
    """
    script = """
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage().partition(" in ")[0])
logging.getLogger("outlast.checkpoint.outcomes").addHandler(handler)
logging.getLogger("outlast.checkpoint.outcomes").setLevel("INFO")
manager = manage(config={"local_most_recent_k": 2, "suspect_window": 0, "async_save": False})
for iteration in (1, 2, 3):
    assert manager.save(state, iteration).result.checkpoint == iteration
before = os.stat(folder + "/step-3/manifest.json")
train()
said.clear()
assert manager.save(state, 3).done
again, later = list(said), manage(config={"local_directory": folder + "-later"})
later.save(state, 4).wait(100)
later.close()
after = os.stat(folder + "/step-3/manifest.json")
tell(
    names=sorted(os.listdir(folder)), latest=open(folder + "/latest").read(),
    again=again, said=said, untouched=(before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns),
)
manager.close()
"""
    ((code, report),) = start(tmp_path / "ckpt", script)
    assert code == 0, report
    assert report == {
        "names": ["latest", "owner", "run.json", "step-2", "step-3"],
        "latest": "step-3\n",
        "untouched": True,
    } | {
        "again": [],
        "said": ["Scheduling async checkpoint save of iteration 4 to local", "saved iteration 4 to local"],
    }


@pytest.mark.process
def test_a_full_disk_fails_saves_until_space_is_free(tmp_path: Path) -> None:
    """A save on a full disk fails and keeps older checkpoints; the next save retries.

    Too many failures in a row raise an error.
    """
    script = """
import resource
manager = manage(config={"max_consecutive_save_failures": 2, "async_save": False})
assert manager.save(state, 1).error is None
def limit(num_bytes):
    resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
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
    ((code, report),) = start(tmp_path / "ckpt", script)
    assert code == 0, report
    assert "rank 0" in report["first"]
    assert "2 saves in a row failed" in report["last"]
    assert "Make room or repair the directory" in report["last"]
    assert report["durable"] == 3
    assert {"step-1", "step-3"} <= set(report["names"])


@pytest.mark.process
def test_a_failed_save_removes_its_files(tmp_path: Path) -> None:
    """A failed attempt removes its file and its folder, which frees the space for the next."""
    script = """
import resource
manager = manage(config={"async_save": False})
assert manager.save(state, 1).error is None
resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
assert manager.save(state, 2).error is not None
tell(names=sorted(os.listdir(folder)))
manager.close()
"""
    ((code, report),) = start(tmp_path / "ckpt", script)
    assert code == 0, report
    assert report == {"names": ["latest", "owner", "run.json", "step-1"]}


@pytest.mark.slow
@pytest.mark.process
def test_a_stopped_writer_fails_its_save_and_is_replaced(tmp_path: Path) -> None:
    """A stopped writer fails each save at its deadline until it is replaced; the next save uses a new writer."""
    script = """
manager = manage(config={"async_save": False, "save_timeout": 5.0})
assert manager.save(state, 1).error is None
stopped = writer_pid()
os.kill(stopped, signal.SIGSTOP)
failed = str(manager.save(state, 2).error)
iteration = 3
while manager.save(state, iteration).error is not None:
    iteration += 1
tell(failed=failed, replaced=writer_pid() != stopped, gone=not os.path.exists(f"/proc/{stopped}"))
manager.close()
"""
    ((code, report),) = start(tmp_path / "ckpt", script)
    assert code == 0, report
    assert "did not respond" in report["failed"]
    assert report["replaced"]
    assert report["gone"]


@pytest.mark.process
def test_a_save_without_a_load_keeps_older_checkpoints(tmp_path: Path) -> None:
    """The first save into a directory with checkpoints that were not loaded fails and keeps them."""
    script = """
manager = manage(config={"async_save": False, "local_most_recent_k": 2, "suspect_window": 0})
for iteration in (100, 200):
    manager.save(state, iteration)
manager.close()
manager = manage(config={"async_save": False, "local_most_recent_k": 2, "suspect_window": 0})
try:
    manager.save(state, 1)
except CheckpointError as error:
    refused = str(error)
restored = manager.load_latest(state)
manager.save(state, 201)
tell(refused=refused, restored=restored.iteration, names=sorted(os.listdir(folder)))
manager.close()
"""
    ((code, report),) = start(tmp_path / "ckpt", script)
    assert code == 0, report
    assert "checkpoints (newest: 200) that this training did not load" in report["refused"]
    assert report["restored"] == 200
    assert report["names"] == ["latest", "owner", "run.json", "step-200", "step-201"]


@pytest.mark.process
def test_the_writer_exits_with_its_worker(tmp_path: Path) -> None:
    """The writer process of a killed worker exits."""
    script = """
manager = manage()
manager.save(state, 1).wait(100)
tell(writer=writer_pid())
kill_self()
"""
    ((code, report),) = start(tmp_path / "ckpt", script)
    assert code == -9, report
    deadline_s = time.monotonic() + 60
    while _runs(report["writer"]):
        assert time.monotonic() < deadline_s, "the writer outlived its worker"
        os.sched_yield()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
