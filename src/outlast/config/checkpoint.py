"""Settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import require, require_finite

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where and how often generations are saved, and how many are kept.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    directory: str
    """Folder of the run's generations, seen by every rank or one per node; made when missing."""

    save_interval: int = 0
    """Iterations between two saves; 0 = only when the script, or an orderly end, asks for one."""

    async_save: bool = True
    """Return from a save once the state is copied; off: once it is committed."""

    most_recent_k: int = 3
    """Committed generations to keep, at least 2 (the newest may prove bad); -1 = all."""

    max_consecutive_save_failures: int = 5
    """Failed saves in a row after which training stops with the last error; 0 = never."""

    save_timeout: float = 600.0
    """Seconds that a save may take from its copy to its commit before it counts as failed."""

    def __post_init__(self) -> None:
        require_finite(self)
        require(bool(self.directory), "directory must not be empty; name a folder for the run's generations")
        require(self.save_interval >= 0, f"save_interval={self.save_interval} must not be negative")
        require(
            self.most_recent_k == -1 or self.most_recent_k >= 2,
            f"most_recent_k={self.most_recent_k} must be at least 2, or -1 to keep all",
        )
        require(
            self.max_consecutive_save_failures >= 0,
            f"max_consecutive_save_failures={self.max_consecutive_save_failures} must not be negative",
        )
        require(self.save_timeout > 0, f"save_timeout={self.save_timeout} must be above 0 seconds")
