"""The commit: every rank's digests gathered, the manifest, the rename, the tracker; or an error told to all.

One thread per worker does it, save after save. It speaks to its peers through keys of a store, never through
collectives, so that training's collectives and its own cannot get into each other's way. In the order of the saves
every rank hears the same outcomes, so all of them know alike what is committed.

A leader (the lowest rank of each set of ranks that share a folder) waits for all ranks' digests, writes the
manifest and renames; rank 0, a leader always, tells the outcome once every leader has renamed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast import clock
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.directory import Agreed, Attempt, Directory
from outlast.checkpoint.finite import MAY_BE_INFINITE
from outlast.checkpoint.frames import Request
from outlast.checkpoint.handle import SaveHandle, SaveResult
from outlast.checkpoint.manifest import MANIFEST, SCHEMA, Manifest, ShardEntry, TensorEntry, encode_manifest
from outlast.checkpoint.shard import shard_name
from outlast.checkpoint.writer_client import WriterClient
from outlast.errors import CheckpointError
from outlast.runtime.files import fsync_folder

__all__ = ["Committer", "Save"]

log = logging.getLogger(__name__)
POLL_S = 0.02
GRACE_S = 10.0
"""Ranks wait this much longer for the outcome than rank 0 does for its causes: better late than contradictory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save, staged or failed at that."""

    iteration: int
    attempt: Attempt
    handle: SaveHandle
    started_ns: int
    stall_s: float
    restored_from: int | None
    arena: Arena | None = None
    num_bytes: int = 0
    tensors: tuple[TensorEntry, ...] = ()
    error: str | None = None
    """Why there is nothing staged on this rank: the others must hear of it, or they would wait."""


class _Ready(msgspec.Struct, frozen=True):
    """What a rank posts when its shard is durable, or is not going to be."""

    iteration: int
    shard: ShardEntry | None = None
    error: str | None = None


class _Outcome(msgspec.Struct, frozen=True):
    error: str | None = None


class Committer:
    """Commit saves in their order, in a thread of its own.

    Args:
        directory: This rank's directory.
        agreed: What the ranks know about their directories.
        rank: This rank.
        world_size: Number of ranks.
        topology: Digest of the ranks' arrangement.
        store: A store connection for this thread alone.
        writer: The writer process.
        timeout_s: Longest time from a save's start to its outcome.
        on_outcome: Called in this thread with each save before its handle is done, its error or ``None``, and
            its result, ``None`` when it was committed before and not written again.
        most_recent_k: Committed generations to keep; -1 = all.
        at_stage: For fault injection: called with a stage's name just before it.
    """

    def __init__(
        self,
        directory: Directory,
        agreed: Agreed,
        *,
        rank: int,
        world_size: int,
        topology: str,
        store: Any,
        writer: WriterClient,
        timeout_s: float,
        on_outcome: Callable[[Save, CheckpointError | None, SaveResult | None], None],
        most_recent_k: int = -1,
        at_stage: Callable[[str], None] | None = None,
    ) -> None:
        self._directory, self._agreed = directory, agreed
        self._rank, self._world_size, self._topology = rank, world_size, topology
        self._store, self._writer, self._timeout_s = store, writer, timeout_s
        self._on_outcome, self._most_recent_k = on_outcome, most_recent_k
        self._at_stage = at_stage or (lambda name: None)
        self._committed: set[int] = set()
        self._claimed = False
        self._posted: list[tuple[int, str]] = []
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-commit", daemon=True)
        self._thread.start()

    @property
    def committed(self) -> frozenset[int]:
        """Generations known to be whole."""
        return frozenset(self._committed)

    def start_from(self, generations: frozenset[int]) -> None:
        """Take generations, and no others, for committed. Only before the first save."""
        self._committed = set(generations)

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
            error: CheckpointError | None = None
            written = save.iteration not in self._committed
            try:
                if written:
                    self._commit(save)
                else:
                    log.info("iteration %d is committed already; it is not written again", save.iteration)
            except CheckpointError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - whatever it is, it must not end saving without a word
                error = CheckpointError(
                    f"saving iteration {save.iteration} failed: {type(failure).__name__}: {failure}",
                    rank=self._rank,
                    iteration=save.iteration,
                )
            result = SaveResult(
                generation=save.iteration,
                num_bytes=save.num_bytes,
                duration_s=(clock.now_ns() - save.started_ns) / 1e9,
                stall_s=save.stall_s,
            )
            if error is None:
                self._committed.add(save.iteration)
            else:
                self._clear_up(save)
            try:
                self._on_outcome(save, error, result if written else None)
            except Exception:
                log.exception("what follows the save of iteration %d failed", save.iteration)
            # Last, so that whoever waited finds the outcome logged and in the journal.
            if error is None:
                save.handle.succeed(result)
            else:
                save.handle.fail(error)

    def _commit(self, save: Save) -> None:
        self._post(save, f"ready/{self._rank}", self._write(save))
        if self._agreed.leader == self._rank:
            self._lead(save)
        outcome = msgspec.json.decode(self._await(save, "outcome", grace_s=GRACE_S), type=_Outcome)
        if outcome.error is not None:
            raise CheckpointError(
                f"iteration {save.iteration} is not saved: {outcome.error}", rank=self._rank, iteration=save.iteration
            )
        self._forget_posted(save.attempt.ordinal)
        oldest = self._oldest_kept(save)
        if self._agreed.leader == self._rank:
            self._follow_up(save, oldest)
        self._committed = {generation for generation in self._committed if generation >= oldest}

    def _clear_up(self, save: Save) -> None:
        if self._agreed.leader == self._rank and not self._stop.is_set():
            self._directory.discard(save.iteration, save.attempt)
            try:
                self._directory.remove_stale(save.attempt)
            except OSError as error:
                log.warning("what failed saves left cannot be removed: %s", error)

    def _write(self, save: Save) -> _Ready:
        if save.arena is None:
            return _Ready(save.iteration, error=f"rank {self._rank}: {save.error}")
        self._at_stage("data")
        file = shard_name(self._rank)
        path = self._directory.temporary(save.iteration, save.attempt) / file
        reply = self._writer.write(
            Request(path=os.fspath(path), num_bytes=save.num_bytes, numbers=_numbers(save.tensors)),
            save.arena.fd,
            timeout_s=self._left_s(save),
        )
        if reply.error is not None:
            return _Ready(save.iteration, error=f"rank {self._rank}: {reply.error}")
        shard = ShardEntry(
            rank=self._rank,
            file=file,
            num_bytes=save.num_bytes,
            chunks=reply.chunks,
            tensors=save.tensors,
            finite=reply.finite,
        )
        return _Ready(save.iteration, shard)

    def _lead(self, save: Save) -> None:
        """Write the manifest and rename; tell how it went. Errors of this rank are told, then raised."""
        try:
            error = self._place(save)
        except (OSError, CheckpointError) as failure:
            error = f"rank {self._rank}: {failure}"
        self._post(save, f"renamed/{self._rank}", _Outcome(error))
        if self._rank == 0:
            for leader in self._agreed.leaders:
                if error is None:
                    try:
                        error = msgspec.json.decode(self._await(save, f"renamed/{leader}"), type=_Outcome).error
                    except CheckpointError as failure:
                        error = str(failure)
            self._post(save, "outcome", _Outcome(error))

    def _place(self, save: Save) -> str | None:
        shards = []
        for rank in range(self._world_size):
            ready = msgspec.json.decode(self._await(save, f"ready/{rank}"), type=_Ready)
            if ready.iteration != save.iteration:
                return f"rank {rank} saves iteration {ready.iteration} meanwhile; all ranks must save the same ones"
            if ready.shard is None:
                return ready.error
            shards.append(ready.shard)
        folder = self._directory.temporary(save.iteration, save.attempt)
        for rank in self._agreed.members:
            path = folder / shards[rank].file
            if not path.exists() or path.stat().st_size != shards[rank].num_bytes:
                return f"rank {self._rank} does not see what rank {rank} wrote as {path}; is it the same file system?"
        manifest = Manifest(
            schema=SCHEMA,
            run=self._agreed.run,
            topology=self._topology,
            world_size=self._world_size,
            iteration=save.iteration,
            attempt=str(save.attempt),
            restored_from=save.restored_from,
            shards=tuple(shards),
        )
        self._at_stage("manifest")
        if not self._claimed:
            self._directory.claim(self._agreed.run)
            self._claimed = True
        with open(folder / MANIFEST, "xb") as file:
            file.write(encode_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(folder)
        self._at_stage("rename")
        self._directory.commit(save.iteration, save.attempt)
        return None

    def _oldest_kept(self, save: Save) -> int:
        newest_first = sorted({*self._committed, save.iteration}, reverse=True)
        if self._most_recent_k < 0 or len(newest_first) <= self._most_recent_k:
            return 0
        return newest_first[self._most_recent_k - 1]

    def _follow_up(self, save: Save, oldest: int) -> None:
        """What a leader does once a generation is committed; none of it can undo that."""
        try:
            self._at_stage("tracker")
            self._directory.point_to(save.iteration)
            for generation in self._directory.generations():
                if generation < oldest:
                    self._directory.remove(generation)
                    log.info("removed generation %d; the newest %d are kept", generation, self._most_recent_k)
            if removed := self._directory.remove_stale(save.attempt):
                log.info("removed what earlier attempts left: %s", ", ".join(removed))
        except OSError as error:
            log.warning("iteration %d is committed, but cleaning up failed: %s", save.iteration, error)

    def _key(self, save: Save, name: str) -> str:
        return f"outlast/checkpoint/{save.attempt.token}/{save.attempt.ordinal}/{name}"

    def _post(self, save: Save, name: str, value: msgspec.Struct) -> None:
        key = self._key(save, name)
        self._store.set(key, msgspec.json.encode(value).decode())
        self._posted.append((save.attempt.ordinal, key))

    def _forget_posted(self, before: int) -> None:
        """Delete what this rank posted for earlier saves: all ranks have taken part in a later one since."""
        for ordinal, key in self._posted:
            if ordinal < before:
                self._store.delete_key(key)
        self._posted = [(ordinal, key) for ordinal, key in self._posted if ordinal >= before]

    def _await(self, save: Save, name: str, *, grace_s: float = 0.0) -> bytes:
        key = self._key(save, name)
        while not self._store.check([key]):
            if self._stop.wait(POLL_S):
                raise CheckpointError(f"iteration {save.iteration} is given up: this rank leaves", rank=self._rank)
            if self._left_s(save) + grace_s <= 0:
                raise CheckpointError(
                    f"iteration {save.iteration}: no word of {name} after {self._timeout_s:g} s (save_timeout); "
                    "see the log of that rank",
                    rank=self._rank,
                    iteration=save.iteration,
                )
        return bytes(self._store.get(key))

    def _left_s(self, save: Save) -> float:
        return self._timeout_s - (clock.now_ns() - save.started_ns) / 1e9


def _numbers(tensors: tuple[TensorEntry, ...]) -> tuple[tuple[str, int, int], ...]:
    """Return what of a shard may be infinite or NaN: element type, offset, bytes."""
    return tuple(
        (tensor.dtype, tensor.offset, tensor.num_bytes) for tensor in tensors if tensor.dtype in MAY_BE_INFINITE
    )
