"""Root cause of a failed cycle, and whether a restart can help.

:func:`find_first` picks among the failed workers of one node: the exception of one rank makes its peers fail in their
collectives a moment later, and the first to end is not always the root cause. :func:`root_cause` picks among the
incidents of all nodes. Which rank a hang waits for: :mod:`outlast.policy.root_cause`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outlast.errors import ExitReason
from outlast.incidents import Cause, Incident, IncidentKind
from outlast.policy.rerun import Finding

SAME_FAULT_S, MAX_SAME_FAULT_S = 5.0, 30.0
"""How long the other workers of a node are given to fail with the same cause, minimum and maximum; see
:func:`same_fault_s`."""
AGREED_EXIT_S = 5.0
"""How long the other workers are given to exit by themselves after one exited with a decision for the whole job: all
ranks exit for it, after the code that follows their training loop."""
FIRST_FAULT_S = 0.3
"""How long a node waits for the root cause while its only failed workers lost a peer."""
PLAIN_START_S = 60.0
"""A script that reports no steps counts as before its first one for this long."""

_LATE_NS = 1 << 62
_PEERS = ("PeerLost", "DistBackendError", "DistNetworkError", "DistStoreError", "RestartAbort")
"""Exceptions that a worker raises for the failure of a peer. ``RestartAbort`` is raised on all ranks at once."""
_PEER_TEXT = re.compile(
    r"connection (closed|reset)|closed by peer|reset by peer|broken pipe|remote process exited|ncclRemoteError"
    r"|application timeout caused pair closure|timed out waiting \d+ ?ms for (recv|send)|peer .* (is gone|left|closed)",
    re.IGNORECASE,
)
_STATIC = frozenset({"SyntaxError", "ImportError", "FileNotFoundError", "NotADirectoryError", "ConfigError"})
"""Errors in a script, its environment or its arguments, at any point of the run."""
_BEFORE_STEPS = frozenset({"NameError", "AttributeError", "TypeError", "ValueError", "LookupError", "PermissionError"})
"""Errors in a script that has not begun its first step."""
_OF_CODE = frozenset({"ArithmeticError", "AssertionError", "NotImplementedError", "RecursionError"})
"""Further errors that the same code repeats with the same data; none of devices, networks or disks."""
_CHECKPOINT = frozenset({"Mismatch", "Unavailable", "Untrusted"})
"""The checkpoint to load, or its location, is wrong."""
_PASSING = frozenset({"UnicodeError", "JSONDecodeError"})
"""ValueErrors that a file which is still being written can cause."""
_NOT_OF_CODE = frozenset({"OSError", "EOFError", "MemoryError", "OutOfMemoryError", "AcceleratorError"})
_NOT_OF_CODE_TYPE = re.compile(
    r"timeout|connect|network|transport|http|ssl|socket|rpc|client|server|service|request|response|unavailable|throttl"
    r"|retry|broken|process|cuda|nccl|device",
    re.IGNORECASE,
)
_NOT_OF_CODE_TEXT = re.compile(
    r"cuda|cublas|cudnn|cusolver|nvml|nvidia|driver|\bgpus?\b|nccl|gloo|\bhip|rocm|\bxpu\b|\becc\b|device-side|memory"
    r"|time(d|s)?[ -]?out|deadline|connect|network|socket|address|resolve|\bhost|unreachable|reset|refused|temporar"
    r"|unavailable|try again|retr(y|ies)|busy|\block|too many|rate limit|throttl|quota|\b(429|5\d\d)\b|interrupt"
    r"|exited|killed|signal|crash|broken|corrupt|truncat|incomplete|partial|\bi/?o\b|input/output|disk|space left"
    r"|no longer|stale",
    re.IGNORECASE,
)
"""Text of errors that may be transient: devices, networks, disks, other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker that ended with a nonzero exit code, or recorded an exception and is about to."""

    rank: int
    cause: Cause | None = None
    """``None`` = no exception was recorded."""
    ended_ns: int = 0
    """When its end was observed; 0 = it still runs."""


def is_consequence(cause: Cause | None) -> bool:
    if cause is None:
        return False
    names = {cause.type.rpartition(".")[2], *cause.bases}
    if not names.isdisjoint(_PEERS):
        return True
    return not names.isdisjoint({"RuntimeError", "OSError"}) and _PEER_TEXT.search(cause.text) is not None


def is_permanent(cause: Cause | None, *, has_session: bool) -> bool:
    """Return whether a script that fails with this cause before its first step fails again at every start.

    Args:
        has_session: The script reports its steps, so that it is known to be before the first one. For a plain script,
            only causes unrelated to steps count.
    """
    if cause is None or is_consequence(cause):
        return False
    names = {cause.type.rpartition(".")[2], *cause.bases}
    wrong = _STATIC | _CHECKPOINT | (_BEFORE_STEPS if has_session else frozenset())
    return cause.is_usage_error or (not names.isdisjoint(wrong) and names.isdisjoint(_PASSING))


def is_deterministic(cause: Cause) -> bool:
    """Return whether the same code with the same data fails again, as far as the exception's type shows."""
    names = {cause.type.rpartition(".")[2], *cause.bases}
    is_own = not names.isdisjoint(_STATIC | _BEFORE_STEPS | _OF_CODE) and names.isdisjoint(_PASSING)
    return is_own and not is_consequence(cause)


