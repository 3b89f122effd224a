"""Reports of a node to the coordinator, and the state that it keeps for the next coordinator."""

from __future__ import annotations

import logging

import msgspec

from outlast.launch import protocol as m
from outlast.launch.control_link import ControlLink

log = logging.getLogger(__name__)


class CoordinatorClient:
    """Report for one node.

    Args:
        link: The link to the coordinator.
        addr: Address of this node for its peers.
        nproc: Number of its workers.
        wish: The slot that the user requested, if any.

    Thread: the agent's main thread; no method blocks.
    """

    def __init__(self, link: ControlLink, *, addr: str, nproc: int, wish: int | None) -> None:
        self.link = link
        self.send = link.send
        self.node, self.addr, self.nproc, self._wish = link.node, addr, nproc, wish
        self._place: m.SlotPlace | None = None
        self._ran: m.SlotPlace | None = None
        self._term = 0
        self._ended: m.CycleFacts | None = None
        self._newest_trained = -1
        self._script_settings: str | None = None

    @property
    def num_spares(self) -> int:
        """Number of waiting spares as the coordinator reported last. Thread: any."""
        place = self._place
        return 0 if place is None else place.num_spares

    def take_place(self, start: m.Start) -> bool:
        """Take the place in a cycle; return False if the cycle must not be started.

        That is a repeated Start, or one of a superseded coordinator.
        """
        if start.term < self._term:
            log.warning("cycle %d was not started: it is of term %d, and %d rules", start.cycle, start.term, self._term)
            return False
        if self._place is not None and self._place.slot is not None and start.place.order <= self._place.order:
            return False
        self._term, self._place = start.term, start.place
        return True

    def wait_as_spare(self, place: m.SlotPlace) -> None:
        """Take the place of this node among a cycle's spares."""
        if self._place is None or place.order > self._place.order:
            self._place = place
        if place.order == self._place.order:
            self._count()

    def note_ran(self, ran: m.Ran) -> None:
        """Note that all nodes of a cycle have started it, and the number of waiting spares."""
        if self._place is not None and self._place.cycle == ran.cycle:
            self._place = self._ran = msgspec.structs.replace(self._place, num_spares=ran.num_spares)
            self._count()

    def _count(self) -> None:
        assert self._place is not None
        place = self._place
        self.send(m.Counted(cycle=place.cycle, term=place.term, num_spares=place.num_spares))

    def begin_job(self) -> None:
        """Drop all state of this node's job, to take part in another job of the run."""
        self.link.begin_job()
        self._place = self._ran = self._ended = self._script_settings = None
        self._term, self._newest_trained, self.link.recovery_state = 0, -1, None

    def note_term(self, term: int) -> None:
        self._term = max(self._term, term)

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint is known from which the run can resume."""
        return self._ended is not None and self._ended.durable_iteration is not None

    def join(self, ended: m.CycleFacts | None) -> None:
        """Request a slot in the next cycle; ``ended`` describes the last one of this node."""
        self._ended = ended
        self.send(m.JoinRequest(addr=self.addr, nproc=self.nproc, wish=self._wish, ended=ended))

    def report_step(self, cycle: int) -> None:
        """Report once per cycle that a rank of this node has completed a step."""
        if cycle > self._newest_trained:
            self._newest_trained = cycle
            self.send(m.Stepped(cycle=cycle))

    def report_settings(self, text: str) -> None:
        """Report the settings of the script's config, empty for none, if they have changed."""
        if text != self._script_settings:
            self._script_settings = text
            self.send(m.ScriptSettings(fault_tolerance=text))

    def finish(self, facts: m.CycleFacts) -> None:
        """Report that every worker of this node exited with 0 or was spared."""
        self._ended = facts
        self.send(m.Finished(facts=facts))

    def register(self, *, is_running: bool, is_joining: bool, has_finished: bool) -> None:
        """Report this node's place, and repeat its last messages, to a coordinator that was just reached."""
        self.send(
            m.Register(
                addr=self.addr,
                nproc=self.nproc,
                wish=self._wish,
                place=self._place,
                ran=self._ran,
                running=is_running or has_finished,
                recovery_state=self.link.recovery_state,
            )
        )
        if self._newest_trained >= 0:
            self.send(m.Stepped(cycle=self._newest_trained))
        if self._script_settings is not None:
            settings, self._script_settings = self._script_settings, None
            self.report_settings(settings)
        if is_joining:
            self.join(self._ended)
        elif has_finished and self._ended is not None:
            self.finish(self._ended)
