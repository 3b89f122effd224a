"""Every byte of generations read and compared with its digest, by several threads, in bounded memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import xxhash

from outlast.checkpoint.catalogue.entries import (
    Generation,
    ListedGeneration,
    Problem,
    Reader,
    StoredFile,
    describe_error,
)
from outlast.checkpoint.shard import CHUNK_BYTES
from outlast.errors import CheckpointError, Corrupt, Incomplete

__all__ = ["Verified", "verify"]

CHUNKS_PER_TURN = 8
"""What a thread takes at once: one large file keeps all of them busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What reading a generation showed."""

    entry: Generation
    """With what is wrong; its ``valid`` is judged by the bytes."""
    num_bytes_read: int


@dataclass(frozen=True, slots=True)
class _Turn:
    file: StoredFile
    first: int
    """Number of the first chunk."""


def verify(
    found: ListedGeneration,
    *,
    num_threads: int,
    on_read: Callable[[int], None] | None = None,
) -> Verified:
    """Compare every byte of a generation with its digest.

    Args:
        found: As listed.
        num_threads: Readers, each of which holds a piece of a file in memory (1 MiB; 8 MiB from an object store).
        on_read: Called in the readers' threads with the bytes that were just read.

    Blocks: while all of it is read. Ctrl-C ends it once each reader has read the piece that it is at.
    """
    turns = queue.SimpleQueue[_Turn]()
    for file in found.files:
        for first in range(0, len(file.chunks), CHUNKS_PER_TURN):
            turns.put(_Turn(file, first))
    work = _Work(turns, on_read or (lambda count: None))
    threads = [
        threading.Thread(target=work.run, name=f"outlast-verify-{number}", daemon=True)
        for number in range(min(num_threads, turns.qsize()))
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            work.ended.get()  # not join(): Ctrl-C in it makes Python 3.11 take a thread that runs for one that ended
    finally:
        work.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if work.failure is not None:
        raise work.failure
    problems = sorted(work.problems, key=lambda problem: (problem.file, problem.chunk if problem.chunk else 0))
    return Verified(entry=found.judge(problems) if problems else found.entry, num_bytes_read=work.num_bytes_read)


class _Work:
    """What the readers share."""

    def __init__(self, turns: queue.SimpleQueue[_Turn], on_read: Callable[[int], None]) -> None:
        self.problems: list[Problem] = []
        self.num_bytes_read = 0
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self.ended = queue.SimpleQueue[None]()
        """Has one entry for each reader that is through."""
        self._turns, self._on_read = turns, on_read
        self._unreadable: set[str] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    turn = self._turns.get_nowait()
                except queue.Empty:
                    return
                self._take(turn)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller, in its thread
            self.failure = error
            self.stop.set()
        finally:
            self.ended.put(None)

    def _take(self, turn: _Turn) -> None:
        file = turn.file
        if file.name in self._unreadable:
            return
        last = min(turn.first + CHUNKS_PER_TURN, len(file.chunks))
        try:
            with file.open() as reader:
                for index in range(turn.first, last):
                    problem = self._verify_chunk(reader, file, index)
                    if problem is not None:
                        with self._lock:
                            self.problems.append(problem)
                    if self.stop.is_set():
                        return
        except (OSError, CheckpointError) as error:
            with self._lock:
                if file.name not in self._unreadable:
                    self.problems.append(describe_error(error, file.name, node=file.node, rank=file.rank))
                self._unreadable.add(file.name)

    def _verify_chunk(self, reader: Reader, file: StoredFile, index: int) -> Problem | None:
        position = start = index * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, file.num_bytes)
        found = xxhash.xxh3_64()
        while position < end and not self.stop.is_set():
            piece = reader.read(position, min(file.piece_bytes, end - position))
            if not len(piece):
                return _at(file, index, Incomplete(f"ends after {position} bytes instead of {file.num_bytes}"))
            found.update(piece)
            position += len(piece)
            with self._lock:
                self.num_bytes_read += len(piece)
            self._on_read(len(piece))
        if position < end or found.hexdigest() == file.chunks[index]:
            return None
        return _at(file, index, Corrupt(f"chunk {index}, bytes {start} to {end}, differs from its digest"))


def _at(file: StoredFile, index: int, error: CheckpointError) -> Problem:
    start, end = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
    tensors = tuple(name for name, offset, num_bytes in file.tensors if offset < end and offset + num_bytes > start)
    problem = describe_error(error, file.name, node=file.node, rank=file.rank)
    return msgspec.structs.replace(problem, chunk=index, tensors=tensors)
