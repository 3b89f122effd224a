"""The process whose memory ``outlast bench save`` watches; prints MiB by name, a line a round.

What counts is anonymous and shared memory of this process and all below it, beyond what they had before; code and other
files do not.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.checkpoint import state_dict_saver as dcp

from outlast.bench.checkpoint_state import CheckpointState
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig

__all__ = ["main"]

_INTERVAL_S = 0.02
_SAVES = 4


def _peak_extra_mib(save: Callable[[], None]) -> float:
    """Return the most memory that was in use during ``save`` beyond what was before, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier round has freed is to be counted again when it is used again
    before = peak = _used_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_INTERVAL_S):
            peak = max(peak, _used_bytes())

    watcher = threading.Thread(target=watch, name="outlast-bench-memory")
    watcher.start()
    try:
        save()
    finally:
        done.set()
        watcher.join()
    return (peak - before) / 2**20


def _used_bytes() -> int:
    """Return the bytes in use by this process and all below it, what is shared counted once."""
    this = psutil.Process()
    own = shared = 0
    for process in (this, *this.children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue  # it has ended meanwhile
        fields = dict(line.split(":", 1) for line in text.splitlines())
        own += _bytes_of(fields, "RssAnon")
        shared = max(shared, _bytes_of(fields, "RssShmem"))  # whoever maps most of it maps all of it
    return own + shared


def _bytes_of(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory that saves take.")
    parser.add_argument("rounds", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tensors", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the peer's own
    saved = CheckpointState(args.tensors)

    def save_ours() -> None:
        """Save again and again, the next as soon as there is a buffer for it."""
        folder = args.folder / "ours"
        manager = CheckpointManager(CheckpointConfig(local_directory=str(folder)))
        for iteration in range(1, _SAVES + 1):
            manager.save(saved.state, iteration)
        manager.wait()
        manager.close()
        shutil.rmtree(folder)

    def save_dcp() -> None:
        written: Any = dcp.async_save(saved.state_dict(), checkpoint_id=args.folder / "dcp", no_dist=True)
        written.result()
        shutil.rmtree(args.folder / "dcp")

    for _ in range(args.rounds):
        print(json.dumps({"ours": _peak_extra_mib(save_ours), "dcp": _peak_extra_mib(save_dcp)}), flush=True)


if __name__ == "__main__":
    main()
