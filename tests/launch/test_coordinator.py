"""The coordinator's promises, verified without a network: messages in, messages out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ExitReason
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.decisions import Record, Remember
from outlast.launch.job_settings import JobSettings
from outlast.launch.protocol import JobPhase
from outlast.policy.recovery_point import Exclusion, Load
from outlast.policy.recovery_policy import Limits, RecoveryState
from outlast.policy.root_cause import Collective, Position


class Job:
    """A coordinator with simulated nodes, which follow its orders unless a test prevents that."""

    def __init__(self, num_slots: int = 2, **settings: Any) -> None:
        self.now_s = 0.0
        self.state = RecoveryState()
        settings = {"limits": Limits(max_restarts=5), **settings}
        self.coordinator = Coordinator(
            JobSettings(job="job", num_slots=num_slots, **settings),
            self.state,
        )
        self.incidents: list[Incident] = []
        """Incidents that the coordinator wrote to the journal."""
        self.sent_to: dict[str, list[m.ToNode]] = {}
        self.running: dict[str, m.Start] = {}
        self.heartbeats: dict[str, int] = {}
        self.positions: dict[str, tuple[Position, ...]] = {}
        """The positions that each node reports when an examination is requested."""
        self.dead: set[str] = set()
        """Nodes that died and send nothing any more."""

    def say(self, message: m.ToCoordinator) -> None:
        self.deliver(self.coordinator.handle(message, self.now_s))

    def join(self, name: str, *, ended: m.CycleFacts | None = None, nproc: int = 2, wish: int | None = None) -> None:
        self.heartbeats.setdefault(name, 0)
        self.running.pop(name, None)
        self.say(m.JoinRequest(node=name, epoch=f"{name}-1", addr=name, nproc=nproc, ended=ended, wish=wish))

    def fail(self, name: str, kind: IncidentKind = IncidentKind.WORKER_DIED, **facts: Any) -> None:
        cycle = self.running[name].cycle
        incident = Incident(kind=kind, node=name, cycle=cycle, exit_code=-9)
        self.join(name, ended=m.CycleFacts(cycle=cycle, incident=incident, **facts))

    def die(self, name: str) -> None:
        self.dead.add(name)
        self.running.pop(name, None)

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps of a second, with heartbeats of living nodes."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for name in self.heartbeats:
                self.heartbeats[name] += name not in self.dead
            self.deliver(self.coordinator.judge_heartbeats(self.heartbeats, self.now_s, since_last_s=1.0))

    def finish_all(self) -> None:
        for name, start in list(self.running.items()):
            self.say(m.Finished(node=name, epoch=f"{name}-1", facts=m.CycleFacts(cycle=start.cycle)))

    def deliver(self, outbox: list[tuple[str, str, m.ToNode]]) -> None:
        for effect in self.coordinator.take_effects():
            match effect:
                case Remember(state):
                    self.state = state
                case Record(EventKind.INCIDENT, _, {"incident": Incident() as incident}):
                    self.incidents.append(incident)
        for name, epoch, message in outbox:
            self.sent_to.setdefault(name, []).append(message)
            if name in self.dead:
                continue
            if isinstance(message, m.Prepare):
                self.say(m.Master(node=name, epoch=epoch, cycle=message.cycle, addr=name, port=1000 + message.cycle))
            elif isinstance(message, m.Start):
                self.running[name] = message
            elif isinstance(message, m.CycleOver) and name in self.running:
                positions = self.positions.get(name, ()) if message.examine else ()
                self.join(name, ended=m.CycleFacts(cycle=message.cycle, positions=positions))


def ranks(job: Job) -> dict[str, int]:
    return {name: start.node_rank for name, start in job.running.items()}


def test_a_cycle_starts_once_every_slot_has_a_node() -> None:
    """No node starts before the world is complete; then each node gets its ranks, and all the same master."""
    job = Job(num_slots=3)
    job.join("a")
    job.join("b")
    assert not job.running
    job.join("c")
    assert ranks(job) == {"a": 0, "b": 1, "c": 2}
    assert {start.base_rank for start in job.running.values()} == {0, 2, 4}
    assert {(s.master_addr, s.master_port, s.world_size) for s in job.running.values()} == {("a", 1000, 6)}


def test_a_hang_without_root_cause_counts_against_no_node() -> None:
    """When ranks wait in different collectives the workers restart, the ranks in each collective are reported, and no
    node is charged."""
    job = Job()
    for name in ("a", "b"):
        job.join(name)
    for rank, (node, op) in enumerate([("a", "ALLREDUCE"), ("a", "ALLREDUCE"), ("b", "BROADCAST"), ("b", "ALLREDUCE")]):
        facts = {"waits_in_collective": True, "groups": {"0": 7}, "waiting_in": Collective(op=op, seq=7, group="0")}
        job.positions[node] = (*job.positions.get(node, ()), Position(node=node, global_rank=rank, **facts))
    first = Incident(kind=IncidentKind.WORKER_HUNG, node="a", rank=0, pid=5, section="step")
    job.say(m.Hung(node="a", epoch="a-1", cycle=0, incident=first))
    assert [start.cycle for start in job.running.values()] == [1, 1]
    assert job.state.node_faults == {}
    assert job.state.restarts_total == 1
    where = "ranks wait in different collectives: 0, 1, 3 in ALLREDUCE seq 7, 2 in BROADCAST seq 7"
    assert job.state.history[-1].reason.startswith(f"the group of ranks hangs: {where}; restarting the workers")


def test_a_spare_never_disturbs_a_cycle() -> None:
    """A surplus node waits, whether it joins while the world forms or runs, and may die at any time."""
    job = Job()
    for name in ("a", "b", "c"):
        job.join(name)
    before = dict(job.running)
    job.join("d")
    job.die("d")
    job.pass_time(10)
    job.join("e")
    assert job.running == before
    assert isinstance(job.sent_to["c"][-1], m.Wait)
    assert isinstance(job.sent_to["e"][-1], m.Wait)


def test_a_node_that_dies_before_the_start_is_not_awaited() -> None:
    """The world forms without a node that joined and died before it was complete."""
    job = Job()
    job.join("a")
    job.die("a")
    job.pass_time(10)
    job.join("b")
    job.join("c")
    assert ranks(job) == {"b": 0, "c": 1}


def test_nodes_keep_their_slots_in_a_restart() -> None:
    """After a failure each node gets the same ranks in the next cycle, on a fresh port."""
    job = Job(num_slots=3)
    for name in ("a", "b", "c"):
        job.join(name)
    before = ranks(job)
    job.fail("b")
    assert ranks(job) == before
    assert {start.cycle for start in job.running.values()} == {1}
    assert {start.master_port for start in job.running.values()} == {1001}


def test_a_spare_takes_the_slot_of_a_lost_node() -> None:
    """The spare takes the lost node's ranks; the others keep theirs, and the world size stays the same."""
    job = Job()
    for name in ("a", "b", "s"):
        job.join(name)
    job.die("a")
    job.fail("b", IncidentKind.WORKER_FAILED)  # the effect of the loss on its peer
    job.pass_time(8)
    assert ranks(job) == {"s": 0, "b": 1}
    assert job.state.node_faults == {"a": 1}, "the peer's collateral failure is not charged to it"


