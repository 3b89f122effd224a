"""The connection of an agent to the coordinator.

:class:`ControlLink` has one thread and one connection. It sends the agent's messages and heartbeats, which show that
the agent's main loop runs, and delivers the coordinator's messages to the agent's mailbox. Every heartbeat is answered;
if the answers stop, the link tries the next endpoint: it connects to a coordinator there, or hosts one if the endpoint
belongs to this machine. A coordinator's knowledge is soft state: training continues without a coordinator, and agents
report all that matters to the next one.

The same loop serves the node's relay for its ranks (:mod:`outlast.launch.rank_relay`).

With several endpoints, several coordinators can exist for a moment; all but one yield
(:mod:`outlast.policy.leadership`).
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from outlast import clock, env
from outlast.config.sources import LayeredSettings
from outlast.errors import ExitReason, OutlastError, RendezvousError
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity, NoListener, WrongRun, ask, connect, join_handshake
from outlast.launch.coordinator_server import CoordinatorServer
from outlast.launch.job_settings import JobSettings
from outlast.launch.rank_relay import RankRelay
from outlast.launch.run_records import RunRecords
from outlast.policy.leadership import Leadership, should_change_job, should_yield
from outlast.policy.recovery_policy import RecoveryState
from outlast.runtime.addresses import Endpoint, listening_addresses, parse_endpoint
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.run_key import describe_difference
from outlast.runtime.wire import AuthenticationFailed, BufferedChannel, SelectedChannel
from outlast.version import __version__

log = logging.getLogger(__name__)
GOODBYE_S = 5.0
"""How long a host waits until the other nodes know that the job is over."""
_FIRST_ANSWER_S = 20.0
"""Hundreds of agents that connect at once may have to wait for each other."""
_CONNECT_S = 2.0
_PAUSE_S = 0.2
"""Between two rounds through the endpoints."""
_RIVALS_S = 1.0
"""Between two searches for other coordinators of the job."""
_RECORDS_S = 1.0
"""Between two reads of the run directory while no coordinator is reached."""
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The coordinator cannot be reached; the link keeps trying."""

    error: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The coordinator is reached, perhaps again."""

    job: str
    is_host: bool
    is_first: bool
    term: int = 0


@dataclass(frozen=True, slots=True)
class JobInProgress:
    job: str
    host: str
    """Node of the lost coordinator."""
    term: int
    """The highest term that this agent has obeyed."""


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """The link has given up."""

    error: str
    exit_code: int = ExitReason.FAILED


LinkEvent = m.ToNode | LinkDown | LinkUp | LinkFailed


class _Refusal(WrongRun):
    """The coordinator refused this agent, with the reason and what to do about it."""

    def __init__(self, refused: m.Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused


class _LinkOver(OutlastError):
    """The connection to the coordinator is over."""


class ControlLink:
    """Connect an agent to the coordinator, and host the coordinator if no other agent does.

    Args:
        endpoints: Where the coordinator may be, in the order of trying.
        settings: The job's settings if this agent begins it; its node, heartbeat interval and timeouts are the link's.
        identity: What all agents of the job have in common.
        deliver: Receives all events for the agent, in the link's thread.
        layers: The launcher's fault tolerance settings, for a coordinator here.
        on_host: Called before this agent hosts the coordinator.
        may_write: Returns whether this job still owns the run directory.
        has_loop: The agent's main loop advances :attr:`count`; otherwise this thread does.
        relay: The relay of the node's ranks, which this object closes; ``None``: torch's own agent.
        records: Records of the run directory, read while no coordinator is reached; ``None``: not read.

    Thread: owns one, or two on a host with several endpoints; methods may be called from any thread and do not block on
    the network.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        settings: JobSettings,
        identity: JobIdentity,
        *,
        deliver: Callable[[LinkEvent], None],
        layers: LayeredSettings,
        on_host: Callable[[], None] = lambda: None,
        may_write: Callable[[], bool] = lambda: True,
        has_loop: bool = True,
        relay: RankRelay | None = None,
        records: RunRecords | None = None,
    ) -> None:
        self.settings, self.node, self.relay, self._records = settings, settings.host, relay, records
        self.epoch = self._sender = _name_life()
        """Identifies this life of the agent in its job; the sender's follows once it joins another job."""
        self.endpoint: Endpoint | None = None
        """Endpoint of the coordinator; ``None``: not found yet."""
        self.problem = ""
        """Why the coordinator was not found; empty: no attempt has failed."""
        self.count = 0
        """How often the agent's main loop has run its timer; advanced by the agent."""
        self.recovery_state: RecoveryState | None = None
        """State of the recovery policy after its last decision; set by the agent."""
        self.server: CoordinatorServer | None = None
        """The coordinator while this agent hosts it."""
        self.endpoints = list(endpoints)
        """Where the coordinator may be, in the order of trying; changed by the link's thread."""
        self._given = frozenset(endpoints)
        self._identity, self._deliver, self._layers, self._has_loop = identity, deliver, layers, has_loop
        self._on_host, self._may_write = on_host, may_write
        self._outgoing: Mailbox[m.FromNode | None] = Mailbox()
        self._closing = threading.Event()
        self._retired: CoordinatorServer | None = None
        """A former coordinator of this agent, which refuses agents: a closed port would make them declare this node
        dead."""
        self._job: JobInProgress | None = None
        self._leader = ""
        self._silent: Endpoint | None = None
        """Endpoint of a coordinator that has just stopped responding; not tried for a while."""
        self._events: list[m.OnAgent] = []
        self._errors: list[OSError] = []
        self._yields = threading.Event()
        self._successor: Endpoint | None = None
        """Endpoint of the coordinator to which this agent's own yields."""
        self._may_host = True
        self._thread = threading.Thread(target=self._run, name="outlast-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.FromNode) -> None:
        """Send a message once the coordinator is reached."""
        self._outgoing.put(msgspec.structs.replace(message, node=self.node, epoch=self._sender))

    def begin_job(self) -> None:
        """Send messages to another job's coordinator from now on, and drop those of the last job."""
        self._sender = self.epoch

    def stop_taking_over(self) -> None:
        """Never host a coordinator from now on, unless this agent hosts one: the job is over for this agent."""
        self._may_host = False

    def close(self, *, goodbye_timeout_s: float = GOODBYE_S) -> None:
        """End the link; a host first waits until every node knows that the job is over.

        Blocks: a host up to ``goodbye_timeout_s``; others up to 3 s while the thread ends.
        """
        self.send(m.Bye())
        if (server := self.server) is not None:
            server.closed.wait(goodbye_timeout_s)
        self._closing.set()
        self._outgoing.put(None)
        # Before the first connection the thread may wait for a name server, and holds nothing.
        self._thread.join(0.1 if self._job is None else 3.0)
        for server in (self.server, self._retired):
            if server is not None:
                server.close()
        if self.relay is not None and not self._thread.is_alive():
            self.relay.close()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_first = True
        try:
            while (link := self._reach(is_first=is_first)) is not None:
                with selectors.DefaultSelector() as selector:
                    channel = SelectedChannel(selector, link, self._on_messages, self._on_broken)
                    try:
                        if not is_first:
                            self._outgoing.take_all()  # the agent reports all that matters again
                        assert self._job is not None
                        up = LinkUp(self._job.job, self.server is not None, is_first, self._job.term)
                        self._deliver(up)
                        is_first = False
                        self._pump(selector, channel)
                    except _LinkOver as left:
                        if self._closing.is_set():
                            return
                        self._deliver(LinkDown(str(left)))
                    finally:
                        channel.close()
                if self._yields.is_set():
                    self._stop_hosting()
        except WrongRun as error:
            self._deliver(LinkFailed(str(error), ExitReason.BAD_INPUT))
        except RendezvousError as error:
            self._deliver(LinkFailed(str(error)))
        except BaseException as error:
            log.exception("the link to the coordinator ended on an error")
            self._deliver(LinkFailed(f"{type(error).__name__}: {error}"))

    def _pump(self, selector: selectors.BaseSelector, channel: SelectedChannel[m.OnAgent]) -> None:
        """Exchange messages and heartbeats.

        Raises:
            _LinkOver: The coordinator is lost, or the link is closed.
        """
        selector.register(self._outgoing, selectors.EVENT_READ, partial(self._send_all, channel))
        if (relay := self.relay) is not None:
            assert self._job is not None
            for message in relay.introduce(self._job.term):  # before the agent registers
                channel.send(message)
            selector.register(relay, selectors.EVENT_READ, lambda _: None)
        self._errors.clear()
        now_s = clock.now_s()
        next_heartbeat_s, looked_s = now_s, now_s
        while True:
            now_s = clock.now_s()
            if now_s - looked_s > self.settings.node_timeout_s / 2:
                channel.channel.received_ns = clock.now_ns()  # this process was paused: silence proves nothing
            looked_s = now_s
            if now_s >= next_heartbeat_s:
                next_heartbeat_s = now_s + self.settings.heartbeat_interval_s
                self.count += not self._has_loop
                channel.send(m.AgentHeartbeat(count=self.count))
            self._deliver_events()
            due_s = next_heartbeat_s
            if relay is not None and relay.deadline_s is not None:
                due_s = min(due_s, relay.deadline_s)
            for key, events in selector.select(max(0.0, due_s - clock.now_s())):
                key.data(events)
            self._deliver_events()
            if relay is not None:
                for message in relay.serve():
                    channel.send(message)
            silent_s = clock.now_s() - channel.channel.received_ns / 1e9
            if self._errors:
                raise _LinkOver("the connection to the coordinator ended")
            if self._closing.is_set():
                self._send_all(channel, 0)  # the last messages may have come after the previous call
                channel.channel.drain(1.0)
                raise _LinkOver("the link is closed")
            if self._yields.is_set():
                raise _LinkOver("another coordinator of this job leads")
            if silent_s > self.settings.node_timeout_s and clock.now_s() - now_s < self.settings.node_timeout_s / 2:
                channel.send(m.Moving())
                self._silent = self.endpoint
                raise _LinkOver(f"the coordinator at {self.endpoint} did not respond for {silent_s:.1f} s")

    def _on_messages(self, _: SelectedChannel[m.OnAgent], came: list[m.OnAgent]) -> None:
        self._events += came

    def _on_broken(self, _: SelectedChannel[m.OnAgent], error: OSError) -> None:
        self._errors.append(error)

    def _deliver_events(self) -> None:
        events, self._events = self._events, []
        for message in events:
            if isinstance(message, m.RankOrder):
                if self.relay is not None:
                    self.relay.obey(message)
            elif not isinstance(message, m.Welcome | m.Refused | m.AgentHeartbeat):
                self._deliver(message)

    def _send_all(self, channel: SelectedChannel[m.OnAgent], _: int) -> None:
        for message in self._outgoing.take_all():
            if message is not None and message.epoch == self.epoch:
                channel.send(message)

    # -- finding the coordinator -------------------------------------------------------------------------------

    def _reach(self, *, is_first: bool) -> BufferedChannel[m.OnAgent] | None:
        """Connect to the coordinator or host it; ``None`` if the link is closed meanwhile.

        Raises:
            RendezvousError: No coordinator was reached in time.
            WrongRun: The coordinator belongs to another run or has another command.
        """
        end_s = clock.now_s() + self.settings.join_timeout_s
        answer_s = _FIRST_ANSWER_S if is_first else self.settings.node_timeout_s
        num_rounds, error, gone = 0, "no endpoint was tried", False
        reads_s = clock.now_s()
        # The port of a stopped process still accepts connections: each attempt would take the silence limit, while
        # others could host.
        silent, self._silent = self._silent, None
        avoid_s = clock.now_s() + (self.settings.node_timeout_s if len(self.endpoints) > 1 else _PAUSE_S)
        while not self._closing.is_set():
            reads_records = self._records is not None and clock.now_s() >= reads_s
            if reads_records:
                reads_s = clock.now_s() + _RECORDS_S
                self._learn_endpoints()
            endpoints = list(self.endpoints)
            while endpoints:
                endpoint = endpoints.pop(0)
                if endpoint.port == 0 or (endpoint == silent and clock.now_s() < avoid_s):
                    continue
                try:
                    return self.join_at(endpoint, answer_s)
                except WrongRun as failure:
                    refused = failure.refused if isinstance(failure, _Refusal) else m.Refused(reason="")
                    error = self.problem = str(failure)
                    if refused.successor is not None:
                        successor = parse_endpoint(refused.successor)
                        if successor not in self.endpoints:
                            self.endpoints.append(successor)
                            endpoints.append(successor)
                    elif refused.job is not None:
                        if should_change_job(num_endpoints=len(self.endpoints), leads=refused.leads):
                            self._leave_job()
                            endpoints.insert(0, endpoint)  # before another endpoint is tried, or this node hosts
                    elif self._job is None and endpoint in self._given:
                        raise WrongRun(f"the coordinator at {endpoint} refuses this agent: {failure}") from None
                except NoListener as failure:
                    gone |= endpoint == self.endpoint and failure.is_refused
                    error = self.problem = str(failure)
                except (RendezvousError, OSError) as failure:
                    error = self.problem = f"{endpoint}: {failure}"
                if self._closing.is_set():
                    return None
            if reads_records and self._stop_if_over():
                return None
            for order, endpoint in enumerate(self.endpoints):
                # Later endpoints give earlier ones time to host.
                if order <= num_rounds and self._host_at(endpoint, order, host_is_dead=gone):
                    return self.join_at(self.endpoints[order], answer_s)
            num_rounds += 1
            if is_first and clock.now_s() > end_s:
                raise RendezvousError(error)
            self._closing.wait(_PAUSE_S)
        return None

    def _learn_endpoints(self) -> None:
        """Add the endpoints at which another agent of the job may host the coordinator by now."""
        if self._records is not None and self.server is None:  # a host keeps its coordinator's order of endpoints
            self.endpoints = self._records.find_endpoints(self.endpoints)

    def _stop_if_over(self) -> bool:
        """Deliver the job's end if it ended without this agent; return whether it did."""
        if self._records is None:
            return False
        stop = self._records.find_end(None if self._job is None else self._job.job, self.recovery_state)
        if stop is not None:
            self._deliver(stop)
        return stop is not None

    def join_at(self, endpoint: Endpoint, answer_s: float) -> BufferedChannel[m.OnAgent]:
        """Return a connection to the coordinator at an endpoint that has welcomed this agent.

        Raises:
            RendezvousError: Nothing listens there.
            OSError: The listener is not a coordinator, does not respond, or (:class:`WrongRun`) serves another run.

        Blocks: up to 2 s for the name lookup, 2 s for the connection, and ``answer_s`` for the answer.
        """
        connection = connect(endpoint, timeout_s=min(_CONNECT_S, answer_s))
        job = self._job
        channel: BufferedChannel[m.OnAgent] = BufferedChannel(
            connection, m.OnAgent, handshake=join_handshake(self._identity.run_id, self._identity.key)
        )
        hello = m.Hello(
            run_id=self._identity.run_id,
            node=self.node,
            epoch=self.epoch,
            command=self._identity.command,
            command_text=self._identity.command_text,
            job=None if job is None else job.job,
            leader=self._leader,
            term=0 if job is None else job.term,
            version=__version__,
        )
        try:
            channel.send(hello)
            welcome = self._await_welcome(channel, answer_s)
        except BaseException:
            channel.close()
            raise
        self.endpoint, self._leader = endpoint, welcome.leader
        self._job = JobInProgress(welcome.job, welcome.host, welcome.term)
        return channel

    def _await_welcome(self, channel: BufferedChannel[m.OnAgent], answer_s: float) -> m.Welcome:
        with selectors.DefaultSelector() as selector:
            waiting = SelectedChannel(selector, channel, self._on_messages, self._on_broken)
            self._errors.clear()
            self._events.clear()
            last_ns = clock.now_ns()
            while not self._events:
                if self._closing.is_set():
                    raise ConnectionAbortedError("the link is closed")
                last_ns = max(last_ns, channel.received_ns)
                if clock.now_ns() - last_ns > answer_s * 1e9:
                    raise TimeoutError(f"it did not respond within {answer_s:g} s")
                for key, events in selector.select(_PAUSE_S):
                    key.data(events)
                if self._errors:
                    if isinstance(self._errors[0], AuthenticationFailed):
                        raise self._errors[0]
                    raise ConnectionResetError(f"it ended the connection ({self._errors[0]})")
            waiting.release()
        first = self._events.pop(0)
        if isinstance(first, m.Refused):
            raise _Refusal(first)
        if not isinstance(first, m.Welcome):
            raise ConnectionAbortedError(f"unexpected response {type(first).__name__}")
        difference = describe_difference(first.version, whose="the coordinator", own="the agent")
        if difference is not None:
            raise WrongRun(difference)
        return first

    def _leave_job(self) -> None:
        """Drop this agent's part in its job, to join another job's coordinator as a new agent."""
        self._job, self._leader, self.epoch = None, "", _name_life()
        if self.relay is not None:
            self.relay.begin_job()

    # -- hosting -----------------------------------------------------------------------------------------------

    def _host_at(self, endpoint: Endpoint, order: int, *, host_is_dead: bool) -> bool:
        """Host the coordinator at an endpoint if it is a free one of this machine; return whether it does."""
        if not self._may_host:
            return False
        if self._retired is not None:
            self._retired.close()
            self._retired = None
        listeners = listen(endpoint)
        if not listeners:
            return False
        port = listeners[0].getsockname()[1]
        self.endpoints[order] = Endpoint(endpoint.host, port)
        settings = replace(self.settings, order=order, num_endpoints=len(self.endpoints))
        if (former := self._job) is not None:
            settings = replace(
                settings,
                job=former.job,
                former_host=former.host,
                term=former.term + 1,
                host_is_dead=host_is_dead or endpoint == self.endpoint,  # this port could be bound: it is gone
            )
        self._yields.clear()
        self._on_host()
        self.server = CoordinatorServer(
            listeners,
            settings,
            self._identity,
            layers=self._layers,
            may_write=self._may_write,
            on_error=lambda error: self._deliver(LinkFailed(f"the coordinator ended: {error!r}")),
        )
        self.server.start()
        if len(self.endpoints) > 1:
            watch = partial(self._watch_rivals, self.server, order)
            threading.Thread(target=watch, name="outlast-rivals", daemon=True).start()
        return True

    def _stop_hosting(self) -> None:
        """Hand this coordinator's agents over to the leading one."""
        server, self.server = self.server, None
        self._yields.clear()
        if server is not None and self._successor is not None:
            log.warning("another coordinator of this job leads: the one on node %s ends", self.node)
            server.hand_over(self._successor)
            self._retired = server

    def _watch_rivals(self, server: CoordinatorServer, order: int) -> None:
        """Search for other coordinators of the job, and yield to one with a better right to lead."""
        try:
            while not self._closing.wait(_RIVALS_S) and server is self.server:
                if not server.leadership().leads and self._stop_if_over():
                    return
                for number, endpoint in enumerate(self.endpoints):
                    own = server.leadership()
                    if number == order or (other := self._ask_rival(endpoint)) is None:
                        continue
                    if should_yield(own, Leadership(term=other.term, leads=other.leads, order=other.order)):
                        self._successor = endpoint
                        self._yields.set()
                        self._outgoing.put(None)  # wakes up the link
                        return
        except BaseException as error:
            log.exception("the search for other coordinators ended on an error")
            self._deliver(LinkFailed(f"{type(error).__name__}: {error}"))

    def _ask_rival(self, endpoint: Endpoint) -> m.Leads | None:
        question = m.AskLeadership()
        try:
            answer = ask(endpoint, question, run_id=self._identity.run_id, key=self._identity.key, timeout_s=_CONNECT_S)
        except RendezvousError as error:
            log.debug("no other coordinator: %s", error)
            return None
        return answer if isinstance(answer, m.Leads) else None


def _name_life() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def listen(endpoint: Endpoint) -> list[socket.socket]:
    """Return sockets that listen at an endpoint, one for each of its addresses on this machine.

    Returns:
        An empty list if the endpoint belongs to another machine or is in use.
    """
    listeners: list[socket.socket] = []
    port = endpoint.port
    for family, address in listening_addresses(endpoint.host, interface=env.interface()):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listeners.append(listener)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            log.debug("%s port %d cannot be listened at: %s", address, port, error)
            for one in listeners:
                one.close()
            return []
        port = listener.getsockname()[1]
    return listeners
