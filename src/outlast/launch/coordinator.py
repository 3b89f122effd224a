"""The coordinator, one per job: decides which nodes start when, and what follows the end of a cycle.

A state machine without I/O: messages and time go in, messages come out. :mod:`outlast.launch.coordinator_server` feeds
it. A cycle costs O(nodes) messages. The phases::

    ADOPTING   a new coordinator for a job in progress: agents register the places that they hold
    FORMING    nodes join; once every slot has a ready node -> Prepare to the first slot's node
    PREPARING  that node opened the cycle's store -> Start to every slot's node
    RUNNING    until a node fails, hangs or is lost, or all have finished
    FORMING    again: CycleOver was sent to all; each node joins with what it knows of the ended cycle. Once all holders
               of slots have joined or are lost, the recovery policy decides once, on the cause among all incidents
    OVER       Stop was sent to all

Every phase has a time limit: a node that does not open the store, start its workers or report a cycle's end in time is
lost. Where several coordinators are possible, only one with the quorum of the last cycle's members forms another cycle
(:mod:`outlast.policy.leadership`); one without it waits for ``join_timeout`` and then stops the job here, for the
scheduler. Nodes are judged by whether their heartbeat counters advance, on this process's monotonic clock.

Rejected: a shared blob changed by compare-and-swap (O(nodes^2) retries), and leaderless arrival counters (a joiner that
dies between two operations leaves a gap that no other node can close).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from outlast.errors import ExitReason
from outlast.incidents import Decision, EventKind, RecoveryLevel
from outlast.launch import protocol as m
from outlast.launch.decisions import (
    CycleEnding,
    Effects,
    Learn,
    Record,
    RecoveryStateClient,
    RestartReports,
    departure,
    describe_notice,
    highest_committed,
    highest_durable,
    observations,
)
from outlast.launch.excluded_nodes import ExcludedNodes
from outlast.launch.in_process_restarts import InProcessRestarts
from outlast.launch.job_settings import JobSettings
from outlast.launch.membership import Adoption, Forming, Node, Nodes, Outbox, Quorum, why_it_waits
from outlast.policy.causes import OWN_DECISIONS
from outlast.policy.leadership import Leadership
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Members:
    """The members of the cycle that runs on all of its nodes, for the quorum of the next one."""

    places: dict[str, m.SlotPlace] = field(default_factory=dict)
    coming: list[str] = field(default_factory=list)
    """Spares that came later; members once all holders of slots know the new number of spares."""
    counted: set[str] = field(default_factory=set)
    """Holders that know the new number of spares."""
    num_spares: int = 0

    def __post_init__(self) -> None:
        self.num_spares = next((place.num_spares for place in self.places.values()), 0)


def _limits(settings: JobSettings) -> Limits:
    """Return the limits of a job; a restart delay must not exceed the agents' ``join_timeout``."""
    delay_s = min(settings.limits.max_restart_delay_s, settings.join_timeout_s)
    return replace(settings.limits, max_restart_delay_s=delay_s)


