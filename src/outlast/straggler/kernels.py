"""Kernel times of a few steps, through torch's own profiler; without a device the times of torch's operators.

The profiler slows the steps down that it looks at, and waits for the device when it ends. So it has to be asked for, it
looks at a few steps of a window, the same ones on all ranks, and no section is timed in those. Kernels of collectives
are left out: they take as long as their ranks wait.
"""

from __future__ import annotations

import logging
from typing import Any

from outlast.policy.timings import Timing, summarise
from outlast.runtime.device import kernel_seconds, profiled_activities

__all__ = ["KernelTimes"]

log = logging.getLogger(__name__)
NUM_STEPS = 2
"""Steps that are looked at in a window."""
MAX_KERNELS = 50
"""Kernels of a rank that are told, those that took most time."""


class KernelTimes:
    """Look at steps, once a window.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._times_s: dict[str, list[float]] = {}
        self._is_off = False

    @property
    def is_running(self) -> bool:
        """Whether the profiler looks at the current step."""
        return self._profile is not None

    def start(self) -> None:
        """Begin to look. A profiler that cannot start, as another one runs, is said once and not tried again."""
        if self._is_off or self._profile is not None:
            return
        from torch.profiler import profile

        started = profile(activities=profiled_activities())
        try:
            started.start()
        except RuntimeError as error:
            self._is_off = True
            log.warning("kernels are not timed: torch's profiler cannot start (%s)", error)
            return
        self._profile = started

    def stop(self) -> None:
        """End looking, and take in what was seen.

        Blocks: until the device has done what it was given, and while the events are read.
        """
        if self._profile is None:
            return
        stopped, self._profile = self._profile, None
        stopped.stop()
        for event in stopped.events() or ():
            if seconds := kernel_seconds(event):
                self._times_s.setdefault(event.name, []).append(seconds)

    def take(self, best_s: dict[str, float]) -> tuple[Timing, ...]:
        """Return the summaries of the kernels that took most time, and forget them all.

        Args:
            best_s: The own best of earlier windows, by kernel.
        """
        timings = [summarise(name, values, best_s=best_s.get(name, 0.0)) for name, values in self._times_s.items()]
        self._times_s = {}
        return tuple(sorted(timings, key=lambda timing: -timing.total_s)[:MAX_KERNELS])
