"""Writing an image to a durable file: digests, unaligned ends, direct writes that fail, and errors."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from outlast.checkpoint.shard import CHUNK_BYTES, digest_image, write_image

real_open, real_pwrite = os.open, os.pwrite


def image_of(num_bytes: int) -> memoryview:
    """Return random bytes that begin at a page."""
    pages = mmap.mmap(-1, max(1, num_bytes))
    np.frombuffer(pages, dtype=np.uint8)[:] = np.random.default_rng(num_bytes).integers(0, 256, len(pages))
    return memoryview(pages)[:num_bytes]


def expected_digests(image: memoryview) -> tuple[str, ...]:
    data = bytes(image)
    return tuple(xxhash.xxh3_64_hexdigest(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES))


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 5])
def test_the_file_has_the_bytes_of_the_image(tmp_path: Path, num_bytes: int) -> None:
    """A file has exactly the image's bytes, also if they end within a page or a chunk, and its digests are in order."""
    image = image_of(num_bytes)
    chunks = write_image(image, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == bytes(image)
    assert chunks == expected_digests(image) == digest_image(image)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 12345])
def test_the_look_callback_receives_every_byte_once(tmp_path: Path, num_bytes: int) -> None:
    """The ``look`` callback receives each byte of the image once, in a write and in a digest; digests do not change."""
    image, seen = image_of(num_bytes), dict[int, bytes]()

    def look(piece: memoryview, start: int) -> None:
        assert start not in seen
        seen[start] = bytes(piece)

    assert write_image(image, tmp_path / "f", look=look) == expected_digests(image)
    assert b"".join(piece for _, piece in sorted(seen.items())) == bytes(image)
    assert [start + len(piece) for start, piece in sorted(seen.items())][:-1] == sorted(seen)[1:]
    seen.clear()
    assert digest_image(image, look=look) == expected_digests(image)
    assert b"".join(piece for _, piece in sorted(seen.items())) == bytes(image)


def test_a_refused_direct_open_falls_back_to_buffered_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose direct open fails with EINVAL is written with buffered writes; other files are written directly."""
    flags_seen = []

    def refusing_open(path: object, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT, mode)  # type: ignore[arg-type]
        flags_seen.append((Path(str(path)).name, bool(flags & os.O_DIRECT)))
        if flags & os.O_DIRECT and Path(str(path)).name == "refused":
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", refusing_open)
    image = image_of(CHUNK_BYTES + 3)
    for name in ("refused", "taken"):
        assert write_image(image, tmp_path / name) == expected_digests(image)
        assert (tmp_path / name).read_bytes() == bytes(image)
    assert flags_seen == [("refused", True), ("refused", False), ("taken", True)]


def test_a_refused_direct_write_falls_back_to_buffered_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose first direct write fails with EINVAL is written again with buffered writes."""
    direct = set[int]()

    def recording_open(path: object, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT, mode)  # type: ignore[arg-type]
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def refusing_pwrite(fd: int, data: bytes, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", recording_open)
    monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    image = image_of(CHUNK_BYTES + 4097)
    assert write_image(image, tmp_path / "f") == expected_digests(image)
    assert (tmp_path / "f").read_bytes() == bytes(image)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short write, the remaining bytes are written."""
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_pwrite(fd, data[: 1 << 20], offset))
    image = image_of(2 * CHUNK_BYTES)
    assert write_image(image, tmp_path / "f") == expected_digests(image)
    assert (tmp_path / "f").read_bytes() == bytes(image)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_error_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file that cannot be completed is removed, which frees its space, and the error contains its path."""

    def failing_call(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 2 * CHUNK_BYTES:
            raise OSError(code, os.strerror(code))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing_call)
    with pytest.raises(OSError, match=r"full\.bin") as error_info:
        write_image(image_of(4 * CHUNK_BYTES), tmp_path / "full.bin")
    assert error_info.value.errno == code
    assert list(tmp_path.iterdir()) == []


def test_a_failed_fsync_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose fsync fails is removed."""

    def failing_call(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing_call)
    with pytest.raises(OSError, match="Input/output"):
        write_image(image_of(4096), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_detected_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space for the whole file is allocated first; without it, no byte is written and no file remains."""

    def full_fallocate(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written = []
    monkeypatch.setattr(os, "posix_fallocate", full_fallocate)
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(arguments))
    with pytest.raises(OSError, match="No space"):
        write_image(image_of(CHUNK_BYTES), tmp_path / "f")
    assert (written, list(tmp_path.iterdir())) == ([], [])


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """Writing to an existing file fails, and the file stays unchanged."""
    (tmp_path / "f").write_bytes(b"committed")
    with pytest.raises(FileExistsError):
        write_image(image_of(4096), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"committed"
