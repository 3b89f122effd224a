"""What recovery costs on a machine, from the files that ``outlast bench --json`` wrote there.

A file is the JSON form of one result, a list of such, or one on each line. Of its figures those count that a simulation
uses; others, and those that could not be measured, are skipped. A ratio is turned into seconds with the peer's figure
that was measured beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from outlast.decoding import parse_json, read_file
from outlast.errors import ConfigError
from outlast.simulate.scenario import RecoveryCosts

__all__ = ["MeasuredCosts", "read_costs"]

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BENCHES_USED = "restart, save, load, replica, rendezvous"


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs that were found, and where each comes from."""

    costs: RecoveryCosts
    sources: Mapping[str, str]
    """Field of :class:`RecoveryCosts` to the file and figure that it comes from."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """How a figure becomes a cost."""

    field: str
    bench: str
    bar: str
    adjust: Callable[[float, Mapping[str, float]], float] = lambda seconds, _: seconds
    """Gets the figure in seconds and all others of the file's bench; returns the cost."""


def _after_notice(seconds: float, others: Mapping[str, float]) -> float:
    return max(0.0, seconds - others.get("death_noticed_ms", 0.0))


def _after_stall(seconds: float, others: Mapping[str, float]) -> float:
    return max(0.0, seconds - others.get("stall_vs_memcpy", 0.0))


def _per_node(num: int) -> Callable[[float, Mapping[str, float]], float]:
    return lambda seconds, _: seconds / num


_FIGURES = (
    _Figure("detection_s", "restart", "death_noticed_ms"),
    # From the kill to the first all-reduce; the later entry wins, so four ranks count before two.
    _Figure("restart_s", "restart", "restart_vs_torchrun_2", _after_notice),
    _Figure("restart_s", "restart", "restart_vs_torchrun_4", _after_notice),
    _Figure("save_stall_s", "save", "stall_vs_memcpy"),
    _Figure("global_save_stall_s", "save", "stall_vs_memcpy"),
    _Figure("save_s", "save", "durable_vs_dcp_save", _after_stall),
    _Figure("load_local_s", "load", "load_verified_vs_torch_load"),
    _Figure("load_memory_s", "load", "load_memory_vs_torch_load"),
    _Figure("load_replica_s", "replica", "replica_vs_gloo"),
    _Figure("rendezvous_node_s", "rendezvous", "rendezvous_512_s", _per_node(512)),
    _Figure("rendezvous_node_s", "rendezvous", "rendezvous_4096_s", _per_node(4096)),
)


def read_costs(paths: Iterable[Path], start: RecoveryCosts | None = None) -> MeasuredCosts:
    """Read costs from files; where two have the same figure, the later one counts.

    Args:
        paths: The files.
        start: The costs that they change; ``None`` = the defaults.

    Raises:
        ConfigError: A file cannot be read, is something else, or holds no figure that is used.
    """
    costs, sources = RecoveryCosts() if start is None else start, dict[str, str]()
    for path in paths:
        found = dict[str, float]()
        for result in _read_results(path):
            bench = result["bench"]
            seconds = {
                name: value
                for bar in result["bars"]
                if isinstance(bar, Mapping)
                and isinstance(name := bar.get("name"), str)
                and (value := _seconds(bar)) is not None
            }
            for figure in _FIGURES:
                if figure.bench == bench and figure.bar in seconds:
                    found[figure.field] = figure.adjust(seconds[figure.bar], seconds)
                    sources[figure.field] = f"{figure.bar} of {path}"
        if not found:
            raise ConfigError(
                f"{path} holds no figure that a simulation uses; give what outlast bench --json wrote, of one of "
                f"{_BENCHES_USED}"
            )
        costs = replace(costs, **found)
    return MeasuredCosts(costs, sources)


def _read_results(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = read_file(path, follows_links=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the costs in {path} cannot be read: {error}; name a file of outlast bench --json") from None
    try:
        values = parse_json(text)
    except ValueError:
        try:
            values = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}; name a file of outlast bench --json") from None
    results = values if isinstance(values, list) else [values]
    return [
        result
        for result in results
        if isinstance(result, dict) and isinstance(result.get("bench"), str) and isinstance(result.get("bars"), list)
    ]


def _seconds(bar: Mapping[str, Any]) -> float | None:
    """Return a figure in seconds; ``None`` where it was not measured, or is no time."""
    value, unit = bar.get("value"), bar.get("unit")
    if not _is_number(value):
        return None
    if unit in _UNITS:
        return float(value) * _UNITS[unit]
    peer, peer_value = bar.get("peer"), bar.get("peer_value")
    if unit != "x" or not _is_number(peer_value) or not str(peer).endswith("(s)"):
        return None
    return float(value) * float(peer_value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
