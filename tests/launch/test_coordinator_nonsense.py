"""Invalid messages of an authenticated agent: those that pass the decoder leave the coordinator consistent, and the
others close the connection."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_control_connection import LinkedAgent, connect, drain, finish, free_port, hello, make, train  # noqa: F401

from outlast.config.sources import LayeredSettings
from outlast.errors import ConfigError
from outlast.incidents import Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.coordinator import Coordinator
from outlast.launch.job_settings import JobSettings
from outlast.launch.protocol import JobPhase
from outlast.policy.recovery_policy import Limits, RecoveryState
from outlast.policy.root_cause import Collective, Position
from outlast.runtime.wire import encode_frame

DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(m.FromAgent)
NAMES = st.sampled_from("abcd")
FEW = st.integers(0, 3)
NUMBERS = st.one_of(FEW, FEW, st.sampled_from([-1, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 53, (1 << 63) - 1]))
MAYBE = st.one_of(st.none(), NUMBERS)
TEXTS = st.sampled_from(["", "x", "\0", "é" * 9000])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
KEYS = st.sampled_from(["checks", "diagnosis", "cause", "summary", "computes_wrong", "generation"])
INCIDENTS = st.builds(
    Incident,
    kind=st.sampled_from(IncidentKind),
    cycle=NUMBERS,
    node=st.one_of(NAMES, TEXTS),
    rank=MAYBE,
    pid=MAYBE,
    exit_code=MAYBE,
    iteration=MAYBE,
    evidence=st.dictionaries(KEYS, JSON, max_size=3),
)
POSITIONS = st.builds(
    Position,
    node=NAMES,
    global_rank=NUMBERS,
    iteration=NUMBERS,
    collectives=NUMBERS,
    sections=st.tuples(TEXTS),
    groups=st.dictionaries(TEXTS, NUMBERS, max_size=2),
    waiting_in=st.one_of(st.none(), st.builds(Collective, op=TEXTS, seq=NUMBERS, group=TEXTS)),
    responsive=st.booleans(),
    process_state=st.sampled_from(["", "D", "T", "?"]),
    waits_in_collective=st.sampled_from([None, True, False]),
    finished=st.booleans(),
)
FACTS = st.builds(
    m.CycleFacts,
    cycle=NUMBERS,
    incident=st.one_of(st.none(), INCIDENTS),
    durable_iteration=MAYBE,
    progress_known=st.booleans(),
    had_session=st.booleans(),
    has_trained=st.booleans(),
    positions=st.lists(POSITIONS, max_size=2).map(tuple),
)
PLACES = st.one_of(
    st.none(),
    st.builds(
        m.SlotPlace,
        term=NUMBERS,
        cycle=NUMBERS,
        num_slots=NUMBERS,
        slot=MAYBE,
        num_spares=NUMBERS,
        spare=MAYBE,
        num_kept=NUMBERS,
        host_slot=MAYBE,
        host_spare=MAYBE,
    ),
)
LADDERS = st.builds(
    RecoveryState,
    number=NUMBERS,
    restarts_without_progress=NUMBERS,
    restarts_total=NUMBERS,
    cycles_without_progress=NUMBERS,
    best_durable=MAYBE,
    node_faults=st.dictionaries(NAMES, NUMBERS, max_size=2),
    quarantined=st.lists(NAMES, max_size=2).map(tuple),
    finished=st.booleans(),
)
SRC: dict[str, Any] = {"node": NAMES, "epoch": st.sampled_from("112")}
MESSAGES = st.one_of(
    st.builds(m.JoinRequest, **SRC, addr=TEXTS, nproc=NUMBERS, wish=MAYBE, ended=st.one_of(st.none(), FACTS)),
    st.builds(m.JoinRequest, **SRC, addr=NAMES, nproc=st.just(1)),
    st.builds(
        m.Register,
        **SRC,
        addr=TEXTS,
        nproc=FEW,
        place=PLACES,
        ran=PLACES,
        running=st.booleans(),
        recovery_state=st.one_of(st.none(), LADDERS),
    ),
    st.builds(m.Running, **SRC, cycle=NUMBERS),
    st.builds(m.Stepped, **SRC, cycle=NUMBERS),
    st.builds(m.Counted, **SRC, cycle=NUMBERS, term=NUMBERS, num_spares=NUMBERS),
    st.builds(m.Hung, **SRC, cycle=FEW, incident=INCIDENTS),
    st.builds(m.Master, **SRC, cycle=NUMBERS, addr=TEXTS, port=NUMBERS),
    st.builds(
        m.Restarted, **SRC, cycle=FEW, call=NUMBERS, restart_count=NUMBERS, incident=INCIDENTS, durable_iteration=MAYBE
    ),
    st.builds(m.Finished, **SRC, facts=FACTS),
    st.builds(m.Leave, **SRC, saved=st.booleans(), signal=NUMBERS, whole_job=st.just(False)),
    st.builds(m.Unhealthy, **SRC, incident=INCIDENTS, stays=st.booleans()),
    st.builds(m.Bye, **SRC),
    st.builds(m.Dead, **SRC, reason=TEXTS, is_known=st.booleans()),
)
SETTINGS = st.builds(
    JobSettings,
    job=st.just("job"),
    num_slots=st.integers(1, 3),
    max_nodes=st.sampled_from([0, 1, 4]),
    min_nodes=st.sampled_from([None, 1]),
    former_host=st.sampled_from([None, None, "a"]),
    num_endpoints=st.sampled_from([1, 2]),
    host_is_dead=st.booleans(),
    host=st.just("b"),
    limits=st.just(Limits(max_restarts=20, max_no_progress_cycles=20)),
    join_timeout_s=st.sampled_from([20.0, 600.0]),
)
SCRIPT = st.one_of(MESSAGES, st.just("obey"), st.just("obey"), st.sampled_from([1.0, 4.0, 40.0, 200.0]))


class CheckedCoordinator:
    """A coordinator whose state is checked after each message."""

    def __init__(self, settings: JobSettings) -> None:
        self.coordinator = Coordinator(settings, RecoveryState())
        self.now_s, self.heartbeats = 0.0, itertools.count()
        self.unanswered: list[tuple[str, str, m.ToNode]] = []
        self.was_over = False

    def send_message(self, message: m.ToCoordinator) -> None:
        if not isinstance(message, m.Dead):
            try:
                message = DECODER.decode(msgspec.msgpack.encode(message))
            except msgspec.ValidationError:
                return  # the connection is closed
        self.check(self.coordinator.handle(message, self.now_s))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        heartbeats = {node.name: next(self.heartbeats) for node in self.coordinator.nodes if node.name != "d"}
        self.check(self.coordinator.judge_heartbeats(heartbeats, self.now_s, since_last_s=1.0))

    def follow_orders(self) -> None:
        """Let the nodes follow the orders that they were sent."""
        orders, self.unanswered = self.unanswered, []
        for node, epoch, order in orders:
            sender = {"node": node, "epoch": epoch}
            match order:
                case m.Prepare():
                    self.send_message(m.Master(**sender, cycle=order.cycle, addr=node, port=1))
                case m.Start():
                    self.send_message(m.Running(**sender, cycle=order.cycle))
                case m.CycleOver():
                    facts = m.CycleFacts(cycle=order.cycle)
                    self.send_message(m.JoinRequest(**sender, addr=node, nproc=1, ended=facts))

    def check(self, outbox: list[tuple[str, str, m.ToNode]]) -> None:
        coordinator = self.coordinator
        nodes, phase = coordinator.nodes, coordinator.phase
        for _, _, message in outbox:
            encode_frame(message)
        encode_frame(coordinator.status(self.now_s, time="", run_id="run", run_dir=None))
        assert coordinator.leadership.term >= 0
        assert (phase == JobPhase.OVER) == (coordinator.stop is not None)
        assert phase == JobPhase.OVER or not self.was_over, "a job that is over stays over"
        self.was_over = phase == JobPhase.OVER
        holders = [slot.holder for slot in nodes.slots if slot.holder is not None]
        assert len(holders) == len(set(holders)), "no node has two slots"
        if phase == JobPhase.PREPARING:
            assert len(holders) == len(nodes.slots)
            assert all(name in nodes.by_name for name in holders), "the cycle that is prepared has all of its nodes"
        if phase == JobPhase.RUNNING:
            assert all(name in nodes.by_name or name in coordinator.finished for name in holders)
        self.unanswered += [one for one in outbox if nodes.is_here(one[0], one[1])]


@pytest.mark.extended
@given(SETTINGS, st.lists(SCRIPT, max_size=40))
def test_no_sequence_of_messages_breaks_the_coordinator(settings: JobSettings, script: list[Any]) -> None:
    """Any messages in any order raise nothing, no phase is entered partially, and a job that is over stays over."""
    tested = CheckedCoordinator(settings)
    for step in script:
        if step == "obey":
            tested.follow_orders()
        elif isinstance(step, float):
            tested.pass_time(step)
        else:
            tested.send_message(step)


@given(st.lists(st.one_of(st.just("obey"), st.just("obey"), MESSAGES), max_size=25))
def test_no_message_breaks_a_running_job(script: list[Any]) -> None:
    """The same holds for a running job of two nodes and a spare, so that each phase gets each message."""
    tested = CheckedCoordinator(
        JobSettings(job="job", num_slots=2, limits=Limits(max_restarts=20, max_no_progress_cycles=20))
    )
    for name in "abc":
        tested.send_message(m.JoinRequest(node=name, epoch="1", addr=name, nproc=1))
    tested.follow_orders()
    tested.follow_orders()
    assert tested.coordinator.phase == JobPhase.RUNNING
    for step in script:
        if step == "obey":
            tested.follow_orders()
        else:
            tested.send_message(step)
    tested.pass_time(200.0)


@pytest.mark.parametrize(
    "message",
    [
        m.Running(cycle=-1),
        m.Running(cycle=1 << 60),
        m.JoinRequest(addr="x" * 5000, nproc=1),
        m.JoinRequest(addr="x", nproc=-1),
        m.JoinRequest(addr="x", nproc=1, wish=1 << 30),
        m.Register(addr="x", nproc=1, place=m.SlotPlace(cycle=0, num_slots=10**12)),
        m.Register(addr="x", nproc=1, ran=m.SlotPlace(cycle=0, num_slots=1, slot=-3)),
        m.Master(cycle=0, addr="x", port=70_000),
        m.Finished(facts=m.CycleFacts(cycle=-2)),
        m.Hello(run_id="run", node="n" * 5000, epoch="1", command="", command_text=""),
        m.Hello(run_id="run", node="n", epoch="1", command="", command_text="", term=1 << 63),
        m.AgentHeartbeat(count=-1),
    ],
)
def test_a_message_beyond_its_limits_is_rejected(message: msgspec.Struct) -> None:
    """A negative cycle, a world of a trillion nodes and a name of kilobytes are not decoded."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.OnControl)