def test_a_returning_node_ends_its_old_cycle() -> None:
    """A node that was out of reach is notified that its cycle is over, and ends its ranks."""
    job = Job()
    for name in ("a", "b", "s"):
        job.join(name)
    job.die("b")
    job.pass_time(8)
    assert any(isinstance(message, m.CycleOver) and message.cycle == 0 for message in job.sent_to["b"])


def test_a_job_without_a_spare_waits_and_then_stops() -> None:
    """Without a spare the job waits join_timeout seconds for a node, and then stops with the reason."""
    job = Job(join_timeout_s=20.0)
    job.join("a")
    job.join("b")
    job.die("b")
    job.pass_time(15)
    assert job.coordinator.phase == JobPhase.FORMING
    job.pass_time(30)
    assert job.coordinator.stop is not None
    assert job.coordinator.stop.exit_code == 1
    assert "no spare" in job.coordinator.stop.reason


def test_the_world_shrinks_with_min_nodes() -> None:
    """With min_nodes the survivors continue as a smaller world, in the same order."""
    job = Job(num_slots=3, min_nodes=2)
    for name in ("a", "b", "c"):
        job.join(name)
    job.die("a")
    job.pass_time(8)
    assert ranks(job) == {"b": 0, "c": 1}
    assert {start.world_size for start in job.running.values()} == {4}


