"""``outlast bench save``: what a save costs training, and when it is durable, beside other libraries.

Three processes measure one after the other: stalls and durations, training steps meanwhile, and memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from outlast.bench.measuring import Rounds, describe_place, measure_in_process
from outlast.bench.peer_figures import compared, missing_peers, times
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say
from outlast.bench.state_size import NUM_SMALL, NUM_TENSORS, TENSOR_BYTES

__all__ = ["measure"]

_TIMEOUT_S = 900.0
_MOST_MEMORY_ROUNDS = 2
_MEMORY_BEYOND_MIB = 64.0
_SECONDS = {
    "memcpy": "a copy by two threads into warm memory",
    "ours": "outlast: the stall of a save",
    "ours_durable": "outlast: until it is committed and durable",
    "overlapped": "outlast, overlap_staging: the stall",
    "many": f"outlast: the stall of a save of {NUM_SMALL:,} tensors of 4 KiB",
    "many_copy": "a copy of the same bytes in one piece",
    "overlapped_guard": "outlast, overlap_staging: the wait before optimizer.step(), if it came at once",
    "dcp_async": "dcp.async_save, as it is: the stall",
    "dcp_async_durable": "dcp.async_save, as it is: until it is written",
    "dcp_reused_stager": "dcp.async_save with a stager that is kept: the stall",
    "dcp_staging": "dcp.async_save with asynchronous staging: the stall",
    "dcp_staging_guard": "dcp.async_save with asynchronous staging: the wait for its staging",
    "bare_write": "bare O_DIRECT writes by two threads, and fsync",
    "dcp_save": "dcp.save",
    "torch_save": "torch.save, and fsync",
    "safetensors": "safetensors' save_file, and fsync",
    "meta": "torch-checkpointing: the stall",
    "meta_guard": "torch-checkpointing: the wait for its lock, if it came at once",
    "meta_total": "torch-checkpointing: until it is written (no fsync)",
}


def measure(*, repeats: int, say: Say, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Save a state again and again.

    Args:
        repeats: Rounds that count.
        say: Hears of every round.
        num_tensors: Size of the state, in tensors of 16 MiB.

    Raises:
        OutlastError: A process that measures failed.

    Blocks: about 20 s a round, for a state of 1 GiB.
    """
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        say(f"{num_tensors * TENSOR_BYTES / 2**20:.0f} MiB, {describe_place(folder)}")
        arguments = (name, str(num_tensors))
        saves = measure_in_process(
            "outlast.bench.save_worker", arguments, repeats=repeats, say=say, timeout_s=_TIMEOUT_S
        )
        steps = measure_in_process(
            "outlast.bench.save_slowdown_worker", arguments, repeats=repeats, say=say, timeout_s=_TIMEOUT_S
        )
        memory = measure_in_process(
            "outlast.bench.save_memory_worker",
            arguments,
            repeats=min(repeats, _MOST_MEMORY_ROUNDS),
            say=say,
            timeout_s=_TIMEOUT_S,
        )
        place = describe_place(folder)
    return BenchResult(
        bench="save",
        bars=(
            compared(saves, "stall_vs_dcp_async", "ours", "dcp_async", 0.7, "dcp.async_save"),
            compared(saves, "stall_vs_memcpy", "ours", "memcpy", 1.25, "warm copy, 2 threads"),
            Bar(
                name="stall_overlapped_ms",
                value=_milliseconds(saves, "overlapped"),
                unit="ms",
                bar=8.0,
                peer="dcp, asynchronous staging",
                peer_value=_milliseconds(saves, "dcp_staging"),
            ),
            compared(
                saves, "stall_overlapped_vs_dcp_staging", "overlapped", "dcp_staging", 0.6, "dcp, asynchronous staging"
            ),
            Bar(
                name="many_tensors_stall_ms",
                value=_many(saves),
                unit="ms",
                bar=150.0,
                peer="1.25 x a copy of the same bytes in one piece",
                peer_value=_milliseconds(saves, "many_copy", 1.25),
            ),
            Bar(
                name="slowdown_vs_dcp_thread",
                value=_ratio_of_medians(steps, "ours_slowdown", "dcp_slowdown"),
                unit="x",
                bar=0.5,
                peer="dcp.async_save, thread (a step's growth)",
                peer_value=steps.median("dcp_slowdown"),
            ),
            compared(saves, "durable_vs_dcp_save", "ours_durable", "dcp_save", 0.7, "dcp.save"),
            compared(saves, "durable_vs_bare_write", "ours_durable", "bare_write", 1.3, "bare O_DIRECT + fsync"),
            Bar(
                name="extra_memory_mib",
                value=memory.median("ours"),
                unit="MiB",
                bar=2 * num_tensors * TENSOR_BYTES / 2**20 + _MEMORY_BEYOND_MIB,
                peer="dcp.async_save",
                peer_value=memory.median("dcp"),
            ),
        ),
        notes=(
            f"{num_tensors} tensors of 16 MiB, {place}; each round removes what it wrote",
            *times(saves, _SECONDS),
            *_of_steps(steps),
            *missing_peers(measured="meta" in saves),
        ),
    )


def _ratio_of_medians(rounds: Rounds, ours: str, peer: str) -> float | None:
    """Return the ratio of two medians; ``None``: the peer lost nothing to compare with."""
    our_value, peer_value = rounds.median(ours), rounds.median(peer)
    if our_value is None or peer_value is None or peer_value <= 0:
        return None
    return max(0.0, our_value) / peer_value


def _milliseconds(rounds: Rounds, name: str, factor: float = 1.0) -> float | None:
    seconds = rounds.median(name)
    return None if seconds is None else seconds * factor * 1e3


def _many(rounds: Rounds) -> float | None:
    """Return the milliseconds that a save of many small tensors takes beyond 1.25 times the copy of their bytes."""
    stall_ms, copy_ms = _milliseconds(rounds, "many"), _milliseconds(rounds, "many_copy", 1.25)
    return None if stall_ms is None or copy_ms is None else stall_ms - copy_ms


def _of_steps(steps: Rounds) -> list[str]:
    lines = []
    for suffix, training in (("", "training on all cores"), ("_one_core", "training on one core")):
        for name, called in (("ours", "outlast"), ("dcp", "dcp.async_save")):
            lost_s = steps.median(f"{name}{suffix}_lost")
            slowdown = steps.median(f"{name}{suffix}_slowdown")
            meanwhile_s = steps.median(f"{name}{suffix}_meanwhile")
            if lost_s is not None and slowdown is not None and meanwhile_s is not None:
                lines.append(
                    f"{training}, while {called} writes: steps took {slowdown:+.0%} for {meanwhile_s * 1e3:.0f} ms, "
                    f"{lost_s * 1e3:.0f} ms lost in all"
                )
    return lines
