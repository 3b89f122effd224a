"""Settings of the recovery of a group of actors."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import require, require_finite

__all__ = ["RecoveryConfig"]

_ABOVE_ZERO = (
    "ping_interval",
    "ping_timeout",
    "examine_timeout",
    "start_timeout",
    "store_timeout",
    "abort_timeout",
    "join_timeout",
    "collective_timeout",
    "close_timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """After how long an actor counts as lost, what each step of a recovery may take, and how often there may be one.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    ping_interval: float = 0.5
    """Seconds between two questions to an actor whether it lives. It answers beside whatever it does, so that one that
    waits in a collective is not taken for dead."""

    ping_timeout: float = 5.0
    """Seconds without an answer after which an actor counts as lost: it is stopped, holds the interpreter's lock, or
    its node cannot be reached."""

    examine_timeout: float = 0.7
    """Seconds in which actors have to say where they stand once one exceeded the timeout of a section; who does not is
    unresponsive."""

    start_timeout: float = 300.0
    """Seconds in which an actor has to start: its process, its imports, its constructor."""

    store_timeout: float = 10.0
    """Seconds in which an actor has to open the store where the next incarnation meets, and a node that is new to the
    group to start its checkpoint writer."""

    abort_timeout: float = 5.0
    """Seconds in which an actor has to leave an interrupted call; who does not is lost, too."""

    join_timeout: float = 300.0
    """Seconds in which all actors have to be connected, set up, and have loaded their state."""

    collective_timeout: float = 1800.0
    """Timeout in seconds of the process groups. Sections find a hang much sooner."""

    spare_wait: float = 60.0
    """Seconds to wait for another actor to start when no spare is left; 0 = none."""

    close_timeout: float = 10.0
    """Seconds in which actors have to be gone when the group is closed."""

    allow_shrink: bool = False
    """When no spare is left, go on at once with fewer data shards, from a generation of the global tier."""

    max_rounds: int = 4
    """Attempts of one recovery: each failure in it needs another one."""

    max_recoveries: int = 5
    """Recoveries in a row without progress; progress is a call that ends at a higher iteration than any before, or any
    call where actors keep no state."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name in _ABOVE_ZERO:
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0 seconds")
        require(self.spare_wait >= 0, f"spare_wait={self.spare_wait} must not be negative")
        require(
            self.ping_interval < self.ping_timeout,
            f"ping_interval={self.ping_interval} must be below ping_timeout={self.ping_timeout}: "
            "an answer is due before it is missed",
        )
        for name in ("max_rounds", "max_recoveries"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
