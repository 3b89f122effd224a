"""The lanes to the node-local tiers: gather every rank's digests, make the manifest, commit on every node.

One lane writes to memory, through which every save passes first, and one to the local tier. Ranks send messages up a
tree, and rank 0 makes the manifest. The lowest rank of each node leads it: it receives the manifest and commits on
its node, in memory or by a rename. Rank 0, always a leader, posts the outcome once every leader has committed.
"""

from __future__ import annotations

import logging
import os
import queue
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from outlast.checkpoint import protocol as f
from outlast.checkpoint.directory import SUSPECT, Directory, DirectoryRefused
from outlast.checkpoint.infinities import MAX_NAMED, examined, find_infinite
from outlast.checkpoint.lane import (
    GRACE_S,
    Lane,
    RankAnswer,
    Reached,
    RetryingLane,
    SaveOutcome,
    Unstaged,
)
from outlast.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    CopyKey,
    Manifest,
    ShardEntry,
    decode_manifest,
    seal,
)
from outlast.checkpoint.outcomes import FIRST_LANE
from outlast.checkpoint.replica.client import CopyOutcome
from outlast.checkpoint.save import PeerSilent, Save
from outlast.checkpoint.shard import shard_name
from outlast.errors import CheckpointError, Untrusted
from outlast.policy.recovery_point import Tier
from outlast.runtime.files import fsync_folder, write_durably
from outlast.runtime.injection import reach

log = logging.getLogger(__name__)
KEEP_TIMEOUT_S = 30.0
_Infinite: TypeAlias = dict[int, tuple[str, ...]]


class ShardReady(RankAnswer, frozen=True, kw_only=True):
    """A rank's message that its shard is digested, and durable if there is a local tier; or an error."""

    shard: ShardEntry | None = None
    num_copies: int = 0
    not_finite: tuple[str, ...] = ()


class Described(msgspec.Struct, frozen=True):
    manifest: msgspec.Raw = msgspec.Raw(b"null")
    failure: SaveOutcome = SaveOutcome()
    """Reason why there is no manifest, if it has an error."""


