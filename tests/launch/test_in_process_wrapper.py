"""The real wrapper under `outlast run`: nodes, cycles, the coordinator's loss, and what the launcher recovers instead.

``tests/inprocess/test_wrapper.py`` has the recovery of single ranks, under every launcher.
"""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from outlast.incidents import EventKind, RecoveryLevel
from outlast.testing import Cluster
from outlast.testing.ranks import free_port

pytestmark = [pytest.mark.process]

TRAIN = """
import hashlib, json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from outlast import InProcessRestartConfig
from outlast.errors import RestartAbort
from outlast.inprocess import Handle, Wrapper, current_handle

here, active = pathlib.Path(sys.argv[1]), int(sys.argv[2])
faults = [fault.split(":") for fault in sys.argv[3:]]  # kind:initial rank:restart iteration[:cycle]
initial, cycle = int(os.environ["RANK"]), int(os.environ.get("OUTLAST_CYCLE", "0"))

def strike(iteration):
    for kind, rank, restart, *when in faults:
        if int(rank) != initial or restart != str(iteration) or (when and when[0] != str(cycle)):
            continue
        if kind == "killed":
            together = [one[1] for one in faults if one[0] == kind and one[2:] == [restart, *when]]
            (here / f"doomed-{cycle}-{restart}-{initial}").touch()  # else the first one's end may keep the next alive
            while not all((here / f"doomed-{cycle}-{restart}-{one}").exists() for one in together):
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "aborts":
            raise RestartAbort("planted")
        raise ValueError("planted")

def wait_while(name):
    if (here / name).exists():
        (here / f"{name}-{cycle}-{initial}").touch()
    while (here / name).exists():
        time.sleep(0.02)
        if current_handle() is not None:
            current_handle().ping()

def train(handle: Handle):
    dist.init_process_group("gloo")
    weights, rank = torch.zeros(1000), dist.get_rank()
    for step in range(20):
        if step == 7:
            wait_while("hold")
            strike(handle.iteration)
        grad = torch.full((1000,), float(rank + step))
        dist.all_reduce(grad)
        weights += grad * 0.37
        handle.ping()
    dist.barrier()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    end = {"rank": rank, "iteration": handle.iteration, "pid": os.getpid(), "digest": digest}
    whole = here / f"end-{cycle}-{initial}.tmp"  # the test looks for it meanwhile, and may not find half of it
    whole.write_text(json.dumps(end))
    whole.rename(whole.with_suffix(".json"))
    until = here / "until"
    while until.exists():
        time.sleep(0.02)
        handle.ping()

(here / f"pid-{cycle}-{initial}").write_text(str(os.getpid()))
config = InProcessRestartConfig(active_world_size=active, granularity="rank")
for _ in range(int(os.environ.get("calls", "1"))):
    Wrapper(config, health_check=lambda _: wait_while("check"))(train)()
"""


def digest_of(world_size: int) -> str:
    """Return the digest of the weights of an undisturbed run."""
    weights = torch.zeros(1000)
    for step in range(20):
        weights += torch.full((1000,), float(sum(rank + step for rank in range(world_size)))) * 0.37
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def cluster(tmp_path: Path, active: int, *faults: str, **changes: Any) -> Cluster:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    settings = {"num_nodes": 1, "nproc_per_node": 5, **changes}
    return Cluster(script, str(tmp_path), str(active), *faults, run_dir=tmp_path / "run", **settings)


