"""The coordinator's settings for a job, and the job's name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from outlast.config import FaultToleranceConfig
from outlast.policy.recovery_policy import Limits, RecoveryState

START_S = 180.0
"""How long a node may take to start a cycle's workers, without a wait for GPU memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    job: str
    num_slots: int
    """Nodes that train at a time; further nodes wait as spares."""
    max_nodes: int = 0
    """Most nodes that may join; 0: not known."""
    former_host: str | None = None
    """Node of the lost coordinator of a job in progress; ``None``: the job is new."""
    min_nodes: int | None = None
    """Smallest world to shrink to when no spare is left; ``None``: never shrink."""
    limits: Limits = field(default_factory=Limits)
    is_named: bool = True
    """The user gave the run an id or a directory: once finished, it is not trained again."""
    join_timeout_s: float = 600.0
    """How long an incomplete cycle may wait for nodes before the job stops."""
    node_timeout_s: float = 5.0
    """How long a node may send no heartbeat."""
    loop_timeout_factor: int = 12
    """Factor on ``node_timeout_s`` for an agent whose heartbeats arrive while its main loop stands still, as on a
    loaded machine."""
    goodbye_timeout_s: float = 5.0
    """How long the coordinator waits for nodes to receive Stop."""
    heartbeat_interval_s: float = 1.0
    """Between two heartbeats of a node."""
    prepare_timeout_s: float = 30.0
    """How long the first node may take to open a cycle's store."""
    start_timeout_s: float = START_S
    """How long a node may take to start a cycle's workers; includes the end of the previous ones, a health check and
    the wait for GPU memory."""
    rejoin_timeout_s: float = 60.0
    """How long a node may take to report a cycle's end."""
    host: str = ""
    """Node of this coordinator."""
    order: int = 0
    """Index of its endpoint."""
    num_endpoints: int = 1
    term: int = 1
    """The lowest term of this coordinator."""
    host_is_dead: bool = False
    """The agent of the former coordinator is certainly dead."""
    last_job: str = ""
    """The run's last job when this agent began; empty: none."""

    def changed_by(self, config: FaultToleranceConfig) -> JobSettings:
        """Return the settings after a script's config has been applied; more ``min_nodes`` than slots are not used."""
        least = config.min_nodes
        limits = replace(
            self.limits,
            max_no_progress_cycles=config.max_no_progress_cycles,
            max_node_faults=config.max_node_faults,
            max_restart_delay_s=config.max_restart_delay,
        )
        is_possible = least is None or least <= self.num_slots
        return replace(self, limits=limits, min_nodes=least if is_possible else self.min_nodes)


def name_job(allocation: str | None, state: RecoveryState) -> str:
    """Return a name that no earlier job of the run has had, as checkpoints are identified by job and cycle.

    A requeued allocation keeps its number, and one allocation may launch several jobs.

    Args:
        allocation: The scheduler's number of the allocation; ``None``: no scheduler.
        state: State of the recovery policy.
    """
    if allocation is None:
        return f"job-{secrets.token_hex(4)}"
    cycles = {load.cycle for load in state.loads}.union(*(one.tainted for one in state.excluded))
    taken = {step.job for step in state.history} | {cycle.rpartition("-")[0] for cycle in cycles}
    name, number = allocation, 1
    while name in taken:
        name, number = f"{allocation}.{number}", number + 1
    return name
