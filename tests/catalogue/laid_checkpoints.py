"""Writes node-local checkpoints as a run writes them: complete, with replicas, on several nodes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.checkpoint.directory import Directory
from outlast.checkpoint.manifest import MANIFEST, SCHEMA, Manifest, ShardEntry, seal
from outlast.checkpoint.shard import Identity, ShardLayout, digests, shard_name
from outlast.policy.lineage import Branch

RUN = "run-0a1b2c3d"
TOPOLOGY = "feed"


def attempt_name(ordinal: int) -> str:
    return f"job-0-cafe.{ordinal}"


def shard_bytes(
    rank: int, world_size: int, iteration: int, attempt: str, *, num_elements: int = 1000, run: str = RUN
) -> bytes:
    """Return a shard of two tensors."""
    identity = Identity(
        run=run, topology=TOPOLOGY, rank=rank, world_size=world_size, iteration=iteration, attempt=attempt
    )
    tensors = [("model.weight", "F32", (num_elements,), 4 * num_elements, 4), ("model.bias", "F32", (10,), 40, 4)]
    layout = ShardLayout(tensors)
    head, _, size = layout.place(identity, 16)
    data = head + random.Random(f"{rank}/{iteration}/{attempt}").randbytes(size - len(head))
    return data


def lay_checkpoint(
    folders: Mapping[str, Path],
    iteration: int,
    *,
    nodes: Sequence[str] = ("node0",),
    replicas: Mapping[str, Sequence[int]] | None = None,
    parity: int = 0,
    attempt: str | None = None,
    num_elements: int = 1000,
    restored_from: int | None = None,
    finite: bool = True,
    suspect: bool = False,
    name: str | None = None,
    run: str = RUN,
    branch: Branch | None = None,
) -> Manifest:
    """Commit a checkpoint into nodes' folders.

    Args:
        folders: The nodes that are here, each with its folder.
        iteration: Of the checkpoint.
        nodes: Each rank's node.
        replicas: Ranks of other nodes whose shards a node holds.
        parity: Nodes whose shards share one parity; a part of it lies beside each rank.
        attempt: That wrote it; one of its own when left out.
        num_elements: Of its large tensor.
        restored_from: As in the manifest.
        finite: As in the manifest.
        suspect: Saved for diagnosis.
        name: Of its folder, when it is another than the committed one.
        run: That saved it.
        branch: Of the processes that saved it.
    """
    branch = branch or Branch("")
    attempt = attempt or attempt_name(iteration)
    shards = [
        shard_bytes(r, len(nodes), iteration, attempt, num_elements=num_elements, run=run) for r in range(len(nodes))
    ]
    manifest = Manifest(
        schema=SCHEMA,
        run=run,
        topology=TOPOLOGY,
        world_size=len(nodes),
        iteration=iteration,
        attempt=attempt,
        restored_from=restored_from,
        era=branch.era,
        forks=branch.forks,
        nodes=tuple(nodes),
        num_copies=tuple(sum(r in held for held in replicas.values()) for r in range(len(nodes))) if replicas else (),
        parity=parity,
        shards=tuple(
            ShardEntry.of(rank, memoryview(data), digests(data), finite=finite) for rank, data in enumerate(shards)
        ),
    )
    for node, folder in folders.items():
        directory = Directory(folder / "suspect" if suspect else folder)
        path = directory.path / (name or f"step-{iteration}")
        path.mkdir(parents=True)
        for rank, data in enumerate(shards):
            if nodes[rank] == node or rank in (replicas or {}).get(node, ()):
                (path / shard_name(rank)).write_bytes(data)
            if parity and nodes[rank] == node:
                (path / f"parity-{rank:05d}.bin").write_bytes(b"xor")
        (path / MANIFEST).write_bytes(seal(manifest))
        Directory(folder).create_hint(run)
        if not suspect and name is None:
            directory.point_to(iteration)
    return manifest


def two_nodes(place: Path, iteration: int, **changes: object) -> Manifest:
    """Commit a checkpoint of four ranks on two nodes, each of which holds the other's replicas."""
    return lay_checkpoint(
        {"node0": place / "node0", "node1": place / "node1"},
        iteration,
        nodes=("node0", "node0", "node1", "node1"),
        replicas={"node0": (2, 3), "node1": (0, 1)},
        **changes,  # type: ignore[arg-type]
    )


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file, keeping its length."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))
