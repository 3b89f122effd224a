"""The agent's side of the coordinator: what a node reports, and the connection on which that travels.

:class:`CoordinatorClient` is what the agent uses; its methods never block. :class:`ControlLink` carries the messages,
in two threads that a stuck store cannot take the agent with: one sends messages and beats (and ticks the coordinator,
if this process hosts the store), one receives and puts what comes into the agent's mailbox. The control store is soft
state: when it is lost, training continues, and the link tries the endpoints in turn until one answers or can be hosted
by this machine. :class:`Lifeline` is a connection whose end shows the store's host that this agent died.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from torch.distributed import DistError

from outlast import clock
from outlast.errors import RendezvousError
from outlast.launch import protocol as m
from outlast.launch.coordinator_server import PATIENCE_S, CoordinatorServer, _LifelineHello, beat_key, channel_key
from outlast.policy.recovery_point import Distrusted
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.store import TCPStore


class CoordinatorClient:
    """Report for one node.

    Args:
        link: The link to the coordinator.
        addr: Address of this node for its peers.
        nproc: Workers that it starts.
        wish: The slot that its user asked for, if any.

    Thread: the agent's main thread; nothing here blocks.
    """

    def __init__(self, link: ControlLink, *, addr: str, nproc: int, wish: int | None) -> None:
        self.link = link
        self.send = link.send
        self.node, self.addr, self.nproc, self._wish = link.node, addr, nproc, wish
        self._place: m.SlotPlace | None = None
        self._ended: m.CycleFacts | None = None
        self._distrusted: tuple[Distrusted, ...] = ()
        self._script_settings: str | None = None

    def take_place(self, start: m.Start) -> bool:
        """Note the place in a cycle; return False for one that was taken before (sent twice, after a reconnection)."""
        if self._place is not None and start.cycle <= self._place.cycle:
            return False
        self._place = m.SlotPlace(cycle=start.cycle, slot=start.node_rank, num_slots=start.num_nodes)
        self._distrusted = start.distrusted
        return True

    def join(self, ended: m.CycleFacts | None) -> None:
        """Request a slot in the next cycle, with what is known of the one that ended here."""
        self._ended = ended
        self.send(m.JoinRequest(addr=self.addr, nproc=self.nproc, wish=self._wish, ended=ended))

    def report_settings(self, text: str) -> None:
        """Report what the script's config sets, empty for nothing, unless it was reported before."""
        if text != self._script_settings:
            self._script_settings = text
            self.send(m.ScriptSettings(fault_tolerance=text))

    def finish(self, facts: m.CycleFacts) -> None:
        """Report that every worker of this node ended with 0, or could be spared."""
        self._ended = facts
        self.send(m.Finished(facts=facts))

    def register(self, *, is_running: bool, is_joining: bool, has_finished: bool) -> None:
        """Report this node's place, and its last message, to a control store that is back, or to another one."""
        self.send(
            m.Register(
                addr=self.addr,
                nproc=self.nproc,
                wish=self._wish,
                place=self._place,
                running=is_running or has_finished,
                distrusted=self._distrusted,
            )
        )
        if self._script_settings is not None:
            settings, self._script_settings = self._script_settings, None
            self.report_settings(settings)
        if is_joining:
            self.join(self._ended)
        elif has_finished and self._ended is not None:
            self.finish(self._ended)


