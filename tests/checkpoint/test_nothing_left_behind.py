"""Cleanup after early failures, and saves for diagnosis that do not affect committed checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.arena_pool import ArenaPool
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
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if name.endswith(".safetensors"):
            found.append(name)
    return found


@pytest.fixture
def config(tmp_path: Path) -> CheckpointConfig:
    return CheckpointConfig(local_directory=str(tmp_path / "local"), async_save=False)


@pytest.mark.process
def test_a_rejected_checkpoint_is_closed(config: CheckpointConfig) -> None:
    """The verified copy is closed after the live state is found to be incompatible."""
    manager = CheckpointManager(config)
    manager.save({"w": torch.zeros(3)}, 1)
    manager.close()
    manager = CheckpointManager(config)
    with pytest.raises(Mismatch, match="does not fit rank 0"):
        manager.load_latest({"w": torch.zeros(4)})
    assert open_shards() == []
    manager.close()


class _ExitingPeers:
    """Peers that exit after a number of gathers."""

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
def test_a_failed_start_removes_its_probe_file(config: CheckpointConfig, tmp_path: Path, num_gathers: int) -> None:
    """The file that shows which ranks share a folder is removed, also when a peer exits before all have read it."""
    with pytest.raises(PeerLost):
        agree_places(config, WorkerEnv(node="n"), _ExitingPeers(num_gathers), WriterClient(None))  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "local" / "n") == []


@pytest.mark.process
def test_a_suspect_save_does_not_affect_the_committed_one(config: CheckpointConfig, tmp_path: Path) -> None:
    """A suspect save of a committed iteration is written, and does not count as committed."""
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
def test_a_save_without_staging_does_not_change_the_save_cost(
    config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that stages nothing changes neither the measured cost nor the interval derived from it."""
    manager = CheckpointManager(config)
    state = {"w": torch.zeros(3)}
    manager.save(state, 1)
    cost_s = manager.save_cost_s

    def fail(pool: ArenaPool, num_bytes: int) -> None:
        raise CheckpointError("no memory")

    monkeypatch.setattr(ArenaPool, "take", fail)
    assert "no memory" in str(manager.save(state, 2).error)
    assert manager.save_cost_s == cost_s
    manager.close()


def test_a_manager_that_cannot_open_closes_its_parts(config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a lane cannot start, everything that was opened before is closed."""
    closed = list[str]()
    for kind in (Outcomes, Peers, WriterClient):
        monkeypatch.setattr(kind, "close", lambda _, name=kind.__name__: closed.append(name))

    def fail(peers: Peers) -> None:
        raise RuntimeError("no store")

    monkeypatch.setattr(Peers, "store", fail)
    with pytest.raises(RuntimeError, match="no store"):
        CheckpointManager(config)
    assert closed == ["Outcomes", "Peers", "WriterClient"]
