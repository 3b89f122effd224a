"""The times that a session measures in a step to detect slow ranks, and the slow rank that it reports to the
launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.config import StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.monitor.rank_monitor import SectionTimer
from outlast.policy.rerun import Finding
from outlast.policy.slowness import OUTSIDE, Basis, Timing
from outlast.policy.stragglers import Findings, Straggler
from outlast.runtime.consensus import Consensus
from outlast.runtime.diagnoses import read_diagnosis
from outlast.runtime.journal import Journal
from outlast.session.checks import SlowRanks
from outlast.straggler import Report

STEPS = 8
"""More than the first steps, which are not timed."""


@pytest.fixture
def marked() -> list[str]:
    """The calls of the watchdog."""
    return []


@pytest.fixture
def consensus() -> Iterator[Consensus]:
    """The consensus of a single rank."""
    created = Consensus(["stop"])
    yield created
    created.close()


@pytest.fixture
def slow_ranks(consensus: Consensus) -> Iterator[SlowRanks]:
    """The slow rank detection of a single rank."""
    created = watch_for_slow_ranks(WorkerEnv(), consensus)
    yield created
    created.detector.close()


def watch_for_slow_ranks(place: WorkerEnv, consensus: Consensus) -> SlowRanks:
    journal = Journal(None, run_id="run", job="job", node=place.node, proc="rank-0")
    config = StragglerDetectionConfig(enabled=True, report_time_interval=1e-9, num_gpu_perf_scores_to_print=0)
    return SlowRanks(config, place, journal, consensus)


def timer(marked: list[str], name: str) -> SectionTimer:
    return SectionTimer(0, lambda _: marked.append(name), lambda _: marked.append(f"/{name}"))


def timings(slow_ranks: SlowRanks) -> dict[str, Timing]:
    return slow_ranks.detector.report().ranks[0].by_name


def test_sections_of_the_script_are_timed_and_marked(slow_ranks: SlowRanks, marked: list[str]) -> None:
    """A section of the script is timed and reported to the watchdog, also as a decorator. A section with the step's
    name is only reported."""
    data, step = slow_ranks.timed("data", timer(marked, "data")), timer(marked, "step")
    assert slow_ranks.timed("step", step) is step
    work = slow_ranks.timed("work", timer(marked, "work"))(lambda: None)
    assert not slow_ranks.detector.wants_report()
    for iteration in range(STEPS):
        slow_ranks.begin_step(iteration)
        with data:
            pass
        work()
        slow_ranks.detector.end_step()
        slow_ranks.note_wait()
    assert slow_ranks.detector.wants_report()
    found = timings(slow_ranks)
    assert list(found) == ["data", "work", OUTSIDE]
    assert {timing.count for timing in found.values()} == {STEPS - 3}
    assert marked == ["data", "/data", "work", "/work"] * STEPS
    assert not slow_ranks.detector.wants_report()


@pytest.mark.parametrize("name", ["checkpointing", "setup", "evaluation", "validation"])
def test_sections_outside_of_a_step_are_not_timed(slow_ranks: SlowRanks, marked: list[str], name: str) -> None:
    """Nothing within such a section is compared, also if the session itself opens it; the watchdog gets the section."""
    forward = slow_ranks.timed("forward", timer(marked, "forward"))
    model = torch.nn.Linear(2, 2)
    slow_ranks.detector.watch({"model": model})
    for iteration in range(STEPS):
        slow_ranks.begin_step(iteration)
        model(torch.ones(1, 2))
        with slow_ranks.timed(name, timer(marked, name)), forward:
            model(torch.ones(1, 2))
        with slow_ranks.left_out(timer(marked, name)):
            model(torch.ones(1, 2))
        slow_ranks.detector.end_step()
    found = timings(slow_ranks)
    assert list(found) == ["forward", OUTSIDE]
    assert found["forward"].count == STEPS - 3
    assert marked.count(name) == 2 * STEPS


def test_a_section_around_a_timed_forward_is_counted_once(slow_ranks: SlowRanks, marked: list[str]) -> None:
    """A script's section with the name of an automatically timed part has one time per step for both."""
    model = torch.nn.Linear(2, 2)
    slow_ranks.detector.watch({"model": model})
    forward = slow_ranks.timed("forward", timer(marked, "forward"))
    for iteration in range(STEPS):
        slow_ranks.begin_step(iteration)
        with forward:
            model(torch.ones(1, 2))
        slow_ranks.detector.end_step()
    assert timings(slow_ranks)["forward"].count == STEPS - 3


def test_time_spent_waiting_is_not_step_time(consensus: Consensus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreements of the ranks within a step count as waiting time and not as the step's own time; close() removes
    the timing."""
    agree, result_of = consensus.agree, consensus.result
    slow_ranks = watch_for_slow_ranks(WorkerEnv(), consensus)

    def wait() -> list[int]:
        consensus.waited_s += 1.0
        return result_of()

    monkeypatch.setattr(consensus, "result", wait)
    for iteration in range(STEPS):
        slow_ranks.begin_step(iteration)
        consensus.agree([0])
        slow_ranks.detector.end_step()
        slow_ranks.note_wait()
    assert slow_ranks.detector.report().ranks[0].wait_s == pytest.approx(1.0)
    slow_ranks.detector.close()
    assert consensus.agree == agree


def report_of(ranks: SlowRanks, *stop_for: int) -> Report:
    """Return a report for which all ranks exit."""
    facts: dict[str, Any] = {"role": "", "basis": Basis.RELATIVE, "score": 0.5, "ratio": 2.0, "excess_s": 0.01}
    named = tuple(
        Straggler(rank=rank, node=f"node-{rank}", section="forward", z=9.0, num_windows=3, **facts) for rank in stop_for
    )
    findings = Findings(relative={}, individual={}, named=named)
    return replace(ranks.detector.report(), iteration=40, findings=findings, stop_for=stop_for)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_slow_rank_is_reported_to_the_launcher(tmp_path: Path, consensus: Consensus, rank: int) -> None:
    """Every rank writes a diagnosis with the slowest rank and its node; the slow rank adds its device."""
    place = WorkerEnv(global_rank=rank, node=f"node-{rank}", job="job", run_dir=str(tmp_path))
    slow_ranks = watch_for_slow_ranks(place, consensus)
    slow_ranks.diagnose(report_of(slow_ranks, 2, 1))
    slow_ranks.detector.close()
    found = read_diagnosis(tmp_path, "job", 0, rank)
    assert found is not None
    assert (found.finding, found.rank, found.node, found.iteration) == (Finding.SLOW, 2, "node-2", 40)
    assert found.device == ("node-2/cpu-0" if rank == 2 else "")
    assert "takes 2.00 times as long in 'forward'" in found.describe()
