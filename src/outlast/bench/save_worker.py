"""The process that ``outlast bench save`` measures stalls and durations in; prints seconds by name, a line a round.

Every save has ended, and what it wrote is removed, before the next measure begins.
"""

from __future__ import annotations

import argparse
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outlast import clock
from outlast.bench.checkpoint_state import CheckpointState
from outlast.bench.measuring import timed
from outlast.bench.save_floors import Floors
from outlast.bench.save_peers import Dcp, MetaCheckpointing, save_safetensors, save_torch
from outlast.bench.state_size import NUM_SMALL
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig

__all__ = ["main"]

Found = dict[str, float]


class _Ours:
    """Saves of a manager with a local tier; it removes nothing itself, as the peers do not."""

    def __init__(self, folder: Path, state: dict[str, Any], *, overlap: bool) -> None:
        config = CheckpointConfig(local_directory=str(folder), local_most_recent_k=-1, overlap_staging=overlap)
        self._manager = CheckpointManager(config)
        self._folder, self._state, self._iteration = folder, state, 0
        for _ in range(2):  # each of the two buffers once: fresh pages cost several times the copy
            self.save()

    def save(self) -> tuple[float, float, float]:
        """Return the seconds of the stall, of the wait for the rest of the copy, and until the save was durable."""
        self._iteration += 1
        begin_ns = clock.now_ns()
        stall_s, handle = timed(lambda: self._manager.save(self._state, self._iteration))
        guard_s, _ = timed(self._manager.finish_staging)
        handle.wait()
        durable_s = (clock.now_ns() - begin_ns) / 1e9
        for old in self._folder.glob("*/step-*"):
            shutil.rmtree(old)
        return stall_s, guard_s, durable_s

    def close(self) -> None:
        self._manager.close()


class _Many:
    """Saves of as many small tensors as a large model and its optimizer have."""

    def __init__(self, folder: Path) -> None:
        tensors = {f"layers.{number // 10}.part_{number % 10}": torch.randn(1024) for number in range(NUM_SMALL)}
        self._ours = _Ours(folder, {"tensors": tensors}, overlap=False)
        self._source = torch.cat(list(tensors.values())).numpy()
        self._target = self._source.copy()

    def save(self) -> Found:
        """Return the seconds of the stall, and of a copy of the same bytes in one piece."""
        copy_s, _ = timed(lambda: np.copyto(self._target, self._source))
        return {"many": self._ours.save()[0], "many_copy": copy_s}

    def close(self) -> None:
        self._ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure saves.")
    parser.add_argument("rounds", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tensors", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own
    saved = CheckpointState(args.tensors)
    ours = _Ours(args.folder / "ours", saved.state, overlap=False)
    late = _Ours(args.folder / "late", saved.state, overlap=True)
    many = _Many(args.folder / "many")
    floors, dcp = Floors(saved, args.folder), Dcp(saved, args.folder / "dcp")
    meta = MetaCheckpointing.find(saved, args.folder / "meta")

    def save_ours() -> Found:
        stall_s, _, durable_s = ours.save()
        return {"ours": stall_s, "ours_durable": durable_s}

    def save_late() -> Found:
        stall_s, guard_s, _ = late.save()
        return {"overlapped": stall_s, "overlapped_guard": guard_s}

    measures: list[Callable[[], Found]] = [
        save_ours,
        lambda: {"memcpy": floors.copy()},
        dcp.save_in_thread,
        dcp.save_with_stager,
        save_late,
        many.save,
        dcp.save_staging_beside,
        lambda: {"bare_write": floors.write()},
        dcp.save,
        lambda: {"torch_save": save_torch(saved, args.folder / "state.pt")},
        lambda: {"safetensors": save_safetensors(saved, args.folder / "state.safetensors")},
    ]
    if meta is not None:
        measures.append(meta.save)
    for _ in range(args.rounds):
        found: Found = {}
        for measure in measures:
            found |= measure()
        print(json.dumps(found), flush=True)
    for closing in (ours, late, many, floors, dcp, meta):
        if closing is not None:
            closing.close()


if __name__ == "__main__":
    main()
