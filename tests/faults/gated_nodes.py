"""Nodes whose writers wait at a gate before they write anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
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

    def let_one_pass(self, name: str) -> None:
        """Let the shard pass that waits, or the next that comes. Blocks: until it does."""
        os.close(os.open(self._gates[name], os.O_WRONLY))


def _start_gated(gate: Path) -> WriterProcess:
    with armed_in_children(Injection(point="checkpoint.writer.write", do="wait", path=str(gate))):
        return WriterProcess()


def empty_memory(writer: WriterProcess) -> None:
    """Have a writer forget everything, as that of a replaced node has."""
    with closing(WriterClient(writer.address)) as client:
        for held in client.ask(f.List(), f.Listed, timeout_s=300)[0].generations:
            facts = decode_manifest(held.manifest)[0]
            client.ask(f.Discard(iteration=facts.iteration, attempt=facts.attempt), f.Done, timeout_s=300)
