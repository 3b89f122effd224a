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
    """A coordinator with nodes that do as they are told, as far as a test lets them."""

    def __init__(self, num_slots: int = 2, **settings: Any) -> None:
        self.now_s = 0.0
        self.state = RecoveryState()
        settings = {"limits": Limits(max_restarts=5), **settings}
        self.coordinator = Coordinator(
            JobSettings(job="job", num_slots=num_slots, **settings),
            self.state,
        )
        self.incidents: list[Incident] = []
        """What the coordinator itself wrote into the journal."""
        self.said: dict[str, list[m.ToNode]] = {}
        self.running: dict[str, m.Start] = {}
        self.beats: dict[str, int] = {}
        self.positions: dict[str, tuple[Position, ...]] = {}
        """What each node sees where it is asked to look at its ranks."""
        self.mute: set[str] = set()
        """Nodes that died: they answer nothing any more."""

    def say(self, message: m.ToCoordinator) -> None:
        self._deliver(self.coordinator.handle(message, self.now_s))

    def join(self, name: str, *, ended: m.CycleFacts | None = None, nproc: int = 2, wish: int | None = None) -> None:
        self.beats.setdefault(name, 0)
        self.running.pop(name, None)
        self.say(m.JoinRequest(node=name, epoch=f"{name}-1", addr=name, nproc=nproc, ended=ended, wish=wish))

    def fail(self, name: str, kind: IncidentKind = IncidentKind.WORKER_DIED, **facts: Any) -> None:
        cycle = self.running[name].cycle
        incident = Incident(kind=kind, node=name, cycle=cycle, exit_code=-9)
        self.join(name, ended=m.CycleFacts(cycle=cycle, incident=incident, **facts))

    def die(self, name: str) -> None:
        self.mute.add(name)
        self.running.pop(name, None)

    def pass_time(self, seconds: float) -> None:
        """Let time go by in steps of a second; the living beat."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for name in self.beats:
                self.beats[name] += name not in self.mute
            self._deliver(self.coordinator.judge_beats(self.beats, self.now_s, since_last_s=1.0))

    def finish_all(self) -> None:
        for name, start in list(self.running.items()):
            self.say(m.Finished(node=name, epoch=f"{name}-1", facts=m.CycleFacts(cycle=start.cycle)))

    def _deliver(self, outbox: list[tuple[str, str, m.ToNode]]) -> None:
        for effect in self.coordinator.take_effects():
            match effect:
                case Remember(state):
                    self.state = state
                case Record(EventKind.INCIDENT, _, {"incident": Incident() as incident}):
                    self.incidents.append(incident)
        for name, epoch, message in outbox:
            self.said.setdefault(name, []).append(message)
            if name in self.mute:
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


def test_cycle_starts_once_every_slot_has_a_node() -> None:
    """Nobody starts before the world is complete; then each node knows its ranks, and all the same master."""
    job = Job(num_slots=3)
    job.join("a")
    job.join("b")
    assert not job.running
    job.join("c")
    assert ranks(job) == {"a": 0, "b": 1, "c": 2}
    assert {start.base_rank for start in job.running.values()} == {0, 2, 4}
    assert {(s.master_addr, s.master_port, s.world_size) for s in job.running.values()} == {("a", 1000, 6)}


def test_a_hang_that_is_nobodys_charges_no_node() -> None:
    """Ranks wait in different collectives: the workers restart, who waits in what is said, and no node is at fault."""
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


def test_surplus_node_never_disturbs() -> None:
    """A node too many waits, whether it comes while the world forms or runs, and may die at any time."""
    job = Job()
    for name in ("a", "b", "c"):
        job.join(name)
    before = dict(job.running)
    job.join("d")
    job.die("d")
    job.pass_time(10)
    job.join("e")
    assert job.running == before
    assert isinstance(job.said["c"][-1], m.Wait)
    assert isinstance(job.said["e"][-1], m.Wait)


def test_joiner_that_dies_while_forming_leaves_no_hole() -> None:
    """A node that joined and died before the world was complete holds nobody up."""
    job = Job()
    job.join("a")
    job.die("a")
    job.pass_time(10)
    job.join("b")
    job.join("c")
    assert ranks(job) == {"b": 0, "c": 1}


def test_nodes_keep_their_slots_over_a_restart() -> None:
    """After a failure every node gets the ranks that it had, on a fresh port, in the next cycle."""
    job = Job(num_slots=3)
    for name in ("a", "b", "c"):
        job.join(name)
    before = ranks(job)
    job.fail("b")
    assert ranks(job) == before
    assert {start.cycle for start in job.running.values()} == {1}
    assert {start.master_port for start in job.running.values()} == {1001}


def test_lost_node_gives_its_slot_to_the_spare() -> None:
    """The spare takes the lost node's ranks; the others keep theirs; the world's size stays."""
    job = Job()
    for name in ("a", "b", "s"):
        job.join(name)
    job.die("a")
    job.fail("b", IncidentKind.WORKER_FAILED)  # what the loss does to its peer
    job.pass_time(8)
    assert ranks(job) == {"s": 0, "b": 1}
    assert job.state.node_faults == {"a": 1}, "the peer's collateral failure is not charged to it"


def test_lost_node_that_comes_back_hears_that_its_cycle_is_over() -> None:
    """A node that was only away must not let its ranks go on in a cycle that is over."""
    job = Job()
    for name in ("a", "b", "s"):
        job.join(name)
    job.die("b")
    job.pass_time(8)
    assert any(isinstance(message, m.CycleOver) and message.cycle == 0 for message in job.said["b"])


def test_world_waits_for_a_node_then_stops_with_the_reason() -> None:
    """Without a spare the job waits join_timeout seconds for a node and then stops, saying why."""
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


def test_world_shrinks_when_the_script_allows_it() -> None:
    """With min_nodes the survivors go on as a smaller world, in the same order."""
    job = Job(num_slots=3, min_nodes=2)
    for name in ("a", "b", "c"):
        job.join(name)
    job.die("a")
    job.pass_time(8)
    assert ranks(job) == {"b": 0, "c": 1}
    assert {start.world_size for start in job.running.values()} == {4}


def test_spare_with_fewer_workers_cannot_take_a_slot() -> None:
    """A slot's ranks go only to a node that can carry as many."""
    job = Job()
    job.join("a")
    job.join("b")
    job.join("small", nproc=1)
    job.die("b")
    job.pass_time(8)
    assert not job.running
    job.join("fits")
    assert ranks(job) == {"a": 0, "fits": 1}


