"""How the benches of checkpoints tell ours beside the peers'."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from outlast.bench.measuring import Rounds
from outlast.bench.result import Bar

__all__ = ["compared", "missing_peers", "times"]

_NEEDS_CUDA = "nvidia-resiliency-ext"
"""A peer whose saves and loads synchronise with CUDA even where all tensors lie in main memory."""


def compared(rounds: Rounds, name: str, ours: str, peer: str, bar: float, called: str) -> Bar:
    """Return the bar of a ratio.

    Args:
        rounds: What was measured.
        name: The bar's.
        ours: Name of what is ours in the rounds.
        peer: Name of what it is compared with.
        bar: What the ratio may reach.
        called: The peer's name for people.
    """
    return Bar(
        name=name,
        value=rounds.ratio(ours, peer),
        unit="x",
        bar=bar,
        peer=f"{called} (s)",
        peer_value=rounds.median(peer),
    )


def times(rounds: Rounds, called: Mapping[str, str]) -> list[str]:
    """Return a line on each median that was measured.

    Args:
        rounds: What was measured.
        called: Name in the rounds to what people are told.
    """
    return [f"{what}: {median * 1e3:.1f} ms" for name, what in called.items() if (median := rounds.median(name))]


def missing_peers(*, measured: bool) -> list[str]:
    """Return a line on each peer that is not measured.

    Args:
        measured: Whether torch-checkpointing was.
    """
    lines = [] if measured else ["torch-checkpointing is not installed (make bench-peers)"]
    try:
        version = importlib.metadata.version(_NEEDS_CUDA)
    except importlib.metadata.PackageNotFoundError:
        return [*lines, f"{_NEEDS_CUDA} is not installed (make bench-peers)"]
    return [*lines, f"{_NEEDS_CUDA} {version} is not measured: it waits for CUDA even where all tensors are in memory"]
