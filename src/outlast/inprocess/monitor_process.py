"""The monitor process: it watches one rank from outside, and speaks for it.

One per rank, started by its :class:`~outlast.inprocess.monitor_link.MonitorLink`. It carries the rank's reports to the
hub and the hub's orders to the rank; it reports what the rank cannot (that it is gone, that its main thread makes no
progress), and ends a rank that is stuck. One of the monitor processes hosts the hub, beside all that; when it is gone,
the next candidate does (:mod:`outlast.inprocess.candidates`).

It ends with its rank, however that one ends, unless its hub is still needed. It is an event loop in one thread, waits
for deadlines, and imports no torch.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
from functools import partial

import msgspec

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import messages as m
from outlast.inprocess.absences import name_space
from outlast.inprocess.candidates import Search
from outlast.inprocess.hub import Hub
from outlast.inprocess.link import Link, LinkBroken
from outlast.inprocess.monitor_task import MonitorTask
from outlast.inprocess.page import Page
from outlast.inprocess.rank_watch import RankWatch, SoftTimeout
from outlast.inprocess.record import Record

__all__ = ["main"]

log = logging.getLogger("outlast.inprocess.monitor_process")

_GREETING_S = 5.0
"""Seconds in which whoever connects has to say who it is."""
_ANSWER_S = 5.0
"""Seconds in which the hub has to show a sign of life when it is needed."""
_LAST_WORDS_S = 1.0
"""Seconds that a process whose rank is gone has to tell the hub."""
_CLOSED_S = 1.0
"""Seconds between the end of the rank's socket and the end of its process; later, it left the wrapper and lives."""
_LATE_S = 0.5
"""Seconds that this process may be late before it excuses the silence of others by its own."""
_MAX_STRANGERS = 256


