"""Ranks whose calls or states differ: the difference is reported on all ranks and never becomes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saving_ranks import start
from torch.distributed import HashStore

from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.lane import SaveOutcome
from outlast.checkpoint.late_tiers import LateTiers
from outlast.checkpoint.node_lanes import MemoryLane
from outlast.checkpoint.save import Save, SaveHandle
from outlast.policy.recovery_point import Tier

OUTCOMES = """
def outcome(save):
    try:
        return save().wait(100).checkpoint
    except CheckpointError as error:
        return str(error)
"""


@pytest.mark.process
def test_ranks_that_save_different_iterations_commit_nothing(tmp_path: Path) -> None:
    """The save fails on both ranks with the reason and commits nothing; the next save succeeds."""
    folder = tmp_path / "ckpt"
    script = (
        OUTCOMES
        + """
manager = manage()
different = outcome(lambda: manager.save(state, 5 + rank))
dist.barrier()
names = [name for name in os.listdir(folder) if name.startswith("step-") and ".tmp-" not in name]
dist.barrier()
tell(different=different, names=names, durable=manager.durable_iteration, same=outcome(lambda: manager.save(state, 7)))
manager.close()
"""
    )
    for code, report in start(folder, script, world=2):
        assert code == 0, report
        assert "rank 1 saves iteration 6 meanwhile" in report["different"]
        assert report["names"] == []
        assert report["same"] == 7
    assert len(list((folder / "step-7").glob("rank-*"))) == 2


@pytest.mark.process
def test_a_rank_that_cannot_save_fails_the_save_at_once(tmp_path: Path) -> None:
    """A value that cannot be saved fails the save on all ranks with that reason, long before the timeout.

    Both ranks continue with the next save.
    """
    folder = tmp_path / "ckpt"
    script = (
        OUTCOMES
        + """
manager = manage(config={"save_timeout": 1000.0})
first = outcome(lambda: manager.save({**state, **({"bad": kill_self} if rank else {})}, 1))
second = outcome(lambda: manager.save(state, 2))
tell(first=first, second=second, durable=manager.durable_iteration)
manager.close()
"""
    )
    for code, report in start(folder, script, world=2):
        assert code == 0, report
        assert "'state.bad' of type function" in report["first"]
        assert report["second"] == report["durable"] == 2
    assert not (folder / "step-1").exists()
    assert len(list((folder / "step-2").glob("rank-*"))) == 2


@pytest.mark.process
def test_ranks_of_a_node_with_different_folders_are_rejected_with_replication(tmp_path: Path) -> None:
    """A node stores replicas in one folder, so that a commit would promise a replica that is not there: the start fails
    on both ranks with that reason. Without replication, each rank saves to its own folder."""
    script = (
        OUTCOMES
        + """
config = {"local_directory": f"{os.path.dirname(folder)}/{rank}"}
try:
    told = manage(config=config)
except Exception as error:
    told = f"{type(error).__name__}: {error}"
manager = manage(config={**config, "replication": False})
tell(told=told, saved=outcome(lambda: manager.save(state, 1)))
manager.close()
"""
    )
    for code, report in start(tmp_path / "ckpt", script, world=2):
        assert code == 0, report
        assert report["told"] == (
            "ConfigError: ranks 0 and 1 are both on node ckpt, but do not share a local_directory; a node stores "
            "replicas in one folder: give all of its ranks the same, or set replication=false"
        )
        assert report["saved"] == 1
    for rank in (0, 1):
        assert [path.name for path in tmp_path.glob(f"{rank}/ckpt/step-1/rank-*")] == [f"rank-{rank:05}.safetensors"]


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize(("saved_by", "kind"), [(2, "KeyError"), (2, "RuntimeError"), (1, "KeyError")])
def test_a_failing_state_dict_fails_the_load_at_once(tmp_path: Path, saved_by: int, kind: str) -> None:
    """Both ranks report the failing rank and the reason long before the timeout, and do not reject the checkpoint."""
    begin = """
manager = manage(config={"local_directory": None, "directory": os.path.dirname(folder), "save_timeout": 1000.0})
"""
    save = OUTCOMES + begin + 'tell(saved=outcome(lambda: manager.save({"n": 1, "x": {"y": 2}}, 1)))\nmanager.close()\n'
    load = f"""
class Untold:
    def state_dict(self):
        raise {kind}("no such part")
    def load_state_dict(self, found):
        pass
{begin}
try:
    manager.load_latest({{"n": 0, "x": Untold() if rank else {{"y": 0}}}})
    told = None
except CheckpointError as error:
    told = str(error)
