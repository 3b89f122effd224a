"""Forming: the next cycle's world comes together, slot by slot, from the nodes that wait."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from outlast.launch import messages as m
from outlast.launch.job import JobSettings
from outlast.launch.nodes import Node, Nodes
from outlast.policy.ladder import LadderState
from outlast.policy.slots import Slot, fill_slots, shrink
from outlast.wording import count

__all__ = ["Forming", "Lack", "why_it_waits"]

log = logging.getLogger(__name__)
SAY_S = 10.0
"""Seconds between two lines on who is waited for."""
FIRST_SAY_S = 3.0
"""Seconds until the first of them."""


def why_it_waits(node: Node, state: LadderState) -> str:
    """Return why a node has no slot, for people."""
    if node.name in state.quarantined:
        return "the node is quarantined for this job"
    if node.name in state.held_back:
        return "an invalid result of this node is replayed on another one"
    return "every slot is held: the node is a spare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Nodes that are waited for."""

    num_missing: int
    num_needed: int
    waited_s: float
    gives_up_in_s: float


@dataclass(slots=True)
class Forming:
    """Wait until every slot has a ready node, but not for ever."""

    settings: JobSettings
    nodes: Nodes
    has_majority: bool = True
    """Most of the slots' holders took part when this coordinator took over (or it always was the only one)."""
    num_unclaimed: int = 0
    """Slots that nobody claimed when it took over."""
    _since_s: float | None = None
    """Since when nodes are missing."""
    _missing: int = 0
    _said_s: float | None = None
    """When it was last said who is waited for."""

    def begin(self, state: LadderState, quarantine: Collection[str]) -> None:
        """Begin with a new cycle: the time to wait starts afresh.

        Args:
            state: What the ladder remembers.
            quarantine: Nodes that lose their slots now, and hear so.
        """
        self._since_s = self._said_s = None
        for name in quarantine:
            if (node := self.nodes.get(name)) is not None:
                self.nodes.send(node, m.Wait(reason=why_it_waits(node, state)))

    def fill(self, cycle: int, now_s: float, *, barred: Collection[str]) -> tuple[Slot, ...] | None:
        """Return the slots of the world that can start now; ``None`` while nodes are missing.

        Args:
            cycle: The cycle that forms; only a later one may be smaller than the first.
            now_s: Monotonic seconds.
            barred: Nodes that may have no slot.
        """
        num_slots, num_ready = len(self.nodes.slots), self.nodes.num_ready
        if num_ready < (self.settings.min_nodes or num_slots):  # the usual case, at O(1) a message
            self._miss(num_slots - num_ready, cycle, now_s)
            return None
        slots = fill_slots(self.nodes.slots, self.nodes.ready(), barred=barred)
        if any(slot.holder is None for slot in slots):
            smaller = shrink(slots, min_nodes=self.settings.min_nodes) if cycle and self.has_majority else None
            if smaller is None or any(slot.holder is None for slot in smaller):
                self._miss(sum(slot.holder is None for slot in slots), cycle, now_s)
                return None
            log.warning("no spare is left: the world shrinks from %s to %d", count(len(slots), "node"), len(smaller))
            slots = smaller
        if not self.has_majority and self.settings.max_nodes >= 2 * len(slots):
            # Another part of a divided network could be complete as well; two runs must not go on.
            self._miss(self.num_unclaimed, cycle, now_s)
            return None
        self._since_s = self._said_s = None
        return slots

    def remind(self, now_s: float) -> None:
        """Tell the nodes that wait who is waited for, every ten seconds."""
        if self._since_s is None:
            return
        if self._said_s is None:
            self._said_s = self._since_s - SAY_S + FIRST_SAY_S  # nodes that start together come within this
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        have = sorted(node.name for node in self.nodes if node.ready)
        names = ", ".join(have[:8]) + (f" and {len(have) - 8} more" if len(have) > 8 else "")
        left_s = max(0.0, self._since_s + self.settings.join_timeout_s - now_s)
        num_slots = len(self.nodes.slots)
        reason = (
            f"waiting for {self._missing} of {num_slots} node{'' if num_slots == 1 else 's'} (have: {names or 'none'})"
            f"; gives up in {left_s:.0f} s"
        )
        for node in self.nodes:
            if node.ready:
                self.nodes.out.append((node.name, node.epoch, m.NodesMissing(reason=reason)))

    def start(self, cycle: int, addr: str, port: int, state: LadderState) -> None:
        """Tell every slot's node its place, and the others that they wait.

        Args:
            cycle: The cycle that starts.
            addr: Where its first node hosts its store.
            port: The store's port.
            state: What the ladder remembers.
        """
        slots, base_rank = self.nodes.slots, 0
        for index, slot in enumerate(slots):
            node = self.nodes.holder(slot)
            assert node is not None
            self.nodes.mark(node, ready=False)
            self.nodes.send(
                node,
                m.Start(
                    cycle=cycle,
                    node_rank=index,
                    num_nodes=len(slots),
                    base_rank=base_rank,
                    world_size=sum(slot.nproc or 0 for slot in slots),
                    master_addr=addr,
                    master_port=port,
                    distrusted=state.distrusted,
                    replay=state.replay,
                ),
            )
            base_rank += slot.nproc or 0
        for node in self.nodes.spares(state.quarantined):
            self.nodes.send(node, m.Wait(reason=why_it_waits(node, state)))

    def lacks_heir(self, state: LadderState) -> bool:
        """Return whether a node that is held back is needed after all: the spare that was to have its slot is gone."""
        return bool(state.held_back) and not self._can_fill(state.barred) and self._can_fill(state.quarantined)

    def may_shrink(self) -> bool:
        """Return whether the world may go on without one of its nodes."""
        least = self.settings.min_nodes
        return least is not None and self.has_majority and len(self.nodes.slots) - 1 >= least

    def gave_up(self, now_s: float, *, is_awaited: bool) -> str | None:
        """Return why nodes are not waited for any longer, for people; ``None`` while they are.

        Args:
            now_s: Monotonic seconds.
            is_awaited: Somebody waits for the next cycle.
        """
        timeout_s = self.settings.join_timeout_s
        if self._since_s is None or now_s - self._since_s <= timeout_s or not is_awaited:
            return None
        return (
            f"{self._missing} of {len(self.nodes.slots)} slots stayed empty for {timeout_s:.0f} s "
            "(--rdzv-conf join_timeout=...): no spare is left"
        )

    def lack(self, now_s: float) -> Lack | None:
        """Return what is waited for; ``None``: nothing was missing at the last look."""
        if self._since_s is None:
            return None
        waited_s = max(0.0, now_s - self._since_s)
        return Lack(
            num_missing=self._missing,
            num_needed=len(self.nodes.slots),
            waited_s=waited_s,
            gives_up_in_s=max(0.0, self.settings.join_timeout_s - waited_s),
        )

    def _can_fill(self, barred: Collection[str]) -> bool:
        slots = fill_slots(self.nodes.slots, self.nodes.ready(), barred=barred)
        return all(slot.holder is not None for slot in slots)

    def _miss(self, missing: int, cycle: int, now_s: float) -> None:
        self._missing = missing
        if self._since_s is None:
            self._since_s = now_s
