"""The coordinator and replays: nodes that are held back, orders to replay, and replays without a spare."""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.incidents import Decision, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.decisions import Record, Remember
from outlast.launch.job_settings import JobSettings
from outlast.policy.recovery_policy import Limits, RecoveryState, RecoveryStep, begin_job
from outlast.policy.rerun import Diagnosis, Finding, Replay


class Job:
    """A coordinator with simulated nodes that follow its orders."""

    def __init__(self, *nodes: str, state: RecoveryState | None = None, nproc: dict[str, int] | None = None) -> None:
        self.state = state or RecoveryState()
        self.decisions: list[tuple[Decision, Incident | None]] = []
        settings = JobSettings(job="job", num_slots=2, limits=Limits(max_restarts=9, max_no_progress_cycles=9))
        self.coordinator = Coordinator(settings, self.state)
        self.starts: list[dict[str, m.Start]] = []
        """The starts of each cycle, by node."""
        self.waits: dict[str, str] = {}
        """The reason for which each node waits."""
        self.ignoring: set[str] = set()
        """Nodes that do not end a cycle when ordered."""
        for name in nodes:
            self.join(name, nproc=(nproc or {}).get(name, 1))

    def join(self, name: str, *, ended: m.CycleFacts | None = None, nproc: int = 1) -> None:
        self.send_message(m.JoinRequest(node=name, epoch="1", addr=name, nproc=nproc, ended=ended))

    def send_message(self, message: m.ToCoordinator) -> None:
        outbox = self.coordinator.handle(message, 0.0)
        for effect in self.coordinator.take_effects():
            match effect:
                case Remember(state):
                    self.state = state
                case Record(EventKind.DECISION, _, {"verdict": Decision() as decision, **others}):
                    self.decisions.append((decision, others.get("incident")))  # type: ignore[arg-type]
        for name, epoch, order in outbox:
            match order:
                case m.Prepare():
                    self.send_message(m.Master(node=name, epoch=epoch, cycle=order.cycle, addr=name, port=1))
                case m.Start():
                    self.starts += [{}] * (order.cycle + 1 - len(self.starts))
                    self.starts[order.cycle] = {**self.starts[order.cycle], name: order}
                case m.Wait():
                    self.waits[name] = order.reason
                case m.CycleOver() if name not in self.ignoring:
                    self.join(name, ended=m.CycleFacts(cycle=order.cycle))

    def exit_with(self, name: str, code: int, diagnose: Diagnosis, *, rank: int = 1) -> None:
        evidence = {"diagnosis": msgspec.to_builtins(diagnose), "summary": diagnose.describe()}
        incident = Incident(
            kind=IncidentKind.WORKER_FAILED, node=name, rank=rank, pid=77, exit_code=code, evidence=evidence
        )
        self.join(name, ended=m.CycleFacts(cycle=self.coordinator.cycle, incident=incident))


def diagnose(finding: Finding = Finding.REPRODUCED, **facts: Any) -> Diagnosis:
    return Diagnosis(finding=finding, **{"rank": 1, "node": "b", "device": "b/cpu-0", "iteration": 7, **facts})


EXPECTED = Replay(iteration=7, device="b/cpu-0", node="b", rank=1)


def test_a_replay_lasts_one_cycle_on_all_nodes() -> None:
    """The spare replaces the node with the invalid result, all nodes get the replay with their start, and the cycle
    after it trains as usual on the nodes of its slots."""
    job = Job("a", "b", "s")
    job.exit_with("b", 16, diagnose())
    assert job.starts[1].keys() == {"a", "s"}
    assert {start.replay for start in job.starts[1].values()} == {EXPECTED}
    assert "replayed on another" in job.waits["b"]
    job.exit_with("s", 17, diagnose(Finding.PERSISTENT, replayed_on="s/cpu-0"))
    assert job.starts[2].keys() == {"a", "s"}
    assert {start.replay for start in job.starts[2].values()} == {None}
    assert job.state.quarantined == ("b",)
    assert job.coordinator.nodes.spares(job.state.barred) == []


