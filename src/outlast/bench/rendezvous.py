"""``outlast bench rendezvous``: how long many agents take to meet, beside torch's c10d rendezvous."""

from __future__ import annotations

from functools import partial

from outlast.bench.crowd import Crowd
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say, median, run_rounds

__all__ = ["measure"]


def measure(*, repeats: int, say: Say) -> BenchResult:
    """Let 64, 256 and 512 agents of this machine meet.

    Raises:
        OutlastError: Agents did not come to a rank each.

    Blocks: about 15 s a round.
    """
    with Crowd() as crowd:
        found = run_rounds(
            {
                "outlast, 64 agents": partial(crowd.meet, "outlast", 64),
                "c10d, 64 agents": partial(crowd.meet, "c10d", 64),
                "outlast, 256 agents": partial(crowd.meet, "outlast", 256),
                "outlast, 512 agents": partial(crowd.meet, "outlast", 512),
            },
            repeats=repeats,
            say=say,
        )
    few_s, peer_s, many_s, most_s = (median(some) for some in found.values())
    return BenchResult(
        bench="rendezvous",
        bars=(
            Bar(name="rendezvous_512_s", value=most_s, unit="s", bar=60.0),
            Bar(name="rendezvous_growth_256_to_512", value=most_s / many_s, unit="x", bar=2.6),
            Bar(
                name="rendezvous_vs_c10d_64",
                value=few_s / peer_s,
                unit="x",
                bar=1.0,
                peer="torch c10d, 64 agents (s)",
                peer_value=peer_s,
            ),
        ),
        notes=(
            f"from the word to join to the last rank: outlast {few_s:.3f} s with 64, {many_s:.3f} s with 256, "
            f"{most_s:.3f} s with 512 agents; c10d {peer_s:.3f} s with 64",
        ),
    )
