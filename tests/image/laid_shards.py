"""Shards in memory or in files, with the manifest that describes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from outlast.checkpoint.arena import Arena, Staged, Stager
from outlast.checkpoint.manifest import SCHEMA, Manifest, ShardEntry
from outlast.checkpoint.shard import Identity, digest_image, write_image
from outlast.checkpoint.state import FlatState, flatten

IDENTITY = Identity(run="run", topology="t", rank=0, world_size=1, iteration=7, attempt="7-a")


def memfd(num_bytes: int) -> int:
    """Return sealable shared memory, which the caller closes."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


def provide(num_bytes: int) -> Arena:
    """Return an arena that is one page longer than requested."""
    num_bytes = -(-num_bytes // 4096) * 4096 + 4096
    return Arena(memfd(num_bytes))


def flat_of(tensors: Mapping[str, torch.Tensor], note: str = "as saved") -> FlatState:
    return flatten({"state": {**tensors, "note": note}})


def stage(tensors: Mapping[str, torch.Tensor], identity: Identity = IDENTITY) -> Staged:
    """Return a state's image; the caller closes its arena."""
    stager = Stager()
    try:
        return stager.stage(flat_of(tensors), identity, provide)
    finally:
        stager.close()


def bytes_of(staged: Staged) -> bytes:
    return bytes(staged.arena.view(staged.num_bytes))


def manifest_of(staged: Staged, identity: Identity = IDENTITY) -> Manifest:
    """Return the manifest of a checkpoint that consists of this shard."""
    image = staged.arena.view(staged.num_bytes)
    entry = ShardEntry.of(0, image, digest_image(image), finite=True)
    return Manifest(
        schema=SCHEMA,
        run=identity.run,
        topology=identity.topology,
        world_size=1,
        iteration=identity.iteration,
        attempt=identity.attempt,
        restored_from=None,
        shards=(entry,),
    )


def lay(tensors: Mapping[str, torch.Tensor], path: Path) -> Manifest:
    """Write a state's shard into a file; return its manifest."""
    staged = stage(tensors)
    try:
        write_image(staged.arena.view(staged.num_bytes), path)
        return manifest_of(staged)
    finally:
        staged.arena.close()


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
