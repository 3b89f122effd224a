"""Unfit nodes, as the coordinator knows them: who stays outside and why, and what the others are told of it."""

from __future__ import annotations

from outlast.incidents import EventKind
from outlast.launch import messages as m
from outlast.launch.forming import why_it_waits
from outlast.launch.nodes import Node, Nodes
from outlast.launch.rulings import Record, Rulings
from outlast.policy.ladder import CycleEnd

__all__ = ["UnfitNodes"]


class UnfitNodes:
    """Keep what nodes reported of their health, and tell it.

    Args:
        nodes: The nodes that joined.
        rulings: Bars nodes from slots.
        record: Called with every event for the journal.

    Thread: the coordinator's.
    """

    def __init__(self, nodes: Nodes, rulings: Rulings, record: Record) -> None:
        self._nodes, self._rulings, self._record = nodes, rulings, record
        self._outside: dict[str, m.Unhealthy] = {}
        """Nodes that did not join."""
        self._told: dict[str, frozenset[str]] = {}
        """What the others were told of each node."""

    @property
    def any_waits(self) -> bool:
        """Whether an agent outside waits for the job's end."""
        return any(report.stays for report in self._outside.values())

    def take(self, report: m.Unhealthy, *, cycle: int, is_running: bool) -> bool:
        """Take a report; return whether the running cycle is to end because of it.

        A node that did not join is barred, also for the scheduler, which reads what the ladder remembers. One that
        trains is replaced if a spare can take its slot. A full disk does not end a run by itself; wrong numbers do.
        """
        node = self._nodes.get(report.node)
        if node is None or node.epoch != report.epoch:
            self._outside[report.node] = report
            self._rulings.bar(report.node)
            self._tell(report, cycle, "it did not join")
            return False
        if node.name in self._rulings.state.quarantined:
            return False
        if not self._nodes.holds_slot(node):
            self._rulings.bar(node.name)
            self._nodes.send(node, m.Wait(reason=why_it_waits(node, self._rulings.state)))
            self._tell(report, cycle, "it gets no slot")
            return False
        if not is_running or report.incident.cycle != cycle:
            return False  # it will say so again
        spares = self._nodes.num_heirs(node.name, self._rulings.state.barred)
        end = CycleEnd(cycle=cycle, incident=report.incident, num_spares=spares)
        if report.incident.evidence.get("computes_wrong") or self._rulings.would_replace(end):
            self._tell(report, cycle, "it is replaced")
            return True
        self._tell(report, cycle, "no spare waits for its slot: it trains on")
        return False

    def admit(self, node: Node) -> None:
        """Let a node in that has been found fit, and tell it who stays outside."""
        if self._outside.pop(node.name, None) is not None:
            self._told.pop(node.name, None)
            self._rulings.admit(node.name)
        for report in self._outside.values():
            text = f"{report.incident.describe()}; it did not join"
            self._nodes.out.append((node.name, node.epoch, m.Remark(text=text)))

    def send_stop(self, stop: m.Stop) -> None:
        """Tell the agents outside that the job is over."""
        for report in self._outside.values():
            if report.stays:
                self._nodes.out.append((report.node, report.epoch, stop))

    def describe(self) -> str:
        """Return who stays outside and why, as the end of a sentence; empty: nobody."""
        return "".join(f"; {report.incident.describe()}" for report in self._outside.values())

    def _tell(self, report: m.Unhealthy, cycle: int, what_follows: str) -> None:
        """Tell all other nodes of a report, and write it down; once for the same failures."""
        checks = frozenset(f"{one['name']} {one['target']}" for one in report.incident.evidence.get("checks", ()))
        if checks <= self._told.get(report.node, frozenset()):
            return
        self._told[report.node] = checks
        self._record(EventKind.INCIDENT, cycle, {"incident": report.incident})
        text = f"{report.incident.describe()}; {what_follows}"
        for node in self._nodes:
            if node.name != report.node:
                self._nodes.out.append((node.name, node.epoch, m.Remark(text=text)))
