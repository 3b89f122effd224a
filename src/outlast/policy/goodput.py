"""Goodput and iterations per second: the one definition of each.

*Goodput* is the productive share of the wall time since the run, or one job of it, began (:func:`goodput`). Time is
productive from when all ranks have begun their first step until training stops, excluding waits for saves, steps whose
result was lost, and the delay that slow ranks add to steps. :class:`ProductiveTime` counts it during the run;
:mod:`outlast.goodput.ledger` places the same time on the run's time line.

*Iterations per second* is the mean over the last :data:`RATE_WINDOW_S` without a step back (:class:`IterationRate`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RATE_WINDOW_S = 60.0
REPORTED_S = 10.0
"""Ranks that train report more often; without a report for this long they do not train."""
_MIN_GAP_NS = int(RATE_WINDOW_S * 1e9) // 64
"""Samples of a rate that are closer than this count as one."""
_SLOW_SCORE = 0.9
"""A report before the one that identifies a slow rank counts as slowed by it if the rank's score there was lower."""
_MAX_POINTS = 1024


class IterationRate:
    """Iterations per second: the mean over the last :data:`RATE_WINDOW_S` seconds without a step back."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()

    def note(self, at_ns: int, iteration: int) -> None:
        """Add a sample at a monotonic time; an iteration lower than before drops the earlier samples."""
        samples = self._samples
        if samples and iteration < samples[-1][1]:
            samples.clear()
        if len(samples) > 1 and at_ns - samples[-2][0] < _MIN_GAP_NS:
            samples.pop()
        samples.append((at_ns, iteration))
        while len(samples) > 2 and samples[1][0] < at_ns - RATE_WINDOW_S * 1e9:
            samples.popleft()

    def clear(self) -> None:
        self._samples.clear()

    @property
    def span_s(self) -> float:
        """Seconds between the oldest and the newest sample."""
        return (self._samples[-1][0] - self._samples[0][0]) / 1e9 if self._samples else 0.0

    @property
    def value(self) -> float | None:
        """Iterations per second; ``None`` = too few samples."""
        if len(self._samples) < 2:
            return None
        last_ns, last = self._samples[-1]
        first_ns, first = next(one for one in self._samples if one[0] >= last_ns - RATE_WINDOW_S * 1e9)
        if first_ns == last_ns:  # a step takes longer than the window
            first_ns, first = self._samples[-2]
        return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else None


def goodput(productive_s: float, elapsed_s: float) -> float:
    """Return the goodput, from 0 to 1."""
    return min(1.0, max(0.0, productive_s / elapsed_s)) if elapsed_s > 0 else 0.0


class ProductiveTime:
    """Count the seconds of training whose result still counts, while the run continues."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.has_begun = False
        self.has_advanced = False
        """Whether an iteration was done since training last began."""
        self._last_s = 0.0
        self._points: list[tuple[int, float]] = []
        """Iteration, and total seconds when it was done; both ascending."""
        self._window_s = 0.0
        """Total seconds at the last report on slow ranks."""
        self._unnamed: deque[tuple[Mapping[int, float], float, float]] = deque(maxlen=16)
        """Scores of the newest reports if these identified no slow rank, with the interval of total seconds of each."""

    def begin(self, at_s: float, iteration: int) -> None:
        """Record that training begins, or begins again, after an iteration: time spent beyond it is lost."""
        while self._points and self._points[-1][0] > iteration:
            done, self.total_s = self._points.pop()
            before, spent_s = self._points[-1] if self._points else (iteration, self.total_s)
            if before < iteration:
                self.total_s = spent_s + (self.total_s - spent_s) * (iteration - before) / (done - before)
            else:
                self.total_s = spent_s
        if not self._points or self._points[-1][0] < iteration:
            self._points.append((iteration, self.total_s))
        self.has_begun, self.has_advanced, self._last_s = True, False, at_s
        self._window_s = self.total_s
        self._unnamed.clear()

    def advance(self, at_s: float, iteration: int, wait_s: float = 0.0) -> None:
        """Record that training has reached an iteration.

        Args:
            at_s: The time.
            iteration: Number of optimizer steps done.
            wait_s: Part of the time since the last call in which training waited for a save.
        """
        if not self.has_begun:
            return
        passed_s = at_s - self._last_s  # in each step of training: no call that can be avoided
        if passed_s > wait_s:
            self.total_s += passed_s - wait_s
        if passed_s > 0.0:
            self._last_s = at_s
        self.has_advanced = True
        points = self._points
        last = points[-1][0]
        if last < iteration:
            points.append((iteration, self.total_s))
            if len(points) > _MAX_POINTS:
                del points[1:-1:2]
        else:
            points[-1] = (last, self.total_s)

    def take_slow_ranks(self, scores: Mapping[int, float], named: Sequence[int]) -> None:
        """Subtract the delay that slow ranks added to steps since the last report on them."""
        window = self._window_s, self.total_s
        if not (share := slow_share(scores, named)):
            self._unnamed.append((scores, *window))
        else:
            self._take_off(share, *window)
            for earlier, from_s, to_s in reversed(self._unnamed):
                if not (share := share_before(earlier, named)):
                    break
                self._take_off(share, from_s, to_s)
                named = ()
            self._unnamed.clear()
        self._window_s = self.total_s

    def _take_off(self, share: float, from_s: float, to_s: float) -> None:
        """Subtract a share of an interval of total seconds."""

        def less(seconds: float) -> float:
            return seconds - share * max(0.0, min(seconds, to_s) - from_s)

        self._points = [(iteration, less(seconds)) for iteration, seconds in self._points]
        self.total_s = less(self.total_s)

    def redo_step(self) -> None:
        """Record that a step is run again in place: its first run does not count."""
        (first, begin_s), (last, end_s) = (self._points[0], self._points[-1]) if self._points else ((0, 0.0), (0, 0.0))
        if last > first:
            self.total_s -= (end_s - begin_s) / (last - first)
            self._points[-1] = (last, self.total_s)

    def resume(self, total_s: float) -> None:
        """Continue from the total that an earlier process counted."""
        self.total_s, self._points, self.has_begun, self._window_s = total_s, [], False, total_s


def slow_share(scores: Mapping[int, float], named: Iterable[int]) -> float:
    """Return the share of a step that slow ranks add: the distance of the slowest from the median rank's score, 1."""
    return max(0.0, 1.0 - min((scores[rank] for rank in named if rank in scores), default=1.0))


def share_before(earlier: Mapping[int, float], named: Iterable[int]) -> float:
    """Return the slow share of the report before one with slow ranks, for those that were slow already; where no rank
    was identified, for the slowest rank."""
    named = tuple(named) or tuple(sorted(earlier, key=lambda rank: earlier[rank])[:1])
    return slow_share(earlier, [rank for rank in named if earlier.get(rank, 1.0) < _SLOW_SCORE])


def read_scores(data: Mapping[str, Any]) -> dict[int, float]:
    """Return the relative scores in a report on slow ranks, by rank; earlier versions wrote the worst five."""
    scores = data.get("scores")
    if isinstance(scores, list):
        return {rank: float(score) for rank, score in enumerate(scores) if score is not None}
    return {int(rank): float(score) for rank, score in (data.get("worst") or {}).items()}
