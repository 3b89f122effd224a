"""The watch over a call: waits for everybody's answer, and sees meanwhile who died, is silent, or hangs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from outlast import clock
from outlast.config import RecoveryConfig
from outlast.policy.causes import Position, find_culprit
from outlast.ray.actor import Actor
from outlast.ray.answers import Answer, Fault, await_answers, describe_error, read_answer
from outlast.ray.report import LossKind, Lost
from outlast.ray.words import Failed, FailureKind, Pulse

__all__ = ["Gathered", "Watch", "lose"]

log = logging.getLogger(__name__)
_AFTER_DUE_S = 0.02
"""An actor is asked so long after a timeout of its own was due."""
_SHORTEST_S = 0.05
"""Between two questions to one actor."""


def lose(rank: int, actor: Actor, kind: LossKind, evidence: str, detected_after_s: float | None = None) -> Lost:
    """Return the entry of an actor in a report."""
    return Lost(
        rank=rank,
        node=actor.node,
        pid=actor.pid,
        kind=kind,
        evidence=evidence,
        detected_after_s=None if detected_after_s is None else round(detected_after_s, 3),
    )


@dataclass(slots=True, kw_only=True)
class Gathered:
    """What came of a call of all actors."""

    values: dict[int, Any] = field(default_factory=dict)
    """Rank to what it answered."""
    failed: dict[int, Failed] = field(default_factory=dict)
    """Rank to why its call did not end well, in the order in which they said so; they live."""
    lost: dict[int, Lost] = field(default_factory=dict)
    """Rank to why its actor must be replaced."""
    unclear: set[int] = field(default_factory=set)
    """Ranks whose answer was lost; they may live."""

    @property
    def is_whole(self) -> bool:
        """Whether everybody answered well."""
        return not (self.failed or self.lost or self.unclear)


@dataclass(slots=True, kw_only=True)
class _Look:
    """What is known of one actor's life."""

    alive_s: float
    """When it was last known to answer."""
    due_s: float
    """When it is to be asked again."""
    ref: Any = None
    """The question that it has not answered."""
    asked_s: float = 0.0
    overdue_s: float = math.inf
    """When a timeout of its own will be exceeded, as it said itself."""
    pulse: Pulse | None = None


