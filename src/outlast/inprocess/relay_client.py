"""A duty's connection to the in-process restart coordinator: one Unix socket to the relay of its node.

The relay's owner, the agent of ``outlast run`` or an :class:`~outlast.inprocess.agent_link.AgentLink`, carries reports
to the coordinator, and orders back; see :mod:`outlast.launch.rank_relay`. Where the relay is gone the rank gets an
order to stop. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable

from outlast import clock
from outlast.inprocess import protocol as m
from outlast.policy import inprocess_protocol as p
from outlast.runtime.wire import BufferedChannel, SelectedChannel

log = logging.getLogger(__name__)

_FINAL_REPORT_S = 1.0
"""Seconds in which the relay has to accept the last report."""
_QUIET_S = 3600.0
RelayLink = SelectedChannel[p.Order]


class RelayClient:
    """Report to the coordinator, and receive its orders. Part of an event loop; only :meth:`close` blocks.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: Of the duty.
        relay: Address of the relay, the name of an abstract socket without its leading zero.
        on_order: Receives the orders to the rank.
    """

    def __init__(
        self, selector: selectors.BaseSelector, task: m.MonitorTask, relay: str, *, on_order: Callable[[p.Order], None]
    ) -> None:
        self._selector, self._task, self._relay, self._on_order = selector, task, relay, on_order
        self._record = m.MemberRecord()
        self._ranks: dict[int, int] = {}
        self._link: RelayLink | None = None
        self._give_up_s: float | None = None
        self.is_over = False
        """There are no more orders for the rank, or the rank has no more reports."""

    @property
    def restart_count(self) -> int:
        """The call that the rank was ordered to enter last; 0 before."""
        return max(0, self._record.standing.restart_count)

    def connect(self) -> None:
        # The coordinator waits as long for missing ranks, and again for the rank that assigns ranks.
        self._give_up_s = clock.now_s() + 2 * self._task.limits.barrier_timeout_s + _FINAL_REPORT_S
        self._join()

    def reconnect(self, known: m.Reconnect) -> None:
        self._record, self._ranks = m.MemberRecord(known.standing), known.ranks
        self._join()
        if known.final_report is not None:
            self._send(known.final_report)

    def report(self, report: p.Report) -> None:
        self._record.note_report(report)
        self._send(report)

    def end(self, final_report: m.Gone | p.Left) -> None:
        """Report that the rank is gone; :attr:`is_over` then."""
        if self.is_over:
            return
        if self._link is None:
            self._join()  # it ended before it had joined: the others need not wait for it
        self._send(final_report)
        self.close()
        self.is_over = True

    def look(self, now_s: float) -> float:
        """Do what is due, and return when the next call is due."""
        if self._give_up_s is None or self.is_over:
            return now_s + _QUIET_S
        if now_s >= self._give_up_s:
            self._stop("the coordinator gave no order to begin; look at its log")
            return now_s + _QUIET_S
        return self._give_up_s

    def close(self) -> None:
        """Close the connection. Blocks: up to a second where the relay accepts nothing."""
        if self._link is not None:
            self._link.channel.drain(_FINAL_REPORT_S)
        self._drop()

    def _join(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{self._relay}")
        except OSError as error:
            connection.close()
            self._stop(f"the agent of this node cannot be reached: {error.strerror}")
            return
        channel: BufferedChannel[p.Order] = BufferedChannel(connection, p.Order)
        self._link = RelayLink(self._selector, channel, self._on_messages, self._on_broken)
        self._send(
            m.JoinRelay(
                cycle=self._task.cycle,
                call=self._task.call,
                initial_rank=self._task.initial_rank,
                initial_world_size=self._task.initial_world_size,
                pid=self._task.pid,
                labels=self._task.labels,
                limits=self._task.limits,
                standing=self._record.standing,
                ranks=self._ranks,
            )
        )

    def _on_messages(self, link: RelayLink, came: list[p.Order]) -> None:
        for order in came:
            if self._link is link:
                self._order(order)

    def _on_broken(self, _: RelayLink, error: OSError) -> None:
        self._stop(f"the agent of this node is gone: {error}")

    def _order(self, order: p.Order) -> None:
        self._give_up_s = None
        self._record.note_order(order)
        is_left_out = isinstance(order, p.Go) and self._task.initial_rank not in order.ranks
        if is_left_out or isinstance(order, p.Finish | p.Abort | p.Expel):
            self.is_over = True
            self._drop()
        self._on_order(order)

    def _stop(self, reason: str) -> None:
        """Order the rank to stop: no coordinator can be reached."""
        if self.is_over:
            return
        log.warning("rank %d: %s", self._task.initial_rank, reason)
        counts = self._record.standing.fault_counts
        self._order(p.Abort(reason=reason, restart_count=self.restart_count, fault_counts=counts))

    def _send(self, message: m.ToRelay) -> None:
        if self._link is not None:
            self._link.send(message)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
