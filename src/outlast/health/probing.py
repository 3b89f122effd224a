"""Checks, their outcomes, and the probe process that isolates callers from checks that hang or crash.

A check of a network disk, a driver or a user's script can block forever in a way that no exception interrupts; some
crash the process. The probe process runs one check after another. If a check times out or its process dies, that is the
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
    """Outcome of a check: a wrong result, no response, and a check that could not run are distinct."""

    OK = "ok"
    """The check passed."""
    FAILED = "failed"
    """The check found a fault."""
    LOST = "lost"
    """The peer is gone."""
    TIMED_OUT = "timed_out"
    """No response in time."""
    ERROR = "error"
    """The check could not run; nothing is known."""
    SKIPPED = "skipped"
    """There is nothing to check here."""


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    status: Status
    reason: str
    """One line for people."""
    facts: dict[str, Any] = {}

    def result(self, name: str, target: str, *, started_s: float) -> CheckResult:
        """Return the result of a named check of a target that started at a monotonic time."""
        took_s = round(now_s() - started_s, 4)
        return CheckResult(
            name=name, target=target, status=self.status, reason=self.reason, took_s=took_s, facts=self.facts
        )


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One check, run in a probe process: its fields hold all that it needs."""

    def run(self) -> CheckOutcome:
        """Run the check.

        Blocks: possibly forever; :class:`Prober` bounds it.
        """
        raise NotImplementedError


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check of one target."""

    name: str
    """Kind of check: ``disk``, ``shm``, ``compute``, ..."""
    target: str
    """A path, a device, an interface."""
    status: Status
    reason: str
    """One line for people."""
    took_s: float
    facts: dict[str, Any] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the node must be excluded because of this result."""
        return self.status not in (Status.OK, Status.SKIPPED)

    def describe(self) -> str:
        """Return one line for people."""
        return f"{self.name} {self.target}: {self.status.replace('_', ' ')}: {self.reason}"


def has_failed(results: Iterable[CheckResult]) -> str | None:
    """Return why a node must be excluded, for people; ``None`` = it may join."""
    return "; ".join(result.describe() for result in results if result.has_failed) or None


def ok(reason: str, **facts: Any) -> CheckOutcome:
    return CheckOutcome(status=Status.OK, reason=reason, facts=facts)


def failed(reason: str, **facts: Any) -> CheckOutcome:
    return CheckOutcome(status=Status.FAILED, reason=reason, facts=facts)


def skipped(reason: str, **facts: Any) -> CheckOutcome:
    return CheckOutcome(status=Status.SKIPPED, reason=reason, facts=facts)


class Prober:
    """Run checks in a probe process. A context manager that ends the process on exit.

    Thread: one, which must outlive the probe process, because the kernel ends the process with the thread.
    :meth:`abandon`: any.
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
        """Run a check in the probe process.

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
        """End the current check and fail all later ones at once. Blocks: never."""
        with self._lock:
            self._abandoned.set()
            if self._child is not None:
                self._child.kill()

    def _send(self, check: Check) -> ChildProcess:
        if self._child is not None:
            try:
                self._child.channel.send(check)
            except ConnectionError:
                pass  # the process is gone; receive() reports how
            return self._child
        if self._abandoned.is_set():
            raise OSError("no checks are made any more")
        # A separate session, so that a user's command and its children end with the process.
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