def ends(tmp_path: Path, cycle: int) -> dict[int, dict[str, Any]]:
    """Return the results of each initial rank that was active at the end of a cycle."""
    found = {}
    for path in tmp_path.glob(f"end-{cycle}-*.json"):
        found[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
    return found


def pid_of(tmp_path: Path, cycle: int, initial: int) -> int:
    return int((tmp_path / f"pid-{cycle}-{initial}").read_text())


def command(process: psutil.Process) -> str:
    """Return the command line of a process, empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def level(job: Cluster) -> list[int]:
    return [event.data["verdict"]["rung"] for event in job.events() if event.kind == EventKind.DECISION]


@pytest.mark.extended
@pytest.mark.slow
def test_workers_restart_when_no_spare_is_left(tmp_path: Path) -> None:
    """The first loss takes the spare; after the second one no spare is left, and the next cycle finishes with all
    ranks."""
    with cluster(tmp_path, 4, "killed:1:0:0", "killed:2:1:0") as job:
        assert job.wait(timeout_s=300) == [0]
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
        ended = ends(tmp_path, 1)
        assert {initial: end["rank"] for initial, end in ended.items()} == {rank: rank for rank in range(4)}
        assert {end["digest"] for end in ended.values()} == {digest_of(4)}
        decisions = [event.data for event in job.events() if event.kind == EventKind.DECISION]
        assert [decision["incident"]["rank"] for decision in decisions[:2]] == [1, 2]


@pytest.mark.extended
@pytest.mark.slow
def test_a_spare_on_another_node_replaces_a_lost_rank(tmp_path: Path) -> None:
    """A rank of the first node is replaced by the spare on the second, and both agents exit with 0."""
    with cluster(tmp_path, 3, "killed:0:0", num_nodes=2, nproc_per_node=2) as job:
        assert job.wait(timeout_s=300) == [0, 0]
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]
        ended = ends(tmp_path, 0)
        assert {initial: end["rank"] for initial, end in ended.items()} == {1: 1, 2: 2, 3: 0}
        assert {end["digest"] for end in ended.values()} == {digest_of(3)}


@pytest.mark.slow
def test_a_job_finishes_without_all_ranks_of_a_node(tmp_path: Path) -> None:
    """When both ranks of one node are killed at once, those of the other node finish without them."""
    with cluster(tmp_path, 2, "killed:0:0", "killed:1:0", num_nodes=2, nproc_per_node=2) as job:
        assert job.wait(timeout_s=300) == [0, 0]
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]
        assert {event.cycle for event in job.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
        ended = ends(tmp_path, 0)
        assert sorted(end["rank"] for end in ended.values()) == [0, 1]
        assert set(ended) == {2, 3}
        assert {end["digest"] for end in ended.values()} == {digest_of(2)}


@pytest.mark.slow
def test_a_spare_node_replaces_a_lost_node(tmp_path: Path) -> None:
    """A node that dies with its agent ends the cycle, also where spare ranks exist: a spare node takes its slot, and
    all ranks run."""
    (tmp_path / "until").touch()
    with cluster(tmp_path, 3, num_nodes=2, num_spares=1, nproc_per_node=2) as job:
        job.wait_for(lambda _: len(ends(tmp_path, 0)) == 3, timeout_s=300)
        first = next(
            event for event in job.events() if event.kind == EventKind.CYCLE_STARTED and event.data["node_rank"]
        )
        job.agent(first.node).kill()
        job.wait_for(lambda _: len(ends(tmp_path, 1)) == 3, timeout_s=300)
        (tmp_path / "until").unlink()
        codes = {agent.name: agent.wait(60) for agent in job.agents if agent.name != first.node}
        assert set(codes.values()) == {0}
        assert RecoveryLevel.REPLACE_NODE in level(job)
        assert {end["digest"] for end in ends(tmp_path, 1).values()} == {digest_of(3)}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed:1:0", "raises:1:0"])
def test_each_wrapped_call_has_its_own_restarts(fault: str, tmp_path: Path) -> None:
    """A second wrapped call runs in the same processes with its own restarts, and does not wait for a rank that died in
    the first call."""
    with cluster(tmp_path, 3, fault, nproc_per_node=4, environment={"calls": "2"}) as job:
        assert job.wait(timeout_s=300) == [0]
        num = 1 if "killed" in fault else 2
        assert level(job) == [RecoveryLevel.RESTART_IN_PROCESS] * num + [RecoveryLevel.STOP]
        ended = ends(tmp_path, 0)
        assert {end["iteration"] for end in ended.values()} == {num - 1}
        assert {end["digest"] for end in ended.values()} == {digest_of(3)}
        assert sorted(end["rank"] for end in ended.values() if end["iteration"] == num - 1) == [0, 1, 2]
        assert all(end["pid"] == pid_of(tmp_path, 0, initial) for initial, end in ended.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "moment"),
    [
        (signal.SIGKILL, "check"),
        pytest.param(signal.SIGKILL, "hold", marks=pytest.mark.extended),
        pytest.param(signal.SIGSTOP, "hold", marks=pytest.mark.extended),
        pytest.param(signal.SIGSTOP, "check", marks=pytest.mark.extended),
    ],
)
def test_an_in_process_restart_survives_the_coordinator(how: signal.Signals, moment: str, tmp_path: Path) -> None:
    """The coordinator's agent, without ranks, is killed or stopped before a rank dies or during the restart: the next
    coordinator completes the restart in the same cycle, with the weights of an undisturbed run."""
    (tmp_path / moment).touch()
    (tmp_path / "sick.toml").write_text("[health]\nmin_open_files = 16\ncommands = ['exit 3']\n")
    endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    options = (f"--rdzv-endpoint={endpoints}", "--ft-node-heartbeat-timeout=3")
    job = cluster(
        tmp_path, 3, "killed:0:0", num_nodes=2, num_spares=1, num_started=0, nproc_per_node=2, options=options
    )
    with job:
        host = job.add_node("host", options=[f"--health-config={tmp_path / 'sick.toml'}"])
        job.wait_for("its agent keeps running, as it hosts the coordinator", timeout_s=300)
        others = [job.add_node(), job.add_node()]
        num_waiting = 3
        job.wait_for(lambda _: len([*tmp_path.glob(f"{moment}-0-*")]) >= num_waiting, timeout_s=300)
        host.signal(how)
        (tmp_path / moment).unlink()
        assert [agent.wait(100) for agent in others] == [0, 0], job.tails()
        host.kill()
        assert {event.cycle for event in job.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
        ended = ends(tmp_path, 0)
        assert {initial: end["rank"] for initial, end in ended.items()} == {1: 1, 2: 2, 3: 0}
        assert {end["iteration"] for end in ended.values()} == {1}
        assert {end["digest"] for end in ended.values()} == {digest_of(3)}


def test_no_process_survives_a_killed_agent(tmp_path: Path) -> None:
    """Ranks, spares and their agent processes exit soon after their agent was killed."""
    (tmp_path / "until").touch()
    with cluster(tmp_path, 2, nproc_per_node=3) as job:
        job.wait_for(lambda _: len(ends(tmp_path, 0)) == 2, timeout_s=300)
        names = [command(process) for process in job.processes()]
        assert sum("outlast.runtime.agent_process" in name for name in names) == 1
        job.agent(0).kill()
        job.assert_no_orphans(within_s=60)


@pytest.mark.extended
@pytest.mark.slow
def test_agent_processes_end_with_their_cycle(tmp_path: Path) -> None:
    """When the workers are restarted, the agent processes of the previous cycle exit by themselves."""
    (tmp_path / "until").touch()
    with cluster(tmp_path, 2, "aborts:1:0:0", nproc_per_node=3) as job:
        job.wait_for(lambda _: len(ends(tmp_path, 1)) == 2, timeout_s=300)
        monitors_of_cycle = {pid_of(tmp_path, 1, rank) for rank in range(3)}
        monitors = [process for process in job.processes() if "runtime.agent_process" in command(process)]
        old = [process for process in monitors if parent(process) not in monitors_of_cycle]
        _, alive = psutil.wait_procs(old, timeout=300)
        assert not alive
        (tmp_path / "until").unlink()
        assert job.wait(timeout_s=300) == [0]
