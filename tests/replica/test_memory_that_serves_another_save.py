"""Reuse of memory for the next save while a peer reads the previous shard from it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
from replica_nodes import KEY

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import ReplicaError, Target, fetch
from outlast.checkpoint.replica.server import ReplicaServer
from outlast.checkpoint.shard import CHUNK_BYTES, digest
from outlast.checkpoint.vault import Image, Vault

OLD, NEW = CopyKey(1, "1-a", 0), CopyKey(2, "2-a", 0)
NUM_BYTES = 11 * CHUNK_BYTES + 5


def keep(vault: Vault, key: CopyKey, data: bytes) -> Image:
    """Stage and keep a rank's part, possibly in the memory of an older part."""
    image = vault.take(key.rank, len(data), (), may_steal=True)
    assert image is not None
    os.pwrite(image.fd, data, 0)
    vault.stage(image.fd, key, len(data))
    vault.keep(key, in_memory=True)
    return image


class ReusingVault(Vault):
    """Reuses memory for the next save when a peer has opened it, ``num_left`` times."""

    num_left = 1

    def open(self, key: CopyKey) -> tuple[int, int] | None:
        opened = super().open(key)
        if opened is not None and self.num_left:
            self.num_left -= 1
            os.pwrite(self.reuse_memory(), b"new" * 1000, 0)
        return opened

    def reuse_memory(self) -> int:
        for _ in range(2):  # the first take returns the rank's other image
            image = self.take(OLD.rank, NUM_BYTES, (), may_steal=True)
            assert image is not None
            self.stage(image.fd, NEW, NUM_BYTES)
            if self.open_of(OLD) is None:
                return image.fd
            self.keep(NEW, in_memory=True)
        raise AssertionError("the old image was not taken")

    def open_of(self, key: CopyKey) -> tuple[int, int] | None:
        opened = super().open(key)
        if opened is not None:
            os.close(opened[0])
        return opened


@pytest.fixture
def serve() -> Iterator[Callable[[Vault], Target]]:
    servers: list[ReplicaServer] = []

    def make(vault: Vault) -> Target:
        server = ReplicaServer(vault, host="127.0.0.1", key=KEY, on_refused=lambda *what: None)
        servers.append(server)
        return Target("other", "127.0.0.1", server.port)

    yield make
    for server in servers:
        server.close()


def test_a_part_whose_memory_is_reused_is_rejected(
    serve: Callable[[Vault], Target], hold: Callable[[bytes], int]
) -> None:
    """A fetch whose memory is reused for a newer save fails with that reason; a second fetch reports a missing part."""
    data = random.Random(1).randbytes(NUM_BYTES)
    vault = ReusingVault()
    target = serve(vault)
    keep(vault, OLD, data)
    target_fd = hold(bytes(NUM_BYTES))
    with pytest.raises(ReplicaError, match=r"serves a newer save|does not hold"):
        fetch(target, KEY, OLD, target_fd, NUM_BYTES, timeout_s=10)
    with pytest.raises(ReplicaError, match="does not hold"):
        fetch(target, KEY, OLD, target_fd, NUM_BYTES, timeout_s=10)


def test_a_kept_part_is_served_during_the_next_save(
    serve: Callable[[Vault], Target], hold: Callable[[bytes], int]
) -> None:
    """A save into the rank's other memory does not change the part that a peer reads."""
    data = random.Random(2).randbytes(NUM_BYTES)
    vault = Vault()
    target = serve(vault)
    kept_image = keep(vault, OLD, data)
    second_image = vault.take(OLD.rank, NUM_BYTES, (), may_steal=False)
    assert second_image is not None
    assert second_image is not kept_image
    vault.stage(second_image.fd, NEW, NUM_BYTES)
    expected = tuple(digest(data[start : start + CHUNK_BYTES]) for start in range(0, NUM_BYTES, CHUNK_BYTES))
    assert fetch(target, KEY, OLD, hold(bytes(NUM_BYTES)), NUM_BYTES, timeout_s=10) == expected


def test_is_unchanged_identifies_reused_memory() -> None:
    """Memory holds its part until another save takes it, also one that is never kept; a file always holds its part."""
    vault = Vault()
    image = keep(vault, OLD, b"old")
    opened = vault.open(OLD)
    assert opened is not None
    fd, _ = opened
    assert vault.is_unchanged(OLD, fd)
    assert not vault.is_unchanged(NEW, fd)
    vault.stage(image.fd, NEW, 3)
    assert not vault.is_unchanged(OLD, fd)
    os.close(fd)
    file_fd = os.open(__file__, os.O_RDONLY)
    assert vault.is_unchanged(OLD, file_fd)
    os.close(file_fd)
