"""Replies of actors: read, waited for with a limit, and asked for again and again to know whether an actor lives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import ray
from ray import exceptions

from outlast import clock

_Key = TypeVar("_Key")
_FETCH_S = 60.0
"""For bringing a reply that is ready to this node."""
_TEXT_LENGTH = 400
_DEATH = "The actor is dead because "
"""Begins the line in which Ray reports why an actor is dead."""
_AGAIN_S = 0.1
"""From a question that did not reach its actor to the next."""


class ReplyFault(StrEnum):
    """Why there is no value."""

    DIED = "died"
    """The actor, or its node, is gone, as Ray reports."""
    UNREACHABLE = "unreachable"
    """The actor could not be reached, or its reply was lost; it may live."""
    RAISED = "raised"
    """The method raised."""
    LATE = "late"
    """There was no reply in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a remote call."""

    value: Any = None
    fault: ReplyFault | None = None
    error: BaseException | None = None
    """What the method raised, or what Ray reports."""


def read_reply(ref: Any) -> Reply:
    """Return the reply behind a reference that is ready.

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
    """Return the replies of several remote calls, those that came in time and ``LATE`` for the others.

    Blocks: until all have replied, at most ``timeout_s``.
    """
    deadline_s = clock.now_s() + timeout_s
    replies: dict[_Key, Reply] = {}
    left = dict(refs)
    while left:
        wait_s = max(0.0, deadline_s - clock.now_s())
        ready, _ = ray.wait(list(left.values()), num_returns=len(left), timeout=wait_s, fetch_local=False)
        for key in [key for key, ref in left.items() if ref in ready]:
            replies[key] = read_reply(left.pop(key))
        if left and clock.now_s() >= deadline_s:
            break
    return replies | dict.fromkeys(left, Reply(fault=ReplyFault.LATE))


def reply_if_ready(ref: Any) -> Reply | None:
    """Return the reply behind a reference; ``None`` = there is none yet. Blocks: while the value is fetched."""
    return read_reply(ref) if ray.wait([ref], timeout=0, fetch_local=False)[0] else None


@dataclass(slots=True, kw_only=True)
class ActorPing:
    """A question that one actor is asked again and again, to know whether it lives; one at a time."""

    due_s: float = 0.0
    """When it is asked again, if no reply is waited for."""
    asked_s: float = math.inf
    """Since when it is unanswered; infinite = it is answered."""
    ref: Any = None
    """Reference to the reply that is waited for."""

    def poll(self, method: Any) -> Reply | None:
        """Return the reply if it has come; ask if that is due. Blocks: while the value is fetched."""
        now_s = clock.now_s()
        if self.ref is None:
            if now_s >= self.due_s:
                self.ref, self.asked_s = method.remote(), min(self.asked_s, now_s)
            return None
        reply = reply_if_ready(self.ref)
        if reply is not None and reply.fault == ReplyFault.UNREACHABLE:
            self.note_failure()  # it may live
            return None
        return reply

    def note_failure(self) -> None:
        """Note that asking raised an error: it is asked again, and is silent since it was asked first."""
        self.ref, self.due_s = None, clock.now_s() + _AGAIN_S

    def note_answer(self, due_s: float) -> None:
        """Note that the question was answered, and when it is to be asked again."""
        self.ref, self.asked_s, self.due_s = None, math.inf, due_s


def describe_error(error: BaseException | None) -> str:
    """Return an error in one line: of Ray's report on a dead actor only the reason."""
    if error is None:
        return "no response"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, exceptions.RayError):
        for line in lines:
            if line.startswith(_DEATH):
                reason, _, details = line.removeprefix(_DEATH).partition(" Worker exit type: ")
                return reason.rstrip(".") + (f" ({details.split()[0]})" if details else "")
        return (lines or [type(error).__name__])[-1][:_TEXT_LENGTH]
    return f"{type(error).__name__}: {' '.join(lines)}"[:_TEXT_LENGTH]
