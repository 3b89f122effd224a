"""The culprit of a hang: the one rank that all the others wait for, not the first to time out.

When one rank of a job stops, soon all of them stand still in a collective and exceed the same timeout. The
culprit is found by narrowing the ranks down, one kind of evidence after the other: the lowest iteration; then
what the process is doing (stopped beats unresponsive beats busy beats waiting in a collective); then the
fewest sections entered in the iteration, the fewest collectives, an exceeded timeout of its own, and at last
the lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

__all__ = ["Culprit", "Position", "find_culprit"]


class Position(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one rank is, and what can be seen of its process; travels between nodes as JSON."""

    node: str
    global_rank: int
    pid: int = 0
    iteration: int = 0
    sections: tuple[str, ...] = ()
    """Names of the open sections, outermost first."""
    num_entries: int = 0
    """Sections entered since the iteration changed."""
    collectives: int = -1
    """Collectives entered, of all process groups together; -1 = not known."""
    responsive: bool = True
    """A Python thread of the process answered; ``False``: it holds the GIL, is stopped, or is gone."""
    process_state: str = ""
    """Letter of ``/proc/<pid>/stat`` before anything was done to the process (``R``, ``S``, ``D``, ``T``,
    ``Z``); ``X`` = gone, empty = not known."""
    stack_line: str | None = None
    """Innermost line of the main thread that belongs to the user's code."""
    waits_in_collective: bool | None = None
    """The main thread stands in a collective or in a backward pass; ``None`` = not known."""
    expired: bool = False
    """It exceeded a timeout itself."""
    attached: bool = True
    """It takes part in the monitoring; ``False``: a plain process of which only the pid is known."""
    finished: bool = False
    """It said that it is done."""


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the others wait for, and the evidence in one line."""

    position: Position
    reason: str


def find_culprit(positions: Iterable[Position]) -> Culprit:
    """Name the rank that a hang started from.

    Args:
        positions: Every rank of every node that could be examined.

    Raises:
        ValueError: There is no position.
    """
    everyone = sorted(positions, key=lambda one: one.global_rank)
    if not everyone:
        raise ValueError("no rank was examined, so none can be named")
    left = [one for one in everyone if not one.finished] or everyone
    attached = [one for one in left if one.attached]
    if attached and (len(attached) == len(left) or min(one.iteration for one in attached) > 0):
        left = attached  # a process that never attached may well be plain, and ahead of everybody

    reasons = []
    for narrow in (_by_iteration, _by_process, _by_sections, _by_collectives, _by_timeout):
        if len(left) == 1:
            break
        kept, reason = narrow(left)
        if len(kept) < len(left):
            reasons.append(reason)
            left = kept
    culprit = left[0]
    if len(left) > 1:
        reasons.append(f"nothing tells ranks {_ranks(left)} apart; the lowest is named")
    if not reasons:
        reasons.append("it is the only rank that can be named")
    where = f" at {culprit.stack_line}" if culprit.stack_line else ""
    return Culprit(
        position=culprit,
        reason=f"rank {culprit.global_rank} (node {culprit.node}): {'; '.join(reasons)}{where}",
    )


def _by_iteration(ranks: list[Position]) -> tuple[list[Position], str]:
    lowest = min(one.iteration for one in ranks)
    others = sorted({one.iteration for one in ranks} - {lowest})
    return (
        [one for one in ranks if one.iteration == lowest],
        f"at iteration {lowest} while others reached {', '.join(map(str, others))}",
    )


_STOPPED, _UNRESPONSIVE, _BUSY, _UNKNOWN, _WAITING = range(5)


def _doing(one: Position) -> int:
    if one.process_state in ("T", "t", "Z", "X"):
        return _STOPPED
    if one.waits_in_collective:
        return _WAITING
    if not one.responsive and one.attached:
        return _UNRESPONSIVE
    return _BUSY if one.waits_in_collective is False else _UNKNOWN


def _by_process(ranks: list[Position]) -> tuple[list[Position], str]:
    worst = min(map(_doing, ranks))
    kept = [one for one in ranks if _doing(one) == worst]
    gone = kept[0].process_state in ("Z", "X")
    reason = {
        _STOPPED: "its process is gone" if gone else f"its process is stopped (state {kept[0].process_state})",
        _UNRESPONSIVE: "its interpreter does not answer (a C call that holds the GIL)",
        _BUSY: "it has not come to the collective that the others wait in",
        _UNKNOWN: "it is not seen to wait in a collective, unlike the others",
        _WAITING: "",
    }[worst]
    return kept, reason


def _fewest(count: Callable[[Position], int], what: str, ranks: list[Position]) -> tuple[list[Position], str]:
    fewest, most = min(map(count, ranks)), max(map(count, ranks))
    return [one for one in ranks if count(one) == fewest], f"{fewest} {what}, others {most}"


def _by_sections(ranks: list[Position]) -> tuple[list[Position], str]:
    return _fewest(lambda one: one.num_entries, "sections entered in this iteration", ranks)


def _by_collectives(ranks: list[Position]) -> tuple[list[Position], str]:
    if any(one.collectives < 0 for one in ranks):
        return ranks, ""
    return _fewest(lambda one: one.collectives, "collectives entered", ranks)


def _by_timeout(ranks: list[Position]) -> tuple[list[Position], str]:
    return [one for one in ranks if one.expired] or ranks, "it exceeded a timeout itself"


def _ranks(ranks: list[Position]) -> str:
    return ", ".join(str(rank) for rank in sorted(one.global_rank for one in ranks))
