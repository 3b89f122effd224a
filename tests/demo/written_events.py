"""Events as a run writes them, for tests that read them."""

from __future__ import annotations

from typing import Any

from outlast.incidents import Event, EventKind

__all__ = ["written"]


def written(
    kind: EventKind,
    at_s: float = 0,
    *,
    job: str = "j",
    on: str = "node-0",
    proc: str = "agent",
    cycle: int = 0,
    rank: int | None = None,
    iteration: int | None = None,
    **data: Any,
) -> Event:
    """Return an event that was written ``at_s`` seconds after some begin, on a node."""
    ns = round(at_s * 1e9)
    return Event(
        kind=kind,
        wall_ns=ns,
        mono_ns=ns,
        run_id="r",
        job=job,
        node=on,
        proc=proc,
        cycle=cycle,
        rank=rank,
        iteration=iteration,
        data=data,
    )