def test_a_spare_with_fewer_workers_cannot_take_a_slot() -> None:
    """A slot is only assigned to a node with at least as many workers."""
    job = Job()
    job.join("a")
    job.join("b")
    job.join("small", nproc=1)
    job.die("b")
    job.pass_time(8)
    assert not job.running
    job.join("fits")
    assert ranks(job) == {"a": 0, "fits": 1}


def test_a_finished_run_stops_all_nodes_with_0() -> None:
    """Once all slots have finished, spares and nodes that join later are stopped with 0."""
    job = Job()
    for name in ("a", "b", "s"):
        job.join(name)
    job.finish_all()
    job.join("late")
    assert {
        name: sent_to[-1].exit_code for name, sent_to in job.sent_to.items() if isinstance(sent_to[-1], m.Stop)
    } == {
        "a": 0,
        "b": 0,
        "s": 0,
        "late": 0,
    }
    assert job.state.finished


def test_a_finished_node_restarts_when_a_peer_fails() -> None:
    """When another node fails, a node that has finished restarts together with all others."""
    job = Job()
    job.join("a")
    job.join("b")
    job.say(m.Finished(node="a", epoch="a-1", facts=m.CycleFacts(cycle=0)))
    job.fail("b")
    assert {start.cycle for start in job.running.values()} == {1}
    assert set(job.running) == {"a", "b"}


def test_a_second_agent_of_a_name_is_rejected() -> None:
    """Of two living agents of one name the first continues, and the second exits with 2 and the remedy."""
    job = Job()
    job.join("a")
    job.say(m.JoinRequest(node="a", epoch="a-2", addr="a", nproc=2))
    job.pass_time(3)
    refusals = [message for message in job.sent_to["a"] if isinstance(message, m.Stop)]
    assert [refusal.exit_code for refusal in refusals] == [2]
    assert "--node-name" in refusals[0].reason


@pytest.mark.parametrize(("silent_s", "lost_after_s"), [(0.5, 60), (None, 5)])
def test_a_starved_agent_is_kept_while_its_heartbeats_arrive(silent_s: float | None, lost_after_s: int) -> None:
    """On a loaded machine an agent's main loop may not run: its node is lost after 60 s, and after 5 s if no heartbeat
    arrives either."""
    job = Job()
    job.join("a")
    job.join("b")
    job.heartbeats = {"a": 0, "b": 0}
    for second in range(1, 100):
        job.heartbeats["a"] += 1
        silences = {} if silent_s is None else {"b": silent_s}
        job.coordinator.judge_heartbeats(job.heartbeats, float(second), since_last_s=1.0, silences_s=silences)
        if "b" not in job.coordinator.nodes.by_name:
            break
    assert lost_after_s < second <= lost_after_s + 2


NODES = ("a", "b", "c", "d")


