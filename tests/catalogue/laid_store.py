"""Writes global checkpoints as a run writes them: files, then the manifest, then the tracker."""

from __future__ import annotations

import random
from collections.abc import Callable

from outlast.checkpoint.dcp.manifest import (
    METADATA,
    SCHEMA,
    FileEntry,
    GlobalManifest,
    Item,
    RankEntry,
    TensorPiece,
    Where,
    encode_global_manifest,
)
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.shard import CHUNK_BYTES, digest
from outlast.policy.lineage import Branch

RUN = "run-0a1b2c3d"
BLOB_BYTES = 4000


def lay_in_store(
    write: Callable[[str, bytes], None],
    iteration: int,
    *,
    world_size: int = 2,
    folder: str | None = None,
    committed: bool = True,
    num_bytes: int = 10_000,
    attempt: str | None = None,
    restored_from: int | None = None,
    metadata: bytes | None = b"a pickle that nobody here reads",
    branch: Branch | None = None,
) -> GlobalManifest:
    """Commit a checkpoint into a global directory.

    Args:
        write: Puts a file under a name relative to the directory.
        iteration: Of the checkpoint.
        world_size: Ranks that saved it, each of which has a file.
        folder: Of the checkpoint, when it is another than the committed one.
        committed: Off: without a manifest.
        num_bytes: Of each file.
        attempt: That wrote it; one of its own when left out.
        restored_from: As in the manifest.
        branch: Of the processes that saved it.
        metadata: Content of ``.metadata``; ``None`` = as earlier versions left it, without a digest.
    """
    attempt = attempt or f"job-0-cafe.{iteration}"
    suffix = "" if committed or folder is not None else f".{attempt}"  # an attempt in an object store
    folder, branch = folder or f"step-{iteration}", branch or Branch("")
    files, pieces, ranks = [], [], []
    for rank in range(world_size):
        data = random.Random(f"{rank}/{iteration}").randbytes(num_bytes)
        name = f"__{rank}_0{suffix}.distcp"
        write(f"{folder}/{name}", data)
        chunks = tuple(digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
        files.append(FileEntry(name=name, num_bytes=num_bytes, chunks=chunks))
        pieces.append(TensorPiece((rank * 250,), (250,), Where(rank, 0, BLOB_BYTES, 1000, 1000)))
        ranks.append(RankEntry(tree=Where(rank, BLOB_BYTES, 100, BLOB_BYTES, 100)))
    manifest = GlobalManifest(
        schema=SCHEMA,
        run=RUN,
        topology="feed",
        world_size=world_size,
        iteration=iteration,
        attempt=attempt,
        restored_from=restored_from,
        era=branch.era,
        forks=branch.forks,
        finite=True,
        metadata=None
        if metadata is None
        else FileEntry(name=METADATA, num_bytes=len(metadata), chunks=(digest(metadata),)),
        files=tuple(files),
        items=(
            Item(
                name="model.weight",
                path=("model", "weight"),
                dtype="F32",
                shape=(250 * world_size,),
                pieces=tuple(pieces),
            ),
        ),
        ranks=tuple(ranks),
    )
    write(f"{folder}/{METADATA}", metadata or b"of an earlier version")
    if committed:
        write(f"{folder}/{MANIFEST}", encode_global_manifest(manifest))
        if folder == f"step-{iteration}":
            write("latest", f"step-{iteration}\n".encode())
    write("run.json", b'{"run":"%s"}' % RUN.encode())
    return manifest
