"""Each phase of the coordinator has a deadline, and repeated or lost messages leave no job waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from test_control_connection import LinkedAgent, free_port, make  # noqa: F401  the fixture
from test_coordinator import Job, ranks

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.protocol import JobPhase


class SlowJob(Job):
    """A job whose nodes send heartbeats and do not respond to some orders."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ignores: dict[str, type[m.ToNode]] = {}

    def deliver(self, outbox: list[tuple[str, str, m.ToNode]]) -> None:
        kept = []
        for name, epoch, message in outbox:
            if name in self.ignores and isinstance(message, self.ignores[name]):
                self.sent_to.setdefault(name, []).append(message)
            else:
                kept.append((name, epoch, message))
        super().deliver(kept)

    def ranks_in(self, cycle: int) -> dict[str, int]:
        return {name: start.node_rank for name, start in self.running.items() if start.cycle == cycle}

    def run(self, *names: str) -> None:
        """Let nodes report that their workers have started."""
        for name in names:
            self.say(m.Running(node=name, epoch=f"{name}-1", cycle=self.running[name].cycle))

    def loss_of(self, name: str) -> str:
        (incident,) = [one for one in self.incidents if one.node == name]
        assert incident.kind == IncidentKind.NODE_LOST
        return str(incident.evidence["summary"])


def job_of(*names: str, ignores: dict[str, type[m.ToNode]] | None = None) -> SlowJob:
    job = SlowJob()
    job.ignores = ignores or {}
    for name in names:
        job.join(name)
    return job


def test_a_node_that_opens_no_store_is_replaced() -> None:
    """A node that sends heartbeats and does not open the cycle's store within 30 s loses its slot to the spare; its
    peer keeps its own."""
    job = job_of("a", "b", "s", ignores={"a": m.Prepare})
    job.pass_time(30)
    assert job.coordinator.phase == JobPhase.PREPARING
    job.pass_time(1)
    assert ranks(job) == {"s": 0, "b": 1}
    assert "did not open the cycle's store within 31 s" in job.loss_of("a")


def test_a_node_that_starts_no_workers_is_replaced() -> None:
    """A node that does not report its workers within 180 s of its Start is lost; the others keep their slots."""
    job = job_of("a", "b", "s", ignores={"b": m.CycleOver})
    job.run("a")
    job.pass_time(180)
    assert job.ranks_in(0) == {"a": 0, "b": 1}
    job.pass_time(1)
    assert job.ranks_in(1) == {"a": 0, "s": 1}
    assert "did not start its workers within 181 s" in job.loss_of("b")
    job.run("a", "s")
    job.pass_time(600)
    assert job.coordinator.cycle == 1, "a cycle that has started has no deadline"


def test_a_node_that_does_not_report_the_end_is_replaced() -> None:
    """A node that does not report within 60 s how a cycle ended is lost, and is no longer waited for."""
    job = job_of("a", "b", "s")
    job.run("a", "b")
    job.ignores = {"b": m.CycleOver}
    job.fail("a")
    job.pass_time(60)
    assert job.coordinator.phase == JobPhase.FORMING
    job.pass_time(1)
    assert job.ranks_in(1) == {"a": 0, "s": 1}
    assert "did not report the cycle's end within" in job.loss_of("b")


def test_each_deadline_without_a_spare_ends_the_job() -> None:
    """Without a node for the free slot the job stops with a reason after join_timeout."""
    for ignored in (m.Prepare, m.CycleOver):
        job = SlowJob(join_timeout_s=20.0)
        job.ignores = {"a": ignored}
        job.join("a")
        job.join("b")
        if ignored is m.CycleOver:
            job.fail("b")
        job.pass_time(90)
        assert job.coordinator.stop is not None
        assert job.coordinator.stop.exit_code == ExitReason.FAILED
        assert "no spare is left" in job.coordinator.stop.reason


