"""Verification: every chunk (8 MiB) of a stored file is compared with its digest before its bytes are used.

Loads, ``VerifiedReader`` and ``outlast ckpt verify`` all use :func:`verify_chunk`, for shared memory, a node's folder,
and the global tier on a file system or in an object store.

A rank's shard is read twice. First every byte is read through small buffers and verified, without allocating memory or
changing state. Once all ranks have verified theirs, the bytes are read straight into their tensors, and digested again
there: first touch of fresh memory costs several times the copy, and the used bytes must be the verified ones. Neither
torch nor numpy is imported at the top.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.manifest import FileEntry, GlobalManifest
from outlast.checkpoint.manifest import Manifest, ShardEntry
from outlast.checkpoint.shard import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    TREE,
    Identity,
    TensorSpan,
    digest,
    digests,
    read_head,
    read_header,
)
from outlast.decoding import open_file
from outlast.errors import CheckpointError, Corrupt, Incomplete, Unavailable, Untrusted
from outlast.runtime.storage_calls import CallProgress, StorageCalls

log = logging.getLogger(__name__)
R = TypeVar("R")
PIECE_BYTES = 1 << 20
"""Bytes of one read from a disk: small enough to be digested from the cache."""
NUM_LOAD_THREADS = 2
MAX_BUFFERS = 512
"""Buffers of one read; the system takes up to 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file, and the expected digests of its bytes."""

    name: str
    num_bytes: int
    chunks: tuple[str, ...]
    """xxh3_64 of every 8 MiB, hexadecimal."""
    contents: Callable[[], Iterable[tuple[str, int, int]]] = tuple
    """Returns name, offset and bytes of its tensors."""
    read: Callable[[int, int, memoryview], Iterable[memoryview]]
    """Yields the bytes between two offsets, in order, each piece valid until the next; ends early where the file does.
    The third argument is ``room_bytes`` of scratch memory. Raises: OSError, CheckpointError."""
    room_bytes: int = 0
    takes: Callable[[int], bool] = lambda _: False
    """Returns whether the reader of a chunk, by its number, also digests it; called once, before it is read."""
    node: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Flaw:
    file: StoredFile
    error: CheckpointError | OSError
    chunk: int | None = None
    contents: tuple[str, ...] = ()
    """Names of the tensors in that chunk."""


def verify_chunk(
    file: StoredFile, index: int, room: memoryview, on_piece: Callable[[memoryview, int], None] | None = None
) -> Flaw | None:
    """Compare a chunk with its digest; a chunk that its reader digests is only read.

    Args:
        room: At least ``file.room_bytes``; holds the chunk's last piece afterwards.
        on_piece: Called with each piece and its offset in the file.

    Raises:
        OSError, CheckpointError: The file cannot be read.
    """
    start = index * CHUNK_BYTES
    end = min(start + CHUNK_BYTES, file.num_bytes)
    found, position, is_taken = xxhash.xxh3_64(), start, file.takes(index)
    for piece in file.read(start, end, room):
        if not is_taken:
            found.update(piece)
        if on_piece is not None:
            on_piece(piece, position)
        position += len(piece)
    if position == end and (is_taken or found.hexdigest() == file.chunks[index]):
        return None
    names = tuple(name for name, offset, num_bytes in file.contents() if offset < end and offset + num_bytes > start)
    if position < end:
        return Flaw(file, Incomplete(f"ends after {position} bytes instead of {file.num_bytes}"), index, names)
    within = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
    return Flaw(file, Corrupt(f"chunk {index}, bytes {start} to {end}{within}, differs from its digest"), index, names)


def verify(
    files: Sequence[StoredFile],
    *,
    num_threads: int,
    on_piece: Callable[[memoryview, int], None] | None = None,
    until_flaw: bool = False,
    chunks: Callable[[int], bool] | None = None,
) -> list[Flaw]:
    """Compare every byte of files with its digest, several chunks at once.

    Args:
        num_threads: Readers, each of which holds ``room_bytes`` of a file in memory.
        on_piece: Called in the readers' threads with each piece and its offset in its file.
        until_flaw: Whether no further chunk is begun after the first flaw.
        chunks: Returns whether to read the chunk of this number; ``None`` = all.

    Returns:
        The flaws, in the order of the files and their chunks; an unreadable file has one.

    Blocks: while all of it is read. Ctrl-C ends it once each reader has read its current piece.
    """
    wanted = [(file, index) for file in files for index in range(len(file.chunks)) if chunks is None or chunks(index)]
    turns = iter(wanted)
    flaws, unreadable, failures = list[Flaw](), set[int](), list[BaseException]()
    lock, stop = threading.Lock(), threading.Event()
    ended = queue.SimpleQueue[None]()  # has one entry for each reader that has ended

    def next_turn() -> tuple[StoredFile, int] | None:
        with lock:
            if stop.is_set() or (until_flaw and flaws):
                return None
            return next((turn for turn in turns if id(turn[0]) not in unreadable), None)

    def take(piece: memoryview, offset: int) -> None:
        if stop.is_set():
            raise _StoppedError
        if on_piece is not None:
            on_piece(piece, offset)

    def read() -> None:
        room = memoryview(b"")
        try:
            while (turn := next_turn()) is not None:
                file, index = turn
                if len(room) < file.room_bytes:
                    room = memoryview(bytearray(file.room_bytes))
                try:
                    flaw = verify_chunk(file, index, room, take)
                except (OSError, CheckpointError) as error:
                    flaw = Flaw(file, error)
                with lock:
                    if flaw is not None and (flaw.chunk is not None or id(file) not in unreadable):
                        flaws.append(flaw)
                        if flaw.chunk is None:
                            unreadable.add(id(file))
        except _StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures.append(error)
            stop.set()
        finally:
            ended.put(None)

    num_threads = min(num_threads, len(wanted))
    if num_threads < 2:
        read()
    else:
        names = [f"outlast-verify-{number}" for number in range(num_threads)]
        threads = [threading.Thread(target=read, name=name, daemon=True) for name in names]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                ended.get()  # not join(): after Ctrl-C in it, Python 3.11 takes a running thread for an ended one
        finally:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if failures:
        raise failures[0]
    places = {id(file): place for place, file in enumerate(files)}
    return sorted(flaws, key=lambda flaw: (places[id(flaw.file)], flaw.chunk or 0))


class _StoppedError(Exception):
    """The caller no longer waits."""


def check_origin(manifest: Manifest | GlobalManifest, *, iteration: int, run: str | None) -> None:
    """Check a manifest's iteration, and its run unless the directory's is unknown (``None``). Raises: Untrusted."""
    if run is not None and manifest.run != run:
        raise Untrusted(f"belongs to run {manifest.run}, its directory to run {run}")
    if manifest.iteration != iteration:
        raise Untrusted(f"is the manifest of iteration {manifest.iteration}")


# -- a rank's shard ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proof:
    spans: dict[str, TensorSpan]
    tree: bytes
    head_bytes: int


def shard_file(
    entry: ShardEntry,
    read: Callable[[int, int, memoryview], Iterable[memoryview]],
    *,
    name: str = "",
    room_bytes: int = 0,
    node: str | None = None,
    spans: Mapping[str, TensorSpan] | None = None,
    takes: Callable[[int], bool] = lambda _: False,
) -> StoredFile:
    """Return a rank's shard as a file to verify; without ``spans``, its header is read after a flaw."""

    def contents() -> list[tuple[str, int, int]]:
        found = _read_table(entry, read, room_bytes) if spans is None else spans
        in_order = sorted(found.values(), key=lambda span: span.offset)
        return [(span.name, span.offset, span.num_bytes) for span in in_order]

    return StoredFile(
        name=name or entry.file,
        num_bytes=entry.num_bytes,
        chunks=entry.chunks,
        contents=contents,
        read=read,
        room_bytes=room_bytes,
        takes=takes,
        node=node,
        rank=entry.rank,
    )


