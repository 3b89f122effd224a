"""Events that threads and signal handlers put into an agent's mailbox; the coordinator's are in ``protocol``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.launch.protocol import Stop

if TYPE_CHECKING:
    from outlast.monitor.watchdog import HangReport


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal requests this agent to shut down."""

    signal: int


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
class WatchdogFailed:
    """The thread that watches the workers ended on an error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class AgentStops:
    """This agent ends: another job has its run directory."""

    stop: Stop