def test_a_repeated_join_changes_nothing() -> None:
    """A node that sends its JoinRequest again, on the same or a new connection, gets the same Start once more."""
    job = job_of("a", "b")
    start = job.running["b"]
    job.run("a", "b")
    for ended in (None, m.CycleFacts(cycle=-1)):
        job.say(m.JoinRequest(node="b", epoch="b-1", addr="b", nproc=2, ended=ended))
        assert job.sent_to["b"][-1] == start
        assert job.coordinator.phase == JobPhase.RUNNING
    job.fail("a")
    assert {start.cycle for start in job.running.values()} == {1}, "b was asked for its end of the cycle, as before"
    orders = [message for message in job.sent_to["b"] if not isinstance(message, m.Decided)]
    assert isinstance(orders[-2], m.CycleOver)


def test_a_repeated_end_of_a_cycle_counts_once() -> None:
    """A node's report of a cycle's end counts once, however often it is sent."""
    job = job_of("a", "b")
    job.ignores = {"b": m.CycleOver}
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", cycle=0, exit_code=1)
    for _ in range(5):
        job.join("a", ended=m.CycleFacts(cycle=0, incident=incident))
    ending = job.coordinator.ending
    assert ending is not None
    assert (len(ending.facts), len(ending.incidents)) == (1, 1)
    job.join("b", ended=m.CycleFacts(cycle=0))
    assert set(ranks(job)) == {"a", "b"}


def test_a_node_that_exits_before_its_start_is_replaced() -> None:
    """A node that exits while the cycle's store is opened is not waited for."""
    job = job_of("a", "b", "s", ignores={"a": m.Prepare})
    job.say(m.Bye(node="b", epoch="b-1"))
    job.ignores = {}
    assert job.coordinator.phase == JobPhase.PREPARING
    job.say(m.Master(node="a", epoch="a-1", cycle=job.coordinator.cycle, addr="a", port=1))
    assert ranks(job) == {"a": 0, "s": 1}


def test_only_the_first_slots_node_reports_the_store() -> None:
    """A Master message of another node, or a second one, has no effect on the ranks' store."""
    job = job_of("a", "b", ignores={"a": m.Prepare})
    job.say(m.Master(node="b", epoch="b-1", cycle=0, addr="elsewhere", port=1))
    assert not job.running
    job.say(m.Master(node="a", epoch="a-1", cycle=0, addr="a", port=7))
    assert {(start.master_addr, start.master_port) for start in job.running.values()} == {("a", 7)}


# -- taking over -----------------------------------------------------------------------------------------------

PLACE = m.SlotPlace(term=1, cycle=4, num_slots=3, slot=0)


def place(slot: int | None, **fields: Any) -> m.SlotPlace:
    return msgspec.structs.replace(PLACE, slot=slot, **fields)


def register(job: Job, name: str, slot: int | None, *, running: bool = True, ran: bool = True) -> None:
    job.heartbeats.setdefault(name, 0)
    taken = None if slot is None else place(slot)
    if running and taken is not None:
        job.running[name] = m.Start(
            cycle=4, term=1, node_rank=taken.slot or 0, num_nodes=3, base_rank=0, world_size=6, master_addr="x",
            master_port=1, place=taken,
        )  # fmt: skip
    job.say(
        m.Register(
            node=name, epoch=f"{name}-1", addr=name, nproc=2, place=taken, ran=taken if ran else None, running=running
        )
    )


def test_a_repeated_registration_is_one_node() -> None:
    """A node that registers twice, before or after the others did, keeps its slot, and the cycle continues."""
    job = Job(num_slots=3, former_host="a")
    for name, slot in (("a", 0), ("b", 1), ("a", 0), ("b", 1)):
        register(job, name, slot)
    assert job.coordinator.phase == JobPhase.ADOPTING
    register(job, "c", 2)
    assert job.coordinator.phase == JobPhase.RUNNING
    register(job, "a", 0)
    assert [slot.holder for slot in job.coordinator.nodes.slots] == ["a", "b", "c"]
    assert (job.coordinator.phase, job.coordinator.cycle) == (JobPhase.RUNNING, 4)
    assert not any(isinstance(message, m.CycleOver) for messages in job.sent_to.values() for message in messages)


