"""A node's replica holdings in memory, and a replica server for them."""

from __future__ import annotations

import os
import threading

from outlast.checkpoint.manifest import CopyKey, HoldingsError
from outlast.checkpoint.replica.client import Target
from outlast.checkpoint.replica.server import ReplicaServer

KEY = b"k" * 32


class Memory:
    """Replica holdings in a dictionary."""

    place = "the memory"

    def __init__(self) -> None:
        self.parts: dict[CopyKey, bytes] = {}
        self.refusal: str | None = None
        self.num_open = 0
        self.num_received = 0
        self.change = threading.Condition()

    def receive(self, key: CopyKey, num_bytes: int) -> IncomingPart:
        if self.refusal is not None:
            raise HoldingsError(self.refusal)
        return IncomingPart(self, key, num_bytes)

    def open(self, key: CopyKey) -> tuple[int, int] | None:
        data = self.parts.get(key)
        if data is None:
            return None
        return memfd(data), len(data)

    def is_unchanged(self, key: CopyKey, fd: int) -> bool:
        return key in self.parts


class IncomingPart:
    def __init__(self, memory: Memory, key: CopyKey, num_bytes: int) -> None:
        self._memory, self._key, self._num_bytes = memory, key, num_bytes
        self.fd = memfd(bytes(num_bytes))
        self._done = False
        with memory.change:
            memory.num_open += 1
            memory.num_received += 1

    def keep(self) -> None:
        data = os.pread(self.fd, self._num_bytes, 0)
        with self._memory.change:
            self._memory.parts[self._key] = data
        self.drop()

    def drop(self) -> None:
        if not self._done:
            self._done = True
            os.close(self.fd)
            with self._memory.change:
                self._memory.num_open -= 1
                self._memory.change.notify_all()


class Node:
    """A replica server with its holdings and the list of rejected peers."""

    def __init__(self, name: str, key: bytes | None) -> None:
        self.memory = Memory()
        self.refused: list[tuple[str, str]] = []
        self.server = ReplicaServer(self.memory, host="127.0.0.1", key=key, on_refused=lambda *what: self._refuse(what))
        self.target = Target(name, "127.0.0.1", self.server.port)
        self._change = threading.Condition()

    def await_refusal(self) -> tuple[str, str]:
        """Return the first rejection; wait for it."""
        with self._change:
            assert self._change.wait_for(lambda: self.refused, timeout=10), "nobody was refused"
            return self.refused[0]

    def _refuse(self, what: tuple[str, str]) -> None:
        with self._change:
            self.refused.append(what)
            self._change.notify_all()


def memfd(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, len(data))
    view = memoryview(data)
    while view:
        view = view[os.pwrite(fd, view, len(data) - len(view)) :]
    return fd
