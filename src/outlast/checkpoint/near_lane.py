"""The lane to the near tiers (memory, local, replicas): every rank's digests gathered, the manifest, the rename.

One thread per worker does it, save after save. In the order of the saves every rank gets the same outcomes, so all of
them know alike what is committed.

The lowest rank of each node leads it: it waits for all ranks' digests, writes the manifest and renames; rank 0, a
leader always, posts the outcome once every leader has renamed. Then each rank has the writer keep its part in memory,
and what is to go to the global tier as well is handed on to that lane.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.checkpoint.claim import Claim, DirectoryRefused, Held
from outlast.checkpoint.directory import SUSPECT, Directory
from outlast.checkpoint.durable import MAY_BE_INFINITE, is_finite
from outlast.checkpoint.lane import SaveExchange, SaveOutcome, deadline
from outlast.checkpoint.manifest import MANIFEST, SCHEMA, CopyKey, Manifest, ShardEntry, TensorEntry, encode_manifest
from outlast.checkpoint.places import Places, Replication
from outlast.checkpoint.save import Known, Save
from outlast.checkpoint.shard import shard_name
from outlast.checkpoint.writer_client import WriterClient
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Tier
from outlast.policy.retention import choose_kept
from outlast.runtime.files import fsync_folder

__all__ = ["Committer", "Retention"]


log = logging.getLogger(__name__)
GRACE_S = 10.0
"""Ranks wait this much longer for the outcome than rank 0 does for its causes: better late than contradictory."""
KEEP_TIMEOUT_S = 30.0
MAX_TOLD = 3
"""Tensors of a rank, and ranks, that a warning names."""
_Infinite: TypeAlias = dict[int, tuple[str, ...]]
"""Rank to its first tensors that hold numbers that are infinite or NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many generations of the local tier are kept."""

    most_recent_k: int
    suspect_window: int


class _Ready(msgspec.Struct, frozen=True):
    """What a rank says when its shard is digested, and durable if there is a local tier; or is not going to be."""

    iteration: int
    shard: ShardEntry | None = None
    num_copies: int = 0
    not_finite: tuple[str, ...] = ()
    """Names of tensors that hold numbers that are infinite or NaN; not more than are told."""
    error: str | None = None
    is_refused: bool = False
    """The error is that the folder is another run's."""


