"""News for the agent's loop that come neither from the coordinator nor from the process that starts workers."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.monitor.watchdog import HangReport

__all__ = ["Broken", "HangSeen", "RunDirectoryLost", "SignalReceived", "WriterDied"]


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
