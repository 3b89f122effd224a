"""Metrics that a session passes to a logger, and the run's goodput as measured by a rank.

:mod:`outlast.integrations.metrics` has loggers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from outlast import clock
from outlast.journal import JournalTail, list_files, read_ends
from outlast.policy.goodput import ProductiveTime, goodput
from outlast.policy.run_view import RunView
from outlast.runtime.journal import Journal

LogMetrics = Callable[[dict[str, float], int], object]
"""Takes metrics by name, and the number of optimizer steps done."""
_HEAD_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRun:
    """The run whose metrics a sink receives."""

    run_id: str
    """Identifies the run; the same in every job of the run."""
    iteration: int
    """Number of optimizer steps from which training continues; metrics of later ones may be repeated."""
    global_rank: int = 0
    local_rank: int = 0
    world_size: int = 1


@runtime_checkable
class MetricsSink(Protocol):
    """A ``log_metrics`` that is notified of a run's begin and end.

    Thread: that of the training loop; no method may block.
    """

    def __call__(self, metrics: dict[str, float], iteration: int) -> object:
        """Take metrics by name, and the number of optimizer steps done."""

    def begin_run(self, run: MetricsRun) -> object:
        """Receive the run, once its first iteration is known; again after an in-process restart."""

    def end_run(self, timeout_s: float) -> object:
        """Write pending metrics, blocking up to ``timeout_s`` seconds; 0 = do not wait."""


class Goodput:
    """Measure the run's goodput (see :mod:`outlast.policy.goodput`) by the steps of this rank.

    Goodput is saved with each checkpoint, so that the time of steps that were lost and repeated counts once, over all
    restarts and jobs of the run.

    Args:
        journal: Has the start time of this session.
        began_wall_ns: Start of the run according to the journal; ``None`` = the start of this session.
    """

    def __init__(self, journal: Journal, began_wall_ns: int | None) -> None:
        self._journal = journal
        self._began_wall_ns = min(journal.opened_wall_ns, began_wall_ns or journal.opened_wall_ns)
        self._time = ProductiveTime()
        self._wait_s = 0.0
        """Waits for saves since the last step."""

    @property
    def share(self) -> float:
        """The goodput now, from 0 to 1."""
        session_ns = clock.now_ns() - self._journal.opened_ns
        return goodput(self._time.total_s, (self._journal.opened_wall_ns - self._began_wall_ns + session_ns) / 1e9)

    def begin(self, iteration: int) -> None:
        self._time.begin(clock.now_ns() / 1e9, iteration)

    def note_step(self, at_ns: int, iteration: int) -> None:
        """Record that a step was done at a monotonic time; ``iteration`` counts it."""
        self._time.advance(at_ns / 1e9, iteration, self._wait_s)
        self._wait_s = 0.0

    def note_wait(self, seconds: float) -> None:
        """Record a wait of training for a save."""
        self._wait_s += seconds

    def note_slow_ranks(self, scores: Mapping[int, float], named: Sequence[int]) -> None:
        """Record a straggler report: the relative scores by rank, and the slow ranks."""
        self._time.take_slow_ranks(scores, named)

    def state_dict(self) -> dict[str, Any]:
        return {"steps_s": self._time.total_s, "began_wall_ns": self._began_wall_ns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._time.resume(float(state["steps_s"]))
        self._began_wall_ns = min(self._began_wall_ns, int(state["began_wall_ns"]))


def read_earlier(run_dir: Path, rank: int) -> tuple[Counter[str], int | None]:
    """Return the number of incidents of each kind that the run's agents recorded, and when the run began.

    Journal files of ranks may be large: only the start of this rank's files is read, which shows when a run without
    agents began.
    """
    try:
        files = list_files(run_dir)
        own = [read_ends(file.path, head_bytes=_HEAD_BYTES, end_bytes=0)[0][:1] for file in files if file.rank == rank]
    except OSError:
        return Counter(), None
    view = RunView(keeps_samples=False)
    of_agents = JournalTail(run_dir).read_new(file.path for file in files if file.rank is None)
    for event in sorted([*of_agents, *(event for first in own for event in first)], key=lambda event: event.wall_ns):
        view.take(event)
    return sum((job.incident_counts for job in view.jobs), Counter[str]()), view.began_ns
