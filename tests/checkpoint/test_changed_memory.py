"""Memory that changes between the writes to two tiers never becomes part of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.dcp.assemble import Assemble, Assembled, Range
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.protocol import Done, Take, Write, Written
from outlast.checkpoint.shard import CHUNK_BYTES
from outlast.checkpoint.writer_client import WriterClient

pytestmark = pytest.mark.extended

SIZE = 2 * CHUNK_BYTES + 1000
LIMIT_S = 60.0


@pytest.fixture
def writer() -> Iterator[WriterClient]:
    client = WriterClient(None)
    client.start()
    yield client
    client.close()


def stage(writer: WriterClient, iteration: int, folder: Path | None) -> tuple[int, Written | None]:
    """Stage a shard, write it to the node-local tiers if there is a folder, and return its memory."""
    _, fd = writer.ask(Take(rank=0, num_bytes=SIZE, busy=(), may_steal=True), Done, timeout_s=LIMIT_S)
    assert fd is not None
    os.pwrite(fd, bytes([iteration]) * SIZE, 0)
    if folder is None:
        return fd, None
    request = Write(key=CopyKey(iteration, "a", 0), num_bytes=SIZE, path=str(folder / f"shard-{iteration}"))
    written, _ = writer.ask(request, Written, timeout_s=LIMIT_S, fd=fd)
    return fd, written


def write_global(writer: WriterClient, folder: Path, fd: int, pieces: tuple[Range, ...]) -> Assembled:
    """Write a file of the global tier from the memory."""
    name = f"file-{len(list(folder.rglob('file-*')))}"
    request = Assemble(url=str(folder), folder="step-1", name=name, pieces=pieces, timeout_s=LIMIT_S)
    done, _ = writer.ask(request, Assembled, timeout_s=LIMIT_S, fd=fd)
    return done


@pytest.mark.process
@pytest.mark.parametrize("offset", [0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1])
def test_a_byte_changed_after_the_local_write_fails_the_global_one(
    writer: WriterClient, tmp_path: Path, offset: int
) -> None:
    """A global file of bytes that changed after the local write is rejected, although its own digests would match.

    A file of unchanged chunks is written.
    """
    (tmp_path / "global").mkdir()
    fd, _ = stage(writer, 1, tmp_path)
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte ^ 0x10]), offset)
    done = write_global(writer, tmp_path / "global", fd, (Range(0, SIZE),))
    assert done.error is not None
    assert f"chunk {offset // CHUNK_BYTES} of the staged copy has changed in memory" in done.error
    unchanged_offset = CHUNK_BYTES if offset < CHUNK_BYTES else 0
    assert write_global(writer, tmp_path / "global", fd, (Range(unchanged_offset, 100),)).error is None


@pytest.mark.process
def test_reused_memory_is_not_compared_with_the_last_save(writer: WriterClient, tmp_path: Path) -> None:
    """Memory that is reused without a write to the node-local tiers is not compared with earlier digests."""
    (tmp_path / "global").mkdir()
    for iteration in range(1, 6):
        fd, _ = stage(writer, iteration, tmp_path if iteration % 2 else None)
        assert write_global(writer, tmp_path / "global", fd, (Range(5, SIZE - 5),)).error is None
