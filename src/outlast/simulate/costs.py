"""Recovery costs of a machine, from the results of the benchmarks that ran there.

Values that a simulation does not use, and those that could not be measured, are skipped. A ratio is converted to
seconds with the peer's value of the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outlast.errors import ConfigError
from outlast.simulate.benchmark_results import read_results
from outlast.simulate.scenario import RecoveryCosts


@dataclass(frozen=True, slots=True)
class _Source:
    """Conversion of a benchmark's value to a cost."""

    field: str
    bench: str
    bar: str
    adjust: Callable[[float, Mapping[str, float]], float] = lambda seconds, _: seconds
    """Takes the value in seconds and all others of the benchmark; returns the cost."""


def _after(name: str) -> Callable[[float, Mapping[str, float]], float]:
    return lambda seconds, others: max(0.0, seconds - others.get(name, 0.0))


def _per_node(num: int) -> Callable[[float, Mapping[str, float]], float]:
    return lambda seconds, _: seconds / num


_SOURCES = (
    _Source("detection_s", "restart", "death_noticed_ms"),
    # From the kill to the first all-reduce; the later entry overrides, so four ranks come after two.
    _Source("restart_s", "restart", "restart_vs_torchrun_2", _after("death_noticed_ms")),
    _Source("restart_s", "restart", "restart_vs_torchrun_4", _after("death_noticed_ms")),
    _Source("save_stall_s", "save", "stall_vs_memcpy"),
    _Source("global_save_stall_s", "save", "stall_vs_memcpy"),
    _Source("save_s", "save", "durable_vs_dcp_save", _after("stall_vs_memcpy")),
    _Source("load_local_s", "load", "load_verified_vs_torch_load"),
    _Source("load_memory_s", "load", "load_memory_vs_torch_load"),
    _Source("load_replica_s", "replica", "replica_vs_gloo"),
    _Source("rendezvous_node_s", "rendezvous", "rendezvous_512_s", _per_node(512)),
    _Source("rendezvous_node_s", "rendezvous", "rendezvous_4096_s", _per_node(4096)),
)


def read_costs(paths: Iterable[Path], start: RecoveryCosts | None = None) -> RecoveryCosts:
    """Read costs from files; of two that have the same value, the later one is used.

    Args:
        paths: The files.
        start: The costs to change; ``None`` = the defaults.

    Raises:
        ConfigError: A file cannot be read, is not a result of a benchmark, or has no value that is used.
    """
    costs = RecoveryCosts() if start is None else start
    for path in paths:
        found = dict[str, float]()
        for result in read_results(path):
            seconds = {bar.name: value for bar in result.bars if (value := bar.seconds) is not None}
            for source in _SOURCES:
                if source.bench == result.bench and source.bar in seconds:
                    found[source.field] = source.adjust(seconds[source.bar], seconds)
        if not found:
            benches = ", ".join(dict.fromkeys(source.bench for source in _SOURCES))
            raise ConfigError(
                f"{path} has no value that a simulation uses; give what python -m benchmarks NAME --json wrote, with "
                f"NAME one of {benches}"
            )
        costs = replace(costs, **found)
    return costs
