"""The nodes of a job, as the coordinator knows them: who is there, who lives, and who holds which slot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outlast.errors import ExitReason
from outlast.launch import messages as m
from outlast.policy.slots import Slot, SlotCandidate

__all__ = ["Node", "Nodes", "Outbox"]

log = logging.getLogger(__name__)

Outbox = list[tuple[str, str, m.ToNode]]
"""(node, epoch, message) to be sent."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One life of one node's agent."""

    name: str
    epoch: str
    candidate: SlotCandidate
    ready: bool = True
    """It waits for a cycle; otherwise it is in one."""
    last: m.ToNode | None = None
    """What it was told last."""
    beat: int = -1
    beat_at_s: float = 0.0


class Nodes:
    """All nodes by name, and the slots.

    Args:
        num_slots: Nodes that train at a time.
    """

    def __init__(self, num_slots: int) -> None:
        self.by_name: dict[str, Node] = {}
        self.out: Outbox = []
        """What is to be sent, in order."""
        self.num_joins = 0
        self.claims: dict[str, m.JoinRequest] = {}
        """Joins under a name whose former life is not yet known to be over."""
        self._ready: set[str] = set()
        self._slots: tuple[Slot, ...] = tuple(Slot() for _ in range(num_slots))
        self._holders: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self.by_name.values()))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots, in the order of their ranks."""
        return self._slots

    @slots.setter
    def slots(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._holders = frozenset(slot.holder for slot in slots if slot.holder is not None)

    @property
    def holders(self) -> frozenset[str]:
        """Names of the nodes that hold a slot, also of those that are gone."""
        return self._holders

    def name_of_rank(self, rank: int | None) -> str:
        """Return the name of the node that carries a rank; empty where that cannot be told."""
        base_rank = 0
        for slot in self._slots:
            base_rank += slot.nproc or 0
            if rank is not None and rank < base_rank:
                return slot.holder or ""
        return ""

    def add(self, message: m.JoinRequest | m.Register, now_s: float) -> Node:
        """Add a node's new life."""
        self.num_joins += 1
        candidate = SlotCandidate(order=self.num_joins, nproc=message.nproc, wish=message.wish)
        node = Node(name=message.node, epoch=message.epoch, candidate=candidate, beat_at_s=now_s)
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

    def get(self, name: str) -> Node | None:
        """Return a node, if it is there."""
        return self.by_name.get(name)

    def remove(self, name: str) -> None:
        """Forget a node; the slot that it holds stays its until another one is given it."""
        self.by_name.pop(name, None)
        self._ready.discard(name)

    def holder(self, slot: Slot) -> Node | None:
        """Return the node that holds a slot, if it is there."""
        return self.by_name.get(slot.holder) if slot.holder is not None else None

    def holds_slot(self, node: Node) -> bool:
        """Return whether a node holds a slot."""
        return node.name in self._holders

    @property
    def num_ready(self) -> int:
        """Number of nodes that wait for a cycle; asked for at every message, so it costs the same for any number."""
        return len(self._ready)

    def ready(self) -> dict[str, SlotCandidate]:
        """Return the nodes that wait for a cycle."""
        return {name: self.by_name[name].candidate for name in self.by_name if name in self._ready}

    def any_busy_holder(self) -> bool:
        """Return whether a node that is there and holds a slot is still in a cycle."""
        return len(self.by_name) > len(self._ready) and any(
            name in self.by_name and name not in self._ready for name in self._holders
        )

    def spares(self, barred: Sequence[str]) -> list[Node]:
        """Return the nodes that wait for a slot and may have one."""
        return [n for n in self if n.ready and not self.holds_slot(n) and n.name not in barred]

    def num_heirs(self, name: str, barred: Sequence[str]) -> int:
        """Return how many spares could take the slot of a node; any could, where it holds none."""
        nproc = next((slot.nproc for slot in self._slots if slot.holder == name), None)
        return sum(nproc in (None, spare.candidate.nproc) for spare in self.spares(barred))

    def send(self, node: Node, message: m.ToNode) -> None:
        """Tell a node something."""
        node.last = message
        self.out.append((node.name, node.epoch, message))

    def send_all(self, message: m.ToNode) -> None:
        """Tell every node something."""
        for node in self:
            self.send(node, message)

    def refuse_claim(self, holder: Node) -> None:
        """Turn away a second agent of a node's name, if there is one: the first has just shown that it lives."""
        if (claim := self.claims.pop(holder.name, None)) is None:
            return
        log.warning("a second agent named %s was refused: the first one is still running", claim.node)
        reason = f"another agent of the name {holder.name!r} is alive in this job; give each its own --node-name"
        self.out.append((claim.node, claim.epoch, m.Stop(exit_code=ExitReason.BAD_INPUT, reason=reason)))

    def take_out(self) -> Outbox:
        """Return what is to be sent, once."""
        out, self.out = self.out, []
        return out

    def judge_beats(
        self, beats: Mapping[str, int], now_s: float, *, timeout_s: float, paused: bool
    ) -> tuple[list[Node], list[Node]]:
        """Return the nodes that beat since the last call, and those that have not for ``timeout_s``.

        Args:
            beats: Node name to its counter.
            now_s: Monotonic seconds.
            timeout_s: How long a node may give no sign of life.
            paused: The caller itself was away: nobody is judged.
        """
        alive, silent = [], []
        for node in self:
            beat = beats.get(node.name, node.beat)
            if beat != node.beat or paused:
                node.beat, node.beat_at_s = beat, now_s
                if not paused:
                    alive.append(node)
            elif now_s - node.beat_at_s > timeout_s:
                silent.append(node)
        return alive, silent
