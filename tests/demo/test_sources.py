"""From which tier ranks came back, counted from the events that they wrote."""

from __future__ import annotations

from typing import Any

import msgspec
from written_events import written

from outlast.demo.outcome import count_bytes, find_sources, newest_global
from outlast.incidents import Event, EventKind, Incident, IncidentKind


def event(kind: EventKind, cycle: int, rank: int, **data: Any) -> Event:
    return written(kind, proc=f"rank-{rank}", cycle=cycle, rank=rank, **{"iteration": 30, **data})


def restored(cycle: int, rank: int, tier: str, num_bytes: int) -> Event:
    return event(EventKind.RESTORED, cycle, rank, tier=tier, bytes_read={tier: num_bytes})


def rejected(cycle: int, rank: int, tier: str) -> Event:
    found = Incident(kind=IncidentKind.COPY_REJECTED, node="node-0", rank=rank, evidence={"tier": tier})
    return event(EventKind.INCIDENT, cycle, rank, incident=msgspec.to_builtins(found))


def test_ranks_bytes_and_rejections_of_one_cycle_are_counted() -> None:
    """Other cycles and other incidents do not count."""
    hung = msgspec.to_builtins(Incident(kind=IncidentKind.WORKER_HUNG, node="node-0", rank=1))
    events = [
        restored(0, 0, "global", 7),
        rejected(0, 0, "replica"),
        rejected(1, 2, "replica"),
        event(EventKind.INCIDENT, 1, 1, incident=hung),
        *(restored(1, rank, "memory", 100) for rank in (0, 1)),
        *(restored(1, rank, "replica", 90) for rank in (3, 2)),
    ]
    sources = find_sources(1, events)
    assert sources.tiers == {0: "memory", 1: "memory", 2: "replica", 3: "replica"}
    assert sources.num_ranks == {"memory": 2, "replica": 2}
    assert sources.bytes_read == {"memory": 200, "replica": 180}
    assert sources.rejected == {"replica": 1}
    assert sources.global_bytes == 0
    assert find_sources(0, events).global_bytes == 7
    assert find_sources(2, events).tiers == {}


def test_the_newest_generation_of_the_global_tier_before_a_moment() -> None:
    """Later ones, and those that stayed on the nodes, do not count."""
    commits = [
        event(EventKind.SAVE_COMMITTED, 0, 0, at_s=at_s, iteration=iteration, tiers=tiers)
        for at_s, iteration, tiers in (
            (1, 10, ["local", "memory"]),
            (2, 10, ["global"]),
            (3, 15, ["local"]),
            (5, 20, ["global"]),
        )
    ]
    assert newest_global(commits, before_ns=4 * 10**9) == 10
    assert newest_global(commits, before_ns=5 * 10**9) == 20
    assert newest_global(commits, before_ns=10**9) is None


def test_bytes_are_told_exactly_where_each_counts() -> None:
    """Nothing is rounded to nothing."""
    assert [count_bytes(number) for number in (0, 1, 99_999, 4_640_000)] == [
        "0 bytes",
        "1 byte",
        "99999 bytes",
        "4.6 MB",
    ]
