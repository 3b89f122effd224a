"""The process that ``outlast bench heartbeat`` measures in: a worker with a board, as under an agent.

Writes one JSON line a round: microseconds per call of each measure.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from itertools import repeat
from time import perf_counter_ns

from outlast.monitor import RankMonitor
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint

_BATCHES = 50
_CALLS = 2000
_STORE_CALLS = 200


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


def main() -> None:
    """Measure; arguments: the port of a store on this machine, the number of rounds."""
    port, num_rounds = int(sys.argv[1]), int(sys.argv[2])
    store = stores.connect(Endpoint("127.0.0.1", port), timeout_s=10.0, call_timeout_s=30.0)
    monitor = RankMonitor()
    for _ in range(num_rounds):
        batches: dict[str, list[float]] = {"heartbeat": [], "section": [], "store": []}
        for _ in range(_BATCHES):
            batches["heartbeat"].append(_us_per_call(monitor.heartbeat, _CALLS))
            batches["section"].append(_us_per_section(monitor, _CALLS))
            batches["store"].append(_us_per_call(lambda: store.set("heartbeat", "1"), _STORE_CALLS))
            store.check(["heartbeat"])  # nothing of this batch is under way in the next
        print(json.dumps({name: statistics.median(values) for name, values in batches.items()}), flush=True)
    monitor.close()


if __name__ == "__main__":
    main()
