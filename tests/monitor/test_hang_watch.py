"""The agent process of ranks without ``outlast run`` ends a hung rank and leaves nothing behind."""

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
AGENT = "agent process: "

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

    def __init__(self, hang: str, folder: Path, ending: str = "SIGKILL") -> None:
        arguments = hang, str(folder / "run"), ending
        debug = {"OUTLAST_LOG_LEVEL": "debug"}
        super().__init__(WORKER, *arguments, world_size=1, code=True, stdin=True, environment=debug)

    def find_agent(self) -> None:
        self.agent = int(self.next_line(0, PATIENCE_S, containing=AGENT).removeprefix(AGENT))
        self.agent_fd = os.pidfd_open(self.agent)
        self.send(0, "go on")

    def agent_has_ended(self, timeout_s: float = PATIENCE_S) -> bool:
        return bool(select.select([self.agent_fd], [], [], timeout_s)[0])

    def end(self) -> int:
        (code,) = self.wait(PATIENCE_S)
        return code

    def end_both(self) -> None:
        self.kill(0)
        has_ended = self.agent_has_ended()
        os.close(self.agent_fd)
        assert has_ended  # also when the worker has ended before


@pytest.fixture
def start(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with ExitStack() as stack:

        def start(hang: str, ending: str = "SIGKILL") -> Worker:
            worker = stack.enter_context(Worker(hang, tmp_path, ending))
            worker.find_agent()
            stack.callback(worker.end_both)
            return worker

        yield start
    leftovers = [name for name in set(os.listdir("/dev/shm")) - before if "outlast" in name]
    assert not [name for name in leftovers if not name.startswith(".outlast-probe")]  # of another test, shortly


@pytest.mark.parametrize(("hang", "state"), [("sleep", "S"), ("stop", "T")])
def test_a_hung_worker_is_killed_and_reported(start, tmp_path, hang, state):
    """A worker that sleeps or is stopped is killed, for its launcher to restart it; report and stack are kept."""
    worker = start(hang)
    assert worker.end() == -signal.SIGKILL
    assert worker.agent_has_ended()
    log = worker.output(0)
    pid = worker.pid(0)
    assert f"agent process {worker.agent} of node n watches rank 3 (node n, pid {pid}" in log
    assert "node n watches 1 rank: section timeouts: step 0.5 s" in log
    assert f"rank 3 (node n, pid {pid}): section 'step' exceeded 0.5 s" in log
    assert f"rank 3 (pid {pid}) is ended with SIGKILL" in log
    text = (tmp_path / "run" / "stacks" / "cycle-1" / "rank-3.txt").read_text()
    assert f"iteration 6, in step, process state {state}" in text
    assert 'File "<string>", line ' in text


def test_the_configured_signal_ends_a_stopped_worker(start):
    """A stopped worker gets the configured signal, and is continued so that the signal takes effect."""
    worker = start("stop", "SIGTERM")
    assert worker.end() == -signal.SIGTERM


def test_a_healthy_worker_is_not_ended(start):
    """A worker that finishes is not signalled, and the agent process exits with it."""
    worker = start("none")
    assert worker.end() == 0
    assert worker.agent_has_ended()
    assert "over" in worker.output(0).splitlines()
    assert "exceeded" not in worker.output(0)


def test_a_killed_worker_leaves_nothing_behind(start):
    """After a SIGKILL of the worker the agent process exits and the heartbeat memory is removed."""
    worker = start("serve")
    worker.kill(0)
    assert worker.end() == -signal.SIGKILL
    assert worker.agent_has_ended()


def test_a_killed_agent_process_is_replaced(start):
    """A killed agent process is replaced twice; then one warning reports that hangs of the rank are no longer
    detected."""
    worker = start("serve")
    for _ in range(2):
        os.kill(worker.agent, signal.SIGKILL)
        line = worker.next_line(0, PATIENCE_S, containing=f"agent process {worker.agent} ended: agent process ")
        worker.agent = int(line.partition("ended: agent process ")[2].split()[0])
    os.kill(worker.agent, signal.SIGKILL)
    assert "WARNING" in worker.next_line(0, PATIENCE_S, containing="hangs of rank 3 (node n")
    worker.end_input(0)
    assert worker.end() == 0
    assert worker.output(0).count("WARNING") == 3


def test_close_ends_the_agent_process(start):
    """close() ends the agent process, while the worker continues."""
    worker = start("close")
    assert worker.agent_has_ended()
    worker.end_input(0)
    assert worker.end() == 0
    assert "WARNING" not in worker.output(0)