def test_a_node_that_dies_after_registering_is_lost() -> None:
    """A node that claimed its slot and died before the others registered is charged, and loses its slot."""
    job = Job(num_slots=3, former_host="a")
    register(job, "a", 0)
    register(job, "b", 1)
    job.dead.add("b")
    job.running.pop("b")
    job.say(m.Dead(node="b", epoch="b-1", reason="its agent's connection ended"))
    register(job, "c", 2)
    assert job.coordinator.phase == JobPhase.FORMING
    job.join("s")
    assert ranks(job) == {"a": 0, "s": 1, "c": 2}
    assert [one.node for one in job.incidents] == ["b"]


def test_a_takeover_before_the_first_cycle_starts_the_job() -> None:
    """When the first coordinator is lost before any agent has a place, the agents join the next one, without a place to
    register."""
    job = Job(num_slots=1, former_host="h")
    job.join("a")
    assert job.coordinator.phase == JobPhase.ADOPTING, "others may register a cycle"
    job.pass_time(job.coordinator.settings.node_timeout_s + 1)
    assert ranks(job) == {"a": 0}


def test_a_place_in_a_larger_world_is_ignored() -> None:
    """A node that reports a place in a world that this job cannot have had joins as a new node."""
    job = Job(num_slots=3, former_host="a")
    taken = place(700_000, num_slots=1 << 20)
    job.say(m.Register(node="x", epoch="x-1", addr="x", nproc=2, place=taken, ran=taken))
    for name, slot in (("a", 0), ("b", 1), ("c", 2)):
        register(job, name, slot)
    assert job.coordinator.phase == JobPhase.RUNNING
    assert len(job.coordinator.nodes.slots) == 3


@pytest.mark.parametrize("durable", [None, 10])
def test_a_first_cycle_that_only_one_node_started_ends_the_job(durable: int | None) -> None:
    """The coordinator's machine is lost when one of three nodes has got its Start. The two remaining nodes may be the
    minority: they wait join_timeout and exit, with 75 if a checkpoint exists."""
    job = Job(num_slots=3, former_host="h", num_endpoints=2, order=1, host="a", join_timeout_s=60.0)
    job.heartbeats["a"] = 0
    started_by = m.SlotPlace(term=1, cycle=0, num_slots=3, slot=0)
    job.say(m.Register(node="a", epoch="a-1", addr="a", nproc=2, place=started_by, running=False))
    job.join("a", ended=m.CycleFacts(cycle=0, durable_iteration=durable))
    job.say(m.Register(node="c", epoch="c-1", addr="c", nproc=2))
    job.join("c")
    job.pass_time(60)
    assert job.coordinator.stop is None
    assert not job.running, "the third may still train elsewhere: no second world begins"
    job.pass_time(10)
    stop = job.coordinator.stop
    assert stop is not None
    assert stop.exit_code == (ExitReason.FAILED if durable is None else ExitReason.PREEMPTED)
    assert stop.reason.startswith("most nodes of the last cycle stayed away for 60 s (--rdzv-conf join_timeout=...)")
    assert {type(job.sent_to[name][-1]) for name in ("a", "c")} == {m.Stop}


# -- over real connections -------------------------------------------------------------------------------------


def test_an_agent_that_ignores_prepare_is_replaced(make: Callable[..., LinkedAgent]) -> None:  # noqa: F811
    """An agent that sends heartbeats and never opens the store loses its slot; the spare gets it and opens the
    store."""
    port = free_port()
    settings = {"num_slots": 2, "prepare_timeout_s": 0.5, "join_timeout_s": 600.0}
    stuck = make("a", port, **settings).start()
    stuck.join(wish=0)
    other = make("b", port, **settings).start()
    spare = make("s", port, **settings).start()
    other.join(wish=1)
    assert stuck.wait_for(m.Prepare).cycle == 0
    spare.join(wish=0)
    prepare = spare.wait_for(m.Prepare)
    assert prepare.cycle == 1
    assert "did not open the cycle's store" in stuck.wait_for(m.CycleOver).reason
    spare.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
    starts = [spare.wait_for(m.Start), other.wait_for(m.Start)]
    assert [start.node_rank for start in starts] == [0, 1]
    assert {start.num_nodes for start in starts} == {2}
