"""The lane to the global tier: its own thread and exchange, behind the near tiers' commit.

Every rank takes inventory of its image, rank 0 shares the writing out, every rank has its writer process put its files
together, several at once, and rank 0 commits: data, ``.metadata``, manifest, tracker. All ranks get the same outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from outlast.checkpoint.claim import NEW, Claim, DirectoryContent, DirectoryRefused, Held
from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import Items, dump_metadata
from outlast.checkpoint.dcp.layout import FILE_BYTES, Duty, Inventory, Packing, WriteReport, assign, compose
from outlast.checkpoint.dcp.manifest import METADATA, SCHEMA, FileEntry, GlobalManifest
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.lane import PeerSilent, SaveExchange, SaveOutcome, deadline
from outlast.checkpoint.manifest import TensorEntry
from outlast.checkpoint.shard import digests
from outlast.errors import CheckpointError
from outlast.policy.retention import choose_kept

__all__ = ["AskWriter", "GlobalLane", "GlobalRetention", "GlobalSave", "Planned", "Step"]


NUM_FILES_AT_ONCE = 3
GRACE_S = 10.0
"""Ranks wait this much longer for rank 0's words than rank 0 does for theirs: better late than contradictory."""
ANSWER_S = 5.0
"""The writer has this much longer to answer than it has to write: it is not to be taken for dead."""
T = TypeVar("T", bound=msgspec.Struct)
AskWriter: TypeAlias = Callable[[Assemble, int, float], Assembled]
"""Has the writer process put a file together: request, descriptor of the image, seconds to wait for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSave:
    """One save on its way to the global tier."""

    iteration: int
    attempt: SaveAttempt
    fd: int
    """Of the image, for the writer; stays open until the outcome."""
    image: memoryview
    """The shard; stays what it is until the outcome."""
    tensors: tuple[TensorEntry, ...]
    """What lies where in it."""
    restored_from: int | None = None
    restored_attempt: str | None = None
    suspect: bool = False
    """For diagnosis only: it goes to ``suspect/`` and is never the newest."""
    context: Any = None
    """Whatever the caller wants to find again in the outcome."""


class _Told(msgspec.Struct, frozen=True):
    """A rank's inventory, or why there is none."""

    iteration: int
    inventory: Inventory | None = None
    error: str | None = None


class _Order(msgspec.Struct, frozen=True):
    """What a rank is to write, or why nobody writes."""

    duty: Duty | None = None
    error: str | None = None


class _Wrote(msgspec.Struct, frozen=True):
    report: WriteReport | None = None
    error: str | None = None


@dataclass(slots=True)
class Planned:
    """What rank 0 knows of a save under way."""

    inventories: list[Inventory] = field(default_factory=list)
    duties: tuple[Duty, ...] = ()