def _read_table(
    entry: ShardEntry, read: Callable[[int, int, memoryview], Iterable[memoryview]], room_bytes: int
) -> Mapping[str, TensorSpan]:
    room = memoryview(bytearray(room_bytes))

    def read_bytes(end: int) -> bytes:
        return b"".join([bytes(piece) for piece in read(0, end, room)])

    try:
        length = int.from_bytes(read_bytes(8), "little")
        head = read_bytes(min(8 + length, entry.num_bytes))
        return read_header(memoryview(head), entry.num_bytes)[1] if digest(head) == entry.table else {}
    except (OSError, CheckpointError):
        return {}


def read_path(path: Path, start: int, end: int, room: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a local file; see :attr:`StoredFile.read`."""
    with open(open_file(path), "rb", buffering=0) as file:
        yield from _read_fd(file.fileno(), start, end, room)


def check_shard(path: Path, manifest: Manifest, rank: int, *, read_head: bool = False) -> None:
    """Check a file's size as that of a rank's shard; if it differs, or with ``read_head``, check its header.

    Raises: CheckpointError, when it is missing, torn, or another one.
    """
    try:
        with open(open_file(path), "rb", buffering=0) as file:
            if read_head or os.fstat(file.fileno()).st_size != manifest.shards[rank].num_bytes:
                _check_table(_prove_head(file.fileno(), manifest, rank)[0], manifest, rank)
    except FileNotFoundError:
        raise Incomplete("is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error


class ShardReader(Protocol):
    """Reads a shard, and processes the same bytes that are compared with their digests."""

    num_threads: int

    def takes(self, chunk: int) -> bool:
        """As :attr:`StoredFile.takes`; may be called by several threads at once."""

    def read(self, start: int, end: int, room: memoryview) -> Iterable[memoryview]:
        """As :attr:`StoredFile.read`; may be called by several threads at once."""

    def finish(self) -> Mapping[int, str]:
        """Return the digests of the chunks that it took, by their numbers, once all is read.

        Raises: CheckpointError. Blocks: until it has processed all bytes.
        """


def prove_shard(
    fd: int,
    manifest: Manifest,
    rank: int,
    *,
    in_memory: bool = False,
    open_reader: Callable[[Mapping[str, TensorSpan]], ShardReader | None] | None = None,
    bound: BoundedReading | None = None,
) -> Proof:
    """Compare every byte of a rank's shard with its digest.

    Args:
        open_reader: Gets the shard's tensors, and returns a reader of ``fd``; ``None`` = the default reader.
        bound: Ends a reading without progress; ``None`` = no time limit.

    Raises:
        CheckpointError: The shard is torn, changed, or another one.
        Unavailable: The reading made no progress.
        OSError: It cannot be read.

    Blocks: while all of it is read, by two threads, or as many as the reader has.
    """
    entry = manifest.shards[rank]
    prove_head = partial(_prove_head, fd, manifest, rank, in_memory=in_memory)
    head, spans = prove_head() if bound is None else bound.run(prove_head)
    _check_spans(spans, start=len(head), size=entry.num_bytes)
    _check_table(head, manifest, rank)
    again, tree = bytearray(len(head)), bytearray(spans[TREE].num_bytes)
    kept = [(0, again), (spans[TREE].offset, tree)]

    def copy_out(piece: memoryview, position: int) -> None:
        for offset, into in kept:
            begin, end = max(position, offset), min(position + len(piece), offset + len(into))
            if begin < end:
                into[begin - offset : end - offset] = piece[begin - position : end - position]

    reader = None if open_reader is None else open_reader(spans)
    if reader is not None:
        file = shard_file(entry, reader.read, spans=spans, takes=reader.takes)
        _verify_shard(file, copy_out, num_threads=reader.num_threads, bound=bound)
        if differing := {chunk for chunk, found in reader.finish().items() if found != file.chunks[chunk]}:
            stored = shard_file(entry, partial(_read_fd, fd), room_bytes=PIECE_BYTES, spans=spans)
            _verify_shard(stored, chunks=differing.__contains__)  # raises if the stored bytes differ
            raise CheckpointError(
                f"a device does not hold what was copied to it (chunk {min(differing)}), but what is stored is as it "
                "was saved; look at the device's memory and its link"
            )
    elif in_memory:
        with mmap.mmap(fd, entry.num_bytes, prot=mmap.PROT_READ) as image, memoryview(image) as view:
            _verify_shard(shard_file(entry, partial(_read_image, view), spans=spans), copy_out)
    else:
        _verify_shard(shard_file(entry, partial(_read_fd, fd), room_bytes=PIECE_BYTES, spans=spans), copy_out)
    if again != head:
        raise Corrupt("the header changed while it was read")
    return Proof(spans, bytes(tree), len(head))


class _Unread:
    """Stands for memory whose bytes only the digest needs."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, where: slice) -> memoryview:
        return memoryview(bytearray(len(range(self._num_bytes)[where])))


def read_shard(
    fd: int,
    manifest: Manifest,
    rank: int,
    proof: Proof,
    parts: Mapping[str, memoryview],
    *,
    bound: BoundedReading | None = None,
) -> None:
    """Read a verified shard; chunks without a requested tensor are skipped.

    Args:
        parts: Memory for the bytes of each requested tensor, by name.
        bound: Ends a reading without progress; ``None`` = no time limit.

    Raises:
        CheckpointError: It changed since its verification, or makes no progress; the memory of ``parts`` is unusable.
        OSError: It cannot be read.

    Blocks: while all of it is read, by two threads.
    """
    ordered = sorted((span for span in proof.spans.values() if span.num_bytes), key=lambda span: span.offset)
    starts = [0, *(span.offset for span in ordered)]
    views = [
        memoryview(bytearray(proof.head_bytes)),
        *(parts.get(span.name) or _Unread(span.num_bytes) for span in ordered),
    ]
    is_wanted = [True, *(span.name in parts for span in ordered)]

    def has_wanted(chunk: int) -> bool:
        first = bisect.bisect_right(starts, chunk * CHUNK_BYTES) - 1
        return any(is_wanted[first : bisect.bisect_left(starts, (chunk + 1) * CHUNK_BYTES)])

    def room_of(start: int, end: int) -> Iterator[memoryview]:
        index = bisect.bisect_right(starts, start) - 1
        while start < end:
            begin, view = starts[index], views[index]
            stop = min(end, begin + len(view))
            yield view[start - begin : stop - begin]
            start, index = stop, index + 1

    def read(start: int, end: int, _: memoryview) -> Iterator[memoryview]:
        while start < end:
            buffers = list(itertools.islice(room_of(start, min(start + PIECE_BYTES, end)), MAX_BUFFERS))
            if not (left := os.preadv(fd, buffers, start)):
                return
            start += left
            for buffer in buffers:
                yield buffer[:left]
                left -= min(left, len(buffer))

    _verify_shard(shard_file(manifest.shards[rank], read, spans=proof.spans), chunks=has_wanted, bound=bound)


@dataclass(frozen=True, slots=True)
class BoundedReading:
    calls: StorageCalls
    place: str
    path: str

    def run(self, work: Callable[[], R], *, progress: CallProgress | None = None) -> R:
        """Return the result of ``work()``. Raises, blocks: as :meth:`StorageCalls.run`."""
        return self.calls.run(self.place, work, operation="read", target=lambda: self.path, progress=progress)


def _verify_shard(
    file: StoredFile,
    on_piece: Callable[[memoryview, int], None] | None = None,
    *,
    num_threads: int = NUM_LOAD_THREADS,
    chunks: Callable[[int], bool] | None = None,
    bound: BoundedReading | None = None,
) -> None:
    progress = CallProgress()

    def take(piece: memoryview, offset: int) -> None:
        progress.add()
        if on_piece is not None:
            on_piece(piece, offset)

    on_each = on_piece if bound is None else take
    work = partial(verify, [file], num_threads=num_threads, on_piece=on_each, until_flaw=True, chunks=chunks)
    for flaw in work() if bound is None else bound.run(work, progress=progress):
        raise flaw.error


def _read_fd(fd: int, start: int, end: int, room: memoryview) -> Iterator[memoryview]:
    while start < end and (count := os.preadv(fd, [room[: end - start]], start)):
        yield room[:count]
        start += count


def _read_image(view: memoryview, start: int, end: int, _: memoryview) -> Iterator[memoryview]:
    with view[start:end] as piece:
        yield piece


def _prove_head(
    fd: int, manifest: Manifest, rank: int, *, in_memory: bool = False
) -> tuple[bytes, dict[str, TensorSpan]]:
    """Return a shard's head and its tensors, if it is the rank's shard of this checkpoint and has the right length.

    A file in the wrong place differs in every digest, and perhaps in length, so its identity is checked first.
    """
    size, expected_size = os.fstat(fd).st_size, manifest.shards[rank].num_bytes
    if in_memory:
        size = min(size, expected_size)
    try:
        head = read_head(fd, size)
        identity, spans = read_header(memoryview(head), size)
    except Corrupt:
        if size != expected_size:
            raise Incomplete(f"is {size} bytes long instead of {expected_size}") from None
        raise
    expected = Identity(
        run=manifest.run,
        topology=manifest.topology,
        rank=rank,
        world_size=manifest.world_size,
        iteration=manifest.iteration,
        attempt=manifest.attempt,
    )
    if identity != expected:
        differences = (
            f"{name} {getattr(identity, name)} instead of {getattr(expected, name)}"
            for name in Identity.__struct_fields__
            if getattr(identity, name) != getattr(expected, name)
        )
        raise Untrusted(f"is the shard of {', '.join(differences)}")
    if size != expected_size:
        raise Incomplete(f"is {size} bytes long instead of {expected_size}")
    return head, spans


def _check_table(head: bytes, manifest: Manifest, rank: int) -> None:
    if digest(head) != manifest.shards[rank].table:
        raise Corrupt("the header, which is the table of its tensors, differs from its digest")


def _check_spans(spans: dict[str, TensorSpan], *, start: int, size: int) -> None:
    """Check that the tensors fill the file without gaps, and match their shapes. Raises: Corrupt."""
    unknown = {span.dtype for span in spans.values()} - set(ELEMENT_BYTES)
    if unknown or TREE not in spans:
        raise Corrupt(f"has no {TREE}, or elements of unknown types {sorted(unknown)}")
    for span in sorted(spans.values(), key=lambda span: (span.offset, span.num_bytes)):
        if span.offset != start or math.prod(span.shape) * ELEMENT_BYTES[span.dtype] != span.num_bytes:
            raise Corrupt(f"the header contradicts itself about tensor {span.name!r}")
        start += span.num_bytes
    if start != size:
        raise Corrupt(f"the header describes {start} bytes of {size}")


# -- the global tier ---------------------------------------------------------------------------------------------------


class VerifiedFiles:
    """The files of one checkpoint of the global tier. Thread: any.

    Args:
        folder: Its folder in the directory; ``None`` = that of its iteration.
        calls: Ends a reading without progress; ``None`` = no time limit.
    """

    def __init__(
        self,
        directory: GlobalDirectory,
        manifest: GlobalManifest,
        folder: str | None = None,
        *,
        calls: StorageCalls | None = None,
    ) -> None:
        self.directory, self.manifest, self._calls = directory, manifest, calls
        self._reading, self._progress = "", CallProgress()
        self.folder = directory.folder(manifest.iteration) if folder is None else folder
        self._lock = threading.Lock()
        self.num_bytes_read = 0

    def stored(self, entry: FileEntry, index: int | None) -> StoredFile:
        """Return a file to verify; ``index`` is its number in the manifest, if it has one."""
        return StoredFile(
            name=f"{self.folder}/{entry.name}",
            num_bytes=entry.num_bytes,
            chunks=entry.chunks,
            contents=tuple if index is None else partial(self.manifest.contents, index),
            read=partial(self._read, entry),
            room_bytes=CHUNK_BYTES if self.directory.is_remote else PIECE_BYTES,
        )

    def open(self, index: int) -> VerifiedFile:
        return VerifiedFile(self.stored(self.manifest.files[index], index))

    def bounded(self, work: Callable[[], R]) -> R:
        """Return the result of ``work()``, which reads these files. Raises: Unavailable, without progress."""
        if self._calls is None:
            return work()
        url = self.directory.url
        return self._calls.run(
            url, work, operation="read", target=lambda: f"{url}/{self._reading or self.folder}", progress=self._progress
        )

    def warn_of_metadata(self) -> None:
        """Log a damaged ``.metadata``, which only other readers of the format need. Blocks: while it is read."""
        if (entry := self.manifest.metadata) is None:
            return
        name = f"{self.folder}/{entry.name}"
        try:
            data = self.directory.read(name)
            is_right = len(data) == entry.num_bytes and entry.chunks == digests(data)
            problem = "differs from its digest"
        except (OSError, CheckpointError) as error:
            is_right, problem = False, f"cannot be read ({error})"
        if not is_right:
            log.warning(
                "%s/%s %s: outlast does not need this file, but torch.distributed.checkpoint cannot read the "
                "checkpoint without VerifiedReader",
                self.directory.url,
                name,
                problem,
            )

    def _read(self, entry: FileEntry, start: int, end: int, room: memoryview) -> Iterator[memoryview]:
        name = f"{self.folder}/{entry.name}"
        while start < end:
            asked = min(len(room), end - start)
            self._reading = name
            try:
                count = self.directory.read_into(name, start, room[:asked])
            except FileNotFoundError:
                raise Incomplete("is missing") from None
            except Unavailable:
                raise
            except CheckpointError:
                # An object store refuses reads beyond an object's end.
                if (size := self._size(entry.name)) is not None and size < end:
                    raise Incomplete(f"is {size} bytes long instead of {entry.num_bytes}") from None
                raise
            with self._lock:
                self.num_bytes_read += count
            self._progress.add()
            yield room[:count]
            if count < asked:
                return
            start += count

    def _size(self, name: str) -> int | None:
        try:
            return self.directory.sizes(self.folder).get(name, 0)
        except CheckpointError:
            return None


class VerifiedFile:
    """Verified bytes of one file; caches the last chunk. Thread: one."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._buffer = memoryview(b"")
        self._number = -1

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``start`` on.

        Raises:
            Incomplete: The file is missing or ends too early.
            Corrupt: A chunk differs from its digest.
            CheckpointError: The file cannot be read.
        """
        import numpy as np  # not at the top: ``outlast ckpt`` works without numpy

        done = 0
        while done < len(target):
            number, skip = divmod(start + done, CHUNK_BYTES)
            chunk = self._read_chunk(number)
            part = chunk[skip : skip + len(target) - done]
            if not part:
                raise Incomplete(f"{self._file.name} ends before byte {start + done}")
            # Not by slices: first touch of fresh memory takes longest, and numpy releases the GIL.
            np.copyto(np.frombuffer(target[done : done + len(part)], np.uint8), np.frombuffer(part, np.uint8))
            done += len(part)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the file's bytes from ``start`` on. Raises as :meth:`read_into`."""
        data = bytearray(num_bytes)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def _read_chunk(self, number: int) -> memoryview:
        file = self._file
        size = min(CHUNK_BYTES, file.num_bytes - number * CHUNK_BYTES)
        if size <= 0:
            return memoryview(b"")
        if number != self._number:
            self._number = -1
            if not self._buffer:
                self._buffer = memoryview(bytearray(min(CHUNK_BYTES, file.num_bytes)))
            try:
                flaw = verify_chunk(file, number, self._buffer)
            except Incomplete as error:
                raise Incomplete(f"{file.name} {error}") from None
            except OSError as error:
                raise CheckpointError(f"{file.name} cannot be read ({error.strerror or error})") from error
            if flaw is not None:
                assert isinstance(flaw.error, CheckpointError)
                raise type(flaw.error)(f"{file.name}{':' if isinstance(flaw.error, Corrupt) else ''} {flaw.error}")
            self._number = number
        return self._buffer[:size]
