"""Network partitions, with simulated agents and the real coordinators: two worlds never train at the same time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.job_settings import JobSettings
from outlast.policy.leadership import should_yield
from outlast.policy.recovery_policy import Limits, RecoveryState

SILENCE_S = 5.0


@dataclass
class Agent:
    """A simulated agent: its connection, its knowledge of the job, and its running cycle."""

    name: str
    endpoint: int | None
    """The endpoint at which this agent may host the coordinator, if any."""
    leader: Host | None = None
    obeys: Host | None = None
    """The coordinator that accepted this agent last."""
    job: tuple[str, int] | None = None
    """Node and term of the last coordinator that this agent obeyed."""
    place: m.SlotPlace | None = None
    ran: m.SlotPlace | None = None
    start: m.Start | None = None
    """The cycle whose workers run."""
    ended: m.CycleFacts | None = None
    pending: list[m.ToNode] = field(default_factory=list)
    """Messages that wait in the kernel of the coordinator's machine."""
    silent_s: float = 0.0
    rounds: int = 0
    count: int = 0

    @property
    def epoch(self) -> str:
        return f"{self.name}-1"


@dataclass(eq=False)
class Host:
    """One instance of a coordinator."""

    agent: Agent
    coordinator: Coordinator
    linked: dict[str, Agent] = field(default_factory=dict)
    judged_s: float = 0.0


