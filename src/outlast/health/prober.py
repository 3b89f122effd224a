"""Runs checks in a process of their own, so that one that hangs or crashes does neither to its caller.

A check of a network disk, a driver or a user's script can block forever, where no exception reaches it; some crash the
process. The probe process runs one check after another. When one exceeds its time, or the process dies, that is the
check's outcome, and the next check gets a new process.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from outlast.clock import now_s
from outlast.health.result import Check, CheckOutcome, CheckResult, Status
from outlast.runtime.child import ChildProcess
from outlast.runtime.processes import describe_exit

__all__ = ["Prober"]


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def ask(self, check: Check, name: str, target: str, *, timeout_s: float) -> CheckResult:
        """Have a check made.

        Args:
            check: What to check.
            name: The result's name.
            target: The result's target.
            timeout_s: How long it may take, the start of the process included.

        Blocks: up to ``timeout_s`` and some seconds, whatever the check does.
        """
        started_s = now_s()
        try:
            child = self._send(check)
        except OSError as error:
            return self._result(name, target, started_s, Status.ERROR, f"the check could not be started ({error})")
        try:
            outcome: CheckOutcome | None = child.channel.receive(within_s=started_s + timeout_s - now_s())
        except TimeoutError:
            self._drop()
            return self._result(name, target, started_s, Status.TIMED_OUT, f"no answer in {timeout_s:g} s")
        except ConnectionError:
            outcome = None
        if outcome is None:
            exit_code = self._drop()
            how = "its process could not be reaped" if exit_code is None else describe_exit(exit_code)
            return self._result(name, target, started_s, Status.FAILED, f"the check's process ended with {how}")
        return outcome.result(name, target, took_s=now_s() - started_s)

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
            "outlast.health.probe", str(os.getpid()), task=check, receives=CheckOutcome, quiet=True, own_session=True
        )
        with self._lock:
            self._child = child
            if self._abandoned.is_set():
                child.kill()
        return child

    def _result(self, name: str, target: str, started_s: float, status: Status, reason: str) -> CheckResult:
        return CheckOutcome(status=status, reason=reason).result(name, target, took_s=now_s() - started_s)

    def _drop(self) -> int | None:
        """End the process; return its exit code, ``None`` when there is none or it cannot be ended."""
        with self._lock:
            child, self._child = self._child, None
        return None if child is None else child.close()