@given(st.one_of(JSON.map(lambda value: msgspec.json.encode(value).decode()), TEXTS))
def test_invalid_settings_of_a_script_are_rejected(text: str) -> None:
    """A script's settings as a node reports them are accepted, or rejected as the coordinator expects."""
    try:
        LayeredSettings().with_script(text or "{}")
    except ConfigError:
        pass


def test_invalid_messages_and_floods_are_survived(make: Callable[..., LinkedAgent]) -> None:  # noqa: F811
    """An agent that sends a negative cycle is disconnected; one that floods the coordinator and reads nothing is
    disconnected or served; the job finishes."""
    port = free_port()
    agent = make("a", port).start()
    start = train(agent)
    with connect(port) as channel:
        assert isinstance(hello(channel, node="x"), m.Welcome)
        channel.send(m.Running(cycle=-1))
        assert drain(channel) == []
    for message in (
        m.AgentHeartbeat(count=1),
        m.JoinRequest(addr="y" * 1000, nproc=1),
        m.Unhealthy(incident=WRONG, stays=True),
    ):
        with connect(port) as channel:
            assert isinstance(hello(channel, node="y"), m.Welcome)
            sending = threading.Thread(target=_flood, args=(channel, message))
            sending.start()
            sending.join(120)
            assert not sending.is_alive(), "the coordinator reads on, or has closed the connection"
    finish(agent, start)


WRONG = Incident(kind=IncidentKind.NODE_UNHEALTHY, node="y", evidence={"checks": [3, {"name": []}], "cause": "x"})


def _flood(channel: Any, message: msgspec.Struct) -> None:
    with contextlib.suppress(OSError):
        for _ in range(5000):
            channel.send(message)
