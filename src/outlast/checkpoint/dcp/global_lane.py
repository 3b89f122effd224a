"""Saves to the global tier in a thread with its own message exchange, after the commit to memory.

Every rank lists the contents of its image; rank 0 distributes the writing; each rank's writer process assembles its
files; rank 0 commits data, ``.metadata``, manifest and tracker. All ranks get the same outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from outlast.checkpoint.dcp.assemble import Assemble, Assembled, Range
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import Items, dump_metadata
from outlast.checkpoint.dcp.layout import (
    FILE_BYTES,
    Duty,
    Inventory,
    InventoryRoot,
    InventoryTable,
    Order,
    Packing,
    PartDigests,
    WriteReport,
    WrittenFile,
    assign,
    compose,
    join,
    pack,
)
from outlast.checkpoint.dcp.manifest import METADATA, SCHEMA, FileEntry, GlobalManifest
from outlast.checkpoint.directory import DirectoryRefused
from outlast.checkpoint.infinities import examined
from outlast.checkpoint.lane import (
    GRACE_S,
    RankAnswer,
    Reached,
    RetryingLane,
    SaveOutcome,
    child_above,
    children,
)
from outlast.checkpoint.save import Replaced, Save
from outlast.checkpoint.shard import digests, pack_digests
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Tier

log = logging.getLogger(__name__)
NUM_FILES_AT_ONCE = 3
STALE_S = 10.0
"""A save yields to a newer one if the directory took longer than this to respond."""
ANSWER_S = 5.0
"""Time that the writer has to respond beyond its time limit for writing, so that a slow writer is not declared dead."""


class Inventoried(RankAnswer, frozen=True, kw_only=True):
    """A rank's inventory, or why it has none."""

    inventory: InventoryRoot | None = None


class Wrote(RankAnswer, frozen=True, kw_only=True):
    """A rank's write report, or why it wrote nothing."""

    report: WriteReport | None = None


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """The orders of a rank and of its subtree."""

    orders: list[tuple[int, Order]]


@dataclass(frozen=True, slots=True)
class _SharedWriting:
    inventories: list[Inventory]
    duties: tuple[Duty, ...]