@given(st.permutations(NODES), st.sets(st.sampled_from(NODES)), st.booleans())
def test_the_reason_lists_the_nodes_that_got_the_signal(
    order: list[str], received: set[str], reports_early: bool
) -> None:
    """Whatever the order in which agents report a shutdown, the reason lists only nodes whose agents received the
    signal, and all of them if each reported it before the first workers ended."""
    job = Job(num_slots=len(NODES))
    for name in NODES:
        job.join(name)
    for name in received if reports_early else ():
        job.say(m.Detected(node=name, epoch=f"{name}-1", signal=15))
    for name in order:
        number = 15 if name in received else 0
        job.say(m.Leave(node=name, epoch=f"{name}-1", saved=True, signal=number))
    stop = job.coordinator.stop
    assert stop is not None
    assert stop.exit_code == ExitReason.PREEMPTED
    listed, has_signal, _ = stop.reason.partition(" received ")
    named = set(listed.partition(" ")[2].split(", ")) if listed.startswith("node") else set()
    assert named <= received
    if reports_early and received:
        assert named == received
    assert has_signal


def test_a_signal_without_a_name_is_reported_by_its_number() -> None:
    """A real-time signal that an agent reports ends the job like any other."""
    job = Job(num_slots=1)
    job.join("a")
    job.say(m.Leave(node="a", epoch="a-1", signal=50))
    assert job.coordinator.stop is not None
    assert job.coordinator.stop.reason.startswith("node a received signal 50; ")


def test_a_node_name_is_claimed_first() -> None:
    """A new agent is admitted at once where its name is free, rejected while another agent of that name lives, and
    admitted once that agent has left."""
    job = Job(num_slots=1)
    claim = m.NameClaim(node="a", epoch="a-2")
    job.say(m.NameClaim(node="a", epoch="a-1"))
    assert job.coordinator.take_admissions() == [("a", "a-1", None)]
    job.join("a")
    job.say(claim)
    assert job.coordinator.take_admissions() == []
    job.pass_time(3)
    ((*listed, reason),) = job.coordinator.take_admissions()
    assert listed == ["a", "a-2"]
    assert "--node-name" in (reason or "")
    job.say(claim)
    job.finish_all()
    job.say(m.Bye(node="a", epoch="a-1"))
    assert job.coordinator.take_admissions() == [("a", "a-2", None)]


def test_a_replaced_agent_is_stopped_when_it_returns() -> None:
    """An agent that returns after another one took its name is stopped; the job continues with the other one."""
    job = Job()
    job.join("a")
    job.join("b")
    place = job.running["b"].place
    job.die("b")
    job.pass_time(8)
    job.dead.discard("b")
    job.say(m.JoinRequest(node="b", epoch="b-2", addr="c", nproc=2))
    outbox = job.coordinator.handle(
        m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=place, ran=place, running=True), job.now_s
    )
    ((name, epoch, stop),) = [one for one in outbox if isinstance(one[2], m.Stop)]
    assert (name, epoch) == ("b", "b-1")
    assert isinstance(stop, m.Stop)
    assert stop.is_replaced
    assert job.coordinator.nodes.by_name["b"].epoch == "b-2"
    assert job.coordinator.phase == JobPhase.RUNNING


@pytest.mark.parametrize("newer_first", [True, False])
def test_a_takeover_keeps_the_newer_agent_of_a_name(newer_first: bool) -> None:
    """When two agents of one name register with a new coordinator, the one with a place in the newer cycle is kept, in
    either order."""
    job = Job(num_slots=2, former_host="x")
    lives = [("b-1", m.SlotPlace(cycle=6, slot=1, num_slots=2)), ("b-2", m.SlotPlace(cycle=7, slot=1, num_slots=2))]
    stopped = []
    for epoch, place in reversed(lives) if newer_first else lives:
        message = m.Register(node="b", epoch=epoch, addr="b", nproc=2, place=place, running=True)
        outbox = job.coordinator.handle(message, job.now_s)
        stopped += [listed for _, listed, sent in outbox if isinstance(sent, m.Stop) and sent.is_replaced]
    assert stopped == ["b-1"]
    assert job.coordinator.nodes.by_name["b"].epoch == "b-2"


