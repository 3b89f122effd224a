"""A manifest's file: the manifest and its SHA-256, which tells what was changed later. Nothing here imports torch."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from outlast.decoding import from_json
from outlast.errors import CheckpointError, Corrupt, Untrusted

__all__ = ["run_of", "seal", "unseal"]

T = TypeVar("T", bound=msgspec.Struct)
MAX_SCHEMA = 1
"""Up to which manifests of any tier name their run in the same field."""


class _Sealed(msgspec.Struct, frozen=True):
    manifest: msgspec.Raw
    sha256: str


class _Schema(msgspec.Struct, frozen=True):
    schema: int


class _Named(msgspec.Struct, frozen=True):
    schema: int
    run: str
    iteration: int


def seal(manifest: msgspec.Struct) -> bytes:
    """Return the file of a manifest. Equal manifests give equal bytes."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), hashlib.sha256(body).hexdigest()))


def unseal(data: bytes, kind: type[T], *, schema: int) -> tuple[T, str]:
    """Read the file of a manifest.

    Args:
        data: The file.
        kind: The manifest's type, which has a field ``schema``.
        schema: The newest that this version knows.

    Returns:
        The manifest and its SHA-256.

    Raises:
        Corrupt: It is not a manifest, or was changed after it was written.
        Untrusted: A later version of this package wrote it.
    """
    try:
        sealed = from_json(data, _Sealed)
        body = bytes(sealed.manifest)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise Corrupt("the manifest differs from its own SHA-256")
        found = from_json(body, _Schema).schema
        if found > schema:
            raise Untrusted(f"the manifest has schema {found}, this version reads up to {schema}; update outlast")
        return from_json(body, kind), sealed.sha256
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the manifest cannot be read ({error})") from error


def run_of(data: bytes, iteration: int) -> str | None:
    """Return the run that the file of a manifest names, whichever tier's it is.

    Args:
        data: The file.
        iteration: Of the generation in whose folder it lies.

    Returns:
        The run; ``None``: it cannot be trusted, or is another generation's.
    """
    try:
        named, _ = unseal(data, _Named, schema=MAX_SCHEMA)
    except CheckpointError:
        return None
    return named.run if named.iteration == iteration else None
