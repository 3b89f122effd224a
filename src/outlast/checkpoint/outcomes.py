"""What became of this process's saves and loads: tiers reached, failures in a row, log and journal.

The methods are called by the lanes' threads; what they keep is read by the training thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from outlast import clock
from outlast.checkpoint.arena import ArenaPool
from outlast.checkpoint.claim import DirectoryRefused
from outlast.checkpoint.launcher_report import LauncherReport
from outlast.checkpoint.protocol import CopyFailure
from outlast.checkpoint.recovery import Restored
from outlast.checkpoint.save import PeerSilent, Save, SaveResult
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.recovery_point import Tier
from outlast.runtime.journal import Journal
from outlast.wording import count

__all__ = ["Outcomes", "Reporter"]

log = logging.getLogger(__name__)
_LEAVING_S = 2.0
"""Seconds in which a process learns that it has to leave what its peers have left already."""
_LOOK_S = 0.01


class Outcomes:
    """Take note of saves' ends, in whichever tier.

    Args:
        reporter: Writes log and journal.
        arenas: Where a save's memory goes back to.
        launcher: Reports committed generations to the node's agent.
    """

    def __init__(self, reporter: Reporter, arenas: ArenaPool, launcher: LauncherReport) -> None:
        self._reporter, self._arenas, self._launcher = reporter, arenas, launcher
        self._lock = threading.Lock()
        self._reached: dict[int, frozenset[Tier]] = {}
        """Tiers of the saves that are under way, by their ordinal."""
        self.durable: int | None = None
        """The newest generation known to be committed, loaded or saved."""
        self.num_failures = 0
        """Saves in a row that failed."""
        self.last_error: CheckpointError | None = None
        self.refusal: DirectoryRefused | None = None
        """Why no save of this run can succeed: a directory is another run's."""
        self.is_left: Callable[[], bool] | None = None
        """Whether the call that saves is left, and with it what is not committed; ``None``: there is no call."""

    def check(self, limit: int, *, rank: int, iteration: int) -> None:
        """Raise :class:`CheckpointError` when ``limit`` saves in a row have failed; 0 = never."""
        if self.refusal is None and 0 < limit <= self.num_failures:
            advice = "Make room or repair the directory"
            if isinstance(self.last_error, PeerSilent):
                advice = "Have the launcher start all ranks again"
            raise CheckpointError(
                f"{count(self.num_failures, 'save')} in a row failed, the last with: {self.last_error}. "
                f"{advice}; max_consecutive_save_failures sets how many are tolerated",
                rank=rank,
                iteration=iteration,
            )

    def committed(self, save: Save, tiers: frozenset[Tier], failures: tuple[CopyFailure, ...]) -> None:
        """A save was committed to more tiers; empty: it was in all of them before."""
        for failure in failures:
            self._reporter.not_copied(save.iteration, failure)
        self._reached[save.attempt.ordinal] = self._reached.get(save.attempt.ordinal, frozenset()) | tiers
        if not tiers or save.suspect:
            return
        with self._lock:
            self.durable = durable = max(self.durable or 0, save.iteration)
        self._reporter.committed(_result(save), tiers)
        self._launcher.committed(durable)

    def finished(self, save: Save) -> None:
        """A save is in all of its tiers."""
        self._release(save)
        reached = self._reached.pop(save.attempt.ordinal, frozenset())
        with self._lock:
            self.num_failures = 0
        if reached and not save.suspect:
            self._reporter.saved(_result(save), reached)
        # Last, so that whoever waited finds the outcome logged and in the journal.
        save.handle.succeed(_result(save))

    def failed(self, save: Save, error: CheckpointError) -> None:
        """A save did not reach a tier that it was meant for."""
        self._release(save)
        reached = self._reached.pop(save.attempt.ordinal, frozenset())
        if isinstance(error, DirectoryRefused):
            self.refusal = error
        if self.refusal is None and self._is_given_up():
            self._reporter.given_up(save.iteration, error)
        else:
            with self._lock:
                self.num_failures += 1
                self.last_error, num_failures = error, self.num_failures
            self._reporter.failed(save.iteration, error, num_failures=num_failures, reached=reached)
        save.handle.fail(error)

    def _is_given_up(self) -> bool:
        """Return whether a save failed because the call was left, here or at a peer. Blocks: up to 2 s."""
        if self.is_left is None:
            return False
        end_ns = clock.now_ns() + int(_LEAVING_S * 1e9)
        while not self.is_left():
            if clock.now_ns() >= end_ns:
                return False
            time.sleep(_LOOK_S)
        return True

    def _release(self, save: Save) -> None:
        if save.arena is not None:
            self._arenas.give_back(save.arena)


def _result(save: Save) -> SaveResult:
    return SaveResult(
        generation=save.iteration,
        num_bytes=save.num_bytes,
        duration_s=(clock.now_ns() - save.started_ns) / 1e9,
        stall_s=save.stall_s,
    )


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
        """A state was copied; its commit is under way, and training continues meanwhile or waits for it."""
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
        """A generation was loaded; newer copies may have been skipped."""
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
