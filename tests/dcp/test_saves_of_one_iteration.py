"""An iteration that is saved again while its first save is under way: a handle says what is, not what will be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.dcp.global_lane import GlobalLane
from outlast.errors import CheckpointError, DeadlineExceeded

pytestmark = pytest.mark.process
LONG_S = 60.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """One rank's, which saves to a folder beside training."""
    with_one = CheckpointManager(outlast.CheckpointConfig(directory=str(tmp_path / "ckpt"), async_save=True))
    yield with_one
    with_one.close()


def test_the_second_save_is_done_with_the_first(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first save waits for its store the second is not committed; then both are, and it was written once."""
    begun, written = threading.Event(), threading.Event()
    write = GlobalLane._write_files
    calls: list[int] = []

    def write_late(self: GlobalLane, save: Any, *others: Any) -> Any:
        calls.append(save.iteration)
        begun.set()
        written.wait(LONG_S)
        return write(self, save, *others)

    monkeypatch.setattr(GlobalLane, "_write_files", write_late)
    state = {"w": torch.ones(100)}
    first = manager.save(state, 3)
    assert begun.wait(LONG_S)  # a save that is still queued would be replaced by the second
    second = manager.save(state, 3)
    with pytest.raises(DeadlineExceeded):
        second.wait(0.5)
    assert not first.done
    written.set()
    assert second.wait(LONG_S).checkpoint == 3
    assert first.done
    assert first.error is None
    assert calls == [3]
    assert (tmp_path / "ckpt" / "step-3" / "manifest.json").exists()


def test_the_second_save_makes_good_for_the_first(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first save failed, the second is written, and is what its handle says."""
    begun, queued = threading.Event(), threading.Event()
    write = GlobalLane._write_files
    calls: list[int] = []

    def write_at_last(self: GlobalLane, save: Any, *others: Any) -> Any:
        calls.append(save.iteration)
        if len(calls) == 1:
            begun.set()
            queued.wait(LONG_S)
            raise CheckpointError("no room")
        return write(self, save, *others)

    monkeypatch.setattr(GlobalLane, "_write_files", write_at_last)
    state = {"w": torch.ones(100)}
    first = manager.save(state, 3)
    assert begun.wait(LONG_S)
    second = manager.save(state, 3)
    queued.set()
    with pytest.raises(CheckpointError, match="no room"):
        first.wait(LONG_S)
    assert second.wait(LONG_S).checkpoint == 3
    assert calls == [3, 3]
    assert (tmp_path / "ckpt" / "step-3" / "manifest.json").exists()
