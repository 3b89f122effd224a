"""The way to the global tier: its own thread, its own words between the ranks, behind the near tiers' commit.

Every rank takes inventory of its image, rank 0 shares the writing out, every rank has its writer process put its files
together, several at once, and rank 0 commits: data, ``.metadata``, manifest, tracker. All ranks hear the same outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.dcp.compose import compose
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.inventory import Duty, Inventory, Report
from outlast.checkpoint.dcp.items import Items
from outlast.checkpoint.dcp.manifest import SCHEMA, FileEntry, GlobalManifest
from outlast.checkpoint.dcp.metadata import dump_metadata
from outlast.checkpoint.dcp.ownership import assign
from outlast.checkpoint.dcp.packing import FILE_BYTES, Packing
from outlast.checkpoint.directory import Attempt
from outlast.checkpoint.exchange import Exchange, NoWord, Stopped
from outlast.checkpoint.manifest import TensorEntry
from outlast.errors import CheckpointError
from outlast.policy.retention import choose_kept

__all__ = ["GlobalLane", "GlobalRetention", "GlobalSave"]

log = logging.getLogger(__name__)
NUM_FILES_AT_ONCE = 3
GRACE_S = 10.0
"""Ranks wait this much longer for rank 0's words than rank 0 does for theirs: better late than contradictory."""
ANSWER_S = 5.0
"""The writer has this much longer to answer than it has to write: it is not to be taken for dead."""
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSave:
    """One save on its way to the global tier."""

    iteration: int
    attempt: Attempt
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRetention:
    """How many generations are kept; see ``policy.retention``."""

    most_recent_k: int
    retain_interval: int = 0
    suspect_window: int = 0


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
    report: Report | None = None
    error: str | None = None


class _Outcome(msgspec.Struct, frozen=True):
    error: str | None = None


@dataclass(slots=True)
class _Planned:
    """What rank 0 knows of a save under way."""

    inventories: list[Inventory] = field(default_factory=list)
    duties: tuple[Duty, ...] = ()


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
        ask: Has the writer process put a file together: request, image, seconds to wait for the answer.
        timeout_s: Longest time from the beginning of a save to its outcome.
        retention: What is kept.
        on_outcome: Called in the lane's thread with each save and its error; ``None`` = it is committed.
        file_bytes: A file that has reached it is full.

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
        ask: Callable[[Assemble, int, float], Assembled],
        timeout_s: float,
        retention: GlobalRetention,
        on_outcome: Callable[[GlobalSave, CheckpointError | None], None],
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._directory = directory
        self._rank, self._world_size, self._run_name, self._topology = rank, world_size, run, topology
        self._ask, self._timeout_s, self._retention = ask, timeout_s, retention
        self._on_outcome, self._file_bytes = on_outcome, file_bytes
        self._known: set[int] = set()
        self._is_claimed, self._may_be_stale = False, True
        self._saves: queue.SimpleQueue[GlobalSave | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._exchange = Exchange(store, f"{token}/global", self._stop)
        self._thread = threading.Thread(target=self._run, name="outlast-global", daemon=True)
        self._thread.start()

    def start_from(self, generations: Iterable[int]) -> None:
        """Take generations, and no others, for valid. Only before the first save."""
        self._known = set(generations)

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
            except Exception:
                log.exception("what follows the save of iteration %d failed", save.iteration)

    def _save(self, save: GlobalSave) -> None:
        end_ns = clock.now_ns() + int(self._timeout_s * 1e9)
        step = _Step(self, save, lambda: (end_ns - clock.now_ns()) / 1e9)
        directory = self._directory.suspects if save.suspect else self._directory
        items = step.tell_inventory()
        planned = step.order() if self._rank == 0 else _Planned()
        step.write(directory, items)
        if self._rank == 0:
            self._decide(step, directory, planned)
        outcome = step.hear("outcome", _Outcome, grace_s=GRACE_S)
        if outcome.error is not None:
            raise CheckpointError(
                f"iteration {save.iteration} is not saved to {directory.url}: {outcome.error}",
                rank=self._rank,
                iteration=save.iteration,
            )
        self._exchange.forget(save.attempt.ordinal)
        if self._rank == 0:
            self._follow_up(save, directory)

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _decide(self, step: _Step, directory: GlobalDirectory, planned: _Planned) -> None:
        """Commit what all ranks wrote, or clear it away; tell which."""
        save = step.save
        reports, error = step.gather_reports()
        if error is None:
            try:
                self._commit(save, directory, planned, reports)
            except (CheckpointError, OSError) as failure:
                error = f"rank 0: {failure}"
        if error is not None:
            self._may_be_stale = True
            try:
                directory.discard(save.iteration, save.attempt)
            except (CheckpointError, OSError) as failure:
                log.warning("what a failed save left cannot be removed: %s", failure)
        step.say("outcome", _Outcome(error))

    def _commit(self, save: GlobalSave, directory: GlobalDirectory, planned: _Planned, reports: list[Report]) -> None:
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
        if not self._is_claimed:
            self._directory.claim(self._run_name)
            self._is_claimed = True
        directory.commit(save.iteration, save.attempt, manifest, dump_metadata(manifest))

    def _follow_up(self, save: GlobalSave, directory: GlobalDirectory) -> None:
        """What comes after a commit; none of it can undo that."""
        try:
            if not save.suspect:
                self._known.add(save.iteration)
                directory.point_to(save.iteration)
                self._remove_old(directory)
            if self._may_be_stale:
                if removed := directory.remove_stale(save.attempt):
                    log.info("removed what earlier attempts left: %s", ", ".join(removed))
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
        )
        for generation in present:
            if generation not in kept and generation < newest and self._retention.most_recent_k >= 0:
                directory.remove(generation)
                log.info("removed generation %d from %s", generation, directory.url)


