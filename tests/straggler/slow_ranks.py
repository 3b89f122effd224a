"""Scenes that ranks run in the straggler tests, each with the reports of its rank.

Where it matters how slow a rank is, time is simulated, so that the load of the machine has no effect.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast.config import StragglerDetectionConfig
from outlast.env import read_worker
from outlast.runtime.journal import Journal
from outlast.straggler import Report, StragglerDetector, machine_check, recorder
from outlast.straggler import detector as detector_module
from outlast.straggler.report import record

FORWARD_S = 0.012
STEPS = 10
"""Steps in a window."""


class _Time:
    """Simulated time of each rank, which is synchronized when the ranks meet."""

    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, duration_s: float) -> None:
        self.now_ns += round(duration_s * 1e9)

    def meet(self) -> None:
        latest = torch.tensor([self.now_ns])
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        self.now_ns = int(latest)
        self.spend(0.001)


@contextlib.contextmanager
def _simulated_time() -> Iterator[_Time]:
    """Time sections and steps with the simulated time."""
    before = recorder.perf_counter_ns
    clock = _Time()
    recorder.perf_counter_ns = detector_module.perf_counter_ns = clock
    try:
        yield clock
    finally:
        recorder.perf_counter_ns = detector_module.perf_counter_ns = before


def _window(detector: StragglerDetector, clock: _Time, factor: float, number: int) -> None:
    for step in range(STEPS):
        with detector.step(number * STEPS + step):
            with detector.section("forward"):
                clock.spend(FORWARD_S * factor * (1 + 0.01 * ((step + number) % 3)))
            with detector.section("backward"):
                clock.meet()  # every rank waits here for the slowest one


def _summarize(report: Report) -> dict[str, Any]:
    return {
        "iteration": report.iteration,
        "named": list(report.named_ranks),
        "bases": sorted({str(one.basis) for one in report.findings.named}),
        "sections": sorted({one.section for one in report.findings.named}),
        "relative": report.findings.relative,
        "individual": report.findings.individual,
        "machines": [[one.rank, str(one.cause)] for one in report.machines],
        "stop": report.should_stop,
        "notes": list(report.findings.notes),
        "text": report.render(),
    }


def slowed(rank: int) -> list[dict[str, Any]]:
    """Rank 2 becomes 1.3 times as slow in the fifth window, and its machine takes twice as long for a product."""
    product_s, copy_s = machine_check.time_product, machine_check.time_copy
    machine_check.time_product = lambda device: product_s(device) * 0 + (0.02 if rank == 2 else 0.01)
    machine_check.time_copy = lambda device: copy_s(device) * 0 + 0.01
    place = read_worker()
    journal = Journal(sys.argv[1], run_id="run", job="job", node=place.node, proc=f"rank-{rank}")
    keep = functools.partial(record, place=place, journal=journal)
    detector = StragglerDetector(StragglerDetectionConfig(), on_report=keep, num_warmup_steps=0, timeout_s=30)
    results = []
    with _simulated_time() as clock:
        for number in range(8):
            _window(detector, clock, 1.3 if rank == 2 and number >= 4 else 1.0, number)
            results.append(_summarize(detector.report()))
    detector.close()
    journal.close()
    machine_check.time_product, machine_check.time_copy = product_s, copy_s
    return results


def stopped(rank: int) -> list[dict[str, Any]]:
    """Rank 1 is twice as slow from the start, on a machine that is as fast as the others."""
    machine_check.time_product = machine_check.time_copy = lambda device: 0.01
    config = StragglerDetectionConfig(stop_if_detected=True, confirmations=2)
    detector = StragglerDetector(config, num_warmup_steps=0, timeout_s=30)
    results = []
    with _simulated_time() as clock:
        for number in range(2):
            _window(detector, clock, 2.0 if rank == 1 else 1.0, number)
            results.append(_summarize(detector.report()))
    detector.close()
    return results


def paced(rank: int) -> list[int]:
    """Each rank determines by itself when a report is due."""
    detector = StragglerDetector(StragglerDetectionConfig(report_time_interval=0.1), timeout_s=30)
    results = []
    for number in range(100):
        with detector.step(number), detector.section("forward"):
            time.sleep(0.002 + rank * 0.0005)
        if (report := detector.report_if_due()) is not None:
            results.append(report.iteration)
    detector.close()
    return results


def missing(rank: int) -> list[dict[str, Any]]:
    """Rank 3 never enters a section that the others enter; calls of gather_bytes are counted."""
    gathered: list[int] = []
    gather_bytes = detector_module.gather_bytes

    def counted(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
        gathered.append(len(data))
        return gather_bytes(group, data)

    detector_module.gather_bytes = counted
    detector = StragglerDetector(num_warmup_steps=0, timeout_s=30)
    for number in range(5):
        with detector.step(number):
            if rank != 3:
                with detector.section("augment"):
                    time.sleep(0.001)
    before = len(gathered)
    results = [_summarize(detector.report()) | {"gathered": [before, len(gathered)]}]
    detector.close()
    detector_module.gather_bytes = gather_bytes
    return results


def kernels(rank: int) -> dict[str, Any]:
    """Torch's profiler times operators in a few steps of each window."""
    detector = StragglerDetector(StragglerDetectionConfig(profile_kernels=True), num_warmup_steps=0, timeout_s=30)
    model = torch.nn.Linear(64, 64)
    results = {}
    for number in range(8):
        with detector.step(number):
            loss = model(torch.ones(8, 64)).sum()
            loss.backward()
            dist.all_reduce(loss.detach())
    report = detector.report()
    detector.close()
    results["names"] = [[timing.name for timing in owner.kernels] for owner in report.ranks]
    results["num_steps"] = [owner.num_steps for owner in report.ranks]
    results["relative"] = report.findings.relative
    return results


def main() -> None:
    """Run the scenes; arguments: the run directory, a folder for the results, the scenes."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {name: globals()[name](rank) for name in sys.argv[3:]}
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
