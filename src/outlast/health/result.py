"""What a check found, as data."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

__all__ = ["CheckResult", "Outcome", "Status", "has_failed"]


class Status(StrEnum):
    """How a check ended. A wrong answer, none, and a check that could not be made are three things."""

    OK = "ok"
    """Looked at, and right."""
    FAILED = "failed"
    """Looked at, and wrong."""
    LOST = "lost"
    """Whoever was asked is gone."""
    TIMED_OUT = "timed_out"
    """No answer in time."""
    ERROR = "error"
    """The check could not be made; nothing is known."""
    SKIPPED = "skipped"
    """There is nothing here to look at."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one check says."""

    status: Status
    reason: str
    """One line for people."""
    facts: dict[str, Any] = {}
    """What was measured."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one thing."""

    name: str
    """What was checked: ``disk``, ``shm``, ``compute``, ..."""
    target: str
    """Of what: a path, a device, an interface."""
    status: Status
    reason: str
    """One line for people."""
    took_s: float
    facts: dict[str, Any] = {}
    """What was measured."""

    @property
    def has_failed(self) -> bool:
        """Whether the node is to be kept out for it."""
        return self.status not in (Status.OK, Status.SKIPPED)

    def describe(self) -> str:
        """Return one line for people."""
        return f"{self.name} {self.target}: {self.status.replace('_', ' ')}: {self.reason}"


def has_failed(results: Iterable[CheckResult]) -> str | None:
    """Return why a node is to be kept out, for people; ``None``: it may join."""
    return "; ".join(result.describe() for result in results if result.has_failed) or None
