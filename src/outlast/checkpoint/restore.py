"""One rank's copy of a checkpoint, verified and restored: from memory, this node's disk, another node or the global
tier.

Before any live state is changed, every byte of a copy is compared with its digest, and the copy is checked to fit the
live state; it is loaded only once all ranks have voted (:mod:`outlast.checkpoint.recovery`). Tensors for devices are
copied there during verification, into separate memory (:mod:`outlast.checkpoint.landing`); without memory for that,
they are read into host memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outlast.checkpoint import protocol as f
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.dcp.items import TORCH_TYPES
from outlast.checkpoint.dcp.reader import bytes_of, read_rank
from outlast.checkpoint.dcp.reshard import Resharded, load_resharded
from outlast.checkpoint.fit import check_fit, check_layouts, restore_into
from outlast.checkpoint.landing import Landing
from outlast.checkpoint.layouts import OtherLayout, meshes_of
from outlast.checkpoint.manifest import MANIFEST, MANIFEST_PART, CopyKey, Manifest, decode_manifest
from outlast.checkpoint.missing import complete, find_missing
from outlast.checkpoint.places import Peers, Places, group_of
from outlast.checkpoint.replica.client import ParityMember, Target
from outlast.checkpoint.shard import TREE, TensorSpan, shard_name
from outlast.checkpoint.state import Wrapped, capture, decode, flatten
from outlast.checkpoint.tiers import PARITY, Table, check_manifest
from outlast.checkpoint.verification import BoundedReading, Proof, VerifiedFiles, prove_shard, read_shard
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.decoding import open_file
from outlast.errors import CheckpointError, Corrupt, Incomplete, Unavailable, Untrusted
from outlast.policy.recovery_point import Copy, Tier
from outlast.runtime.device import empty_cache
from outlast.runtime.storage_calls import StorageCalls, is_blocked, is_outage

log = logging.getLogger(__name__)
OPEN_TIMEOUT_S = 30.0


class VerifiedCopy:
    """A verified copy; the base class represents the live state itself, which is not changed."""

    num_bytes_read = 0
    keeps_missing = False
    """What it lacks of the live state keeps its present value."""
    missing: Sequence[str] = ()
    """Names in the live state that it lacks and that keep their present values; known after :meth:`check`."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError when it does not fit the live state. Changes nothing."""

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Load it into the live state; return its random numbers. Raises: CheckpointError; the state is unusable."""
        return None

    def close(self) -> None:
        """Release it."""

    def _fit(self, state: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.keeps_missing:
            self.missing, saved = find_missing(state, saved), complete(state, saved)
        check_fit(state, saved, keeps_missing=self.keeps_missing)
        return saved


class _ShardCopy(VerifiedCopy):
    """A shard in a file or in shared memory.

    Args:
        fd: Its descriptor, which the copy takes over.
        state: The live state; it is not changed.
        on_close: Called when the copy is released.
        bound: Ends a reading without progress; ``None`` = no time limit.
    """

    def __init__(
        self,
        fd: int,
        manifest: Manifest,
        rank: int,
        state: Mapping[str, Any],
        *,
        keeps_missing: bool,
        in_memory: bool = False,
        on_close: Callable[[], None] | None = None,
        bound: BoundedReading | None = None,
    ) -> None:
        self._fd, self._manifest, self._rank, self._on_close = fd, manifest, rank, on_close
        self._bound, self.keeps_missing = bound, keeps_missing
        self._landing: Landing | None = None

        def land(spans: Mapping[str, TensorSpan]) -> Landing | None:
            landing = Landing(fd, spans, state)
            self._landing = landing if landing.tensors else None
            return self._landing

        try:
            self._proof = prove_shard(fd, manifest, rank, in_memory=in_memory, open_reader=land, bound=bound)
        except BaseException:
            self._release()
            self._close(fd)  # without on_close: a rejected copy is not kept
            raise
        self.num_bytes_read = manifest.shards[rank].num_bytes

    def check(self, state: Mapping[str, Any]) -> None:
        live = capture(state)
        check_layouts(self._proof.tree, live)
        saved = decode(self._proof.tree, self._placeholder, meshes_of(live), rewrap=Wrapped.outline)["state"]
        self._fit(state, saved)

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        live = capture(state)
        into = {}
        for named in flatten({"state": live}, is_live=True).tensors:
            span = self._proof.spans.get(named.name)
            if span is not None and _takes(named.tensor, span.shape, span.dtype):
                into[named.name] = named.tensor
        landed = {} if self._landing is None else self._landing.tensors
        tensors = read_tensors(self._fd, self._manifest, self._rank, self._proof, into, landed, bound=self._bound)
        saved = decode(self._proof.tree, partial(_present, tensors), meshes_of(live))
        restore_into(state, complete(state, saved["state"]) if self.keeps_missing else saved["state"])
        tensors.clear()  # reference cycles of the decoder would keep them alive
        return dict(saved["random"])

    def _release(self) -> None:
        if self._landing is not None:
            self._landing.close()
            self._landing = None
            empty_cache()

    def close(self) -> None:
        self._release()
        if self._fd >= 0:
            self._close(self._fd)
            self._fd = -1
            if self._on_close is not None:
                self._on_close()

    def _close(self, fd: int) -> None:
        if self._bound is None:
            os.close(fd)
        elif is_blocked(self._bound.place):  # closing would block, and readers still use the fd
            threading.Thread(target=os.close, args=(fd,), name="outlast-storage", daemon=True).start()
        else:
            with contextlib.suppress(Unavailable):
                self._bound.run(partial(os.close, fd))

    def _placeholder(self, name: str) -> torch.Tensor:
        span = _present(self._proof.spans, name)
        return torch.empty((), dtype=TORCH_TYPES[span.dtype]).expand(span.shape)


class _GlobalCopy(VerifiedCopy):
    def __init__(self, files: VerifiedFiles, rank: int, state: Mapping[str, Any], *, keeps_missing: bool) -> None:
        self.keeps_missing = keeps_missing
        self._error: Exception | None = None

        def accept(tree: bytes) -> None:
            try:
                check_layouts(tree, capture(state))
            except OtherLayout:
                raise
            except Exception as error:  # noqa: BLE001 - an error of the live state; check() raises it
                self._error = error

        self._state = read_rank(files, rank, accept=accept)
        self.num_bytes_read = self._state.num_bytes_read

    def check(self, state: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._saved = decode(self._state.tree, partial(_present, self._state.tensors), meshes_of(capture(state)))
        self._saved["state"] = self._fit(state, self._saved["state"])

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        restore_into(state, self._saved["state"])
        return dict(self._saved["random"])


class _ReshardedCopy(VerifiedCopy):
    """A checkpoint of another number of ranks or layout, loaded for this state into separate tensors."""

    def __init__(self, resharded: Resharded) -> None:
        self._resharded, self.missing = resharded, resharded.missing
        self.num_bytes_read = resharded.num_bytes_read

    def restore(self, state: Mapping[str, Any]) -> None:
        self._resharded.apply()
        log.info("loaded in another layout than it was saved in: every rank's random numbers start from a new seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProver:
    config: CheckpointConfig
    places: Places
    peers: Peers
    writer: WriterClient
    arenas: ArenaPool
    """Memory for copies from other nodes."""
    table: Table
    """The copies that all ranks could load."""
    calls: StorageCalls
    """Ends calls on directories that do not respond."""
    state: Mapping[str, Any]
    """The live state."""
    keeps_missing: bool
    """What a copy lacks of the live state keeps its present value."""

    def prove(self, copy: Copy, reshard: bool) -> VerifiedCopy:
        """Compare every byte of a copy with its digest.

        Args:
            reshard: Whether it was saved in another layout than the live state's; only in the global tier, and the same
                on all ranks.

        Raises:
            OtherLayout: The layout differs, and ``reshard`` is off.
            CheckpointError: It is invalid or unavailable.
            OSError: It cannot be read.

        Collective: all ranks, for a checkpoint of another number of ranks or layout, the same on all.
        Blocks: while it is read.
        """
        match copy.tier:
            case Tier.MEMORY:
                return self._from_memory(copy)
            case Tier.LOCAL:
                return self._from_disk(copy)
            case Tier.REPLICA:
                return self._from_parity(copy) if copy.holder == PARITY else self._from_node(copy)
            case _:
                return self._from_global(copy, reshard)

    def _from_memory(self, copy: Copy) -> _ShardCopy:
        listed, _ = self.writer.ask(f.List(), f.Listed, timeout_s=OPEN_TIMEOUT_S)
        for held in listed.checkpoints:
            manifest, _ = decode_manifest(held.manifest)
            if (manifest.iteration, manifest.attempt) == (copy.checkpoint, copy.attempt):
                self._checked(manifest, copy)
                _, fd = self.writer.ask(f.Open(key=self._key(copy)), f.Done, timeout_s=OPEN_TIMEOUT_S)
                if fd is not None:
                    return self._shard_copy(fd, manifest, in_memory=True)
        raise Incomplete("the writer does not hold it any more")

    def _from_disk(self, copy: Copy) -> _ShardCopy:
        local = self.places.local
        assert local is not None
        path = local.checkpoint(copy.checkpoint) / shard_name(self.peers.rank)
        bound = BoundedReading(self.calls, local.url, os.fspath(path))

        def open_copy() -> tuple[Manifest, int]:
            manifest = self._checked(local.manifest(copy.checkpoint)[0], copy)
            return manifest, open_file(path)

        manifest, fd = self.calls.run(
            local.url,
            open_copy,
            operation="open",
            target=lambda: bound.path,
            discard=lambda late: os.close(late[1]),
        )
        return self._shard_copy(fd, manifest, bound=bound)

    def _shard_copy(self, fd: int, manifest: Manifest, **how: Any) -> _ShardCopy:
        return _ShardCopy(fd, manifest, self.peers.rank, self.state, keeps_missing=self.keeps_missing, **how)

    def _from_node(self, copy: Copy) -> _ShardCopy:
        target = self.places.targets[copy.holder]
        manifest, data = self._fetch_manifest(copy, target)
        problem = f"node {copy.holder} gave other bytes than were saved"
        return self._fetch(copy, manifest, data, problem, target=target)

    def _from_parity(self, copy: Copy) -> _ShardCopy:
        members, rank, targets = self.table.members[copy.attempt], self.peers.rank, self.places.targets
        known = [other for other in sorted(members) if other != rank]
        manifest, data = self._fetch_manifest(copy, targets[members[known[0]]])
        group = group_of(manifest.nodes, manifest.parity, rank) if manifest.parity else ()
        if missing := [other for other in group if other != rank and other not in members]:
            raise Incomplete(f"rank {missing[0]}'s shard or parity is missing")
        if len(group) < 2:
            raise Incomplete("its parity group has no other rank")
        holders = {other: targets[members[other]] for other in group if other != rank}
        holders[rank] = Target(node="", host="", port=0)
        parities = tuple(ParityMember(other, manifest.shards[other].num_bytes, holders[other]) for other in group)
        others = ", ".join(members[other] for other in group if other != rank)
        problem = f"what was rebuilt from nodes {others} is not what was saved"
        return self._fetch(copy, manifest, data, problem, members=parities)

    def _fetch_manifest(self, copy: Copy, target: Target) -> tuple[Manifest, bytes]:
        part = CopyKey(copy.checkpoint, copy.attempt, 0, MANIFEST_PART)
        request = f.GetPart(key=part, target=target, timeout_s=self.config.replication_timeout)
        data = self.writer.ask(request, f.GotPart, timeout_s=self.config.save_timeout)[0].data
        return self._checked(decode_manifest(data)[0], copy), data

    def _fetch(
        self,
        copy: Copy,
        manifest: Manifest,
        data: bytes,
        problem: str,
        *,
        target: Target | None = None,
        members: tuple[ParityMember, ...] = (),
    ) -> _ShardCopy:
        """Have the writer fetch a shard into memory, which becomes this node's copy."""
        rank = self.peers.rank
        num_bytes, chunks = manifest.shards[rank].num_bytes, manifest.shards[rank].chunks
        limit_s = self.config.replication_timeout
        request = f.Fetch(
            key=self._key(copy), num_bytes=num_bytes, chunks=chunks, target=target, members=members, timeout_s=limit_s
        )
        arena = self.arenas.take(num_bytes)
        try:
            fetched, _ = self.writer.ask(request, f.Fetched, timeout_s=self.config.save_timeout, fd=arena.fd)
            if fetched.chunks != chunks:
                wrong = next(n for n, chunk in enumerate(chunks) if fetched.chunks[n : n + 1] != (chunk,))
                raise Corrupt(f"{problem}: chunk {wrong} differs")
            hold = partial(self._hold, arena, copy, data)
            return self._shard_copy(os.dup(arena.fd), manifest, in_memory=True, on_close=hold)
        except BaseException:  # the next request needs the memory
            self.arenas.give_back(arena)
            raise

    def _hold(self, arena: Arena, copy: Copy, manifest: bytes) -> None:
        try:
            if self.writer.outlives_worker:
                self.writer.ask(f.PreparePart(key=self._key(copy), manifest=manifest), f.Done, timeout_s=OPEN_TIMEOUT_S)
                self.writer.ask(f.KeepPart(key=self._key(copy)), f.Done, timeout_s=OPEN_TIMEOUT_S)
        except CheckpointError:
            pass  # the next save makes another
        finally:
            self.arenas.give_back(arena)

    def _from_global(self, copy: Copy, reshard: bool) -> VerifiedCopy:
        directory = self.places.directory
        assert directory is not None
        same = self.table.world_sizes.get(copy.attempt) == self.peers.world_size and not reshard
        files, problem = None, ""
        try:
            folder = directory.folder(copy.checkpoint)
            manifest = self.calls.run(
                directory.url,
                lambda: directory.manifest(copy.checkpoint),
                operation="read",
                target=lambda: f"{directory.url}/{folder}/{MANIFEST}",
            )
            if manifest.attempt != copy.attempt:
                raise Untrusted(f"belongs to attempt {manifest.attempt} instead of {copy.attempt}")
            files = VerifiedFiles(directory, manifest, folder, calls=self.calls)
        except (CheckpointError, OSError) as error:
            if same:
                raise
            problem = f"{Unavailable.__name__ if is_outage(error) else ''}\0rank {self.peers.rank}: {error}"
        # All ranks load together: if one cannot begin, none may.
        if not same and (text := self.peers.find_first(problem)):
            kind, _, text = text.partition("\0")
            raise Unavailable(text) if kind else CheckpointError(text)
        assert files is not None
        if self.peers.rank == 0:
            with contextlib.suppress(Unavailable):  # the reading below detects it, too
                files.bounded(files.warn_of_metadata)
        if same:
            return _GlobalCopy(files, self.peers.rank, self.state, keeps_missing=self.keeps_missing)
        return _ReshardedCopy(load_resharded(files, self.state, keeps_missing=self.keeps_missing))

    def _key(self, copy: Copy) -> CopyKey:
        return CopyKey(copy.checkpoint, copy.attempt, self.peers.rank)

    def _checked(self, manifest: Manifest, copy: Copy) -> Manifest:
        check_manifest(manifest, self.places)
        if (manifest.iteration, manifest.attempt) != (copy.checkpoint, copy.attempt):
            raise Untrusted(f"is of attempt {manifest.attempt} at iteration {manifest.iteration}")
        return manifest


