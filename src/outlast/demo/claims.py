"""The claims: what the demo says of what follows a fault, and which of them were not kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outlast.demo.account import Account
from outlast.demo.plan import Deed
from outlast.demo.sources import Sources, count_bytes
from outlast.incidents import IncidentKind
from outlast.policy.rerun import Finding

__all__ = ["unkept"]


def unkept(rows: Sequence[Account]) -> tuple[str, ...]:
    """Return what was not as it should be after the demo's faults, each in one line.

    * After a killed or a hung rank: from the nodes that have it, and nothing from the global tier.
    * After a lost node: its ranks from the copies on other nodes, and nothing from the global tier.
    * After one whose copies were spoiled: each of its ranks rejects them and comes back from the global tier, and all
      go on from the newest generation there.
    * After a NaN that comes once: it is found transient, and nobody is restarted.
    * After a bit flip in a weight: the tensor is named, the rank's node is quarantined, and the node's ranks come back
      from the copies on other nodes.
    """
    lines = []
    for row in rows:
        if row.fault is not None:
            lines += [f"{row.fault} at iteration {row.iteration}: {told}" for told in _check(row)]
    return tuple(lines)


def _check(row: Account) -> Iterator[str]:
    if row.kind == IncidentKind.INVALID_RESULT:
        yield from _transient(row) if row.fault == Deed.NAN else _flipped(row)
    if row.sources is not None:
        yield from _near(row, row.sources) if row.copies_spoiled is None else _far(row, row.sources)


def _transient(row: Account) -> Iterator[str]:
    if row.restarts or row.finding != Finding.TRANSIENT:
        yield f"it was found {row.finding}, and what was done was to {row.action.replace('_', ' ')}"


def _flipped(row: Account) -> Iterator[str]:
    if row.named != row.struck:
        yield f"{row.named} was named instead of {row.struck}"
    if row.quarantined != (row.node,):
        yield f"{row.node} should be quarantined, and not {', '.join(row.quarantined) or 'nobody'}"


def _near(row: Account, sources: Sources) -> Iterator[str]:
    if sources.global_bytes:
        yield f"{count_bytes(sources.global_bytes)} were read from the global tier"
    is_node_gone = row.kind == IncidentKind.NODE_LOST or bool(row.quarantined)
    expected = ("replica",) if is_node_gone else ("memory", "local")
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
