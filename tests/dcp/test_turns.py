"""Saves to a tier that is slower than training: one is written, the newest one waits, and all ranks write the same
saves."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from lanes import Lanes, flat_state

from outlast.checkpoint.dcp.assemble import Assemble, Assembled, assemble
from outlast.checkpoint.save import Replaced, Save

WORLD = 3
LONG_S = 60.0


class _Gate:
    """A writer that waits until the gate is opened."""

    def __init__(self) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        self.written: list[int] = []

    def write(self, rank: int, request: Assemble, image: memoryview) -> Assembled:
        self.is_reached.set()
        assert self.is_open.wait(LONG_S)
        if rank == 0:
            self.written.append(int(request.folder.split(".")[0].removeprefix("step-")))
        return assemble(request, image)


def _submit(lanes: Lanes, iteration: int, ranks: range | list[int], ordinal: int) -> dict[int, Save]:
    flats = {rank: flat_state({"w": torch.full((64,), float(iteration)), "own": rank}) for rank in ranks}
    return lanes.submit(flats, iteration, ordinal=ordinal)


def test_the_newest_save_replaces_older_queued_saves(tmp_path: Path) -> None:
    """While the first save is written, four more are submitted: every rank writes the last one and drops the other
    three."""
    gate = _Gate()
    with Lanes(str(tmp_path), WORLD, writer=gate.write) as lanes:
        for ordinal, iteration in enumerate((10, 20, 30, 40, 50)):
            _submit(lanes, iteration, range(WORLD), ordinal)
            if iteration == 10:
                assert gate.is_reached.wait(LONG_S)
        gate.is_open.set()
        lanes.wait(5 * WORLD)
        assert lanes.directory.checkpoints() == [50, 10]
        assert gate.written == [10, 50]


def test_a_save_that_some_ranks_replaced_is_not_written(tmp_path: Path) -> None:
    """Rank 0 begins a save that the other ranks have replaced: no rank writes it, and all ranks write the newer
    save."""
    gate = _Gate()
    ended: dict[tuple[int, int], object] = {}

    def record(rank: int, save: Save, error: object) -> None:
        ended.setdefault((rank, save.iteration), error)

    with Lanes(str(tmp_path), WORLD, writer=gate.write, on_outcome=record) as lanes:
        _submit(lanes, 10, range(WORLD), 0)
        assert gate.is_reached.wait(LONG_S)
        _submit(lanes, 20, range(WORLD), 1)
        _submit(lanes, 30, [1, 2], 2)  # replaces 20 on these ranks
        gate.is_open.set()
        lanes.wait(WORLD + 2 + 1)  # 10 on all ranks; 20 replaced on two ranks, then on rank 0
        assert lanes.directory.checkpoints() == [10]
        _submit(lanes, 30, [0], 2)
        lanes.wait(WORLD)
        assert lanes.directory.checkpoints() == [30, 10]
    assert {type(ended[rank, 20]) for rank in range(WORLD)} == {Replaced}
    assert [ended[rank, 30] for rank in range(WORLD)] == [None] * WORLD


def test_a_failed_save_is_retried_in_a_new_folder(tmp_path: Path) -> None:
    """Without a newer save, a failed save is retried until it succeeds; each attempt writes to a different folder."""
    folders: list[str] = []

    def write(rank: int, request: Assemble, image: memoryview) -> Assembled:
        if rank == 1:
            folders.append(request.folder)
            if len(folders) < 4:
                return Assembled(error=f"{request.name}: No space left on device")
        return assemble(request, image)

    committed = threading.Event()

    def record(rank: int, save: Save, error: object) -> None:
        if rank == 0 and error is None:
            committed.set()

    with Lanes(str(tmp_path), WORLD, writer=write, retry_s=0.01, on_outcome=record) as lanes:
        saves = _submit(lanes, 10, range(WORLD), 0)
        assert committed.wait(LONG_S)
        assert lanes.directory.checkpoints() == [10]
        assert lanes.directory.manifest(10).attempt == str(saves[0].attempt)
    assert len(folders) == len(set(folders)) == 4
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_queued_permanent_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    """A queued multiple of save_retain_interval is written before the newest save, which replaces the other queued
    saves."""
    gate = _Gate()
    with Lanes(str(tmp_path), WORLD, writer=gate.write, most_recent_k=-1, retain_interval=40) as lanes:
        for ordinal, iteration in enumerate((10, 30, 40, 50, 60)):
            _submit(lanes, iteration, range(WORLD), ordinal)
            if iteration == 10:
                assert gate.is_reached.wait(LONG_S)
        gate.is_open.set()
        lanes.wait(5 * WORLD)
        assert lanes.directory.checkpoints() == [60, 40, 10]