class GlobalLane(RetryingLane):
    name = "global"
    _tier = Tier.GLOBAL
    tiers = frozenset({Tier.GLOBAL})
    file_bytes = FILE_BYTES
    """Size from which a file takes no more tensors."""

    def _commit(self, save: Save) -> Reached:
        if not self._wanted(save):
            self._committed.add(save.iteration, self.tiers)
            return Reached(frozenset())
        self._start_clock()
        directory = self._directory.suspects if save.suspect else self._directory
        items, answer = self._look(save)
        try:
            plan = self._plan(save, answer)
            duty = self._take_order(save, plan)
            if duty is not None:
                self._start_clock()
                self._report(save, directory, plan, self._write(save, directory, items, duty))
        finally:
            if items is not None:
                items.close()
        self._conclude(
            save, f"iteration {save.iteration} is not saved to the global tier ({directory.url})", is_limited=False
        )
        if not save.suspect:
            self._committed.add(save.iteration, self.tiers)
        if self._rank == 0:
            self._follow_up(save, directory)
        return Reached(self.tiers)

    @property
    def _directory(self) -> GlobalDirectory:
        assert self._places.directory is not None  # otherwise there is no global lane
        return self._places.directory

    def _where(self) -> str:
        return f"the global tier ({self._directory.url})"

    def _clear_up(self, save: Save) -> None:
        """Nothing to do: rank 0 cleans up before it posts the outcome."""

    # -- every rank --------------------------------------------------------------------------------------------

    def _look(self, save: Save) -> tuple[Items | None, Inventoried]:
        """Return the rank's items (``None``: the image cannot be read) and the message to rank 0."""
        try:
            items = Items(self._check_staged(save).view(save.num_bytes), save.tensors, world_size=self._world_size)
            mine = items.inventory
            table, digests = self._share(mine.table), self._share(PartDigests(mine.digests))
            root = InventoryRoot(table, digests, mine.offsets, mine.private)
            return items, Inventoried(iteration=save.iteration, inventory=root)
        except Exception as error:  # any error: the other ranks wait for this rank's message
            if not isinstance(error, CheckpointError) and not self._stop.is_set():
                log.exception("cannot determine the contents of iteration %d", save.iteration)
            answer = Inventoried.of(error, self._text_of(error), iteration=save.iteration)
            return None, answer

    def _take_order(self, save: Save, plan: _SharedWriting | None) -> Duty | None:
        """Return this rank's duty, after forwarding its subtree's orders; ``None``: the outcome is known."""
        if plan is not None:
            orders = {rank: Order.of(duty) for rank, duty in enumerate(plan.duties)}
        else:
            key, poll_s = f"order/{self._rank}", self.poll_pause_s(self._world_size)
            if self._wait_for(save, "outcome", key, grace_s=GRACE_S, poll_s=poll_s, is_limited=False) == "outcome":
                return None
            orders = dict(self.receive(save, key, Orders).orders)
        mine = orders.pop(self._rank)
        below: dict[int, list[tuple[int, Order]]] = {rank: [] for rank in children(self._rank, self._world_size)}
        for rank, order in orders.items():
            below[child_above(rank, self._rank)].append((rank, order))
        for child, some in below.items():
            self.post(f"order/{child}", Orders(some))
        return mine.duty

    def _write(self, save: Save, directory: GlobalDirectory, items: Items | None, duty: Duty) -> Wrote:
        """Write the files that rank 0 ordered."""
        try:
            assert items is not None  # otherwise rank 0 sent no order
            return Wrote(iteration=save.iteration, report=self._write_files(save, directory, items, duty))
        except Exception as error:  # any error: rank 0 waits for this rank's report
            if not isinstance(error, CheckpointError) and not self._stop.is_set():
                log.exception("files of iteration %d cannot be written", save.iteration)
            return Wrote.of(error, self._text_of(error), iteration=save.iteration)

    def _write_files(self, save: Save, directory: GlobalDirectory, items: Items, duty: Duty) -> WriteReport:
        values = [items.value(items.inventory.table.values[index].item) for index in duty.values]
        packing, tree = Packing(self.file_bytes), Range(items.tree.offset, items.tree.num_bytes)
        names = frozenset(tensor.name for tensor in examined(save))
        pack(packing, items.inventory, duty, tree, values, items.offsets, names)
        limit_s = max(0.1, self._left_s())
        requests = [
            Assemble(
                url=directory.url,
                folder=directory.attempt_folder(save.iteration, save.attempt),
                name=directory.file_name(self._rank, index, save.attempt),
                pieces=tuple(contents),
                timeout_s=limit_s,
            )
            for index, contents in enumerate(packing.files)
        ]

        def ask(request: Assemble) -> WrittenFile:
            assert save.arena is not None
            done, _ = self._writer.ask(request, Assembled, timeout_s=limit_s + ANSWER_S, fd=save.arena.fd)
            if done.error is not None:
                raise CheckpointError(done.error)
            are_finite.append(done.finite)
            return WrittenFile(done.num_bytes, pack_digests(done.chunks))

        are_finite: list[bool] = []
        with ThreadPoolExecutor(NUM_FILES_AT_ONCE, thread_name_prefix="outlast-global") as pool:
            running = [pool.submit(ask, request) for request in requests]  # all run to the end, even if one fails
        files = tuple(one.result() for one in running)
        return WriteReport(files, all(are_finite), tree.num_bytes, tuple(map(len, values)))

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _plan(self, save: Save, answer: Inventoried) -> _SharedWriting | None:
        """Gather all inventories; on rank 0 distribute the writing, or post the error as the outcome."""
        if self._rank != 0:
            self._gather_answers(save, "has", answer)
            return None
        try:
            self._outcomes.late.wait_for(self.name, f"{self._describe_rank(0)}, which looks into it")
            self._hold_claim()
            if self.has_newer(save) and self._left_s() < self._timeout_s - STALE_S:
                raise Replaced("the directory did not respond for a while, and a newer save has come")
        except (CheckpointError, OSError) as error:
            self.post("outcome", self._failed_here(error))
            return None
        self._start_clock()
        try:
            answers = self._gather_answers(save, "has", answer)
            roots = [one.inventory for one in answers if one.inventory is not None]  # never None without an error
            tables = {one.table: InventoryTable for one in roots}
            digests = {one.digests: PartDigests for one in roots}
            inventories = join(
                roots,
                {name: self.receive(save, f"shared/{name}", kind) for name, kind in tables.items()},
                {name: self.receive(save, f"shared/{name}", kind) for name, kind in digests.items()},
            )
            return _SharedWriting(inventories, assign(inventories))
        except CheckpointError as error:
            self.post("outcome", SaveOutcome.of(error))
            return None

    def _report(self, save: Save, directory: GlobalDirectory, plan: _SharedWriting | None, wrote: Wrote) -> None:
        """Gather all write reports; on rank 0 commit, or delete the files, and post the outcome."""
        reports: list[WriteReport] = []
        try:
            # Waits for all ranks even after a failure: no file may be deleted while a rank still writes.
            answers = self._gather_answers(save, "wrote", wrote, waits_for_all=True)
            reports = [one.report for one in answers if one.report is not None]  # never None without an error
            outcome = SaveOutcome()
        except CheckpointError as failure:
            if self._rank != 0:
                raise
            outcome = SaveOutcome.of(failure)
        if plan is None:
            return
        if outcome.error is None:
            try:
                self._outcomes.late.wait_for(self.name, f"{self._describe_rank(0)}, which commits it")
                self._place(save, directory, plan, reports)
                if not save.suspect:
                    self._outcomes.report_committed(
                        save.iteration, frozenset({Tier.GLOBAL})
                    )  # before posting, as in the node-local lane
            except (CheckpointError, OSError) as failure:
                outcome = self._failed_here(failure)
        if outcome.error is not None:
            self._must_sweep = True
            try:
                directory.discard(save.iteration, save.attempt)
            except (CheckpointError, OSError) as failure:
                log.warning("files of a failed save cannot be removed: %s", failure)
        self.post("outcome", outcome)

    def _place(
        self, save: Save, directory: GlobalDirectory, plan: _SharedWriting, reports: Sequence[WriteReport]
    ) -> None:
        composed = compose(
            plan.inventories,
            plan.duties,
            reports,
            file_bytes=self.file_bytes,
            name_of=lambda rank, number: directory.file_name(rank, number, save.attempt),
        )
        manifest = GlobalManifest(schema=SCHEMA, **save.manifest_fields(self._places), **composed._asdict())
        metadata = dump_metadata(manifest)
        entry = FileEntry(name=METADATA, num_bytes=len(metadata), chunks=digests(metadata))
        manifest = msgspec.structs.replace(manifest, metadata=entry)
        assert self._claim is not None  # rank 0 has a claim
        with self._claim.committing():
            directory.commit(save.attempt, manifest, metadata, confirm=self._claim.acquire)
        if not save.suspect:
            self._committed.note_finite(save.iteration, finite=manifest.finite)

    def _failed_here(self, error: Exception) -> SaveOutcome:
        is_plain = isinstance(error, DirectoryRefused | Replaced)
        return SaveOutcome.of(error, str(error) if is_plain else f"{self._describe_rank(0)}: {error}")

    def _text_of(self, error: Exception) -> str:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return f"{self._describe_rank(self._rank)}: {kind}{error}"
