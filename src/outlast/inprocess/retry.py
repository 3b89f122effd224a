"""Plug-ins that end restarting: for the whole job, or for one rank."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.errors import ConfigError, RestartAbort, UnhealthyRank
from outlast.inprocess.state import State

__all__ = ["FaultCounter", "RetryController"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryController:
    """End restarting in process by ``RestartAbort``; an ``initialize`` plug-in.

    Raises:
        ConfigError: A limit is out of range.
    """

    max_iterations: int | None = None
    """Restarts that may be made; ``None`` = no limit, 0 = none."""
    min_world_size: int = 1
    """Fewest processes to go on with, reserves included."""
    min_active_world_size: int = 1
    """Fewest ranks to run the function with."""

    def __post_init__(self) -> None:
        if self.max_iterations is not None and self.max_iterations < 0:
            raise ConfigError(f"max_iterations={self.max_iterations} must not be negative; None = no limit")
        for name in ("min_world_size", "min_active_world_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    def __call__(self, state: State) -> None:
        """Check what is left.

        Raises:
            RestartAbort: A limit is passed; the message names it.
        """
        for broken, limit in (
            (
                self.max_iterations is not None and state.iteration > self.max_iterations,
                f"this would be restart {state.iteration} of max_iterations={self.max_iterations}",
            ),
            (
                state.world_size < self.min_world_size,
                f"{state.world_size} processes are left of min_world_size={self.min_world_size}",
            ),
            (
                state.active_world_size < self.min_active_world_size,
                f"{state.active_world_size} ranks would run of min_active_world_size={self.min_active_world_size}",
            ),
        ):
            if broken:
                raise RestartAbort(
                    f"{limit}; look at the faults before, and restart the job",
                    counts={
                        "restarts": state.iteration,
                        "living": state.world_size,
                        "active": state.active_world_size,
                        "faults": sum(state.fault_counts.values()),
                    },
                    rank=state.initial_rank,
                    node=state.node,
                    iteration=state.iteration,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCounter:
    """Let a rank leave for good that fails too often; a ``health_check`` plug-in.

    Raises:
        ConfigError: The limit is out of range.
    """

    max_rank_faults: int | None = None
    """Faults that a rank may have; with one more it leaves. ``None`` = no limit. What follows from another rank's fault
    does not count."""

    def __post_init__(self) -> None:
        if self.max_rank_faults is not None and self.max_rank_faults < 0:
            raise ConfigError(f"max_rank_faults={self.max_rank_faults} must not be negative; None = no limit")

    def __call__(self, state: State) -> None:
        """Check this rank.

        Raises:
            UnhealthyRank: It has failed more often than it may.
        """
        faults = state.fault_counts.get(state.initial_rank, 0)
        if self.max_rank_faults is not None and faults > self.max_rank_faults:
            raise UnhealthyRank(
                f"rank {state.initial_rank} failed {faults} times, more than max_rank_faults={self.max_rank_faults} "
                "allows; look at its node",
                rank=state.initial_rank,
                node=state.node,
                iteration=state.iteration,
            )
