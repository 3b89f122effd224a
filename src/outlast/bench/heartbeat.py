"""``outlast bench heartbeat``: what a heartbeat and a section cost the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import repeat
from time import perf_counter_ns

from outlast import env
from outlast.bench.measuring import ONE_THREAD, Progress, measure_in_process, median
from outlast.bench.result import Bar, BenchResult
from outlast.monitor import RankMonitor
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.board import Board

__all__ = ["measure", "measure_calls"]

_TIMEOUT_S = 120.0
_BATCHES = 50
_CALLS = 2000
_STORE_CALLS = 200


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Measure in a worker process on a real board, which this process holds as an agent does.

    Raises:
        OutlastError: The worker failed.

    Blocks: about a second a round, two minutes at most.
    """
    hosted = stores.host(Endpoint("127.0.0.1", 0), timeout_s=30.0)
    assert hosted is not None, "port 0 is never taken"
    with closing(Board.create(num_ranks=1)) as board:
        worker = {env.BOARD: board.path, env.RUN_ID: "bench", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        progress(f"heartbeat, section and TCPStore.set in turns, {repeats} rounds and one that is dropped")
        found = measure_in_process(
            measure_calls,
            hosted.port,
            repeats=repeats,
            progress=progress,
            timeout_s=_TIMEOUT_S,
            variables={**worker, **ONE_THREAD},
        )
    return BenchResult(
        bench="heartbeat",
        bars=(
            Bar(
                name="heartbeat_us",
                value=found.median("heartbeat"),
                unit="us",
                bar=1.0,
                peer="TCPStore.set",
                peer_value=found.median("store"),
            ),
            Bar(name="section_us", value=found.median("section"), unit="us", bar=2.0),
        ),
    )


def measure_calls(num_rounds: str, port: str) -> Iterator[dict[str, float]]:
    """Yield microseconds per call of each measure, in a worker with a board, as under an agent.

    Args:
        num_rounds: Rounds.
        port: Of a store on this machine.
    """
    store = stores.connect(Endpoint("127.0.0.1", int(port)), timeout_s=10.0, call_timeout_s=30.0)
    with closing(RankMonitor()) as monitor:
        for _ in range(int(num_rounds)):
            batches: dict[str, list[float]] = {"heartbeat": [], "section": [], "store": []}
            for _ in range(_BATCHES):
                batches["heartbeat"].append(_us_per_call(monitor.heartbeat, _CALLS))
                batches["section"].append(_us_per_section(monitor, _CALLS))
                batches["store"].append(_us_per_call(lambda: store.set("heartbeat", "1"), _STORE_CALLS))
                store.check(["heartbeat"])  # nothing of this batch is under way in the next
            yield {name: median(values) for name, values in batches.items()}


def _us_per_call(call: Callable[[], object], num_calls: int) -> float:
    start = perf_counter_ns()
    for _ in repeat(None, num_calls):
        call()
    return (perf_counter_ns() - start) / num_calls / 1e3


def _us_per_section(monitor: RankMonitor, num_calls: int) -> float:
    start = perf_counter_ns()
    for _ in repeat(None, num_calls):
        with monitor.section("step"):
            pass
    return (perf_counter_ns() - start) / num_calls / 1e3
