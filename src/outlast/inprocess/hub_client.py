"""The way of a monitor process to the hub, wherever that is: at another process, or in this one.

A member that loses the hub looks for it among the candidates, and hosts it itself where all before it are gone. Until
then nothing is lost: its :class:`~outlast.inprocess.protocol.MemberRecord` is sent to the next hub.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
from collections.abc import Callable
from functools import partial

from outlast import clock
from outlast.inprocess import protocol as m
from outlast.inprocess.door import HubListener
from outlast.inprocess.failover.search import PeerProbes, Search
from outlast.inprocess.hub import RETURN_S, Hub, name_space
from outlast.inprocess.link import Link, LinkBroken
from outlast.inprocess.protocol import MemberRecord, MonitorTask

__all__ = ["HubClient"]


log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds in which the hub has to show a sign of life when it is needed."""
_SILENT_S = _ANSWER_S
"""Seconds that others have more to come after a hub that fell silent: they notice it when they are called on."""
_LAST_WORDS_S = 1.0
"""Seconds that a process whose rank is gone has to tell the hub."""


class HubClient:
    """Tell the hub, and hear it.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: What the process was told.
        on_order: Gets the hub's orders to the rank.
        on_candidates: Gets who could host the hub, whenever that changes.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        task: MonitorTask,
        *,
        on_order: Callable[[m.Order], None],
        on_candidates: Callable[[m.HubCandidates], None],
    ) -> None:
        self._selector, self._task = selector, task
        self._on_order, self._on_candidates = on_order, on_candidates
        self._record = MemberRecord()
        self._joined_with = self._record.standing
        self._life = secrets.token_hex(8)
        self._space = name_space()
        self._known = m.HubCandidates(candidates=())
        self._door = HubListener(selector, task.host, world_size=task.initial_world_size, on_join=self._on_join)
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._search: Search | None = None
        self._calls: PeerProbes | None = None
        self._was_silent = False
        self._last_words: m.Gone | m.Left | None = None
        self._rank_is_gone = False
        self._end_s: float | None = None
        self._is_over = False
        self._next_beat_s = 0.0
        self._answer_s: float | None = None

    # -- for the monitor process -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host port`` where this process could host the hub."""
        return self._door.address

    @property
    def restart_count(self) -> int:
        """The call that the rank was told to enter last; 0 before."""
        return max(0, self._record.standing.restart_count)

    @property
    def is_over(self) -> bool:
        """Whether the hub has nothing more to say to the rank, or the rank to it."""
        return self._is_over

    @property
    def is_done(self) -> bool:
        """Whether nobody needs this process any more, once its rank is gone."""
        if self._hub is not None:
            if self._hub.is_over:
                self._end_hub()
            elif self._hub.serves_others(self._task.initial_rank):
                return False
        return self._last_words is None or self._is_over or (self._end_s is not None and clock.now_s() >= self._end_s)

    def connect(self, order: m.Connect) -> None:
        """JoinHub the hub for the first time, or host it."""
        self._door.token = order.token
        if order.hub == self._door.address:
            self._host_hub()
            return
        self._known = m.HubCandidates(candidates=(m.HubCandidate(initial_rank=0, node="", address=order.hub, life=""),))
        self._find_hub(self._task.limits.barrier_timeout_s)

    def reconnect(self, known: m.Reconnect) -> None:
        """JoinHub the hub in place of a process that is gone."""
        self._door.token, self._last_words = known.token, known.final_report
        self._record = MemberRecord(known.standing)
        # It knows nothing of what a candidate must know, so it is the last one.
        others = [c for c in known.known.candidates if c.initial_rank != self._task.initial_rank]
        self._known = m.HubCandidates(candidates=(*others, self._describe()), members=known.known.members)
        self._find_hub(self._task.heartbeat_timeout_s + _ANSWER_S)

    def report(self, report: m.Report) -> None:
        """Tell the hub what the rank said, or what is said for it."""
        self._record.note_report(report)
        if isinstance(report, m.Left):
            self._last_words = report
        if self._link is None:
            return  # its standing, or its last words, will say it
        self._say(report)
        if isinstance(report, m.RankFault):
            self._demand_answer()

    def end(self, final_report: m.Gone | m.Left) -> None:
        """Tell the hub that the rank is gone; :attr:`is_done` soon."""
        self._rank_is_gone = True
        if not self._door.token:
            self._is_over = True  # nobody knows of it yet
        if self._is_over:
            return
        if self._last_words is None:
            self._last_words = final_report
        self._end_s = clock.now_s() + _LAST_WORDS_S
        if self._link is not None:
            self._say_last_words()

    def look(self, now_s: float) -> float:
        """Do what is due, and return when to look again."""
        due: list[float | None] = [now_s + self._task.heartbeat_timeout_s, self._end_s]
        if self._link is not None:
            due.append(self._look_at_link(now_s))
        self._door.look()
        due.append(self._door.deadline_s)
        if self._search is not None:
            self._search.look()
            due.append(self._search.deadline_s if self._search is not None else now_s)
        if self._calls is not None:
            self._calls.look()
            due.append(self._calls.deadline_s)
        if self._hub is not None:
            self._hub.look()
            due.append(self._hub.deadline_s)
        return min(time_s for time_s in due if time_s is not None)

    def discount_pause(self) -> None:
        """This process did not run for a while: what others said meanwhile is still to be read."""
        if self._link is not None:
            self._link.heard_ns = clock.now_ns()
        if self._hub is not None:
            self._hub.discount_pause()

    def close(self) -> None:
        """Let go of everything.

        Blocks: up to a second for each member that takes nothing.
        """
        if self._search is not None:
            self._search.close()
        if self._calls is not None:
            self._calls.close()
        if self._hub is not None:
            self._end_hub()
        if self._link is not None:
            self._link.drain(_LAST_WORDS_S)
        self._drop_link()
        self._door.close()

    # -- the hub -----------------------------------------------------------------------------------------------

    def _host_hub(self) -> None:
        """Host the hub, and join it."""
        self._search = None
        self._hub = Hub(
            self._selector,
            world_size=self._task.initial_world_size,
            limits=self._task.limits,
            heartbeat_timeout_s=self._task.heartbeat_timeout_s,
            host=self._describe(),
            space=self._space,
            predecessor=self._known if self._known.members else None,
            patience_s=RETURN_S + (min(_SILENT_S, self._task.heartbeat_timeout_s) if self._was_silent else 0.0),
        )
        if self._was_silent:
            self._calls = PeerProbes(self._selector, self._make_join(""))
            for rank, place in self._known.members.items():
                if rank != self._task.initial_rank:
                    self._calls.begin(place.address)
        here, there = socket.socketpair()
        self._hub.adopt(Link(there, is_trusted=True), self._make_join(""))
        self._take_link(Link(here, is_trusted=True), [])

    def _end_hub(self) -> None:
        assert self._hub is not None
        self._hub.close()
        self._hub = None

    def _find_hub(self, timeout_s: float) -> None:
        self._search = Search(
            self._selector,
            self._known.candidates,
            make_join=self._make_join,
            own_life=self._life,
            can_host=not self._rank_is_gone,
            on_found=self._take_link,
            on_host=self._host_hub,
            on_failed=self._fail,
            timeout_s=timeout_s,
        )
        self._search.start()

    def _describe(self) -> m.HubCandidate:
        return m.HubCandidate(
            initial_rank=self._task.initial_rank, node=self._task.node, address=self._door.address, life=self._life
        )

    def _make_join(self, wants: str) -> m.JoinHub:
        task = self._task
        self._joined_with = self._record.standing
        return m.JoinHub(
            token=self._door.token,
            initial_rank=task.initial_rank,
            initial_world_size=task.initial_world_size,
            place=m.MemberPlace(
                node=task.node, space=self._space, pid=task.pid, address=self._door.address, labels=task.labels
            ),
            life=self._life,
            wants=wants,
            standing=self._joined_with,
        )

    def _on_join(self, link: Link, join: m.JoinHub) -> None:
        """A member has come: to the hub, or in search of it."""
        if self._hub is not None and join.wants in ("", self._life):
            return self._hub.adopt(link, join)
        try:
            link.send(m.NotHub(life=self._life, candidates=self._known.candidates))
            link.drain(0.05)
        except LinkBroken as error:
            log.debug("it is gone again: %s", error)
        link.close()
        # It lost the hub: perhaps this process has, too, and does not know it yet.
        return self._demand_answer()

    def _fail(self, reason: str) -> None:
        """There is no hub for this member any more."""
        self._search = None
        if self._rank_is_gone:
            return
        text = f"no hub can be reached ({reason})"
        log.warning("rank %d: %s", self._task.initial_rank, text)
        counts = self._record.standing.fault_counts
        self._order(m.Abort(reason=text, restart_count=self.restart_count, fault_counts=counts))

    # -- the link ----------------------------------------------------------------------------------------------

    def _take_link(self, link: Link, came: list[m.OnLink]) -> None:
        """Use a link to the hub."""
        self._search, self._was_silent = None, False
        self._link, self._answer_s = link, None
        self._next_beat_s = clock.now_s() + self._task.heartbeat_interval_s
        self._selector.register(link, selectors.EVENT_READ, partial(self._on_event, link))
        if self._record.standing != self._joined_with:
            for report in self._record.reports():
                self._say(report)
        if self._last_words is not None:
            self._say_last_words()
        for message in came:
            self._hear(message)

    def _on_event(self, link: Link, events: int) -> None:
        if link is not self._link:
            return
        try:
            if events & selectors.EVENT_WRITE:
                link.flush()
                self._watch()
            if events & selectors.EVENT_READ:
                for message in link.receive():
                    self._hear(message)
        except LinkBroken as error:
            if link is self._link:
                self._lose_link(str(error))

    def _hear(self, message: m.OnLink) -> None:
        match message:
            case m.HubCandidates():
                self._known = message
                self._on_candidates(message)
            case m.Restart() | m.Assign() | m.Go() | m.Finish() | m.Abort() | m.Expel():
                self._order(message)
            case m.Beat():
                pass  # the link has noted when it came
            case other:
                log.warning("unexpected message from the hub: %s", type(other).__name__)

    def _order(self, order: m.Order) -> None:
        self._record.note_order(order)
        is_left_out = isinstance(order, m.Go) and self._task.initial_rank not in order.ranks
        if is_left_out or isinstance(order, m.Finish | m.Abort | m.Expel):
            self._is_over = True
            self._drop_link()
        self._on_order(order)

    def _say(self, message: m.OnLink) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except LinkBroken as error:
            self._lose_link(str(error))
        else:
            self._watch()

    def _say_last_words(self) -> None:
        link, words = self._link, self._last_words
        assert link is not None
        assert words is not None
        self._say(words)
        if self._link is link and self._rank_is_gone:
            link.drain(_LAST_WORDS_S)
            self._drop_link()
            self._is_over = True

    def _look_at_link(self, now_s: float) -> float:
        """Beat, and give up a hub that is silent."""
        assert self._link is not None
        heard_s = self._link.heard_ns / 1e9
        if self._answer_s is not None and heard_s > self._answer_s - _ANSWER_S:
            self._answer_s = None
        due_s = heard_s + self._task.heartbeat_timeout_s
        if self._answer_s is not None:
            due_s = min(due_s, self._answer_s)
        if now_s >= due_s:
            self._was_silent = True
            self._lose_link(f"no sign of life for {now_s - heard_s:.1f} s")
            return now_s
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._task.heartbeat_interval_s
            self._say(m.Beat())
        return min(due_s, self._next_beat_s)

    def _demand_answer(self) -> None:
        """The hub has to show that it lives, soon."""
        if self._link is not None and self._answer_s is None:
            self._answer_s = clock.now_s() + _ANSWER_S
            self._say(m.Beat())

    def _watch(self) -> None:
        assert self._link is not None
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.is_waiting else 0)
        key = self._selector.get_key(self._link)
        if key.events != wanted:
            self._selector.modify(self._link, wanted, key.data)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _lose_link(self, error: str) -> None:
        """The hub cannot be reached over this link: look for it elsewhere."""
        log.info("rank %d: the link to the hub broke: %s", self._task.initial_rank, error)
        self._drop_link()
        if self._hub is not None or self._is_over:
            return
        timeout_s = self._task.heartbeat_timeout_s + _ANSWER_S
        self._find_hub(_LAST_WORDS_S if self._rank_is_gone else timeout_s)
