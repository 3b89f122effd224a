"""Members whose link broke: they may come back within a short time, unless their process is seen to be gone.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outlast import clock
from outlast.inprocess.messages import MemberPlace

__all__ = ["RETURN_S", "Absences", "name_space"]

RETURN_S = 5.0
"""Seconds that a member whose link broke has to come back: time for another monitor process to start on a machine
that is busy. One whose process is seen to be gone is not waited for."""


def name_space() -> str:
    """Return a name of this machine and of the name space of its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclass(slots=True)
class _Absence:
    until_s: float
    pidfd: int | None
    is_dead: bool = False


class Absences:
    """Wait for members.

    Args:
        selector: Of the process's loop.
        space: Where this process can see whether another process lives.
        on_death: Called from the loop when a member that is waited for proves to be dead; see :meth:`take_ended`.
    """

    def __init__(self, selector: selectors.BaseSelector, space: str, on_death: Callable[[], None]) -> None:
        self._selector, self._space, self._on_death = selector, space, on_death
        self._absent: dict[int, _Absence] = {}

    def __len__(self) -> int:
        return len(self._absent)

    def __contains__(self, rank: int) -> bool:
        return rank in self._absent

    def ranks(self) -> tuple[int, ...]:
        """Return who is waited for."""
        return tuple(self._absent)

    @property
    def deadline_s(self) -> float | None:
        """When the next one has been waited for long enough."""
        return min((absence.until_s for absence in self._absent.values()), default=None)

    def begin(self, rank: int, place: MemberPlace, patience_s: float = RETURN_S) -> None:
        """Wait for a member."""
        self.end(rank)
        absence = _Absence(clock.now_s() + patience_s, None)
        self._absent[rank] = absence
        if place.space != self._space:
            return
        try:
            absence.pidfd = os.pidfd_open(place.pid)
        except ProcessLookupError:
            absence.is_dead, absence.until_s = True, 0.0
            return

        def see_death(_: int) -> None:
            absence.is_dead, absence.until_s = True, 0.0
            self._on_death()

        self._selector.register(absence.pidfd, selectors.EVENT_READ, see_death)

    def end(self, rank: int) -> None:
        """Wait for a member no more."""
        absence = self._absent.pop(rank, None)
        if absence is not None and absence.pidfd is not None:
            self._selector.unregister(absence.pidfd)
            os.close(absence.pidfd)

    def take_ended(self) -> list[tuple[int, bool]]:
        """Return those who are waited for no more, and whether they are known to be dead."""
        now_s = clock.now_s()
        ended = [(rank, absence.is_dead) for rank, absence in self._absent.items() if now_s >= absence.until_s]
        for rank, _ in ended:
            self.end(rank)
        return ended

    def close(self) -> None:
        """Wait for nobody; idempotent."""
        for rank in self.ranks():
            self.end(rank)
