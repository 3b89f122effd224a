"""A data loader's workers outlive a signal to the whole process group, and nothing else."""

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
def running(tmp_path: Path, how: str) -> Iterator[tuple[RankProcesses, list[psutil.Process]]]:
    """Start the script as a group of its own; yield it, and its loader's workers, once they work."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with RankProcesses(script, how, world_size=1) as ranks:
        ranks.wait_for("running\n", PATIENCE_S)
        yield ranks, psutil.Process(ranks.pid(0)).children(recursive=True)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("how", ["kept", "spawned"])
def test_workers_go_on_through_a_signal_to_the_group(tmp_path: Path, how: str) -> None:
    """Batches come on after the group was told to leave; the loader then ends its workers as ever."""
    with running(tmp_path, how) as (ranks, workers):
        assert len(workers) >= 2
        os.killpg(ranks.pid(0), signal.SIGTERM)
        codes, output = ranks.wait(PATIENCE_S), ranks.output(0)
        # torch's spawned workers, and Python's tracker of their semaphores, sometimes complain at their end.
        said = [line for line in output.splitlines() if line in ("went on", "loader ended")]
        assert (codes, said) == ([0], ["went on", "loader ended"]), output
        assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]


@pytest.mark.process
def test_without_the_option_they_die_as_torchs_do(tmp_path: Path) -> None:
    """What the option is for: the signal ends the workers, and the next batch fails."""
    with running(tmp_path, "plain") as (ranks, _):
        os.killpg(ranks.pid(0), signal.SIGTERM)
        assert ranks.wait(PATIENCE_S) == [1]
        output = ranks.output(0)  # torch names the worker, or the connection to it, perhaps within a traceback
        assert "Error" in output
        assert "went on" not in output


@pytest.mark.process
def test_they_end_when_their_parent_is_gone(tmp_path: Path) -> None:
    """A signal that came before counts once the parent has left, so nothing is left behind."""
    with running(tmp_path, "busy") as (ranks, workers):
        os.killpg(ranks.pid(0), signal.SIGTERM)
        ranks.kill(0)
        assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]