class Network:
    """Agents in groups that reach only their own group; time passes in steps of half a second."""

    def __init__(
        self, rng: random.Random, *, num_agents: int, num_slots: int, num_endpoints: int, min_nodes: int
    ) -> None:
        self.rng, self.now_s = rng, 0.0
        self.num_slots, self.num_agents, self.num_endpoints, self.min_nodes = (
            num_slots,
            num_agents,
            num_endpoints,
            min_nodes,
        )
        self.agents = [Agent(f"n{i}", i if i < num_endpoints else None) for i in range(num_agents)]
        self.by_name = {agent.name: agent for agent in self.agents}
        self.group = dict.fromkeys(self.by_name, 0)
        self.hosts: dict[int, Host] = {}
        self.ports = itertools.count(1)
        self.worlds: list[tuple[int, int]] = []
        """Term and cycle of each world that trained."""

    def reach(self, one: Agent, other: Agent) -> bool:
        return self.group[one.name] == self.group[other.name]

    def divide(self, num_parts: int) -> None:
        self.group = {name: self.rng.randrange(num_parts) for name in self.by_name}

    def heal(self) -> None:
        self.group = dict.fromkeys(self.by_name, 0)

    # -- a step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now_s += 0.5
        for agent in self.rng.sample(self.agents, len(self.agents)):
            self._connect(agent)
        for host in list(self.hosts.values()):
            heartbeats = {}
            for agent in host.linked.values():
                if self.reach(agent, host.agent):
                    agent.count += 1
                heartbeats[agent.name] = agent.count
            before, host.judged_s = host.judged_s, self.now_s
            self._send(host, host.coordinator.handle(m.CoordinatorTick(), self.now_s))
            self._send(
                host, host.coordinator.judge_heartbeats(heartbeats, self.now_s, since_last_s=self.now_s - before)
            )
        self._yield()
        self._check_worlds()

    def _connect(self, agent: Agent) -> None:
        if agent.leader is not None:
            if self.reach(agent, agent.leader.agent) and agent.leader in self.hosts.values():
                agent.silent_s = 0.0
                pending, agent.pending = agent.pending, []
                for message in pending:
                    self._take(agent, message)
                return
            agent.silent_s += 0.5
            if agent.silent_s < SILENCE_S and agent.leader in self.hosts.values():
                return
            agent.leader.linked.pop(agent.name, None)
            agent.leader, agent.rounds = None, 0
        for _, host in sorted(self.hosts.items()):
            if self.reach(agent, host.agent):
                return self._join(agent, host)
        if agent.endpoint is not None and agent.rounds >= agent.endpoint:
            return self._join(agent, self._host(agent))
        agent.rounds += 1
        return None

    def _host(self, agent: Agent) -> Host:
        assert agent.endpoint is not None
        settings = JobSettings(
            job="job",
            num_slots=self.num_slots,
            max_nodes=self.num_agents,
            min_nodes=self.min_nodes,
            limits=Limits(max_restarts=10**6, max_no_progress_cycles=10**6),
            join_timeout_s=10**6,
            node_timeout_s=SILENCE_S,
            host=agent.name,
            order=agent.endpoint,
            num_endpoints=self.num_endpoints,
            former_host=None if agent.job is None else agent.job[0],
            term=1 if agent.job is None else agent.job[1] + 1,
        )
        coordinator = Coordinator(settings, RecoveryState())
        self.hosts[agent.endpoint] = host = Host(agent, coordinator, judged_s=self.now_s)
        return host

    def _join(self, agent: Agent, host: Host) -> None:
        is_first = agent.job is None
        host.coordinator.note_term(0 if agent.job is None else agent.job[1], is_own=agent.obeys is host)
        agent.obeys = host
        agent.leader, agent.silent_s, agent.pending = host, 0.0, []
        agent.job = (host.agent.name, host.coordinator.leadership.term)
        host.linked[agent.name] = agent
        if not is_first:
            self._send_to_host(
                agent,
                m.Register(addr=agent.name, nproc=1, place=agent.place, ran=agent.ran, running=agent.start is not None),
            )
        if agent.start is None:
            self._send_to_host(agent, m.JoinRequest(addr=agent.name, nproc=1, ended=agent.ended))

    def _send_to_host(self, agent: Agent, message: m.FromAgent) -> None:
        if agent.leader is not None and self.reach(agent, agent.leader.agent):
            host = agent.leader
            signed = msgspec.structs.replace(message, node=agent.name, epoch=agent.epoch)
            self._send(host, host.coordinator.handle(signed, self.now_s))

    def _send(self, host: Host, outbox: Sequence[tuple[str, str, m.ToNode]]) -> None:
        for name, _, message in outbox:
            agent = self.by_name[name]
            if agent.leader is not host:
                continue
            if not self.reach(agent, host.agent):
                agent.pending.append(message)  # the kernel sends it again, for as long as the connection stays
            elif self.rng.random() < 0.02:  # lost with the connection, which the agent opens again
                host.linked.pop(name, None)
                agent.leader = None
            else:
                self._take(agent, message)
        for name, _ in host.coordinator.take_dropped():
            if self.by_name[name].leader is host and self.reach(self.by_name[name], host.agent):
                self.by_name[name].leader = None
                host.linked.pop(name, None)

    def _take(self, agent: Agent, message: m.ToNode) -> None:
        match message:
            case m.Prepare():
                self._send_to_host(agent, m.Master(cycle=message.cycle, addr=agent.name, port=next(self.ports)))
            case m.Start() if agent.job is not None and message.term >= agent.job[1]:
                if (
                    agent.place is not None
                    and agent.place.slot is not None
                    and message.place.order <= agent.place.order
                ):
                    return
                agent.start, agent.place = message, message.place
                agent.job = (agent.job[0], message.term)
                self._send_to_host(agent, m.Running(cycle=message.cycle))
            case m.Wait(place=place) if place is not None:
                if agent.place is None or place.order > agent.place.order:
                    agent.place = place
                if place.order == agent.place.order:
                    self._count(agent)
            case m.Ran():
                if agent.place is not None and agent.place.cycle == message.cycle:
                    agent.place = agent.ran = msgspec.structs.replace(agent.place, num_spares=message.num_spares)
                    self._count(agent)
            case m.CycleOver() if agent.start is not None and agent.start.cycle == message.cycle:
                self._end(agent)
            case _:
                pass

    def _count(self, agent: Agent) -> None:
        place = agent.place
        assert place is not None
        self._send_to_host(agent, m.Counted(cycle=place.cycle, term=place.term, num_spares=place.num_spares))

    def _end(self, agent: Agent) -> None:
        assert agent.start is not None
        agent.ended, agent.start = m.CycleFacts(cycle=agent.start.cycle), None
        self._send_to_host(agent, m.JoinRequest(addr=agent.name, nproc=1, ended=agent.ended))

    def _yield(self) -> None:
        for order, host in list(self.hosts.items()):
            for other in list(self.hosts.values()):
                if other is host or not self.reach(host.agent, other.agent):
                    continue
                if should_yield(host.coordinator.leadership, other.coordinator.leadership):
                    self.hosts.pop(order, None)

    def _check_worlds(self) -> None:
        """Record the world that trains: one of which every node runs and reaches the others. Fail if there are two."""
        runs: dict[int, list[Agent]] = {}
        for agent in self.agents:
            if agent.start is not None:
                runs.setdefault(agent.start.master_port, []).append(agent)
        complete = []
        for agents in runs.values():
            slots = {agent.start.node_rank for agent in agents if agent.start is not None}
            first = agents[0]
            assert first.start is not None
            if len(slots) == first.start.num_nodes and all(self.reach(first, agent) for agent in agents):
                complete.append((first.start.term, first.start.cycle))
        assert len(complete) <= 1, f"two worlds train at once: {complete}"
        if complete and (not self.worlds or self.worlds[-1] != complete[0]):
            self.worlds.append(complete[0])

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.step()


