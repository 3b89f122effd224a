"""A monitor process's link to the hub, wherever that is: at another process, or in this one.

Where the hub is, a :class:`HubLocator` knows. While the hub is looked for nothing is lost: the member's
:class:`~outlast.inprocess.protocol.MemberRecord` is sent to the next one.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import selectors
from collections.abc import Callable
from functools import partial
from typing import Protocol

from outlast import clock
from outlast.inprocess import protocol as m
from outlast.policy import inprocess_protocol as p

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds in which the hub has to show a sign of life when it is needed."""
_FINAL_REPORT_S = 1.0
"""Seconds that a process whose rank is gone has to reach the hub."""


class HubSeeker(Protocol):
    """A member, for the locator of its hub."""

    def take_standing(self) -> p.MemberStanding:
        """Return where the member stands, to be sent to the hub that it joins."""
        ...

    def use_link(self, channel: m.HubChannel, came: list[m.OnLink]) -> None:
        """The hub was found: use this link, on which these messages came already."""
        ...

    def give_up(self, reason: str) -> None:
        """There is no hub for this member any more."""
        ...

    def demand_answer(self) -> None:
        """The hub has to show soon that it lives: another member lost it."""
        ...


class HubLocator(Protocol):
    """Where the hub is, and whether this process hosts it. A part of an event loop; nothing here blocks."""

    address: str
    """``host port`` where this process could host the hub."""

    def attach(self, seeker: HubSeeker) -> None:
        """Locate the hub for this member; called once, before anything else."""
        ...

    @property
    def is_bootstrapped(self) -> bool:
        """Whether it is known how to find the hub."""
        ...

    @property
    def is_hosting(self) -> bool:
        """Whether the hub is in this process."""
        ...

    @property
    def is_needed(self) -> bool:
        """Whether other members need what this process hosts."""
        ...

    def connect(self, order: m.Connect) -> None:
        """Join the hub for the first time, or host it."""
        ...

    def reconnect(self, known: m.Reconnect, timeout_s: float) -> None:
        """Find the hub in place of a process that is gone."""
        ...

    def find(self, timeout_s: float, *, may_host: bool, was_silent: bool = False) -> None:
        """Find the hub again after its link broke.

        Args:
            timeout_s: Seconds that this may take.
            may_host: Whether this process may become its host.
            was_silent: The hub's process fell silent, which others may not have noticed.
        """
        ...

    def learn(self, known: m.HubCandidates) -> None:
        """Remember who could host the hub."""
        ...

    def look(self, now_s: float) -> float | None:
        """Do what is due; return when to look again, ``None`` = nothing is due."""
        ...

    def discount_pause(self) -> None:
        """This process did not run for a while: what others sent meanwhile is still to be read."""
        ...

    def close(self) -> None:
        """Let go of everything. Blocks: up to 0.5 s for each member that takes nothing."""
        ...


