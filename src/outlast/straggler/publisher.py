"""Where reports on slow ranks go, from rank 0: the log, the loggers of metrics, the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from outlast.config.training import StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.incidents import EventKind
from outlast.runtime.journal import Journal
from outlast.straggler.report import Report

__all__ = ["Metrics", "Publisher"]

NUM_WORST = 5
"""Ranks whose score is in the journal."""
Metrics = Callable[[Mapping[str, float], int], None]
"""Takes metrics by name, and the iteration."""


class Publisher:
    """Publish reports.

    Args:
        config: What is printed, and where.
        place: This rank's place.
        journal: The journal; ``None`` = none.
        log_metrics: Gets metrics; ``None`` = nobody does.
    """

    def __init__(
        self,
        config: StragglerDetectionConfig,
        place: WorkerEnv,
        journal: Journal | None,
        log_metrics: Metrics | None,
    ) -> None:
        self._config, self._place, self._journal, self._log_metrics = config, place, journal, log_metrics
        self._log = logging.getLogger(config.logger_name)

    def publish(self, report: Report) -> None:
        """Give a report to the logger, the loggers of metrics, and the journal."""
        config, findings = self._config, report.findings
        if config.num_gpu_perf_scores_to_print > 0:
            self._log.info("\n%s", report.render(config.num_gpu_perf_scores_to_print))
        elif findings.named:
            self._log.info("\n%s", report.render())
        for line in report.warnings():
            self._log.warning("%s", line)
        metrics = report.metrics()
        if config.enable_logging and metrics:
            self._log.info("scores: %s", ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
            if self._log_metrics is not None:
                self._log_metrics(metrics, report.iteration)
        if report.should_stop:
            ranks = ", ".join(map(str, report.stop_for))
            self._log.error("Detected stragglers. Training should be stopped: rank %s is below its threshold", ranks)
        if self._journal is not None:
            self._write(self._journal, report, metrics)

    def _write(self, journal: Journal, report: Report, metrics: Mapping[str, float]) -> None:
        findings = report.findings
        worst = sorted(findings.relative, key=lambda rank: findings.relative[rank])[:NUM_WORST]
        journal.write(
            EventKind.STRAGGLER_REPORT,
            rank=self._place.global_rank,
            iteration=report.iteration,
            named=list(findings.named_ranks),
            metrics=dict(metrics),
            worst={str(rank): findings.relative[rank] for rank in worst},
            why_nobody=findings.why_nobody,
            notes=list(findings.notes),
            machines=[verdict.describe() for verdict in report.machines],
            processing_s=report.processing_s,
        )
        for incident in report.incidents(job=self._place.job, cycle=self._place.cycle):
            journal.write(
                EventKind.INCIDENT,
                rank=self._place.global_rank,
                iteration=report.iteration,
                incident=msgspec.to_builtins(incident),
            )
