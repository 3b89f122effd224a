"""Events that threads and signal handlers put into an agent's mailbox; the coordinator's messages are in
``protocol``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.launch.protocol import Stop

if TYPE_CHECKING:
    from outlast.monitor.watchdog import HangReport


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The agent received a signal that requests a shutdown."""

    signal: int


@dataclass(frozen=True, slots=True)
class WriterDied:
    """The node's checkpoint writer died; its owner starts another one."""

    summary: str


@dataclass(frozen=True, slots=True)
class HangSeen:
    """The watchdog detected ranks of a cycle that exceeded a timeout."""

    cycle: int
    report: HangReport


@dataclass(frozen=True, slots=True)
class WatchdogFailed:
    """The watchdog's thread ended on an error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class AgentStops:
    """The agent must exit: another job owns its run directory."""

    stop: Stop
