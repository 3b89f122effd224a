"""The report on a window, in the layout of NVIDIA's resiliency extension, and its publication by rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from outlast.config.training import StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.slowness import REFERENCES, Basis, RankTimings, lower_median
from outlast.policy.stragglers import Findings, MachineDecision
from outlast.runtime.journal import Journal

Metrics = Callable[[Mapping[str, float], int], None]
"""Takes metrics by name, and the iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report on a window; the same on all ranks, except for ``processing_s``."""

    iteration: int
    """Number of optimizer steps done."""
    device: str
    """``GPU`` or ``CPU``."""
    ranks: tuple[RankTimings, ...]
    """Timings of each rank, by rank."""
    findings: Findings
    machines: tuple[MachineDecision, ...] = ()
    """Benchmark results for the ranks that were newly reported in this window."""
    stop_for: tuple[int, ...] = ()
    """Ranks for which training is to stop: ``stop_if_detected`` is on, they are reported, and below a threshold. Of
    ranks that are equally slow only those whose machine proved slow: the others may wait for them."""
    processing_s: float = 0.0
    """Seconds that the report took on this rank, waiting for others included."""

    @property
    def named_ranks(self) -> tuple[int, ...]:
        """Reported global ranks, worst first."""
        return self.findings.named_ranks

    @property
    def should_stop(self) -> bool:
        """Whether training is to stop for a rank."""
        return bool(self.stop_for)

    def metrics(self) -> dict[str, float]:
        """Return smallest, median and largest score of the ranks, for loggers."""
        found = {}
        for name, scores in (
            ("gpu_relative_perf", self.findings.relative),
            ("gpu_individual_perf", self.findings.individual),
        ):
            if scores:
                values = scores.values()
                found[f"{name}/min"] = min(values)
                found[f"{name}/median"] = lower_median(values)
                found[f"{name}/max"] = max(values)
        return found

    def render(self, num_scores: int = 5) -> str:
        """Return the report's text.

        Args:
            num_scores: Worst and best ranks to list; all, if there are not more ranks than both together.
        """
        nodes = {owner.rank: owner.node for owner in self.ranks}
        lines = []
        scores_of = {Basis.RELATIVE: self.findings.relative, Basis.INDIVIDUAL: self.findings.individual}
        for basis, scores in scores_of.items():
            if scores:
                lines += [f"{self.device} {basis} performance:", *_list_scores(scores, nodes, num_scores)]
        if references := [f"{basis} = {REFERENCES[basis]}" for basis, scores in scores_of.items() if scores]:
            lines.append(f"Reference: {'; '.join(references)}")
        lines += _describe_arrivals(self.ranks)
        lines += [f"Note: {note}" for note in self.findings.notes]
        if self.findings.named:
            lines += [f"Straggler: {one.describe()}" for one in self.findings.named]
            lines += [f"Straggler: {decision.describe()}" for decision in self.machines]
        else:
            lines.append(f"No straggler: {self.findings.why_none}")
        lines += [f"Not a straggler: {one.describe()}" for one in self.findings.waiting if self.findings.named]
        lines.append(f"Straggler report processing time: {self.processing_s:.3f} sec.")
        return "\n".join(lines)

    def warnings(self) -> tuple[str, ...]:
        """Return a line for each basis on which ranks are slow."""
        texts = {
            Basis.RELATIVE: f"Some {self.device}s have worse relative performance.",
            Basis.INDIVIDUAL: f"Some {self.device}s performance dropped.",
        }
        return tuple(
            f"STRAGGLER DETECTION WARNING: {texts[basis]} Affected ranks: {', '.join(map(str, ranks))} "
            f"(reference: {REFERENCES[basis]})"
            for basis in texts
            if (ranks := [one.rank for one in self.findings.named if one.basis == basis])
        )

    def incidents(self, *, job: str = "", cycle: int = 0) -> tuple[Incident, ...]:
        """Return an incident for each rank that was not reported in the window before."""
        decisions = {decision.rank: decision for decision in self.machines}
        found = []
        for rank in self.findings.newly_named:
            one = next(one for one in self.findings.named if one.rank == rank)
            decision = decisions.get(rank)
            evidence = {
                "summary": one.describe() + (f"; {decision.describe()}" if decision else ""),
                "basis": str(one.basis),
                "score": one.score,
                "ratio": one.ratio,
                "num_windows": one.num_windows,
                "scope": str(one.scope),
                "cause": str(decision.cause) if decision else "unknown",
            }
            found.append(
                Incident(
                    kind=IncidentKind.STRAGGLER,
                    job=job,
                    cycle=cycle,
                    node=one.node,
                    rank=rank,
                    section=one.section,
                    iteration=self.iteration,
                    evidence=evidence,
                )
            )
        return tuple(found)


def _list_scores(scores: Mapping[int, float], nodes: Mapping[int, str], num_scores: int) -> list[str]:
    """Return the worst ranks, worst first, and the best ones, best first."""

    def line(rank: int) -> str:
        return f"  Rank={rank} Node={nodes[rank]} Score={scores[rank]:.2f}"

    worst_first = sorted(scores, key=lambda rank: (scores[rank], rank))
    if len(scores) <= 2 * num_scores:
        return [line(rank) for rank in worst_first]
    best_first = sorted(scores, key=lambda rank: (-scores[rank], rank))
    return [
        f" Worst performing {num_scores}/{len(scores)} ranks:",
        *map(line, worst_first[:num_scores]),
        f" Best performing {num_scores}/{len(scores)} ranks:",
        *map(line, best_first[:num_scores]),
    ]


def _describe_arrivals(ranks: tuple[RankTimings, ...]) -> list[str]:
    """Return which rank reaches the step's end last, and the longest wait of another rank for it."""
    waits_s = {owner.rank: owner.wait_s for owner in ranks if owner.wait_s is not None}
    if len(waits_s) < 2:
        return []
    last = min(waits_s, key=lambda rank: (waits_s[rank], rank))
    skew_s = max(waits_s.values()) - waits_s[last]
    step_s = max(owner.step_s for owner in ranks)
    return [
        f"Arrival at the step's end: rank {last} comes last, the longest wait of another one is "
        f"{skew_s * 1e3:.3g} ms of {step_s * 1e3:.3g} ms"
    ]


