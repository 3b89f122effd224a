"""Which of the faults that ended an iteration are its causes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outlast.policy.restart_orders import Fault, FaultKind

__all__ = ["add_fault", "count_causes", "judge"]


def add_fault(known: tuple[Fault, ...], fault: Fault) -> tuple[Fault, ...]:
    """Return the faults with one more, unless it is known: a rank may say the same to two hubs."""
    name = (fault.initial_rank, fault.iteration, fault.kind)
    if any((other.initial_rank, other.iteration, other.kind) == name for other in known):
        return known
    return (*known, fault)


def judge(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return the faults, causes first; who waited for a rank that hung or had to be ended is not to blame."""
    ended = any(fault.kind == FaultKind.HARD_TIMEOUT for fault in faults)
    judged = (
        msgspec.structs.replace(fault, is_consequence=True)
        if fault.is_victims or (ended and fault.kind == FaultKind.SOFT_TIMEOUT)
        else fault
        for fault in faults
    )
    return tuple(sorted(judged, key=lambda fault: fault.is_consequence))


def count_causes(before: Mapping[int, int], faults: tuple[Fault, ...]) -> dict[int, int]:
    """Return the number of causes by initial rank, with those of an iteration added to those before.

    A rank is at fault once in an iteration, in however many ways that showed.
    """
    counts = {**before}
    for rank, _ in {(fault.initial_rank, fault.iteration) for fault in judge(faults) if not fault.is_consequence}:
        counts[rank] = counts.get(rank, 0) + 1
    return counts
