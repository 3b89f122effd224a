"""``outlast bench numerics``: how fast replicas are digested, and what judging a step costs when nothing is wrong."""

from __future__ import annotations

from outlast.bench.measuring import Rounds, measure_in_process
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say

__all__ = ["measure"]

_TIMEOUT_S = 300.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def measure(*, repeats: int, say: Say) -> BenchResult:
    """Measure digests in one process, then steps of two ranks.

    Raises:
        OutlastError: A worker failed, or was too slow.

    Blocks: about ten seconds a round, ten minutes at most.
    """
    say(f"digests of 512 MiB on one core, {repeats} rounds and one that is dropped")
    digests = measure_in_process(
        "outlast.bench.digest_worker", [], repeats=repeats, say=say, timeout_s=_TIMEOUT_S, variables=_ONE_THREAD
    )
    say(f"steps of 2 ranks in turns, {repeats} rounds and one that is dropped")
    steps = measure_in_process(
        "outlast.bench.quiet_step_worker", [], repeats=repeats, say=say, timeout_s=_TIMEOUT_S, variables=_ONE_THREAD
    )
    return BenchResult(
        bench="numerics",
        bars=(
            Bar(
                name="digest_gb_s",
                value=digests.median("digest"),
                unit="GB/s",
                bar=8.0,
                is_floor=True,
                peer="torch.hash_tensor",
                peer_value=digests.median("hash_tensor"),
            ),
            Bar(
                name="quiet_step_overhead_pct",
                value=steps.median("judged_pct"),
                unit="%",
                bar=2.0,
                peer="a bare all-reduce over gloo",
                peer_value=steps.median("reduced_pct"),
            ),
        ),
        notes=_notes(digests, steps),
    )


def _notes(digests: Rounds, steps: Rounds) -> tuple[str, ...]:
    plain_ms, judged_ms = steps.median("plain_ms"), steps.median("judged_ms")
    return (
        "digests: bfloat16, 32 tensors of 16 MiB; torch.hash_tensor is an XOR, blind to order and to equal flips; "
        f"of the same bytes as int64 it does {digests.median('hash_tensor_of_int64'):.3g} GB/s",
        f"steps: {plain_ms:.3g} ms as they are, {judged_ms:.3g} ms judged, "
        "with DistributedDataParallel over gloo and the ranks' agreement",
    )