class MonitorProcess:
    """One monitor process.

    Args:
        task: What it was told.
        rank: The socket to the rank; this object owns it.
        page: The rank's page.
        pidfd: Of the rank's process.
    """

    def __init__(self, task: MonitorTask, rank: socket.socket, page: Page, pidfd: int) -> None:
        self._task, self._rank, self._page, self._pidfd = task, rank, page, pidfd
        self._selector = selectors.DefaultSelector()
        self._watch = RankWatch(page, task)
        self._record = Record()
        self._joined_with = self._record.standing
        self._life = secrets.token_hex(8)
        self._space = name_space()
        self._token = ""
        self._known = m.Candidates(candidates=())
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._search: Search | None = None
        self._strangers: dict[Link, float] = {}
        self._is_over = False
        """The rank needs no orders any more."""
        self._last_words: m.Gone | m.Left | None = None
        """What the hub must hear, though this process is about to end."""
        self._rank_is_gone = False
        self._end_s: float | None = None
        self._closed_s: float | None = None
        self._kill_s: float | None = None
        self._next_beat_s = 0.0
        self._looked_s = clock.now_s()
        self._answer_s: float | None = None
        self._stuck: m.Fault | None = None
        family = socket.AF_INET6 if ":" in task.host else socket.AF_INET
        self._listener = socket.create_server((task.host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._address = f"{task.host} {self._listener.getsockname()[1]}"
        rank.setblocking(False)
        self._selector.register(rank, selectors.EVENT_READ, self._on_rank)
        self._selector.register(pidfd, selectors.EVENT_READ, self._on_death)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def run(self) -> int:
        """Serve until nobody needs this process; return its exit code."""
        self._tell_rank(m.encode(m.Listening(address=self._address)))
        try:
            while not self._is_done():
                due_s = self._look()
                for key, events in self._selector.select(max(0.0, due_s - clock.now_s())):
                    key.data(events)
        finally:
            self._close()
        return 0

    # -- the loop ----------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        if self._hub is not None:
            if self._hub.is_over:
                self._end_hub()
            elif not self._rank_is_gone or self._hub.serves_others(self._task.initial_rank):
                return False
        if not self._rank_is_gone:
            return False
        if self._last_words is None or self._is_over:
            return True
        return self._end_s is not None and clock.now_s() >= self._end_s

    def _look(self) -> float:
        """Do what is due, and return when to look again."""
        now_s = clock.now_s()
        if now_s > self._looked_s + self._task.process_interval_s + _LATE_S:
            self._excuse_silence()
        self._looked_s = now_s
        due = [now_s + self._task.process_interval_s]
        if not self._rank_is_gone:
            due.append(self._look_at_rank(now_s))
        if self._end_s is not None:
            due.append(self._end_s)
        if self._link is not None:
            due.append(self._look_at_link(now_s))
        for stranger in [link for link, until_s in self._strangers.items() if now_s >= until_s]:
            self._drop_stranger(stranger)
        due.extend(self._strangers.values())
        if self._search is not None:
            self._search.look()
            if self._search is not None and self._search.deadline_s is not None:
                due.append(self._search.deadline_s)
        if self._hub is not None:
            self._hub.look()
            due.append(self._hub.deadline_s)
        return min(due)

    def _excuse_silence(self) -> None:
        """This process was stopped, or starved: what others said meanwhile is still to be read."""
        log.info("this process did not run for a while")
        if self._link is not None:
            self._link.heard_ns = clock.now_ns()
        if self._hub is not None:
            self._hub.excuse_silence()

    def _look_at_rank(self, now_s: float) -> float:
        due = [now_s + self._task.process_interval_s]
        if self._closed_s is not None:
            if now_s >= self._closed_s:
                self._lose_rank(m.Left(reason="the rank left the wrapper"))
                return now_s
            due.append(self._closed_s)
        if self._kill_s is not None:
            if now_s >= self._kill_s:
                self._signal(signal.SIGKILL)
                self._kill_s = None
            else:
                due.append(self._kill_s)
        found, next_ns = self._watch.look(clock.now_ns())
        if isinstance(found, SoftTimeout):
            log.warning("rank %d: %s", self._task.initial_rank, found.summary)
            self._report(self._fault(found.iteration, m.FaultKind.SOFT_TIMEOUT, found.summary))
        elif found is not None and self._stuck is None:
            log.warning("rank %d is ended: %s", self._task.initial_rank, found.summary)
            self._stuck = self._fault(found.iteration, found.kind, found.summary)
            self._signal(signal.SIGKILL)
        if next_ns is not None:
            due.append(next_ns / 1e9)
        return min(due)

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
            self._lose_link(f"no sign of life for {now_s - heard_s:.1f} s")
            return now_s
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._task.heartbeat_interval_s
            self._say(m.Beat())
        return min(due_s, self._next_beat_s)

    def _demand_answer(self) -> None:
        """The hub has to show that it lives, soon."""
        if self._link is not None and self._answer_s is None:
            self._say(m.Beat())
            self._answer_s = clock.now_s() + _ANSWER_S

    # -- the rank ----------------------------------------------------------------------------------------------

    def _on_rank(self, _: int) -> None:
        if (data := self._receive()) is None:
            return
        if data:
            self._hear_rank(data)
        else:
            self._selector.unregister(self._rank)
            self._closed_s = clock.now_s() + (0.0 if self._is_over or self._last_words else _CLOSED_S)

    def _receive(self) -> bytes | None:
        """Return a packet of the rank's; empty: it was the last one; ``None``: there is none now."""
        try:
            return self._rank.recv(m.MAX_PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _hear_rank(self, data: bytes) -> None:
        match m.decode_from_rank(data):
            case m.Connect(hub=hub, token=token):
                self._token = token
                if hub == self._address:
                    self._host_hub()
                else:
                    self._known = m.Candidates(candidates=(m.Candidate(initial_rank=0, node="", address=hub, life=""),))
                    self._find_hub(self._task.limits.barrier_timeout_s)
            case m.Reconnect() as known:
                self._token, self._last_words = known.token, known.last_words
                self._record = Record(known.standing)
                # It knows nothing of what a candidate must know, so it is the last one.
                own = m.Candidate(
                    initial_rank=self._task.initial_rank, node=self._task.node, address=self._address, life=self._life
                )
                others = [c for c in known.known.candidates if c.initial_rank != self._task.initial_rank]
                self._known = m.Candidates(candidates=(*others, own), members=known.known.members)
                self._find_hub(self._task.heartbeat_timeout_s + _ANSWER_S)
            case report:
                self._report(report)

    def _on_death(self, _: int) -> None:
        while data := self._receive():
            self._hear_rank(data)  # what it said before it ended
        fault = self._stuck or self._fault(
            max(0, self._record.standing.iteration), m.FaultKind.DIED, "its process is gone"
        )
        if not self._is_over and self._last_words is None:
            log.info("rank %d (pid %d) is gone", self._task.initial_rank, self._task.pid)
        self._lose_rank(m.Gone(fault=fault))

    def _lose_rank(self, last_words: m.Gone | m.Left) -> None:
        """The rank is gone, or left."""
        if self._rank_is_gone:
            return
        self._rank_is_gone, self._closed_s, self._kill_s = True, None, None
        for watched in (self._pidfd, self._rank):
            try:
                self._selector.unregister(watched)
            except KeyError:
                pass  # the socket ended before
        if self._is_over:
            return
        if self._last_words is None:
            self._last_words = last_words
        self._end_s = clock.now_s() + _LAST_WORDS_S
        if self._link is not None:
            self._say_last_words()

    def _report(self, report: m.Report) -> None:
        """Tell the hub what the rank said, or what is said for it."""
        self._record.note_report(report)
        if isinstance(report, m.Left):
            self._last_words = report
        if self._link is None:
            return  # its standing, or its last words, will say it
        self._say(report)
        if isinstance(report, m.Fault):
            self._demand_answer()

    def _fault(self, iteration: int, kind: m.FaultKind, summary: str) -> m.Fault:
        return m.Fault(initial_rank=self._task.initial_rank, iteration=iteration, kind=kind, summary=summary)

    def _order(self, order: m.Order) -> None:
        """Give the rank an order."""
        self._record.note_order(order)
        match order:
            case m.Go(iteration=iteration, ranks=ranks):
                if ranks.get(self._task.initial_rank) is not None:
                    self._watch.note_go(iteration, clock.now_ns())
                elif self._task.initial_rank not in ranks:
                    self._is_over = True
            case m.Restart():
                self._watch.note_leave(clock.now_ns())
            case m.Finish() | m.Abort():
                self._is_over = True
                self._watch.note_leave(clock.now_ns())
            case m.Expel():
                self._is_over = True
                self._expel()
        if not self._rank_is_gone:
            self._tell_rank(m.encode(order))

    def _expel(self) -> None:
        """End a rank that counts as dead: at once where it is stuck, with a grace period otherwise."""
        log.warning("rank %d is expelled", self._task.initial_rank)
        grace_s = self._task.termination_grace_s
        if grace_s > 0:
            self._signal(signal.SIGTERM)
        self._kill_s = clock.now_s() + grace_s

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile

    def _tell_rank(self, data: bytes) -> None:
        try:
            self._rank.send(data)
        except OSError as error:
            log.debug("the rank takes nothing: %s", error)  # its end is seen elsewhere

    # -- the hub -----------------------------------------------------------------------------------------------

    def _host_hub(self) -> None:
        """Host the hub, and join it."""
        heritage = self._known if self._known.members else None
        own = m.Candidate(
            initial_rank=self._task.initial_rank, node=self._task.node, address=self._address, life=self._life
        )
        self._search = None
        self._hub = Hub(
            self._selector,
            world_size=self._task.initial_world_size,
            limits=self._task.limits,
            heartbeat_timeout_s=self._task.heartbeat_timeout_s,
            host=own,
            space=self._space,
            heritage=heritage,
        )
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

    def _make_join(self, wants: str) -> m.Join:
        self._joined_with = self._record.standing
        return m.Join(
            token=self._token,
            initial_rank=self._task.initial_rank,
            initial_world_size=self._task.initial_world_size,
            place=m.MemberPlace(node=self._task.node, space=self._space, pid=self._task.pid, labels=self._task.labels),
            address=self._address,
            life=self._life,
            wants=wants,
            standing=self._record.standing,
        )

    def _take_link(self, link: Link, came: list[m.OnLink]) -> None:
        """Use a link to the hub."""
        self._search = None
        self._link, self._answer_s = link, None
        self._next_beat_s = clock.now_s() + self._task.heartbeat_interval_s
        self._selector.register(link, selectors.EVENT_READ, partial(self._on_link, link))
        if self._record.standing != self._joined_with:
            for report in self._record.reports():
                self._say(report)
        if self._last_words is not None:
            self._say_last_words()
        for message in came:
            self._hear(message)

    def _on_link(self, link: Link, events: int) -> None:
        if link is not self._link:
            return
        try:
            if events & selectors.EVENT_WRITE:
                link.flush()
                self._watch_link()
            if events & selectors.EVENT_READ:
                for message in link.receive():
                    self._hear(message)
        except LinkBroken as error:
            if link is self._link:
                self._lose_link(str(error))

    def _hear(self, message: m.OnLink) -> None:
        match message:
            case m.Candidates():
                self._known = message
                self._tell_rank(m.encode(message))
            case m.Restart() | m.Assign() | m.Go() | m.Finish() | m.Abort() | m.Expel():
                self._order(message)
                if self._is_over:
                    self._drop_link()
            case m.Beat():
                pass  # the link has noted when it came
            case other:
                log.warning("the hub said %s", type(other).__name__)

    def _say(self, message: m.OnLink) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except LinkBroken as error:
            self._lose_link(str(error))
        else:
            self._watch_link()

    def _say_last_words(self) -> None:
        if self._link is None or self._last_words is None:
            return
        link, words = self._link, self._last_words
        self._say(words)
        if self._link is link:
            link.drain(_LAST_WORDS_S)
            if self._rank_is_gone:
                self._drop_link()
                self._is_over = True

    def _watch_link(self) -> None:
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

    def _fail(self, reason: str) -> None:
        """There is no hub for this member any more."""
        self._search = None
        if self._rank_is_gone:
            return
        text = f"no hub can be reached ({reason})"
        log.warning("rank %d: %s", self._task.initial_rank, text)
        standing = self._record.standing
        self._order(m.Abort(reason=text, iteration=max(0, standing.iteration), fault_counts=standing.fault_counts))

    # -- those who connect -------------------------------------------------------------------------------------

    def _on_connection(self, _: int) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError as error:
            log.debug("no connection after all: %s", error)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        link = Link(connection, is_trusted=False)
        self._strangers[link] = clock.now_s() + _GREETING_S
        self._selector.register(link, selectors.EVENT_READ, partial(self._on_stranger, link))

    def _on_stranger(self, link: Link, _: int) -> None:
        try:
            came = link.receive()
        except LinkBroken as error:
            log.debug("a stranger: %s", error)
            return self._drop_stranger(link)
        if not came:
            return None
        join = came[0]
        if not isinstance(join, m.Join) or not self._is_genuine(join):
            log.warning("whoever connects does not know the secret of this job; the connection is closed")
            return self._drop_stranger(link)
        if self._hub is not None and join.wants in ("", self._life):
            del self._strangers[link]
            self._selector.unregister(link)
            self._hub.adopt(link, join)
            return None
        try:
            link.send(m.NotHub(life=self._life, candidates=self._known.candidates))
            link.drain(0.05)
        except LinkBroken as error:
            log.debug("it is gone again: %s", error)
        self._drop_stranger(link)
        # It lost the hub: perhaps this process has, too, and does not know it yet.
        self._demand_answer()
        return None

    def _is_genuine(self, join: m.Join) -> bool:
        return (
            bool(self._token)
            and hmac.compare_digest(join.token.encode(), self._token.encode())
            and join.initial_world_size == self._task.initial_world_size
            and 0 <= join.initial_rank < join.initial_world_size
        )

    def _drop_stranger(self, link: Link) -> None:
        del self._strangers[link]
        self._selector.unregister(link)
        link.close()

    def _close(self) -> None:
        if self._search is not None:
            self._search.close()
        if self._hub is not None:
            self._end_hub()
        if self._link is not None:
            self._link.drain(_LAST_WORDS_S)
        self._drop_link()
        for link in list(self._strangers):
            self._drop_stranger(link)
        self._listener.close()
        self._rank.close()
        os.close(self._pidfd)
        self._selector.close()
        self._page.close()


def main(arguments: list[str] | None = None) -> int:
    """Run as a monitor process; return its exit code."""
    rank_fd, page_fd, text = sys.argv[1:] if arguments is None else arguments
    task = msgspec.json.decode(text, type=MonitorTask)
    if task.log_path:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", filename=task.log_path)
    else:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        pidfd = os.pidfd_open(task.pid)
    except ProcessLookupError:
        return 0
    if os.getppid() != task.pid:  # the rank ended before the descriptor was there
        return 0
    try:
        return MonitorProcess(task, socket.socket(fileno=int(rank_fd)), Page(int(page_fd)), pidfd).run()
    except OutlastError:
        log.exception("rank %d is watched no more", task.initial_rank)
        return 1


if __name__ == "__main__":
    sys.exit(main())
