"""``outlast bench straggler``: what timing a step costs training, and what a report does."""

from __future__ import annotations

from outlast.bench.measuring import measure_in_process
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say

__all__ = ["measure"]

_TIMEOUT_S = 120.0


def measure(*, repeats: int, say: Say) -> BenchResult:
    """Measure in two ranks that do nothing else.

    Raises:
        OutlastError: A worker failed, or was too slow.

    Blocks: about a second a round, two minutes at most.
    """
    say(f"timed steps of 2 ranks, and reports, {repeats} rounds and one that is dropped")
    found = measure_in_process(
        "outlast.bench.straggler_worker",
        [],
        repeats=repeats,
        say=say,
        timeout_s=_TIMEOUT_S,
        variables={"OMP_NUM_THREADS": "1"},
    )
    return BenchResult(
        bench="straggler",
        bars=(
            Bar(
                name="straggler_us_per_step",
                value=found.median("step_us"),
                unit="us",
                bar=10.0,
                peer="torch.profiler.record_function, off",
                peer_value=found.median("record_function_us"),
            ),
            Bar(name="report_ms", value=found.median("report_ms"), unit="ms", bar=50.0),
        ),
        notes=(
            "a step has three sections within; the peer only marks them, for a profiler that does not run",
            f"what the timings of 512 ranks say is worked out in {found.median('judge_512_ms'):.3g} ms on each",
        ),
    )
