"""The in-process restart coordinator without ``outlast run``: a part of one agent process.

Each node's agent process has one connection to it (:mod:`outlast.inprocess.agent_link`) for the reports of the node's
relay and for orders. :class:`outlast.launch.in_process_restarts.InProcessRestarts` makes all decisions about ranks;
decided here is only which nodes are unreachable: a node whose connection broke has ``RECONNECT_S`` to reconnect.

A coordinator that follows another one first waits for the standings of all members of the last call. Every node gets
the list of the few agent processes that may follow. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import math
import selectors
from dataclasses import dataclass
from functools import partial

import msgspec

from outlast import clock
from outlast.inprocess.protocol import MonitorTask
from outlast.launch import protocol as m
from outlast.launch.in_process_restarts import InProcessRestarts
from outlast.launch.rank_relay import RECONNECT_S
from outlast.runtime.wire import BufferedChannel, SelectedChannel

log = logging.getLogger(__name__)

_MAX_SUCCESSORS = 3
_END_S = 2.0
"""Seconds in which the last order has to be delivered."""
_TOGETHER_S = 0.5
"""Nodes whose time limits end within this many seconds are lost together: their losses may have one cause, and a
restart for the first of them would be in vain."""


class JoinCoordinator(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message on a connection."""

    node: str
    life: str
    address: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Response of the coordinator to a process that joins; sent again when the addresses change."""

    term: int
    addresses: tuple[str, ...]


class NotCoordinator(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent process does not coordinate, or not yet."""

    is_new: bool
    """It was started in place of one that was killed, and has no standings."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A heartbeat; the coordinator sends it back."""


OnLink = JoinCoordinator | Welcome | NotCoordinator | Heartbeat | m.RankStandings | m.RankReports | m.RankOrder
NodeChannel = BufferedChannel[OnLink]
NodeLink = SelectedChannel[OnLink]


@dataclass(slots=True)
class _LinkedNode:
    link: NodeLink
    join: JoinCoordinator


