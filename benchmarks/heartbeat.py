"""Benchmark ``heartbeat``: the cost of a heartbeat and of a section."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from time import perf_counter_ns

from benchmarks.measuring import Progress, measure_rounds, median, seconds_per_call, take_turns
from outlast import env
from outlast.monitor import RankMonitor
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.board import Board
from outlast.simulate.benchmark_results import BenchResult

_TIMEOUT_S = 120.0
_BATCHES = 50
_CALLS = 2000
_STORE_CALLS = 200


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Measure in a worker process whose heartbeat memory this process holds, as an agent does.

    Raises:
        OutlastError: The worker failed.

    Blocks: about a second a round, two minutes at most.
    """
    hosted = stores.host(Endpoint("127.0.0.1", 0), timeout_s=30.0)
    assert hosted is not None, "port 0 is never taken"
    with closing(Board.create(num_ranks=1)) as board:
        worker = {env.BOARD: board.path, env.RUN_ID: "bench", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        progress(f"heartbeat, section and TCPStore.set in turns, {repeats} rounds and one that is dropped")
        found = measure_rounds(
            measure_calls, hosted.port, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S, variables=worker
        )
    heartbeat = found.bar("heartbeat_us", "heartbeat", "us", 1.0, called="TCPStore.set", peer="store")
    return BenchResult("heartbeat", (heartbeat, found.bar("section_us", "section", "us", 2.0)))


def measure_calls(num_rounds: str, port: str) -> Iterator[dict[str, float]]:
    """Yield microseconds by name; ``port`` is that of a store on this machine."""
    store = stores.connect(Endpoint("127.0.0.1", int(port)), timeout_s=10.0, call_timeout_s=30.0)

    def seconds_per_set() -> float:
        found_s = seconds_per_call(lambda: store.set("heartbeat", "1"), _STORE_CALLS)
        store.check(["heartbeat"])  # no request of this batch remains in the next
        return found_s

    with closing(RankMonitor()) as monitor:
        batches = {
            "heartbeat": lambda: seconds_per_call(monitor.heartbeat, _CALLS),
            "section": lambda: _seconds_per_section(monitor),
            "store": seconds_per_set,
        }
        for _ in range(int(num_rounds)):
            yield {name: median(seconds) * 1e6 for name, seconds in take_turns(batches, _BATCHES).items()}


def _seconds_per_section(monitor: RankMonitor) -> float:
    begin_ns = perf_counter_ns()
    for _ in range(_CALLS):  # a function call would cost a good part of the section
        with monitor.section("step"):
            pass
    return (perf_counter_ns() - begin_ns) / _CALLS / 1e9
