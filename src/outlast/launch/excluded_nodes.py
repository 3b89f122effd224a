"""Nodes that failed their health check: which stay outside and why, and the remarks about them to the other nodes."""

from __future__ import annotations

import logging

from outlast.incidents import EventKind
from outlast.launch import protocol as m
from outlast.launch.decisions import Effects, Record, RecoveryStateClient
from outlast.launch.membership import Node, Nodes, why_it_waits
from outlast.policy.recovery_policy import CycleEnd

log = logging.getLogger(__name__)


class ExcludedNodes:
    """Keep the nodes' health reports and pass them on.

    Args:
        nodes: The nodes that joined.
        recovery_state_client: Quarantines nodes.
        effects: Receives events for the journal.

    Thread: the coordinator's.
    """

    def __init__(self, nodes: Nodes, recovery_state_client: RecoveryStateClient, effects: Effects) -> None:
        self._nodes, self._recovery_state, self._effects = nodes, recovery_state_client, effects
        self._outside: dict[str, m.Unhealthy] = {}
        """Reports of nodes that did not join."""
        self._reported: dict[str, frozenset[str]] = {}
        """Failed checks that the others were notified of, by node."""

    @property
    def any_waits(self) -> bool:
        """Whether the agent of an excluded node waits for the job's end."""
        return any(report.stays for report in self._outside.values())

    def take(self, report: m.Unhealthy, *, cycle: int, is_running: bool) -> bool:
        """Take a report; return whether the running cycle must end because of it.

        A node that did not join is quarantined in the policy's state, which the scheduler reads, too. A node that
        trains is replaced if a spare can take its slot. A full disk alone does not end a cycle; wrong numbers do.
        """
        node = self._nodes.by_name.get(report.node)
        if node is not None and node.epoch != report.epoch:
            log.warning("ignored a failed health check of another agent that has the name of node %s", report.node)
            return False
        if node is None:
            self._outside[report.node] = report
            self._recovery_state.bar(report.node)
            self._log(report, cycle, "it did not join")
            return False
        if node.name in self._recovery_state.state.quarantined:
            return False
        if not self._nodes.holds_slot(node):
            self._recovery_state.bar(node.name)
            self._nodes.send(node, m.Wait(reason=why_it_waits(node, self._recovery_state.state)))
            self._log(report, cycle, "it gets no slot")
            return False
        if not is_running or report.incident.cycle != cycle:
            return False  # the node reports it again
        spares = self._nodes.num_successors(node.name, self._recovery_state.state.barred)
        end = CycleEnd(cycle=cycle, incident=report.incident, num_spares=spares)
        if report.incident.evidence.get("computes_wrong") or self._recovery_state.would_replace(end):
            self._log(report, cycle, "it is replaced")
            return True
        self._log(report, cycle, "no spare waits for its slot: it trains on")
        return False

    def admit(self, node: Node) -> None:
        """Note that a node passed its check, and send it a remark on each excluded node."""
        if self._outside.pop(node.name, None) is not None:
            self._reported.pop(node.name, None)
            self._recovery_state.admit(node.name)
        for report in self._outside.values():
            text = f"{report.incident.describe()}; it did not join"
            self._nodes.out.append((node.name, node.epoch, m.Remark(text=text)))

    def send_stop(self, stop: m.Stop) -> None:
        """Send Stop to the waiting agents of excluded nodes."""
        for report in self._outside.values():
            if report.stays:
                self._nodes.out.append((report.node, report.epoch, stop))

    def describe(self) -> str:
        """Return the excluded nodes and the reasons, as the end of a sentence; empty: none."""
        return "".join(f"; {report.incident.describe()}" for report in self._outside.values())

    def _log(self, report: m.Unhealthy, cycle: int, what_follows: str) -> None:
        """Send a report to all other nodes, and record it; once for the same failures."""
        listed = report.incident.evidence.get("checks", ())
        listed = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list | tuple) else []
        checks = frozenset(f"{one.get('name')} {one.get('target')}" for one in listed)
        if checks <= self._reported.get(report.node, frozenset()):
            return
        self._reported[report.node] = checks
        self._effects.append(Record(EventKind.INCIDENT, cycle, {"incident": report.incident}))
        text = f"{report.incident.describe()}; {what_follows}"
        for node in self._nodes:
            if node.name != report.node:
                self._nodes.out.append((node.name, node.epoch, m.Remark(text=text)))