@pytest.mark.parametrize("end", [m.Dead(reason="its connection ended"), m.Bye()])
def test_a_claim_ends_with_its_agent(end: m.ToCoordinator) -> None:
    """An agent that claimed a name and has ended gets no slot once the holder of the name is lost; a spare gets it."""
    job = Job()
    for name in ("a", "b"):
        job.join(name)
    job.pass_time(1)
    job.die("b")
    job.say(m.JoinRequest(node="b", epoch="b-2", addr="b", nproc=2))
    job.say(msgspec.structs.replace(end, node="b", epoch="b-2"))
    job.pass_time(7)
    assert "b" not in job.coordinator.nodes.by_name
    job.join("s")
    assert ranks(job) == {"a": 0, "s": 1}


def test_a_restarted_agent_gets_its_name_back() -> None:
    """An agent restarted under its old name is admitted once the old one is known to be dead."""
    job = Job()
    job.join("a")
    job.join("b")
    job.die("b")
    job.say(m.JoinRequest(node="b", epoch="b-2", addr="b", nproc=2))
    job.dead.discard("b")
    job.heartbeats["b"] = 0
    job.coordinator.nodes.by_name["b"].heartbeat = 0  # the counter of the old agent does not advance
    job.dead.add("b")
    job.pass_time(8)
    assert job.coordinator.nodes.by_name["b"].epoch == "b-2"


def test_a_takeover_keeps_cycle_and_slots() -> None:
    """A new coordinator restores the job from the agents' state; a running cycle continues."""
    job = Job(num_slots=2, former_host="x")
    for slot, name in enumerate(("a", "b")):
        job.heartbeats[name] = 0
        place = m.SlotPlace(cycle=7, slot=slot, num_slots=2)
        job.say(m.Register(node=name, epoch=f"{name}-1", addr=name, nproc=2, place=place, running=True))
    assert job.coordinator.phase == JobPhase.RUNNING
    assert job.coordinator.cycle == 7
    assert not any(job.sent_to.values())


def test_a_takeover_replaces_the_node_of_the_store() -> None:
    """The unclaimed slot was lost with the host of the store; a spare takes it in the next cycle."""
    job = Job(num_slots=2, former_host="host")
    job.heartbeats.update(b=0, s=0)
    place = m.SlotPlace(cycle=3, slot=1, num_slots=2, host_slot=0)
    job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=place))
    job.join("b", ended=m.CycleFacts(cycle=3, durable_iteration=40, progress_known=True))
    job.say(m.Register(node="s", epoch="s-1", addr="s", nproc=2))
    job.join("s")
    job.pass_time(3)
    assert ranks(job) == {"s": 0, "b": 1}
    assert {start.cycle for start in job.running.values()} == {4}
    assert job.state.best_durable == 40
    assert job.state.node_faults == {"host": 1}


def test_cycle_numbers_are_unique_across_coordinators() -> None:
    """After a successor formed two cycles and was lost, the coordinator that was stopped meanwhile continues with a
    higher number."""
    job = Job(num_slots=2, num_endpoints=2, max_nodes=3)
    for name in ("a", "b", "s"):
        job.join(name)
    assert {start.cycle for start in job.running.values()} == {0}
    for name in ("a", "b"):
        job.say(m.Running(node=name, epoch=f"{name}-1", cycle=0))
    for name in ("s", "b"):
        node = job.coordinator.nodes.by_name[name]
        job.running.pop(name, None)
        job.say(m.Dead(node=name, epoch=node.epoch, reason="it went to another coordinator", is_known=False))
    started = m.SlotPlace(term=2, cycle=2, slot=1, num_slots=2, num_spares=1)
    waits = m.SlotPlace(term=2, cycle=2, spare=0, num_slots=2, num_spares=1)
    job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=started, ran=started, running=True))
    job.join("b", ended=m.CycleFacts(cycle=2))
    job.say(m.Register(node="s", epoch="s-1", addr="s", nproc=2, place=waits, ran=waits))
    job.join("s")
    assert [message.cycle for message in job.sent_to["a"] if isinstance(message, m.Prepare)] == [0, 3]


