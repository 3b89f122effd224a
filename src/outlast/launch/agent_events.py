"""What wakes an agent beside its workers and the coordinator: local events, and timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outlast import clock
from outlast.monitor.watchdog import HangReport

__all__ = ["Broken", "HangSeen", "RunDirectoryLost", "SignalReceived", "Timers", "WriterDied"]


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal that tells the agent to leave."""

    signal: int


@dataclass(frozen=True, slots=True)
class RunDirectoryLost:
    """Another job has taken the run directory over, while this one was stopped or cut off."""

    why: str


@dataclass(frozen=True, slots=True)
class WriterDied:
    """The node's checkpoint writer died by itself; its owner starts another."""

    summary: str


@dataclass(frozen=True, slots=True)
class HangSeen:
    """The watchdog saw ranks of a cycle exceed a timeout."""

    cycle: int
    report: HangReport


@dataclass(frozen=True, slots=True)
class Broken:
    """A thread that the cycle needs ended on an error."""

    what: str
    error: BaseException


class Timers:
    """Named deadlines of one loop. Thread: the loop's."""

    def __init__(self) -> None:
        self._deadlines: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Have something done in ``seconds``; it takes the place of what the name stood for."""
        self._deadlines[name] = (clock.now_s() + seconds, action)

    def cancel(self, name: str) -> None:
        """Have it not done, if it still was to come."""
        self._deadlines.pop(name, None)

    def is_set(self, name: str) -> bool:
        """Return whether something is still to be done under a name."""
        return name in self._deadlines

    def until_next_s(self) -> float | None:
        """Return the seconds until the next one; ``None`` = there is none."""
        next_s = min((at_s for at_s, _ in self._deadlines.values()), default=None)
        return None if next_s is None else max(0.0, next_s - clock.now_s())

    def fire(self) -> None:
        """Do what is due."""
        now_s = clock.now_s()
        for name in [name for name, (at_s, _) in self._deadlines.items() if now_s >= at_s]:
            _, action = self._deadlines.pop(name)
            action()
