"""The sources: from which tier every rank came back, how much was read there, and what was passed over. Pure.

All is counted from the ranks' own events ``restored`` and ``copy_rejected`` of the cycle that follows an incident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.incidents import Event, EventKind, IncidentKind
from outlast.policy.recovery_point import Tier

__all__ = ["TIERS", "Sources", "count_bytes", "find_sources", "newest_global"]

TIERS = tuple(str(tier) for tier in sorted(Tier))
"""The nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where one cycle's ranks came back from."""

    tiers: Mapping[int, str]
    """Rank to the name of its tier."""
    bytes_read: Mapping[str, int]
    """Tier to the bytes that all ranks read there."""
    rejected: Mapping[str, int]
    """Tier to the number of copies there that ranks rejected first."""

    @property
    def num_ranks(self) -> dict[str, int]:
        """Tier to the number of ranks that came back from it."""
        counts = Counter(self.tiers.values())
        return {tier: counts[tier] for tier in TIERS if tier in counts}

    @property
    def global_bytes(self) -> int:
        """Bytes that were read from the global tier."""
        return self.bytes_read.get("global", 0)


def find_sources(cycle: int, events: Iterable[Event]) -> Sources:
    """Return where the ranks of a cycle came back from."""
    tiers: dict[int, str] = {}
    num_bytes, rejected = Counter[str](), Counter[str]()
    for event in events:
        if event.cycle != cycle or event.rank is None:
            continue
        if event.kind == EventKind.RESTORED:
            tiers[event.rank] = event.data["tier"]
            num_bytes.update(event.data["bytes_read"])
        elif event.kind == EventKind.INCIDENT and _is_rejected(incident := event.data["incident"]):
            rejected[incident["evidence"]["tier"]] += 1
    return Sources(tiers=tiers, bytes_read=dict(num_bytes), rejected=dict(rejected))


def newest_global(events: Sequence[Event], *, before_ns: int) -> int | None:
    """Return the newest generation that was committed to the global tier before a moment; ``None`` = none was."""
    return max(
        (
            event.iteration
            for event in events
            if event.kind == EventKind.SAVE_COMMITTED
            and event.mono_ns <= before_ns
            and event.iteration is not None
            and "global" in event.data.get("tiers", ())
        ),
        default=None,
    )


def count_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    if num_bytes >= 100_000:
        return f"{num_bytes / 1e6:.1f} MB"
    return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"


def _is_rejected(incident: Mapping[str, Any]) -> bool:
    return bool(incident["kind"] == IncidentKind.COPY_REJECTED)