@pytest.mark.parametrize(("term", "host_slot"), [(0, None), (0, 1), (-1, 0)])
def test_a_takeover_waits_for_the_node_of_an_unclaimed_slot(term: int, host_slot: int | None) -> None:
    """If the unclaimed slot was not the lost host's, or may not have been, its node may return within the timeout of
    silent nodes: the cycle continues, and the lost host is not blamed."""
    for returns in (True, False):
        job = Job(num_slots=2, former_host="host", term=2 + term)
        job.heartbeats.update(b=0, late=0)
        place = m.SlotPlace(term=1, cycle=3, slot=1, num_slots=2, host_slot=host_slot)
        job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=place, running=True))
        job.pass_time(4)
        assert job.coordinator.phase == JobPhase.ADOPTING
        if returns:
            late = m.SlotPlace(term=1, cycle=3, slot=0, num_slots=2, host_slot=host_slot)
            job.say(m.Register(node="late", epoch="late-1", addr="late", nproc=2, place=late, running=True))
            assert (job.coordinator.phase, job.coordinator.cycle) == (JobPhase.RUNNING, 3)
        else:
            job.pass_time(8)
            assert job.coordinator.phase != JobPhase.ADOPTING
            assert not job.state.node_faults


def test_a_divided_network_has_one_run() -> None:
    """Where both parts of a divided network could be complete, only the part with most of the slots continues."""
    job = Job(num_slots=2, max_nodes=4, former_host="host", num_endpoints=2)
    place = m.SlotPlace(cycle=3, slot=1, num_slots=2)
    job.heartbeats.update(b=0, s=0)
    job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=place))
    job.join("b", ended=m.CycleFacts(cycle=3))
    job.say(m.Register(node="s", epoch="s-1", addr="s", nproc=2))
    job.join("s")
    job.pass_time(30)
    assert not job.running


@pytest.mark.parametrize("order", [("root", "peer"), ("peer", "root")])
def test_a_killed_rank_is_the_root_cause(order: tuple[str, str]) -> None:
    """A killed rank is the root cause and its peer's exception the effect, in either order of the reports."""
    job = Job()
    job.join("root")
    job.join("peer")
    incidents = {
        "root": Incident(kind=IncidentKind.WORKER_DIED, node="root", rank=0, exit_code=-9),
        "peer": Incident(kind=IncidentKind.WORKER_FAILED, node="peer", rank=2, exit_code=1),
    }
    job.dead = {"root", "peer"}
    for name in order:
        job.join(name, ended=m.CycleFacts(cycle=0, incident=incidents[name]))
    assert job.state.node_faults == {"root": 1}


def _load(cycle: int) -> Load:
    return Load(cycle=f"job-{cycle}", checkpoint=120, attempt="job-0-aa.1", tier="replica", suspect_window=20)


def test_an_invalid_copy_is_excluded_on_every_node() -> None:
    """Exit code 17 soon after a load starts another cycle with the copy excluded on all nodes, and an incident reports
    the copy and the reason, also where only another node reported the load."""
    job = Job()
    job.join("a")
    job.join("b")
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=2, iteration=127, exit_code=17)
    job.dead = {"a", "b"}
    job.join("b", ended=m.CycleFacts(cycle=0, incident=incident))
    job.dead = set()
    job.join("a", ended=m.CycleFacts(cycle=0, load=_load(0)))
    assert {start.cycle for start in job.running.values()} == {1}
    for start in job.running.values():
        (one,) = start.excluded
        assert (one.checkpoint, one.attempt, one.tier) == (120, "job-0-aa.1", "replica")
    (written,) = job.incidents
    assert (written.kind, written.rank, written.iteration) == (IncidentKind.COPY_UNTRUSTED, 2, 127)
    assert written.evidence["attempt"] == "job-0-aa.1"
    assert "checkpoint 120" in written.describe()


