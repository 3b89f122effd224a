"""The coordinator's host: feeds the coordinator from the agents' connections, in a thread of the hosting agent.

One selector loop serves the listener, the agents' connections and timers. Writes to the run directory (``ladder.json``
before a decision is sent) have a time limit.

A connection that ends proves nothing: networks break connections, and a living agent reconnects at once. An agent that
does not within :data:`PATIENCE_S` counts as dead. The kernel closes the connections of a killed process at once;
missing heartbeats reveal a machine without power, and an agent whose main loop hangs.

Strangers: no message is decoded before the run key is proved; unauthenticated connections are limited in number and
time, and the oldest is closed first. An authenticated agent of another run, job or command is refused with the
difference.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from outlast import clock
from outlast.config.sources import LayeredSettings
from outlast.errors import ConfigError
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity, serve_handshake
from outlast.launch.coordinator import Coordinator
from outlast.launch.decisions import Learn, Record, Remember
from outlast.launch.job_settings import JobSettings
from outlast.launch.recovery_state_file import (
    describe_last_job,
    load_recovery_state,
    save_recovery_state,
    state_of_job,
)
from outlast.monitor.learned_timeouts import FILE_NAME, LearnedTimeouts
from outlast.policy.leadership import Leadership
from outlast.policy.recovery_policy import RecoveryState
from outlast.runtime.addresses import Endpoint
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.files import write_optional
from outlast.runtime.journal import Journal
from outlast.runtime.listener import Listener
from outlast.runtime.processes import raise_descriptor_limit
from outlast.runtime.run_key import describe_difference
from outlast.runtime.wire import SelectedChannel, encode_frame
from outlast.version import __version__

log = logging.getLogger(__name__)
PATIENCE_S = 0.3
"""How long an agent has to reconnect."""
_JOIN_S = 10.0
"""How long a connection may take until its agent is known."""
_MAX_NEWCOMERS = 1024
"""Connections of unknown agents in addition to one per node; one more closes the oldest."""
_MAX_HELLO_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 24
_REWRITE_S = 5.0
"""Between two attempts to write a file that a full disk did not take."""
AgentChannel = SelectedChannel[m.OnControl]


@dataclass(slots=True)
class _AgentLink:
    """The connection of one life of an agent."""

    channel: AgentChannel
    hello: m.Hello
    count: int = -1
    """Counter of its last heartbeat."""


class CoordinatorServer:
    """Run the coordinator of a job.

    Args:
        listeners: Bound and listening sockets, owned by this object.
        settings: The job's settings.
        identity: What all agents of the job have in common; ``ladder.json`` and ``ft_state.json`` are kept in its run
            directory.
        layers: The settings of options and file; the script's config may set the others.
        on_error: Called in the server's thread with the error that ended it.
        may_write: Returns whether this job still owns the run directory.

    Thread: owns one; :meth:`start`, :meth:`close` and :meth:`leadership` may be called from any thread.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        settings: JobSettings,
        identity: JobIdentity,
        *,
        layers: LayeredSettings,
        on_error: Callable[[BaseException], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.settings, self._identity, self._run_dir = settings, identity, identity.run_dir
        self._layers, self._on_error, self._may_write = layers, on_error, may_write
        self._journal = Journal(
            identity.run_dir, run_id=identity.run_id, job=settings.job, node=settings.host, proc="coordinator"
        )
        is_new_job = settings.former_host is None
        saved = load_recovery_state(identity.run_dir)
        state = state_of_job(saved, settings.job, is_new_job=is_new_job, is_named=settings.is_named)
        stop = describe_last_job(saved, settings.last_job) if is_new_job else None
        self._unwritten = state if stop is None and saved.finished and not state.finished else None
        """State that ``ladder.json`` lacks; written later."""
        self._writes_again_s = 0.0
        self._coordinator = Coordinator(settings, state, format_time=self._journal.format_time, stop=stop)
        self.leader = secrets.token_hex(4)
        """Identifies this life of the coordinator."""
        self._selector = selectors.DefaultSelector()
        self._requests: Mailbox[str] = Mailbox()
        self._listener: Listener[m.OnControl] = Listener(
            self._selector,
            listeners,
            m.OnControl,
            self._on_newcomer,
            name=f"the coordinator of node {settings.host}",
            join_s=_JOIN_S,
            max_newcomers=_MAX_NEWCOMERS + max(settings.num_slots, settings.max_nodes),  # nodes may connect all at once
            handshake=partial(serve_handshake, identity),
            max_bytes=_MAX_HELLO_BYTES,
        )
        self._agents: dict[tuple[str, str], _AgentLink] = {}
        """By node and epoch."""
        self._claimants: dict[tuple[str, str], tuple[AgentChannel, m.Hello, list[m.OnControl]]] = {}
        """Agents whose name may be another agent's: the connection, its Hello and later messages."""
        self._refused: set[tuple[str, str]] = set()
        """Nodes and reasons that were logged already."""
        self._suspects: dict[tuple[str, str], tuple[float, bool]] = {}
        """Agents whose connection ended, oldest first: when they count as dead, and whether that is certain."""
        self._learned: LearnedTimeouts | None = None
        """Timeouts learned in the newest cycle; ``None``: none, or already logged."""
        self._judged_at_s = self._next_tick_s = clock.now_s()
        self._is_closing = False
        self._successor: Endpoint | None = None
        """Endpoint of the coordinator to which this one has yielded."""
        self._thread = threading.Thread(target=self._run, name="outlast-coordinator", daemon=True)
        self.closed = threading.Event()
        """Set once every node has received Stop, or the time for that is over."""

    def start(self) -> None:
        raise_descriptor_limit()
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread and free the port. Idempotent. Blocks: up to ``timeout_s``."""
        if self._thread.is_alive():
            self._requests.put("close")
            self._thread.join(timeout_s)
        self._journal.close()

    def hand_over(self, successor: Endpoint) -> None:
        """Yield to the coordinator at another endpoint: disconnect all agents and refer new ones to it.

        The port stays open until :meth:`close`, as a refused connection would make agents declare this node dead.
        """
        self._successor = successor
        self._requests.put("hand over")

    def leadership(self) -> Leadership:
        return self._coordinator.leadership

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._requests.fileno(), selectors.EVENT_READ, self._on_request)
            while not self._is_closing:
                self._serve_once()
        except BaseException as error:
            log.exception("the coordinator ended on an error")
            self._on_error(error)
        finally:
            self._disconnect_agents()
            self._listener.close()
            self._selector.close()
            self._requests.close()
            self.closed.set()

    def _serve_once(self) -> None:
        due = self._job_deadlines_s()
        if self._listener.deadline_s is not None:
            due.append(self._listener.deadline_s)
        for key, events in self._selector.select(max(0.0, min(due) - clock.now_s()) if due else None):
            key.data(events)
        now_s = clock.now_s()
        self._listener.serve(now_s)
        if self._successor is None:
            self._serve_job(now_s)

    def _job_deadlines_s(self) -> list[float]:
        """Return when to call :meth:`_serve_job`."""
        if self._successor is not None:
            return []
        due = [self._next_tick_s]
        if self._suspects:  # in order of their deadlines
            due.append(next(iter(self._suspects.values()))[0])
        if self._coordinator.deadline_s is not None:
            due.append(self._coordinator.deadline_s)
        return due

    def _serve_job(self, now_s: float) -> None:
        while self._suspects and now_s >= next(iter(self._suspects.values()))[0]:
            who = next(iter(self._suspects))
            _, is_known = self._suspects.pop(who)
            reason = "its agent's connection ended and was not reestablished"
            self._handle(m.Dead(node=who[0], epoch=who[1], reason=reason, is_known=is_known))
        if now_s >= self._next_tick_s:
            self._tick(now_s)
        elif (due_s := self._coordinator.deadline_s) is not None and now_s >= due_s:
            self._handle(m.CoordinatorTick())

    def _on_request(self, _: int) -> None:
        self._is_closing |= "close" in self._requests.take_all()
        if self._successor is not None:
            self._listener.drop_all("another coordinator of this job leads")
            self._disconnect_agents()
            self._suspects.clear()
            self.closed.set()

    def _disconnect_agents(self) -> None:
        for agent in self._agents.values():
            agent.channel.channel.drain(0.05)
            agent.channel.close()
        self._agents.clear()

    def _tick(self, now_s: float) -> None:
        self._next_tick_s = now_s + self.settings.heartbeat_interval_s
        self._handle(m.CoordinatorTick())
        if self._unwritten is not None and now_s >= self._writes_again_s:
            self._remember(self._unwritten)
        since_s, self._judged_at_s = now_s - self._judged_at_s, now_s
        # Another agent of a node's name may be connected; its silence says nothing about the member.
        lives = {who[0]: agent for who, agent in self._agents.items() if self._coordinator.nodes.is_here(*who)}
        heartbeats = {node: agent.count for node, agent in lives.items()}
        silences_s = {node: now_s - agent.channel.channel.received_ns / 1e9 for node, agent in lives.items()}
        self._send_all(
            self._coordinator.judge_heartbeats(heartbeats, now_s, since_last_s=since_s, silences_s=silences_s)
        )
        if self._coordinator.may_close or self._coordinator.should_give_up_on_goodbyes(now_s):
            self.closed.set()

    # -- connections -------------------------------------------------------------------------------------------

    def _on_newcomer(self, link: AgentChannel, came: list[m.OnControl]) -> None:
        if self._successor is not None:
            reason = f"it has yielded to the coordinator at {self._successor}"
            link.send(m.Refused(reason=reason, successor=str(self._successor)))
            return
        match came[0]:
            case m.Hello() as hello:
                self._greet(link, hello, came[1:])
            case m.AskStatus():
                link.send(self._status())
            case m.AskLeadership():
                own = self._coordinator.leadership
                link.send(m.Leads(job=self.settings.job, term=own.term, leads=own.leads, order=own.order))
            case other:
                self._listener.drop(link, f"it began with {type(other).__name__}")

    def _greet(self, link: AgentChannel, hello: m.Hello, more: list[m.OnControl]) -> None:
        if (refusal := self._why_refused(hello)) is not None:
            self._refuse(link, hello, refusal)
        elif hello.job is None:  # the coordinator decides whether the name is free
            self._claimants[hello.node, hello.epoch] = link, hello, more
            self._handle(m.NameClaim(node=hello.node, epoch=hello.epoch))
        else:
            self._welcome(link, hello, more)

    def _refuse(self, link: AgentChannel, hello: m.Hello, refusal: m.Refused) -> None:
        if len(self._refused) >= _MAX_NEWCOMERS:
            self._refused.clear()
        known = (hello.node, refusal.reason) in self._refused
        self._refused.add((hello.node, refusal.reason))
        log.log(logging.DEBUG if known else logging.WARNING, "node %s was refused: %s", hello.node, refusal.reason)
        link.send(refusal)

    def _welcome(self, link: AgentChannel, hello: m.Hello, more: list[m.OnControl]) -> None:
        self._listener.admit(link)
        self._coordinator.note_term(hello.term, hello.leader == self.leader)
        who = hello.node, hello.epoch
        if (old := self._agents.pop(who, None)) is not None:
            old.channel.close()
        self._suspects.pop(who, None)
        self._agents[who] = _AgentLink(link, hello)
        link.channel.max_bytes = _MAX_MESSAGE_BYTES
        link.on_messages, link.on_broken = partial(self._on_messages, who), partial(self._on_broken, who)
        link.send(
            m.Welcome(
                job=self.settings.job,
                host=self.settings.host,
                leader=self.leader,
                term=self._coordinator.leadership.term,
                version=__version__,
            )
        )
        if more:
            self._on_messages(who, link, more)

    def _why_refused(self, hello: m.Hello) -> m.Refused | None:
        """Return why an agent may not take part in this job; ``None``: it may."""
        own, job = self._identity, self.settings.job
        if hello.run_id != own.run_id:
            reason = f"this is run {own.run_id!r}, not {hello.run_id!r}; give all agents of one run the same --rdzv-id"
            return m.Refused(reason=reason)
        difference = describe_difference(hello.version, whose="the agent", own="the coordinator")
        if difference is not None:
            return m.Refused(reason=difference)
        if own.command and hello.command and hello.command != own.command:
            reason = (
                f"the agents of this job run {own.command_text!r}, this one {hello.command_text!r}; start all with the "
                "same command (--rdzv-conf any_command=1 where they differ on purpose)"
            )
            return m.Refused(reason=reason)
        if hello.job not in (None, job):
            reason = f"this is job {job}, and the agent takes part in job {hello.job}, which is over here"
            return m.Refused(reason=reason, job=job, leads=self._coordinator.leadership.leads)
        return None

    def _on_messages(self, who: tuple[str, str], link: AgentChannel, came: list[m.OnControl]) -> None:
        agent = self._agents[who]
        for message in came:
            match message:
                case m.AgentHeartbeat():
                    agent.count = message.count
                    link.send(message)
                case m.Moving():
                    reason = "its agent received no response for too long and connected to another coordinator"
                    self._handle(m.Dead(node=who[0], epoch=who[1], reason=reason, is_known=False))
                case m.Hello() | m.AskStatus() | m.AskLeadership():
                    self._on_broken(who, link, ConnectionAbortedError(f"it sent {type(message).__name__}"))
                    return
                case _:
                    self._handle(msgspec.structs.replace(message, node=who[0], epoch=who[1]))

    def _on_broken(self, who: tuple[str, str], link: AgentChannel, error: OSError) -> None:
        link.close()
        if (agent := self._agents.get(who)) is None or agent.channel is not link:
            return
        del self._agents[who]
        log.debug("the connection to node %s ended: %s", who[0], error)
        now_s = clock.now_s()
        # After a pause of this process agents may have left because of its silence: a closed connection proves nothing.
        is_known = now_s - self._judged_at_s < self.settings.node_timeout_s / 2
        self._suspects[who] = now_s + PATIENCE_S, is_known

    # -- the coordinator ---------------------------------------------------------------------------------------

    def _handle(self, message: m.ToCoordinator) -> None:
        if isinstance(message, m.ScriptSettings):
            self._take_script_settings(message)
        self._send_all(self._coordinator.handle(message, clock.now_s()))
        if self._coordinator.may_close:
            self.closed.set()

    def _send_all(self, outbox: Sequence[tuple[str, str, m.ToNode]]) -> None:
        for effect in self._coordinator.take_effects():
            match effect:
                case Record(kind, cycle, data):
                    self._journal.write(kind, cycle=cycle, rank=None, iteration=None, **data)
                case Remember(state):
                    self._remember(state)
                case Learn():
                    self._learn(effect)
        if self._coordinator.stop is not None and (learned := self._learned) is not None:
            self._learned = None
            learned.log_suggestion()  # at the end of the job, however it ends
        frames: dict[int, bytes] = {}
        for node, epoch, message in outbox:
            if (agent := self._agents.get((node, epoch))) is None:
                continue  # disconnected: it registers again, and receives the message then
            frame = frames.get(id(message)) or frames.setdefault(id(message), encode_frame(message))
            agent.channel.send_frame(frame)
        for who in self._coordinator.take_dropped():
            if (agent := self._agents.pop(who, None)) is not None:
                agent.channel.close()
        for node, epoch, reason in self._coordinator.take_admissions():
            link, hello, more = self._claimants.pop((node, epoch), (None, None, []))
            if link is None or hello is None or not self._listener.is_newcomer(link):
                continue  # the connection ended
            if reason is None:
                self._welcome(link, hello, more)
            else:
                self._refuse(link, hello, m.Refused(reason=reason))

    def _status(self) -> m.LiveStatus:
        return self._coordinator.status(
            clock.now_s(), time=self._journal.format_time(), run_id=self._identity.run_id, run_dir=self._run_dir
        )

    def _take_script_settings(self, reported: m.ScriptSettings) -> None:
        """Use the settings of the script's config that no option and no file sets."""
        try:
            self._layers = self._layers.with_script(reported.fault_tolerance or "{}")
        except ConfigError as error:
            log.warning("the settings of node %s's script are not used: %s", reported.node, error)
            return
        settings, least = self._coordinator.settings, self._layers.config.min_nodes
        if least is not None and least > settings.num_slots:
            log.warning(
                "fault_tolerance.min_nodes=%d of the script's config is more than the %d nodes of --nnodes; not used",
                *(least, settings.num_slots),
            )
        self._coordinator.resettle(settings.changed_by(self._layers.config))

    # -- what the coordinator has others do --------------------------------------------------------------------

    def _remember(self, state: RecoveryState) -> None:
        run_dir = self._run_dir
        if run_dir is None:
            return
        is_written = self._write(
            "decisions of the recovery policy",
            run_dir / "ladder.json",
            lambda: save_recovery_state(run_dir, state),
            "the agents of this job keep them; a later job will not know which remedies were tried",
        )
        self._unwritten = None if is_written else state
        self._writes_again_s = clock.now_s() + _REWRITE_S

    def _learn(self, of: Learn) -> None:
        config, observations, expired = self._layers.config, of.observations, of.expired
        folder = LearnedTimeouts.folder(config, self._run_dir)
        if folder is None:  # count hangs at timeouts that the script calculated all the same
            expired = [one for one in expired or () if one.is_calculated and not one.is_explained]
            folder, observations = LearnedTimeouts.counts_in(config, self._run_dir), []
            if folder is None or not expired:
                return

        def save() -> None:
            learned = LearnedTimeouts.load(folder)
            learned.merge(
                observations,
                cycle=f"{self.settings.job}/{of.cycle}",
                config=config,
                finished=expired is None,
                faulted=expired or (),
                with_defaults=True,
            )
            learned.save()
            self._learned = learned

        self._write("learned timeouts", folder / FILE_NAME, save, "those of this cycle are lost")

    def _write(self, what: str, path: Path, write: Callable[[], None], otherwise: str) -> bool:
        """Write a file if this job still owns the run directory; return whether it was written. A hung disk blocks
        briefly."""

        def write_if_ours() -> bool:
            if self._may_write():
                write()
            return True

        return bool(write_optional(what, path, write_if_ours, otherwise=otherwise))
