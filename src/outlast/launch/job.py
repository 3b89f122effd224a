"""What the coordinator is told about a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.policy.ladder import Limits

__all__ = ["JobSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What the coordinator is told about the job."""

    job: str
    num_slots: int
    """Nodes that train at a time; more than these wait as spares."""
    max_nodes: int = 0
    """Most nodes that may join; 0 = not known."""
    former_host: str | None = None
    """Node that hosted the control store before, when the job is in progress and lost it; else ``None``."""
    min_nodes: int | None = None
    """Smallest world to shrink to when no spare is left; ``None`` = never shrink."""
    limits: Limits = field(default_factory=Limits)
    join_timeout_s: float = 600.0
    """How long an incomplete cycle may wait for nodes before the job stops."""
    node_timeout_s: float = 5.0
    """How long a node may give no sign of life."""
    goodbye_timeout_s: float = 5.0
    """How long the coordinator waits for nodes to hear that the job is over."""
