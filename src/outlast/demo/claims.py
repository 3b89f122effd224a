"""The claims: what the demo says of where state comes from after a fault, and which of them were not kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outlast.demo.account import Account
from outlast.demo.sources import Sources, count_bytes
from outlast.incidents import IncidentKind

__all__ = ["unkept"]


def unkept(rows: Sequence[Account]) -> tuple[str, ...]:
    """Return what did not come from where it should after the demo's faults, each in one line.

    * After a killed or a hung rank: from the nodes that have it, and nothing from the global tier.
    * After a lost node: its ranks from the copies on other nodes, and nothing from the global tier.
    * After one whose copies were spoiled: each of its ranks rejects them and comes back from the global tier, and all
      go on from the newest generation there.
    """
    lines = []
    for row in rows:
        if row.fault is not None and row.sources is not None:
            check = _near if row.copies_spoiled is None else _far
            lines += [f"{row.fault} at iteration {row.iteration}: {told}" for told in check(row, row.sources)]
    return tuple(lines)


def _near(row: Account, sources: Sources) -> Iterator[str]:
    if sources.global_bytes:
        yield f"{count_bytes(sources.global_bytes)} were read from the global tier"
    expected = ("replica",) if row.kind == IncidentKind.NODE_LOST else ("memory", "local")
    yield from _elsewhere(row.victims, sources, expected)


def _far(row: Account, sources: Sources) -> Iterator[str]:
    if not row.copies_spoiled:
        yield "there was no copy on another node to damage"
    yield from _elsewhere(row.victims, sources, ("global",))
    if (rejected := sources.rejected.get("replica", 0)) < len(row.victims):
        yield f"{rejected} damaged copies were rejected by {len(row.victims)} ranks"
    if row.newest_global is None or (row.restored_iteration or 0) < row.newest_global:
        yield f"it went on from {row.restored_iteration}, but the global tier held {row.newest_global}"


def _elsewhere(victims: Iterable[int], sources: Sources, expected: tuple[str, ...]) -> Iterator[str]:
    for rank in victims:
        if (tier := sources.tiers.get(rank, "nowhere")) not in expected:
            yield f"rank {rank} came back from {tier} instead of {' or '.join(expected)}"