class _Step:
    """One save, as one rank takes it along: what it says, hears and writes."""

    def __init__(self, lane: GlobalLane, save: GlobalSave, left_s: Callable[[], float]) -> None:
        self._lane, self.save, self._left_s = lane, save, left_s

    def tell_inventory(self) -> Items | None:
        """Say what this rank has; return it, ``None`` when it cannot be told apart."""
        rank, world_size = self._lane._rank, self._lane._world_size
        try:
            items = Items(self.save.image, self.save.tensors, alone=world_size == 1)
        except CheckpointError as error:
            self.say(f"has/{rank}", _Told(self.save.iteration, error=f"rank {rank}: {error}"))
            return None
        self.say(f"has/{rank}", _Told(self.save.iteration, items.inventory))
        return items

    def order(self) -> _Planned:
        """Hear what all ranks have, and tell each what to write. Errors are told, not raised."""
        planned, error = _Planned(), None
        try:
            for rank in range(self._lane._world_size):
                told = self.hear(f"has/{rank}", _Told)
                if told.iteration != self.save.iteration:
                    raise CheckpointError(f"rank {rank} saves iteration {told.iteration}; all must save the same ones")
                if told.inventory is None:
                    raise CheckpointError(told.error or f"rank {rank} has nothing")
                planned.inventories.append(told.inventory)
            planned.duties = assign(planned.inventories)
        except CheckpointError as failure:
            error = str(failure)
        for rank in range(self._lane._world_size):
            self.say(f"order/{rank}", _Order(error=error) if error is not None else _Order(planned.duties[rank]))
        return planned

    def write(self, directory: GlobalDirectory, items: Items | None) -> None:
        """Write what this rank was told to, and say what came of it."""
        rank = self._lane._rank
        try:
            order = self.hear(f"order/{rank}", _Order, grace_s=GRACE_S)
            if order.duty is None or items is None:
                raise CheckpointError(order.error or "there is nothing to write")
            wrote = _Wrote(self._write(directory, items, order.duty))
        except CheckpointError as error:
            text = str(error)
            wrote = _Wrote(error=text if text.startswith("rank ") else f"rank {rank}: {text}")
        self.say(f"wrote/{rank}", wrote)

    def gather_reports(self) -> tuple[list[Report], str | None]:
        """Hear what all ranks wrote, even after a failure: nothing may be cleared away while somebody writes."""
        reports, first_error = [], None
        for rank in range(self._lane._world_size):
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

    def say(self, name: str, word: msgspec.Struct) -> None:
        self._lane._exchange.post(self.save.attempt.ordinal, name, word)

    def hear(self, name: str, kind: type[T], *, grace_s: float = 0.0) -> T:
        lane, save = self._lane, self.save
        try:
            return lane._exchange.await_word(save.attempt.ordinal, name, kind, lambda: self._left_s() + grace_s)
        except Stopped:
            raise CheckpointError(
                f"iteration {save.iteration} is given up: this rank leaves", rank=lane._rank
            ) from None
        except NoWord:
            raise CheckpointError(
                f"iteration {save.iteration}: no word of {name} after {lane._timeout_s:g} s (save_timeout); "
                "see the log of that rank",
                rank=lane._rank,
                iteration=save.iteration,
            ) from None

    def _write(self, directory: GlobalDirectory, items: Items, duty: Duty) -> Report:
        lane, save, inventory = self._lane, self.save, items.inventory
        packing = Packing(lane._file_bytes)
        tree = packing.add_range(items.tree.offset, items.tree.num_bytes)
        values = tuple(packing.add_bytes(items.value(inventory.values[index].item)) for index in duty.values)
        own = tuple(packing.add_tensor(items.entry(inventory.parts[index].name)) for index in duty.own)
        parts = tuple(packing.add_tensor(items.entry(inventory.parts[index].name)) for index in duty.parts)
        limit_s = max(0.1, self._left_s())
        requests = [
            Assemble(
                url=directory.url,
                folder=directory.attempt_folder(save.iteration, save.attempt),
                name=directory.file_name(lane._rank, index, save.attempt),
                pieces=tuple(contents),
                timeout_s=limit_s,
            )
            for index, contents in enumerate(packing.files)
        ]
        with ThreadPoolExecutor(NUM_FILES_AT_ONCE, thread_name_prefix="outlast-global") as pool:
            running = [pool.submit(lane._ask, request, save.fd, limit_s + ANSWER_S) for request in requests]
            answers = [one.result() for one in running]
        if error := next((answer.error for answer in answers if answer.error is not None), None):
            raise CheckpointError(error)
        files = tuple(
            FileEntry(name=request.name, num_bytes=answer.num_bytes, chunks=answer.chunks)
            for request, answer in zip(requests, answers, strict=True)
        )
        return Report(files, all(answer.finite for answer in answers), tree, parts, own, values)
