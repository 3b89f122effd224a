"""Settings of the comparison of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import require, require_finite

__all__ = ["ReplicaDigestConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigestConfig:
    """How often the replicas of a data-parallel group are compared.

    Raises:
        ConfigError: A value is out of range; the message says what is not.
    """

    interval: int = 0
    """Optimizer steps between two comparisons of all replicas' parameters and optimizer state; they are compared before
    each save, too, which is not made if they differ. 0 = never, not even before saves."""

    def __post_init__(self) -> None:
        require_finite(self)
        require(self.interval >= 0, f"interval={self.interval} must not be negative; 0 = never")
