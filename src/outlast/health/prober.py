"""Runs checks in a process of their own, so that one that hangs or crashes does neither to whoever asked.

A check of a network disk, a driver or a user's script can block for ever, where no exception reaches it; some crash the
process. The probe process takes one task after another. When one exceeds its time, or the process dies, the answer says
so, and the next task gets a new process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import msgspec

from outlast import env
from outlast.clock import now_s
from outlast.decoding import from_json
from outlast.health.result import CheckResult, Outcome, Status
from outlast.health.tasks import Task
from outlast.runtime.processes import describe_exit, kill_group

__all__ = ["Prober"]

_END_S = 2.0


class Prober:
    """Ask a probe process. A context manager: what it started is ended at its end.

    Thread: one, which must outlive the probe process: the kernel ends that with it. :meth:`abandon`: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._pending = b""

    def __enter__(self) -> Prober:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def ask(self, task: Task, name: str, target: str, *, timeout_s: float) -> CheckResult:
        """Have a check made.

        Args:
            task: What to check.
            name: The result's name.
            target: The result's target.
            timeout_s: How long it may take, the start of the process included.

        Blocks: up to ``timeout_s`` and some seconds, whatever the check does.
        """
        started_s = now_s()
        try:
            outcome = self._ask(task, until_s=started_s + timeout_s, timeout_s=timeout_s)
        except OSError as error:
            self._drop()
            outcome = Outcome(status=Status.ERROR, reason=f"the check could not be started ({error})")
        return CheckResult(
            name=name,
            target=target,
            status=outcome.status,
            reason=outcome.reason,
            took_s=round(now_s() - started_s, 3),
            facts=outcome.facts,
        )

    def abandon(self) -> None:
        """End the check that is being made, and make none any more: they all fail at once. Blocks: never."""
        with self._lock:
            self._abandoned.set()
            if self._process is not None:
                kill_group(self._process.pid, signal.SIGKILL)

    def _ask(self, task: Task, *, until_s: float, timeout_s: float) -> Outcome:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; the end of its answers says how
        line = self._read_line(until_s)
        if line is None:
            self._drop()
            return Outcome(status=Status.TIMED_OUT, reason=f"no answer in {timeout_s:g} s")
        if not line:
            exit_code = self._drop()
            how = "its process could not be reaped" if exit_code is None else describe_exit(exit_code)
            return Outcome(status=Status.FAILED, reason=f"the check's process ended with {how}")
        return from_json(line, Outcome)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._abandoned.is_set():
            raise OSError("no check is made any more")
        variables = env.environ()
        package_root = str(Path(__file__).resolve().parents[2])
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, variables.get("PYTHONPATH")]))
        self._answers, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "outlast.health.probe", str(theirs), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs],
                env=variables,
                start_new_session=True,  # a user's command and all it starts are ended with it
            )
        finally:
            os.close(theirs)
        with self._lock:
            self._process = process
            if self._abandoned.is_set():
                kill_group(process.pid, signal.SIGKILL)
        return process

    def _read_line(self, until_s: float) -> bytes | None:
        """Return the next answer; empty: the process ended; ``None``: not in time."""
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, until_s - now_s()))
            if not readable:
                return None
            data = os.read(self._answers, 65536)
            if not data:
                return b""
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _drop(self) -> int | None:
        """End the process; return its exit code, ``None`` when there is none or it cannot be ended."""
        with self._lock:
            process, self._process = self._process, None
        if self._answers >= 0:
            os.close(self._answers)
            self._answers, self._pending = -1, b""
        if process is None:
            return None
        kill_group(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass  # what it did not read is of no interest any more
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # It sits in the kernel, in a driver or a network disk, and cannot be killed before that lets go.
            threading.Thread(target=process.wait, name="outlast-health-reaper", daemon=True).start()
            return None
