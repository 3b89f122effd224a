"""Three checkpoints in every tier of one or two nodes, with functions that damage and restore them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_nodes import empty_memory
from obedient_ranks import Ranks

from outlast.checkpoint import protocol as f
from outlast.checkpoint.manifest import CopyKey, decode_manifest
from outlast.checkpoint.replica.client import Replicator, Target
from outlast.checkpoint.writer_client import WriterClient, WriterProcess
from outlast.policy.recovery_point import Tier

__all__ = ["ITERATIONS", "NEWEST", "Node", "Spot", "World", "make_world"]

ITERATIONS = (1, 2, 3)
NEWEST = 3
KEY = b"a secret of the tests"


@dataclass(frozen=True, order=True)
class Spot:
    """One rank's copy of a checkpoint in one place."""

    rank: int
    checkpoint: int
    tier: Tier
    node: str
    """Node of the memory or disk; empty for the global tier."""


class Node:
    """A node's writer and folder, and their undamaged contents."""

    def __init__(self, name: str, rank: int, folder: Path | None) -> None:
        self.name, self.rank, self.folder = name, rank, folder
        self.writer = WriterProcess()
        self.client = WriterClient(self.writer.address)
        self.parts: dict[CopyKey, bytes] = {}
        self.manifest = b""

    def note_memory(self) -> None:
        """Record the contents of the writer: the newest checkpoint only."""
        (checkpoint,) = self._list()
        manifest, _ = decode_manifest(checkpoint.manifest)
        assert manifest.iteration == NEWEST
        self.manifest = checkpoint.manifest
        sizes = {shard.rank: shard.num_bytes for shard in manifest.shards}
        self.parts = {key: self.read_part(key, sizes[key.rank]) for key in checkpoint.parts}

    def holds(self, key: CopyKey) -> bool:
        """Return whether the node's memory holds a part."""
        _, fd = self.client.ask(f.Open(key=key), f.Done, timeout_s=300)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def open_part(self, key: CopyKey) -> int:
        """Return a descriptor of the memory that holds a part."""
        _, fd = self.client.ask(f.Open(key=key), f.Done, timeout_s=300)
        assert fd is not None
        return fd

    def read_part(self, key: CopyKey, num_bytes: int) -> bytes:
        with closing(os.fdopen(self.open_part(key), "rb")) as memory:
            return os.pread(memory.fileno(), num_bytes, 0)

    def write_part(self, key: CopyKey, data: bytes, offset: int = 0) -> None:
        """Write into the memory that holds a part, without the writer's knowledge."""
        with closing(os.fdopen(self.open_part(key), "wb")) as memory:
            os.pwrite(memory.fileno(), data, offset)

    def flip_bit(self, key: CopyKey, offset: int, bit: int) -> None:
        self.write_part(key, bytes([self.parts[key][offset] ^ 1 << bit]), offset)

    def empty_memory(self) -> None:
        """Make the writer discard all checkpoints."""
        empty_memory(self.writer)

    def heal_memory(self, port_of_others: dict[str, int]) -> None:
        """Restore the recorded contents of the writer."""
        held = self._list()
        if len(held) != 1 or held[0].manifest != self.manifest or set(held[0].parts) != set(self.parts):
            self.empty_memory()
            self._fill_memory(port_of_others[self.name])
            return
        for key, data in self.parts.items():
            self.write_part(key, data)

    def serve(self) -> int:
        """Return the port where the writer sends and receives copies."""
        folder = os.fspath(self.folder) if self.folder is not None else None
        return self.client.ask(f.Serve(host="127.0.0.1", secret=KEY, folder=folder), f.Serving, timeout_s=300)[0].port

    def close(self) -> None:
        self.client.close()
        self.writer.close()

    def _list(self) -> tuple[f.InMemory, ...]:
        return self.client.ask(f.List(), f.Listed, timeout_s=300)[0].checkpoints

    def _fill_memory(self, port: int) -> None:
        target = Target(node=self.name, host="127.0.0.1", port=port)
        with closing(Replicator(KEY)) as replicator:
            for key, data in self.parts.items():
                if key.rank != self.rank:
                    fd = os.memfd_create("part")
                    os.pwrite(fd, data, 0)
                    (outcome,) = replicator.replicate(key, fd, len(data), (target,), timeout_s=60)
                    os.close(fd)
                    assert outcome.error is None, outcome
        own = next(key for key in self.parts if key.rank == self.rank)
        data = self.parts[own]
        _, memory = self.client.ask(f.Take(rank=self.rank, num_bytes=len(data), may_steal=True), f.Done, timeout_s=300)
        assert memory is not None
        os.pwrite(memory, data, 0)
        self.client.ask(f.Write(key=own, num_bytes=len(data), path=None), f.Written, timeout_s=300, fd=memory)
        os.close(memory)
        self.client.ask(f.PreparePart(key=own, manifest=self.manifest), f.Done, timeout_s=300)
        self.client.ask(f.KeepPart(key=own), f.Done, timeout_s=300)