log = logging.getLogger(__name__)
_FOREVER = datetime.timedelta(days=365)
_CALL_TIMEOUT_S = 10.0
GOODBYE_S = 5.0
"""How long a host waits until the other nodes know that the job is over."""
_CONNECT_TIMEOUT_S = 20.0
"""Where nobody listens it fails at once; hundreds that come together may have to wait for each other."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The control store is out of reach; the link keeps trying."""

    error: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The control store is there (again); ``job`` names the job that it serves."""

    job: str
    is_host: bool
    is_first: bool


@dataclass(frozen=True, slots=True)
class JobInProgress:
    """A job whose control store was lost: its name, and the node that hosted it."""

    job: str
    host: str


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """The link gave up."""

    error: str


News = m.Wait | m.NodesMissing | m.Prepare | m.Start | m.CycleOver | m.Remark | m.Stop | LinkDown | LinkUp | LinkFailed


class ControlLink:
    """Connect an agent to the coordinator, hosting it where nobody does.

    Args:
        endpoints: Where the control store may be, in the order of trying.
        node: Name of this node.
        deliver: Called in a thread of the link with everything that the agent must know.
        serve: Makes the coordinator's server on a store that this process hosts; its second argument is ``None`` at a
            job's start.
        beat_interval_s: Seconds between two signs of life.
        connect_timeout_s: How long the first connection may take.

    Thread: owns two; its methods may be called by any and never block on the store.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        node: str,
        deliver: Callable[[News], None],
        serve: Callable[[TCPStore, JobInProgress | None], CoordinatorServer],
        beat_interval_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.node = node
        self.epoch = f"{os.getpid()}-{secrets.token_hex(4)}"
        """Names this life of the agent."""
        self.endpoint: Endpoint | None = None
        """Where the control store was found."""
        self.problem = ""
        """Why it has not been found yet, or not again; empty = no try has failed."""
        self._endpoints = list(endpoints)
        self._deliver, self._serve = deliver, serve
        self._beat_interval_s, self._connect_timeout_s = beat_interval_s, connect_timeout_s
        self._outgoing: queue.SimpleQueue[m.FromNode | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._server: CoordinatorServer | None = None
        self._hosted: TCPStore | None = None
        self._job: JobInProgress | None = None
        self._listener: threading.Thread | None = None
        self._lifeline: Lifeline | None = None
        self._sender = threading.Thread(target=self._run, name="outlast-link-send", daemon=True)
        self._broken = threading.Event()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the control store may be."""
        return tuple(self._endpoints)

    def start(self) -> None:
        """Start connecting."""
        self._sender.start()

    def send(self, message: m.FromNode) -> None:
        """Send a message of this node's as soon as the control store is there."""
        self._outgoing.put(msgspec.structs.replace(message, node=self.node, epoch=self.epoch))

    def close(self, *, goodbye_timeout_s: float = GOODBYE_S) -> None:
        """End the link; a host first waits until every node knows that the job is over.

        Blocks: a host up to ``goodbye_timeout_s``; others hardly.
        """
        self.send(m.Bye())
        if self._server is not None:
            self._server.closed.wait(goodbye_timeout_s)
        self._closing.set()
        self._outgoing.put(None)
        if self._job is None:  # never connected: the thread may be in a call that nothing interrupts, and holds nothing
            self._sender.join(0.1)
            return
        # Threads inside a store call must not be left to the interpreter's end, which they would abort.
        self._sender.join(3.0)
        if self._listener is not None:
            self._listener.join(1.0)
        if self._lifeline is not None:
            self._lifeline.close()
        if self._server is not None:
            self._server.close()

    # -- threads -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_first = True
        try:
            while (store := self._reach(is_first=is_first)) is not None:
                if not is_first:
                    self._discard_outgoing()
                assert self._job is not None
                self._deliver(LinkUp(job=self._job.job, is_host=self._server is not None, is_first=is_first))
                is_first = False
                self._pump(store)
                if self._closing.is_set():
                    return
        except RendezvousError as error:
            self._deliver(LinkFailed(str(error)))
        except BaseException as error:
            log.exception("the link to the control store ended on an error")
            self._deliver(LinkFailed(f"{type(error).__name__}: {error}"))

    def _settle(self, store: TCPStore) -> None:
        """Take up life on a store: the job's name, a lifeline, a first beat, a thread that listens."""
        job, host, port = (bytes(value).decode() for value in store.multi_get(["job", "host", "lifelines"]))
        self._hold_lifeline(int(port))
        self._job = JobInProgress(job, host)
        self._broken = threading.Event()
        store.add(beat_key(self.node, self.epoch), 1)
        self._listener = threading.Thread(
            target=self._listen, args=(store.clone(), self._broken), name="outlast-link-listen", daemon=True
        )
        self._listener.start()

    def _hold_lifeline(self, port: int) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        assert self.endpoint is not None
        self._lifeline = Lifeline(self.endpoint.host, port, node=self.node, epoch=self.epoch)

    def _pump(self, store: TCPStore) -> None:
        """Send messages and beats until the store is lost or the link is closed."""
        next_beat_s = clock.now_s()
        pending: m.FromNode | None = None
        try:
            while not self._broken.is_set():
                now_s = clock.now_s()
                if now_s >= next_beat_s:
                    next_beat_s = now_s + self._beat_interval_s
                    store.add(beat_key(self.node, self.epoch), 1)
                    if self._server is not None:
                        store.queue_push("inbox", m.encode(m.CoordinatorTick()))
                try:
                    pending = self._outgoing.get(timeout=max(0.0, next_beat_s - clock.now_s()))
                except queue.Empty:
                    continue
                if pending is None:
                    # Wake the listener: a thread inside a store call must not be left to the interpreter's end.
                    store.queue_push(channel_key(self.node, self.epoch), m.encode(m.Wait(reason="the link is closed")))
                    return
                store.queue_push("inbox", m.encode(pending))
                store.check(["job"])  # a push is fire-and-forget; an answer to this says that it arrived
                pending = None
        except (DistError, RuntimeError) as error:
            self._deliver(LinkDown(_first_line(error)))
            return
        if not self._closing.is_set():
            self._deliver(LinkDown("the connection to the control store broke"))

    def _discard_outgoing(self) -> None:
        """Drop what was meant for a store that is gone: the agent reports all that matters again."""
        while not self._outgoing.empty():
            try:
                if self._outgoing.get_nowait() is None:
                    self._outgoing.put(None)  # the link is being closed
                    return
            except queue.Empty:
                return

    def _listen(self, store: TCPStore, broken: threading.Event) -> None:
        store.set_timeout(_FOREVER)
        key = channel_key(self.node, self.epoch)
        try:
            while not self._closing.is_set():
                news = m.decode_to_node(bytes(store.queue_pop(key, block=True)))
                if not self._closing.is_set():
                    self._deliver(news)
        except (DistError, RuntimeError, RendezvousError) as error:
            if not self._closing.is_set():
                log.debug("waiting for the coordinator failed: %s", _first_line(error))
        finally:
            broken.set()

    def _reach(self, *, is_first: bool) -> TCPStore | None:
        """Connect to the control store or host it; ``None`` when the link is closed meanwhile."""
        deadline_s = clock.now_s() + self._connect_timeout_s
        error = "no endpoint was tried"
        while not self._closing.is_set():
            for endpoint in self._endpoints:
                try:
                    store = self._reach_at(endpoint)
                    self._settle(store)
                    return store
                except (RendezvousError, DistError, RuntimeError) as failure:
                    error = self.problem = _first_line(failure)
            if is_first and clock.now_s() > deadline_s:
                raise RendezvousError(error)
            self._closing.wait(0.2)
        return None

    def _reach_at(self, endpoint: Endpoint) -> TCPStore:
        if endpoint.is_local and (hosted := stores.host(endpoint, timeout_s=_CALL_TIMEOUT_S)) is not None:
            self.endpoint = Endpoint(endpoint.host, hosted.port)
            self._endpoints = [self.endpoint if e == endpoint else e for e in self._endpoints]
            self._hosted = hosted
            self._server = self._serve(hosted, self._job)
            self._server.start()
            return hosted.clone()
        store = stores.connect(endpoint, timeout_s=_CONNECT_TIMEOUT_S, call_timeout_s=_CALL_TIMEOUT_S)
        self.endpoint = endpoint
        return store


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class Lifeline:
    """This agent's lifeline to the control store's host; connects again when it breaks.

    Args:
        host: Where the lifelines' server listens.
        port: Its port.
        node: Name of this node.
        epoch: Names this life of the agent.

    Thread: owns one.
    """

    def __init__(self, host: str, port: int, *, node: str, epoch: str) -> None:
        self._address = (host, port)
        self._hello = msgspec.json.encode(_LifelineHello(node, epoch))
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="outlast-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go."""
        self._closing.set()
        held = self._socket
        if held is not None:
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("the lifeline was broken already: %s", error)
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with socket.create_connection(self._address, timeout=2.0) as held:
                    held.settimeout(None)
                    self._socket = held
                    held.sendall(self._hello)
                    held.recv(1)  # nothing ever comes: this returns when the connection ends
            except OSError as error:
                log.debug("the lifeline broke: %s", error)
                self._closing.wait(PATIENCE_S / 3)
