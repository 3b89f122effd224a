"""A check and what it found, as data."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

__all__ = ["Check", "CheckOutcome", "CheckResult", "Status", "failed", "has_failed", "ok", "skipped"]


class Status(StrEnum):
    """How a check ended. A wrong answer, none, and a check that could not be made are three things."""

    OK = "ok"
    """Looked at, and right."""
    FAILED = "failed"
    """Looked at, and wrong."""
    LOST = "lost"
    """The peer is gone."""
    TIMED_OUT = "timed_out"
    """No answer in time."""
    ERROR = "error"
    """The check could not be made; nothing is known."""
    SKIPPED = "skipped"
    """There is nothing here to check."""


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    status: Status
    reason: str
    """One line for people."""
    facts: dict[str, Any] = {}
    """What was measured."""

    def result(self, name: str, target: str, *, took_s: float) -> CheckResult:
        """Return it as the result of a named check of a target."""
        return CheckResult(
            name=name, target=target, status=self.status, reason=self.reason, took_s=round(took_s, 4), facts=self.facts
        )


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One check, which a probe process runs. Each knows what it needs, and nothing of this process."""

    def run(self) -> CheckOutcome:
        """Make the check.

        Blocks: possibly forever; :class:`~outlast.health.prober.Prober` bounds it.
        """
        raise NotImplementedError


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


def ok(reason: str, **facts: Any) -> CheckOutcome:
    """Return the outcome of a check that passed."""
    return CheckOutcome(status=Status.OK, reason=reason, facts=facts)


def failed(reason: str, **facts: Any) -> CheckOutcome:
    """Return the outcome of a check that failed."""
    return CheckOutcome(status=Status.FAILED, reason=reason, facts=facts)


def skipped(reason: str, **facts: Any) -> CheckOutcome:
    """Return the outcome of a check for which there is nothing here."""
    return CheckOutcome(status=Status.SKIPPED, reason=reason, facts=facts)
