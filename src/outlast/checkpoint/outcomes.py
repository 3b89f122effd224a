"""The outcomes of one rank's saves and loads: counted, and reported in the log, the journal and to the agent.

The agent of ``outlast run`` reads them on this rank's page of the heartbeat memory: a committed checkpoint is progress,
on which restart budgets reset, and an invalid result soon after a load excludes the loaded checkpoint. A
:class:`outlast.monitor.RankMonitor` may share the page; it keeps the page's other content.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast import clock
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.directory import DirectoryRefused, Refusal
from outlast.checkpoint.late_tiers import LateTiers
from outlast.checkpoint.replica.client import CopyOutcome
from outlast.checkpoint.save import PeerSilent, Replaced, Save
from outlast.checkpoint.tiers import Restored
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.durability import Durability, OwedSaves, describe_overdue, job_tier, with_commit
from outlast.policy.recovery_point import Tier, tier_of_load
from outlast.runtime.board import Board, LoadedCopy
from outlast.runtime.journal import Journal
from outlast.wording import count

log = logging.getLogger(__name__)
_LEAVING_S = 2.0
"""Seconds in which a process detects that the call, which its peers have already left, ends."""
_LOOK_S = 0.01
FIRST_LANE = "commit"
"""Name of the lane that gets every save first, if there is memory to keep it in or a global tier."""


@dataclass(slots=True)
class _SaveUnderWay:
    undecided: set[str]
    """Lanes in which it is neither committed nor failed yet."""
    open: set[str]
    reached: set[Tier] = field(default_factory=set)
    errors: dict[str, CheckpointError] = field(default_factory=dict)


class Outcomes:
    """Counts and reports the outcomes of one rank's saves and loads.

    Args:
        journal: Journal for events; ``None`` = log only.
        suspect_window: Iterations after a load in which an invalid result excludes the loaded checkpoint.
        tiers: The configured tiers.
        where: The tier that outlives the job, with its path; for people.
        is_left: Returns whether the call around the saves has ended; ``None`` = there is no such call. Saves that fail
            because of that are abandoned: no incidents, and not counted.

    Raises:
        OutlastError: The agent's heartbeat memory is not usable.

    Thread: any; the lanes' threads call it, the training thread reads its attributes.
    """

    def __init__(
        self,
        place: WorkerEnv,
        journal: Journal | None,
        arenas: ArenaPool,
        refusal: Refusal,
        *,
        suspect_window: int,
        tiers: frozenset[Tier] = frozenset(),
        where: str = "",
        is_left: Callable[[], bool] | None = None,
    ) -> None:
        self._place, self._arenas, self._refusal, self._suspect_window = place, arenas, refusal, suspect_window
        self._is_left, self._is_process_ending = is_left, False
        # Only rank 0 logs at INFO: all ranks have the same messages.
        self._level = logging.INFO if place.global_rank == 0 else logging.DEBUG
        self._journal = journal or Journal(
            None, run_id=place.run_id, job=place.job, node=place.node, proc=f"rank-{place.global_rank}"
        )
        self._lock = threading.Lock()
        self._board = None if place.board is None else Board.open(place.board)
        self._page = None if self._board is None else self._board.rank(place.local_rank)
        self._under_way: dict[int, _SaveUnderWay] = {}
        self._tiers, self._where = tiers, where
        self._durability = Durability()
        owed = None if self._page is None else self._page.owed
        self._owed = OwedSaves() if owed is None else OwedSaves().add(owed[0], owed[1] / 1e9)
        self.num_failures = 0
        self.last_error: CheckpointError | None = None
        self.late = LateTiers()

    @property
    def durability(self) -> Durability:
        """The newest checkpoints that survive each failure, saved or loaded. Thread: any."""
        return self._durability

    @property
    def durable_lag_s(self) -> float:
        """Seconds for which a commit to the tier that outlives the job has been due; 0 = none is due. Thread: any."""
        return self._owed.lag_s(clock.now_ns() / 1e9)

    def describe_overdue(self, limit_s: float, done: int) -> str:
        return describe_overdue(
            where=self._where or "any tier that outlives the job",
            lag_s=self.durable_lag_s,
            limit_s=limit_s,
            error=str(self.last_error or ""),
            known=self._durability,
            done=done,
        )

    def check(self, limit: int, *, iteration: int) -> None:
        """Raise :class:`CheckpointError` when ``limit`` saves in a row have failed; 0 = never."""
        if self._refusal.error is None and 0 < limit <= self.num_failures:
            advice = "Make room or repair the directory"
            if isinstance(self.last_error, PeerSilent):
                advice = "Have the launcher start all ranks again"
            raise CheckpointError(
                f"{count(self.num_failures, 'save')} in a row failed, the last with: {self.last_error}. "
                f"{advice}; max_consecutive_save_failures sets how many are tolerated",
                rank=self._place.global_rank,
                iteration=iteration,
            )

    def close(self) -> None:
        with self._lock:
            self.late.stop()
            board, self._board, self._page = self._board, None, None
            if board is not None:
                board.close()

    # -- saves -------------------------------------------------------------------------------------------------

    def saving(self, iteration: int, tiers: frozenset[Tier]) -> None:
        with self._lock:
            if job_tier(self._tiers) in tiers:
                self._owed = self._owed.add(iteration, clock.now_ns() / 1e9)
            if self._page is not None:
                self._page.set_owed(self._owed_words())
                self._page.set_iteration(iteration)
                self._page.report_progress()

    def scheduled(self, save: Save, *, is_async: bool) -> None:
        what, level = ("Scheduling async checkpoint save", self._level) if is_async else ("saving", logging.DEBUG)
        log.log(level, "%s of iteration %d to %s", what, save.iteration, _names(save.tiers))
        self._write(EventKind.SAVE_SCHEDULED, save.iteration, stall_s=save.stall_s, tiers=_list(save.tiers))

    def begin(self, save: Save, lanes: Collection[str]) -> None:
        with self._lock:
            self._under_way[save.attempt.ordinal] = _SaveUnderWay(set(lanes), set(lanes))

    def committed(self, save: Save, lane: str, tiers: frozenset[Tier], failures: tuple[CopyOutcome, ...] = ()) -> None:
        """Record that a lane has committed a save to ``tiers``; empty = it was in all of the lane's before."""
        for failure in failures:  # warned of once until the partner accepts a copy again
            if failure.is_new:
                log.warning("no copy on node %s: %s; saves continue without it", failure.node, failure.error)
                text = f"node {failure.node}: {failure.error}"
                self._write_incident(IncidentKind.REPLICATION_FAILED, save.iteration, text, partner=failure.node)
            else:
                log.debug("still no copy on node %s: %s", failure.node, failure.error)
        self.late.commit(lane, save.iteration)
        if tiers and not save.suspect:
            took = save.result().duration_s
            log.debug("committed iteration %d, tiers %s, in %.2f s", save.iteration, _names(tiers), took)
            self._write(
                EventKind.SAVE_COMMITTED,
                save.iteration,
                generation=save.iteration,
                duration_s=took,
                num_bytes=save.num_bytes,
                tiers=_list(tiers),
            )
            self.report_committed(save.iteration, tiers)
        self._advance(save, lane, tiers=tiers)

    def failed(self, save: Save, lane: str, error: CheckpointError, *, is_retried: bool = False) -> None:
        with self._lock:
            under_way = self._under_way.get(save.attempt.ordinal)
            is_first = under_way is None or lane not in under_way.errors
            reached = frozenset() if under_way is None else frozenset(under_way.reached)
        if isinstance(error, DirectoryRefused):
            self._refusal.error = error
        if is_first and self._refusal.error is None and self._is_given_up():  # not an incident
            log.log(
                self._level,
                "the save of iteration %d is abandoned, as its call or its process ends: %s",
                save.iteration,
                error,
            )
        elif is_first and not isinstance(error, Replaced):
            with self._lock:
                self.last_error = error
            # A silent peer may be rank 0; any other error is the same on every rank.
            level = logging.WARNING if self._place.global_rank == 0 or isinstance(error, PeerSilent) else logging.DEBUG
            if not self.late.may_warn(lane):
                level = logging.DEBUG
            where = f"; it is in {_names(reached)}" if reached else ""
            again = "; it is retried until a newer save takes its place" if is_retried else ""
            log.log(level, "save failed: %s%s%s", error, where, again)
            self._write_incident(
                IncidentKind.SAVE_FAILED, save.iteration, str(error), tier=_TIER_OF_LANE.get(lane, lane)
            )
        if isinstance(error, Replaced):
            self.late.replace(lane)
        else:
            self.late.fail(lane, str(error))
        self._advance(save, lane, error=error, is_retried=is_retried)

    def _advance(
        self,
        save: Save,
        lane: str,
        *,
        tiers: frozenset[Tier] = frozenset(),
        error: CheckpointError | None = None,
        is_retried: bool = False,
    ) -> None:
        """Record a lane's result; end the save once all of its lanes are done."""
        with self._lock:
            under_way = self._under_way.get(save.attempt.ordinal)
            if under_way is None:
                if save.handle.is_settled:
                    return
                under_way = self._under_way[save.attempt.ordinal] = _SaveUnderWay({lane}, {lane})
            was_undecided = bool(under_way.undecided)
            under_way.undecided.discard(lane)
            if error is None:
                under_way.reached |= tiers
                under_way.errors.pop(lane, None)
            else:
                under_way.errors.setdefault(lane, error)
            if not is_retried:
                under_way.open.discard(lane)
            is_decided, is_over = not under_way.undecided, not under_way.open
            reached, errors = frozenset(under_way.reached), list(under_way.errors.values())
            if is_over:
                del self._under_way[save.attempt.ordinal]
            if is_decided and was_undecided:
                is_saved = not errors or bool(reached)
                self.num_failures = 0 if is_saved else self.num_failures + (not self._is_unblamed(errors))
        if save.arena is not None:
            if is_over:
                self._arenas.give_back(save.arena)
            elif is_decided or lane == FIRST_LANE:
                self._arenas.mark_behind(save.arena)
        if is_over and not errors and reached and not save.suspect:
            took = _seconds(save.result().duration_s)
            log.log(self._level, "saved iteration %d to %s in %s", save.iteration, _names(reached), took)
        # Last, so that a waiting caller finds the outcome logged and in the journal.
        if is_over and not errors:
            save.handle.succeed(save.result())
        elif is_decided and errors:
            save.handle.fail(errors[0], is_retried=not is_over)

    def _is_unblamed(self, errors: Iterable[CheckpointError]) -> bool:
        return self.is_call_left or all(isinstance(error, Replaced) for error in errors)

    @property
    def is_call_left(self) -> bool:
        """Whether the surrounding call has ended, or the process ends. Thread: any."""
        return self._is_process_ending or (self._is_left is not None and self._is_left())

    def abandon(self) -> None:
        self._is_process_ending = True

    def _is_given_up(self) -> bool:
        """Return whether a save failed because the call has ended, here or at a peer. Blocks: up to 2 s."""
        if self._is_left is None and not self._is_process_ending:
            return False
        end_ns = clock.now_ns() + int(_LEAVING_S * 1e9)
        while not self.is_call_left:
            if clock.now_ns() >= end_ns:
                return False
            time.sleep(_LOOK_S)
        return True

    # -- loads -------------------------------------------------------------------------------------------------

    def skipped(self, restored: Restored) -> None:
        for rejection in restored.rejected:
            if rejection.rank == self._place.global_rank:
                log.warning("skipped: %s", rejection)
                evidence = {"generation": rejection.checkpoint, "tier": rejection.tier, "file": rejection.file}
                self._write_incident(IncidentKind.COPY_REJECTED, rejection.checkpoint, str(rejection), **evidence)

    def loaded(self, restored: Restored, *, suspect_window: int | None = None) -> None:
        """Report that training continues from a checkpoint.

        Args:
            suspect_window: Iterations after the load in which an invalid result excludes the checkpoint; ``None`` = the
                default.
        """
        tiers = ", ".join(f"{restored.tiers.count(name)} from {name}" for name in dict.fromkeys(restored.tiers))
        took = _seconds(restored.load_s)
        log.log(self._level, "loaded iteration %d in %s; tiers by rank: %s", restored.iteration, took, tiers)
        if not restored.finite and self._place.global_rank == 0:
            log.warning(
                "the loaded checkpoint %d contains numbers that are infinite or NaN: there is no older one without "
                "them, or prefer_finite is off; unless they are expected, training resumes from a broken state",
                restored.checkpoint,
            )
        self._write(
            EventKind.RESTORED,
            restored.iteration,
            generation=restored.checkpoint,
            attempt=restored.attempt,
            tier=restored.tier,
            bytes_read=restored.bytes_read,
            rejected=[str(rejection) for rejection in restored.rejected],
            load_s=restored.load_s,
        )
        self.report_origin(restored, suspect_window=suspect_window)

    def report_origin(self, restored: Restored, *, suspect_window: int | None = None) -> None:
        with self._lock:
            if self._page is None:
                return
            self._page.set_iteration(restored.iteration)
            self._page.set_durability(self._durability_of(restored))  # a state kept in memory is newer
            read = [tier for tier in restored.tiers if tier != "kept"]  # a kept state stayed in its process
            if read:
                self._page.set_restored(
                    LoadedCopy(
                        checkpoint=restored.checkpoint,
                        attempt=restored.attempt,
                        tier=Tier[tier_of_load(read).upper()],
                        suspect_window=self._suspect_window if suspect_window is None else suspect_window,
                    )
                )

    def _durability_of(self, restored: Restored) -> Durability:
        """Return the durability that a load implies; a checkpoint that all ranks read from the global tier outlives the
        job.
        """
        far = set(restored.tiers) == {str(Tier.GLOBAL)}
        return Durability(restored.checkpoint, *(2 * (restored.checkpoint,) if far else ()))

    def leaving(self, iteration: int, exit_code: int) -> None:
        with self._lock:
            if self._page is not None:
                self._page.set_iteration(iteration)
                self._page.set_leaving(exit_code)

    def report_committed(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """Report to the agent that a checkpoint is in more tiers, by this process or before it. Thread: any."""
        with self._lock:
            self._durability = with_commit(self._durability, iteration, tiers, self._tiers)
            self._owed = self._owed.cover(self._durability.job)
            if self._page is not None:
                self._page.set_durability(self._durability)
                self._page.set_owed(self._owed_words())

    def start_from(self, held: Mapping[int, Collection[Tier]]) -> None:
        for iteration, tiers in held.items():
            self.report_committed(iteration, frozenset(tiers))

    def _owed_words(self) -> tuple[int, int] | None:
        oldest = self._owed.oldest
        return None if oldest is None else (oldest[0], int(oldest[1] * 1e9))

    # -- the journal -------------------------------------------------------------------------------------------

    def _write(self, kind: EventKind, iteration: int, **data: Any) -> None:
        self._journal.write(kind, rank=self._place.global_rank, iteration=iteration, **data)

    def _write_incident(self, kind: IncidentKind, iteration: int, summary: str, **evidence: Any) -> None:
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
        self._write(EventKind.INCIDENT, iteration, incident=incident)


_TIER_OF_LANE = {FIRST_LANE: str(Tier.MEMORY)}


def _list(tiers: Collection[Tier]) -> list[str]:
    return [str(tier) for tier in sorted(tiers)]


def _names(tiers: Collection[Tier]) -> str:
    return ", ".join(_list(tiers))


def _seconds(duration_s: float) -> str:
    digits = 2 if duration_s < 1 else 1 if duration_s < 10 else 0
    return f"{duration_s:.{digits}f} s"
