"""`outlast run` and workers that restart inside their processes: who is spared, what it costs, and how a job ends.

The workers here only say what a wrapper says; tests/inprocess tells what the wrapper does.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ExitReason
from outlast.incidents import EventKind, RecoveryLevel
from outlast.testing import Cluster

PATIENCE_S = 250
pytestmark = [pytest.mark.process]

WORKER = """
import os, pathlib, signal, sys, time
from outlast.incidents import IncidentKind
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime.board import InProcessFault, InProcessMark

rank, cycle = int(os.environ["RANK"]), int(os.environ["OUTLAST_CYCLE"])
size = int(os.environ["WORLD_SIZE"])
here = pathlib.Path(sys.argv[1])
mark = InProcessMark(os.environ["OUTLAST_BOARD"], int(os.environ["LOCAL_RANK"]))
deadline = time.monotonic() + 150

def say(name):
    (here / f"{name}-{cycle}-{rank}").touch()

def meet(name, ranks):
    say(name)
    while not all((here / f"{name}-{cycle}-{other}").exists() for other in ranks):
        assert time.monotonic() < deadline, name
        time.sleep(0.005)

everybody = range(size)

def arm(patience_s=60.0):
    mark.arm(0, patience_s=patience_s)
    meet("armed", everybody)
    mark.set(InProcessState.ACTIVE, 0)
    meet("active", everybody)

def restart(iteration, ranks, *faults):
    mark.set(InProcessState.RESTARTING, iteration, faults)
    meet(f"left-{iteration}", ranks)
    mark.set(InProcessState.ACTIVE, iteration, faults)
    meet(f"began-{iteration}", ranks)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def await_end_of(other):
    while (pid := int((here / f"pid-{other}").read_text())) and alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.005)

def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

(here / f"pid-{rank}").write_text(str(os.getpid()))
def died(other):
    return InProcessFault(rank=other, kind=IncidentKind.WORKER_DIED, summary="its agent process saw it end")

def await_text(path, text):
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.005)

def finish(ranks):
    mark.set(InProcessState.COMPLETED)
    meet("completed", ranks)
    mark.set(InProcessState.RETURNED)
"""


def cluster(tmp_path: Path, code: str, *, num_nodes: int = 1, nproc: int = 3, options: tuple[str, ...] = ()) -> Cluster:
    script = tmp_path / "train.py"
    script.write_text(WORKER + code)
    return Cluster(
        script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=num_nodes, nproc_per_node=nproc, options=options
    )


def data_of(job: Cluster, kind: EventKind) -> list[dict[str, Any]]:
    return [event.data for event in job.events() if event.kind == kind]


def level(job: Cluster) -> list[int]:
    return [data["verdict"]["rung"] for data in data_of(job, EventKind.DECISION)]


def cycles(job: Cluster) -> set[int | None]:
    return {event.cycle for event in job.events() if event.kind == EventKind.CYCLE_STARTED}


@pytest.mark.slow
def test_a_killed_rank_costs_no_cycle(tmp_path: Path) -> None:
    """The others go on inside their processes; the job ends with 0 and says what it did without."""
    code = """
arm()
if rank == 1:
    die()
await_end_of(1)
restart(1, (0, 2), died(1))
finish((0, 2))
"""
    with cluster(tmp_path, code) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert cycles(job) == {0}
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]
        incident = data_of(job, EventKind.DECISION)[0]["incident"]
        assert (incident["kind"], incident["rank"], incident["exit_code"]) == ("worker_died", 1, -9)
        assert [data["incident"]["rank"] for data in data_of(job, EventKind.INCIDENT)] == [1]
        assert [data.get("spared", False) for data in data_of(job, EventKind.WORKER_EXITED)].count(True) == 1
        assert "1 restart in process, 1 rank lost and not replaced), exit code 0" in job.agent(0).output()
        recovery_state = json.loads((tmp_path / "run" / "ladder.json").read_text())
        assert (recovery_state["restarts_total"], recovery_state["finished"]) == (1, True)


@pytest.mark.slow
def test_a_fault_that_ends_no_process_is_charged_once_for_all_nodes(tmp_path: Path) -> None:
    """Every node tells of an exception that was mended; the recovery policy counts one restart, on the node it
    happened on. A hang in which every rank waited for others is charged to none."""
    code = """
arm()
fault = InProcessFault(rank=3, kind=IncidentKind.WORKER_FAILED, summary="ValueError: three")
effect = InProcessFault(rank=0, kind=IncidentKind.WORKER_FAILED, summary="connection lost", is_consequence=True)
restart(1, everybody, effect, fault)
if rank == 0:
    await_text(here / "run" / "ladder.json", '"restarts_total": 1')
