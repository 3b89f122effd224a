"""Reading a generation's files, each chunk compared with its digest before any byte of it is given out.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import xxhash

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.manifest import GlobalManifest
from outlast.checkpoint.shard import CHUNK_BYTES, digests
from outlast.errors import CheckpointError, Corrupt, Incomplete

__all__ = ["VerifiedFile", "VerifiedFiles"]

log = logging.getLogger(__name__)


class VerifiedFiles:
    """The files of one generation. Thread: any.

    Args:
        directory: Where the generation lies.
        manifest: Of the generation.
        folder: Its folder in the directory; ``None``: that of its iteration.
    """

    def __init__(self, directory: GlobalDirectory, manifest: GlobalManifest, folder: str | None = None) -> None:
        self.directory, self.manifest = directory, manifest
        self.folder = directory.folder(manifest.iteration) if folder is None else folder
        self._lock = threading.Lock()
        self._num_bytes_read = 0

    @property
    def num_bytes_read(self) -> int:
        """Bytes that came from the place so far."""
        return self._num_bytes_read

    def open(self, index: int) -> VerifiedFile:
        """Return a reader of a file, for one thread."""
        return VerifiedFile(self, index)

    def warn_of_metadata(self) -> None:
        """Say in the log if what other readers of the format read is not what was saved; none of ours reads it.

        Blocks: while it is read.
        """
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
                "%s/%s %s: outlast does not need it, but torch.distributed.checkpoint cannot read this generation "
                "without VerifiedReader",
                self.directory.url,
                name,
                problem,
            )

    def read_chunk(self, index: int, number: int, buffer: memoryview) -> memoryview:
        """Read a chunk of a file into a buffer of :data:`CHUNK_BYTES`; return the part of it that it fills.

        Raises:
            Incomplete: The file is missing or ends too early.
            Corrupt: It differs from its digest.
            CheckpointError: It cannot be read.
        """
        file = self.manifest.files[index]
        start = number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, file.num_bytes)
        name = f"{self.folder}/{file.name}"
        try:
            data = buffer[: self.directory.read_into(name, start, buffer[: end - start])]
        except FileNotFoundError:
            raise Incomplete(f"{name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror or error})") from error
        except CheckpointError:
            # A store refuses to give bytes from beyond an object's end.
            if (size := self._size(file.name)) is not None and size < end:
                raise Incomplete(f"{name} is {size} bytes long instead of {file.num_bytes}") from None
            raise
        with self._lock:
            self._num_bytes_read += len(data)
        if len(data) != end - start:
            raise Incomplete(f"{name} ends after {start + len(data)} bytes instead of {file.num_bytes}")
        if xxhash.xxh3_64_hexdigest(data) != file.chunks[number]:
            within = [n for n, begin, size in self.manifest.contents(index) if begin < end and begin + size > start]
            items = f" ({', '.join(within[:3])}{', ...' if len(within) > 3 else ''})" if within else ""
            raise Corrupt(f"{name}: chunk {number}, bytes {start} to {end}{items}, differs from its digest")
        return data

    def _size(self, name: str) -> int | None:
        try:
            return self.directory.sizes(self.folder).get(name, 0)
        except CheckpointError:
            return None


class VerifiedFile:
    """One file; the chunk that was read last is remembered. Thread: one.

    Args:
        files: The generation's.
        index: Which of them.
    """

    def __init__(self, files: VerifiedFiles, index: int) -> None:
        self._files, self._index = files, index
        self._buffer: memoryview | None = None
        self._number, self._chunk = -1, memoryview(b"")

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``start`` on. Raises as :meth:`VerifiedFiles.read_chunk`."""
        done = 0
        while done < len(target):
            number, skip = divmod(start + done, CHUNK_BYTES)
            if number != self._number:
                self._number = -1
                if self._buffer is None:
                    self._buffer = memoryview(
                        bytearray(min(CHUNK_BYTES, self._files.manifest.files[self._index].num_bytes))
                    )
                self._chunk = self._files.read_chunk(self._index, number, self._buffer)
                self._number = number
            part = self._chunk[skip : skip + len(target) - done]
            if not part:
                raise Incomplete(f"{self._files.manifest.files[self._index].name} ends before byte {start + done}")
            # Not by slices: first touch of fresh memory takes longest, and numpy lets other threads go on meanwhile.
            np.copyto(np.frombuffer(target[done : done + len(part)], np.uint8), np.frombuffer(part, np.uint8))
            done += len(part)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the file's bytes from ``start`` on. Raises as :meth:`VerifiedFiles.read_chunk`."""
        data = bytearray(num_bytes)
        self.read_into(start, memoryview(data))
        return bytes(data)
