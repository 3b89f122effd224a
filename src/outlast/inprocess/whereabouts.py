"""Where the main thread of a rank stands: whoever waits for another rank is a victim of its hang, not the cause.

Nothing here imports torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from outlast import clock
from outlast.monitor import stacks
from outlast.policy.restart_orders import WAITS

__all__ = ["Whereabouts", "look_up"]

_LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank stood when its stack was taken."""

    line: str
    """The innermost line of the user's code."""
    waits: bool | None
    """It waits for other ranks; ``None`` = that cannot be told."""

    @property
    def evidence(self) -> dict[str, str]:
        """What a fault tells of it."""
        waits = {True: "yes", False: "no", None: "unknown"}[self.waits]
        return {"stack_line": self.line, WAITS: waits}


def look_up(pid: int, timeout_s: float = 0.1) -> Whereabouts | None:
    """Return where the main thread of a process stands; ``None`` where it does not tell.

    Blocks: usually a few milliseconds, at most ``timeout_s``.
    """
    dump = stacks.Dump(pid)
    if not dump.request():
        return None
    end_s = clock.now_s() + timeout_s
    while not dump.is_complete():
        if clock.now_s() >= end_s:
            return None
        time.sleep(_LOOK_S)  # the file tells nobody when it grows
    stack = stacks.parse(dump.text())
    return Whereabouts(stack.line, stack.waits_in_collective) if stack.line is not None else None
