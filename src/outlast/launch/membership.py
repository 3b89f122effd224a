"""The nodes of a job as the coordinator knows them, and who forms the next cycle.

:class:`Nodes` lists the nodes and the slots that they hold. :class:`Forming` fills the slots of the next cycle from the
waiting nodes, if this part of the job has the :class:`Quorum`. :class:`Adoption` rebuilds the slots for a new
coordinator of a job in progress: agents keep their slots and register with their place in the last cycle. A slot that
no agent claims in time belonged to a node that was lost with the old coordinator.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from outlast.errors import ExitReason
from outlast.launch import protocol as m
from outlast.launch.job_settings import JobSettings
from outlast.launch.slots import Slot, SlotCandidate, fill_slots, shrink
from outlast.policy.leadership import has_quorum_of, may_begin
from outlast.policy.recovery_policy import RecoveryState, known_durable
from outlast.wording import count

log = logging.getLogger(__name__)
REMIND_S = 10.0
"""Seconds between two log lines on missing nodes."""
FIRST_REMINDER_S = 3.0
"""Seconds until the first of them."""
_HOST_MISSING_S = 1.0
"""How long the node of the lost coordinator may take to rejoin once all other nodes have joined."""
Outbox = list[tuple[str, str, m.ToNode]]
"""Node, epoch and message to send."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One life of one node's agent."""

    name: str
    epoch: str
    candidate: SlotCandidate
    ready: bool = True
    """The node waits for a cycle; otherwise it is in one."""
    last: m.ToNode | None = None
    """The last message sent to it."""
    heartbeat: int = -1
    heartbeat_at_s: float = 0.0


