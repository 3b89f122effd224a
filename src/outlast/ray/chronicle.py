"""What a group of actors writes into the journal."""

from __future__ import annotations

import logging

import msgspec

from outlast import env
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.ray.report import LossKind, RecoveryReport
from outlast.runtime.journal import Journal

__all__ = ["Chronicle"]

log = logging.getLogger(__name__)
_KINDS = {
    LossKind.DIED: IncidentKind.WORKER_FAILED,
    LossKind.RAISED: IncidentKind.WORKER_FAILED,
    LossKind.SILENT: IncidentKind.WORKER_HUNG,
    LossKind.HUNG: IncidentKind.WORKER_HUNG,
    LossKind.STUCK: IncidentKind.WORKER_HUNG,
}


class Chronicle:
    """Log recoveries, and write them into the journal of the run directory.

    Args:
        run_dir: The run directory; ``None``: nothing is written.
        group: Name of the group.

    Thread: one.
    """

    def __init__(self, run_dir: str | None, group: str) -> None:
        self._group = group
        self._journal = Journal(run_dir, run_id=group, job=group, node=env.node_name(), proc="driver")

    def note(self, report: RecoveryReport) -> None:
        """Write down a recovery: an incident for each loss, and what was done."""
        log.warning("incarnation %d of %s: %s", report.incarnation, self._group, report.describe())
        for lost in report.lost:
            incident = Incident(
                kind=_KINDS[lost.kind],
                job=self._group,
                cycle=report.incarnation - 1,
                node=lost.node,
                rank=lost.rank,
                pid=lost.pid,
                iteration=report.begun_at,
                detected_after_s=lost.detected_after_s,
                evidence={"summary": lost.evidence},
            )
            self._journal.write(EventKind.INCIDENT, incident=msgspec.to_builtins(incident))
        self._journal.write(
            EventKind.ACTORS_RECOVERED,
            cycle=report.incarnation,
            iteration=report.iteration,
            report=msgspec.to_builtins(report, str_keys=True),
        )

    def note_keeper(self, node: str) -> None:
        """Write down that the keeper of a node's checkpoint writer died, and that another one is on its way."""
        summary = "its keeper died; another one takes its place, what the writer held in memory is gone"
        incident = Incident(kind=IncidentKind.WRITER_LOST, job=self._group, node=node, evidence={"summary": summary})
        log.warning("%s: %s", self._group, incident.describe())
        self._journal.write(EventKind.INCIDENT, incident=msgspec.to_builtins(incident))

    def close(self) -> None:
        """Close the journal. Idempotent."""
        self._journal.close()
