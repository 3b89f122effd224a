"""Monitors a call of all actors of an incarnation, and distinguishes dead, silent and hanging actors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import ray

from outlast import clock
from outlast.config import RecoveryConfig
from outlast.policy.root_cause import Position, find_root_cause
from outlast.ray.pool import Actor, Pool
from outlast.ray.protocol import ActorStatus, CallFailed, FailureKind
from outlast.ray.replies import ActorPing, ReplyFault, await_replies, describe_error, read_reply

log = logging.getLogger(__name__)
_AFTER_DUE_S = 0.02
"""Delay of a status query after an actor's timeout is due."""
_SHORTEST_S = 0.05
"""Minimum time between two status queries of an actor."""


class LossKind(StrEnum):
    """How an actor was lost."""

    DIED = "died"
    """The process or node ended."""
    SILENT = "silent"
    """No response: the process is stopped, holds the interpreter lock, or is disconnected."""
    HUNG = "hung"
    """The actor exceeded a section's timeout while the others waited for it."""
    STUCK = "stuck"
    """The actor did not leave the interrupted call, or did not join in time."""
    RAISED = "raised"
    """The call raised; the process is kept."""
    DRAINED = "drained"
    """The actor works, but had to leave a node that Ray drains."""


class LostActor(msgspec.Struct, frozen=True, kw_only=True):
    """A lost actor and the evidence."""

    rank: int
    node: str
    pid: int
    kind: LossKind
    evidence: str
    detected_after_s: float | None = None
    """Seconds since its last heartbeat, or since the start of the section in which it hung; ``None``: unknown."""


def lose(rank: int, actor: Actor, kind: LossKind, evidence: str, detected_after_s: float | None = None) -> LostActor:
    after_s = None if detected_after_s is None else round(detected_after_s, 3)
    return LostActor(rank=rank, node=actor.node, pid=actor.pid, kind=kind, evidence=evidence, detected_after_s=after_s)


@dataclass(slots=True, kw_only=True)
class Gathered:
    """The result of a call of all actors."""

    values: dict[int, Any] = field(default_factory=dict)
    """Replies by rank."""
    failed: dict[int, CallFailed] = field(default_factory=dict)
    """Failed calls by rank, in order of arrival; these actors are alive."""
    lost: dict[int, LostActor] = field(default_factory=dict)
    """Ranks whose actor must be replaced."""
    unclear: set[int] = field(default_factory=set)
    """Ranks whose reply was lost; they may be alive."""

    @property
    def is_whole(self) -> bool:
        return not (self.failed or self.lost or self.unclear)


@dataclass(slots=True, kw_only=True)
class AwaitedActor:
    """One actor with a pending reply."""

    actor: Actor
    call: Any
    """Reference to the pending reply."""
    alive_s: float
    """Monotonic time of its last response."""
    ping: ActorPing
    """Pings its status."""
    overdue_s: float = math.inf
    """Monotonic time at which one of its timeouts will be exceeded, according to its status."""
    open_s: float = 0.0
    """Seconds that its longest open section was open, according to its status."""