def play(seed: int) -> Network:
    """Simulate a job through partitions at random moments; the network is healed at the end."""
    rng = random.Random(seed)
    num_endpoints = rng.randint(2, 3)
    num_agents = rng.randint(num_endpoints, 8)
    num_slots = rng.randint(max(1, num_agents // 3), num_agents)
    min_nodes = rng.randint(1, num_slots)
    network = Network(rng, num_agents=num_agents, num_slots=num_slots, num_endpoints=num_endpoints, min_nodes=min_nodes)
    network.pass_time(rng.choice([0.5, 1.0, 10.0]))
    for _ in range(rng.randint(1, 5)):
        network.divide(rng.randint(2, 3))
        network.pass_time(rng.choice([0.5, 3.0, 6.0, 20.0]))
        if rng.random() < 0.6:
            network.heal()
            network.pass_time(rng.choice([0.5, 2.0, 15.0]))
    network.heal()
    network.pass_time(90.0)
    return network


def check(seed: int) -> None:
    network = play(seed)
    leaders = {id(agent.leader) for agent in network.agents}
    assert len(leaders) == 1, "agents obey different coordinators"
    running = [agent for agent in network.agents if agent.start is not None]
    assert running, "nobody trains although the network is whole again"
    assert len({agent.start.master_port for agent in running if agent.start}) == 1


@pytest.mark.parametrize("seed", range(40))
def test_partitioned_network(seed: int) -> None:
    """Two worlds never train at the same time; in the healed network one world trains, and every agent obeys its
    coordinator."""
    check(seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(40, 240))
def test_partitioned_network_with_many_seeds(seed: int) -> None:
    """The promise of `test_partitioned_network` holds for two hundred more seeds."""
    check(seed)


def test_majority_continues_and_the_minority_waits() -> None:
    """Two of three nodes continue without the third, which hosts the coordinator; once reconnected, that node joins
    the others' coordinator."""
    network = Network(random.Random(1), num_agents=3, num_slots=3, num_endpoints=2, min_nodes=2)
    network.pass_time(5)
    first = network.worlds[-1]
    network.group = {"n0": 0, "n1": 1, "n2": 1}
    network.pass_time(30)
    second = network.worlds[-1]
    assert second[0] > first[0]
    assert second[1] > first[1]
    assert network.by_name["n0"].start is None
    assert {network.by_name[name].start is not None for name in ("n1", "n2")} == {True}
    network.heal()
    network.pass_time(20)
    assert network.by_name["n0"].leader is network.by_name["n1"].leader