meet("charged", everybody)
waits = {"kind": IncidentKind.WORKER_HUNG, "summary": "it waits", "is_consequence": True}
restart(2, everybody, InProcessFault(rank=1, **waits), InProcessFault(rank=2, **waits))
finish(everybody)
"""
    with cluster(tmp_path, code, num_nodes=2, nproc=2) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0, 0]
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]
        nobodys = data_of(job, EventKind.DECISION)[1]["incident"]
        assert not {"rank", "node"} & nobodys.keys()
        assert "every rank that exceeded its timeout waited for others" in nobodys["evidence"]["summary"]
        assert sum(json.loads((tmp_path / "run" / "ladder.json").read_text())["node_faults"].values()) == 1
        incident = data_of(job, EventKind.DECISION)[0]["incident"]
        assert (incident["rank"], incident["evidence"]["summary"]) == (3, "ValueError: three")
        assert incident["node"] == next(
            event.node for event in job.events() if event.kind == EventKind.CYCLE_STARTED and 3 in event.data["ranks"]
        )


def test_what_cannot_be_recovered_in_process_restarts_the_workers(tmp_path: Path) -> None:
    """Survivors that give up end the cycle; the cause is the rank that was lost, and the next cycle finishes."""
    code = """
arm()
if cycle == 0:
    if rank == 1:
        die()
    await_end_of(1)
    while not any('"worker_died"' in path.read_text() for path in (here / "run" / "journal").glob("*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    mark.set(InProcessState.RESTARTING, 1)
    meet("gave up", (0, 2))
    mark.set(InProcessState.GAVE_UP)
    raise SystemExit(1)
finish(everybody)
"""
    with cluster(tmp_path, code) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert cycles(job) == {0, 1}
        assert level(job) == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
        assert data_of(job, EventKind.DECISION)[0]["incident"]["rank"] == 1


@pytest.mark.slow
def test_survivors_that_never_restart_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    """A loss after which nobody gets on within the workers' own patience ends the cycle."""
    code = """
arm(patience_s=1.0 if cycle == 0 else 60.0)
if cycle == 0:
    if rank == 1:
        die()
    time.sleep(600)
finish(everybody)
"""
    with cluster(tmp_path, code) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert level(job) == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
        assert "did not recover in process in time" in job.agent(0).output()


@pytest.mark.extended
@pytest.mark.slow
def test_giving_up_for_ever_stops_with_93(tmp_path: Path) -> None:
    """A run that mends itself in process and then gives up, over and over, spends one budget and stops."""
    code = """
from outlast.monitor import RankMonitor
arm()
monitor = RankMonitor()
monitor.report_progress()
restart(1, everybody, InProcessFault(rank=0, kind=IncidentKind.WORKER_FAILED, summary="again"))
await_text(here / "run" / "ladder.json", f'"restarts_total": {2 * cycle + 1}')
meet("charged", everybody)
mark.set(InProcessState.GAVE_UP)
raise SystemExit(1)
"""
    with cluster(tmp_path, code, nproc=2) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [ExitReason.NO_PROGRESS]
        assert level(job) == [1, 2, 1, RecoveryLevel.STOP]


def test_restarts_in_process_alone_are_bounded_too(tmp_path: Path) -> None:
    """Mending the same place without an end stops at --max-restarts, though every process lives."""
    code = """
from outlast.monitor import RankMonitor
arm()
monitor = RankMonitor()
monitor.report_progress()
for iteration in range(1, 1000):
    restart(iteration, everybody, InProcessFault(rank=1, kind=IncidentKind.WORKER_HUNG, summary="again"))
"""
    with cluster(tmp_path, code, nproc=2, options=("--max-restarts=2",)) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [ExitReason.NO_PROGRESS]
        assert level(job) == [1, 1, RecoveryLevel.STOP]
        assert cycles(job) == {0}


@pytest.mark.extended
@pytest.mark.slow
def test_progress_renews_what_restarts_in_process_spent(tmp_path: Path) -> None:
    """With a new durable checkpoint before each, more restarts in process than --max-restarts are no reason to stop."""
    code = """
from outlast.monitor import RankMonitor
arm()
monitor = RankMonitor()
for iteration in range(1, 6):
    monitor.set_durable_iteration(10 * iteration)
    fault = InProcessFault(rank=1, kind=IncidentKind.WORKER_HUNG, summary="again")
    restart(iteration, everybody, fault)
    if rank == 0:
        (here / f"go-{iteration}").touch()
    while not (here / f"go-{iteration}").exists():
        time.sleep(0.005)
    await_text(here / "run" / "ladder.json", f'"best_durable": {10 * iteration},')
finish(everybody)
"""
    with cluster(tmp_path, code, nproc=2, options=("--max-restarts=1",)) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert level(job) == [1] * 5 + [RecoveryLevel.STOP]


@pytest.mark.slow
def test_a_node_without_workers_waits_for_the_others(tmp_path: Path) -> None:
    """All ranks of one node are lost, those of another go on in process: the job finishes in the same cycle."""
    code = """
arm()
if rank in (2, 3):
    die()
await_end_of(2), await_end_of(3)
restart(1, (0, 1), died(2), died(3))
finish((0, 1))
"""
    with cluster(tmp_path, code, num_nodes=2, nproc=2) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0, 0]
        assert cycles(job) == {0}
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]


