"""The agent process of ranks without ``outlast run``: a hung rank is ended all the same, and nothing is left behind."""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process, pytest.mark.cold]
PATIENCE_S = 100.0
SIDE = "agent process: "

WORKER = """
import logging, os, signal, sys, time
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.monitor.rank_monitor import PlacedRankMonitor

logging.basicConfig()
what, run_dir, ending = sys.argv[1:]
timeout_s = 0.5 if what in ("sleep", "stop") else 60.0
config = FaultToleranceConfig(
    rank_section_timeouts={"step": timeout_s}, num_warmup_iterations=0, rank_termination_signal=ending
)
monitor = PlacedRankMonitor(WorkerEnv(global_rank=3, cycle=1, node="n"), config, run_dir)
assert "torch" not in sys.modules
monitor.set_iteration(6)
print("agent process:", monitor.watch.pid, flush=True)
sys.stdin.readline()
with monitor.section("step"):
    if what == "sleep":
        time.sleep(3600)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)
if what == "serve":
    sys.stdin.read()
elif what == "close":
    monitor.close()
    sys.stdin.read()
print("over", flush=True)
"""


class Worker(RankProcesses):
    """A rank without ``outlast run``, and its node's agent process."""

    def __init__(self, what: str, folder: Path, ending: str = "SIGKILL") -> None:
        arguments = what, str(folder / "run"), ending
        debug = {"OUTLAST_LOG_LEVEL": "debug"}
        super().__init__(WORKER, *arguments, world_size=1, code=True, stdin=True, environment=debug)

    def find_side(self) -> None:
        self.side = int(self.next_line(0, PATIENCE_S, containing=SIDE).removeprefix(SIDE))
        self.side_fd = os.pidfd_open(self.side)
        self.send(0, "go on")

    def side_is_over(self, timeout_s: float = PATIENCE_S) -> bool:
        return bool(select.select([self.side_fd], [], [], timeout_s)[0])

    def end(self) -> int:
        (code,) = self.wait(PATIENCE_S)
        return code

    def end_both(self) -> None:
        self.kill(0)
        over = self.side_is_over()
        os.close(self.side_fd)
        assert over  # whatever happened to the worker


@pytest.fixture
def start(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with ExitStack() as stack:

        def start(what: str, ending: str = "SIGKILL") -> Worker:
            worker = stack.enter_context(Worker(what, tmp_path, ending))
            worker.find_side()
            stack.callback(worker.end_both)
            return worker

        yield start
    left = [name for name in set(os.listdir("/dev/shm")) - before if "outlast" in name]
    assert not [name for name in left if not name.startswith(".outlast-probe")]  # another test's, for a moment


@pytest.mark.parametrize(("what", "state"), [("sleep", "S"), ("stop", "T")])
def test_hung_worker_is_ended_and_explained(start, tmp_path, what, state):
    """A worker that sleeps or is stopped is killed, for its launcher to restart; report and stack are kept."""
    worker = start(what)
    assert worker.end() == -signal.SIGKILL
    assert worker.side_is_over()
    log = worker.output(0)
    pid = worker.pid(0)
    assert f"agent process {worker.side} of node n watches rank 3 (node n, pid {pid}" in log
    assert "node n watches 1 rank: section timeouts: step 0.5 s" in log
    assert f"rank 3 (node n, pid {pid}): section 'step' exceeded 0.5 s" in log
    assert f"rank 3 (pid {pid}) is ended with SIGKILL" in log
    text = (tmp_path / "run" / "stacks" / "cycle-1" / "rank-3.txt").read_text()
    assert f"iteration 6, in step, process state {state}" in text
    assert 'File "<string>", line ' in text


def test_chosen_signal_ends_even_a_stopped_worker(start):
    """A stopped worker gets the chosen signal, and is woken for it."""
    worker = start("stop", "SIGTERM")
    assert worker.end() == -signal.SIGTERM


def test_healthy_worker_outlives_its_watch(start):
    """A worker that ends in order is not touched, and the agent process ends with it."""
    worker = start("none")
    assert worker.end() == 0
    assert worker.side_is_over()
    assert "over" in worker.output(0).splitlines()
    assert "exceeded" not in worker.output(0)


def test_killed_worker_leaves_nothing_behind(start):
    """After a SIGKILL of the worker the agent process is gone by itself, and so is the board."""
    worker = start("serve")
    worker.kill(0)
    assert worker.end() == -signal.SIGKILL
    assert worker.side_is_over()


def test_a_killed_agent_process_is_replaced(start):
    """The rank is watched by another agent process, twice; then one warning reports that it is not watched any more."""
    worker = start("serve")
    for _ in range(2):
        os.kill(worker.side, signal.SIGKILL)
        line = worker.next_line(0, PATIENCE_S, containing=f"agent process {worker.side} ended: agent process ")
        worker.side = int(line.partition("ended: agent process ")[2].split()[0])
    os.kill(worker.side, signal.SIGKILL)
    assert "WARNING" in worker.next_line(0, PATIENCE_S, containing="hangs of rank 3 (node n")
    worker.end_input(0)
    assert worker.end() == 0
    assert worker.output(0).count("WARNING") == 3


def test_closed_monitor_ends_the_agent_process(start):
    """close() ends the agent process, while the worker goes on."""
    worker = start("close")
    assert worker.side_is_over()
    worker.end_input(0)
    assert worker.end() == 0
    assert "WARNING" not in worker.output(0)
