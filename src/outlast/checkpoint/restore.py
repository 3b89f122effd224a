"""One rank's copy of a generation, proven and restored: from memory, this node's disk, another node or the global tier.

A copy is proven before any live state is touched: every byte is compared with its digest. It is checked whether it fits
the live state, and only once all ranks have voted (:mod:`outlast.checkpoint.recovery`) is it put into it.

What is going to lie on a device is copied there while it is proven, into memory beside the live state: what the device
copies are the very bytes that were compared. Where there is no memory for that, it is read into the host's memory.
"""

from __future__ import annotations

import bisect
import collections
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.checkpoint.arena import Arena, ArenaPool
from outlast.checkpoint.dcp.items import TORCH_TYPES
from outlast.checkpoint.dcp.reader import bytes_of, read_rank
from outlast.checkpoint.dcp.reshard import Resharded, load_resharded
from outlast.checkpoint.manifest import MANIFEST_PART, CopyKey, Manifest, decode_manifest
from outlast.checkpoint.places import Peers, Places, group_of
from outlast.checkpoint.replica.client import ParityMember, Target
from outlast.checkpoint.shard import DTYPE_NAMES, TREE, TensorSpan, shard_name
from outlast.checkpoint.state import (
    OtherLayout,
    Wrapped,
    capture,
    check_fit,
    check_layouts,
    decode,
    flatten,
    meshes_of,
    restore_into,
)
from outlast.checkpoint.tiers import PARITY, Table, check_manifest
from outlast.checkpoint.verification import Proof, VerifiedFiles, prove_shard, read_shard
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted
from outlast.policy.recovery_point import Copy, Tier
from outlast.runtime.device import Copied, DeviceCopies, copies_of, empty_cache, start_driver_thread

log = logging.getLogger(__name__)
OPEN_TIMEOUT_S = 30.0
LANDED_BYTES = 256 << 10
"""Tensors below this are read into the host's memory: one by one, copies cost more than their bytes."""
SLOT_BYTES = 8 << 20
NUM_LANDING_THREADS = 12
"""At most; a core reads and digests some 4 GB/s, a link to a device takes up to 55."""
NUM_SPARE_SLOTS = 6
"""Slots that a device copies from while each reader fills one."""
_POLL_S, _LOOK_S = 0.0003, 0.1
_DEVICE_LIMIT_S = 60.0
"""A device that does not take 4 MiB in this time hangs."""


class ProvenCopy:
    """A copy whose every byte was compared with its digest; this one is the live state itself, which stays as it is."""

    num_bytes_read = 0

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError when it does not fit the live state. Changes nothing."""

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Put it into the live state; return the saved random numbers, ``None`` when there are none for this rank.

        Raises:
            CheckpointError: It changed since it was proven; the live state is then unusable.
        """
        return None

    def close(self) -> None:
        """Release it."""


class _PinnedSlot:
    """Pinned memory that a device copies from."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.view = memory, bytes_of(memory)


_Filled: TypeAlias = tuple[_PinnedSlot, int, int]
"""A slot, and between which of the shard's bytes it holds what was read."""


@dataclass(frozen=True, slots=True)
class _Room:
    """A tensor of a device, as bytes, that takes a part of a shard."""

    begin: int
    end: int
    bytes: torch.Tensor
    copies: DeviceCopies