class Coordinator:
    """Form cycles and end them.

    Args:
        settings: The job's settings.
        state: The recovery policy's state.
        tell_time: Returns the wall-clock time as text, for the policy's history.
        stop: Why the job is over before it begins; ``None``: it begins unless the state says that it has finished.

    Thread: one.
    """

    def __init__(
        self,
        settings: JobSettings,
        state: RecoveryState,
        *,
        format_time: Callable[[], str] = str,
        stop: m.Stop | None = None,
    ) -> None:
        self.settings = settings
        self.nodes = Nodes(settings.num_slots)
        self._effects: Effects = []
        self._recovery_state = RecoveryStateClient(
            state, _limits(settings), nodes=self.nodes, effects=self._effects, format_time=format_time
        )
        self.cycle = 0
        """The cycle that forms or runs."""
        self._newest_elsewhere = -1
        """The newest cycle that nodes joined under other coordinators; its number is not reused."""
        self.phase = m.JobPhase.ADOPTING if settings.former_host is not None else m.JobPhase.FORMING
        if stop is None and state.finished:
            stop = m.Stop(exit_code=ExitReason.FINISHED, reason="the run is finished")
        self.stop = stop
        if stop is not None:
            self.phase = m.JobPhase.OVER
        self._noted_forming: tuple[int, bool] | None = None
        self.ending: CycleEnding | None = None
        """The ending cycle, until all of its nodes have reported."""
        self._adoption = Adoption(settings.num_slots, settings.term - 1)
        self._quorum = Quorum(settings, self.nodes)
        self._forming = Forming(settings, self.nodes, self._quorum)
        self._term = settings.term
        self._places: dict[str, m.SlotPlace] = {}
        """Places of the nodes of a cycle that not all nodes have started yet; empty: they have."""
        self._master: m.Master | None = None
        """Address of the cycle's store while votes for the cycle are counted."""
        self._votes: set[str] = set()
        """Nodes that know of the prepared cycle."""
        self._started: set[str] = set()
        self._newest_trained = -1
        """The newest cycle in which a rank completed a step."""
        self._ranks = InProcessRestarts()
        self._members = _Members()
        self._phase_since_s: float | None = None
        """Since when this phase waits for nodes."""
        self._excluded = ExcludedNodes(self.nodes, self._recovery_state, self._effects)
        self.finished: dict[str, m.CycleFacts] = {}
        """Nodes whose workers all finished the running cycle; a finished node may exit before the others."""
        self._restarts = RestartReports()
        """In-process restarts of the running cycle."""
        self._detected: dict[str, int] = {}
        """Nodes whose agents received a shutdown signal, and its number."""
        self._over_at_s: float | None = None
        self._running_since_s: float | None = None
        """When the newest cycle started; ``None``: under another coordinator."""
        self._restart_at_s: float | None = None
        """When the next cycle may start after repeated failures; ``None``: as soon as its nodes are ready."""
        self._dropped: list[tuple[str, str]] = []

    @property
    def state(self) -> RecoveryState:
        return self._recovery_state.state

    @property
    def leadership(self) -> Leadership:
        """How this coordinator stands, for other coordinators of the job. Thread: any."""
        leads = self.phase == m.JobPhase.OVER or self._quorum.leads
        return Leadership(term=self._term, leads=leads, order=self.settings.order)

    def note_term(self, term: int, is_own: bool) -> None:
        """Raise this coordinator's term above one that an agent has obeyed under another coordinator."""
        if not is_own and term >= self._term:
            self._term = self._ranks.term = term + 1

    def status(self, now_s: float, *, time: str, run_id: str, run_dir: Path | None) -> m.LiveStatus:
        """Return the job's live status.

        Args:
            now_s: Monotonic seconds.
            time: The same moment as text.
            run_id: Name of the run.
            run_dir: The run directory on the coordinator's node.
        """
        slots: dict[str, tuple[int, int]] = {}
        first_rank = 0
        for index, held in enumerate(self.nodes.slots):
            if held.holder is not None:
                slots[held.holder] = index, first_rank
            first_rank += held.nproc or 0
        nodes = []
        for node in self.nodes:
            slot, first = slots.get(node.name, (None, None))
            nproc = node.candidate.nproc
            nodes.append(m.LiveNode(name=node.name, slot=slot, first_rank=first, nproc=nproc, ready=node.ready))
        is_forming = self.phase == m.JobPhase.FORMING and self.ending is None
        return m.LiveStatus(
            time=time,
            run_id=run_id,
            job=self.settings.job,
            host=self.settings.host,
            run_dir=None if run_dir is None else str(run_dir),
            phase=str(self.phase),
            cycle=self.cycle,
            nodes=tuple(nodes),
            num_slots=len(self.nodes.slots),
            lack=self._forming.lack(now_s) if is_forming else None,
            budgets=m.LiveBudgets.of(self.state, self.settings.limits),
            best_durable=self.state.best_durable,
            best_committed=self.state.newest_iteration,
            quarantined=self.state.quarantined,
            held_back=self.state.held_back,
            exit_code=None if self.stop is None else self.stop.exit_code,
            reason=None if self.stop is None else self.stop.reason,
        )

    def resettle(self, settings: JobSettings) -> None:
        """Continue with other settings of the same job."""
        self.settings = self._forming.settings = settings
        self._recovery_state.limits = _limits(settings)

    # -- what comes in -----------------------------------------------------------------------------------------

    def handle(self, message: m.ToCoordinator, now_s: float) -> Outbox:
        """Handle one message; return the messages to send."""
        match message:
            case m.JoinRequest():
                self._on_join(message, now_s)
            case m.NameClaim():
                self._on_claim(message)
            case m.Register():
                self._on_register(message, now_s)
            case m.Unhealthy():
                self._on_unhealthy(message, now_s)
            case m.RankStandings() | m.RankReports():
                self._on_ranks(message, now_s)
                return self.nodes.take_out()  # the job is as before
            case m.CoordinatorTick():
                self._report_spares()
                self._ranks.look(now_s)
                self._order_ranks()
            case m.ScriptSettings():
                pass
            case _:
                node = self.nodes.by_name.get(message.node)
                if node is None or node.epoch != message.epoch:
                    if isinstance(message, m.Dead | m.Bye):
                        self.nodes.drop_claim(message.node, message.epoch)
                    log.debug("message of an earlier start of node %s ignored", message.node)
                else:
                    self._on_known(message, node, now_s)
        self._advance(now_s)
        return self.nodes.take_out()

    def judge_heartbeats(
        self,
        heartbeats: Mapping[str, int],
        now_s: float,
        *,
        since_last_s: float,
        silences_s: Mapping[str, float] = MappingProxyType({}),
    ) -> Outbox:
        """Declare nodes lost whose heartbeats do not advance.

        Args:
            heartbeats: Heartbeat counter by node.
            now_s: Monotonic seconds.
            since_last_s: Seconds since the last call; after a long pause of this process no node is judged.
            silences_s: Seconds since anything came from a node's agent.
        """
        timeout_s = self.settings.node_timeout_s
        alive, silent = self.nodes.judge_heartbeats(
            heartbeats,
            now_s,
            timeout_s=timeout_s,
            loop_timeout_s=timeout_s * self.settings.loop_timeout_factor,
            paused=since_last_s > timeout_s / 2,
            silences_s=silences_s,
        )
        for node in alive:
            self.nodes.refuse_claim(node)
        for node in silent:
            silent_s = now_s - node.heartbeat_at_s
            why = f"no heartbeat for {silent_s:.1f} s"
            if silences_s.get(node.name, silent_s) < timeout_s / 2:
                why = f"its agent's main loop has not run for {silent_s:.1f} s"
            self._lose(node, why, now_s)
        self._advance(now_s)
        return self.nodes.take_out()

    @property
    def deadline_s(self) -> float | None:
        """When to handle a :class:`~outlast.launch.protocol.CoordinatorTick`; ``None``: not before a message comes."""
        due = (self._restart_at_s, self._ranks.deadline_s)
        return min((one for one in due if one is not None), default=None)

    # -- restarts inside the processes -------------------------------------------------------------------------

    def _on_ranks(self, message: m.RankStandings | m.RankReports, now_s: float) -> None:
        is_new = self.phase == m.JobPhase.FORMING and not self.nodes.holders
        if is_new or self.phase == m.JobPhase.ADOPTING:
            self._ranks.keep(message)  # it precedes its node's Register
            return
        node = self.nodes.by_name.get(message.node)
        if node is not None and node.epoch == message.epoch and self.nodes.holds_slot(node):
            self._ranks.take(message, now_s)
            self._order_ranks()

    def _order_ranks(self) -> None:
        orders, self._ranks.out = self._ranks.out, []
        self.nodes.out += orders

    @property
    def may_close(self) -> bool:
        """Whether the job is over and every living node has received its Stop."""
        return self.phase == m.JobPhase.OVER and self._over_at_s is not None and not self.nodes.by_name

    def should_give_up_on_goodbyes(self, now_s: float) -> bool:
        """Return whether the time for nodes to receive Stop is over."""
        return self._over_at_s is not None and now_s - self._over_at_s > self.settings.goodbye_timeout_s

    def take_admissions(self) -> list[tuple[str, str, str | None]]:
        """Return the decided claims of names: node, epoch, and the reason for a refusal, ``None``: admitted."""
        admissions, self.nodes.admissions = self.nodes.admissions, []
        return admissions

    def take_dropped(self) -> list[tuple[str, str]]:
        """Return the nodes and epochs declared lost since the last call; one that is alive must register again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_effects(self) -> Effects:
        """Return what the host must do before it sends the messages returned with it."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # -- joining and leaving -----------------------------------------------------------------------------------

    def _on_claim(self, claim: m.NameClaim) -> None:
        """Admit a new agent, unless another agent of its name may be alive: the next heartbeats decide that."""
        node = self.nodes.by_name.get(claim.node)
        if node is None or node.epoch == claim.epoch:
            self.nodes.admissions.append((claim.node, claim.epoch, None))
        else:
            self.nodes.claims[claim.node] = claim

    def _settle_claims(self, now_s: float) -> None:
        """Admit the agents that claimed the name of a node that is lost by now."""
        for name in [name for name in self.nodes.claims if name not in self.nodes.by_name]:
            claim = self.nodes.claims.pop(name)
            if isinstance(claim, m.NameClaim):
                self._on_claim(claim)
            else:
                self._on_join(claim, now_s)

    def _on_join(self, join: m.JoinRequest, now_s: float) -> None:
        node = self.nodes.by_name.get(join.node)
        if node is not None and node.epoch != join.epoch:
            # Two agents of one name, or a restarted one whose end was not detected yet: the next heartbeats decide
            # that.
            self.nodes.claims[join.node] = join
            return
        if node is None:
            node = self._add(join, now_s)
        if self.stop is not None:
            self._over_at_s = self._over_at_s or now_s
            self.nodes.send(node, self.stop)
            return
        if self._holds_running(node) and (join.ended is None or join.ended.cycle != self.cycle):
            # The request was sent before the node received its Start, perhaps over an older connection.
            if self._send_start_again(node):
                return
            self._end_cycle(f"node {node.name} left the cycle", examine=False, but=node)
        self.nodes.mark(node, ready=True)
        self.finished.pop(node.name, None)
        if join.ended is not None:
            self._take_facts(join.ended, node)
        if node.name in self.state.quarantined or (
            self.phase == m.JobPhase.RUNNING and not self.nodes.holds_slot(node)
        ):
            self.nodes.send(node, m.Wait(reason=why_it_waits(node, self.state)))
            self._count_spares()

    def _add(self, message: m.JoinRequest | m.Register, now_s: float) -> Node:
        node = self.nodes.add(message, now_s)
        spare = self.nodes.num_joins > len(self.nodes.slots)
        self._record(EventKind.NODE_JOINED, {"name": node.name, "spare": spare})
        self._excluded.admit(node)
        if self.state.number or isinstance(message, m.JoinRequest):
            self.nodes.out.append((node.name, node.epoch, m.Decided(recovery_state=self.state)))
        return node

    def _on_register(self, message: m.Register, now_s: float) -> None:
        if any(
            place is not None and place.num_slots > self.settings.num_slots for place in (message.place, message.ran)
        ):
            # A world may shrink but never grows: agents of one command cannot differ in its size.
            log.warning(
                "node %s reports a place in a larger world than this job's: the node starts from the beginning",
                message.node,
            )
            message = msgspec.structs.replace(message, place=None, ran=None)
        node = self.nodes.by_name.get(message.node)
        if node is not None and node.epoch != message.epoch:
            node = self._replace_older(node, message)
            if node is not None:
                return
        if node is not None and self.phase != m.JobPhase.ADOPTING:
            # The same coordinator as before: its last message may have been lost with the connection.
            self._quorum.register(message)
            if message.running and message.place and message.place.cycle != self.cycle:
                reason = f"cycle {self.cycle} began without this node"
                self.nodes.send(node, m.CycleOver(cycle=message.place.cycle, reason=reason))
            elif (last := node.last) is not None:
                if not self._send_start_again(node):
                    self.nodes.send(node, last)
                if self.phase == m.JobPhase.RUNNING and self._members.places:
                    self._notify_ran(node)
            self._report_finished([node.name])
            return
        if self.stop is not None:
            self.nodes.out.append((message.node, message.epoch, self.stop))
            return
        for place in (message.place, message.ran):
            self._newest_elsewhere = max(self._newest_elsewhere, -1 if place is None else place.cycle)
        node = node or self._add(message, now_s)
        if message.recovery_state is not None:
            self._recovery_state.learn(message.recovery_state)
        if self.phase == m.JobPhase.FORMING and not self.nodes.holders and message.place is not None:
            self.phase = m.JobPhase.ADOPTING  # this agent was restarted, and hosts for a job in progress
            self._quorum.adopt()
        elif self.phase == m.JobPhase.FORMING:
            self.cycle = max(self.cycle, self._newest_elsewhere + 1)
        self._quorum.register(message)
        if self.phase == m.JobPhase.ADOPTING:
            self._adoption.register(message, now_s)
            self.nodes.mark(node, ready=not message.running)
        elif message.running:
            self.nodes.mark(node, ready=False)
            self.nodes.send(
                node,
                m.CycleOver(
                    cycle=message.place.cycle if message.place else -1, reason="its agent reconnected too late"
                ),
            )

    def _replace_older(self, node: Node, message: m.Register) -> Node | None:
        """Stop the older of two agents of one name that both take part in the job.

        Returns:
            The known node if it keeps the name; ``None``: it was removed.
        """
        adopts = self.phase == m.JobPhase.ADOPTING
        if adopts and message.place is None:
            return node  # in no cycle: its JoinRequest follows, and is a claim
        held = self._quorum.place_of(node)
        is_newer = held is None or (message.place is not None and message.place.order > held.order)
        knows_other = not self._quorum.is_here or self._quorum.knows_newer(message)
        if not adopts and self._quorum.is_asked and knows_other:
            self._quorum.register(message)  # the cycle that it knows of may continue elsewhere
            return node
        older = node.epoch if adopts and is_newer else message.epoch
        log.warning("an earlier agent of node %s is stopped: another agent of that name has taken its place", node.name)
        reason = f"another agent has taken the place of node {node.name!r}; this one ends its workers and exits"
        stop = m.Stop(exit_code=ExitReason.FAILED, reason=reason, is_replaced=True)
        self.nodes.out.append((node.name, older, stop))
        if older == message.epoch:
            return node
        self.nodes.remove(node.name)
        return None

    def _holds_running(self, node: Node) -> bool:
        """Return whether a node takes part in the running cycle."""
        return self.phase == m.JobPhase.RUNNING and self.nodes.holds_slot(node) and not node.ready

    def _send_start_again(self, node: Node) -> bool:
        """Send a node its Start again if that was the last message to it; return whether it was."""
        if not isinstance(last := node.last, m.Start):
            return False
        # The node was welcomed in the newest term and obeys no older one.
        self.nodes.send(node, msgspec.structs.replace(last, term=self._term))
        return True

    def _adopt(self, now_s: float) -> None:
        """Take over the job from what the agents registered."""
        adoption, self.phase = self._adoption, m.JobPhase.FORMING
        if adoption.newest is None:
            return  # no node was in a cycle: the job begins
        self.cycle, self.nodes.slots = adoption.newest.cycle, adoption.slots
        num_claims, num_slots = len(adoption.claims), adoption.num_slots
        log.warning("took over the job in cycle %d: %d of %d nodes registered", self.cycle, num_claims, num_slots)
        for name, place in adoption.running.items():
            if adoption.is_stale(name) and (node := self.nodes.by_name.get(name)) is not None:
                reason = f"cycle {self.cycle} began without this node"
                self.nodes.send(node, m.CycleOver(cycle=place.cycle, reason=reason))
        self.finished = {name: facts for name, facts in self.finished.items() if facts.cycle == self.cycle}
        if adoption.is_running:
            self.phase = m.JobPhase.RUNNING
            self._ranks.take_over(self.cycle, self._term, self.nodes.holders, now_s)
            self._order_ranks()
            return
        self._ranks.close()
        if self.nodes.holders.isdisjoint(self.nodes.by_name):  # no node that knows is left
            self._newest_trained = self.cycle
        reason = "the coordinator's node is gone" if adoption.missing else "the cycle was ending"
        self.ending = self._end_cycle(reason, examine=False, but=None)
        for name, why in adoption.lost.items():
            if name in self.nodes.holders:
                incident = self.ending.lose(name, why)
                self._record(EventKind.INCIDENT, {"incident": incident})
        for slot in adoption.missing:
            name, why = "", f"it held slot {slot} and did not come to the new coordinator"
            if slot == adoption.lost_slot:
                name, why = (
                    self.settings.former_host or "",
                    f"it held slot {slot} and was lost together with the coordinator",
                )
            incident = self.ending.lose(name, why)
            self._record(EventKind.INCIDENT, {"incident": incident})
        for name, facts in adoption.ended.items():
            if (node := self.nodes.by_name.get(name)) is not None:
                self._take_facts(facts, node)

    def _on_known(self, message: m.ToCoordinator, node: Node, now_s: float) -> None:
        match message:
            case m.Master() if (
                self.phase == m.JobPhase.PREPARING
                and message.cycle == self.cycle
                and node.name == self.nodes.slots[0].holder
                and self._master is None
            ):
                self._master = message
                self._places = self._forming.place_nodes(self.cycle, self.state, term=self._term)
                self._votes = set(self.nodes.holders)
                if not self._quorum.is_held_by(self._votes):
                    self._forming.notify_spares(self._places, self.state)  # they vote, and must know the cycle
                self._start_if_held(now_s)
            case m.Counted() if self.phase == m.JobPhase.PREPARING and (message.term, message.cycle) == (
                self._term,
                self.cycle,
            ):
                self._votes.add(node.name)
                self._start_if_held(now_s)
            case m.Counted() if self.phase == m.JobPhase.RUNNING:
                self._on_counted(message, node)
            case m.Running() if self.phase == m.JobPhase.RUNNING and message.cycle == self.cycle:
                self._on_running(node)
            case m.Stepped():
                self._newest_trained = max(self._newest_trained, message.cycle)
            case m.Restarted() if self.phase == m.JobPhase.RUNNING and message.cycle == self.cycle:
                self._charge_restart(self._restarts.add(message, now_s), now_s)
            case m.Hung() if self.phase == m.JobPhase.RUNNING and message.cycle == self.cycle:
                ending = self._end_cycle(message.incident.describe(), examine=True, but=None)
                ending.incidents.append(message.incident)
                ending.expired.extend(message.expired)
            case m.Finished() if self.phase == m.JobPhase.ADOPTING or (
                message.facts.cycle == self.cycle and self.phase == m.JobPhase.RUNNING
            ):
                self.finished[node.name] = message.facts
                self._finish_if_all(now_s)
                if len(self.finished) == 1:
                    self._report_finished(self.nodes.holders)
            case m.Detected():
                self._detected[node.name] = message.signal
            case m.Leave():
                self._on_leave(message, node, now_s)
            case m.Dead():
                self._lose(node, message.reason, now_s, is_known=message.is_known)
            case m.Bye() if (
                self.phase == m.JobPhase.OVER
                or node.name in self.finished
                or (node.ready and not (self.phase == m.JobPhase.PREPARING and self.nodes.holds_slot(node)))
            ):
                self._quorum.note_dead(node)
                self.nodes.remove(node.name)
            case m.Bye():
                self._lose(node, "its agent left", now_s, is_known=True)

    def _start_if_held(self, now_s: float) -> None:
        """Start the prepared cycle once the nodes that know of it are a quorum."""
        if self._master is None or not self._quorum.is_held_by(self._votes):
            return
        master, self._master = self._master, None
        self._enter(m.JobPhase.RUNNING, now_s)
        self._running_since_s = now_s
        self._restarts, self._started = RestartReports(), set()
        self._ranks.begin(self.cycle, self._term)
        self._forming.start(self._places, master.addr, master.port, self.state)

    def _on_running(self, node: Node) -> None:
        """Note that a node has started its workers; once all have, they are the job's members."""
        self._started.add(node.name)
        if self._places and self.nodes.holders <= self._started:
            self._quorum.note_ran(self._places)
            self._members = _Members(self._places)
            for member in self.nodes.present(self._places):
                self._notify_ran(member)
            self._places, self._phase_since_s = {}, None
            self._count_spares()

    def _notify_ran(self, node: Node) -> None:
        """Send a node the number of spares of the running cycle; it does not replace the node's last order."""
        num_spares = self._members.num_spares + len(self._members.coming)
        self.nodes.out.append((node.name, node.epoch, m.Ran(cycle=self.cycle, num_spares=num_spares)))

    def _report_spares(self) -> None:
        """Send the nodes the number of waiting spares if it has changed since the cycle began.

        With several endpoints :meth:`_count_spares` does that, as the number decides which part of the job leads.
        """
        if self._quorum.is_asked or self.phase != m.JobPhase.RUNNING or self._places or not self._members.places:
            return
        num_spares = len(self.nodes.spares(self.state.quarantined))
        if num_spares != self._members.num_spares:
            self._members.num_spares = num_spares
            for holder in self.nodes.present(self.nodes.holders):
                self._notify_ran(holder)

    def _count_spares(self) -> None:
        """Make late spares members; first every holder must know their number, as it counts for the quorum."""
        members = self._members
        if not self._quorum.is_asked or self.phase != m.JobPhase.RUNNING or self._places or members.coming:
            return
        spares = self.nodes.spares(self.state.quarantined)
        if not members.places or not (coming := [node.name for node in spares if node.name not in members.places]):
            return
        members.coming, members.counted = coming, set()
        for holder in self.nodes.present(self.nodes.holders):
            self._notify_ran(holder)

    def _on_counted(self, counted: m.Counted, node: Node) -> None:
        members = self._members
        num_spares = members.num_spares + len(members.coming)
        if not members.coming or (counted.cycle, counted.num_spares) != (self.cycle, num_spares):
            return
        members.counted.add(node.name)
        if not self.nodes.holders <= members.counted:
            return
        first = next(iter(members.places.values()))
        for number, name in enumerate(members.coming, members.num_spares):
            members.places[name] = msgspec.structs.replace(first, slot=None, spare=number, num_spares=num_spares)
        for spare in self.nodes.present(members.coming):
            self.nodes.send(spare, m.Wait(reason=why_it_waits(spare, self.state), place=members.places[spare.name]))
        self._quorum.admit({name: members.places[name] for name in members.coming})
        coming, members.num_spares, members.coming = members.coming, num_spares, []
        for spare in self.nodes.present(coming):
            self._notify_ran(spare)
        self._count_spares()

    def _record(self, kind: EventKind, data: dict[str, object]) -> None:
        self._effects.append(Record(kind, self.cycle, data))

    def _enter(self, phase: m.JobPhase, now_s: float) -> None:
        """Begin a phase that waits for nodes."""
        self.phase, self._phase_since_s = phase, now_s

    def _lose_late(self, now_s: float) -> None:
        """Declare the nodes lost that exceed a phase's time limit."""
        if self._phase_since_s is None:
            return
        waited_s, settings = now_s - self._phase_since_s, self.settings
        late: list[str] = []
        if self.phase == m.JobPhase.PREPARING and waited_s > settings.prepare_timeout_s:
            if self._master is not None:  # spares did not vote: they are lost by now, or asked again
                self.phase, self._phase_since_s = m.JobPhase.FORMING, None
                return
            late, why = [self.nodes.slots[0].holder or ""], "it did not open the cycle's store"
        elif self.phase == m.JobPhase.RUNNING and self._places and waited_s > settings.start_timeout_s:
            late, why = sorted(self.nodes.holders - self._started), "it did not start its workers"
        elif self.ending is not None and waited_s > settings.rejoin_timeout_s:
            late = [node.name for node in self.nodes if self.nodes.holds_slot(node) and not node.ready]
            why = "it did not report the cycle's end"
        for node in self.nodes.present(late):
            self._lose(node, f"{why} within {waited_s:.0f} s", now_s)

    def _charge_restart(self, end: CycleEnd | None, now_s: float) -> None:
        """Charge an in-process restart to the restart budget; stop the job if the budget is exceeded."""
        if end is None or end.incident is None or self.phase != m.JobPhase.RUNNING:
            return
        incident = end.incident
        incident = msgspec.structs.replace(incident, node=incident.node or self.nodes.name_of_rank(incident.rank))
        decision = self._recovery_state.rule(replace(end, incident=incident))
        if decision.exit_code is not None:
            self._stop_job(decision.exit_code, decision.reason, now_s)

    def _on_unhealthy(self, report: m.Unhealthy, now_s: float) -> None:
        if self.stop is not None:
            self.nodes.out.append((report.node, report.epoch, self.stop))
            return
        incident = report.incident
        if self._excluded.take(report, cycle=self.cycle, is_running=self.phase == m.JobPhase.RUNNING):
            self._end_cycle(incident.describe(), examine=False, but=None).incidents.append(incident)
        elif self.settings.max_nodes == 1 and not report.stays:
            self._stop_job(ExitReason.UNHEALTHY_NODE, incident.describe(), now_s)

    def _on_leave(self, leave: m.Leave, node: Node, now_s: float) -> None:
        if self.stop is not None:
            self.nodes.remove(node.name)
            return
        if not leave.whole_job or not self.nodes.holds_slot(node):
            self._lose(node, "its agent left", now_s, is_known=True)
            return
        self.nodes.remove(node.name)
        if leave.facts is not None:
            self._effects.append(Learn(self.cycle, observations([leave.facts]), []))
        if leave.signal:
            self._detected[node.name] = leave.signal
        decision = self._recovery_state.rule(departure(self.cycle, leave))
        number = leave.signal or next(iter(self._detected.values()), signal.SIGTERM)
        code = ExitReason.PREEMPTED if leave.saved else 128 + number
        self._stop_job(code, f"{describe_notice(self._detected)}; {decision.reason}", now_s)

    def _lose(self, node: Node, why: str, now_s: float, *, is_known: bool = False) -> None:
        """Continue without a node; ``is_known``: its agent is certainly dead."""
        if is_known or node.name in self.nodes.claims:
            self._quorum.note_dead(node)
        self.nodes.remove(node.name)
        self._dropped.append((node.name, node.epoch))
        log.warning("node %s is lost: %s", node.name, why)
        # A node that was only cut off receives this first: its ranks must not continue.
        self.nodes.send(node, m.CycleOver(cycle=self.cycle, reason=f"the node was declared lost: {why}"))
        if self.nodes.holds_slot(node) and self.phase in (m.JobPhase.RUNNING, m.JobPhase.PREPARING):
            self._end_cycle(f"node {node.name} is lost: {why}", examine=False, but=None)
        if self.phase == m.JobPhase.ADOPTING:
            self._adoption.lose(node.name, why)
        if self.nodes.holds_slot(node) and self.ending is not None:
            incident = self.ending.lose(node.name, why, detected_after_s=round(now_s - node.heartbeat_at_s, 3))
            self._record(EventKind.INCIDENT, {"incident": incident})

    # -- a cycle's end -----------------------------------------------------------------------------------------

    def _take_facts(self, facts: m.CycleFacts, node: Node) -> None:
        if self.phase == m.JobPhase.ADOPTING:
            self._adoption.ended[node.name] = facts
        if facts.cycle != self.cycle or self.phase in (m.JobPhase.OVER, m.JobPhase.ADOPTING):
            return
        if self.phase in (m.JobPhase.RUNNING, m.JobPhase.PREPARING):
            reason = facts.incident.describe() if facts.incident else f"node {node.name} left the cycle"
            is_agreed = facts.incident is not None and facts.incident.exit_code in OWN_DECISIONS
            awaits_exits = is_agreed or facts.permanent is not None
            self._end_cycle(reason, examine=False, but=node, awaits_exits=awaits_exits)
        if self.ending is not None:
            self.ending.take(node.name, facts)

    def _end_cycle(self, reason: str, *, examine: bool, but: Node | None, awaits_exits: bool = False) -> CycleEnding:
        has_begun = self.phase != m.JobPhase.PREPARING and not self._places
        self.phase, self._phase_since_s, self._members = m.JobPhase.FORMING, None, _Members()
        self._places = {}
        self._ranks.close()
        has_trained = self._newest_trained >= self.cycle
        self.ending = CycleEnding(job=self.settings.job, cycle=self.cycle, has_begun=has_begun, has_trained=has_trained)
        over = m.CycleOver(cycle=self.cycle, reason=reason, examine=examine, awaits_exits=awaits_exits)
        for node in self.nodes:
            if node is not but and self.nodes.holds_slot(node) and not node.ready:
                self.nodes.send(node, over)
        return self.ending

    def _finish_if_all(self, now_s: float) -> None:
        if self.phase != m.JobPhase.RUNNING or not self.nodes.holders <= self.finished.keys():
            return
        facts = list(self.finished.values())
        lost = [one.incident for one in facts if one.incident is not None]
        if len(lost) == len(facts):
            ending = self._end_cycle(lost[0].describe(), examine=False, but=None)
            ending.incidents.extend(lost)
            return
        end = CycleEnd(
            cycle=self.cycle,
            incident=None,
            finished=True,
            durable_iteration=highest_durable(facts),
            committed_iteration=highest_committed(facts),
            had_session=any(one.had_session for one in facts),
        )
        self._effects.append(Learn(self.cycle, observations(facts), None))
        self._carry_out(self._recovery_state.rule(end), now_s)

    def _report_finished(self, names: Collection[str]) -> None:
        """Notify those of the nodes whose workers still run that another node's workers exited with 0."""
        if self.phase != m.JobPhase.RUNNING or not self.finished:
            return
        for node in self.nodes.present(self.nodes.holders.intersection(names) - self.finished.keys()):
            self.nodes.out.append((node.name, node.epoch, m.PeersFinished(cycle=self.cycle)))

    def _carry_out(self, decision: Decision, now_s: float) -> None:
        if decision.recovery_level >= RecoveryLevel.REQUEUE_JOB:
            assert decision.exit_code is not None
            self._stop_job(decision.exit_code, decision.reason, now_s)
            return
        # A coordinator that was suspended does not know its successor's cycles, but returning nodes do. Their numbers
        # are not reused: they identify what a cycle saved, and the owners of directories.
        self.cycle = max(self.cycle, self._newest_elsewhere) + 1
        self._forming.begin(self.state, decision.quarantine)
        self._restart_at_s = now_s + decision.delay_s if decision.delay_s else None

    def _stop_job(self, exit_code: int, reason: str, now_s: float) -> None:
        self.phase, self._over_at_s = m.JobPhase.OVER, now_s
        self.stop = m.Stop(exit_code=exit_code, reason=reason)
        for node in self.nodes:
            self.nodes.send(node, self.stop)
        self._excluded.send_stop(self.stop)

    # -- forming -----------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Enter the next phase if its conditions hold."""
        if self._restart_at_s is not None and now_s >= self._restart_at_s:
            self._restart_at_s = None
        if self.ending is not None and self._phase_since_s is None:
            self._phase_since_s = now_s
        self._lose_late(now_s)
        self._settle_claims(now_s)
        if self.phase == m.JobPhase.RUNNING:
            known = self._restarts.due(self.nodes.holders, now_s, progress_counts=self.state.progress_known)
            self._charge_restart(known, now_s)
        if self.phase == m.JobPhase.ADOPTING and (self.nodes.by_name or self._excluded.any_waits):
            self._adoption.begin(now_s)
        if self.phase == m.JobPhase.ADOPTING and self._adoption.is_over(now_s, self.settings.node_timeout_s):
            if self._quorum.is_lost:
                self._await_quorum(now_s)
                return
            self._adopt(now_s)
            self._finish_if_all(now_s)
            self._report_finished(self.nodes.holders)
        if self.phase != m.JobPhase.FORMING:
            return
        if self.ending is not None and self.nodes.any_busy_holder():
            return
        if self._quorum.is_lost:  # the other part of the job decides what follows
            self._await_quorum(now_s)
            return
        if self.ending is not None:
            ending, self.ending, self._phase_since_s = self.ending, None, None
            barred = self.state.barred
            end = ending.summarise(
                num_successors=lambda name: self.nodes.num_successors(name, barred),
                may_shrink=self._forming.may_shrink(),
                num_nodes=len(self.nodes.slots),
            )
            began_s, self._running_since_s = self._running_since_s, None
            end = replace(end, ran_s=0.0 if began_s is None else now_s - began_s)
            self._effects.append(Learn(self.cycle, observations(ending.facts), ending.exceeded()))
            self._carry_out(self._recovery_state.rule(end), now_s)
            if self.stop is not None:
                return
        if self._restart_at_s is not None:  # nodes join meanwhile
            return
        if self._forming.lacks_successor(self.state):
            self._recovery_state.drop_replay(f"no spare is left for the slot of node {', '.join(self.state.held_back)}")
        slots = self._forming.fill(self.cycle, now_s, barred=self.state.barred)
        self._note_forming(missing=0 if slots is not None else max(1, self._forming.missing))
        if slots is None:
            self._wait_for_nodes(now_s)
            return
        self.nodes.slots, self.finished = slots, {}
        self._enter(m.JobPhase.PREPARING, now_s)
        self._master, self._votes = None, set()
        first = self.nodes.holder(slots[0])
        assert first is not None
        self.nodes.send(first, m.Prepare(cycle=self.cycle))

    def _note_forming(self, *, missing: int) -> None:
        """Record once per cycle that nodes are missing, and that none is missing any more."""
        if (noted := (self.cycle, missing > 0)) != self._noted_forming:
            self._noted_forming = noted
            self._record(EventKind.FORMING, {"missing": missing})

    def _await_quorum(self, now_s: float) -> None:
        self._forming.await_quorum(self.cycle, now_s)
        self._wait_for_nodes(now_s)

    def _wait_for_nodes(self, now_s: float) -> None:
        """Log which nodes are missing; stop the job here once that has taken too long."""
        self._forming.remind(now_s)
        awaited = bool(self.nodes.by_name) or self._excluded.any_waits
        if (reason := self._forming.gave_up(now_s, is_awaited=awaited)) is None:
            return
        reason += self._excluded.describe()
        recovery_level, code = RecoveryLevel.STOP, ExitReason.FAILED
        facts = [*self._adoption.ended.values(), *(self.ending.facts if self.ending is not None else ())]
        is_durable = self.state.best_durable is not None or highest_durable(facts) is not None
        if self._quorum.is_lost and is_durable:
            recovery_level, code = RecoveryLevel.REQUEUE_JOB, ExitReason.PREEMPTED
            reason += "; a saved checkpoint exists to resume from"
        decision = Decision(recovery_level=recovery_level, reason=reason, exit_code=code)
        self._record(EventKind.DECISION, {"verdict": decision})
        self._stop_job(code, reason, now_s)
