"""The watches of a Ray Train run's machines: together they name one worker, and end it and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

ray = pytest.importorskip("ray")

from outlast.config import FaultToleranceConfig  # noqa: E402
from outlast.incidents import EventKind  # noqa: E402
from outlast.ray.train_watch import Briefing, TrainWatch, WorkerPlace  # noqa: E402
from outlast.runtime.journal import read_journal  # noqa: E402

WORKER = """
import ctypes, sys, threading
from outlast.env import WorkerEnv
from outlast.monitor import RankMonitor
rank, iteration = int(sys.argv[1]), int(sys.argv[2])
monitor = RankMonitor(WorkerEnv(global_rank=rank, world_size=2, board=input(), node=f"machine-{rank}"))
monitor.set_iteration(iteration)
print("attached", flush=True)
input()
with monitor.section("step"):
    if sys.argv[3] == "waits":
        threading.Event().wait(120)
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # keeps the interpreter's lock, and no signal that asks for stacks ends it
"""


@pytest.fixture
def workers(tmp_path):
    """Two workers, as if on two machines: rank 1 is an iteration behind, and both hang once they know their board."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(iteration), does],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, iteration, does in ((0, 5, "waits"), (1, 4, "holds the lock"))
    ]
    yield processes
    for process in processes:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def watches(ray_cluster, tmp_path):
    """A watch for each of the two machines."""
    told = Briefing(
        run_id="run",
        job="job",
        run_dir=str(tmp_path / "run"),
        fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": 0.5}, num_warmup_iterations=0).to_json(),
        keeps_writer=False,
    )
    started = [
        ray.remote(num_cpus=0, max_concurrency=8)(TrainWatch).remote(f"machine-{rank}", told) for rank in range(2)
    ]
    yield started
    for watch in started:
        ray.kill(watch)


def begin(watches, workers, *, meet):
    """Have the watches begin, and know each other as said."""
    posts = []
    for rank, (watch, worker) in enumerate(zip(watches, workers, strict=True)):
        place = WorkerPlace(local_rank=0, global_rank=rank, pid=worker.pid)
        posts.append(ray.get(watch.begin.remote(0, [place], 1), timeout=60))
    for watch in watches:
        ray.get(watch.meet.remote(meet), timeout=60)
    return posts


def let_hang(workers, posts):
    """Have workers go into the section that they do not leave, once all of them are attached."""
    for worker, post in zip(workers, posts, strict=True):
        worker.stdin.write(post.board + "\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "attached\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()


@pytest.mark.process
def test_culprit_is_found_on_another_machine_than_the_first_report(watches, workers, tmp_path):
    """Whoever reports first, the rank that is behind is named, on its machine, and ended; the others are kept."""
    posts = begin(watches, workers, meet=watches)
    let_hang(workers, posts)
    assert workers[1].wait(30) == -signal.SIGKILL
    assert workers[0].poll() is None
    standing = ray.get(watches[0].standing.remote(), timeout=30)
    assert (standing.incident.rank, standing.incident.node, standing.incident.pid) == (1, "machine-1", workers[1].pid)
    found = [event for event in read_journal(tmp_path / "run") if event.kind == EventKind.INCIDENT]
    assert [(event.node, event.rank) for event in found] == [("machine-0", 1)]  # judged once, by the judge


@pytest.mark.process
def test_watch_judges_alone_when_the_judge_is_gone(watches, workers):
    """A machine that is lost takes no protection from the others: each watch ends what hangs on its own."""
    posts = begin(watches, workers, meet=watches)
    ray.kill(watches[0])
    let_hang(workers[1:], posts[1:])
    assert workers[1].wait(30) == -signal.SIGKILL
    assert workers[0].poll() is None


@pytest.mark.process
def test_resting_watch_ends_nobody(watches, workers):
    """Workers whose attempt is over are not ended any more: who started them does that."""
    posts = begin(watches, workers, meet=watches)
    ray.get([watch.rest.remote() for watch in watches], timeout=30)
    assert ray.get(watches[1].examine.remote(0), timeout=30) == []
    assert ray.get(watches[1].end_worker.remote(0, 1), timeout=30) is False
    ray.get(watches[1].close.remote(), timeout=30)
    assert [worker.poll() for worker in workers] == [None, None]
    assert all(post.board and not post.writer for post in posts)