class Landing:
    """Read a shard, and have devices copy its large tensors, as far as they have memory beside the live state.

    What reads fills pinned slots, and one thread gives the devices what is filled: this way Python's lock is
    needed for little, which else is the limit with many readers.

    Args:
        fd: The shard.
        spans: What lies where.
        state: The live state, which says what belongs on which device; nothing of it is touched.

    Thread: that of the training loop; :meth:`read`: any, several at once.
    """

    def __init__(self, fd: int, spans: Mapping[str, TensorSpan], state: Mapping[str, Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """What has a place on a device, by name; filled once all was read and :meth:`finish` has returned."""
        self.num_threads = min(NUM_LANDING_THREADS, len(os.sched_getaffinity(0)))
        self._fd, self._rooms, self._slots, self._num_slots = fd, list[_Room](), list[_PinnedSlot](), 0
        for (copies, is_copied), names in _places_on_devices(spans, state).items():
            shapes = [(spans[name].shape, TORCH_TYPES[spans[name].dtype]) for name in names]
            # What is only copied from is given back at once; of the rest each is going to be part of the state.
            for name, tensor in zip(names, copies.make_room(shapes, together=is_copied), strict=False):
                begin, end = spans[name].offset, spans[name].offset + spans[name].num_bytes
                self.tensors[name] = tensor
                self._rooms.append(_Room(begin, end, tensor.view(-1).view(torch.uint8), copies))
        self._rooms.sort(key=lambda room: room.begin)
        self._ends = [room.end for room in self._rooms]
        self._lock, self._failure = threading.Lock(), list[BaseException]()
        self._free, self._filled = queue.SimpleQueue[_PinnedSlot](), queue.SimpleQueue[_Filled | None]()
        self._sender: threading.Thread | None = None
        self._is_over = False
        if self.tensors:
            self._sender = start_driver_thread(self._send_all, "outlast-landing")

    def read(self, start: int, end: int, _: memoryview) -> Iterator[memoryview]:
        """See :class:`outlast.checkpoint.verification.ShardReader`. Raises: CheckpointError, when a device hangs."""
        while start < end:
            slot = self._take_slot()  # all of it at once: in smaller pieces Python's lock is what readers wait for
            if not (count := os.preadv(self._fd, [slot.view[: end - start]], start)):
                return  # nothing of this load counts any more, the slot neither
            yield slot.view[:count]
            self._filled.put((slot, start, start + count))
            start += count

    def finish(self) -> None:
        """Wait until the devices have copied everything. Raises: CheckpointError, when one hangs."""
        if self._sender is not None:
            self._filled.put(None)
            self._sender.join(2 * _DEVICE_LIMIT_S)
            if self._sender.is_alive():  # in a call of the driver
                self._failure.append(_hanging())
            self._sender = None
        if self._failure:
            raise self._failure[0]

    def close(self) -> None:
        """Release what was not used. Idempotent. Blocks: until nothing is copied any more."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - whatever kept the devices from copying
            log.warning("%s", error)
            _lost.append((self.tensors, self._slots))  # their memory must not be used again
        self.tensors, self._rooms, self._slots, self._failure = {}, [], [], []

    def _take_slot(self) -> _PinnedSlot:
        """Return a slot that no device copies from. Raises: CheckpointError, when one hangs."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            if is_new := self._num_slots < self.num_threads + NUM_SPARE_SLOTS:
                self._num_slots += 1
        if is_new:
            slot = _PinnedSlot(self._rooms[0].copies.pinned(SLOT_BYTES))
            self._slots.append(slot)
            return slot
        end_s = clock.now_s() + 2 * _DEVICE_LIMIT_S
        while not self._failure:
            try:
                return self._free.get(timeout=_LOOK_S)
            except queue.Empty:
                if clock.now_s() >= end_s:
                    raise _hanging() from None
        raise self._failure[0]

    def _send_all(self) -> None:
        """Have the devices copy what is filled, until :meth:`finish`. Thread: the sender's."""
        under_way = collections.deque[tuple[float, list[Copied], list[_PinnedSlot]]]()
        try:
            while (batch := self._next_batch(_POLL_S if under_way else None)) is not None or under_way:
                if batch:
                    under_way.append((clock.now_s(), self._send(batch), [slot for slot, _, _ in batch]))
                while under_way and all(copied.wait(0.0) for copied in under_way[0][1]):
                    for slot in under_way.popleft()[2]:
                        self._free.put(slot)
                if under_way and clock.now_s() >= under_way[0][0] + _DEVICE_LIMIT_S:
                    raise _hanging()
        except BaseException as error:  # noqa: BLE001 - raised again by finish(), and by whoever waits for a slot
            self._failure.append(error)

    def _next_batch(self, timeout_s: float | None) -> list[_Filled] | None:
        """Return what was filled since, waiting for the first so long; ``None``: that was all."""
        if self._is_over and timeout_s is None:
            return None
        batch = list[_Filled]()
        try:
            while (found := self._filled.get_nowait() if batch else self._filled.get(timeout=timeout_s)) is not None:
                batch.append(found)
            self._is_over = True
        except queue.Empty:
            pass
        return None if self._is_over and not batch else batch

    def _send(self, batch: Iterable[_Filled]) -> list[Copied]:
        """Have the devices copy what slots hold: the shard's bytes from here to there."""
        pairs: dict[DeviceCopies, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for slot, start, end in batch:
            for room in self._rooms[bisect.bisect_right(self._ends, start) :]:
                if room.begin >= end:
                    break
                first, last = max(start, room.begin), min(end, room.end)
                pair = slot.memory[first - start : last - start], room.bytes[first - room.begin : last - room.begin]
                pairs.setdefault(room.copies, []).append(pair)
        return [copies.queue(some) for copies, some in pairs.items()]


def _hanging() -> CheckpointError:
    return CheckpointError(f"the device has not taken {SLOT_BYTES} bytes within {_DEVICE_LIMIT_S:g} s; it hangs")


_lost: list[tuple[dict[str, torch.Tensor], list[_PinnedSlot]]] = []
"""What a device may still write to, or read."""


def _places_on_devices(
    spans: Mapping[str, TensorSpan], state: Mapping[str, Any]
) -> dict[tuple[DeviceCopies, bool], list[str]]:
    """Return which large tensors of a shard belong on which device, and whether they are copied into live ones there.

    They belong where the live state has such a one; and what an optimizer has not made yet, beside its parameter. Only
    modules and bare tensors copy; an optimizer, or whatever else has a ``load_state_dict``, may keep what it is given.
    """
    live = {named.name: named for named in flatten({"state": capture(state)}).tensors}
    parts = list(_parts("state", state))
    copying = [path for path, value in parts if isinstance(value, torch.nn.Module | torch.Tensor)]
    parameters = {
        (path, number): parameter
        for path, value in parts
        if isinstance(value, torch.optim.Optimizer)
        for number, parameter in enumerate(one for group in value.param_groups for one in group["params"])
    }
    found: dict[tuple[DeviceCopies, bool], list[str]] = {}
    for name, span in spans.items():
        if span.num_bytes < LANDED_BYTES:
            continue
        device = None
        if (named := live.get(name)) is not None:
            if tuple(named.shape) == span.shape and named.dtype == TORCH_TYPES[span.dtype]:
                device = named.device
        else:
            path, _, rest = name.rpartition(".state.")
            index = rest.partition(".")[0]
            if index.isdecimal() and (parameter := parameters.get((path, int(index)))) is not None:
                device = parameter.device
        if device is not None and (copies := copies_of(device)) is not None:
            is_copied = any(name == path or name.startswith(f"{path}.") for path in copying)
            found.setdefault((copies, is_copied), []).append(name)
    return found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is no mapping in a state, by its path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _parts(f"{path}.{name}", inner)
    else:
        yield path, value


class _ShardCopy(ProvenCopy):
    """A shard in a file or in shared memory.

    Args:
        fd: Its descriptor, from now on the copy's.
        manifest: Its generation.
        rank: Whose it is.
        state: The live state that it is for; nothing of it is touched.
        in_memory: It lies in shared memory that may be longer than the shard.
        on_close: Is called when it is released after all.
    """

    def __init__(
        self,
        fd: int,
        manifest: Manifest,
        rank: int,
        state: Mapping[str, Any],
        *,
        in_memory: bool,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._fd, self._manifest, self._rank, self._on_close = fd, manifest, rank, on_close
        self._landing: Landing | None = None

        def land(spans: Mapping[str, TensorSpan]) -> Landing | None:
            landing = Landing(fd, spans, state)
            self._landing = landing if landing.tensors else None
            return self._landing

        try:
            self._proof = prove_shard(fd, manifest, rank, in_memory=in_memory, open_reader=land)
            self._await_device()
        except BaseException:
            self._release()
            os.close(fd)  # and nothing else: what was refused is not held
            raise
        self.num_bytes_read = manifest.shards[rank].num_bytes

    def check(self, state: Mapping[str, Any]) -> None:
        live = capture(state)
        check_layouts(self._proof.tree, live)
        saved = decode(self._proof.tree, self._placeholder, meshes_of(live), rewrap=Wrapped.outline)
        check_fit(state, saved["state"])

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        live = capture(state)
        into = {}
        for named in flatten({"state": live}).tensors:
            span = self._proof.spans.get(named.name)
            if span is not None and _takes(named.tensor, span.shape, span.dtype):
                into[named.name] = named.tensor
        landed = {} if self._landing is None else self._landing.tensors
        tensors = read_tensors(self._fd, self._manifest, self._rank, self._proof, into, landed)
        saved = decode(self._proof.tree, partial(_present, tensors), meshes_of(live))
        restore_into(state, saved["state"])
        tensors.clear()  # what has decoded them refers to itself, and is freed when garbage is next collected
        return dict(saved["random"])

    def _await_device(self) -> None:
        if self._landing is not None:
            self._landing.finish()

    def _release(self) -> None:
        """Give back what lies on devices beside the live state."""
        if self._landing is not None:
            self._landing.close()
            self._landing = None
            empty_cache()

    def close(self) -> None:
        self._release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._on_close is not None:
                self._on_close()

    def _placeholder(self, name: str) -> torch.Tensor:
        """Return a tensor of the right type and shape that takes no memory."""
        span = _present(self._proof.spans, name)
        return torch.empty((), dtype=TORCH_TYPES[span.dtype]).expand(span.shape)


class _GlobalCopy(ProvenCopy):
    """A rank's exact state, put together from the global tier, in memory of its own."""

    def __init__(self, files: VerifiedFiles, rank: int, state: Mapping[str, Any]) -> None:
        self._unfit: Exception | None = None

        def accept(tree: bytes) -> None:
            try:
                check_layouts(tree, capture(state))
            except OtherLayout:
                raise
            except Exception as error:  # noqa: BLE001 - the live state's, not the generation's; check() raises it
                self._unfit = error

        self._state = read_rank(files, rank, accept=accept)
        self.num_bytes_read = self._state.num_bytes_read

    def check(self, state: Mapping[str, Any]) -> None:
        if self._unfit is not None:
            raise self._unfit
        self._saved = decode(self._state.tree, partial(_present, self._state.tensors), meshes_of(capture(state)))
        check_fit(state, self._saved["state"])

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        restore_into(state, self._saved["state"])
        return dict(self._saved["random"])


class _ReshardedCopy(ProvenCopy):
    """A generation of another number of ranks, or another layout, loaded for this very state into tensors beside it."""

    def __init__(self, resharded: Resharded) -> None:
        self._resharded = resharded
        self.num_bytes_read = resharded.num_bytes_read

    def restore(self, state: Mapping[str, Any]) -> None:
        self._resharded.apply()
        log.info("loaded in another layout than it was saved in: every rank's random numbers start from a new seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProver:
    """Proves copies of this rank."""

    config: CheckpointConfig
    """How long another node may take."""
    places: Places
    """Where they may lie."""
    peers: Peers
    """The ranks, for generations that all load together."""
    writer: WriterClient
    """Holds memory and communicates with other nodes."""
    arenas: ArenaPool
    """Where copies from other nodes go."""
    table: Table
    """What all ranks could load."""
    state: Mapping[str, Any]
    """The live state."""

    def prove(self, copy: Copy, reshard: bool) -> ProvenCopy:
        """Compare every byte of a copy with its digest.

        Args:
            copy: Which.
            reshard: Whether it was saved in another layout than the live state's; only of the global tier, and the
                same on all ranks.

        Raises:
            OtherLayout: It was, and ``reshard`` is off.
            CheckpointError: It is not what it should be, or is unavailable.
            OSError: It cannot be read.

        Collective: all ranks, for a generation of another number of ranks or layout, which is the same on all.
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
        for held in listed.generations:
            manifest, _ = decode_manifest(held.manifest)
            if (manifest.iteration, manifest.attempt) == (copy.generation, copy.attempt):
                self._checked(manifest, copy)
                _, fd = self.writer.ask(f.Open(key=self._key(copy)), f.Done, timeout_s=OPEN_TIMEOUT_S)
                if fd is not None:
                    return _ShardCopy(fd, manifest, self.peers.rank, self.state, in_memory=True)
        raise Incomplete("the writer does not hold it any more")

    def _from_disk(self, copy: Copy) -> _ShardCopy:
        assert self.places.local is not None
        manifest = self._checked(self.places.local.manifest(copy.generation)[0], copy)
        path = self.places.local.generation(copy.generation) / shard_name(self.peers.rank)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _ShardCopy(fd, manifest, self.peers.rank, self.state, in_memory=False)

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
            raise Incomplete("it shares a parity with nobody")
        holders = {other: targets[members[other]] for other in group if other != rank}
        holders[rank] = Target(node="", host="", port=0)
        parities = tuple(ParityMember(other, manifest.shards[other].num_bytes, holders[other]) for other in group)
        others = ", ".join(members[other] for other in group if other != rank)
        problem = f"what was rebuilt from nodes {others} is not what was saved"
        return self._fetch(copy, manifest, data, problem, members=parities)

    def _fetch_manifest(self, copy: Copy, target: Target) -> tuple[Manifest, bytes]:
        """Have the writer get a generation's manifest from another node; return it, checked, and its file."""
        part = CopyKey(copy.generation, copy.attempt, 0, MANIFEST_PART)
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
        """Have the writer get a shard into memory, which is then kept as this node's copy."""
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
            return _ShardCopy(
                os.dup(arena.fd),
                manifest,
                rank,
                self.state,
                in_memory=True,
                on_close=lambda: self._hold(arena, copy, data),
            )
        except BaseException:  # whatever failed, the memory serves the next one
            self.arenas.give_back(arena)
            raise

    def _hold(self, arena: Arena, copy: Copy, manifest: bytes) -> None:
        """Have the writer keep what came from another node: it is this node's memory copy now."""
        try:
            if self.writer.outlives_worker:
                self.writer.ask(f.PreparePart(key=self._key(copy), manifest=manifest), f.Done, timeout_s=OPEN_TIMEOUT_S)
                self.writer.ask(f.KeepPart(key=self._key(copy)), f.Done, timeout_s=OPEN_TIMEOUT_S)
        except CheckpointError:
            pass  # the next save makes another
        finally:
            self.arenas.give_back(arena)

    def _from_global(self, copy: Copy, reshard: bool) -> ProvenCopy:
        directory = self.places.directory
        assert directory is not None
        same = self.table.world_sizes.get(copy.attempt) == self.peers.world_size and not reshard
        files, problem = None, ""
        try:
            manifest = directory.manifest(copy.generation)
            if manifest.attempt != copy.attempt:
                raise Untrusted(f"belongs to attempt {manifest.attempt} instead of {copy.attempt}")
            files = VerifiedFiles(directory, manifest, directory.folder(copy.generation))
        except (CheckpointError, OSError) as error:
            if same:
                raise
            problem = f"rank {self.peers.rank}: {error}"
        # All ranks load together: if one cannot even begin, none may.
        if not same and (text := self.peers.find_first(problem)):
            raise CheckpointError(text)
        assert files is not None
        if self.peers.rank == 0:
            files.warn_of_metadata()
        if same:
            return _GlobalCopy(files, self.peers.rank, self.state)
        return _ReshardedCopy(load_resharded(files, self.state))

    def _key(self, copy: Copy) -> CopyKey:
        return CopyKey(copy.generation, copy.attempt, self.peers.rank)

    def _checked(self, manifest: Manifest, copy: Copy) -> Manifest:
        check_manifest(manifest, self.places)
        if (manifest.iteration, manifest.attempt) != (copy.generation, copy.attempt):
            raise Untrusted(f"is of attempt {manifest.attempt} at iteration {manifest.iteration}")
        return manifest


def read_tensors(
    fd: int,
    manifest: Manifest,
    rank: int,
    proof: Proof,
    into: Mapping[str, torch.Tensor],
    landed: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Read a proven shard's tensors.

    Args:
        fd: The shard.
        manifest: Its generation.
        rank: Whose it is.
        proof: What ``prove_shard`` returned.
        into: Contiguous CPU tensors of the right type and shape that take their bytes, by name; others are new.
        landed: Tensors that have their bytes already, by name; they are not read again.

    Returns:
        All tensors but the tree, by name; those of ``into`` and ``landed`` are the given ones.

    Raises:
        CheckpointError: It is not what was proven; what ``into`` holds is unusable.
        OSError: It cannot be read.

    Blocks: while all of it is read, by two threads.
    """
    landed = landed or {}
    tensors = {
        name: into[name] if name in into else torch.empty(span.shape, dtype=TORCH_TYPES[span.dtype])
        for name, span in proof.spans.items()
        if name not in landed
    }
    read_shard(fd, manifest, rank, proof, {name: bytes_of(tensor) for name, tensor in tensors.items()})
    del tensors[TREE]
    return {**tensors, **landed}


def _takes(tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a shard's bytes can be read straight into a tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tuple(tensor.shape) == shape
        and DTYPE_NAMES.get(str(tensor.dtype)) == dtype
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _present(mapping: Mapping[str, Any], name: str) -> Any:
    if name not in mapping:
        raise CheckpointError(f"tensor {name!r} is missing")
    return mapping[name]
