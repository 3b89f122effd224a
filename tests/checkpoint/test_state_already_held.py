"""Ranks whose state is the checkpoint that all go back to keep it; the others load, and prove what they load."""

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


class Peers:
    """Two ranks, the other of which says what it is told to say."""

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


def saved(config: CheckpointConfig, *iterations: int) -> dict[int, str]:
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


def test_a_state_that_is_the_newest_checkpoint_is_left_alone(config: CheckpointConfig) -> None:
    """With its iteration and attempt named, nothing is read and nothing touched; the next save descends from it."""
    attempts = saved(config, 1, 2)
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
    attempts = saved(config, 1, 2)
    for has in ((2, "other"), (1, attempts[1]), None):
        manager = CheckpointManager(config)
        state = {"weights": torch.full((3,), 7.0)}
        restored = manager.load_latest(state, has=has)
        assert restored is not None
        assert (restored.iteration, restored.tier) == (2, "global"), has
        assert state["weights"].tolist() == [2.0] * 3
        manager.close()


def test_a_bad_copy_is_not_needed_by_who_has_the_state(config: CheckpointConfig) -> None:
    """The rank keeps what it has though its copy is damaged; without it, the load is refused as ever."""
    attempts = saved(config, 1)
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


def test_what_one_rank_has_does_not_make_a_checkpoint() -> None:
    """A checkpoint is chosen only if every other rank has a copy of that very attempt."""
    mine = (3, "b")
    two = Copy(2, "a", Tier.LOCAL, "node")
    three = Copy(3, "b", Tier.GLOBAL)
    assert gather_kept(mine, table({two}, {two}), Peers(None)) == [None, None]  # type: ignore[arg-type]
    kept = gather_kept(mine, table({two}, {two, three}), Peers(None))  # type: ignore[arg-type]
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


def test_a_checkpoint_of_another_number_of_ranks_is_loaded_by_all() -> None:
    """What has to be re-cut is read by all ranks together: no rank stays aside."""
    three = Copy(3, "b", Tier.GLOBAL)
    both = table({three}, {three}, world_sizes={"b": 4})
    kept = gather_kept((3, "b"), both, Peers((3, "b")))  # type: ignore[arg-type]
    assert kept == [None, None]
