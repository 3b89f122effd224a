"""Settings of monitoring, restarting and fault simulation."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from outlast.config.base import Partial, from_mapping, require, require_finite

__all__ = ["LAUNCHERS_OWN", "FaultToleranceConfig"]

LAUNCHERS_OWN = ("max_no_progress_cycles", "max_node_faults", "min_nodes", "node_heartbeat_timeout", "shutdown_grace")
"""Fields that a launcher carries out: without one of ours they have no effect."""


def _check_seconds(name: str, value: float | None) -> None:
    require(value is None or value > 0, f"{name}={value} must be above 0 seconds; write none to switch it off")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultToleranceConfig(Partial):
    """What is watched, for how long, and how often a job may be restarted.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    enable_ft_package: bool = False
    """Watch heartbeats and sections of the workers; off: only their deaths are noticed. Where it is not given,
    ``outlast run`` watches, and a session under another launcher does if a timeout is given."""

    calc_ft_timeouts: bool = False
    """Learn timeouts of sections and heartbeats from observed durations, and keep them in ft_state.json for the next
    cycle and job."""

    initial_rank_heartbeat_timeout: float | None = None
    """Longest time in seconds from a worker's start to its first heartbeat; none = not enforced. Where it is not given,
    ``outlast run`` enforces 1800 s, or ``rank_heartbeat_timeout`` if that is longer, on ranks with a session. Where
    their section is given a longer timeout or none, or the time outside sections a longer one, that holds instead."""

    rank_heartbeat_timeout: float | None = None
    """Longest time in seconds between two heartbeats of a worker; none = not enforced. Where it is not given, ``outlast
    run`` enforces 1800 s on ranks with a session, while they are in its loop. Where their section is given a longer
    timeout or none, or the time outside sections a longer one, that holds instead. An evaluation within the loop sends
    none: sections find a hang much sooner."""

    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    """Longest time in seconds in each section, as setup:600,step:180,checkpointing:420; a section that is not
    named is measured, not enforced."""

    rank_out_of_section_timeout: float | None = None
    """Longest time in seconds that a worker that uses sections may spend outside all of them; none = not
    enforced."""

    safety_factor: float = 5.0
    """A learned timeout is the longest observed duration times this."""

    num_warmup_iterations: int = 1
    """In a cycle's first iterations, this many, the section step is not enforced; 0 = enforced from the
    first."""

    rank_termination_signal: str = "SIGKILL"
    """Signal that ends a hung worker when no launcher of ours does (SIGKILL, SIGTERM, ...)."""

    max_no_progress_cycles: int = 3
    """Cycles in a row that may end without a new durable generation, where progress can be known; then the
    job stops with exit code 93."""

    max_node_faults: int = 3
    """Faults after which a node gives its slot to a spare, where there is one; 0 = never."""

    min_nodes: int | None = None
    """Smallest number of nodes that the script can train with once spares are spent; none = never shrink."""

    node_heartbeat_timeout: float = 5.0
    """Seconds without a sign of life after which a node counts as lost."""

    shutdown_grace: float = 60.0
    """Seconds that workers get to save after SIGTERM or Ctrl-C reached their agent; 0 = none."""

    simulate_fault: bool = False
    """Cause one fault on purpose, once a run."""

    simulated_fault_type: str = "random"
    """rank_hung (SIGSTOP), rank_killed (SIGKILL), or random (one of the two)."""

    simulated_fault_rank: int | None = None
    """Global rank that the fault applies to; none = drawn at random, the same everywhere."""

    simulated_fault_base_delay: float = 0.0
    """Seconds after the session's start before which the fault does not come."""

    def __post_init__(self) -> None:
        require_finite(self)
        _check_seconds("initial_rank_heartbeat_timeout", self.initial_rank_heartbeat_timeout)
        _check_seconds("rank_heartbeat_timeout", self.rank_heartbeat_timeout)
        _check_seconds("rank_out_of_section_timeout", self.rank_out_of_section_timeout)
        for name, seconds in self.rank_section_timeouts.items():
            _check_seconds(f"rank_section_timeouts[{name!r}]", seconds)
            require(0 < len(name.encode()) <= 39, f"section name {name!r} must have 1 to 39 bytes; shorten it")
        _check_seconds("node_heartbeat_timeout", self.node_heartbeat_timeout)
        require(self.safety_factor >= 1, f"safety_factor={self.safety_factor} must be at least 1")
        require(
            self.num_warmup_iterations >= 0,
            f"num_warmup_iterations={self.num_warmup_iterations} must not be negative",
        )
        require(
            self.max_no_progress_cycles >= 1,
            f"max_no_progress_cycles={self.max_no_progress_cycles} must be at least 1",
        )
        require(self.max_node_faults >= 0, f"max_node_faults={self.max_node_faults} must not be negative")
        require(self.min_nodes is None or self.min_nodes >= 1, f"min_nodes={self.min_nodes} must be at least 1")
        require(self.shutdown_grace >= 0, f"shutdown_grace={self.shutdown_grace} must not be negative")
        require(
            self.rank_termination_signal in signal.Signals.__members__,
            f"rank_termination_signal={self.rank_termination_signal!r} is no signal; write SIGKILL, say",
        )
        require(
            self.simulated_fault_type in ("rank_hung", "rank_killed", "random"),
            f"simulated_fault_type={self.simulated_fault_type!r} must be rank_hung, rank_killed or random",
        )
        require(
            self.simulated_fault_rank is None or self.simulated_fault_rank >= 0,
            f"simulated_fault_rank={self.simulated_fault_rank} must not be negative",
        )
        require(
            self.simulated_fault_base_delay >= 0,
            f"simulated_fault_base_delay={self.simulated_fault_base_delay} must not be negative",
        )
        initial, steady = self.initial_rank_heartbeat_timeout, self.rank_heartbeat_timeout
        require(
            initial is None or steady is None or initial >= steady,
            f"initial_rank_heartbeat_timeout={initial} must be at least rank_heartbeat_timeout={steady}: "
            "the first heartbeat also waits for start-up",
        )

    def to_json(self) -> str:
        """Return the fields that were given as JSON, for another process."""
        return json.dumps(self.given)

    @classmethod
    def from_json(cls, text: str) -> FaultToleranceConfig:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: It is something else, or was cut.
        """
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        require(isinstance(values, dict), f"{text[:80]!r} are no fault tolerance settings; run one outlast everywhere")
        return from_mapping(cls, values, where="fault tolerance settings")
