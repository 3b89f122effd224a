"""Collective exchange of values between all ranks for the extension's calls: a gloo group with a time limit."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch.distributed as dist

from outlast import env
from outlast.decoding import from_msgpack
from outlast.errors import OutlastError, PeerLost
from outlast.runtime.process_groups import Group, gather_bytes, is_initialised

T = TypeVar("T")

EXCHANGE_TIMEOUT_S = 600.0
"""Seconds after which a rank stops waiting for the others."""


class WorldExchange:
    """Gather a value of every rank on every rank. The group follows a world that is destroyed and created again."""

    def __init__(self, what: str, timeout_s: float = EXCHANGE_TIMEOUT_S) -> None:
        self._what, self._timeout_s = what, timeout_s
        self._group: Group | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank() if is_initialised() else env.read_worker().global_rank

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value, by rank.

        Raises:
            OutlastError: There are several ranks, and ``torch.distributed`` is not initialised.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks of the default group.
        Blocks: until all ranks have arrived; up to the time limit.
        """
        if not is_initialised():
            if env.read_worker().world_size > 1:
                raise OutlastError(
                    f"{self._what} needs all ranks: call torch.distributed.init_process_group() before it"
                )
            return [value]
        if dist.get_world_size() == 1:
            return [value]
        try:
            gathered = gather_bytes(self._open(), msgspec.msgpack.encode(value))
        except RuntimeError as error:
            raise PeerLost(
                f"a peer exited, or did not reach {self._what} within {self._timeout_s:g} s ({error}); "
                "see that rank's log or the launcher's report for the cause"
            ) from error
        return [from_msgpack(data, kind) for data in gathered]

    def close(self) -> None:
        """Close the group, if there is one. Idempotent. Blocks: never; peers that wait in the group fail."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _open(self) -> dist.ProcessGroup:
        known = dist.distributed_c10d._world.pg_map
        if self._group is not None and (self._group.is_cut or self._group.process_group not in known):
            self._group = None  # of a destroyed world
        if self._group is None:
            self._group = Group.share(timeout_s=self._timeout_s)
        return self._group.open_group
