"""Benchmark ``straggler``: the cost of timing a step and of a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import torch.distributed as dist
from torch.profiler import record_function

from benchmarks.measuring import GROUP_TIMEOUT_S, Progress, measure_rounds, median, process_group, take_turns, timed
from outlast.config import StragglerDetectionConfig
from outlast.policy.slowness import RankTimings, summarise
from outlast.policy.stragglers import Streaks, judge
from outlast.simulate.benchmark_results import BenchResult
from outlast.straggler import StragglerDetector

_TIMEOUT_S = 120.0
_NUM_TURNS, _BLOCK = 20, 300
"""Blocks of each kind in a round, and steps in a block."""
_SECTIONS = ("forward", "backward", "optimizer")


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Measure in two ranks that do nothing else.

    Raises:
        OutlastError: A worker failed, or was too slow.

    Blocks: about a second a round, two minutes at most.
    """
    progress(f"timed steps of 2 ranks, and reports, {repeats} rounds and one that is dropped")
    found = measure_rounds(measure_steps, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S, num_ranks=2)
    peer = "torch.profiler.record_function, off"
    return BenchResult(
        "straggler",
        (
            found.bar("straggler_us_per_step", "step_us", "us", 10.0, called=peer, peer="record_function_us"),
            found.bar("report_ms", "report_ms", "ms", 50.0),
        ),
        (
            "a step has three sections within; the peer only marks them, for a profiler that does not run",
            f"judging the timings of 512 ranks takes each of them {found.median('judge_512_ms'):.3g} ms",
        ),
    )


def measure_steps(num_rounds: str) -> Iterator[dict[str, float]]:
    """Yield the results of each round.

    Blocks of steps with three empty sections take turns with blocks that mark them with torch's record_function, and
    with blocks of the bare loop, which is subtracted. Then both ranks report on the timed steps.

    Collective: both ranks.
    """
    with process_group():
        rank = dist.get_rank()
        config = StragglerDetectionConfig(num_gpu_perf_scores_to_print=0, enable_logging=False, check_machine=False)
        detector = StragglerDetector(
            config, global_rank=rank, node=f"node-{rank}", num_warmup_steps=0, timeout_s=GROUP_TIMEOUT_S
        )
        first, second, third = (detector.section(name) for name in _SECTIONS)

        def timed_steps() -> None:
            for number in range(_BLOCK):
                detector.begin_step(number)
                with first:
                    pass
                with second:
                    pass
                with third:
                    pass
                detector.end_step()
                detector.wants_report()

        def marked_steps() -> None:
            for _ in range(_BLOCK):
                for name in _SECTIONS:
                    with record_function(name):
                        pass

        def bare_steps() -> None:
            for _ in range(_BLOCK):
                pass

        many = _timings_of_many()
        kinds = {
            "step": lambda: timed(timed_steps)[0],
            "marked": lambda: timed(marked_steps)[0],
            "bare": lambda: timed(bare_steps)[0],
        }
        with closing(detector):
            for _ in range(int(num_rounds)):
                found_s = take_turns(kinds, _NUM_TURNS)
                us = {name: median(seconds) * 1e6 / _BLOCK for name, seconds in found_s.items()}
                report_s, _ = timed(detector.report)
                judge_s, _ = timed(lambda: judge(Streaks(), many, config))
                yield {
                    "step_us": us["step"] - us["bare"],
                    "record_function_us": us["marked"] - us["bare"],
                    "report_ms": report_s * 1e3,
                    "judge_512_ms": judge_s * 1e3,
                }


def _timings_of_many() -> list[RankTimings]:
    """Return timings of 512 simulated ranks."""
    return [
        RankTimings(
            rank=rank,
            node=f"node-{rank // 8}",
            num_steps=100,
            step_s=0.1,
            sections=tuple(summarise(name, [0.03 + rank * 1e-6] * 5, best_s=0.03) for name in _SECTIONS),
        )
        for rank in range(512)
    ]
