"""The other ranks: one gather of bytes for the training thread, and a store for the committer's."""

from __future__ import annotations

import datetime
from typing import Any

from outlast.errors import PeerLost
from outlast.runtime.process_groups import Group, gather_bytes

__all__ = ["OwnStore", "Peers"]


class Peers:
    """All ranks that save and load together; works alone, too.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Longest time that a gather waits for a peer.

    Collective: all ranks.
    """

    def __init__(self, rank: int, world_size: int, *, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = Group.open(timeout_s=timeout_s) if world_size > 1 else None

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, by rank.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks.
        Blocks: until all ranks have come.
        """
        if self._group is None:
            return [data]
        try:
            gathered = gather_bytes(self._group.open_group, data)
        except RuntimeError as error:
            raise PeerLost(
                f"a peer left while the ranks agreed on a checkpoint ({error}); see the log of the rank that left"
            ) from error
        if self._group is None or self._group.is_cut:
            raise PeerLost("this rank left while the ranks agreed on a checkpoint; its log says why")
        return gathered

    def store(self, *, timeout_s: float) -> Any:
        """Return a connection of its own to the ranks' store, for one thread."""
        if self._group is None:
            return OwnStore()
        from torch.distributed.distributed_c10d import _get_default_store

        default: Any = _get_default_store()
        store = default.clone()
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        return store

    def close(self) -> None:
        """Leave, without waiting for anyone. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def cut(self) -> None:
        """Fail whatever waits for a peer. Thread: any."""
        if self._group is not None:
            self._group.cut()


class OwnStore:
    """The part of ``torch.distributed``'s store that an :class:`~outlast.checkpoint.lane.SaveExchange` needs."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
