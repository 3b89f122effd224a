"""A node's membership in the job: what its agent tells the coordinator, and what it would have to tell again."""

from __future__ import annotations

from outlast.incidents import Incident
from outlast.launch import messages as m
from outlast.launch.cycle import Cycle
from outlast.launch.in_process import Mended
from outlast.launch.link import Link
from outlast.policy.deadlines import Expired
from outlast.policy.quarantine import Distrusted

__all__ = ["Member"]


class Member:
    """Speak for one node.

    Args:
        link: The link to the coordinator.
        addr: Address of this node for its peers.
        nproc: Workers that it starts.
        wish: The slot that its user asked for, if any.

    Thread: the agent's main thread; nothing here blocks.
    """

    def __init__(self, link: Link, *, addr: str, nproc: int, wish: int | None) -> None:
        self.link = link
        self.node, self.addr, self.nproc = link.node, addr, nproc
        self._epoch, self._wish = link.epoch, wish
        self._place: m.SlotPlace | None = None
        self._ended: m.CycleFacts | None = None
        self._distrusted: tuple[Distrusted, ...] = ()
        self._script_settings: str | None = None

    def take_place(self, start: m.Start) -> bool:
        """Note the place in a cycle; return False for one that was taken before (told twice, after a reconnection)."""
        if self._place is not None and start.cycle <= self._place.cycle:
            return False
        self._place = m.SlotPlace(cycle=start.cycle, slot=start.node_rank, num_slots=start.num_nodes)
        self._distrusted = start.distrusted
        return True

    def join(self, ended: m.CycleFacts | None) -> None:
        """Ask for a place in the next cycle, telling what is known of the one that ended here."""
        self._ended = ended
        self.link.send(
            m.JoinRequest(
                node=self.node, epoch=self._epoch, addr=self.addr, nproc=self.nproc, wish=self._wish, ended=ended
            )
        )

    def report_restart(self, mended: Mended, incident: Incident, cycle: Cycle) -> None:
        """Tell that the workers restarted inside their processes."""
        self.link.send(
            m.Restarted(
                node=self.node,
                epoch=self._epoch,
                cycle=cycle.number,
                call=mended.call,
                iteration=mended.iteration,
                incident=incident,
                durable_iteration=cycle.durable_iteration,
                progress_known=cycle.progress_known,
            )
        )

    def report_settings(self, text: str) -> None:
        """Tell what the script's config sets, empty for nothing, unless that was told before."""
        if text != self._script_settings:
            self._script_settings = text
            self.link.send(m.ScriptSettings(node=self.node, epoch=self._epoch, fault_tolerance=text))

    def finish(self, facts: m.CycleFacts) -> None:
        """Tell that every worker of this node ended with 0, or could be spared."""
        self._ended = facts
        self.link.send(m.Finished(node=self.node, epoch=self._epoch, facts=facts))

    def register(self, *, is_running: bool, is_joining: bool, has_finished: bool) -> None:
        """Tell a control store that is back, or its heir, where this node is, and what it said last."""
        self.link.send(
            m.Register(
                node=self.node,
                epoch=self._epoch,
                addr=self.addr,
                nproc=self.nproc,
                wish=self._wish,
                place=self._place,
                running=is_running or has_finished,
                distrusted=self._distrusted,
            )
        )
        if self._script_settings is not None:
            told, self._script_settings = self._script_settings, None
            self.report_settings(told)
        if is_joining:
            self.join(self._ended)
        elif has_finished and self._ended is not None:
            self.finish(self._ended)

    def host_cycle(self, cycle: int, port: int) -> None:
        """Tell where the cycle's own store is."""
        self.link.send(m.Master(node=self.node, epoch=self._epoch, cycle=cycle, addr=self.addr, port=port))

    def report_hang(self, incident: Incident, expired: list[Expired], cycle: int) -> None:
        """Tell at once that a rank exceeded a timeout, so that all nodes look at theirs."""
        self.link.send(
            m.Hung(node=self.node, epoch=self._epoch, cycle=cycle, incident=incident, expired=tuple(expired))
        )

    def report_unhealthy(self, incident: Incident, *, stays: bool) -> None:
        """Tell that this node failed its health check, and whether its agent goes on nevertheless."""
        self.link.send(m.Unhealthy(node=self.node, epoch=self._epoch, incident=incident, stays=stays))

    def leave(self, *, saved: bool, signal: int, facts: m.CycleFacts | None, whole_job: bool) -> None:
        """Tell that this node goes."""
        self.link.send(
            m.Leave(node=self.node, epoch=self._epoch, saved=saved, signal=signal, facts=facts, whole_job=whole_job)
        )
