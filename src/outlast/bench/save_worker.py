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

from outlast import clock
from outlast.bench.checkpoint_state import CheckpointState
from outlast.bench.measuring import timed
from outlast.bench.save_floors import Floors
from outlast.bench.save_peers import Dcp, MetaCheckpointing, save_safetensors, save_torch
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig

__all__ = ["main"]

Found = dict[str, float]


class _Ours:
    """Saves of a manager with a local tier; it removes nothing itself, as the peers do not."""

    def __init__(self, folder: Path, saved: CheckpointState, *, overlap: bool) -> None:
        config = CheckpointConfig(local_directory=str(folder), local_most_recent_k=-1, overlap_staging=overlap)
        self._manager = CheckpointManager(config)
        self._folder, self._saved, self._iteration = folder, saved, 0
        for _ in range(2):  # each of the two buffers once: fresh pages cost several times the copy
            self.save()

    def save(self) -> tuple[float, float, float]:
        """Return the seconds of the stall, of the wait for the rest of the copy, and until the save was durable."""
        self._iteration += 1
        begin_ns = clock.now_ns()
        stall_s, handle = timed(lambda: self._manager.save(self._saved.state, self._iteration))
        guard_s, _ = timed(self._manager.finish_staging)
        handle.wait()
        durable_s = (clock.now_ns() - begin_ns) / 1e9
        for old in self._folder.glob("*/step-*"):
            shutil.rmtree(old)
        return stall_s, guard_s, durable_s

    def close(self) -> None:
        self._manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure saves.")
    parser.add_argument("rounds", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tensors", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own
    saved = CheckpointState(args.tensors)
    ours = _Ours(args.folder / "ours", saved, overlap=False)
    late = _Ours(args.folder / "late", saved, overlap=True)
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
    for closing in (ours, late, floors, dcp, meta):
        if closing is not None:
            closing.close()


if __name__ == "__main__":
    main()
