"""Workers of a data loader survive a signal to the whole process group, and end with their parent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from outlast.testing import RankProcesses

PATIENCE_S = 100.0

SCRIPT = """
import os, signal, sys, time
import torch
from outlast.preemption import ShutdownListener, outlive_sigterm

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

if __name__ == "__main__":
    torch.set_num_threads(1)
    how = sys.argv[1]
    listener = ShutdownListener(keep_forked=how in ("kept", "busy"))
    extra = {"multiprocessing_context": "spawn", "worker_init_fn": outlive_sigterm} if how == "spawned" else {}
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, timeout=100, **extra)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    print("running", flush=True)
    if how == "busy":
        time.sleep(600)
    assert listener.wait(100)
    for _ in range(50):  # more than what was fetched ahead
        next(batches)
    print("went on", flush=True)
    del batches
    print("loader ended", flush=True)
"""


@contextmanager
def running(tmp_path: Path, mode: str) -> Iterator[tuple[RankProcesses, list[psutil.Process]]]:
    """Start the script in its own process group; yield the ranks and the loader's workers, once they work."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with RankProcesses(script, mode, world_size=1) as ranks:
        ranks.wait_for("running\n", PATIENCE_S)
        yield ranks, psutil.Process(ranks.pid(0)).children(recursive=True)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("mode", ["kept", "spawned"])
def test_loader_workers_survive_a_signal_to_the_group(tmp_path: Path, mode: str) -> None:
    """Batches keep arriving after a signal to the process group; the loader then ends its workers as usual."""
    with running(tmp_path, mode) as (ranks, workers):
        assert len(workers) >= 2
        os.killpg(ranks.pid(0), signal.SIGTERM)
        codes, output = ranks.wait(PATIENCE_S), ranks.output(0)
        # torch's spawned workers, and Python's tracker of their semaphores, sometimes complain at their end.
        progress = [line for line in output.splitlines() if line in ("went on", "loader ended")]
        assert (codes, progress) == ([0], ["went on", "loader ended"]), output
        assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]


@pytest.mark.process
def test_loader_workers_die_without_the_option(tmp_path: Path) -> None:
    """Without the option the signal ends the workers, and the next batch fails."""
    with running(tmp_path, "plain") as (ranks, _):
        os.killpg(ranks.pid(0), signal.SIGTERM)
        assert ranks.wait(PATIENCE_S) == [1]
        output = ranks.output(0)  # torch names the worker, or the connection to it, perhaps within a traceback
        assert "Error" in output
        assert "went on" not in output


@pytest.mark.process
def test_loader_workers_end_with_their_parent(tmp_path: Path) -> None:
    """An earlier signal takes effect once the parent has exited, so no process is left."""
    with running(tmp_path, "busy") as (ranks, workers):
        os.killpg(ranks.pid(0), signal.SIGTERM)
        ranks.kill(0)
        assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]
