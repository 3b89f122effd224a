"""No object, process or hook of an iteration survives the iteration."""

from __future__ import annotations

import multiprocessing
import sys
import time
import weakref
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from outlast.errors import PeerLost
from outlast.inprocess.leaving import Background, describe, drop, end_children, is_consequence
from outlast.inprocess.rank import WrappedRank


class Big:
    """Stands for a tensor."""


def fail(kept: list[weakref.ref[Big]]) -> None:
    big = Big()
    kept.append(weakref.ref(big))
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer\nand more") from error


def test_the_frames_of_an_exception_are_cleared() -> None:
    """The objects in a failed call's frames are freed once its exception was dropped, even though the exception is
    referenced."""
    kept: list[weakref.ref[Big]] = []
    with pytest.raises(ValueError) as caught:
        fail(kept)
    assert kept[0]() is not None
    drop(caught.value)
    assert kept[0]() is None
    assert caught.value.__traceback__ is None


def test_a_fault_is_described_in_one_line() -> None:
    """The description has type, first line and location."""
    try:
        fail([])
    except ValueError as error:
        text = describe(error)
    assert text.startswith("ValueError: outer (at ")
    assert "test_leaving.py:" in text
    assert "and more" not in text


@pytest.mark.parametrize("error", [None, SystemExit(0), ValueError("wrong")])
def test_nothing_is_called_after_the_function_has_ended(error: BaseException | None) -> None:
    """The wrapper calls nothing directly after the function, so that a late order cannot be raised in a call."""
    called: list[str] = []

    def function() -> int:
        if error is not None:
            raise error
        return 5

    def record_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back is not None and frame.f_back.f_code is WrappedRank._enter.__code__:
            called.append(frame.f_code.co_name)

    rank: Any = Mock(_function=function)
    sys.setprofile(record_call)
    try:
        outcome = WrappedRank._enter(rank, Mock(), 0, {})
    finally:
        sys.setprofile(None)
    assert called[-1] == "function"
    assert (outcome.value, outcome.error) == (None if error else 5, error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[gloo] Connection reset by peer"), True),
        (PeerLost("gone"), True),
        (ConnectionResetError(104, "Connection reset"), True),
        (RuntimeError("shape mismatch"), False),
        (RuntimeError("could not reach the remote"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_lost_connections_are_consequences(error: Exception, expected: bool) -> None:
    """Errors that only report the loss of another rank do not count as faults of this rank."""
    assert is_consequence(error) is expected


def test_the_exception_hook_is_restored() -> None:
    """The hook for uncaught exceptions that each default group adds is removed."""
    background = Background()
    before = sys.excepthook
    sys.excepthook = lambda *_: None
    background.restore()
    assert sys.excepthook is before


class Stuck(Dataset[torch.Tensor]):
    """A data set whose third item never returns."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 2:
            time.sleep(3600)
        return torch.zeros(1)


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers_end_at_once(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are stuck are killed, and deletion of their iterator does not wait for them."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 300.0)
    before = set(multiprocessing.active_children())
    loader: Any = DataLoader(Stuck(), batch_size=1, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    begin = time.monotonic()
    end_children(workers)
    del iterator, loader
    passed_s = time.monotonic() - begin
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert passed_s < 150, "it waited for a worker"  # torch waits this interval for each worker
