"""What ends early leaves nothing open and nothing behind, and a save for diagnosis leaves the committed ones alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.outcomes import Outcomes
from outlast.checkpoint.places import Peers, agree_places
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, Mismatch, PeerLost


def open_shards() -> list[str]:
    """Return the shards that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # of the listing itself
            continue
        if name.endswith(".safetensors"):
            found.append(name)
    return found


@pytest.fixture
def config(tmp_path: Path) -> CheckpointConfig:
    return CheckpointConfig(local_directory=str(tmp_path / "local"), async_save=False)


@pytest.mark.process
def test_a_checkpoint_that_does_not_fit_is_closed(config: CheckpointConfig) -> None:
    """The copy that was verified before the state was found to be another one is not held any more."""
    manager = CheckpointManager(config)
    manager.save({"w": torch.zeros(3)}, 1)
    manager.close()
    manager = CheckpointManager(config)
    with pytest.raises(Mismatch, match="does not fit rank 0"):
        manager.load_latest({"w": torch.zeros(4)})
    assert open_shards() == []
    manager.close()


class _LeavingPeers:
    """Peers that leave after so many gathers."""

    rank, world_size = 0, 1

    def __init__(self, num_gathers: int) -> None:
        self._left = num_gathers

    def gather(self, kind: Any, value: Any) -> list[Any]:
        if not self._left:
            raise PeerLost("a peer left")
        self._left -= 1
        return [value]

    def find_first(self, text: str) -> str:
        return str(self.gather(str, text)[0])


@pytest.mark.parametrize("num_gathers", [1, 2])
def test_a_start_that_fails_leaves_no_probe(config: CheckpointConfig, tmp_path: Path, num_gathers: int) -> None:
    """The file that shows which ranks see one folder goes, also when a peer leaves before all have looked."""
    with pytest.raises(PeerLost):
        agree_places(config, WorkerEnv(node="n"), _LeavingPeers(num_gathers), WriterClient(None))  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "local" / "n") == []


@pytest.mark.process
def test_a_save_for_diagnosis_neither_needs_nor_replaces_the_committed_one(
    config: CheckpointConfig, tmp_path: Path
) -> None:
    """It is written although its iteration is committed, and does not count as committed itself."""
    manager = CheckpointManager(config)
    state = {"w": torch.zeros(3)}
    manager.save(state, 1)
    manager.save(state, 1, suspect=True)
    manager.save(state, 2, suspect=True)
    manager.save(state, 2)
    manager.close()
    (node,) = (tmp_path / "local").iterdir()
    for folder in (node, node / "suspect"):
        assert {path.name for path in folder.iterdir() if path.name.startswith("step-")} == {"step-1", "step-2"}


@pytest.mark.process
def test_a_save_that_staged_nothing_does_not_count_as_a_cheap_one(
    config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What saves cost stays what it was, and so does the interval that is chosen by it."""
    manager = CheckpointManager(config)
    state = {"w": torch.zeros(3)}
    manager.save(state, 1)
    cost_s = manager.save_cost_s

    def refuse(num_bytes: int) -> None:
        raise CheckpointError("no memory")

    monkeypatch.setattr(manager._arenas, "take", refuse)
    assert "no memory" in str(manager.save(state, 2).error)
    assert manager.save_cost_s == cost_s
    manager.close()


def test_a_manager_that_cannot_open_leaves_the_board(config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lane cannot begin, everything that was opened before it is closed."""
    closed = list[str]()
    for kind in (Outcomes, Peers, WriterClient):
        monkeypatch.setattr(kind, "close", lambda _, name=kind.__name__: closed.append(name))

    def refuse(peers: Peers) -> None:
        raise RuntimeError("no store")

    monkeypatch.setattr(Peers, "store", refuse)
    with pytest.raises(RuntimeError, match="no store"):
        CheckpointManager(config)
    assert closed == ["Outcomes", "Peers", "WriterClient"]
