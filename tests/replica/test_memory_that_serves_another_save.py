"""Memory that is given to the next save while a peer reads the old one from it: the peer is refused, not misled."""

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
    """Stage and keep a rank's part, in memory that may be the older part's."""
    image = vault.take(key.rank, len(data), (), may_steal=True)
    assert image is not None
    os.pwrite(image.fd, data, 0)
    vault.stage(image.fd, key, len(data))
    vault.keep(key, in_memory=True)
    return image


class Restaged(Vault):
    """Gives memory that is read to the next save as soon as somebody has opened it, for a number of times."""

    num_left = 1

    def open(self, key: CopyKey) -> tuple[int, int] | None:
        found = super().open(key)
        if found is not None and self.num_left:
            self.num_left -= 1
            os.pwrite(self.restaged(), b"new" * 1000, 0)
        return found

    def restaged(self) -> int:
        for _ in range(2):  # the other image of the rank first
            image = self.take(OLD.rank, NUM_BYTES, (), may_steal=True)
            assert image is not None
            self.stage(image.fd, NEW, NUM_BYTES)
            if self.open_of(OLD) is None:
                return image.fd
            self.keep(NEW, in_memory=True)
        raise AssertionError("the old image was not taken")

    def open_of(self, key: CopyKey) -> tuple[int, int] | None:
        found = super().open(key)
        if found is not None:
            os.close(found[0])
        return found


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


def test_a_part_whose_memory_is_staged_anew_is_refused(
    serve: Callable[[Vault], Target], hold: Callable[[bytes], int]
) -> None:
    """A reader hears that the memory serves a newer save, whatever of the old part had arrived; asked again, that the
    part is not there."""
    data = random.Random(1).randbytes(NUM_BYTES)
    vault = Restaged()
    target = serve(vault)
    keep(vault, OLD, data)
    into = hold(bytes(NUM_BYTES))
    with pytest.raises(ReplicaError, match=r"serves a newer save|does not hold"):
        fetch(target, KEY, OLD, into, NUM_BYTES, timeout_s=10)
    with pytest.raises(ReplicaError, match="does not hold"):
        fetch(target, KEY, OLD, into, NUM_BYTES, timeout_s=10)


def test_a_part_that_stays_is_given_out_whole(serve: Callable[[Vault], Target], hold: Callable[[bytes], int]) -> None:
    """Reading a part that is kept meanwhile is not disturbed by saves into the rank's other memory."""
    data = random.Random(2).randbytes(NUM_BYTES)
    vault = Vault()
    target = serve(vault)
    kept = keep(vault, OLD, data)
    other = vault.take(OLD.rank, NUM_BYTES, (), may_steal=False)
    assert other is not None
    assert other is not kept
    vault.stage(other.fd, NEW, NUM_BYTES)
    expected = tuple(digest(data[start : start + CHUNK_BYTES]) for start in range(0, NUM_BYTES, CHUNK_BYTES))
    assert fetch(target, KEY, OLD, hold(bytes(NUM_BYTES)), NUM_BYTES, timeout_s=10) == expected


def test_an_opened_part_is_known_by_its_memory() -> None:
    """Memory shows a part until it is given to another save, also to one that is never kept; a file shows it always."""
    vault = Vault()
    image = keep(vault, OLD, b"old")
    found = vault.open(OLD)
    assert found is not None
    fd, _ = found
    assert vault.is_unchanged(OLD, fd)
    assert not vault.is_unchanged(NEW, fd)
    vault.stage(image.fd, NEW, 3)
    assert not vault.is_unchanged(OLD, fd)
    os.close(fd)
    a_file = os.open(__file__, os.O_RDONLY)
    assert vault.is_unchanged(OLD, a_file)
    os.close(a_file)
