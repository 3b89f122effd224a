"""The lane to the global tier: its own thread and exchange, behind the near tiers' commit.

Every rank takes inventory of its image, rank 0 shares the writing out, every rank has its writer process put its files
together, several at once, and rank 0 commits: data, ``.metadata``, manifest, tracker. All ranks get the same outcome.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from outlast import clock
from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import Items, dump_metadata
from outlast.checkpoint.dcp.layout import FILE_BYTES, Duty, Inventory, Packing, WriteReport, assign, compose
from outlast.checkpoint.dcp.manifest import METADATA, SCHEMA, FileEntry, GlobalManifest
from outlast.checkpoint.directory import DirectoryRefused
from outlast.checkpoint.lane import GRACE_S, Lane, RankAnswer, Reached, SaveOutcome
from outlast.checkpoint.save import PeerSilent, Save
from outlast.checkpoint.shard import digests
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Tier

log = logging.getLogger(__name__)
NUM_FILES_AT_ONCE = 3
ANSWER_S = 5.0
"""The writer has this much longer to answer than it has to write: it is not to be taken for dead."""


class GlobalMessage(RankAnswer, frozen=True, kw_only=True):
    """What a rank has to save, is to write, or wrote; or why not."""

    inventory: Inventory | None = None
    """``has``, from each rank."""
    duty: Duty | None = None
    """``order``, from rank 0 to each."""
    report: WriteReport | None = None
    """``wrote``, from each rank."""


@dataclass(slots=True)
class _SharedWriting:
    """What rank 0 knows of a save under way."""

    inventories: list[Inventory] = field(default_factory=list)
    duties: tuple[Duty, ...] = ()
    reports: list[WriteReport] = field(default_factory=list)
    refusal: SaveOutcome | None = None
    """Why nothing may be written; ``None``: the directory is this run's."""
    error: str | None = None
    """The first failure of any rank."""
    is_silent: bool = False
    """A rank did not answer in time."""

    def fail(self, error: CheckpointError) -> None:
        """Note a failure; the first counts."""
        self.is_silent |= isinstance(error, PeerSilent)
        self.error = self.error or str(error)


