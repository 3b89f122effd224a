"""An image becomes a durable file: digests, tails, disks that refuse, and errors."""

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


def expected(image: memoryview) -> tuple[str, ...]:
    data = bytes(image)
    return tuple(xxhash.xxh3_64_hexdigest(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES))


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 5])
def test_the_file_is_the_image_whatever_its_length(tmp_path: Path, num_bytes: int) -> None:
    """A file has exactly the image's bytes, also where they end within a page or a chunk; digests are in order."""
    image = image_of(num_bytes)
    chunks = write_image(image, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == bytes(image)
    assert chunks == expected(image) == digest_image(image)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 12345])
def test_every_byte_is_looked_at_once(tmp_path: Path, num_bytes: int) -> None:
    """Who looks is shown the whole image, piece by piece, whether it is written or not; digests are the same."""
    image, seen = image_of(num_bytes), dict[int, bytes]()

    def look(piece: memoryview, start: int) -> None:
        assert start not in seen
        seen[start] = bytes(piece)

    assert write_image(image, tmp_path / "f", look=look) == expected(image)
    assert b"".join(piece for _, piece in sorted(seen.items())) == bytes(image)
    assert [start + len(piece) for start, piece in sorted(seen.items())][:-1] == sorted(seen)[1:]
    seen.clear()
    assert digest_image(image, look=look) == expected(image)
    assert b"".join(piece for _, piece in sorted(seen.items())) == bytes(image)


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where opening for direct writes is refused (EINVAL), this file is written the ordinary way; others are not."""
    flags_seen = []

    def refusing(path: object, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT, mode)  # type: ignore[arg-type]
        flags_seen.append((Path(str(path)).name, bool(flags & os.O_DIRECT)))
        if flags & os.O_DIRECT and Path(str(path)).name == "refused":
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", refusing)
    image = image_of(CHUNK_BYTES + 3)
    for name in ("refused", "taken"):
        assert write_image(image, tmp_path / name) == expected(image)
        assert (tmp_path / name).read_bytes() == bytes(image)
    assert flags_seen == [("refused", True), ("refused", False), ("taken", True)]


def test_a_disk_that_refuses_the_first_direct_write_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the refusal comes only with a write, the file is begun again the ordinary way."""
    direct = set[int]()

    def opening(path: object, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags & ~os.O_DIRECT, mode)  # type: ignore[arg-type]
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def writing(fd: int, data: bytes, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwrite", writing)
    image = image_of(CHUNK_BYTES + 4097)
    assert write_image(image, tmp_path / "f") == expected(image)
    assert (tmp_path / "f").read_bytes() == bytes(image)


def test_writes_that_come_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes less than it was given gets the rest."""
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_pwrite(fd, data[: 1 << 20], offset))
    image = image_of(2 * CHUNK_BYTES)
    assert write_image(image, tmp_path / "f") == expected(image)
    assert (tmp_path / "f").read_bytes() == bytes(image)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_error_leaves_no_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file that cannot be finished is removed, so that its room is free, and the error says which it was."""

    def failing(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 2 * CHUNK_BYTES:
            raise OSError(code, os.strerror(code))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match=r"full\.bin") as caught:
        write_image(image_of(4 * CHUNK_BYTES), tmp_path / "full.bin")
    assert caught.value.errno == code
    assert list(tmp_path.iterdir()) == []


def test_a_failed_fsync_is_a_failed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk does not confirm does not stay."""

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        write_image(image_of(4096), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all of it is asked for first; without it nothing is written and nothing stays."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(arguments))
    with pytest.raises(OSError, match="No space"):
        write_image(image_of(CHUNK_BYTES), tmp_path / "f")
    assert (written, list(tmp_path.iterdir())) == ([], [])


def test_a_file_that_exists_is_never_touched(tmp_path: Path) -> None:
    """A committed file cannot be written again, and the attempt does not remove it."""
    (tmp_path / "f").write_bytes(b"committed")
    with pytest.raises(FileExistsError):
        write_image(image_of(4096), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"committed"
