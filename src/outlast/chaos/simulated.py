"""The faults that a session's settings ask for: a plan's, and the one of ``simulate_fault``."""

from __future__ import annotations

import random

from outlast.chaos.armed import ArmedFaults
from outlast.chaos.fault import Fault, FaultKind
from outlast.chaos.plan import FaultPlan
from outlast.config import Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.runtime.device import device_name
from outlast.runtime.journal import Journal

__all__ = ["arm_configured", "simulated_fault"]

_KINDS = {"rank_hung": FaultKind.STOP, "rank_killed": FaultKind.KILL}


def simulated_fault(config: FaultToleranceConfig, place: WorkerEnv) -> Fault:
    """Return the fault of ``simulate_fault``: a rank that hangs or is killed, once a run.

    What the settings leave open is drawn from the run's name, so that all ranks draw the same.

    Args:
        config: The settings; ``simulate_fault`` is on.
        place: A worker's place.

    Raises:
        ConfigError: The rank that the fault is for does not exist.
    """
    draw = random.Random(f"simulated fault of {place.run_id}")
    drawn_type, drawn_rank = draw.choice(sorted(_KINDS)), draw.randrange(place.world_size)
    name = drawn_type if config.simulated_fault_type == "random" else config.simulated_fault_type
    rank = drawn_rank if config.simulated_fault_rank is None else config.simulated_fault_rank
    if rank >= place.world_size:
        raise ConfigError(f"simulated_fault_rank={rank} does not exist, ranks end at {place.world_size - 1}; name one")
    delay_s = config.simulated_fault_base_delay
    return Fault(name=name, kind=_KINDS[name], rank=rank, after_s=delay_s, once_durable=True)


def arm_configured(
    config: Config, fault_tolerance: FaultToleranceConfig, place: WorkerEnv, journal: Journal
) -> ArmedFaults | None:
    """Return the faults that a session's settings ask for, armed; ``None`` when they ask for none.

    Args:
        config: The session's settings.
        fault_tolerance: The timeouts and the like that are in use.
        place: This worker's place.
        journal: Where each fault is written.

    Raises:
        ConfigError: The plan cannot be read or is wrong, or a fault is for a rank that does not exist.
    """
    plan = FaultPlan() if config.fault_plan is None else FaultPlan.load(config.fault_plan)
    if fault_tolerance.simulate_fault:
        plan = FaultPlan(seed=plan.seed, faults=(*plan.faults, simulated_fault(fault_tolerance, place)))
    if not plan.faults:
        return None
    device = device_name(place.device or place.node, place.local_rank)
    return plan.arm(place, run_dir=place.run_dir, journal=journal, device=device)