class GlobalLane(Lane):
    """Commit saves to the global tier."""

    _name = "global"
    _tier = Tier.GLOBAL
    file_bytes = FILE_BYTES
    """A file that has reached it is full."""

    def _commit(self, save: Save) -> Reached:
        self._end_ns = clock.now_ns() + int(self._timeout_s * 1e9)
        assert self._places.directory is not None
        directory = self._places.directory.suspects if save.suspect else self._places.directory
        items = self._post_inventory(save)
        plan = self._order(save) if self._rank == 0 else None
        self._post(save, f"wrote/{self._rank}", self._write(save, directory, items))
        if plan is not None:
            self._decide(save, directory, plan)
        self._conclude(save, f"iteration {save.iteration} is not saved to {directory.url}")
        if self._rank == 0:
            self._follow_up(save, directory)
        return Reached(frozenset({Tier.GLOBAL}))

    def _clear_up(self, save: Save) -> None:
        """Rank 0 has done it before it posted the outcome."""

    # -- every rank --------------------------------------------------------------------------------------------

    def _post_inventory(self, save: Save) -> Items | None:
        """Post what this rank has; return it, ``None`` when its image cannot be read."""
        assert save.arena is not None
        items: Items | None = None
        try:
            items = Items(save.arena.view(save.num_bytes), save.tensors, world_size=self._world_size)
            answer = GlobalMessage(iteration=save.iteration, inventory=items.inventory)
        except Exception as error:  # whatever it is: the others wait for this rank's answer
            if not isinstance(error, CheckpointError):
                log.exception("what iteration %d consists of cannot be told", save.iteration)
            answer = GlobalMessage(iteration=save.iteration, error=f"rank {self._rank}: {_text_of(error)}")
        self._post(save, f"has/{self._rank}", answer)
        return items

    def _write(self, save: Save, directory: GlobalDirectory, items: Items | None) -> GlobalMessage:
        """Write what rank 0 orders; return what came of it."""
        try:
            order = self._receive(save, f"order/{self._rank}", GlobalMessage, grace_s=GRACE_S)
            if order.duty is None or items is None:
                raise CheckpointError(order.error or "there is nothing to write")
            report = self._write_files(save, directory, items, order.duty)
            return GlobalMessage(iteration=save.iteration, report=report)
        except Exception as error:  # rank 0 waits for this rank's answer
            if not isinstance(error, CheckpointError):
                log.exception("files of iteration %d cannot be written", save.iteration)
            text = str(error) if str(error).startswith("rank ") else f"rank {self._rank}: {_text_of(error)}"
            return GlobalMessage(iteration=save.iteration, error=text)

    def _write_files(self, save: Save, directory: GlobalDirectory, items: Items, duty: Duty) -> WriteReport:
        inventory, packing = items.inventory, Packing(self.file_bytes)
        tree = packing.add_range(items.tree.offset, items.tree.num_bytes)
        values = tuple(packing.add_bytes(items.value(inventory.values[index].item)) for index in duty.values)
        own = tuple(packing.add_tensor(items.entry(inventory.parts[index].name)) for index in duty.own)
        parts = tuple(packing.add_tensor(items.entry(inventory.parts[index].name)) for index in duty.parts)
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

        def ask(request: Assemble) -> FileEntry:
            assert save.arena is not None
            done, _ = self._writer.ask(request, Assembled, timeout_s=limit_s + ANSWER_S, fd=save.arena.fd)
            if done.error is not None:
                raise CheckpointError(done.error)
            are_finite.append(done.finite)
            return FileEntry(name=request.name, num_bytes=done.num_bytes, chunks=done.chunks)

        are_finite: list[bool] = []
        with ThreadPoolExecutor(NUM_FILES_AT_ONCE, thread_name_prefix="outlast-global") as pool:
            running = [pool.submit(ask, request) for request in requests]  # all end, also when one fails
        files = tuple(one.result() for one in running)
        return WriteReport(files, all(are_finite), tree, parts, own, values)

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _order(self, save: Save) -> _SharedWriting:
        """Gather what all ranks have, and post what each is to write. Errors are posted, not raised."""
        plan = _SharedWriting()
        try:
            self._hold_claim()
        except (CheckpointError, OSError) as error:
            plan.refusal = _failed_here(error)
        try:
            for answer in self._gather(save, "has", GlobalMessage):
                assert answer.inventory is not None  # there is one, or an error
                plan.inventories.append(answer.inventory)
            plan.duties = assign(plan.inventories)
        except CheckpointError as failure:
            plan.fail(failure)
        error_text = plan.refusal.error if plan.refusal is not None else plan.error
        for rank in range(self._world_size):
            duty = plan.duties[rank] if error_text is None else None
            self._post(save, f"order/{rank}", GlobalMessage(iteration=save.iteration, duty=duty, error=error_text))
        plan.error = None  # every rank posts it, the first one's counts
        return plan

    def _decide(self, save: Save, directory: GlobalDirectory, plan: _SharedWriting) -> None:
        """Commit what all ranks wrote, or clear it away; post which."""
        for rank in range(self._world_size):  # even after a failure: nothing may be cleared away while somebody writes
            try:
                wrote = self._receive(save, f"wrote/{rank}", GlobalMessage)
            except CheckpointError as error:
                plan.fail(error)
                continue
            if wrote.report is not None:
                plan.reports.append(wrote.report)
            else:
                plan.error = plan.error or wrote.error
        outcome = plan.refusal or SaveOutcome(plan.error, plan.is_silent)
        if outcome.error is None:
            try:
                self._place(save, directory, plan)
            except (CheckpointError, OSError) as failure:
                outcome = _failed_here(failure)
        if outcome.error is not None:
            self._must_sweep = True
            try:
                directory.discard(save.iteration, save.attempt)
            except (CheckpointError, OSError) as failure:
                log.warning("files of a failed save cannot be removed: %s", failure)
        self._post(save, "outcome", outcome)

    def _place(self, save: Save, directory: GlobalDirectory, plan: _SharedWriting) -> None:
        composed = compose(plan.inventories, plan.duties, plan.reports)
        manifest = GlobalManifest(
            schema=SCHEMA,
            run=self._places.run,
            topology=self._places.topology,
            world_size=self._world_size,
            iteration=save.iteration,
            attempt=str(save.attempt),
            restored_from=save.restored_from,
            restored_attempt=save.restored_attempt,
            **composed._asdict(),
        )
        metadata = dump_metadata(manifest)
        entry = FileEntry(name=METADATA, num_bytes=len(metadata), chunks=digests(metadata))
        manifest = msgspec.structs.replace(manifest, metadata=entry)
        assert self._claim is not None  # this is rank 0
        with self._claim.committing():
            directory.commit(save.iteration, save.attempt, manifest, metadata, confirm=self._claim.acquire)
        if not save.suspect:
            self._committed.note_finite(save.iteration, finite=manifest.finite)

    def _hold_claim(self) -> None:
        """Be sure that the directory is this run's. Raises: DirectoryRefused, when it is another run's."""
        if self._claim is not None:
            self._claim.hold()


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _failed_here(error: Exception) -> SaveOutcome:
    """Return the outcome of a save that failed on rank 0."""
    return SaveOutcome.of(error, str(error) if isinstance(error, DirectoryRefused) else f"rank 0: {error}")