class Watch:
    """Waits for the replies of all actors to one call, or for the first failure. Thread: one."""

    def __init__(self, config: RecoveryConfig, pool: Pool) -> None:
        self._config, self._pool = config, pool

    def gather(
        self,
        members: Mapping[int, Actor],
        refs: Mapping[int, Any],
        *,
        timeout_s: float = math.inf,
        leaves_nodes: bool = False,
    ) -> Gathered:
        """Return the replies; after the first failure, those received until then.

        Blocks: until all have replied or a failure is detected, at most ``timeout_s``.
        """
        now_s = begun_s = clock.now_s()
        due_s, gathered = now_s + self._config.ping_interval, Gathered()
        waiting = {
            rank: AwaitedActor(actor=members[rank], call=ref, alive_s=now_s, ping=ActorPing(due_s=due_s))
            for rank, ref in refs.items()
        }
        while waiting:
            self.wait_for_event(waiting, begun_s + timeout_s)
            self._pool.idle()
            self._read(waiting, gathered)
            self.check(waiting, gathered)
            if leaves_nodes and waiting and gathered.is_whole:
                for rank, text in self._pool.due_to_leave(members).items():
                    gathered.lost[rank] = lose(rank, members[rank], LossKind.DRAINED, text)
            if not gathered.is_whole:
                break
            if clock.now_s() - begun_s >= timeout_s:
                for rank, one in waiting.items():
                    text = f"no response within {timeout_s:g} s"
                    gathered.lost[rank] = lose(rank, one.actor, LossKind.STUCK, text, timeout_s)
                break
        return gathered

    def wait_for_event(self, waiting: Mapping[int, AwaitedActor], deadline_s: float) -> None:
        some = waiting.values()
        refs = [*(one.call for one in some), *(one.ping.ref for one in some if one.ping.ref is not None)]
        now_s = clock.now_s()
        wake_s = min(deadline_s, now_s + self._config.ping_interval)
        for one in some:
            wake_s = min(wake_s, one.ping.due_s if one.ping.ref is None else self.silent_s(one))
        ray.wait(refs, num_returns=1, timeout=max(0.001, wake_s - now_s), fetch_local=False)

    def _read(self, waiting: dict[int, AwaitedActor], gathered: Gathered) -> None:
        refs = [one.call for one in waiting.values()]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        for rank in [rank for rank, one in waiting.items() if one.call in ready]:
            one = waiting.pop(rank)
            reply = read_reply(one.call)
            if reply.fault is None and isinstance(reply.value, CallFailed):
                gathered.failed[rank] = reply.value
            elif reply.fault is None:
                gathered.values[rank] = reply.value
            elif reply.fault == ReplyFault.DIED:
                gathered.lost[rank] = lose(rank, one.actor, LossKind.DIED, describe_error(reply.error))
            else:
                log.debug("rank %d: the reply was lost: %s", rank, describe_error(reply.error))
                gathered.unclear.add(rank)

    def check(self, waiting: Mapping[int, AwaitedActor], gathered: Gathered) -> None:
        """Query the status of due actors and process the responses."""
        exceeded: dict[int, tuple[str, float]] = {}
        for rank, one in waiting.items():
            reply = one.ping.poll(one.actor.handle.status, self._config.ping_timeout)
            now_s = clock.now_s()
            silent = f"no response for {now_s - one.ping.asked_s:.1f} s"
            if reply is not None and reply.fault is None:
                self._note_status(one, reply.value)
                if reply.value.exceeded:
                    exceeded[rank] = (reply.value.exceeded[0], one.open_s)
            elif reply is not None:
                is_dead = reply.fault == ReplyFault.DIED
                kind, text = (LossKind.DIED, describe_error(reply.error)) if is_dead else (LossKind.SILENT, silent)
                gathered.lost[rank] = lose(rank, one.actor, kind, text, now_s - one.alive_s)
            elif now_s >= self.silent_s(one):
                text = f"a timeout is exceeded, and {silent}"
                exceeded[rank] = (text, one.open_s + now_s - one.alive_s)
        if exceeded and gathered.is_whole:
            self._find_root_cause(waiting, exceeded, gathered)

    def _note_status(self, one: AwaitedActor, status: ActorStatus) -> None:
        now_s = clock.now_s()
        one.alive_s, one.open_s = now_s, max((open_s for _, open_s in status.sections), default=0.0)
        one.overdue_s = math.inf if status.due_in_s is None else now_s + status.due_in_s
        due_s = min(now_s + self._config.ping_interval, one.overdue_s + _AFTER_DUE_S)
        one.ping.note_answer(max(now_s + _SHORTEST_S, due_s))

    def silent_s(self, one: AwaitedActor) -> float:
        """Return when an unanswered query indicates a failure."""
        overdue_s = max(one.overdue_s, one.ping.asked_s) + self._config.examine_timeout
        return min(overdue_s, one.ping.asked_s + self._config.ping_timeout)

    def _find_root_cause(
        self, waiting: Mapping[int, AwaitedActor], exceeded: Mapping[int, tuple[str, float]], gathered: Gathered
    ) -> None:
        """After an exceeded timeout, identify the actor that the others wait for, if any."""
        refs = {rank: one.actor.handle.examine.remote() for rank, one in waiting.items()}
        replies = await_replies(refs, self._config.examine_timeout)
        for rank, reply in replies.items():
            if reply.fault == ReplyFault.DIED:
                gathered.lost[rank] = lose(rank, waiting[rank].actor, LossKind.DIED, describe_error(reply.error))
        if gathered.lost:
            return
        positions = {rank: reply.value for rank, reply in replies.items() if reply.value is not None}
        lowest = min((one.iteration for one in positions.values()), default=0)
        for rank in waiting.keys() - positions.keys():
            actor, is_responsive = waiting[rank].actor, replies[rank].fault is None
            positions[rank] = Position(
                node=actor.node, global_rank=rank, pid=actor.pid, iteration=lowest, responsive=is_responsive
            )
        root_cause = find_root_cause(positions.values())
        if root_cause.position is None:
            # No actor is replaced: all leave the call, which is repeated once.
            text = f"{next(iter(exceeded.values()))[0]}; {root_cause.reason}"
            gathered.failed |= {rank: CallFailed(kind=FailureKind.PEER, summary=text) for rank in waiting}
            return
        rank = root_cause.position.global_rank
        text, open_s = exceeded.get(rank) or next(iter(exceeded.values()))
        reason = root_cause.reason.partition(": ")[2]  # the prefix names the rank
        kind = LossKind.HUNG if root_cause.position.responsive else LossKind.SILENT
        gathered.lost[rank] = lose(rank, waiting[rank].actor, kind, f"{text}; {reason}", open_s)
