"""The way to the global tier: its own thread, its own words between the ranks, behind the near tiers' commit.

Every rank takes inventory of its image, rank 0 shares the writing out, every rank has its writer process put its files
together, several at once, and rank 0 commits: data, ``.metadata``, manifest, tracker. All ranks hear the same outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast.checkpoint.claim import NEW, Claim, DirectoryContent, DirectoryRefused, Held
from outlast.checkpoint.dcp.compose import compose
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.inventory import WriteReport
from outlast.checkpoint.dcp.manifest import METADATA, SCHEMA, FileEntry, GlobalManifest
from outlast.checkpoint.dcp.metadata import dump_metadata
from outlast.checkpoint.dcp.packing import FILE_BYTES
from outlast.checkpoint.dcp.step import GRACE_S, AskWriter, GlobalSave, Planned, Step
from outlast.checkpoint.exchange import SaveExchange, SaveOutcome, deadline
from outlast.checkpoint.shard import digests
from outlast.errors import CheckpointError
from outlast.policy.retention import choose_kept

__all__ = ["GlobalLane", "GlobalRetention", "GlobalSave"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRetention:
    """How many generations are kept; see ``policy.retention``."""

    most_recent_k: int
    retain_interval: int = 0
    suspect_window: int = 0


class GlobalLane:
    """Take saves to the global tier, in their order.

    Args:
        directory: The global tier.
        store: A connection to the ranks' store for this thread alone.
        rank: This rank.
        world_size: Number of ranks.
        token: Names this set of processes; the same for all ranks.
        run: The run's name.
        topology: Digest of the ranks' arrangement.
        ask: Has the writer process put a file together.
        timeout_s: Longest time from the beginning of a save to its outcome.
        retention: What is kept.
        on_outcome: Called in the lane's thread with each save and its error; ``None`` = it is committed.
        file_bytes: A file that has reached it is full.
        seen: What lay in the directory when the run began; ``None`` = that is not known. Only rank 0 uses it.
        lease: On the directory, on rank 0; ``None`` = there is none.

    Collective: all ranks, with the same saves in the same order.
    """

    def __init__(
        self,
        directory: GlobalDirectory,
        store: Any,
        *,
        rank: int,
        world_size: int,
        token: str,
        run: str,
        topology: str,
        ask: AskWriter,
        timeout_s: float,
        retention: GlobalRetention,
        on_outcome: Callable[[GlobalSave, CheckpointError | None], None],
        file_bytes: int = FILE_BYTES,
        seen: DirectoryContent | None = NEW,
        lease: Held | None = None,
    ) -> None:
        self._directory = directory
        self._rank, self._world_size, self._run_name, self._topology = rank, world_size, run, topology
        self._ask, self._timeout_s, self._retention = ask, timeout_s, retention
        self._on_outcome, self._file_bytes = on_outcome, file_bytes
        self._known: set[int] = set()
        self._not_finite: set[int] = set()
        self._claim, self._may_be_stale = Claim(directory, run, seen, lease), True
        self._saves: queue.SimpleQueue[GlobalSave | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._exchange = SaveExchange(store, f"{token}/global", self._stop, rank=rank)
        self._thread = threading.Thread(target=self._run, name="outlast-global", daemon=True)
        self._thread.start()

    def start_from(self, generations: Iterable[int], not_finite: frozenset[int]) -> None:
        """Take generations, and no others, for valid. Only before the first save.

        Args:
            generations: Which.
            not_finite: Generations that hold numbers that are infinite or NaN.
        """
        self._known, self._not_finite = set(generations), set(not_finite)

    def submit(self, save: GlobalSave) -> None:
        """Take a save to the global tier. Thread: any, but on all ranks in the same order."""
        self._saves.put(save)

    def stop(self, timeout_s: float) -> bool:
        """Give up what is not committed yet and end the thread; return whether it ended in time."""
        self._stop.set()
        self._saves.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (save := self._saves.get()) is not None:
            error: CheckpointError | None = None
            try:
                self._save(save)
            except CheckpointError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - whatever it is, it must not end saving without a word
                text = f"saving iteration {save.iteration} failed: {type(failure).__name__}: {failure}"
                error = CheckpointError(text, rank=self._rank, iteration=save.iteration)
            try:
                self._on_outcome(save, error)
            except Exception:  # a caller's own code, whose error is not the save's
                log.exception("a callback after the save of iteration %d failed", save.iteration)

    def _save(self, save: GlobalSave) -> None:
        step = Step(save, self._exchange, rank=self._rank, world_size=self._world_size, timeout_s=self._timeout_s)
        directory = self._directory.suspects if save.suspect else self._directory
        items = step.tell_inventory()
        refusal = self._refusal() if self._rank == 0 else None
        planned = step.order(refusal.error if refusal is not None else None) if self._rank == 0 else Planned()
        step.write(directory, items, self._ask, file_bytes=self._file_bytes)
        if self._rank == 0:
            self._decide(step, directory, planned, refusal)
        outcome = step.hear_outcome()
        if outcome.is_refused:
            self._exchange.part(save.attempt.ordinal, self._world_size, deadline(GRACE_S))
        if outcome.error is not None:
            what = f"iteration {save.iteration} is not saved to {directory.url}"
            raise outcome.failure(what, rank=self._rank, iteration=save.iteration)
        self._exchange.forget(save.attempt.ordinal)
        if self._rank == 0:
            self._follow_up(save, directory)

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _refusal(self) -> SaveOutcome | None:
        """Return why nothing may be written; ``None``: the directory is this run's."""
        try:
            self._claim.hold()
        except (CheckpointError, OSError) as error:
            return _failed_here(error)
        return None

    def _decide(self, step: Step, directory: GlobalDirectory, planned: Planned, refusal: SaveOutcome | None) -> None:
        """Commit what all ranks wrote, or clear it away; tell which."""
        save = step.save
        reports, error = step.gather_reports()
        outcome = refusal or SaveOutcome(error, step.is_silent)
        if outcome.error is None:
            try:
                self._commit(save, directory, planned, reports)
            except (CheckpointError, OSError) as failure:
                outcome = _failed_here(failure)
        if outcome.error is not None:
            self._may_be_stale = True
            try:
                directory.discard(save.iteration, save.attempt)
            except (CheckpointError, OSError) as failure:
                log.warning("files of a failed save cannot be removed: %s", failure)
        step.tell_outcome(outcome)

    def _commit(
        self, save: GlobalSave, directory: GlobalDirectory, planned: Planned, reports: list[WriteReport]
    ) -> None:
        composed = compose(planned.inventories, planned.duties, reports)
        manifest = GlobalManifest(
            schema=SCHEMA,
            run=self._run_name,
            topology=self._topology,
            world_size=self._world_size,
            iteration=save.iteration,
            attempt=str(save.attempt),
            restored_from=save.restored_from,
            restored_attempt=save.restored_attempt,
            finite=composed.finite,
            files=composed.files,
            items=composed.items,
            ranks=composed.ranks,
        )
        metadata = dump_metadata(manifest)
        entry = FileEntry(name=METADATA, num_bytes=len(metadata), chunks=digests(metadata))
        self._claim.hold()
        manifest = msgspec.structs.replace(manifest, metadata=entry)
        directory.commit(save.iteration, save.attempt, manifest, metadata)
        if not save.suspect:
            (self._not_finite.discard if manifest.finite else self._not_finite.add)(save.iteration)

    def _follow_up(self, save: GlobalSave, directory: GlobalDirectory) -> None:
        """What comes after a commit; none of it can undo that."""
        try:
            if not save.suspect:
                self._known.add(save.iteration)
                directory.point_to(save.iteration)
                self._remove_old(directory)
            if self._may_be_stale:
                if removed := directory.remove_stale(save.attempt):
                    log.debug("removed files of earlier attempts: %s", ", ".join(removed))
                self._may_be_stale = False
        except (CheckpointError, OSError) as error:
            log.warning("iteration %d is committed, but cleaning up failed: %s", save.iteration, error)

    def _remove_old(self, directory: GlobalDirectory) -> None:
        present = directory.generations()
        newest = max(present, default=0)
        kept = choose_kept(
            [*(self._known & set(present)), newest],
            most_recent_k=self._retention.most_recent_k,
            retain_interval=self._retention.retain_interval,
            suspect_window=self._retention.suspect_window,
            # What is newer and not known to be valid does not take the place of the newest that is finite.
            not_finite=self._not_finite | ({newest} - self._known),
        )
        for generation in present:
            if generation not in kept and generation < newest and self._retention.most_recent_k >= 0:
                directory.remove(generation)
                log.debug("removed generation %d from %s", generation, directory.url)


def _failed_here(error: Exception) -> SaveOutcome:
    """Return the outcome of a save that failed on rank 0."""
    return SaveOutcome.of(error, str(error) if isinstance(error, DirectoryRefused) else f"rank 0: {error}")
