"""The coordinator and in-process restarts: charges, root causes and the end of the job."""

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
        self.sent: list[tuple[str, m.ToNode]] = []
        settings = JobSettings(job="job", num_slots=2, limits=Limits(max_restarts=max_restarts))
        self.coordinator = Coordinator(settings, RecoveryState())
        for node in "ab":
            self.join(node)
        self.start(0)

    def send_message(self, message: m.ToCoordinator) -> None:
        self.sent += [(node, reply) for node, _, reply in self.coordinator.handle(message, 0.0)]
        for effect in self.coordinator.take_effects():
            if isinstance(effect, Record) and isinstance(decision := effect.data.get("verdict"), Decision):
                self.decisions.append(decision)
                if isinstance(incident := effect.data.get("incident"), Incident):
                    self.incidents.append(incident)

    def join(self, node: str, ended: m.CycleFacts | None = None) -> None:
        self.send_message(m.JoinRequest(node=node, epoch="1", addr=node, nproc=2, ended=ended))

    def start(self, cycle: int) -> None:
        self.send_message(m.Master(node="a", epoch="1", cycle=cycle, addr="a", port=1))
        assert self.coordinator.phase == JobPhase.RUNNING

    def restarted(
        self, node: str, restart_count: int, *, call: int = 0, cycle: int = 0, fault: Incident = FAULT
    ) -> None:
        self.send_message(
            m.Restarted(node=node, epoch="1", cycle=cycle, call=call, restart_count=restart_count, incident=fault)
        )

    def finished(self, node: str, lost: Incident | None = None) -> None:
        self.send_message(m.Finished(node=node, epoch="1", facts=m.CycleFacts(cycle=0, incident=lost)))

    @property
    def level(self) -> list[RecoveryLevel]:
        return [decision.recovery_level for decision in self.decisions]


def test_each_restart_is_charged_once_for_all_nodes() -> None:
    """The first report of a restart counts; reports of other nodes and late ones of an earlier restart change
    nothing."""
    job = Job()
    for node, restart_count in (("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)):
        job.restarted(node, restart_count)
    assert job.level == [RecoveryLevel.RESTART_IN_PROCESS] * 3
    assert job.coordinator.state.restarts_without_progress == 3
    assert job.coordinator.phase == JobPhase.RUNNING


def test_each_wrapped_call_counts_its_own_restarts() -> None:
    """A second wrapped function of the same cycle counts its own restarts; a report of another cycle is ignored."""
    job = Job()
    job.restarted("a", 2)
    job.restarted("a", 1, call=1)
    job.restarted("b", 1, call=1)
    job.restarted("b", 9, cycle=7)
    assert job.level == [RecoveryLevel.RESTART_IN_PROCESS] * 2


@pytest.mark.parametrize(("rank", "node"), [(1, "a"), (3, "b"), (9, ""), (None, "")])
def test_a_fault_counts_for_the_node_of_its_rank(rank: int | None, node: str) -> None:
    """The coordinator determines the node of a faulty rank, also when another node reports it."""
    job = Job()
    job.restarted("a", 1, fault=Incident(kind=IncidentKind.WORKER_FAILED, rank=rank))
    assert job.incidents[0].node == node
    assert job.coordinator.state.node_faults == ({node: 1} if node else {})


def test_a_spent_budget_ends_the_job() -> None:
    """When the budget is spent all nodes are stopped, although all ranks run."""
    job = Job(max_restarts=1)
    job.restarted("a", 1)
    assert not any(isinstance(reply, m.Stop) for _, reply in job.sent)
    job.restarted("b", 2)
    stops = [(node, reply.exit_code) for node, reply in job.sent if isinstance(reply, m.Stop)]
    assert stops == [("a", ExitReason.FAILED), ("b", ExitReason.FAILED)]


def test_a_node_without_ranks_waits_for_the_others() -> None:
    """A node that lost all its ranks does not keep the job from finishing, in either order of the reports."""
    for order in ("ab", "ba"):
        job = Job()
        job.restarted("b", 1)
        for node in order:
            job.finished(node, FAULT if node == "a" else None)
        assert job.decisions[-1].exit_code == ExitReason.FINISHED


def report(node: str, restart_count: int, durable: int | None, *, progress_is_known: bool = True) -> m.Restarted:
    fault = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=3, iteration=19)
    return m.Restarted(
        node=node,
        epoch="1",
        cycle=0,
        call=0,
        restart_count=restart_count,
        incident=fault,
        durable_iteration=durable,
        progress_known=progress_is_known,
    )


def test_the_newest_reported_checkpoint_counts_for_a_restart() -> None:
    """After a report of a node with only spares, or with an older checkpoint, the decision waits for the other node."""
    reports = RestartReports()
    assert reports.add(report("a", 1, None, progress_is_known=False), 0.0) is None
    assert reports.due("ab", 0.0, progress_counts=True) is None
    assert reports.add(report("b", 1, 15), 0.1) is None
    end = reports.due("ab", 0.1, progress_counts=True)
    assert end is not None
    assert (end.durable_iteration, end.progress_known, end.recovered_in_process) == (15, True, True)
    assert end.incident is not None
    assert end.incident.iteration == 19
    assert reports.add(report("a", 1, 15), 0.2) is None, "a late report of a charged restart changes nothing"
    assert reports.due("ab", 9.0, progress_counts=True) is None


def test_a_silent_node_does_not_delay_a_charge_for_ever() -> None:
    """A restart is charged by the next restart, or at the end of the wait."""
    reports = RestartReports()
    assert reports.add(report("a", 1, 5), 0.0) is None
    earlier = reports.add(report("a", 2, 10), 1.0)
    assert earlier is not None
    assert earlier.durable_iteration == 5
    assert reports.due("ab", 1.0, progress_counts=True) is None
    newest = reports.due("ab", 1.0 + REPORT_S, progress_counts=True)
    assert newest is not None
    assert newest.durable_iteration == 10
    assert reports.counted == (0, 2)
