"""`outlast run` with workers that restart inside their processes: ranks that continue, charges, and the end of the job.

The workers here only send a wrapper's messages, so that each message comes at a chosen time;
``test_in_process_wrapper.py`` has the same launcher with the real wrapper.
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
def test_a_killed_rank_restarts_the_others_in_process(tmp_path: Path) -> None:
    """The other ranks continue in their processes; the job exits with 0, and its summary reports the lost rank."""
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
def test_a_recovered_fault_is_charged_once(tmp_path: Path) -> None:
    """A recovered exception that all nodes report is charged once, to the node where it was raised; a hang in which all
    ranks waited for others is charged to no node."""
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
        uncharged = data_of(job, EventKind.DECISION)[1]["incident"]
        assert not {"rank", "node"} & uncharged.keys()
        assert "every rank that exceeded its timeout waited for others" in uncharged["evidence"]["summary"]
        assert sum(json.loads((tmp_path / "run" / "ladder.json").read_text())["node_faults"].values()) == 1
        incident = data_of(job, EventKind.DECISION)[0]["incident"]
        assert (incident["rank"], incident["evidence"]["summary"]) == (3, "ValueError: three")
        assert incident["node"] == next(
            event.node for event in job.events() if event.kind == EventKind.CYCLE_STARTED and 3 in event.data["ranks"]
        )


def test_a_failed_in_process_restart_restarts_the_workers(tmp_path: Path) -> None:
    """Survivors that abort end the cycle with the lost rank as the root cause, and the next cycle finishes."""
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
def test_survivors_that_do_not_restart_end_the_cycle(tmp_path: Path) -> None:
    """A loss after which no rank continues within the workers' own timeout ends the cycle."""
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
def test_repeated_aborts_spend_one_budget_and_stop_with_93(tmp_path: Path) -> None:
    """A run that restarts in process and then aborts, in each cycle, spends one budget and stops."""
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


def test_in_process_restarts_alone_are_bounded(tmp_path: Path) -> None:
    """Restarts in process at the same iteration stop at --max-restarts, although all processes live."""
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
def test_progress_resets_the_budget_of_in_process_restarts(tmp_path: Path) -> None:
    """With a new durable checkpoint before each, more restarts in process than --max-restarts do not stop the job."""
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
def test_ranks_lost_on_every_node_restart_the_workers(tmp_path: Path) -> None:
    """When no rank is left on any node, the workers are restarted; the job does not count as finished."""
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


def test_a_failure_after_the_wrapped_call_fails_the_cycle(tmp_path: Path) -> None:
    """Once the wrapped function has returned on all ranks, a rank that fails is not excused, and the cycle fails."""
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


def test_a_killed_spare_needs_no_restart(tmp_path: Path) -> None:
    """A spare that is killed needs no restart, and a rank that exits with 0 is not a failure."""
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
def test_a_rank_in_a_restart_does_not_count_as_hung(tmp_path: Path) -> None:
    """Sections that were open when a restart began do not expire, however long it takes; sections after it do."""
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
    """A rank whose restart exceeds its own timeouts is reported, and the workers are restarted."""
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
def test_spares_need_no_save_at_a_preemption(tmp_path: Path) -> None:
    """A preemption notice ends spares without a save; the others save, and the job exits with 75."""
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