def publish(report: Report, config: StragglerDetectionConfig, log_metrics: Metrics | None = None) -> None:
    """Write a report to the logger that ``config`` names, and its metrics to ``log_metrics``."""
    log, findings = logging.getLogger(config.logger_name), report.findings
    if config.num_gpu_perf_scores_to_print > 0:
        log.info("\n%s", report.render(config.num_gpu_perf_scores_to_print))
    elif findings.named:
        log.info("\n%s", report.render())
    for line in report.warnings():
        log.warning("%s", line)
    metrics = report.metrics()
    if config.enable_logging and metrics:
        log.info("scores: %s", ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
        if log_metrics is not None:
            log_metrics(metrics, report.iteration)
    if report.should_stop:
        ranks = ", ".join(map(str, report.stop_for))
        log.error("Detected stragglers. Training should be stopped: rank %s is below its threshold", ranks)


def record(report: Report, place: WorkerEnv, journal: Journal) -> None:
    """Write a report to the journal, and an incident for each newly reported rank."""
    findings = report.findings
    scores = [findings.relative.get(owner.rank) for owner in sorted(report.ranks, key=lambda owner: owner.rank)]
    journal.write(
        EventKind.STRAGGLER_REPORT,
        rank=place.global_rank,
        iteration=report.iteration,
        named=list(findings.named_ranks),
        metrics=report.metrics(),
        scores=[None if score is None else round(score, 3) for score in scores] if findings.relative else [],
        why_nobody=findings.why_none,
        notes=list(findings.notes),
        machines=[decision.describe() for decision in report.machines],
        processing_s=report.processing_s,
    )
    for incident in report.incidents(job=place.job, cycle=place.cycle):
        incident_data = msgspec.to_builtins(incident)
        journal.write(EventKind.INCIDENT, rank=place.global_rank, iteration=report.iteration, incident=incident_data)
