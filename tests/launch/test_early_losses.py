"""A node lost before any rank of its cycle completed a step is charged to the node, not to the job's restart budget."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_coordinator import Job

from outlast.incidents import EventKind
from outlast.launch import protocol as m
from outlast.launch.protocol import JobPhase
from outlast.policy.recovery_policy import Limits
from outlast.testing import Cluster

LIMIT_S = 300.0
SCRIPT = """
import os, pathlib, sys, time
from outlast.monitor import RankMonitor
folder, num_steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
monitor = RankMonitor()
with monitor.section("setup"):
    pass
for _ in range(num_steps):
    with monitor.section("step"):
        pass
folder.joinpath(f"waits-{os.environ['OUTLAST_CYCLE']}-{os.environ['RANK']}").touch()
deadline = time.monotonic() + 900
while not (folder / "go").exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
monitor.finish()
"""


class StartedJob(Job):
    """A job whose nodes start their workers, and are lost once the connection of their agent has ended."""

    def __init__(self, num_slots: int = 2, **settings: Any) -> None:
        super().__init__(num_slots, **settings)
        self.has_trained: set[str] = set()
        """Nodes that report a completed step when their cycle ends."""

    def join(self, name: str, *, ended: m.CycleFacts | None = None, **fields: Any) -> None:
        if ended is not None:
            ended = msgspec.structs.replace(ended, has_trained=name in self.has_trained)
        super().join(name, ended=ended, **fields)

    def start_all(self) -> None:
        for name, start in self.running.items():
            self.say(m.Running(node=name, epoch=f"{name}-1", cycle=start.cycle))

    def step(self, name: str) -> None:
        self.say(m.Stepped(node=name, epoch=f"{name}-1", cycle=self.running[name].cycle))

    def lose(self, name: str) -> None:
        self.running.pop(name)
        self.say(m.Dead(node=name, epoch=f"{name}-1", reason="its connection ended"))


def job_of(*names: str, **settings: Any) -> StartedJob:
    job = StartedJob(**settings)
    for name in names:
        job.join(name)
    job.start_all()
    return job


@pytest.mark.parametrize("outcome", ["a spare", "a smaller world", "neither"])
def test_a_loss_before_a_step_is_charged_to_the_node(outcome: str) -> None:
    """A node lost three times right after it started its workers is quarantined if the world can continue without it,
    without a charge to the budgets; otherwise the fourth loss counts against them."""
    job = job_of("a", "b", limits=Limits(max_restarts=1))
    for number in range(3):
        if number == 2 and outcome == "a spare":
            job.join("s")
        if number == 2 and outcome == "a smaller world":
            job.coordinator.resettle(dataclasses.replace(job.coordinator.settings, min_nodes=1))
        job.lose("b")
        assert (job.state.restarts_without_progress, job.state.node_faults) == (0, {"b": number + 1})
        job.join("b")
        job.start_all()
    assert job.state.quarantined == (() if outcome == "neither" else ("b",))
    assert job.running.keys() == {"a spare": {"a", "s"}, "a smaller world": {"a"}, "neither": {"a", "b"}}[outcome]
    assert job.coordinator.phase == JobPhase.RUNNING
    if outcome == "neither":
        job.lose("b")
        job.join("b")
        job.start_all()
        assert job.state.restarts_without_progress == 1
        job.lose("b")
        assert job.coordinator.stop is not None


@pytest.mark.parametrize("reporter", ["survivor", "lost node", "none"])
def test_a_loss_after_a_step_counts_against_the_budget(reporter: str) -> None:
    """A loss counts against the budget once any rank of the cycle has completed a step, reported by a survivor or by
    the lost node; reports of an earlier cycle do not count."""
    job = job_of("a", "b", "s")
    job.step("a")
    job.lose("b")
    job.join("b")
    job.start_all()
    assert job.state.restarts_without_progress == 1
    if reporter == "survivor":
        job.has_trained.add("a")
    elif reporter == "lost node":
        job.step("s")
    job.lose("s")
    assert job.state.restarts_without_progress == (1 if reporter == "none" else 2)


@pytest.mark.parametrize("survives", [True, False])
def test_a_loss_in_a_takeover_counts_without_a_survivor(survives: bool) -> None:
    """The loss of the coordinator's own node is free if a survivor reports that no step was completed; without a
    survivor the loss counts."""
    job = StartedJob(num_slots=2 if survives else 1, former_host="x", term=2)
    place = m.SlotPlace(term=1, cycle=7, slot=1, num_slots=2, host_slot=0)
    if not survives:
        place = m.SlotPlace(term=1, cycle=7, spare=0, num_spares=1, num_slots=1, host_slot=0)
    job.heartbeats["a"] = 0
    if survives:
        job.running["a"] = start_of(place)
    job.say(m.Register(node="a", epoch="a-1", addr="a", nproc=2, place=place, ran=place, running=survives))
    if not survives:
        job.join("a")
    job.pass_time(10)
    assert job.state.node_faults == {"x": 1}
    assert job.state.restarts_without_progress == (0 if survives else 1)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_the_number_of_losses_is_bounded(
    losses: list[tuple[str, bool]], min_nodes: int | None, max_restarts: int, faults: int
) -> None:
    """For any sequence of early losses and returns at most max_restarts restarts count against the budget, at most
    max_node_faults more are free, and then the job stops or waits for nodes."""
    limits = Limits(max_restarts=max_restarts, max_node_faults=faults)
    job = job_of("a", "b", "c", "d", limits=limits, min_nodes=min_nodes)
    num_losses = 0
    for name, comes_back in losses:
        if name in job.running:
            num_losses += 1
            job.lose(name)
        if comes_back and name not in job.coordinator.nodes.by_name:
            job.join(name)
        job.start_all()
        if job.coordinator.stop is not None:
            break
    assert job.state.restarts_without_progress <= max_restarts
    assert num_losses <= max_restarts + faults + 1


def start_of(place: m.SlotPlace) -> m.Start:
    values = {"node_rank": 1, "num_nodes": 2, "base_rank": 2, "world_size": 4, "master_addr": "x", "master_port": 1}
    return m.Start(cycle=place.cycle, term=place.term, place=place, **values)


@pytest.mark.process
@pytest.mark.slow
def test_a_node_that_keeps_dying_is_quarantined(tmp_path: Path) -> None:
    """A node whose agent is killed three times as soon as all workers run is quarantined, and a spare finishes the job
    without using the one allowed restart."""
    with cluster_of(tmp_path, num_steps=0) as cluster:
        cluster.add_node("host")
        wait_for_join(cluster, "host")
        for cycle in range(3):
            flaky = cluster.add_node("flaky")
            wait_for_ranks(cluster, tmp_path, cycle)
            if cycle == 2:
                cluster.add_node("spare")
                cluster.wait_for("node spare waits", LIMIT_S)
            flaky.kill()
        wait_for_ranks(cluster, tmp_path, 3)
        flaky = cluster.add_node("flaky")
        cluster.wait_for("node flaky waits: the node is quarantined for this job", LIMIT_S)
        (tmp_path / "go").touch()
        assert [cluster.agent(name).wait(LIMIT_S) for name in ("host", "spare", "flaky")] == [0, 0, 0]
        state = json.loads((tmp_path / "run" / "ladder.json").read_text())
        assert (state["quarantined"], state["node_faults"]) == (["flaky"], {"flaky": 3})
        assert state["restarts_without_progress"] == 0


@pytest.mark.process
@pytest.mark.slow
def test_a_node_that_dies_after_a_step_counts_as_a_restart(tmp_path: Path) -> None:
    """A loss after one completed step uses the one allowed restart."""
    with cluster_of(tmp_path, num_steps=1) as cluster:
        cluster.add_node("host")
        wait_for_join(cluster, "host")
        flaky = cluster.add_node("flaky")
        wait_for_ranks(cluster, tmp_path, 0)
        flaky.kill()
        cluster.add_node("flaky")
        wait_for_ranks(cluster, tmp_path, 1)
        (tmp_path / "go").touch()
        assert [cluster.agent(name).wait(LIMIT_S) for name in ("host", "flaky")] == [0, 0]
        assert json.loads((tmp_path / "run" / "ladder.json").read_text())["restarts_without_progress"] == 1


def cluster_of(folder: Path, *, num_steps: int) -> Cluster:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    values = {"run_dir": folder / "run", "num_nodes": 2, "num_spares": 1, "num_started": 0, "nproc_per_node": 1}
    return Cluster(script, str(folder), str(num_steps), options=["--max-restarts=1", "--no-health-check"], **values)


def wait_for_join(cluster: Cluster, name: str) -> None:
    cluster.wait_for(lambda event: event.kind == EventKind.NODE_JOINED and event.data["name"] == name, LIMIT_S)


def wait_for_ranks(cluster: Cluster, folder: Path, cycle: int) -> None:
    """Wait until both ranks of a cycle have completed their steps."""
    paths = [folder / f"waits-{cycle}-{rank}" for rank in range(2)]
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, cluster.tails()
        time.sleep(0.02)
