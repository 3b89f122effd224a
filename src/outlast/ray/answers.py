"""Answers of remote calls, with a limit on every wait: a value, or what went wrong, told apart by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import ray
from ray import exceptions

from outlast import clock

__all__ = ["Answer", "Fault", "await_answers", "describe_error", "read_answer"]

_Key = TypeVar("_Key")
_FETCH_S = 60.0
"""For bringing an answer that is ready to this node."""
_TEXT_LENGTH = 400
_DEATH = "The actor is dead because "
"""Begins the line in which Ray says why an actor is dead."""


class Fault(StrEnum):
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
class Answer:
    """What came of a remote call."""

    value: Any = None
    fault: Fault | None = None
    error: BaseException | None = None
    """What the method raised, or what Ray says."""


def read_answer(ref: Any) -> Answer:
    """Return the answer behind a reference that is ready.

    Blocks: while the value is fetched from its node.
    """
    try:
        return Answer(value=ray.get(ref, timeout=_FETCH_S))
    except exceptions.RayTaskError as error:
        return Answer(fault=Fault.RAISED, error=error.cause if isinstance(error.cause, BaseException) else error)
    except exceptions.ActorUnavailableError as error:
        return Answer(fault=Fault.UNREACHABLE, error=error)
    except (exceptions.RayActorError, exceptions.NodeDiedError) as error:
        return Answer(fault=Fault.DIED, error=error)
    except exceptions.RayError as error:  # lost with its node, or not fetched in time
        return Answer(fault=Fault.UNREACHABLE, error=error)
    except Exception as error:  # noqa: BLE001 - an exception or a value that cannot be read here
        return Answer(fault=Fault.RAISED, error=error)


def await_answers(refs: Mapping[_Key, Any], timeout_s: float) -> dict[_Key, Answer]:
    """Return the answers of several remote calls, those that came in time and ``LATE`` for the others.

    Blocks: until all have answered, at most ``timeout_s``.
    """
    deadline_s = clock.now_s() + timeout_s
    answers: dict[_Key, Answer] = {}
    left = dict(refs)
    while left:
        wait_s = max(0.0, deadline_s - clock.now_s())
        ready, _ = ray.wait(list(left.values()), num_returns=len(left), timeout=wait_s, fetch_local=False)
        for key in [key for key, ref in left.items() if ref in ready]:
            answers[key] = read_answer(left.pop(key))
        if left and clock.now_s() >= deadline_s:
            break
    return answers | dict.fromkeys(left, Answer(fault=Fault.LATE))


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
