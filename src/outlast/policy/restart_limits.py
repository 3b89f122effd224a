"""What bounds in-process restarts, as numbers."""

from __future__ import annotations

import msgspec

__all__ = ["RestartLimits"]


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds in-process restarts."""

    max_iterations: int | None = None
    """Restarts in process; ``None``: no bound."""
    barrier_timeout_s: float = 120.0
    """Seconds that a member has to be ready for the next iteration."""
    completion_timeout_s: float = 120.0
    """Seconds from the first completed rank to the last."""
    last_call_wait_s: float = 1.0
    """Seconds that the cause is waited for when all known faults are consequences of another one."""
