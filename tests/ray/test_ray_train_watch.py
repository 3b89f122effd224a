"""The watches of a Ray Train run's machines together identify one worker as the root cause, and end only that
worker."""

from __future__ import annotations

import signal

import pytest

ray = pytest.importorskip("ray")
from outlast import env  # noqa: E402
from outlast.config import FaultToleranceConfig  # noqa: E402
from outlast.incidents import EventKind  # noqa: E402
from outlast.journal import read  # noqa: E402
from outlast.ray.train_watch import TrainWatch, WorkerPlace  # noqa: E402
from outlast.testing import RankProcesses  # noqa: E402

pytestmark = pytest.mark.extended

PATIENCE_S = 100.0

WORKER = """
import ctypes, os, threading
from outlast.env import WorkerEnv
from outlast.monitor.rank_monitor import PlacedRankMonitor
rank, iteration = int(os.environ["RANK"]), int(os.environ["AT"])
monitor = PlacedRankMonitor(WorkerEnv(global_rank=rank, world_size=2, board=input(), node=f"machine-{rank}"))
monitor.set_iteration(iteration)
print("attached", flush=True)
input()
with monitor.section("step"):
    if os.environ["DOES"] == "waits":
        threading.Event().wait(600)
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # keeps the interpreter's lock, and no signal that asks for stacks ends it
"""


@pytest.fixture
def workers(tmp_path):
    """Start two workers, as if on two machines: rank 1 is one iteration behind, and both hang once they are
    attached."""
    behaviours = [{"AT": "5", "DOES": "waits"}, {"AT": "4", "DOES": "holds the lock"}]
    with RankProcesses(WORKER, world_size=2, code=True, stdin=True, environments=behaviours) as ranks:
        yield ranks


@pytest.fixture
def watches(ray_cluster, tmp_path):
    """Start a watch for each of the two machines."""
    config = FaultToleranceConfig(rank_section_timeouts={"step": 0.5}, num_warmup_iterations=0)
    run = {"run_id": "run", "job": "job", "run_dir": str(tmp_path / "run"), "keeps_writer": False}
    started = [
        ray.remote(num_cpus=0, max_concurrency=8)(TrainWatch).remote(f"machine-{rank}", config, **run)
        for rank in range(2)
    ]
    yield started
    for watch in started:
        ray.kill(watch)


def begin(watches, workers, *, meet):
    """Start the watches, with the given peers."""
    variables = []
    for rank, watch in enumerate(watches):
        place = WorkerPlace(local_rank=0, global_rank=rank, pid=workers.pid(rank))
        variables.append(ray.get(watch.begin.remote(0, [place]), timeout=PATIENCE_S))
    for watch in watches:
        ray.get(watch.meet.remote(meet), timeout=PATIENCE_S)
    return variables


def let_hang(workers, variables, ranks):
    """Make workers enter a section that does not end, once all of them are attached."""
    for rank in ranks:
        workers.send(rank, variables[rank][env.BOARD])
        workers.next_line(rank, PATIENCE_S, containing="attached")
    for rank in ranks:
        workers.send(rank, "")


@pytest.mark.process
def test_the_root_cause_is_ended_on_any_machine(watches, workers, tmp_path):
    """Whichever machine reports first, the rank that is behind is identified and ended on its machine; the others are
    kept."""
    variables = begin(watches, workers, meet=watches)
    let_hang(workers, variables, range(2))
    assert workers.wait(PATIENCE_S, ranks=[1]) == [-signal.SIGKILL]
    assert workers.running(0)
    facts = ray.get(watches[0].facts.remote(), timeout=PATIENCE_S)
    assert (facts.incident.rank, facts.incident.node, facts.incident.pid) == (1, "machine-1", workers.pid(1))
    found = [event for event in read(tmp_path / "run") if event.kind == EventKind.INCIDENT]
    assert [(event.node, event.rank) for event in found] == [("machine-0", 1)]  # decided once, by one of the watches


@pytest.mark.process
def test_a_watch_works_without_the_deciding_machine(watches, workers):
    """After the loss of the machine that decides, each watch ends the workers that hang on its own machine."""
    variables = begin(watches, workers, meet=watches)
    ray.kill(watches[0])
    let_hang(workers, variables, [1])
    assert workers.wait(PATIENCE_S, ranks=[1]) == [-signal.SIGKILL]
    assert workers.running(0)


@pytest.mark.process
def test_a_stopped_watch_ends_no_worker(watches, workers):
    """Workers whose attempt is over are not ended by a watch: Ray Train ends them."""
    variables = begin(watches, workers, meet=watches)
    ray.get([watch.stop.remote() for watch in watches], timeout=PATIENCE_S)
    assert ray.get(watches[1].examine.remote(0), timeout=PATIENCE_S) == []
    assert ray.get(watches[1].end_worker.remote(0, 1), timeout=PATIENCE_S) is False
    ray.get(watches[1].close.remote(), timeout=PATIENCE_S)
    assert all(workers.running(rank) for rank in range(2))
    assert all(one[env.BOARD] and not one[env.WRITER] for one in variables)