def test_finished_run_ends_for_everyone_and_is_not_restarted() -> None:
    """Once all slots finished, spares too are told to stop with 0, and so is whoever comes later."""
    job = Job()
    for name in ("a", "b", "s"):
        job.join(name)
    job.finish_all()
    job.join("late")
    assert {name: said[-1].exit_code for name, said in job.said.items() if isinstance(said[-1], m.Stop)} == {
        "a": 0,
        "b": 0,
        "s": 0,
        "late": 0,
    }
    assert job.state.finished


def test_node_that_finished_runs_again_when_a_peer_fails() -> None:
    """A finished node is not the end: when another one fails, all start again together."""
    job = Job()
    job.join("a")
    job.join("b")
    job.say(m.Finished(node="a", epoch="a-1", facts=m.CycleFacts(cycle=0)))
    job.fail("b")
    assert {start.cycle for start in job.running.values()} == {1}
    assert set(job.running) == {"a", "b"}


def test_second_agent_of_the_same_name_is_turned_away() -> None:
    """Two living agents of one name: the first goes on, the second gets exit code 2 and the remedy."""
    job = Job()
    job.join("a")
    job.say(m.JoinRequest(node="a", epoch="a-2", addr="a", nproc=2))
    job.pass_time(3)
    refusals = [message for message in job.said["a"] if isinstance(message, m.Stop)]
    assert [refusal.exit_code for refusal in refusals] == [2]
    assert "--node-name" in refusals[0].reason


