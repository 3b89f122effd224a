"""The side process: without an agent of ours a hung worker is ended all the same, and nothing is left behind."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

WORKER = """
import logging, os, signal, sys, time
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.monitor import RankMonitor

logging.basicConfig(level=logging.INFO)
what, run_dir, ending = sys.argv[1:]
config = FaultToleranceConfig(
    rank_section_timeouts={"step": 0.5}, num_warmup_iterations=0, rank_termination_signal=ending
)
monitor = RankMonitor(WorkerEnv(global_rank=3, cycle=1, node="n"), config, run_dir)
assert "torch" not in sys.modules
monitor.set_iteration(6)
with monitor.section("step"):
    print(monitor._side.pid, flush=True)
    if what == "sleep":
        time.sleep(3600)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
if what == "serve":
    sys.stdin.read()
elif what == "close":
    monitor.close()
    sys.stdin.read()
print("over", flush=True)
"""


class Worker:
    """A worker without an agent, and its side process."""

    def __init__(self, what: str, folder: Path, ending: str = "SIGKILL") -> None:
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, what, str(folder / "run"), ending],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.side = int(self.process.stdout.readline())
        self.side_fd = os.pidfd_open(self.side)

    def side_is_over(self, timeout_s: float = 20.0) -> bool:
        return bool(select.select([self.side_fd], [], [], timeout_s)[0])

    def logged(self, pattern: str, timeout_s: float = 20.0) -> bool:
        until = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.log.read_text())) and time.monotonic() < until:
            time.sleep(0.02)
        return found is not None

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.side_is_over()  # whatever happened to the worker
        os.close(self.side_fd)


@pytest.fixture
def start(tmp_path):
    workers = []

    def start(what: str, ending: str = "SIGKILL") -> Worker:
        workers.append(Worker(what, tmp_path, ending))
        return workers[-1]

    before = set(os.listdir("/dev/shm"))
    yield start
    for worker in workers:
        worker.close()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "outlast" in name]


@pytest.mark.parametrize(("what", "state"), [("sleep", "S"), ("stop", "T")])
def test_hung_worker_is_ended_and_explained(start, tmp_path, what, state):
    """A worker that sleeps or is stopped is killed, for its launcher to restart; report and stack are kept."""
    worker = start(what)
    assert worker.process.wait(20) == -signal.SIGKILL
    assert worker.side_is_over()
    log = worker.log.read_text()
    pid = worker.process.pid
    assert f"no agent of outlast runs here: side process {worker.side} watches rank 3 (node n, pid {pid}" in log
    assert "[RankMonitorServer] node n watches 1 ranks: section timeouts: step 0.5 s" in log
    assert f"[RankMonitor] rank 3 (node n, pid {pid}): section 'step' exceeded 0.5 s" in log
    assert f"[RankMonitor] rank 3 (pid {pid}) is ended with SIGKILL" in log
    text = (tmp_path / "run" / "stacks" / "cycle-1" / "rank-3.txt").read_text()
    assert f"iteration 6, in step, process state {state}" in text
    assert 'File "<string>", line ' in text


def test_chosen_signal_ends_even_a_stopped_worker(start):
    """A stopped worker gets the chosen signal, and is woken for it."""
    worker = start("stop", "SIGTERM")
    assert worker.process.wait(20) == -signal.SIGTERM


def test_healthy_worker_outlives_its_watch(start):
    """A worker that ends in order is not touched, and its side process ends with it."""
    worker = start("none")
    assert worker.process.wait(20) == 0
    assert worker.process.stdout.read() == b"over\n"
    assert worker.side_is_over()
    assert "exceeded" not in worker.log.read_text()


def test_killed_worker_leaves_nothing_behind(start):
    """After a SIGKILL of the worker the side process is gone by itself, and so is the board."""
    worker = start("serve")
    worker.process.kill()
    assert worker.process.wait(10) == -signal.SIGKILL
    assert worker.side_is_over()


def test_lost_side_process_is_noticed(start):
    """When the side process is killed the worker says so in one warning, leaves no zombie, and goes on."""
    worker = start("serve")
    os.kill(worker.side, signal.SIGKILL)
    assert worker.logged(rf"WARNING.*side process {worker.side} ended \(exit code -9\)")
    assert not Path(f"/proc/{worker.side}").exists()
    worker.process.stdin.close()
    assert worker.process.wait(20) == 0
    assert worker.log.read_text().count("WARNING") == 1


def test_closed_monitor_ends_its_side_process(start):
    """close() ends the side process at once, while the worker goes on."""
    worker = start("close")
    assert worker.side_is_over()
    worker.process.stdin.close()
    assert worker.process.wait(20) == 0
    assert "WARNING" not in worker.log.read_text()