class Committer:
    """Commit saves to memory, local tier and replicas, in their order, in a thread of its own.

    Args:
        places: Where, and who is there.
        rank: This rank.
        topology: Digest of the ranks' arrangement.
        store: A store connection for this thread alone.
        writer: The writer process.
        timeout_s: Longest time from a save's start to its outcome.
        retention: What is kept of the local tier.
        replication: What of this rank's shards goes to which other nodes.
        on_committed: Called in this thread with each save that is committed to the near tiers, its tiers that are
            still missing, and failures of its copies.
        on_failed: Called in this thread with each save that is not, and its error.
        lease: On this node's folder, on the rank that leads it; ``None`` = there is none.
        at_stage: For fault injection: called with a stage's name just before it.
    """

    def __init__(
        self,
        places: Places,
        *,
        rank: int,
        topology: str,
        store: Any,
        writer: WriterClient,
        timeout_s: float,
        retention: Retention,
        replication: Replication,
        on_committed: Callable[[Save, frozenset[Tier], tuple[f.CopyFailure, ...]], None],
        on_failed: Callable[[Save, CheckpointError], None],
        lease: Held | None = None,
        at_stage: Callable[[str], None] | None = None,
    ) -> None:
        self._places, self._rank, self._topology = places, rank, topology
        self._writer, self._timeout_s, self._retention = writer, timeout_s, retention
        self._on_committed, self._on_failed = on_committed, on_failed
        self._at_stage = at_stage or (lambda name: None)
        self._replication = replication
        self._known = Known()
        self._not_finite: set[int] = set()
        self._infinite_tensors: tuple[str, ...] = ()
        self._told_of = _Infinite()
        leads = places.local is not None and places.is_leader(rank)
        self._claim = Claim(places.local, places.run, places.seen_local, lease) if leads and places.local else None
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._exchange = SaveExchange(store, places.token, self._stop, rank=rank)
        self._thread = threading.Thread(target=self._run, name="outlast-commit", daemon=True)
        self._thread.start()

    def start_from(self, known: dict[int, set[Tier]], not_finite: frozenset[int]) -> None:
        """Take generations, and no others, for committed to these tiers. Only before the first save.

        Args:
            known: Each generation's tiers.
            not_finite: Generations that hold numbers that are infinite or NaN.
        """
        self._known, self._not_finite = Known(dict(known)), set(not_finite)

    def has(self, save: Save) -> bool:
        """Return whether a save's iteration is known to be in all of its tiers. Thread: any."""
        return not self._known.missing(save)

    def submit(self, save: Save) -> None:
        """Commit a staged save. Thread: the training thread."""
        self._saves.put(save)

    def stop(self, timeout_s: float) -> bool:
        """Give up what is not committed yet and end the thread; return whether it ended in time."""
        self._stop.set()
        self._saves.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (save := self._saves.get()) is not None:
            missing = self._known.missing(save)
            failures: tuple[f.CopyFailure, ...] = ()
            try:
                if missing:
                    failures = self._commit(replace(save, tiers=missing))
                    # Every rank notes it here, in the order of the saves, whatever becomes of the global copy: what is
                    # missing must be the same for all.
                    self._known.add(save.iteration, missing)
                else:
                    log.debug("iteration %d is committed already; it is not written again", save.iteration)
            except CheckpointError as error:
                self._fail(save, error)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not end saving without a word
                text = f"saving iteration {save.iteration} failed: {type(error).__name__}: {error}"
                self._fail(save, CheckpointError(text, rank=self._rank, iteration=save.iteration))
            else:
                self._tell(self._on_committed, save, missing, failures)

    def _fail(self, save: Save, error: CheckpointError) -> None:
        self._clear_up(save)
        self._tell(self._on_failed, save, error)

    def _tell(self, listener: Callable[..., None], save: Save, *what: Any) -> None:
        try:
            listener(save, *what)
        except Exception:  # a caller's own code, whose error is not the save's
            log.exception("a callback after the save of iteration %d failed", save.iteration)

    def _commit(self, save: Save) -> tuple[f.CopyFailure, ...]:
        ready, failures = self._write(save)
        self._exchange.post(save.attempt.ordinal, f"ready/{self._rank}", ready)
        leads = self._places.is_leader(self._rank)
        manifest, infinite = self._lead(save) if leads else (None, {})
        outcome = self._await(save, "outcome", SaveOutcome, grace_s=GRACE_S)
        if outcome.is_refused:
            self._exchange.part(save.attempt.ordinal, len(self._places.nodes), deadline(GRACE_S))
        if outcome.error is not None:
            what = f"iteration {save.iteration} is not saved"
            raise outcome.failure(what, rank=self._rank, iteration=save.iteration)
        self._exchange.forget(save.attempt.ordinal)
        self._keep(save, manifest)
        if leads and not save.suspect:
            self._note_infinite(save.iteration, infinite)
        if leads and self._folder(save) is not None:
            self._follow_up(save)
        return failures

    # -- this rank's part --------------------------------------------------------------------------------------

    def _folder(self, save: Save) -> Directory | None:
        """Return the folder that a save is written to on this node; ``None`` = no file."""
        local = self._places.local
        if local is None or Tier.LOCAL not in save.tiers:
            return None
        return Directory(local.path / SUSPECT) if save.suspect else local

    def _write(self, save: Save) -> tuple[_Ready, tuple[f.CopyFailure, ...]]:
        try:
            if save.guard is not None:
                save.guard()
            if save.arena is None:
                raise CheckpointError(save.error or "nothing was staged")
            self._at_stage("data")
            self._hold_claim(save)
            folder, file = self._folder(save), shard_name(self._rank)
            path = folder.temporary(save.iteration, save.attempt) / file if folder is not None else None
            replicates = self._replicates(save)
            request = f.Write(
                key=self._key(save),
                num_bytes=save.num_bytes,
                path=os.fspath(path) if path is not None else None,
                numbers=_numbers(save.tensors),
                targets=self._replication.targets if replicates else (),
                holders=self._replication.holders if replicates else (),
                timeout_s=self._replication.timeout_s,
            )
            written, _ = self._writer.ask(request, f.Written, timeout_s=self._left_s(save), fd=save.arena.fd)
        except DirectoryRefused as error:
            return _Ready(save.iteration, error=str(error), is_refused=True), ()
        except (CheckpointError, OSError) as error:
            return _Ready(save.iteration, error=f"rank {self._rank}: {error}"), ()
        shard = ShardEntry(
            rank=self._rank,
            file=file,
            num_bytes=save.num_bytes,
            chunks=written.chunks,
            tensors=save.tensors,
            finite=written.finite,
        )
        if written.finite:
            self._infinite_tensors = ()
        elif not self._infinite_tensors:  # once: with masks, say, each save would cost another look at everything
            self._infinite_tensors = _find_infinite(save)
        return _Ready(save.iteration, shard, written.num_copies, self._infinite_tensors), written.failures

    def _hold_claim(self, save: Save) -> None:
        """Be sure that the node's folder is this run's, before data is written and again before the commit.

        Raises: DirectoryRefused, when it is another run's.
        """
        if self._claim is not None and self._folder(save) is not None:
            self._claim.hold()

    def _keep(self, save: Save, manifest: bytes | None) -> None:
        """Have the writer keep this rank's part, and the node's copies of others' parts."""
        in_memory = Tier.MEMORY in save.tiers and not save.suspect
        keep = f.KeepPart(key=self._key(save), manifest=manifest if in_memory else None, in_memory=in_memory)
        try:
            self._writer.ask(keep, f.Done, timeout_s=KEEP_TIMEOUT_S)
        except CheckpointError as error:
            log.warning("iteration %d is committed, but not kept in memory: %s", save.iteration, error)

    def _clear_up(self, save: Save) -> None:
        """Forget what a failed attempt left: its room may be what the next one lacks."""
        if self._stop.is_set():
            return
        try:
            discard = f.Discard(iteration=save.iteration, attempt=str(save.attempt))
            self._writer.ask(discard, f.Done, timeout_s=KEEP_TIMEOUT_S)
        except CheckpointError as error:
            log.debug("%s", error)  # a writer that is gone holds nothing
        folder = self._folder(save)
        if folder is not None and self._places.is_leader(self._rank):
            folder.discard(save.iteration, save.attempt)
            try:
                if self._claim is not None and self._claim.is_held:  # else they may be another run's, and in use
                    folder.remove_stale(save.attempt)
            except OSError as error:
                log.warning("files of failed saves cannot be removed: %s", error)

    # -- the node's part ---------------------------------------------------------------------------------------

    def _lead(self, save: Save) -> tuple[bytes | None, _Infinite]:
        """Write the manifest and rename; tell how it went. Errors of this rank are told.

        Returns:
            The manifest, and the tensors that hold numbers that are infinite or NaN.
        """
        manifest, infinite, mine = None, _Infinite(), SaveOutcome()
        try:
            described, infinite = self._describe(save)
            manifest = encode_manifest(described)
            self._place(save, manifest)
        except (OSError, CheckpointError) as failure:
            text = f"rank {self._rank}: {failure}" if isinstance(failure, OSError) else str(failure)
            mine = SaveOutcome.of(failure, text)
        self._exchange.post(save.attempt.ordinal, f"renamed/{self._rank}", mine)
        if self._rank == 0:
            outcome = mine
            for leader in self._places.leaders:
                if outcome.error is None:
                    try:
                        outcome = self._await(save, f"renamed/{leader}", SaveOutcome)
                    except CheckpointError as failure:
                        outcome = SaveOutcome.of(failure)
            self._exchange.post(save.attempt.ordinal, "outcome", outcome)
        return manifest, infinite

    def _describe(self, save: Save) -> tuple[Manifest, _Infinite]:
        """Gather all ranks' shards."""
        replicates = self._replicates(save)
        shards, num_copies, infinite = [], [], _Infinite()
        for rank in range(len(self._places.nodes)):
            ready = self._await(save, f"ready/{rank}", _Ready)
            if ready.iteration != save.iteration:
                raise CheckpointError(
                    f"rank {rank} saves iteration {ready.iteration} meanwhile; all ranks must save the same ones"
                )
            if ready.shard is None:
                kind = DirectoryRefused if ready.is_refused else CheckpointError
                raise kind(ready.error or f"rank {rank} has nothing")
            shards.append(ready.shard)
            if not ready.shard.finite:
                infinite[rank] = ready.not_finite
            num_copies.append(ready.num_copies)
        manifest = Manifest(
            schema=SCHEMA,
            run=self._places.run,
            topology=self._topology,
            world_size=len(self._places.nodes),
            iteration=save.iteration,
            attempt=str(save.attempt),
            restored_from=save.restored_from,
            restored_attempt=save.restored_attempt,
            nodes=self._places.nodes,
            num_copies=tuple(num_copies) if replicates else (),
            parity=self._replication.parity if replicates else 0,
            shards=tuple(shards),
        )
        return manifest, infinite

    def _note_infinite(self, iteration: int, infinite: _Infinite) -> None:
        """Warn of numbers that are infinite or NaN, on rank 0, once until other ranks or tensors hold some."""
        (self._not_finite.add if infinite else self._not_finite.discard)(iteration)
        if infinite and infinite != self._told_of and self._rank == 0:
            named = [f"rank {rank} in {', '.join(names)}" for rank, names in sorted(infinite.items())]
            more = f"; and {len(named) - MAX_TOLD} more ranks" if len(named) > MAX_TOLD else ""
            log.warning(
                "iteration %d is saved with numbers that are infinite or NaN: %s%s; a load takes an older generation "
                "without them where there is one, unless prefer_finite is off",
                iteration,
                "; ".join(named[:MAX_TOLD]),
                more,
            )
        self._told_of = infinite

    def _place(self, save: Save, manifest: bytes) -> None:
        folder = self._folder(save)
        if folder is None:
            return
        temporary = folder.temporary(save.iteration, save.attempt)
        for rank in self._places.members(self._rank):
            path = temporary / shard_name(rank)
            if not path.exists():
                raise CheckpointError(f"rank {self._rank} does not see {path}; is it the same file system?")
        self._at_stage("manifest")
        self._hold_claim(save)
        with open(temporary / MANIFEST, "xb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(temporary)
        self._at_stage("rename")
        folder.commit(save.iteration, save.attempt)

    def _follow_up(self, save: Save) -> None:
        """What a leader does once a generation is committed; none of it can undo that."""
        folder = self._folder(save)
        assert folder is not None
        try:
            if not save.suspect:
                self._at_stage("tracker")
                folder.point_to(save.iteration)
                self._remove_old(folder, save.iteration)
            if removed := folder.remove_stale(save.attempt):
                log.debug("removed files of earlier attempts: %s", ", ".join(removed))
        except OSError as error:
            log.warning("iteration %d is committed, but cleaning up failed: %s", save.iteration, error)

    def _remove_old(self, folder: Directory, newest: int) -> None:
        """Remove what the newest commit makes superfluous; what is newer and was refused stays for whoever looks."""
        present = folder.generations()
        known = self._known.tiers
        valid = [number for number in present if Tier.LOCAL in known.get(number, ()) or number == newest]
        kept = choose_kept(
            valid,
            most_recent_k=self._retention.most_recent_k,
            retain_interval=0,
            suspect_window=self._retention.suspect_window,
            not_finite=self._not_finite,
        )
        for generation in present:
            if generation not in kept and generation < newest:
                folder.remove(generation)
                log.debug("removed generation %d; the newest %d are kept", generation, self._retention.most_recent_k)

    # -- words -------------------------------------------------------------------------------------------------

    def _await(self, save: Save, name: str, kind: type[Any], *, grace_s: float = 0.0) -> Any:
        return self._exchange.hear(
            save.iteration,
            save.attempt.ordinal,
            name,
            kind,
            lambda: self._left_s(save) + grace_s,
            timeout_s=self._timeout_s,
        )

    def _replicates(self, save: Save) -> bool:
        return Tier.REPLICA in save.tiers and not save.suspect

    def _key(self, save: Save) -> CopyKey:
        return CopyKey(save.iteration, str(save.attempt), self._rank)

    def _left_s(self, save: Save) -> float:
        return self._timeout_s - (clock.now_ns() - save.started_ns) / 1e9


def _numbers(tensors: tuple[TensorEntry, ...]) -> tuple[tuple[str, int, int], ...]:
    """Return what of a shard may be infinite or NaN: element type, offset, bytes."""
    return tuple(
        (tensor.dtype, tensor.offset, tensor.num_bytes) for tensor in tensors if tensor.dtype in MAY_BE_INFINITE
    )


def _find_infinite(save: Save) -> tuple[str, ...]:
    """Return the first tensors that hold numbers that are infinite or NaN."""
    found: list[str] = []
    if save.arena is None:
        return ()
    with save.arena.view(save.num_bytes) as image:
        for tensor in save.tensors:
            if tensor.dtype not in MAY_BE_INFINITE or len(found) == MAX_TOLD:
                continue
            with image[tensor.offset : tensor.offset + tensor.num_bytes] as data:
                if not is_finite(data, tensor.dtype):
                    found.append(tensor.name)
    return tuple(found)
