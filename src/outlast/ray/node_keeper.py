"""The checkpoint writer of each of Ray's nodes: it outlives its actors, and what it holds in memory with it.

The writer is a process of its own, started and watched by an actor that needs no CPU. That actor is the driver's: it
ends with the group, and so does its writer. Should it die before, the driver starts another one, whose writer listens
at the same address: the actors of the node continue to save and need no notice.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outlast import clock
from outlast.checkpoint.writer_client import WriterProcess

__all__ = ["NodeKeeper", "NodeKeepers"]

log = logging.getLogger(__name__)
_CLOSE_S = 3.0
_LOOK_S = 0.5
"""From an answer of a keeper to the next question whether it lives."""


class NodeKeeper:
    """Keep one node's writer.

    Args:
        address: Where the node's actors find it.

    Raises:
        OSError: The system starts no process.

    Thread: the actor's main thread; the writer ends with it.
    """

    def __init__(self, address: str) -> None:
        self._writer = WriterProcess(address=address)

    def address(self) -> str:
        """Return where the node's actors find the writer."""
        return self._writer.address

    def pid(self) -> int:
        """Return the process id of the writer that runs now."""
        return self._writer.pid

    def close(self) -> None:
        """End the writer, and give up what it held. Blocks: up to 2 s."""
        self._writer.close()


@dataclass(slots=True)
class _Keeper:
    """A keeper, and what is known of its life."""

    handle: Any
    question: Any = None
    """The question that it has not answered."""
    answered_s: float | None = None
    """When it last did; ``None`` = it has not started yet."""


class NodeKeepers:
    """Have one :class:`NodeKeeper` on each node that needs one.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._keepers: dict[str, _Keeper] = {}
        self._name = f"outlast-keeper-{uuid.uuid4().hex}"
        self._lost: list[str] = []

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
        kept = self._keepers.pop(node_id, None)
        if kept is not None:
            ray.kill(kept.handle)

    def look(self) -> list[str]:
        """Replace the keepers that died, and return the nodes that lost theirs since the last look. Blocks: never."""
        now_s = clock.now_s()
        for node_id, kept in list(self._keepers.items()):
            if kept.question is None:
                if kept.answered_s is None or now_s - kept.answered_s >= _LOOK_S:
                    kept.question = kept.handle.pid.remote()
                continue
            if not ray.wait([kept.question], timeout=0, fetch_local=False)[0]:
                continue
            try:
                ray.get(kept.question)
                kept.question, kept.answered_s = None, now_s
            except RayError as error:
                if self._lose(node_id, error):
                    self._start(node_id)
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """End all writers. Idempotent. Blocks: up to 3 s."""
        closing = [kept.handle.close.remote() for kept in self._keepers.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for node_id in list(self._keepers):
            self.forget(node_id)

    def _ask(self, node_ids: Collection[str], end_s: float) -> tuple[dict[str, str], list[str]]:
        """Return the addresses that are known by ``end_s``, and the nodes whose keeper is gone."""
        asked = {}
        for node_id in node_ids:
            if node_id not in self._keepers:
                self._start(node_id)
            asked[node_id] = self._keepers[node_id].handle.address.remote()
        found, gone = {}, []
        for node_id, address in asked.items():
            left_s = end_s - clock.now_s()
            try:
                found[node_id] = ray.get(address, timeout=max(0.0, left_s))
                self._keepers[node_id].answered_s = clock.now_s()
            except GetTimeoutError:
                log.log(
                    logging.WARNING if left_s > 0 else logging.DEBUG,
                    "node %s has no checkpoint writer yet: its actors keep no checkpoints in memory",
                    node_id[:8],
                )
            except RayError as error:
                self._lose(node_id, error)
                gone.append(node_id)
        return found, gone

    def _start(self, node_id: str) -> None:
        pinned = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        keeper = ray.remote(NodeKeeper).options(num_cpus=0, max_restarts=0, scheduling_strategy=pinned)
        self._keepers[node_id] = _Keeper(keeper.remote(f"{self._name}-{node_id}"))

    def _lose(self, node_id: str, error: RayError) -> bool:
        """Give up a keeper that died; return whether another one could take its place."""
        had_started = self._keepers[node_id].answered_s is not None
        self.forget(node_id)
        log.warning("node %s has no checkpoint writer (%s)", node_id[:8], type(error).__name__)
        node_lives = any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
        if had_started and node_lives:  # a lost node is reported by the recovery
            self._lost.append(node_id)
        return had_started and node_lives
