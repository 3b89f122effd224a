"""What ``outlast bench restart`` launches to be stopped: two ranks in sections, rank 1 in one that does not end.

Arguments: the folder where rank 1 says when it entered, and the number of cycles to be stopped in; the one after them
ends at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from outlast.monitor import RankMonitor

_LONGEST_S = 60.0


def main() -> None:
    """Run one rank."""
    folder, num_cycles = sys.argv[1], int(sys.argv[2])
    monitor = RankMonitor()
    worker = monitor.env
    if worker.cycle >= num_cycles:
        return
    never = threading.Event()
    if worker.global_rank == 1:
        entered_ns = time.monotonic_ns()
        with monitor.section("step"):
            path = os.path.join(folder, f"{worker.cycle}-{worker.global_rank}.json")
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                json.dump({"pid": os.getpid(), "entered_ns": entered_ns}, file)
            os.replace(f"{path}.part", path)
            never.wait(_LONGEST_S)
    end_ns = time.monotonic_ns() + int(_LONGEST_S * 1e9)
    while time.monotonic_ns() < end_ns:
        with monitor.section("step"):
            never.wait(0.05)


if __name__ == "__main__":
    main()