class Watch:
    """Wait for the answers of all actors of an incarnation to one call, or for the first sign of trouble.

    Args:
        config: Intervals and timeouts.
        idle: Called at least every ``ping_interval``; may raise to end the wait.

    Thread: one.
    """

    def __init__(self, config: RecoveryConfig, idle: Callable[[], None]) -> None:
        self._config = config
        self._idle = idle

    def gather(self, members: Mapping[int, Actor], refs: Mapping[int, Any], *, timeout_s: float = math.inf) -> Gathered:
        """Return the answers; at the first sign of trouble, with what is known until then.

        Args:
            members: Rank to actor.
            refs: Rank to the reference of its answer.
            timeout_s: Seconds after which who has not answered is lost.

        Blocks: until all have answered or trouble is seen, at most ``timeout_s``.
        """
        now_s = clock.now_s()
        begun_s, gathered, waiting = now_s, Gathered(), dict(refs)
        looks = {rank: _Look(alive_s=now_s, due_s=now_s + self._config.ping_interval) for rank in refs}
        while waiting:
            self._await_something(waiting, looks, begun_s + timeout_s)
            self._idle()
            self._read(waiting, members, gathered)
            self._look(waiting, members, looks, gathered)
            if not gathered.is_whole:
                break
            if clock.now_s() - begun_s >= timeout_s:
                for rank in waiting:
                    text = f"no answer within {timeout_s:g} s"
                    gathered.lost[rank] = lose(rank, members[rank], LossKind.STUCK, text, timeout_s)
                break
        return gathered

    def _await_something(self, waiting: Mapping[int, Any], looks: Mapping[int, _Look], deadline_s: float) -> None:
        refs = [*waiting.values(), *(looks[rank].ref for rank in waiting if looks[rank].ref is not None)]
        now_s = clock.now_s()
        wake_s = min(deadline_s, now_s + self._config.ping_interval)
        for rank in waiting:
            look = looks[rank]
            wake_s = min(wake_s, look.due_s if look.ref is None else self._silent_s(look))
        ray.wait(refs, num_returns=1, timeout=max(0.001, wake_s - now_s), fetch_local=False)

    def _read(self, waiting: dict[int, Any], members: Mapping[int, Actor], gathered: Gathered) -> None:
        ready, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=0, fetch_local=False)
        for rank in [rank for rank, ref in waiting.items() if ref in ready]:
            answer = read_answer(waiting.pop(rank))
            if answer.fault is None:
                if isinstance(answer.value, Failed):
                    gathered.failed[rank] = answer.value
                else:
                    gathered.values[rank] = answer.value
            elif answer.fault == Fault.DIED:
                text = describe_error(answer.error)
                gathered.lost[rank] = lose(rank, members[rank], LossKind.DIED, text)
            else:
                log.debug("the answer of rank %d was lost: %s", rank, describe_error(answer.error))
                gathered.unclear.add(rank)

    def _look(
        self, waiting: Mapping[int, Any], members: Mapping[int, Actor], looks: Mapping[int, _Look], gathered: Gathered
    ) -> None:
        """Ask who is to be asked, and see who answered."""
        exceeded: dict[int, tuple[str, float]] = {}
        for rank in waiting:
            look, actor = looks[rank], members[rank]
            now_s = clock.now_s()
            if look.ref is None:
                if now_s >= look.due_s:
                    look.ref, look.asked_s = actor.handle.pulse.remote(), now_s
                continue
            answer = self._answer_to(look)
            if answer is not None and answer.fault is None:
                self._note_pulse(look, answer.value)
                if answer.value.exceeded:
                    exceeded[rank] = (answer.value.exceeded[0], _longest_open(answer.value))
            elif answer is not None and answer.fault == Fault.DIED:
                text = describe_error(answer.error)
                gathered.lost[rank] = lose(rank, actor, LossKind.DIED, text, now_s - look.alive_s)
            elif now_s - look.asked_s >= self._config.ping_timeout:
                text = f"no answer for {now_s - look.asked_s:.1f} s"
                gathered.lost[rank] = lose(rank, actor, LossKind.SILENT, text, now_s - look.alive_s)
            elif now_s >= self._silent_s(look):
                assert look.pulse is not None
                exceeded[rank] = (
                    f"a timeout is exceeded, and no answer for {now_s - look.asked_s:.1f} s",
                    _longest_open(look.pulse) + now_s - look.alive_s,
                )
        if exceeded and gathered.is_whole:
            self._name_culprit(waiting, members, looks, exceeded, gathered)

    def _answer_to(self, look: _Look) -> Answer | None:
        ready, _ = ray.wait([look.ref], timeout=0, fetch_local=False)
        return read_answer(look.ref) if ready else None

    def _note_pulse(self, look: _Look, pulse: Pulse) -> None:
        now_s = clock.now_s()
        look.ref, look.pulse, look.alive_s = None, pulse, now_s
        look.overdue_s = math.inf if pulse.due_in_s is None else now_s + pulse.due_in_s
        look.due_s = max(now_s + _SHORTEST_S, min(now_s + self._config.ping_interval, look.overdue_s + _AFTER_DUE_S))

    def _silent_s(self, look: _Look) -> float:
        """Return when an unanswered question shows that something is wrong."""
        overdue_s = max(look.overdue_s, look.asked_s) + self._config.examine_timeout
        return min(overdue_s, look.asked_s + self._config.ping_timeout)

    def _name_culprit(
        self,
        waiting: Mapping[int, Any],
        members: Mapping[int, Actor],
        looks: Mapping[int, _Look],
        exceeded: Mapping[int, tuple[str, float]],
        gathered: Gathered,
    ) -> None:
        """Find out for whom the others wait, if for anybody, once a timeout is exceeded."""
        refs = {rank: members[rank].handle.examine.remote() for rank in waiting}
        answers = await_answers(refs, self._config.examine_timeout)
        for rank, answer in answers.items():
            if answer.fault == Fault.DIED:
                gathered.lost[rank] = lose(rank, members[rank], LossKind.DIED, describe_error(answer.error))
        if gathered.lost:
            return
        positions = {rank: answer.value for rank, answer in answers.items() if answer.value is not None}
        lowest = min((one.iteration for one in positions.values()), default=0)
        for rank in waiting:
            if rank not in positions:
                actor, answers_now = members[rank], answers[rank].fault is None
                positions[rank] = Position(
                    node=actor.node, global_rank=rank, pid=actor.pid, iteration=lowest, responsive=answers_now
                )
        culprit = find_culprit(positions.values())
        if culprit.position is None:
            # Nobody is to be replaced: all leave the call, and it is repeated, once.
            text = f"{next(iter(exceeded.values()))[0]}; {culprit.reason}"
            gathered.failed |= {rank: Failed(kind=FailureKind.PEER, summary=text) for rank in waiting}
            return
        rank = culprit.position.global_rank
        text, open_s = exceeded.get(rank) or next(iter(exceeded.values()))
        reason = culprit.reason.partition(": ")[2]  # what comes before says which rank it is
        kind = LossKind.HUNG if culprit.position.responsive else LossKind.SILENT
        gathered.lost[rank] = lose(rank, members[rank], kind, f"{text}; {reason}", open_s)


def _longest_open(pulse: Pulse) -> float:
    return max((open_s for _, open_s in pulse.sections), default=0.0)
