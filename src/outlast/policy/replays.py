"""Cases: invalid results without a verdict yet, and the replays that were granted to find one.

A result that was invalid twice on one device is either that device's persistent fault or the correct result of bad data
or a bad model. Only another device can tell. Where there is none, the same one may try again a few times; it can only
tell that it is not reproducible after all.

A case is told from another by its step and by the device on which the result was seen first. It is closed by progress:
training committed a generation beyond its iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outlast.incidents import Incident
from outlast.policy.quarantine import Load
from outlast.policy.rerun import Diagnosis, Replay

__all__ = ["Case", "file_case", "find_case", "granted_elsewhere", "granted_here", "open_cases", "replay_of"]


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An invalid result that is being looked into."""

    iteration: int | None
    """Number of optimizer steps done before the step; ``None`` = not known."""
    device: str
    """What the rank computed on when the result was seen first; its node, where no device is known."""
    rank: int | None = None
    """Global rank that saw it, where its device is not known: two ranks of a node are then two devices."""
    load: Load | None = None
    """What the newest cycle that saw it while it trained had loaded."""
    same_device: int = 0
    """Cycles that were granted to see it again on the same device."""
    elsewhere: int = 0
    """Cycles that were granted to see it on another one."""


def find_case(
    cases: Sequence[Case], incident: Incident, diagnosis: Diagnosis | None, load: Load | None, *, is_replay: bool
) -> Case:
    """Return the case of an invalid result: the one that is open already, or a new one.

    Args:
        cases: The open ones.
        incident: The cycle's end.
        diagnosis: What the workers knew.
        load: What the cycle had loaded.
        is_replay: The cycle was started to replay this result: what it loaded is the diagnostic save.
    """
    if diagnosis is None:
        new = Case(iteration=incident.iteration, device=incident.node, rank=incident.rank, load=load)
    else:
        rank = None if diagnosis.device else diagnosis.rank
        new = Case(iteration=diagnosis.iteration, device=diagnosis.device or diagnosis.node, rank=rank, load=load)
    known = next((case for case in cases if _key(case) == _key(new)), None)
    if known is None:
        return msgspec.structs.replace(new, load=None) if is_replay else new
    return known if is_replay else msgspec.structs.replace(known, load=load)


def granted_here(case: Case) -> Case:
    """Return a case after one more try on the same device was granted."""
    return msgspec.structs.replace(case, same_device=case.same_device + 1)


def granted_elsewhere(case: Case) -> Case:
    """Return a case after a try on another device was granted."""
    return msgspec.structs.replace(case, elsewhere=case.elsewhere + 1)


def file_case(cases: Sequence[Case], case: Case) -> tuple[Case, ...]:
    """Return the cases with one added, or replaced by what became of it."""
    return (*(other for other in cases if _key(other) != _key(case)), case)


def open_cases(cases: Sequence[Case], durable_iteration: int | None) -> tuple[Case, ...]:
    """Return the cases that are still open after a cycle.

    Args:
        cases: Those before it.
        durable_iteration: The newest generation that it committed; ``None`` = none. Where a case's iteration is not
            known, any commit closes it.
    """
    return tuple(
        case
        for case in cases
        if durable_iteration is None or (case.iteration is not None and durable_iteration <= case.iteration)
    )


def replay_of(diagnosis: Diagnosis, case: Case) -> Replay:
    """Return what a cycle is to run again, to find out more about an invalid result."""
    return Replay(
        iteration=diagnosis.iteration,
        device=diagnosis.device,
        node=diagnosis.node,
        rank=diagnosis.rank,
        call=diagnosis.call,
        what=diagnosis.what,
        first=diagnosis.first,
        batch=diagnosis.batch,
        tries=max(diagnosis.tries, case.same_device),
    )


def _key(case: Case) -> tuple[int | None, str, int | None]:
    return case.iteration, case.device, case.rank
