"""Remote calls of actors: replies with a limit on every wait, and the watch over a call of all actors of a group.

While a call runs the watch asks the actors for their status: a dead, a silent and a hanging actor are told apart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import ray
from ray import exceptions

from outlast import clock
from outlast.config import RecoveryConfig
from outlast.policy.causes import Position, find_culprit
from outlast.ray.protocol import ActorIdentity, ActorStatus, CallFailed, FailureKind

__all__ = [
    "Actor",
    "Gathered",
    "Reply",
    "ReplyFault",
    "Watch",
    "await_replies",
    "describe_error",
    "lose",
    "read_reply",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actor:
    """One living actor that has started."""

    number: int
    """Counts the actors of a group; never used again."""
    bundle: int
    """The bundle of resources that it occupies."""
    handle: Any
    """Ray's handle of its shell."""
    hello: ActorIdentity

    @property
    def node(self) -> str:
        """Ray's id of its node."""
        return self.hello.node_id

    @property
    def pid(self) -> int:
        """Process id on its node."""
        return self.hello.pid


_Key = TypeVar("_Key")
_FETCH_S = 60.0
"""For bringing an answer that is ready to this node."""
_TEXT_LENGTH = 400
_DEATH = "The actor is dead because "
"""Begins the line in which Ray says why an actor is dead."""


class ReplyFault(StrEnum):
    """Why there is no value."""

    DIED = "died"
    """The actor, or its node, is gone: Ray says so."""
    UNREACHABLE = "unreachable"
    """The actor could not be reached, or its answer was lost; it may live."""
    RAISED = "raised"
    """The method raised."""
    LATE = "late"
    """There was no answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a remote call."""

    value: Any = None
    fault: ReplyFault | None = None
    error: BaseException | None = None
    """What the method raised, or what Ray says."""


def read_reply(ref: Any) -> Reply:
    """Return the answer behind a reference that is ready.

    Blocks: while the value is fetched from its node.
    """
    try:
        return Reply(value=ray.get(ref, timeout=_FETCH_S))
    except exceptions.RayTaskError as error:
        return Reply(fault=ReplyFault.RAISED, error=error.cause if isinstance(error.cause, BaseException) else error)
    except exceptions.ActorUnavailableError as error:
        return Reply(fault=ReplyFault.UNREACHABLE, error=error)
    except (exceptions.RayActorError, exceptions.NodeDiedError) as error:
        return Reply(fault=ReplyFault.DIED, error=error)
    except exceptions.RayError as error:  # lost with its node, or not fetched in time
        return Reply(fault=ReplyFault.UNREACHABLE, error=error)
    except Exception as error:  # noqa: BLE001 - an exception or a value that cannot be read here
        return Reply(fault=ReplyFault.RAISED, error=error)


def await_replies(refs: Mapping[_Key, Any], timeout_s: float) -> dict[_Key, Reply]:
    """Return the answers of several remote calls, those that came in time and ``LATE`` for the others.

    Blocks: until all have answered, at most ``timeout_s``.
    """
    deadline_s = clock.now_s() + timeout_s
    answers: dict[_Key, Reply] = {}
    left = dict(refs)
    while left:
        wait_s = max(0.0, deadline_s - clock.now_s())
        ready, _ = ray.wait(list(left.values()), num_returns=len(left), timeout=wait_s, fetch_local=False)
        for key in [key for key, ref in left.items() if ref in ready]:
            answers[key] = read_reply(left.pop(key))
        if left and clock.now_s() >= deadline_s:
            break
    return answers | dict.fromkeys(left, Reply(fault=ReplyFault.LATE))


def describe_error(error: BaseException | None) -> str:
    """Return an error in one line: for what Ray says of a dead actor only the reason."""
    if error is None:
        return "no answer"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, exceptions.RayError):
        for line in lines:
            if line.startswith(_DEATH):
                reason, _, details = line.removeprefix(_DEATH).partition(" Worker exit type: ")
                return reason.rstrip(".") + (f" ({details.split()[0]})" if details else "")
        return (lines or [type(error).__name__])[-1][:_TEXT_LENGTH]
    return f"{type(error).__name__}: {' '.join(lines)}"[:_TEXT_LENGTH]


log = logging.getLogger(__name__)
_AFTER_DUE_S = 0.02
"""An actor is asked so long after a timeout of its own was due."""
_SHORTEST_S = 0.05
"""Between two questions to one actor."""


def lose(rank: int, actor: Actor, kind: LossKind, evidence: str, detected_after_s: float | None = None) -> LostActor:
    """Return the entry of an actor in a report."""
    return LostActor(
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
    failed: dict[int, CallFailed] = field(default_factory=dict)
    """Rank to why its call did not end well, in the order in which they said so; they live."""
    lost: dict[int, LostActor] = field(default_factory=dict)
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
    pulse: ActorStatus | None = None


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
            answer = read_reply(waiting.pop(rank))
            if answer.fault is None:
                if isinstance(answer.value, CallFailed):
                    gathered.failed[rank] = answer.value
                else:
                    gathered.values[rank] = answer.value
            elif answer.fault == ReplyFault.DIED:
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
            elif answer is not None and answer.fault == ReplyFault.DIED:
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

    def _answer_to(self, look: _Look) -> Reply | None:
        ready, _ = ray.wait([look.ref], timeout=0, fetch_local=False)
        return read_reply(look.ref) if ready else None

    def _note_pulse(self, look: _Look, pulse: ActorStatus) -> None:
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
        answers = await_replies(refs, self._config.examine_timeout)
        for rank, answer in answers.items():
            if answer.fault == ReplyFault.DIED:
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
            gathered.failed |= {rank: CallFailed(kind=FailureKind.PEER, summary=text) for rank in waiting}
            return
        rank = culprit.position.global_rank
        text, open_s = exceeded.get(rank) or next(iter(exceeded.values()))
        reason = culprit.reason.partition(": ")[2]  # what comes before says which rank it is
        kind = LossKind.HUNG if culprit.position.responsive else LossKind.SILENT
        gathered.lost[rank] = lose(rank, members[rank], kind, f"{text}; {reason}", open_s)


def _longest_open(pulse: ActorStatus) -> float:
    return max((open_s for _, open_s in pulse.sections), default=0.0)


class LossKind(StrEnum):
    """How an actor failed."""

    DIED = "died"
    """Its process or its node ended."""
    SILENT = "silent"
    """It did not answer: stopped, holding the interpreter's lock, or cut off."""
    HUNG = "hung"
    """It exceeded the timeout of a section, and the others waited for it."""
    STUCK = "stuck"
    """It did not leave the interrupted call, or did not join in time."""
    RAISED = "raised"
    """Its call raised; its process is kept."""


class LostActor(msgspec.Struct, frozen=True, kw_only=True):
    """Who failed, and how that is known."""

    rank: int
    node: str
    pid: int
    kind: LossKind
    evidence: str
    """For people."""
    detected_after_s: float | None = None
    """Seconds from its last sign of life, or from the begin of the section that it hung in; ``None``: not known."""
