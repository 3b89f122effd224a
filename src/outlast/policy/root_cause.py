"""Root cause of a hang, from the positions of all ranks.

When one rank stops, soon all ranks wait in a collective and exceed the same timeout. :func:`find_root_cause` narrows
the ranks down by one kind of evidence after the other: the lowest iteration; the state of the process (stopped, then
unresponsive, then busy, then waiting in a collective); the fewest sections entered in the iteration; the fewest
collectives; an exceeded timeout of its own. No rank is identified if several are equally slow, if a collective that all
entered does not return, or if the script is at fault: ranks wait in different collectives, or one skipped a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec


class Collective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    op: str
    """``ALLREDUCE``, ``BROADCAST``, ..."""
    seq: int = -1
    """Number among the collectives of its group, from 1; -1 = not known."""
    group: str = ""
    """Name of the process group, the same on all of its ranks."""
    label: str = ""
    """Display name of the group; empty = the group of all ranks."""
    shape: str = ""
    """Sizes that must be equal on all ranks; empty = not known, or they may differ."""
    is_p2p: bool = False
    """A send or receive, numbered per pair of ranks."""
    is_own: bool = False
    """An agreement of all ranks outside process groups, as at the end of a step."""

    def describe(self, *, with_shape: bool = False) -> str:
        text = self.op + (f" seq {self.seq}" if self.seq >= 0 else "")
        text += f" of group {self.label}" if self.label else ""
        return text + (f" of {self.shape}" if with_shape and self.shape else "")


class Position(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Position of one rank, and the state of its process; sent between nodes as JSON."""

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
    groups: dict[str, int] = {}
    """Collectives entered, by name of the process group; empty = not known."""
    waiting_in: Collective | None = None
    """``None`` = no collective, or not known."""
    responsive: bool = True
    """A Python thread of the process responded; ``False`` = it holds the GIL, is stopped, or is gone."""
    process_state: str = ""
    """Letter of ``/proc/<pid>/stat`` before the process was touched (``R``, ``S``, ``D``, ``T``, ``Z``); ``X`` = gone,
    empty = not known."""
    stack_line: str | None = None
    """Innermost line of the main thread in the user's code."""
    waits_in_collective: bool | None = None
    """The main thread is in a collective or a backward pass; ``None`` = not known."""
    expired: bool = False
    attached: bool = True
    """``False`` = a plain process of which only the pid is known."""
    finished: bool = False


