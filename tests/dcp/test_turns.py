"""Saves to a tier that is behind: one is written, the newest waits, and all ranks write the same ones."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from lanes import Lanes, flat_state, stage, staged_save

from outlast.checkpoint.dcp.assemble import Assemble, Assembled, assemble
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.save import Replaced, Save

WORLD = 3
LONG_S = 60.0


class _Gate:
    """A directory that does not respond until it is opened."""

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
    """Submit a save on some ranks."""
    attempt = SaveAttempt(job="job", cycle=0, token=lanes.token, ordinal=ordinal)
    saves = {}
    for rank in ranks:
        flat = flat_state({"w": torch.full((64,), float(iteration)), "own": rank})
        image = stage(flat, rank=rank, world=WORLD, iteration=iteration, attempt=str(attempt))
        lanes._images[rank] = image  # the writer in place reads the newest image; all of a rank's are alike in layout
        lanes._arenas.append(image.arena)
        saves[rank] = staged_save(image, iteration, attempt)
        lanes.lanes[rank].submit(saves[rank])
    return saves


def test_the_newest_save_takes_the_place_of_older_ones_that_wait(tmp_path: Path) -> None:
    """While the first save is written four more come: on every rank the last one follows it, and none of the others."""
    gate = _Gate()
    with Lanes(str(tmp_path), WORLD, writer=gate.write) as lanes:
        for ordinal, iteration in enumerate((10, 20, 30, 40, 50)):
            _submit(lanes, iteration, range(WORLD), ordinal)
            if iteration == 10:
                assert gate.is_reached.wait(LONG_S)
        gate.is_open.set()
        for _ in range(5 * WORLD):
            assert lanes._told.acquire(timeout=LONG_S)
        assert lanes.directory.checkpoints() == [50, 10]
        assert gate.written == [10, 50]


def test_a_save_that_some_ranks_have_replaced_is_written_by_none(tmp_path: Path) -> None:
    """Rank 0 is behind and begins a save that the others do not hold any more; the one that they hold follows."""
    gate = _Gate()
    ended: dict[tuple[int, int], object] = {}
    with Lanes(str(tmp_path), WORLD, writer=gate.write) as lanes:
        for rank, lane in enumerate(lanes.lanes):
            outcomes = lane._outcomes
            note = outcomes._end  # type: ignore[attr-defined]

            def end(save: Save, error: object, rank: int = rank, note: object = note) -> None:
                ended.setdefault((rank, save.iteration), error)
                note(save, error)  # type: ignore[operator]

            outcomes._end = end  # type: ignore[attr-defined]
        _submit(lanes, 10, range(WORLD), 0)
        assert gate.is_reached.wait(LONG_S)
        _submit(lanes, 20, range(WORLD), 1)
        _submit(lanes, 30, [1, 2], 2)  # there it takes the place of 20
        gate.is_open.set()
        for _ in range(WORLD + 2 + 1):  # 10 on all, 20 replaced on two, then on rank 0 by what they respond
            assert lanes._told.acquire(timeout=LONG_S)
        assert lanes.directory.checkpoints() == [10]
        _submit(lanes, 30, [0], 2)
        for _ in range(WORLD):
            assert lanes._told.acquire(timeout=LONG_S)
        assert lanes.directory.checkpoints() == [30, 10]
    assert {type(ended[rank, 20]) for rank in range(WORLD)} == {Replaced}
    assert [ended[rank, 30] for rank in range(WORLD)] == [None] * WORLD


def test_a_save_that_failed_is_retried_with_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing newer comes, so the same save is tried again until the place takes it; each try writes to other names."""
    folders: list[str] = []

    def write(rank: int, request: Assemble, image: memoryview) -> Assembled:
        if rank == 1:
            folders.append(request.folder)
            if len(folders) < 4:
                return Assembled(error=f"{request.name}: No space left on device")
        return assemble(request, image)

    committed = threading.Event()
    with Lanes(str(tmp_path), WORLD, writer=write, retry_s=0.01) as lanes:
        monkeypatch.setattr(
            lanes.lanes[0]._outcomes, "committed", lambda save, lane, tiers, failures=(): committed.set()
        )
        saves = _submit(lanes, 10, range(WORLD), 0)
        assert committed.wait(LONG_S)
        assert lanes.directory.checkpoints() == [10]
        assert lanes.directory.manifest(10).attempt == str(saves[0].attempt)
    assert len(folders) == len(set(folders)) == 4
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_checkpoint_that_is_kept_for_ever_is_not_replaced(tmp_path: Path) -> None:
    """A multiple of save_retain_interval that waits is written before the newest save, which replaces the others."""
    gate = _Gate()
    with Lanes(str(tmp_path), WORLD, writer=gate.write, most_recent_k=-1) as lanes:
        for lane in lanes.lanes:
            lane._retention = dataclasses.replace(lane._retention, retain_interval=40)
        for ordinal, iteration in enumerate((10, 30, 40, 50, 60)):
            _submit(lanes, iteration, range(WORLD), ordinal)
            if iteration == 10:
                assert gate.is_reached.wait(LONG_S)
        gate.is_open.set()
        for _ in range(5 * WORLD):
            assert lanes._told.acquire(timeout=LONG_S)
        assert lanes.directory.checkpoints() == [60, 40, 10]
