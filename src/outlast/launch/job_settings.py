"""The coordinator's settings for a job, and the job's name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from outlast.policy.ladder import LadderState, Limits

START_S = 180.0
"""How long a node may take to start a cycle's workers, without a wait for GPU memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The coordinator's settings for a job."""

    job: str
    num_slots: int
    """Nodes that train at a time; more than these wait as spares."""
    max_nodes: int = 0
    """Most nodes that may join; 0 = not known."""
    former_host: str | None = None
    """Node of the coordinator before, when the job is in progress and lost it; else ``None``."""
    min_nodes: int | None = None
    """Smallest world to shrink to when no spare is left; ``None`` = never shrink."""
    limits: Limits = field(default_factory=Limits)
    is_named: bool = True
    """The run has an id or a directory of its own: once finished, it is not trained again."""
    join_timeout_s: float = 600.0
    """How long an incomplete cycle may wait for nodes before the job stops."""
    node_timeout_s: float = 5.0
    """How long a node may send no heartbeat."""
    loop_timeout_factor: int = 12
    """So many times longer the main loop of an agent may stand still whose heartbeats arrive: a loaded machine starves
    it, and the node is there."""
    goodbye_timeout_s: float = 5.0
    """How long the coordinator waits for nodes to hear that the job is over."""
    beat_interval_s: float = 1.0
    """Between two signs of life of a node."""
    prepare_timeout_s: float = 30.0
    """How long the first node may take to open a cycle's store."""
    start_timeout_s: float = START_S
    """How long a node may take to start a cycle's workers, the last one's end, a health check and a wait for GPU memory
    included."""
    rejoin_timeout_s: float = 60.0
    """How long a node may take to report a cycle's end."""
    host: str = ""
    """Node of this coordinator."""
    order: int = 0
    """Number of its endpoint."""
    num_endpoints: int = 1
    """Places where a coordinator may be."""
    term: int = 1
    """The least that this coordinator may begin with."""
    host_is_dead: bool = False
    """The agent that hosted the coordinator before is gone for certain."""
    last_job: str = ""
    """The run's last job when the agent of this coordinator began; empty: none is remembered."""


def name_job(allocation: str | None, state: LadderState) -> str:
    """Return a name that no earlier job of the run has had.

    What a cycle saved is known by the names of its job and cycle. A re-queued allocation has the number that it had
    before, and so have two launches in one allocation.

    Args:
        allocation: The scheduler's number of the allocation; ``None`` without a scheduler.
        state: What is remembered of the run.
    """
    if allocation is None:
        return f"job-{secrets.token_hex(4)}"
    cycles = {load.cycle for load in state.loads}.union(*(one.tainted for one in state.distrusted))
    taken = {step.job for step in state.history} | {cycle.rpartition("-")[0] for cycle in cycles}
    name, number = allocation, 1
    while name in taken:
        name, number = f"{allocation}.{number}", number + 1
    return name