@pytest.mark.parametrize(("unheard_s", "lost_after_s"), [(0.5, 60), (None, 5)])
def test_a_starved_agent_is_kept_while_its_heartbeats_arrive(unheard_s: float | None, lost_after_s: int) -> None:
    """A loaded machine may keep an agent's main loop from running: its node is lost after 60 s, and after 5 s where no
    heartbeat arrives either."""
    job = Job()
    job.join("a")
    job.join("b")
    job.beats = {"a": 0, "b": 0}
    for second in range(1, 100):
        job.beats["a"] += 1
        unheard = {} if unheard_s is None else {"b": unheard_s}
        job.coordinator.judge_beats(job.beats, float(second), since_last_s=1.0, unheard_s=unheard)
        if "b" not in job.coordinator.nodes.by_name:
            break
    assert lost_after_s < second <= lost_after_s + 2


NODES = ("a", "b", "c", "d")


@given(st.permutations(NODES), st.sets(st.sampled_from(NODES)), st.booleans())
def test_only_nodes_that_received_the_signal_are_named(
    order: list[str], received: set[str], reports_early: bool
) -> None:
    """Agents report a shutdown in whatever order their workers end: the reason names nodes whose agents received the
    signal, never one that followed; all of them, where each reported the signal before the first workers ended."""
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
    who, has_signal, _ = stop.reason.partition(" received ")
    named = set(who.partition(" ")[2].split(", ")) if who.startswith("node") else set()
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


def test_a_name_is_claimed_before_anything_else() -> None:
    """An agent that has just begun is admitted at once where its name is free, refused while another agent of that name
    lives, and admitted once that one has left."""
    job = Job(num_slots=1)
    claim = m.NameClaim(node="a", epoch="a-2")
    job.say(m.NameClaim(node="a", epoch="a-1"))
    assert job.coordinator.take_admissions() == [("a", "a-1", None)]
    job.join("a")
    job.say(claim)
    assert job.coordinator.take_admissions() == []
    job.pass_time(3)
    ((*who, reason),) = job.coordinator.take_admissions()
    assert who == ["a", "a-2"]
    assert "--node-name" in (reason or "")
    job.say(claim)
    job.finish_all()
    job.say(m.Bye(node="a", epoch="a-1"))
    assert job.coordinator.take_admissions() == [("a", "a-2", None)]


def test_replaced_agent_is_stopped_when_it_returns() -> None:
    """An agent that comes back after another one has taken its name is stopped; the job goes on with the other one."""
    job = Job()
    job.join("a")
    job.join("b")
    place = job.running["b"].place
    job.die("b")
    job.pass_time(8)
    job.mute.discard("b")
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
def test_takeover_keeps_the_newer_of_two_agents_of_a_name(newer_first: bool) -> None:
    """A new coordinator that two agents of one name register with keeps the one that took a place in the newer cycle,
    in whichever order they come."""
    job = Job(num_slots=2, former_host="x")
    lives = [("b-1", m.SlotPlace(cycle=6, slot=1, num_slots=2)), ("b-2", m.SlotPlace(cycle=7, slot=1, num_slots=2))]
    stopped = []
    for epoch, place in reversed(lives) if newer_first else lives:
        message = m.Register(node="b", epoch=epoch, addr="b", nproc=2, place=place, running=True)
        outbox = job.coordinator.handle(message, job.now_s)
        stopped += [who for _, who, sent in outbox if isinstance(sent, m.Stop) and sent.is_replaced]
    assert stopped == ["b-1"]
    assert job.coordinator.nodes.by_name["b"].epoch == "b-2"


@pytest.mark.parametrize("end", [m.Dead(reason="its connection ended"), m.Bye()])
def test_a_claim_ends_with_its_agent(end: m.ToCoordinator) -> None:
    """An agent that claimed a name and is gone gets no slot once the holder of the name is lost: its spare does."""
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


def test_new_agent_of_a_dead_one_takes_its_name() -> None:
    """An agent that was restarted under its old name is let in once the old one is known to be dead."""
    job = Job()
    job.join("a")
    job.join("b")
    job.die("b")
    job.say(m.JoinRequest(node="b", epoch="b-2", addr="b", nproc=2))
    job.mute.discard("b")
    job.beats["b"] = 0
    job.coordinator.nodes.by_name["b"].beat = 0  # the old life's counter stands still
    job.mute.add("b")
    job.pass_time(8)
    assert job.coordinator.nodes.by_name["b"].epoch == "b-2"


