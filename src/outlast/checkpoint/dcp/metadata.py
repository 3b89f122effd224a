"""The manifest as ``torch.distributed.checkpoint``'s own metadata, for its planners and for other readers."""

from __future__ import annotations

import io
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from outlast.checkpoint.dcp.items import TORCH_TYPES
from outlast.checkpoint.dcp.manifest import GlobalManifest

__all__ = ["dump_metadata", "make_metadata"]


def make_metadata(manifest: GlobalManifest) -> Metadata:
    """Return what the format's readers need to know; what is ours alone is left out."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored, paths = {}, {}
    for item in manifest.items:
        if not item.path:
            continue
        paths[item.name] = tuple(item.path)
        chunks = []
        for piece in item.pieces:
            if piece.where is None:
                continue
            where = piece.where
            is_tensor = item.dtype is not None
            index = MetadataIndex(item.name, piece.offset) if is_tensor else MetadataIndex(item.name)
            stored[index] = _StorageInfo(manifest.files[where.file].name, where.start, where.num_bytes)
            chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)))
        if item.dtype is None:
            described[item.name] = BytesStorageMetadata()
        else:
            properties = TensorProperties(dtype=TORCH_TYPES[item.dtype])
            described[item.name] = TensorStorageMetadata(properties, torch.Size(item.shape), chunks)
    return Metadata(described, planner_data=paths, storage_data=stored, storage_meta=StorageMeta())


def dump_metadata(manifest: GlobalManifest) -> bytes:
    """Return the content of ``.metadata``."""
    buffer = io.BytesIO()
    pickle.dump(make_metadata(manifest), buffer)
    return buffer.getvalue()