class RankCoordinator:
    """Serve the agent processes of a call of a wrapped function.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: Of a rank of this node.
        own: This agent process.
        term: Higher than any other coordinator's of the call.
        patience_s: Seconds to wait for the members of the last call.
    """

    def __init__(
        self, selector: selectors.BaseSelector, task: MonitorTask, own: JoinCoordinator, *, term: int, patience_s: float
    ) -> None:
        self._selector, self._task, self._own, self._term = selector, task, own, term
        self._restarts = InProcessRestarts()
        self._nodes: dict[str, _LinkedNode] = {}
        self._absent: dict[str, float] = {}
        """Time limits of nodes whose connection broke."""
        self._addresses: tuple[str, ...] = (own.address,)
        self._has_begun = False
        self._patience_end_s = clock.now_s() + patience_s
        self._next_silence_check_s = clock.now_s() + task.heartbeat_timeout_s
        self._end_s = math.inf

    @property
    def deadline_s(self) -> float:
        due = [self._next_silence_check_s, *self._absent.values()]
        if not self._has_begun and clock.now_s() < self._patience_end_s:
            due.append(self._patience_end_s)
        if (restarts_s := self._restarts.deadline_s) is not None:
            due.append(restarts_s)
        if clock.now_s() < self._end_s:
            due.append(self._end_s)
        return min(due)

    def serves_others(self) -> bool:
        """Return whether other nodes need this coordinator, or may reconnect."""
        if clock.now_s() >= self._end_s:
            return False
        others = (self._nodes.keys() | self._absent.keys()) - {self._own.life}
        return bool(others) or (self._has_begun and self._restarts.is_waiting())

    def adopt(self, channel: NodeChannel, join: JoinCoordinator) -> None:
        if (old := self._nodes.pop(join.life, None)) is not None:
            old.link.close()
        self._absent.pop(join.life, None)
        on_messages, on_broken = partial(self._on_messages, join), partial(self._on_broken, join)
        link = NodeLink(self._selector, channel, on_messages, on_broken)
        self._nodes[join.life] = _LinkedNode(link, join)
        link.send(Welcome(term=self._term, addresses=self._addresses))
        self._choose_successors()

    def look(self, now_s: float) -> None:
        if now_s >= self._next_silence_check_s:
            self._check_silence(now_s)
        if any(now_s >= until_s for until_s in self._absent.values()):
            lost = {life for life, until_s in self._absent.items() if now_s + _TOGETHER_S >= until_s}
            self._absent = {life: until_s for life, until_s in self._absent.items() if life not in lost}
            self._restarts.lose(lost, now_s)
        self._begin_if_complete(now_s)
        self._restarts.look(now_s)
        self._deliver()

    def discount_pause(self) -> None:
        for node in self._nodes.values():
            node.link.channel.received_ns = clock.now_ns()

    def close(self) -> None:
        """Close all connections. Blocks: up to 0.5 s for each node that accepts nothing."""
        for node in self._nodes.values():
            node.link.channel.drain(0.5)
            node.link.close()
        self._nodes.clear()

    # -- nodes -------------------------------------------------------------------------------------------------

    def _on_messages(self, join: JoinCoordinator, link: NodeLink, came: list[OnLink]) -> None:
        for message in came:
            match message:
                case Heartbeat():
                    link.send(message)
                case m.RankStandings() | m.RankReports():
                    message = msgspec.structs.replace(message, node=join.node, epoch=join.life)
                    if self._has_begun:
                        self._restarts.take(message, clock.now_s())
                    else:
                        self._restarts.keep(message)
                case other:
                    self._on_broken(join, link, ConnectionAbortedError(f"it sent {type(other).__name__}"))
                    return
        self._begin_if_complete(clock.now_s())
        self._deliver()

    def _on_broken(self, join: JoinCoordinator, link: NodeLink, error: OSError) -> None:
        link.close()
        node = self._nodes.get(join.life)
        if node is None or node.link is not link:
            return
        del self._nodes[join.life]
        if self._restarts.is_home(join.life):
            log.info("the connection to the agent process of node %s broke: %s", join.node, error)
            self._absent[join.life] = clock.now_s() + RECONNECT_S
        self._choose_successors()

    def _check_silence(self, now_s: float) -> None:
        """Close connections that have been silent for the heartbeat timeout."""
        oldest_s = now_s
        for node in [node for life, node in self._nodes.items() if life != self._own.life]:
            received_s = node.link.channel.received_ns / 1e9
            if now_s >= received_s + self._task.heartbeat_timeout_s:
                error = TimeoutError(f"no heartbeat for {now_s - received_s:.1f} s")
                self._on_broken(node.join, node.link, error)
            else:
                oldest_s = min(oldest_s, received_s)
        self._next_silence_check_s = oldest_s + self._task.heartbeat_timeout_s

    def _choose_successors(self) -> None:
        """Send all nodes the processes that may follow this coordinator, where they changed."""
        linked = [node.join.address for life, node in self._nodes.items() if life != self._own.life]
        kept = [address for address in self._addresses[1:] if address in linked]
        added = [address for address in linked if address not in kept]
        addresses = (self._own.address, *[*kept, *added][:_MAX_SUCCESSORS])
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for node in list(self._nodes.values()):
            node.link.send(Welcome(term=self._term, addresses=addresses))

    # -- decisions ---------------------------------------------------------------------------------------------

    def _begin_if_complete(self, now_s: float) -> None:
        """Begin, or resume from the standings, once all members of the last call have sent theirs."""
        if (
            self._has_begun
            or not self._restarts.has_kept
            or (self._restarts.missing() and now_s < self._patience_end_s)
        ):
            return
        self._has_begun = True
        self._restarts.take_over(self._task.cycle, self._term, None, now_s)

    def _deliver(self) -> None:
        orders, self._restarts.out = self._restarts.out, []
        for _, life, order in orders:
            if (node := self._nodes.get(life)) is not None:  # else it gets the order when it reconnects
                node.link.send(order)
        if self._has_begun and self._restarts.is_over:
            self._end_s = min(self._end_s, clock.now_s() + _END_S)