class HubClient:
    """Report to the hub, and receive its orders.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: What the process has to do.
        locator: Knows where the hub is; this object owns it.
        on_order: Gets the hub's orders to the rank.
        on_candidates: Gets who could host the hub, whenever that changes.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        task: m.MonitorTask,
        locator: HubLocator,
        *,
        on_order: Callable[[p.Order], None],
        on_candidates: Callable[[m.HubCandidates], None],
    ) -> None:
        self._selector, self._task, self._locator = selector, task, locator
        self._on_order, self._on_candidates = on_order, on_candidates
        self._record = m.MemberRecord()
        self._joined_with = self._record.standing
        self._channel: m.HubChannel | None = None
        self._final_report: m.Gone | p.Left | None = None
        self._rank_is_gone = False
        self._end_s: float | None = None
        self._next_beat_s = 0.0
        self._answer_s: float | None = None
        self.is_over = False
        """The hub has no more orders for the rank, or the rank no more reports for it."""
        locator.attach(self)

    # -- for the monitor process -------------------------------------------------------------------------------

    @property
    def restart_count(self) -> int:
        """The call that the rank was ordered to enter last; 0 before."""
        return max(0, self._record.standing.restart_count)

    @property
    def is_done(self) -> bool:
        """Whether nobody needs this process any more, once its rank is gone."""
        if self._locator.is_needed:
            return False
        return self._final_report is None or self.is_over or (self._end_s is not None and clock.now_s() >= self._end_s)

    def reconnect(self, known: m.Reconnect) -> None:
        """Join the hub in place of a process that is gone."""
        self._final_report = known.final_report
        self._record = m.MemberRecord(known.standing)
        self._locator.reconnect(known, self._task.heartbeat_timeout_s + _ANSWER_S)

    def report(self, report: p.Report) -> None:
        """Send the hub what the rank reported, or what is reported for it."""
        self._record.note_report(report)
        if isinstance(report, p.Left):
            self._final_report = report
        if self._channel is None:
            return  # its standing, or its final report, will have it
        self._send(report)
        if isinstance(report, p.RankFault):
            self.demand_answer()

    def end(self, final_report: m.Gone | p.Left) -> None:
        """Report that the rank is gone; :attr:`is_done` soon."""
        self._rank_is_gone = True
        if not self._locator.is_bootstrapped:
            self.is_over = True  # no member knows of it yet
        if self.is_over:
            return
        if self._final_report is None:
            self._final_report = final_report
        self._end_s = clock.now_s() + _FINAL_REPORT_S
        self._send_final_report()

    def look(self, now_s: float) -> float:
        """Do what is due, and return when to look again."""
        due: list[float | None] = [now_s + self._task.heartbeat_timeout_s, self._end_s]
        if self._channel is not None:
            due.append(self._look_at_link(now_s, self._channel))
        due.append(self._locator.look(now_s))
        return min(time_s for time_s in due if time_s is not None)

    def discount_pause(self) -> None:
        """This process did not run for a while: what others sent meanwhile is still to be read."""
        if self._channel is not None:
            self._channel.received_ns = clock.now_ns()
        self._locator.discount_pause()

    def close(self) -> None:
        """Let go of everything.

        Blocks: up to a second for each member that takes nothing.
        """
        self._locator.close()
        if self._channel is not None:
            self._channel.drain(_FINAL_REPORT_S)
        self._drop_link()

    # -- for the locator ---------------------------------------------------------------------------------------

    def take_standing(self) -> p.MemberStanding:
        self._joined_with = self._record.standing
        return self._joined_with

    def use_link(self, channel: m.HubChannel, came: list[m.OnLink]) -> None:
        self._channel, self._answer_s = channel, None
        self._next_beat_s = clock.now_s() + self._task.heartbeat_interval_s
        self._selector.register(channel, selectors.EVENT_READ, partial(self._on_event, channel))
        if self._record.standing != self._joined_with:
            for report in self._record.reports():
                self._send(report)
        self._send_final_report()
        for message in came:
            self._take(message)

    def give_up(self, reason: str) -> None:
        if self._rank_is_gone:
            return
        text = f"no hub can be reached ({reason})"
        log.warning("rank %d: %s", self._task.initial_rank, text)
        counts = self._record.standing.fault_counts
        self._order(p.Abort(reason=text, restart_count=self.restart_count, fault_counts=counts))

    def demand_answer(self) -> None:
        if self._channel is not None and self._answer_s is None:
            self._answer_s = clock.now_s() + _ANSWER_S
            self._send(m.Beat())

    # -- the link ----------------------------------------------------------------------------------------------

    def _on_event(self, channel: m.HubChannel, events: int) -> None:
        if channel is not self._channel:
            return
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
                m.watch(self._selector, channel)
            if events & selectors.EVENT_READ:
                for message in channel.receive():
                    self._take(message)
        except OSError as error:
            if channel is self._channel:
                self._lose_link(str(error))

    def _take(self, message: m.OnLink) -> None:
        match message:
            case m.HubCandidates():
                self._locator.learn(message)
                self._on_candidates(message)
            case p.Restart() | p.Assign() | p.Go() | p.Finish() | p.Abort() | p.Expel():
                self._order(message)
            case m.Beat():
                pass  # the channel has noted when it came
            case other:
                log.warning("unexpected message from the hub: %s", type(other).__name__)

    def _order(self, order: p.Order) -> None:
        self._record.note_order(order)
        is_left_out = isinstance(order, p.Go) and self._task.initial_rank not in order.ranks
        if is_left_out or isinstance(order, p.Finish | p.Abort | p.Expel):
            self.is_over = True
            self._drop_link()
        self._on_order(order)

    def _send(self, message: m.OnLink) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except OSError as error:
            self._lose_link(str(error))
        else:
            m.watch(self._selector, self._channel)

    def _send_final_report(self) -> None:
        channel, report = self._channel, self._final_report
        if channel is None or report is None:
            return
        self._send(report)
        if self._channel is channel and self._rank_is_gone:
            channel.drain(_FINAL_REPORT_S)
            self._drop_link()
            self.is_over = True

    def _look_at_link(self, now_s: float, channel: m.HubChannel) -> float:
        """Send a beat if it is due, and give up a hub that is silent."""
        received_s = channel.received_ns / 1e9
        if self._answer_s is not None and received_s > self._answer_s - _ANSWER_S:
            self._answer_s = None
        due_s = received_s + self._task.heartbeat_timeout_s
        if self._answer_s is not None:
            due_s = min(due_s, self._answer_s)
        if now_s >= due_s:
            self._lose_link(f"no sign of life for {now_s - received_s:.1f} s", was_silent=True)
            return now_s
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._task.heartbeat_interval_s
            self._send(m.Beat())
        return min(due_s, self._next_beat_s)

    def _drop_link(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None

    def _lose_link(self, error: str, *, was_silent: bool = False) -> None:
        """The hub cannot be reached over this link: look for it elsewhere."""
        log.info("rank %d: the link to the hub broke: %s", self._task.initial_rank, error)
        self._drop_link()
        if self._locator.is_hosting or self.is_over:
            return
        timeout_s = _FINAL_REPORT_S if self._rank_is_gone else self._task.heartbeat_timeout_s + _ANSWER_S
        self._locator.find(timeout_s, may_host=not self._rank_is_gone, was_silent=was_silent)
