"""After a preemption notice, all ranks stop after the same iteration with one checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from ranks import PATIENCE_S, Ranks

from outlast.errors import DeadlineExceeded
from outlast.incidents import Event, EventKind
from outlast.journal import read
from outlast.testing import RankProcesses

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import outlast

folder, what = sys.argv[1], sys.argv[2]
checkpoint = None if what == "nothing" else outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=10**6)
run = outlast.init(outlast.Config(checkpoint=checkpoint, run_dir=folder + "/run"))
model = torch.nn.Linear(2, 2)
ddp = torch.nn.parallel.DistributedDataParallel(model) if run.world_size > 1 else model
state = {"model": ddp, "steps": torch.zeros(1)}
for iteration in run.steps(state, total=10**6):
    if not state["steps"].item():
        # In one piece: torchrun runs ranks unbuffered, and they share a pipe.
        print(f"pid {run.global_rank} {os.getpid()}\\n", end="", flush=True)
    if iteration == int(state["steps"].item()) and what == "look":
        print("restored", iteration, flush=True)
        break
    ddp(torch.ones(1, 2)).sum().backward()
    state["steps"] += 1
    time.sleep(0.005)
    if iteration == 5:
        print("running\\n", end="", flush=True)
    if what == "hang" and iteration == 5 and run.global_rank == 0:
        while True:
            time.sleep(0.1)
    if what == "after" and iteration == 6:
        break
print("after the loop", flush=True)
if what == "after":
    time.sleep(600)
"""


def _script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _ends(tmp_path: Path) -> dict[int | None, Event]:
    return {event.rank: event for event in read(tmp_path / "run") if event.kind == EventKind.SESSION_ENDED}


@pytest.mark.slow
@pytest.mark.process
def test_sigterm_to_one_rank_under_torchrun_stops_all_ranks(tmp_path: Path) -> None:
    """After SIGTERM to one rank both ranks save one checkpoint and exit with 75, and the next start resumes from
    there."""
    arguments = ("--standalone", "--nproc-per-node=2", str(_script(tmp_path)), str(tmp_path), "train")
    with RankProcesses("torch.distributed.run", *arguments, world_size=1, module=True) as torchrun:
        torchrun.wait_for("running", PATIENCE_S, times=2)
        pids = {match[1]: int(match[2]) for match in re.finditer(r"pid (\d) (\d+)", torchrun.output(0))}
        os.kill(pids["1"], signal.SIGTERM)
        torchrun.wait(PATIENCE_S)
        output = torchrun.output(0)
    assert "Received signal 15, initiating graceful stop" in output
    ends = _ends(tmp_path)
    assert {rank: event.data["exit_code"] for rank, event in ends.items()} == {0: 75, 1: 75}, output
    (iteration,) = {event.iteration for event in ends.values()}
    assert iteration is not None
    assert iteration > 5
    committed = [event for event in read(tmp_path / "run") if event.kind == EventKind.SAVE_COMMITTED]
    assert {event.iteration for event in committed} == {iteration}
    with Ranks(_script(tmp_path), str(tmp_path), "look", world_size=2) as ranks:
        codes, outputs = ranks.end()
    assert codes == [0, 0], outputs
    assert f"restored {iteration}" in outputs[0]
    assert f"restored {iteration}" in outputs[1]


@pytest.mark.process
def test_without_a_checkpoint_directory_the_exit_code_is_143(tmp_path: Path) -> None:
    """The exit code is 75 only if there is a checkpoint to resume from; otherwise it is the signal's."""
    with Ranks(_script(tmp_path), str(tmp_path), "nothing") as ranks:
        ranks.wait_for_line(0, "running")
        ranks.signal(0, signal.SIGTERM)
        codes, outputs = ranks.end()
    assert codes == [128 + signal.SIGTERM], outputs
    assert "there is no checkpoint.directory" in outputs[0]
    assert re.search(
        r"no checkpoint survives the end of the job: iterations? .*lost; exiting with code 143", outputs[0]
    )


@pytest.mark.process
def test_a_second_signal_ends_a_rank_that_hangs(tmp_path: Path) -> None:
    """A second signal ends a process whose body does not return."""
    with Ranks(_script(tmp_path), str(tmp_path), "hang") as ranks:
        ranks.wait_for_line(0, "running")
        ranks.signal(0, signal.SIGTERM)
        ranks.wait_for_line(0, "initiating graceful stop")
        # A second signal within a second counts as the scheduler's echo of the first.
        deadline = time.monotonic() + PATIENCE_S
        while ranks.running(0) and time.monotonic() < deadline:
            ranks.signal(0, signal.SIGTERM)
            with contextlib.suppress(DeadlineExceeded):
                ranks.wait(0.5)
        codes, outputs = ranks.end()
    assert codes == [128 + signal.SIGTERM], outputs


@pytest.mark.process
def test_after_the_loop_sigterm_ends_the_process(tmp_path: Path) -> None:
    """After the end of training SIGTERM has its default effect."""
    with Ranks(_script(tmp_path), str(tmp_path), "after") as ranks:
        ranks.wait_for_line(0, "after the loop")
        ranks.signal(0, signal.SIGTERM)
        codes, outputs = ranks.end()
    assert codes == [-signal.SIGTERM], outputs