tell(told=told)
manager.close()
"""
    for code, report in start(tmp_path / "ckpt", save, world=saved_by):
        assert (code, report) == (0, {"saved": 1})
    for code, report in start(tmp_path / "ckpt", load, world=2):
        assert code == 0, report
        assert f"checkpoint 1 does not fit rank 1: {kind}: " in report["told"]
        assert "no such part" in report["told"]


@pytest.mark.slow
@pytest.mark.process
def test_waiting_for_a_save_ends_when_the_store_host_is_stopped(tmp_path: Path) -> None:
    """With the host of the TCPStore stopped, ``wait`` ends at the save's deadline, and the process exits."""
    script = """
from outlast.errors import DeadlineExceeded
import outlast.checkpoint.manager as module
module.GRACE_S = 0.5
manager = manage(config={"save_timeout": 1.0})
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 0:
    signal.pause()
os.kill(pids[0], signal.SIGSTOP)
handle = manager.save(state, 1)
try:
    handle.wait()
except DeadlineExceeded as error:
    tell(text=str(error))
manager.close()
os.kill(pids[0], signal.SIGKILL)
os._exit(0)
"""
    (code, _), (other_code, report) = start(tmp_path / "ckpt", script, world=2)
    assert (code, other_code) == (-9, 0), report
    assert "neither committed nor failed" in report["text"]


@pytest.mark.slow
@pytest.mark.process
def test_the_death_of_rank_0_is_reported(tmp_path: Path) -> None:
    """Saves that fail because rank 0 is gone report that, and do not suggest to repair the directory."""
    script = """
manager = manage(config={"max_consecutive_save_failures": 1, "async_save": False})
assert manager.save(state, 1).error is None
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if rank == 0:
    signal.pause()
os.kill(pids[0], signal.SIGKILL)
first = manager.save(state, 2).error
try:
    manager.save(state, 3)
except CheckpointError as error:
    tell(first=str(first), last=str(error))
manager.close()
os._exit(0)
"""
    (code, _), (other_code, report) = start(tmp_path / "ckpt", script, world=2)
    assert (code, other_code) == (-9, 0), report
    assert "rank 0, which hosts the ranks' store, is gone" in report["first"]
    assert "1 save in a row failed" in report["last"]
    assert "start all ranks again" in report["last"]
    assert "repair the directory" not in report["last"]


@pytest.mark.slow
@pytest.mark.process
def test_nodes_with_separate_folders_commit_together(tmp_path: Path) -> None:
    """Without replicas each folder holds its ranks' shards and the same manifest.

    If one node lacks the manifest, no rank loads the checkpoint.
    """
    base = tmp_path / "ckpt"
    apart = "folder = folder + f'/node-{rank}'\nos.makedirs(folder, exist_ok=True)\n"
    save = (
        apart
        + """
manager = manage(config={"replication": False})
saved = []
for iteration in (1, 2):
    train()
    manager.save(state, iteration).wait(100)
    saved.append(content())
tell(saved=saved)
manager.close()
"""
    )
    saves = start(base, save, world=2)
    assert [code for code, _ in saves] == [0, 0], saves
    for rank in (0, 1):
        assert [path.name for path in (base / f"node-{rank}" / "step-2").glob("rank-*")] == [
            f"rank-0000{rank}.safetensors"
        ]
    manifests = {(base / f"node-{rank}" / "step-2" / "manifest.json").read_bytes() for rank in (0, 1)}
    assert len(manifests) == 1
    (base / "node-1" / "step-2" / "manifest.json").unlink()
    load = (
        apart
        + """
manager = manage(config={"replication": False})
restored = manager.load_latest(state)
tell(iteration=restored.iteration, loaded=content(), rejected=[str(one) for one in restored.rejected])
manager.close()
"""
    )
    loaded = start(base, load, world=2)
    for (code, report), (_, saved) in zip(loaded, saves, strict=True):
        assert code == 0, report
        assert report["iteration"] == 1
        assert report["loaded"] == saved["saved"][0]
        assert "rank 1" in report["rejected"][0]


class _DisappearingStore(HashStore):
    """A TCPStore double whose host disappears on request."""

    is_gone = False

    def _reach(self) -> None:
        if self.is_gone:
            raise RuntimeError("Broken pipe\nException raised from sendBytes")

    def set(self, key: str, value: str) -> None:
        self._reach()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return super().check(keys)

    def delete_key(self, key: str) -> bool:
        self._reach()
        return super().delete_key(key)


@pytest.mark.parametrize("operation", ["forget", "part"])
def test_a_store_lost_after_the_outcome_changes_nothing(operation: str) -> None:
    """If the store is lost after the outcome is known, the outcome stays valid."""
    store: Any = _DisappearingStore()
    places: Any = SimpleNamespace(nodes=("a", "b"), token="test", local=None, tiers=frozenset({Tier.MEMORY}))
    unused: Any = None
    outcomes: Any = SimpleNamespace(late=LateTiers())
    lane = MemoryLane(
        places, rank=0, store=store, writer=unused, timeout_s=60.0, claim=None, retention=unused, outcomes=outcomes
    )
    attempt = SaveAttempt(job="job", cycle=0, token="test", ordinal=0)
    save = Save(
        iteration=1,
        attempt=attempt,
        handle=SaveHandle(1, limit_s=60.0),
        started_ns=0,
        stall_s=0.0,
        tiers=frozenset({Tier.LOCAL}),
    )
    lane.post("outcome", SaveOutcome())
    store.is_gone = True
    if operation == "forget":
        lane.forget(1)
    else:
        lane.part(save)
    store.is_gone = False
    assert lane.receive(save, "outcome", SaveOutcome, grace_s=60.0) == SaveOutcome()
    assert lane.stop(60.0)
