"""The coordinator and restarts inside the processes: what is charged, to whom, and how such a job ends."""

from __future__ import annotations

import pytest

from outlast.errors import ExitReason
from outlast.incidents import Decision, Incident, IncidentKind, RecoveryLevel
from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.decisions import REPORT_S, Record, RestartReports
from outlast.launch.job_settings import JobSettings
from outlast.launch.protocol import JobPhase
from outlast.policy.recovery_policy import Limits, RecoveryState

FAULT = Incident(kind=IncidentKind.WORKER_FAILED, rank=3, evidence={"summary": "ValueError"})


class Job:
    """A coordinator of two nodes, a and b, with two ranks each, whose cycle 0 runs."""

    def __init__(self, max_restarts: int = 5) -> None:
        self.decisions: list[Decision] = []
        self.incidents: list[Incident] = []
        self.told: list[tuple[str, m.ToNode]] = []
        settings = JobSettings(job="job", num_slots=2, limits=Limits(max_restarts=max_restarts))
        self.coordinator = Coordinator(settings, RecoveryState())
        for node in "ab":
            self.join(node)
        self.start(0)

    def say(self, message: m.ToCoordinator) -> None:
        self.told += [(node, reply) for node, _, reply in self.coordinator.handle(message, 0.0)]
        for effect in self.coordinator.take_effects():
            if isinstance(effect, Record) and isinstance(decision := effect.data.get("verdict"), Decision):
                self.decisions.append(decision)
                if isinstance(incident := effect.data.get("incident"), Incident):
                    self.incidents.append(incident)

    def join(self, node: str, ended: m.CycleFacts | None = None) -> None:
        self.say(m.JoinRequest(node=node, epoch="1", addr=node, nproc=2, ended=ended))

    def start(self, cycle: int) -> None:
        self.say(m.Master(node="a", epoch="1", cycle=cycle, addr="a", port=1))
        assert self.coordinator.phase == JobPhase.RUNNING

    def restarted(
        self, node: str, restart_count: int, *, call: int = 0, cycle: int = 0, fault: Incident = FAULT
    ) -> None:
        self.say(m.Restarted(node=node, epoch="1", cycle=cycle, call=call, restart_count=restart_count, incident=fault))

    def finished(self, node: str, lost: Incident | None = None) -> None:
        self.say(m.Finished(node=node, epoch="1", facts=m.CycleFacts(cycle=0, incident=lost)))

    @property
    def level(self) -> list[RecoveryLevel]:
        return [decision.recovery_level for decision in self.decisions]


def test_each_restart_is_charged_once_though_every_node_tells() -> None:
    """The first word of a restart counts; later ones, and late ones of an earlier one, change nothing."""
    job = Job()
    for node, restart_count in (("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)):
        job.restarted(node, restart_count)
    assert job.level == [RecoveryLevel.RESTART_IN_PROCESS] * 3
    assert job.coordinator.state.restarts_without_progress == 3
    assert job.coordinator.phase == JobPhase.RUNNING


def test_another_call_counts_anew() -> None:
    """A second wrapped function of the same cycle counts its own restarts; a report of another cycle is ignored."""
    job = Job()
    job.restarted("a", 2)
    job.restarted("a", 1, call=1)
    job.restarted("b", 1, call=1)
    job.restarted("b", 9, cycle=7)
    assert job.level == [RecoveryLevel.RESTART_IN_PROCESS] * 2


@pytest.mark.parametrize(("rank", "node"), [(1, "a"), (3, "b"), (9, ""), (None, "")])
def test_the_fault_counts_for_the_node_of_its_rank(rank: int | None, node: str) -> None:
    """A node that tells of another node's rank does not know whose it is; the coordinator does."""
    job = Job()
    job.restarted("a", 1, fault=Incident(kind=IncidentKind.WORKER_FAILED, rank=rank))
    assert job.incidents[0].node == node
    assert job.coordinator.state.node_faults == ({node: 1} if node else {})


def test_one_restart_too_many_ends_the_job() -> None:
    """When the budget is spent every node is told to stop, though all ranks run."""
    job = Job(max_restarts=1)
    job.restarted("a", 1)
    assert not any(isinstance(reply, m.Stop) for _, reply in job.told)
    job.restarted("b", 2)
    stops = [(node, reply.exit_code) for node, reply in job.told if isinstance(reply, m.Stop)]
    assert stops == [("a", ExitReason.FAILED), ("b", ExitReason.FAILED)]


def test_a_node_that_lost_all_waits_for_one_that_finished() -> None:
    """One node whose ranks all were lost does not keep the job from finishing, whichever is done first."""
    for order in ("ab", "ba"):
        job = Job()
        job.restarted("b", 1)
        for node in order:
            job.finished(node, FAULT if node == "a" else None)
        assert job.decisions[-1].exit_code == ExitReason.FINISHED


def test_a_world_that_lost_all_has_not_finished() -> None:
    """When no node finished anything the cycle has failed, and the next one starts."""
    job = Job()
    job.finished("a", FAULT)
    job.finished("b", FAULT)
    assert [node for node, reply in job.told if isinstance(reply, m.CycleOver)] == ["a", "b"]
    for node in "ab":
        job.join(node, ended=m.CycleFacts(cycle=0))
    assert job.level == [RecoveryLevel.RESTART_WORKERS]
    job.start(1)
    assert not job.coordinator.state.finished


def report(node: str, restart_count: int, durable: int | None, *, knows: bool = True) -> m.Restarted:
    fault = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=3, iteration=19)
    return m.Restarted(
        node=node,
        epoch="1",
        cycle=0,
        call=0,
        restart_count=restart_count,
        incident=fault,
        durable_iteration=durable,
        progress_known=knows,
    )


def test_a_restart_is_judged_by_the_newest_checkpoint_that_any_node_knows() -> None:
    """A node with only spares, or with an older checkpoint, reports first: the decision waits for the other one."""
    reports = RestartReports()
    assert reports.add(report("a", 1, None, knows=False), 0.0) is None
    assert reports.due("ab", 0.0, progress_counts=True) is None
    assert reports.add(report("b", 1, 15), 0.1) is None
    end = reports.due("ab", 0.1, progress_counts=True)
    assert end is not None
    assert (end.durable_iteration, end.progress_known, end.recovered_in_process) == (15, True, True)
    assert end.incident is not None
    assert end.incident.iteration == 19
    assert reports.add(report("a", 1, 15), 0.2) is None, "a late report of a charged restart changes nothing"
    assert reports.due("ab", 9.0, progress_counts=True) is None


def test_a_silent_node_never_keeps_a_restart_from_being_charged() -> None:
    """The next restart charges the one before, and so does the end of the wait."""
    reports = RestartReports()
    assert reports.add(report("a", 1, 5), 0.0) is None
    earlier = reports.add(report("a", 2, 10), 1.0)
    assert earlier is not None
    assert earlier.durable_iteration == 5
    assert reports.due("ab", 1.0, progress_counts=True) is None
    newest = reports.due("ab", 1.0 + REPORT_S, progress_counts=True)
    assert newest is not None
    assert newest.durable_iteration == 10
    assert reports.charged == (0, 2)
