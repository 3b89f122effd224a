"""Which incident, rank or worker began what ended a cycle, and whether a restart can help against it.

Two questions, by what is known at the time:

* Several workers of a node failed (:func:`find_first`): one rank's exception makes its peers fail in their collectives
  a moment later, and whoever ends first is not always the one that began. A script that cannot work (a missing module,
  a wrong setting) fails on all ranks alike each time it is started: a restart only repeats the traceback.
* The nodes reported several incidents (:func:`root_cause`): what cannot be an effect comes first.

Which rank a hang waits for: :mod:`outlast.policy.culprit`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import ExitReason
from outlast.incidents import Cause, Incident, IncidentKind
from outlast.policy.rerun import Finding

SAME_FAULT_S, MAX_SAME_FAULT_S = 5.0, 30.0
"""How long the workers of a node have at least and at most to fail with the same cause; see :func:`same_fault_s`."""
FIRST_FAULT_S = 0.3
"""How long a node waits for the worker that failed by itself, where only one was seen that lost a peer."""
PLAIN_START_S = 60.0
"""A script that reports no steps is taken to be before its first one for so long."""

_LATE_NS = 1 << 62
_PEERS = ("PeerLost", "DistBackendError", "DistNetworkError", "DistStoreError", "RestartAbort")
"""What a worker raises for a peer's failure; ``RestartAbort`` comes to all ranks that cannot continue without it."""
_PEER_TEXT = re.compile(
    r"connection (closed|reset)|closed by peer|reset by peer|broken pipe|remote process exited|ncclRemoteError"
    r"|application timeout caused pair closure|timed out waiting \d+ ?ms for (recv|send)|peer .* (is gone|left|closed)",
    re.IGNORECASE,
)
_STATIC = frozenset({"SyntaxError", "ImportError", "FileNotFoundError", "NotADirectoryError", "ConfigError"})
"""What is wrong with a script, its surroundings, or how it was called, whatever else it does."""
_BEFORE_STEPS = frozenset({"NameError", "AttributeError", "TypeError", "ValueError", "LookupError", "PermissionError"})
"""What is wrong with a script that is known to be before its first step."""
_OF_CODE = frozenset({"ArithmeticError", "AssertionError", "NotImplementedError", "RecursionError"})
"""What the same code does again with the same data, besides the above; no error of a device, a network or a disk."""
_CHECKPOINT = frozenset({"Mismatch", "Unavailable", "Untrusted"})
"""What is wrong with what was to be loaded, or with where it lies."""
_PASSING = frozenset({"UnicodeError", "JSONDecodeError"})
"""ValueErrors that a file which is still being written can cause."""
_NOT_OF_CODE = frozenset({"OSError", "EOFError", "MemoryError", "OutOfMemoryError", "AcceleratorError"})
"""Errors of files, networks, memory and devices."""
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
"""What the text of an error contains that may pass: of a device, a network, a disk, another process."""


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


def is_deterministic(cause: Cause) -> bool:
    """Return whether the same code with the same data fails so each time, as far as the exception's type shows."""
    names = {cause.type.rpartition(".")[2], *cause.bases}
    is_own = not names.isdisjoint(_STATIC | _BEFORE_STEPS | _OF_CODE) and names.isdisjoint(_PASSING)
    return is_own and not is_consequence(cause)


def is_of_code(cause: Cause) -> bool:
    """Return whether a failure seems to be that of the code, so that the same start brings it again.

    Wider than :func:`is_deterministic`: any exception that neither its type nor its text relates to a device, a
    network, a disk, memory or another process. It is evidence only where the failure came twice in a row, with the same
    text.
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
    """Return what all workers failed with alike before their first step, if a restart cannot help.

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


def same_fault_s(ran_s: float) -> float:
    """Return how long the other workers have to fail with the same cause, once a restart cannot help one that failed.

    They read the same files as the one that failed: where that took long, as on a slow shared file system, they may be
    behind it by as much.

    Args:
        ran_s: Seconds from the start of the workers to the first failure.
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
) -> float:
    """Return how long to wait for other workers of the node before the cycle is ended; 0 = what happened is clear.

    Args:
        ended: As for :func:`find_first`.
        ran_s: Seconds from the start of the workers to the first failure.
        num_running: Workers of the node that still run and recorded nothing.
        is_before_first_step: No rank of the node began a step in this job.
        has_session: Its ranks tell of their steps.
        is_alone: There is no other node whose ranks may be the cause.
        is_one_leaving: One that still runs was permanently removed from a restart in process, and is about to end.
    """
    if not num_running:
        return 0.0
    causes = [one.cause for one in ended]
    if is_before_first_step and permanent_cause(causes, has_session=has_session) is not None:
        return same_fault_s(ran_s)
    if all(map(is_consequence, causes)) and (is_alone or is_one_leaving):
        return SAME_FAULT_S if is_one_leaving else FIRST_FAULT_S
    return 0.0


OWN_VERDICTS = frozenset(
    {ExitReason.RESUME_TO_DISAMBIGUATE, ExitReason.FAILED_VALIDATION, ExitReason.STRAGGLER},
)
"""Exit codes by which a worker says why all ranks leave: a result was invalid, or a rank is slow."""


_GRAVITY = {
    IncidentKind.NODE_LOST: 0,
    IncidentKind.CANNOT_START: 1,
    IncidentKind.NODE_UNHEALTHY: 1,
    IncidentKind.WORKER_HUNG: 3,
    IncidentKind.WORKER_DIED: 4,
    IncidentKind.WORKER_FAILED: 5,
}


_OWN_VERDICT = 2
"""A worker that left with a verdict of its own was not driven out by its peers; they may have been by it."""


_FOUND_OUT = -1
"""What a replay found out is not lost, also where a node is lost at the same time: its slot is empty anyway."""


def root_cause(incidents: Sequence[Incident]) -> Incident | None:
    """Return the cause among the incidents of one cycle, in the order of their arrival.

    One fault shows in many places: peers of a lost node or of a killed rank fail in their collectives. What
    cannot be an effect comes first, then a failure that is not recorded as a peer's, then what was seen first. Where
    all ranks leave because of one invalid result, the cause is the rank that saw it; because of a slow rank, that rank.
    """
    ranked = [
        (_gravity(incident), is_consequence(incident.cause), _distance(incident), order)
        for order, incident in enumerate(incidents)
        if incident.kind in _GRAVITY
    ]
    return incidents[min(ranked)[-1]] if ranked else None


def _gravity(incident: Incident) -> int:
    if incident.kind == IncidentKind.WORKER_FAILED and incident.exit_code in OWN_VERDICTS:
        return _FOUND_OUT if _finding(incident) in (Finding.PERSISTENT, Finding.CORRECT) else _OWN_VERDICT
    return _GRAVITY[incident.kind]


def _finding(incident: Incident) -> object:
    diagnosis = incident.evidence.get("diagnosis")
    return diagnosis.get("finding") if isinstance(diagnosis, dict) else None


def _distance(incident: Incident) -> int:
    """Return how far a worker is from the reason for which it left: 0 = it is what it saw itself."""
    diagnosis = incident.evidence.get("diagnosis")
    if not isinstance(diagnosis, dict):
        return 2
    return int(diagnosis.get("rank") != incident.rank)