def test_takeover_keeps_cycle_and_slots() -> None:
    """A new coordinator rebuilds the job from what the agents hold; a cycle that runs goes on untouched."""
    job = Job(num_slots=2, former_host="x")
    for slot, name in enumerate(("a", "b")):
        job.beats[name] = 0
        place = m.SlotPlace(cycle=7, slot=slot, num_slots=2)
        job.say(m.Register(node=name, epoch=f"{name}-1", addr=name, nproc=2, place=place, running=True))
    assert job.coordinator.phase == JobPhase.RUNNING
    assert job.coordinator.cycle == 7
    assert not any(job.said.values())


def test_takeover_replaces_the_node_that_hosted_the_store() -> None:
    """The slot that nobody claims went down with the old store's host; a spare takes it in the next cycle."""
    job = Job(num_slots=2, former_host="host")
    job.beats.update(b=0, s=0)
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


def test_a_number_that_an_heir_has_given_is_not_given_again() -> None:
    """A coordinator was stopped, its heir formed two cycles and is gone: the next one has a number above them."""
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
    took = m.SlotPlace(term=2, cycle=2, slot=1, num_slots=2, num_spares=1)
    waits = m.SlotPlace(term=2, cycle=2, spare=0, num_slots=2, num_spares=1)
    job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=took, ran=took, running=True))
    job.join("b", ended=m.CycleFacts(cycle=2))
    job.say(m.Register(node="s", epoch="s-1", addr="s", nproc=2, place=waits, ran=waits))
    job.join("s")
    assert [told.cycle for told in job.said["a"] if isinstance(told, m.Prepare)] == [0, 3]


@pytest.mark.parametrize(("term", "host_slot"), [(0, None), (0, 1), (-1, 0)])
def test_takeover_waits_for_a_node_that_was_not_the_hosts(term: int, host_slot: int | None) -> None:
    """The slot that nobody claims was another node's, or it is not known whose: that one has as long as silent nodes
    have, the cycle goes on if it comes, and the lost host is not blamed for its absence."""
    for comes in (True, False):
        job = Job(num_slots=2, former_host="host", term=2 + term)
        job.beats.update(b=0, late=0)
        place = m.SlotPlace(term=1, cycle=3, slot=1, num_slots=2, host_slot=host_slot)
        job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=place, running=True))
        job.pass_time(4)
        assert job.coordinator.phase == JobPhase.ADOPTING
        if comes:
            late = m.SlotPlace(term=1, cycle=3, slot=0, num_slots=2, host_slot=host_slot)
            job.say(m.Register(node="late", epoch="late-1", addr="late", nproc=2, place=late, running=True))
            assert (job.coordinator.phase, job.coordinator.cycle) == (JobPhase.RUNNING, 3)
        else:
            job.pass_time(8)
            assert job.coordinator.phase != JobPhase.ADOPTING
            assert not job.state.node_faults


def test_divided_network_does_not_make_two_runs() -> None:
    """Where both halves of a divided network could be complete, only the one with most slots' holders goes on."""
    job = Job(num_slots=2, max_nodes=4, former_host="host", num_endpoints=2)
    place = m.SlotPlace(cycle=3, slot=1, num_slots=2)
    job.beats.update(b=0, s=0)
    job.say(m.Register(node="b", epoch="b-1", addr="b", nproc=2, place=place))
    job.join("b", ended=m.CycleFacts(cycle=3))
    job.say(m.Register(node="s", epoch="s-1", addr="s", nproc=2))
    job.join("s")
    job.pass_time(30)
    assert not job.running


@pytest.mark.parametrize("order", [("root", "peer"), ("peer", "root")])
def test_cause_is_what_cannot_be_an_effect(order: tuple[str, str]) -> None:
    """A killed rank is the cause, its peer's exception the effect, whichever is told first."""
    job = Job()
    job.join("root")
    job.join("peer")
    incidents = {
        "root": Incident(kind=IncidentKind.WORKER_DIED, node="root", rank=0, exit_code=-9),
        "peer": Incident(kind=IncidentKind.WORKER_FAILED, node="peer", rank=2, exit_code=1),
    }
    job.mute = {"root", "peer"}
    for name in order:
        job.join(name, ended=m.CycleFacts(cycle=0, incident=incidents[name]))
    assert job.state.node_faults == {"root": 1}