class RootCause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rank that the others wait for, and the evidence in one line."""

    position: Position | None = None
    """``None`` = no rank was identified."""
    node: str = ""
    """The node that the evidence points at; empty = none."""
    reason: str


def find_root_cause(positions: Iterable[Position]) -> RootCause:
    """Identify the rank that a hang started from, if it is distinguishable from the others.

    Args:
        positions: Every rank of every node that could be examined.

    Raises:
        ValueError: ``positions`` is empty.
    """
    everyone = sorted(positions, key=lambda one: one.global_rank)
    if not everyone:
        raise ValueError("no rank was examined, so none can be named")
    left = [one for one in everyone if not one.finished] or everyone
    attached = [one for one in left if one.attached]
    if attached and (len(attached) == len(left) or min(one.iteration for one in attached) > 0):
        left = attached  # a process that never attached may be a plain one, ahead of all others
    gone = [one for one in everyone if one.finished and one not in left]
    if (reason := _fault_of_the_script(left, gone)) is not None:
        return RootCause(reason=reason)

    suspects, reasons = left, []
    for narrow in (_by_iteration, _by_process, _by_sections, _by_collectives, _by_timeout):
        if len(suspects) == 1:
            break
        kept, reason = narrow(suspects)
        if len(kept) < len(suspects):
            reasons.append(reason)
            suspects = kept
    if len(suspects) > 1:
        return RootCause(node=_common_node(suspects, left), reason=_describe_indistinguishable(suspects, reasons))
    root_cause = suspects[0]
    if not reasons:
        reasons.append("it is the only rank that can be named")
    where = f" at {root_cause.stack_line}" if root_cause.stack_line else ""
    return RootCause(
        position=root_cause,
        node=root_cause.node,
        reason=f"rank {root_cause.global_rank} (node {root_cause.node}): {'; '.join(reasons)}{where}",
    )


def is_hang_explained(positions: Iterable[Position]) -> bool:
    """Return whether the positions explain an exceeded timeout; otherwise the timeout may be too short.

    A process that is stopped or gone explains it, and so do ranks that wait for each other forever.
    """
    everyone = sorted(positions, key=lambda one: one.global_rank)
    left = [one for one in everyone if not one.finished]
    gone = [one for one in everyone if one.finished]
    return any(_doing(one) == _STOPPED for one in left) or _fault_of_the_script(left, gone) is not None


def _fault_of_the_script(ranks: list[Position], finished: list[Position]) -> str | None:
    """Return the error in the script that makes ranks wait forever; ``None`` = a rank may hang by itself."""
    if any(_doing(one) in (_STOPPED, _UNRESPONSIVE) for one in ranks):
        return None
    waiting = [one for one in ranks if _doing(one) == _WAITING and one.waiting_in is not None]
    if not waiting:
        return None
    if len(waiting) == len(ranks) and finished and not all(one.waiting_in.is_own for one in waiting if one.waiting_in):
        return f"{_places(waiting)}, {_name(finished)} finished without it"
    skippers = [
        one for one in ranks if any(_awaits(other, one) and other.iteration < one.iteration for other in waiting)
    ]
    if skippers:
        victims = [one for one in waiting if any(_awaits(one, other) for other in skippers)]
        highest = max(one.iteration for one in skippers)
        return f"{_places(victims)}, {_name(skippers)} continued to iteration {highest} without it"
    if _differ(waiting, len(waiting) == len(ranks)):
        return f"ranks wait in different collectives: {_places(waiting, with_shape=_same_names(waiting))}"
    first = waiting[0].waiting_in
    if 1 < len(waiting) == len(ranks) and all(one.waiting_in == first for one in ranks) and first and first.seq >= 0:
        return f"all ranks wait in {first.describe()}, which does not return; look at the network between their nodes"
    return None


def _differ(waiting: list[Position], is_everybody: bool) -> bool:
    """Return whether ranks wait in collectives that cannot both complete."""
    calls: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for one in waiting:
        call = one.waiting_in
        if call is not None and call.seq >= 0 and not call.is_p2p:
            calls.setdefault((call.group, call.seq), set()).add((call.op, call.shape))
    if any(len(there) > 1 for there in calls.values()):
        return True
    if not is_everybody:
        return False
    if all(any(_awaits(one, other) for other in waiting) for one in waiting):
        return True
    unknown = {one.waiting_in.op for one in waiting if one.waiting_in is not None and one.waiting_in.seq < 0}
    return len(unknown) > 1 and not any(one.groups for one in waiting)


def _awaits(one: Position, other: Position) -> bool:
    """Return whether a rank waits in a collective that another has not entered, as far as known."""
    call = one.waiting_in
    if call is None or one is other or call.is_p2p:
        return False
    if call.is_own:  # no rank reaches a later iteration without having taken part
        return other.iteration <= one.iteration and other.waiting_in is not None and not other.waiting_in.is_own
    return other.groups.get(call.group, call.seq) < call.seq


def _places(ranks: list[Position], *, with_shape: bool = False) -> str:
    """Return ranks by collective: ``0, 1, 3 in ALLREDUCE seq 7, 2 in BROADCAST seq 7``."""
    places: dict[str, list[Position]] = {}
    for one in ranks:
        assert one.waiting_in is not None
        places.setdefault(one.waiting_in.describe(with_shape=with_shape), []).append(one)
    if len(places) == 1:
        text, there = next(iter(places.items()))
        return f"{_name(there)} wait{'s' * (len(there) == 1)} in {text}"
    return ", ".join(f"{_ranks(there)} in {text}" for text, there in places.items())


def _same_names(ranks: list[Position]) -> bool:
    return len({one.waiting_in.describe() for one in ranks if one.waiting_in is not None}) == 1


def _name(ranks: list[Position]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_ranks(ranks)}"


def _describe_indistinguishable(suspects: list[Position], reasons: list[str]) -> str:
    text = f"ranks {_ranks(suspects)} are indistinguishable"
    if reasons:
        text += f"; for each of them: {'; '.join(reasons)}"
    lines = {one.stack_line for one in suspects}
    if len(lines) == 1 and None not in lines:
        text += f"; all are at {lines.pop()}"
    return text


def _common_node(suspects: list[Position], left: list[Position]) -> str:
    """Return the node whose ranks are all suspects while those of other nodes only wait; empty = none."""
    nodes = {one.node for one in suspects}
    is_distinguishable = any(one.node not in nodes for one in left) and all(_doing(one) != _WAITING for one in suspects)
    return nodes.pop() if len(nodes) == 1 and is_distinguishable else ""


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
        _UNRESPONSIVE: "its interpreter does not respond (a C call that holds the GIL)",
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
    waiting = [one for one in ranks if any(_awaits(one, other) for other in ranks)]
    if waiting:
        kept = [one for one in ranks if one not in waiting and any(_awaits(other, one) for other in waiting)]
        return kept or ranks, f"not in the collective that others wait in: {_places(waiting)}"
    # Sums over different groups cannot be compared.
    if any(one.collectives < 0 or one.groups.keys() != ranks[0].groups.keys() for one in ranks):
        return ranks, ""
    return _fewest(lambda one: one.collectives, "collectives entered", ranks)


def _by_timeout(ranks: list[Position]) -> tuple[list[Position], str]:
    expired = [one for one in ranks if one.expired]
    # Ranks in the same sections exceed the same timeout one after the other: the order proves nothing.
    others = {one.sections for one in ranks if not one.expired}
    if not expired or any(one.sections in others for one in expired):
        return ranks, ""
    return expired, "it exceeded a timeout itself"


def _ranks(ranks: list[Position]) -> str:
    return ", ".join(str(rank) for rank in sorted(one.global_rank for one in ranks))
