"""One save on its way to the global tier, as one rank takes it along: what it says, hears and writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.inventory import Duty, Inventory, WriteReport
from outlast.checkpoint.dcp.items import Items
from outlast.checkpoint.dcp.manifest import FileEntry
from outlast.checkpoint.dcp.ownership import assign
from outlast.checkpoint.dcp.packing import Packing
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.exchange import PeerSilent, SaveExchange, SaveOutcome, deadline
from outlast.checkpoint.manifest import TensorEntry
from outlast.errors import CheckpointError

__all__ = ["AskWriter", "GlobalSave", "Planned", "Step"]

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
