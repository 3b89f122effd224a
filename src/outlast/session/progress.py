"""What the outside sees of a session's training: heartbeats, sections, PROGRESS events, and figures for a logger."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from outlast import clock
from outlast.env import WorkerEnv
from outlast.incidents import EventKind
from outlast.journal import decode_events
from outlast.monitor.rank_monitor import RankMonitor
from outlast.runtime.journal import Journal
from outlast.session.inprocess_scope import InProcessScope

__all__ = ["LogMetrics", "ProgressReporter"]

log = logging.getLogger(__name__)
LogMetrics = Callable[[dict[str, float], int], object]
"""Takes figures by name, and the number of optimizer steps done."""
PROGRESS_EVERY_NS = 5_000_000_000
"""A rank writes a PROGRESS event at most this often."""


class ProgressReporter:
    """Report the beginning and the end of each step.

    Args:
        scope: The call around the session.
        monitor: Writes what the watchdog sees.
        journal: Records what happened.
        place: This worker's place.
        log_metrics: Takes figures; ``None`` = nobody does.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        scope: InProcessScope,
        monitor: RankMonitor,
        journal: Journal,
        place: WorkerEnv,
        log_metrics: LogMetrics | None,
    ) -> None:
        self._scope, self._monitor, self._journal, self._place = scope, monitor, journal, place
        self._log_metrics = log_metrics
        self._began_ns = 0
        self._wrote_progress_ns: int | None = None
        self._has_raised = False
        self._earlier_incidents = Counter[str]()
        if log_metrics is not None and place.run_dir is not None:
            self._earlier_incidents = _incidents_of_launchers(Path(place.run_dir))

    def begin_step(self) -> None:
        """Report that a step begins."""
        self._scope.ping()
        self._monitor.heartbeat()
        self._monitor.start_section("step")
        self._began_ns = clock.now_ns()

    def end_step(self, iteration: int) -> float:
        """Report that a step has ended.

        Args:
            iteration: Number of optimizer steps done.

        Returns:
            How long it took, in seconds.
        """
        self._monitor.end_section("step")
        self._monitor.set_iteration(iteration)
        now_ns = clock.now_ns()
        if self._wrote_progress_ns is None or now_ns - self._wrote_progress_ns >= PROGRESS_EVERY_NS:
            self._wrote_progress_ns = now_ns
            self._journal.write(EventKind.PROGRESS, rank=self._place.global_rank, iteration=iteration)
        return (now_ns - self._began_ns) / 1e9

    def log_step(self, iteration: int, took_s: float, report: dict[str, float]) -> None:
        """Hand a step's figures to the logger.

        Args:
            iteration: Number of optimizer steps done.
            took_s: How long the step took.
            report: Figures of the report on slow ranks, if there was one after this step.
        """
        if self._log_metrics is None:
            return
        figures = {
            "step_time_s": took_s,
            "restart_count": float(self._place.cycle),
            "in_process_restart_count": float(self._place.call),
            **report,
        }
        for kind, number in (self._earlier_incidents + self._journal.incidents).items():
            figures[f"incidents/{kind}"] = float(number)
        self.log(iteration, figures)

    def log(self, iteration: int, figures: dict[str, float]) -> None:
        """Hand figures to the logger, ``outlast/`` before each name; one that raises is reported once."""
        if self._log_metrics is None:
            return
        try:
            self._log_metrics({f"outlast/{name}": value for name, value in figures.items()}, iteration)
        except Exception as error:  # a logger's trouble must not end training
            if not self._has_raised:
                log.warning("log_metrics failed (%s: %s); training continues", type(error).__name__, error)
                log.debug("log_metrics failed", exc_info=True)
            self._has_raised = True


def _incidents_of_launchers(run_dir: Path) -> Counter[str]:
    """Return how many incidents of each kind the run had, as its agents recorded them.

    Ranks record incidents of their own too, beside all else that they do: their files may be large, and are left out.
    """
    counts = Counter[str]()
    for path in (run_dir / "journal").glob("*.jsonl"):
        if not re.search(r"-rank-\d+$", path.stem):
            events, _ = decode_events(path.read_bytes())
            counts.update(str(event.data["incident"]["kind"]) for event in events if event.kind == EventKind.INCIDENT)
    return counts