def is_of_code(cause: Cause) -> bool:
    """Return whether a failure appears to be caused by the code, so that the next start repeats it.

    Wider than :func:`is_deterministic`: any exception that neither type nor text relates to a device, a network, a
    disk, memory or another process. Evidence only where the same text occurred twice in a row.
    """
    own = cause.type.rpartition(".")[2]
    if is_consequence(cause) or own in ("SystemExit", "KeyboardInterrupt", "fatal signal") or cause.is_usage_error:
        return False
    if is_deterministic(cause):
        return True
    is_of_surroundings = not {own, *cause.bases}.isdisjoint(_NOT_OF_CODE | _PASSING)
    named = any(_NOT_OF_CODE_TYPE.search(name) for name in (cause.type, *cause.bases))
    return not (is_of_surroundings or named or _NOT_OF_CODE_TEXT.search(cause.text))


def permanent_cause(causes: Sequence[Cause | None], *, has_session: bool) -> Cause | None:
    """Return the cause with which all workers failed before their first step, if a restart cannot help.

    Causes are equal if type and line are; the texts may name each rank's own file.
    """
    first = causes[0] if causes else None
    if first is None or not is_permanent(first, has_session=has_session):
        return None
    are_equal = all(one is not None and (one.type, one.frame) == (first.type, first.frame) for one in causes)
    return first if are_equal else None


def find_first(ended: Sequence[Ended]) -> Ended:
    """Return the worker of a node that failed first by itself; if all are consequences, the one that ended first.

    Args:
        ended: Workers that ended, or recorded an exception and are about to; at least one has ended.
    """
    own = [one for one in ended if not is_consequence(one.cause)]
    return min(own or ended, key=lambda one: (_since_ns(one), one.rank))


def _since_ns(one: Ended) -> int:
    recorded = one.cause.mono_ns if one.cause is not None else 0
    return min(filter(None, (recorded, one.ended_ns)), default=_LATE_NS)  # 0 = still writing a core dump, for example


def same_fault_s(ran_s: float) -> float:
    """Return how long the other workers may take to fail with the same cause as the first, in seconds.

    They read the same files, and on a slow shared file system may be late by as long as the first one ran (``ran_s``).
    """
    return min(max(SAME_FAULT_S, ran_s), MAX_SAME_FAULT_S)


def wait_s(
    ended: Sequence[Ended],
    *,
    ran_s: float,
    num_running: int,
    is_before_first_step: bool,
    has_session: bool,
    is_alone: bool,
    is_one_leaving: bool = False,
    is_agreed: bool = False,
) -> float:
    """Return how long to wait for other workers of the node before the cycle is ended; 0 = the cause is clear.

    Args:
        ended: As for :func:`find_first`.
        ran_s: Seconds from the start of the workers to the first failure.
        num_running: Workers of the node that still run and recorded no exception.
        is_before_first_step: No rank of the node has begun a step in this job.
        has_session: The ranks report their steps.
        is_alone: No other node has ranks that may be the root cause.
        is_one_leaving: A running worker was permanently removed from an in-process restart, and is about to exit.
        is_agreed: A worker exited with one of :data:`OWN_DECISIONS`.
    """
    if not num_running:
        return 0.0
    if is_agreed:
        return AGREED_EXIT_S
    causes = [one.cause for one in ended]
    if is_before_first_step and permanent_cause(causes, has_session=has_session) is not None:
        return same_fault_s(ran_s)
    if all(map(is_consequence, causes)) and (is_alone or is_one_leaving):
        return SAME_FAULT_S if is_one_leaving else FIRST_FAULT_S
    return 0.0


OWN_DECISIONS = frozenset(
    {ExitReason.RESUME_TO_DISAMBIGUATE, ExitReason.FAILED_VALIDATION, ExitReason.STRAGGLER},
)
"""Exit codes by which a worker reports why all ranks exit: an invalid result, or a slow rank."""


_GRAVITY = {
    IncidentKind.NODE_LOST: 0,
    IncidentKind.CANNOT_START: 1,
    IncidentKind.NODE_UNHEALTHY: 1,
    IncidentKind.WORKER_HUNG: 3,
    IncidentKind.WORKER_DIED: 4,
    IncidentKind.WORKER_FAILED: 5,
}


_OWN_DECISION = 2
"""A worker that exited with a decision of its own was not ended by its peers; they may have been by it."""


_FOUND_OUT = -1
"""The result of a replay is kept even where a node is lost at the same time."""


def root_cause(incidents: Sequence[Incident]) -> Incident | None:
    """Return the root cause among the incidents of one cycle, given in the order of their arrival.

    Peers of a lost node or killed rank fail in their collectives. Incidents that cannot be an effect come first, then
    failures that are not recorded as a peer's, then the earliest. Where all ranks exit because of one invalid result,
    the rank that saw it is the root cause; because of a slow rank, that rank.
    """
    ranked = [
        (_gravity(incident), is_consequence(incident.cause), _distance(incident), order)
        for order, incident in enumerate(incidents)
        if incident.kind in _GRAVITY
    ]
    return incidents[min(ranked)[-1]] if ranked else None


def _gravity(incident: Incident) -> int:
    if incident.kind == IncidentKind.WORKER_FAILED and incident.exit_code in OWN_DECISIONS:
        return (
            _FOUND_OUT
            if _diagnosis(incident).get("finding") in (Finding.PERSISTENT, Finding.CORRECT)
            else _OWN_DECISION
        )
    return _GRAVITY[incident.kind]


def _diagnosis(incident: Incident) -> Mapping[str, object]:
    diagnosis = incident.evidence.get("diagnosis")
    return diagnosis if isinstance(diagnosis, dict) else {}


def _distance(incident: Incident) -> int:
    """Return 0 for the rank that the diagnosis is about, 1 for others, 2 without a diagnosis."""
    diagnosis = _diagnosis(incident)
    return int(diagnosis.get("rank") != incident.rank) if diagnosis else 2
