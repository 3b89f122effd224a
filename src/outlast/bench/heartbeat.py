"""``outlast bench heartbeat``: what a heartbeat and a section cost the training."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

from outlast import env
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say, median
from outlast.errors import OutlastError
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.board import Board

__all__ = ["measure"]

_TIMEOUT_S = 120.0


def measure(*, repeats: int, say: Say) -> BenchResult:
    """Measure in a worker process on a real board, which this process holds as an agent does.

    Raises:
        OutlastError: The worker failed.

    Blocks: about a second a round, two minutes at most.
    """
    hosted = stores.host(Endpoint("127.0.0.1", 0), timeout_s=30.0)
    assert hosted is not None, "port 0 is never taken"
    with closing(Board.create_anonymous(num_ranks=1)) as board:
        variables = env.environ() | {
            env.BOARD: board.path,
            env.RUN_ID: "bench",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "outlast.bench.heartbeat_worker", str(hosted.port), str(repeats + 1)]
        say(f"heartbeat, section and TCPStore.set in turns, {repeats} rounds and one that is dropped")
        try:
            done = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise OutlastError(f"the worker that measures failed: {error}; its output is above") from error
    rounds = [json.loads(line) for line in done.stdout.splitlines()][1:]
    found = {name: median([one[name] for one in rounds]) for name in ("heartbeat", "section", "store")}
    return BenchResult(
        bench="heartbeat",
        bars=(
            Bar(
                name="heartbeat_us",
                value=found["heartbeat"],
                unit="us",
                bar=1.0,
                peer="TCPStore.set",
                peer_value=found["store"],
            ),
            Bar(name="section_us", value=found["section"], unit="us", bar=2.0),
        ),
    )