def test_the_recovery_state_survives_the_coordinator() -> None:
    """A new coordinator without the old one's files gets the exclusions and used restarts from the agents, in any
    order."""
    job = Job(num_slots=1, former_host="x")
    job.heartbeats["a"] = 0
    one = Exclusion(checkpoint=120, attempt="job-0-aa.1", tier="memory")
    place = m.SlotPlace(cycle=7, slot=0, num_slots=1)
    recovery_state = RecoveryState(number=9, excluded=(one,), restarts_without_progress=4, restarts_total=7)
    earlier = RecoveryState(number=8, restarts_without_progress=3, restarts_total=6)
    message = m.Register(
        node="a", epoch="a-1", addr="a", nproc=2, place=place, running=True, recovery_state=recovery_state
    )
    job.say(msgspec.structs.replace(message, node="s", epoch="s-1", place=None, running=False, recovery_state=earlier))
    job.say(message)
    job.say(message)
    assert job.state.excluded == (one,)
    assert (job.state.restarts_without_progress, job.state.restarts_total) == (4, 7)
    job.running["a"] = m.Start(
        cycle=7,
        term=1,
        node_rank=0,
        num_nodes=1,
        base_rank=0,
        world_size=2,
        master_addr="a",
        master_port=1,
        place=place,
    )
    job.fail("a")
    job.pass_time(30)  # the delay of a fifth restart without progress
    assert job.running["a"].excluded == (one,)
    recovery_states = [message.recovery_state for message in job.sent_to["a"] if isinstance(message, m.Decided)]
    assert (recovery_states[-1].restarts_total, job.coordinator.stop) == (8, None)
    job.fail("a")
    assert job.coordinator.stop is not None
    assert "all 5 restarts are used" in job.coordinator.stop.reason


@pytest.mark.parametrize("how", ["takeover", "reconnection"])
def test_finished_peers_are_reported_again(how: str) -> None:
    """A node with running ranks is notified after a takeover or reconnection that another node's ranks have finished,
    since the first notification may have been lost."""
    job = Job(num_slots=2, former_host="x")
    places = {name: m.SlotPlace(cycle=7, slot=slot, num_slots=2) for slot, name in enumerate("ab")}
    registers = {
        name: m.Register(node=name, epoch=f"{name}-1", addr=name, nproc=2, place=place, ran=place, running=True)
        for name, place in places.items()
    }
    job.say(registers["a"])
    job.say(m.Finished(node="a", epoch="a-1", facts=m.CycleFacts(cycle=7)))
    job.say(registers["b"])
    if how == "reconnection":
        job.sent_to.clear()
        job.say(registers["b"])
    assert [one for one in job.sent_to["b"] if isinstance(one, m.PeersFinished)] == [m.PeersFinished(cycle=7)]
    assert not [one for one in job.sent_to.get("a", ()) if isinstance(one, m.PeersFinished)]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "fail", "die", "time", "finish"]), st.sampled_from("abcde")), max_size=40
)


@given(EVENTS)
def test_each_cycle_has_one_complete_world(events: list[tuple[str, str]]) -> None:
    """For any order of joins, failures and deaths no cycle starts twice on a node, each slot of a started cycle is held
    by one living node, and cycles without progress are bounded."""
    job = Job(limits=Limits(max_restarts=4, max_no_progress_cycles=100))
    for action, name in events:
        if action == "join" and name not in job.heartbeats:
            job.join(name)
        elif action == "fail" and name in job.running:
            job.fail(name)
        elif action == "die" and name in job.heartbeats:
            job.die(name)
        elif action == "time":
            job.pass_time(7)
        elif action == "finish":
            job.finish_all()
    starts = [message for sent_to in job.sent_to.values() for message in sent_to if isinstance(message, m.Start)]
    for sent_to in job.sent_to.values():
        cycles = [message.cycle for message in sent_to if isinstance(message, m.Start)]
        assert cycles == sorted(set(cycles))
    for cycle in {start.cycle for start in starts}:
        world = [start for start in starts if start.cycle == cycle]
        assert sorted(start.node_rank for start in world) == [0, 1]
        assert sorted(start.base_rank for start in world) == [0, 2]
        assert len({(start.master_addr, start.master_port) for start in world}) == 1
    assert len({start.cycle for start in starts}) <= 5
