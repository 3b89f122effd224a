"""Nodes whose writers wait at a FIFO before each write."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from outlast.checkpoint import protocol as f
from outlast.checkpoint.manifest import decode_manifest
from outlast.checkpoint.writer_client import WriterClient, WriterProcess
from outlast.runtime.injection import Injection, armed_in_children

__all__ = ["GatedNodes", "empty_memory"]


class GatedNodes:
    """Checkpoint writers by node name, each with its own FIFO."""

    def __init__(self, names: tuple[str, ...], root: Path) -> None:
        self._gates = {name: root / f"gate-{name}" for name in names}
        for gate in self._gates.values():
            os.mkfifo(gate)
        self.writers = {name: _start_gated(gate) for name, gate in self._gates.items()}

    @classmethod
    @contextmanager
    def open(cls, names: tuple[str, ...], root: Path) -> Iterator[GatedNodes]:
        """Start the writers, and close them at the end of the block."""
        nodes = cls(names, root)
        try:
            yield nodes
        finally:
            for writer in nodes.writers.values():
                writer.close()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let all writes on all nodes pass during the block."""
        is_over = threading.Event()

        def keep_open(gate: Path) -> None:
            while not is_over.wait(0.01):  # a FIFO does not notify a process that would write
                with suppress(OSError):  # no reader waits
                    os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))

        threads = [threading.Thread(target=keep_open, args=(gate,)) for gate in self._gates.values()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def let_one_pass(self, name: str) -> None:
        """Let the waiting shard, or the next one, pass. Blocks: until it does."""
        os.close(os.open(self._gates[name], os.O_WRONLY))


def _start_gated(gate: Path) -> WriterProcess:
    with armed_in_children(Injection(point="checkpoint.writer.write", do="wait", path=str(gate))):
        return WriterProcess()


def empty_memory(writer: WriterProcess) -> None:
    """Make a writer discard all checkpoints, as on a replaced node."""
    with closing(WriterClient(writer.address)) as client:
        for held in client.ask(f.List(), f.Listed, timeout_s=300)[0].checkpoints:
            facts = decode_manifest(held.manifest)[0]
            client.ask(f.Discard(iteration=facts.iteration, attempt=facts.attempt), f.Done, timeout_s=300)
