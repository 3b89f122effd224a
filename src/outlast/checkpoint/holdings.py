"""What a node holds of generations: names of the parts, and the seam between who keeps them and who carries them."""

from __future__ import annotations

from typing import Protocol

import msgspec

__all__ = ["MANIFEST_PART", "SHARD_PART", "CopyKey", "Holdings", "HoldingsError", "Incoming"]

SHARD_PART = ""
"""A rank's whole shard."""
MANIFEST_PART = "manifest"
"""The generation's manifest; its rank is 0 by convention."""


class HoldingsError(Exception):
    """A part cannot be taken in or given out; says why in one line."""


class CopyKey(msgspec.Struct, frozen=True, order=True):
    """Names one part of one generation."""

    iteration: int
    attempt: str
    rank: int
    """The rank whose state it is; of a parity, the rank on whose node it lies."""
    part: str = SHARD_PART


class Incoming(Protocol):
    """A part that is being received."""

    fd: int
    """Where its bytes go: a file of ``num_bytes`` zeros that can be written at any offset and mapped."""

    def keep(self) -> None:
        """Make it durable, as far as its place is, and give it out from now on. Raises: HoldingsError."""

    def drop(self) -> None:
        """Forget it. Idempotent; does nothing after :meth:`keep`."""


class Holdings(Protocol):
    """A node's parts. Thread: any."""

    def receive(self, key: CopyKey, num_bytes: int) -> Incoming:
        """Make room for a part; one that is there already is replaced once the new one is kept.

        Raises:
            HoldingsError: There is no room, or nothing is kept here.
        """

    def open(self, key: CopyKey) -> tuple[int, int] | None:
        """Return a readable descriptor, which the caller closes, and the bytes of a part; ``None`` = not here."""

    def is_unchanged(self, key: CopyKey, fd: int) -> bool:
        """Return whether what :meth:`open` gave out for a part still is that part.

        Memory serves the next save when its generation is old, whoever reads it; what was read before it is unchanged.
        """
