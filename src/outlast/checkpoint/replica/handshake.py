"""How two writers prove to each other that they know the run's key, without saying it.

Each side draws a nonce; a proof is the HMAC-SHA256 of both nonces under the key, with a word for the side that gives
it, so that none can be sent back or used again. From the same nonces each side derives the keys under which it signs
the frames of this connection. The shards' bytes are neither signed nor encrypted: digests tell whether they are right.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

__all__ = ["NONCE_BYTES", "TAG_BYTES", "Session", "draw_nonce", "is_proof", "prove"]

NONCE_BYTES = 32
TAG_BYTES = 16
"""Bytes of a frame's signature."""


def draw_nonce() -> bytes:
    """Return a number that nobody can guess and that never comes again."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that a side knows the key.

    Args:
        key: The run's key.
        side: ``client`` or ``server``.
        server_nonce: ``NONCE_BYTES`` drawn by the server for this connection.
        client_nonce: The same by the client.
    """
    return hmac.digest(key, b"outlast replica proof " + side.encode() + server_nonce + client_nonce, "sha256")


def is_proof(proof: bytes, key: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> bool:
    """Tell whether a side's proof is right, in a time that does not depend on where it is wrong."""
    if len(server_nonce) != NONCE_BYTES or len(client_nonce) != NONCE_BYTES:
        return False
    return hmac.compare_digest(proof, prove(key, side, server_nonce, client_nonce))


@dataclass(slots=True)
class Session:
    """The signatures of one direction of a connection: each frame's depends on its number."""

    key: bytes
    count: int = 0

    @classmethod
    def derive(cls, key: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> Session:
        """Return the session of the frames that ``side`` sends."""
        text = b"outlast replica frames " + side.encode() + server_nonce + client_nonce
        return cls(hmac.digest(key, text, "sha256"))

    def sign(self, frame: bytes) -> bytes:
        """Return the signature of the next frame."""
        tag = hmac.digest(self.key, self.count.to_bytes(8, "big") + frame, "sha256")[:TAG_BYTES]
        self.count += 1
        return tag
