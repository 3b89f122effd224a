"""What the log and the journal say about saves and loads of this rank."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from outlast.checkpoint.exchange import PeerSilent
from outlast.checkpoint.frames import CopyFailure
from outlast.checkpoint.handle import SaveResult
from outlast.checkpoint.recovery import Restored
from outlast.env import WorkerEnv
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.recovery_point import Tier
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
        # All ranks have the same to say of a save or a load: rank 0 says it.
        self._level = logging.INFO if place.global_rank == 0 else logging.DEBUG
        self._journal = journal or Journal(
            None, run_id=place.run_id, job=place.job, node=place.node, proc=f"rank-{place.global_rank}"
        )

    def scheduled(self, iteration: int, tiers: Collection[Tier], *, stall_s: float, is_async: bool) -> None:
        """A state was copied; its commit is under way, and training goes on meanwhile or waits for it."""
        names = _names(tiers)
        what = "Scheduling async checkpoint save" if is_async else "saving a checkpoint"
        log.debug("%s of iteration %d, tiers %s", what, iteration, ", ".join(names))
        self._journal.write(
            EventKind.SAVE_SCHEDULED, rank=self._place.global_rank, iteration=iteration, stall_s=stall_s, tiers=names
        )

    def committed(self, result: SaveResult, tiers: Collection[Tier]) -> None:
        """A generation is committed to these tiers."""
        names = _names(tiers)
        log.debug("committed iteration %d, tiers %s, in %.2f s", result.generation, ", ".join(names), result.duration_s)
        self._journal.write(
            EventKind.SAVE_COMMITTED,
            rank=self._place.global_rank,
            iteration=result.generation,
            generation=result.generation,
            duration_s=result.duration_s,
            num_bytes=result.num_bytes,
            tiers=names,
        )

    def saved(self, result: SaveResult, tiers: Collection[Tier]) -> None:
        """A generation is committed to the last of its tiers."""
        names, took = ", ".join(_names(tiers)), _seconds(result.duration_s)
        log.log(self._level, "saved iteration %d to %s in %s", result.generation, names, took)

    def not_copied(self, iteration: int, failure: CopyFailure) -> None:
        """A partner holds no right copy of this rank's shard; said once until it takes one again."""
        if not failure.is_new:
            log.debug("still no copy on node %s: %s", failure.node, failure.error)
            return
        log.warning("no copy on node %s: %s; saves continue without it", failure.node, failure.error)
        text = f"node {failure.node}: {failure.error}"
        self._write_incident(IncidentKind.REPLICATION_FAILED, iteration, text, {"partner": failure.node})

    def failed(self, iteration: int, error: Exception, *, num_failures: int, reached: Collection[Tier]) -> None:
        """A save failed, or reached these tiers only."""
        # Where a peer is silent it may be rank 0; of all else every rank has heard the same.
        level = logging.WARNING if self._place.global_rank == 0 or isinstance(error, PeerSilent) else logging.DEBUG
        where = f"; it is in {', '.join(_names(reached))}" if reached else ""
        count = f" ({num_failures} failed saves in a row)" if num_failures > 1 else ""
        log.log(level, "save failed: %s%s%s", error, where, count)
        self._write_incident(IncidentKind.SAVE_FAILED, iteration, str(error), {})

    def given_up(self, iteration: int, error: Exception) -> None:
        """A save was abandoned, as the call around it is left for a restart; that is no trouble of its own."""
        log.log(self._level, "the save of iteration %d is abandoned for a restart: %s", iteration, error)

    def restored(self, restored: Restored) -> None:
        """A generation was loaded; newer copies may have been passed over."""
        for rejection in restored.rejected:
            if rejection.rank == self._place.global_rank:
                log.warning("skipped: %s", rejection)
                evidence = {"generation": rejection.generation, "tier": rejection.tier, "file": rejection.file}
                self._write_incident(IncidentKind.COPY_REJECTED, rejection.generation, str(rejection), evidence)
        log.log(
            self._level,
            "loaded iteration %d in %s; tiers by rank: %s",
            restored.iteration,
            _seconds(restored.load_s),
            _count(restored.tiers),
        )
        if not restored.finite and self._place.global_rank == 0:
            log.warning(
                "what was loaded, generation %d, holds numbers that are infinite or NaN: there is no older one without "
                "them, or prefer_finite is off; unless they belong there, training resumes from a broken state",
                restored.generation,
            )
        self._journal.write(
            EventKind.RESTORED,
            rank=self._place.global_rank,
            iteration=restored.iteration,
            generation=restored.generation,
            attempt=restored.attempt,
            tier=restored.tier,
            bytes_read=restored.bytes_read,
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


def _names(tiers: Collection[Tier]) -> list[str]:
    """Return the tiers, nearest first."""
    return [str(tier) for tier in sorted(tiers)]


def _seconds(duration_s: float) -> str:
    digits = 2 if duration_s < 1 else 1 if duration_s < 10 else 0
    return f"{duration_s:.{digits}f} s"


def _count(tiers: tuple[str, ...]) -> str:
    """Return how many ranks loaded from which tier."""
    return ", ".join(f"{tiers.count(name)} from {name}" for name in dict.fromkeys(tiers))
