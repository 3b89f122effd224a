"""What the log and the journal say about saves and loads of this rank."""

from __future__ import annotations

import logging
from typing import Any

from outlast.checkpoint.handle import SaveResult
from outlast.checkpoint.load import TIER, Restored
from outlast.env import WorkerEnv
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.runtime.journal import Journal

__all__ = ["Reporter"]

log = logging.getLogger(__name__)


class Reporter:
    """Write events of one rank.

    Args:
        place: The rank's place.
        journal: Where to; ``None`` = into the log only.

    Thread: any.
    """

    def __init__(self, place: WorkerEnv, journal: Journal | None) -> None:
        self._place = place
        self._journal = journal or Journal(
            None, run_id=place.run_id, job=place.job, node=place.node, proc=f"rank-{place.global_rank}"
        )

    def scheduled(self, iteration: int, *, stall_s: float) -> None:
        """A state was copied; its commit is under way."""
        log.info("Scheduling async checkpoint save of iteration %d, tier %s", iteration, TIER)
        self._journal.write(
            EventKind.SAVE_SCHEDULED, rank=self._place.global_rank, iteration=iteration, stall_s=stall_s
        )

    def committed(self, result: SaveResult) -> None:
        """A generation is durable."""
        log.info("committed iteration %d, tier %s, in %.2f s", result.generation, TIER, result.duration_s)
        self._journal.write(
            EventKind.SAVE_COMMITTED,
            rank=self._place.global_rank,
            iteration=result.generation,
            generation=result.generation,
            duration_s=result.duration_s,
            num_bytes=result.num_bytes,
        )

    def failed(self, iteration: int, error: Exception, *, num_failures: int) -> None:
        """A save failed."""
        log.warning("save failed: %s (%d in a row)", error, num_failures)
        self._write_incident(IncidentKind.SAVE_FAILED, iteration, str(error), {})

    def restored(self, restored: Restored) -> None:
        """A generation was loaded; newer copies may have been passed over."""
        for rejection in restored.rejected:
            if rejection.rank == self._place.global_rank:
                log.warning("passed over: %s", rejection)
                evidence = {"generation": rejection.generation, "tier": rejection.tier, "file": rejection.file}
                self._write_incident(IncidentKind.COPY_REJECTED, rejection.generation, str(rejection), evidence)
        log.info("loaded iteration %d, tier %s, in %.2f s", restored.iteration, restored.tier, restored.load_s)
        self._journal.write(
            EventKind.RESTORED,
            rank=self._place.global_rank,
            iteration=restored.iteration,
            generation=restored.generation,
            tier=restored.tier,
            rejected=[str(rejection) for rejection in restored.rejected],
            load_s=restored.load_s,
        )

    def _write_incident(self, kind: IncidentKind, iteration: int, summary: str, evidence: dict[str, Any]) -> None:
        place = self._place
        incident = Incident(
            kind=kind,
            job=place.job,
            cycle=place.cycle,
            node=place.node,
            rank=place.global_rank,
            iteration=iteration,
            evidence={"summary": summary, **evidence},
        )
        self._journal.write(EventKind.INCIDENT, rank=place.global_rank, iteration=iteration, incident=incident)
