"""Causes: which of several workers failed by itself, and whether a restart can help against it.

One rank's exception makes its peers fail in their collectives a moment later; whoever ends first is not always the
one that began. And a script that cannot work (a module that is missing, a wrong setting) fails on all ranks alike
each time that it is started: restarting it only repeats the traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.incidents import Cause

__all__ = ["Ended", "find_first", "is_consequence", "is_permanent", "permanent_cause", "wait_s"]

SAME_FAULT_S = 5.0
"""How long the workers of a node have to fail alike, once one failed in a way that a restart cannot mend."""
FIRST_FAULT_S = 0.3
"""How long a node waits for the worker that failed by itself, where only one was seen that lost a peer."""
PLAIN_START_S = 60.0
"""A script that reports no steps is taken to be before its first one for so long."""

_LATE_NS = 1 << 62
_PEERS = ("PeerLost", "DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_TEXT = re.compile(
    r"connection (closed|reset)|closed by peer|reset by peer|broken pipe|remote process exited|ncclRemoteError"
    r"|application timeout caused pair closure|timed out waiting \d+ ?ms for (recv|send)|peer .* (is gone|left|closed)",
    re.IGNORECASE,
)
_STATIC = frozenset({"SyntaxError", "ImportError", "FileNotFoundError", "NotADirectoryError", "ConfigError"})
"""What is wrong with a script, its surroundings, or how it was called, whatever else it does."""
_BEFORE_STEPS = frozenset({"NameError", "AttributeError", "TypeError", "ValueError", "LookupError", "PermissionError"})
"""What is wrong with a script that is known to be before its first step."""
_CHECKPOINT = frozenset({"Mismatch", "Unavailable", "Untrusted"})
"""What is wrong with what was to be loaded, or with where it lies."""
_PASSING = frozenset({"UnicodeError", "JSONDecodeError"})
"""ValueErrors that a file which is still being written can cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker that ended with anything but 0, or is about to."""

    rank: int
    cause: Cause | None = None
    """What it recorded; ``None`` = nothing."""
    ended_ns: int = 0
    """When its end was seen; 0 = it still runs."""


def is_consequence(cause: Cause | None) -> bool:
    """Return whether a worker failed because a peer did."""
    if cause is None:
        return False
    names = {cause.type.rpartition(".")[2], *cause.bases}
    if not names.isdisjoint(_PEERS):
        return True
    return not names.isdisjoint({"RuntimeError", "OSError"}) and _PEER_TEXT.search(cause.text) is not None


def is_permanent(cause: Cause | None, *, has_session: bool) -> bool:
    """Return whether a script that fails so before its first step fails so again however often it is started.

    Args:
        cause: What it failed with.
        has_session: It tells of its steps, so that it is known to be before the first one. Of a plain script only what
            has nothing to do with its steps counts.
    """
    if cause is None or is_consequence(cause):
        return False
    names = {cause.type.rpartition(".")[2], *cause.bases}
    wrong = _STATIC | _CHECKPOINT | (_BEFORE_STEPS if has_session else frozenset())
    return cause.is_usage_error or (not names.isdisjoint(wrong) and names.isdisjoint(_PASSING))


def permanent_cause(causes: Sequence[Cause | None], *, has_session: bool) -> Cause | None:
    """Return what all workers failed with alike before their first step, if a restart cannot mend it.

    Alike are exceptions of one type from one line; their texts may name each rank's own file.
    """
    first = causes[0] if causes else None
    if first is None or not is_permanent(first, has_session=has_session):
        return None
    alike = all(one is not None and (one.type, one.frame) == (first.type, first.frame) for one in causes)
    return first if alike else None


def find_first(ended: Sequence[Ended]) -> Ended:
    """Return the worker that failed by itself, by what all of a node recorded, else the one that ended first.

    Args:
        ended: Those that ended, and those that recorded an exception and have not ended yet; at least one has ended.
    """
    own = [one for one in ended if not is_consequence(one.cause)]
    return min(own or ended, key=lambda one: (_since_ns(one), one.rank))


def _since_ns(one: Ended) -> int:
    recorded = one.cause.mono_ns if one.cause is not None else 0
    return min(filter(None, (recorded, one.ended_ns)), default=_LATE_NS)  # its core is being written, say


def wait_s(
    ended: Sequence[Ended], *, num_running: int, is_before_first_step: bool, has_session: bool, is_alone: bool
) -> float:
    """Return how long to wait for other workers of the node before the cycle is ended; 0 = what happened is clear.

    Args:
        ended: As for :func:`find_first`.
        num_running: Workers of the node that still run and recorded nothing.
        is_before_first_step: No rank of the node began a step in this job.
        has_session: Its ranks tell of their steps.
        is_alone: There is no other node whose ranks may be the cause.
    """
    if not num_running:
        return 0.0
    causes = [one.cause for one in ended]
    if is_before_first_step and permanent_cause(causes, has_session=has_session) is not None:
        return SAME_FAULT_S
    if is_alone and all(map(is_consequence, causes)):
        return FIRST_FAULT_S
    return 0.0
