"""The coordinator and replays: who is held back, who is told to replay, and what becomes of it without a spare."""

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
    """A coordinator whose nodes do as they are told."""

    def __init__(self, *nodes: str, state: RecoveryState | None = None, nproc: dict[str, int] | None = None) -> None:
        self.state = state or RecoveryState()
        self.decisions: list[tuple[Decision, Incident | None]] = []
        settings = JobSettings(job="job", num_slots=2, limits=Limits(max_restarts=9, max_no_progress_cycles=9))
        self.coordinator = Coordinator(settings, self.state)
        self.starts: list[dict[str, m.Start]] = []
        """The starts of each cycle, by node."""
        self.waits: dict[str, str] = {}
        """Why each node waits."""
        self.deaf: set[str] = set()
        """Nodes that do not leave a cycle by themselves."""
        for name in nodes:
            self.join(name, nproc=(nproc or {}).get(name, 1))

    def join(self, name: str, *, ended: m.CycleFacts | None = None, nproc: int = 1) -> None:
        self.say(m.JoinRequest(node=name, epoch="1", addr=name, nproc=nproc, ended=ended))

    def say(self, message: m.ToCoordinator) -> None:
        outbox = self.coordinator.handle(message, 0.0)
        for effect in self.coordinator.take_effects():
            match effect:
                case Remember(state):
                    self.state = state
                case Record(EventKind.DECISION, _, {"verdict": Decision() as decision, **others}):
                    self.decisions.append((decision, others.get("incident")))  # type: ignore[arg-type]
        for name, epoch, told in outbox:
            match told:
                case m.Prepare():
                    self.say(m.Master(node=name, epoch=epoch, cycle=told.cycle, addr=name, port=1))
                case m.Start():
                    self.starts += [{}] * (told.cycle + 1 - len(self.starts))
                    self.starts[told.cycle] = {**self.starts[told.cycle], name: told}
                case m.Wait():
                    self.waits[name] = told.reason
                case m.CycleOver() if name not in self.deaf:
                    self.join(name, ended=m.CycleFacts(cycle=told.cycle))

    def leave(self, name: str, code: int, found: Diagnosis, *, rank: int = 1) -> None:
        evidence = {"diagnosis": msgspec.to_builtins(found), "summary": found.describe()}
        incident = Incident(
            kind=IncidentKind.WORKER_FAILED, node=name, rank=rank, pid=77, exit_code=code, evidence=evidence
        )
        self.join(name, ended=m.CycleFacts(cycle=self.coordinator.cycle, incident=incident))


def found(finding: Finding = Finding.REPRODUCED, **facts: Any) -> Diagnosis:
    return Diagnosis(finding=finding, **{"rank": 1, "node": "b", "device": "b/cpu-0", "iteration": 7, **facts})


ASKED = Replay(iteration=7, device="b/cpu-0", node="b", rank=1)


def test_every_node_of_the_next_cycle_is_told_to_replay_and_only_of_that_one() -> None:
    """The spare has the slot of the node that saw the result, all nodes get the replay with their start, and the cycle
    after it trains as usual, on the nodes that have the slots then."""
    job = Job("a", "b", "s")
    job.leave("b", 16, found())
    assert job.starts[1].keys() == {"a", "s"}
    assert {start.replay for start in job.starts[1].values()} == {ASKED}
    assert "replayed on another" in job.waits["b"]
    job.leave("s", 17, found(Finding.PERSISTENT, replayed_on="s/cpu-0"))
    assert job.starts[2].keys() == {"a", "s"}
    assert {start.replay for start in job.starts[2].values()} == {None}
    assert job.state.quarantined == ("b",)
    assert job.coordinator.nodes.spares(job.state.barred) == []


