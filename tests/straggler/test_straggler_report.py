"""Layout and metrics of a straggler report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from outlast.config import StragglerDetectionConfig
from outlast.policy.slowness import RankTimings, summarise
from outlast.policy.stragglers import SlownessCause, Streaks, judge, ranks_to_stop_for
from outlast.straggler import Report, StragglerDetector


def report_of(times_s: Mapping[int, float], *, num_windows: int = 1, **facts: Any) -> Report:
    """Return the report on ranks with these times in ``forward``, whose best times are 10 ms."""
    ranks = tuple(
        RankTimings(
            rank=rank,
            node=f"h100-{rank // 8:03}",
            num_steps=10,
            step_s=seconds,
            sections=(summarise("forward", [seconds] * 10, best_s=0.01),),
            wait_s=0.02 - seconds,
        )
        for rank, seconds in times_s.items()
    )
    streaks = Streaks()
    for _ in range(num_windows):
        streaks, findings = judge(streaks, ranks, StragglerDetectionConfig())
    return Report(iteration=100, device="GPU", ranks=ranks, findings=findings, processing_s=0.042, **facts)


def test_a_large_report_lists_the_worst_and_best_ranks() -> None:
    """Of 512 ranks the five worst and the five best are listed, in the known layout."""
    times_s = dict.fromkeys(range(512), 0.01) | {76: 0.01 / 0.94, 13: 0.01 / 0.95}
    lines = report_of(times_s).render().splitlines()
    assert lines[:4] == [
        "GPU relative performance:",
        " Worst performing 5/512 ranks:",
        "  Rank=76 Node=h100-009 Score=0.94",
        "  Rank=13 Node=h100-001 Score=0.95",
    ]
    assert lines[7] == " Best performing 5/512 ranks:"
    assert lines[13] == "GPU individual performance:"
    assert lines[7:14] == [
        " Best performing 5/512 ranks:",
        *(f"  Rank={rank} Node=h100-000 Score=1.00" for rank in range(5)),
        "GPU individual performance:",
    ]
    assert (
        "Reference: relative = the median of the ranks; individual = its own best so far, beyond what the other ranks "
        "slowed down by"
    ) in lines
    assert lines[-1] == "Straggler report processing time: 0.042 sec."
    assert "No straggler: all ranks are within noise of each other in what was compared, 100% of a step" in lines


def test_a_small_report_lists_all_ranks() -> None:
    """With at most twice the configured number of ranks all of them are listed, worst first."""
    lines = report_of({0: 0.01, 1: 0.0125, 2: 0.01, 3: 0.01}).render().splitlines()
    assert lines[:5] == [
        "GPU relative performance:",
        "  Rank=1 Node=h100-000 Score=0.80",
        "  Rank=0 Node=h100-000 Score=1.00",
        "  Rank=2 Node=h100-000 Score=1.00",
        "  Rank=3 Node=h100-000 Score=1.00",
    ]
    assert "Arrival at the step's end: rank 1 comes last, the longest wait of another one is 2.5 ms of 12.5 ms" in lines


def test_metrics_are_minimum_median_and_maximum() -> None:
    """Each kind of score has three metrics."""
    assert report_of({0: 0.01, 1: 0.02, 2: 0.01}).metrics() == {
        "gpu_relative_perf/min": 0.5,
        "gpu_relative_perf/median": 1.0,
        "gpu_relative_perf/max": 1.0,
        "gpu_individual_perf/min": 0.5,
        "gpu_individual_perf/median": 1.0,
        "gpu_individual_perf/max": 1.0,
    }


def test_an_incident_describes_the_slow_rank() -> None:
    """Each newly identified rank is one incident, with a line for operators."""
    (incident,) = report_of({0: 0.01, 1: 0.02, 2: 0.01, 3: 0.01}, num_windows=3).incidents(job="job", cycle=2)
    assert (incident.rank, incident.node, incident.section, incident.cycle) == (1, "h100-000", "forward", 2)
    assert "rank 1 on node h100-000 is slow in section 'forward' at iteration 100" in incident.describe()
    assert "takes 2.00 times as long in 'forward' as the median of the ranks" in incident.describe()
    assert "the decision is about the rank (its process or GPU), not the node: all ranks" in incident.describe()
    assert incident.evidence["scope"] == "rank"
    assert report_of({0: 0.01, 1: 0.02, 2: 0.01}, num_windows=4).incidents() == ()


def test_printing_and_metrics_are_configurable(caplog: pytest.LogCaptureFixture) -> None:
    """With num_gpu_perf_scores_to_print=0 a report without a straggler is not logged; without enable_logging no metrics
    are passed."""
    metrics_logged: list[tuple[dict[str, float], int]] = []
    for number, logs in ((0, False), (5, True)):
        config = StragglerDetectionConfig(
            num_gpu_perf_scores_to_print=number, enable_logging=logs, logger_name="outlast.straggler.test"
        )
        detector = StragglerDetector(
            config,
            num_warmup_steps=0,
            log_metrics=lambda metrics, iteration: metrics_logged.append((dict(metrics), iteration)),
        )
        with caplog.at_level(logging.INFO, logger="outlast"):
            for iteration in range(5):
                with detector.step(iteration):
                    pass
            detector.report()
        assert len(caplog.messages) == (2 if logs else 0)
        detector.close()
    ((metrics, iteration),) = metrics_logged
    assert iteration == 5
    assert metrics["gpu_individual_perf/max"] == 1.0


def test_of_equally_slow_ranks_only_a_slow_machine_stops() -> None:
    """One of two equally slow ranks may only wait for the other, so the check of the machines decides which one
    training stops for."""
    found = report_of({0: 0.01, 1: 0.02, 2: 0.02, 3: 0.01}, num_windows=3).findings
    assert found.below_threshold == (1, 2)
    assert ranks_to_stop_for(found, {}) == ()
    assert ranks_to_stop_for(found, {1: SlownessCause.WORK, 2: SlownessCause.MACHINE}) == (2,)


@pytest.mark.extended
def test_a_requested_stop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log contains the rank for which training should stop."""
    from outlast.straggler.report import publish

    report = replace(report_of({0: 0.01, 1: 0.02, 2: 0.01, 3: 0.01}, num_windows=3), stop_for=(1,))
    publish(report, StragglerDetectionConfig())
    assert "Detected stragglers. Training should be stopped: rank 1" in caplog.text