def read_tensors(
    fd: int,
    manifest: Manifest,
    rank: int,
    proof: Proof,
    into: Mapping[str, torch.Tensor],
    landed: Mapping[str, torch.Tensor] | None = None,
    *,
    bound: BoundedReading | None = None,
) -> dict[str, torch.Tensor]:
    """Read a verified shard's tensors.

    Args:
        into: Contiguous CPU tensors of the right type and shape to read into, by name; others are new.
        landed: Tensors that are already filled, by name; they are not read again.
        bound: Ends a reading without progress; ``None`` = no time limit.

    Returns:
        All tensors but the tree, by name; those of ``into`` and ``landed`` are the given ones.

    Raises:
        CheckpointError: It changed since its verification; the tensors of ``into`` are unusable.
        OSError: It cannot be read.

    Blocks: while all of it is read, by two threads.
    """
    landed = landed or {}
    tensors = {
        name: into[name] if name in into else torch.empty(span.shape, dtype=TORCH_TYPES[span.dtype])
        for name, span in proof.spans.items()
        if name not in landed
    }
    parts = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    read_shard(fd, manifest, rank, proof, parts, bound=bound)
    del tensors[TREE]
    return {**tensors, **landed}


def _takes(tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tuple(tensor.shape) == shape
        and tensor.dtype == TORCH_TYPES.get(dtype)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _present(mapping: Mapping[str, Any], name: str) -> Any:
    if name not in mapping:
        raise CheckpointError(f"tensor {name!r} is missing")
    return mapping[name]