def test_a_node_that_is_cleared_waits_as_a_spare() -> None:
    """Once the replay is over without a fault of its own, the node that was held back may take a slot again."""
    job = Job("a", "b", "s")
    job.leave("b", 16, found())
    died = Incident(kind=IncidentKind.WORKER_DIED, node="s", exit_code=-9)
    job.join("s", ended=m.CycleFacts(cycle=1, incident=died, durable_iteration=20, progress_known=True))
    assert [node.name for node in job.coordinator.nodes.spares(job.state.barred)] == ["b"]
    job.deaf = {"s"}
    job.say(m.Dead(node="s", epoch="1", reason="killed"))
    assert job.starts[-1].keys() == {"a", "b"}


def test_a_spare_with_fewer_workers_is_no_other_device() -> None:
    """Where no spare fits the slot, the same nodes replay."""
    job = Job("a", "b", "small", nproc={"a": 2, "b": 2})
    job.leave("b", 16, found())
    assert job.starts[1].keys() == {"a", "b"}
    assert job.starts[1]["a"].replay == ASKED
    assert job.state.held_back == ()


def test_without_the_spare_the_node_has_its_slot_again_and_no_replay() -> None:
    """The spare is gone before the replay began: the node that was held back takes its slot, and the cycle trains as
    usual, since a replay there would prove nothing."""
    job = Job("a", "b", state=RecoveryState(held_back=("b",), replay=ASKED))
    assert job.starts[0].keys() == {"a", "b"}
    assert {start.replay for start in job.starts[0].values()} == {None}
    assert (job.state.held_back, job.state.replay) == ((), None)


def test_the_next_job_replays_what_was_left() -> None:
    """A replay that a preempted job left is what the first cycle of the next one does."""
    left = RecoveryStep(cycle=3, recovery_level=RecoveryLevel.REQUEUE_JOB, reason="told to leave")
    job = Job("a", "b", state=begin_job(RecoveryState(held_back=("b",), replay=ASKED, history=(left,))))
    assert {start.replay for start in job.starts[0].values()} == {ASKED}


def test_the_rank_that_saw_it_is_named_even_if_only_others_were_heard() -> None:
    """All ranks leave with 16; only another rank's end is told: the cause is the rank that the diagnosis names."""
    job = Job("a", "b")
    job.leave("a", 16, found(), rank=0)
    ((decision, incident),) = job.decisions
    assert incident is not None
    assert (incident.node, incident.rank, incident.pid) == ("b", 1, None)
    assert incident.evidence["first_reported_rank"] == 0
    assert "node b" in decision.reason


def test_the_rank_that_saw_it_is_the_cause_whoever_is_first() -> None:
    """Of two nodes that both tell of exit code 16, the one of the diagnosis's rank is the cause."""
    job = Job("a", "b", "s")
    job.deaf = {"a", "b"}
    job.leave("a", 16, found(), rank=0)
    job.leave("b", 16, found(), rank=1)
    ((_, incident),) = job.decisions
    assert incident is not None
    assert (incident.node, incident.rank, incident.pid) == ("b", 1, 77)


def test_what_a_replay_found_is_not_lost_with_a_node() -> None:
    """A node is lost in the moment in which the replay names another one: that one is quarantined all the same."""
    job = Job("a", "b", "s", "t")
    job.leave("b", 16, found())
    job.deaf = {"a", "s"}
    job.say(m.Dead(node="a", epoch="1", reason="killed"))
    job.leave("s", 17, found(Finding.PERSISTENT, replayed_on="s/cpu-0"))
    assert job.state.quarantined == ("b",)
    assert job.starts[2].keys() == {"s", "t"}


def test_an_unreadable_diagnosis_is_none() -> None:
    """A diagnosis of another version is passed over: the exit code alone decides, within its own bound."""
    job = Job("a", "b")
    for _ in range(3):
        evidence = {"diagnosis": {"rank": "first"}}
        incident = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=1, exit_code=16, evidence=evidence)
        job.join("b", ended=m.CycleFacts(cycle=job.coordinator.cycle, incident=incident))
    assert [decision.exit_code for decision, _ in job.decisions] == [None, None, 17]
