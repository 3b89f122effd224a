"""The coordinator's work per message with many nodes: counted, so that it does not depend on the machine's speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks import rendezvous_crowd
from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.job_settings import JobSettings
from outlast.launch.protocol import JobPhase
from outlast.policy.recovery_policy import Limits, RecoveryState

FEW, MANY = 100, 400
MOST_GROWTH = 1.5
"""Allowed ratio of the work per message with four times as many nodes."""


def count_steps(work: Callable[[], object]) -> int:
    """Return the number of interpreter steps of some work, including those in comprehensions and callbacks."""
    num = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num


class Nodes:
    """A coordinator and simulated nodes that follow its orders at once."""

    def __init__(self, num: int, **settings: Any) -> None:
        self.num, self.now_s, self.cycle = num, 0.0, -1
        self.num_messages = 0
        self.names = [f"n{number}" for number in range(num)]
        self.places: dict[str, m.SlotPlace] = {}
        self.ran: dict[str, m.SlotPlace] = {}
        self.waiting: list[m.ToCoordinator] = []
        self.coordinator = self.make(**settings)

    def make(self, **settings: Any) -> Coordinator:
        return Coordinator(
            JobSettings(job="job", num_slots=self.num, limits=Limits(max_restarts=9), **settings),
            RecoveryState(),
        )

    def send_message(self, *messages: m.ToCoordinator) -> None:
        self.waiting += messages
        while self.waiting:
            messages_waiting, self.waiting = self.waiting, []
            for message in messages_waiting:
                self.num_messages += 1
                for name, epoch, answer in self.coordinator.handle(message, self.now_s):
                    self._answer({"node": name, "epoch": epoch}, answer)

    def _answer(self, sender: dict[str, str], answer: m.ToNode) -> None:
        name = sender["node"]
        if name not in self.names:
            return
        match answer:
            case m.Prepare():
                self.waiting.append(m.Master(**sender, cycle=answer.cycle, addr=name, port=1))
            case m.Start():
                self.cycle, self.places[name] = answer.cycle, answer.place
                self.waiting.append(m.Running(**sender, cycle=answer.cycle))
            case m.Wait() if answer.place is not None:
                self.places[name] = answer.place
                counted = m.Counted(
                    **sender, cycle=answer.place.cycle, term=answer.place.term, num_spares=answer.place.num_spares
                )
                self.waiting.append(counted)
            case m.Ran() if name in self.places:
                self.ran[name] = self.places[name]
                place = self.places[name]
                self.waiting.append(
                    m.Counted(**sender, cycle=answer.cycle, term=place.term, num_spares=answer.num_spares)
                )
            case m.CycleOver():
                self.waiting.append(join(name, ended=m.CycleFacts(cycle=answer.cycle)))

    def lose(self, names: list[str]) -> None:
        self.names = [name for name in self.names if name not in names]
        self.send_message(*(m.Dead(node=name, epoch="1", reason="its agent's connection ended") for name in names))


def join(name: str, **fields: Any) -> m.JoinRequest:
    return m.JoinRequest(node=name, epoch="1", addr=name, nproc=8, **fields)


def form(nodes: Nodes) -> None:
    nodes.send_message(*(join(name) for name in nodes.names))
    assert (nodes.cycle, nodes.coordinator.phase) == (0, JobPhase.RUNNING)


def form_and_lose(nodes: Nodes) -> None:
    """A tenth of the nodes dies at once, and spares take their slots."""
    spares = [f"s{number}" for number in range(nodes.num // 10)]
    form(nodes)
    nodes.names += spares
    nodes.send_message(*(join(name) for name in spares))
    nodes.lose(nodes.names[: len(spares)])
    assert (nodes.cycle, nodes.coordinator.phase) == (1, JobPhase.RUNNING)


def form_and_shrink(nodes: Nodes) -> None:
    """A tenth of the nodes dies at once, and the world continues without them."""
    form(nodes)
    nodes.lose(nodes.names[: nodes.num // 10])
    assert nodes.cycle == 1
    assert len(nodes.coordinator.nodes.slots) == nodes.num - nodes.num // 10


def take_over(nodes: Nodes) -> None:
    """A coordinator on another machine adopts the job, without the node that hosted the last one."""
    form(nodes)
    nodes.coordinator = nodes.make(num_endpoints=2, order=1, host="n1", former_host="n0", host_is_dead=True, term=2)
    nodes.names.remove("n0")
    places = nodes.places
    nodes.send_message(
        *(
            m.Register(node=name, epoch="1", addr=name, nproc=8, running=True, place=places[name], ran=nodes.ran[name])
            for name in nodes.names
        )
    )
    nodes.names.append("s")
    nodes.now_s = 2.0
    nodes.send_message(m.CoordinatorTick(), join("s"))
    assert (nodes.cycle, nodes.coordinator.phase) == (1, JobPhase.RUNNING)


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        (form, {}),
        (form, {"min_nodes": 2}),
        (form_and_lose, {}),
        (form_and_lose, {"num_endpoints": 2}),
        (form_and_shrink, {"min_nodes": 10}),
        (take_over, {"num_endpoints": 2, "host": "n0"}),
    ],
)
def test_work_for_a_message_does_not_grow_with_the_nodes(
    scenario: Callable[[Nodes], None], settings: dict[str, Any]
) -> None:
    """Forming cycles, losing nodes and taking over needs as much work per message for 400 nodes as for 100."""
    work = []
    for num in (FEW, MANY):
        nodes = Nodes(num, **settings)
        steps = count_steps(lambda nodes=nodes: scenario(nodes))  # type: ignore[misc]
        work.append(steps / nodes.num_messages)
    assert work[1] < MOST_GROWTH * work[0], work


@pytest.mark.process
def test_hundreds_of_agents_form_two_cycles() -> None:
    """A few hundred simulated agents form a cycle with a real coordinator, lose 64 nodes at once, and form the next
    cycle."""
    metrics = rendezvous_crowd.meet(200)
    assert metrics.rss_mib > 0
    assert metrics.node_kib < 64, "a node's share of the coordinator's memory"
