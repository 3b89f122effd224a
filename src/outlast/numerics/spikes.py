"""When a value is a spike: many times the largest of late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

__all__ = ["SpikeRule"]


class SpikeRule:
    """Tell spikes from ordinary values.

    The first ``warmup`` finite values are never spikes. After them a value is one whose magnitude is at least
    ``factor`` times the largest magnitude among the newest ``window`` finite values. NaN and infinite values are no
    spikes, and never count among those; nor does a value before it is known to be trained on.

    Args:
        factor: See above.
        warmup: See above.
        window: See above.
    """

    def __init__(self, *, factor: float, warmup: int, window: int) -> None:
        self._factor, self._warmup, self._window = factor, warmup, window
        self._num_seen = 0
        # Ordinal and magnitude of those of the window that are larger than all after them, so the first is the largest.
        self._largest: deque[tuple[int, float]] = deque()

    @property
    def maximum(self) -> float | None:
        """The largest magnitude in the window; ``None`` during the warm-up."""
        return self._largest[0][1] if self._num_seen >= self._warmup else None

    def is_spike(self, value: float) -> bool:
        """Return whether a value is a spike."""
        maximum = self.maximum
        return maximum is not None and math.isfinite(value) and maximum > 0 and abs(value) >= self._factor * maximum

    def note(self, value: float) -> None:
        """Take in a value that is trained on."""
        if not math.isfinite(value):
            return
        magnitude = abs(value)
        while self._largest and self._largest[-1][1] <= magnitude:
            self._largest.pop()
        self._largest.append((self._num_seen, magnitude))
        self._num_seen += 1
        while self._largest[0][0] < self._num_seen - self._window:
            self._largest.popleft()

    def state_dict(self) -> list[float]:
        """Return what it knows, as plain numbers: how many values it saw, then each maximum's ordinal and magnitude."""
        return [float(self._num_seen), *(number for entry in self._largest for number in entry)]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        seen, *entries = state
        self._num_seen = int(seen)
        self._largest = deque((int(at), size) for at, size in zip(entries[::2], entries[1::2], strict=True))
