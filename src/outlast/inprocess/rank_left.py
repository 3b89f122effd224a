"""How a rank leaves for good while the others go on."""

from __future__ import annotations

from outlast.errors import ExitReason

__all__ = ["RankLeft"]


class RankLeft(SystemExit):
    """This rank leaves a wrapped function for good, and the others go on; its process ends with exit code 0.

    Args:
        reason: Why, in one line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(int(ExitReason.FINISHED))
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
