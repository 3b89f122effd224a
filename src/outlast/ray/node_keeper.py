"""The checkpoint writer of each of Ray's nodes: it outlives its actors, and what it holds in memory with it.

The writer is a process of its own, started and watched by an actor that needs no CPU. That actor is the driver's: it
ends with the group, and so does its writer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outlast import clock
from outlast.checkpoint.writer_process import WriterProcess

__all__ = ["NodeKeeper", "NodeKeepers"]

log = logging.getLogger(__name__)
_CLOSE_S = 3.0


class NodeKeeper:
    """Keep one node's writer.

    Raises:
        OSError: The system starts no process.

    Thread: the actor's main thread; the writer ends with it.
    """

    def __init__(self) -> None:
        self._writer = WriterProcess()

    def address(self) -> str:
        """Return where the node's actors find the writer."""
        return self._writer.address

    def pid(self) -> int:
        """Return the process id of the writer that runs now."""
        return self._writer.pid

    def close(self) -> None:
        """End the writer, and give up what it held. Blocks: up to 2 s."""
        self._writer.close()


class NodeKeepers:
    """Have one :class:`NodeKeeper` on each node that needs one.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._keepers: dict[str, Any] = {}

    def ensure(self, node_ids: Collection[str], timeout_s: float) -> dict[str, str]:
        """Return the writers' addresses by node; a node whose writer does not start in time is left out.

        Who was asked before is asked again: a keeper that died meanwhile is replaced.

        Args:
            node_ids: Ray's ids of the nodes.
            timeout_s: Seconds to wait for all of them.

        Blocks: some milliseconds; up to ``timeout_s`` where one has to be started.
        """
        end_s = clock.now_s() + timeout_s
        found, gone = self._ask(node_ids, end_s)
        if gone:
            found |= self._ask(gone, end_s)[0]
        return found

    def forget(self, node_id: str) -> None:
        """Give up the writer of a node that is gone. Idempotent. Blocks: never."""
        keeper = self._keepers.pop(node_id, None)
        if keeper is not None:
            ray.kill(keeper)

    def close(self) -> None:
        """End all writers. Idempotent. Blocks: up to 3 s."""
        closing = [keeper.close.remote() for keeper in self._keepers.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for node_id in list(self._keepers):
            self.forget(node_id)

    def _ask(self, node_ids: Collection[str], end_s: float) -> tuple[dict[str, str], list[str]]:
        """Return the addresses that are told by ``end_s``, and the nodes whose keeper is gone."""
        asked = {}
        for node_id in node_ids:
            if node_id not in self._keepers:
                pinned = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
                self._keepers[node_id] = (
                    ray.remote(NodeKeeper).options(num_cpus=0, max_restarts=0, scheduling_strategy=pinned).remote()
                )
            asked[node_id] = self._keepers[node_id].address.remote()
        found, gone = {}, []
        for node_id, address in asked.items():
            left_s = end_s - clock.now_s()
            try:
                found[node_id] = ray.get(address, timeout=max(0.0, left_s))
            except GetTimeoutError:
                log.log(
                    logging.WARNING if left_s > 0 else logging.DEBUG,
                    "node %s has no checkpoint writer yet: its actors keep nothing in memory",
                    node_id[:8],
                )
            except RayError as error:
                log.warning("node %s has no checkpoint writer (%s)", node_id[:8], type(error).__name__)
                self.forget(node_id)
                gone.append(node_id)
        return found, gone