def test_a_cleared_node_becomes_a_spare() -> None:
    """Once the replay is over without a fault of the node that was held back, it may take a slot again."""
    job = Job("a", "b", "s")
    job.exit_with("b", 16, diagnose())
    died = Incident(kind=IncidentKind.WORKER_DIED, node="s", exit_code=-9)
    job.join("s", ended=m.CycleFacts(cycle=1, incident=died, durable_iteration=20, progress_known=True))
    assert [node.name for node in job.coordinator.nodes.spares(job.state.barred)] == ["b"]
    job.ignoring = {"s"}
    job.send_message(m.Dead(node="s", epoch="1", reason="killed"))
    assert job.starts[-1].keys() == {"a", "b"}


def test_a_spare_with_fewer_workers_does_not_replay() -> None:
    """Where no spare fits the slot, the same nodes replay."""
    job = Job("a", "b", "small", nproc={"a": 2, "b": 2})
    job.exit_with("b", 16, diagnose())
    assert job.starts[1].keys() == {"a", "b"}
    assert job.starts[1]["a"].replay == EXPECTED
    assert job.state.held_back == ()


def test_without_a_spare_no_node_is_held_back() -> None:
    """If the spare is lost before the replay began, the node that was held back takes its slot, and the cycle trains as
    usual, since a replay on the same node would prove nothing."""
    job = Job("a", "b", state=RecoveryState(held_back=("b",), replay=EXPECTED))
    assert job.starts[0].keys() == {"a", "b"}
    assert {start.replay for start in job.starts[0].values()} == {None}
    assert (job.state.held_back, job.state.replay) == ((), None)


def test_the_next_job_runs_a_pending_replay() -> None:
    """The first cycle of the next job runs the pending replay of a preempted job."""
    last_step = RecoveryStep(cycle=3, recovery_level=RecoveryLevel.REQUEUE_JOB, reason="told to leave")
    job = Job("a", "b", state=begin_job(RecoveryState(held_back=("b",), replay=EXPECTED, history=(last_step,))))
    assert {start.replay for start in job.starts[0].values()} == {EXPECTED}


def test_the_diagnosed_rank_is_the_cause_without_its_report() -> None:
    """When all ranks exit with 16 and only another rank's end is reported, the root cause is the rank of the
    diagnosis."""
    job = Job("a", "b")
    job.exit_with("a", 16, diagnose(), rank=0)
    ((decision, incident),) = job.decisions
    assert incident is not None
    assert (incident.node, incident.rank, incident.pid) == ("b", 1, None)
    assert incident.evidence["first_reported_rank"] == 0
    assert "node b" in decision.reason


def test_the_diagnosed_rank_is_the_cause_in_any_order() -> None:
    """Of two nodes that report exit code 16 the one with the rank of the diagnosis is the root cause."""
    job = Job("a", "b", "s")
    job.ignoring = {"a", "b"}
    job.exit_with("a", 16, diagnose(), rank=0)
    job.exit_with("b", 16, diagnose(), rank=1)
    ((_, incident),) = job.decisions
    assert incident is not None
    assert (incident.node, incident.rank, incident.pid) == ("b", 1, 77)


def test_the_result_of_a_replay_survives_a_lost_node() -> None:
    """When a node is lost while the replay identifies another one, the identified node is quarantined."""
    job = Job("a", "b", "s", "t")
    job.exit_with("b", 16, diagnose())
    job.ignoring = {"a", "s"}
    job.send_message(m.Dead(node="a", epoch="1", reason="killed"))
    job.exit_with("s", 17, diagnose(Finding.PERSISTENT, replayed_on="s/cpu-0"))
    assert job.state.quarantined == ("b",)
    assert job.starts[2].keys() == {"s", "t"}


def test_an_unreadable_diagnosis_is_ignored() -> None:
    """With a diagnosis of another version the exit code alone decides, within its own limit."""
    job = Job("a", "b")
    for _ in range(3):
        evidence = {"diagnosis": {"rank": "first"}}
        incident = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=1, exit_code=16, evidence=evidence)
        job.join("b", ended=m.CycleFacts(cycle=job.coordinator.cycle, incident=incident))
    assert [decision.exit_code for decision, _ in job.decisions] == [None, None, 17]
