"""The coordinator: one per job, decides who starts when, and what follows when a cycle ends.

No I/O happens here: messages and time go in, messages come out. :mod:`outlast.launch.control` feeds it from the
control store. It costs O(nodes) store operations a cycle: one message from each node, one to each.

A cycle's life::

    ADOPTING   the control store was lost and this coordinator is new: agents register the places that they hold
    FORMING    nodes join; once every slot has a ready node -> Prepare to the first slot's node
    PREPARING  that node opened the cycle's own store -> Start to every slot's node
    RUNNING    until a node fails, hangs, is lost, or all have finished
    FORMING    again: CycleOver went to all; each joins with what it knows of the ended cycle. When all slots'
               nodes have joined or are lost, the ladder decides once, on the cause among all incidents
    OVER       Stop went to all

Nodes are judged by their beats advancing, on this process's monotonic clock; no wall clocks are compared. Spares
wait in FORMING and RUNNING alike and cannot disturb either: only a slot's holder counts.

Rejected: a shared blob changed by compare-and-swap (O(nodes^2) retries), and leaderless arrival counters (a joiner
that dies between two operations leaves a hole that nobody can close).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from outlast.errors import ExitReason
from outlast.incidents import EventKind, Rung, Verdict
from outlast.launch import messages as m
from outlast.launch.adoption import Adoption
from outlast.launch.ending import Ending, copy_untrusted, highest_durable, observations
from outlast.launch.job import JobSettings
from outlast.launch.nodes import Node, Nodes, Outbox
from outlast.policy import ladder
from outlast.policy.deadlines import Expired
from outlast.policy.ladder import CycleEnd, LadderState
from outlast.policy.quarantine import Distrusted
from outlast.policy.slots import fill_slots, shrink
from outlast.policy.timeouts import Observation

__all__ = ["Coordinator", "Phase"]

log = logging.getLogger(__name__)


class Phase(StrEnum):
    """Where the job is; see the module's head."""

    ADOPTING = "adopting"
    FORMING = "forming"
    PREPARING = "preparing"
    RUNNING = "running"
    OVER = "over"


