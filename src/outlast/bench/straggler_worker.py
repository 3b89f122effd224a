"""The ranks in which ``outlast bench straggler`` measures: two of them, over gloo.

Blocks of steps with three empty sections take turns with blocks that mark them by torch's own means, and with blocks of
the bare loop, which is taken off. Then all ranks make a report on the steps that were timed. Rank 0 prints a line of
JSON a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import torch.distributed as dist
from torch.profiler import record_function

from outlast.bench.measuring import timed
from outlast.bench.two_ranks import TIMEOUT_S, WORLD_SIZE, measure_together
from outlast.config import StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.policy.stragglers import Streaks, judge
from outlast.policy.timings import RankTimings, summarise
from outlast.straggler import StragglerDetector

NUM_TURNS, BLOCK = 20, 300
"""Blocks of each kind in a round, and steps in a block."""
SECTIONS = ("forward", "backward", "optimizer")


def measure_rounds(num_rounds: int) -> Iterator[dict[str, float]]:
    """Yield what each round gave.

    Collective: both ranks.
    """
    place = WorkerEnv(global_rank=dist.get_rank(), world_size=WORLD_SIZE, node=f"node-{dist.get_rank()}")
    config = StragglerDetectionConfig(num_gpu_perf_scores_to_print=0, enable_logging=False, check_machine=False)
    detector = StragglerDetector(config, place=place, num_warmup_steps=0, timeout_s=TIMEOUT_S)
    first, second, third = (detector.section(name) for name in SECTIONS)

    def timed_steps() -> None:
        for number in range(BLOCK):
            detector.begin_step(number)
            with first:
                pass
            with second:
                pass
            with third:
                pass
            detector.end_step()
            detector.wishes_report()

    def marked_steps() -> None:
        for _ in range(BLOCK):
            for name in SECTIONS:
                with record_function(name):
                    pass

    def bare_steps() -> None:
        for _ in range(BLOCK):
            pass

    crowd = _crowd()
    for _ in range(num_rounds):
        step_us, marked_us, bare_us = _us_in_turns(timed_steps, marked_steps, bare_steps)
        report_s, _ = timed(detector.report)
        judge_s, _ = timed(lambda: judge(Streaks(), crowd, config))
        yield {
            "step_us": step_us - bare_us,
            "record_function_us": marked_us - bare_us,
            "report_ms": report_s * 1e3,
            "judge_512_ms": judge_s * 1e3,
        }
    detector.close()


def _us_in_turns(*kinds: Callable[[], None]) -> list[float]:
    """Return the microseconds of a step of each kind, the median over its blocks."""
    found_us: list[list[float]] = [[] for _ in kinds]
    for _ in range(NUM_TURNS):
        for steps, values in zip(kinds, found_us, strict=True):
            begin_ns = perf_counter_ns()
            steps()
            values.append((perf_counter_ns() - begin_ns) / 1e3 / BLOCK)
    return [statistics.median(values) for values in found_us]


def _crowd() -> list[RankTimings]:
    """Return what 512 ranks might tell."""
    return [
        RankTimings(
            rank=rank,
            node=f"node-{rank // 8}",
            num_steps=100,
            step_s=0.1,
            sections=tuple(summarise(name, [0.03 + rank * 1e-6] * 5, best_s=0.03) for name in SECTIONS),
        )
        for rank in range(512)
    ]


if __name__ == "__main__":
    measure_together("outlast.bench.straggler_worker", measure_rounds)