class Nodes:
    """All nodes by name, and the slots."""

    def __init__(self, num_slots: int) -> None:
        self.by_name: dict[str, Node] = {}
        self.out: Outbox = []
        """Messages to send, in order."""
        self.num_joins = 0
        self.num_changes = 0
        """Number of nodes that joined or were removed."""
        self.claims: dict[str, m.JoinRequest | m.NameClaim] = {}
        """Agents that claim a name whose former life may not be over."""
        self.admissions: list[tuple[str, str, str | None]] = []
        """Decided claims: node, epoch, and the reason for a refusal; ``None``: admitted."""
        self._ready: set[str] = set()
        self.holders: frozenset[str] = frozenset()
        """Names of the nodes that hold a slot, including nodes that are gone."""
        self.slots = [Slot()] * num_slots

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self.by_name.values()))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots, in the order of their ranks."""
        return self._slots

    @slots.setter
    def slots(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self.holders = frozenset(slot.holder for slot in slots if slot.holder is not None)

    def name_of_rank(self, rank: int | None) -> str:
        """Return the name of the node that carries a rank; empty: not known."""
        base_rank = 0
        for slot in self._slots:
            base_rank += slot.nproc or 0
            if rank is not None and rank < base_rank:
                return slot.holder or ""
        return ""

    def add(self, message: m.JoinRequest | m.Register, now_s: float) -> Node:
        self.num_joins += 1
        self.num_changes += 1
        candidate = SlotCandidate(order=self.num_joins, nproc=message.nproc, wish=message.wish)
        node = Node(name=message.node, epoch=message.epoch, candidate=candidate, heartbeat_at_s=now_s)
        self.by_name[node.name] = node
        self._ready.add(node.name)
        return node

    def mark(self, node: Node, *, ready: bool) -> None:
        """Note that a node waits for a cycle, or is in one."""
        node.ready = ready
        if ready:
            self._ready.add(node.name)
        else:
            self._ready.discard(node.name)

    def remove(self, name: str) -> None:
        """Remove a node; it holds its slot until another node is given it."""
        self.num_changes += 1
        self.by_name.pop(name, None)
        self._ready.discard(name)

    def present(self, names: Iterable[str]) -> list[Node]:
        """Return the connected ones of some nodes."""
        return [self.by_name[name] for name in names if name in self.by_name]

    def holder(self, slot: Slot) -> Node | None:
        """Return the node that holds a slot, if it is connected."""
        return self.by_name.get(slot.holder) if slot.holder is not None else None

    def holds_slot(self, node: Node) -> bool:
        return node.name in self.holders

    @property
    def num_ready(self) -> int:
        """Number of nodes that wait for a cycle; O(1), as every message reads it."""
        return len(self._ready)

    def ready(self) -> dict[str, SlotCandidate]:
        """Return the nodes that wait for a cycle."""
        return {name: self.by_name[name].candidate for name in self.by_name if name in self._ready}

    def any_busy_holder(self) -> bool:
        """Return whether a connected holder of a slot is still in a cycle."""
        return len(self.by_name) > len(self._ready) and any(
            name in self.by_name and name not in self._ready for name in self.holders
        )

    def spares(self, barred: Sequence[str]) -> list[Node]:
        """Return the nodes that wait for a slot and may have one."""
        return [n for n in self if n.ready and not self.holds_slot(n) and n.name not in barred]

    def num_successors(self, name: str, barred: Sequence[str]) -> int:
        """Return how many spares could take the slot of a node; all, if it holds none."""
        nproc = next((slot.nproc for slot in self._slots if slot.holder == name), None)
        return sum(nproc in (None, spare.candidate.nproc) for spare in self.spares(barred))

    def send(self, node: Node, message: m.ToNode) -> None:
        node.last = message
        self.out.append((node.name, node.epoch, message))

    def refuse_claim(self, holder: Node) -> None:
        """Refuse a second agent of a node's name, if there is one: the first is alive."""
        if (claim := self.claims.pop(holder.name, None)) is None:
            return
        reason = f"another agent of the name {holder.name!r} is alive in this job; give each its own --node-name"
        if isinstance(claim, m.NameClaim):
            self.admissions.append((claim.node, claim.epoch, reason))
            return
        log.warning("a second agent named %s was refused: the first one is still running", claim.node)
        stop = m.Stop(exit_code=ExitReason.BAD_INPUT, reason=reason, is_replaced=True)
        self.out.append((claim.node, claim.epoch, stop))

    def drop_claim(self, name: str, epoch: str) -> None:
        """Drop the claim of an agent that is gone."""
        if (claim := self.claims.get(name)) is not None and claim.epoch == epoch:
            del self.claims[name]

    def take_out(self) -> Outbox:
        """Return the messages to send, once."""
        out, self.out = self.out, []
        return out

    def is_here(self, name: str, epoch: str) -> bool:
        """Return whether this life of a node is connected."""
        node = self.by_name.get(name)
        return node is not None and node.epoch == epoch

    def judge_heartbeats(
        self,
        heartbeats: Mapping[str, int],
        now_s: float,
        *,
        timeout_s: float,
        loop_timeout_s: float,
        paused: bool,
        silences_s: Mapping[str, float],
    ) -> tuple[list[Node], list[Node]]:
        """Return the nodes whose main loop ran since the last call, and those that are lost.

        Args:
            heartbeats: Heartbeat counter by node.
            now_s: Monotonic seconds.
            timeout_s: How long nothing may come from a node.
            loop_timeout_s: How long its main loop may stand still while heartbeats arrive.
            paused: The caller itself was paused: no node is judged.
            silences_s: Seconds since anything came from a node's agent.
        """
        alive, silent = [], []
        for node in self:
            heartbeat = heartbeats.get(node.name, node.heartbeat)
            if heartbeat != node.heartbeat or paused:
                node.heartbeat, node.heartbeat_at_s = heartbeat, now_s
                if not paused:
                    alive.append(node)
                continue
            still_s = now_s - node.heartbeat_at_s
            if min(still_s, silences_s.get(node.name, still_s)) > timeout_s or still_s > loop_timeout_s:
                silent.append(node)
        return alive, silent


