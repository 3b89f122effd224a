"""Settings of a simulation: the world, its failures, the costs of checkpoints and recovery, and the recovery policy's
limits.

Each default states its source. Measured values come from the results of the benchmarks in the repository
(``docs/results``); ``--costs`` replaces them by those of another machine, see :mod:`outlast.simulate.costs`. Values
that depend on the model and the cluster were not measured, and are marked as assumptions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from outlast.config.base import require, require_above_zero, require_at_least
from outlast.policy.checkpoint_plan import GLOBAL_SHARE, failures_per_s, iterations_between
from outlast.policy.recovery_policy import Limits


class SimulatedFault(IntEnum):
    """Kind of a simulated fault."""

    PROCESS = 0
    """A worker dies; a restart of the workers recovers it."""
    HANG = 1
    """A worker hangs, which is detected after a timeout; a restart of the workers recovers it."""
    NODE = 2
    """A node is lost, with its node-local copies."""
    RACK = 3
    """All nodes of a rack are lost at once."""
    PREEMPTION = 4
    """The job is requested to shut down; it saves, and waits in the queue."""


SHARES = {
    SimulatedFault.PROCESS: "process_share",
    SimulatedFault.HANG: "hang_share",
    SimulatedFault.NODE: "node_share",
    SimulatedFault.RACK: "rack_share",
}
"""Kind of failure to the field of :class:`Scenario` with its share."""
MAX_RANKS = 1 << 22
MAX_FAILURES = 1_000_000
"""Maximum of expected failures in one run: a minute of simulation."""


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """One fault of a trace."""

    time_s: float
    """Seconds since the trace began."""
    kind: SimulatedFault
    slot: int | None = None
    """The slot that fails; ``None`` = any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """Costs of saves and of recovery, in seconds.

    Raises:
        ConfigError: A cost is negative, or not finite.
    """

    save_stall_s: float = 0.07
    """How long training waits in a save to the node-local tiers. Measured: 1 GiB a rank."""
    save_s: float = 0.36
    """From the end of that wait until the checkpoint is committed. Measured: 1 GiB a rank, to a disk."""
    global_save_stall_s: float = 0.07
    """How long training waits in a save to all tiers. Measured: the state is copied once, whatever the tiers."""
    global_save_s: float = 60.0
    """From the end of that wait until the checkpoint is committed in the global tier. Assumption."""
    load_memory_s: float = 0.15
    """A load from the node's memory. Measured: 1 GiB a rank, verified."""
    load_local_s: float = 0.11
    """A load from the node's disk. Measured: 1 GiB a rank, verified, in the page cache."""
    load_replica_s: float = 1.0
    """A load from another node. Assumption: 1 GiB a rank, eight ranks to a node, over 100 Gbit/s."""
    load_global_s: float = 60.0
    """A load from the global tier. Assumption."""
    detection_s: float = 0.012
    """From the death of a worker to its detection. Measured."""
    hang_timeout_s: float = 300.0
    """From a hang to its detection: the timeout of the section, or of the heartbeat. Assumption: a setting of the run.
    """
    node_timeout_s: float = 5.0
    """From the loss of a node to its detection: the default of ``node_heartbeat_timeout``."""
    restart_s: float = 0.09
    """From the detection to workers that run again. Measured: 4 ranks, without their imports."""
    rendezvous_s: float | None = None
    """Rendezvous of all nodes; ``None`` = ``rendezvous_node_s`` times the number of nodes, at least 0.01 s."""
    rendezvous_node_s: float = 0.00017
    """Rendezvous time per node. Measured: 0.7 s with 4,096 nodes, twice as long as with 2,048."""
    start_up_s: float = 60.0
    """From workers that run to the first finished step, without the load: imports, groups, compilation. Assumption."""

    def __post_init__(self) -> None:
        _require_not_negative(self, *self.__dataclass_fields__, unit=" seconds")

    def rendezvous_of(self, num_nodes: int) -> float:
        """Return how long the rendezvous of this many nodes takes."""
        return max(0.01, self.rendezvous_node_s * num_nodes) if self.rendezvous_s is None else self.rendezvous_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated training run.

    Raises:
        ConfigError: A value is out of range or contradicts another.
    """

    num_ranks: int = 16384
    """Ranks of the world."""
    ranks_per_node: int | None = None
    """Ranks on a node; ``None`` = 8, or all if there are fewer."""
    nodes_per_rack: int = 2
    """Nodes lost with a rack. Two servers a rack: Meta's cluster for Llama 3."""
    num_spares: int | None = None
    """Nodes that wait for a slot; ``None`` = one for each hundred nodes, and at least one."""
    duration_s: float = 30 * 86400.0
    """Wall time of the run."""
    step_s: float = 5.0
    """One iteration on a healthy world. About Llama 3 405B on 16,384 GPUs."""
    slow_share: float = 0.0
    """Delay that slow ranks add to each step, as a share of it."""

    rank_mttf_hours: float = 29500.0
    """Mean time to a failure of one rank. Meta: 1.8 h between failures of a job on 16,384 GPUs, some 14 min on 131,072;
    7.9 h on 1,024, that is, 8,090 h per rank."""
    failure_every_s: float | None = None
    """Mean seconds between two failures of the whole world, instead of ``rank_mttf_hours``."""
    weibull_shape: float | None = None
    """Shape of the Weibull distribution of the times between failures of the world; ``None`` = exponential. Below 1:
    failures come in bursts. 0.7 to 0.8: B. Schroeder and G. Gibson, 2006."""
    trace: tuple[DrawnFault, ...] | None = None
    """Recorded faults, by time, instead of drawn ones."""
    process_share: float = 0.70
    """Share of the failures in which a worker dies. With hangs three quarters, which a restart recovers (Meta)."""
    hang_share: float = 0.05
    """Share of the failures in which a worker hangs."""
    node_share: float = 0.24
    """Share of the failures in which a node is lost."""
    rack_share: float = 0.01
    """Share of the failures in which a rack is lost."""
    preempt_every_s: float | None = None
    """Mean seconds between two preemptions; ``None`` = none."""
    queue_s: float = 600.0
    """How long a preempted job waits in the queue."""
    restart_stopped_s: float | None = 3600.0
    """How long it takes until a person restarts a run that the recovery policy stopped; ``None`` = it is not restarted.
    Assumption."""
    repair_s: float = 86400.0
    """Mean time until a lost node is repaired. Assumption."""
    fixed_repair: bool = False
    """Each repair takes exactly that long; else it is exponential."""

    interval_s: float | None = None
    """Seconds of training between two saves to the node-local tiers; 0 = none; ``None`` = Young's optimum."""
    interval_iterations: int | None = None
    """The same in iterations."""
    global_interval_s: float | None = None
    """Seconds of training between two saves to all tiers; 0 = none; ``None`` = Young's optimum."""
    global_interval_iterations: int | None = None
    """The same in iterations."""
    replication: int | None = None
    """Nodes that hold each shard in node-local tiers, its own included; 1 = no copies on other nodes; ``None`` = 2 if
    there are two nodes."""
    replication_jump: int | None = None
    """Ranks from a rank to the one whose node holds its copy; ``None`` = the ranks of a node. A multiple of them."""
    use_memory: bool = True
    """The newest checkpoint stays in the node's memory; otherwise node-local copies are on its disk only."""

    costs: RecoveryCosts = field(default_factory=RecoveryCosts)
    limits: Limits | None = None
    """``None`` = the defaults for the number of nodes."""

    def __post_init__(self) -> None:
        self._check_world()
        self._check_failures()
        self._check_saves()

    def _check_world(self) -> None:
        require_at_least(self, 1, "num_ranks", "nodes_per_rack", "replication", "ranks_per_node")
        require(self.num_ranks <= MAX_RANKS, f"num_ranks={self.num_ranks} must be at most {MAX_RANKS:,}")
        require(
            self.num_ranks % self.node_size == 0,
            f"num_ranks={self.num_ranks} must be a multiple of ranks_per_node={self.node_size}",
        )
        _require_above_zero(self, "duration_s", "step_s", "repair_s")
        _require_not_negative(self, "num_spares", "slow_share", "queue_s", "restart_stopped_s")
        limits = ("max_restarts", "max_restarts_total", "max_no_progress_cycles", "max_node_faults")
        _require_not_negative(self.limits_in_force, *limits)

    def _check_failures(self) -> None:
        # An infinite time to failure is a run without failures.
        require_above_zero(self, "rank_mttf_hours", what=" hours")
        require_above_zero(self, "failure_every_s", "preempt_every_s")
        _require_above_zero(self, "weibull_shape", unit="")
        shape = self.weibull_shape
        require(shape is None or shape >= 0.2, f"weibull_shape={shape} must be at least 0.2")
        shares = {name: getattr(self, name) for name in SHARES.values()}
        for name, share in shares.items():
            require(0 <= share <= 1, f"{name}={share} must be between 0 and 1")
        total = sum(shares.values())
        listed = ", ".join(f"{name}={share:g}" for name, share in shares.items())
        require(abs(total - 1) < 1e-6, f"the shares of the failures must sum to 1, and sum to {total:g}: {listed}")
        expected = self.failures_per_s * self.duration_s if self.trace is None or self.trace else 0.0
        require(
            expected <= MAX_FAILURES,
            f"{expected:.3g} failures are too many to simulate (at most {MAX_FAILURES:,}); shorten the run, or let "
            "them come less often",
        )
        require(self.trace is None or len(self.trace) > 0, "the trace holds no fault; give one with some, or none")

    def _check_saves(self) -> None:
        for seconds, iterations in (
            ("interval_s", "interval_iterations"),
            ("global_interval_s", "global_interval_iterations"),
        ):
            both = getattr(self, seconds), getattr(self, iterations)
            require(
                None in both, f"{seconds}={both[0]} and {iterations}={both[1]} set the same value; remove one of them"
            )
            _require_not_negative(self, seconds, iterations)
        jump = self.replication_jump
        require(
            jump is None or (jump >= 1 and jump % self.node_size == 0),
            f"replication_jump={jump} must be a multiple of ranks_per_node={self.node_size}",
        )
        require(
            self.copies <= self.num_nodes,
            f"replication={self.replication} needs as many nodes, and there are {self.num_nodes}",
        )

    @property
    def node_size(self) -> int:
        """Ranks on a node."""
        return min(8, self.num_ranks) if self.ranks_per_node is None else self.ranks_per_node

    @property
    def limits_in_force(self) -> Limits:
        """The limits of the recovery policy."""
        return Limits.for_nodes(self.num_nodes) if self.limits is None else self.limits

    @property
    def num_nodes(self) -> int:
        """Slots of the world."""
        return self.num_ranks // self.node_size

    @property
    def spares(self) -> int:
        """Nodes that wait for a slot when the run begins."""
        return max(1, round(self.num_nodes / 100)) if self.num_spares is None else self.num_spares

    @property
    def copies(self) -> int:
        """Nodes that hold each shard in node-local tiers, its own included."""
        return min(2, self.num_nodes) if self.replication is None else self.replication

    @property
    def failures_per_s(self) -> float:
        """Mean rate of the failures of the whole world, in 1/s; 0 = none."""
        if self.trace is not None:
            return sum(fault.kind != SimulatedFault.PREEMPTION for fault in self.trace) / trace_span_s(self.trace)
        if self.failure_every_s is not None:
            return 1.0 / self.failure_every_s
        return failures_per_s(self.num_ranks, self.rank_mttf_hours)

    @property
    def slow_step_s(self) -> float:
        """One iteration, with the delay of slow ranks."""
        return self.step_s * (1.0 + self.slow_share)

    @property
    def node_every(self) -> int:
        """Iterations between two saves to the node-local tiers; 0 = none."""
        costs, rate = self.costs, self.failures_per_s
        return self._every(self.interval_s, self.interval_iterations, costs.save_stall_s, costs.save_s, rate)

    @property
    def global_every(self) -> int:
        """Iterations between two saves to all tiers; 0 = none."""
        # The same choice as the session's for automatic intervals.
        costs, rate = self.costs, self.failures_per_s * (GLOBAL_SHARE if self.node_every else 1.0)
        seconds, iterations = self.global_interval_s, self.global_interval_iterations
        return self._every(seconds, iterations, costs.global_save_stall_s, costs.global_save_s, rate)

    def _every(self, seconds: float | None, iterations: int | None, stall_s: float, save_s: float, rate: float) -> int:
        if iterations is not None:
            return iterations
        if seconds is not None:
            return max(1, round(seconds / self.slow_step_s)) if seconds > 0 else 0
        least = math.ceil(save_s / self.slow_step_s)  # a save before the last one is committed would wait for it
        if rate <= 0:
            return max(1, least, round(3600.0 / self.slow_step_s))
        return max(least, iterations_between(stall_s, self.slow_step_s, rate))

    def change(self, **values: Any) -> Scenario:
        """Return the scenario with other values; fields of ``costs`` and ``limits`` are given by their own names."""
        costs = {name: values.pop(name) for name in list(values) if name in RecoveryCosts.__dataclass_fields__}
        limits = {name: values.pop(name) for name in list(values) if name in Limits.__dataclass_fields__}
        for one in ("interval_s", "global_interval_s"):  # the same in two units: the given one counts
            other = one.replace("_s", "_iterations")
            values |= {other: None} if one in values else {one: None} if other in values else {}
        if costs:
            values["costs"] = replace(self.costs, **costs)
        if limits:
            values["limits"] = replace(self.limits_in_force, **limits)
        return replace(self, **values)

    def to_fields(self) -> dict[str, Any]:
        """Return the settings used, including those chosen automatically, for JSON."""
        rate = self.failures_per_s
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "ranks_per_node": self.node_size,
            "num_nodes": self.num_nodes,
            "num_spares": self.spares,
            "replication": self.copies,
            "interval_iterations": self.node_every,
            "global_interval_iterations": self.global_every,
            "interval_s": self.node_every * self.slow_step_s,
            "global_interval_s": self.global_every * self.slow_step_s,
            "trace": None if self.trace is None else len(self.trace),
            "mtbf_s": 1.0 / rate if rate > 0 else None,
            "costs": asdict(self.costs) | {"rendezvous_s": self.costs.rendezvous_of(self.num_nodes)},
            "limits": asdict(self.limits_in_force),
        }
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value for name, value in fields.items()
        }


def trace_span_s(trace: tuple[DrawnFault, ...]) -> float:
    """Return the length of a trace: to its last fault plus one mean gap; infinite if all are at 0."""
    last = max(fault.time_s for fault in trace)
    return last * (len(trace) + 1) / len(trace) if last > 0 else math.inf


def _require_above_zero(config: Any, *names: str, unit: str = " seconds") -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or (math.isfinite(value) and value > 0), f"{name}={value} must be above 0{unit}")


def _require_not_negative(config: Any, *names: str, unit: str = "") -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or (math.isfinite(value) and value >= 0), f"{name}={value} must be 0 or more{unit}")
