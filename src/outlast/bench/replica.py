"""``outlast bench replica``: what it costs to get a shard from another node's writer, every byte digested."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from outlast.bench.measuring import plain_environment
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say, median
from outlast.bench.state_size import NUM_TENSORS
from outlast.errors import OutlastError

__all__ = ["measure"]

_TIMEOUT_S = 300.0


def measure(*, repeats: int, say: Say, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Measure between two processes of this machine, beside gloo's send and recv of the same bytes.

    Args:
        repeats: Rounds that count.
        say: Hears of every round.
        num_tensors: Size of the shard, in tensors of 16 MiB.

    Raises:
        OutlastError: A process failed.

    Blocks: about two seconds a round, five minutes at most.
    """
    say(f"gloo and replica in turns, {repeats} rounds and one that is dropped")
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        module, store = "outlast.bench.replica_worker", str(Path(folder) / "store")
        command = [sys.executable, "-m", module, store, str(repeats + 1), str(num_tensors)]
        variables = plain_environment() | {"OMP_NUM_THREADS": "1"}
        workers: list[subprocess.Popen[str]] = []
        try:
            workers += [
                subprocess.Popen([*command, str(rank)], env=variables, stdout=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            output, _ = workers[1].communicate(timeout=_TIMEOUT_S)
            codes = [worker.wait(_TIMEOUT_S) for worker in workers]
        except (subprocess.SubprocessError, OSError) as error:
            raise OutlastError(f"the processes that measure failed: {error}; their output is above") from error
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    if any(codes):
        raise OutlastError(f"the processes that measure ended with codes {codes}; their output is above")
    lines = [json.loads(line) for line in output.splitlines()]
    num_bytes, rounds = lines[0]["num_bytes"], lines[2:]
    found = {name: median([one[name] for one in rounds]) for name in ("gloo", "warm", "fresh", "push")}
    ratio = median([one["warm"] / one["gloo"] for one in rounds])
    speeds = {name: f"{num_bytes / seconds / 1e9:.2f} GB/s" for name, seconds in found.items()}
    return BenchResult(
        bench="replica",
        bars=(
            Bar(
                name="replica_vs_gloo",
                value=ratio,
                unit="x",
                bar=1.11,  # of the time: at least 0.9 of the throughput
                peer="gloo send/recv, not verified (s)",
                peer_value=found["gloo"],
            ),
        ),
        notes=(
            f"{num_bytes / 2**20:.0f} MiB over loopback: gloo {speeds['gloo']}; fetched and digested into mapped "
            f"memory {speeds['warm']}, into a memfd that has yet to be mapped {speeds['fresh']}",
            f"given to the other writer, which digests it into new memory: {speeds['push']}",
        ),
    )