def _load(cycle: int) -> Load:
    return Load(cycle=f"job-{cycle}", checkpoint=120, attempt="job-0-aa.1", tier="replica", suspect_window=20)


def test_a_copy_that_proved_bad_is_named_to_every_node() -> None:
    """Exit code 17 soon after a load starts another cycle; every node hears what not to load, and an incident says
    which copy it was and why. The other node's load is known even where the failing one could not tell it."""
    job = Job()
    job.join("a")
    job.join("b")
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=2, iteration=127, exit_code=17)
    job.mute = {"a", "b"}
    job.join("b", ended=m.CycleFacts(cycle=0, incident=incident))
    job.mute = set()
    job.join("a", ended=m.CycleFacts(cycle=0, load=_load(0)))
    assert {start.cycle for start in job.running.values()} == {1}
    for start in job.running.values():
        (one,) = start.excluded
        assert (one.checkpoint, one.attempt, one.tier) == (120, "job-0-aa.1", "replica")
    (written,) = job.incidents
    assert (written.kind, written.rank, written.iteration) == (IncidentKind.COPY_UNTRUSTED, 2, 127)
    assert written.evidence["attempt"] == "job-0-aa.1"
    assert "checkpoint 120" in written.describe()


def test_what_was_decided_survives_the_coordinators_machine() -> None:
    """A new coordinator without the old one's files learns from the agents what they must not load, and which restarts
    were used, whichever of them comes first."""
    job = Job(num_slots=1, former_host="x")
    job.beats["a"] = 0
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
    decided = [message.recovery_state for message in job.said["a"] if isinstance(message, m.Decided)]
    assert (decided[-1].restarts_total, job.coordinator.stop) == (8, None)
    job.fail("a")
    assert job.coordinator.stop is not None
    assert "all 5 restarts are used" in job.coordinator.stop.reason


@pytest.mark.parametrize("how", ["takeover", "reconnection"])
def test_nodes_are_notified_again_that_peers_have_finished(how: str) -> None:
    """A node whose ranks still run learns from the coordinator that takes over, or that it reaches again, that the
    ranks of another node have finished: the notification may have been lost with the connection."""
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
        job.said.clear()
        job.say(registers["b"])
    assert [one for one in job.said["b"] if isinstance(one, m.PeersFinished)] == [m.PeersFinished(cycle=7)]
    assert not [one for one in job.said.get("a", ()) if isinstance(one, m.PeersFinished)]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "fail", "die", "time", "finish"]), st.sampled_from("abcde")), max_size=40
)


@given(EVENTS)
def test_whatever_happens_a_cycle_is_one_world(events: list[tuple[str, str]]) -> None:
    """For any order of joins, failures and deaths: no cycle starts twice on a node, each one that starts is whole,
    with every slot held by one living node, and cycles without progress are bounded."""
    job = Job(limits=Limits(max_restarts=4, max_no_progress_cycles=100))
    for action, name in events:
        if action == "join" and name not in job.beats:
            job.join(name)
        elif action == "fail" and name in job.running:
            job.fail(name)
        elif action == "die" and name in job.beats:
            job.die(name)
        elif action == "time":
            job.pass_time(7)
        elif action == "finish":
            job.finish_all()
    starts = [message for said in job.said.values() for message in said if isinstance(message, m.Start)]
    for said in job.said.values():
        cycles = [message.cycle for message in said if isinstance(message, m.Start)]
        assert cycles == sorted(set(cycles))
    for cycle in {start.cycle for start in starts}:
        world = [start for start in starts if start.cycle == cycle]
        assert sorted(start.node_rank for start in world) == [0, 1]
        assert sorted(start.base_rank for start in world) == [0, 2]
        assert len({(start.master_addr, start.master_port) for start in world}) == 1
    assert len({start.cycle for start in starts}) <= 5