class Quorum:
    """Whether this part of the job may form a cycle; see :mod:`outlast.policy.leadership`."""

    def __init__(self, settings: JobSettings, nodes: Nodes) -> None:
        self._settings, self._nodes = settings, nodes
        self._claims: dict[tuple[str, str], tuple[m.SlotPlace | None, m.SlotPlace | None]] = {}
        """By life of a node: its place in the last cycle known to have run, and in the last cycle that it joined."""
        self._newest = (-1, -1)
        """Order of the newest cycle known to have run."""
        self._dead: set[tuple[str, str]] = set()
        self._is_new = settings.former_host is None
        """No cycle is known to have run under any coordinator."""
        self._adopts = not self._is_new
        """The last cycle ran under another coordinator, and is known from the nodes' registrations."""
        self._formed: set[tuple[int, int]] = set()
        """Cycles that this coordinator has formed, whether they ran or not."""
        self._num_changes = 0
        self._judged: tuple[tuple[int, int], bool] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether there may be another coordinator."""
        return self._settings.num_endpoints > 1

    @property
    def is_lost(self) -> bool:
        """Whether a cycle has run, and most of its members may continue elsewhere."""
        return not self._is_new and not self.is_here

    @property
    def is_here(self) -> bool:
        """Whether this part may form a cycle."""
        if not self.is_asked:
            return True
        state = self._num_changes, self._nodes.num_changes
        if self._judged is None or self._judged[0] != state:  # it costs O(nodes)
            self._judged = state, self._judge()
        return self._judged[1]

    def is_held_by(self, names: Collection[str]) -> bool:
        """Return whether some of the connected nodes may form a cycle without the others.

        Only nodes with a place in a cycle, or as its spares, count: others may count for another coordinator.
        """
        if not self.is_asked or self._is_new:
            return self.is_here
        return self._judge(names)

    def _judge(self, names: Collection[str] | None = None) -> bool:
        settings, nodes = self._settings, self._nodes
        if self._is_new:
            return may_begin(
                settings.order,
                num_slots=settings.num_slots,
                max_nodes=settings.max_nodes,
                num_endpoints=settings.num_endpoints,
            )
        here = [
            claim
            for (name, epoch), claim in self._claims.items()
            if nodes.is_here(name, epoch) and (names is None or name in names)
        ]
        dead_slots: set[int | None] = set()
        dead_spares: set[int | None] = set()
        for who in self._dead:
            ran = self._claims[who][0]
            if ran is not None:
                dead_slots.add(ran.slot)
                dead_spares.add(ran.spare)
        if settings.host_is_dead:
            for ran, _ in here:
                if ran is not None:
                    dead_slots.add(ran.host_slot)
                    dead_spares.add(ran.host_spare)
        return has_quorum_of(here, dead_slots=dead_slots - {None}, dead_spares=dead_spares - {None})  # type: ignore[arg-type]

    @property
    def may_shrink(self) -> bool:
        """Whether the world may be smaller than the job asks for; with several endpoints only after a full cycle
        ran."""
        return self.is_here and not (self.is_asked and self._is_new)

    @property
    def leads(self) -> bool:
        """Whether a cycle has run, and this part may continue from it."""
        return not self._is_new and self.is_here

    def adopt(self) -> None:
        """Rely on registrations: this coordinator is new, and the job is not."""
        self._is_new, self._adopts = False, True

    def register(self, message: m.Register) -> None:
        """Note the places of a node that registers."""
        newest = self._newest
        if message.ran is not None and message.ran.order > newest:
            self._adopts = True  # another coordinator has led since
        if message.place is not None and (self._adopts or self.knows_newer(message)):
            self._is_new = False
            self._num_changes += 1
            self._claims[message.node, message.epoch] = message.ran, message.place
            if message.ran is not None:
                self._newest = max(newest, message.ran.order)

    def knows_newer(self, message: m.Register) -> bool:
        """Return whether a node took a place in a newer cycle than any that this coordinator knows."""
        place = message.place
        return place is not None and place.order > self._newest and place.order not in self._formed

    def place_of(self, node: Node) -> m.SlotPlace | None:
        """Return the place that a node registered, or took in the last cycle; ``None``: none."""
        ran, taken = self._claims.get((node.name, node.epoch), (None, None))
        return taken or ran

    def note_formed(self, place: m.SlotPlace) -> None:
        """Note that this coordinator forms a cycle."""
        self._formed.add(place.order)

    def note_ran(self, places: Mapping[str, m.SlotPlace]) -> None:
        """Note that a cycle has started on all of its nodes, which are the members now."""
        self._is_new, self._adopts, self._dead = False, False, set()
        self._num_changes += 1
        self._claims = {(one.name, one.epoch): (places[one.name], None) for one in self._nodes.present(places)}
        self._newest = max((place.order for place in places.values()), default=(-1, -1))
        # The former host's place belonged to the previous cycle.
        self._settings = dataclasses.replace(self._settings, host_is_dead=False)

    def admit(self, places: Mapping[str, m.SlotPlace]) -> None:
        """Count late spares among the members of the last cycle, now that all holders know of them."""
        self._num_changes += 1
        num_spares = next(iter(places.values())).num_spares
        for who, (ran, taken) in self._claims.items():
            if ran is not None:
                self._claims[who] = msgspec.structs.replace(ran, num_spares=num_spares), taken
        for node in self._nodes.present(places):
            self._claims[node.name, node.epoch] = places[node.name], None

    def count_holders(self, names: Collection[str]) -> int:
        """Return how many of these nodes held a slot in the last cycle that ran."""
        return sum(
            ran is not None and ran.slot is not None and name in names and self._nodes.is_here(name, epoch)
            for (name, epoch), (ran, _) in self._claims.items()
        )

    def note_dead(self, node: Node) -> None:
        """Note that a life of a node is certainly over."""
        if (node.name, node.epoch) in self._claims:
            self._num_changes += 1
            self._dead.add((node.name, node.epoch))


@dataclass(slots=True)
class Adoption:
    """The registrations of the agents of a job in progress.

    Args:
        num_slots: Number of slots of a job that was in no cycle yet.
        former_term: Term of the lost coordinator.
    """

    num_slots: int
    former_term: int
    since_s: float | None = None
    """When the first agent registered or joined; ``None``: not yet."""
    newest: m.SlotPlace | None = None
    """A place in the newest registered cycle."""
    claims: dict[int, Slot] = field(default_factory=dict)
    """Holders by slot."""
    running: dict[str, m.SlotPlace] = field(default_factory=dict)
    """Places of nodes whose workers run or have finished."""
    ended: dict[str, m.CycleFacts] = field(default_factory=dict)
    """Reports on the cycle that ended, by node."""
    lost: dict[str, str] = field(default_factory=dict)
    """Nodes that registered and were lost before all had, and why."""
    _slot_of: dict[str, int] = field(default_factory=dict)
    """Claimed slot by node."""

    def begin(self, now_s: float) -> None:
        """Start the time limit; called for the first agent, including one that only joins."""
        if self.since_s is None:
            self.since_s = now_s

    def register(self, message: m.Register, now_s: float) -> None:
        """Take one node's place; places in older cycles are dropped."""
        self.begin(now_s)
        place = message.place
        if place is not None and message.running:
            self.running[message.node] = place
        if place is None or (self.newest is not None and place.order < self.newest.order):
            return
        if self.newest is None or place.order > self.newest.order:
            self.newest, self.num_slots, self.claims, self._slot_of = place, place.num_slots, {}, {}
        self.lost.pop(message.node, None)
        if place.slot is None or place.slot >= self.num_slots:
            return
        former = self._slot_of.pop(message.node, place.slot)
        if former != place.slot and (held := self.claims.get(former)) is not None and held.holder == message.node:
            del self.claims[former]
        self.claims[place.slot] = Slot(holder=message.node, nproc=message.nproc)
        self._slot_of[message.node] = place.slot

    def lose(self, node: str, why: str) -> None:
        """Note that a node was lost; it keeps the claimed slot until the cycle's end is judged."""
        self.running.pop(node, None)
        self.lost[node] = why

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots as claimed."""
        return tuple(self.claims.get(index, Slot()) for index in range(self.num_slots))

    @property
    def num_missing(self) -> int:
        """Number of unclaimed slots; O(1), as every message reads it."""
        return self.num_slots - len(self.claims)

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.num_slots) if index not in self.claims]

    @property
    def is_running(self) -> bool:
        """Whether the cycle continues on every node."""
        current = {name for name in self.running if not self.is_stale(name)}
        return not self.missing and current.issuperset(slot.holder for slot in self.slots)

    @property
    def lost_slot(self) -> int | None:
        """The slot of the lost coordinator's own node, if it is unclaimed and known."""
        newest = self.newest
        if newest is None or newest.term != self.former_term or newest.host_slot in self.claims:
            return None
        return newest.host_slot

    def is_stale(self, name: str) -> bool:
        """Return whether a node's workers run in a superseded cycle."""
        return self.newest is not None and self.running[name].order < self.newest.order

    def is_over(self, now_s: float, wait_s: float) -> bool:
        """Return whether all nodes have registered, or had ``wait_s`` seconds to."""
        if self.since_s is None:
            return False
        if self.newest is not None and not self.num_missing:
            return True
        if self.num_missing == 1 and self.lost_slot is not None:
            wait_s = min(wait_s, _HOST_MISSING_S)
        return now_s - self.since_s > wait_s


