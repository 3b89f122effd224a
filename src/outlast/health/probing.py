"""Checks, what they find, and the process that makes them, so that one that hangs or crashes harms no caller.

A check of a network disk, a driver or a user's script can block forever, where no exception reaches it; some crash the
process. The probe process runs one check after another. When one exceeds its time, or the process dies, that is the
check's outcome, and the next check gets a new process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from outlast.clock import now_s
from outlast.runtime.processes import ChildProcess, describe_exit


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

    def result(self, name: str, target: str, *, started_s: float) -> CheckResult:
        """Return it as the result of a named check of a target, begun at a monotonic time."""
        took_s = round(now_s() - started_s, 4)
        return CheckResult(
            name=name, target=target, status=self.status, reason=self.reason, took_s=took_s, facts=self.facts
        )


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One check, which a probe process runs. Each knows what it needs, and nothing of this process."""

    def run(self) -> CheckOutcome:
        """Make the check.

        Blocks: possibly forever; :class:`Prober` bounds it.
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


class Prober:
    """Run checks in a probe process. A context manager: what it started is ended at its end.

    Thread: one, which must outlive the probe process: the kernel ends that with it. :meth:`abandon`: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._child: ChildProcess | None = None

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def ask(self, check: Check, name: str, target: str, *, timeout_s: float) -> CheckResult:
        """Have a check made.

        Blocks: up to ``timeout_s`` and some seconds, whatever the check does.
        """
        started_s = now_s()
        return self._ask(check, started_s, timeout_s).result(name, target, started_s=started_s)

    def _ask(self, check: Check, started_s: float, timeout_s: float) -> CheckOutcome:
        try:
            child = self._send(check)
        except OSError as error:
            return CheckOutcome(status=Status.ERROR, reason=f"the check could not be started ({error})")
        try:
            outcome: CheckOutcome | None = child.channel.receive(within_s=started_s + timeout_s - now_s())
        except TimeoutError:
            self._drop()
            return CheckOutcome(status=Status.TIMED_OUT, reason=f"no response in {timeout_s:g} s")
        except ConnectionError:
            outcome = None
        if outcome is None:
            exit_code = self._drop()
            how = "its process could not be reaped" if exit_code is None else describe_exit(exit_code)
            return failed(f"the check's process ended with {how}")
        return outcome

    def abandon(self) -> None:
        """End the check that is being made, and make no others: they all fail at once. Blocks: never."""
        with self._lock:
            self._abandoned.set()
            if self._child is not None:
                self._child.kill()

    def _send(self, check: Check) -> ChildProcess:
        if self._child is not None:
            try:
                self._child.channel.send(check)
            except ConnectionError:
                pass  # it is gone; the end of its answers shows how
            return self._child
        if self._abandoned.is_set():
            raise OSError("no checks are made any more")
        # In a session of its own: a user's command and all it starts are ended with it.
        child = ChildProcess(
            "outlast.health.node", str(os.getpid()), task=check, receives=CheckOutcome, quiet=True, own_session=True
        )
        with self._lock:
            self._child = child
            if self._abandoned.is_set():
                child.kill()
        return child

    def _drop(self) -> int | None:
        """End the process; return its exit code, ``None`` when there is none or it cannot be ended."""
        with self._lock:
            child, self._child = self._child, None
        return None if child is None else child.close()