class Coordinator:
    """Form cycles and end them.

    Args:
        settings: The job's settings.
        state: What the ladder remembers of the run.
        record: Called with every event for the journal: kind, cycle, data.
        remember: Called with the ladder's new state whenever it changed, before anyone hears of the verdict.
        learn: Called with a cycle's number, what its nodes observed, and the timeouts exceeded in it (``None``: it
            finished).

    Thread: one.
    """

    def __init__(
        self,
        settings: JobSettings,
        state: LadderState,
        *,
        record: Callable[[EventKind, int, dict[str, object]], None],
        remember: Callable[[LadderState], None],
        learn: Callable[[int, list[Observation], list[Expired] | None], None],
    ) -> None:
        self.settings = settings
        self.state = state
        self.cycle = 0
        """The cycle that forms or runs."""
        self.phase = Phase.ADOPTING if settings.former_host is not None else Phase.FORMING
        self.nodes = Nodes(settings.num_slots)
        self.stop: m.Stop | None = None
        if state.finished:
            reason = "an earlier job finished the run; to train anew, name another --run-dir"
            self.phase, self.stop = Phase.OVER, m.Stop(exit_code=ExitReason.FINISHED, reason=reason)
        self._record, self._remember, self._learn = record, remember, learn
        self._ending: Ending | None = None
        """The cycle that is ending, until all of its nodes have told what they know."""
        self._adoption = Adoption(settings.num_slots)
        self._has_majority = True
        """Most of the slots' holders took part when this coordinator took over (or it always was the only one)."""
        self._finished: dict[str, m.CycleFacts] = {}
        """Nodes whose workers all finished the running cycle; a finished one may say goodbye before the others."""
        self._waiting_since_s: float | None = None
        self._early: dict[str, m.CycleFacts] = {}
        """Facts of nodes that joined while the job was being taken over."""
        self._claims: dict[str, m.Join] = {}
        """Joins under a name whose former life is not yet known to be over."""
        self._over_at_s: float | None = None

    # -- what comes in -----------------------------------------------------------------------------------------

    def handle(self, message: m.ToCoordinator, now_s: float) -> Outbox:
        """Take one message and return what is to be sent."""
        match message:
            case m.Join():
                self._on_join(message, now_s)
            case m.Register():
                self._on_register(message, now_s)
            case m.Tick() | m.Quit():
                pass
            case _:
                node = self.nodes.get(message.node)
                if node is None or node.epoch != message.epoch:
                    log.debug("message of an unknown life of node %s passed over", message.node)
                else:
                    self._on_known(message, node, now_s)
        self._advance(now_s)
        return self.nodes.take_out()

    def judge_beats(self, beats: Mapping[str, int], now_s: float, *, since_last_s: float) -> Outbox:
        """Find nodes that gave no sign of life.

        Args:
            beats: Node name to its counter.
            now_s: Monotonic seconds.
            since_last_s: Seconds since the last call; after a long pause of our own nobody is judged.
        """
        timeout_s = self.settings.node_timeout_s
        alive, silent = self.nodes.judge_beats(beats, now_s, timeout_s=timeout_s, paused=since_last_s > timeout_s / 2)
        for node in alive:
            if (claim := self._claims.get(node.name)) is not None:
                self._refuse(claim, node)
        for node in silent:
            self._lose(node, f"no sign of life for {now_s - node.beat_at_s:.1f} s", now_s)
        self._advance(now_s)
        return self.nodes.take_out()

    @property
    def may_close(self) -> bool:
        """Whether the job is over and every node that lives has heard so."""
        return self.phase == Phase.OVER and self._over_at_s is not None and not self.nodes.by_name

    def should_give_up_on_goodbyes(self, now_s: float) -> bool:
        """Return whether nodes had long enough to hear that the job is over."""
        return self._over_at_s is not None and now_s - self._over_at_s > self.settings.goodbye_timeout_s

    # -- joining and leaving -----------------------------------------------------------------------------------

    def _on_join(self, join: m.Join, now_s: float) -> None:
        node = self.nodes.get(join.node)
        if node is not None and node.epoch != join.epoch:
            # Two agents of one name, or one that came back before it was missed: its beats will tell.
            self._claims[join.node] = join
            return
        if node is None:
            node = self._add(join, now_s)
        if self.stop is not None:
            self._over_at_s = self._over_at_s or now_s
            self.nodes.send(node, self.stop)
            return
        self.nodes.mark(node, ready=True)
        self._finished.pop(node.name, None)
        if join.ended is not None:
            self._take_facts(join.ended, node)
        if node.name in self.state.quarantined:
            self.nodes.send(node, m.Wait(reason="the node is quarantined for this job"))
        elif self.phase == Phase.RUNNING and not self.nodes.holds_slot(node):
            self.nodes.send(node, m.Wait(reason="every slot is held: the node is a spare"))

    def _add(self, message: m.Join | m.Register, now_s: float) -> Node:
        node = self.nodes.add(message, now_s)
        spare = self.nodes.num_joins > len(self.nodes.slots)
        self._record(EventKind.NODE_JOINED, self.cycle, {"name": node.name, "spare": spare})
        return node

    def _on_register(self, message: m.Register, now_s: float) -> None:
        node = self.nodes.get(message.node)
        if node is not None and self.phase != Phase.ADOPTING:
            # The same coordinator: what it said last may have been lost with the connection.
            if node.epoch == message.epoch and node.last is not None:
                self.nodes.send(node, node.last)
            return
        if self.stop is not None:
            self.nodes.out.append((message.node, message.epoch, self.stop))
            return
        node = node or self._add(message, now_s)
        self._learn_distrusted(message.distrusted)
        if self.phase == Phase.FORMING and self.cycle == 0 and message.place is not None:
            self.phase = Phase.ADOPTING  # this agent was started anew, and hosts for a job in progress
        if self.phase == Phase.ADOPTING:
            self._adoption.register(message, now_s)
            self.nodes.mark(node, ready=not message.running)
        elif message.running:
            self.nodes.mark(node, ready=False)
            self.nodes.send(
                node,
                m.CycleOver(cycle=message.place.cycle if message.place else -1, reason="it came back too late"),
            )

    def _learn_distrusted(self, told: Sequence[Distrusted]) -> None:
        """Take over what an agent was told not to load by a coordinator whose memory may be out of reach."""
        known = {(one.attempt, one.tier) for one in self.state.distrusted}
        if new := tuple(one for one in told if (one.attempt, one.tier) not in known):
            self.state = msgspec.structs.replace(self.state, distrusted=self.state.distrusted + new)
            self._remember(self.state)

    def _adopt(self, now_s: float) -> None:
        """Take over the job from what the agents registered."""
        adoption, self.phase = self._adoption, Phase.FORMING
        if adoption.cycle < 0:
            return  # nobody was in a cycle: the job begins
        self.cycle, self.nodes.slots = adoption.cycle, adoption.slots
        self._has_majority = len(adoption.claims) * 2 > len(self.nodes.slots)
        log.warning(
            "took over the job in cycle %d: %d of %d nodes registered",
            self.cycle,
            len(adoption.claims),
            len(self.nodes.slots),
        )
        if not adoption.missing and all(slot.holder in adoption.running for slot in self.nodes.slots):
            self.phase = Phase.RUNNING
            return
        reason = "the node that hosted the control store is gone" if adoption.missing else "the cycle was ending"
        self._ending = self._end_cycle(reason, examine=False, but=None)
        for slot in adoption.missing:
            why = f"it carried slot {slot} and went down with the control store"
            incident = self._ending.lose(self.settings.former_host or "", why)
            self._record(EventKind.INCIDENT, self.cycle, {"incident": incident})
        for name, facts in self._early.items():
            if (node := self.nodes.get(name)) is not None:
                self._take_facts(facts, node)
        self._early.clear()

    def _refuse(self, claim: m.Join, holder: Node) -> None:
        del self._claims[claim.node]
        log.warning("a second agent calls itself node %s while the first one lives; it was turned away", claim.node)
        reason = f"another agent of the name {holder.name!r} is alive in this job; give each its own --node-name"
        self.nodes.out.append((claim.node, claim.epoch, m.Stop(exit_code=ExitReason.BAD_INPUT, reason=reason)))

    def _on_known(self, message: m.ToCoordinator, node: Node, now_s: float) -> None:
        match message:
            case m.Master() if self.phase == Phase.PREPARING and message.cycle == self.cycle:
                self._start(message.addr, message.port)
            case m.Hung() if self.phase == Phase.RUNNING and message.cycle == self.cycle:
                ending = self._end_cycle(message.incident.describe(), examine=True, but=None)
                ending.incidents.append(message.incident)
                ending.expired.extend(message.expired)
            case m.Finished() if self.phase == Phase.ADOPTING or (
                message.facts.cycle == self.cycle and self.phase == Phase.RUNNING
            ):
                self._finished[node.name] = message.facts
                self._finish_if_all(now_s)
            case m.Leave():
                self._on_leave(message, node, now_s)
            case m.Dead():
                self._lose(node, message.reason, now_s)
            case m.Bye() if self.phase == Phase.OVER or node.name in self._finished or node.ready:
                self.nodes.remove(node.name)
            case m.Bye():
                self._lose(node, "its agent left", now_s)
            case _:
                pass

    def _on_leave(self, leave: m.Leave, node: Node, now_s: float) -> None:
        if self.stop is not None:
            self.nodes.remove(node.name)
            return
        if not leave.whole_job or not self.nodes.holds_slot(node):
            self._lose(node, "its agent left", now_s)
            return
        self.nodes.remove(node.name)
        facts = leave.facts
        end = CycleEnd(
            cycle=self.cycle,
            incident=None,
            preempted=True,
            preempted_saved=leave.saved,
            durable_iteration=facts.durable_iteration if facts else None,
            progress_known=facts.progress_known if facts else False,
        )
        self.state, verdict = ladder.decide(self.state, end, self.settings.limits)
        self._remember(self.state)
        self._record(EventKind.VERDICT, self.cycle, {"verdict": verdict})
        code = ExitReason.PREEMPTED if leave.saved else 128 + leave.signal
        self._stop_job(code, f"node {node.name} was told to leave; {verdict.reason}", now_s)

    def _lose(self, node: Node, why: str, now_s: float) -> None:
        self.nodes.remove(node.name)
        log.warning("node %s is lost: %s", node.name, why)
        # Should it only have been away, it hears this first: its ranks must not go on in a cycle that is over.
        self.nodes.send(node, m.CycleOver(cycle=self.cycle, reason=f"the node was taken for lost: {why}"))
        if self.nodes.holds_slot(node) and self.phase in (Phase.RUNNING, Phase.PREPARING):
            self._end_cycle(f"node {node.name} is lost: {why}", examine=False, but=None)
        if self.nodes.holds_slot(node) and self._ending is not None:
            incident = self._ending.lose(node.name, why, detected_after_s=round(now_s - node.beat_at_s, 3))
            self._record(EventKind.INCIDENT, self.cycle, {"incident": incident})
        # else: nothing was started on it; its slot, if any, is simply free again
        if (claim := self._claims.pop(node.name, None)) is not None:
            self._on_join(claim, now_s)

    # -- a cycle's end -----------------------------------------------------------------------------------------

    def _take_facts(self, facts: m.CycleFacts, node: Node) -> None:
        if self.phase == Phase.ADOPTING:
            self._early[node.name] = facts
        if facts.cycle != self.cycle or self.phase in (Phase.OVER, Phase.ADOPTING):
            return
        if self.phase in (Phase.RUNNING, Phase.PREPARING):
            reason = facts.incident.describe() if facts.incident else f"node {node.name} left the cycle"
            self._end_cycle(reason, examine=False, but=node)
        if self._ending is not None:
            self._ending.take(facts)

    def _end_cycle(self, reason: str, *, examine: bool, but: Node | None) -> Ending:
        self.phase = Phase.FORMING
        self._ending = Ending(job=self.settings.job, cycle=self.cycle)
        for node in self.nodes:
            if node is not but and self.nodes.holds_slot(node) and not node.ready:
                self.nodes.send(node, m.CycleOver(cycle=self.cycle, reason=reason, examine=examine))
        return self._ending

    def _finish_if_all(self, now_s: float) -> None:
        if self.phase != Phase.RUNNING or not self.nodes.holders <= self._finished.keys():
            return
        facts = list(self._finished.values())
        end = CycleEnd(cycle=self.cycle, incident=None, finished=True, durable_iteration=highest_durable(facts))
        self._learn(self.cycle, observations(facts), None)
        self._decide(end, now_s)

    def _decide(self, end: CycleEnd, now_s: float) -> Verdict:
        """Let the ladder decide about a cycle's end, remember it before anybody hears of it, and carry it out."""
        before = self.state.distrusted
        self.state, verdict = ladder.decide(self.state, end, self.settings.limits)
        self._remember(self.state)
        for one in self.state.distrusted:
            if one not in before and not one.settled:
                self._record(EventKind.INCIDENT, self.cycle, {"incident": copy_untrusted(one, end.incident)})
        data: dict[str, object] = {"verdict": verdict}
        if end.incident is not None:
            data["incident"] = end.incident
            level = logging.ERROR if verdict.rung == Rung.STOP else logging.WARNING
            log.log(level, "[outlast] cycle %d ended: %s", self.cycle, verdict.reason)
        self._record(EventKind.VERDICT, self.cycle, data)
        self._carry_out(verdict, now_s)
        return verdict

    def _carry_out(self, verdict: Verdict, now_s: float) -> None:
        if verdict.rung >= Rung.REQUEUE_JOB:
            assert verdict.exit_code is not None
            self._stop_job(verdict.exit_code, verdict.reason, now_s)
            return
        for name in verdict.quarantine:
            if (node := self.nodes.get(name)) is not None:
                self.nodes.send(node, m.Wait(reason="the node is quarantined for this job"))
        self.cycle += 1
        self._waiting_since_s = None

    def _stop_job(self, exit_code: int, reason: str, now_s: float) -> None:
        self.phase, self._over_at_s = Phase.OVER, now_s
        self.stop = m.Stop(exit_code=exit_code, reason=reason)
        self.nodes.send_all(self.stop)

    # -- forming -----------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Go on to the next phase, when what it needs is there."""
        if self.phase == Phase.ADOPTING and self._adoption.is_over(now_s, self.settings.node_timeout_s):
            self._adopt(now_s)
            self._finish_if_all(now_s)
        if self.phase != Phase.FORMING:
            return
        if self._ending is not None:
            if self.nodes.any_busy_holder():
                return
            ending, self._ending = self._ending, None
            end = ending.summarise(num_spares=len(self.nodes.spares(self.state.quarantined)))
            self._learn(self.cycle, observations(ending.facts), ending.expired)
            if self._decide(end, now_s).rung >= Rung.REQUEUE_JOB:
                return
        num_slots, num_ready = len(self.nodes.slots), self.nodes.num_ready
        if num_ready < (self.settings.min_nodes or num_slots):
            self._wait_for_nodes(num_slots - num_ready, now_s)
            return
        slots = fill_slots(self.nodes.slots, self.nodes.ready(), barred=self.state.quarantined)
        if any(slot.holder is None for slot in slots):
            smaller = shrink(slots, min_nodes=self.settings.min_nodes) if self.cycle and self._has_majority else None
            if smaller is None or any(slot.holder is None for slot in smaller):
                self._wait_for_nodes(sum(slot.holder is None for slot in slots), now_s)
                return
            log.warning("no spare is left: the world shrinks from %d to %d nodes", len(slots), len(smaller))
            slots = smaller
        if not self._has_majority and self.settings.max_nodes >= 2 * len(slots):
            # Another part of a divided network could be complete as well; two runs must not go on.
            self._wait_for_nodes(len(self._adoption.missing), now_s)
            return
        self.nodes.slots, self._waiting_since_s = slots, None
        self._finished = {}
        self.phase = Phase.PREPARING
        first = self.nodes.holder(slots[0])
        assert first is not None
        self.nodes.send(first, m.Prepare(cycle=self.cycle))

    def _wait_for_nodes(self, missing: int, now_s: float) -> None:
        num_slots = len(self.nodes.slots)
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
            if self.cycle:
                log.warning(
                    "waiting for %d of %d nodes, up to %.0f s",
                    missing,
                    num_slots,
                    self.settings.join_timeout_s,
                )
        elif now_s - self._waiting_since_s > self.settings.join_timeout_s and self.nodes.by_name:
            reason = (
                f"{missing} of {num_slots} slots stayed empty for {self.settings.join_timeout_s:.0f} s "
                "(--rdzv-conf join_timeout=...): no spare is left"
            )
            self._record(
                EventKind.VERDICT,
                self.cycle,
                {"verdict": Verdict(rung=Rung.STOP, reason=reason, exit_code=1)},
            )
            self._stop_job(ExitReason.FAILED, reason, now_s)

    def _start(self, addr: str, port: int) -> None:
        self.phase = Phase.RUNNING
        world_size = sum(slot.nproc or 0 for slot in self.nodes.slots)
        base_rank = 0
        for index, slot in enumerate(self.nodes.slots):
            node = self.nodes.holder(slot)
            assert node is not None
            self.nodes.mark(node, ready=False)
            self.nodes.send(
                node,
                m.Start(
                    cycle=self.cycle,
                    node_rank=index,
                    num_nodes=len(self.nodes.slots),
                    base_rank=base_rank,
                    world_size=world_size,
                    master_addr=addr,
                    master_port=port,
                    distrusted=self.state.distrusted,
                ),
            )
            base_rank += slot.nproc or 0
        for node in self.nodes.spares(self.state.quarantined):
            self.nodes.send(node, m.Wait(reason="every slot is held: the node is a spare"))
