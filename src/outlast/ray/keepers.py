"""The checkpoint writers of the nodes, each owned by a keeper actor that the driver replaces if it dies.

A writer and its memory tier outlive the actors of its node; the writer ends with its keeper, and so with the group. A
replaced keeper's writer listens at the same address, so actors continue to save without being notified.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outlast import clock
from outlast.checkpoint.writer_client import WriterProcess
from outlast.ray.replies import ActorPing, Reply, ReplyFault, await_replies, describe_error

log = logging.getLogger(__name__)
_CLOSE_S = 3.0
_LOOK_S = 0.5
"""Delay between a keeper's reply and the next ping."""
SILENT_S = 60.0
"""Seconds without a reply after which a started keeper is replaced: it is stopped, or hangs in the kernel."""


def start_on(node_id: str, actor_class: type, arguments: Mapping[str, Any], **options: Any) -> Any:
    """Start an actor without resources on a node; return its handle. Blocks: never."""
    pinned = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    started = ray.remote(actor_class).options(num_cpus=0, max_restarts=0, scheduling_strategy=pinned, **options)
    return started.remote(**arguments)


class NodeKeeper:
    """Owns one node's writer.

    Raises: OSError (the writer process cannot be started). Thread: the actor's main thread; the writer ends with it.
    """

    def __init__(self, address: str) -> None:
        self._writer = WriterProcess(address=address)

    def address(self) -> str:
        """Return the writer's address for the node's actors."""
        return self._writer.address

    def pid(self) -> int:
        """Return the process id of the current writer."""
        return self._writer.pid

    def close(self) -> None:
        """End the writer and release its memory. Blocks: up to 2 s."""
        self._writer.close()


@dataclass(slots=True)
class Keeper:
    handle: Any
    ping: ActorPing = field(default_factory=ActorPing)
    has_started: bool = False


class NodeKeepers:
    """Keeps one :class:`NodeKeeper` on each node that needs one.

    Args:
        runtime_env: Ray's runtime environment; that of the actors, as writers need the same credentials. ``None``: the
            driver's.

    Thread: one at a time.
    """

    def __init__(self, runtime_env: Mapping[str, Any] | None = None) -> None:
        self._options: dict[str, Any] = {"runtime_env": dict(runtime_env)} if runtime_env else {}
        self.by_node: dict[str, Keeper] = {}
        self._name = f"outlast-keeper-{uuid.uuid4().hex}"
        self._lost: list[str] = []

    def ensure(self, node_ids: Collection[str], timeout_s: float) -> dict[str, str]:
        """Return the writers' addresses by node, without nodes whose writer does not start in time.

        Known keepers are queried again, and replaced if they died. Blocks: some milliseconds; up to ``timeout_s`` if
        one has to be started.
        """
        deadline_s = clock.now_s() + timeout_s
        found, gone = self._ask(node_ids, timeout_s)
        if gone:
            found |= self._ask(gone, max(0.0, deadline_s - clock.now_s()))[0]
        return found

    def forget(self, node_id: str) -> None:
        """Drop the writer of a lost node. Idempotent. Blocks: never."""
        kept = self.by_node.pop(node_id, None)
        if kept is not None:
            ray.kill(kept.handle)

    def look(self) -> list[str]:
        """Replace dead keepers; return the nodes that lost theirs since the last call. Blocks: never."""
        for node_id, kept in list(self.by_node.items()):
            reply = kept.ping.poll(kept.handle.pid, SILENT_S if kept.has_started else math.inf)
            if reply is not None and reply.fault is None:
                kept.has_started = True
                kept.ping.note_answer(clock.now_s() + _LOOK_S)
            elif reply is not None and self._lose(node_id, reply):
                self._start(node_id)
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """End all writers. Idempotent. Blocks: up to 3 s."""
        closing = [kept.handle.close.remote() for kept in self.by_node.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for node_id in list(self.by_node):
            self.forget(node_id)

    def _ask(self, node_ids: Collection[str], timeout_s: float) -> tuple[dict[str, str], list[str]]:
        """Return the addresses that arrived in time, and the nodes whose keeper is dead."""
        for node_id in node_ids:
            if node_id not in self.by_node:
                self._start(node_id)
        refs = {node_id: self.by_node[node_id].handle.address.remote() for node_id in node_ids}
        found, gone = {}, []
        for node_id, reply in await_replies(refs, timeout_s).items():
            if reply.fault is None:
                found[node_id] = reply.value
                self.by_node[node_id].has_started = True
            elif reply.fault == ReplyFault.LATE:
                log.log(
                    logging.WARNING if timeout_s > 0 else logging.DEBUG,
                    "node %s has no checkpoint writer yet: its actors keep no checkpoints in memory",
                    node_id[:8],
                )
            else:
                self._lose(node_id, reply)
                gone.append(node_id)
        return found, gone

    def _start(self, node_id: str) -> None:
        address = f"{self._name}-{node_id}"
        self.by_node[node_id] = Keeper(start_on(node_id, NodeKeeper, {"address": address}, **self._options))

    def _lose(self, node_id: str, reply: Reply) -> bool:
        """Drop a dead keeper; return whether another one can replace it."""
        had_started = self.by_node[node_id].has_started
        self.forget(node_id)
        log.warning("node %s has no checkpoint writer (%s)", node_id[:8], describe_error(reply.error))
        node_lives = any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
        if had_started and node_lives:  # the recovery reports a lost node
            self._lost.append(node_id)
        return had_started and node_lives