class NearLane(Lane):
    """Common part of the lanes to the node-local tiers: a rank's part, the manifest, the commit on every node."""

    _is_limited = True
    """Whether ranks other than 0 decide by themselves that a save has failed after its deadline."""
    _infinite_tensors: tuple[str, ...] = ()
    _warned_of: _Infinite | None = None

    def _commit(self, save: Save) -> Reached:
        missing = self._wanted(save)
        if not missing:
            log.debug("iteration %d is committed already; it is not written again", save.iteration)
            return Reached(missing)
        self._start_clock()
        ready, failures = self._write(save)
        self._is_decided = False
        described, infinite = self._describe(save, ready)
        leads = self._places.is_leader(self._rank)
        is_finite = self._lead(save, described) if leads else True
        what = f"iteration {save.iteration} is not saved to {self._where()}"
        outcome = self._conclude(save, what, is_limited=self._is_limited)
        self._keep(save)
        reached = missing - {Tier.REPLICA} if outcome.lacks_copies else missing
        if not save.suspect:
            self._committed.add(save.iteration, missing)  # the same on all ranks
        if leads and not save.suspect:
            self._committed.note_finite(save.iteration, finite=is_finite)
            if self._rank == 0:
                self._warn_of_infinite(save.iteration, infinite)
        if leads and (folder := self._folder(save)) is not None:
            self._follow_up(save, folder)
        return Reached(reached, failures)

    # -- this rank's part --------------------------------------------------------------------------------------

    @abstractmethod
    def _folder(self, save: Save) -> Directory | None:
        """Return the folder that a save is written to on this node; ``None`` = no file."""

    @abstractmethod
    def _keep(self, save: Save) -> None:
        """Finish the save on each rank after the commit."""

    def _write(self, save: Save) -> tuple[ShardReady, tuple[CopyOutcome, ...]]:
        try:
            arena = self._check_staged(save)
            reach("checkpoint.data", attempt=str(save.attempt))
            self._hold_claim()
            folder, file = self._folder(save), shard_name(self._rank)
            path = folder.temporary(save.iteration, save.attempt) / file if folder is not None else None
            replicates = self._replicates(save)
            request = f.Write(
                key=self._key(save),
                num_bytes=save.num_bytes,
                path=os.fspath(path) if path is not None else None,
                numbers=tuple((one.dtype, one.offset, one.num_bytes) for one in examined(save)),
                targets=self._places.replication.targets if replicates else (),
                holders=self._places.replication.holders if replicates else (),
                timeout_s=self._places.replication.timeout_s,
                limit_s=self._left_s(),
            )
            written, _ = self._writer.ask(request, f.Written, timeout_s=self._left_s(), fd=arena.fd)
            with arena.view(save.num_bytes) as image:
                shard = ShardEntry.of(self._rank, image, written.chunks, finite=written.finite)
        except (CheckpointError, OSError) as error:
            where = "" if isinstance(error, DirectoryRefused) else f"{self._describe_folder(self._rank)}: "
            return ShardReady.of(error, f"{where}{error}", iteration=save.iteration), ()
        if written.finite:
            self._infinite_tensors = ()
        elif not self._infinite_tensors:  # only once: with masks, for example, each save would be examined again
            self._infinite_tensors = find_infinite(save)
        ready = ShardReady(
            iteration=save.iteration,
            shard=shard,
            num_copies=written.num_copies,
            not_finite=self._infinite_tensors,
        )
        return ready, written.failures

    # -- the node's part ---------------------------------------------------------------------------------------

    def _describe(self, save: Save, ready: ShardReady) -> tuple[Described | None, _Infinite]:
        """Gather all ranks' shards; on rank 0 make the manifest, and post it, or an error, to the leaders.

        Returns:
            On rank 0 the posted message, and the tensors that hold infinities or NaN.
        """
        try:
            answers = self._gather_answers(save, "ready", ready)
            if self._rank != 0:
                return None, {}
            described = Described(msgspec.Raw(seal(self._manifest(save, answers))))
            infinite = {
                rank: one.not_finite
                for rank, one in enumerate(answers)
                if one.shard is not None and not one.shard.finite
            }
        except CheckpointError as failure:
            if self._rank != 0:
                raise
            described, infinite = Described(failure=SaveOutcome.of(failure)), {}
        if len(self._places.leaders) > 1:
            self.post("manifest", described)
        return described, infinite

    def _lead(self, save: Save, described: Described | None) -> bool:
        """Have the writer prepare the checkpoint, write the manifest and rename; report the result or error up the
        tree.

        Args:
            described: Rank 0's message; ``None`` = another rank, which receives it.

        Returns:
            Whether all numbers of the checkpoint are finite.
        """
        is_finite, lacks_copies, mine = True, False, SaveOutcome()
        try:
            if described is None:
                described = self.receive(
                    save,
                    "manifest",
                    Described,
                    grace_s=GRACE_S,
                    poll_s=self.poll_pause_s(len(self._places.leaders)),
                    is_limited=self._is_limited,
                )
            mine = described.failure
            if mine.error is None:
                manifest = bytes(described.manifest)
                facts, _ = decode_manifest(manifest)
                if (facts.iteration, facts.attempt) != (save.iteration, str(save.attempt)):
                    raise Untrusted(f"the manifest is of attempt {facts.attempt} at iteration {facts.iteration}")
                is_finite, lacks_copies = facts.finite, not all(facts.num_copies)
                self._place(save, manifest)
        except (OSError, CheckpointError) as failure:
            mine = SaveOutcome.of(failure, f"{self._describe_folder(self._rank)}: {failure}")
        try:
            outcomes = self._gather_up(save, "renamed", mine, self._places.leaders)
        except PeerSilent as failure:
            outcomes = [(self._rank, SaveOutcome.of(failure))]
        if self._rank == 0:
            committed = SaveOutcome(lacks_copies=lacks_copies)
            outcome = next((one for _, one in outcomes if one.error is not None), committed)
            if outcome.error is None and not save.suspect:
                # Before the outcome: the call may end, or this process be killed, and the next one must know the
                # commit.
                self._outcomes.report_committed(save.iteration, save.tiers & self.tiers - {Tier.REPLICA})
            self.post("outcome", outcome)
        return is_finite

    def _manifest(self, save: Save, answers: Sequence[ShardReady]) -> Manifest:
        replicates = self._replicates(save)
        return Manifest(
            schema=SCHEMA,
            home=self._places.home,
            nodes=self._places.nodes,
            num_copies=tuple(one.num_copies for one in answers) if replicates else (),
            # Also in memory, where the local lane makes the parities: both manifests are of the same attempt.
            parity=self._places.replication.parity if Tier.REPLICA in save.tiers and not save.suspect else 0,
            shards=tuple(one.shard for one in answers if one.shard is not None),  # each has one, or an error was raised
            **save.manifest_fields(self._places),
        )

    def _warn_of_infinite(self, iteration: int, infinite: _Infinite) -> None:
        """Warn of infinities and NaN, once until other ranks or tensors have some."""
        if infinite and infinite != self._warned_of:
            named = [f"rank {rank} in {', '.join(names)}" for rank, names in sorted(infinite.items())]
            more = f"; and {len(named) - MAX_NAMED} more ranks" if len(named) > MAX_NAMED else ""
            log.warning(
                "iteration %d is saved with numbers that are infinite or NaN: %s%s; a load uses an older checkpoint "
                "without them if there is one, unless prefer_finite is off",
                iteration,
                "; ".join(named[:MAX_NAMED]),
                more,
            )
        self._warned_of = infinite

    @abstractmethod
    def _place(self, save: Save, manifest: bytes) -> None:
        """Commit a save on this node. Raises: CheckpointError, OSError."""

    def _replicates(self, save: Save) -> bool:
        return Tier.REPLICA in save.tiers & self.tiers and not save.suspect

    def _key(self, save: Save) -> CopyKey:
        return CopyKey(save.iteration, str(save.attempt), self._rank)


