"""Ranks whose live state is a generation already: they need no copy of it, while others load it.

Such a state counts as one more copy of its rank, the nearest of all, of exactly one attempt. So which generation is
chosen is decided as ever: the newest of which every rank has a copy; what the others load is proven as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outlast.checkpoint.peers import Peers
from outlast.checkpoint.tiers import Table
from outlast.decoding import from_json
from outlast.policy.recovery_point import Copy, Tier

__all__ = ["KeptState", "gather_kept", "is_kept"]

_HOLDER = ""
"""Of a live state, in a tier whose copies all have a holder; it sorts before every node's name."""


class KeptState:
    """In place of a proven copy: the live state, which stays as it is."""

    num_bytes_read = 0

    def check(self, state: Mapping[str, Any]) -> None:
        """It is this very state."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Leave it as it is."""

    def close(self) -> None:
        """Nothing is held."""


def is_kept(copy: Copy) -> bool:
    """Return whether a copy is its rank's live state."""
    return copy.tier == Tier.MEMORY and copy.holder == _HOLDER


def gather_kept(has: tuple[int, str] | None, table: Table, peers: Peers) -> list[Copy | None]:
    """Return by rank which generation its live state is; ``None`` = of none that counts.

    What is committed nowhere does not count, nor what was saved by another number of ranks: all load that together.

    Args:
        has: Iteration and attempt, of this rank.
        table: What all ranks could load.

    Raises:
        PeerLost: A peer left.

    Collective: all ranks.
    """
    told = peers.gather(msgspec.json.encode(has))
    everyone = [from_json(data, tuple[int, str] | None) for data in told]
    committed = {(copy.generation, copy.attempt) for copies in table.copies for copy in copies}
    return [
        Copy(one[0], one[1], Tier.MEMORY, _HOLDER)
        if one is not None and one in committed and table.world_sizes.get(one[1], peers.world_size) == peers.world_size
        else None
        for one in everyone
    ]
