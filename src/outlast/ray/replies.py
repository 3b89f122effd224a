"""Replies of actors: reading, waiting with a limit, and repeated pings."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import ray
from ray import exceptions

from outlast import clock

log = logging.getLogger(__name__)
_Key = TypeVar("_Key")
_FETCH_S = 60.0
"""Limit for fetching a ready reply to this node."""
_TEXT_LENGTH = 400
_DEATH = "The actor is dead because "
"""Prefix of the line in which Ray reports why an actor is dead."""
_AGAIN_S = 0.1
"""Delay after a ping that did not reach its actor."""


class ReplyFault(StrEnum):
    """Why a reply has no value."""

    DIED = "died"
    """Ray reports that the actor or its node is dead."""
    UNREACHABLE = "unreachable"
    """The actor could not be reached, or its reply was lost; it may be alive."""
    RAISED = "raised"
    LATE = "late"
    """No reply in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    value: Any = None
    fault: ReplyFault | None = None
    error: BaseException | None = None
    """The method's exception, or Ray's."""


def read_reply(ref: Any) -> Reply:
    """Return the reply of a ready reference. Blocks: while the value is fetched from its node."""
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
    """Return the replies of several remote calls; ``LATE`` for those that did not come in time.

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
    """Return the reply of a reference if it is ready. Blocks: while the value is fetched."""
    return read_reply(ref) if ray.wait([ref], timeout=0, fetch_local=False)[0] else None


@dataclass(slots=True, kw_only=True)
class ActorPing:
    """Repeated pings of one actor, one at a time."""

    due_s: float = 0.0
    """Monotonic time of the next ping, if none is pending."""
    asked_s: float = math.inf
    """Monotonic time since which the actor has not replied; infinite = it has."""
    ref: Any = None
    """Reference of the pending ping."""
    error: BaseException | None = None
    """Why the last ping since then failed."""

    def poll(self, method: Any, timeout_s: float = math.inf) -> Reply | None:
        """Return the reply, or the fault: ``DIED``, or ``LATE`` after ``timeout_s``; ping if due.

        A ping that raised or did not reach the actor, which may be alive, is repeated soon.

        Blocks: while the value is fetched.
        """
        reply, now_s = None, clock.now_s()
        if self.ref is not None:
            reply = reply_if_ready(self.ref)
        elif now_s >= self.due_s:
            self.ref, self.asked_s = method.remote(), min(self.asked_s, now_s)
        if reply is not None and reply.fault in (ReplyFault.UNREACHABLE, ReplyFault.RAISED):
            log.debug("a ping failed: %s", describe_error(reply.error))
            self.ref, self.due_s, self.error, reply = None, now_s + _AGAIN_S, reply.error, None
        if reply is None and (silent_s := now_s - self.asked_s) >= timeout_s:
            error = self.error or TimeoutError(f"no response for {silent_s:.0f} s")
            return Reply(fault=ReplyFault.LATE, error=error)
        return reply

    def note_answer(self, due_s: float) -> None:
        """Record a reply and schedule the next ping."""
        self.ref, self.asked_s, self.error, self.due_s = None, math.inf, None, due_s


def describe_error(error: BaseException | None) -> str:
    """Return an error in one line; of Ray's report on a dead actor only the reason."""
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