def why_it_waits(node: Node, state: RecoveryState) -> str:
    """Return why a node has no slot, for people."""
    if node.name in state.quarantined:
        return "the node is quarantined for this job"
    if node.name in state.held_back:
        return "an invalid result of this node is replayed on another one"
    return "every slot is held: the node is a spare"


@dataclass(slots=True)
class Forming:
    """Wait until every slot has a ready node, up to the join timeout."""

    settings: JobSettings
    nodes: Nodes
    quorum: Quorum
    _since_s: float | None = None
    """Since when nodes are missing."""
    missing: int = 0
    """Slots without a node at the last :meth:`fill`."""
    _lacks_quorum: bool = False
    """The slots could be filled, but most members may be elsewhere."""
    _said_s: float | None = None
    """Time of the last reminder."""

    def begin(self, state: RecoveryState, quarantine: Collection[str]) -> None:
        """Begin a new cycle, and with it a new time limit; notify the nodes that are quarantined now."""
        self._since_s = self._said_s = None
        for node in self.nodes.present(quarantine):
            self.nodes.send(node, m.Wait(reason=why_it_waits(node, state)))

    def fill(self, cycle: int, now_s: float, *, barred: Collection[str]) -> tuple[Slot, ...] | None:
        """Return the slots of the world that can start now; ``None`` while nodes are missing.

        Only a later cycle than the first may be smaller than requested.
        """
        num_slots, num_ready = len(self.nodes.slots), self.nodes.num_ready
        self._lacks_quorum = False
        may_shrink = bool(cycle) and self.settings.min_nodes is not None and self.quorum.may_shrink
        if num_ready < ((self.settings.min_nodes or num_slots) if may_shrink else num_slots):  # the usual case, in O(1)
            self._miss(num_slots - num_ready, cycle, now_s)
            return None
        slots = fill_slots(self.nodes.slots, self.nodes.ready(), barred=barred)
        if any(slot.holder is None for slot in slots):
            smaller = shrink(slots, min_nodes=self.settings.min_nodes) if may_shrink else None
            if smaller is None or any(slot.holder is None for slot in smaller):
                self._miss(sum(slot.holder is None for slot in slots), cycle, now_s)
                return None
            log.warning("no spare is left: the world shrinks from %s to %d", count(len(slots), "node"), len(smaller))
            slots = smaller
        if not self.quorum.is_here:
            # Another part of a divided network could be complete as well; only one world may train.
            self.await_quorum(cycle, now_s)
            return None
        self._since_s = self._said_s = None
        return slots

    def await_quorum(self, cycle: int, now_s: float) -> None:
        """Note that most members are missing."""
        self._lacks_quorum = True
        self._miss(0, cycle, now_s)

    def remind(self, now_s: float) -> None:
        """Send the waiting nodes a reminder of the missing ones, at most every ten seconds."""
        if self._since_s is None:
            return
        if self._said_s is None:
            # nodes that start together join within this time
            self._said_s = self._since_s - REMIND_S + FIRST_REMINDER_S
        if now_s - self._said_s < REMIND_S:
            return
        self._said_s = now_s
        have = sorted(node.name for node in self.nodes if node.ready)
        names = ", ".join(have[:8]) + (f" and {len(have) - 8} more" if len(have) > 8 else "")
        left_s = max(0.0, self._since_s + self.settings.join_timeout_s - now_s)
        num_slots = len(self.nodes.slots)
        reason = f"waiting for {self.missing} of {num_slots} node{'s' * (num_slots != 1)} (have: {names or 'none'})"
        if self._lacks_quorum:
            reason = (
                f"waiting for most nodes of the last cycle, which may still train elsewhere (have: {names or 'none'})"
            )
        reason += f"; gives up in {left_s:.0f} s"
        reminder = m.NodesMissing(reason=reason, missing=max(1, self.missing))
        self.nodes.out += [(node.name, node.epoch, reminder) for node in self.nodes if node.ready]

    def place_nodes(self, cycle: int, state: RecoveryState, *, term: int) -> dict[str, m.SlotPlace]:
        """Return the place of each slot's node and of each spare in a new cycle."""
        slots, spares = self.nodes.slots, self.nodes.spares(state.quarantined)
        numbers = {spare.name: number for number, spare in enumerate(spares)}
        indices = {slot.holder: index for index, slot in enumerate(slots) if slot.holder is not None}
        host = self.settings.host
        common = m.SlotPlace(
            term=term,
            cycle=cycle,
            num_slots=len(slots),
            num_spares=len(spares),
            num_kept=self.quorum.count_holders(indices),
            host_slot=indices.get(host),
            host_spare=numbers.get(host),
        )
        self.quorum.note_formed(common)
        places = {name: msgspec.structs.replace(common, slot=index) for name, index in indices.items()}
        return places | {name: msgspec.structs.replace(common, spare=number) for name, number in numbers.items()}

    def start(self, places: Mapping[str, m.SlotPlace], addr: str, port: int, state: RecoveryState) -> None:
        """Send every slot's node its Start, and the spares that they wait.

        Args:
            places: Of all nodes.
            addr: Address of the cycle's store, which the first node hosts.
            port: Port of the store.
            state: State of the recovery policy.
        """
        slots, base_rank = self.nodes.slots, 0
        world_size = sum(slot.nproc or 0 for slot in slots)
        for index, slot in enumerate(slots):
            node = self.nodes.holder(slot)
            assert node is not None
            self.nodes.mark(node, ready=False)
            self.nodes.send(
                node,
                m.Start(
                    cycle=places[node.name].cycle,
                    term=places[node.name].term,
                    node_rank=index,
                    num_nodes=len(slots),
                    base_rank=base_rank,
                    world_size=world_size,
                    master_addr=addr,
                    master_port=port,
                    place=places[node.name],
                    excluded=state.excluded,
                    replay=state.replay,
                    has_checkpoint=state.best_durable is not None,
                    durable_iteration=known_durable(state),
                ),
            )
            base_rank += slot.nproc or 0
        self.notify_spares(places, state)

    def notify_spares(self, places: Mapping[str, m.SlotPlace], state: RecoveryState) -> None:
        """Send the spares their places in a cycle."""
        for node in self.nodes.present(name for name, place in places.items() if place.slot is None):
            self.nodes.send(node, m.Wait(reason=why_it_waits(node, state), place=places[node.name]))

    def lacks_successor(self, state: RecoveryState) -> bool:
        """Return whether a node that is held back is needed after all: the spare for its slot is gone."""
        return bool(state.held_back) and not self._can_fill(state.barred) and self._can_fill(state.quarantined)

    def may_shrink(self) -> bool:
        """Return whether the world may continue without one of its nodes."""
        least = self.settings.min_nodes
        return least is not None and self.quorum.may_shrink and len(self.nodes.slots) - 1 >= least

    def gave_up(self, now_s: float, *, is_awaited: bool) -> str | None:
        """Return why the wait for nodes is over, for people; ``None`` while it is not.

        Args:
            now_s: Monotonic seconds.
            is_awaited: An agent waits for the next cycle.
        """
        timeout_s = self.settings.join_timeout_s
        if self._since_s is None or now_s - self._since_s <= timeout_s or not is_awaited:
            return None
        if self._lacks_quorum:
            return (
                f"most nodes of the last cycle stayed away for {timeout_s:.0f} s (--rdzv-conf join_timeout=...) and "
                "may still train elsewhere"
            )
        return (
            f"{self.missing} of {len(self.nodes.slots)} slots stayed empty for {timeout_s:.0f} s "
            "(--rdzv-conf join_timeout=...): no spare is left"
        )

    def lack(self, now_s: float) -> m.LiveLack | None:
        """Return the missing nodes; ``None``: none at the last check."""
        if self._since_s is None:
            return None
        waited_s = max(0.0, now_s - self._since_s)
        return m.LiveLack(
            num_missing=self.missing,
            num_needed=len(self.nodes.slots),
            waited_s=round(waited_s, 1),
            gives_up_in_s=round(max(0.0, self.settings.join_timeout_s - waited_s), 1),
        )

    def _can_fill(self, barred: Collection[str]) -> bool:
        slots = fill_slots(self.nodes.slots, self.nodes.ready(), barred=barred)
        return all(slot.holder is not None for slot in slots)

    def _miss(self, missing: int, cycle: int, now_s: float) -> None:
        self.missing = missing
        if self._since_s is None:
            self._since_s = now_s