class Step:
    """One save, on one rank.

    Args:
        save: The save.
        exchange: This rank's words to its peers.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Longest time from now to the outcome.

    Thread: the lane's.
    """

    def __init__(
        self, save: GlobalSave, exchange: SaveExchange, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.save, self.rank, self.world_size = save, rank, world_size
        self._exchange, self._timeout_s, self._left_s = exchange, timeout_s, deadline(timeout_s)
        self.is_silent = False
        """A rank said nothing in time."""

    def tell_inventory(self) -> Items | None:
        """Say what this rank has; return it, ``None`` when it cannot be told apart."""
        rank, world_size = self.rank, self.world_size
        try:
            items = Items(self.save.image, self.save.tensors, world_size=world_size)
        except CheckpointError as error:
            self.say(f"has/{rank}", _Told(self.save.iteration, error=f"rank {rank}: {error}"))
            return None
        self.say(f"has/{rank}", _Told(self.save.iteration, items.inventory))
        return items

    def order(self, refusal: str | None) -> Planned:
        """Hear what all ranks have, and tell each what to write. Errors are told, not raised.

        Args:
            refusal: Why nobody is to write anything; ``None`` = all may.
        """
        planned, error = Planned(), refusal
        try:
            for rank in range(self.world_size):
                told = self.hear(f"has/{rank}", _Told)
                if told.iteration != self.save.iteration:
                    raise CheckpointError(f"rank {rank} saves iteration {told.iteration}; all must save the same ones")
                if told.inventory is None:
                    raise CheckpointError(told.error or f"rank {rank} has nothing")
                planned.inventories.append(told.inventory)
            planned.duties = assign(planned.inventories)
        except CheckpointError as failure:
            error = error or str(failure)
        for rank in range(self.world_size):
            self.say(f"order/{rank}", _Order(error=error) if error is not None else _Order(planned.duties[rank]))
        return planned

    def write(self, directory: GlobalDirectory, items: Items | None, ask: AskWriter, *, file_bytes: int) -> None:
        """Write what this rank was told to, and say what came of it.

        Args:
            directory: Where the generation goes.
            items: What this rank has; ``None`` = it could not be told apart.
            ask: Reaches the writer process.
            file_bytes: A file that has reached it is full.
        """
        rank = self.rank
        try:
            order = self.hear(f"order/{rank}", _Order, grace_s=GRACE_S)
            if order.duty is None or items is None:
                raise CheckpointError(order.error or "there is nothing to write")
            wrote = _Wrote(self._write(directory, items, order.duty, ask, file_bytes))
        except CheckpointError as error:
            text = str(error)
            wrote = _Wrote(error=text if text.startswith("rank ") else f"rank {rank}: {text}")
        self.say(f"wrote/{rank}", wrote)

    def gather_reports(self) -> tuple[list[WriteReport], str | None]:
        """Hear what all ranks wrote, even after a failure: nothing may be cleared away while somebody writes."""
        reports, first_error = [], None
        for rank in range(self.world_size):
            try:
                wrote = self.hear(f"wrote/{rank}", _Wrote)
            except CheckpointError as error:
                first_error = first_error or str(error)
                continue
            if wrote.report is not None:
                reports.append(wrote.report)
            else:
                first_error = first_error or wrote.error
        return reports, first_error

    def tell_outcome(self, outcome: SaveOutcome) -> None:
        """Say what became of the save. Rank 0 does."""
        self.say("outcome", outcome)

    def hear_outcome(self) -> SaveOutcome:
        """Return whether there is a generation, or why not. Raises: CheckpointError, when nobody says it."""
        return self.hear("outcome", SaveOutcome, grace_s=GRACE_S)

    def say(self, name: str, word: msgspec.Struct) -> None:
        """Tell all ranks something about this save."""
        self._exchange.post(self.save.attempt.ordinal, name, word)

    def hear(self, name: str, kind: type[T], *, grace_s: float = 0.0) -> T:
        """Return what a rank says. Raises: CheckpointError, when it says nothing in time."""
        save = self.save
        try:
            return self._exchange.hear(
                save.iteration,
                save.attempt.ordinal,
                name,
                kind,
                lambda: self._left_s() + grace_s,
                timeout_s=self._timeout_s,
            )
        except PeerSilent:
            self.is_silent = True
            raise

    def _write(
        self, directory: GlobalDirectory, items: Items, duty: Duty, ask: AskWriter, file_bytes: int
    ) -> WriteReport:
        save, inventory = self.save, items.inventory
        packing = Packing(file_bytes)
        tree = packing.add_range(items.tree.offset, items.tree.num_bytes)
        values = tuple(packing.add_bytes(items.value(inventory.values[index].item)) for index in duty.values)
        own = tuple(packing.add_tensor(items.entry(inventory.parts[index].name)) for index in duty.own)
        parts = tuple(packing.add_tensor(items.entry(inventory.parts[index].name)) for index in duty.parts)
        limit_s = max(0.1, self._left_s())
        requests = [
            Assemble(
                url=directory.url,
                folder=directory.attempt_folder(save.iteration, save.attempt),
                name=directory.file_name(self.rank, index, save.attempt),
                pieces=tuple(contents),
                timeout_s=limit_s,
            )
            for index, contents in enumerate(packing.files)
        ]
        with ThreadPoolExecutor(NUM_FILES_AT_ONCE, thread_name_prefix="outlast-global") as pool:
            running = [pool.submit(ask, request, save.fd, limit_s + ANSWER_S) for request in requests]
            answers = [one.result() for one in running]
        if error := next((answer.error for answer in answers if answer.error is not None), None):
            raise CheckpointError(error)
        files = tuple(
            FileEntry(name=request.name, num_bytes=answer.num_bytes, chunks=answer.chunks)
            for request, answer in zip(requests, answers, strict=True)
        )
        return WriteReport(files, all(answer.finite for answer in answers), tree, parts, own, values)


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
