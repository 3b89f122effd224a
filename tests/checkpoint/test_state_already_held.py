"""Ranks whose live state is the recovery point keep it; the others load and verify their copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.recovery import gather_kept, is_kept
from outlast.checkpoint.tiers import Table
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Copy, Tier, choose_recovery_point


class FakePeers:
    """Two ranks, the second of which gathers a given value."""

    rank, world_size = 0, 2

    def __init__(self, other: tuple[int, str] | None) -> None:
        self._other = other

    def gather(self, kind: Any, value: Any) -> list[Any]:
        return [value, self._other]


def table(*copies: set[Copy], world_sizes: dict[str, int] | None = None) -> Table:
    return Table(copies=list(copies), lineage={}, world_sizes=world_sizes or {}, rejected=[])


@pytest.fixture
def config(tmp_path: Path) -> CheckpointConfig:
    return CheckpointConfig(directory=str(tmp_path / "run"), async_save=False)


def save_iterations(config: CheckpointConfig, *iterations: int) -> dict[int, str]:
    """Save a state of ``iteration`` ones per iteration; return the attempts."""
    manager = CheckpointManager(config)
    state = {"weights": torch.zeros(3)}
    manager.load_latest(state)
    attempts = {}
    for iteration in iterations:
        state["weights"].fill_(iteration)
        attempts[iteration] = manager.save(state, iteration).attempt
    manager.close()
    return attempts


def test_a_state_equal_to_the_newest_checkpoint_is_kept(config: CheckpointConfig) -> None:
    """A state with the newest checkpoint's iteration and attempt is kept without a read; the next save succeeds."""
    attempts = save_iterations(config, 1, 2)
    manager = CheckpointManager(config)
    state = {"weights": torch.full((3,), 7.0)}
    restored = manager.load_latest(state, has=(2, attempts[2]))
    assert restored is not None
    assert (restored.iteration, restored.tier, restored.attempt) == (2, "kept", attempts[2])
    assert restored.bytes_read == {}
    assert state["weights"].tolist() == [7.0] * 3
    assert manager.durable_iteration == 2
    assert manager.save(state, 3).result is not None
    manager.close()


def test_another_attempt_or_an_older_iteration_is_loaded(config: CheckpointConfig) -> None:
    """A state of another attempt, or of an older checkpoint, is replaced by the newest."""
    attempts = save_iterations(config, 1, 2)
    for has in ((2, "other"), (1, attempts[1]), None):
        manager = CheckpointManager(config)
        state = {"weights": torch.full((3,), 7.0)}
        restored = manager.load_latest(state, has=has)
        assert restored is not None
        assert (restored.iteration, restored.tier) == (2, "global"), has
        assert state["weights"].tolist() == [2.0] * 3
        manager.close()


def test_a_rank_that_holds_the_state_ignores_corrupt_copies(config: CheckpointConfig) -> None:
    """A rank that holds the state keeps it although its copy is corrupt; a rank without it fails to load."""
    attempts = save_iterations(config, 1)
    assert config.directory is not None
    for path in Path(config.directory).glob("step-*/*.distcp"):
        path.write_bytes(b"x" * path.stat().st_size)
    manager = CheckpointManager(config)
    state = {"weights": torch.full((3,), 7.0)}
    restored = manager.load_latest(state, has=(1, attempts[1]))
    assert restored is not None
    assert restored.tier == "kept"
    manager.close()
    manager = CheckpointManager(config)
    with pytest.raises(CheckpointError):
        manager.load_latest(state)
    manager.close()


def test_a_kept_state_requires_copies_on_all_ranks() -> None:
    """A kept state is chosen only if each other rank has a copy of the same attempt."""
    own_state = (3, "b")
    two = Copy(2, "a", Tier.LOCAL, "node")
    three = Copy(3, "b", Tier.GLOBAL)
    assert gather_kept(own_state, table({two}, {two}), FakePeers(None)) == [None, None]  # type: ignore[arg-type]
    kept = gather_kept(own_state, table({two}, {two, three}), FakePeers(None))  # type: ignore[arg-type]
    assert kept[1] is None
    assert kept[0] is not None
    assert is_kept(kept[0])
    point = choose_recovery_point([{two, kept[0]}, {two}])
    assert point is not None
    assert point.checkpoint == 2
    assert not is_kept(point.copies[0])

    point = choose_recovery_point([{two, kept[0]}, {two, three}])
    assert point is not None
    assert point.checkpoint == 3
    assert [is_kept(copy) for copy in point.copies] == [True, False]


def test_a_checkpoint_of_another_world_size_is_loaded_by_all() -> None:
    """A checkpoint that must be resharded is read by all ranks; no rank keeps its state."""
    three = Copy(3, "b", Tier.GLOBAL)
    candidates = table({three}, {three}, world_sizes={"b": 4})
    kept = gather_kept((3, "b"), candidates, FakePeers((3, "b")))  # type: ignore[arg-type]
    assert kept == [None, None]
