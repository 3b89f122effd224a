"""What a monitor process concludes from its rank's page.

Nothing here imports torch, and nothing here looks at a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outlast.inprocess.messages import FaultKind
from outlast.inprocess.monitor_task import MonitorTask
from outlast.inprocess.page import RankPhase

__all__ = ["RankWatch", "SoftTimeout", "Stuck"]

_IN_FN = (RankPhase.IN_FN, RankPhase.LEAVING)
_IDLE = (RankPhase.WAITING, RankPhase.COMPLETED)
"""The main thread waits in the wrapper, and nothing of ours holds the interpreter's lock."""
_BEAT_SLACK_S = 0.25
"""How late a monitor thread may be on a busy machine and still count as running."""


class Words(Protocol):
    """What is read of a page."""

    @property
    def beat_ns(self) -> int: ...
    @property
    def progress_ns(self) -> int: ...
    @property
    def phase(self) -> RankPhase: ...
    @property
    def iteration(self) -> int: ...
    @property
    def is_paused(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SoftTimeout:
    """The main thread makes no progress, though the interpreter is free."""

    iteration: int
    summary: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """The rank has to be ended."""

    iteration: int
    kind: FaultKind
    summary: str


class RankWatch:
    """Watch one rank.

    Args:
        page: Its page.
        task: Timeouts.
    """

    def __init__(self, page: Words, task: MonitorTask) -> None:
        self._page, self._task = page, task
        self._soft_ns, self._hard_ns = int(task.soft_timeout_s * 1e9), int(task.hard_timeout_s * 1e9)
        self._start_ns = int(task.limits.barrier_timeout_s * 1e9)
        self._fresh_ns = int((task.thread_interval_s + _BEAT_SLACK_S) * 1e9)
        self._said_soft = -1
        self._went: tuple[int, int] | None = None
        self._told_to_leave_ns: int | None = None
        self._is_over = False

    def note_end(self) -> None:
        """The rank is about to leave the wrapper, or has left: its monitor thread need not run any more."""
        self._is_over = True

    def note_go(self, iteration: int, now_ns: int) -> None:
        """The rank was told to enter an iteration."""
        self._went = (iteration, now_ns)
        self._told_to_leave_ns = None

    def note_leave(self, now_ns: int) -> None:
        """The rank was told to leave the function."""
        self._went = None
        if self._told_to_leave_ns is None:
            self._told_to_leave_ns = now_ns

    def describe_idle(self, now_ns: int) -> SoftTimeout | None:
        """Return how long a rank in the function has made no progress, if that is half a soft timeout, and untold."""
        page = self._page
        since_ns = now_ns - page.progress_ns
        is_judged = page.phase == RankPhase.IN_FN and not page.is_paused and self._said_soft < page.iteration
        if not is_judged or self._told_to_leave_ns is not None or since_ns < self._soft_ns // 2:
            return None
        self._said_soft = page.iteration
        return SoftTimeout(page.iteration, f"no progress for {since_ns / 1e9:.1f} s while others waited")

    def look(self, now_ns: int) -> tuple[SoftTimeout | Stuck | None, int | None]:
        """Return what is found, and when to look again; ``None``: when anything else happens."""
        page, iteration = self._page, self._page.iteration
        phase = page.phase
        if self._went is not None:
            if page.iteration >= self._went[0] and phase not in (RankPhase.WAITING, RankPhase.STARTING):
                self._went = None
            elif now_ns >= (due := self._went[1] + self._start_ns):
                text = f"the function was not entered within {self._task.limits.barrier_timeout_s:g} s"
                return Stuck(self._went[0], FaultKind.HARD_TIMEOUT, text), None
            else:
                found, silent_ns = self._look_at_beat(self._went[0], now_ns, "before the function was entered")
                return found, due if silent_ns is None else min(due, silent_ns)
        if phase in _IDLE:
            return self._look_at_beat(iteration, now_ns, "outside the function")
        if phase not in _IN_FN:
            return None, None
        if page.is_paused:
            return None, now_ns + self._soft_ns
        progress_ns = page.progress_ns
        base_ns = progress_ns if self._told_to_leave_ns is None else min(progress_ns, self._told_to_leave_ns)
        hard_ns = base_ns + self._hard_ns
        if now_ns >= hard_ns:
            return Stuck(iteration, FaultKind.HARD_TIMEOUT, self._describe(now_ns, hard=True)), None
        if self._told_to_leave_ns is not None or self._said_soft >= iteration:
            return None, hard_ns
        soft_ns = progress_ns + self._soft_ns
        if now_ns < soft_ns:
            return None, soft_ns
        fresh_until_ns = page.beat_ns + self._fresh_ns
        if now_ns <= fresh_until_ns:
            self._said_soft = iteration
            return SoftTimeout(iteration, self._describe(now_ns, hard=False)), hard_ns
        # The monitor thread does not run either: it may come back (a long call that holds the interpreter's lock).
        return None, min(hard_ns, now_ns + self._fresh_ns // 4)

    def _look_at_beat(self, iteration: int, now_ns: int, where: str) -> tuple[Stuck | None, int | None]:
        """Judge a rank whose main thread may wait as long as it likes, such as a reserve: its monitor thread beats."""
        if self._is_over:
            return None, None
        silent_ns = self._page.beat_ns + self._hard_ns
        if now_ns < silent_ns:
            return None, silent_ns
        since_s = (now_ns - self._page.beat_ns) / 1e9
        text = f"no thread of it has run for {since_s:.1f} s {where}; it was stopped, or held the interpreter's lock"
        return Stuck(iteration, FaultKind.HARD_TIMEOUT, f"{text} (hard_timeout={self._task.hard_timeout_s:g})"), None

    def _describe(self, now_ns: int, *, hard: bool) -> str:
        since_s = (now_ns - self._page.progress_ns) / 1e9
        text = f"no progress for {since_s:.1f} s"
        if not hard:
            return text + f" (soft_timeout={self._task.soft_timeout_s:g})"
        if now_ns > self._page.beat_ns + self._fresh_ns:
            text += "; it was stopped, or held the interpreter's lock"
        elif self._told_to_leave_ns is not None:
            text = "it could not be interrupted"
        return text + f" (hard_timeout={self._task.hard_timeout_s:g})"