@pytest.mark.slow
def test_ranks_lost_on_every_node_restart_the_workers(tmp_path: Path) -> None:
    """When nobody is left anywhere, nothing was finished: the recovery policy's next recovery level follows, never
    success."""
    code = """
arm()
if cycle == 0:
    die()
finish(everybody)
"""
    with cluster(tmp_path, code, num_nodes=2, nproc=1) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0, 0]
        assert cycles(job) == {0, 1}
        assert level(job) == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]


def test_a_rank_that_fails_after_all_returned_is_a_failure(tmp_path: Path) -> None:
    """Once the wrapped function is behind them, ranks are spared no more: what fails then fails the cycle."""
    code = """
arm()
finish(everybody)
if rank == 1 and cycle == 0:
    raise SystemExit(5)
meet("end", everybody)
"""
    with cluster(tmp_path, code, nproc=2) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert level(job) == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]


def test_spares_and_ranks_that_leave_are_not_missed(tmp_path: Path) -> None:
    """A spare that is killed needs no restart; a rank that leaves for good with 0 is no failure."""
    code = """
mark.arm(0, patience_s=0.0 if rank == 2 else 60.0)
meet("armed", everybody)
if rank == 2:
    mark.set(InProcessState.SPARE, 0)
    meet("placed", everybody)
    die()
mark.set(InProcessState.ACTIVE, 0)
meet("placed", everybody)
await_end_of(2)
if rank == 1:
    mark.set(InProcessState.LEFT)
    raise SystemExit(0)
await_end_of(1)
restart(1, (0,), InProcessFault(rank=1, kind=IncidentKind.WORKER_FAILED, summary="its health check failed"))
finish((0,))
"""
    with cluster(tmp_path, code) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert cycles(job) == {0}
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]


@pytest.mark.campaign
def test_a_rank_in_a_restart_does_not_hang(tmp_path: Path) -> None:
    """Sections that were open when a restart began are no hang, however long it takes; one after it is judged."""
    code = """
from outlast.monitor import RankMonitor
arm()
monitor = RankMonitor()
for _ in range(2):
    with monitor.section("step"):
        pass
monitor.start_section("step")
mark.set(InProcessState.RESTARTING, 1)
time.sleep(4.5)
restart(1, everybody, InProcessFault(rank=1, kind=IncidentKind.WORKER_HUNG, summary="it slept"))
with monitor.section("step"):
    time.sleep(0.1 if cycle else 600)
monitor.close()
finish(everybody)
"""
    options = ("--ft-rank-section-timeouts=step:3.0",)
    with cluster(tmp_path, code, nproc=2, options=options) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert level(job) == [1, 2, 1, RecoveryLevel.STOP]
        assert len(re.findall(r"section 'step' exceeded 3\.0 s", job.agent(0).output())) >= 1


def test_a_restart_that_takes_too_long_is_a_hang(tmp_path: Path) -> None:
    """A rank that stays in a restart beyond what its own timeouts allow is reported, and the workers are restarted."""
    code = """
arm(patience_s=0.5 if cycle == 0 else 60.0)
if cycle == 0:
    mark.set(InProcessState.RESTARTING, 1)
    time.sleep(600)
finish(everybody)
"""
    with cluster(tmp_path, code, nproc=2) as job:
        assert job.wait(timeout_s=PATIENCE_S) == [0]
        assert level(job) == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
        assert "restart inside the process exceeded 0.5 s" in job.agent(0).output()


@pytest.mark.slow
def test_spares_do_not_keep_a_preempted_job_from_having_saved(tmp_path: Path) -> None:
    """A notice ends spares, which have nothing to save; the others saved, and the job says so with 75."""
    code = """
def save(*_):
    mark.set(InProcessState.COMPLETED)
    mark.set(InProcessState.RETURNED)
    raise SystemExit(75)

mark.arm(0, patience_s=60.0)
meet("armed", everybody)
if rank == 2:
    mark.set(InProcessState.SPARE, 0)
else:
    mark.set(InProcessState.ACTIVE, 0)
    signal.signal(signal.SIGTERM, save)
say("runs")
time.sleep(600)
"""
    with cluster(tmp_path, code) as job:
        job.wait_for(lambda _: len(list(tmp_path.glob("runs-*"))) == 3, timeout_s=PATIENCE_S)
        job.agent(0).signal(signal.SIGTERM)
        assert job.wait(timeout_s=PATIENCE_S) == [ExitReason.PREEMPTED]
        assert cycles(job) == {0}
