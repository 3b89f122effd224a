"""An iteration that is saved again while its first save is in progress: a handle reports the state of its own save."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import outlast
from outlast.checkpoint import CheckpointManager
from outlast.errors import CheckpointError, DeadlineExceeded
from outlast.runtime.injection import armed

pytestmark = pytest.mark.process
LONG_S = 60.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """A manager of one rank that saves to a folder in the background."""
    opened = CheckpointManager(outlast.CheckpointConfig(directory=str(tmp_path / "ckpt"), async_save=True))
    yield opened
    opened.close()


def test_a_repeated_save_completes_with_the_first(manager: CheckpointManager, tmp_path: Path) -> None:
    """A second save of the iteration that is being written is not committed before the first; both complete with one
    write."""
    begun, released = threading.Event(), threading.Event()
    attempts: list[str] = []

    def wait(attempt: str) -> None:
        attempts.append(attempt)
        begun.set()
        released.wait(LONG_S)

    state = {"w": torch.ones(100)}
    with armed("checkpoint.fenced", wait):
        first = manager.save(state, 3)
        assert begun.wait(LONG_S)  # a queued save would be replaced by the second one
        second = manager.save(state, 3)
        with pytest.raises(DeadlineExceeded):
            second.wait(0.5)
        assert not first.done
        released.set()
        assert second.wait(LONG_S).checkpoint == 3
    assert first.done
    assert first.error is None
    assert len(attempts) == 1
    assert (tmp_path / "ckpt" / "step-3" / "manifest.json").exists()


def test_a_repeated_save_is_written_after_the_first_failed(manager: CheckpointManager, tmp_path: Path) -> None:
    """If the first save of an iteration fails, the second one is written and its handle reports the checkpoint."""
    begun, queued = threading.Event(), threading.Event()
    attempts: list[str] = []

    def fail_once(attempt: str) -> None:
        attempts.append(attempt)
        if len(attempts) == 1:
            begun.set()
            queued.wait(LONG_S)
            raise CheckpointError("no room")

    state = {"w": torch.ones(100)}
    with armed("checkpoint.fenced", fail_once):
        first = manager.save(state, 3)
        assert begun.wait(LONG_S)
        second = manager.save(state, 3)
        queued.set()
        with pytest.raises(CheckpointError, match="no room"):
            first.wait(LONG_S)
        assert second.wait(LONG_S).checkpoint == 3
    assert len(set(attempts)) == len(attempts) == 2
    assert (tmp_path / "ckpt" / "step-3" / "manifest.json").exists()