class MemoryLane(NearLane):
    """Commit saves to memory and, without a local tier, to copies in other nodes' memory.

    Every save passes here first, and is digested, without waiting for a disk; then it is passed on to the other lanes,
    also after a failure here. A save without a tier here is only digested, without messages between the ranks.
    """

    name = FIRST_LANE
    _tier = Tier.MEMORY

    def _open(self) -> None:
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        there = {Tier.MEMORY} if self._places.local is not None else {Tier.MEMORY, Tier.REPLICA}
        self.tiers = self._places.tiers & there

    def submit(self, save: Save) -> None:
        self._saves.put(save)

    def takes(self, save: Save) -> bool:
        return bool(save.tiers & (self.tiers | {Tier.GLOBAL}))

    def _where(self) -> str:
        return "memory"

    def _wake(self) -> None:
        self._saves.put(None)

    def _next(self) -> Save | None:
        return self._saves.get()

    def _missing(self, save: Save) -> frozenset[Tier]:
        return frozenset() if save.suspect else super()._missing(save)

    def _commit(self, save: Save) -> Reached:
        if save.tiers & self.tiers and not save.suspect:
            return super()._commit(save)
        self._start_clock()
        if save.arena is not None:
            ready, _ = self._write(save)
            is_known = ready.kind == Unstaged.__name__ or self._outcomes.is_call_left
            if ready.error is not None and not is_known:  # the next lanes' ranks need the error
                log.warning("iteration %d cannot be digested: %s", save.iteration, ready.error)
        return Reached(frozenset())

    def _folder(self, save: Save) -> None:
        return None

    def _place(self, save: Save, manifest: bytes) -> None:
        if Tier.MEMORY in save.tiers & self.tiers:
            self._writer.ask(f.PreparePart(key=self._key(save), manifest=manifest), f.Done, timeout_s=self._left_s())

    def _keep(self, save: Save) -> None:
        keep = f.KeepPart(key=self._key(save), in_memory=Tier.MEMORY in save.tiers & self.tiers)
        try:
            self._writer.ask(keep, f.Done, timeout_s=KEEP_TIMEOUT_S)
        except CheckpointError as error:
            log.warning("iteration %d is committed, but not kept in memory: %s", save.iteration, error)

    def _clear_up(self, save: Save) -> None:
        """Discard a failed attempt in the writer: the next save may need the memory."""
        try:
            discard = f.Discard(iteration=save.iteration, attempt=str(save.attempt))
            self._writer.ask(discard, f.Done, timeout_s=KEEP_TIMEOUT_S)
        except CheckpointError as error:
            log.debug("%s", error)  # a writer that is gone holds nothing


class LocalLane(NearLane, RetryingLane):
    name = "local"
    _tier = Tier.LOCAL
    _is_limited = False

    def _open(self) -> None:
        super()._open()
        self.tiers = self._places.tiers & {Tier.LOCAL, Tier.REPLICA}

    def _where(self) -> str:
        return f"the local tier ({self._local.path})"

    @property
    def _local(self) -> Directory:
        assert self._places.local is not None
        return self._places.local

    def _folder(self, save: Save) -> Directory:
        return Directory(self._local.path / SUSPECT) if save.suspect else self._local

    def _keep(self, save: Save) -> None:
        """Nothing follows the commit."""

    def _place(self, save: Save, manifest: bytes) -> None:
        folder = self._folder(save)
        temporary = folder.temporary(save.iteration, save.attempt)
        for rank in self._places.members(self._rank):
            path = temporary / shard_name(rank)
            if not path.exists():
                raise CheckpointError(f"rank {self._rank} does not see {path}; is it the same file system?")
        reach("checkpoint.manifest", attempt=str(save.attempt))
        assert self._claim is not None  # this rank leads its node
        with self._claim.committing():
            write_durably(temporary / MANIFEST, manifest)
            fsync_folder(temporary)
            reach("checkpoint.rename", attempt=str(save.attempt))
            folder.promote(save.iteration, save.attempt)

    def _clear_up(self, save: Save) -> None:
        """Delete the files of a failed attempt: the next save may need the space."""
        if not self._places.is_leader(self._rank):
            return
        folder = self._folder(save)
        folder.discard(save.iteration, save.attempt)
        try:
            if self._claim is not None and self._claim.is_held:  # otherwise the files may be another run's, and in use
                folder.remove_stale(save.attempt)
        except OSError as error:
            log.warning("files of failed saves cannot be removed: %s", error)
