"""Nodes whose writers wait at a gate before they write anything."""

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
    """Writers by the name of their node, each with a gate of its own."""

    def __init__(self, names: tuple[str, ...], root: Path) -> None:
        self._gates = {name: root / f"gate-{name}" for name in names}
        for gate in self._gates.values():
            os.mkfifo(gate)
        self.writers = {name: _start_gated(gate) for name, gate in self._gates.items()}

    @classmethod
    @contextmanager
    def open(cls, names: tuple[str, ...], root: Path) -> Iterator[GatedNodes]:
        """Start the writers, and end them with the block."""
        nodes = cls(names, root)
        try:
            yield nodes
        finally:
            for writer in nodes.writers.values():
                writer.close()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let everything pass that comes in the block, on all nodes."""
        is_over = threading.Event()

        def keep_open(gate: Path) -> None:
            while not is_over.wait(0.01):  # a FIFO signals nothing to who would write
                with suppress(OSError):  # nothing waits there
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
        """Let the shard pass that waits, or the next that comes. Blocks: until it does."""
        os.close(os.open(self._gates[name], os.O_WRONLY))


def _start_gated(gate: Path) -> WriterProcess:
    with armed_in_children(Injection(point="checkpoint.writer.write", do="wait", path=str(gate))):
        return WriterProcess()


def empty_memory(writer: WriterProcess) -> None:
    """Have a writer forget everything, as that of a replaced node has."""
    with closing(WriterClient(writer.address)) as client:
        for held in client.ask(f.List(), f.Listed, timeout_s=300)[0].checkpoints:
            facts = decode_manifest(held.manifest)[0]
            client.ask(f.Discard(iteration=facts.iteration, attempt=facts.attempt), f.Done, timeout_s=300)