class World:
    """Nodes with one rank each, and all their checkpoints.

    Args:
        root: Folder of everything.
        nodes: By rank.
        ranks: Their ranks.
        config: The settings that they save and load with.
    """

    def __init__(self, root: Path, nodes: list[Node], ranks: Ranks, config: dict[str, Any]) -> None:
        self.root, self.nodes, self.ranks, self.config = root, nodes, ranks, config
        self.has_disks = nodes[0].folder is not None
        told = ranks.tell(do="save", config=config, iterations=list(ITERATIONS), job="job")
        self.digests = [{int(n): digest for n, digest in one["saved"].items()} for one in told]
        """For each rank, the digest of each checkpoint."""
        for place in self.places:
            shutil.copytree(place, self.whole(place))
        for node in nodes:
            node.note_memory()
        self.spots = frozenset(self._all_spots())
        self._lay_another_run()

    @property
    def places(self) -> list[Path]:
        """Folders that contain checkpoints."""
        local = [node.folder for node in self.nodes if node.folder is not None]
        return [*local, Path(self.config["directory"])]

    def whole(self, path: Path) -> Path:
        """Return the path of the undamaged backup of a file or folder."""
        return self.root / "whole" / path.relative_to(self.root)

    def foreign(self, path: Path) -> Path:
        """Return the path of the same file or folder in another run."""
        return self.root / "foreign" / path.relative_to(self.root)

    def heal(self) -> None:
        """Undo all damage."""
        for place in self.places:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.whole(place), place)
        ports = {node.name: node.serve() for node in self.nodes}
        for node in self.nodes:
            node.heal_memory(ports)

    def load(self) -> list[dict[str, Any]]:
        """Make all ranks load; return their reports."""
        return self.ranks.tell(do="load", config=self.config)

    def expect(self, spoiled: set[Spot]) -> tuple[int, list[Tier]] | None:
        """Return the checkpoint and each rank's tier that a load must use, computed from the undamaged copies."""
        good = self.spots - spoiled
        for checkpoint in sorted(ITERATIONS, reverse=True):
            tiers = [
                [spot.tier for spot in good if spot.rank == rank and spot.checkpoint == checkpoint]
                for rank in range(len(self.nodes))
            ]
            if all(tiers):
                return checkpoint, [min(left) for left in tiers]
        return None

    def _all_spots(self) -> Iterator[Spot]:
        for node in self.nodes:
            for checkpoint in ITERATIONS:
                yield Spot(node.rank, checkpoint, Tier.GLOBAL, "")
                if self.has_disks:
                    yield Spot(node.rank, checkpoint, Tier.LOCAL, node.name)
                    for other in self.nodes:
                        if other is not node:
                            yield Spot(node.rank, checkpoint, Tier.REPLICA, other.name)
            for key in node.parts:
                tier = Tier.MEMORY if key.rank == node.rank else Tier.REPLICA
                yield Spot(key.rank, NEWEST, tier, node.name)

    def _lay_another_run(self) -> None:
        """Save the same iterations in another run, for files that could be confused with these."""
        config = dict(self.config)
        for name in ("directory", "local_directory"):
            if config.get(name) is not None:
                config[name] = os.fspath(self.foreign(Path(config[name])))
        for node in self.nodes:
            node.empty_memory()
        self.ranks.tell(do="save", config=config, iterations=list(ITERATIONS), job="other")
        self.heal()


@contextmanager
def make_world(root: Path, *, num_nodes: int, has_disks: bool) -> Iterator[World]:
    """Save three checkpoints on ``num_nodes`` nodes."""
    config: dict[str, Any] = {
        "directory": os.fspath(root / "global"),
        "local_directory": os.fspath(root / "local") if has_disks else None,
        "most_recent_k": 3,
        "local_most_recent_k": 3,
        "save_timeout": 60.0,
        "replication_timeout": 30.0,
        "replication_key_file": os.fspath(root / "key"),
    }
    (root / "key").write_bytes(KEY)
    with ExitStack() as stack:
        nodes = []
        for rank in range(num_nodes):
            name = f"node{rank}"
            nodes.append(Node(name, rank, root / "local" / name if has_disks else None))
            stack.callback(nodes[-1].close)
        ranks = stack.enter_context(Ranks({node.name: node.writer for node in nodes}, root / "ranks.log"))
        yield World(root, nodes, ranks, config)
